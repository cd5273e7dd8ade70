"""Training on data that is read while training runs: a window of rows at a time.

A window is the next `--streaming_buffer_size` rows, tokenised and packed into a store like any other, once per node, while the window
before it is trained on. It is also the shuffle buffer: its samples come in an order that follows from seed and window number. So the
order of samples is the same for any number of ranks, the disk holds three windows, and the position in the data is two small things:
the number of the window, and where the source stood when it began. These go into the checkpoint (`state_dict`). Besides, a line per
window stays in the cache, so that a run on the same disk finds its place without a checkpoint's help.

When the source ends it begins again; how often it did is the epoch.
"""

from __future__ import annotations

import bisect
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from harness import encoders, node_cache, token_store
from harness.batches import Sample, StepBatch, make_step_batch
from harness.data_sources import FileReader, Place, Row
from harness.findings import UserError, user_error
from harness.permutation import Permutation, combine_seeds
from harness.preparation import SEGMENT_CHARS, Preparer
from harness.source_specs import FileSource, HubSource, Source, digest
from harness.step_loader import Begin
from harness.token_store import TokenizedDataset, TokenStore

UNKNOWN_STEPS = 1 << 40
"""Steps per epoch of a stream: nobody knows, so no epoch ever ends by counting."""
_KEPT_WINDOWS = 3

State = dict[str, Any]


class FileRows:
    """Rows of files from a place on.

    Files before it are not read, nor what comes before it in its own file, if that is of lines or a table. Only in compressed files
    and in .csv the rows before it are read over.
    """

    def __init__(self, source: FileSource, segment_chars: int | None, state: State | None) -> None:
        self._source = source
        self._reader = FileReader(source.spec.key, source.spec.encoding, source.spec.line_mode, segment_chars, source.skipped)
        self._file: int = state["file"] if state else 0
        self._rows: int = state["rows"] if state else 0
        near = state.get("near") if state else None
        self._iterator = self._read(None if near is None else Place(*near))

    def _read(self, near: Place | None) -> Iterator[Row]:
        for number in range(self._file, len(self._source.files)):
            self._file = number
            for row in self._reader.rows([self._source.files[number]], self._rows, near):
                self._rows += 1
                yield row
            self._rows, near = 0, None

    def __iter__(self) -> Iterator[Row]:
        return self._iterator

    def state(self) -> State:
        """Where the next row is."""
        place = self._reader.place
        return {"file": self._file, "rows": self._rows, "near": None if place is None else list(dataclasses.astuple(place))}


class HubRows:
    """Rows of a dataset of the hub from a place on."""

    def __init__(self, source: HubSource, state: State | None) -> None:
        self._data = source.stream()
        if state:
            self._data.load_state_dict(state)
        self._name = f"{source.spec.dataset_name} ({source.spec.split})"

    def __iter__(self) -> Iterator[Row]:
        for number, values in enumerate(self._data, 1):
            yield Row(dict(values), f"{self._name}, row {number} since the stream was opened")

    def state(self) -> State:
        """Where the next row is."""
        return self._data.state_dict()


@dataclasses.dataclass(frozen=True)
class Window:
    """One window of a stream.

    Attributes:
        number: counted over the whole run.
        epoch: how often the source had ended before.
        start: position of its first sample in the order of all samples.
        num_samples: how many it has.
        before, after: where the source stood; None at its beginning.
        epoch_after: epoch of the next window.
    """

    number: int
    epoch: int
    start: int
    num_samples: int
    before: State | None
    after: State | None
    epoch_after: int


