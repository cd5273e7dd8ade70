"""Faults raised inside a rank, at the beginning of an optimizer step.

    HARNESS_TEST_FAULT="hang:1:6"     rank 1 sleeps in step 6, for good

Each word is kind:rank:step; see `Fault` for the kinds. They are raised in the first life of a process only.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

SLOW_S = 0.25
JUMP_S = 86_400.0


class Fault:
    """One word.

    Kinds:
        hang: stands still in Python, outside of any collective.
        slow: takes `SLOW_S` longer, in this step and all after it.
        nan: the model's output is NaN in this step.
        loader: a worker of the data loader is killed.
        forward, back: the wall clock jumps by a day from here on.
        abort: the process aborts, as NCCL's watchdog lets it.
    """

    def __init__(self, word: str) -> None:
        self.kind, rank, step = word.split(":")
        self.rank, self.step = int(rank), int(step)

    def raise_in(self, trainer: Any, step: int) -> None:
        if step < self.step or (step > self.step and self.kind not in ("slow", "nan")):
            return
        if self.kind == "hang":
            time.sleep(600)
        elif self.kind == "slow":
            time.sleep(SLOW_S)
        elif self.kind == "nan":
            self._spoil(trainer.engine.module, step == self.step)
        elif self.kind == "loader":
            import multiprocessing

            (worker,) = multiprocessing.active_children()
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGKILL)
        elif self.kind in ("forward", "back"):
            now, jump_s = time.time, JUMP_S if self.kind == "forward" else -JUMP_S
            time.time = lambda: now() + jump_s
        elif self.kind == "abort":
            os.abort()

    def _spoil(self, module: Any, is_on: bool) -> None:
        if is_on:
            embedding = module.get_input_embeddings()
            self.handle = embedding.register_forward_hook(lambda module, arguments, output: output * float("nan"))
        elif self.handle is not None:
            self.handle.remove()
            self.handle = None

    handle: Any = None


def install(text: str) -> None:
    """Lets the loop raise this rank's faults."""
    from harness import guard_line
    from harness.trainer import Trainer

    own = [fault for fault in map(Fault, text.split()) if fault.rank == int(os.environ.get("RANK", "0"))]
    if guard_line.attempt() or not own:
        return
    forward_backward = Trainer._forward_backward

    def with_faults(trainer: Any, *args: Any) -> Any:
        for fault in own:
            fault.raise_in(trainer, trainer.state.step + 1)
        return forward_backward(trainer, *args)

    Trainer._forward_backward = with_faults  # type: ignore[method-assign]
