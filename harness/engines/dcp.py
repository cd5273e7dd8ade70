"""Sharded state of engines whose parameters are tensors or DTensors, through torch.distributed.checkpoint."""

from __future__ import annotations

import functools
import heapq
import json
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint as checkpoint
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map

from harness.coordination import Coordinator
from harness.eight_bit_adam import as_float32, is_eight_bit
from harness.engines.base import load_schedule
from harness.float8 import plain
from harness.host_copies import HostCopies
from harness.stored_state import AVERAGES, StoredState, whole

EXTRA = "engine.json"


class HasState(Protocol):
    """What is saved of an engine: sharded or whole tensors, and a few plain values beside them.

    Attributes:
        skipped: scalar float32, updates left out so far.
    """

    module: Any
    optimizer: Any
    scheduler: Any
    scaler: torch.amp.GradScaler
    skipped: Tensor


def _extra(engine: HasState) -> dict[str, Any]:
    """The plain values; JSON. Rates of a schedule are tensors where the optimizer's are."""
    schedule = tree_map(lambda value: float(value) if isinstance(value, Tensor) else value, engine.scheduler.state_dict())
    return {"scheduler": schedule, "scaler": engine.scaler.state_dict(), "skipped": float(engine.skipped.item())}


def _take_extra(engine: HasState, extra: dict[str, Any]) -> None:
    if not extra:
        return
    load_schedule(engine.scheduler, extra["scheduler"])
    if extra.get("scaler") and engine.scaler.is_enabled():
        engine.scaler.load_state_dict(extra["scaler"])
    engine.skipped.fill_(extra.get("skipped", 0.0))


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def unwrapped(value: Any) -> Any:
    """A DTensor around the plain numbers of its shard, in the same memory: files hold nothing of how weights are gathered."""
    if isinstance(value, DTensor) and plain(value._local_tensor) is not value._local_tensor:
        return DTensor(plain(value._local_tensor), value._spec, requires_grad=False)  # type: ignore[call-arg]
    return value


def _own_tensors(state: dict[str, Any]) -> dict[str, Any]:
    """A state with each DTensor's shard in its place."""
    return {part: {name: _local(value) for name, value in values.items()} for part, values in state.items()}


@functools.cache
def _copies() -> HostCopies:
    """One block of page-locked host memory that the first save allocates and later ones use again."""
    return HostCopies()


def staged(state: dict[str, Any], copies: HostCopies) -> dict[str, Any]:
    """The state in host memory; a DTensor stays one, of the same mesh and placements, around the copy of its shard.

    The copies are overwritten by the next call: the writing of the last one must have ended, which `Checkpointer.save` waits for.
    """
    copied = copies.copy("checkpoint", _own_tensors(state))
    for part, values in state.items():
        for name, value in values.items():
            if isinstance(value, DTensor):  # not `from_local`, which would send the copy back to the mesh's device
                copied[part][name] = DTensor(copied[part][name], value._spec, requires_grad=False)  # type: ignore[call-arg]
    return copied  # type: ignore[no-any-return]


def own_share(state: dict[str, Any], process_index: int, num_processes: int) -> dict[str, Any]:
    """Of what every rank holds whole (DDP's tensors), this rank's part of the copying and writing; shards and plain values stay.

    Args:
        state: {"model": {name: value}, "optimizer": {name: value}}.
    """
    whole = [
        (-value.numel() * value.element_size(), part, name)
        for part, values in state.items()
        for name, value in values.items()
        if isinstance(value, Tensor) and not isinstance(value, DTensor)
    ]
    loads = [(0, rank) for rank in range(num_processes)]
    others = set()
    for size, part, name in sorted(whole):  # largest first, each to the rank with the least so far
        load, rank = heapq.heappop(loads)
        heapq.heappush(loads, (load - size, rank))
        if rank != process_index:
            others.add((part, name))
    return {part: {name: value for name, value in values.items() if (part, name) not in others} for part, values in state.items()}


def _in_files(name: str, value: Any) -> Any:
    """Of an optimizer's state, what every optimizer could read: torchao's has codes, and learning rates that are tensors."""
    local = value._local_tensor if isinstance(value, DTensor) else value
    if isinstance(local, Tensor) and is_eight_bit(local):
        values = as_float32(local)
        return DTensor(values, value._spec, requires_grad=False) if isinstance(value, DTensor) else values  # type: ignore[call-arg]
    return float(value) if name.endswith((".lr", ".initial_lr")) and isinstance(value, Tensor) else value


def _state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    # What never changes (the base under adapters) comes from the model's own files again.
    options = StateDictOptions(flatten_optimizer_state_dict=True, ignore_frozen_params=True)
    return {
        "model": {name: unwrapped(value) for name, value in get_model_state_dict(module, options=options).items()},
        "optimizer": {name: _in_files(name, value) for name, value in get_optimizer_state_dict(module, optimizer, options=options).items()},
    }


