"""What this machine has, found without torch: cards through NVML, host memory through psutil and the container's limit."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from harness import cgroups
from harness.findings import is_count

GIB = 1024**3


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One card that the job may use.

    Attributes:
        name: as the driver calls it.
        memory_bytes: its whole memory.
        compute_capability: (major, minor); bf16 needs 8.0.
    """

    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Machine:
    """What one machine offers to a job.

    Attributes:
        gpus: the visible cards, in order; empty on a machine without.
        num_cpus: cores this process may run on.
        host_memory_bytes: memory of the host, or the container's limit where that is lower.
        cpu_has_fp16: the CPU computes in fp16, without which DeepSpeed refuses fp16 where there is no card.
    """

    gpus: tuple[Gpu, ...] = ()
    num_cpus: int = 1
    host_memory_bytes: int = 0
    cpu_has_fp16: bool = False

    @property
    def supports_bf16(self) -> bool:
        """Whether every card computes in bf16 natively. Machines without a card do it in software."""
        return all(gpu.compute_capability >= (8, 0) for gpu in self.gpus)

    @property
    def min_gpu_memory_bytes(self) -> int:
        """Memory of the smallest card; 0 without cards."""
        return min((gpu.memory_bytes for gpu in self.gpus), default=0)


def detect_machine(environ: Mapping[str, str] | None = None) -> Machine:
    """Looks at this machine. Never fails: what cannot be found out is absent or 0."""
    import psutil

    environ = os.environ if environ is None else environ
    return Machine(
        gpus=_gpus(environ),
        num_cpus=len(os.sched_getaffinity(0)),
        host_memory_bytes=min([psutil.virtual_memory().total, *(group.limit_bytes for group in cgroups.memory_groups())]),
        cpu_has_fp16=_cpu_has_fp16(),
    )


def _cpu_has_fp16() -> bool:
    """oneDNN computes in fp16 on CPUs with AVX512-FP16, or with AVX-NE-CONVERT."""
    try:
        flags = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "").split()
    except OSError:
        return False
    return "avx512_fp16" in flags or "avx_ne_convert" in flags


def free_host_bytes() -> int:
    """Memory that a job on this host may still take: what the machine has free, or what is left of the container's limit."""
    import psutil

    return min([int(psutil.virtual_memory().available), *(group.free_bytes for group in cgroups.memory_groups())])


def _gpus(environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no driver, no NVML, no package: no card that we could use
        return ()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        cards = []
        for handle in handles:
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
            name = pynvml.nvmlDeviceGetName(handle)
            memory = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
            cards.append(Gpu(name if isinstance(name, str) else name.decode(), memory, (major, minor)))
    except pynvml.NVMLError:
        return ()
    finally:
        pynvml.nvmlShutdown()
    return tuple(visible(cards, environ.get("CUDA_VISIBLE_DEVICES")))


def visible(cards: list[Gpu], visible_devices: str | None) -> list[Gpu]:
    """The cards that CUDA_VISIBLE_DEVICES leaves, in its order; like CUDA, it stops at the first number that does not exist.

    Names (GPU-..., MIG-...) are counted, not resolved: the first cards stand for them.
    """
    if visible_devices is None:
        return cards
    chosen: list[Gpu] = []
    for word in (part.strip() for part in visible_devices.split(",")):
        if word.startswith(("GPU-", "MIG-")) and len(chosen) < len(cards):
            chosen.append(cards[len(chosen)])
        elif is_count(word) and int(word) < len(cards):
            chosen.append(cards[int(word)])
        else:
            break
    return chosen


def can_compile() -> bool:
    """Whether DeepSpeed can build its CPU Adam, which it does when it is first used."""
    return bool(shutil.which("ninja") and (shutil.which("g++") or shutil.which("c++")))
