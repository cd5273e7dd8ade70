"""`harness logs <file|folder>...`: training logs as a table, CSV, JSON or plots, and the first failure among all ranks.

    harness logs out                                  # a run of ours: its metrics.jsonl, failures from its *.log files
    harness logs slurm-17.out --csv run.csv           # anybody's console log
    harness logs out_a out_b --plot loss,throughput --png compare.png

A folder is one run; if only its sub-folders hold runs, each of them is one. Where a run has a `metrics.jsonl`, its records come from
there and console logs are read for failures only. Output that several ranks printed counts once; where ranks report different values
the lowest rank's are kept and the difference is said.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import importlib.util
import io
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from harness import disk_room
from harness.findings import Finding, FindingParser, UserError, format_findings, printable, user_error
from harness.log_formats import Failure, LogReader, Row, is_finite, read_state_file
from harness.metrics import METRICS_FILE, read_metrics, summarize, superseded_indices, to_json_line
from harness.user_files import MAX_LOG_BYTES, file_name, read_text, replacing

_LOG_SUFFIXES = (".log", ".out", ".err", ".txt")
_MAX_DEPTH = 4  # torchrun's --log-dir nests run/attempt/rank/stderr.log

# What --plot takes -> (title of the axis, columns, the first that a run has is drawn).
PLOTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "loss": ("loss", ("loss",)),
    "eval_loss": ("evaluation loss", ("eval_loss",)),
    "lr": ("learning rate", ("learning_rate",)),
    "grad_norm": ("gradient norm", ("grad_norm",)),
    "memory": ("peak memory (GiB)", ("peak_memory_gib", "memory_gib")),
    "throughput": (
        "tokens/s per GPU",
        ("tokens_per_second_per_gpu", "tokens_per_second", "samples_per_second", "train_samples_per_second"),
    ),
    "mfu": ("MFU", ("mfu",)),
    "step_time": ("seconds per step", ("step_time_s",)),
    "loss_scale": ("loss scale", ("loss_scale",)),
}
_FIRST_COLUMNS = ("step", "epoch", "loss", "eval_loss", "grad_norm", "learning_rate", "tokens_per_second_per_gpu", "mfu", "peak_memory_gib")
_NOT_COLUMNS = frozenset({"kind", "source", "rank", "time_s", "max_steps", "superseded", "life_began_s"})
_NOT_SAID = frozenset({"event", "kind", "time_s", "source", "life_began_s"})
_EXIT_CODES: dict[int, str] = {
    -9: " (SIGKILL: often the kernel's out-of-memory killer)",
    -11: " (segmentation fault)",
    -7: " (bus error: is /dev/shm full?)",
}


@dataclasses.dataclass
class RunLog:
    """What the logs of one run say.

    Attributes:
        name: the path that was given.
        records: rows with `kind` ("train", "eval", "summary") and, where the log says it, `step`; each once.
        events: what happened: overflows, step-downs, resumes.
        failures: as in the texts, in order of time where all have one.
        progress: (done, total) of the training's progress bar, as last seen.
        first_failure: the one that the others follow from; None: nothing failed.
        num_duplicates: records that another rank had printed already.
        num_superseded: records that a resumed run computed again.
        num_bad_lines: lines of a metrics file that are no JSON.
        unreadable: files of the run's folder that could not be read, each with the reason; one that has vanished is not among them.
        differences: where ranks report different values for one step.
    """

    name: str
    records: list[Row] = dataclasses.field(default_factory=list)
    events: list[Row] = dataclasses.field(default_factory=list)
    failures: list[Failure] = dataclasses.field(default_factory=list)
    progress: tuple[int, int] | None = None
    first_failure: Failure | None = None
    num_duplicates: int = 0
    num_superseded: int = 0
    num_bad_lines: int = 0
    unreadable: list[str] = dataclasses.field(default_factory=list)
    differences: list[str] = dataclasses.field(default_factory=list)


def parse_text(text: str, name: str = "") -> RunLog:
    """Reads one console log."""
    reader = LogReader(name)
    reader.feed(text)
    return _combine(name, [reader])


def parse_run(path: str | Path) -> RunLog:
    """Reads one file, or a folder as one run.

    Raises:
        UserError: nothing is there, or a file cannot be read.
    """
    path = Path(path)
    try:
        return _parse_folder(path) if path.is_dir() else _parse_file(path)
    except OSError as error:
        raise user_error(str(path), f"cannot be read: {error.strerror or error}") from None


def find_runs(path: str | Path) -> list[Path]:
    """The runs that a path stands for: itself, or its sub-folders where only they hold logs.

    Raises:
        UserError: there is no such path, or no log in it.
    """
    path = Path(path)
    if not path.exists():
        raise user_error(str(path), "does not exist")
    if not path.is_dir() or os.path.exists(path / METRICS_FILE) or any(child.suffix in _LOG_SUFFIXES for child in _children(path)):
        return [path]
    runs = sorted(child for child in _children(path) if _has_metrics(child))
    if runs:
        return runs
    if _log_files(path) or _state_files(path):
        return [path]
    raise user_error(str(path), f"holds no {METRICS_FILE} and no {', '.join(_LOG_SUFFIXES)} file")


def _children(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError as error:
        raise user_error(str(folder), f"cannot be read: {error.strerror or error}") from None


def _has_metrics(folder: Path) -> bool:
    # Not Path.exists: it raises where the folder may not be entered.
    return any(os.path.exists(folder / name) for name in (METRICS_FILE, "trainer_state.json"))


def _files(folder: Path) -> Iterator[Path]:
    """Every file below a folder. Others may be writing there: what vanishes meanwhile or may not be entered is passed over."""
    for place, _, names in os.walk(folder):
        yield from (Path(place, name) for name in names if os.path.isfile(os.path.join(place, name)))


def _log_files(folder: Path) -> list[Path]:
    files = (file for file in _files(folder) if file.suffix in _LOG_SUFFIXES)
    return sorted(file for file in files if len(file.relative_to(folder).parts) <= _MAX_DEPTH)


def _state_files(folder: Path) -> list[Path]:
    return sorted(file for file in _files(folder) if file.name == "trainer_state.json")


def rank_of_path(path: Path) -> int | None:
    """The rank that a log file's name stands for: `rank3.log`, `stderr.3`, torchrun's `attempt_0/3/stderr.log`."""
    match = re.search(r"rank[_-]?(\d+)", path.name) or re.fullmatch(r"std(?:out|err)\.(\d+)(?:\.\w+)?", path.name)
    if match:
        return int(match[1])
    if path.stem in ("stdout", "stderr") and path.parent.name.isdigit():
        return int(path.parent.name)
    return None


def _read(path: Path) -> LogReader:
    reader = LogReader(str(path), rank_of_path(path))
    reader.feed(read_text(path, errors="replace", max_bytes=MAX_LOG_BYTES))  # not read_text: it would turn carriage returns into newlines
    return reader


def _parse_file(path: Path) -> RunLog:
    if path.name == "trainer_state.json":
        try:
            return RunLog(str(path), records=read_state_file(read_text(path, errors="replace")))
        except ValueError as error:
            raise user_error(str(path), f"is not a trainer state: {error}") from None
    if path.suffix == ".jsonl" or path.name == METRICS_FILE:
        run = _from_metrics(path)
        if run.records or run.events:
            return run
    if path.suffix == ".csv":
        return RunLog(str(path), records=_from_csv(path))
    return _combine(str(path), [_read(path)])


@contextlib.contextmanager
def _reading(file: Path, unreadable: list[str]) -> Iterator[None]:
    """Within, a file of a folder is read: one that has vanished is passed over, one that cannot be read is noted."""
    try:
        yield
    except FileNotFoundError:
        pass
    except OSError as error:
        unreadable.append(f"{file}: {error.strerror or error}")


def _parse_folder(folder: Path) -> RunLog:
    unreadable: list[str] = []
    readers = []
    for file in _log_files(folder):
        with _reading(file, unreadable):
            readers.append(_read(file))
    run = _combine(str(folder), readers)
    run.unreadable = unreadable
    metrics = folder / METRICS_FILE
    if os.path.exists(metrics):
        with _reading(metrics, unreadable):
            own = _from_metrics(metrics)
            own.failures, own.first_failure, own.progress = run.failures, run.first_failure, run.progress
            return dataclasses.replace(own, name=str(folder), unreadable=unreadable)
    if not run.records:
        # Each checkpoint repeats the history so far: the longest one is the run's.
        histories = []
        for file in _state_files(folder):
            with _reading(file, unreadable), contextlib.suppress(ValueError):  # a damaged one; the others say the same
                histories.append(read_state_file(read_text(file, errors="replace")))
        run.records = max(histories, key=len, default=[])
    return run


def _from_metrics(path: Path) -> RunLog:
    """A metrics file of ours, or any file of one JSON object a line."""
    read = read_metrics(path)
    if any("kind" in row for row in read.rows):
        events = [{name: value for name, value in row.items() if name != "kind"} for row in read.of_kind("event")]
        records = [row | {"source": "metrics"} for row in read.of_kind("train", "eval", "summary")]
        return RunLog(str(path), records, events, num_superseded=read.num_superseded, num_bad_lines=read.num_bad_lines)
    reader = LogReader(str(path))
    for row in read.rows:
        reader.feed(to_json_line(row))
    return dataclasses.replace(_combine(str(path), [reader]), num_bad_lines=read.num_bad_lines)


def _from_csv(path: Path) -> list[Row]:
    """Rows of a CSV with a header, as Lightning's CSV logger writes it."""
    reader = LogReader(str(path))
    text = read_text(path, encoding="utf-8-sig", errors="replace", max_bytes=MAX_LOG_BYTES)
    for row in csv.DictReader(io.StringIO(text, newline="")):
        reader.add_named("csv", {name: value for name, value in row.items() if name and value})
    return reader.records


