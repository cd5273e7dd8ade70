"""FSDP2: torch's `fully_shard` on every decoder layer, applied by us.

Not through `accelerator.prepare`: on CPU accelerate turns an FSDP config into DDP or into unconnected processes without a word, and
recovery from out-of-memory needs the sharded parameters in our hands.

Accumulation reduce-scatters every micro-batch: leaving the reduction out until the last one would keep whole float32 gradients on every
rank, and the smaller micro-batch that was to save memory would cost it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from harness.backward_updates import BackwardUpdates
from harness.batches import MicroBatch, StepBatch
from harness.blocks import Blocks, compile_backend
from harness.engines import dcp, fsdp_reset
from harness.engines.base import (
    Build,
    advance,
    clip_and_step,
    compute_dtype,
    may_halve,
    micro_batch_loss,
    place_schedule,
    scaled_step,
    trained,
)
from harness.findings import user_error
from harness.float8 import check_float8, convert_to_float8, gathers_float8, renew_scales
from harness.four_bit import mark_packed
from harness.fsdp_templates import FsdpTemplate
from harness.host_threads import take_cores
from harness.ladder import MemorySettings
from harness.loss import install_loss
from harness.modeling import fill, layer_units, num_parameters
from harness.optim import build_optimizer, build_scheduler, parameter_groups
from harness.stored_state import StoredState


def build_mesh(template: FsdpTemplate, num_processes: int, num_local_processes: int, device_type: str) -> DeviceMesh:
    """One dimension of shards, or (replicas, shards) for hybrid sharding."""
    replicas, shards = template.group_sizes(num_processes, num_local_processes)
    if replicas == 1:
        return init_device_mesh(device_type, (shards,), mesh_dim_names=("shard",))
    return init_device_mesh(device_type, (replicas, shards), mesh_dim_names=("replicate", "shard"))


def units_to_wrap(model: nn.Module, template: FsdpTemplate) -> list[tuple[str, nn.Module]]:
    """The modules that become a group of their own, by the template's policy.

    Raises:
        UserError: a class name that is not in the model; the message holds those that are.
    """
    if template.wrap_policy == "none":
        return []
    if template.wrap_policy == "size":
        return [
            (name, module)
            for name, module in layer_units(model)
            if sum(parameter.numel() for parameter in module.parameters()) >= template.min_num_params
        ]
    if not template.wrap_class_names:
        return layer_units(model)
    names = set(template.wrap_class_names)
    present = {type(module).__name__ for module in model.modules()}
    missing = sorted(names - present)
    if missing:
        blocks = sorted({type(module).__name__ for _, module in layer_units(model)}) or sorted(present)
        raise user_error(
            "fsdp_transformer_layer_cls_to_wrap", f"{', '.join(missing)} is not in {type(model).__name__}", f"use {', '.join(blocks)}"
        )
    return [(name, module) for name, module in model.named_modules() if type(module).__name__ in names]


def _voted(base: type, check: Callable[[], None]) -> Any:
    """torch's own collective, with a vote after its buffer was allocated and before it is launched."""

    class Voted(base):  # type: ignore[misc, valid-type]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            check()
            return super().__call__(*args, **kwargs)

    return Voted()


