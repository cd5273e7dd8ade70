"""Where the time of a few steps goes: a trace per rank, and one page that says how much of it computed, communicated or did nothing.

--profile_steps 10-12      out/profile/trace-0.json.gz, ... (open in https://ui.perfetto.dev), out/profile/summary.txt
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger("harness")

Interval = tuple[float, float]
_NUM_ROWS = 20


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points in time without overlaps, in order."""
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """How long they last, overlaps once."""
    return sum(stop - start for start, stop in union(intervals))


@dataclasses.dataclass(frozen=True)
class Shares:
    """Milliseconds of a GPU's time, which add up to the total.

    Attributes:
        total: from the first kernel to the end of the last.
        compute: some kernel computes, whatever else goes on.
        exposed_communication: collectives run and nothing computes.
        exposed_copies: copies and memory sets run, and neither of the others.
        idle: nothing runs: the GPU waits for the host.
        communication: all of the collectives, hidden behind computing or not.
    """

    total: float
    compute: float
    exposed_communication: float
    exposed_copies: float
    idle: float
    communication: float


def shares(compute: list[Interval], communication: list[Interval], copies: list[Interval]) -> Shares | None:
    """What a GPU's time went to, from the intervals in which each kind ran, in milliseconds. None where nothing ran."""
    everything = union([*compute, *communication, *copies])
    if not everything:
        return None
    computing = length(compute)
    communicating = length([*compute, *communication])
    busy = length(everything)
    total = everything[-1][1] - everything[0][0]
    return Shares(total, computing, communicating - computing, busy - communicating, total - busy, length(communication))


def kind_of(name: str) -> str:
    """ "communication", "copies" or "compute", by the name of what ran on the GPU."""
    lower = name.lower()
    if "nccl" in lower:
        return "communication"
    return "copies" if lower.startswith(("memcpy", "memset")) else "compute"


class StepProfiler:
    """Records the steps it was asked for.

    Args:
        steps: "10-12" or "10"; optimizer steps, the first is 1.
        folder: of the traces and the summary.
    """

    def __init__(self, steps: str, folder: Path, process_index: int, device: torch.device) -> None:
        first, _, last = steps.partition("-")
        self.first, self.last = int(first), int(last or first)
        self.folder, self.process_index, self.device = folder, process_index, device
        self.profile: Any = None

    def before(self, step: int) -> None:
        """Called before optimizer step `step`."""
        if step != self.first:
            return
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self.device.type == "cuda" else [])
        self.profile = profile(activities=activities)
        self.profile.__enter__()

    def after(self, step: int) -> None:
        """Called after optimizer step `step`; waits for the device and writes after the last one."""
        if self.profile is None or step != self.last:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.profile.__exit__(None, None, None)
        profile, self.profile = self.profile, None
        self.folder.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(self.folder / f"trace-{self.process_index}.json.gz"))
        if self.process_index == 0:
            path = self.folder / "summary.txt"
            path.write_text(self.summary(profile), encoding="utf-8")
            log.info("profile of steps %d to %d: %s", self.first, self.last, path)

    def summary(self, profile: Any) -> str:
        """One page: the GPU's time by kind, then what took most of it."""
        ran: dict[str, list[Interval]] = {"compute": [], "communication": [], "copies": []}
        for event in profile.events():
            if event.device_type == torch.autograd.DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
                ran[kind_of(event.name)].append((event.time_range.start / 1000, event.time_range.end / 1000))
        found = shares(**ran)
        steps = self.last - self.first + 1
        lines = [f"steps {self.first} to {self.last}, rank {self.process_index}, {self.device.type}; milliseconds a step"]
        if found is not None:
            lines += [
                f"{name.replace('_', ' '):24s}{value / steps:10.2f}{100 * value / found.total:8.1f} %"
                for name, value in dataclasses.asdict(found).items()
            ]
        key = "self_device_time_total" if found is not None else "self_cpu_time_total"
        averages = profile.key_averages()
        averages[:] = [each for each in averages if each.key != "Command Buffer Full"]  # the host's waits, counted as a kernel's
        lines += ["", averages.table(sort_by=key, row_limit=_NUM_ROWS, max_name_column_width=60)]
        return "\n".join(lines) + "\n"
