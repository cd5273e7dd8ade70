"""The one owner of the log format: what a step reports, `metrics.jsonl`, the console line, and reading both back.

`metrics.jsonl` holds one strict JSON object a line, each flushed when written:

    {"kind": "train", "time_s": 1764288000.0, "step": 10, "max_steps": 100, "loss": 2.5, "learning_rate": 2e-06, ...}
    {"kind": "eval",  "time_s": ..., "step": 10, "eval_loss": 2.4}
    {"kind": "event", "time_s": ..., "event": "resume", "step": 10}
    {"kind": "gpu",   "time_s": ..., ...}            samples of harness.monitor, never printed
    {"kind": "summary", "time_s": ..., ...}          last line of a run that ended by itself

JSON has no NaN: a non-finite number is null, and `"nonfinite": {"loss": "nan"}` says what it was. The file is only ever appended to. A run
that resumes at step N writes a `resume` event; the rows after step N of its earlier life stay in the file, and `read_metrics` leaves
them out (or marks them `superseded`). The first row of a life after the first says when it began, `"life_began_s"`. A line torn by a
crash is skipped and counted.

On the console the same row is one line, which `parse_console` reads back:

    train | step: 10/100 | epoch: 0.1 | loss: 2.5 | grad_norm: 0.75 | lr: 2e-06 | tok/s/gpu: 8371.2 | mfu: 41.3%
    event: resume | step: 10
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from harness.user_files import MAX_LOG_BYTES, open_regular, parse_json, read_text

Kind = Literal["train", "eval", "event", "gpu", "summary"]
KINDS: tuple[str, ...] = ("train", "eval", "event", "gpu", "summary")
METRICS_FILE = "metrics.jsonl"
_SEPARATOR = " | "
MAX_WAITING_ROWS = 10_000  # kept in memory while the disk is full


@dataclasses.dataclass
class StepMetrics:
    """What the run reports about one optimizer step. None: not measured.

    Attributes:
        step: optimizer steps done, this one included.
        loss: mean loss per label token over all ranks, of the steps since the last row.
        max_steps: optimizer steps of the whole run.
        epoch: passes over the training data so far.
        grad_norm: norm of the whole gradient before clipping.
        num_input_tokens: tokens that went through the model since the start of the run, all ranks.
        num_label_tokens: those of them that count in the loss.
        tokens_per_second_per_gpu: input tokens of one rank per second since the last row.
        mfu: model FLOP utilisation, 0 to 1.
        step_time_s: mean seconds per optimizer step since the last row.
        peak_memory_gib: highest allocated device memory of the worst rank since the last row.
        micro_batch_size: samples of one rank that go through the model at once.
        gradient_accumulation_steps: micro-batches per rank in an optimizer step.
        loss_scale: fp16's factor.
        num_skipped_steps: updates left out so far because of a non-finite gradient.
        extra: more numbers or short texts under their own names.
    """

    step: int
    loss: float | None = None
    max_steps: int | None = None
    epoch: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    num_input_tokens: int | None = None
    num_label_tokens: int | None = None
    tokens_per_second_per_gpu: float | None = None
    mfu: float | None = None
    step_time_s: float | None = None
    peak_memory_gib: float | None = None
    micro_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    loss_scale: float | None = None
    num_skipped_steps: int | None = None
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)

    def to_row(self) -> dict[str, Any]:
        """A flat dictionary of everything that was measured.

        Raises:
            ValueError: `extra` uses the name of a field.
        """
        row = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "extra"}
        taken = sorted(set(row) & set(self.extra))
        if taken:
            raise ValueError(f"extra must not repeat {', '.join(taken)}")
        return {name: value for name, value in (row | self.extra).items() if value is not None}


# Console labels that differ from the field's name, and the order in which known fields are printed.
_LABELS: dict[str, str] = {
    "learning_rate": "lr",
    "num_input_tokens": "tokens",
    "num_label_tokens": "label_tokens",
    "tokens_per_second_per_gpu": "tok/s/gpu",
    "step_time_s": "s/step",
    "peak_memory_gib": "peak_gib",
    "micro_batch_size": "micro_batch",
    "gradient_accumulation_steps": "accumulation",
    "num_skipped_steps": "skipped",
}
_NAMES: dict[str, str] = {label: name for name, label in _LABELS.items()}
_ORDER: list[str] = [field.name for field in dataclasses.fields(StepMetrics) if field.name not in ("extra", "max_steps")]
_ORDER.remove("loss")
_ORDER.insert(_ORDER.index("epoch") + 1, "loss")
_NOT_PRINTED = frozenset({"kind", "time_s", "nonfinite", "max_steps", "event", "superseded", "life_began_s"})


def plain(value: Any) -> Any:
    """A value as JSON types: tensors and numpy scalars become numbers, paths texts; keys become texts."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(dataclasses.asdict(value))
    if hasattr(value, "item") and callable(value.item):
        return plain(value.item())
    return str(value)


