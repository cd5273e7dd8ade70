"""Tokens on disk: written once as flat files, read by memory mapping, so that neither memory nor access time grows with the corpus.

<store>/tokens.bin   every document's tokens one after another, uint16 where the vocabulary allows, else uint32
        mask.bin     one byte per token, 1 = trained on; only where not every token is
        ends.bin     int64, where each document ends in tokens.bin
        meta.json    dtype, counts; written last
        plans/<key>/ starts.bin int64, lengths.bin int32 (pieces), offsets.bin int64 (pieces before each sample),
                     sample_lengths.bin int32, plan.json
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from harness import packing
from harness.batches import IGNORE, Sample
from harness.permutation import Permutation, mix64

FORMAT = 2


class TokenWriter:
    """Appends documents to a store's files.

    Args:
        folder: an existing, empty folder.
        max_token_id: largest id that can occur.
        masked: whether documents come with a mask.
    """

    def __init__(self, folder: Path, max_token_id: int, masked: bool) -> None:
        self.folder = folder
        self.dtype = np.dtype(np.uint16 if max_token_id < 1 << 16 else np.uint32)
        self.masked = masked
        self.num_tokens = 0
        self.num_documents = 0
        self.num_trained_tokens = 0
        self.longest = 0
        self._last_end = 0
        self._files = contextlib.ExitStack()
        names = ("tokens", "ends", "mask") if masked else ("tokens", "ends")
        opened = [self._files.enter_context((folder / f"{name}.bin").open("wb")) for name in names]
        self._tokens, self._ends = opened[:2]
        self._mask = opened[2] if masked else None

    def add(self, tokens: np.ndarray, lengths: np.ndarray, mask: np.ndarray | None = None, is_open: bool = False) -> None:
        """Appends documents.

        Args:
            tokens: (t,) of all documents end to end.
            lengths: (d,) with sum t.
            mask: (t,) of 0 and 1, if the store is masked.
            is_open: the last document goes on in the next call.
        """
        assert len(tokens) == lengths.sum() and (mask is None) == (not self.masked)
        tokens.astype(self.dtype, copy=False).tofile(self._tokens)
        ends = self.num_tokens + np.cumsum(lengths, dtype=np.int64)
        ends = ends[: len(ends) - is_open]
        ends.tofile(self._ends)
        if self._mask is not None and mask is not None:
            mask.astype(np.uint8, copy=False).tofile(self._mask)
            self.num_trained_tokens += int(mask.sum())
        else:
            self.num_trained_tokens += len(tokens)
        self.num_tokens += len(tokens)
        self.num_documents += len(ends)
        self.longest = max(self.longest, int(np.diff(ends, prepend=self._last_end).max(initial=0)))
        self._last_end = int(ends[-1]) if len(ends) else self._last_end

    def close(self, report: dict[str, Any]) -> None:
        """Writes meta.json: from now on the folder is a store. `report` is kept in it for whoever opens the store later."""
        self._files.close()
        meta = {
            "format": FORMAT,
            "dtype": self.dtype.name,
            "masked": self.masked,
            "num_tokens": self.num_tokens,
            "num_documents": self.num_documents,
            "num_trained_tokens": self.num_trained_tokens,
            "longest": self.longest,
            "report": report,
        }
        (self.folder / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")


def _map(path: Path, dtype: Any) -> np.ndarray:
    """A read-only memory map; an empty file, which cannot be mapped, is an empty array."""
    if path.stat().st_size == 0:
        return np.zeros(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r")


class TokenStore:
    """A finished store, opened for reading.

    Args:
        folder: where `TokenWriter` wrote; its name is the fingerprint of the contents.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.meta: dict[str, Any] = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        self.fingerprint = folder.name
        self.tokens = _map(folder / "tokens.bin", np.dtype(self.meta["dtype"]))
        self.ends = _map(folder / "ends.bin", np.int64)
        self.mask = _map(folder / "mask.bin", np.uint8) if self.meta["masked"] else None
        self.num_tokens: int = self.meta["num_tokens"]
        self.num_documents: int = self.meta["num_documents"]

    def windows(self, split: Split | None = None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(starts, lengths) of documents, (d,) int64, some at a time; with a split only its documents."""
        for begin in range(0, self.num_documents, packing.WINDOW_DOCUMENTS):
            ends = np.array(self.ends[begin : begin + packing.WINDOW_DOCUMENTS])
            before = int(self.ends[begin - 1]) if begin else 0
            starts = np.concatenate([[before], ends[:-1]])
            if split is None:
                yield starts, ends - starts
            else:
                yield split.select(begin, starts, ends - starts)

    def has_labels(self, start: int, length: int) -> bool:
        """Whether anything that this piece predicts is trained on."""
        return self.mask is None or bool(self.mask[start + 1 : start + length].any())


_SPLIT_SEED = 0x5EED
_MIN_SPLIT_DOCUMENTS = 20
_MAX_LISTED_DOCUMENTS = 1 << 20


@dataclasses.dataclass(frozen=True)
class Split:
    """One side of a division of a store into training and held-out documents: the same for every seed, rank and machine.

    Documents are divided, never samples, so that no half of a document is trained on while the other is evaluated. Only a corpus of
    fewer than 20 documents is divided by tokens: its last ones are held out.

    Attributes:
        percent: share held out.
        held_out: which side.
        cut: token at which the corpus is divided, or None where documents are.
        chosen: numbers of the held-out documents, sorted; None where a hash of the number decides (over a million documents).
    """

    percent: float
    held_out: bool
    cut: int | None = None
    chosen: np.ndarray | None = None

    def key(self) -> str:
        return f"{'eval' if self.held_out else 'train'}-{self.percent:g}"

    def select(self, first: int, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """This side's part of documents number `first` and following."""
        if self.cut is not None:
            ends = starts + lengths
            if self.held_out:
                starts = np.maximum(starts, self.cut)
            else:
                ends = np.minimum(ends, self.cut)
            keep = ends - starts > 1
            return starts[keep], (ends - starts)[keep]
        numbers = np.arange(first, first + len(starts))
        if self.chosen is not None:
            out = np.isin(numbers, self.chosen, assume_unique=True)
        else:
            out = mix64(numbers.astype(np.uint64) + np.uint64(_SPLIT_SEED)) < np.uint64(int(self.percent / 100 * 2**64))
        keep = out if self.held_out else ~out
        return starts[keep], lengths[keep]


def divide(store: TokenStore, percent: float) -> tuple[Split, Split]:
    """(training side, held-out side) with about `percent` percent of the tokens held out; neither side is empty."""
    assert 0 < percent < 100 and store.num_documents > 0
    cut, chosen = None, None
    if store.num_documents < _MIN_SPLIT_DOCUMENTS:
        cut = min(store.num_tokens - 2, max(2, round(store.num_tokens * (1 - percent / 100))))
    elif store.num_documents <= _MAX_LISTED_DOCUMENTS:
        ends = np.array(store.ends)
        lengths = np.diff(ends, prepend=0)
        order = Permutation(store.num_documents, _SPLIT_SEED)(np.arange(store.num_documents))
        taken = np.cumsum(lengths[order])
        number = int(np.searchsorted(taken, store.num_tokens * percent / 100)) + 1
        chosen = np.sort(order[: min(number, store.num_documents - 1)])
    return Split(percent, False, cut, chosen), Split(percent, True, cut, chosen)


def write_plan(
    folder: Path,
    store: TokenStore,
    split: Split | None,
    block_size: int,
    packing_name: str,
    overlong: str,
) -> None:
    """Plans the samples of a store and writes the plan into an existing, empty folder."""
    counts = packing.PackingCounts()
    has_labels: Callable[[int, int], bool] | None = None if store.mask is None else store.has_labels
    num_pieces = num_samples = num_tokens = 0
    with (
        open(folder / "starts.bin", "wb") as starts,
        open(folder / "lengths.bin", "wb") as lengths,
        open(folder / "offsets.bin", "wb") as offsets,
        open(folder / "sample_lengths.bin", "wb") as sample_lengths,
    ):
        np.zeros(1, dtype=np.int64).tofile(offsets)
        for part in packing.plan(store.windows(split), block_size, packing_name, overlong, counts, has_labels):
            part.starts.astype(np.int64).tofile(starts)
            part.lengths.tofile(lengths)
            ends = np.cumsum(part.pieces, dtype=np.int64)
            (num_pieces + ends).tofile(offsets)
            totals = np.add.reduceat(part.lengths, ends - part.pieces, dtype=np.int64)
            totals.astype(np.int32).tofile(sample_lengths)
            num_pieces += len(part.starts)
            num_samples += len(part.pieces)
            num_tokens += int(totals.sum())
    summary = {
        "block_size": block_size,
        "packing": packing_name,
        "overlong": overlong,
        "num_pieces": num_pieces,
        "num_samples": num_samples,
        "num_tokens": num_tokens,
        "counts": dataclasses.asdict(counts),
    }
    (folder / "plan.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")


class TokenizedDataset:
    """The samples of a store under a plan.

    Args:
        store: the tokens.
        plan: folder that `write_plan` filled.
        isolate: documents of a sample do not see each other: positions restart, and a document's first token is not predicted.
        max_samples: only the first so many samples.

    Attributes:
        num_documents: pieces of documents in the samples.
        num_tokens: tokens in the samples, repeated context tokens included.
        lengths: (n,) int32, tokens of each sample.
        fingerprint: equal for equal samples in equal order.
    """

    def __init__(self, store: TokenStore, plan: Path, isolate: bool = True, max_samples: int | None = None) -> None:
        self.store = store
        self.isolate = isolate
        self.plan: dict[str, Any] = json.loads((plan / "plan.json").read_text(encoding="utf-8"))
        number = self.plan["num_samples"] if max_samples is None else min(max_samples, self.plan["num_samples"])
        self._starts = _map(plan / "starts.bin", np.int64)
        self._lengths = _map(plan / "lengths.bin", np.int32)
        self._offsets = _map(plan / "offsets.bin", np.int64)
        self.lengths = _map(plan / "sample_lengths.bin", np.int32)[:number]
        self.num_documents = int(self._offsets[number])
        self.num_tokens = int(self.lengths.sum(dtype=np.int64))
        self.fingerprint = f"{plan.name}-{number}{'' if isolate else '-joined'}"

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return int(self.lengths.max(initial=0))

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        pieces = slice(int(self._offsets[index]), int(self._offsets[index + 1]))
        starts, lengths = self._starts[pieces].tolist(), self._lengths[pieces]
        spans = [slice(start, start + length) for start, length in zip(starts, lengths.tolist(), strict=True)]
        input_ids = np.concatenate([self.store.tokens[span] for span in spans]).astype(np.int64)
        labels = input_ids.copy()
        if self.store.mask is not None:
            labels[np.concatenate([self.store.mask[span] for span in spans]) == 0] = IGNORE
        position_ids = np.arange(len(input_ids), dtype=np.int64)
        document_ids = np.zeros(len(input_ids), dtype=np.int32)
        if self.isolate:
            firsts = np.cumsum(lengths, dtype=np.int64) - lengths
            labels[firsts] = IGNORE
            position_ids -= np.repeat(firsts, lengths)
            document_ids = np.repeat(np.arange(len(spans), dtype=np.int32), lengths)
        return {"input_ids": input_ids, "labels": labels, "position_ids": position_ids, "document_ids": document_ids}

    def pieces(self, index: int) -> list[tuple[int, int]]:
        """(first token in the store, number of tokens) of each piece of a sample."""
        span = slice(int(self._offsets[index]), int(self._offsets[index + 1]))
        return list(zip(self._starts[span].tolist(), self._lengths[span].tolist(), strict=True))
