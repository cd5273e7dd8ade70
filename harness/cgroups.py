"""Limits of host memory and cores that containers and schedulers set, and the kernel's kills, for cgroup v2 and v1. Standard library only.

Docker and Kubernetes show a container its own group as the root of the tree; Slurm and systemd leave a job in a folder below it. So the
group of this process and every one above it counts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


@dataclasses.dataclass(frozen=True)
class MemoryGroup:
    """One group with a limit, bytes. `free_bytes` counts what the page cache would give back."""

    limit_bytes: int
    free_bytes: int


def memory_folders(root: Path = ROOT, own: Path = OWN) -> Iterator[Path]:
    """Folders of the groups that this process's memory is counted in, the innermost first; those that can be seen here."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "memory" if controllers else root
        inner = base / path.lstrip("/")
        # A container may be told its path in the host's tree, and see only its own: the root of what it sees then.
        yield from (folder for folder in (inner, *inner.parents) if folder.is_relative_to(base) and folder.is_dir())


def memory_groups(root: Path = ROOT, own: Path = OWN) -> list[MemoryGroup]:
    """Those of the folders that have a limit."""
    groups = []
    for folder in memory_folders(root, own):
        for limit_name, used_name in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            with contextlib.suppress(OSError, ValueError):  # "max" where there is none
                limit, used = int((folder / limit_name).read_text()), int((folder / used_name).read_text())
                words = (folder / "memory.stat").read_text().split()
                cached = int(dict(zip(words[::2], words[1::2], strict=False)).get("inactive_file", 0))
                groups.append(MemoryGroup(limit, max(0, limit - used + cached)))
    return groups


def num_kernel_kills(root: Path = ROOT, own: Path = OWN) -> int:
    """Processes of this process's group that the kernel has killed for memory so far; 0 where it does not say."""
    for folder in memory_folders(root, own):
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError, ValueError):
                words = (folder / name).read_text().split()
                counts = dict(zip(words[::2], words[1::2], strict=False))
                if "oom_kill" in counts:
                    return int(counts["oom_kill"])
    return 0


def usable_cores(root: Path = ROOT) -> int:
    """Cores this process may use: its CPU affinity, and the quota of its container (cgroup v2, then v1)."""
    cores = len(os.sched_getaffinity(0))
    for quota_file, period_file in ((root / "cpu.max", None), (root / "cpu/cpu.cfs_quota_us", root / "cpu/cpu.cfs_period_us")):
        try:
            fields = quota_file.read_text().split() + (period_file.read_text().split() if period_file else [])
        except OSError:
            continue
        if len(fields) == 2 and fields[0].isdigit() and fields[1].isdigit() and int(fields[1]) > 0:
            cores = min(cores, max(1, math.ceil(int(fields[0]) / int(fields[1]))))
            break
    return cores
