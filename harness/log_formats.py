"""Console lines of training programs, read back: one reader that is fed a text and collects records, events and failures.

It knows our own lines and metrics file, Hugging Face's metric dictionaries (floats, or texts as transformers 5 prints them) and its
"eval metrics" tables, DeepSpeed's step, overflow, throughput and pipeline lines, Megatron's `iteration ... |` lines, progress bars with
carriage returns and postfixes, JSON lines, and whatever says a step and a loss in words ("step 10/100 | loss 2.5", "iter 10: loss 2.5").
Names become ours (`learning_rate`, `grad_norm`, ...), percentages of MFU become shares, milliseconds seconds, memory GiB.

Pure text work: no torch, no files.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from harness.metrics import KINDS, from_json_line, is_own_row, parse_console
from harness.user_files import parse_json

Row = dict[str, Any]

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07")
_NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|(?:nan|inf(?:inity)?)\b)"

# Other programs' names (lower case; blanks, "_" and "-" are the same) -> ours. The longest match is tried first.
_METRICS: dict[str, str] = {
    "loss": "loss",
    "train loss": "loss",
    "training loss": "loss",
    "train/loss": "loss",
    "lm loss": "loss",
    "loss train": "loss",
    "val loss": "eval_loss",
    "valid loss": "eval_loss",
    "validation loss": "eval_loss",
    "eval loss": "eval_loss",
    "eval/loss": "eval_loss",
    "val": "eval_loss",
    "lr": "learning_rate",
    "learning rate": "learning_rate",
    "grad norm": "grad_norm",
    "gradient norm": "grad_norm",
    "gnorm": "grad_norm",
    "norm": "grad_norm",
    "ppl": "perplexity",
    "perplexity": "perplexity",
    "epoch": "epoch",
    "tok/s/gpu": "tokens_per_second_per_gpu",
    "tps": "tokens_per_second_per_gpu",
    "tokens per second per gpu": "tokens_per_second_per_gpu",
    "tok/s": "tokens_per_second",
    "tok/sec": "tokens_per_second",
    "tokens/s": "tokens_per_second",
    "tokens/sec": "tokens_per_second",
    "tokens per second": "tokens_per_second",
    "samples/s": "samples_per_second",
    "samples/sec": "samples_per_second",
    "mfu": "mfu",
    "loss scale": "loss_scale",
    "memory": "peak_memory_gib",
    "mem": "peak_memory_gib",
    "peak memory": "peak_memory_gib",
    "step time": "step_time_s",
    "iter time": "step_time_s",
    "iteration time": "step_time_s",
    "elapsed time per iteration": "step_time_s",
    "time": "step_time_s",
    "dt": "step_time_s",
    "tokens": "num_input_tokens",
    "num tokens": "num_input_tokens",
    "skipped": "num_skipped_steps",
    "consumed samples": "num_samples",
    "global batch size": "global_batch_size",
}


def _name_pattern(names: list[str]) -> str:
    ordered = sorted(names, key=len, reverse=True)
    return "|".join(re.escape(name).replace(r"\ ", "[ _-]") for name in ordered)


_PAIR = re.compile(
    rf"(?<![\w/])(?P<name>{_name_pattern(list(_METRICS))})(?P<unit_before>\s*\((?:ms|s)\))?\s*[:=]?\s*(?:tensor\()?"
    rf"(?P<number>{_NUMBER})\s?(?P<unit>ms\b|s\b|%|[KMGkm]i?B\b|[kKM]\b)?",
    re.IGNORECASE,
)
_VALUE_FIRST = re.compile(
    rf"(?<![\w.])(?P<number>{_NUMBER})\s?(?P<percent>%)?\s*(?:bf16 |fp16 )?"
    r"(?P<name>tok/s/gpu|tok/s|tok/sec|tokens/s|tokens/sec|samples/s|MFU|ms)\b",
    re.IGNORECASE,
)
_STEP = re.compile(
    r"(?<![\w/.])(?:global[ _]?step|num_updates|training step|train step|steps?|iter(?:ation)?s?)\b\s*[:=#]?\s*\[?\s*"
    r"(?P<step>\d[\d,]*)(?:\s*(?:/|of)\s*(?P<total>\d[\d,]*))?(?!\.?\d|%)",
    re.IGNORECASE,
)
_BAR = re.compile(
    # Not with the description before it, which would be looked for from every place of a line without a bar.
    r"\s*(?P<percent>\d{1,3})%\|[^|]{0,400}\|\s*(?P<n>\d{1,15})/(?P<total>\d{1,15})\s*\[(?P<inner>[^\]]{0,400})\]",
)
_DICT = re.compile(r"\{\s*'[^{}]*\}")
_DICT_ITEM = re.compile(rf"'(?P<name>[^']+)':\s*(?:tensor\(|np\.float\d+\()?'?(?P<value>{_NUMBER})'?", re.IGNORECASE)
_DS_STEP = re.compile(r"\bstep=(?P<step>\d+), skipped=(?P<skipped>\d+), lr=\[(?P<lr>[^\]]*)\]")
_DS_OVERFLOW = re.compile(
    r"OVERFLOW!(?: Rank (?P<rank>\d+))? Skipping step\.(?: Attempted loss scale: (?P<scale>\d+(?:\.\d+)?), "
    r"(?:reducing to (?P<to>\d+(?:\.\d+)?)|but hysteresis is (?P<from_h>\d+)\. Reducing hysteresis to (?P<to_h>\d+)))?"
)
_DS_THROUGHPUT = re.compile(r"epoch=(?P<epoch>\d+)/micro_step=(?P<micro>\d+)/global_step=(?P<step>\d+), (?P<rest>.*)")
_DS_ITEM = re.compile(rf"(?P<name>\w+)=(?P<value>{_NUMBER})(?:GB)?")
_TABLE_HEAD = re.compile(r"\*{5}\s+(?P<split>train|eval|predict|test)\w*\s+metrics\s+\*{5}")
_TABLE_ITEM = re.compile(r"^\s+(?P<name>\w+)\s+=\s+(?P<value>\S+)\s*$")
_RANK = re.compile(
    r"^\s*(?:\[(?:rank|default) ?(?P<a>\d+)\]:?|\[\d+,(?P<b>\d+)\]<std(?:out|err)>:|(?P<c>\d{1,5}): (?=\S))|\[rank ?(?P<d>\d+)\]",
    re.IGNORECASE,
)
_TIME = re.compile(
    r"(?P<y>\d{4})-(?P<m>\d\d)-(?P<d>\d\d)[ T_](?P<h>\d\d):(?P<min>\d\d):(?P<s>\d\d)(?:[.,](?P<f>\d{1,6}))?"
    r"|(?P<m2>\d\d)/(?P<d2>\d\d)/(?P<y2>\d{4}) (?P<h2>\d\d):(?P<min2>\d\d):(?P<s2>\d\d)"
)

# A Python exception's last line, with or without its module.
_EXCEPTION = re.compile(r"^(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Failed|Fault))(?::\s*(?P<text>.*))?$")
_CAUSES = re.compile(
    r"(CUDA out of memory|CUDA error: .*|CUBLAS_STATUS_\w+|Bus error.*|Segmentation fault.*|Fatal Python error: .*|^Killed\b.*|oom-kill.*|"
    r"Out of memory: Killed process.*|No space left on device.*|ECC error.*|Xid .*)"
)
# What the other ranks say when one has failed.
_CONSEQUENCES = re.compile(
    r"(ChildFailedError|DistBackendError|[Ww]atchdog caught collective operation timeout.*|"
    r"Connection (?:closed|reset) by peer.*|Broken pipe.*|"
    r"NCCL communicator was aborted.*|Signal(?:Exception)?.*SIGTERM.*|SIGTERM|exits with return code = -?\d+|CalledProcessError|"
    r"STEP .* CANCELLED.*|TCPStore.*(?:[Ff]ailed|timed? out).*|socketPollConnect.*|socketProgress.*|[Rr]emote process exited.*|"
    r"srun: error: .*|slurmstepd: error: .*)"
)
# Patterns look for an end from each place of such a run, so that their time grows with its square or more; no metric has as long a one.
_LONG_RUN = re.compile(r"([ \t]{40})[ \t]+|(\d{40})\d+|([^\W\d_]{100})[^\W\d_]+|(\w{200})\w+")
_LONG_LINE = 400
_MAX_LINE = 20_000  # characters of a line that are looked at
_LAG_S = 0.25  # tqdm draws every 0.1 s; with steps slower than this its last bar is up to date
_ROOT_CAUSE = "Root Cause (first observed failure)"


@dataclasses.dataclass(frozen=True)
class Failure:
    """Something that ended a process.

    Attributes:
        message: the exception's last line, or the line that says it.
        rank: which process, where the log says so.
        time_s: seconds since 1970 as the log's clock shows it (zone unknown), for ordering; None without time stamps.
        line: line number in its file, from 1.
        source: the file.
        is_consequence: what a process says because another one failed.
    """

    message: str
    rank: int | None = None
    time_s: float | None = None
    line: int = 0
    source: str = ""
    is_consequence: bool = False


def number(text: str) -> int | float:
    """A number as programs print it: "1,234", "2.5e-05", "nan", "-inf"."""
    text = text.replace(",", "")
    try:
        return int(text)
    except ValueError:
        return float(text)


def canonical(name: str) -> str:
    """Our name for another program's metric name; unknown names stay as they are."""
    key = re.sub(r"[ _-]+", " ", name.strip().lower())
    return _METRICS.get(key, name.strip())


