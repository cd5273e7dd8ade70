"""The memory planner inside a run: the fastest settings that fit every rank, and the ladder below them.

    memory plan for fsdp on 8 x H100 (79.1 GiB): start with 2 x 4, checkpointing none: 61.4 GiB expected (59.0 to 65.3), 3.37 s a step
    as asked for (8 x 1, checkpointing none) a card would need 257.6 GiB

What the user gave stays, unless nothing fits with it; the samples of an optimizer step always stay. Without a card, and without
--gpu_memory, there is nothing to plan.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from harness.args import Arguments
from harness.blocks import compile_backend
from harness.candidates import Candidate, EnginePlan, Figure, Limits, pareto, plan_engine
from harness.cards import card_bytes, card_of_size, hardware_of
from harness.checkpoint_files import write_json
from harness.deepspeed_keys import zero_size
from harness.engine_memory import GIB, OPTIMIZER_STATE_BYTES
from harness.findings import UserError
from harness.ladder import MemorySettings, Rung
from harness.memory import Factors, lora_request, machine_factors, measure, record_measurement
from harness.model_shape import ENGINES, EngineName, Measured, RunShape, ZeroOptions
from harness.plan_report import number, settings_text
from harness.templates import fsdp_template_of, load_deepspeed_template

log = logging.getLogger("harness")

PLAN_FILE = "plan.json"
# Of a node's memory, what the job may plan with: the rest is the page cache's, without which reading data is slow.
HOST_SHARE = 0.9
# Settings that are given up for something that fits, in this order; each with those before it.
RELEASED: tuple[tuple[str, ...], ...] = (
    (),
    ("reduce_bucket_size", "prefetch_bucket_size", "max_live_parameters", "reshard_after_forward", "in_flight_micro_batches"),
    ("micro_batch_size",),
    ("activation_checkpointing",),
    ("optimizer_offload", "param_offload"),
)


# What a running engine can change.
IN_PLACE = {"micro_batch_size", "activation_checkpointing", "activation_offload", "reshard_after_forward", "in_flight_micro_batches"}


# CUDA, cuBLAS and NCCL together take less outside the allocator; more belongs to other processes on the card.
MOST_OUTSIDE_BYTES = 4 * GIB


@dataclasses.dataclass(frozen=True)
class JobFacts:
    """What the planner must know of a job beside its arguments; the same on all ranks.

    Attributes:
        engine: "ddp", "fsdp", "zero" or "device_map".
        gpu_name: of the main process's card; "" without one.
        gpu_bytes: what a rank may use of its card, the least of all ranks.
        block_size: tokens of the longest sample.
        samples_per_rank: of an optimizer step.
        precision: "bf16", "fp16" or "fp32".
        host_bytes: memory of a node.
        may_relaunch: settings that need new processes can be taken during the run.
    """

    engine: str
    num_processes: int
    num_local_processes: int
    gpu_name: str
    gpu_bytes: int
    block_size: int
    samples_per_rank: int
    precision: str
    host_bytes: int | None = None
    may_relaunch: bool = False


@dataclasses.dataclass(frozen=True)
class StartPlan:
    """What the planner decided.

    Attributes:
        settings: to start with.
        ladder: those and everything below them, fastest first.
        candidate: the settings with their estimates.
        lines: for the log.
        changed: settings of the user's that did not fit.
        content: for plan.json.
    """

    settings: MemorySettings
    ladder: tuple[Rung, ...]
    candidate: Candidate
    lines: tuple[str, ...]
    changed: tuple[str, ...]
    content: dict[str, Any]


def engine_name(args: Arguments, engine: str, environ: Mapping[str, str]) -> EngineName | None:
    """The planner's name of an engine: ZeRO with its stage. None for a device map, which plans itself, and for DeepSpeed without ZeRO."""
    if engine == "zero":
        stage = (load_deepspeed_template(args, environ) or {}).get("zero_optimization", {}).get("stage", 0)
        engine = f"zero{stage}"
    return next((name for name in ENGINES if name == engine and name != "device_map"), None)


def zero_options(template: Mapping[str, Any]) -> ZeroOptions:
    """Sizes of a DeepSpeed template; what is not there has DeepSpeed's default, "auto" the one made of the hidden size."""
    zero = template.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    return ZeroOptions(
        reduce_bucket_size=zero_size(zero, "reduce_bucket_size"),
        prefetch_bucket_size=zero_size(zero, "stage3_prefetch_bucket_size"),
        persistence_threshold=zero_size(zero, "stage3_param_persistence_threshold"),
        max_live_parameters=zero_size(zero, "stage3_max_live_parameters") or 0,
        max_reuse_distance=zero_size(zero, "stage3_max_reuse_distance") or 0,
        sub_group_size=zero_size(zero, "sub_group_size") or 0,
        overlap_comm=bool(zero.get("overlap_comm", stage == 3)),
        pin_memory=bool(zero.get("offload_optimizer", {}).get("pin_memory", False)),
    )


