"""Sharded state of engines whose parameters are tensors or DTensors, through torch.distributed.checkpoint."""

from __future__ import annotations

import json
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from harness.coordination import Coordinator

EXTRA = "engine.json"


def _model_state(module: nn.Module) -> dict[str, Any]:
    return get_model_state_dict(module)


def _state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    return {"model": _model_state(module), "optimizer": get_optimizer_state_dict(module, optimizer, options=options)}


def save(
    directory: Path, module: nn.Module, optimizer: torch.optim.Optimizer, extra: dict[str, Any], coordinator: Coordinator
) -> Future[None]:
    """Copies this rank's shards to host memory and writes them while training goes on.

    Uses the coordinator's own gloo group for checkpoints: on the default group it would interleave with the training's collectives.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if coordinator.is_main_process:
        (directory / EXTRA).write_text(json.dumps(extra), encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return checkpoint.async_save(_state(module, optimizer), checkpoint_id=str(directory), process_group=coordinator.checkpoint_group)  # type: ignore[return-value]


def load(directory: Path, module: nn.Module, optimizer: torch.optim.Optimizer, coordinator: Coordinator) -> dict[str, Any]:
    """Reads weights and optimizer state in place, resharding where the number of ranks has changed. Returns `extra`."""
    state = _state(module, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint.load(state, checkpoint_id=str(directory), process_group=coordinator.checkpoint_group)
    # The model's tensors were filled in place; the optimizer's are handed back under its own numbering.
    set_optimizer_state_dict(module, optimizer, state["optimizer"], options=StateDictOptions(flatten_optimizer_state_dict=True))
    path = directory / EXTRA
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
