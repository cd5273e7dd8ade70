"""torchao's 8-bit AdamW in files and after them: its averages are float32 there, as every optimizer's, and 8-bit again on the card.

torchao's tensors of codes and scales cannot be staged by torch's checkpoints, and say nothing to another optimizer or another number of
ranks. A block's scale is found again from its values, so codes come back as they were.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_AVERAGES = {"exp_avg": True, "exp_avg_sq": False}  # whether it has a sign


def is_eight_bit(local: Tensor) -> bool:
    """Whether a tensor, or the shard of a DTensor, is torchao's codes and scales."""
    return type(local).__name__ == "OptimState8bit"


def as_float32(local: Any) -> Tensor:
    """Its values, in host memory: on the card they would take four times what the codes do."""
    return local.to("cpu").dequantize(torch.float32)  # type: ignore[no-any-return]


def write_codes(local: Any, values: Tensor) -> None:
    """Fills codes and scales with values that were read from such, whose blocks' largest numbers say their scale.

    A block was divided by its largest magnitude. Was that of a positive number, its code stands for 1; of a negative one, for the lowest
    number that there is, a little more than -1; where both are as large, it was the negative one.

    Args:
        local: torchao's tensor.
        values: of the same shape, on the same device, float32.
    """
    from torchao.optim.quant_utils import quantize_8bit_with_qmap

    blocks = values.reshape(-1, local.block_size)
    highest, lowest = blocks.amax(-1), blocks.amin(-1)
    scale = torch.where(highest > -lowest, highest, lowest / local.qmap[0] if local.signed else highest).clamp(min=1e-12)
    local.codes.copy_(quantize_8bit_with_qmap((blocks / scale.unsqueeze(-1)).view(values.shape), local.qmap))
    local.scale.copy_(scale)


@torch.no_grad()
def after_load(optimizer: Any) -> None:
    """For `register_load_state_dict_post_hook`: torch has made the averages float32 and learning rates numbers."""
    for group in optimizer.param_groups:
        if not isinstance(group["lr"], Tensor):
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float32)
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for name, signed in _AVERAGES.items():
                if name in state:
                    state[name] = _again(optimizer, parameter, state[name], signed)


def _again(optimizer: Any, parameter: Any, average: Any, signed: bool) -> Any:
    made = optimizer._new_buffer(parameter, signed)
    target, values = (each.to_local() if hasattr(each, "to_local") else each for each in (made, average))
    if not is_eight_bit(target) or is_eight_bit(values):
        return average
    write_codes(target, values)
    return made
