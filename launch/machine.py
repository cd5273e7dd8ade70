"""What launchers need to know of this machine: its GPUs, cores and free ports. Standard library only."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

_NO_DEVICES = {"", "-1", "nodevfiles", "none", "void"}


def physical_gpus() -> list[str]:
    """UUIDs of the NVIDIA GPUs of this machine in index order; made-up names where only the device files are there."""
    smi = shutil.which("nvidia-smi")
    if smi:
        try:
            listing = subprocess.run([smi, "-L"], capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            listing = None
        if listing is not None and listing.returncode == 0:
            return re.findall(r"^GPU \d+:.*\(UUID: ([^)]+)\)", listing.stdout, flags=re.MULTILINE)
    return [f"device-{path.name}" for path in sorted(Path("/dev").glob("nvidia[0-9]*"))]


def visible_gpus(environ: Mapping[str, str], physical: list[str]) -> list[str]:
    """The GPUs a job may use, as indices or UUIDs, spelt as CUDA_VISIBLE_DEVICES spells them.

    Like CUDA, stops at the first entry that does not exist.
    """
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return [str(index) for index in range(len(physical))]
    if value.strip().lower() in _NO_DEVICES or not physical:
        return []
    devices: list[str] = []
    for entry in value.split(","):
        entry = entry.strip()
        exists = int(entry) < len(physical) if entry.isdigit() else entry.startswith(("GPU-", "MIG-"))
        if not exists:
            break
        devices.append(entry)
    return devices


def device_indices(devices: list[str], physical: list[str]) -> list[int] | None:
    """Indices of visible devices that may be spelt as (abbreviated) UUIDs; None where one of them has no index."""
    indices: list[int] = []
    for device in devices:
        matches = [int(device)] if device.isdigit() else [index for index, uuid in enumerate(physical) if uuid.startswith(device)]
        if len(matches) != 1:
            return None
        indices += matches
    return indices


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def port_is_free(port: int) -> bool:
    """Whether a server could listen on `port` on all addresses of this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a closed job's TIME_WAIT does not count
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


def is_this_machine(address: str) -> bool:
    """Whether `address` is one of this machine's own."""
    try:
        ip = socket.gethostbyname(address)
        with socket.socket() as probe:
            probe.bind((ip, 0))
    except OSError:
        return False
    return True
