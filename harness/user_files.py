"""Files that a user hands us, as text, JSON or YAML: whatever is in them, the outcome is a value or one kind of error.

The libraries have several: besides their own, a number of more than 4300 digits is a ValueError, brackets within brackets are a
RecursionError, and PyYAML's constructors let through what Python says about a date like 2001-99-99.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from harness.findings import user_error

# Values of a YAML file with all aliases written out; more is no file that a person wrote, and would fill the memory.
MAX_YAML_VALUES = 100_000


# Of a file of settings, and of a log or a table of metrics: far above any that there is, far below a machine's memory.
MAX_TEXT_BYTES = 256 * 2**20
MAX_LOG_BYTES = 8 * 2**30
# Brackets within brackets: no file that a person or a program wrote has as many, and readers take time or stack for each.
MAX_NESTING = 200
_MAX_NAME_BYTES, _MAX_PATH_BYTES = 255, 4095  # of Linux's file systems
_JSON_MARKS = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[\]{}]', re.DOTALL)
_YAML_MARKS = re.compile(r"[\[\]{}]")  # wherever they stand: a quote in a comment or within a word opens no text
_OWN_PIPES = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")  # `<(...)` and `|` of a shell: the user's own writer is there


def file_name(text: str) -> str:
    """The name of a file or folder on a command line: an empty one, as of a variable that is not set, would mean the folder one is in.

    Raises:
        argparse.ArgumentTypeError: it is empty.
    """
    if not text:
        raise argparse.ArgumentTypeError("the name is empty")
    return text


def named_path(text: str) -> Path:
    """As `file_name`, as a path."""
    return Path(file_name(text))


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Within, an output is written under the name that is yielded; whole, it takes the place of `path`, and goes where anything fails.

    What cannot be replaced (a device, a pipe, a file in a folder that may not be written) is written to as it is.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not (target.is_file() and os.access(target.parent, os.W_OK)):
        yield target
        return
    temporary = target.with_name(f".tmp-{os.getpid()}-{target.name[-60:]}")
    try:
        yield temporary
        if target.exists():
            shutil.copymode(target, temporary)
        os.replace(temporary, target)
    except OSError as error:
        if error.filename == str(temporary):
            error.filename = str(path)
        raise
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def path_problem(path: str) -> str | None:
    """Why no file of Linux can have this path; None where one can."""
    if "\0" in path:
        return "holds a null character"
    if any(len(os.fsencode(part)) > _MAX_NAME_BYTES for part in path.split("/")):
        return f"is too long: a name in it has more than {_MAX_NAME_BYTES} bytes"
    if len(os.fsencode(os.path.abspath(path))) > _MAX_PATH_BYTES:
        return f"is too long: more than {_MAX_PATH_BYTES} bytes"
    return None


def open_regular(path: str | Path) -> BinaryIO:
    """Opens a file to be read, if it is an ordinary one: a named pipe without a writer would block for ever, a device may have no end.

    Raises:
        OSError: it cannot be opened, or is a pipe, a device or a folder.
    """
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode) and not (stat.S_ISFIFO(mode) and str(path).startswith(_OWN_PIPES)):
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return open(path, "rb")


def read_bytes(path: str | Path, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """All of an ordinary file.

    Raises:
        OSError: as `open_regular`; larger than `max_bytes`.
    """
    with open_regular(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"has more than {max_bytes} bytes", str(path))
    return content


def read_text(path: str | Path, encoding: str = "utf-8", errors: str = "strict", max_bytes: int = MAX_TEXT_BYTES) -> str:
    """All of an ordinary file as text, with its line ends as they are.

    Raises:
        OSError: as `read_bytes`.
        UnicodeDecodeError: not of this encoding.
    """
    return read_bytes(path, max_bytes).decode(encoding, errors)


def instead_of(path: str | Path) -> str | None:
    """ "did you mean ...?" for a path that does not exist, where something of a similar name is in its folder."""
    missing = Path(path).expanduser()
    with contextlib.suppress(OSError, ValueError):
        names = sorted(each.name for each in missing.parent.iterdir())
        if close := difflib.get_close_matches(missing.name, names, n=1, cutoff=0.75):
            return f"did you mean {Path(path).parent / close[0]}?"
    return None


def read_user_text(path: str | Path, key: str, fix: str = "give the path of an existing file") -> str:
    """A text file in UTF-8, with or without a byte order mark.

    Raises:
        UserError: not there, not readable, no regular file, too large, or not UTF-8.
    """
    try:
        return read_text(path, encoding="utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except OSError as error:
        fix = "give the path of a regular file" if error.errno in (errno.EINVAL, errno.EISDIR, errno.EFBIG) else fix
        raise user_error(key, f"cannot read {path}: {error.strerror}", fix) from None
    except UnicodeDecodeError as error:
        raise user_error(key, f"{path} is not UTF-8 (byte {error.start})", "save it as UTF-8") from None
    except ValueError as error:  # a null character in the name
        raise user_error(key, f"cannot read {str(path)!r}: {error}", fix) from None


def _nested_too_deeply(text: str, marks: re.Pattern[str]) -> bool:
    """Whether more than `MAX_NESTING` brackets are open somewhere."""
    if text.count("[") + text.count("{") <= MAX_NESTING:
        return False
    depth = 0
    for match in marks.finditer(text):
        mark = match[0]
        depth = depth + 1 if mark in "[{" else max(0, depth - 1) if mark in "]}" else depth
        if depth > MAX_NESTING:
            return True
    return False


# Keys that only one kind of file has, and the flag that takes this kind.
_KINDS: dict[str, tuple[str, frozenset[str]]] = {
    "--config_file": ("an accelerate YAML", frozenset(["distributed_type", "compute_environment"])),
    "--deepspeed": ("a DeepSpeed JSON", frozenset(["zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"])),
    "--config": ("a file with a run's arguments", frozenset(["output_dir", "model_name_or_path"])),
}


def refuse_other_kind(values: Mapping[str, Any], key: str, path: str | Path) -> None:
    """Refuses settings that were given to the wrong one of `--config`, `--config_file` and `--deepspeed`, where their keys show it.

    Raises:
        UserError: one finding, instead of one for each key that the right reader would know.
    """
    if _KINDS[key][1] & set(values):
        return
    for flag, (what, marks) in _KINDS.items():
        if flag != key and marks & set(values):
            raise user_error(key, f"{path} is {what}, not {_KINDS[key][0]}", f"{flag} {path}")


def parse_json(text: str, **options: Any) -> Any:
    """`json.loads`, whose every failure is a ValueError.

    Raises:
        ValueError: of json's own kind where it says a place.
    """
    if _nested_too_deeply(text, _JSON_MARKS):
        raise ValueError("nested too deeply")
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def json_problem(error: ValueError) -> str:
    """What `parse_json` found wrong, with the place where it is known."""
    if isinstance(error, json.JSONDecodeError):
        return f"line {error.lineno} column {error.colno}: {error.msg}"
    return str(error).split(";")[0]


def parse_yaml(text: str) -> Any:
    """`yaml.safe_load`, whose every failure is a ValueError that says the line where it is known.

    Raises:
        ValueError: not YAML, a value that is none of its kind, or aliases that stand for too much.
    """
    if _nested_too_deeply(text, _YAML_MARKS):  # PyYAML takes time that grows with the square of the depth
        raise ValueError("nested too deeply")
    import yaml  # not above: the launcher reads host files by this module before anything is installed

    try:
        problem = _stands_twice(yaml.compose(text, yaml.SafeLoader))
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        raise ValueError(f"{where}{getattr(error, 'problem', None) or str(error).splitlines()[0]}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except (ValueError, AttributeError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"a value is not of its kind: {str(error).splitlines()[0] if str(error) else type(error).__name__}") from None
    if problem is not None:
        raise ValueError(problem)
    if _num_values(values, {}) > MAX_YAML_VALUES:
        raise ValueError("its aliases stand for too many values, or for themselves")
    return values


def _stands_twice(root: Any) -> str | None:
    """The first key that stands twice in one mapping of a YAML tree, of which PyYAML takes the last; None where there is none."""
    left, seen = [root], set()
    while left:
        node = left.pop()
        if id(node) in seen or node is None or isinstance(node.value, str):
            continue
        seen.add(id(node))
        lines: dict[tuple[str, str], int] = {}
        for entry in node.value:
            key, *children = entry if isinstance(entry, tuple) else (None, entry)
            left += children
            if key is None or not isinstance(key.value, str) or key.tag == "tag:yaml.org,2002:merge":
                continue
            line, name = key.start_mark.line + 1, (key.tag, key.value)
            if name in lines:
                return f"line {line}: {key.value} stands here and on line {lines[name]}"
            lines[name] = line
    return None


def _num_values(node: Any, known: dict[int, int]) -> int:
    """Values in a tree whose branches may be shared; one that contains itself has more than any limit."""
    if not isinstance(node, (dict, list)):
        return 1
    if id(node) not in known:
        known[id(node)] = MAX_YAML_VALUES + 1  # until it is counted: met again inside itself
        children = [*node, *node.values()] if isinstance(node, dict) else node
        known[id(node)] = min(MAX_YAML_VALUES + 1, 1 + sum(_num_values(child, known) for child in children))
    return known[id(node)]