def _combine(name: str, readers: Sequence[LogReader]) -> RunLog:
    run = RunLog(name)
    for reader in readers:
        run.events += reader.events
        run.failures += reader.failures
        run.progress = run.progress or reader.progress
    run.events = _once(run.events, run)
    _merge_ranks([record for reader in readers for record in reader.records], run)
    if run.failures and all(failure.time_s is not None for failure in run.failures):
        run.failures.sort(key=lambda failure: failure.time_s or 0.0)  # stable: within one second the order of the text stands
    roots = [reader.root_cause for reader in readers if reader.root_cause is not None]
    run.first_failure = first_failure(run.failures, roots)
    return run


def first_failure(failures: Sequence[Failure], roots: Sequence[tuple[int | None, int | None]] = ()) -> Failure | None:
    """The failure that the others follow from.

    Args:
        failures: in order of time.
        roots: (rank, exit code) that torchrun calls the first observed failure.

    Returns:
        The earliest failure that is not a consequence of another, of the rank that torchrun names if it has one; without any, that rank's
        exit code; without that, the earliest consequence.
    """
    causes = [failure for failure in failures if not failure.is_consequence]
    for rank, _ in roots:
        for failure in causes:
            if rank is not None and failure.rank == rank:
                return failure
    if causes:
        return causes[0]
    for rank, code in roots:
        if code is not None:
            hint = {
                -9: " (SIGKILL: often the kernel's out-of-memory killer)",
                -11: " (segmentation fault)",
                -7: " (bus error: /dev/shm full?)",
            }
            return Failure(f"exit code {code}{hint.get(code, '')}", rank)
    return failures[0] if failures else None


