"""The training loop. Every line of it is a phase; each component decides for itself whether it is due."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from harness.args import TrainArguments
from harness.batches import StepBatch
from harness.checkpoint import Checkpointer
from harness.coordination import Coordinator
from harness.engines.base import Engine
from harness.evaluation import Evaluator
from harness.metrics import MetricsLog, StepMetrics
from harness.profiling import StepProfiler
from harness.recovery import Recovery
from harness.snapshots import Snapshots
from harness.source_losses import SourceLosses
from harness.step_loader import Begin

log = logging.getLogger("harness")


@dataclasses.dataclass
class TrainState:
    """Where a run is. Everything in here is in every checkpoint.

    Attributes:
        step: optimizer steps done.
        epoch: passes over the training data so far.
        num_input_tokens, num_label_tokens: over all ranks, so far.
        best_metric, best_step: of `--metric_for_best_model`.
        num_bad_evaluations: evaluations in a row without enough improvement.
    """

    step: int = 0
    epoch: float = 0.0
    num_input_tokens: int = 0
    num_label_tokens: int = 0
    best_metric: float | None = None
    best_step: int = -1
    num_bad_evaluations: int = 0
    last_evaluation: dict[str, float] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainState:
        return cls(**{field.name: values[field.name] for field in dataclasses.fields(cls) if field.name in values})


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """Counts of a run, fixed before step 1.

    Attributes:
        max_steps: optimizer steps in total.
        steps_per_epoch: optimizer steps of one pass over the data.
        global_batch_size: samples per optimizer step over all ranks.
        logging_steps, save_steps, eval_steps: intervals in optimizer steps; 0 never.
    """

    max_steps: int
    steps_per_epoch: int
    global_batch_size: int
    logging_steps: int
    save_steps: int
    eval_steps: int


def _interval(value: float, total: int) -> int:
    """An interval in steps; a value below 1 is a share of all steps."""
    return max(1, math.ceil(value * total) if value < 1 else int(value))


def plan_run(train: TrainArguments, *, num_steps: int, steps_per_epoch: int, global_batch_size: int, has_evaluation: bool) -> RunPlan:
    """Resolves epochs, shares and strategies into step counts; `num_steps` are those of `--num_train_epochs`."""
    max_steps = train.max_steps if train.max_steps > 0 else num_steps
    save = {"no": 0, "steps": _interval(train.save_steps, max_steps), "epoch": steps_per_epoch}[train.save_strategy]
    every = train.eval_steps if train.eval_steps is not None else train.logging_steps
    evaluate = {"no": 0, "steps": _interval(every, max_steps), "epoch": steps_per_epoch}[train.eval_strategy]
    return RunPlan(
        max_steps=max_steps,
        steps_per_epoch=steps_per_epoch,
        global_batch_size=global_batch_size,
        logging_steps=_interval(train.logging_steps, max_steps),
        save_steps=save,
        eval_steps=evaluate if has_evaluation else 0,
    )


class NonFiniteError(RuntimeError):
    """The loss or gradients were NaN or infinite and the policy says to stop."""


class NotSavedError(RuntimeError):
    """The last checkpoint of a run, or of a life that was asked to stop, could not be written.

    Attributes:
        older: name of the newest one that there is; "" for none.
    """

    def __init__(self, message: str, older: str) -> None:
        super().__init__(message)
        self.older = older


class LagWatch:
    """Finds the rank that the others wait for, from how long each has waited on the host: that one waits least.

    What a GPU does alone is not seen here, for the host does not wait for it; `harness doctor` compares the cards.
    """

    SHARE, LEAST_S = 0.2, 0.05  # of a step, and seconds a step: below that it is noise

    def __init__(self, is_main_process: bool) -> None:
        self.is_main_process = is_main_process
        self.last = self.said = -1

    def look(self, waited_s: Sequence[float], elapsed_s: float, num_steps: int) -> dict[str, float]:
        """Of an interval; the same on all ranks. Says it when the same rank lags in two intervals in a row, once.

        Args:
            waited_s: of each rank.
            elapsed_s: time of the interval's steps.

        Returns:
            For the row of the log: `slowest_rank`, and `lag_s`, seconds a step that another waited for it; empty where none lags.
        """
        slowest = min(range(len(waited_s)), key=waited_s.__getitem__)
        lag_s, step_s = (max(waited_s) - waited_s[slowest]) / num_steps, elapsed_s / num_steps
        if lag_s < max(self.SHARE * step_s, self.LEAST_S):
            self.last = -1
            return {}
        if slowest == self.last and slowest != self.said and self.is_main_process:
            self.said = slowest
            log.warning("rank %d is the slowest: others wait for it %.2f s of each step of %.2f s", slowest, lag_s, step_s)
        self.last = slowest
        return {"slowest_rank": slowest, "lag_s": round(lag_s, 4)}


class StepWatch:
    """Adds up what a row of the log needs, on the device, and reads it only when a row is due.

    Args:
        sources: of a mixture, whose losses are logged one by one; None without.
    """

    def __init__(
        self, coordinator: Coordinator, flops_per_token: float, peak_flops: float | None, sources: SourceLosses | None = None
    ) -> None:
        self.coordinator, self.sources = coordinator, sources
        self.flops_per_token, self.peak_flops = flops_per_token, peak_flops
        self.grad_norm: torch.Tensor | None = None
        self.learning_rate = 0.0
        self.lag = LagWatch(coordinator.is_main_process)
        self.reset()

    def reset(self) -> None:
        self.loss_sum: torch.Tensor | None = None
        self.num_steps = self.num_input_tokens = self.num_label_tokens = 0
        self.excluded_s = 0.0
        self.coordinator.waited_s = 0.0
        self.started = time.monotonic()
        if self.coordinator.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.coordinator.device)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What runs inside (an evaluation, a save) does not count as training time."""
        started, waited_s = time.monotonic(), self.coordinator.waited_s
        yield
        self.excluded_s += time.monotonic() - started
        self.coordinator.waited_s = waited_s

    def add(self, loss_sum: torch.Tensor, num_input_tokens: int, num_label_tokens: int) -> None:
        self.loss_sum = loss_sum if self.loss_sum is None else self.loss_sum + loss_sum
        self.num_steps += 1
        self.num_input_tokens += num_input_tokens
        self.num_label_tokens += num_label_tokens
        if self.sources is not None:
            self.sources.commit()

    def read(self) -> dict[str, Any]:
        """The interval's figures; waits for the device, and for the other ranks once."""
        assert self.loss_sum is not None and self.grad_norm is not None
        loss_sum = float(self.loss_sum)
        device = self.coordinator.device
        elapsed_s = time.monotonic() - self.started - self.excluded_s
        on_card = device.type == "cuda"
        peaks = [torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)] if on_card else [0, 0]
        count, own = self.coordinator.num_processes, self.coordinator.process_index
        waits = [self.coordinator.waited_s * (rank == own) for rank in range(count)]
        total_loss, *waits = self.coordinator.sum([loss_sum, *waits], "loss of the log")
        peak, reserved = self.coordinator.max([float(each) for each in peaks], "peak memory")
        rate = self.num_input_tokens / elapsed_s / self.coordinator.num_processes
        by_source = {} if self.sources is None else self.sources.read(self.coordinator)
        return {
            "loss": total_loss / max(self.num_label_tokens, 1),
            "grad_norm": float(self.grad_norm),
            "learning_rate": self.learning_rate,
            "tokens_per_second_per_gpu": round(rate, 2),
            "mfu": round(rate * self.flops_per_token / self.peak_flops, 4) if self.peak_flops else None,
            "step_time_s": round(elapsed_s / self.num_steps, 6),
            "peak_memory_gib": round(peak / 2**30, 3) if peak else None,
            "extra": {
                **({"peak_reserved_gib": round(reserved / 2**30, 3)} if reserved else {}),
                **self.lag.look(waits, elapsed_s, self.num_steps),
                **{f"loss/{name}": loss for name, loss in by_source.items()},
            },
        }


