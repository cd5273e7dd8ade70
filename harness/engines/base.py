"""What every engine offers the trainer, and the few pieces they share.

An engine hides how parameters, gradients and optimizer state are spread over ranks. The trainer never asks which one it has.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.args import Arguments
from harness.batches import MicroBatch, StepBatch
from harness.bf16_adam import AdamWBf16
from harness.coordination import Coordinator
from harness.isolation import documents
from harness.ladder import MemorySettings
from harness.lora import AttachedLora
from harness.sequence_parallel import SequenceParallel
from harness.stored_state import StoredState


@dataclasses.dataclass
class Build:
    """What an engine is built from.

    Attributes:
        args: all arguments of the run.
        coordinator: this process among the others.
        empty_model: harness.modeling.EmptyModel, to be filled and sharded.
        settings: memory settings in force.
        precision: "bf16", "fp16" or "fp32", resolved.
        total_steps: optimizer steps of the whole run, for the schedule.
        lora: adapters in the empty model; None without.
        sequence: this process among those that share its samples; None where each has its own.
    """

    args: Arguments
    coordinator: Coordinator
    empty_model: Any
    settings: MemorySettings
    precision: str
    total_steps: int
    lora: AttachedLora | None = None
    sequence: SequenceParallel | None = None

    def micro_batches(self, batch: StepBatch, micro_batch_size: int) -> list[MicroBatch]:
        """The samples of a step, cut by the settings in force; rows of a length that can be shared."""
        return batch.micro_batches(micro_batch_size, self.coordinator.sequence_parallel_size)

    @property
    def share(self) -> Any:
        """For `harness.loss.install_loss`."""
        return None if self.sequence is None else self.sequence.sharing

    def vote_on_exchanges(self, check: Callable[[], None]) -> None:
        """From here on `check` is called before every exchange of attention too."""
        if self.sequence is not None:
            self.sequence.check = check


class Engine(Protocol):
    """The interface of all engines.

    Attributes:
        name: "ddp", "fsdp", "zero1", "zero2", "zero3", "device_map".
        module: the model; the object to call is `wrapped`.
        settings: memory settings in force.
        in_process: names of the settings that `apply` can change.
        optimizer, scheduler: the objects whose state a checkpoint holds.
        lora: the model's adapters; None without.
    """

    name: str
    module: nn.Module
    settings: MemorySettings
    in_process: frozenset[str]
    optimizer: Any
    lora: AttachedLora | None

    def forward_backward(self, batch: StepBatch, num_label_tokens: int) -> Tensor:
        """Gradients of one optimizer step, cut by the settings.

        Args:
            batch: this rank's samples of the step.
            num_label_tokens: label tokens of the whole step, over all ranks.

        Returns:
            This rank's sum of token losses, scalar float32 on the device; the host does not read it.
        """

    def step(self) -> Tensor:
        """Clips, updates, advances the schedule, drops gradients. Returns the global gradient norm before clipping, on the device."""

    def reset_step(self) -> None:
        """After a failed forward or backward: as if the step had never begun."""

    def install_votes(self, check: Callable[[], None]) -> None:
        """From here on `check` is called before every collective of a step; it raises where another rank ran out of memory."""

    def eval_loss(self, micro: MicroBatch) -> Tensor:
        """Sum of token losses of one evaluation batch, scalar float32 on the device, no gradients. Called equally often on all ranks."""

    def learning_rate(self) -> float: ...

    def num_skipped_steps(self) -> int:
        """Updates left out so far because of non-finite gradients. Reads the device."""

    def save(self, directory: Path) -> Future[None]:
        """Starts writing weights, optimizer and schedule, sharded; called on all ranks. The future is done when this rank's files are."""

    def load(self, directory: Path) -> None:
        """Reads what `save` wrote, on all ranks."""

    def snapshot_state(self) -> Any:
        """This rank's part of what `save` writes, as a tree of tensors and plain values, not copied; called on all ranks."""

    def load_snapshot(self, state: Any) -> None:
        """Takes over what an engine of the same layout gave; called on all ranks."""

    def adopt(self, source: StoredState, num_updates: int) -> list[str]:
        """Takes weights, and Adam's averages where both have them, that another engine, number of ranks or program wrote; on all ranks.

        Args:
            num_updates: where the schedule goes on.

        Returns:
            What begins anew, in words.
        """

    def full_weights(self, trainable_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Every parameter (or every one that trains) by name, whole, one at a time; called on all ranks, valid on the main process."""

    def apply(self, settings: MemorySettings) -> bool:
        """Changes settings in process; False when that needs a rebuild or relaunch."""

    def describe(self) -> str:
        """Layout of devices and shards, one line."""

    def close(self) -> None: ...


def trained(module: nn.Module, only: bool) -> Iterator[tuple[str, nn.Parameter]]:
    """The module's parameters by name; with `only`, those that train."""
    return ((name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad or not only)


def compute_dtype(precision: str) -> torch.dtype:
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]


def micro_batch_loss(call: Callable[..., Tensor], micro: MicroBatch, device: torch.device) -> Tensor:
    """Sum of token losses of a micro-batch: copies it to the device without waiting and calls the model with labels."""
    ids, ends, tokens, positions, labels = (
        None if tensor is None else tensor.to(device, non_blocking=True)
        for tensor in (micro.document_ids, micro.document_ends, micro.input_ids, micro.position_ids, micro.labels)
    )
    with documents(ids, ends):
        return call(input_ids=tokens, position_ids=positions, labels=labels, **reporting(micro))


def reporting(micro: MicroBatch) -> dict[str, Callable[[Tensor], None]]:
    """The argument by which the model's forward reports row losses, where somebody wants to know."""
    return {} if micro.report is None else {"report": functools.partial(micro.report, micro)}


def clip_and_step(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, max_norm: float, counter: Tensor) -> Tensor:
    """Clips to the global norm and updates; an update with a non-finite norm is left out on every rank, counted in `counter`.

    The norm is over all ranks, so all agree without a word. With an optimizer that takes `found_inf` the host never waits.

    Args:
        counter: scalar float32 on the device, raised by one for a left-out update.

    Returns:
        The norm before clipping, scalar on the device.
    """
    from harness.optim import takes_found_inf

    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm if max_norm > 0 else float("inf"))
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    norm = norm.detach()
    found_inf = (~torch.isfinite(norm)).float().to(counter.device)
    counter += found_inf
    if takes_found_inf(optimizer):
        optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        optimizer.grad_scale = None  # type: ignore[attr-defined]
        optimizer.step()
    elif not bool(found_inf):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def scaled_step(
    scaler: torch.amp.GradScaler, parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, max_norm: float, counter: Tensor
) -> tuple[Tensor, bool]:
    """fp16's update: unscales, clips, and leaves the update out on all ranks where any gradient overflowed.

    Returns:
        The norm before clipping, and whether the update was made.
    """
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm if max_norm > 0 else float("inf"))
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    updated = scaler.get_scale() >= before
    counter += float(not updated)
    return norm.detach(), updated


