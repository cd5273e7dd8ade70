"""Threads for an optimizer that runs on the host: torchrun and DeepSpeed's launcher leave each process one, however many cores there are.

    [harness] the optimizer on the host uses 16 threads a process (the launcher had set OMP_NUM_THREADS=1)

A number above one is somebody's choice and stays.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import MutableMapping

from harness.cgroups import usable_cores

log = logging.getLogger("harness")
VARIABLE = "OMP_NUM_THREADS"


def optimizer_threads(chosen: str | None, num_local_processes: int, num_cores: int) -> int | None:
    """Threads for each of a machine's processes; None where `chosen`, OMP_NUM_THREADS, is more than a launcher's one, or there are no more.

    Args:
        num_cores: that the processes of this machine may use together.
    """
    if chosen not in (None, "", "1"):
        return None
    num_threads = num_cores // max(1, num_local_processes)
    return num_threads if num_threads > 1 else None


def take_cores(num_local_processes: int, environ: MutableMapping[str, str] = os.environ) -> int | None:
    """Before DeepSpeed's CPU Adam is loaded or torch's runs on the host. Returns the number of threads where it changed.

    torch's own pool is told; the OpenMP that comes with DeepSpeed's operator may be another library, which reads the environment when it
    is loaded.
    """
    chosen = environ.get(VARIABLE)
    num_threads = optimizer_threads(chosen, num_local_processes, usable_cores())
    if num_threads is None:
        return None
    import torch

    environ[VARIABLE] = str(num_threads)
    torch.set_num_threads(num_threads)
    why = f"the launcher had set {VARIABLE}={chosen}" if chosen else f"{VARIABLE} was not set"
    log.info("the optimizer on the host uses %d threads a process (%s)", num_threads, why)
    return num_threads


def ask_cpu_once() -> threading.Thread | None:
    """DeepSpeed asks py-cpuinfo three times before its CPU Adam is there, and each answer takes a process of more than a second.

    From here on there is one answer, and the thread that is returned is already waiting for it. None where py-cpuinfo is missing.
    """
    try:
        import cpuinfo
    except ImportError:
        return None
    if not hasattr(cpuinfo.get_cpu_info, "cache_info"):
        one_at_a_time, ask = threading.Lock(), functools.cache(cpuinfo.get_cpu_info)

        @functools.wraps(ask)
        def answer() -> dict[str, object]:
            with one_at_a_time:
                return dict(ask())

        answer.cache_info = ask.cache_info  # type: ignore[attr-defined]
        cpuinfo.get_cpu_info = answer

    def wait() -> None:
        with contextlib.suppress(Exception):  # whoever needs the answer gets the exception
            cpuinfo.get_cpu_info()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread
