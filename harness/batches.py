"""Samples, and how the samples of one optimizer step become padded micro-batches.

A sample is already packed: it may hold several documents one after another. What keeps them apart is data, not code:
`document_ids` numbers them and `position_ids` starts again at 0 for each; padding is one more document at the end of the row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

IGNORE = -100
"""Label of a token that is not trained on (the value PyTorch's cross-entropy and transformers ignore)."""

FILLER_LENGTH = 2
"""Tokens of a zero-weight sample: the shortest row from which a model can still predict something."""

Sample = dict[str, np.ndarray]
"""input_ids, labels, position_ids (s,) int64 and document_ids (s,) int32. Labels are not shifted: the model shifts them."""


def make_sample(input_ids: np.ndarray, labels: np.ndarray | None = None) -> Sample:
    """A sample of one document, all of whose tokens are trained on unless labels (s,) say otherwise."""
    ids = np.asarray(input_ids, dtype=np.int64)
    return {
        "input_ids": ids,
        "labels": ids.copy() if labels is None else np.asarray(labels, dtype=np.int64),
        "position_ids": np.arange(len(ids), dtype=np.int64),
        "document_ids": np.zeros(len(ids), dtype=np.int32),
    }


def filler_sample(pad_id: int) -> Sample:
    """A sample without any weight: it fills a short step, so that every rank runs the same number of forwards."""
    return make_sample(np.full(FILLER_LENGTH, pad_id), np.full(FILLER_LENGTH, IGNORE))


def count_label_tokens(labels: np.ndarray) -> int:
    """How many tokens of (s,) labels are predicted: the first token of a row never is."""
    return int(np.count_nonzero(labels[1:] != IGNORE))


@dataclasses.dataclass
class MicroBatch:
    """Samples that go through the model at once: torch tensors on the CPU.

    Attributes:
        input_ids, labels, position_ids: (b, s) int64.
        document_ids: (b, s) int32, padding numbered as one more document of its row; None when every row is one document without
            padding, where plain causal attention is right, or with padding that `collate` was told to leave unmasked.
        document_ends: see the function of that name; None where document_ids is.
        num_label_tokens: labels that are predicted, i.e. labels[:, 1:] != -100.
        single_documents: every row is one document and then only padding. Plain causal attention then gives the right results
            for all real tokens too, because padding comes last.
        source_ids: (b,) int64, the number of each sample's source in a mixture; None without a mixture.
        report: called with the micro-batch and the losses of its rows, (b,) on the device, by its forward; None: nobody wants to know.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    document_ids: Tensor | None
    num_label_tokens: int
    single_documents: bool
    document_ends: Tensor | None = None
    source_ids: Tensor | None = None
    report: Callable[[MicroBatch, Tensor], None] | None = None

    def pin_memory(self) -> MicroBatch:
        """The same in page-locked memory, so that copies to a GPU need not be waited for."""
        tensors = {
            field.name: value.pin_memory()
            for field in dataclasses.fields(self)
            if hasattr(value := getattr(self, field.name), "pin_memory")
        }
        return dataclasses.replace(self, **tensors)


def document_ends(document_ids: np.ndarray) -> np.ndarray:
    """Where documents end among the tokens of all rows.

    Args:
        document_ids: (b, s); rows have documents of their own.

    Returns:
        (n + 1,) int32: 0, the end of each document in order, and b x s again and again up to one more than a power of two, so that few
        different sizes occur.
    """
    is_first = np.ones(document_ids.shape, dtype=bool)
    is_first[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    begins = np.flatnonzero(is_first)
    ends = np.full((1 << max(4, (len(begins) - 1).bit_length())) + 1, document_ids.size, dtype=np.int32)
    ends[: len(begins)] = begins
    return ends


def collate(
    samples: Sequence[Sample],
    pad_id: int,
    multiple_of: int = 1,
    source_ids: Sequence[int] | None = None,
    pin_memory: bool = False,
) -> MicroBatch:
    """Pads samples on the right to the longest of them.

    Padding has label -100 whatever `pad_id` is (a tokenizer's pad token may well be its eos, which is a real token elsewhere),
    position_ids from 0, and its own document number, so that no real token attends to it.

    Args:
        samples: at least one.
        pad_id: token put into padding.
        multiple_of: the length is rounded up to a multiple of this. Rows are long where that is needed, and a mask of every pair of
            tokens is dear: where padding alone would need one there is none, which changes nothing for what comes before it.
        source_ids: source of each sample.
        pin_memory: page-locked tensors.
    """
    import torch

    longest = max(len(sample["input_ids"]) for sample in samples)
    width = -(-longest // multiple_of) * multiple_of
    shape = (len(samples), width)
    input_ids = np.full(shape, pad_id, dtype=np.int64)
    labels = np.full(shape, IGNORE, dtype=np.int64)
    position_ids = np.zeros(shape, dtype=np.int64)
    document_ids = np.zeros(shape, dtype=np.int32)
    single, padded = True, False
    for row, sample in enumerate(samples):
        length = len(sample["input_ids"])
        input_ids[row, :length] = sample["input_ids"]
        labels[row, :length] = sample["labels"]
        position_ids[row, :length] = sample["position_ids"]
        document_ids[row, :length] = sample["document_ids"]
        last = int(sample["document_ids"][-1])
        single &= last == 0
        if length < width:
            padded = True
            position_ids[row, length:] = np.arange(width - length)
            document_ids[row, length:] = last + 1
    unmasked = single and (multiple_of > 1 or not padded)
    batch = MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        labels=torch.from_numpy(labels),
        position_ids=torch.from_numpy(position_ids),
        document_ids=None if unmasked else torch.from_numpy(document_ids),
        document_ends=None if unmasked else torch.from_numpy(document_ends(document_ids)),
        num_label_tokens=int(np.count_nonzero(labels[:, 1:] != IGNORE)),
        single_documents=single,
        source_ids=None if source_ids is None else torch.tensor(list(source_ids), dtype=torch.int64),
    )
    return batch.pin_memory() if pin_memory else batch


@dataclasses.dataclass
class StepBatch:
    """This rank's samples of one optimizer step.

    Attributes:
        samples: in the order of the global order.
        epoch: passes over the data after this step.
        num_input_tokens: tokens without padding and without zero-weight samples.
        num_label_tokens: tokens that are predicted.
        pad_id: token put into padding.
        source_ids: source of each sample in a mixture, else None.
        pin_memory: make page-locked micro-batches.
        num_fillers: zero-weight samples among the samples.
        report: for its micro-batches.
    """

    samples: list[Sample]
    epoch: float
    num_input_tokens: int
    num_label_tokens: int
    pad_id: int = 0
    source_ids: list[int] | None = None
    pin_memory: bool = False
    num_fillers: int = 0
    report: Callable[[MicroBatch, Tensor], None] | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return max(len(sample["input_ids"]) for sample in self.samples)

    def micro_batches(self, micro_batch_size: int, multiple_of: int = 1) -> list[MicroBatch]:
        """Cuts the samples, in order, into micro-batches; the last one may be smaller.

        Args:
            micro_batch_size: samples per micro-batch.
            multiple_of: lengths are rounded up to a multiple of this.
        """
        if micro_batch_size < 1:
            raise ValueError(f"micro_batch_size must be at least 1, not {micro_batch_size}")
        batches = []
        for start in range(0, len(self.samples), micro_batch_size):
            part = slice(start, start + micro_batch_size)
            sources = None if self.source_ids is None else self.source_ids[part]
            micro = collate(self.samples[part], self.pad_id, multiple_of, sources, self.pin_memory)
            micro.report = self.report
            batches.append(micro)
        return batches


def make_step_batch(
    samples: Sequence[Sample],
    epoch: float,
    *,
    pad_id: int = 0,
    num_fillers: int = 0,
    source_ids: list[int] | None = None,
    pin_memory: bool = False,
) -> StepBatch:
    """A `StepBatch` of real samples followed by `num_fillers` zero-weight ones."""
    fillers = [filler_sample(pad_id) for _ in range(num_fillers)]
    return StepBatch(
        samples=[*samples, *fillers],
        epoch=epoch,
        num_input_tokens=sum(len(sample["input_ids"]) for sample in samples),
        num_label_tokens=sum(count_label_tokens(sample["labels"]) for sample in samples),
        pad_id=pad_id,
        source_ids=None if source_ids is None else [*source_ids, *([0] * num_fillers)],
        pin_memory=pin_memory,
        num_fillers=num_fillers,
    )
