"""Linear layers whose matrix products run in float8, by torchao; weights, gradients and optimizer state stay in the run's precision."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import torch
from torch import nn

from harness.findings import user_error

# NVIDIA cards from this compute capability on multiply float8 (Ada Lovelace; Hopper is 9.0).
NEEDED_CAPABILITY = (8, 9)
# Float8 products need sizes that are multiples of this.
_MULTIPLE = 16


def check_float8(device: torch.device) -> None:
    """Refuses float8 where it cannot run.

    Raises:
        UserError: with the reason.
    """
    if importlib.util.find_spec("torchao") is None:
        raise user_error("--fp8", "torchao is not installed", "pip install torchao, or leave --fp8 out")
    if device.type != "cuda":
        raise user_error("--fp8", f"there is no float8 arithmetic on {device.type}", "leave --fp8 out")
    capability = torch.cuda.get_device_capability(device)
    if capability < NEEDED_CAPABILITY:
        message = f"{torch.cuda.get_device_name(device)} (compute capability {capability[0]}.{capability[1]}) has no float8 arithmetic"
        raise user_error("--fp8", message, "it begins with 8.9 (L4, L40, RTX 4090) and 9.0 (H100): leave --fp8 out")


def _fits(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and module.in_features % _MULTIPLE == 0 and module.out_features % _MULTIPLE == 0


def convert_to_float8(block: nn.Module, recipe: str, *, emulate: bool = False) -> int:
    """Replaces the block's linear layers, keeping their parameters and names. Before sharding, so that gathered weights are cast.

    Args:
        recipe: "tensorwise" (one scale a tensor, fastest) or "rowwise" (one a row, closer to bf16).
        emulate: computes what float8 would on a device without it, slowly; for tests.

    Returns:
        How many were replaced.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    config: Any = Float8LinearConfig.from_recipe_name(recipe)
    if emulate:
        config = dataclasses.replace(config, emulate=True)
    convert_to_float8_training(block, config=config, module_filter_fn=_fits)
    return sum(isinstance(module, Float8Linear) for module in block.modules())
