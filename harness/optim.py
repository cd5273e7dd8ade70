"""Optimizers and learning-rate schedules by the names that `TrainingArguments` uses."""

from __future__ import annotations

import importlib.metadata
import json
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from harness.args import TrainArguments
from harness.bf16_adam import AdamWBf16
from harness.eight_bit_adam import after_load
from harness.findings import user_error
from harness.ladder import MemorySettings


def parameter_groups(named_parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices with weight decay; norms, biases and other vectors without. Frozen parameters are left out."""
    decay: list[nn.Parameter] = []
    no_decay: list[nn.Parameter] = []
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            # Under ZeRO-3 the local tensor is empty; its real shape is ds_shape.
            dimensions = len(getattr(parameter, "ds_shape", parameter.shape))
            (no_decay if dimensions < 2 or name.endswith(".bias") else decay).append(parameter)
    groups = [{"params": decay, "weight_decay": weight_decay}, {"params": no_decay, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def apex_is_nvidias() -> bool:
    """True for NVIDIA's Apex; the PyPI package of that name is an unrelated web toolkit."""
    try:
        from apex.optimizers import FusedAdam  # noqa: F401
    except Exception:
        return False
    return True


def check_optimizer(name: str) -> None:
    """Fails early for an optimizer whose library is missing.

    Raises:
        UserError: with the package to install.
    """
    if name == "adamw_apex_fused" and not apex_is_nvidias():
        installed = [distribution for distribution in importlib.metadata.distributions() if distribution.metadata["Name"] == "apex"]
        what = "the installed 'apex' is PyPI's package of that name, not NVIDIA's" if installed else "NVIDIA's Apex is not installed"
        raise user_error(
            "--optim adamw_apex_fused", what, "build github.com/NVIDIA/apex, use an NGC image, or take --optim adamw_torch_fused"
        )
    if name == "adamw_8bit":
        try:
            import torchao.optim  # noqa: F401
        except ImportError:
            raise user_error("--optim adamw_8bit", "torchao is not installed", "pip install torchao") from None


def build_optimizer(groups: list[dict[str, Any]], train: TrainArguments, settings: MemorySettings | None = None) -> torch.optim.Optimizer:
    """The optimizer `--optim` names, over parameter groups as `parameter_groups` returns them.

    Args:
        settings: in force; of those only `optimizer_bf16` counts. None: of an engine that cannot change it.

    Raises:
        UserError: its library is missing.
    """
    adam: dict[str, Any] = {"lr": train.learning_rate, "betas": (train.adam_beta1, train.adam_beta2), "eps": train.adam_epsilon}
    check_optimizer(train.optim)
    if train.optim == "adamw_torch_fused" and settings is not None and (settings.optimizer_bf16 or "optimizer_bf16" in train.oom_ladder):
        return AdamWBf16(groups, halved=settings.optimizer_bf16, **adam)
    if train.optim == "adamw_torch_fused":
        return torch.optim.AdamW(groups, fused=True, **adam)
    if train.optim == "adamw_torch":
        return torch.optim.AdamW(groups, fused=False, **adam)
    if train.optim == "adamw_apex_fused":
        from apex.optimizers import FusedAdam

        return FusedAdam(groups, adam_w_mode=True, **adam)
    if train.optim == "adamw_bf16":
        return AdamWBf16(groups, **adam)
    if train.optim == "adamw_8bit":
        from torchao.optim import AdamW8bit

        eight_bit: torch.optim.Optimizer = AdamW8bit(groups, **adam)
        eight_bit.register_load_state_dict_post_hook(after_load)
        return eight_bit
    if train.optim == "sgd":
        return torch.optim.SGD(groups, lr=train.learning_rate)
    from transformers.optimization import Adafactor

    return Adafactor(groups, lr=train.learning_rate, scale_parameter=False, relative_step=False)


def takes_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """True when the optimizer can skip an update by a flag on the device, without the host reading it."""
    return bool(optimizer.defaults.get("fused")) and isinstance(optimizer, (torch.optim.AdamW, torch.optim.Adam))


def num_warmup_steps(train: TrainArguments, total_steps: int) -> int:
    """Warm-up in optimizer steps; shares of the run are rounded up, as in `TrainingArguments.get_warmup_steps`."""
    share = train.warmup_ratio if train.warmup_ratio is not None else (train.warmup_steps if train.warmup_steps < 1 else None)
    return math.ceil(share * total_steps) if share is not None else int(train.warmup_steps)


def build_scheduler(optimizer: torch.optim.Optimizer, train: TrainArguments, total_steps: int) -> Any:
    """transformers' schedule over optimizer steps: stepped once per update on every rank, whatever the number of processes.

    Raises:
        UserError: unknown name.
    """
    from transformers.optimization import get_scheduler

    try:
        return get_scheduler(
            train.lr_scheduler_type,
            optimizer,
            num_warmup_steps=num_warmup_steps(train, total_steps),
            num_training_steps=total_steps,
            scheduler_specific_kwargs=json.loads(train.lr_scheduler_kwargs) if train.lr_scheduler_kwargs else {},
        )
    except ValueError as error:
        raise user_error("--lr_scheduler_type", str(error), "take one of linear, cosine, constant, constant_with_warmup, ...") from None
