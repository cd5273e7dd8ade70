"""The settings a run could use, what each needs, and the ladder: the fastest first, every rung below it slower and smaller.

    plan = plan_engine(measured, run, hardware, given, limits)
    plan.chosen      the fastest that fits every rank
    plan.ladder      the Pareto front of memory and time, fastest first

No torch: a plan for eight H100s is made on a laptop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from harness.engine_memory import GIB, offload_ratios, offloaded_input_bytes
from harness.ladder import MemorySettings
from harness.memory import Factors, MemoryEstimate, estimate_memory
from harness.model_shape import EngineName, Measured, ModelShape, RunShape
from harness.step_time import Hardware, StepTime, step_time

# "start": expected where a step that does not fit is redone in place, high where a miss costs a new start of all processes.
Figure = Literal["high", "expected", "start"]

# Engines whose states or weights can live on the host.
OFFLOADING: tuple[EngineName, ...] = ("zero1", "zero2", "zero3", "fsdp")


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the machine has.

    Attributes:
        gpu_bytes: memory of one card, as CUDA reports it.
        host_bytes: memory of one node that the job may use; None where it is not known.
        nvme: an NVMe disk may hold parameters.
    """

    gpu_bytes: int
    host_bytes: int | None = None
    nvme: bool = False


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One set of settings with its estimates."""

    run: RunShape
    settings: MemorySettings
    estimate: MemoryEstimate
    time: StepTime

    @property
    def engine(self) -> EngineName:
        return self.run.engine

    @property
    def offload(self) -> bool:
        return self.settings.optimizer_offload > 0 or self.settings.param_offload != "none"

    @property
    def accumulation(self) -> int:
        """Micro-batches of one optimizer step."""
        return -(-self.run.samples_per_step // self.settings.micro_batch_size)

    @property
    def tokens_per_s(self) -> float:
        """Of the whole job."""
        ranks = 1 if self.engine == "device_map" else self.run.num_processes // self.run.sequence_parallel_size
        return ranks * self.run.samples_per_step * self.run.block_size / self.time.total_s

    @property
    def redone_in_place(self) -> bool:
        """Forward and backward can be redone by the same processes; DeepSpeed's offload cannot."""
        return not (self.engine.startswith("zero") and self.offload)

    def need_bytes(self, figure: Figure) -> int:
        estimate = self.estimate
        if figure == "expected" or (figure == "start" and self.redone_in_place):
            return max(estimate.expected_bytes, estimate.update_bytes if figure == "start" else 0)
        return estimate.high_bytes

    def misfit(self, limits: Limits, figure: Figure = "high") -> str:
        """Why it cannot run; empty where it can."""
        need = self.need_bytes(figure)
        if need > limits.gpu_bytes:
            return f"needs {need / GIB:.1f} GiB of a card, which has {limits.gpu_bytes / GIB:.1f}"
        if not self.fits_host(limits):
            assert limits.host_bytes is not None
            return f"needs {self.estimate.host_bytes / GIB:.0f} GiB of host memory, the node has {limits.host_bytes / GIB:.0f}"
        return ""

    def fits_host(self, limits: Limits) -> bool:
        """Whether the node can hold what lives in its memory. What every process needs by itself is a guess, and keeps nobody from it."""
        hosted = self.offload or self.settings.activation_offload or self.run.snapshots
        return not hosted or limits.host_bytes is None or self.estimate.host_bytes <= limits.host_bytes

    def to_dict(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "settings": self.settings.to_dict(),
            "gradient_accumulation_steps": self.accumulation,
            "estimate": self.estimate.to_dict(),
            "step_time_s": self.time.total_s,
            "communicated_bytes": self.time.communicated_bytes,
            "tokens_per_s": self.tokens_per_s,
        }


@dataclasses.dataclass(frozen=True)
class EnginePlan:
    """What one engine can do for a job.

    Attributes:
        given: the settings as asked for.
        candidates: everything considered that the host can hold.
        ladder: Pareto front, fastest first.
        chosen: the fastest that fits; None where nothing does.
        factors: this machine's corrections, in all estimates.
    """

    given: Candidate
    candidates: tuple[Candidate, ...]
    ladder: tuple[Candidate, ...]
    chosen: Candidate | None
    limits: Limits
    figure: Figure
    factors: Factors | None = None

    @property
    def smallest(self) -> Candidate:
        return min([*self.candidates, self.given], key=lambda candidate: candidate.need_bytes(self.figure))

    @property
    def largest_micro_batch(self) -> int:
        """Samples of the largest micro-batch that fits with any settings; 0 where nothing fits."""
        fitting = (c.settings.micro_batch_size for c in self.candidates if not c.misfit(self.limits, self.figure))
        return max(fitting, default=0)


def evaluate(settings: MemorySettings, measured: Measured, run: RunShape, hardware: Hardware, factors: Factors | None = None) -> Candidate:
    """Settings with their memory and time."""
    return Candidate(run, settings, estimate_memory(settings, measured, run, factors), step_time(settings, measured, run, hardware))


def micro_batches(samples_per_step: int) -> list[int]:
    """Sizes that cut a step evenly, at most 12 of them, small ones and powers of two first."""
    divisors = [n for n in range(1, samples_per_step + 1) if samples_per_step % n == 0]
    if len(divisors) <= 12:
        return divisors
    powers = [n for n in divisors if n & (n - 1) == 0]
    return sorted({*powers[:10], *divisors[:4], divisors[-1]})


