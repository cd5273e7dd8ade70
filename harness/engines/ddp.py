"""DDP, one GPU, one CPU process: every rank holds the whole model in float32 and computes in the run's precision."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from harness.backward_updates import BackwardUpdates
from harness.batches import MicroBatch, StepBatch
from harness.blocks import Blocks, compile_backend
from harness.engines import dcp
from harness.engines.base import (
    Build,
    advance,
    average_gradients,
    clip_and_step,
    compute_dtype,
    may_halve,
    micro_batch_loss,
    place_schedule,
    scaled_step,
    trained,
)
from harness.ladder import MemorySettings
from harness.loss import install_loss
from harness.modeling import fill, num_parameters
from harness.optim import build_optimizer, build_scheduler, parameter_groups
from harness.stored_state import StoredState


class DdpEngine:
    """Data parallel over whole copies of the model; with one process, plain training."""

    in_process = frozenset({"micro_batch_size", "activation_checkpointing", "activation_offload", "optimizer_bf16"})

    def __init__(self, build: Build) -> None:
        self.name = "ddp"
        self.build, self.settings, self.lora = build, build.settings, build.lora
        self.coordinator = build.coordinator
        self.device = build.coordinator.device
        train = build.args.train
        self.module: Any = fill(build.empty_model, self.device, broadcast=self._broadcast)
        self.blocks = Blocks(self.module, compile_backend(build.args.model, self.device))
        install_loss(self.module, build.settings.loss_chunk_size, compiled=self.blocks.is_compiled, share=build.share)
        self.blocks.set_checkpointing(build.settings.activation_checkpointing, build.settings.activation_offload)
        self.module.train()
        self.optimizer = build_optimizer(parameter_groups(self.module.named_parameters(), train.weight_decay), train, self.settings)
        self.updates = BackwardUpdates(self.optimizer) if train.optim_in_backward else None
        self.scheduler = build_scheduler(self.optimizer, train, build.total_steps)
        self.dtype = compute_dtype(build.precision)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=build.precision == "fp16", init_scale=2.0**16)
        self.skipped = torch.zeros((), device=self.device)
        self.check: Callable[[], None] | None = None
        self.wrapped: nn.Module = self._wrap()

    def _broadcast(self, tensor: Tensor) -> None:
        if self.coordinator.num_processes > 1:
            torch.distributed.broadcast(tensor, src=0)

    def _wrap(self) -> nn.Module:
        train = self.build.args.train
        if self.coordinator.num_processes == 1:
            return self.module
        options: dict[str, Any] = {"find_unused_parameters": bool(train.ddp_find_unused_parameters)}
        if train.ddp_bucket_cap_mb is not None:
            options["bucket_cap_mb"] = train.ddp_bucket_cap_mb
        ids = [self.device.index] if self.device.type == "cuda" else None
        # Every rank filled its copy with the same values, so nothing has to be sent at start.
        return DistributedDataParallel(self.module, device_ids=ids, init_sync=False, gradient_as_bucket_view=True, **options)

    def install_votes(self, check: Callable[[], None]) -> None:
        """From here on gradients are summed by one voted pass after the last backward, not by DDP's hooks inside backward.

        A rank that runs out of memory then leaves no half-done reduction behind, and all can redo the step.
        """
        if self.coordinator.num_processes > 1:
            self.check, self.wrapped = check, self.module
            self.build.vote_on_exchanges(check)

    def _sum_gradients(self) -> None:
        """Averages gradients over ranks, in place; every rank votes before the first collective."""
        assert self.check is not None
        self.check()
        average_gradients(self.module.parameters(), self.device, self.coordinator.num_processes)

    def _autocast(self) -> Any:
        # In float32 none, rather than a disabled one: that would undo an evaluation's own half precision.
        return contextlib.nullcontext() if self.dtype == torch.float32 else torch.autocast(self.device.type, self.dtype)

    def forward_backward(self, batch: StepBatch, num_label_tokens: int) -> Tensor:
        total = torch.zeros((), device=self.device)
        # DDP averages gradients over ranks; the loss is a sum over all ranks' tokens.
        scale = self.coordinator.num_processes / max(num_label_tokens, 1)
        micros = self.build.micro_batches(batch, self.settings.micro_batch_size)
        for index, micro in enumerate(micros):
            last = index == len(micros) - 1
            if self.updates is not None:
                self.updates.micro_batch(index, len(micros))
            sync = contextlib.nullcontext() if last or self.wrapped is self.module else self.wrapped.no_sync()  # type: ignore[operator]
            with sync:
                with self._autocast():
                    loss = micro_batch_loss(self.wrapped, micro, self.device)
                self.scaler.scale(loss * scale).backward()
            total += loss.detach()
        if self.check is not None:
            self._sum_gradients()
        return total

    def step(self) -> Tensor:
        parameters = list(self.module.parameters())
        max_norm = self.build.args.train.max_grad_norm
        if self.updates is not None:
            norm, updated = self.updates.finish(self.skipped), True
        elif self.scaler.is_enabled():
            norm, updated = scaled_step(self.scaler, parameters, self.optimizer, max_norm, self.skipped)
        else:
            norm, updated = clip_and_step(parameters, self.optimizer, max_norm, self.skipped), True
        if updated:
            advance(self.scheduler)
        return norm

    def reset_step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self.check is None and self.wrapped is not self.module:
            # After a failed backward DDP's reducer waits for gradients that never come; a new one starts clean.
            self.wrapped = self._wrap()

    @torch.no_grad()
    def eval_loss(self, micro: MicroBatch) -> Tensor:
        self.module.eval()
        try:
            with self._autocast():
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

    def snapshot_state(self) -> Any:
        return dcp.snapshot(self)

    def load_snapshot(self, state: Any) -> None:
        dcp.load_snapshot(self, state)

    def adopt(self, source: StoredState, num_updates: int) -> list[str]:
        place_schedule(self.scheduler, num_updates)
        return dcp.adopt(self.module, self.optimizer, source)

    def full_weights(self, trainable_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in trained(self.module, trainable_only):
            yield name, parameter.detach()

    def apply(self, settings: MemorySettings) -> bool:
        changed = self.settings.differing(settings)
        if not changed <= self.in_process or not may_halve(self.optimizer, self.settings, settings):
            return False
        self.blocks.set_checkpointing(settings.activation_checkpointing, settings.activation_offload)
        self.settings = settings
        return True

    def describe(self) -> str:
        copies = self.coordinator.num_processes
        noun = "copy" if copies == 1 else "copies"
        dtype = str(next(self.module.parameters()).dtype).removeprefix("torch.")
        return f"{num_parameters(self.module):,} parameters, {copies} whole {noun} in {dtype} on {self.device.type}"

    def close(self) -> None:
        self.wrapped = self.module