def _is_nonfinite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _without_nonfinite(value: Any) -> Any:
    if _is_nonfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _without_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nonfinite(item) for item in value]
    return value


def to_json_line(row: Mapping[str, Any]) -> str:
    """A row as one line of strict JSON; non-finite numbers as described at the top (inside lists and mappings: as text)."""
    values = plain(row)
    odd = {name: str(value) for name, value in values.items() if _is_nonfinite(value)}
    strict = {name: None if name in odd else _without_nonfinite(value) for name, value in values.items()}
    if odd:
        strict["nonfinite"] = odd
    return json.dumps(strict, ensure_ascii=False, allow_nan=False)


def from_json_line(line: str) -> dict[str, Any]:
    """Reads what `to_json_line` wrote; non-finite numbers come back as floats.

    Raises:
        ValueError: not a JSON object.
    """
    row = parse_json(line)
    if not isinstance(row, dict):
        raise ValueError(f"a metrics line is a JSON object, not {line[:80]!r}")
    odd = row.pop("nonfinite", None)
    if isinstance(odd, dict):
        row.update({name: float(str(text)) for name, text in odd.items()})
    return row


# What readers of a metrics file compute with.
_COMPUTED = ("step", "max_steps", "rank", "node", "time_s", "life_began_s", "lost_steps", "step_time_s", "mfu")


def is_own_row(row: Mapping[str, Any]) -> bool:
    """Whether a row can be one of ours: what is computed with is a number. A file may be torn, or changed by hand."""
    values = [row.get(name) for name in _COMPUTED]
    if any(name in row and row[name] is None for name in ("time_s", "life_began_s")):
        return False
    return all(value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e15) for value in values)


def own_row(line: str) -> dict[str, Any]:
    """A line of a metrics file of ours.

    Raises:
        ValueError: none of ours.
    """
    row = from_json_line(line)
    if not is_own_row(row):
        raise ValueError("what is computed with is no number")
    return row


def _is_bare(text: str) -> bool:
    """Whether a text can stand in a console line as it is and is read back as the same text."""
    return bool(text) and text == text.strip() and "|" not in text and text.isprintable() and _parse_value(text) == text


def _format_value(name: str, value: Any) -> str:
    if name == "mfu" and isinstance(value, float):
        return f"{100 * value:.4g}%"
    if isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str) and _is_bare(value):
        return value
    # "|" is escaped so that a line can be cut at its separators; it only occurs inside JSON strings.
    return json.dumps(_without_nonfinite(plain(value)), ensure_ascii=True).replace("|", "\\u007c")


def _parse_value(text: str) -> Any:
    try:
        return parse_json(text)  # also reads NaN and Infinity
    except ValueError:
        pass
    try:
        return float(text)  # nan, inf, 1e5, 2.
    except ValueError:
        return text


def format_console(row: StepMetrics | Mapping[str, Any], kind: Kind = "train") -> str:
    """One row as one console line; numbers to six digits. `parse_console` reads it back."""
    values = plain(row.to_row() if isinstance(row, StepMetrics) else row)
    head: str = f"event: {values['event']}" if kind == "event" else kind
    parts = [head]
    names = [name for name in _ORDER if name in values] + [name for name in values if name not in _ORDER]
    for name in names:
        value = values[name]
        if name in _NOT_PRINTED or value is None:
            continue
        text = _format_value(name, value)
        if name == "step" and values.get("max_steps") is not None:
            text += f"/{values['max_steps']}"
        parts.append(f"{_LABELS.get(name, name)}: {text}")
    return _SEPARATOR.join(parts)


def parse_console(line: str) -> dict[str, Any] | None:
    """Reads a console line of ours, also with a logger's prefix before it; None for any other line."""
    parts = line.strip().split(_SEPARATOR)
    words = parts[0].split()
    if len(words) >= 2 and words[-2] == "event:":
        row: dict[str, Any] = {"kind": "event", "event": words[-1]}
    elif words and words[-1] in ("train", "eval", "summary") and len(parts) > 1:
        row = {"kind": words[-1]}
    else:
        return None
    for part in parts[1:]:
        label, colon, text = part.partition(": ")
        if not colon:
            return None
        name = _NAMES.get(label, label)
        if name == "step" and "/" in text:
            text, _, total = text.partition("/")
            row["max_steps"] = _parse_value(total)
        value = _parse_value(text.removesuffix("%")) if name == "mfu" and text.endswith("%") else None
        row[name] = round(value / 100, 12) if isinstance(value, (int, float)) and not isinstance(value, bool) else _parse_value(text)
    return row if is_own_row(row) else None