def variants(
    measured: Measured, run: RunShape, given: MemorySettings, limits: Limits, pinned: Iterable[str] = (), offload: bool | None = None
) -> Iterator[MemorySettings]:
    """Every set of settings that keeps the mathematics of the given one.

    Args:
        given: settings as asked for; activations that are offloaded stay so.
        pinned: names of settings that stay as given.
        offload: of weights and optimizer states: False: none; True: only with; None: both.
    """
    pins = set(pinned)
    sizes = [given.micro_batch_size] if "micro_batch_size" in pins else micro_batches(run.samples_per_step)
    modes = [given.activation_checkpointing] if "activation_checkpointing" in pins else ["none", "selective", "full"]
    modes = [mode for mode in modes if mode not in measured.unsupported]
    chunks = [given.loss_chunk_size]
    if "loss_chunk_size" not in pins and not given.loss_chunk_size and measured.shape.plain_head:
        chunks.append(1024)
    for places in _places(measured.shape, run, given, limits, pins, offload):
        for buffers in _buffers(measured, run, given, pins):
            for size in sizes:
                for mode in modes:
                    for chunk in chunks:
                        changes = {**places, **buffers, "activation_checkpointing": mode, "loss_chunk_size": chunk}
                        settings = given.replace(micro_batch_size=size, **changes)
                        yield settings
                        moved = settings.replace(activation_offload=True)
                        if moved != settings and offloaded_input_bytes(moved, run, measured.shape.hidden_size):
                            yield moved


def _places(
    shape: ModelShape, run: RunShape, given: MemorySettings, limits: Limits, pins: set[str], offload: bool | None
) -> list[dict[str, Any]]:
    """Where states and weights may live."""
    nowhere: dict[str, Any] = {"optimizer_offload": 0.0, "param_offload": "none"}
    options: list[dict[str, Any]] = [nowhere]
    if run.engine in ("zero1", "zero2"):
        options.append({"optimizer_offload": 1.0, "param_offload": "none"})
    elif run.engine == "zero3":
        options += [{"optimizer_offload": ratio, "param_offload": "none"} for ratio in offload_ratios(shape, run)]
        options += [{"optimizer_offload": 1.0, "param_offload": place} for place in ("none", "cpu")]
        if limits.nvme:
            options.append({"optimizer_offload": 1.0, "param_offload": "nvme"})
    elif run.engine == "fsdp":
        options.append({"optimizer_offload": 0.0, "param_offload": "cpu"})
    fixed = {name: getattr(given, name) for name in nowhere if name in pins}
    options = [option for option in options if all(option[name] == value for name, value in fixed.items())] or [{**nowhere, **fixed}]
    if offload is None:
        return options
    return [option for option in options if (option != nowhere) == offload]


def _buffers(measured: Measured, run: RunShape, given: MemorySettings, pins: set[str]) -> list[dict[str, Any]]:
    """How much an engine may gather and collect at once."""
    if run.engine == "fsdp" and "reshard_after_forward" not in pins:
        return [{"reshard_after_forward": reshard} for reshard in (True, False)]
    names = {"reduce_bucket_size", "prefetch_bucket_size", "max_live_parameters"}
    if run.engine == "zero3" and not names & pins:
        layer = measured.shape.largest_layer
        zero = run.zero.resolved(measured.shape)
        small = {
            "reduce_bucket_size": min(zero.reduce_bucket_size or 0, max(layer.largest_tensor // 4, 1_000_000)),
            "prefetch_bucket_size": min(zero.prefetch_bucket_size or 0, max(layer.num_parameters // 4, 1_000_000)),
            "max_live_parameters": min(zero.max_live_parameters, 2 * layer.num_parameters),
        }
        return [{name: getattr(given, name) for name in names}, small]
    if run.engine == "device_map" and "in_flight_micro_batches" not in pins:
        return [{"in_flight_micro_batches": depth} for depth in (0, 1, 2, 4) if depth < run.samples_per_step]
    return [{}]


def pareto(candidates: Iterable[Candidate], figure: Figure = "high") -> list[Candidate]:
    """Those that no other beats in both memory and time, fastest first; among equals the one that leaves more settings alone."""
    candidates = list(candidates)
    ladder: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.time.total_s, c.need_bytes(figure))):
        # A rung must be worth its step: 3 % less memory at least.
        if not ladder or candidate.need_bytes(figure) < 0.97 * ladder[-1].need_bytes(figure):
            ladder.append(candidate)
    # But the smallest of all is the last resort, however little it saves.
    ordered = sorted(candidates, key=lambda c: (c.need_bytes(figure), c.time.total_s))
    return ladder + [c for c in ordered[:1] if c.need_bytes(figure) < ladder[-1].need_bytes(figure)]


def plan_engine(
    measured: Measured,
    run: RunShape,
    hardware: Hardware,
    given: MemorySettings,
    limits: Limits,
    *,
    pinned: Iterable[str] = (),
    offload: bool | None = None,
    figure: Figure = "high",
    factors: Factors | None = None,
) -> EnginePlan:
    """Considers every variant of the given settings on one engine.

    Args:
        figure: which estimate must fit: "high" where a miss costs a relaunch, "expected" where the dry run can step down in place.
    """
    asked = evaluate(given, measured, run, hardware, factors)
    considered = [evaluate(s, measured, run, hardware, factors) for s in variants(measured, run, given, limits, pinned, offload)]
    possible = [c for c in considered if c.fits_host(limits)]
    ladder = pareto(possible, figure)
    chosen = next((candidate for candidate in ladder if not candidate.misfit(limits, figure)), None)
    return EnginePlan(asked, tuple(possible), tuple(ladder), chosen, limits, figure, factors)
