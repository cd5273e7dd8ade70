"""The optimizer's update of each parameter inside backward, as soon as its gradient is complete; the gradient is gone at once.

At no time are there gradients of all parameters. The price: the gradients' norm is not known before the first update, so it cannot be
clipped to; and a step whose backward runs out of memory after the first update cannot be redone.

The optimizer stays one, with its schedule and its state as they are in checkpoints: for an update of one parameter it is shown a group
with that parameter alone. Under FSDP2 the hook runs after the reduction, on the shard and on the stream of the reduction; torch waits for
that stream at the end of backward.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class BackwardUpdates:
    """Updates an optimizer's parameters inside backward.

    Args:
        optimizer: takes `found_inf`, as torch's fused ones do.

    Attributes:
        has_begun: in this step a parameter was updated: forward and backward cannot be made again.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.has_begun = False
        self.is_last = self.updates = True
        self.squares: list[Tensor] = []
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                parameter.register_post_accumulate_grad_hook(functools.partial(self._with_gradient, index))

    def micro_batch(self, index: int, count: int) -> None:
        """Before each backward: gradients of all micro-batches but the last of a step add up."""
        if index == 0:
            self.has_begun, self.squares = False, []
        self.is_last = index == count - 1

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """Inside, gradients come and go as in training, and nothing is updated."""
        self.updates = False
        try:
            yield
        finally:
            self.updates = True

    @torch.no_grad()
    def _with_gradient(self, index: int, parameter: nn.Parameter) -> None:
        if not self.is_last:
            return
        if self.updates:
            self._update(index, parameter)
        parameter.grad = None

    def _update(self, index: int, parameter: nn.Parameter) -> None:
        optimizer: Any = self.optimizer
        gradient = parameter.grad
        assert gradient is not None
        norm = torch.linalg.vector_norm(gradient.to_local() if hasattr(gradient, "to_local") else gradient, dtype=torch.float32)
        self.squares.append(norm.square())
        self.has_begun = True
        optimizer.found_inf, optimizer.grad_scale = (~torch.isfinite(norm)).float(), None
        groups = optimizer.param_groups
        optimizer.param_groups = [{**groups[index], "params": [parameter]}]
        try:
            optimizer.step()
        finally:
            optimizer.param_groups = groups

    def finish(self, counter: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
        """After backward: what an update after it would have returned.

        Args:
            counter: scalar float32 on the device, raised by one where a gradient was not finite. Its parameter (under FSDP2: this rank's
                shard of it) was not updated; those with finite ones were.
            group: of the ranks that share the gradients out; None where each has them whole.

        Returns:
            The norm of all gradients, scalar on the device.
        """
        total = torch.stack(self.squares).sum() if self.squares else torch.zeros((), device=counter.device)
        if group is not None:
            dist.all_reduce(total, group=group)
        self.has_begun, self.squares = False, []
        norm = total.sqrt()
        counter += (~torch.isfinite(norm)).float()
        return norm
