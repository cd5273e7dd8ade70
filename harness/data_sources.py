"""Rows of training data from files: which files are meant, how each kind is read, and what is wrong with them, by file and line.

    .txt .text .md .rst .py     text: one file is one document, or with text mode "line" every non-blank line is one
    .jsonl .ndjson .json        one object per line, or an array of objects
    .csv .tsv                   with a header line
    .parquet .arrow             tables
    a folder                    every such file in it; or what `Dataset.save_to_disk` wrote

Everything but .parquet and .arrow may end in .gz, .bz2 or .xz as well.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import dataclasses
import difflib
import errno
import glob
import gzip
import io
import itertools
import json
import lzma
import os
import tokenize
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from harness.findings import Finding, UserError, user_error
from harness.user_files import json_problem, parse_json, path_problem

TEXT_SUFFIXES = {".txt", ".text", ".md", ".rst", ".py"}
JSON_SUFFIXES = {".jsonl", ".ndjson", ".json"}
TABLE_SUFFIXES = {".csv", ".tsv", ".parquet", ".arrow"}
SUFFIXES = TEXT_SUFFIXES | JSON_SUFFIXES | TABLE_SUFFIXES
_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_ROWS_AT_ONCE = 512
_SAVED_MARKS = ("dataset_info.json", "state.json")
_SAVED_SPLITS = "dataset_dict.json"
_SPLITS = {"--validation_file": ("validation", "valid", "dev", "test")}
_PLAIN_ENCODINGS = {"utf-8", "ascii", "iso8859-1", "iso8859-15", "cp1252"}
"""Those in which a newline's byte is a newline wherever it stands, so that a line can be found by its offset."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a source.

    Attributes:
        values: by column.
        where: "file, line 3" or the like, for messages.
        continues, more: the previous row began, and the next row goes on with, the same document (a long text comes in parts).
        problem: why the row cannot be used; it has no values then.
    """

    values: dict[str, Any]
    where: str
    continues: bool = False
    more: bool = False
    problem: Finding | None = None


@dataclasses.dataclass(frozen=True)
class Place:
    """A place in a file of lines.

    Attributes:
        offset: in bytes; a line begins there.
        line, rows: lines and rows before it.
    """

    offset: int = 0
    line: int = 0
    rows: int = 0


@dataclasses.dataclass(frozen=True)
class SourceFile:
    """A file of a source.

    Attributes:
        path: the file.
        named: the user gave its name; otherwise it was found in a folder or by a glob.
    """

    path: Path
    named: bool

    @property
    def suffix(self) -> str:
        """Its kind, without a compression's suffix."""
        suffixes = self.path.suffixes
        if len(suffixes) > 1 and suffixes[-1].lower() in _OPENERS:
            return suffixes[-2].lower()
        return self.path.suffix.lower()


def is_saved_dataset(path: Path) -> bool:
    """Whether a folder is what `Dataset.save_to_disk` or `DatasetDict.save_to_disk` writes."""
    return (path / _SAVED_SPLITS).is_file() or all((path / mark).is_file() for mark in _SAVED_MARKS)


def _split_folder(folder: Path, key: str) -> Path | Finding:
    """Of a folder with several splits the one that is meant; a folder of one dataset as it is."""
    if not (folder / _SAVED_SPLITS).is_file():
        return folder
    try:
        splits = [str(name) for name in parse_json((folder / _SAVED_SPLITS).read_text(encoding="utf-8"))["splits"]]
        splits[0]
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return Finding("error", key, f"{folder / _SAVED_SPLITS} names no splits", "save_to_disk it again, or give the folder of one split")
    wanted = _SPLITS.get(key, ("train",))
    split = splits[0] if len(splits) == 1 else next((name for name in wanted if name in splits), None)
    if split is None:
        return Finding("error", key, f"{folder} has no split {wanted[0]}, but {', '.join(splits)}", f"give one: {folder / splits[0]}")
    return folder / split


