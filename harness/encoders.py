"""From rows to tokens and to what is trained on: plain text, prompt with completion, and chat."""

from __future__ import annotations

import collections
import concurrent.futures
import concurrent.futures.process
import dataclasses
import itertools
import json
import multiprocessing
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from harness import chat_masks
from harness.data_sources import Row
from harness.findings import Finding, UserError, user_error

MAX_REPORTED_ROWS = 10
_BATCH_ROWS = 512
_BATCH_CHARS = 1 << 19


@dataclasses.dataclass
class Encoded:
    """Documents of some rows.

    Attributes:
        tokens: (t,) uint32, documents end to end.
        lengths: (d,) int64, with sum t.
        mask: (t,) uint8, 1 = trained on; None where every token is.
        open: the last document goes on in the next batch.
        dropped: rows left out, by reason.
        problems: rows that are wrong.
        notes: what happened to how many rows that are used all the same.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    mask: np.ndarray | None = None
    open: bool = False
    dropped: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    problems: list[Finding] = dataclasses.field(default_factory=list)
    notes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)


class Encoder(Protocol):
    """Turns rows into documents; lives in worker processes."""

    masked: bool

    def encode(self, rows: Sequence[Row]) -> Encoded: ...


def joined(documents: Sequence[Sequence[int] | np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Documents end to end (t,) uint32, and their lengths (d,)."""
    lengths = np.fromiter((len(document) for document in documents), dtype=np.int64, count=len(documents))
    tokens = np.fromiter(itertools.chain.from_iterable(documents), dtype=np.uint32, count=int(lengths.sum()))
    return tokens, lengths


class TextTokenizer:
    """A tokenizer as this module needs it: text to ids without special tokens, truncation or padding.

    Args:
        tokenizer: transformers' tokenizer. A fast one's backend is copied, because truncation is a setting of the backend that
            whoever used the tokenizer last may have left on.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.backend = None
        if getattr(tokenizer, "is_fast", False):
            backend = type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str())
            backend.no_truncation()
            backend.no_padding()
            self.backend = backend
        self.max_token_id = max(len(tokenizer) - 1, max(tokenizer.get_vocab().values()))

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text."""
        if self.backend is not None:
            return [encoding.ids for encoding in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]
        if not texts:
            return []
        return self.tokenizer(list(texts), add_special_tokens=False, truncation=False)["input_ids"]

    def ids_and_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids, and the characters [begin, end) that each stands for.

        Raises:
            UserError: the tokenizer cannot tell (it is not a fast one).
        """
        if self.backend is None:
            raise user_error("--tokenizer_name", "loss masks need a fast tokenizer, and this one is not", "use its fast version")
        encoding = self.backend.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def is_splittable(self) -> bool:
        """Whether text cut after a line end gives the same tokens in parts as in one piece. Sentencepiece-like tokenizers that put
        a blank before every text do not."""
        probes = ["a word\n", "def f(x):\n", "Ends here.\n\n", "x\n"]
        followers = ["and more", "# 1", "(b", "é"]
        texts = [a + b for a in probes for b in followers]
        parts = self.ids([text for a in probes for b in followers for text in (a, b)])
        return all(whole == parts[2 * i] + parts[2 * i + 1] for i, whole in enumerate(self.ids(texts)))


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    """Which special tokens documents get.

    Attributes:
        bos, eos: put before and after every document; None: not.
        pad: put into padding. Never matters to the loss: what is padding is known by position, not by this id.
        findings: what there is to say about it.
    """

    bos: int | None
    eos: int | None
    pad: int
    findings: tuple[Finding, ...] = ()


def special_tokens(tokenizer: Any, add_bos: bool | None, add_eos: bool | None) -> SpecialTokens:
    """The rules for bos, eos and pad of a tokenizer.

    Args:
        tokenizer: transformers' tokenizer.
        add_bos: None: where the tokenizer itself does.
        add_eos: None: where there is one.

    Raises:
        UserError: a token that was asked for does not exist.
    """
    problems, notes = [], []
    bos, eos, pad = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    if add_bos and bos is None:
        problems.append(Finding("error", "--add_bos", "the tokenizer has no bos token", "leave --add_bos out"))
    if add_eos and eos is None:
        problems.append(Finding("error", "--add_eos", "the tokenizer has no eos token", "leave --add_eos out, or add one to the tokenizer"))
    if problems:
        raise UserError(problems)
    if add_bos is None:
        ids = tokenizer("a")["input_ids"]
        add_bos = bos is not None and len(ids) > 0 and ids[0] == bos
    if eos is None:
        notes.append(
            Finding("warning", "tokenizer", "has no eos token: documents are not ended, and a trained model does not learn to stop")
        )
    if pad is None:
        pad = eos if eos is not None else 0
        what = f"eos token {tokenizer.eos_token!r}" if eos is not None else "id 0"
        notes.append(
            Finding(
                "info",
                "tokenizer",
                f"has no pad token: {what} fills padding, which is masked by position, so real eos tokens stay trained on",
            )
        )
    return SpecialTokens(bos if add_bos else None, eos if add_eos is not False else None, int(pad), tuple(notes))


def text_of(row: Row, column: str, problems: list[Finding], key: str) -> str | None:
    """A row's text; None, with a problem added, where there is none."""
    if row.problem is not None:
        problems.append(row.problem)
        return None
    if column not in row.values:
        columns = ", ".join(sorted(map(str, row.values))) or "nothing"
        problems.append(Finding("error", key, f"{row.where}: no column {column!r}; it has {columns}", "name the right column"))
        return None
    value = row.values[column]
    if value is None:
        return ""
    if not isinstance(value, str):
        problems.append(
            Finding("error", key, f"{row.where}: {column!r} holds {type(value).__name__}, not text", "convert the column to text")
        )
        return None
    return value


