"""harness/run_clm.py for launchers, with the training process forked from a `tests.faults.fork_ranks.ForkServer`.

    HARNESS_TEST_SERVER=<ForkServer.address> torchrun ... tests/faults/forked_script.py <arguments of run_clm.py>

The launcher and the guard are real. The guard's child is a stand-in: it hands its arguments, folder, environment and open files to the
server, which forks the training process; signals go there, and the exit code comes back. Whoever kills the stand-in kills both.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

SERVER_VARIABLE = "HARNESS_TEST_SERVER"
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_MAX_FILES = 64
# Files wait above this number until they get the one that they had.
_ABOVE = 500


# ---- the stand-in ----


def stand_in(arguments: list[str]) -> int:
    """Returns the training process's exit code; dies of the signal that ended it."""
    files = [int(name) for name in os.listdir("/proc/self/fd")]
    files = [number for number in files if _is_handed_on(number)]
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(os.environ[SERVER_VARIABLE])
        request = {"script": arguments, "folder": os.getcwd(), "environment": dict(os.environ), "files": files}
        text = json.dumps(request).encode() + b"\n"
        sent = socket.send_fds(server, [text], files)
        server.sendall(text[sent:])
        for number in _FORWARDED:
            signal.signal(number, lambda number, _: server.send(bytes([number])))
        answer = server.makefile().readline()
    if not answer:
        return 1
    code = int(answer)
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler to take back
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def _is_handed_on(number: int) -> bool:
    try:
        return os.get_inheritable(number)
    except OSError:  # of the listing itself
        return False


# ---- the server's side ----


def listen(path: str) -> socket.socket:
    """A socket that stand-ins connect to."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen(64)
    return server


def serve(server: socket.socket, run: Callable[[list[str]], int]) -> None:
    """Takes one stand-in and forks its training process, under a process that watches both.

    Args:
        run: what the training process does with its arguments; returns its exit code.
    """
    connection, _ = server.accept()
    if os.fork():
        connection.close()
        return
    server.close()
    try:
        _watch(connection, run)
    finally:
        os._exit(1)


def _watch(connection: socket.socket, run: Callable[[list[str]], int]) -> NoReturn:
    os.setsid()
    data, received, _, _ = socket.recv_fds(connection, 1 << 20, _MAX_FILES)
    while not data.endswith(b"\n"):
        data += connection.recv(1 << 20)
    pid = os.fork()
    if pid == 0:
        _become(json.loads(data), received, run)
    ended = os.pidfd_open(pid)
    while ended not in select.select([connection, ended], [], [])[0]:
        numbers = connection.recv(64)
        for number in numbers or [signal.SIGKILL]:
            os.kill(pid, number)
        if not numbers:
            break
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):
        connection.sendall(f"{code}\n".encode())
    os._exit(0)


def _become(request: dict[str, Any], received: list[int], run: Callable[[list[str]], int]) -> NoReturn:
    from tests.faults.fork_ranks import leave_with  # whose process this is a fork of

    def become() -> int:
        waiting = [fcntl.fcntl(number, fcntl.F_DUPFD, _ABOVE) for number in received]
        for number in map(int, os.listdir("/proc/self/fd")):
            if number not in waiting:
                with contextlib.suppress(OSError):
                    os.close(number)
        for number, target in zip(waiting, request["files"], strict=True):
            os.dup2(number, target)
            os.close(number)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        return run(request["script"])

    leave_with(become)


if __name__ == "__main__":
    from harness import guard

    sys.exit(guard.main() if guard.needs_guard() else stand_in(sys.argv[1:]))