def expand(entries: Sequence[str], key: str) -> list[SourceFile | Path]:
    """The files that names, globs and folders stand for, in a fixed order; folders of `save_to_disk` stay folders, of one split each.

    Args:
        entries: what the user gave.
        key: the flag, for messages.

    Raises:
        UserError: every entry that is not there, matches nothing, or is of an unknown kind, together.
    """
    found: dict[Path, SourceFile | Path] = {}
    problems: list[Finding] = []

    def cannot_read(error: OSError) -> None:
        message = f"cannot read {error.filename or entry}: {error.strerror or error}"
        problems.append(Finding("error", key, message, "give what you may read"))

    for entry in entries:
        if problem := path_problem(entry):
            problems.append(Finding("error", key, f"{entry[:60]} {problem}", "give the path of an existing file"))
            continue
        path = Path(entry).expanduser()
        try:
            files = _files_of(entry, path, key, problems, cannot_read)
        except OSError as error:
            cannot_read(error)
            continue
        for file in files:
            if isinstance(file, SourceFile) and not os.access(file.path, os.R_OK):
                cannot_read(PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file.path)))
            if isinstance(file, SourceFile) and file.suffix not in SUFFIXES:
                problems.append(Finding("error", key, f"{file.path} is of an unknown kind", f"known are {_known()}"))
            real = (file.path if isinstance(file, SourceFile) else file).resolve()
            found.setdefault(real, file)
    if problems:
        raise UserError(problems)
    return list(found.values())


def _files_of(entry: str, path: Path, key: str, problems: list[Finding], cannot_read: Callable[[OSError], None]) -> list[SourceFile | Path]:
    """What one entry stands for; what is wrong with it is added to `problems`, or raised as an OSError."""
    if path.is_dir():
        num_before = len(problems)
        if is_saved_dataset(path):
            split = _split_folder(path, key)
            problems += [split] if isinstance(split, Finding) else []
            return [split] if isinstance(split, Path) else []
        files = _files_below(path, cannot_read)
        if not files and len(problems) == num_before:
            problems.append(Finding("error", key, f"folder {entry} has no file of a known kind", f"known are {_known()}"))
        return [SourceFile(file, False) for file in files]
    if path.is_file():
        return [SourceFile(path, True)]
    if glob.has_magic(str(path)):
        matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
        files = [match for match in matches if match.is_file()]
        if not files:
            problems.append(Finding("error", key, f"no file matches {entry}", "quote globs so that ** reaches the program"))
        return [SourceFile(file, False) for file in files]
    problems.append(_not_there(entry, path, key))
    return []


def _known() -> str:
    return " ".join(sorted(SUFFIXES)) + ", all text kinds also with .gz .bz2 .xz"


def _files_below(folder: Path, cannot_read: Callable[[OSError], None]) -> list[Path]:
    files = []
    for root, folders, names in os.walk(folder, onerror=cannot_read, followlinks=False):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        files += [Path(root) / name for name in sorted(names) if not name.startswith(".")]
    return [file for file in files if SourceFile(file, False).suffix in SUFFIXES and file.is_file()]


def _not_there(entry: str, path: Path, key: str) -> Finding:
    if path.exists():  # read twice, once for its kind and once for its rows, and again by the next run
        return Finding("error", key, f"{entry} is a pipe or a device", "give a regular file: write what comes out of it into one")
    return Finding("error", key, f"{entry} does not exist", _close_name(path))


def _close_name(path: Path) -> str:
    parent = path.parent if path.parent.is_dir() else None
    close = difflib.get_close_matches(path.name, os.listdir(parent), n=1) if parent else []
    return f"did you mean {parent / close[0]}?" if parent and close else "give the path of a file, a folder or a glob"


def open_bytes(path: Path) -> BinaryIO:
    """A file's bytes, decompressed."""
    opener = _OPENERS.get(path.suffix.lower())
    return opener(path, "rb") if opener else open(path, "rb")


