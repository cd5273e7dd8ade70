"""What a full disk says, and what to say of it: which path, how much is free, what to do. Every writer of a run's files asks here."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT)
# As libraries put it whose errors carry no number (safetensors, torch's writers).
_FULL_TEXTS = ("No space left on device", "Disk quota exceeded", "os error 28", "os error 122")
MAKE_ROOM = "free some space there, or choose a folder on another disk"


def is_full(error: BaseException) -> bool:
    """Whether an error comes from a full disk or an exhausted quota."""
    return (isinstance(error, OSError) and error.errno in _FULL) or any(text in str(error) for text in _FULL_TEXTS)


def write_fix(error: BaseException) -> str:
    """What the user can do about a folder that could not be written."""
    return MAKE_ROOM if is_full(error) else "choose a folder you may write to"


def free_text(folder: Path) -> str:
    """ " (0.1 MiB free)" of the nearest folder above that there is; empty where nobody can say."""
    existing = next((parent for parent in (folder, *folder.absolute().parents) if parent.exists()), None)
    if existing is None:
        return ""
    try:
        return f" ({shutil.disk_usage(existing).free / 2**20:.1f} MiB free)"
    except OSError:
        return ""


@contextlib.contextmanager
def naming(path: Path, num_bytes: int | None = None) -> Iterator[None]:
    """An error of a full disk inside comes out as an OSError that names the path, what is free and what to do.

    Python's own says neither after the file is open; safetensors' is no OSError at all.

    Args:
        num_bytes: how much was to be written, where that is known.
    """
    try:
        yield
    except Exception as error:
        if not is_full(error) or MAKE_ROOM in str(error):
            raise
        number = error.errno if isinstance(error, OSError) and error.errno in _FULL else errno.ENOSPC
        needed = "" if num_bytes is None else f" of {num_bytes / 2**20:.1f} MiB"
        assert number is not None
        raise OSError(number, f"cannot write {path}{needed}: {os.strerror(number)}{free_text(path.parent)}; {MAKE_ROOM}") from None


def named(error: BaseException) -> str | None:
    """What `naming` has said of a full disk; None for every other error."""
    return error.strerror if isinstance(error, OSError) and MAKE_ROOM in (error.strerror or "") else None


@contextlib.contextmanager
def unfinished(temporary: Path, final: Path, num_bytes: int | None = None) -> Iterator[None]:
    """`naming` for a folder that is filled under another name before it gets its own: whatever fails inside takes it away."""
    try:
        with naming(final, num_bytes):
            yield
    except Exception:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def fill_probe(path: Path) -> None:
    """Writes a block into a new file and removes it again: an empty file can be made on a full disk too.

    Raises:
        OSError: it cannot be written; the file is gone all the same.
    """
    try:
        with open(path, "wb") as file:
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
