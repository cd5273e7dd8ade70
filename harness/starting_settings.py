"""The memory settings a life of a run begins with: what was asked for, what the run had come down to, or one step below what just failed.

out of memory in phase 'update' of the last life: optimizer_offload 0.0 -> 1.0
"""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from harness import guard_line
from harness.args import Arguments
from harness.cards import card_bytes
from harness.coordination import Coordinator
from harness.end_advice import advice
from harness.engines.build import initial_settings
from harness.findings import Finding, UserError
from harness.ladder import MemorySettings, Rung, default_ladder, describe_change, is_lower, next_settings, parse_ladder, seen_memory
from harness.machine import can_compile, detect_machine
from harness.memory import CONTEXT_BYTES
from harness.oom_reports import (
    EndOfLadderError,
    computed_ladder,
    host_relief_so_far,
    last_good_settings,
    last_settings,
    steps_down_so_far,
    write_ladder,
)
from harness.partition import GIB
from harness.recovery import Recovery, end_message
from harness.run_plan import JobFacts, StartPlan, engine_name, flags_of, further_engine, learn, plan_start, usable_bytes, write_plan

log = logging.getLogger("harness")

# float32 weights and Adam's two averages, and gradients on their way: what offload moves to the host.
OFFLOADED_BYTES_PER_PARAMETER = 16
# Of the host's memory, what offload may take.
HOST_SHARE = 0.8


@dataclasses.dataclass(frozen=True)
class Start:
    """Where a life begins; the same on all ranks.

    Attributes:
        engine: "ddp", "fsdp", "zero" or "device_map".
        settings: in force from the start.
        ladder: what can be taken after an out-of-memory, fastest first; empty where recovery is off.
        host_relief: steps taken after the host's memory ran out: 1 no snapshots, 2 no loader workers either, 3 and up less offload.
        plan: what the memory planner decided; None where it had nothing to say.
    """

    engine: str
    settings: MemorySettings
    ladder: tuple[MemorySettings | Rung, ...] = ()
    host_relief: int = 0
    plan: StartPlan | None = None


def engine_family_of(engine: str) -> str:
    """ "zero3" is built by the engine "zero"."""
    return "zero" if engine.startswith("zero") else engine


def offload_steps(
    engine: str, stage: int, settings: MemorySettings, num_parameters: int, compiles: bool | None = None
) -> list[dict[str, Any]]:
    """What of a job's state can move to the host, in order; empty where the host has no room for it, or an op cannot be built.

    Args:
        engine: "fsdp" or "zero"; others have none.
        stage: ZeRO's; 0 for other engines.
        num_parameters: of the whole model; all ranks of a node together hold at most that many.
    """
    machine = detect_machine()
    if num_parameters * OFFLOADED_BYTES_PER_PARAMETER > HOST_SHARE * machine.host_memory_bytes:
        return []
    if engine == "fsdp":
        return [{"param_offload": "cpu"}]
    if engine != "zero":
        return []
    steps: list[dict[str, Any]] = []
    if can_compile() if compiles is None else compiles:  # DeepSpeed's CPU Adam
        steps.append({"optimizer_offload": 1.0})
        if stage == 3:
            steps.append({"param_offload": "cpu"})
    return [step for step in steps if is_lower(settings.replace(**step), settings)]


_RUNGS_OF = {
    "reshard_after_forward": {"fsdp"},
    "param_offload": {"fsdp", "zero"},
    "optimizer_offload": {"zero"},
    "optimizer_bf16": {"ddp", "fsdp"},
    "in_flight_micro_batches": {"device_map"},
    "reduce_bucket_size": {"zero"},
    "stage3_prefetch_bucket_size": {"zero"},
    "stage3_max_live_parameters": {"zero"},
}


def foreign_rungs(words: Sequence[str], engine: str) -> list[Finding]:
    """Words of `--oom_ladder` that name a setting of other engines: they would free nothing.

    Args:
        engine: its family, "ddp", "fsdp", "zero" or "device_map".
    """
    found = []
    for word in words:
        engines = _RUNGS_OF.get(word.partition("=")[0])
        if engines is not None and engine not in engines:
            problem = f"'{word}' would free nothing: it is a setting of {' and '.join(sorted(engines))}, the engine is {engine}"
            found.append(Finding("error", "--oom_ladder", problem, "leave it out"))
    return found