def run_shape(args: Arguments, engine: EngineName, facts: JobFacts, environ: Mapping[str, str]) -> RunShape:
    """The job in the planner's terms. Snapshots in host memory are not counted: they take what is left."""
    shards = None
    if engine == "fsdp" and (template := fsdp_template_of(args, environ)) is not None:
        shards = template.group_sizes(facts.num_processes, facts.num_local_processes)[1]
    compiled = bool(facts.gpu_name) and compile_backend(args.model, torch.device("cuda")) is not None
    liger = args.model.use_liger_kernel is not False and not args.model.no_custom_kernels and not compiled
    return RunShape(
        engine=engine,
        num_processes=facts.num_processes,
        block_size=facts.block_size,
        samples_per_step=facts.samples_per_rank,
        num_local_processes=facts.num_local_processes,
        precision=facts.precision,  # type: ignore[arg-type]
        optimizer=args.train.optim,
        lora=args.lora.lora_r is not None,
        fused_layers=bool(facts.gpu_name) and liger and importlib.util.find_spec("liger_kernel") is not None,
        compiled_layers=compiled,
        shard_group_size=shards if shards != facts.num_processes else None,
        reduce_in_float32=args.train.reduce_dtype == "fp32",
        ddp_reducer=args.train.no_oom_recovery,
        in_backward=args.train.optim_in_backward,
        sequence_parallel_size=args.train.sequence_parallel_size,
        zero=zero_options(load_deepspeed_template(args, environ) or {}) if engine.startswith("zero") else ZeroOptions(),
    )


def probe_request(args: Arguments, run: RunShape) -> dict[str, Any]:
    """What must be measured of the model; see `harness.activation_probe.ProbeRequest`."""
    attention = args.model.attn_implementation or "sdpa"
    chunk = args.train.loss_chunk_size
    return {
        "model": args.model.model_name_or_path or args.model.config_name,
        "model_type": args.model.model_type,
        "config_overrides": args.model.config_overrides,
        "cache_dir": args.model.cache_dir,
        "trust_remote_code": args.model.trust_remote_code,
        "attention": attention,
        "block_size": run.block_size,
        "checkpointing": ["none", "selective", "full"],
        "loss_chunks": [chunk] if chunk else [0, 1024],
        "lora": lora_request(args.lora.lora_r, args.lora.lora_dropout, args.lora.target_modules),
        "documents": args.data.keeps_documents_apart,
        "weights": [run.weights],
        "sequence_parallel_size": run.sequence_parallel_size,
    }


def pinned_settings(args: Arguments, asked: MemorySettings) -> set[str]:
    """Settings that the user gave, on the command line or in a template; "auto" in a template is nobody's choice."""
    pinned = {"optimizer_offload", "param_offload", "loss_chunk_size"}
    if asked.activation_offload:  # without checkpointing it would move nothing
        pinned.add("activation_checkpointing")
    if "per_device_train_batch_size" in args.typed:
        pinned.add("micro_batch_size")
    if {"activation_checkpointing", "gradient_checkpointing"} & args.typed or asked.activation_checkpointing != "none":
        pinned.add("activation_checkpointing")
    sizes = [name for name in RELEASED[1] if name != "reshard_after_forward" and getattr(asked, name)]
    return pinned | {"reshard_after_forward", *sizes}


_FURTHER: dict[EngineName, EngineName] = {"ddp": "fsdp", "zero1": "zero3", "zero2": "zero3"}


def further_engine(args: Arguments, engine: EngineName | None, num_processes: int) -> EngineName | None:
    """With `--engine auto`: the engine that spreads the same job further over its ranks; None where there is none."""
    return _FURTHER.get(engine) if engine is not None and args.train.engine == "auto" and num_processes > 1 else None


@dataclasses.dataclass(frozen=True)
class _Planning:
    """What all plans of one job have in common."""

    measured: Measured
    asked: MemorySettings
    limits: Limits
    gpu_name: str
    figure: Figure
    may_offload: bool

    def plan(self, run: RunShape, pinned: set[str], engine: str = "") -> EnginePlan:
        hardware = hardware_of(self.gpu_name or card_of_size(self.limits.gpu_bytes))
        keep = pinned | (set() if self.may_offload else {"optimizer_offload", "param_offload"})
        given = self.asked.replace(engine=engine)
        factors = machine_factors(self.gpu_name, run.engine) if self.gpu_name else None
        return plan_engine(self.measured, run, hardware, given, self.limits, pinned=keep, figure=self.figure, factors=factors)

    def fitting(self, run: RunShape, pinned: set[str], engine: str = "") -> EnginePlan:
        """The plan that changes the least of what the user gave and has something that fits; else the one that is free to change all."""
        held = set(pinned)
        plan = self.plan(run, held, engine)
        for names in RELEASED:
            if plan.chosen is None and held & set(names):
                held -= set(names)
                plan = self.plan(run, held, engine)
        return plan


