"""An optimizer step of somebody else's loop that can be redone with smaller pieces, on one process or under DDP.

A loop hands over its micro-batches one by one. They are kept until the step is complete: where one runs out of memory, on whatever rank,
all ranks drop the gradients of the step, cut smaller, and compute all its micro-batches again, with the same random states. The loop does
not notice: the samples of the step and the weight of each token stay the same.

Gradients are not summed by DDP inside the backward, where a rank that is missing would leave the others waiting, but by one pass after the
last one, which all ranks have voted for on the host. That costs DDP's overlap of sums and backward.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness import rank_hook
from harness.coordination import Coordinator
from harness.engines.base import average_gradients
from harness.ladder import worst_report
from harness.node_facts import num_local_processes
from harness.oom_reports import is_out_of_memory, memory_report
from harness.recovery import random_state, restore_random_state
from harness.votes import PeerOutOfMemoryError, Vote, checker, make_vote

log = logging.getLogger("harness")
TIMEOUT_S = 1800.0
IGNORED_LABEL = -100
# Collectives that a loop may call inside a step; each is voted for first.
COLLECTIVES = ("gather", "gather_for_metrics", "reduce", "pad_across_processes")
Compute = Callable[[Any, Any], Tensor]


def coordinator_of(accelerator: Any) -> Coordinator:
    """This process among the others that accelerate knows; called on all ranks."""
    size, rank = int(accelerator.num_processes), int(accelerator.process_index)
    local = num_local_processes(os.environ, size)
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT_S)) if size > 1 else None
    backend = dist.get_backend() if size > 1 else "gloo"
    return Coordinator(size, rank, int(accelerator.local_process_index), local, accelerator.device, backend, TIMEOUT_S, host_group=group)


# ---- batches


def num_rows(batch: Any) -> int:
    """Samples in a batch: the first dimension of its first tensor."""
    values = batch.values() if isinstance(batch, Mapping) else batch
    return next((len(value) for value in values if isinstance(value, Tensor) and value.dim() > 0), 1)


def pieces_of(batch: Any, rows: int | None) -> list[Any]:
    """A batch in pieces of at most `rows` samples; what is not per sample goes into every piece.

    Args:
        batch: a mapping or sequence of tensors (samples, ...) and other values.
        rows: None leaves it whole.
    """
    count = num_rows(batch)
    if rows is None or rows >= count:
        return [batch]

    def part(value: Any, start: int) -> Any:
        is_per_sample = (isinstance(value, Tensor) and value.dim() > 0 and len(value) == count) or (
            isinstance(value, list) and len(value) == count
        )
        return value[start : start + rows] if is_per_sample else value

    def piece(start: int) -> Any:
        if isinstance(batch, Mapping):
            return {name: part(value, start) for name, value in batch.items()}
        return type(batch)(part(value, start) for value in batch)

    return [piece(start) for start in range(0, count, rows)]


def num_label_tokens(batch: Any) -> Tensor | int:
    """What a mean over a batch is a mean over: label tokens, shifted by one as causal models do; samples where there are no labels."""
    if isinstance(batch, Mapping) and isinstance(batch.get("shift_labels"), Tensor):
        return (batch["shift_labels"] != IGNORED_LABEL).sum()
    if isinstance(batch, Mapping) and isinstance(batch.get("labels"), Tensor):
        labels = batch["labels"]
        return (labels[..., 1:] if labels.dim() > 1 else labels).ne(IGNORED_LABEL).sum()
    return num_rows(batch)


def share(piece: Any, batch: Any) -> Any:
    """What a piece's mean loss counts in its batch's, so that the pieces' weighted sum is the batch's mean."""
    if piece is batch:
        return 1.0
    of_piece, of_batch = num_label_tokens(piece), num_label_tokens(batch)
    return of_piece / (of_batch.clamp(min=1) if isinstance(of_batch, Tensor) else of_batch)


# ---- the step


class StepRedo:
    """Computes the micro-batches of a step.

    Args:
        accelerator: accelerate's, prepared.
        models: what is trained, as prepared: plain or DDP.

    Attributes:
        rows: samples that go through the model at once; None is a whole micro-batch.
        steps_down: what was lowered, oldest first.
    """

    def __init__(self, accelerator: Any, models: Sequence[nn.Module]) -> None:
        self.accelerator, self.models = accelerator, list(models)
        self.coordinator = coordinator_of(accelerator)
        self.vote: Vote = make_vote(self.coordinator)
        self.check = checker(self.vote)
        self.rows: int | None = None
        self.steps_down: list[dict[str, Any]] = []
        self.pending: list[tuple[Any, Compute]] = []
        self.random_state: Any = None
        self.before_redo: Callable[[], object] = lambda: None

    def micro_batch(self, batch: Any, compute: Compute, *, is_last: bool) -> Tensor:
        """Forward and backward of one micro-batch; its loss.

        Args:
            compute: takes (piece, share), does forward and backward, returns the detached loss times the share.
            is_last: the optimizer is next.

        Raises:
            torch.OutOfMemoryError: single samples do not fit.
        """
        if not self.pending:
            self.random_state = random_state(self.coordinator.device)
        self.pending.append((batch, compute))
        loss = self._attempt(self.pending[-1:], is_last)
        while loss is None:
            self._step_down()
            loss = self._attempt(self.pending, is_last)
        if is_last:
            self.pending = []
        return loss

    def _attempt(self, micro_batches: Sequence[tuple[Any, Compute]], is_last: bool) -> Tensor | None:
        """One try; None where any rank ran out of memory.

        The exception is gone when this returns: it would pin the tensors of the failing frames.
        """
        self.failure = ""
        try:
            with contextlib.ExitStack() as stack:
                for model in self.models:
                    if hasattr(model, "no_sync"):
                        stack.enter_context(model.no_sync())  # type: ignore[operator]
                stack.enter_context(self._voted_collectives())
                for batch, compute in micro_batches:
                    loss = self._whole(batch, compute)
            if is_last:
                self.check()
        except PeerOutOfMemoryError:
            return None
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.failure = rank_hook.first_line(error)
        if self.failure:
            self.vote(True)
            return None
        if is_last and self.coordinator.num_processes > 1:
            parameters = (parameter for model in self.models for parameter in model.parameters())
            average_gradients(parameters, self.coordinator.device, self.coordinator.num_processes)
        return loss

    def _whole(self, batch: Any, compute: Compute) -> Tensor:
        losses = [compute(piece, share(piece, batch)) for piece in pieces_of(batch, self.rows)]
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    @contextlib.contextmanager
    def _voted_collectives(self) -> Iterator[None]:
        """Inside, accelerate's collectives are called only when no rank has run out of memory: it would not come."""
        if self.coordinator.num_processes == 1:
            yield
            return

        def voted(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                self.check()
                return function(*args, **kwargs)

            return call

        for name in COLLECTIVES:
            setattr(self.accelerator, name, voted(getattr(self.accelerator, name)))
        try:
            yield
        finally:
            for name in COLLECTIVES:
                delattr(self.accelerator, name)

    def _step_down(self) -> None:
        """Frees what the try left, on all ranks, and agrees on smaller pieces."""
        report = memory_report(self.coordinator.device, self.failure)
        self.drop()
        sizes = [min(self.rows or num_rows(batch), num_rows(batch)) for batch, _ in self.pending]
        reports = self.coordinator.gather({**report, "rows": max(sizes)})
        worst = worst_report(reports)
        failure, rows = reports[worst]["failure"], max(each["rows"] for each in reports)
        if rows == 1:
            raise torch.OutOfMemoryError(f"{failure} (rank {worst}, with single samples)")
        self.rows = rows // 2
        self.before_redo()
        restore_random_state(self.random_state, self.coordinator.device)
        self.steps_down.append({"rank": worst, "failure": failure, "change": f"samples at once {rows} -> {self.rows}"})
        if self.coordinator.is_main_process:
            log.warning("out of memory on rank %d (%s): samples at once %d -> %d; redoing the step", worst, failure, rows, self.rows)

    def drop(self) -> None:
        """Drops gradients and everything that only garbage still holds."""
        for model in self.models:
            model.zero_grad(set_to_none=True)
        gc.collect()
        if self.coordinator.device.type == "cuda":
            torch.cuda.empty_cache()
