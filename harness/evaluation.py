"""Token-weighted loss and perplexity over the evaluation set: only sums travel between ranks."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from harness.batches import MicroBatch
from harness.coordination import Coordinator
from harness.source_losses import SourceLosses

log = logging.getLogger("harness")


class Evaluator:
    """Evaluates when it is due.

    Args:
        batches: makes this rank's evaluation batches of a given size; the same number on every rank.
        batch_size: samples of a batch.
        eval_loss: the engine's.
        every_steps: interval in optimizer steps; 0 never.
        on_result: called with (metrics) after each evaluation.
        sources: of a mixture, whose losses are told one by one; None without.
        dtype: that evaluations compute in, where it is another than training's.
        half: that they may change to when memory runs out; None where training computes in it already.
    """

    def __init__(
        self,
        batches: Callable[[int], Iterable[MicroBatch]],
        eval_loss: Callable[[MicroBatch], torch.Tensor],
        coordinator: Coordinator,
        *,
        batch_size: int,
        every_steps: int,
        on_result: Callable[[dict[str, float], Any], None],
        sources: SourceLosses | None = None,
        dtype: torch.dtype | None = None,
        half: torch.dtype | None = None,
    ) -> None:
        self.batches, self.eval_loss, self.coordinator = batches, eval_loss, coordinator
        self.batch_size, self.every_steps, self.on_result = batch_size, every_steps, on_result
        self.sources, self.dtype, self.half = sources, dtype, half
        self.last_step = -1
        # Called before the ranks add up: stops where another one ran out of memory and will not come.
        self.check: Callable[[], None] = lambda: None

    def lower(self) -> str | None:
        """Halves the batch after an out-of-memory, then computes in half precision; what changed, or None where nothing is left.

        Training is not touched.
        """
        if self.batch_size > 1:
            old, self.batch_size = self.batch_size, self.batch_size // 2
            return f"per_device_eval_batch_size {old} -> {self.batch_size}"
        if self.dtype is None and self.half is not None:
            self.dtype = self.half
            return f"evaluation in {str(self.half).removeprefix('torch.')}"
        return None

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        """Products in half precision where that was asked for, or memory asks for it: the activations of a float32 run are halved."""
        return contextlib.nullcontext() if self.dtype is None else torch.autocast(self.coordinator.device.type, self.dtype)

    def maybe_run(self, state: Any) -> None:
        """Evaluates when the state's step is a multiple of the interval."""
        if self.every_steps and state.step % self.every_steps == 0:
            self.run(state)

    def run(self, state: Any) -> dict[str, float]:
        """Evaluates now, unless this step was evaluated already. Returns eval_loss (nats per token) and eval_perplexity.

        Of a mixture also eval_loss/NAME for each source.
        """
        if self.last_step == state.step:
            return dict(state.last_evaluation)
        started = time.monotonic()
        loss_sum: torch.Tensor | None = None
        num_tokens = 0
        report = None if self.sources is None else self.sources.begin()
        for micro in self.batches(self.batch_size):
            micro.report = report
            with self._precision():
                value = self.eval_loss(micro)
            loss_sum = value if loss_sum is None else loss_sum + value
            num_tokens += micro.num_label_tokens
        self.check()
        total, count = self.coordinator.sum([0.0 if loss_sum is None else float(loss_sum), num_tokens], "evaluation")
        count /= self.coordinator.sequence_parallel_size  # ranks that share samples have the losses of a part, and the count of all
        loss = total / count if count else float("nan")
        result = {
            "eval_loss": loss,
            "eval_perplexity": math.exp(loss) if loss < 700 else float("inf"),
            "eval_num_label_tokens": count,
            "eval_runtime_s": round(time.monotonic() - started, 3),
        }
        if self.sources is not None:
            self.sources.commit()
            result |= {f"eval_loss/{name}": value for name, value in self.sources.read(self.coordinator).items()}
        self.last_step = state.step
        state.last_evaluation = result
        self.on_result(result, state)
        return result