def _identity(row: Row) -> str:
    return to_json_line({name: value for name, value in sorted(row.items()) if name not in ("rank", "time_s", "life_began_s")})


def _once(rows: Iterable[Row], run: RunLog) -> list[Row]:
    """Rows without the copies that other ranks printed (or the same rank, where the row names its step or follows at once)."""
    kept: list[Row] = []
    seen: dict[str, Any] = {}
    previous = ""
    for row in rows:
        key = _identity(row)
        if key in seen and ("step" in row or key == previous or seen[key] != row.get("rank")):
            run.num_duplicates += 1
        else:
            kept.append(row)
            seen[key] = row.get("rank")
        previous = key
    return kept


def _with_ordered_steps(rows: Sequence[Row]) -> Sequence[Row]:
    """Rows in which a step that goes back means a resumed run.

    The step of a metric dictionary comes from the progress bar, which may lag and so repeat itself: there the epoch decides, which may
    repeat too (it is rounded), but falls only on a resume.
    """
    if not any(str(row.get("source")).startswith("hf") for row in rows):
        return rows
    if not all(is_finite(row.get("epoch")) for row in rows):
        return []
    ordered: list[Row] = []
    previous, repeats = None, 0
    for row in rows:
        repeats = repeats + 1 if row["epoch"] == previous else 0
        previous = row["epoch"]
        ordered.append({"kind": row["kind"], "step": round(row["epoch"] * 1e6) * 10**6 + repeats})
    return ordered


