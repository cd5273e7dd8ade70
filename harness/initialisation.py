"""Weights from scratch: drawn as the model's family does, block by block, the same on any number of ranks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from harness.findings import user_error


@contextlib.contextmanager
def seeded(seed: int, index: int, device: torch.device) -> Iterator[None]:
    """Within, random numbers follow from the seed and a block's place; outside nothing of it is seen."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed * 1_000_003 + index)
        yield


def owners_of(model: Any) -> dict[int, Any]:
    """The id of each module -> the model of transformers' around it whose `_init_weights` is for it: of parts of several the nearest."""
    from transformers import PreTrainedModel

    found: dict[int, Any] = {}

    def visit(module: nn.Module, owner: Any) -> None:
        owner = module if isinstance(module, PreTrainedModel) else owner
        found.setdefault(id(module), owner)
        for child in module.children():
            visit(child, owner)

    visit(model, model)
    return found


def initialise(
    owners: dict[int, Any], modules: list[nn.Module], weights: list[nn.Parameter], seed: int, index: int, device: torch.device
) -> None:
    """Draws the weights of some modules as the model's own `_init_weights` does, from a seed of their own.

    A block's weights so depend on the seed and its place only, not on the number of ranks or the engine.

    Args:
        owners: by the id of a module, the model whose `_init_weights` is for it.
        weights: what is to be drawn; adapters, which others fill, are not among them.

    Raises:
        UserError: weights that nothing draws.
    """
    here = {id(module) for module in modules}
    own = [parameter for parameter in weights if parameter.is_floating_point()]
    with seeded(seed, index, device), torch.no_grad():
        for parameter in own:
            parameter.fill_(math.nan)  # so that what nothing draws is seen
        for module in reversed(modules):  # children first, as transformers does
            # What has parameters of others' blocks below it would draw those a second time.
            if any(True for _ in module.parameters(recurse=False)) or all(id(each) in here for each in module.modules()):
                owners[id(module)]._init_weights(module)
        undrawn = {id(parameter) for parameter in own if bool(parameter.isnan().any())}
    if undrawn:
        holders = (module for module in modules if any(id(each) in undrawn for each in module.parameters(recurse=False)))
        kinds = sorted({type(module).__name__ for module in holders})
        message = f"{', '.join(kinds)}: weights that {type(owners[id(modules[0])]).__name__} does not initialise"
        raise user_error("--model_type", message, "train from a stored model, with --model_name_or_path")