class StreamDataset:
    """The samples of a stream by their position in the order of all samples.

    Args:
        preparer: tokenizer and options.
        source: of the rows.
        rows_per_window: rows that are tokenised, packed and shuffled together.
        seed: of the order.
        shuffle: shuffle within windows.

    Attributes:
        fingerprint: equal for equal samples.
        longest: most tokens that a sample can have; how many really occur is not known beforehand.
    """

    def __init__(self, preparer: Preparer, source: Source, rows_per_window: int, seed: int, shuffle: bool = True) -> None:
        args = preparer.args
        self.preparer = preparer
        self.source = source
        self.rows_per_window = rows_per_window
        self.seed = seed
        self.shuffle = shuffle
        self.longest = self.block_size = preparer.block_size
        options = [args.packing, preparer.block_size, args.overlong, rows_per_window]
        key = digest([source.identity(), preparer.options(source.spec), options])
        self.folder = preparer.cache / f"stream-{key}"
        self.fingerprint = f"stream-{key}-{seed}-{shuffle}{'' if args.document_isolation else '-joined'}"
        self._windows: list[Window] = []
        self._open_rows: tuple[int, Iterator[Row], Any] | None = None
        self._encoder: encoders.Encoder | None = None
        self._text_tokenizer = encoders.TextTokenizer(preparer.tokenizer)
        self._segment_chars = SEGMENT_CHARS if self._text_tokenizer.is_splittable() else None
        self._dataset = functools.lru_cache(maxsize=_KEPT_WINDOWS)(self._open_dataset)
        self._order = functools.lru_cache(maxsize=_KEPT_WINDOWS)(self._make_order)
        self._ahead = concurrent.futures.ThreadPoolExecutor(1, "next-window")
        self._coming: concurrent.futures.Future[Window] | None = None

    # Finding windows -----------------------------------------------------------------------------------------------

    def window_at(self, position: int) -> Window:
        """The window that a position lies in; windows up to it are prepared, or their lines in the cache read."""
        if not self._windows or position < self._windows[0].start:
            self._windows = [self._describe(0, 0, 0, None)]
        while position >= self._windows[-1].start + self._windows[-1].num_samples:
            last = self._windows[-1]
            self._windows.append(self._next(last))
        return self._windows[bisect.bisect_right([window.start for window in self._windows], position) - 1]

    def _next(self, last: Window) -> Window:
        coming, self._coming = self._coming, None
        if coming is not None and (window := coming.result()).number == last.number + 1:
            return window
        return self._describe(last.number + 1, last.epoch_after, last.start + last.num_samples, last.after)

    def prepare_ahead(self, window: Window) -> None:
        """Begins with the window after this one in the background, on the node's first process."""
        if self._coming is None and self.preparer.first and window == self._windows[-1]:
            following = (window.number + 1, window.epoch_after, window.start + window.num_samples, window.after)
            self._coming = self._ahead.submit(self._describe, *following)

    def _describe(self, number: int, epoch: int, start: int, before: State | None) -> Window:
        line = self.folder / f"window-{number}.json"
        if not line.exists():
            self._make(number, epoch, before)
        found = json.loads(line.read_text(encoding="utf-8"))
        return Window(number, epoch, start, found["num_samples"], before, found["after"], found["epoch_after"])

    def state(self, position: int) -> State:
        """What `restore` needs to go on at a position, in O(1)."""
        last = self._windows[-1] if self._windows else None
        if last is not None and position == last.start + last.num_samples:  # a run that ends here needs no further window
            return {"number": last.number + 1, "epoch": last.epoch_after, "start": position, "source": last.after}
        window = self.window_at(position)
        return {"number": window.number, "epoch": window.epoch, "start": window.start, "source": window.before}

    def restore(self, state: State) -> None:
        """Goes on where `state` was taken; earlier positions are found from the beginning, as without it."""
        self._windows = [self._describe(state["number"], state["epoch"], state["start"], state["source"])]

    # Making windows ------------------------------------------------------------------------------------------------

    def _make(self, number: int, epoch: int, before: State | None) -> Path:
        return node_cache.make_once(
            self.folder,
            f"window-{number}",
            lambda target: self._build(target, number, epoch, before),
            first=self.preparer.first,
        )

    def _rows_of(self, number: int, before: State | None) -> tuple[Iterator[Row], Any]:
        if self._open_rows is not None and self._open_rows[0] == number:
            return self._open_rows[1:]
        source = self.source
        rows: FileRows | HubRows = (
            FileRows(source, self._segment_chars, before) if isinstance(source, FileSource) else HubRows(source, before)
        )
        return iter(rows), rows

    def _build(self, target: Path, number: int, epoch: int, before: State | None) -> None:
        args = self.preparer.args
        iterator, rows = self._rows_of(number, before)
        taken = _take(iterator, self.rows_per_window)
        first = next(taken, None)
        if first is None and before is None:
            raise user_error(self.source.spec.key, "there is not a single row", "give data with text in it")
        encoder = self._encoder_for(first if number == 0 else None)
        writer = token_store.TokenWriter(target, self._text_tokenizer.max_token_id, encoder.masked)
        num_rows = 0
        dropped: collections.Counter[str] = collections.Counter()
        for batch in encoders.row_batches(itertools.chain([] if first is None else [first], taken)):
            num_rows += len(batch)
            encoded = encoder.encode(batch)
            if encoded.problems and args.bad_rows == "error":
                raise UserError(encoded.problems[: encoders.MAX_REPORTED_ROWS])
            dropped["bad rows"] += len(encoded.problems)
            dropped += encoded.dropped
            writer.add(encoded.tokens, encoded.lengths, encoded.mask, encoded.open)
        ended = num_rows < self.rows_per_window
        if number == 0 and not writer.num_documents:
            raise user_error(self.source.spec.key, f"no usable token in the first {num_rows} rows", "give data with text in it")
        writer.close({"dropped": dict(dropped), "notes": {}})
        if dropped["bad rows"]:
            left_out = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items())
            self.preparer.say(f"streaming, window {number}: {num_rows:,} rows; left out: {left_out}")
        plan = target / "plan"
        plan.mkdir()
        token_store.write_plan(plan, TokenStore(target), None, self.block_size, args.packing, args.overlong)
        after = None if ended else rows.state()
        self._open_rows = None if ended else (number + 1, iterator, rows)
        num_samples = json.loads((plan / "plan.json").read_text(encoding="utf-8"))["num_samples"]
        if number == 0 and not num_samples:
            raise user_error(
                "--block_size", f"no sample is left of the first {num_rows} rows", "use --overlong split, or a larger --block_size"
            )
        line = {"num_samples": num_samples, "after": after, "epoch_after": epoch + ended}
        node_cache.write_atomically(self.folder / f"window-{number}.json", json.dumps(line))
        with contextlib.suppress(OSError):
            shutil.rmtree(self.folder / f"window-{number - _KEPT_WINDOWS}")

    def _encoder_for(self, row: Row | None) -> encoders.Encoder:
        """One encoder for the whole stream, chosen by its very first row."""
        if self._encoder is None:
            self._encoder = self.preparer.encoder_for(self._text_tokenizer, row or next(self._rows_of(-1, None)[0]))
        return self._encoder

    # Samples -------------------------------------------------------------------------------------------------------

    def _open_dataset(self, window: tuple[int, int, str]) -> TokenizedDataset:
        number, epoch, before = window
        for attempt in range(5):
            folder = self._make(number, epoch, json.loads(before))
            try:
                return TokenizedDataset(TokenStore(folder), folder / "plan", self.preparer.args.document_isolation)
            except OSError:  # a run that is further on in the same stream has just deleted it
                if attempt == 4:
                    raise
        raise AssertionError("unreachable")

    def _make_order(self, number: int, size: int) -> Permutation:
        return Permutation(size, combine_seeds(self.seed, number))

    def sample(self, position: int) -> tuple[int, Sample]:
        """(epoch, sample) at a position of the order of all samples; begins with the next window in the background."""
        self.prepare_ahead(self.window_at(position))
        return self._sample(position)

    def _sample(self, position: int) -> tuple[int, Sample]:
        window = self.window_at(position)
        data = self._dataset((window.number, window.epoch, json.dumps(window.before)))
        index = position - window.start
        if self.shuffle:
            index = int(self._order(window.number, window.num_samples)(np.array([index]))[0])
        return window.epoch, data[index]

    def __len__(self) -> int:
        """Samples of the first window, which is what a preview shows."""
        return self.window_at(0).num_samples

    def __getitem__(self, index: int) -> Sample:
        return self._sample(index)[1]