class TextEncoder:
    """Plain text, all of it trained on.

    Args:
        tokenizer: what makes tokens.
        special: bos and eos.
        column: of the text.
    """

    masked = False

    def __init__(self, tokenizer: TextTokenizer, special: SpecialTokens, column: str) -> None:
        self.tokenizer = tokenizer
        self.special = special
        self.column = column

    def encode(self, rows: Sequence[Row]) -> Encoded:
        """Documents of these rows; a document in parts may begin before them and go on after them."""
        problems: list[Finding] = []
        dropped: collections.Counter[str] = collections.Counter()
        kept: list[tuple[Row, str]] = []
        for row in rows:
            text = text_of(row, self.column, problems, "--text_column")
            if text is None:
                continue
            if not text.strip() and not row.continues and not row.more:
                dropped["empty rows"] += 1
                continue
            kept.append((row, text))
        bos = [] if self.special.bos is None else [self.special.bos]
        eos = [] if self.special.eos is None else [self.special.eos]
        parts: list[list[int]] = []
        lengths: list[int] = []
        for (row, _), ids in zip(kept, self.tokenizer.ids([text for _, text in kept]), strict=True):
            part = [*([] if row.continues else bos), *ids, *([] if row.more else eos)]
            if len(part) < 2 and not row.continues and not row.more:
                dropped["documents of a single token"] += 1
                continue
            parts.append(part)
            if row.continues and lengths:
                lengths[-1] += len(part)
            else:
                lengths.append(len(part))
        tokens, _ = joined(parts)
        is_open = bool(kept) and kept[-1][0].more
        return Encoded(tokens, np.array(lengths, dtype=np.int64), None, is_open, dropped, problems)


