"""On two ranks: weights of 4 bits that FSDP2 cuts and gathers. The stand-in for bitsandbytes packs as it does, with one scale a weight."""

from __future__ import annotations

import functools
import os
import sys
import types
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from launch.machine import free_port
from tests.faults.fork_ranks import leave_with

NUM_RANKS, NUM_BLOCKS, WIDTH, HIDDEN = 2, 2, 24, 40


def quantize_4bit(weight: Tensor, *, quant_storage: torch.dtype, **_: Any) -> tuple[Tensor, Any]:
    scale = weight.abs().max()
    codes = ((weight / scale + 1) * 7.5).round().to(torch.uint8).flatten()
    packed = (codes[0::2] << 4 | codes[1::2]).view(quant_storage).reshape(-1, 1)
    return packed, types.SimpleNamespace(scale=scale, shape=weight.shape)


def unpacked(packed: Tensor, state: Any) -> Tensor:
    """(out, in) float32."""
    pairs = packed.detach().reshape(-1).view(torch.uint8)
    return (torch.stack([pairs >> 4, pairs & 15], dim=1).flatten() / 7.5 - 1).reshape(state.shape) * state.scale


class Multiply(torch.autograd.Function):
    """Reads the bits in the forward, and again in the backward: they must be in place then too."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, packed: Tensor, state: Any) -> Tensor:
        ctx.packed, ctx.state = packed, state
        return inputs @ unpacked(packed, state).to(inputs.dtype).T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return gradient @ unpacked(ctx.packed, ctx.state).to(gradient.dtype), None, None


def matmul_4bit(inputs: Tensor, packed: Tensor, *, quant_state: Any, bias: Tensor | None) -> Tensor:
    outputs = Multiply.apply(inputs, packed, quant_state)
    return outputs if bias is None else outputs + bias


def stand_in() -> None:
    package: Any = types.ModuleType("bitsandbytes")
    package.functional = types.SimpleNamespace(quantize_4bit=quantize_4bit)
    package.matmul_4bit = matmul_4bit
    sys.modules["bitsandbytes"] = package


class Block(nn.Module):
    """Two frozen layers, and a trained one beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH)
        self.adapter = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up.requires_grad_(False), self.down.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.down(torch.tanh(self.up(inputs))) + self.adapter(inputs)


def build(dtype: torch.dtype) -> nn.Sequential:
    from harness.four_bit import quantise_block

    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    assert quantise_block(list(model.modules()), dtype) == 2 * NUM_BLOCKS
    return model


def bits(model: nn.Module) -> list[bytes]:
    packed = [parameter.detach() for name, parameter in model.named_parameters() if name.endswith(("up.weight", "down.weight"))]
    whole = [value.full_tensor() if hasattr(value, "full_tensor") else value for value in packed]
    return [value.contiguous().view(torch.uint8).numpy().tobytes() for value in whole]


def check(dtype: torch.dtype, rank: int) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from harness.four_bit import mark_packed
    from harness.modeling import num_parameters

    inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    alone = build(dtype)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        alone(inputs).square().sum().backward()
    expected = {name: parameter.grad for name, parameter in alone.named_parameters() if parameter.grad is not None}
    model = build(dtype)
    num_true = num_parameters(model)
    assert num_true == NUM_BLOCKS * (2 * WIDTH * HIDDEN + WIDTH + WIDTH * WIDTH)
    policy = MixedPrecisionPolicy() if dtype == torch.float32 else MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in (*model, model):
        fully_shard(module, mp_policy=policy)
        mark_packed(module)
    local: Any = model[0].up.weight
    assert local.to_local().numel() * NUM_RANKS == WIDTH * HIDDEN // 2 // dtype.itemsize
    assert num_parameters(model) == num_true
    for _ in range(2):
        model.zero_grad()
        model(inputs[rank::NUM_RANKS]).square().sum().mul(NUM_RANKS).backward()
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.2}
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient.full_tensor(), expected[name], **tolerance)
    assert bits(model) == bits(alone)


def _rank(rank: int, port: int) -> int:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=NUM_RANKS)
    stand_in()
    for dtype in (torch.float32, torch.bfloat16):
        check(dtype, rank)
    dist.destroy_process_group()
    return 0


def ranks() -> None:
    """Runs it on forks of this process."""
    port, children = free_port(), []
    for rank in range(NUM_RANKS):
        pid = os.fork()
        if pid == 0:
            leave_with(functools.partial(_rank, rank, port))
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert codes == [0] * NUM_RANKS, codes
