"""For scripts with transformers' Trainer, or one built on it (TRL's SFTTrainer): a step that runs out of memory is redone in place.

    from harness.callbacks import OomRecoveryMixin

    class MyTrainer(OomRecoveryMixin, Trainer):     # or SFTTrainer; the mixin comes first
        pass

On one process and under DDP, all ranks vote on the host before every collective of a step and before each update; where one has run out of
memory, all cut their micro-batches in half and compute the step again: same samples, same weight of each token, same random states. Before
step 1 a dry run on the longest samples shows what does not fit, and the optimizer's state is allocated.

Under FSDP2 and DeepSpeed a step cannot be taken back from inside a Trainer. There a lack of memory goes to `harness run`, which ends all
ranks within seconds and starts the command again one rung lower; and under FSDP2 gradients are reduced after every micro-batch, because
accumulating them unreduced keeps them whole on every rank, which costs more than a smaller micro-batch saves.

`OomRecoveryCallback` alone, without the mixin, does the parts that a callback can: the reduction under FSDP2 and the optimizer's state.
"""

from __future__ import annotations

import copy
import logging
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from harness.oom_reports import is_out_of_memory
from harness.recovery import random_state, restore_random_state
from harness.safe_loop import allocate_optimizers, can_redo, hand_over
from harness.step_redo import StepRedo

log = logging.getLogger("harness")
# Samples whose length is looked at for the dry run: all of a small set, every n-th of a large one.
LOOKED_AT = 2000
# Counters of TRL's trainers that a forward adds to.
_COUNTERS = ("_metrics", "_total_train_tokens")


def reduce_every_micro_batch(accelerator: Any) -> bool:
    """Under FSDP2: reduce gradients after each micro-batch. True where that was changed."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    kwargs = accelerator.gradient_state.plugin_kwargs
    if plugin is None or getattr(plugin, "fsdp_version", 1) != 2 or kwargs.get("sync_each_batch"):
        return False
    kwargs["sync_each_batch"] = True
    return True


def _shared_state() -> Any:
    """What every Accelerator of this process shares, for a callback that is not given its Trainer's."""
    from accelerate.state import AcceleratorState, GradientState

    state = AcceleratorState()
    return SimpleNamespace(
        state=state, gradient_state=GradientState(), distributed_type=state.distributed_type, is_main_process=state.is_main_process
    )


class OomRecoveryCallback(TrainerCallback):
    """What makes a lack of memory rarer, and earlier: under FSDP2 no unreduced gradients; the optimizer's state before step 1.

    Args:
        dry_run: with the mixin: forward and backward on the longest samples before step 1.
    """

    def __init__(self, dry_run: bool = True) -> None:
        self.dry_run = dry_run
        self.trainer: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Called by the Trainer, on all ranks, when model and optimizer are prepared and a checkpoint is loaded."""
        accelerator = self.trainer.accelerator if self.trainer is not None else _shared_state()
        if reduce_every_micro_batch(accelerator) and accelerator.is_main_process:
            log.warning("FSDP2: gradients are reduced after every micro-batch (sync_each_batch)")
        if can_redo(accelerator) and model is not None and optimizer is not None:
            allocate_optimizers([model], [optimizer])
        if self.trainer is not None and self.dry_run:
            self.trainer._oom_dry_run(kwargs.get("train_dataloader"))


class OomRecoveryMixin:
    """Put before Trainer or SFTTrainer among the bases of a class.

    Attributes:
        step_redo: with `rows`, the samples at once now, and `steps_down`; None before the first step and where steps cannot be redone.
    """

    step_redo: StepRedo | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        trainer: Any = self
        callback = next((each for each in trainer.callback_handler.callbacks if isinstance(each, OomRecoveryCallback)), None)
        if callback is None:
            callback = OomRecoveryCallback()
            trainer.add_callback(callback)
        callback.trainer = self

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of one micro-batch, redone in smaller pieces with the rest of its step where memory runs out."""
        trainer: Any = self
        if not can_redo(trainer.accelerator) or trainer.args.n_gpu > 1:
            return self._guarded_step(model, inputs, num_items_in_batch)
        if self.step_redo is None or self.step_redo.models[0] is not model:
            self.step_redo = StepRedo(trainer.accelerator, [model])
        redo = self.step_redo
        if not redo.pending:
            counters = self._counters()
            redo.before_redo = lambda: self.__dict__.update(copy.deepcopy(counters))
        count = trainer.current_gradient_accumulation_steps
        is_mean = num_items_in_batch is None or getattr(trainer, "loss_is_scaled_for_ga", None) is False
        parent = super().training_step  # type: ignore[misc]

        def compute(piece: Any, share: Any) -> Tensor:
            # The Trainer divides a mean by the micro-batches of the step; a sum that is divided by the step's tokens needs no weight.
            trainer.current_gradient_accumulation_steps = count / share if is_mean else count
            try:
                return parent(model, piece, num_items_in_batch)
            finally:
                trainer.current_gradient_accumulation_steps = count

        try:
            return redo.micro_batch(inputs, compute, is_last=trainer.accelerator.sync_gradients)
        except Exception as error:
            if is_out_of_memory(error):
                hand_over(error, step=trainer.state.global_step + 1)
            raise

    def _guarded_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Tensor:
        try:
            return super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        except Exception as error:
            if is_out_of_memory(error):
                hand_over(error, step=self.state.global_step + 1)  # type: ignore[attr-defined]
            raise

    def _counters(self) -> dict[str, Any]:
        return {name: copy.deepcopy(getattr(self, name)) for name in _COUNTERS if hasattr(self, name)}

    def _oom_dry_run(self, loader: Any) -> None:
        """Forward and backward on the longest samples, before step 1; leaves no gradient, no count and the same random states."""
        trainer: Any = self
        accelerator = trainer.accelerator
        is_fsdp2 = getattr(getattr(accelerator.state, "fsdp_plugin", None), "fsdp_version", 1) == 2
        batch = longest_batch(loader, trainer.args.per_device_train_batch_size)
        if batch is None or not (can_redo(accelerator) or is_fsdp2):
            return
        before, counters, model = random_state(accelerator.device), self._counters(), trainer.model_wrapped
        accelerator.gradient_state._set_sync_gradients(True)
        trainer.current_gradient_accumulation_steps = 1
        _, num_items = trainer.get_batch_samples(iter([batch]), 1, accelerator.device)
        self.training_step(model, trainer._prepare_inputs(batch), num_items)
        model.zero_grad(set_to_none=True)
        restore_random_state(before, accelerator.device)
        self.__dict__.update(counters)


def longest_batch(loader: Any, num_samples: int) -> Any:
    """A batch of the longest samples; None where they cannot be looked at (a stream, samples without `input_ids`)."""
    dataset, collate = getattr(loader, "dataset", None), getattr(loader, "collate_fn", None)
    if dataset is None or collate is None or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return None
    indices = range(0, len(dataset), max(1, len(dataset) // LOOKED_AT))
    try:
        lengths = {index: len(dataset[index]["input_ids"]) for index in indices}
    except (KeyError, TypeError, IndexError):
        return None
    longest = sorted(lengths, key=lambda index: lengths[index], reverse=True)[:num_samples]
    return collate([dataset[index] for index in longest]) if longest else None
