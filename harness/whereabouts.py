"""Where a rank is: what it waits for, and the Python stacks of its threads, also of a rank that hangs, was stopped, or has crashed.

The guard makes a memory file and leaves it open in the training process. Its first page is shared memory: there the training process writes
what it waits for, and the guard why it asked for a stop. Behind it Python's faulthandler writes the stacks of all threads, when the guard
sends `STACK_SIGNAL` and when the process crashes. None of it needs the process to be able to run Python: a thread may sit in a collective,
in a GPU wait, or hold the interpreter's lock.

Imports no torch and nothing of ours, because guards stay light.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import mmap
import os
import re
import signal
import struct
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

VARIABLE = "HARNESS_WHEREABOUTS"
# One that nothing else uses: launchers, batch systems, NCCL and debuggers take the named ones.
STACK_SIGNAL = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else None
_PAGE = 4096
_MARK = struct.Struct("<q?dh")  # number of the wait, still waiting, since when (monotonic clock), length of its name
_NOTE_AT, _LENGTH = 2048, struct.Struct("<h")
_MAX_NAME_BYTES = 512
_MAX_STACK_BYTES = 1 << 20
MAX_NAMED = 4

# The letter of /proc/<pid>/stat, where it explains something.
_STATES = {
    "D": "waits for a disk or a network file system",
    "T": "is stopped by a signal such as SIGSTOP",
    "t": "is held by a debugger",
    "Z": "has ended",
    "": "has ended",
}


class _Page:
    """The shared page of a memory file."""

    def __init__(self, descriptor: int) -> None:
        self.memory = mmap.mmap(descriptor, _PAGE)

    def mark(self, number: int, is_waiting: bool, name: str) -> None:
        text = name.encode()[:_MAX_NAME_BYTES]
        self.memory[: _MARK.size + len(text)] = _MARK.pack(number, is_waiting, time.monotonic(), len(text)) + text

    def marked(self) -> tuple[int, bool, float, str]:
        """(number, still waiting, for how many seconds, name) of the last wait; number 0 before the first."""
        number, is_waiting, since_s, length = _MARK.unpack_from(self.memory, 0)
        text = self.memory[_MARK.size : _MARK.size + max(0, min(length, _MAX_NAME_BYTES))]
        return number, is_waiting, time.monotonic() - since_s, text.decode("utf-8", "replace")

    def note(self, text: str) -> None:
        data = text.encode()[:_MAX_NAME_BYTES]
        self.memory[_NOTE_AT : _NOTE_AT + _LENGTH.size + len(data)] = _LENGTH.pack(len(data)) + data

    def noted(self) -> str:
        (length,) = _LENGTH.unpack_from(self.memory, _NOTE_AT)
        start = _NOTE_AT + _LENGTH.size
        return self.memory[start : start + length].decode("utf-8", "replace")


# ---- in the training process


@functools.cache
def _own_page() -> _Page | None:
    with contextlib.suppress(OSError, ValueError, KeyError):
        return _Page(int(os.environ[VARIABLE]))
    return None


def begin() -> None:
    """From here on the guard can ask where this process is, and a crash leaves the stacks of all threads; without a guard, nothing."""
    if _own_page() is None or STACK_SIGNAL is None:
        return
    descriptor = int(os.environ[VARIABLE])
    os.lseek(descriptor, 0, os.SEEK_END)
    faulthandler.enable(file=descriptor, all_threads=True)
    faulthandler.register(STACK_SIGNAL, file=descriptor, all_threads=True, chain=False)
    os.register_at_fork(after_in_child=_end)


def _end() -> None:
    """Undoes `begin`: a worker that is forked from this process must not write its crash into this one's file."""
    faulthandler.disable()
    if STACK_SIGNAL is not None:
        faulthandler.unregister(STACK_SIGNAL)


_num_waits = 0


@contextlib.contextmanager
def waiting(name: str, *, counted: bool = True) -> Iterator[None]:
    """What runs inside waits for other ranks: costs two writes to shared memory. Where it fails, it counts as still waiting.

    Args:
        counted: all ranks come to this wait, in the same order, so that its number tells who has arrived. False for one that a rank
            enters only if the others are not there yet.
    """
    global _num_waits
    _num_waits += counted
    page = _own_page()
    if page is None:
        yield
        return
    page.mark(_num_waits, True, name)
    yield
    page.mark(_num_waits, False, name)


def note_of_guard() -> str:
    """Why the guard asked for a stop; empty where it did not."""
    page = _own_page()
    return page.noted() if page is not None else ""


# ---- in the guard


