"""From one source to samples: tokenised once per node, cached by content, packed, counted."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from harness import encoders, node_cache, token_store
from harness.args import DataArguments
from harness.batches import IGNORE
from harness.data_sources import Row
from harness.findings import Finding, UserError, user_error
from harness.source_specs import HubSource, Source, SourceSpec, default_cache_dir, digest, tokenizer_fingerprint
from harness.token_store import TokenizedDataset, TokenStore
from harness.user_files import read_user_text

DEFAULT_BLOCK_SIZE = 4096
"""Most tokens per sample unless the user says otherwise: long contexts of today's models would not fit by default."""
_PARALLEL_BYTES = 32 << 20
"""Less input than this is tokenised in one process: starting others would take longer."""
SEGMENT_CHARS = 1 << 20
_PACKING_WORDS = {
    "num_cuts": "cuts through documents",
    "num_truncated": "documents truncated",
    "num_truncated_tokens": "tokens lost by truncation",
    "num_dropped": "documents dropped because they are longer",
    "num_dropped_tokens": "tokens lost with them",
    "num_unlabelled": "parts dropped in which nothing is trained on",
}
_VALIDATION_NAMES = ("validation", "valid", "dev")

Say = Callable[[str], None]


@dataclasses.dataclass
class DataReport:
    """Counts of one source or split.

    Attributes:
        num_documents, num_tokens, longest: of the documents.
        num_trained_tokens: tokens that a loss mask leaves to be trained on.
        dropped: what was left out: reason -> how many.
        num_samples, num_sample_tokens: after packing; repeated context tokens count.
        num_packed: samples before `--max_train_samples` or `--max_eval_samples`; what `packing` counts happened in all of them.
        block_size: most tokens per sample.
        packing_efficiency: share of block_size * num_samples that is real tokens.
        packing: `PackingCounts` by name.
    """

    num_documents: int
    num_tokens: int
    longest: int
    num_trained_tokens: int
    dropped: dict[str, int]
    num_samples: int = 0
    num_sample_tokens: int = 0
    num_packed: int = 0
    block_size: int = 0
    packing_efficiency: float = 0.0
    packing: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def mean_length(self) -> float:
        """Tokens per document."""
        return self.num_tokens / max(1, self.num_documents)

    def documents_line(self, name: str) -> str:
        """What was read, as one line."""
        line = (
            f"{name}: {self.num_documents:,} documents, {self.num_tokens:,} tokens (mean {self.mean_length:,.0f}, longest {self.longest:,})"
        )
        if self.num_trained_tokens != self.num_tokens:
            line += f", {self.num_trained_tokens:,} of them trained on"
        left_out = ", ".join(f"{number:,} {reason}" for reason, number in self.dropped.items() if number)
        return f"{line}; left out: {left_out}" if left_out else line

    def samples_line(self, name: str, packing: str, isolated: bool) -> str:
        """What packing made of it, as one line."""
        how = f"{packing}, documents {'isolated' if isolated else 'not isolated'}"
        line = f"{name}: {self.num_samples:,} samples of up to {self.block_size:,} tokens ({how})"
        if packing != "none":
            line += f", {self.packing_efficiency:.1%} of their places filled"
        happened = ", ".join(f"{self.packing[key]:,} {text}" for key, text in _PACKING_WORDS.items() if self.packing.get(key))
        if self.num_packed > self.num_samples:
            happened = f"the first of {self.num_packed:,}{', in which: ' if happened else ''}{happened}"
        return f"{line}; {happened}" if happened else line


def resolve_block_size(block_size: int | None, max_positions: int | None) -> int:
    """Tokens per sample.

    Args:
        block_size: what the user gave.
        max_positions: the model's limit.

    Raises:
        UserError: more than the model can take.
    """
    if block_size is None:
        return min(max_positions or DEFAULT_BLOCK_SIZE, DEFAULT_BLOCK_SIZE)
    if max_positions is not None and block_size > max_positions:
        raise user_error(
            "--block_size", f"{block_size} is over the model's limit of {max_positions} positions", f"--block_size {max_positions}"
        )
    return block_size


def validation_source(args: DataArguments) -> Source | None:
    """What `--validation_file` names."""
    if not args.validation_file:
        return None
    files = tuple(args.validation_file)
    return SourceSpec(files=files, key="--validation_file", encoding=args.data_encoding, line_mode=args.text_mode == "line").open()


def sources_of(args: DataArguments) -> tuple[Source, Source | None]:
    """The training source, and the evaluation source if it is another one.

    Raises:
        UserError: none or several were named, or what was named is not there.
    """
    if args.train_file and args.dataset_name:
        raise user_error("--train_file", "and --dataset_name were both given", "keep one of them, or mix them with --dataset_mix")
    if not args.train_file and not args.dataset_name:
        raise user_error("--train_file", "no training data was given", "give --train_file, --dataset_name or --dataset_mix")
    evaluation = validation_source(args)
    if args.train_file:
        files = tuple(args.train_file)
        return SourceSpec(files=files, encoding=args.data_encoding, line_mode=args.text_mode == "line").open(), evaluation
    spec = SourceSpec(dataset_name=args.dataset_name, dataset_config_name=args.dataset_config_name, key="--dataset_name")
    source = HubSource(spec)
    if evaluation is None:
        held = next((name for name in _VALIDATION_NAMES if name in source.splits()), None)
        evaluation = HubSource(dataclasses.replace(spec, split=held)) if held else None
    return source, evaluation


def read_chat_template(value: str) -> str:
    """A chat template, from a file of that name or, if it has template marks in it, from the value itself.

    Raises:
        UserError: neither.
    """
    if "{" in value:
        return value
    return read_user_text(Path(value).expanduser(), "--chat_template", "give a file, or the template's text")


@dataclasses.dataclass
class PreparedSource:
    """Samples of one source.

    Attributes:
        train, evaluation: samples; evaluation is None where there is none.
        report, evaluation_report: counts.
    """

    train: TokenizedDataset
    evaluation: TokenizedDataset | None
    report: DataReport
    evaluation_report: DataReport | None


class Preparer:
    """Tokenises and packs sources with one tokenizer and one set of options."""

    def __init__(self, args: DataArguments, tokenizer: Any, max_positions: int | None, say: Say, first: bool) -> None:
        self.args = args
        self.block_size = resolve_block_size(args.block_size, max_positions)
        self.tokenizer = tokenizer
        if args.chat_template:
            tokenizer.chat_template = read_chat_template(args.chat_template)
        self.special = encoders.special_tokens(tokenizer, args.add_bos, args.add_eos)
        self.findings: list[Finding] = list(self.special.findings)
        self.cache = Path(args.data_cache_dir).expanduser() if args.data_cache_dir else default_cache_dir()
        self.say = say
        self.first = first

    def prepare(self, name: str = "train") -> PreparedSource:
        """Training and evaluation samples of what the arguments name; `name` is for messages."""
        args = self.args
        train_source, evaluation_source = sources_of(args)
        store = self.store(train_source, name)
        train_split = held_out = evaluation_store = None
        if evaluation_source is not None:
            evaluation_store = self.store(evaluation_source, f"{name} evaluation")
        elif args.validation_split_percentage > 0:
            evaluation_store = store
            train_split, held_out = token_store.divide(store, args.validation_split_percentage)
        train, report = self.samples(store, train_split, name, args.max_train_samples)
        self._check(train, name)
        if evaluation_store is None:
            return PreparedSource(train, None, report, None)
        evaluation, evaluation_report = self.samples(evaluation_store, held_out, "evaluation", args.max_eval_samples)
        if not len(evaluation):
            self.findings.append(Finding("warning", "evaluation", "no sample is left to evaluate on: no evaluation"))
            return PreparedSource(train, None, report, None)
        return PreparedSource(train, evaluation, report, evaluation_report)

    def options(self, spec: SourceSpec) -> list[Any]:
        """All that changes a source's tokens, besides its contents."""
        args = self.args
        return [
            token_store.FORMAT,
            tokenizer_fingerprint(self.tokenizer),
            [self.special.bos, self.special.eos],
            [spec.encoding, spec.line_mode],
            [args.text_column, args.prompt_column, args.completion_column, args.messages_column],
            [args.train_on_prompt, args.bad_rows],
        ]

    def store(self, source: Source, name: str) -> TokenStore:
        """The tokens of a source."""
        options = self.options(source.spec)
        request = f"request-{digest([source.identity(), options])}"
        for attempt in range(5):
            pointer = node_cache.make_once(
                self.cache,
                request,
                lambda folder: self._build_request(folder, source, options, name),
                first=self.first,
                rebuild=self.args.overwrite_cache and attempt == 0,
                say=self.say,
            )
            folder = None
            try:
                folder = self.cache / (pointer / "store").read_text(encoding="utf-8")
                store = TokenStore(folder)
                break
            except (OSError, ValueError):  # deleted, damaged, or being made anew by another process at this moment
                for broken in (pointer, folder):
                    if broken is not None:
                        node_cache.discard(broken)
                time.sleep(0.2 * attempt)
        else:
            raise user_error("--data_cache_dir", f"tokenised data in {self.cache} keeps disappearing", "choose another folder")
        self.say(_report_of(store).documents_line(name))
        for note, number in store.meta["report"]["notes"].items():
            self.findings.append(Finding("warning", source.spec.key, f"{number:,} {note}"))
        return store

    def _build_request(self, folder: Path, source: Source, options: list[Any], name: str) -> None:
        """Runs in the one process that makes it: the contents' hash names the store, so that equal data elsewhere is found too."""
        key = f"tokens-{digest([source.content(), options])}"
        node_cache.make_once(
            self.cache,
            key,
            lambda target: self._tokenise(target, source, name),
            rebuild=self.args.overwrite_cache,
            say=self.say,
        )
        (folder / "store").write_text(key, encoding="utf-8")

    def _tokenise(self, folder: Path, source: Source, name: str) -> None:
        text_tokenizer = encoders.TextTokenizer(self.tokenizer)
        progress = _Progress(name, source.num_bytes, self.say, self.first)
        segment_chars = SEGMENT_CHARS if text_tokenizer.is_splittable() else None
        rows = source.rows(segment_chars, progress.add)
        first = next(rows, None)
        if first is None:
            raise user_error(source.spec.key, "there is not a single row", "give data with text in it")
        encoder = self.encoder_for(text_tokenizer, first)
        writer = token_store.TokenWriter(folder, text_tokenizer.max_token_id, encoder.masked)
        dropped: collections.Counter[str] = collections.Counter()
        notes: collections.Counter[str] = collections.Counter()
        with progress:
            for encoded in encoders.encode_all(encoder, _chain(first, rows), self._num_workers(source)):
                if encoded.problems and self.args.bad_rows == "error":
                    raise UserError(encoded.problems[: encoders.MAX_REPORTED_ROWS])
                dropped["bad rows"] += len(encoded.problems)
                dropped += encoded.dropped
                notes += encoded.notes
                writer.add(encoded.tokens, encoded.lengths, encoded.mask, encoded.open)
        for reason, names in source.skipped.items():
            dropped[f"{reason} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"] += len(names)
        if not writer.num_documents:
            why = "; ".join(f"{number} {reason}" for reason, number in dropped.items() if number)
            raise user_error(source.spec.key, f"no usable token in the data: {why or 'it is empty'}", "give data with text in it")
        writer.close({"dropped": dict(dropped), "notes": dict(notes)})

    def encoder_for(self, tokenizer: encoders.TextTokenizer, first: Row) -> encoders.Encoder:
        """The encoder that the arguments ask for, or that a source's first row suggests."""
        args = self.args
        objective = encoders.choose_objective(first, args.text_column, args.prompt_column, args.completion_column, args.messages_column)
        self.say(f"training on {objective.kind}: column {' and '.join(objective.columns)}")
        if objective.kind == "chat":
            return encoders.ChatEncoder(tokenizer, objective.columns[0], args.train_on_prompt)
        if objective.kind == "prompt":
            prompt, completion = objective.columns
            return encoders.PromptEncoder(tokenizer, self.special, prompt, completion, args.train_on_prompt)
        return encoders.TextEncoder(tokenizer, self.special, objective.columns[0])

    def _num_workers(self, source: Source) -> int:
        if source.num_bytes is not None and source.num_bytes < _PARALLEL_BYTES:
            return 1
        return self.args.preprocessing_num_workers or len(os.sched_getaffinity(0))

    def samples(
        self, store: TokenStore, split: token_store.Split | None, name: str, max_samples: int | None
    ) -> tuple[TokenizedDataset, DataReport]:
        """Samples of a store, or of one side of it."""
        args, block_size = self.args, self.block_size
        report = _report_of(store)
        key = f"{args.packing}-{block_size}-{args.overlong}{'' if split is None else '-' + split.key()}"
        # Not in the store's folder: were that made anew at this moment, the plan's folder would stand in its way.
        plan = node_cache.make_once(
            self.cache,
            f"plan-{store.fingerprint}-{key}",
            lambda folder: token_store.write_plan(folder, store, split, block_size, args.packing, args.overlong),
            first=self.first,
            say=self.say,
        )
        data = TokenizedDataset(store, plan, args.document_isolation, max_samples)
        report.num_samples = len(data)
        report.num_sample_tokens = data.num_tokens
        report.num_packed = data.plan["num_samples"]
        report.block_size = block_size
        report.packing_efficiency = data.num_tokens / max(1, len(data) * block_size)
        report.packing = data.plan["counts"]
        self.say(report.samples_line(name, args.packing, args.document_isolation))
        return data, report

    def _check(self, data: TokenizedDataset, name: str) -> None:
        if not len(data):
            left_out = [f"{data.plan['counts'][key]:,} {text}" for key, text in _PACKING_WORDS.items() if data.plan["counts"].get(key)]
            raise user_error(
                "--block_size",
                f"{name}: no sample is left: {', '.join(left_out) or 'nothing to train on'}",
                "use --overlong split, or a larger --block_size",
            )
        if self.args.packing == "concat" and data.num_tokens < self.block_size and self.args.max_train_samples is None:
            raise user_error(
                "--block_size",
                f"the training data has {data.num_tokens:,} tokens, fewer than one block of {self.block_size:,}",
                f"give more text, or --block_size {max(2, data.num_tokens // 2)}",
            )