_UNITS: dict[str, float] = {"kib": 2**-20, "kb": 2**-20, "mib": 2**-10, "mb": 2**-10, "gib": 1.0, "gb": 1.0, "k": 1e3, "m": 1e6}


def _with_unit(name: str, value: int | float, unit: str) -> int | float:
    unit = unit.strip(" ()").lower()
    if name == "mfu":
        return round(value / 100, 12) if unit == "%" else value
    if name == "step_time_s" and unit == "ms":
        return round(value / 1000, 12)
    if name == "peak_memory_gib" and unit in ("kib", "kb", "mib", "mb"):
        return value * _UNITS[unit]
    if unit in ("k", "m") and name.startswith(("num_", "tokens", "samples")):
        return value * _UNITS[unit]
    return value


def pairs_in(text: str) -> Row:
    """All known metrics that a line names, by our names; the first of each counts."""
    row: Row = {}
    for match in _PAIR.finditer(text):
        name = canonical(match["name"])
        unit = match["unit"] or match["unit_before"] or ""
        if name == "peak_memory_gib" and not unit.lower().endswith("b"):
            continue  # "memory 3" could be anything
        row.setdefault(name, _with_unit(name, number(match["number"]), unit))
    for match in _VALUE_FIRST.finditer(text):
        name = "step_time_s" if match["name"].lower() == "ms" else canonical(match["name"])
        unit = "ms" if match["name"].lower() == "ms" else match["percent"] or ""
        row.setdefault(name, _with_unit(name, number(match["number"]), unit))
    return row