@dataclasses.dataclass
class FileReader:
    """Reads rows from files.

    Attributes:
        key: the flag that named the files, for messages.
        encoding: of text files; UTF-8 takes a byte order mark too.
        line_mode: in text files, each line is a document.
        segment_chars: texts longer than this come in parts, cut at the end of a line; None never cuts.
        skipped: what was left out and why, filled while reading: reason -> names.
        on_bytes: told how many more bytes of files were read.
        place: near the last row that was read, not after it; None in files in which no place can be gone to.
    """

    key: str = "--train_file"
    encoding: str = "utf-8"
    line_mode: bool = False
    segment_chars: int | None = None
    skipped: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    on_bytes: Callable[[int], None] = lambda number: None
    place: Place | None = None

    def __post_init__(self) -> None:
        try:
            codecs.lookup(self.encoding)
        except LookupError:
            raise user_error("--data_encoding", f"{self.encoding} is not an encoding Python knows", "for example utf-8, latin-1") from None

    def rows(self, files: Sequence[SourceFile | Path], skip: int = 0, near: Place | None = None) -> Iterator[Row]:
        """All rows, file by file.

        Args:
            skip: so many rows of the first file are left out; where the kind of file allows it they are not read.
            near: a `place` before the first row that is wanted.

        Raises:
            UserError: a file that cannot be read as what its name says; an empty one that was named.
        """
        for file in files:
            self.place = None
            if isinstance(file, Path):
                yield from self._saved(file, skip)
            else:
                yield from self._file(file, skip, near or Place())
                self.on_bytes(file.path.stat().st_size)
            skip, near = 0, None

    def _file(self, file: SourceFile, skip: int, near: Place) -> Iterator[Row]:
        readers: dict[str, Callable[[SourceFile, int, Place], Iterator[Row]]] = {
            ".csv": self._csv,
            ".tsv": self._csv,
            ".parquet": self._parquet,
            ".arrow": self._arrow,
            ".json": self._json,
        }
        read = readers.get(file.suffix) or (self._text if file.suffix in TEXT_SUFFIXES else self._jsonl)
        rows = read(file, skip, near)
        try:
            first = next(rows, None)
            if first is None:
                if not skip:
                    self._leave_out(file)
                return
            yield first
            yield from rows
        except UnicodeDecodeError as error:
            if file.suffix == ".py" and not file.named:
                self.skipped.setdefault("source files whose encoding cannot be read", []).append(str(file.path))
                return
            raise self._not_decodable(file, error) from None
        except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
            raise user_error(self.key, f"cannot read {file.path}: {error}") from None

    def _leave_out(self, file: SourceFile) -> None:
        if file.named:
            raise user_error(self.key, f"{file.path} is empty or blank", "remove it from the list, or fill it")
        self.skipped.setdefault("empty or blank files", []).append(str(file.path))

    def _not_decodable(self, file: SourceFile, error: UnicodeDecodeError) -> UserError:
        encoding = error.encoding
        try:
            offset, line, byte = locate_bad_byte(file.path, encoding)
        except (OSError, EOFError, lzma.LZMAError, zlib.error) as damage:  # further on in the same file
            return user_error(self.key, f"cannot read {file.path}: {damage}")
        with open_bytes(file.path) as stream:
            start = stream.read(2)
        likely = "this one begins like utf-16" if start in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "for example latin-1"
        return user_error(
            self.key,
            f"{file.path}, line {line}: byte 0x{byte:02x} at offset {offset} is not {encoding.upper().replace('UTF-8-SIG', 'UTF-8')}",
            f"say which encoding it has with --data_encoding ({likely}), or convert it",
        )

    def _open_text(self, file: SourceFile, newline: str | None = None) -> io.TextIOWrapper:
        encoding = self.encoding
        if file.suffix == ".py" and codecs.lookup(encoding).name == "utf-8":
            with open_bytes(file.path) as head:
                try:
                    encoding = tokenize.detect_encoding(head.readline)[0]  # source code may name its own
                except SyntaxError:
                    encoding = "utf-8"
        if codecs.lookup(encoding).name == "utf-8":
            encoding = "utf-8-sig"
        return io.TextIOWrapper(open_bytes(file.path), encoding=encoding, newline=newline)

    def _lines(self, file: SourceFile, skip: int, near: Place) -> Iterator[tuple[str, str]]:
        """(line that is not blank, where) without the first `skip` ones; goes to `near` at once where it can."""
        encoding = codecs.lookup(self.encoding).name
        if encoding not in _PLAIN_ENCODINGS or file.suffix == ".py" or file.path.suffix.lower() in _OPENERS:
            with self._open_text(file) as stream:
                lines = ((line.rstrip("\n"), f"{file.path}, line {number}") for number, line in enumerate(stream, 1) if line.strip())
                yield from itertools.islice(lines, skip, None)
            return
        with open(file.path, "rb") as raw_lines:
            raw_lines.seek(near.offset)
            offset, number, rows = near.offset, near.line, near.rows
            for raw in raw_lines:
                self.place = Place(offset, number, rows)
                text = raw.decode(encoding).removesuffix("\n").removesuffix("\r")
                if offset == 0 and encoding == "utf-8":
                    text = text.removeprefix("\ufeff")
                for line in text.split("\r"):  # alone it ends a line, too
                    number += 1
                    if line.strip():
                        rows += 1
                        if rows > skip:
                            yield line, f"{file.path}, line {number}"
                offset += len(raw)

    def _text(self, file: SourceFile, skip: int, near: Place) -> Iterator[Row]:
        if self.line_mode:
            for line, where in self._lines(file, skip, near):
                yield Row({"text": line}, where)
            return
        yield from itertools.islice(self._document(file), skip, None)

    def _document(self, file: SourceFile) -> Iterator[Row]:
        with self._open_text(file) as stream:
            if self.segment_chars is None:
                text = stream.read()
                if text.strip():
                    yield Row({"text": text}, str(file.path))
                return
            waiting, continues = None, False
            for segment in segments(stream, self.segment_chars):
                if waiting is not None:
                    yield Row({"text": waiting}, str(file.path), continues, more=True)
                    continues = True
                waiting = segment
            if waiting is not None:
                yield Row({"text": waiting}, str(file.path), continues)

    def _jsonl(self, file: SourceFile, skip: int, near: Place) -> Iterator[Row]:
        for line, where in self._lines(file, skip, near):
            try:
                value = _parse_json(line, where, self.key)
            except UserError as error:
                yield self._unusable(where, error.findings[0])
            else:
                yield self._object(value, where, _may_hold_halves(line))

    def _object(self, value: Any, where: str, may_hold_halves: bool) -> Row:
        if isinstance(value, dict):
            if may_hold_halves and (half := _half_of(value)):
                message = f"{where}: {half} is half of a character (a lone surrogate), which no tokenizer takes"
                return self._unusable(where, Finding("error", self.key, message, "write characters whole, in UTF-8"))
            return Row(value, where)
        message = f"{where}: a JSON object is needed, not {type(value).__name__}"
        return self._unusable(where, Finding("error", self.key, message, 'write rows like {"text": "..."}'))

    def _unusable(self, where: str, problem: Finding) -> Row:
        fix = f"{problem.fix}, or --bad_rows skip" if problem.fix else "--bad_rows skip"
        return Row({}, where, problem=dataclasses.replace(problem, fix=fix))

    def _json(self, file: SourceFile, skip: int, near: Place) -> Iterator[Row]:
        with self._open_text(file) as stream:
            start = stream.read(4096).lstrip()[:1]
        if start != "[":  # an object per line under another name, or one object that holds the rows
            yield from self._json_object(file, skip, near) if start == "{" else self._jsonl(file, skip, near)
            return
        with self._open_text(file) as stream:
            text = stream.read()
        values, halves = _parse_json(text, str(file.path), self.key), _may_hold_halves(text)
        for number, value in enumerate(values[skip:], skip + 1):
            where = f"{file.path}, row {number}"
            yield self._object(value, where, halves)

    def _json_object(self, file: SourceFile, skip: int, near: Place) -> Iterator[Row]:
        with self._open_text(file) as stream:
            first_line = stream.readline()
            try:
                parse_json(first_line)
            except ValueError:
                lines = False
            else:
                lines = bool(stream.readline().strip())
        if lines:
            yield from self._jsonl(file, skip, near)
            return
        with self._open_text(file) as stream:
            text = stream.read()
        value, halves = _parse_json(text, str(file.path), self.key), _may_hold_halves(text)
        rows = value.get("data") if isinstance(value.get("data"), list) else [value]
        for number, row in enumerate(rows[skip:], skip + 1):
            where = f"{file.path}, row {number}"
            yield self._object(row, where, halves)

    def _csv(self, file: SourceFile, skip: int, near: Place) -> Iterator[Row]:
        with self._open_text(file, newline="") as stream:
            reader = csv.DictReader(stream, delimiter="\t" if file.suffix == ".tsv" else ",", strict=True)
            try:
                if not any(name.strip() for name in reader.fieldnames or ()):
                    return
                for values in itertools.islice(reader, skip, None):
                    where = f"{file.path}, line {reader.line_num}"
                    if None in values or None in values.values():
                        message = f"{where}: not as many fields as the header has"
                        yield self._unusable(where, Finding("error", self.key, message, "quote fields that hold the delimiter"))
                    else:
                        yield Row(values, where)
            except csv.Error as error:
                raise user_error(self.key, f"{file.path}, line {reader.line_num + 1}: not valid CSV: {error}") from None

    def _parquet(self, file: SourceFile, skip: int, near: Place) -> Iterator[Row]:
        import pyarrow
        import pyarrow.parquet

        try:
            table = pyarrow.parquet.ParquetFile(file.path, memory_map=True)
            group, begin = 0, 0
            while group < table.num_row_groups and begin + table.metadata.row_group(group).num_rows <= skip:
                begin += table.metadata.row_group(group).num_rows
                group += 1
            batches = table.iter_batches(batch_size=_ROWS_AT_ONCE, row_groups=range(group, table.num_row_groups))
            values = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
            for number, row in enumerate(itertools.islice(values, skip - begin, None), skip + 1):
                yield Row(row, f"{file.path}, row {number}")
        except Exception as error:  # what pyarrow says of a damaged file has many types
            raise user_error(self.key, f"{file.path} is not a parquet file: {_first_line(error)}") from None

    def _arrow(self, file: SourceFile, skip: int, near: Place) -> Iterator[Row]:
        import datasets

        try:
            yield from dataset_rows(datasets.Dataset.from_file(str(file.path)), str(file.path), skip)
        except Exception as error:  # as for parquet
            raise user_error(self.key, f"{file.path} is not an arrow file: {_first_line(error)}") from None

    def _saved(self, folder: Path, skip: int) -> Iterator[Row]:
        import datasets

        try:
            yield from dataset_rows(datasets.load_from_disk(str(folder)), str(folder), skip)
        except Exception as error:  # as for parquet
            raise user_error(self.key, f"{folder} cannot be read: {_first_line(error)}", "save_to_disk it again") from None


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def dataset_rows(data: Any, name: str, skip: int = 0) -> Iterator[Row]:
    """Rows of a `datasets.Dataset` after the first `skip`."""
    number = itertools.count(skip + 1)
    if skip >= len(data):
        return
    rest = data.with_format(None).select(range(skip, len(data))) if skip else data.with_format(None)
    batches = rest.iter(batch_size=_ROWS_AT_ONCE)
    for table in rest.with_format("arrow").iter(batch_size=_ROWS_AT_ONCE):
        table.validate(full=True)  # a damaged file may point anywhere in memory
        batch = next(batches)
        columns = list(batch)
        for values in zip(*batch.values(), strict=True):
            yield Row(dict(zip(columns, values, strict=True)), f"{name}, row {next(number)}")


