"""`oom_safe`: for a training loop of one's own on accelerate, a batch that does not fit is cut and redone.

    from harness import oom_safe

    for batch in loader:
        with accelerator.accumulate(model):
            with oom_safe(accelerator, batch) as cut:
                loss = cut(lambda part: model(**part).loss)     # forward and backward; instead of accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

or, as a decorator:

    @oom_safe(accelerator)
    def forward_backward(part):
        return model(**part).loss

    loss = forward_backward(batch)

The function gets the batch, or a piece of it, and returns the mean loss over its label tokens (over its samples where there are no labels);
it must not call backward, and may be called again for the same samples. The loss that comes back is the batch's, detached.

On one process and under DDP. Under FSDP and DeepSpeed a rank cannot redo a step by itself: there `cut` is a plain forward and backward, and
a lack of memory goes to `harness run`, which starts the command again one rung lower.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from harness import rank_hook
from harness.engines.base import materialise_optimizer
from harness.oom_reports import is_out_of_memory
from harness.step_redo import StepRedo

log = logging.getLogger("harness")
_ATTRIBUTE = "_harness_step_redo"


def can_redo(accelerator: Any) -> bool:
    """Whether every rank holds all weights, so that a step can be taken back without the others' help."""
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    return kind in ("NO", "MULTI_GPU", "MULTI_CPU")


def prepared_models(accelerator: Any) -> list[Any]:
    """The models that accelerate has prepared, as the loop has them. Of one under DDP it keeps only the inside."""
    inside = list(accelerator._models)
    wrapped = [each for each in gc.get_objects() if type(each) is DistributedDataParallel]
    return [next((each for each in wrapped if each.module is model), model) for model in inside]


def allocate_optimizers(models: list[Any], optimizers: list[Any]) -> None:
    """Allocates the states of torch's Adams now, so that memory that does not suffice shows before the first update."""
    for optimizer in optimizers:
        inner = getattr(optimizer, "optimizer", optimizer)
        if isinstance(inner, (torch.optim.Adam, torch.optim.AdamW)):
            for model in models:
                module = getattr(model, "module", model)
                owned = {id(parameter) for group in inner.param_groups for parameter in group["params"]}
                if owned <= {id(parameter) for parameter in module.parameters()}:
                    materialise_optimizer(module, inner)


def hand_over(error: BaseException, **facts: Any) -> None:
    """For a lack of memory that cannot be redone here: ends the process where `harness run` listens; returns where it does not."""
    rank_hook.end_process(error, **facts)
    log.error("out of memory: start the command with 'harness run -- ...', and it goes on one rung lower from its last checkpoint")


class OomSafe:
    """What `oom_safe` returns: a context, whose value computes its batch, or a decorator of a function of a batch."""

    def __init__(self, accelerator: Any, batch: Any) -> None:
        self.accelerator, self.batch = accelerator, batch

    def __enter__(self) -> Callable[[Callable[[Any], Tensor]], Tensor]:
        if self.batch is None:
            raise TypeError("oom_safe(accelerator, batch): as a context it needs the batch")
        return lambda function: self._compute(self.batch, function)

    def __exit__(self, *_: object) -> None:
        return None

    def __call__(self, function: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
        return lambda batch: self._compute(batch, function)

    def _compute(self, batch: Any, function: Callable[[Any], Tensor]) -> Tensor:
        def forward_backward(piece: Any, weight: Any) -> Tensor:
            loss = function(piece)
            scaled = loss if isinstance(weight, float) and weight == 1.0 else loss * weight
            self.accelerator.backward(scaled)
            return scaled.detach()

        if can_redo(self.accelerator):
            return self._redo().micro_batch(batch, forward_backward, is_last=bool(self.accelerator.sync_gradients))
        try:
            return forward_backward(batch, 1.0)
        except Exception as error:
            if is_out_of_memory(error):
                hand_over(error)
            raise

    def _redo(self) -> StepRedo:
        """One for each accelerator: the pieces that fitted are where the next batch begins."""
        found = getattr(self.accelerator, _ATTRIBUTE, None)
        if found is None:
            models, optimizers = prepared_models(self.accelerator), list(self.accelerator._optimizers)
            if not models or (self.accelerator.num_processes > 1 and not all(hasattr(model, "no_sync") for model in models)):
                raise ValueError("oom_safe: no model is prepared; call accelerator.prepare(model, optimizer, ...) first")
            allocate_optimizers(models, optimizers)
            found = StepRedo(self.accelerator, models)
            setattr(self.accelerator, _ATTRIBUTE, found)
        return found


def oom_safe(accelerator: Any, batch: Any = None) -> OomSafe:
    """See the module's text.

    Args:
        accelerator: accelerate's, with model and optimizer prepared.
        batch: what the loader gave; a mapping or sequence of tensors (samples, ...). None for the decorator.
    """
    return OomSafe(accelerator, batch)
