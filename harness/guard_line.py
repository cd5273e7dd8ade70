"""The training process's line to its guard: that it must come back with other settings, and memory that is to outlive it.

One packet is one JSON object; a file descriptor may come with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from harness.relaunch_hub import RELAUNCH

LINE_VARIABLE = "HARNESS_GUARD_LINE"
HUB_VARIABLE = "HARNESS_HUB"
ATTEMPT_VARIABLE = "HARNESS_ATTEMPT"
CAUSE_VARIABLE = "HARNESS_RELAUNCH_CAUSE"
HELD_VARIABLE = "HARNESS_HELD_MEMORY"
MAX_PACKET_BYTES = 1 << 16
_PR_SET_PDEATHSIG = 1

log = logging.getLogger("harness")


def die_with_parent(parent: int) -> None:
    """In the child: SIGKILL when the parent ends. Run between fork and exec."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


@functools.cache
def _line() -> socket.socket | None:
    number = os.environ.get(LINE_VARIABLE)
    if number is None:
        return None
    with contextlib.suppress(OSError, ValueError):
        return socket.socket(fileno=int(number))
    return None


def _tell(message: dict[str, Any], descriptor: int | None = None) -> bool:
    line = _line()
    if line is None:
        return False
    try:
        socket.send_fds(line, [json.dumps(message).encode()[:MAX_PACKET_BYTES]], [] if descriptor is None else [descriptor])
    except OSError:
        return False
    return True


def can_relaunch() -> bool:
    """True where a guard would start this process again."""
    return _line() is not None


def attempt() -> int:
    """Number of this life of the process; the first is 0."""
    return int(os.environ.get(ATTEMPT_VARIABLE, "0"))


def cause() -> dict[str, Any] | None:
    """Why the life before this one ended; None in the first."""
    text = os.environ.get(CAUSE_VARIABLE)
    return json.loads(text) if text else None


def join_hub(broadcast: Callable[[Any], Any]) -> None:
    """Tells every rank's guard where the hub of the job is; called on all ranks once they can talk to each other.

    Args:
        broadcast: rank 0's value on every rank.
    """
    where = os.environ.get(HUB_VARIABLE)
    address = broadcast({**json.loads(where), "host": os.environ.get("MASTER_ADDR", "127.0.0.1")} if where else None)
    if address is not None:
        _tell({"op": "hub", **address})


def tell_folder(folder: Path, started_s: float) -> None:
    """Tells the guard where the run is written, for what this process cannot write any more: that a signal killed it.

    Args:
        started_s: wall-clock start of this job.
    """
    _tell({"op": "folder", "path": str(folder.absolute()), "started_s": started_s})


def hears_signals() -> None:
    """Tells the guard that this process handles signals now: before, one that asks to stop would only kill it."""
    _tell({"op": "hears"})


def ask_whereabouts(at: str, limit_s: float = 8.0) -> dict[str, dict[str, Any]]:
    """Where every rank of the job is, asked of all guards because this one has waited for the others for too long.

    Args:
        at: this process's own place in the code.

    Returns:
        What harness.whereabouts.Whereabouts.look finds, by rank; of a large job the ranks that say most. Empty where no guard answers.
    """
    line = _line()
    if line is None or not _tell({"op": "where", "at": at}):
        return {}
    try:
        line.settimeout(limit_s)
        return dict(json.loads(line.recv(MAX_PACKET_BYTES)))
    except (OSError, ValueError):
        return {}


def ask_for_standby() -> bool:
    """Asks the guard for a process that waits to take this one's place (harness.standby). False where no guard would."""
    return _tell({"op": "standby"})


def relaunch(cause: dict[str, Any]) -> NoReturn:
    """Ends this process so that all ranks start again.

    Args:
        cause: JSON for the next life: why.
    """
    _tell({"op": "cause", "cause": cause})
    for handler in log.handlers:
        handler.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads may sit in a GPU wait, and peers in a collective with this process: nothing is to be waited for.
    os._exit(RELAUNCH)


def hold(name: str, descriptor: int) -> bool:
    """Gives a memory file (os.memfd_create) to the guard, which hands it to the next life under this name."""
    return _tell({"op": "hold", "name": name}, descriptor)


def held() -> dict[str, int]:
    """Memory files of the life before, by name."""
    return {str(name): int(number) for name, number in json.loads(os.environ.get(HELD_VARIABLE, "{}")).items()}
