"""Which samples are in which optimizer step, and getting them there in time.

There is one global order of all samples. It follows from the seed alone; optimizer step k owns its positions [k * G, (k + 1) * G),
G being the global batch, and rank r of N the r-th of N equal parts of these. So neither the number of ranks, nor that of loader
workers, nor the micro-batch size changes what a step learns from, and any step can be had at once, which is all that resuming needs.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import signal
import threading
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from harness.batches import IGNORE, MicroBatch, Sample, StepBatch, collate, filler_sample, make_sample, make_step_batch
from harness.findings import UserError, user_error
from harness.permutation import Permutation, combine_seeds

STRATEGIES = ("random", "sequential", "group_by_length")
GROUP_STEPS = 50
"""group_by_length: samples of so many steps are sorted together (transformers' factor), so that order stays random in the large."""


class SampleSource(Protocol):
    """What a `StepLoader` reads: anything with samples by number and their lengths."""

    @property
    def lengths(self) -> np.ndarray: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


@dataclasses.dataclass(frozen=True)
class Begin:
    """Where the steps of this size begin: at the beginning, or where a run went on that had another number of samples per step.

    Attributes:
        step: optimizer steps made before, with whatever they took.
        epoch, position: what they have taken: whole epochs, and samples of the next one. (Of a stream `position` counts all.)
    """

    step: int = 0
    epoch: int = 0
    position: int = 0

    @classmethod
    def of(cls, state: dict[str, Any]) -> Begin:
        """Out of a loader's `state_dict`."""
        return cls(*state.get("begin", ()))

    def to_dict(self) -> dict[str, Any]:
        return {} if self == Begin() else {"begin": [self.step, self.epoch, self.position]}


class SampleList:
    """A user's own dataset of rows with `input_ids` as a `SampleSource`.

    Rows may have labels, position_ids and document_ids; what is missing is what one document that is trained on throughout has.
    Positions where a row's attention_mask is 0 are cut away.

    Raises:
        UserError: a row without input_ids, or with columns of different lengths.
    """

    def __init__(self, rows: Any) -> None:
        self._rows = rows
        self.lengths = np.array([len(self[index]["input_ids"]) for index in range(len(rows))], dtype=np.int32)
        self.num_tokens = int(self.lengths.sum(dtype=np.int64))
        self.longest = int(self.lengths.max(initial=0))
        fingerprint = getattr(rows, "_fingerprint", None)  # of a datasets.Dataset; else the lengths are what can be compared at little cost
        self.fingerprint = f"own-{fingerprint or hashlib.sha256(self.lengths.tobytes()).hexdigest()[:32]}"

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        row = self._rows[index]
        if "input_ids" not in row:
            raise user_error("train_dataset", f"row {index} has no input_ids, but {', '.join(sorted(row))}", "tokenise it first")
        arrays = {
            name: np.asarray(row[name]).reshape(-1) for name in ("input_ids", "labels", "position_ids", "document_ids") if name in row
        }
        sizes = {name: len(array) for name, array in arrays.items()}
        if len(set(sizes.values())) > 1:
            raise user_error("train_dataset", f"row {index}: columns of different lengths {sizes}", "give every column one value per token")
        if "attention_mask" in row:
            real = np.asarray(row["attention_mask"]).reshape(-1) != 0
            arrays = {name: array[real] for name, array in arrays.items()}
        sample = make_sample(arrays["input_ids"], arrays.get("labels"))
        for name in ("position_ids", "document_ids"):
            if name in arrays:
                sample[name] = arrays[name].astype(sample[name].dtype)
        return sample


class StepLoader:
    """This rank's samples of every optimizer step.

    Args:
        dataset: the samples.
        global_batch_size: samples per optimizer step over all ranks; a multiple of num_processes.
        num_processes, process_index: this rank's place.
        seed: of the order.
        strategy: "random", "sequential" or "group_by_length".
        drop_last: leave out the last, short step of an epoch; otherwise it is filled up with zero-weight samples.
        num_workers: processes that read ahead; 0 reads in this one.
        prefetch: steps that each worker reads ahead.
        pad_id: token put into padding.
        pin_memory: micro-batches in page-locked memory.

    Raises:
        UserError: more ranks than samples, or with drop_last fewer samples than one step.
    """

    def __init__(
        self,
        dataset: SampleSource,
        *,
        global_batch_size: int,
        num_processes: int,
        process_index: int,
        seed: int,
        strategy: str = "random",
        drop_last: bool = False,
        num_workers: int = 0,
        prefetch: int = 2,
        pad_id: int = 0,
        pin_memory: bool = False,
    ) -> None:
        if global_batch_size < 1 or global_batch_size % num_processes:
            raise ValueError(f"global_batch_size {global_batch_size} is not a multiple of the {num_processes} processes")
        if not 0 <= process_index < num_processes:
            raise ValueError(f"process_index {process_index} is not one of {num_processes} processes")
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, not {strategy!r}")
        size = len(dataset)
        if size < num_processes:
            raise user_error(
                "train_file",
                f"{size} training samples for {num_processes} processes",
                "use fewer processes, a smaller --block_size or more data",
            )
        if drop_last and size < global_batch_size:
            raise user_error(
                "--dataloader_drop_last",
                f"one optimizer step needs {global_batch_size} samples, but there are {size}, so every step would be dropped",
                "remove --dataloader_drop_last or use a smaller batch",
            )
        if strategy != "random" and hasattr(dataset, "at_any"):
            raise user_error("--train_sampling_strategy", f"a mixture of sources has only a random order, not {strategy}", "leave it out")
        self.dataset = dataset
        self.global_batch_size = global_batch_size
        self.num_processes = num_processes
        self.process_index = process_index
        self.samples_per_rank = global_batch_size // num_processes
        self.seed = seed
        self.strategy = strategy
        self.drop_last = drop_last
        self.num_workers = num_workers
        self.prefetch = prefetch
        self.pad_id = pad_id
        self.pin_memory = pin_memory
        self.steps_per_epoch = size // global_batch_size if drop_last else -(-size // global_batch_size)
        self.begin = Begin()
        self._permutation = functools.lru_cache(maxsize=2)(self._make_permutation)
        self._group = functools.lru_cache(maxsize=2)(self._make_group)

    @property
    def num_last_samples(self) -> int:
        """Samples of the whole last step of an epoch that are not zero-weight."""
        return len(self.dataset) - (self.steps_per_epoch - 1) * self.global_batch_size if not self.drop_last else self.global_batch_size

    def describe(self) -> str:
        """One line about the order and about what happens to the last, short step."""
        size, batch = len(self.dataset), self.global_batch_size
        text = f"{size:,} samples, {batch} per optimizer step: {self.steps_per_epoch:,} steps per epoch, order {self.strategy}"
        rest = size % batch
        if rest and self.drop_last:
            return f"{text}; {rest} samples of the last, short step are dropped in each epoch"
        if rest:
            return f"{text}; the last step has {rest} samples and {batch - rest} zero-weight ones"
        return text

    def _make_permutation(self, epoch: int) -> Permutation:
        return Permutation(len(self.dataset), combine_seeds(self.seed, epoch))

    def _make_group(self, epoch: int, number: int) -> np.ndarray:
        """Indices of one group of GROUP_STEPS steps: steps hold samples of like length, and come in random order."""
        batch, size = self.global_batch_size, len(self.dataset)
        begin = number * GROUP_STEPS * batch
        indices = self._permutation(epoch)(np.arange(begin, min(begin + GROUP_STEPS * batch, size)))
        ordered = indices[np.argsort(-np.asarray(self.dataset.lengths[indices], dtype=np.int64), kind="stable")]
        full = len(ordered) // batch
        order = Permutation(full, combine_seeds(self.seed, epoch, number, 1))(np.arange(full)) if full else np.zeros(0, dtype=np.int64)
        steps = [ordered[step * batch : (step + 1) * batch] for step in order]
        return np.concatenate([*steps, ordered[full * batch :]])

    def _num_steps(self, num_samples: int, batch: int) -> int:
        return num_samples // batch if self.drop_last else -(-num_samples // batch)

    def _place(self, index: int, batch: int, begin: Begin) -> tuple[int, int]:
        """(epoch, position of the first sample) of step `index`, where steps of `batch` samples began at `begin`."""
        step = index - begin.step
        of_first_epoch = self._num_steps(len(self.dataset) - begin.position, batch)
        if 0 <= step < of_first_epoch:
            return begin.epoch, begin.position + step * batch
        epochs, step = divmod(step - of_first_epoch, self._num_steps(len(self.dataset), batch))
        return begin.epoch + 1 + epochs, step * batch

    def num_steps(self, num_epochs: float) -> int:
        """Optimizer steps of a run of so many epochs."""
        begin, batch, size = self.begin, self.global_batch_size, len(self.dataset)
        if begin == Begin():
            return math.ceil(num_epochs * self.steps_per_epoch)
        if num_epochs <= begin.epoch + 1:
            return begin.step + max(0, self._num_steps(math.ceil((num_epochs - begin.epoch) * size) - begin.position, batch))
        rest = math.ceil((num_epochs - begin.epoch - 1) * self.steps_per_epoch)
        return begin.step + self._num_steps(size - begin.position, batch) + rest

    def go_on(self, step: int, old_batch: int, state: dict[str, Any]) -> int:
        """From `step` on, takes up the samples after those that were trained on with another number of samples per step.

        Args:
            step: the next one.
            old_batch: samples per step before.
            state: `state_dict` of the loader before.

        Returns:
            Samples of the epoch that are trained on.

        Raises:
            UserError: the order of samples follows from the samples per step.
        """
        if self.strategy == "group_by_length":
            message = f"the order of samples by length follows from the samples per step, and these were {old_batch}"
            raise user_error("--train_sampling_strategy", message, f"--target_batch_size {old_batch}")
        self.begin = Begin(step, *self._place(step, old_batch, Begin.of(state)))
        return self.begin.position

    def indices(self, index: int) -> np.ndarray:
        """Numbers of this rank's samples of optimizer step `index`, in order, without zero-weight ones."""
        epoch, begin = self._place(index, self.global_batch_size, self.begin)
        first = begin + self.process_index * self.samples_per_rank
        positions = np.arange(first, min(first + self.samples_per_rank, len(self.dataset)))
        if self.strategy == "sequential":
            return positions
        if self.strategy == "random" or not len(positions):
            return self._permutation(epoch)(positions)
        number = begin // self.global_batch_size // GROUP_STEPS
        return self._group(epoch, number)[positions - number * GROUP_STEPS * self.global_batch_size]

    def step(self, index: int) -> StepBatch:
        """This rank's part of optimizer step `index`, counted from 0 over all epochs."""
        epoch, begin = self._place(index, self.global_batch_size, self.begin)
        is_last = self._place(index + 1, self.global_batch_size, self.begin)[0] > epoch
        at = getattr(self.dataset, "at", None)
        samples: list[Sample] = []
        sources: list[int] = []
        for number in self.indices(index).tolist():
            if at is None:
                samples.append(self.dataset[number])
            else:
                source, sample = at(epoch, number)
                samples.append(sample)
                sources.append(source)
        return make_step_batch(
            samples,
            epoch + 1.0 if is_last else (epoch * self.steps_per_epoch + begin / self.global_batch_size + 1) / self.steps_per_epoch,
            pad_id=self.pad_id,
            num_fillers=self.samples_per_rank - len(samples),
            source_ids=None if at is None else sources,
            pin_memory=self.pin_memory,
        )

    def __iter__(self) -> Iterator[StepBatch]:
        return self.prefetching(0)

    def prefetching(self, start_step: int = 0, num_steps: int | None = None) -> Iterator[StepBatch]:
        """Steps from `start_step` on, without end unless `num_steps` says so, read ahead by `num_workers` processes.

        Raises:
            RuntimeError: a worker failed or died; one message with the cause.
        """
        stop = 1 << 62 if num_steps is None else start_step + num_steps
        if self.num_workers == 0:
            yield from map(self.step, range(start_step, stop))
            return
        import torch
        from torch.utils.data import DataLoader

        steps: Any = DataLoader(
            _Steps(self),  # type: ignore[arg-type]
            batch_size=None,
            sampler=range(start_step, stop),
            num_workers=self.num_workers,
            prefetch_factor=self.prefetch,
            collate_fn=_identity,
            # Its own: the workers' seed would be drawn from the process's random numbers, and dropout would have others than without
            # workers, or than before a resume.
            generator=torch.Generator(),
        )
        iterator = _iterate(steps)
        while True:
            try:
                batch = next(iterator)
            except StopIteration:
                return
            except UserError:
                raise
            except Exception as error:
                raise RuntimeError(_worker_message(error)) from None
            yield batch

    def state_dict(self, next_step: int) -> dict[str, Any]:
        """Where steps of this size began. (A stream's loader has more to say here.)"""
        return self.begin.to_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what `state_dict` gave."""
        self.begin = Begin.of(state)


class _Steps:
    """Steps by number, for the workers of a DataLoader."""

    def __init__(self, loader: StepLoader) -> None:
        self.loader = loader

    def __getitem__(self, index: int) -> StepBatch:
        return self.loader.step(index)


def _iterate(loader: Any) -> Iterator[StepBatch]:
    """Starts a DataLoader's workers without torch's signal handler.

    That one raises a worker's death wherever the main thread is at this moment, perhaps in the middle of a collective that the other ranks
    wait in. Without it the death shows when the next batch is asked for, at most 5 s later.
    """
    if threading.current_thread() is not threading.main_thread():
        return iter(loader)
    handler = signal.getsignal(signal.SIGCHLD)
    iterator = iter(loader)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL if handler is None else handler)
    return iterator


def _identity(batch: Any) -> Any:
    return batch


def _worker_message(error: Exception) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    cause = lines[-1].strip() if lines else type(error).__name__
    if "exited unexpectedly" in cause or "killed by signal" in str(error):
        return (
            f"a data loader worker died: {cause} -> it ran out of host memory (see the kernel log) or of /dev/shm "
            "(containers: --shm-size); --dataloader_num_workers 0 loads in the training process"
        )
    return f"a data loader worker failed: {cause}"


def eval_batches(
    dataset: SampleSource,
    batch_size: int,
    num_processes: int,
    process_index: int,
    *,
    pad_id: int = 0,
    multiple_of: int = 1,
    pin_memory: bool = False,
) -> Iterator[MicroBatch]:
    """This rank's evaluation batches: the same number on every rank, each sample on exactly one of them.

    Batches are filled rank by rank in the dataset's order; what is missing at the end is made up of zero-weight samples.
    """
    at = getattr(dataset, "at", None)
    per_round = batch_size * num_processes
    for begin in range(0, len(dataset), per_round):
        first = begin + process_index * batch_size
        numbers = range(first, max(first, min(first + batch_size, len(dataset))))
        pairs = [(0, dataset[number]) if at is None else at(0, number) for number in numbers]
        samples = [sample for _, sample in pairs] or [filler_sample(pad_id)]
        sources = None if at is None else [source for source, _ in pairs] or [0]
        yield collate(samples, pad_id, multiple_of, sources, pin_memory)


def num_eval_batches(dataset: SampleSource, batch_size: int, num_processes: int) -> int:
    """How many batches `eval_batches` yields on every rank."""
    return -(-len(dataset) // (batch_size * num_processes))


def longest_step(dataset: SampleSource, num_samples: int, *, pad_id: int = 0, pin_memory: bool = False) -> StepBatch:
    """A step of the longest samples there are, longest first: the most memory that any step can need.

    Cut into micro-batches of b, its first micro-batch is the b longest samples, which no micro-batch of any order can exceed.

    Args:
        num_samples: this rank's samples per step; where the data has fewer, the longest come again.
    """
    lengths = np.asarray(dataset.lengths)
    number = min(num_samples, len(lengths))
    largest = np.sort(np.argpartition(lengths, len(lengths) - number)[len(lengths) - number :])
    chosen = np.resize(largest, num_samples)
    chosen = chosen[np.argsort(-lengths[chosen].astype(np.int64), kind="stable")]
    at = getattr(dataset, "at_any", None)
    samples = [dataset[int(index)] if at is None else at(int(index)) for index in chosen]
    return make_step_batch(samples, 0.0, pad_id=pad_id, pin_memory=pin_memory)


def longest_possible_step(num_samples: int, block_size: int, *, pad_id: int = 0) -> StepBatch:
    """Like `longest_step` for data whose lengths are not known beforehand (streams): samples of block_size tokens."""
    sample = make_sample(np.full(block_size, pad_id))
    sample["labels"][0] = IGNORE
    return make_step_batch([sample] * num_samples, 0.0, pad_id=pad_id)
