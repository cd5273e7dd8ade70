"""AdamW whose two averages are kept in bfloat16: 4 bytes a parameter instead of 8. Computed in float32, by torch's fused kernel.

Neither torch nor torchao has it: torch's fused and foreach updates want averages of the parameter's dtype, and so does torchao's `_AdamW`.

The averages are rounded up or down by chance, in proportion to what lies between. Rounded to the nearest, the second one could not fall:
with beta2 0.999 an update takes at most a thousandth off it, less than half of what separates two neighbours in bfloat16.

Chance is a function of an element's place and the number of the update, so that a resumed run rounds as the first one did, and copies of
the weights on several ranks stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from harness.engine_memory import BF16_UPDATE_PIECE

# A float32 has 16 bits more of fraction than a bfloat16.
_BITS = 2**16
# An odd number near the golden section of 2**16: its multiples visit all of the range, evenly from the start.
_STRIDE = 40503


def round_by_chance_(values: Tensor, num_updates: Tensor) -> None:
    """Rounds float32 values to neighbours in bfloat16, in place; what is one already stays.

    Args:
        values: (n,) float32, contiguous.
        num_updates: scalar, on the values' device; each number rounds differently, and over all of them evenly.
    """
    generator = torch.Generator(values.device).manual_seed(0)
    noise = torch.empty(values.shape, dtype=torch.int32, device=values.device).random_(0, _BITS, generator=generator)
    noise.add_((num_updates.to(torch.int64) * _STRIDE % _BITS).to(torch.int32)).bitwise_and_(_BITS - 1)
    # Bits of a float grow with its magnitude; a carry into the upper half is the step to the next bfloat16.
    values.view(torch.int32).add_(noise).bitwise_and_(-_BITS)


def _local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class AdamWBf16(torch.optim.AdamW):
    """torch's AdamW with `exp_avg` and `exp_avg_sq` in bfloat16.

    A weight that is bfloat16 itself (training without float32 masters) is rounded like its averages. Takes `found_inf` and `grad_scale`
    as torch's fused optimizers do.

    Args:
        halved: False: it is torch's own in all respects until `halve`.
    """

    def __init__(
        self, params: Any, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float = 0.0, halved: bool = True
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
        self.state_dtype = torch.bfloat16 if halved else None
        # torch gives a loaded state the dtype of its parameter.
        self.register_load_state_dict_post_hook(_to_state_dtype)

    def halve(self) -> None:
        """From here on the averages are bfloat16; what they were is rounded to the nearest, once."""
        self.state_dtype = torch.bfloat16
        _to_state_dtype(self)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient."""
        if self.state_dtype is None:
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in parameters:
                self._begin(parameter)
            for device in dict.fromkeys(_local(parameter).device for parameter in parameters):
                self._update(group, [parameter for parameter in parameters if _local(parameter).device == device], device)
        return loss

    def _begin(self, parameter: nn.Parameter) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=_local(parameter).device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, dtype=self.state_dtype)

    def _update(self, group: dict[str, Any], parameters: list[nn.Parameter], device: torch.device) -> None:
        found_inf, grad_scale = (
            None if value is None else value.to(device, non_blocking=True)
            for value in (getattr(self, "found_inf", None), getattr(self, "grad_scale", None))
        )
        steps = [self.state[parameter]["step"] for parameter in parameters]
        torch._foreach_add_(steps, 1)
        for pieces in _pieces(parameters, self.state):
            self._update_pieces(group, pieces, found_inf, grad_scale)
        if found_inf is not None:  # an update that is left out is not counted
            torch._foreach_sub_(steps, [found_inf] * len(steps))

    def _update_pieces(self, group: dict[str, Any], pieces: list[_Piece], found_inf: Tensor | None, grad_scale: Tensor | None) -> None:
        weights, gradients, averages, squares, steps = (list(each) for each in zip(*pieces, strict=True))
        rounded = averages + squares
        if weights[0].dtype != torch.float32:
            rounded = rounded + weights
        sizes = [value.numel() for value in rounded]
        exact = torch.empty(sum(sizes), dtype=torch.float32, device=weights[0].device)
        views = list(exact.split(sizes))
        torch._foreach_copy_(views, rounded)
        count = len(pieces)
        beta1, beta2 = group["betas"]
        torch._fused_adamw_(
            views[2 * count :] or weights,
            gradients if weights[0].dtype == torch.float32 else [gradient.float() for gradient in gradients],
            views[:count],
            views[count : 2 * count],
            [],
            steps,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=grad_scale,
            found_inf=found_inf,
        )
        round_by_chance_(exact, steps[0])
        torch._foreach_copy_(rounded, views)


# Weight, gradient, average, average of squares, each flat; and the count of updates.
_Piece = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _pieces(parameters: Iterable[nn.Parameter], states: Any) -> Iterator[list[_Piece]]:
    """Parts of parameters, each list of one dtype and of at most `BF16_UPDATE_PIECE` elements."""
    batch: list[_Piece] = []
    size = 0
    for parameter in parameters:
        state, gradient = states[parameter], parameter.grad
        assert gradient is not None
        flat = [_local(each).detach().view(-1) for each in (parameter, state["exp_avg"], state["exp_avg_sq"])]
        gradient = _local(gradient).detach().reshape(-1)
        for start in range(0, gradient.numel(), BF16_UPDATE_PIECE):
            weight, average, square = (each[start : start + BF16_UPDATE_PIECE] for each in flat)
            if batch and (size + weight.numel() > BF16_UPDATE_PIECE or weight.dtype != batch[0][0].dtype):
                yield batch
                batch, size = [], 0
            batch.append((weight, gradient[start : start + BF16_UPDATE_PIECE], average, square, state["step"]))
            size += weight.numel()
    if batch:
        yield batch


def _to_state_dtype(optimizer: Any) -> None:
    if optimizer.state_dtype is None:
        return
    for state in optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            if name in state:
                state[name] = state[name].to(optimizer.state_dtype)
