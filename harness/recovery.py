"""What happens when memory runs out: all ranks agree, free, take the next rung of the ladder, and redo the same samples.

Every rank votes on the host before each collective of a step and once more before the update (harness.votes). A rank whose allocation
failed casts its next vote as "out of memory", so all ranks stop at the same place, whatever it is; no collective is left half done and
nobody waits for a rank that is gone. Then the step starts again from its first sample under smaller settings: same samples, same random
states, same loss curve.

What cannot be redone in process (an update, a save, steps that DeepSpeed cannot take back, settings that need another engine) ends the
process with a report to its guard; the guards start all ranks again, which go on from the last snapshot or checkpoint.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch

from harness import guard_line
from harness.coordination import Coordinator, StopFlag
from harness.engines.base import Engine
from harness.ladder import MemorySettings, Rung, SeenMemory, describe_change, next_settings, seen_memory, worst_report
from harness.oom_reports import (
    EndOfLadderError,
    is_out_of_memory,
    memory_report,
    steps_down_so_far,
    write_ladder,
)
from harness.votes import PeerOutOfMemoryError, Vote, checker, make_vote

log = logging.getLogger("harness")
T = TypeVar("T")


class Recovery:
    """Runs the phases of the loop.

    Args:
        ladder: settings, fastest first, with estimates where they were computed; empty turns recovery off.
        folder: where `ladder.json` is written.
        on_event: log of metrics, main process.
        host_relief: steps taken so far because the host's memory ran out; kept in `ladder.json`.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        stop: StopFlag,
        engine: Engine,
        ladder: Sequence[MemorySettings | Rung] = (),
        *,
        folder: Path | None = None,
        on_event: Callable[..., None] = lambda event, **fields: None,
        host_relief: int = 0,
    ) -> None:
        self.host_relief = host_relief
        self.coordinator, self.stop, self.engine = coordinator, stop, engine
        self.ladder, self.folder, self.on_event = list(ladder), folder, on_event
        self.stop_agreed = self.is_dry = False
        self.steps_down = steps_down_so_far(folder, coordinator.num_processes) if folder is not None and self.ladder else []
        self.may_relaunch = bool(self.ladder) and not coordinator.max([float(not guard_line.can_relaunch())], "guards")[0]
        self.before_relaunch: Callable[[], object] = lambda: None
        self.current_step: Callable[[], int] = lambda: 0
        self.advise: Callable[[MemorySettings], str] = lambda settings: ""
        self.thrashing = _ThrashGuard(coordinator.device)
        self.seen: SeenMemory | None = None
        # What each phase that can be redone lowers; each returns what changed, or None where nothing is left.
        self.lower: dict[str, Callable[[], str | None]] = {"step": self._lower_settings}
        self.vote: Vote | None = None
        self.check: Callable[[], None] = lambda: None
        if self.ladder and getattr(engine, "resettable", True):
            self.vote = make_vote(coordinator)
            self.check = checker(self.vote)
            engine.install_votes(self.check)
        elif self.ladder and not self.may_relaunch:
            log.warning("an out-of-memory ends this run: steps with state on NVMe cannot be redone in process")
        self.record()
        cause = guard_line.cause()
        if self.steps_down and cause is not None and not cause.get("agreed"):  # the life that ended had no time to say it
            last = self.steps_down[-1]
            self.on_event("oom", **{name: last[name] for name in ("phase", "rank", "failure", "change", "way") if name in last})

    def run(self, phase: str, function: Callable[..., T], *args: Any) -> T:
        """Runs `function(*args)`; where it runs out of memory, lowers something and runs it again.

        After the phase "step" all ranks have agreed to commit it. Updates and saves change state that cannot be redone: where one runs
        out of memory the guards start all ranks again; without guards the error goes on to the caller.

        Raises:
            EndOfLadderError: nothing is left to lower.
        """
        if self.vote is None or phase not in self.lower:
            try:
                done = function(*args)
            except Exception as error:
                if self.may_relaunch and is_out_of_memory(error):
                    self._relaunch_alone(phase, error)
                raise
            if phase == "step":
                self._agree_to_stop()
            return done
        while True:
            before = self.random_state = random_state(self.coordinator.device)
            result, failure = self._attempt(function, *args)
            if failure is None:
                if phase == "step":
                    self._agree_to_stop()
                return result  # type: ignore[return-value]
            started = time.monotonic()
            self._step_down(phase, failure)
            restore_random_state(before, self.coordinator.device)
            self.steps_down[-1]["seconds"] = round(time.monotonic() - started, 3)
            self.record()

    def _attempt(self, function: Callable[..., T], *args: Any) -> tuple[T | None, str | None]:
        """One try, with the commit vote at its end. Returns (result, None), or (None, what this rank saw).

        The exception is gone when this returns: kept anywhere, it would pin every tensor of the frames that failed.
        """
        assert self.vote is not None
        failure, voted = None, False
        result: T | None = None
        try:
            result = function(*args)
        except PeerOutOfMemoryError:
            failure, voted = "", True
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = str(error).splitlines()[0] or type(error).__name__
            keep_memory_snapshot(self.coordinator)
        if not voted and self.vote(failure is not None) and failure is None:
            failure = ""  # the commit vote: another rank ran out of memory after this one's last collective
        return (None, failure) if failure is not None else (result, None)

    def _agree_to_stop(self) -> None:
        """MAX over ranks of [stop asked, allocator in trouble]: all act on a signal, and step down before memory runs out, at one step."""
        stop, thrashes = self.coordinator.max([float(bool(self.stop)), float(self.thrashing())], "commit vote")
        if stop and not self.stop_agreed:
            self.stop_agreed = True
            log.warning("stop requested%s: saving after this step", f" by {self.stop.signal_name}" if self.stop else " on another rank")
        if thrashes and self.vote is not None:
            self._step_down_early()

    def _step_down(self, phase: str, failure: str) -> None:
        """Frees what the failed try left, on all ranks, and lowers what the phase allows."""
        updates = getattr(self.engine, "updates", None)
        begun = updates is not None and updates.has_begun
        reports = self.coordinator.gather({**memory_report(self.coordinator.device, failure), "begun": begun})
        worst = worst_report(reports)
        self.seen = seen_memory(reports[worst])
        begun = any(each["begun"] for each in reports)
        reports = [{name: value for name, value in each.items() if name != "begun"} for each in reports]
        self.report = {"phase": phase, "rank": worst, **reports[worst]}
        if begun:
            self._give_up_step(phase)
        self._free()
        change = self.lower[phase]()
        if change is None:
            advice = self.coordinator.broadcast(self.advise(self.engine.settings) if self.coordinator.is_main_process else "")
            raise EndOfLadderError(end_message(worst, reports[worst], self.steps_down, advice, self._at(phase)))
        self._note(change, "redo")
        seen = reports[worst]["failure"]
        if self.coordinator.is_main_process:
            where = (worst, phase, self._at(phase), seen)
            log.warning("out of memory on rank %d in phase '%s' %s (%s): %s; redoing the same samples", *where, change)

    def _give_up_step(self, phase: str) -> NoReturn:
        """Some parameters have been updated in backward, others have not: all ranks go back to the last snapshot or checkpoint.

        Raises:
            EndOfLadderError: nobody would start them again.
        """
        seen = f"out of memory on rank {self.report['rank']} {self._at(phase)} ({self.report['failure']})"
        if not self.may_relaunch:
            raise EndOfLadderError(
                f"{seen}, when parameters had been updated in backward: the step cannot be made again, and no guard starts the processes"
                " anew. Go on from the last checkpoint with a smaller --per_device_train_batch_size, or without --optim_in_backward."
            )
        if self.coordinator.is_main_process:
            log.warning("%s, when parameters had been updated in backward: starting all ranks again", seen)
        self.coordinator.wait_for_everyone("relaunch")
        guard_line.relaunch({**self.report, "agreed": False, "at_s": time.time(), "step": self.current_step()})

    def _at(self, phase: str) -> str:
        """Where the run is, for messages: the step that failed, or the last one that was done."""
        if self.is_dry:
            return "before step 1"
        return f"at step {self.current_step() + (phase in ('step', 'update'))}"

    def _step_down_early(self) -> None:
        """Where the allocator frees and retries step after step, every step is slow and the next one may fail."""
        old = self.engine.settings
        new = next_settings(self.ladder, old, allowed=lambda settings: settings.param_offload == old.param_offload)
        if new is None or not self.engine.apply(new):
            return
        self.report = {"phase": "step", "rank": 0, "failure": "the allocator retried in two steps in a row"}
        self._note(describe_change(old, new), "early")
        log.warning("the allocator had to free and retry in two steps in a row: %s", describe_change(old, new))
        self.record()

    def _note(self, change: str, way: str) -> None:
        self.steps_down.append({**self.report, "change": change, "way": way})
        self.on_event("oom", **{name: self.report[name] for name in ("phase", "rank", "failure")}, change=change, way=way)

    def _lower_settings(self) -> str | None:
        """The next rung of the ladder, by what the rank with the least room saw; what changed, or None at its end.

        A rung that the engine cannot take in process is taken by starting all ranks again; without guards it is passed over.
        """
        old = self.engine.settings
        passed: set[MemorySettings] = set()

        def in_process(settings: MemorySettings) -> bool:
            return old.differing(settings) <= self.engine.in_process

        while (new := next_settings(self.ladder, old, self.seen, lambda settings: settings not in passed, in_process)) is not None:
            if self.engine.apply(new):
                return describe_change(old, new)
            if self.may_relaunch:
                self._relaunch_agreed(new, describe_change(old, new))
            passed.add(new)
        return None

    def _relaunch_agreed(self, new: MemorySettings, change: str) -> NoReturn:
        """All ranks are here: they leave together and come back with `new`."""
        self._note(change, "relaunch")
        if self.coordinator.is_main_process:
            log.warning(
                "out of memory on rank %d in phase '%s' %s (%s): %s; starting all ranks again",
                *(self.report["rank"], self.report["phase"], self._at(self.report["phase"]), self.report["failure"]),
                change,
            )
        self.record(new)
        restore_random_state(self.random_state, self.coordinator.device)  # of before the step: it is part of what is kept
        self.before_relaunch()
        self.coordinator.wait_for_everyone("relaunch")
        guard_line.relaunch({**self.report, "agreed": True, "at_s": time.time(), "step": self.current_step()})

    def _relaunch_alone(self, phase: str, error: BaseException) -> NoReturn:
        relaunch_alone(phase, error, self.coordinator, self.current_step())

    def _free(self) -> None:
        self.engine.reset_step()
        gc.collect()
        if self.coordinator.device.type == "cuda":
            torch.cuda.empty_cache()

    def record(self, now: MemorySettings | None = None) -> None:
        """Main process: writes `ladder.json`.

        Args:
            now: settings of the next life, where they are not those in force.
        """
        if self.folder is not None and self.ladder and self.coordinator.is_main_process:
            settings = now or self.engine.settings
            count = self.coordinator.num_processes
            write_ladder(self.folder, count, self.ladder, self.steps_down, settings, host_relief=self.host_relief)

    def dry_run(self, function: Callable[..., Any], *args: Any) -> None:
        """A step before step 1 on the longest samples there are: what does not fit shows now, and the ladder is taken now.

        Nothing is updated; gradients are dropped and random states restored.
        """
        if self.vote is None:
            return
        before = random_state(self.coordinator.device)
        self.is_dry = True
        updates = getattr(self.engine, "updates", None)
        with contextlib.nullcontext() if updates is None else updates.left_out():
            self.run("step", function, *args)
        self.is_dry = False
        self._free()
        restore_random_state(before, self.coordinator.device)