class Loader(Protocol):
    """What the loop needs of a loader: batches from any step on, and what a checkpoint must hold for that."""

    begin: Begin

    def num_steps(self, num_epochs: float) -> int: ...

    def prefetching(self, start_step: int = 0, num_steps: int | None = None) -> Iterator[StepBatch]: ...

    def state_dict(self, next_step: int) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Trainer:
    """Runs the loop of one training job."""

    def __init__(
        self,
        *,
        train: TrainArguments,
        engine: Engine,
        loader: Loader,
        plan: RunPlan,
        coordinator: Coordinator,
        recovery: Recovery,
        checkpointer: Checkpointer,
        evaluator: Evaluator | None,
        metrics: MetricsLog,
        watch: StepWatch,
        identity: dict[str, Any],
        state: TrainState | None = None,
        first_update: Callable[[], bool] | None = None,
    ) -> None:
        """
        Args:
            first_update: called after updates with a learning rate above 0 until it returns True.
            loader: this rank's batches.
            identity: facts of the run that checkpoints carry: engine, processes, data, batch.
        """
        self.train_args, self.engine, self.loader, self.plan = train, engine, loader, plan
        self.coordinator, self.recovery, self.checkpointer, self.evaluator = coordinator, recovery, checkpointer, evaluator
        self.metrics, self.watch, self.identity = metrics, watch, identity
        self.state = state or TrainState()
        self.first_update = first_update
        self.snapshots: Snapshots | None = None
        self.profiler: StepProfiler | None = None
        self.before_row: Callable[[], None] = lambda: None  # called on all ranks before a row of training is written
        self._skipped_before = 0
        self._bad_in_a_row = 0
        self._is_saved = True

    def train(self) -> bool:
        """Trains to the end, or until all ranks agree to stop. Returns True when the run is finished."""
        remaining = self.plan.max_steps - self.state.step
        batches = self.loader.prefetching(self.state.step, remaining) if remaining > 0 else iter(())
        self._skipped_before = self.engine.num_skipped_steps()
        if self.evaluator is not None and self.train_args.eval_on_start and self.state.step == 0:
            self.recovery.run("evaluate", self.evaluator.run, self.state)
        self.watch.reset()
        while self.state.step < self.plan.max_steps and not self.stops_early():
            if self.profiler is not None:
                self.profiler.before(self.state.step + 1)
            batch = next(batches)
            counts = self._global_counts(batch)
            loss_sum = self.recovery.run("step", self._forward_backward, batch, counts[1])
            self.watch.learning_rate = self.engine.learning_rate()
            self.watch.grad_norm = self.recovery.run("update", self.engine.step)
            self._advance(batch, loss_sum, counts)
            if self.profiler is not None:
                self.profiler.after(self.state.step)
            if self.first_update is not None and self.watch.learning_rate > 0 and self.first_update():
                self.first_update = None
            self._maybe_log(batch)
            with self.watch.paused():
                if self.evaluator is not None:
                    self.recovery.run("evaluate", self.evaluator.maybe_run, self.state)
                self.recovery.run("save", self.maybe_save)
                if self.snapshots is not None:
                    self.recovery.run("snapshot", self.snapshots.maybe_take, self.state.step, self.content)
            if self.recovery.stop_agreed and self.state.step < self.plan.max_steps:
                self._save(wait=True)
                return False
        if self.stops_early():
            log.info("early stopping: %d evaluations in a row without improvement", self.state.num_bad_evaluations)
        if self.evaluator is not None and self.train_args.do_eval is not False:
            self.recovery.run("evaluate", self.evaluator.run, self.state)
        self.recovery.run("save", self._save_last)
        return True

    def _forward_backward(self, batch: StepBatch, num_label_tokens: int) -> torch.Tensor:
        if self.watch.sources is not None:
            batch.report = self.watch.sources.begin()
        return self.engine.forward_backward(batch, num_label_tokens)

    def _global_counts(self, batch: StepBatch) -> tuple[int, int]:
        """(input tokens, label tokens) of the step over all ranks; those of samples that ranks share once."""
        values = self.coordinator.sum([batch.num_input_tokens, batch.num_label_tokens], "tokens of the step")
        copies = self.coordinator.sequence_parallel_size
        return int(values[0]) // copies, int(values[1]) // copies

    def _advance(self, batch: StepBatch, loss_sum: torch.Tensor, counts: tuple[int, int]) -> None:
        self.state.step += 1
        self.state.epoch = batch.epoch
        self.state.num_input_tokens += counts[0]
        self.state.num_label_tokens += counts[1]
        self.watch.add(loss_sum, *counts)
        self.metrics.progress(self.state.step)

    def _maybe_log(self, batch: StepBatch) -> None:
        step = self.state.step
        first = self.train_args.logging_first_step and step == 1
        if step % self.plan.logging_steps and not first and step != self.plan.max_steps:
            return
        self.before_row()
        num_steps = self.watch.num_steps
        figures = self.watch.read()
        skipped = self.engine.num_skipped_steps()
        micro = self.engine.settings.micro_batch_size
        self.metrics.log(
            StepMetrics(
                step=step,
                epoch=round(self.state.epoch, 4),
                num_input_tokens=self.state.num_input_tokens,
                num_label_tokens=self.state.num_label_tokens,
                micro_batch_size=micro,
                gradient_accumulation_steps=math.ceil(len(batch.samples) / micro),
                loss_scale=getattr(self.engine, "loss_scale", lambda: None)(),
                num_skipped_steps=skipped,
                **figures,
            )
        )
        self._check_finite(skipped, num_steps)
        self.watch.reset()

    def _check_finite(self, skipped: int, num_steps: int) -> None:
        """Applies the policy to left-out updates; every rank sees the same counts, because the gradient norm is global."""
        new = skipped - self._skipped_before
        self._skipped_before = skipped
        self._bad_in_a_row = self._bad_in_a_row + new if new == num_steps else new
        if not new:
            return
        scaling = getattr(self.engine, "loss_scale", lambda: None)() is not None
        if self.train_args.nan_policy == "stop" and not scaling:
            raise NonFiniteError(f"{new} of the last {num_steps} updates had non-finite gradients (--nan_policy stop)")
        log.warning("%d of the last %d updates were left out: non-finite gradients%s", new, num_steps, " (loss scaling)" if scaling else "")
        if self._bad_in_a_row >= self.train_args.max_nan_steps and not (scaling and self._loss_scale_can_fall()):
            raise NonFiniteError(
                f"{self._bad_in_a_row} updates in a row had non-finite gradients: "
                "lower --learning_rate, check the data, or use --precision bf16"
            )

    def _loss_scale_can_fall(self) -> bool:
        scale = getattr(self.engine, "loss_scale", lambda: None)()
        return scale is not None and scale > 1

    def note_evaluation(self, result: dict[str, float], state: TrainState) -> None:
        """Logs an evaluation and keeps the best; for the evaluator's `on_result`."""
        self.metrics.log({"step": state.step, "epoch": round(state.epoch, 4), **result}, kind="eval")
        metric = result["eval_" + self.train_args.metric_for_best_model.removeprefix("eval_")]
        greater = bool(self.train_args.greater_is_better)
        better = state.best_metric is None or (metric > state.best_metric if greater else metric < state.best_metric)
        enough = better and (state.best_metric is None or abs(metric - state.best_metric) > self.train_args.early_stopping_threshold)
        state.num_bad_evaluations = 0 if enough and math.isfinite(metric) else state.num_bad_evaluations + 1
        if math.isfinite(metric) and better:
            state.best_metric, state.best_step = metric, state.step

    def stops_early(self) -> bool:
        """True when `--early_stopping_patience` evaluations in a row brought no improvement; the same on all ranks, as their result is."""
        patience = self.train_args.early_stopping_patience
        return patience is not None and self.state.num_bad_evaluations >= patience

    def maybe_save(self) -> None:
        """Saves when the interval, or a new best model that the end will need, says so."""
        step = self.state.step
        due = bool(self.plan.save_steps) and step % self.plan.save_steps == 0
        new_best = self.train_args.load_best_model_at_end and self.state.best_step == step
        if (due or new_best) and step < self.plan.max_steps:
            self._save(wait=False)

    def content(self) -> dict[str, Any]:
        """What a checkpoint or snapshot holds beside engine and random states; JSON, the same on all ranks."""
        return {"state": self.state.to_dict(), "run": self.identity, "data": self.loader.state_dict(self.state.step)}

    def keep_all(self) -> None:
        """Before all ranks start again in agreement: nothing of what was trained is lost, for they stand between two updates."""
        self.checkpointer.finish()
        if self.state.step == 0 or (
            self.snapshots is not None and self.snapshots.every_steps and self.snapshots.take(self.state.step, self.content())
        ):
            return
        self._save(wait=True)

    def check_saved(self) -> None:
        """For the end, when all else is done: a run without its last checkpoint has not done what was asked.

        Raises:
            NotSavedError: it could not be written; names the reason and what there is instead.
        """
        if self._is_saved:
            return
        older = self.checkpointer.last_complete
        there = older.name if older is not None and older.is_dir() else ""
        raise NotSavedError(
            f"the checkpoint of step {self.state.step} was not written ({self.checkpointer.last_failure}); "
            f"newest complete one: {there or 'none'}",
            there,
        )

    def _save_last(self) -> None:
        if self.plan.save_steps:
            self._save(wait=True)
        else:
            self.checkpointer.finish()

    def _save(self, *, wait: bool) -> None:
        if self.train_args.load_best_model_at_end and self.state.best_step > 0:
            self.checkpointer.best = self.checkpointer.output_dir / f"checkpoint-{self.state.best_step}"
        self._is_saved = self.checkpointer.save(self.state.step, self.content(), wait=wait)