def save(directory: Path, engine: HasState, coordinator: Coordinator) -> Future[None]:
    """Copies this rank's shards to host memory and writes them while training goes on.

    Uses the coordinator's own gloo group for checkpoints: on the default group it would interleave with the training's collectives.
    """
    extra = _extra(engine)
    directory.mkdir(parents=True, exist_ok=True)
    state = own_share(_state(engine.module, engine.optimizer), coordinator.process_index, coordinator.num_processes)
    options: dict[str, Any] = {"checkpoint_id": str(directory), "process_group": coordinator.checkpoint_group}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        written = _save_from_gpu(state, options) if coordinator.device.type == "cuda" else checkpoint.async_save(state, **options)
    # After the start of the writing, in which all ranks take part: a full disk must not keep one of them out of it.
    if coordinator.is_main_process:
        (directory / EXTRA).write_text(json.dumps(extra), encoding="utf-8")
    return written  # type: ignore[return-value]


def _save_from_gpu(state: dict[str, Any], options: dict[str, Any]) -> Any:
    return checkpoint.async_save(staged(state, _copies()), async_stager=_Staged(), **options)  # type: ignore[arg-type]


class _Staged:
    """For `async_save`: what it gets has been copied already."""

    _synchronize_after_execute = should_synchronize_after_execute = False

    def stage(self, state_dict: Any) -> Any:
        return state_dict

    def synchronize_staging(self) -> None:
        pass

    def close(self) -> None:
        pass


def _hand_back(engine: HasState, state: dict[str, Any]) -> None:
    """The model's tensors were filled in place; the optimizer's are handed back under its own numbering."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    set_optimizer_state_dict(engine.module, engine.optimizer, state["optimizer"], options=options)


def load(directory: Path, engine: HasState, coordinator: Coordinator) -> None:
    """Reads what `save` wrote, resharding where the number of ranks has changed."""
    state = _state(engine.module, engine.optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint.load(state, checkpoint_id=str(directory), process_group=coordinator.checkpoint_group)
    _hand_back(engine, state)
    path = directory / EXTRA
    _take_extra(engine, json.loads(path.read_text(encoding="utf-8")) if path.exists() else {})


def _fill(target: Tensor, value: Tensor) -> None:
    """Writes a whole tensor, or this rank's shard of it, in place; nothing is sent, as every rank has read it."""
    value = whole(value, target.shape)
    if isinstance(target, DTensor):
        mesh = target.device_mesh
        local = distribute_tensor(value.to(mesh.device_type), mesh, target.placements, src_data_rank=None).to_local()
        target.to_local().copy_(local)
    else:
        target.copy_(value)


@torch.no_grad()
def adopt(module: nn.Module, optimizer: torch.optim.Optimizer, source: StoredState) -> list[str]:
    """The part of `Engine.adopt` that engines with tensors and DTensors share."""
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    missing = sorted(set(trained) - set(source.names))
    if missing:
        raise RuntimeError(f"the checkpoint has no weights of {', '.join(missing[:4])}")
    for name, parameter in trained.items():
        _fill(parameter.data, source.get(name, "weight"))
    if source.num_updates is None:
        return ["the optimizer's state"]
    if not isinstance(optimizer, (torch.optim.AdamW, torch.optim.Adam)):
        return [f"the optimizer's state ({type(optimizer).__name__} has another than Adam's)"]
    dtype = getattr(optimizer, "state_dtype", None)  # of AdamWBf16
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            device = parameter.to_local().device if isinstance(parameter, DTensor) else parameter.device
            step = torch.tensor(float(source.num_updates), dtype=torch.float32, device=device if group["fused"] else "cpu")
            optimizer.state[parameter] = {"step": step, **{kind: torch.zeros_like(parameter, dtype=dtype) for kind in AVERAGES}}
    for name, parameter in trained.items():
        for kind in AVERAGES:
            _fill(optimizer.state[parameter][kind], source.get(name, kind))
    return []


def snapshot(engine: HasState) -> dict[str, Any]:
    """This rank's tensors and plain values of weights and optimizer, shards as plain tensors; not copies."""
    return {**_own_tensors(_state(engine.module, engine.optimizer)), "extra": _extra(engine)}


@torch.no_grad()
def load_snapshot(engine: HasState, saved: dict[str, Any]) -> None:
    """Takes over what `snapshot` gave in an engine of the same layout."""
    state = _state(engine.module, engine.optimizer)
    for part, values in state.items():
        for name, value in values.items():
            if isinstance(value, Tensor):
                _local(value).copy_(saved[part][name])
            else:
                values[name] = saved[part][name]
    _hand_back(engine, state)
    _take_extra(engine, saved["extra"])