def average_gradients(parameters: Iterable[nn.Parameter], device: torch.device, num_processes: int) -> None:
    """Averages gradients over ranks, in place; every rank holds all of them, and all call it."""
    gradients = []
    for parameter in parameters:
        if parameter.requires_grad:
            if parameter.grad is None:  # unused on this rank, perhaps not on others
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
    for dtype in {gradient.dtype for gradient in gradients}:
        same = [gradient for gradient in gradients if gradient.dtype == dtype]
        # NCCL takes them as one operation; gloo one after the other.
        together = dist._coalescing_manager(device=device) if device.type == "cuda" else contextlib.nullcontext()
        with together:
            for gradient in same:
                dist.all_reduce(gradient)
        torch._foreach_div_(same, num_processes)


def may_halve(optimizer: torch.optim.Optimizer, old: MemorySettings, new: MemorySettings) -> bool:
    """Makes the optimizer's averages bfloat16 where the new settings say so; False where it cannot, or they were to grow again."""
    if old.optimizer_bf16 == new.optimizer_bf16:
        return True
    if old.optimizer_bf16 or not isinstance(optimizer, AdamWBf16):
        return False
    optimizer.halve()
    return True


def materialise_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Allocates the optimizer's state before training, so that memory that does not suffice shows before step 1.

    torch makes it by an update with zero gradients at learning rate 0; the step counters it leaves are set back.
    """
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    if optimizer.state:
        return
    get_optimizer_state_dict(module, optimizer)
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"].zero_()
        elif "step" in state:
            state["step"] = 0


def place_schedule(scheduler: Any, num_updates: int) -> None:
    """Puts a schedule where it is after so many updates."""
    if hasattr(scheduler, "last_batch_iteration"):  # DeepSpeed's own
        scheduler.step(num_updates - 1)
        return
    scheduler.last_epoch = num_updates - 1
    advance(scheduler)


def load_schedule(scheduler: Any, state: dict[str, Any]) -> None:
    """Puts a schedule where a saved one was. Its rates are made anew: this run may have another length."""
    scheduler.load_state_dict(state)
    renew_rates(scheduler)


def renew_rates(scheduler: Any) -> None:
    """Computes the rates of where the schedule is."""
    done = scheduler.last_batch_iteration + 1 if hasattr(scheduler, "last_batch_iteration") else scheduler.last_epoch
    place_schedule(scheduler, done)


def advance(scheduler: Any) -> None:
    """Steps a schedule; silent where the optimizer was stepped out of its sight (by a loss scaler)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        scheduler.step()