def _report_of(store: TokenStore) -> DataReport:
    meta = store.meta
    return DataReport(
        meta["num_documents"], meta["num_tokens"], meta["longest"], meta["num_trained_tokens"], dict(meta["report"]["dropped"])
    )


def _chain(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rest


class _Progress:
    """A bar on a terminal, else a line every half minute; only on the node's first process."""

    def __init__(self, name: str, num_bytes: int | None, say: Say, show: bool) -> None:
        from tqdm import tqdm

        self.say = say
        self.total = num_bytes
        self.done = 0
        self.name = name
        self.last = time.monotonic()
        self.show = show
        hidden = not (show and sys.stderr.isatty())
        self.bar = tqdm(total=num_bytes, unit="B", unit_scale=True, desc=f"tokenising {name}", disable=hidden)

    def add(self, num_bytes: int) -> None:
        """More of the input was read."""
        self.done += num_bytes
        self.bar.update(num_bytes)
        now = time.monotonic()
        if self.show and self.bar.disable and now - self.last > 30:
            self.last = now
            share = f"{self.done / self.total:.0%}" if self.total else f"{self.done / 1e6:.0f} MB"
            self.say(f"tokenising {self.name}: {share}")

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self.bar.close()


def preview(dataset: Any, tokenizer: Any, titles: dict[int, str] | None = None, max_tokens: int = 200) -> list[str]:
    """The first samples decoded, with what is trained on marked by + and what is not by -, a line per run of either.

    Args:
        titles: which samples, and what they are called; default: the first two.
    """
    if titles is None:
        titles = {index: f"sample {index}" for index in range(min(2, len(dataset)))}
    lines = []
    for index, title in titles.items():
        sample = dataset[index]
        ids, trained = sample["input_ids"][:max_tokens], sample["labels"][:max_tokens] != IGNORE
        lines.append(f"{title}: {len(sample['input_ids'])} tokens (+ trained on, - not)")
        for run in np.split(np.arange(len(ids)), np.flatnonzero(np.diff(trained)) + 1):
            lines.append(f"  {'+' if trained[run[0]] else '-'} {tokenizer.decode(ids[run].tolist())!r}")
        if len(sample["input_ids"]) > max_tokens:
            lines.append("  ...")
    return lines
