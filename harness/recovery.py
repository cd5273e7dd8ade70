"""What happens when memory runs out: all ranks agree, free, take the next rung of the ladder, and redo the same samples.

Every rank votes on the host before each collective of a step and once more before the update (harness.votes). A rank whose allocation
failed casts its next vote as "out of memory", so all ranks stop at the same place, whatever it is; no collective is left half done and
nobody waits for a rank that is gone. Then the step starts again from its first sample under smaller settings: same samples, same random
states, same loss curve.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from harness.coordination import Coordinator, StopFlag
from harness.engines.base import Engine
from harness.ladder import MemorySettings, Rung, SeenMemory, describe_change, next_settings
from harness.votes import PeerOutOfMemoryError, Vote, checker, make_vote

log = logging.getLogger("harness")
T = TypeVar("T")

# Messages of allocators other than torch's own that mean out of memory (their exceptions have no type of their own).
_OOM_MESSAGES = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "Cuda failure 'out of memory'",
    "Cuda failure 2 'out of memory'",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """True for a GPU, library or host allocation that failed; False for every other error, sticky CUDA errors included."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _OOM_MESSAGES)


class EndOfLadderError(RuntimeError):
    """Nothing is left that would need less memory."""


class Recovery:
    """Runs the phases of the loop.

    Args:
        ladder: settings that can be taken in process, fastest first, with estimates where they were computed; empty turns recovery off.
        folder: where `ladder.json` is written.
        on_event: log of metrics, main process.
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
    ) -> None:
        self.coordinator, self.stop, self.engine = coordinator, stop, engine
        self.ladder, self.folder, self.on_event = list(ladder), folder, on_event
        self.stop_agreed = False
        self.steps_down: list[dict[str, Any]] = []
        self.seen: SeenMemory | None = None
        # What each phase that can be redone lowers; each returns what changed, or None where nothing is left.
        self.lower: dict[str, Callable[[], str | None]] = {"step": self._lower_settings}
        self.vote: Vote | None = None
        self.check: Callable[[], None] = lambda: None
        if self.ladder and getattr(engine, "resettable", True):
            self.vote = make_vote(coordinator)
            self.check = checker(self.vote)
            engine.install_votes(self.check)
        elif self.ladder:
            log.warning("an out-of-memory ends this run: steps with offload to host memory cannot be redone in process")

    def run(self, phase: str, function: Callable[..., T], *args: Any) -> T:
        """Runs `function(*args)`; where it runs out of memory, lowers something and runs it again.

        After the phase "step" all ranks have agreed to commit it. Updates and saves change state that cannot be redone: there an error
        goes on to the caller.

        Raises:
            EndOfLadderError: nothing is left to lower.
        """
        if self.vote is None or phase not in self.lower:
            done = function(*args)
            if phase == "step":
                self._agree_to_stop()
            return done
        while True:
            random_state = _random_state(self.coordinator.device)
            result, failure = self._attempt(function, *args)
            if failure is None:
                if phase == "step":
                    self._agree_to_stop()
                return result  # type: ignore[return-value]
            started = time.monotonic()
            self._step_down(phase, failure)
            _restore_random_state(random_state, self.coordinator.device)
            self.steps_down[-1]["seconds"] = round(time.monotonic() - started, 3)
            self._record()

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
        if not voted and self.vote(failure is not None) and failure is None:
            failure = ""  # the commit vote: another rank ran out of memory after this one's last collective
        return (None, failure) if failure is not None else (result, None)

    def _agree_to_stop(self) -> None:
        """MAX over ranks of [stop asked]: all act on a signal at the same step."""
        if self.coordinator.max([float(bool(self.stop))], "commit vote")[0] and not self.stop_agreed:
            self.stop_agreed = True
            log.warning("stop requested%s: saving after this step", f" by {self.stop.signal_name}" if self.stop else " on another rank")

    def _step_down(self, phase: str, failure: str) -> None:
        """Frees what the failed try left, on all ranks, and lowers what the phase allows."""
        reports = self.coordinator.gather(_memory_report(self.coordinator.device, failure))
        worst = worst_report(reports)
        self.seen = seen_memory(reports[worst])
        self._free()
        change = self.lower[phase]()
        if change is None:
            raise EndOfLadderError(self._end_message(worst, reports[worst]))
        self.steps_down.append({"phase": phase, "rank": worst, "change": change, **reports[worst]})
        seen = reports[worst]["failure"]
        if self.coordinator.is_main_process:
            log.warning("out of memory on rank %d in phase '%s' (%s): %s; redoing the same samples", worst, phase, seen, change)
        self.on_event("oom", phase=phase, rank=worst, failure=seen, change=change)

    def _lower_settings(self) -> str | None:
        """The next rung of the ladder, by what the rank with the least room saw; what changed, or None at its end."""
        old = self.engine.settings
        new = next_settings(self.ladder, old, self.seen)
        if new is None or not self.engine.apply(new):
            return None
        return describe_change(old, new)

    def _free(self) -> None:
        self.engine.reset_step()
        gc.collect()
        if self.coordinator.device.type == "cuda":
            torch.cuda.empty_cache()

    def _end_message(self, rank: int, report: dict[str, Any]) -> str:
        tried = "; ".join(str(step["change"]) for step in self.steps_down)
        return (
            f"out of memory on rank {rank} with nothing left to lower: {report['failure']}. Allocated {report['allocated_gib']} GiB of"
            f" {report['limit_gib']} GiB. Tried: {tried or 'nothing, the settings were the lowest'}."
            " What helps: more GPUs with FSDP or ZeRO-3, offload, a shorter --block_size, --lora_r, or --optim adamw_8bit."
        )

    def _record(self) -> None:
        if self.folder is None or not self.coordinator.is_main_process:
            return
        content = {
            "num_processes": self.coordinator.num_processes,
            "ladder": [rung.to_dict() for rung in self.ladder],
            "steps_down": self.steps_down,
            "now": self.engine.settings.to_dict(),
        }
        temporary = self.folder / "ladder.json.tmp"
        temporary.write_text(json.dumps(content, indent=1), encoding="utf-8")
        os.replace(temporary, self.folder / "ladder.json")

    def dry_run(self, function: Callable[..., Any], *args: Any) -> None:
        """A step before step 1 on the longest samples there are: what does not fit shows now, and the ladder is taken now.

        Nothing is updated; gradients are dropped and random states restored.
        """
        if self.vote is None:
            return
        random_state = _random_state(self.coordinator.device)
        self.run("step", function, *args)
        self._free()
        _restore_random_state(random_state, self.coordinator.device)


def _random_state(device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _restore_random_state(state: tuple[torch.Tensor, torch.Tensor | None], device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)


_GIB_OF = {"KiB": 2**-20, "MiB": 2**-10, "GiB": 1.0}


def _size_in(text: str, pattern: str) -> float | None:
    """A size in torch's message, GiB."""
    match = re.search(pattern + r" ([\d.]+) (KiB|MiB|GiB)", text)
    return round(float(match.group(1)) * _GIB_OF[match.group(2)], 3) if match else None