def time_in(text: str) -> float | None:
    """The first date and time of a line, as seconds since 1970 without a zone."""
    match = _TIME.search(text)
    if not match:
        return None
    part = match.groupdict()
    names = ("y", "m", "d", "h", "min", "s") if part["y"] else ("y2", "m2", "d2", "h2", "min2", "s2")
    try:
        moment = datetime(*(int(part[name]) for name in names), tzinfo=timezone.utc)  # type: ignore[arg-type, misc]
    except ValueError:
        return None
    return moment.timestamp() + (float(f"0.{part['f']}") if part["f"] else 0.0)


def _squeezed(text: str) -> str:
    """A long line without the middle of its blanks, digits and words that go on and on, and without its end if it is no JSON."""
    kept = text if text.rstrip().endswith("}") else text[:_MAX_LINE]
    return _LONG_RUN.sub(lambda run: run[run.lastindex or 0], kept)


class LogReader:
    """Reads texts and collects what they report.

    Args:
        source: name of the file, kept with failures.
        rank: the process whose output this is, if the file's name says so; lines may name another one.

    Attributes:
        records: rows with `kind` ("train", "eval", "summary"), `step` where known, `source` (the format) and `rank` where known.
        events: rows with `event`, such as "overflow".
        failures: in the order of the text.
        progress: (done, total) of the training's bar, as last seen.
        root_cause: (rank, exit code) that torchrun names as the first failure.
    """

    def __init__(self, source: str = "", rank: int | None = None) -> None:
        self.source = source
        self.file_rank = rank
        self.records: list[Row] = []
        self.events: list[Row] = []
        self.failures: list[Failure] = []
        self.progress: tuple[int, int] | None = None
        self.root_cause: tuple[int | None, int | None] | None = None
        self._bars: dict[int, int] = {}  # total -> position, of bars that count steps
        self._train_total: int | None = None
        self._pending: Row | None = None  # a record whose step came from a bar that may lag
        self._first_epoch: int | None = None
        self._step: int | None = None
        self._rank: int | None = rank
        self._time: float | None = None
        self._line = 0
        self._in_traceback: set[int | None] = set()
        self._table: Row | None = None
        self._root_lines = 0

    def feed(self, text: str) -> None:
        """Reads a whole text."""
        for line in text.split("\n"):
            self._line += 1
            for segment in line.split("\r"):
                segment = _ANSI.sub("", segment)
                if len(segment) > _LONG_LINE:
                    segment = _squeezed(segment)
                if segment.strip():
                    self._segment(segment)
        self._end_table()

    def _segment(self, text: str) -> None:
        text = self._prefix(text)
        last_end = 0
        for match in _BAR.finditer(text):
            described = text[last_end : match.start()].strip()
            last_end = match.end()
            if not self._bar(match, described) and described:
                self._message(described)
        rest = text[last_end:]
        if rest.strip():
            self._message(rest)

    def _prefix(self, text: str) -> str:
        """Takes the rank and the time off the front of a line."""
        match = _RANK.search(text)
        self._rank = self.file_rank
        if match:
            self._rank = int(next(group for group in match.groups() if group is not None))
            if match.start() == 0:
                text = text[match.end() :]
        self._time = time_in(text) or self._time
        return text

    # ---- progress bars

    def _bar(self, match: re.Match[str], desc: str) -> bool:
        """A bar that counts training or evaluation steps; False: its description is not one of a training bar."""
        inner = match["inner"]
        if desc and not re.search(r"epoch|step|train|iter|batch", desc, re.IGNORECASE):
            return False
        if desc and len(desc) > 60:
            return False
        if not re.search(r"it/s|s/it", inner) and "?" not in inner:
            return True  # counts examples, files or bytes
        done, total = int(match["n"]), int(match["total"])
        self._settle(done, total, inner)
        epoch = re.search(r"epoch\D{0,3}(\d+)", desc, re.IGNORECASE)
        step = done
        if epoch:
            index = int(epoch[1])
            self._first_epoch = index if self._first_epoch is None else self._first_epoch
            step = (index - self._first_epoch) * total + done
        self._bars.pop(total, None)
        self._bars[total] = done  # last key: the most recent
        if self._train_total in (None, total):
            self.progress = (done, total)
        postfix = pairs_in(inner)
        if "loss" in postfix:
            self._train_total = total
            self.progress = (done, total)
            if epoch:
                postfix.setdefault("epoch", int(epoch[1]))
            if self.records and self.records[-1]["source"] == "bar" and self.records[-1]["step"] == step:
                self.records.pop()  # the same step drawn again
            self._add("bar", "train", {"step": step, **postfix})
        return True

    def _settle(self, done: int, total: int, inner: str) -> None:
        """Corrects the step of the last metrics line: after writing one, tqdm draws its bar again, with the true position.

        The bar before the line lags where steps are faster than tqdm draws. Where they are slow it is exact, and a later position is a
        later step.
        """
        pending, self._pending = self._pending, None
        if pending is None or total != self._train_total or done <= pending["step"]:
            return
        rate = re.search(r"(\d+(?:\.\d+)?)\s*(it/s|s/it)", inner)
        seconds = 0.0 if rate is None else float(rate[1]) if rate[2] == "s/it" else 1 / max(float(rate[1]), 1e-9)
        if seconds < _LAG_S:
            pending["step"] = self._step = done

    def _bar_step(self, is_eval: bool) -> int | None:
        """Step that a metrics line without a step belongs to; None where no bar shows it."""
        if not self._bars:
            return None
        recent = next(reversed(self._bars))
        if self._train_total is None and not (is_eval and len(self._bars) > 1):
            self._train_total = recent
        if self._train_total is None:  # an evaluation before the first training line: the bar that is not at its end
            return next((done for total, done in self._bars.items() if done < total), None)
        if not is_eval and recent != self._train_total and self._bars[recent] < recent:
            self._train_total = recent
        self.progress = (self._bars[self._train_total], self._train_total)
        return self._bars[self._train_total]

    # ---- messages

    def _message(self, text: str) -> None:
        if self._table is not None:
            item = _TABLE_ITEM.match(text)
            if item:
                self._table[item["name"]] = _table_value(item["value"])
                return
            self._end_table()
        for read in _READERS:
            if read(self, text):
                return

    def _add(self, source: str, kind: str, row: Row) -> None:
        record: Row = {"kind": kind, **{name: value for name, value in row.items() if value is not None}, "source": source}
        if self._rank is not None:
            record["rank"] = self._rank
        if isinstance(record.get("step"), int):
            self._step = record["step"]
        self.records.append(record)

    def _end_table(self) -> None:
        if self._table is not None and len(self._table) > 1:
            table, self._table = self._table, None
            kind = table.pop("kind")
            self._add("hf_table", kind, {"step": self._bar_step(is_eval=True), **table})
        self._table = None

    def _read_own(self, text: str) -> bool:
        row = parse_console(text)
        if row is None:
            return False
        if row["kind"] == "event":
            self.events.append(row | ({"rank": self._rank} if self._rank is not None else {}))
        else:
            self._add("harness", row.pop("kind"), row)
        return True

    def _read_json(self, text: str) -> bool:
        start = text.find("{")
        if start < 0 or not text.rstrip().endswith("}") or '"' not in text:
            return False
        try:
            row = from_json_line(text[start:].strip())
        except ValueError:
            return False
        kind = row.pop("kind", None)
        if isinstance(kind, str) and kind in KINDS:
            if not is_own_row(row):
                return False
            if kind == "event":
                self.events.append(row)
            elif kind != "gpu":
                self._add("metrics", kind, row)
            return True
        return self.add_named("json", _flat(row))

    def _read_dict(self, text: str) -> bool:
        match = _DICT.search(text)
        if not match:
            return False
        row = {item["name"]: number(item["value"]) for item in _DICT_ITEM.finditer(match[0])}
        return self.add_named("hf", row)

    def add_named(self, source: str, named: Row) -> bool:
        """A record from names and values that came without a kind; False where there is no metric in it."""
        row: Row = {}
        for name, value in named.items():
            if isinstance(value, str):
                try:
                    value = number(value)
                except ValueError:
                    continue
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                row.setdefault("step" if name.lower() in ("global_step", "iter", "iteration", "step", "_step") else canonical(name), value)
        if "train_runtime" in row:
            kind = "summary"
            row = {name: value for name, value in row.items() if name != "loss"} | ({"train_loss": row["loss"]} if "loss" in row else {})
        elif "loss" in row:
            kind = "train"
        elif any(name.startswith("eval_") for name in row):
            kind = "eval"
        elif "learning_rate" in row or "grad_norm" in row:
            kind = "train"
        else:
            return False
        if "step" in row:
            self._add(source, kind, row)
            return True
        step = self._bar_step(is_eval=kind != "train")
        self._add(source, kind, row if step is None else {"step": step} | row)
        self._pending = self.records[-1] if step is not None else None
        return True

    def _read_deepspeed(self, text: str) -> bool:
        match = _DS_STEP.search(text)
        if match:
            rates = [number(item) for item in re.findall(_NUMBER, re.sub(r"np\.float\d+\(", "", match["lr"]))]
            step, skipped = int(match["step"]), int(match["skipped"])
            row: Row = {"step": step, "num_skipped_steps": skipped, "num_updates": step - skipped}
            if rates:
                row["learning_rate"] = rates[0]
            if len(set(rates)) > 1:
                row["learning_rates"] = rates
            self._add("deepspeed", "train", row)
            return True
        match = _DS_THROUGHPUT.search(text)
        if match:
            items = {item["name"]: number(item["value"]) for item in _DS_ITEM.finditer(match["rest"])}
            names = {
                "RunningAvgSamplesPerSec": "average_samples_per_second",
                "CurrSamplesPerSec": "samples_per_second",
                "MemAllocated": "memory_gib",
                "MaxMemAllocated": "peak_memory_gib",
            }
            row = {"step": int(match["step"]), "epoch": int(match["epoch"]), "num_micro_batches": int(match["micro"])}
            self._add("deepspeed_throughput", "train", row | {ours: items[theirs] for theirs, ours in names.items() if theirs in items})
            return True
        match = _DS_OVERFLOW.search(text)
        if match:
            event: Row = {"event": "overflow"}
            shown = self._bar_step(is_eval=False)
            shown = self._step if shown is None else shown
            if shown is not None:
                event["step"] = shown
            if match["to"]:
                event |= {"loss_scale_from": number(match["scale"]), "loss_scale_to": number(match["to"])}
            elif match["to_h"]:
                event |= {
                    "loss_scale": number(match["scale"]),
                    "hysteresis_from": int(match["from_h"]),
                    "hysteresis_to": int(match["to_h"]),
                }
            self.events.append(event)
            return True
        return False

    def _read_table_head(self, text: str) -> bool:
        match = _TABLE_HEAD.search(text)
        if not match:
            return False
        self._table = {"kind": "summary" if match["split"] == "train" else "eval"}
        return True

    def _read_step_line(self, text: str) -> bool:
        match = _STEP.search(text)
        if not match:
            return False
        if re.search(r"\biter\b.*\bstep\b", text):  # "iter 40 step 10": micro-batches first, the step is what counts
            match = list(_STEP.finditer(text))[-1]
        row = pairs_in(text[: match.start()] + " ; " + text[match.end() :])
        if not ({"loss", "eval_loss", "learning_rate", "perplexity"} & row.keys()):
            return False
        head: Row = {"step": number(match["step"])}
        if match["total"]:
            head["max_steps"] = number(match["total"])
        kind = "eval" if "loss" not in row and "eval_loss" in row else "train"
        self._add("step_line", kind, head | row)
        return True

    def _read_failure(self, text: str) -> bool:
        stripped = re.sub(r"^\s*\[[^\]]*\]:?\s*", "", text) if _RANK.match(text) else text
        if _ROOT_CAUSE in stripped:
            self._root_lines, self.root_cause = 6, (None, None)
            return True
        if self._root_lines and self.root_cause is not None:
            self._root_lines -= 1
            rank, code = self.root_cause
            found_rank = re.search(r"\brank\s+: (\d+)", stripped)
            found_code = re.search(r"\bexitcode\s+: (-?\d+)", stripped)
            self.root_cause = (int(found_rank[1]) if found_rank else rank, int(found_code[1]) if found_code else code)
            return True
        if "Traceback (most recent call last)" in stripped:
            self._in_traceback.add(self._rank)
            return True
        message = stripped.strip()
        exception = _EXCEPTION.match(message)
        known = _CAUSES.search(message)
        consequence = _CONSEQUENCES.search(message)
        if not (exception and (self._rank in self._in_traceback or known or consequence)) and not known and not consequence:
            return False
        self._in_traceback.discard(self._rank)
        failure = Failure(message[:500], self._rank, self._time, self._line, self.source, is_consequence=consequence is not None)
        if not any(_same_failure(failure, old) for old in self.failures[-3:]):
            self.failures.append(failure)
        return True


