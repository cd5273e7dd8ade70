"""Which tokens make which sample.

Input is nothing but the lengths of documents lying one after another in a flat token file; output is a plan: pieces (start, length)
of that file, and how many pieces each sample has. Three ways:

    concat    documents one after another, cut every block_size tokens; only the very last sample is shorter
    best_fit  documents are kept whole where they fit; each goes into the fullest sample that still has room
    none      one document, or one piece of a long one, per sample

A piece that continues a document begins with the token before it, as context only: without that repeated token the first token of
every continuation would never be predicted. So every token of a document except its first is a label exactly once.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Callable, Iterator

import numpy as np

WINDOW_DOCUMENTS = 1 << 18
"""Documents planned at once: memory is bounded by this, not by the corpus."""

HasLabels = Callable[[int, int], bool]
"""(start, length) -> whether anything in this piece is trained on."""


@dataclasses.dataclass
class PlanPart:
    """Samples of one window.

    Attributes:
        starts: (p,) int64, first token of each piece in the token file.
        lengths: (p,) int32, tokens of each piece.
        pieces: (n,) int32, how many pieces each sample has; their sum is p.
    """

    starts: np.ndarray
    lengths: np.ndarray
    pieces: np.ndarray


@dataclasses.dataclass
class PackingCounts:
    """What packing did to documents, for the report.

    Attributes:
        num_cuts: places where a document was cut; the token before each is repeated, as context, after it.
        num_truncated, num_truncated_tokens: documents cut off, and the tokens lost by it.
        num_dropped, num_dropped_tokens: documents left out because they are longer than a block.
        num_unlabelled, num_unlabelled_tokens: pieces of long documents left out because nothing in them is trained on.
    """

    num_cuts: int = 0
    num_truncated: int = 0
    num_truncated_tokens: int = 0
    num_dropped: int = 0
    num_dropped_tokens: int = 0
    num_unlabelled: int = 0
    num_unlabelled_tokens: int = 0


def plan(
    windows: Iterator[tuple[np.ndarray, np.ndarray]],
    block_size: int,
    packing: str,
    overlong: str,
    counts: PackingCounts,
    has_labels: HasLabels | None = None,
) -> Iterator[PlanPart]:
    """Plans samples window by window.

    Args:
        windows: (starts, lengths) of documents, (d,) int64 each, in file order.
        block_size: most tokens in a sample, at least 2.
        packing: "concat", "best_fit" or "none".
        overlong: "split", "truncate" or "drop", for documents longer than block_size.
        counts: filled on the way.
        has_labels: asked for pieces of overlong documents; None where every token is trained on.
    """
    if block_size < 2:
        raise ValueError(f"block_size must be at least 2, not {block_size}")
    if packing not in ("concat", "best_fit", "none"):
        raise ValueError(f"packing must be concat, best_fit or none, not {packing!r}")
    if overlong not in ("split", "truncate", "drop"):
        raise ValueError(f"overlong must be split, truncate or drop, not {overlong!r}")
    if packing == "concat":
        kept = (_shorten(starts, lengths, block_size, overlong, counts) for starts, lengths in windows)
        yield from _concat(kept, block_size, counts)
        return
    for starts, lengths in windows:
        starts, lengths = _shorten(starts, lengths, block_size, overlong, counts)
        piece_starts, piece_lengths = _split(starts, lengths, block_size, counts, has_labels)
        if not len(piece_starts):
            continue
        if packing == "none":
            yield PlanPart(piece_starts, piece_lengths.astype(np.int32), np.ones(len(piece_starts), dtype=np.int32))
        else:
            yield best_fit(piece_starts, piece_lengths, block_size)


def _shorten(
    starts: np.ndarray, lengths: np.ndarray, block_size: int, overlong: str, counts: PackingCounts
) -> tuple[np.ndarray, np.ndarray]:
    """Applies "truncate" and "drop"; "split" leaves documents as they are."""
    long = lengths > block_size
    if overlong == "split" or not long.any():
        return starts, lengths
    if overlong == "truncate":
        counts.num_truncated += int(np.count_nonzero(long))
        counts.num_truncated_tokens += int((lengths[long] - block_size).sum())
        return starts, np.minimum(lengths, block_size)
    counts.num_dropped += int(np.count_nonzero(long))
    counts.num_dropped_tokens += int(lengths[long].sum())
    return starts[~long], lengths[~long]


def _split(
    starts: np.ndarray, lengths: np.ndarray, block_size: int, counts: PackingCounts, has_labels: HasLabels | None
) -> tuple[np.ndarray, np.ndarray]:
    """Cuts documents longer than a block into pieces of at most block_size tokens that overlap by one token."""
    stride = block_size - 1
    num_pieces = np.maximum(1, -(-(lengths - 1) // stride))
    counts.num_cuts += int((num_pieces - 1).sum())
    document = np.repeat(np.arange(len(starts)), num_pieces)
    number = np.arange(len(document)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    piece_starts = starts[document] + number * stride
    piece_lengths = np.minimum(block_size, lengths[document] - number * stride)
    if has_labels is not None:
        keep = np.ones(len(document), dtype=bool)
        for piece in np.flatnonzero((num_pieces[document] > 1) | (lengths[document] == block_size)):
            keep[piece] = has_labels(int(piece_starts[piece]), int(piece_lengths[piece]))
        counts.num_unlabelled += int(np.count_nonzero(~keep))
        counts.num_unlabelled_tokens += int(piece_lengths[~keep].sum())
        piece_starts, piece_lengths = piece_starts[keep], piece_lengths[keep]
    return piece_starts, piece_lengths


def _concat(windows: Iterator[tuple[np.ndarray, np.ndarray]], block_size: int, counts: PackingCounts) -> Iterator[PlanPart]:
    """Fills samples to exactly block_size tokens; what the last window leaves over is the last sample."""
    open_starts, open_lengths = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    for starts, lengths in windows:
        starts = np.concatenate([open_starts, starts])
        lengths = np.concatenate([open_lengths, lengths])
        part, open_starts, open_lengths = _concat_window(starts, lengths, block_size, counts)
        if len(part.pieces):
            yield part
    if open_lengths.sum() > 1:  # a single token predicts nothing: it is the context of a piece that ended exactly here
        yield PlanPart(open_starts, open_lengths.astype(np.int32), np.array([len(open_starts)], dtype=np.int32))


def _concat_window(
    starts: np.ndarray, lengths: np.ndarray, block_size: int, counts: PackingCounts
) -> tuple[PlanPart, np.ndarray, np.ndarray]:
    """All full samples of these documents, and the pieces that are left over."""
    ends = np.cumsum(lengths).tolist()  # in the coordinates of the documents laid end to end
    total = ends[-1] if ends else 0
    cuts, begins, position = [], [0], 0
    while position + block_size <= total:
        position += block_size
        cuts.append(position)
        inside = ends[bisect_left(ends, position)] != position
        position -= inside  # the next sample repeats the cut document's last token
        begins.append(position)
    sample_starts, sample_ends = np.array(begins, dtype=np.int64), np.array([*cuts, total], dtype=np.int64)
    document_ends = np.array(ends, dtype=np.int64)
    document_starts = document_ends - lengths
    first = np.searchsorted(document_ends, sample_starts, side="right")
    last = np.searchsorted(document_ends, sample_ends, side="left")
    num_pieces = np.where(sample_ends > sample_starts, last - first + 1, 0)
    sample = np.repeat(np.arange(len(num_pieces)), num_pieces)
    document = first[sample] + np.arange(len(sample)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    piece_begin = np.maximum(document_starts[document], sample_starts[sample])
    piece_end = np.minimum(document_ends[document], sample_ends[sample])
    piece_starts = starts[document] + piece_begin - document_starts[document]
    piece_lengths = piece_end - piece_begin
    counts.num_cuts += int(np.count_nonzero(sample_starts[1:] != np.array(cuts, dtype=np.int64)))
    full = int(num_pieces[: len(cuts)].sum())
    part = PlanPart(piece_starts[:full], piece_lengths[:full].astype(np.int32), num_pieces[: len(cuts)].astype(np.int32))
    return part, piece_starts[full:], piece_lengths[full:]


def best_fit(starts: np.ndarray, lengths: np.ndarray, block_size: int) -> PlanPart:
    """Best-fit decreasing: longest pieces first, each into the fullest sample that still has room.

    Pieces of one length are placed together: all samples with the same room are alike, and a sample that has taken a piece and has
    room for another of that length is the fullest fitting one for it. So the work grows with the number of different lengths, not
    with the number of pieces. The samples are returned in the order of their first piece in the file.
    """
    order = np.argsort(-lengths, kind="stable")
    sorted_lengths = lengths[order]
    sample_of = np.empty(len(lengths), dtype=np.int64)
    rooms: dict[int, list[np.ndarray]] = {}  # room -> samples with exactly that room
    num_samples = 0
    boundaries = np.flatnonzero(np.diff(sorted_lengths)) + 1
    for group in np.split(order, boundaries):
        length = int(lengths[group[0]])
        placed = 0
        for room in sorted(room for room in rooms if room >= length):
            if placed == len(group):
                break
            samples = np.concatenate(rooms.pop(room))
            placed += _place(group[placed:], samples, room, length, sample_of, rooms)
        per_sample = block_size // length
        left = len(group) - placed
        if left:
            fresh = np.arange(num_samples, num_samples + -(-left // per_sample))
            num_samples += len(fresh)
            _place(group[placed:], fresh, block_size, length, sample_of, rooms)
    by_sample = np.lexsort((np.arange(len(lengths)), sample_of))
    pieces = np.bincount(sample_of, minlength=num_samples)
    offsets = np.cumsum(pieces) - pieces
    file_order = np.argsort(by_sample[offsets], kind="stable")  # by_sample[offsets]: each sample's first piece
    new_number = np.empty(num_samples, dtype=np.int64)
    new_number[file_order] = np.arange(num_samples)
    final = np.lexsort((np.arange(len(lengths)), new_number[sample_of]))
    return PlanPart(starts[final], lengths[final].astype(np.int32), pieces[file_order].astype(np.int32))


def _place(
    group: np.ndarray, samples: np.ndarray, room: int, length: int, sample_of: np.ndarray, rooms: dict[int, list[np.ndarray]]
) -> int:
    """Puts pieces of one length into samples with the same room, as many as fit into each in turn; returns how many it placed."""
    per_sample = room // length
    number = min(len(group), per_sample * len(samples))
    sample_of[group[:number]] = np.repeat(samples, per_sample)[:number]
    full, rest = divmod(number, per_sample)
    for chosen, used in ((samples[:full], per_sample), (samples[full : full + 1], rest), (samples[full + 1 :], 0)):
        if len(chosen):
            rooms.setdefault(room - used * length, []).append(chosen)
    return number