def _memory_report(device: torch.device, failure: str) -> dict[str, Any]:
    """What this rank saw, in GiB: requested and allocated when it failed (from torch's message), and what it may use of its card."""
    allocated: float | None = _size_in(failure, "Of the allocated memory")
    limit = None
    if device.type == "cuda":
        if allocated is None:
            allocated = torch.cuda.memory_allocated(device) / 2**30
        share = torch.cuda.get_per_process_memory_fraction(device)
        limit = round(share * torch.cuda.mem_get_info(device)[1] / 2**30, 3)
    return {
        "failure": failure,
        "requested_gib": _size_in(failure, "Tried to allocate"),
        "allocated_gib": round(allocated or 0.0, 3),
        "limit_gib": limit,
    }


def worst_report(reports: Sequence[dict[str, Any]]) -> int:
    """The rank that lacked the most: of those whose allocation failed, the one furthest over its limit; 0 where none says."""

    def lack(rank: int) -> float:
        each = reports[rank]
        return float(each["allocated_gib"] + (each["requested_gib"] or 0.0) - (each["limit_gib"] or 0.0))

    return max((rank for rank, each in enumerate(reports) if each["failure"]), key=lack, default=0)


def seen_memory(report: dict[str, Any]) -> SeenMemory:
    """A rank's report in the ladder's terms."""

    def num_bytes(name: str) -> float | None:
        return report[name] * 2**30 if report[name] else None

    return SeenMemory(num_bytes("limit_gib"), num_bytes("requested_gib"), num_bytes("allocated_gib"))


def last_good_settings(folder: Path, num_processes: int) -> MemorySettings | None:
    """The settings that an earlier life of this run had come down to, on as many processes; None if it never had to."""
    try:
        content = json.loads((folder / "ladder.json").read_text(encoding="utf-8"))
        return MemorySettings.from_dict(content["now"]) if content["num_processes"] == num_processes else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