def _may_hold_halves(text: str) -> bool:
    """Whether a JSON text may hold half of a character: only by an escape, for files are read as UTF-8. Cheap, for every line."""
    return "\\ud" in text or "\\uD" in text


def _half_of(value: Any) -> str | None:
    """The first half of a character in the texts of a row, as JSON writes it; None where all are whole."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return f"\\u{ord(error.object[error.start]):04x}"
    return None


def _parse_json(text: str, where: str, key: str) -> Any:
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        place = f"{where}: " if "line" in where else f"{where}, line {error.lineno}: "
        raise user_error(
            key, f"{place}not valid JSON: {error.msg.removesuffix(' at')} at column {error.colno}", "one complete JSON object per line"
        ) from None
    except ValueError as error:
        raise user_error(key, f"{where}: not valid JSON: {json_problem(error)}") from None


def segments(stream: io.TextIOBase, size: int) -> Iterator[str]:
    """A text in parts of about `size` characters, cut only after a newline that a non-blank character follows; blank text: nothing.

    Tokenizers split there anyway, so the parts' tokens are the tokens of the whole (which the caller has checked for its tokenizer).
    """
    buffer = ""
    blank = True
    while True:
        chunk = stream.read(size)
        buffer += chunk
        if not chunk:
            break
        end = len(buffer) - 1
        while (cut := buffer.rfind("\n", 0, end)) >= 0 and buffer[cut + 1].isspace():
            end = cut
        if cut >= 0 and (not blank or buffer[: cut + 1].strip()):
            blank = False
            yield buffer[: cut + 1]
            buffer = buffer[cut + 1 :]
    if buffer and not (blank and not buffer.strip()):
        yield buffer


def locate_bad_byte(path: Path, encoding: str) -> tuple[int, int, int]:
    """(offset, line counted from 1, value) of the first byte of a file that cannot be decoded."""
    decoder = codecs.getincrementaldecoder(encoding)()
    offset, line = 0, 1
    with open_bytes(path) as file:
        while True:
            chunk = file.read(1 << 16)
            state = decoder.getstate()
            pending = state[0]
            try:
                line += decoder.decode(chunk, final=not chunk).count("\n")
            except UnicodeDecodeError as error:
                data = pending + chunk
                before = data[: error.start]
                return offset - len(pending) + error.start, line + before.count(b"\n"), data[error.start]
            offset += len(chunk)
            if not chunk:
                raise ValueError(f"{path} can be decoded as {encoding}")
