"""Recognising out-of-memory, what a rank saw of it, and `ladder.json`: the settings a run has come down to."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from harness import rank_hook
from harness.checkpoint_files import write_json
from harness.ladder import MemorySettings, Rung
from harness.rank_hook import size_in
from harness.user_files import parse_json, read_text

LADDER_FILE = "ladder.json"


class EndOfLadderError(RuntimeError):
    """Nothing is left that would need less memory. Its text holds the allocator's, but it is the end and no new failure."""


def is_out_of_memory(error: BaseException) -> bool:
    """True for a GPU, library or host allocation that failed; False for every other error, sticky CUDA errors included."""
    return not isinstance(error, EndOfLadderError) and rank_hook.is_out_of_memory(error)


def memory_report(device: torch.device, failure: str) -> dict[str, Any]:
    """What this rank saw, in GiB: requested and allocated when it failed (from torch's message), and what it may use of its card."""
    allocated: float | None = size_in(failure, "Of the allocated memory")
    limit = None
    if device.type == "cuda":
        if allocated is None:
            allocated = torch.cuda.memory_allocated(device) / 2**30
        share = torch.cuda.get_per_process_memory_fraction(device)
        limit = round(share * torch.cuda.mem_get_info(device)[1] / 2**30, 3)
    return {
        "failure": failure,
        "requested_gib": size_in(failure, "Tried to allocate"),
        "allocated_gib": round(allocated or 0.0, 3),
        "limit_gib": limit,
        "others": _other_processes(device) if failure else [],
    }


def _other_processes(device: torch.device) -> list[str]:
    """Memory on this card that is not ours: "pid 123: 4.2 GiB"; empty where the driver does not say."""
    if device.type != "cuda":
        return []
    try:
        listing = str(torch.cuda.list_gpu_processes(device))
    except Exception:  # NVML may be missing or not loadable; the report goes on without
        return []
    found = re.findall(r"process +(\d+) uses +(\d+(?:\.\d+)?) MB", listing)
    return [f"pid {pid}: {float(mib) / 1024:.1f} GiB" for pid, mib in found if int(pid) != os.getpid()]


def _content(folder: Path) -> dict[str, Any]:
    try:
        content = parse_json(read_text(folder / LADDER_FILE))
        return content if isinstance(content, dict) else {}
    except (OSError, ValueError):
        return {}


def last_good_settings(folder: Path, num_processes: int) -> MemorySettings | None:
    """The settings that an earlier life of this run had come down to, on as many processes; None if it never had to."""
    return last_settings(folder, num_processes) if steps_down_so_far(folder, num_processes) else None


def last_settings(folder: Path, num_processes: int) -> MemorySettings | None:
    """The settings of the life before this one, on as many processes."""
    content = _content(folder)
    try:
        return MemorySettings.from_dict(content["now"]) if content["num_processes"] == num_processes else None
    except (KeyError, TypeError, ValueError):
        return None


def computed_ladder(folder: Path, num_processes: int) -> list[Rung]:
    """The ladder with the estimates that the life before this one went by; empty where it had none."""
    content = _content(folder)
    try:
        rungs = [Rung.from_dict(values) for values in content["ladder"]] if content["num_processes"] == num_processes else []
    except (KeyError, TypeError, ValueError):
        return []
    return rungs if rungs and all(rung.need_bytes is not None for rung in rungs) else []


def steps_down_so_far(folder: Path, num_processes: int) -> list[dict[str, Any]]:
    """The steps down of the lives before this one, oldest first."""
    content = _content(folder)
    steps = content.get("steps_down", [])
    if content.get("num_processes") != num_processes or not isinstance(steps, list):
        return []
    return [step for step in steps if isinstance(step, dict) and "change" in step]


def host_relief_so_far(folder: Path, num_processes: int) -> int:
    """How many steps the run has taken because the host's memory ran out."""
    content = _content(folder)
    relief = content.get("host_relief", 0)
    return max(0, int(relief)) if content.get("num_processes") == num_processes and isinstance(relief, int) else 0


def write_ladder(
    folder: Path,
    num_processes: int,
    ladder: Sequence[MemorySettings | Rung],
    steps_down: Sequence[dict[str, Any]],
    now: MemorySettings,
    *,
    host_relief: int = 0,
) -> None:
    """Writes `ladder.json` as a whole; called on one process."""
    content = {
        "num_processes": num_processes,
        "host_relief": host_relief,
        "ladder": [rung.to_dict() for rung in ladder],
        "steps_down": list(steps_down),
        "now": now.to_dict(),
    }
    write_json(folder / LADDER_FILE, content)
