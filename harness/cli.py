"""The `harness` console command: sub-commands only, each also `python -m harness.<module>`."""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from importlib import metadata, util
from typing import TextIO

from harness import disk_room
from harness.findings import Finding, UserError, format_findings, printable

# name -> (module, what it does). A module's `main(argv) -> int` is all that is needed.
COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("run_clm", "train a causal language model"),
    "tokenize": ("data", "tokenise a dataset before a run"),
    "plan": ("planner", "predict memory and speed of a run, without a GPU"),
    "check": ("check_config", "check templates, arguments and machine against each other"),
    "doctor": ("readiness", "check GPUs, driver, links, disk and memory of this machine"),
    "monitor": ("monitor", "watch the GPUs, tokens per second and MFU"),
    "logs": ("parse_log", "turn logs into tables, CSV and plots"),
    "layers": ("hidden_states", "write the outputs of every layer of a model"),
    "export": ("checkpoint", "turn a checkpoint into safetensors"),
    "run": ("runner", "run another training script under the memory ladder"),
}


def available() -> dict[str, tuple[str, str]]:
    """The commands whose module is there."""
    return {name: entry for name, entry in COMMANDS.items() if util.find_spec(f"harness.{entry[0]}") is not None}


def usage() -> str:
    """The text of `harness --help`."""
    lines = [f"  {name:<10}{text}" for name, (_, text) in available().items()]
    head = ["usage: harness COMMAND [arguments]", "       harness COMMAND --help", "       harness --version", ""]
    return "\n".join([*head, *lines])


def version() -> str:
    """The installed version, or that of a clone which is not installed."""
    try:
        return metadata.version("harness")
    except metadata.PackageNotFoundError:
        return "0 (not installed)"


# As a shell calls a program that ended because nobody reads what it writes: the output is not whole, but nothing is wrong.
BROKEN_PIPE = 128 + signal.SIGPIPE
# Of a path that the user named: it cannot be what it should be, or may not be used.
_OF_PATHS = (errno.EACCES, errno.EPERM, errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one sub-command.

    Returns:
        Its exit code: 0 done, 1 failed or found errors, 2 wrong input, 141 where the reader of its output has gone.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["train"]:  # has exit codes of its own, and says itself why it ended
        return _dispatch(argv)
    try:
        try:
            return _dispatch(argv)
        finally:  # also of --help; what is left for the interpreter's end could not be said in one line
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        _disconnect(sys.stdout)
        return BROKEN_PIPE
    except OSError as error:
        return _failed(error, argv)
    except Exception as error:
        if not disk_room.is_full(error):  # safetensors' is no OSError
            raise
        return _failed(OSError(errno.ENOSPC, str(error).splitlines()[0]), argv)
    finally:
        try:
            if sys.stderr is not None:
                sys.stderr.flush()
        except OSError:  # nobody is left to tell
            _disconnect(sys.stderr)


def _dispatch(argv: Sequence[str]) -> int:
    if not argv:
        print(usage(), file=sys.stderr)
        return 2
    name, rest = argv[0], list(argv[1:])
    if name in ("-h", "--help", "help"):
        print(usage())
        return 0
    if name in ("-V", "--version"):
        print(f"harness {version()}")
        return 0
    commands = available()
    if name not in commands:
        close = difflib.get_close_matches(name, commands, n=1)
        print(
            printable(f"harness: unknown command {name}: ") + (f"did you mean {close[0]}?" if close else "see harness --help"),
            file=sys.stderr,
        )
        return 2
    module = importlib.import_module(f"harness.{commands[name][0]}")
    try:
        return int(module.main(rest) or 0)
    except UserError as error:
        print(format_findings(error.findings), file=sys.stderr)
        return 2


def _failed(error: OSError, argv: Sequence[str]) -> int:
    """Says in one line what could not be read or written. Returns 2 where it is a path that the user named, 1 for every other failure."""
    message, code = error.strerror or str(error) or type(error).__name__, 1
    if error.filename is not None:
        key, fix = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else str(error.filename), ""
        if disk_room.is_full(error):
            fix = disk_room.MAKE_ROOM
        elif error.errno in _OF_PATHS:
            denied = error.errno in (errno.EACCES, errno.EPERM)
            fix = f"see ls -ld {key}: give a path that you may use" if denied else "give another path"
            code = 2 if any(_is_at(key, word) for word in argv[1:]) else 1
    elif _cannot_take(sys.stdout):
        _disconnect(sys.stdout)
        key, message, fix = "standard output", f"cannot be written: {message}", "free some space there, or write to another place"
    else:
        key, fix = " ".join(["harness", *argv[:1]]), "" if disk_room.MAKE_ROOM in message else "free some space" * disk_room.is_full(error)
    with contextlib.suppress(OSError):  # the errors may go to the same full disk
        print(format_findings([Finding("error", key, message, fix)]), file=sys.stderr)
    return code


def _is_at(path: str, word: str) -> bool:
    """Whether a path is the one that a word of the command line names, by itself or behind =, or is below it."""
    named = word.partition("=")[2] if word.startswith("-") else word
    if not named or "\0" in named:
        return False
    folder = os.path.abspath(os.path.expanduser(named))
    return os.path.abspath(path) == folder or os.path.abspath(path).startswith(folder.rstrip("/") + "/")


def _cannot_take(stream: TextIO | None) -> bool:
    """Whether a stream takes no more text: asked after an error that does not say whose it was."""
    try:
        if stream is not None and not stream.isatty():
            stream.write("\n")
            stream.flush()
    except OSError:
        return True
    return False


def _disconnect(stream: TextIO | None) -> None:
    """Lets what a stream still holds go nowhere: the interpreter would fail with it once more when it ends."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        assert stream is not None
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


if __name__ == "__main__":
    sys.exit(main())
