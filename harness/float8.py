"""Linear layers whose matrix products run in float8, by torchao; weights, gradients and optimizer state stay in the run's precision."""

from __future__ import annotations

import dataclasses
import functools
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


def gathers_float8(wanted: bool | None, recipe: str, num_shards: int, *, offloads: bool) -> bool:
    """Whether weights are cast before they are gathered, to half the bytes: `--fp8_all_gather`, or by default where it gains something.

    Args:
        recipe: one scale a tensor can be known before; one a row cannot, as rows are cut otherwise in backward.
        num_shards: ranks that share one copy.
        offloads: weights live in host memory, where their scale would be computed anew for every use.

    Raises:
        UserError: it was asked for and cannot be.
    """
    if wanted and (recipe != "tensorwise" or offloads):
        reason = "weights live in host memory" if offloads else f"--fp8 is {recipe}"
        raise user_error("--fp8_all_gather", f"needs one scale a tensor, kept on the card, and {reason}", "leave it out")
    return recipe == "tensorwise" and num_shards > 1 and not offloads if wanted is None else wanted


def convert_to_float8(block: nn.Module, recipe: str, *, gather_over: int = 0, emulate: bool = False) -> int:
    """Replaces the block's linear layers, keeping their parameters and names. Before sharding, so that gathered weights are cast.

    Args:
        recipe: "tensorwise" (one scale a tensor, fastest) or "rowwise" (one a row, closer to bf16).
        gather_over: ranks over which weights are gathered in float8; 0: in the run's precision. A weight whose rows do not divide by that
            number is gathered as without: torchao hands FSDP2 shards without padding.
        emulate: computes what float8 would on a device without it, slowly; for tests.

    Returns:
        How many were replaced.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    config: Any = Float8LinearConfig.from_recipe_name(recipe)
    if emulate:
        config = dataclasses.replace(config, emulate=True)

    def fits(module: nn.Module, name: str, multiple: int = 1) -> bool:
        if not isinstance(module, nn.Linear) or isinstance(module, Float8Linear):
            return False
        return module.in_features % _MULTIPLE == 0 and module.out_features % _MULTIPLE == 0 and module.out_features % multiple == 0

    if gather_over:
        gathering = dataclasses.replace(config, enable_fsdp_float8_all_gather=True)
        convert_to_float8_training(block, config=gathering, module_filter_fn=functools.partial(fits, multiple=gather_over))
    convert_to_float8_training(block, config=config, module_filter_fn=fits)
    return sum(isinstance(module, Float8Linear) for module in block.modules())


def renew_scales(model: nn.Module) -> None:
    """After every change of weights that are gathered in float8, on all ranks: their scales, by one reduction for all of them."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)


def plain(shard: torch.Tensor) -> torch.Tensor:
    """The float32 numbers, in the same memory, of a shard that torchao wraps to be gathered in float8; any other tensor as it is."""
    return shard._tensor if type(shard).__name__ == "WeightWithDynamicFloat8CastTensor" else shard  # type: ignore[attr-defined,no-any-return]
