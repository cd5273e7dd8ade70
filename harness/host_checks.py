"""The host that a job runs on: memory, /dev/shm, limits, disk, environment variables. Imports no torch, needs no GPU."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import socket
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from harness.findings import Finding, Severity

GIB = 2**30
MIB = 2**20
_MIN_SHM_BYTES = GIB  # NCCL takes some 30 MiB per pair of GPUs, loader workers one batch each
_MIN_OPEN_FILES = 4096
_MIN_FREE_DISK_BYTES = 10 * GIB
_SLOW_DISK_BYTES_PER_S = 100 * MIB


def size_text(num_bytes: float) -> str:
    """64 MiB, 1.5 GiB."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.0f} MiB"


def check_shm(total_bytes: int, num_gpus: int) -> list[Finding]:
    """/dev/shm holds the batches of loader workers and NCCL's buffers: too little of it ends in a bus error.

    Args:
        total_bytes: its size; 0: there is none.
    """
    if total_bytes >= _MIN_SHM_BYTES:
        return []
    severity: Severity = "error" if num_gpus > 1 else "warning"
    message = f"has {size_text(total_bytes)}; NCCL and data loader workers die of a bus error when it is full"
    fix = "docker: --ipc=host or --shm-size=8g; Kubernetes: an emptyDir volume with medium Memory on /dev/shm"
    return [Finding(severity, "/dev/shm", message, fix)]


def check_host_memory(total_bytes: int, available_bytes: int, gpu_memory_bytes: int) -> list[Finding]:
    """Loading and checkpoints pass through host memory; offload needs as much as it moves."""
    findings = []
    if available_bytes < 4 * GIB:
        findings.append(Finding("warning", "host memory", f"only {size_text(available_bytes)} of {size_text(total_bytes)} are available"))
    if gpu_memory_bytes and total_bytes < gpu_memory_bytes / 2:
        message = f"{size_text(total_bytes)} for {size_text(gpu_memory_bytes)} of GPU memory: offload to host memory will not go far"
        findings.append(Finding("info", "host memory", message, "ask for more memory for the container"))
    return findings


def check_limits(open_files: int, locked_bytes: int, num_gpus: int) -> list[Finding]:
    """ulimits. -1: unlimited.

    Args:
        open_files: soft limit of open files.
        locked_bytes: soft limit of locked memory.
    """
    findings = []
    if 0 <= open_files < _MIN_OPEN_FILES:
        message = f"allows {open_files} open files; loader workers and many shards need more"
        findings.append(Finding("warning", "ulimit -n", message, "ulimit -n 65536, or docker run --ulimit nofile=65536"))
    if num_gpus and 0 <= locked_bytes < 64 * MIB:
        message = f"allows {locked_bytes // 1024} KiB of locked memory; InfiniBand and pinned buffers need more"
        findings.append(Finding("warning", "ulimit -l", message, "ulimit -l unlimited, or docker run --ulimit memlock=-1"))
    return findings


def check_disk(folder: str, free_bytes: int, free_inodes: int, write_bytes_per_s: float | None) -> list[Finding]:
    """Free space and speed where the run is written.

    Args:
        write_bytes_per_s: measured with fsync; None: it could not be written to.
    """
    findings = []
    if write_bytes_per_s is None:
        findings.append(Finding("error", folder, "cannot be written to", "choose another --output_dir"))
    elif write_bytes_per_s < _SLOW_DISK_BYTES_PER_S:
        minutes = 96e9 / write_bytes_per_s / 60
        message = f"takes {write_bytes_per_s / MIB:.0f} MiB/s: a checkpoint of an 8B model (96 GB) would take {minutes:.0f} min"
        findings.append(Finding("warning", folder, message, "write to a local or parallel file system"))
    if free_bytes < _MIN_FREE_DISK_BYTES:
        message = f"has {size_text(free_bytes)} free; a checkpoint takes 12 to 16 bytes per parameter"
        findings.append(Finding("warning", folder, message, "free space, or choose another --output_dir"))
    if 0 <= free_inodes < 10_000:
        findings.append(Finding("warning", folder, f"can hold only {free_inodes} more files (inodes)"))
    return findings


