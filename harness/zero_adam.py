"""Adam under DeepSpeed, where its state moves between kinds of Adam: torch's on the card, DeepSpeed's own in host memory, or parts of both.

DeepSpeed 0.19 loads a checkpoint's optimizer state as it lies, with the options of the Adam that wrote it; and where only a part of the
state is offloaded (`offload_optimizer.ratio` below 1), the Adam of the part on the card keeps the learning rate of the start and is in no
checkpoint. What is here mends that. `outer` is DeepSpeed's optimizer (`engine.optimizer`), its `.optimizer` the Adam inside.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

# What a run sets; all else in a group says how an Adam computes.
_SET_BY_THE_RUN = ("lr", "betas", "eps", "weight_decay")
_DEEPSPEEDS = ("DeepSpeedCPUAdam", "FusedAdam")


def is_deepspeeds(adam: Any) -> bool:
    """Whether an Adam counts its steps with a plain number, as DeepSpeed's do."""
    return type(adam).__module__.startswith("deepspeed.") and type(adam).__name__ in _DEEPSPEEDS


def is_adam(adam: Any) -> bool:
    return is_deepspeeds(adam) or isinstance(adam, (torch.optim.AdamW, torch.optim.Adam))


def step_number(adam: Any, num_updates: float, flat: torch.Tensor) -> Any:
    """`num_updates` as this Adam counts: a number, or a tensor on the host, with fused kernels on the device of `flat`."""
    if is_deepspeeds(adam):
        return int(num_updates)
    return torch.tensor(float(num_updates), dtype=torch.float32, device=flat.device if adam.defaults.get("fused") else "cpu")


def fit(outer: Any) -> None:
    """After loading: the groups compute as this Adam does, and each state counts its steps as this Adam does."""
    adam = getattr(outer, "optimizer", None)
    if not is_adam(adam):
        return
    assert adam is not None
    for group in adam.param_groups:
        group.update({key: value for key, value in adam.defaults.items() if key not in _SET_BY_THE_RUN})
    for flat, state in adam.state.items():
        if "step" in state:
            state["step"] = step_number(adam, float(state["step"]), flat)


def on_card(outer: Any) -> list[torch.Tensor]:
    """The parts of the master weights that the second Adam updates on the card; none where all or nothing is offloaded."""
    if getattr(outer, "backup_optimizer", None) is None:
        return []
    devices: Mapping[int, str] = outer.subgroup_to_device
    return [flat for index, flat in enumerate(outer.fp32_partitioned_groups_flat) if devices[index] != "cpu"]


def divide(outer: Any) -> None:
    """After loading into the one Adam: the second one gets the state of what it updates."""
    for flat in on_card(outer):
        if state := outer.optimizer.state.pop(flat, None):
            count = step_number(outer.backup_optimizer, float(state["step"]), flat) if "step" in state else None
            outer.backup_optimizer.state[flat] = {**state, **({} if count is None else {"step": count})}


@contextlib.contextmanager
def united(outer: Any) -> Iterator[None]:
    """Within, the one Adam holds all state, which is what DeepSpeed writes."""
    lent = [flat for flat in on_card(outer) if flat in outer.backup_optimizer.state]
    for flat in lent:
        outer.optimizer.state[flat] = outer.backup_optimizer.state[flat]
    try:
        yield
    finally:
        for flat in lent:
            outer.optimizer.state.pop(flat, None)


def follow(outer: Any) -> None:
    """Before an update: the second Adam takes the learning rate and the like of the first, which the schedule sets."""
    if getattr(outer, "backup_optimizer", None) is None:
        return
    for group, leading in zip(outer.backup_optimizer.param_groups, outer.optimizer.param_groups, strict=True):
        group.update({key: leading[key] for key in _SET_BY_THE_RUN if key in leading})
