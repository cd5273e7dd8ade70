"""QLoRA: the frozen linear layers of the blocks in 4 bits, through bitsandbytes; only the adapters beside them train.

A block's weights are read as they are stored and quantised in place before the next block is read, so a process never holds more than one
block in 16 or 32 bits. The head, embeddings and norms stay as they are. The method, NF4 with double quantisation, is that of
https://arxiv.org/abs/2305.14314.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

InitBlock = Callable[[list[nn.Module], int, torch.device], None]


def quantise_linear(linear: nn.Linear, compute_dtype: torch.dtype) -> nn.Module:
    """A frozen linear layer as one of bitsandbytes in NF4, on the same device.

    Args:
        compute_dtype: in which it multiplies.
    """
    import bitsandbytes as bnb

    with torch.device("meta"):
        quantised: Any = bnb.nn.Linear4bit(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            compute_dtype=compute_dtype,
            compress_statistics=True,
            quant_type="nf4",
        )
    device = linear.weight.device
    weight = bnb.nn.Params4bit(linear.weight.detach().cpu(), requires_grad=False, compress_statistics=True, quant_type="nf4")
    weight.module = quantised  # where it leaves what it needs to be read again
    quantised.weight = weight.to(device)  # this move is what quantises
    quantised.bias = linear.bias
    return quantised


def quantise_block(modules: Sequence[nn.Module], compute_dtype: torch.dtype) -> int:
    """Quantises every frozen linear layer among the children of some modules; returns how many."""
    count = 0
    for module in modules:
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and not child.weight.requires_grad:
                setattr(module, name, quantise_linear(child, compute_dtype))
                count += 1
    return count


def then_quantised(init_block: InitBlock, num_blocks: int, compute_dtype: torch.dtype) -> InitBlock:
    """`init_block`, and after it the block's frozen linear layers are quantised; what lies outside of the blocks stays.

    Args:
        num_blocks: how many come before the rest of the model.
    """

    def init(modules: list[nn.Module], index: int, device: torch.device) -> None:
        init_block(modules, index, device)
        if index < num_blocks:
            quantise_block(modules, compute_dtype)

    return init