@dataclasses.dataclass
class MetricsFile:
    """What `read_metrics` found.

    Attributes:
        rows: all rows that count, in file order.
        num_superseded: rows of an earlier life that a later one computed again.
        num_bad_lines: lines that are no JSON object, such as one torn by a crash.
    """

    rows: list[dict[str, Any]]
    num_superseded: int = 0
    num_bad_lines: int = 0

    def of_kind(self, *kinds: str) -> list[dict[str, Any]]:
        return [row for row in self.rows if row.get("kind") in kinds]


def read_metrics(path: str | Path, keep_superseded: bool = False) -> MetricsFile:
    """Reads a `metrics.jsonl`, or the one in a run's folder.

    Args:
        path: the file, or the folder that holds it.
        keep_superseded: keep rows that a resumed run computed again, marked with `superseded: True`.

    Raises:
        OSError: there is no such file.
    """
    path = Path(path)
    if path.is_dir():
        path = path / METRICS_FILE
    rows: list[dict[str, Any]] = []
    num_bad_lines = 0
    for line in read_text(path, errors="replace", max_bytes=MAX_LOG_BYTES).split("\n"):  # splitlines would also cut at U+2028 inside texts
        if not line.strip():
            continue
        try:
            rows.append(own_row(line))
        except ValueError:
            num_bad_lines += 1
    superseded = superseded_indices(rows)
    for index in superseded:
        rows[index]["superseded"] = True
    kept = rows if keep_superseded else [row for index, row in enumerate(rows) if index not in superseded]
    return MetricsFile(kept, len(superseded), num_bad_lines)


def last_train_step(path: str | Path) -> int:
    """Step of the last train row of a `metrics.jsonl`, read from its end; 0 where there is none."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 2**18))
            lines = file.read().decode("utf-8", errors="replace").split("\n")
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            row = own_row(line)
        except ValueError:  # empty, or cut off
            continue
        if row.get("kind") == "train" and isinstance(row.get("step"), int):
            return int(row["step"])
    return 0


def superseded_indices(rows: Sequence[Mapping[str, Any]]) -> set[int]:
    """Indices of train and eval rows that were computed again.

    Those after step N, once the run resumed at N; and those from step N on, once a train row went back to N (a life that wrote no event).
    What happened (events, GPU samples) did happen, and stays.
    """
    result: set[int] = set()
    alive: list[tuple[int, int, str]] = []  # (step, index, kind) of the rows that count so far; steps never fall
    for index, row in enumerate(rows):
        step, kind = row.get("step"), row.get("kind")
        if not isinstance(step, int):
            continue
        limit: int | None = None
        if kind == "event" and row.get("event") == "resume":
            limit = step
        elif kind == "train":
            last_train_step = next((old for old, _, old_kind in reversed(alive) if old_kind == "train"), None)
            if last_train_step is not None and last_train_step >= step:
                limit = step - 1
        while limit is not None and alive and alive[-1][0] > limit:
            result.add(alive.pop()[1])
        if kind in ("train", "eval"):
            alive.append((step, index, str(kind)))
    return result


class Tracker(Protocol):
    """Where numbers go besides the file: accelerate's trackers have these methods."""

    def log(self, values: dict, step: int | None) -> None: ...

    def finish(self) -> None: ...


