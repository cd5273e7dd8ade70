"""Peak memory of one rank, before the job starts.

    estimate = estimate_memory(settings, measured, run)
    estimate.expected_bytes, estimate.peak_phase, estimate.parts

Three sources, and every figure says which it is from: state bytes counted from the model's parameters; activations and the loss measured
on the model's own code under fake tensors (`harness.activation_probe`, in a child process); transient buffers of the engines in closed
form (`harness.engine_memory`). The peak is the highest of the phases of a step. What the allocator strands and what CUDA and NCCL take
is a range: low, expected, high; a machine's own measurements narrow it (`record_measurement`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.engine_memory import GIB, engine_memory, offloaded_input_bytes, optimizer_bytes, width
from harness.findings import Finding, UserError, user_error
from harness.ladder import MemorySettings
from harness.model_shape import Measured, RunShape, at, top

# What a process allocates through torch besides tensors: a cuBLAS workspace (32 MiB on Hopper) and small change.
WORKSPACE_BYTES = 48 * 2**20
# Reserved over allocated in the computing stream with expandable segments, and what is outside the allocator: (low, expected, high).
# CUDA and its libraries: 1.25 GiB on H200s with CUDA 13, 0.5 to 0.9 GiB on older cards (stas00/ml-engineering, training/performance).
RESERVED_FACTOR = (1.0, 1.03, 1.08)
CONTEXT_BYTES = (int(0.5 * GIB), int(1.25 * GIB), int(1.5 * GIB))
NCCL_BYTES = (int(0.2 * GIB), int(0.3 * GIB), int(1.2 * GIB))
DEEPSPEED_BYTES = (int(0.1 * GIB), int(0.2 * GIB), int(0.8 * GIB))
# Of the memory that activations leave behind, the part in which the first update of DeepSpeed's stage 3 finds room for its copies.
_REUSED_SHARE = 0.4


@dataclasses.dataclass(frozen=True)
class Phase:
    """A moment of a step and what is on the card then: part -> bytes. `pooled_bytes` of it lie in memory of other streams."""

    name: str
    parts: dict[str, float]
    pooled_bytes: float = 0.0

    @property
    def total_bytes(self) -> float:
        return sum(self.parts.values())


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """Memory of one rank, bytes.

    Attributes:
        phases: forward, loss, backward, reduction, update; the peak is the highest.
        allocated_bytes: expected `torch.cuda.max_memory_allocated`.
        reserved_bytes: expected `torch.cuda.max_memory_reserved`.
        pool_bytes: of that, what is kept for other streams than the computing one, before corrections.
        correction: what was learnt of reserved memory on this machine; `reserved_bytes` has it.
        low_bytes, expected_bytes, high_bytes: of the whole card, as `mem_get_info` sees it. "Fits" means the high figure.
        host_bytes: of one node.
        nvme_bytes: of one node, on its NVMe disk.
        checkpoint_bytes: on disk, all ranks together.
        closed_forms: parts that could not be measured on the model's code.
    """

    phases: tuple[Phase, ...]
    allocated_bytes: int
    low_bytes: int
    expected_bytes: int
    high_bytes: int
    host_bytes: int
    nvme_bytes: int
    checkpoint_bytes: int
    closed_forms: tuple[str, ...] = ()
    reserved_bytes: int = 0
    pool_bytes: int = 0
    correction: float = 1.0

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda phase: phase.total_bytes).name

    @property
    def update_bytes(self) -> int:
        """What the update alone is likely to need at most. It cannot be redone; but by then CUDA and NCCL have taken what they take."""
        update = next((phase.total_bytes - phase.pooled_bytes for phase in self.phases if phase.name == "update"), 0.0)
        outside = self.expected_bytes - self.reserved_bytes
        return int(self.correction * (RESERVED_FACTOR[2] * update + self.pool_bytes) + outside)

    @property
    def dry_run_reserved_bytes(self) -> int:
        """Expected `torch.cuda.max_memory_reserved` of forward and backward alone, before corrections."""
        most = max(phase.total_bytes - phase.pooled_bytes for phase in self.phases if phase.name != "update")
        return int(RESERVED_FACTOR[1] * most + self.pool_bytes)

    @property
    def parts(self) -> dict[str, float]:
        """What is on the card at the peak."""
        return max(self.phases, key=lambda phase: phase.total_bytes).parts

    def to_dict(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        values["peak_phase"] = self.peak_phase
        return values


@dataclasses.dataclass(frozen=True)
class Factors:
    """Corrections learnt from real steps on this machine: measured over predicted."""

    allocated: float = 1.0
    reserved: float = 1.0
    outside_bytes: int | None = None

    def describe(self) -> str:
        """For people; empty where nothing was learnt."""
        if self == Factors():
            return ""
        outside = f", {self.outside_bytes / GIB:.2f} GiB outside the allocator" if self.outside_bytes is not None else ""
        return f"corrected by the dry runs on this machine: allocated x {self.allocated:.3f}, reserved x {self.reserved:.3f}{outside}"


def estimate_memory(settings: MemorySettings, measured: Measured, run: RunShape, factors: Factors | None = None) -> MemoryEstimate:
    """Predicts one rank's peak.

    Args:
        settings: what the planner may change.
        measured: the model's sizes and activations for `run.block_size`.
        run: the job.
        factors: this machine's corrections.

    Raises:
        ValueError: the measurement is for another block size, or the optimizer is not known.
    """
    if measured.block_size != run.block_size:
        raise ValueError(f"measured for blocks of {measured.block_size} tokens, not {run.block_size}")
    if measured.sequence_parallel_size != run.sequence_parallel_size:
        raise ValueError(f"measured for {measured.sequence_parallel_size} processes a sample, not {run.sequence_parallel_size}")
    step = _Step(settings, measured, run)
    phases = step.phases()
    factors = factors or Factors()
    allocated = max(phase.total_bytes for phase in phases) * factors.allocated
    many = run.num_processes > 1 and run.engine != "device_map"
    totals, kept = [], 0.0
    for index in range(3):
        outside = CONTEXT_BYTES[index] + (NCCL_BYTES[index] if many else 0)
        outside += DEEPSPEED_BYTES[index] if run.engine.startswith("zero") else 0
        if factors.outside_bytes is not None:
            outside = factors.outside_bytes
        reserved = step.reserved_bytes(phases, RESERVED_FACTOR[index]) * factors.reserved
        kept = reserved if index == 1 else kept
        totals.append(int(reserved + outside))
    closed = [] if step.layers.measured else [f"activations ({settings.activation_checkpointing})"]
    closed += [] if step.loss.measured else ["loss"]
    return MemoryEstimate(
        phases=tuple(phases),
        allocated_bytes=int(allocated),
        low_bytes=totals[0],
        expected_bytes=totals[1],
        high_bytes=totals[2],
        host_bytes=int((step.engine.host + step.offloaded_bytes()) * (1 if run.engine == "device_map" else run.num_local)),
        nvme_bytes=int(step.engine.nvme * run.num_local),
        checkpoint_bytes=int(checkpoint_bytes(measured, run)),
        closed_forms=tuple(closed),
        reserved_bytes=int(kept),
        pool_bytes=int(step.engine.pools),
        correction=factors.reserved,
    )


def checkpoint_bytes(measured: Measured, run: RunShape) -> float:
    """Size of one checkpoint on disk, all ranks together: weights as kept, master copies and optimizer states."""
    shape = measured.shape
    states = optimizer_bytes(run) * shape.num_trainable
    if run.engine.startswith("zero"):
        return width(run) * shape.num_parameters + 4 * shape.num_trainable + states
    return 4 * shape.num_trainable + width(run) * shape.num_frozen + states


class _Step:
    """One optimizer step of one rank: what is on the card at each moment."""

    def __init__(self, settings: MemorySettings, measured: Measured, run: RunShape) -> None:
        self.settings, self.shape, self.run = settings, measured.shape, run
        self.batch = settings.micro_batch_size
        self.engine = engine_memory(measured.shape, run, settings)
        self.layers = measured.layer_memory(run.weights, settings.activation_checkpointing)
        self.loss = measured.loss_memory(run.weights, settings.loss_chunk_size)
        self.kinds = list(self.shape.kind_of_layer)
        self.in_flight = 1
        if run.engine == "device_map":  # the card with the head, and its share of the layers
            share = -(-len(self.kinds) // run.num_processes)
            self.kinds = self.kinds[-share:]
            num_micro = -(-run.samples_per_step // self.batch)
            self.in_flight = min(settings.in_flight_micro_batches or num_micro, num_micro)
        # Liger keeps less: the norms' float32 copies (8h bytes a token) and one tensor of the feed-forward width (2f).
        per_token = (8.0 * self.shape.hidden_size + 2.0 * self.shape.intermediate_size) * run.fused_layers
        if run.compiles(settings):  # of the feed-forward only the two first products; of the norms their input (1.2B Llama on two H200s)
            per_token = 3.0 * self.shape.hidden_size + 4.0 * self.shape.intermediate_size
        self.saving = self.batch * run.own_tokens * per_token
        self.everything_kept = settings.activation_checkpointing == "none"
        self.input_offloaded = offloaded_input_bytes(settings, run, measured.shape.hidden_size)
        self.accumulated = self.engine.growing_gradients * self.shape.num_trainable
        # From the second micro-batch on, the gradients of the first are all there.
        self.before = self.accumulated if run.samples_per_step > self.batch else 0.0

    def kept(self, name: str, kind: int) -> float:
        """What a layer leaves on the card: `name` is forward_kept or backward_kept."""
        own = at(getattr(self.layers.layers[kind], name), self.batch) - (self.saving if self.everything_kept else 0.0)
        return self.in_flight * max(0.0, own - self.input_offloaded)

    def offloaded_bytes(self) -> float:
        """Saved activations that wait in host memory."""
        return self.in_flight * self.input_offloaded * len(self.kinds)

    def phase(self, name: str, **parts: float) -> Phase:
        engine = self.engine
        values = {
            "parameters": engine.parameters,
            "gradients": engine.gradients,
            "optimizer": engine.optimizer,
            "buffers": engine.buffers,
            "workspace": WORKSPACE_BYTES + 2 * self.input_offloaded,  # two inputs are on their way
        }
        for key, value in parts.items():
            values[key] = values.get(key, 0.0) + value
        # The head's gradient is not reduced yet, and not where the reduced ones are.
        pooled = values.get(engine.pooled, 0.0) - (engine.head_gradient if name == "backward" and engine.pooled == "gradients" else 0.0)
        return Phase(name, {key: value for key, value in values.items() if value}, min(pooled, engine.pools))

    def reserved_bytes(self, phases: Sequence[Phase], factor: float) -> float:
        """What the allocator takes from the card: the most of the computing stream, and what it keeps for the others."""
        own = {phase.name: phase.total_bytes - phase.pooled_bytes for phase in phases}
        update = own.pop("update")
        most = max(own.values())
        if not self.engine.scattered:
            return factor * max(most, update) + self.engine.pools
        left = max(0.0, most - (update - self.engine.step))
        return factor * most + max(0.0, self.engine.step - _REUSED_SHARE * left) + self.engine.pools

    def phases(self) -> list[Phase]:
        """The moments at which memory can be at its highest."""
        layers, engine, batch = self.layers, self.engine, self.batch
        kept = {kind: self.kept("forward_kept", kind) for kind in set(self.kinds)}
        all_kept = sum(kept[kind] for kind in self.kinds)
        end = self.in_flight * at(layers.forward_base, batch) + all_kept
        under_last = at(layers.forward_start, batch) + all_kept - kept[self.kinds[-1]]
        rise = max(top(layers.layers[kind].forward_peak, batch) for kind in set(self.kinds)) - self.saving
        forward = max(under_last + rise, end + top(layers.norm_forward_peak, batch))
        loss = at(self.loss.line, batch * self.run.own_tokens)
        root = 0.0 if engine.root_grows or self.before else engine.growing_gradients * self.shape.num_root_trainable
        rest = at(layers.backward_base, batch)
        return [
            self.phase("forward", gradients=self.before, activations=forward, gather=engine.forward_gather),
            self.phase("loss", gradients=self.before, activations=end, loss=loss, gather=engine.loss_gather),
            self.backward(),
            self.phase("reduction", gradients=self.accumulated - root, activations=rest, reduce=engine.last_reduce),
            self.phase("update", gradients=self.accumulated + engine.update_gradients, update=engine.step),
        ]

    def backward(self) -> Phase:
        """The highest moment of all layers' backwards: activations below, the layer's own, and the gradients of the layers above it."""
        engine, shape, batch = self.engine, self.shape, self.batch
        kept = {kind: self.kept("backward_kept", kind) for kind in set(self.kinds)}
        saved = 0.0 if self.everything_kept else self.saving
        own = {kind: top(self.layers.layers[kind].backward_peak, batch) - saved for kind in set(self.kinds)}
        trained_above = float(sum(shape.kinds[kind].num_trainable for kind in self.kinds))
        if engine.root_grows and shape.head_trainable and not shape.tied:
            trained_above += shape.num_head
        below, held, highest, parts = self.in_flight * at(self.layers.backward_base, batch), 0.0, -1.0, (0.0, 0.0, 0.0, 0.0)
        for index, kind in enumerate(self.kinds):
            below += kept[kind]
            held += engine.held_per_parameter * shape.kinds[kind].num_parameters
            trained_above -= shape.kinds[kind].num_trainable
            last = index == len(self.kinds) - 1
            activations = below + (max(own[kind], top(self.layers.norm_backward_peak, batch)) if last else own[kind])
            gradients = self.before or engine.growing_gradients * trained_above
            reduce = engine.reduce + (0.0 if last else engine.pending)
            if activations + gradients + held + reduce > highest:
                highest, parts = activations + gradients + held + reduce, (activations, gradients, held, reduce)
        activations, gradients, held, reduce = parts
        return self.phase(
            "backward",
            gradients=gradients + engine.head_gradient,
            activations=activations,
            gather=engine.backward_gather + held,
            reduce=reduce,
        )


# --------------------------------------------------------------------------------------------------- measuring in a child process


def cache_folder() -> Path:
    """The user's cache folder of the planner: $HARNESS_CACHE, else $XDG_CACHE_HOME/harness, else ~/.cache/harness."""
    own = os.environ.get("HARNESS_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "harness"


# Whoever changes these changes what is measured.
_PROBING_CODE = ("activation_probe.py", "live_bytes.py", "blocks.py", "modeling.py", "loss.py", "sequence_parallel.py")


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _write_json(path: Path, values: Any) -> None:
    """Atomic, and silent where the cache cannot be written: it only saves time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(values), encoding="utf-8")
        temporary.replace(path)
    except OSError:
        return


def _model_files(model: str, cache_dir: str | None) -> list[Path] | None:
    """config.json of a model and, beside it, code that may come with it; None where it cannot be known what is loaded."""
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        from huggingface_hub import try_to_load_from_cache

        try:
            found = try_to_load_from_cache(model, "config.json", cache_dir=cache_dir)
        except ValueError:  # not a name that the hub could have
            return None
        if not isinstance(found, str):
            return None
        file = Path(found)
    return [file, *sorted(file.parent.glob("*.py"))]


def _request_key(request: dict[str, Any]) -> str | None:
    """Hash of everything the answer depends on; None where that cannot be known without loading the model's config."""
    content: list[str] = []
    if request.get("model") is not None:
        files = _model_files(request["model"], request.get("cache_dir"))
        if files is None:
            return None
        content = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    code = b"".join((Path(__file__).parent / name).read_bytes() for name in _PROBING_CODE)
    parts = [
        {key: value for key, value in request.items() if key != "model"},
        content,
        hashlib.sha256(code).hexdigest(),
        [importlib.metadata.version(name) for name in ("torch", "transformers", "peft")],
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def lora_request(lora_r: int | None, lora_dropout: float = 0.0, target_modules: Sequence[str] = ("all-linear",)) -> dict[str, Any] | None:
    """What a request (`harness.activation_probe.ProbeRequest`) says of adapters; None without them."""
    return None if lora_r is None else {"lora_r": lora_r, "lora_dropout": lora_dropout, "target_modules": list(target_modules)}


def measure(requests: Sequence[dict[str, Any]], timeout_s: float = 300.0) -> Measured:
    """Measures a model in a child process; answers are cached, for each way in which weights look by itself.

    Args:
        requests: fields of `harness.activation_probe.ProbeRequest`; same model and block size.

    Raises:
        UserError: no such model, or sizes that cannot be.
    """
    folder = cache_folder() / "activations"
    pieces = [{**request, "weights": [weights]} for request in requests for weights in request.get("weights", ["bf16"])]
    keys = [_request_key(piece) for piece in pieces]
    answers: list[Any] = [_read_json(folder / f"{key}.json") if key else None for key in keys]
    missing = [index for index, answer in enumerate(answers) if answer is None]
    groups: dict[str, list[int]] = {}  # what differs in nothing but the weights is measured together: importing takes longest
    for index in missing:
        groups.setdefault(json.dumps({**pieces[index], "weights": None}, sort_keys=True), []).append(index)
    for indices in groups.values():
        weights = [pieces[index]["weights"][0] for index in indices]
        answer = _ask_child({**pieces[indices[0]], "weights": weights}, timeout_s)
        for index in indices:
            answers[index] = _part_of(answer, pieces[index]["weights"][0])
            if keys[index] is not None:
                _write_json(folder / f"{keys[index]}.json", answers[index])
    parts = [
        Measured.from_dict(answer, answer["block_size"], piece.get("sequence_parallel_size", 1))
        for answer, piece in zip(answers, pieces, strict=True)
    ]
    result = parts[0]
    for part in parts[1:]:
        result = result.merged(part)
    return result


def _part_of(answer: dict[str, Any], weights: str) -> dict[str, Any]:
    """Of an answer, what is about one way in which weights look."""
    lists = {name: [item for item in answer[name] if item["weights"] == weights] for name in ("layers", "losses", "failures")}
    return {**answer, **lists}


def _ask_child(request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    child = _start_child(request)
    try:
        output, errors = child.communicate(timeout=timeout_s)
        return _answer_of(child.returncode, output, errors)
    except subprocess.TimeoutExpired:
        raise user_error("--model", f"measuring it took longer than {timeout_s:.0f} s", "give a smaller --block_size") from None
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()


def _start_child(request: dict[str, Any]) -> subprocess.Popen[str]:
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    # The child computes nothing: it needs no GPU, and a thread pool would only cost memory.
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "harness.activation_probe", json.dumps(request)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def _answer_of(code: int, output: str, errors: str) -> dict[str, Any]:
    try:
        answer = json.loads(output)
    except ValueError:
        last = next((line for line in reversed(errors.strip().splitlines()) if line.strip()), f"it ended with code {code}")
        raise user_error("--model", f"the model could not be measured: {last[:300]}", "check its config") from None
    if "findings" in answer:
        raise UserError(Finding(**finding) for finding in answer["findings"])
    return dict(answer)


# ------------------------------------------------------------------------------------------------- what this machine has taught us


def record_measurement(
    machine: str,
    engine: str,
    predicted_bytes: int,
    predicted_reserved_bytes: int,
    allocated_bytes: int,
    reserved_bytes: int,
    used_bytes: int,
) -> None:
    """Keeps a real step's peak beside its prediction; the last 20 per machine and engine.

    Args:
        machine: name of the card.
        predicted_bytes, predicted_reserved_bytes: `MemoryEstimate.allocated_bytes` and `reserved_bytes` made with no factors.
        allocated_bytes, reserved_bytes: `torch.cuda.max_memory_allocated` and `max_memory_reserved`.
        used_bytes: total minus free of `torch.cuda.mem_get_info`.
    """
    path = cache_folder() / "memory_factors.json"
    values = _read_json(path) or {}
    rows = values.setdefault(f"{machine}|{engine}", [])
    rows.append([predicted_bytes, predicted_reserved_bytes, allocated_bytes, reserved_bytes, used_bytes])
    values[f"{machine}|{engine}"] = rows[-20:]
    _write_json(path, values)


def machine_factors(machine: str, engine: str) -> Factors:
    """Corrections from what was recorded: the worst of the last rows, so that a fit stays a fit."""
    rows = (_read_json(cache_folder() / "memory_factors.json") or {}).get(f"{machine}|{engine}", [])
    rows = [row for row in rows if len(row) == 5 and min(row[:3]) > 0]
    if not rows:
        return Factors()
    return Factors(
        allocated=max(row[2] / row[0] for row in rows[-5:]),
        reserved=max(row[3] / row[1] for row in rows[-5:]),
        outside_bytes=max(max(row[4] - row[3], 0) for row in rows[-5:]),
    )


if __name__ == "__main__":
    import runpy

    sys.argv[0] = "harness plan"
    runpy.run_module("harness.planner", run_name="__main__")
