"""QLoRA: the frozen linear layers of the blocks in 4 bits, through bitsandbytes; only the adapters beside them train.

A block's weights are read as they are stored and quantised in place before the next block is read, so a process never holds more than one
block in 16 or 32 bits. The head, embeddings and norms stay as they are. The method, NF4 with double quantisation, is that of
https://arxiv.org/abs/2305.14314.

A packed weight is a plain parameter whose bits are stored as numbers of the compute dtype, not bitsandbytes' own kind of tensor: FSDP2 cuts
and gathers it like every other one, and its mixed precision, which casts what has another dtype, leaves the bits alone. What is needed to
read it, a thirtieth of its size, lies beside it whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

InitBlock = Callable[[list[nn.Module], int, torch.device], None]


class PackedLinear(nn.Module):
    """A frozen linear layer in NF4.

    Attributes:
        weight: (in * out / 2 / bytes of the dtype, 1) bits of the weight, as numbers of the compute dtype.
        bias: (out), or None.
        quant_state: bitsandbytes' scales and shape.
        compute_dtype: in which it multiplies.
    """

    def __init__(self, linear: nn.Linear, compute_dtype: torch.dtype) -> None:
        from bitsandbytes import functional

        super().__init__()
        packed, self.quant_state = functional.quantize_4bit(
            linear.weight.detach().contiguous(),
            blocksize=64,
            compress_statistics=True,
            quant_type="nf4",
            quant_storage=compute_dtype,
        )
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias
        self.compute_dtype = compute_dtype
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.mark()

    def mark(self) -> None:
        """Lets the parameter tell its true shape; again after it was sharded, which makes a new one."""
        self.weight.quant_state = self.quant_state  # type: ignore[attr-defined]

    def forward(self, inputs: Tensor) -> Tensor:
        """inputs: (..., in), any floating dtype; (..., out) of the same."""
        import bitsandbytes as bnb

        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        # Transposed, as bitsandbytes before 0.50 wants it; later ones take both.
        outputs = bnb.matmul_4bit(inputs.to(self.compute_dtype), self.weight.t(), bias=bias, quant_state=self.quant_state)
        return outputs.to(inputs.dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, NF4"


def quantise_block(modules: Sequence[nn.Module], compute_dtype: torch.dtype) -> int:
    """Quantises every frozen linear layer among the children of some modules; returns how many."""
    count = 0
    for module in modules:
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and not child.weight.requires_grad:
                setattr(module, name, PackedLinear(child, compute_dtype))
                count += 1
    return count


def mark_packed(module: nn.Module) -> None:
    """`PackedLinear.mark` for all layers within a module that was sharded."""
    for part in module.modules():
        if isinstance(part, PackedLinear):
            part.mark()


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