def make_ladder(
    args: Arguments, engine: str, settings: MemorySettings, *, block_size: int, num_parameters: int, num_processes: int
) -> list[MemorySettings]:
    """The user's ladder, or the default one for this engine and machine.

    Raises:
        UserError: a word of `--oom_ladder` that is not known or frees nothing.
    """
    if args.train.no_oom_recovery:
        return []
    if args.train.oom_ladder:
        found: list[Finding] = foreign_rungs(args.train.oom_ladder, engine)
        try:
            rungs = parse_ladder(args.train.oom_ladder, settings)
        except UserError as error:
            raise UserError([*error.findings, *found]) from None
        if found:
            raise UserError(found)
        return rungs
    name = engine_name(args, engine, os.environ)
    further = None if settings.engine else further_engine(args, name, num_processes)
    stage = 3 if "zero3" in (name, further) else 0
    may_offload = guard_line.can_relaunch() and not args.train.optim_in_backward
    offloads = offload_steps(engine_family_of(further or engine), stage, settings, num_parameters) if may_offload else []
    spread = [] if further is None else [{"engine": further}]
    # On the card alone: elsewhere it moves nothing away. A device map has none.
    on_card = torch.cuda.is_available() and not args.train.use_cpu and engine != "device_map"
    inputs = [{"activation_offload": True}] if on_card else []
    return default_ladder(settings, block_size=block_size, offloads=[*inputs, *spread, *offloads])


