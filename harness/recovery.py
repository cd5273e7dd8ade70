"""What happens around a phase of the loop: agreement of all ranks before weights change, and what an out-of-memory means."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from harness.coordination import Coordinator, StopFlag

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


class Recovery:
    """Runs the phases of the loop.

    After the forward and backward of every step all ranks vote on the host whether to commit it. The vote carries requests to stop, so
    that all ranks act on a signal at the same step.
    """

    def __init__(self, coordinator: Coordinator, stop: StopFlag) -> None:
        self.coordinator, self.stop = coordinator, stop
        self.stop_agreed = False

    def run(self, phase: str, function: Callable[..., T], *args: Any) -> T:
        """Runs `function(*args)`; in the phase "step" the ranks then agree to commit it."""
        result = function(*args)
        if phase == "step":
            self.commit_vote()
        return result

    def commit_vote(self) -> None:
        """MAX over ranks of [stop asked]; nothing of the step may be undone afterwards."""
        if self.coordinator.max([float(bool(self.stop))], "commit vote")[0] and not self.stop_agreed:
            self.stop_agreed = True
            log.warning("stop requested%s: saving after this step", f" by {self.stop.signal_name}" if self.stop else " on another rank")