# Variable -> (value that matters or None for any, severity, what it does).
_VARIABLES: dict[str, tuple[str | None, Severity, str]] = {
    "CUDA_LAUNCH_BLOCKING": ("1", "warning", "makes every kernel wait: for debugging only"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("1", "warning", "turns the caching allocator off: very slow"),
    "NCCL_P2P_DISABLE": ("1", "warning", "keeps GPUs from talking to each other directly, over NVLink too"),
    "NCCL_SHM_DISABLE": ("1", "warning", "sends traffic within a node over the network"),
    "NCCL_IB_DISABLE": ("1", "info", "turns InfiniBand off"),
    "NCCL_DEBUG": ("TRACE", "info", "writes a great deal"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "warning", "checks every collective with another one: slow"),
    "RANK": (None, "warning", "is left over from a launcher: a plain start would wait for other processes"),
    "WORLD_SIZE": (None, "warning", "is left over from a launcher: a plain start would wait for other processes"),
    "LOCAL_RANK": (None, "warning", "is left over from a launcher"),
    "MASTER_ADDR": (None, "warning", "is left over from a launcher"),
    "MASTER_PORT": (None, "warning", "is left over from a launcher: the next job would take this port"),
}


def check_environment(environ: Mapping[str, str], interfaces: Collection[str]) -> list[Finding]:
    """Variables that make a job slow, stop it, or belong to another one.

    Args:
        interfaces: names of this machine's network interfaces.
    """
    findings = []
    for name, (value, severity, effect) in _VARIABLES.items():
        if name in environ and (value is None or environ[name].upper() == value):
            findings.append(Finding(severity, f"{name}={environ[name]}", effect, f"unset {name}" if severity == "warning" else ""))
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if name in environ and not _matches_interface(environ[name], interfaces):
            message = f"names no network interface of this machine ({', '.join(sorted(interfaces))})"
            findings.append(Finding("error", f"{name}={environ[name]}", message, f"unset {name}, or name one that exists"))
    if "PYTORCH_CUDA_ALLOC_CONF" in environ and "PYTORCH_ALLOC_CONF" in environ:
        findings.append(Finding("warning", "PYTORCH_CUDA_ALLOC_CONF", "and PYTORCH_ALLOC_CONF are both set", "keep PYTORCH_ALLOC_CONF"))
    return findings


def _matches_interface(wanted: str, interfaces: Collection[str]) -> bool:
    """NCCL's rules: a list of prefixes; "^" excludes them, "=" asks for the whole name."""
    exclude = wanted.startswith("^")
    exact = "=" in wanted[:2]
    names = [name.strip() for name in wanted.lstrip("^=").split(",") if name.strip()]
    hits = {interface for interface in interfaces for name in names if (interface == name if exact else interface.startswith(name))}
    return bool(set(interfaces) - hits) if exclude else bool(hits)


def check_host_name(name: str, resolve: Callable[[str], Any]) -> list[Finding]:
    """torchrun and gloo look up the host's own name.

    Args:
        resolve: raises OSError for a name that is not known.
    """
    try:
        resolve(name)
    except OSError:
        message = "this host's own name does not resolve: torchrun and gloo may hang at start"
        return [Finding("warning", f"hostname {name}", message, f"add '127.0.0.1 {name}' to /etc/hosts, or set GLOO_SOCKET_IFNAME=lo")]
    return []


def write_speed(folder: Path, num_bytes: int = 128 * MIB, limit_s: float = 5.0) -> float | None:
    """Bytes per second written to a file in the folder and flushed to the disk; None if that fails. Leaves nothing behind."""
    block = os.urandom(4 * MIB)  # random, because some file systems compress
    path = folder / f".write-speed-{os.getpid()}"
    written, started = 0, time.monotonic()
    try:
        with open(path, "wb") as file:
            while written < num_bytes and time.monotonic() - started < limit_s:
                file.write(block)
                written += len(block)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        return None
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    return written / max(time.monotonic() - started, 1e-9)


def existing_parent(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def file_system(folder: Path, mounts: str) -> str:
    """Type of the file system that holds the folder, from the text of /proc/mounts: ext4, nfs, overlay, ..."""
    best, kind = "", "unknown"
    for line in mounts.splitlines():
        parts = line.split()
        if len(parts) < 3:
            continue
        mount = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), parts[1])
        inside = str(folder) == mount or str(folder).startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, parts[2]
    return kind


def check_host(output_dir: Path, num_gpus: int, gpu_memory_bytes: int, memory_limit_bytes: int) -> tuple[dict[str, Any], list[Finding]]:
    """Everything above on this machine.

    Args:
        memory_limit_bytes: host memory that this process may use, the container's limit included.

    Returns:
        Facts, and what there is to say.
    """
    import psutil

    available = min(psutil.virtual_memory().available, memory_limit_bytes)
    try:
        shm = os.statvfs("/dev/shm")
        shm_bytes = shm.f_blocks * shm.f_frsize
    except OSError:
        shm_bytes = 0
    open_files, locked = resource.getrlimit(resource.RLIMIT_NOFILE)[0], resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    folder = existing_parent(output_dir)
    disk = os.statvfs(folder)
    free_inodes = disk.f_favail if disk.f_files else -1  # 0 files in all: the file system does not count them
    speed = write_speed(folder)
    try:
        mounts = Path("/proc/mounts").read_text(encoding="utf-8")
    except OSError:
        mounts = ""
    facts = {
        "host_memory_gib": round(memory_limit_bytes / GIB, 1),
        "host_memory_available_gib": round(available / GIB, 1),
        "swap_gib": round(psutil.swap_memory().total / GIB, 1),
        "num_cpus": len(os.sched_getaffinity(0)),
        "shm_gib": round(shm_bytes / GIB, 3),
        "open_files": open_files,
        "locked_memory_bytes": locked,
        "output_folder": str(folder),
        "file_system": file_system(folder, mounts),
        "disk_free_gib": round(disk.f_bavail * disk.f_frsize / GIB, 1),
        "disk_write_mib_per_s": None if speed is None else round(speed / MIB),
    }
    findings = check_shm(shm_bytes, num_gpus)
    findings += check_host_memory(memory_limit_bytes, available, gpu_memory_bytes)
    findings += check_limits(open_files, locked, num_gpus)
    findings += check_disk(str(folder), disk.f_bavail * disk.f_frsize, free_inodes, speed)
    findings += check_environment(os.environ, set(psutil.net_if_addrs()))
    findings += check_host_name(socket.gethostname(), lambda name: socket.getaddrinfo(name, None))
    return facts, findings