class Whereabouts:
    """The guard's end, for one life of its training process.

    Attributes:
        descriptor: of the memory file, for the training process to inherit.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("harness-whereabouts")
        os.ftruncate(self.descriptor, _PAGE)
        self.page = _Page(self.descriptor)

    def note(self, why: str) -> None:
        """Tells the training process why it is asked to stop; call it before the signal."""
        self.page.note(why)

    def stacks(self) -> str:
        """What faulthandler has written so far."""
        size = os.fstat(self.descriptor).st_size
        return os.pread(self.descriptor, min(size - _PAGE, _MAX_STACK_BYTES), _PAGE).decode("utf-8", "replace") if size > _PAGE else ""

    def look(self, pid: int, limit_s: float = 1.0) -> dict[str, Any]:
        """Where the process is, as JSON: `number`, `waiting`, `for_s` and `name` of its last wait, its `state`, and `at`, its main thread's
        place in the code, as far as they can be known.

        Args:
            limit_s: how long its stacks may take; a process that is stopped or waits for a disk is not asked for them.
        """
        state = _state(pid)
        before = len(self.stacks())
        if state not in ("T", "t", "Z", "D", "") and _handles(pid, STACK_SIGNAL):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, STACK_SIGNAL)  # type: ignore[arg-type]
                self._wait_for_stacks(before, limit_s)
        number, is_waiting, for_s, name = self.page.marked()
        found = {"number": number, "waiting": is_waiting, "for_s": round(for_s, 1), "name": name}
        if state in _STATES:
            found["state"] = _STATES[state]
        if place := place_of(self.stacks()[before:]):
            found["at"] = place
        return found

    def _wait_for_stacks(self, before: int, limit_s: float) -> None:
        """Until there are some and no more come."""
        deadline, size = time.monotonic() + limit_s, before
        while time.monotonic() < deadline:
            time.sleep(0.02)
            old, size = size, len(self.stacks())
            if size == old > before:
                return

    def close(self) -> None:
        self.page.memory.close()
        os.close(self.descriptor)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _handles(pid: int, number: int | None) -> bool:
    """Whether the process has a handler for a signal: without one it would end it."""
    if number is None:
        return False
    with contextlib.suppress(OSError, ValueError, IndexError):
        caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)
    return False


_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


def place_of(stacks: str) -> str:
    """The main thread's place in faulthandler's text: its innermost frame and, if that is a library's, ours that led there.

    Returns:
        Such as "torch/distributed/distributed_c10d.py:3045 all_reduce, from harness/coordination.py:121 sum"; empty if there is none.
    """
    threads = re.split(r"^(?=(?:Current thread|Thread) 0x)", stacks, flags=re.MULTILINE)
    threads = [thread for thread in threads if _FRAME.search(thread)]
    if not threads:
        return ""
    # The signal goes to the main thread, and is handled there; where it crashed elsewhere, the main thread is the last.
    thread = next((each for each in threads if each.startswith("Current")), threads[-1])
    shown = [f"{_short(path)}:{line} {name}" for path, line, name in _FRAME.findall(thread)]
    own = next((text for text in shown if text.startswith("harness/")), None)
    return shown[0] if own is None or own == shown[0] else f"{shown[0]}, from {own}"


def _short(path: str) -> str:
    for root in ("/site-packages/", "/dist-packages/"):
        if root in path:
            return path.rpartition(root)[2]
    _, found, tail = path.rpartition("/harness/")
    return f"harness/{tail}" if found else "/".join(Path(path).parts[-2:])


def place_of_error(error: BaseException) -> str:
    """Where an error was raised, as `place_of` shows places."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{_short(frames[-1].filename)}:{frames[-1].lineno} {frames[-1].name}" if frames else ""


# ---- for people


def describe(rank: int | str, found: Mapping[str, Any]) -> str:
    """One rank's whereabouts as part of a sentence."""
    if not found:
        return f"rank {rank} says nothing"
    parts = [found["state"]] if found.get("state") else []
    if found.get("name"):
        name, for_s = found["name"], found["for_s"]
        parts.append(f"waits for the others in '{name}' for {for_s} s" if found["waiting"] else f"left '{name}' {for_s} s ago")
    if found.get("at"):
        parts.append(f"is at {found['at']}")
    return f"rank {rank} " + (", ".join(parts) or "runs")


def late(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Ranks that the others wait for: those that cannot run or say nothing, else those that have not come to the foremost ones' wait.

    One that has asked where the others are is none of them: it waited to the limit, maybe in a collective of the engine, which is no wait
    that is known here.
    """
    others = {rank: each for rank, each in found.items() if not each.get("asked")}
    stuck = [rank for rank, each in others.items() if not each or each.get("state")]
    foremost = max(((each.get("number", 0), bool(each.get("waiting"))) for each in found.values()), default=(0, False))
    return stuck or [rank for rank, each in others.items() if (each.get("number", 0), bool(each.get("waiting"))) < foremost]


def who_hangs(found: Mapping[str, Mapping[str, Any]]) -> str:
    """The end of a sentence that names the ranks which the others wait for, and says where they are; empty where nothing was found."""
    shown = late(found) or [rank for rank, each in found.items() if not each.get("asked")] or list(found)
    more = f"; {len(shown) - MAX_NAMED} more" if len(shown) > MAX_NAMED else ""
    return "".join(f"; {describe(rank, found[rank])}" for rank in shown[:MAX_NAMED]) + more
