"""A step in which memory runs out at a named moment, for tests of what puts an engine back afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


def fails(block: Any, micro_batches: Iterable[Callable[[], object]], moment: str) -> bool:
    """Runs the micro-batches of a step; True when the wanted failure came.

    Args:
        block: the module whose forward, recompute and backward may fail.
        micro_batches: each runs one, forward and backward.
        moment: "forward of micro-batch 2", and so with "recompute", "backward" and "end"; "" for none.
    """
    number = 0

    def fail(kind: str) -> None:
        if moment == f"{kind} of micro-batch {number}":
            raise torch.OutOfMemoryError("injected")

    def forward(*_: Any) -> None:
        fail("recompute" if torch._C._current_graph_task_id() != -1 else "forward")

    hooks = [block.register_forward_pre_hook(forward), block.register_full_backward_hook(lambda *_: fail("backward"))]
    try:
        for number, run in enumerate(micro_batches, 1):  # noqa: B007 - `fail` reads it
            run()
            fail("end")
    except torch.OutOfMemoryError:
        return True
    finally:
        for hook in hooks:
            hook.remove()
    return False