def ladder_below(start: Candidate, candidates: Sequence[Candidate], may_relaunch: bool) -> tuple[Rung, ...]:
    """The start and what is smaller, fastest first: the Pareto front of what the same processes can take, and of what new ones can."""

    def changed(candidate: Candidate) -> set[str]:
        old, new = start.settings.to_dict(), candidate.settings.to_dict()
        return {name for name in old if old[name] != new[name]}

    lower = [each for each in candidates if each.estimate.expected_bytes < start.estimate.expected_bytes]
    front = pareto([each for each in lower if changed(each) <= IN_PLACE], "expected")
    if may_relaunch:
        front += [each for each in pareto(lower, "expected") if each not in front]
    front = sorted((each for each in front if each.time.total_s >= start.time.total_s), key=lambda each: each.time.total_s)
    return tuple(Rung(each.settings, each.estimate.expected_bytes, each.time.total_s, each.estimate.host_bytes) for each in [start, *front])


def plan_start(
    args: Arguments,
    asked: MemorySettings,
    facts: JobFacts,
    environ: Mapping[str, str] | None = None,
    *,
    can_offload: bool = True,
) -> StartPlan | None:
    """Chooses where to start; on the main process only. None where the planner has nothing to say: its problem is never the run's.

    Args:
        asked: settings of arguments and template.
        can_offload: DeepSpeed's operators for states on the host build here.
    """
    environ = os.environ if environ is None else environ
    engine = engine_name(args, facts.engine, environ)
    if args.train.optim not in OPTIMIZER_STATE_BYTES or engine is None:
        return None
    started = time.monotonic()
    try:
        run = run_shape(args, engine, facts, environ)
        further = further_engine(args, engine, run.num_processes)
        runs = [run] if further is None else [run, dataclasses.replace(run, engine=further)]
        measured = measure([{**probe_request(args, run), "weights": list(dict.fromkeys(each.weights for each in runs))}])
    except (UserError, OSError) as error:
        log.warning("no memory plan, starting with what was asked for: %s", str(error).splitlines()[0])
        return None
    if time.monotonic() - started > 2:
        log.info("memory plan: the model was measured in %.0f s, once for this model and block size", time.monotonic() - started)
    planning = _Planning(
        measured=measured,
        asked=asked,
        limits=Limits(facts.gpu_bytes, None if facts.host_bytes is None else int(HOST_SHARE * facts.host_bytes)),
        gpu_name=facts.gpu_name,
        figure="high" if args.train.no_oom_recovery else "start",
        # Weights on the host keep their gradients there, all of them.
        may_offload=can_offload and asked.param_offload != "nvme" and not args.train.optim_in_backward,
    )
    pinned = pinned_settings(args, asked)
    plans = [planning.fitting(each, pinned, "" if each is run else each.engine) for each in runs]
    plan = next((each for each in plans if each.chosen is not None), min(plans, key=lambda each: each.smallest.need_bytes(each.figure)))
    start = plan.chosen or plan.smallest
    return _start_plan(planning, runs, plans[0].given, plan, start, pinned, facts)


def _start_plan(
    planning: _Planning,
    runs: Sequence[RunShape],
    given: Candidate,
    plan: EnginePlan,
    start: Candidate,
    pinned: set[str],
    facts: JobFacts,
) -> StartPlan:
    names = [name for name, value in planning.asked.to_dict().items() if start.settings.to_dict()[name] != value]
    changed = tuple(name for name in names if name in pinned)
    # The ladder may leave what was given: it is taken when memory has run out.
    free = dataclasses.replace(planning, may_offload=planning.may_offload and facts.may_relaunch)
    below = [each for run in runs for each in free.plan(run, set(), "" if run is runs[0] else run.engine).candidates]
    ladder = ladder_below(start, below, facts.may_relaunch)
    too_big = [each for each in plan.ladder if each.misfit(plan.limits, plan.figure) and each.time.total_s < start.time.total_s]
    return StartPlan(
        settings=start.settings,
        ladder=ladder,
        candidate=start,
        lines=tuple(_lines(plan, given, start, too_big, planning.measured, facts, changed)),
        changed=changed,
        content={
            "job": dataclasses.asdict(facts),
            "model": {"model_type": planning.measured.shape.model_type, "num_parameters": planning.measured.shape.num_parameters},
            "corrections": dataclasses.asdict(machine_factors(facts.gpu_name, start.engine) if facts.gpu_name else Factors()),
            "asked": {**given.to_dict(), "misfit": given.misfit(plan.limits, plan.figure)},
            "chosen": start.to_dict(),
            "fits": plan.chosen is not None,
            "changed": list(changed),
            "rejected": [{**each.to_dict(), "misfit": each.misfit(plan.limits, plan.figure)} for each in too_big],
            "ladder": [rung.to_dict() for rung in ladder],
            "closed_forms": list(planning.measured.failures),
        },
    )