def end_message(rank: int, report: Mapping[str, Any], steps_down: Sequence[Mapping[str, Any]], advice: str = "", at: str = "") -> str:
    """What a run says when nothing is left to lower; `advice` is the planner's, with numbers, `at` says where the run was."""
    tried = "; ".join(str(step["change"]) for step in steps_down)
    others = report.get("others") or []
    sharing = f" Other processes hold memory of that card: {', '.join(others)}." if others else ""
    where = f" {at}" if at else ""
    return (
        f"out of memory on rank {rank}{where} with nothing left to lower: {report['failure']}. Allocated {report['allocated_gib']} GiB of"
        f" {report['limit_gib']} GiB.{sharing} Tried: {tried or 'nothing, the settings were the lowest'}."
        f"{advice} What helps: more GPUs with FSDP or ZeRO-3, offload, a shorter --block_size, --lora_r, --optim adamw_bf16 or adamw_8bit."
    )


def relaunch_alone(phase: str, error: BaseException, coordinator: Coordinator, step: int = 0) -> NoReturn:
    """Ends this rank, which ran out of memory where the others cannot be asked; its guard has all ranks started again."""
    report = memory_report(coordinator.device, str(error).splitlines()[0] if str(error) else type(error).__name__)
    if coordinator.device.type == "cuda" and not isinstance(error, torch.OutOfMemoryError) and "CPU" in f"{error} {type(error)}":
        report["memory"] = "host"
    keep_memory_snapshot(coordinator)
    at = f" at step {step + (phase in ('step', 'update'))}" if step else ""
    log.warning("out of memory in phase '%s'%s (%s): starting all ranks again", phase, at, report["failure"], extra={"all_ranks": True})
    guard_line.relaunch({"phase": phase, "agreed": False, "at_s": time.time(), "step": step, **report})


