"""One process, the model spread over all cards by a device map, micro-batches passing through them as through a pipeline."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harness.args import Arguments
from harness.batches import MicroBatch, StepBatch
from harness.blocks import Blocks, compile_backend
from harness.engines import dcp
from harness.engines.base import (
    Build,
    advance,
    clip_and_step,
    compute_dtype,
    place_schedule,
    reporting,
    scaled_step,
    trained,
)
from harness.findings import UserError, has_errors
from harness.isolation import documents
from harness.ladder import MemorySettings
from harness.loss import has_router_loss, install_loss
from harness.model_units import MapJob, check_device_map, device_of, find_units
from harness.modeling import EmptyModel, fill, max_positions, num_parameters
from harness.optim import build_optimizer, build_scheduler, parameter_groups
from harness.partition import Device, format_gib
from harness.pipeline import Pipeline
from harness.placement import MapChoice, device_map_for, torch_device
from harness.stored_state import StoredState

log = logging.getLogger("harness")


def map_job(args: Arguments, config: Any, settings: MemorySettings, precision: str, weights: torch.dtype) -> MapJob:
    """What the map must leave room for: gradients, AdamW's two states, 16-bit copies of wide weights, activations in flight."""
    copies = 2.0 if weights == torch.float32 and precision != "fp32" else 0.0
    block_size = args.data.block_size or min(max_positions(config) or 4096, 4096)
    return MapJob(
        training_bytes_per_param=3.0 * (weights.itemsize if args.lora.lora_r is None else 4) + copies,
        lora_r=args.lora.lora_r,
        num_tokens=settings.micro_batch_size * block_size,
        in_flight=settings.in_flight_micro_batches or args.train.gradient_accumulation_steps,
        activation_checkpointing=settings.activation_checkpointing == "full",
        loss_chunk_size=settings.loss_chunk_size,
    )


def fill_placed(empty: EmptyModel, device_map: Mapping[str, Device]) -> Any:
    """The model filled block by block on the first card, each block going on to its own before the next is made.

    So its values are those that one card would have, and no device ever holds more than its share and one block.

    Raises:
        UserError: the map leaves a module out, cuts a block, or separates tied weights.
    """
    problems = check_device_map(empty.model, device_map, -1)
    if has_errors(problems):
        raise UserError(problems)
    first = torch_device(min(device_map.values(), key=lambda device: (isinstance(device, str), device)))

    def move(name: str, unit: nn.Module) -> None:
        device = device_of(device_map, name) if name else None
        if device is not None:
            unit.to(torch_device(device))
            return
        for part in find_units(unit):
            place = device_of(device_map, part.names[0])
            assert place is not None
            for member in part.names:
                unit.get_submodule(member).to(torch_device(place))

    model = fill(empty, first, shard=move)
    if first.type == "cuda":
        torch.cuda.empty_cache()  # what the blocks of other cards took on their way through this one
    return model