def _lines(
    plan: EnginePlan,
    given: Candidate,
    start: Candidate,
    too_big: Sequence[Candidate],
    measured: Measured,
    facts: JobFacts,
    changed: Sequence[str],
) -> list[str]:
    """The decision for people."""
    limit = facts.gpu_bytes / GIB
    card = f"{facts.gpu_name or 'a card'} ({limit:.{1 if limit >= 10 else 3}f} GiB)"
    low, expected, high = (value / GIB for value in (start.estimate.low_bytes, start.estimate.expected_bytes, start.estimate.high_bytes))
    what = f"memory plan for {start.engine} on {facts.num_processes} x {card}"
    figures = f"{expected:.2f} GiB expected ({low:.2f} to {high:.2f}, highest in {start.estimate.peak_phase})"
    speed = f"{start.time.total_s:.2f} s a step, {number(start.tokens_per_s)} tokens/s"
    lines = [f"{what}: start with {settings_text(start)}: {figures}, {speed}, host {start.estimate.host_bytes / GIB:.0f} GiB a node"]
    if plan.chosen is None:
        lines.append(f"nothing is predicted to fit; these settings need the least: {start.misfit(plan.limits, plan.figure)}")
    if start.settings != given.settings:
        need = given.need_bytes(plan.figure) / GIB
        verdict = "does not fit" if given.misfit(plan.limits, plan.figure) else "fits too, and is slower"
        lines.append(f"as asked for ({given.engine}, {settings_text(given)}) a card would need {need:.2f} GiB: {verdict}")
    if changed:
        lines.append(f"changed although it was given, because nothing fits with it: {', '.join(changed)}")
    if too_big:
        text = "; ".join(f"{settings_text(each)} ({each.need_bytes(plan.figure) / GIB:.2f} GiB)" for each in too_big[:3])
        lines.append(f"faster, but too big: {text}")
    learnt = machine_factors(facts.gpu_name, start.engine).describe() if facts.gpu_name else ""
    lines += [learnt] if learnt else []
    return lines + [f"not measured, closed form instead: {failure}" for failure in measured.failures]


def write_plan(folder: Path, plan: StartPlan) -> None:
    """Writes plan.json, whole or not at all."""
    write_json(folder / PLAN_FILE, plan.content)


def flags_of(plan: StartPlan) -> str:
    """The settings as flags, for somebody who only wants a suggestion."""
    settings = plan.settings
    words = [f"--per_device_train_batch_size {settings.micro_batch_size}", f"--gradient_accumulation_steps {plan.candidate.accumulation}"]
    words.append(f"--activation_checkpointing {settings.activation_checkpointing}")
    words += ["--activation_offload"] if settings.activation_offload else []
    return " ".join(words)


def usable_bytes(total_bytes: int, free_bytes: int, asked: str | None) -> int:
    """What this process may use of its card.

    Args:
        free_bytes: now; what is missing beyond a CUDA context of our own belongs to other processes.
        asked: `--gpu_memory`.
    """
    others = max(0, total_bytes - free_bytes - 2 * GIB)
    usable = total_bytes - others
    return min(usable, card_bytes(asked)) if asked else usable


# ------------------------------------------------------------------------------------------------- what the dry run teaches


def learn(plan: StartPlan, gpu_name: str, allocated_bytes: int, reserved_bytes: int, used_bytes: int) -> str:
    """Keeps what the dry run used beside what was predicted for it, for the next plan on this machine. Returns a line for the log.

    A dry run is forward and backward with the optimizer's states in place, but no update.
    """
    estimate, corrections = plan.candidate.estimate, plan.content["corrections"]
    predicted = max(phase.total_bytes for phase in estimate.phases if phase.name != "update")
    ours = min(used_bytes, reserved_bytes + MOST_OUTSIDE_BYTES)
    record_measurement(
        gpu_name, plan.candidate.engine, int(predicted), estimate.dry_run_reserved_bytes, allocated_bytes, reserved_bytes, ours
    )
    expected = predicted * corrections["allocated"]
    off = 100 * (allocated_bytes / expected - 1)
    return (
        f"dry run: {allocated_bytes / GIB:.2f} GiB allocated, {expected / GIB:.2f} predicted ({off:+.1f} %);"
        f" {used_bytes / GIB:.2f} GiB of the card in use; kept for the next plan on this machine"
    )