def job_facts(
    args: Arguments, engine: str, coordinator: Coordinator, *, block_size: int, samples_per_rank: int, precision: str
) -> JobFacts | None:
    """What the planner must know of this job; called on all ranks. None where there is no card's memory to speak of.

    With --gpu_memory torch is kept from taking more of a card; without a card, the plan is made as if there were one.
    """
    usable, name, asked = 0, "", args.train.gpu_memory
    if coordinator.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(coordinator.device)
        usable, name = usable_bytes(total, free, asked), torch.cuda.get_device_name(coordinator.device)
        if asked and usable < total:
            torch.cuda.set_per_process_memory_fraction(max(usable - CONTEXT_BYTES[1], GIB // 4) / total, coordinator.device)
    elif asked:
        usable = card_bytes(asked)
    least = int(-coordinator.max([-float(usable)], "memory of the cards")[0])
    if not least:
        return None
    return JobFacts(
        engine=engine,
        num_processes=coordinator.num_processes,
        num_local_processes=coordinator.num_local_processes,
        gpu_name=name,
        gpu_bytes=least,
        block_size=block_size,
        samples_per_rank=samples_per_rank,
        precision=precision,
        host_bytes=detect_machine().host_memory_bytes if name else None,
        may_relaunch=guard_line.can_relaunch(),
    )


def _planned(args: Arguments, asked: MemorySettings, engine: str, folder: Path, facts: JobFacts | None) -> StartPlan | None:
    """What the planner says, in the log and in plan.json. A user's own ladder is not mixed with it."""
    if facts is None or args.train.auto_memory == "off" or (args.train.oom_ladder and "auto_memory" not in args.typed):
        return None
    plan = plan_start(args, asked, facts, can_offload=engine != "zero" or can_compile())
    if plan is None:
        return None
    for line in plan.lines:
        log.log(logging.WARNING if plan.changed and line.startswith(("nothing", "changed")) else logging.INFO, "%s", line)
    write_plan(folder, plan)
    if args.train.auto_memory == "suggest":
        log.info("suggested, not taken (--auto_memory on takes it): %s", flags_of(plan))
        return None
    return plan


def choose_start(
    args: Arguments,
    engine: str,
    folder: Path,
    coordinator: Coordinator,
    *,
    block_size: int,
    num_parameters: int,
    facts: JobFacts | None = None,
) -> Start:
    """Settings, ladder and engine of this life; called on all ranks, decided on the main process.

    Args:
        engine: what arguments and template ask for.
        folder: the run's, with the `ladder.json` of its earlier lives.
        block_size: tokens of the longest sample.
        num_parameters: of the whole model.
        facts: for the memory planner; None: it stays out of it.

    Raises:
        EndOfLadderError: the last life ran out of memory with the lowest settings there are.
        UserError: `--oom_ladder` names what is not a rung.
    """
    start: Start | None = None
    failure: Exception | None = None
    if coordinator.is_main_process:
        try:
            start = _decide(args, engine, folder, coordinator.num_processes, block_size, num_parameters, facts)
        except (UserError, EndOfLadderError) as error:
            failure = error
    start, failure = coordinator.broadcast((start, failure))
    if failure is not None:
        raise failure
    assert start is not None
    return start


def _decide(
    args: Arguments,
    engine: str,
    folder: Path,
    num_processes: int,
    block_size: int,
    num_parameters: int,
    facts: JobFacts | None = None,
) -> Start:
    asked = initial_settings(args, engine)
    cause = guard_line.cause()
    # A life after an out-of-memory goes on with the estimates of the one before: a new plan might not know what has just failed.
    computed: Sequence[Rung] = computed_ladder(folder, num_processes) if cause is not None else ()
    plan = None if computed else _planned(args, asked, engine, folder, facts)
    settings = asked if plan is None else plan.settings
    if args.train.no_oom_recovery:
        return Start(_engine_of(engine, settings), settings, plan=plan)
    if plan is not None and not args.train.oom_ladder:  # a user's own ladder stays what it is, wherever the planner starts
        computed = plan.ladder
    earlier = last_settings(folder, num_processes) if cause is not None and computed else last_good_settings(folder, num_processes)
    if earlier is not None and (is_lower(earlier, settings) or any(rung.settings == earlier for rung in computed)):
        if cause is None and earlier != settings:
            log.info("starting at the settings that this run had come down to: %s", describe_change(settings, earlier))
        settings = earlier

    def ladder_below(now: MemorySettings) -> list[MemorySettings]:
        return make_ladder(
            args, _engine_of(engine, now), now, block_size=block_size, num_parameters=num_parameters, num_processes=num_processes
        )

    # The user's own list counts from what was asked for, ours from what is in force.
    ladder: Sequence[MemorySettings | Rung] = computed or ladder_below(asked if args.train.oom_ladder else settings)
    relief, steps_down = host_relief_so_far(folder, num_processes), steps_down_so_far(folder, num_processes)
    if cause is not None and not cause.get("agreed"):
        if cause.get("memory") == "host":
            settings, change = _relieve_host(settings, asked, relief, cause)
            relief += 1
        else:
            settings, change = _step_below(
                settings, ladder, steps_down, cause, lambda now: "" if facts is None else advice(args, facts, now)
            )
        steps_down.append(_step_of(cause, change))
    if ladder:
        write_ladder(folder, num_processes, ladder, steps_down, settings, host_relief=relief)
    return Start(_engine_of(engine, settings), settings, tuple(ladder), relief, plan)


def _engine_of(asked: str, settings: MemorySettings) -> str:
    return engine_family_of(settings.engine) if settings.engine else asked


def _step_of(cause: Mapping[str, Any], change: str) -> dict[str, Any]:
    """The step down that the life that ended could not write itself."""
    phase, rank, failure = cause.get("phase", "unknown"), cause.get("rank", 0), cause.get("failure", "")
    lost_s = round(time.time() - float(cause.get("at_s", time.time())), 3)
    log.warning("out of memory on rank %s in phase '%s' of the last life (%s): %s", rank, phase, failure, change)
    seen = {name: cause[name] for name in ("requested_gib", "allocated_gib", "limit_gib", "memory") if name in cause}
    return {"phase": phase, "rank": rank, "failure": failure, **seen, "change": change, "way": "relaunch", "seconds": lost_s}


def _step_below(
    settings: MemorySettings,
    ladder: Sequence[MemorySettings | Rung],
    steps_down: Sequence[dict[str, Any]],
    cause: Mapping[str, Any],
    advise: Callable[[MemorySettings], str],
) -> tuple[MemorySettings, str]:
    """What takes less of the cards, and what changes."""
    report = {"requested_gib": None, "allocated_gib": None, "limit_gib": None, "failure": "", **cause}
    lower = next_settings(ladder, settings, seen_memory(report))
    if lower is None:
        raise EndOfLadderError(end_message(int(report.get("rank", 0)), report, steps_down, advise(settings)))
    return lower, describe_change(settings, lower)


def _relieve_host(settings: MemorySettings, asked: MemorySettings, relief: int, cause: Mapping[str, Any]) -> tuple[MemorySettings, str]:
    """What takes less of the host, and what changes: no snapshots, then no loader workers, then less offload than a step had brought."""
    if relief < len(_HOST_STEPS):
        return settings, _HOST_STEPS[relief]
    less = _less_offload(settings, asked)
    if less == settings:
        raise EndOfLadderError(
            f"the host's memory ran out on rank {cause.get('rank', 0)} with nothing left to lower: {cause.get('failure', '')}."
            " What helps: more host memory (or a higher limit of the container), fewer --dataloader_num_workers, no offload."
        )
    return less, describe_change(settings, less)


_HOST_STEPS = ("no snapshots in host memory", "no loader workers")


def _less_offload(settings: MemorySettings, asked: MemorySettings) -> MemorySettings:
    """One kind of offload less; what the user asked for stays."""
    if settings.param_offload != asked.param_offload:
        return settings.replace(param_offload=asked.param_offload)
    if settings.optimizer_offload > asked.optimizer_offload:
        return settings.replace(optimizer_offload=asked.optimizer_offload)
    return settings


class DryRunWatch:
    """Compares what the dry run takes of a card with what was predicted for it; the planner's next estimates are corrected by it."""

    def __init__(self, start: Start, recovery: Recovery, coordinator: Coordinator) -> None:
        self.plan = start.plan if start.plan is not None and start.settings == start.plan.settings else None
        self.recovery, self.coordinator = recovery, coordinator
        self.on_card = coordinator.device.type == "cuda"
        self.num_steps_down = len(recovery.steps_down)
        if self.on_card:
            torch.cuda.reset_peak_memory_stats(coordinator.device)

    def done(self) -> None:
        """After the dry run, on all ranks; the rank that needed the most counts."""
        if not self.on_card:
            return
        device = self.coordinator.device
        free, total = torch.cuda.mem_get_info(device)
        seen = [torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device), total - free]
        allocated, reserved, used = (int(value) for value in self.coordinator.max([*map(float, seen)], "memory of the dry run"))
        failed = self.recovery.steps_down[self.num_steps_down :]
        if failed:  # what was predicted for the first attempt is compared with what it would have needed at least
            report = failed[0]
            needed = (report.get("allocated_gib") or 0.0) + (report.get("requested_gib") or 0.0)
            allocated = reserved = used = int(needed * GIB)
        if self.plan is not None and self.coordinator.is_main_process and allocated:
            log.info("%s", learn(self.plan, torch.cuda.get_device_name(device), allocated, reserved, used))


def build_ahead(start: Start, coordinator: Coordinator) -> None:
    """Compiles DeepSpeed's CPU Adam beside the run where a step down may need it, so that a new start does not wait a minute for it."""
    rungs = [rung.settings if isinstance(rung, Rung) else rung for rung in start.ladder]
    later = start.settings.optimizer_offload == 0 and any(rung.optimizer_offload > 0 for rung in rungs)
    if start.engine != "zero" or not later or coordinator.device.type != "cuda" or not coordinator.is_local_main_process:
        return
    try:
        subprocess.Popen(
            [sys.executable, "-m", "harness.compile_ahead", str(os.getppid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=Path(__file__).resolve().parent.parent,
        )
    except OSError as error:
        log.debug("CPU Adam is not compiled ahead: %s", error)