def _merge_ranks(records: list[Row], run: RunLog) -> None:
    """Fills `run.records`: copies once, rows of an earlier life left out, one rank's values where ranks differ."""
    records = _once(records, run)
    groups: dict[tuple[Any, Any], list[Row]] = {}
    for record in records:
        groups.setdefault((record.get("rank"), record.get("source")), []).append(record)
    dropped: set[int] = set()
    for group in groups.values():
        old = superseded_indices(_with_ordered_steps(group))
        dropped |= {id(group[index]) for index in old}
    run.num_superseded += len(dropped)
    records = [record for record in records if id(record) not in dropped]

    by_step: dict[tuple[Any, ...], list[Row]] = {}
    for record in records:
        if "step" in record and "rank" in record:
            by_step.setdefault((record["kind"], record["source"], record["step"]), []).append(record)
    for (_, _, step), group in by_step.items():
        if len({record["rank"] for record in group}) < 2:
            continue
        group = sorted(group, key=lambda record: record["rank"])
        dropped |= {id(record) for record in group[1:] if record["rank"] != group[0]["rank"]}
        if "loss" in group[0]:
            values = ", ".join(f"{record['loss']} (rank {record['rank']})" for record in group if "loss" in record)
            run.differences.append(f"step {step}: ranks report different losses: {values}")
    run.records = [record for record in records if id(record) not in dropped]


def table(run: RunLog) -> list[Row]:
    """One row per step, in the order of the log: everything that any line said about it; the first value of a column counts.

    Rows without a step stay on their own.
    """
    rows: list[Row] = []
    by_step: dict[Any, tuple[Row, set[Any]]] = {}  # step -> its row and what is in it
    for record in run.records:
        if record["kind"] == "summary":
            continue
        step, origin = record.get("step"), (record["source"], record["kind"])
        row, origins = by_step.get(step, (None, set())) if step is not None else (None, set())
        if row is None or origin in origins:
            row, origins = {}, set()
            rows.append(row)
        if step is not None:
            by_step[step] = (row, origins | {origin})
        for name, value in record.items():
            if name not in _NOT_COLUMNS:
                row.setdefault(name, value)
    return rows


def columns(rows: Iterable[Row]) -> list[str]:
    """Names of all columns, the usual ones first."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return [name for name in _FIRST_COLUMNS if name in names] + [name for name in names if name not in _FIRST_COLUMNS]


def to_csv(runs: Sequence[RunLog]) -> str:
    """All rows as CSV; with several runs the first column names the run."""
    tables = [(run.name, table(run)) for run in runs]
    names = columns(row for _, rows in tables for row in rows)
    several = len(runs) > 1
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow((["run"] if several else []) + names)
    for name, rows in tables:
        for row in rows:
            writer.writerow(([name] if several else []) + ["" if row.get(column) is None else row[column] for column in names])
    return text.getvalue()


def to_json(runs: Sequence[RunLog]) -> str:
    """Everything as strict JSON; non-finite numbers as in `harness.metrics`."""

    def strict(row: Row) -> Row:
        return json.loads(to_json_line(row))

    result = []
    for run in runs:
        result.append(
            {
                "name": run.name,
                "records": [strict(row) for row in run.records],
                "events": [strict(row) for row in run.events],
                "progress": list(run.progress) if run.progress else None,
                "first_failure": dataclasses.asdict(run.first_failure) if run.first_failure else None,
                "num_failures": len(run.failures),
                "num_duplicates": run.num_duplicates,
                "num_superseded": run.num_superseded,
                "num_bad_lines": run.num_bad_lines,
                "unreadable": run.unreadable,
                "differences": run.differences,
                "summary": strict(_summary(run)),
            }
        )
    return json.dumps({"runs": result}, ensure_ascii=False, allow_nan=False, indent=1)


def _summary(run: RunLog) -> dict[str, Any]:
    """In order of time, where all rows have one: a run's events say when its lives began."""
    rows = [*run.records, *({**event, "kind": "event"} for event in run.events)]
    if all("time_s" in row for row in rows):
        rows.sort(key=lambda row: row["time_s"])
    return summarize(rows)


