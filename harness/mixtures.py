"""Several sources in given shares, or one after another.

    sources:                    # the file of --dataset_mix
      - name: code
        weight: 3               # shares of the samples: 3 in 4 here
        train_file: [src]
      - name: chat
        weight: 1
        dataset_name: user/chats
        messages_column: conversations
    samples_per_epoch: 100000   # default: as many as the sources have together

Every epoch has exactly the given shares. A source with a larger share than it has samples begins again, in another order; one with
fewer goes on in the next epoch where it stopped. Which sample stands where is arithmetic, so any step can be had at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from harness.args import DataArguments
from harness.batches import Sample
from harness.findings import Finding, UserError
from harness.parsing import read_yaml
from harness.permutation import Permutation, combine_seeds
from harness.source_specs import digest
from harness.token_store import TokenizedDataset

_FIELDS = (
    "train_file",
    "validation_file",
    "dataset_name",
    "dataset_config_name",
    "text_column",
    "prompt_column",
    "completion_column",
    "messages_column",
    "train_on_prompt",
    "text_mode",
    "data_encoding",
    "max_train_samples",
    "max_eval_samples",
)
_MOST_SAMPLES = 2**48  # of an epoch; sources are drawn by floats of 53 bits
_NAME = re.compile(r"[\w.\-/]+( [\w.\-/]+)*")
_LISTS = ("train_file", "validation_file")


@dataclasses.dataclass(frozen=True)
class MixSource:
    """One source of a mixture file.

    Attributes:
        name: for the log.
        weight: its share, in relation to the others'.
        args: the run's data arguments, with what the file says about this source.
    """

    name: str
    weight: float
    args: DataArguments


def read_mix(args: DataArguments) -> tuple[list[MixSource], int | None]:
    """The sources of `args.dataset_mix`, and the samples per epoch if the file gives them.

    Raises:
        UserError: everything that is wrong with the file, together.
    """
    path = str(args.dataset_mix)
    values = read_yaml(path, "--dataset_mix")
    problems: list[Finding] = []

    def bad(where: str, message: str, fix: str = "") -> None:
        problems.append(Finding("error", where, message, fix))

    for key in set(values) - {"sources", "samples_per_epoch"}:
        bad(path, f"unknown key {key!r}", "the keys are sources and samples_per_epoch")
    number = values.get("samples_per_epoch")
    if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
        bad(path, f"samples_per_epoch must be a positive whole number, not {number!r}")
    elif number is not None and number > _MOST_SAMPLES:
        bad(path, f"samples_per_epoch must be at most {_MOST_SAMPLES}", "a smaller number")
    entries = values.get("sources")
    if not isinstance(entries, list) or not entries:
        bad(path, "has no list of sources", "see the example in the documentation of --dataset_mix")
        entries = []
    for flag in ("train_file", "dataset_name"):
        if getattr(args, flag):
            bad(f"--{flag}", "and --dataset_mix were both given", "put it into the mixture's file")
    sources = [_source(args, f"{path}, source {i}", entry, bad) for i, entry in enumerate(entries, 1)]
    names = [source.name for source in sources if source is not None]
    for name in sorted({name for name in names if not _NAME.fullmatch(name)}):
        bad(path, f"{name!r} cannot be a source's name in the log", "give it a name of letters, digits, blanks and . _ - /")
    for name in sorted({name for name in names if names.count(name) > 1}):
        bad(path, f"two sources have the name {name}")
    if problems:
        raise UserError(problems)
    return [source for source in sources if source is not None], number


def _source(args: DataArguments, where: str, entry: Any, bad: Any) -> MixSource | None:
    if not isinstance(entry, dict):
        bad(where, f"is a {type(entry).__name__}, not names with values")
        return None
    for key in entry:
        if key not in ("name", "weight", *_FIELDS):
            close = difflib.get_close_matches(str(key), [*_FIELDS, "name", "weight"], n=1)
            bad(where, f"unknown key {key!r}", f"did you mean {close[0]}?" if close else f"the keys are name, weight, {', '.join(_FIELDS)}")
    if bool(entry.get("train_file")) == bool(entry.get("dataset_name")):
        bad(where, "needs either train_file or dataset_name")
        return None
    weight = entry.get("weight", 1)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 1e-9 <= weight <= 1e9:
        bad(where, f"weight must be a positive number, not {str(weight)[:40]}", "a number from 1e-9 to 1e9")
        return None
    given = {key: value for key, value in entry.items() if key in _FIELDS and value is not None}
    wrong = [key for key, value in given.items() if not _is_of_kind(key, value)]
    for key in wrong:
        bad(where, f"{key} cannot be {given[key]!r}")
    if wrong:
        return None
    for key in _LISTS:
        if key in given and not isinstance(given[key], list):
            given[key] = [str(given[key])]
    files = given.get("train_file") or [given.get("dataset_name")]
    cleared: dict[str, Any] = {"train_file": [], "validation_file": [], "dataset_name": None, "dataset_mix": None}
    return MixSource(str(entry.get("name") or Path(str(files[0])).stem), float(weight), dataclasses.replace(args, **{**cleared, **given}))


def _is_of_kind(key: str, value: Any) -> bool:
    """Whether a value can be that of a flag of the same name."""
    if key in _LISTS and isinstance(value, list):
        return bool(value) and all(isinstance(item, str) and item and "\0" not in item for item in value)
    if key.startswith("max_"):
        return isinstance(value, int) and not isinstance(value, bool) and value > 0
    if key == "train_on_prompt":
        return isinstance(value, bool)
    if key == "text_mode":
        return value in ("line", "document")
    return isinstance(value, str) and bool(value) and "\0" not in value


class Concatenation:
    """Samples of several sources, one source after another.

    Args:
        parts: the sources.

    Attributes:
        lengths: (n,) tokens of each sample.
    """

    def __init__(self, parts: Sequence[TokenizedDataset]) -> None:
        self.parts = list(parts)
        self.ends = np.cumsum([len(part) for part in parts])
        self.lengths = np.concatenate([np.asarray(part.lengths) for part in parts])
        self.num_tokens = sum(part.num_tokens for part in parts)
        self.num_documents = sum(part.num_documents for part in parts)
        self.fingerprint = digest([part.fingerprint for part in parts])

    def __len__(self) -> int:
        return int(self.ends[-1])

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return int(self.lengths.max(initial=0))

    def at(self, epoch: int, index: int) -> tuple[int, Sample]:
        """(number of the source, sample); the same in every epoch."""
        source = int(np.searchsorted(self.ends, index, side="right"))
        return source, self.parts[source][index - (int(self.ends[source - 1]) if source else 0)]

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self.at(0, index)[1]


class Mixture:
    """Samples of several sources in given shares.

    Args:
        parts: the sources.
        names: of the sources.
        weights: shares, in relation to each other.
        seed: of the order within each source.
        num_samples: per epoch; None: as many as the sources have together.

    Attributes:
        lengths: tokens of every sample that can occur, in no order of use.
        counts: samples of each source per epoch.

    Raises:
        UserError: a source would get no sample.
    """

    def __init__(
        self, parts: Sequence[TokenizedDataset], names: Sequence[str], weights: Sequence[float], seed: int, num_samples: int | None = None
    ) -> None:
        self._all = Concatenation(parts)
        self.parts = self._all.parts
        self.names = list(names)
        self.seed = seed
        self.lengths = self._all.lengths
        self.num_tokens, self.num_documents, self.longest = self._all.num_tokens, self._all.num_documents, self._all.longest
        total = len(self._all) if num_samples is None else num_samples
        self.counts = apportion(weights, total)
        empty = [name for name, count in zip(names, self.counts, strict=True) if not count]
        if empty:
            raise UserError(
                Finding(
                    "error",
                    "--dataset_mix",
                    f"{name} gets none of the {total} samples of an epoch",
                    "raise its weight or samples_per_epoch",
                )
                for name in empty
            )
        self.ends = np.cumsum(self.counts)
        self.fingerprint = digest([self._all.fingerprint, self.counts, seed])
        self._order = functools.lru_cache(maxsize=4 * len(self.parts))(self._make_order)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def describe(self) -> list[str]:
        """A line per source: its share, and how often an epoch goes through it."""
        return [
            f"mixture: {name}: {count:,} of {len(self):,} samples per epoch ({count / len(self):.1%}), "
            f"{count / len(part):.2f} times its {len(part):,}"
            for name, count, part in zip(self.names, self.counts, self.parts, strict=True)
        ]

    def first_of_each(self) -> dict[int, str]:
        """Number and title of a sample of every source."""
        return {int(end) - count: f"a sample of {name}" for name, end, count in zip(self.names, self.ends, self.counts, strict=True)}

    def _make_order(self, source: int, number: int) -> Permutation:
        return Permutation(len(self.parts[source]), combine_seeds(self.seed, source, number))

    def at(self, epoch: int, index: int) -> tuple[int, Sample]:
        """(number of the source, sample) at a place of an epoch."""
        source = int(np.searchsorted(self.ends, index, side="right"))
        place = index - (int(self.ends[source - 1]) if source else 0)
        number, position = divmod(epoch * self.counts[source] + place, len(self.parts[source]))
        return source, self.parts[source][int(self._order(source, number)(np.array([position]))[0])]

    def at_any(self, index: int) -> Sample:
        """The sample whose length is `lengths[index]`."""
        return self._all[index]

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self.at(0, index)[1]


def apportion(weights: Sequence[float], total: int) -> list[int]:
    """Whole numbers with sum `total` in the proportion of the weights: largest remainders are rounded up."""
    shares = np.array(weights, dtype=np.float64) / np.sum(weights) * total
    counts = np.floor(shares).astype(np.int64)
    for source in np.argsort(counts - shares, kind="stable")[: total - int(counts.sum())]:
        counts[source] += 1
    return [int(count) for count in counts]