def _same_failure(new: Failure, old: Failure) -> bool:
    return new.message == old.message and new.rank == old.rank


def _flat(row: Row, prefix: str = "") -> Row:
    """Nested mappings as one, with "/" between the names."""
    flat: Row = {}
    for name, value in row.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}/")
        else:
            flat[prefix + name] = value
    return flat


def _table_value(text: str) -> Any:
    clock = re.fullmatch(r"(?:(\d+) days?, )?(\d+):(\d\d):(\d\d(?:\.\d+)?)", text)
    if clock:
        days, hours, minutes, seconds = clock.groups()
        return round(int(days or 0) * 86400 + int(hours) * 3600 + int(minutes) * 60 + float(seconds), 6)
    try:
        return number(text)
    except ValueError:
        return text


# Tried in this order; the first that knows the line keeps it.
_READERS: tuple[Callable[[LogReader, str], bool], ...] = (
    LogReader._read_own,
    LogReader._read_json,
    LogReader._read_dict,
    LogReader._read_deepspeed,
    LogReader._read_table_head,
    LogReader._read_step_line,
    LogReader._read_failure,
)


def read_state_file(text: str) -> list[Row]:
    """Records of a `trainer_state.json` (its `log_history`).

    Raises:
        ValueError: not such a file.
    """
    state = parse_json(text)
    if not isinstance(state, dict) or not isinstance(state.get("log_history"), list):
        raise ValueError("has no log_history")
    reader = LogReader()
    for row in filter(lambda row: isinstance(row, dict), state["log_history"]):
        reader.add_named("trainer_state", row)
    return reader.records


def is_finite(value: Any) -> bool:
    """A number that can be drawn."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
