"""A second process beside each rank's, which has imported everything and waits: what the rank becomes when it must be started again.

    a process beside each rank's imports everything and waits, for a new start after an out-of-memory (--oom_standby off: none)

Imports are ten seconds and more of a new start. The guard starts the process where the training process asks for it (`--oom_standby`), and
hands it what a new training process gets: environment and open files. It takes no GPU memory, because it does not touch CUDA before its
turn, and some 0.8 GiB of the host's; where those run out the kernel ends it before anything else. Where there is none, or it has ended, or
is not ready yet, a new start begins with a new process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from harness import guard_line, whereabouts

VARIABLE = "HARNESS_STANDBY"
END_S = 2.0
# Of a process that is ready, in ps and top.
NAME = "harness-standby"
_FIRST_TO_GO = "1000"  # of the kernel's choice when memory runs out
_READY = b"ready"

# True in a process that would have waited, had it been started for that: only such a one may ask for one that waits.
is_able = False


def _begin(parent: int) -> None:
    """Between fork and exec. A Ctrl-C reaches every process of a terminal: the guard too, which ends this one."""
    guard_line.die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class Standby:
    """The guard's side: one waiting process.

    Args:
        command: of the training process.
        environment: what is added to this process's own.
    """

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.line: socket.socket | None = None
        parent = os.getpid()
        # No memory, no process number, no descriptor: a new start does without.
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            self.line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self.process = subprocess.Popen(
                    command,
                    env={**os.environ, **environment, VARIABLE: str(theirs.fileno())},
                    pass_fds=(theirs.fileno(),),
                    preexec_fn=lambda: _begin(parent),
                )

    def has_ended(self) -> bool:
        return self.process is None or self.process.poll() is not None

    def _is_ready(self) -> bool:
        assert self.line is not None
        try:
            return self.line.recv(len(_READY), socket.MSG_DONTWAIT) == _READY
        except OSError:
            return False

    def take(self, environment: dict[str, str], descriptors: Sequence[int]) -> subprocess.Popen[bytes] | None:
        """Makes it the training process; None where it is not there any more or not ready: then it is ended.

        Args:
            environment: what is added to its own.
            descriptors: files that are to be open in it, whose numbers in `environment` become those that they have there.
        """
        process, line = self.process, self.line
        if process is None or line is None or self.has_ended() or not self._is_ready():
            self.end()
            return None
        packet = json.dumps({"environment": environment, "descriptors": list(descriptors)}).encode()
        try:
            socket.send_fds(line, [packet], list(descriptors))
        except OSError:
            self.end()
            return None
        line.close()
        return process

    def end(self) -> None:
        if self.line is not None:
            self.line.close()
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # it sits in a read from a disk that does not answer
                self.process.wait(END_S)


def wait_for_turn(prepare: Callable[[], object]) -> None:
    """In the process that waits, before anything else: returns when it is the training process. In any other process does nothing.

    Args:
        prepare: imports what the training process will need, and must not touch a GPU. What it prints is dropped; what it raises is not
            said, because the training process will come upon it by itself.
    """
    global is_able
    is_able = True
    number = os.environ.pop(VARIABLE, None)
    if number is None:
        return
    line = socket.socket(fileno=int(number))
    with _changed("/proc/self/oom_score_adj", _FIRST_TO_GO):
        with _silence(), contextlib.suppress(Exception):
            prepare()
        packet, descriptors = b"", list[int]()
        with contextlib.suppress(OSError):
            line.send(_READY)
            with _changed("/proc/self/comm", NAME):
                packet, descriptors, _, _ = socket.recv_fds(line, guard_line.MAX_PACKET_BYTES, 253)
        line.close()
        if not packet:  # the guard needs none any more
            os._exit(0)
        message = json.loads(packet)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.update(_renumber(message["environment"], dict(zip(message["descriptors"], descriptors, strict=True))))


def _renumber(environment: dict[str, str], numbers: Mapping[int, int]) -> dict[str, str]:
    """What a guard adds to a training process's environment, for a process in which its files have other numbers.

    Args:
        numbers: by the number in `environment`.
    """
    renumbered = dict(environment)
    for name in (guard_line.LINE_VARIABLE, whereabouts.VARIABLE):
        renumbered[name] = str(numbers[int(environment[name])])
    held = {name: numbers[number] for name, number in json.loads(environment[guard_line.HELD_VARIABLE]).items()}
    return renumbered | {guard_line.HELD_VARIABLE: json.dumps(held)}


@contextlib.contextmanager
def _changed(path: str, value: str) -> Iterator[None]:
    """What the kernel keeps of this process is another while the block runs, where it may be set."""
    file, old = Path(path), ""
    with contextlib.suppress(OSError):
        old = file.read_text().rstrip("\n")
        file.write_text(value)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.write_text(old)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Everything that goes to stdout and stderr meanwhile is dropped, also what libraries write themselves."""
    kept = [os.dup(1), os.dup(2)]
    with open(os.devnull, "w") as nowhere:
        for stream in (1, 2):
            os.dup2(nowhere.fileno(), stream)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for stream, old in zip((1, 2), kept, strict=True):
            os.dup2(old, stream)
            os.close(old)