class PromptEncoder:
    """A prompt and its completion; only the completion is trained on.

    Args:
        tokenizer: what makes tokens.
        special: bos before the prompt, eos after the completion.
        prompt_column, completion_column: of the texts.
        train_on_prompt: train on both.
    """

    masked = True

    def __init__(
        self, tokenizer: TextTokenizer, special: SpecialTokens, prompt_column: str, completion_column: str, train_on_prompt: bool
    ) -> None:
        self.tokenizer = tokenizer
        self.special = special
        self.columns = (prompt_column, completion_column)
        self.train_on_prompt = train_on_prompt
        self._splittable = tokenizer.is_splittable()

    def encode(self, rows: Sequence[Row]) -> Encoded:
        builder = _MaskedBuilder()
        for row in rows:
            prompt = text_of(row, self.columns[0], builder.problems, "--prompt_column")
            if prompt is None:  # one problem a row, so that bad rows are counted once
                continue
            completion = text_of(row, self.columns[1], builder.problems, "--completion_column")
            if completion is None:
                continue
            if not completion.strip():
                builder.dropped["rows with an empty completion"] += 1
                continue
            ids, mask = self._tokens(prompt, completion)
            if self.special.bos is not None:
                ids, mask = [self.special.bos, *ids], [0, *mask]
            if self.special.eos is not None:
                ids, mask = [*ids, self.special.eos], [*mask, 1]
            builder.add(ids, [1] * len(ids) if self.train_on_prompt else mask)
        return builder.encoded()

    def _tokens(self, prompt: str, completion: str) -> tuple[list[int], list[int]]:
        """Token ids and mask. The two texts are tokenised apart, as at inference, where that adds no blank in between."""
        if self._splittable or self.tokenizer.backend is None:
            first, second = self.tokenizer.ids([prompt, completion])
            return first + second, [0] * len(first) + [1] * len(second)
        text = prompt + completion
        ids, offsets = self.tokenizer.ids_and_offsets(text)
        return ids, chat_masks.token_mask(text, offsets, [(len(prompt), len(text))])