def _take(rows: Iterator[Row], number: int) -> Iterator[Row]:
    """At most so many rows, but no document in parts."""
    for taken, row in enumerate(rows, 1):
        yield row
        if taken >= number and not row.more:
            return


class StreamLoader:
    """This rank's samples of every optimizer step of a stream; like `StepLoader`, but a stream's epoch has no known number of steps.

    Args:
        dataset: the stream.
        global_batch_size: samples per optimizer step over all ranks; a multiple of num_processes.
        num_processes, process_index: this rank's place.
        pad_id: token put into padding.
        pin_memory: micro-batches in page-locked memory.
    """

    steps_per_epoch = UNKNOWN_STEPS

    def __init__(
        self,
        dataset: StreamDataset,
        *,
        global_batch_size: int,
        num_processes: int,
        process_index: int,
        pad_id: int = 0,
        pin_memory: bool = False,
    ) -> None:
        if global_batch_size < 1 or global_batch_size % num_processes:
            raise ValueError(f"global_batch_size {global_batch_size} is not a multiple of the {num_processes} processes")
        self.dataset = dataset
        self.global_batch_size = global_batch_size
        self.num_processes = num_processes
        self.process_index = process_index
        self.samples_per_rank = global_batch_size // num_processes
        self.pad_id = pad_id
        self.pin_memory = pin_memory
        self.begin = Begin()

    def describe(self) -> str:
        """One line about the order."""
        return (
            f"streaming, {self.global_batch_size} samples per optimizer step, "
            f"{'shuffled within' if self.dataset.shuffle else 'in the order of'} windows of {self.dataset.rows_per_window:,} rows"
        )

    def _position(self, index: int) -> int:
        """Of the first sample of a step in the order of all samples."""
        return self.begin.position + (index - self.begin.step) * self.global_batch_size

    def num_steps(self, num_epochs: float) -> int:
        """Of a run of so many epochs; nobody knows, so `--max_steps` says it."""
        return math.ceil(num_epochs * self.steps_per_epoch)

    def go_on(self, step: int, old_batch: int, state: State) -> int:
        """As `StepLoader.go_on`; what is left of the stream is read from there."""
        begin = Begin.of(state)
        self.begin = Begin(step, 0, begin.position + (step - begin.step) * old_batch)
        if "number" in state:
            self.dataset.restore(state)
        return self.begin.position

    def step(self, index: int) -> StepBatch:
        """This rank's part of optimizer step `index`."""
        first = self._position(index) + self.process_index * self.samples_per_rank
        pairs = [self.dataset.sample(position) for position in range(first, first + self.samples_per_rank)]
        return make_step_batch([sample for _, sample in pairs], float(pairs[-1][0]), pad_id=self.pad_id, pin_memory=self.pin_memory)

    def prefetching(self, start_step: int = 0, num_steps: int | None = None) -> Iterator[StepBatch]:
        """Steps from `start_step` on; the next window is prepared in the background."""
        stop = 1 << 62 if num_steps is None else start_step + num_steps
        yield from map(self.step, range(start_step, stop))

    def __iter__(self) -> Iterator[StepBatch]:
        return self.prefetching(0)

    def state_dict(self, next_step: int) -> State:
        """The position in the data, equal on all ranks, for a checkpoint before optimizer step `next_step`."""
        return self.dataset.state(self._position(next_step)) | self.begin.to_dict()

    def load_state_dict(self, state: State) -> None:
        """Goes on from what `state_dict` gave, on any number of ranks; with nothing, the place is found from the beginning."""
        self.begin = Begin.of(state)
        if "number" in state:
            self.dataset.restore(state)