class MetricsLog:
    """Writes rows to `metrics.jsonl`, the console and the trackers. Never raises for a full disk or a failing tracker.

    Args:
        output_dir: the run's folder; None writes no file.
        enabled: True on the main process; elsewhere every method does nothing.
        console: print one line per row.
        trackers: objects with `.log(values, step)` and `.finish()`.
        write_line: prints a console line; default: standard output.
        max_steps: optimizer steps of the run, printed with each train row and used by the progress bar.
        progress_bar: None: only where standard output is a terminal.
    """

    def __init__(
        self,
        output_dir: str | Path | None,
        enabled: bool = True,
        console: bool = True,
        trackers: Iterable[Tracker] | None = None,
        write_line: Callable[[str], None] | None = None,
        max_steps: int | None = None,
        progress_bar: bool | None = None,
    ) -> None:
        self.enabled = enabled
        self.console = console
        self.max_steps = max_steps
        self.path = Path(output_dir) / METRICS_FILE if output_dir is not None and enabled else None
        self.num_lost_rows = 0
        self._trackers = list(trackers or []) if enabled else []
        self._write_line = write_line or (lambda line: print(line, flush=True))
        self._lock = threading.Lock()  # harness.monitor writes from its own thread
        self._file: Any = None
        self._unwritten = b""  # the rest of what a full disk cut off
        self._waiting: deque[tuple[dict[str, Any], bytes]] = deque()  # rows for which there was no room, with their lines
        self._is_begun = False  # `_unwritten` is of the first of them
        self._closed = False
        self._warned: set[str] = set()
        self._rows: list[dict[str, Any]] = []  # for the summary where there is no file
        self._bar: Any = None
        self._life_began_s: float | None = None  # to be said with the next row
        if self.path is not None:
            self._open(self.path)
        if enabled and (sys.stdout.isatty() if progress_bar is None else progress_bar) and console:
            self._start_bar()

    def _open(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        has_rows = path.exists() and path.stat().st_size > 0
        torn = has_rows and not _ends_with_newline(path)
        self._life_began_s = round(time.time(), 3) if has_rows else None
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - lives as long as the run; unbuffered: what is written is known
        if torn:  # end the line of a life that was killed while writing it, so that ours stays whole
            self._unwritten = b"\n"

    def _start_bar(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns = (TextColumn("step"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, transient=True)
        self._task = self._bar.add_task("step", total=self.max_steps)
        self._bar.start()

    def log(self, row: StepMetrics | Mapping[str, Any], kind: Kind = "train") -> None:
        """Writes one row.

        Args:
            row: a `StepMetrics` or a flat mapping; numbers may be 0-dim tensors (reading them waits for the device).
            kind: "train", "eval", "event", "gpu" or "summary".

        Raises:
            ValueError: an unknown kind.
        """
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {kind!r}")
        if not self.enabled or self._closed:
            return
        values: dict[str, Any] = plain(row.to_row() if isinstance(row, StepMetrics) else row)
        if kind == "train" and self.max_steps is not None:
            values.setdefault("max_steps", self.max_steps)
        values = {"kind": kind, "time_s": round(time.time(), 3), **values} | {"kind": kind}
        with self._lock:
            if self._life_began_s is not None:
                values["life_began_s"], self._life_began_s = self._life_began_s, None
            self._write(values)
        if self.console and kind != "gpu":
            self._write_line(format_console(values, kind))
        if kind in ("train", "eval"):
            self._track(values, kind)

    def event(self, event: str, **fields: Any) -> None:
        """Writes that something happened: `event("resume", step=10)`, `event("oom", step=12, rank=3)`. The name is one word."""
        self.log({"event": "_".join(event.split()), **fields}, kind="event")

    def progress(self, step: int) -> None:
        """Moves the progress bar; cheap, for every step."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def _write(self, values: dict[str, Any]) -> None:
        if self._file is None:
            self._rows.append(values)
            return
        try:
            line = (to_json_line(values) + "\n").encode()
            if len(self._waiting) >= MAX_WAITING_ROWS:
                self.num_lost_rows += 1
            else:
                self._waiting.append((values, line))
        except ValueError as error:
            self.num_lost_rows += 1
            self._warn("row", f"a row cannot be written: {error}")
        try:
            self._catch_up()
        except (OSError, ValueError) as error:  # a full disk must not end a run; ValueError: closed underneath us
            self._warn("file", f"cannot write {self.path}: {error}; the run goes on, rows are written once there is room")

    def _catch_up(self) -> None:
        """Writes what waits, oldest first. Raises OSError where there is no room; nothing is written twice."""
        while True:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
            if self._is_begun:
                self._waiting.popleft()
            self._is_begun = bool(self._waiting)
            if not self._is_begun:
                return
            self._unwritten = self._waiting[0][1]

    def _track(self, values: Mapping[str, Any], kind: str) -> None:
        step = values.get("step")
        skip = {"step", "max_steps", "time_s", "kind", "life_began_s"}
        numbers = {
            f"{kind}/{name.removeprefix('eval_') if kind == 'eval' else name}": value
            for name, value in values.items()
            if name not in skip and isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        for tracker in list(self._trackers):
            try:
                tracker.log(dict(numbers), step=step)
            except Exception as error:  # any tracker's network or disk trouble: training is worth more
                self._trackers.remove(tracker)
                self._warn(type(tracker).__name__, f"{type(tracker).__name__} failed and is off from now on: {error}")

    def _warn(self, key: str, message: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            print(f"WARNING metrics: {message}", file=sys.stderr, flush=True)

    def summary(self) -> dict[str, Any]:
        """`summarize` of all rows of this run, those of earlier lives included."""
        rows = read_metrics(self.path, keep_superseded=True).rows if self.path is not None and self.path.exists() else self._rows
        return summarize([*rows, *(row for row, _ in self._waiting)])

    def close(self, status: str | None = None, step: int | None = None, counts: Mapping[str, int] | None = None) -> None:
        """Writes the summary (where any step was logged) and closes everything. Further rows are ignored.

        Args:
            status: how the run ended, such as "finished" or "preempted"; None leaves the summary out.
            step: optimizer steps done, where that is more than the last row tells.
            counts: of tokens, so far; they take the place of the last row's.
        """
        if not self.enabled or self._closed:
            return
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if status is not None:
            summary = self.summary()
            if summary and step is not None:
                summary |= {"step": max(step, summary.get("step") or 0), **(counts or {})}
            if summary:
                self.log({"status": status, **summary}, kind="summary")
        self._closed = True
        for tracker in self._trackers:
            try:
                tracker.finish()
            except Exception as error:
                self._warn(type(tracker).__name__ + ".finish", f"{type(tracker).__name__} did not finish: {error}")
        if self._file is not None:
            if self._waiting:
                self.num_lost_rows += len(self._waiting)
                self._warn("lost", f"{self.num_lost_rows} rows are not in {self.path}: there was no room for them to the end")
            try:
                self._file.close()
            except OSError as error:
                self._warn("file", f"cannot close {self.path}: {error}")


def _ends_with_newline(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def summarize(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The run in a dozen numbers; empty without train rows.

    Throughput, MFU and step time are medians over the rows, so that the first, slow one does not matter. `wall_time_s` is the time of all
    lives, without the time between them; where there are several, `num_lives` says how many, and `life_wall_time_s` is the last one's.

    Args:
        rows: of one run; those marked `superseded` count in the times alone.
    """
    lives = _life_times(rows)
    rows = [row for row in rows if not row.get("superseded")]
    train = [row for row in rows if row.get("kind") == "train"]
    if not train:
        return {}
    last = train[-1]
    result: dict[str, Any] = {"step": last.get("step"), "final_loss": last.get("loss")}
    evals = [row["eval_loss"] for row in rows if row.get("kind") == "eval" and _is_finite(row.get("eval_loss"))]
    if evals:
        result |= {"last_eval_loss": evals[-1], "best_eval_loss": min(evals)}
    for name in ("tokens_per_second_per_gpu", "mfu", "step_time_s"):
        values = [row[name] for row in train if _is_finite(row.get(name))]
        if values:
            result[f"median_{name}"] = statistics.median(values)
    peaks = [row["peak_memory_gib"] for row in train if _is_finite(row.get("peak_memory_gib"))]
    if peaks:
        result["peak_memory_gib"] = max(peaks)
    for name in ("num_input_tokens", "num_label_tokens", "num_skipped_steps"):
        if last.get(name) is not None:
            result[name] = last[name]
    result["num_nonfinite_rows"] = sum(_is_nonfinite(row.get("loss")) for row in train)
    events = [row for row in rows if row.get("kind") == "event"]
    result["num_steps_down"] = sum(row.get("event") == "oom" for row in events)
    result["num_lost_steps"] = sum(row.get("lost_steps") or 0 for row in events if row.get("event") == "resume")
    result["num_events"] = sum(row.get("kind") == "event" for row in rows)
    if lives:
        result["wall_time_s"] = round(sum(lives), 3)
    if len(lives) > 1:
        result |= {"num_lives": len(lives), "life_wall_time_s": round(lives[-1], 3)}
    return result


def _life_times(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Seconds of each life: of the first from its first row to its last, of the others from their beginning to their last row."""
    said = any(_is_finite(row.get("life_began_s")) for row in rows)  # else a file of before, where a resume begins one
    spans: list[tuple[float, float]] = []
    for row in rows:
        if not _is_finite(row.get("time_s")):
            continue
        time_s = float(row["time_s"])
        if _is_finite(row.get("life_began_s")):
            spans.append((float(row["life_began_s"]), time_s))
        elif not spans or (not said and row.get("event") == "resume"):
            spans.append((time_s, time_s))
        else:
            spans[-1] = (spans[-1][0], time_s)
    return [end_s - start_s for start_s, end_s in spans]


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