class ChatEncoder:
    """Conversations through the tokenizer's chat template; only assistant turns are trained on.

    Args:
        tokenizer: what makes tokens; its chat template writes every special token, so none is added.
        column: of the turns.
        train_on_prompt: train on the whole text.
    """

    masked = True
    tools_column = "tools"

    def __init__(self, tokenizer: TextTokenizer, column: str, train_on_prompt: bool) -> None:
        self.tokenizer = tokenizer
        self.column = column
        self.train_on_prompt = train_on_prompt
        self.template = tokenizer.tokenizer.get_chat_template() if tokenizer.tokenizer.chat_template else None
        if self.template is None:
            raise user_error(
                "--chat_template", "the data are conversations, but the tokenizer has no chat template", "give --chat_template FILE"
            )
        if tokenizer.backend is None:
            raise user_error("--tokenizer_name", "loss masks of conversations need a fast tokenizer", "use the fast version of this one")
        problem = chat_masks.syntax_problem(str(self.template))
        if problem:
            raise user_error("--chat_template", f"is no template: {problem}", "mend it, or give another with --chat_template FILE")
        added = {str(token) for token in tokenizer.tokenizer.added_tokens_decoder.values() if token.special}
        self.special = sorted(added | set(tokenizer.tokenizer.all_special_tokens), key=len, reverse=True)

    def encode(self, rows: Sequence[Row]) -> Encoded:
        builder = _MaskedBuilder()
        for row in rows:
            if self.column not in row.values:
                text_of(row, self.column, builder.problems, "--messages_column")
                continue
            try:
                documents = self._documents(row)
            except chat_masks.ChatError as error:
                builder.problems.append(Finding("error", "--messages_column", f"{row.where}: {error}", "mend the row, or --bad_rows skip"))
                continue
            if len(documents) > 1:
                builder.notes["conversations became a sample per assistant turn, because the chat template rewrites earlier turns"] += 1
            for ids, mask in documents:
                builder.add(ids, mask)
                if mask and not self.train_on_prompt and not self._ends(ids, mask):
                    builder.notes["conversations have an assistant turn without an end token: the model may not learn to stop"] += 1
        return builder.encoded()

    def _ends(self, ids: list[int], mask: list[int]) -> bool:
        last = [end - 1 for _, end in chat_masks.runs(mask)]
        special = set(self.tokenizer.tokenizer.all_special_ids) | set(self.tokenizer.tokenizer.added_tokens_decoder)
        return all(ids[position] in special for position in last)

    def _documents(self, row: Row) -> list[tuple[list[int], list[int]]]:
        """Token ids and masks of one conversation.

        Raises:
            ChatError: it cannot be trained on.
        """
        conversation = chat_masks.parse(row.values[self.column])
        tools = row.values.get(self.tools_column) or None
        if isinstance(tools, str):
            try:
                tools = json.loads(tools) or None
            except json.JSONDecodeError:
                raise chat_masks.ChatError(f"column {self.tools_column!r} is not JSON") from None

        def render(messages: Sequence[dict[str, Any]], prompt: bool) -> str:
            return self._apply(messages, tools, add_generation_prompt=prompt, tokenize=False)

        if any(message.get("tool_calls") for message in conversation.messages):
            chat_masks.check_tool_calls(conversation, render(conversation.messages, False))
        if self.train_on_prompt:
            ids, _ = self.tokenizer.ids_and_offsets(render(conversation.messages, False))
            return [(ids, [1] * len(ids))]
        if not any(conversation.trained):
            roles = sorted({str(message["role"]) for message in conversation.messages})
            none = f"its roles are {', '.join(roles)}, none is assistant"
            why = "every assistant turn is marked as not trained" if "assistant" in roles else none
            raise chat_masks.ChatError(f"no turn to train on: {why}")
        if chat_masks.marks_generation(str(self.template)):
            out = self._apply(conversation.messages, tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
            marked = chat_masks.select_runs(out["assistant_masks"], conversation)
            if marked is not None:
                return [(list(out["input_ids"]), marked)]
        result = []
        for text, spans in chat_masks.spans(conversation, render, self.special):
            ids, offsets = self.tokenizer.ids_and_offsets(text)
            result.append((ids, chat_masks.token_mask(text, offsets, spans)))
        return result

    def _apply(self, messages: Sequence[dict[str, Any]], tools: Any, **options: Any) -> Any:
        import jinja2

        try:
            return self.tokenizer.tokenizer.apply_chat_template(list(messages), tools=tools, **options)
        except jinja2.TemplateError as error:
            raise chat_masks.ChatError(f"the chat template refuses it: {error}") from None
        except (TypeError, ValueError, KeyError, IndexError) as error:
            raise chat_masks.ChatError(f"the chat template fails on {len(messages)} turns: {error}") from None


class _MaskedBuilder:
    """Collects documents with masks."""

    def __init__(self) -> None:
        self.documents: list[list[int]] = []
        self.masks: list[list[int]] = []
        self.dropped: collections.Counter[str] = collections.Counter()
        self.notes: collections.Counter[str] = collections.Counter()
        self.problems: list[Finding] = []

    def add(self, ids: list[int], mask: list[int]) -> None:
        if not any(mask[1:]):
            self.dropped["rows in which no token is left to train on"] += 1
            return
        self.documents.append(ids)
        self.masks.append(mask)

    def encoded(self) -> Encoded:
        tokens, lengths = joined(self.documents)
        mask, _ = joined(self.masks)
        return Encoded(tokens, lengths, mask.astype(np.uint8), False, self.dropped, self.problems, self.notes)


@dataclasses.dataclass(frozen=True)
class Objective:
    """What of a row is trained on.

    Attributes:
        kind: "text", "prompt" (with completion) or "chat".
        columns: of the text; of prompt and completion; of the turns.
    """

    kind: str
    columns: tuple[str, ...]


def choose_objective(
    first: Row, text_column: str | None, prompt_column: str | None, completion_column: str | None, messages_column: str | None
) -> Objective:
    """The objective that the user's column names ask for; without any, that which the first row's columns suggest.

    Raises:
        UserError: contradicting names, a column that is not there, none that suggests itself, or a first row that cannot be read.
    """
    if first.problem is not None:  # whatever becomes of other bad rows, the first one says which columns there are
        raise UserError([dataclasses.replace(first.problem, fix="mend or remove this first row: it tells which columns there are")])
    columns = [str(column) for column in first.values]
    have = ", ".join(columns)
    asked = {"text_column": text_column, "prompt_column": prompt_column or completion_column, "messages_column": messages_column}
    if sum(value is not None for value in asked.values()) > 1:
        names = " and ".join(f"--{name}" for name, value in asked.items() if value is not None)
        raise user_error(names, "were given together", "keep one kind of data")
    wanted = [("--text_column", text_column), ("--prompt_column", prompt_column), ("--completion_column", completion_column)]
    missing = [(flag, name) for flag, name in [*wanted, ("--messages_column", messages_column)] if name is not None and name not in columns]
    if missing:
        raise UserError(
            Finding("error", flag, f"there is no column {name!r} ({first.where})", f"there are {have}") for flag, name in missing
        )
    if messages_column:
        return Objective("chat", (messages_column,))
    if prompt_column or completion_column:
        pair = (prompt_column or "prompt", completion_column or "completion")
        for flag, name in zip(("--prompt_column", "--completion_column"), pair, strict=True):
            if name not in columns:
                raise user_error(flag, f"there is no column {name!r} ({first.where})", f"there are {have}")
        return Objective("prompt", pair)
    if text_column:
        return Objective("text", (text_column,))
    for name in ("messages", "conversations"):
        if name in columns:
            return Objective("chat", (name,))
    if "text" in columns:
        return Objective("text", ("text",))
    if "prompt" in columns and "completion" in columns:
        return Objective("prompt", ("prompt", "completion"))
    texts = [str(name) for name, value in first.values.items() if isinstance(value, str)]
    if len(texts) == 1:
        return Objective("text", (texts[0],))
    raise user_error(
        "--text_column", f"{first.where}: no column text, messages, or prompt and completion", f"name one of {have or 'its columns'}"
    )


def row_batches(rows: Iterable[Row], max_rows: int = _BATCH_ROWS, max_chars: int = _BATCH_CHARS) -> Iterator[list[Row]]:
    """Rows in batches of about equal work."""
    batch: list[Row] = []
    chars = 0
    for row in rows:
        batch.append(row)
        chars += sum(len(value) if isinstance(value, str) else 64 for value in row.values.values())
        if len(batch) >= max_rows or chars >= max_chars:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


_worker_encoder: Encoder | None = None


def _start_worker(encoder: Encoder) -> None:
    global _worker_encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each worker is one core's work
    _worker_encoder = encoder


def _encode_in_worker(rows: list[Row]) -> Encoded:
    assert _worker_encoder is not None
    return _worker_encoder.encode(rows)


def encode_all(encoder: Encoder, rows: Iterable[Row], num_workers: int) -> Iterator[Encoded]:
    """Encodes rows in order, a bounded number of batches ahead.

    Args:
        encoder: what encodes.
        rows: of the source, in order.
        num_workers: processes; 1 works in this one, with the tokenizer's own threads.

    Raises:
        RuntimeError: a worker died.
    """
    batches = row_batches(rows)
    if num_workers <= 1:
        yield from map(encoder.encode, batches)
        return
    # Forked workers get the tokenizer without pickling, and need no guarded main module in a user's script.
    context = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(num_workers, context, _start_worker, (encoder,)) as pool:
        waiting: collections.deque[concurrent.futures.Future[Encoded]] = collections.deque()
        try:
            for batch in batches:
                waiting.append(pool.submit(_encode_in_worker, batch))
                if len(waiting) >= 3 * num_workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except concurrent.futures.process.BrokenProcessPool:
            raise RuntimeError(
                "a tokenising process died, most likely for want of host memory (see the kernel log) -> "
                "use fewer of them: --preprocessing_num_workers 1"
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
