"""Starts a launcher so that nothing of it is left behind, whatever happens. Standard library only.

torchrun puts every rank into a session of its own, and a deepspeed runner that gets SIGTERM dies and leaves its ranks running.
So a process group is not enough: every process of the job carries a mark in its environment, and is found by it in /proc.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

MARK = "HARNESS_LAUNCH_ID"
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_NOTE_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_PDEATHSIG = 1
WATCH_S = 0.5
# Ranks that wait for one that is gone have nothing to save.
LOST_GRACE_S = 2.0


def open_standard_files() -> None:
    """Where whoever started this process has closed its input, output or errors (`>&-`), they go nowhere: else what is opened next would
    get their numbers, and everything that prints would fail.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            os.set_inheritable(number, True)
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115 - lives as long as the process


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a launcher ended.

    Attributes:
        code: its exit code as a shell gives it (128 + signal where one killed it).
        stopped_by: the first signal that asked us to stop, if any.
        num_killed: processes that had to be killed because they did not stop by themselves.
    """

    code: int
    stopped_by: int | None = None
    num_killed: int = 0


def environment_of(pid: int) -> dict[str, str]:
    """The environment a process was started with; empty where it is gone, a zombie, or another user's."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    return dict(item.decode("utf-8", "replace").split("=", 1) for item in raw.split(b"\0") if b"=" in item)


def _all_pids() -> Iterator[int]:
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            yield int(entry)


def processes_with(variable: str, value: str) -> list[int]:
    """Living processes that were started with `variable=value`, without this one."""
    needle = f"{variable}={value}".encode()
    found: list[int] = []
    for pid in _all_pids():
        try:
            raw = Path(f"/proc/{pid}/environ").read_bytes()
            if needle not in raw.split(b"\0") or pid == os.getpid():
                continue
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state not in "ZX":
            found.append(pid)
    return sorted(found)


def _parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def ranks_of(mark: str) -> list[int]:
    """The processes of a job that its launcher started as ranks (not the launcher, nor what the ranks started)."""
    job = {pid: environment_of(pid) for pid in processes_with(MARK, mark)}
    ranks = {pid for pid, environ in job.items() if "LOCAL_RANK" in environ}
    if not ranks:  # one plain process: the topmost one
        ranks = set(job)
    return sorted(pid for pid in ranks if _parent_of(pid) not in ranks)


def send(pids: Sequence[int], signum: int) -> None:
    """Signals each process that still lives."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)


def end_processes(mark: str, polite_s: float, grace_s: float) -> int:
    """Waits until no process of the job is left: `polite_s` without a signal, `grace_s` after SIGTERM, then SIGKILL.

    Returns:
        How many had to be killed.
    """
    for signum, wait_s in ((None, polite_s), (signal.SIGTERM, grace_s)):
        if signum is not None:
            send(processes_with(MARK, mark), signum)
        deadline = time.monotonic() + wait_s
        while processes_with(MARK, mark):
            if time.monotonic() >= deadline:
                break
            time.sleep(0.1)
        else:
            return 0
    killed: set[int] = set()
    deadline = time.monotonic() + 10  # a process that forks while it is being killed needs another round
    while (left := processes_with(MARK, mark)) and time.monotonic() < deadline:
        killed |= set(left)
        send(left, signal.SIGKILL)
        time.sleep(0.05)
    return len(killed)


class Job:
    """A launcher and all processes under it.

    - An interrupt or SIGTERM goes on to the launcher's process group, once; what still lives `grace_s` later is killed. A second
      interrupt kills at once. SIGHUP (a closed terminal) goes on as SIGTERM, which training understands as "save and stop".
    - SIGUSR1 and SIGUSR2 go to the ranks only: torchrun dies of them. The launchers are started with them ignored.
    - When the launcher has ended, whatever of the job still runs is ended too.
    - When `is_lost` says that nothing of it can go on, all of it is ended within seconds.

    Args:
        is_lost: asked every `WATCH_S` seconds while the launcher runs.
    """

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        grace_s: float = 35.0,
        is_lost: Callable[[], bool] = lambda: False,
    ) -> None:
        self.command = list(command)
        self.mark = uuid.uuid4().hex
        self.environ = {**environ, MARK: self.mark}
        self.grace_s, self.is_lost = grace_s, is_lost
        self.stopped_by: int | None = None
        self._pending: list[int] = []
        self._killed: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, **popen: Any) -> Ended:
        """Runs the job to its end. Only in the main thread (it handles signals).

        Raises:
            OSError: the launcher cannot be started.
        """
        before = {signum: signal.getsignal(signum) for signum in (*_STOP_SIGNALS, *_NOTE_SIGNALS, signal.SIGALRM)}
        for signum in _STOP_SIGNALS:
            if before[signum] is not signal.SIG_IGN:  # nohup, and background jobs of a script, stay deaf
                signal.signal(signum, self._on_stop)
        for signum in _NOTE_SIGNALS:
            signal.signal(signum, signal.SIG_IGN)  # the launcher inherits this
        signal.signal(signal.SIGALRM, self._on_alarm)
        try:
            self._process = subprocess.Popen(self.command, env=self.environ, start_new_session=True, preexec_fn=_die_with_parent(), **popen)
            for signum in _NOTE_SIGNALS:
                signal.signal(signum, lambda signum, _frame: send(ranks_of(self.mark), signum))
            for early in self._pending:
                self._stop(early)
            code, lost = self._wait(self._process)
            signal.alarm(0)
            if lost:
                num_killed = end_processes(self.mark, polite_s=0.0, grace_s=LOST_GRACE_S)
                code = self._process.wait()
            elif self.stopped_by is None:
                num_killed = end_processes(self.mark, polite_s=5.0, grace_s=self.grace_s)
            else:
                num_killed = end_processes(self.mark, polite_s=self.grace_s, grace_s=0.0)
        finally:
            signal.alarm(0)
            for signum, handler in before.items():
                signal.signal(signum, handler)
        return Ended(code if code >= 0 else 128 - code, self.stopped_by, num_killed + len(self._killed))

    def _wait(self, process: subprocess.Popen[bytes]) -> tuple[int, bool]:
        """(exit code, whether the job is lost): at the launcher's end, or as soon as it is lost; then the code is 0."""
        while True:
            code = None
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(WATCH_S)
            lost = self.stopped_by is None and self.is_lost()
            if lost or code is not None:
                return code or 0, lost

    def _on_stop(self, signum: int, _frame: FrameType | None) -> None:
        if self._process is None:
            self._pending.append(signum)
        else:
            self._stop(signum)

    def _stop(self, signum: int) -> None:
        assert self._process is not None
        if self.stopped_by is not None:
            if signum == signal.SIGINT:
                self._kill()
            return
        self.stopped_by = signum
        name = signal.Signals(signum).name
        print(f"launch: {name}: stopping (at most {self.grace_s:.0f} s; interrupt again to kill)", file=sys.stderr, flush=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM if signum == signal.SIGHUP else signum)
        signal.alarm(max(1, round(self.grace_s)))

    def _on_alarm(self, _signum: int, _frame: FrameType | None) -> None:
        self._kill()

    def _kill(self) -> None:
        left = processes_with(MARK, self.mark)
        self._killed |= set(left)
        send(left, signal.SIGKILL)


def _die_with_parent() -> Any:
    """A function that asks Linux to end the launcher when we are killed; loaded now, since a child may not import after fork."""
    try:
        prctl = ctypes.CDLL(None).prctl
    except (OSError, AttributeError):
        return None
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