class DeviceMapEngine:
    """Trains a model whose parts sit on several cards of this process."""

    in_process = frozenset({"micro_batch_size", "activation_checkpointing", "in_flight_micro_batches"})

    def __init__(self, build: Build) -> None:
        self.name = "device_map"
        self.build, self.settings, self.lora = build, build.settings, build.lora
        self.coordinator = build.coordinator
        self.device = build.coordinator.device
        train = build.args.train
        config = build.empty_model.config
        weights = build.empty_model.dtype if build.lora is None else compute_dtype(build.precision)
        job = map_job(build.args, config, build.settings, build.precision, weights)
        self.choice: MapChoice = device_map_for(build.args, config, job, weights)
        if self.settings.in_flight_micro_batches == 0:  # a number, so that there is something to lower when memory runs out
            self.settings = self.settings.replace(in_flight_micro_batches=self.choice.in_flight)
        self.module: Any = fill_placed(build.empty_model, self.choice.device_map)
        self._log_memory()
        # Each card has code of its own to compile. Without, the host cannot give two cards work as fast as they do it (8B on two H200s).
        self.blocks = Blocks(self.module, compile_backend(build.args.model, self.device))
        install_loss(self.module, build.settings.loss_chunk_size, compiled=self.blocks.is_compiled)
        self.blocks.set_checkpointing(build.settings.activation_checkpointing)
        self.module.train()
        recompute = build.settings.activation_checkpointing != "none"
        whole = has_router_loss(config)
        if whole:
            log.warning("the router's loss is made of all layers at once: one micro-batch at a time passes through the devices")
        self.pipeline = Pipeline(self.module, self.choice.device_map, recompute=recompute, whole=whole)
        self.module.hf_device_map = dict(self.choice.device_map)
        self.optimizer = build_optimizer(parameter_groups(self.module.named_parameters(), train.weight_decay), train)
        self.scheduler = build_scheduler(self.optimizer, train, build.total_steps)
        self.dtype = compute_dtype(build.precision)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=build.precision == "fp16", init_scale=2.0**16)
        self.skipped = torch.zeros((), device=self.device)

    def _log_memory(self) -> None:
        for card in sorted({device for device in self.choice.device_map.values() if isinstance(device, int)}):
            log.info("GPU %d after loading: %s in use", card, format_gib(torch.cuda.memory_allocated(card)))
        for name, parameter in self.module.named_parameters():
            log.debug("%s on %s", name, parameter.device)

    def _compute_in_dtype(self) -> None:
        """Turns autocast on for this thread.

        Not as a context: leaving one empties the cache of 16-bit weights that all micro-batches in flight share.
        """
        if self.dtype != torch.float32:
            torch.set_autocast_enabled(self.device.type, True)
            torch.set_autocast_dtype(self.device.type, self.dtype)

    def _place(self, micro: MicroBatch) -> tuple[dict[str, Any], list[Tensor | None]]:
        """A micro-batch on its devices: tokens, and what `documents` takes, where the embedding is, labels where the head is."""
        start, end = torch_device(self.pipeline.input_device), torch_device(self.pipeline.head_device)
        inputs = {
            "input_ids": micro.input_ids.to(start, non_blocking=True),
            "position_ids": micro.position_ids.to(start, non_blocking=True),
            "labels": micro.labels.to(end, non_blocking=True),
        }
        apart = (micro.document_ids, micro.document_ends)
        return inputs | reporting(micro), [None if each is None else each.to(start, non_blocking=True) for each in apart]

    def install_votes(self, check: Callable[[], None]) -> None:
        """One process has nobody to agree with."""

    def forward_backward(self, batch: StepBatch, num_label_tokens: int) -> Tensor:
        scale = 1.0 / max(num_label_tokens, 1)
        micros = batch.micro_batches(self.settings.micro_batch_size)
        sums: list[Tensor | None] = [None] * len(micros)

        def loss_of(index: int, inputs: dict[str, Any], apart: list[Tensor | None]) -> Callable[[], Tensor]:
            def loss() -> Tensor:
                self._compute_in_dtype()
                with documents(*apart):
                    total = self.module(**inputs)
                sums[index] = total.detach()
                return self.scaler.scale(total * scale)

            return loss

        # All inputs go to their devices first: a copy from ordinary host memory later would wait for the queue of that device.
        calls = [loss_of(index, *self._place(micro)) for index, micro in enumerate(micros)]
        try:
            with documents(None):  # what the forwards set, each in its turn, ends with the step
                self.pipeline.run(calls, self.settings.in_flight_micro_batches)
        finally:
            torch.clear_autocast_cache()
        return torch.stack([one for one in sums if one is not None]).sum().to(self.device, non_blocking=True)

    def step(self) -> Tensor:
        parameters = list(self.module.parameters())
        max_norm = self.build.args.train.max_grad_norm
        if self.scaler.is_enabled():
            norm, updated = scaled_step(self.scaler, parameters, self.optimizer, max_norm, self.skipped)
        else:
            norm, updated = clip_and_step(parameters, self.optimizer, max_norm, self.skipped), True
        if updated:
            advance(self.scheduler)
        return norm

    def reset_step(self) -> None:
        # The pipeline has already given up its micro-batches; only their gradients are left.
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def eval_loss(self, micro: MicroBatch) -> Tensor:
        self.module.eval()
        try:
            inputs, apart = self._place(micro)
            plain = self.dtype == torch.float32
            autocast = contextlib.nullcontext() if plain else torch.autocast(self.device.type, self.dtype)
            with self.pipeline.whole_forward(), documents(*apart), autocast:
                return self.module(**inputs).to(self.device, non_blocking=True)
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
        if not changed <= self.in_process:
            return False
        self.blocks.set_checkpointing(settings.activation_checkpointing)
        self.pipeline.recompute = settings.activation_checkpointing != "none"
        self.settings = settings
        return True

    def describe(self) -> str:
        depth = self.settings.in_flight_micro_batches
        devices: dict[Device, int] = {}
        for name, parameter in self.module.named_parameters():
            device = device_of(self.choice.device_map, name)
            assert device is not None
            devices[device] = devices.get(device, 0) + parameter.numel()
        shares = ", ".join(f"{'GPU ' if isinstance(device, int) else ''}{device}: {count:,}" for device, count in devices.items())
        flight = f"up to {depth} micro-batches in flight" if depth else "all micro-batches of a step in flight"
        return f"{num_parameters(self.module):,} parameters in one process, map {self.choice.strategy} ({shares}), {flight}"

    def close(self) -> None:
        self.pipeline.close()
