"""The light parent of each rank: starts the training process, hands signals on, and sees that nothing outlives its launcher.

`run_clm.py` becomes a guard when it is started, and the guard starts it again as its child. A guard imports no torch and needs about
15 MB. What it is for:

- a launcher that dies (the deepspeed runner leaves its ranks behind when it is killed) ends the run with a save, not with orphans;
- a guard that dies takes its child with it;
- the child's exit code and signal reach the launcher unchanged.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Protocol

CHILD_VARIABLE = "HARNESS_CHILD"
NO_GUARD_VARIABLE = "HARNESS_NO_GUARD"
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
POLL_S = 0.5
# A launcher that is gone is a request to stop; after this long the child is killed.
ORPHAN_GRACE_S = 30.0
_LAUNCHER_PROGRAMS = {"torchrun", "deepspeed", "accelerate", "accelerate-launch"}
_LAUNCHER_MODULES = {
    "torch.distributed.run",
    "torch.distributed.launch",
    "deepspeed.launcher.runner",
    "deepspeed.launcher.launch",
    "accelerate.commands.launch",
}
_PR_SET_PDEATHSIG = 1


def needs_guard() -> bool:
    """True in the process that a launcher or user started; False in the training process."""
    return os.environ.get(CHILD_VARIABLE) != str(os.getppid()) and not os.environ.get(NO_GUARD_VARIABLE) and sys.platform == "linux"


def parent_of(pid: int) -> tuple[int, str] | None:
    """(parent's pid, start time of `pid`) from /proc; the start time tells a process from a later one with its number."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[1]), fields[19]) if fields[0] != "Z" else None


def is_launcher(arguments: list[str]) -> bool:
    """Does this command line start ranks?"""
    names = {Path(argument).name for argument in arguments[:3]}
    modules = {following for option, following in itertools.pairwise(arguments) if option == "-m"}
    own = any(argument.endswith("launch/run.py") for argument in arguments[:3])
    return bool(names & _LAUNCHER_PROGRAMS) or bool(modules & _LAUNCHER_MODULES) or own


def launchers_above(pid: int) -> list[tuple[int, str]]:
    """(pid, start time) of the launchers between `pid` and the shell or scheduler that started them."""
    found: list[tuple[int, str]] = []
    entry = parent_of(pid)
    while entry is not None and entry[0] > 1:
        ancestor = entry[0]
        try:
            arguments = Path(f"/proc/{ancestor}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
        except OSError:
            break
        entry = parent_of(ancestor)
        if entry is None or not is_launcher(arguments):
            break
        found.append((ancestor, entry[1]))
    return found


def is_alive(pid: int, started: str) -> bool:
    entry = parent_of(pid)
    return entry is not None and entry[1] == started


def die_with_parent(parent: int) -> None:
    """In the child: SIGKILL when the parent ends. Run between fork and exec."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


class Child(Protocol):
    """The training process, as subprocess.Popen shows it."""

    returncode: int | None

    def poll(self) -> int | None: ...

    def send_signal(self, sig: int, /) -> None: ...


class Guard:
    """Runs one training process."""

    def __init__(self, command: list[str]) -> None:
        self.command = command
        self.launchers = launchers_above(os.getpid())
        self.kill_at_s: float | None = None
        self.child: Child | None = None
        self.read_end, write_end = os.pipe()
        for end in (self.read_end, write_end):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(write_end)
        for number in (*FORWARDED, signal.SIGCHLD):
            # Under nohup a closed terminal is no reason to stop.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda *_: None)

    def run(self) -> int:
        """Starts the child and stays until it ends. Returns its exit code; dies of the child's signal if that killed it."""
        self.child = self.start_child()
        selector = selectors.DefaultSelector()
        selector.register(self.read_end, selectors.EVENT_READ)
        while self.child.poll() is None:
            if selector.select(timeout=POLL_S):
                with contextlib.suppress(BlockingIOError):
                    for number in os.read(self.read_end, 64):
                        if number in FORWARDED:
                            self._send(signal.Signals(number))
            self._watch_launchers()
        assert self.child.returncode is not None
        return self._leave(self.child.returncode)

    def start_child(self) -> Child:
        parent = os.getpid()
        environment = {**os.environ, CHILD_VARIABLE: str(parent)}
        return subprocess.Popen(self.command, env=environment, preexec_fn=lambda: die_with_parent(parent))

    def _send(self, number: signal.Signals) -> None:
        assert self.child is not None
        if self.child.poll() is None:
            self.child.send_signal(number)

    def _watch_launchers(self) -> None:
        if self.kill_at_s is None:
            if all(is_alive(pid, started) for pid, started in self.launchers):
                return
            print("the launcher is gone: stopping after a save", file=sys.stderr, flush=True)
            self._send(signal.SIGTERM)
            self.kill_at_s = time.monotonic() + ORPHAN_GRACE_S
        elif time.monotonic() > self.kill_at_s:
            self._send(signal.SIGKILL)

    def _leave(self, code: int) -> int:
        if code >= 0:
            return code
        with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler to take back
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        time.sleep(1)  # a signal whose default action is not to end a process
        return 128 - code


def main() -> int:
    """Runs this very command again as a child under a guard."""
    return Guard([sys.executable, *sys.orig_argv[1:]]).run()