SNAPSHOT_VARIABLE = "HARNESS_OOM_SNAPSHOT"


def record_memory_history(folder: Path, coordinator: Coordinator) -> None:
    """From here on every out-of-memory leaves the allocator's history in `folder`, for https://pytorch.org/memory_viz."""
    if coordinator.device.type != "cuda":
        log.warning("--oom_snapshot: the history of allocations is kept for GPUs only")
        return
    os.environ[SNAPSHOT_VARIABLE] = str(folder)
    torch.cuda.memory._record_memory_history(max_entries=100_000)


def keep_memory_snapshot(coordinator: Coordinator) -> None:
    """Writes the allocator's history where it is recorded; the first one of a life, which is the one that matters."""
    folder = os.environ.pop(SNAPSHOT_VARIABLE, None)
    if folder is None:
        return
    path = Path(folder) / f"oom_snapshot_rank{coordinator.process_index}.pickle"
    try:
        torch.cuda.memory._dump_snapshot(str(path))
    except Exception as error:  # a full disk, or no memory for it: the run matters more
        log.warning("%s was not written: %s", path, error, extra={"all_ranks": True})
        return
    log.info("history of allocations: %s", path, extra={"all_ranks": True})


class _ThrashGuard:
    """Says, once a step, whether this rank's allocator had to free and retry in this step and the one before."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.num_retries = self.num_in_a_row = 0

    def __call__(self) -> bool:
        if self.device.type != "cuda":
            return False
        retries = int(torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0))
        self.num_in_a_row = self.num_in_a_row + 1 if retries > self.num_retries else 0
        self.num_retries = retries
        if self.num_in_a_row < 2:
            return False
        self.num_in_a_row = 0
        return True


def random_state(device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """torch's random states, on the host and on the device."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def restore_random_state(state: tuple[torch.Tensor, torch.Tensor | None], device: torch.device) -> None:
    """Undoes `random_state`."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