class FsdpEngine:
    """Parameters, gradients and optimizer state sharded over the ranks as DTensors."""

    in_process = frozenset(
        {"micro_batch_size", "activation_checkpointing", "activation_offload", "optimizer_bf16", "reshard_after_forward"}
    )

    def __init__(self, build: Build, template: FsdpTemplate) -> None:
        self.name = "fsdp"
        self.build, self.settings, self.template, self.lora = build, build.settings, template, build.lora
        self.coordinator = build.coordinator
        self.device = build.coordinator.device
        train = build.args.train
        # accelerate's YAML exports it; transformers would then leave ranks above 0 unfilled.
        os.environ.pop("FSDP_CPU_RAM_EFFICIENT_LOADING", None)
        self.mesh = build_mesh(template, self.coordinator.num_processes, self.coordinator.num_local_processes, self.device.type)
        self.offload = build.settings.param_offload != "none"
        if self.offload:
            take_cores(self.coordinator.num_local_processes)
        self.options = self._options(build.precision)
        self.fp8 = "no" if build.args.model.no_custom_kernels else build.args.model.fp8
        self.gathers_float8 = False
        if self.fp8 != "no":
            check_float8(self.device)
            shards = self.mesh["shard"].size()
            self.gathers_float8 = gathers_float8(build.args.model.fp8_all_gather, self.fp8, shards, offloads=self.offload)
        self.wrap = {name for name, _ in units_to_wrap(build.empty_model.model, template)}
        self.module: Any = fill(build.empty_model, self.device, self._shard, broadcast=lambda tensor: dist.broadcast(tensor, src=0))
        self.blocks = Blocks(self.module, compile_backend(build.args.model, self.device))
        install_loss(self.module, build.settings.loss_chunk_size, compiled=self.blocks.is_compiled, share=build.share)
        self.blocks.set_checkpointing(build.settings.activation_checkpointing, build.settings.activation_offload)
        self.module.train()
        self.optimizer = build_optimizer(parameter_groups(self.module.named_parameters(), train.weight_decay), train, self.settings)
        self.updates = BackwardUpdates(self.optimizer) if train.optim_in_backward else None
        self.scheduler = build_scheduler(self.optimizer, train, build.total_steps)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=build.precision == "fp16", init_scale=2.0**16)
        self.skipped = torch.zeros((), device="cpu" if self.offload else self.device)
        self._assert_sharded()
        self._gather_ahead()
        self._weights_have_changed()

    def _options(self, precision: str) -> dict[str, Any]:
        dtype = compute_dtype(precision)
        reduce_dtype = torch.bfloat16 if self.build.args.train.reduce_dtype == "bf16" else torch.float32
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype) if dtype != torch.float32 else MixedPrecisionPolicy()
        offload: OffloadPolicy = CPUOffloadPolicy(pin_memory=self.device.type == "cuda") if self.offload else OffloadPolicy()
        return {
            "mesh": self.mesh,
            "mp_policy": policy,
            "offload_policy": offload,
            "reshard_after_forward": self.settings.reshard_after_forward,
        }

    def _shard(self, name: str, module: nn.Module) -> None:
        if self.fp8 != "no" and name != "":
            convert_to_float8(module, self.fp8, gather_over=self.mesh["shard"].size() if self.gathers_float8 else 0)
        if name in self.wrap or name == "":
            # Blocks inside blocks (a wrapped class within another) were sharded by their own call.
            fully_shard(module, **self.options)
            mark_packed(module)

    def _weights_have_changed(self) -> None:
        """After an update or a load: scales of what is gathered in float8 are computed once, and not for each gathering."""
        if self.gathers_float8:
            renew_scales(self.module)

    def _gather_ahead(self) -> None:
        """Each block's forward and backward start the gathering of the block after it, before computing anything.

        Left to itself torch starts it when the next block is reached, which is late wherever the host is no faster than the GPU.
        """
        blocks = [module for module in self.module.modules() if isinstance(module, FSDPModule) and module is not self.module]
        for here, after in itertools.pairwise(blocks):
            here.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([here])

    def _assert_sharded(self) -> None:
        parameters = list(self.module.parameters())
        assert isinstance(self.module, FSDPModule) and all(isinstance(parameter, DTensor) for parameter in parameters), (
            "FSDP2 was asked for, but not every parameter is sharded"
        )

    def install_votes(self, check: Callable[[], None]) -> None:
        """Every all-gather and reduce-scatter of the step is voted on from here on."""
        from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

        if self.coordinator.num_processes == 1:
            return
        self.build.vote_on_exchanges(check)
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(_voted(DefaultAllGather, check))
                module.set_custom_reduce_scatter(_voted(DefaultReduceScatter, check))

    def forward_backward(self, batch: StepBatch, num_label_tokens: int) -> Tensor:
        total = torch.zeros((), device=self.device)
        # The reduce-scatter averages over all ranks; the loss is a sum over all ranks' tokens.
        scale = self.coordinator.num_processes / max(num_label_tokens, 1)
        micros = self.build.micro_batches(batch, self.settings.micro_batch_size)
        for index, micro in enumerate(micros):
            if self.updates is not None:
                self.updates.micro_batch(index, len(micros))
            loss = micro_batch_loss(self.module, micro, self.device)
            self.scaler.scale(loss * scale).backward()
            total += loss.detach()
        return total

    def step(self) -> Tensor:
        parameters = list(self.module.parameters())
        max_norm = self.build.args.train.max_grad_norm
        if self.updates is not None:
            norm, updated = self.updates.finish(self.skipped, self.mesh.get_group("shard")), True
        elif self.scaler.is_enabled():
            norm, updated = scaled_step(self.scaler, parameters, self.optimizer, max_norm, self.skipped)
        else:
            norm, updated = clip_and_step(parameters, self.optimizer, max_norm, self.skipped), True
        if updated:
            advance(self.scheduler)
        self._weights_have_changed()
        return norm

    def reset_step(self) -> None:
        """Public reset where torch has it (2.13), on both sides of it a zero_grad.

        The reset alone leaves the gradients of gathered parameters that were not reduced yet, and the retry would add to them: exactly
        twice the gradient, with a loss that looks right.
        """
        self.module.zero_grad()
        if hasattr(self.module, "reset_iter_state"):
            self.module.reset_iter_state()
        else:
            fsdp_reset.reset(self.module)
        self.module.zero_grad()

    @torch.no_grad()
    def eval_loss(self, micro: MicroBatch) -> Tensor:
        self.module.eval()
        try:
            return micro_batch_loss(self.module, micro, self.device)
        finally:
            self.module.train()

    def learning_rate(self) -> float:
        return float(self.scheduler.get_last_lr()[0])

    def num_skipped_steps(self) -> int:
        return int(self.skipped.item())

    def loss_scale(self) -> float | None:
        return float(self.scaler.get_scale()) if self.scaler.is_enabled() else None

    def save(self, directory: Path) -> Future[None]:
        return dcp.save(directory, self, self.coordinator)

    def load(self, directory: Path) -> None:
        dcp.load(directory, self, self.coordinator)
        self._weights_have_changed()

    def snapshot_state(self) -> Any:
        return dcp.snapshot(self)

    def load_snapshot(self, state: Any) -> None:
        dcp.load_snapshot(self, state)
        self._weights_have_changed()

    def adopt(self, source: StoredState, num_updates: int) -> list[str]:
        place_schedule(self.scheduler, num_updates)
        fresh = dcp.adopt(self.module, self.optimizer, source)
        self._weights_have_changed()
        return fresh

    def full_weights(self, trainable_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in trained(self.module, trainable_only):
            yield name, cast(DTensor, dcp.unwrapped(parameter.detach()).to(self.device)).full_tensor()

    def apply(self, settings: MemorySettings) -> bool:
        changed = self.settings.differing(settings)
        if not changed <= self.in_process or not may_halve(self.optimizer, self.settings, settings):
            return False
        self.blocks.set_checkpointing(settings.activation_checkpointing, settings.activation_offload)
        if "reshard_after_forward" in changed:
            self.module.set_reshard_after_forward(settings.reshard_after_forward)
        self.settings = settings
        return True

    def describe(self) -> str:
        sizes = " x ".join(f"{size} {name}" for size, name in zip(self.mesh.shape, self.mesh.mesh_dim_names or (), strict=True))
        local = sum(parameter.to_local().numel() for parameter in self.module.parameters())
        where = "host memory" if self.offload else self.device.type
        return (
            f"{num_parameters(self.module):,} parameters, mesh {sizes}, {local:,} of them float32 on this rank in {where}, "
            f"{len(self.wrap)} wrapped blocks"
        )

    def close(self) -> None:
        pass