def format_run(run: RunLog, max_rows: int = 30) -> str:
    """The run as text: a table (thinned evenly to `max_rows`), events, and how it ended."""
    rows = table(run)
    lines = [run.name or "log"]
    shown = rows
    if max_rows > 0 and len(rows) > max_rows:
        picked = sorted({round(index * (len(rows) - 1) / (max_rows - 1)) for index in range(max_rows)}) if max_rows > 1 else [len(rows) - 1]
        shown = [rows[index] for index in picked]
    names = columns(shown)
    cells = [names] + [[_cell(row.get(name)) for name in names] for row in shown]
    widths = [max(len(row[index]) for row in cells) for index in range(len(names))]
    if rows:
        lines += ["  " + "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in cells]
    else:
        lines.append("  no metrics found")
    if len(shown) < len(rows):
        lines.append(f"  ({len(shown)} of {len(rows)} rows; --rows 0 shows all)")
    lines += [f"  event   {_event_text(event)}" for event in run.events]
    if run.progress:
        lines.append(f"  progress {run.progress[0]}/{run.progress[1]}")
    for difference in run.differences[:3]:
        lines.append(f"  note    {difference}")
    for count, what in ((run.num_duplicates, "copies left out"), (run.num_superseded, "rows computed again after a resume left out")):
        if count:
            lines.append(f"  note    {count} {what}")
    if run.num_bad_lines:
        lines.append(f"  note    {run.num_bad_lines} unreadable lines in the metrics file")
    lines += [f"  note    cannot be read: {each}" for each in run.unreadable[:3]]
    lines += [f"  {row['kind']} {_event_text(row)}" for row in run.records if row["kind"] == "summary"]
    if run.first_failure:
        lines.append(f"  FAILED  {_failure_text(run.first_failure)} ({len(run.failures)} failure lines in all)")
    return "\n".join(lines)


def _failure_text(failure: Failure) -> str:
    where = f"rank {failure.rank}: " if failure.rank is not None else ""
    place = f" [{failure.source}:{failure.line}]" if failure.source else f" [line {failure.line}]" if failure.line else ""
    return f"{where}{failure.message}{place}"


def _event_text(row: Row) -> str:
    head = str(row.get("event", ""))
    rest = ", ".join(f"{name}={_cell(value)}" for name, value in row.items() if name not in _NOT_SAID)
    return f"{head} {rest}".strip()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def plot_names(text: str) -> list[str]:
    """The plots that --plot names.

    Raises:
        UserError: an unknown name, or no matplotlib.
    """
    given = [name.strip() for name in text.split(",") if name.strip()]
    names = [name.replace("-", "_") for name in given]
    unknown = [word for word, name in zip(given, names, strict=True) if name not in PLOTS]
    if unknown or not names:
        fix = f"choose from {', '.join(PLOTS)}; --png FILE is where the picture goes"
        raise user_error("--plot", f"does not know {', '.join(unknown)}" if unknown else "names nothing to draw", fix)
    if importlib.util.find_spec("matplotlib") is None:
        raise user_error("--plot", "needs matplotlib", "pip install matplotlib")
    return names


def _panels(runs: Sequence[RunLog], names: Sequence[str]) -> list[tuple[str, list[tuple[str, list[float], list[float]]]]]:
    """(name, curves) of each plot that these runs have something for.

    Raises:
        UserError: none of them has.
    """
    panels = [(name, found) for name in names if (found := curves(runs, PLOTS[name][1]))]
    if not panels:
        raise user_error("--plot", f"found no {', '.join(names)} in these logs")
    return panels


def plot(runs: Sequence[RunLog], names: Sequence[str], png: str | Path) -> None:
    """Draws one panel per name, all runs in each, into a PNG.

    Raises:
        UserError: an unknown name, nothing to draw, or no matplotlib.
    """
    panels = _panels(runs, plot_names(",".join(names)))
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(panels), 1, figsize=(9, 3.2 * len(panels)), squeeze=False, layout="constrained")
    try:
        for axis, (name, found) in zip(axes[:, 0], panels, strict=True):
            for label, xs, ys in found:
                axis.plot(xs, ys, label=label, marker="." if len(xs) < 30 else "", linewidth=1.2)
            axis.set_ylabel(PLOTS[name][0])
            axis.grid(alpha=0.3)
            if len(runs) > 1:
                axis.legend(fontsize="small")
        axes[-1, 0].set_xlabel("step")
        with replacing(png) as file:
            figure.savefig(file, dpi=120, format="png")
    finally:
        pyplot.close(figure)


def curves(runs: Sequence[RunLog], names: Sequence[str]) -> list[tuple[str, list[float], list[float]]]:
    """(label, steps, values) of every run that has one of the columns; points without a finite value are left out."""
    curves = []
    for run in runs:
        rows = table(run)
        for name in names:
            points = [(row.get("step", index), row[name]) for index, row in enumerate(rows) if is_finite(row.get(name))]
            if points:
                curves.append((run.name, [float(x) for x, _ in points], [float(y) for _, y in points]))
                break
    return curves


def plot_losses(metrics: str | Path, png: str | Path) -> None:
    """Loss, evaluation loss, learning rate and throughput of a run of ours as one PNG."""
    run = parse_run(metrics)
    Path(png).parent.mkdir(parents=True, exist_ok=True)
    plot([run], [name for name in ("loss", "eval_loss", "lr", "throughput") if curves([run], PLOTS[name][1])] or ["loss"], png)


def _parser() -> FindingParser:
    parser = FindingParser(prog="harness logs", description="Reads training logs: ours, HF Trainer's, DeepSpeed's and others'.")
    parser.add_argument("paths", nargs="+", type=file_name, metavar="file|folder")
    parser.add_argument("--csv", nargs="?", const="-", metavar="FILE", help="write CSV to FILE, or to the terminal")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="write strict JSON to FILE, or to the terminal")
    parser.add_argument("--plot", nargs="?", const="loss,lr,memory,throughput", metavar="NAMES", help=f"draw {', '.join(PLOTS)}")
    parser.add_argument("--png", default="logs.png", metavar="FILE", help="where --plot draws (default: %(default)s)")
    parser.add_argument(
        "--rows", type=int, default=30, metavar="N", help="rows of the table, thinned evenly; 0: all (default: %(default)s)"
    )
    return parser


def _write(text: str, target: str, flag: str) -> None:
    if target == "-":
        print(printable(text.rstrip("\n")) if sys.stdout.isatty() else text.rstrip("\n"))
        return
    with _writing(flag, target), replacing(target) as file:
        file.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _writing(flag: str, target: str) -> Iterator[None]:
    """Within, an output is written.

    Raises:
        UserError: it cannot be: a folder, a missing one, no permission.
        OSError: the disk is full.
    """
    try:
        with disk_room.naming(Path(target)):
            yield
    except OSError as error:
        if disk_room.named(error):
            raise
        raise user_error(flag, f"cannot write {target}: {error.strerror or error}", "name a file in a folder with room") from None


def _sources(run: Path) -> list[Path]:
    """The files that a run's records may come from."""
    return [*_log_files(run), *_state_files(run), run / METRICS_FILE] if run.is_dir() else [run]


def _output_problems(runs: Sequence[Path], outputs: dict[str, str]) -> Iterator[Finding]:
    """Outputs that would take the place of a log, or of each other.

    Args:
        outputs: flag -> file.
    """
    sources = [file for run in runs for file in _sources(run) if file.exists()]
    taken: dict[str, str] = {}
    for flag, target in outputs.items():
        real = os.path.realpath(target)
        read = next((file for file in sources if os.path.exists(target) and os.path.samefile(file, target)), None)
        if read is not None:
            yield Finding("error", flag, f"{target} is the log {read}, which would be lost", "name another file")
        elif real in taken:
            yield Finding("error", flag, f"{target} is written by {taken[real]} too", "name another file")
        taken[real] = flag


def main(argv: Sequence[str] | None = None) -> int:
    """The `harness logs` command.

    Returns:
        0; 1 if no log holds anything that was recognised, or the disk is full; 2 for wrong input.
    """
    try:
        options = _parser().parse_args(argv)
        names = plot_names(options.plot) if options.plot is not None else []
        paths = [run for path in options.paths for run in find_runs(path)]
        outputs = {"--csv": options.csv, "--json": options.json, "--png": options.png if names else None}
        if problems := list(_output_problems(paths, {flag: file for flag, file in outputs.items() if file and file != "-"})):
            raise UserError(problems)
        runs = [parse_run(path) for path in paths]
        if names:
            _panels(runs, names)  # refused before anything is written
        if options.csv:
            _write(to_csv(runs), options.csv, "--csv")
        if options.json:
            _write(to_json(runs), options.json, "--json")
        if names:
            with _writing("--png", options.png):
                plot(runs, names, options.png)
    except UserError as error:
        print(format_findings(error.findings), file=sys.stderr)
        return 2
    except OSError as error:
        message = disk_room.named(error)
        if message is None:  # of the terminal, or what takes its place
            raise
        print(format_findings([Finding("error", "harness logs", message)]), file=sys.stderr)
        return 1
    if "-" not in (options.csv, options.json):
        print(printable("\n".join(format_run(run, options.rows) for run in runs)))
    return 0 if any(run.records or run.events or run.failures for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
