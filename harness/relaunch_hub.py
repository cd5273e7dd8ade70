"""What the guards of a job decide together when a training process has ended: start all anew, end all, or nothing to do.

Imports neither torch nor anything of ours, because guards stay light. The guard of rank 0 keeps the `Hub`; every guard reports how its
training process ended, and does what the hub rules:

- a process that ran out of memory and cannot go on (exit code `RELAUNCH`, or killed by the kernel for memory): all start again, with the
  settings one step further down;
- any other failure: all end. Its peers fail milliseconds after a process that ran out of memory, in their collectives, so a failure
  alone is judged only after `WAIT_FOR_CAUSE_S` without such a report;
- a guard was asked to stop between two lives, when its training process cannot be told: all end, as a run that was stopped;
- all have ended in order: done.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import json
import os
import secrets
import selectors
import signal
import socket
import time
from typing import Any

RELAUNCH = 86
PREEMPTED = 75
# Finished, wrong input, preempted after a save.
IN_ORDER = (0, 2, PREEMPTED)
WAIT_FOR_CAUSE_S = 5.0
MAX_RELAUNCHES = 40


@dataclasses.dataclass(frozen=True)
class Report:
    """How a rank's training process ended.

    Attributes:
        code: its exit code; minus the signal that killed it.
        cause: what it said of its lack of memory, or what the kernel did; None for other ends.
    """

    rank: int
    attempt: int
    code: int
    cause: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class Ruling:
    """What all guards do.

    Attributes:
        kind: "relaunch", "fail", "stop" or "done".
        attempt: number of the life that begins with a relaunch.
        port: rendezvous of that life, on rank 0's host.
        cause: why, for a relaunch; `rank` in it is the rank.
        why: for people, for a failure or a stop.
        is_known: `why` is what happened, and not only how processes ended because of it.
    """

    kind: str
    attempt: int
    port: int = 0
    cause: dict[str, Any] | None = None
    why: str = ""
    is_known: bool = False


class Rulings:
    """The rules, without sockets or clocks.

    Args:
        num_ranks: guards that take part.
        wait_s: how long a failure waits for the report of an out-of-memory that may have caused it.
    """

    def __init__(self, num_ranks: int, *, wait_s: float = WAIT_FOR_CAUSE_S) -> None:
        self.num_ranks, self.wait_s = num_ranks, wait_s
        self.attempt = 0
        self.ended: dict[int, Report] = {}
        self.left: set[int] = set()
        self.judge_at_s: float | None = None
        self.closed = False

    def add(self, report: Report, now_s: float) -> Ruling | None:
        """Takes a report; a ruling where it decides something."""
        if self.closed or report.attempt != self.attempt:
            return None
        self.ended[report.rank] = report
        if report.cause is not None:
            if self.left:
                return self._close("fail", f"rank {report.rank} ran out of memory when rank {min(self.left)} had already ended")
            if self.attempt >= MAX_RELAUNCHES:
                return self._close("fail", f"{MAX_RELAUNCHES} relaunches did not help")
            self.attempt += 1
            self.ended, self.judge_at_s = {}, None
            return Ruling("relaunch", self.attempt, cause={**report.cause, "rank": report.rank})
        failed = [each for each in self.ended.values() if each.code not in IN_ORDER]
        if len(self.ended) == self.num_ranks:
            return self._close("fail", _describe(failed)) if failed else self._close("done")
        if failed and self.judge_at_s is None:
            self.judge_at_s = now_s + self.wait_s
        return None

    def lost(self, rank: int, node: str = "") -> Ruling | None:
        """A guard is gone without having been told to go; one whose process has ended in order does not wait for the others for ever."""
        if self.closed:
            return None
        if rank in self.ended and self.ended[rank].code in IN_ORDER:
            self.left.add(rank)
            return None
        return self._close("fail", gone(rank, node), is_known=True)

    def stop(self, signal_name: str) -> Ruling | None:
        """A guard was asked to stop between two lives."""
        return None if self.closed else self._close("stop", stopped_between(signal_name))

    def tick(self, now_s: float) -> Ruling | None:
        """Lets time pass."""
        if self.closed or self.judge_at_s is None or now_s < self.judge_at_s:
            return None
        return self._close("fail", _describe([each for each in self.ended.values() if each.code not in IN_ORDER]))

    def _close(self, kind: str, why: str = "", *, is_known: bool = False) -> Ruling:
        self.closed = True
        return Ruling(kind, self.attempt, why=why, is_known=is_known)


def gone(rank: int, node: str = "") -> str:
    """For people: a guard that says nothing any more."""
    return f"the guard of rank {rank}{' on ' + node if node else ''} is gone: its node is down or cut off, or the guard was killed"


def stopped_between(signal_name: str) -> str:
    """For people: a stop between two lives, which nothing can be saved in."""
    return f"stopped by {signal_name} while all ranks were starting again; the same command goes on from the newest complete checkpoint"


def _describe(failed: list[Report]) -> str:
    ends = [f"rank {each.rank} ended with " + (f"exit code {each.code}" if each.code >= 0 else signal_text(-each.code)) for each in failed]
    return ", ".join(sorted(ends))


def signal_text(number: int) -> str:
    """A signal for people: "signal 9 (SIGKILL)"."""
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:  # real-time ones have no name
        return f"signal {number}"


def free_port() -> int:
    """A port of this host that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def send_line(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


class Lines:
    """Cuts what arrives on a socket into JSON lines."""

    MAX_BYTES = 1 << 20

    def __init__(self) -> None:
        self.rest = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Raises ValueError for what is not a JSON object a line."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        if len(self.rest) > self.MAX_BYTES:
            raise ValueError("a line without an end")
        messages = [json.loads(line) for line in lines if line]
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("not a JSON object")
        return messages


# After this long without a sign of life, the machine at the other end counts as gone.
SILENT_S = 30


def watch_peer(connection: socket.socket) -> None:
    """Lets a connection fail when the other machine is gone without a word (power, network): by itself TCP would never notice."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": (SILENT_S - 10) // 5, "TCP_USER_TIMEOUT": 1000 * SILENT_S}
    for name, value in options.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _listen(address: str, backlog: int) -> socket.socket:
    """A listener on a port that is not the job's own rendezvous: its launcher has chosen that one, but nobody holds it yet."""
    taken = socket.create_server((address, 0), backlog=backlog)
    if str(taken.getsockname()[1]) != os.environ.get("MASTER_PORT"):
        return taken
    other = socket.create_server((address, 0), backlog=backlog)  # while the first is held, so it is another port
    taken.close()
    return other


# What the guards may take to find out where their processes are, and for how long their answer stands.
COLLECT_S = 3.0
FRESH_S = 20.0


class RollCall:
    """Where all ranks are, asked of their guards when one has waited for too long; without sockets or clocks."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.found: dict[str, dict[str, Any]] = {}
        self.asked_at_s: float | None = None
        self.is_open = False

    def ask(self, now_s: float) -> str:
        """A rank wants to know: "ask" the guards, "wait" for answers that are on their way, or "tell" what was found a moment ago."""
        if self.is_open:
            return "wait"
        if self.asked_at_s is not None and now_s < self.asked_at_s + FRESH_S:
            return "tell"
        self.found, self.asked_at_s, self.is_open = {}, now_s, True
        return "ask"

    def add(self, rank: int, position: dict[str, Any]) -> bool:
        """Takes an answer. True when it was the last."""
        if self.is_open:
            self.found[str(rank)] = position
        return self._close(len(self.found) == self.num_ranks)

    def tick(self, now_s: float) -> bool:
        """True when no more answers are waited for."""
        return self._close(self.asked_at_s is not None and now_s > self.asked_at_s + COLLECT_S)

    def _close(self, now: bool) -> bool:
        if not self.is_open or not now:
            return False
        self.is_open = False
        self.found = {str(rank): self.found.get(str(rank), {}) for rank in range(self.num_ranks)}
        return True


class Hub:
    """The rules behind a socket, in the guard of rank 0; guards prove with a secret that they are of this job.

    Args:
        everywhere: listen on all addresses (a job of several nodes), else on this machine alone.
    """

    def __init__(self, num_ranks: int, selector: selectors.BaseSelector, *, everywhere: bool, wait_s: float = WAIT_FOR_CAUSE_S) -> None:
        self.rules = Rulings(num_ranks, wait_s=wait_s)
        self.roll_call = RollCall(num_ranks)
        self.selector = selector
        self.secret = secrets.token_hex(16)
        self.listener = _listen("" if everywhere else "127.0.0.1", num_ranks)
        self.listener.setblocking(False)
        self.port = int(self.listener.getsockname()[1])
        self.guards: dict[int, socket.socket] = {}
        self.nodes: dict[int, str] = {}
        self.last: Ruling | None = None
        self._closed: set[socket.socket] = set()
        selector.register(self.listener, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self.listener.accept()
            connection.setblocking(True)
            connection.settimeout(5.0)
            watch_peer(connection)
            lines = Lines()
            self.selector.register(connection, selectors.EVENT_READ, lambda: self._read(connection, lines))

    def _read(self, connection: socket.socket, lines: Lines) -> None:
        try:
            data = connection.recv(65536)
            messages = lines.feed(data)
        except (OSError, ValueError):
            data, messages = b"", []
        for message in messages:
            self._take(connection, message)
        if not data:
            self._drop(connection)

    def _take(self, connection: socket.socket, message: dict[str, Any]) -> None:
        rank = next((known for known, other in self.guards.items() if other is connection), None)
        if rank is None:
            told = message.get("rank")
            of_this_job = hmac.compare_digest(str(message.get("secret")), self.secret)
            if of_this_job and isinstance(told, int) and 0 <= told < self.rules.num_ranks and told not in self.guards:
                self.guards[told] = connection
                self.nodes[told] = str(message.get("node", ""))
                if self.last is not None:  # it comes late
                    self._send(connection, dataclasses.asdict(self.last))
            else:
                self._drop(connection)
            return
        if message.get("op") == "where":
            answer = self.roll_call.ask(time.monotonic())
            if answer == "ask":
                self._send_all({"op": "where"})
            elif answer == "tell":
                self._send(connection, self._whereabouts())
            return
        if message.get("op") == "position" and isinstance(message.get("position"), dict):
            if self.roll_call.add(rank, message["position"]):
                self._send_all(self._whereabouts())
            return
        if message.get("op") == "stop":
            self.tell(self.rules.stop(str(message.get("signal"))))
            return
        with contextlib.suppress(KeyError, TypeError, ValueError):
            report = Report(rank, int(message["attempt"]), int(message["code"]), message.get("cause"))
            self.tell(self.rules.add(report, time.monotonic()))

    def _drop(self, connection: socket.socket) -> None:
        if connection in self._closed:
            return
        self._closed.add(connection)
        self.selector.unregister(connection)
        connection.close()
        rank = next((known for known, other in self.guards.items() if other is connection), None)
        if rank is not None:
            del self.guards[rank]
            self.tell(self.rules.lost(rank, self.nodes.get(rank, "")))

    def tick(self) -> None:
        if self.roll_call.tick(time.monotonic()):
            self._send_all(self._whereabouts())
        self.tell(self.rules.tick(time.monotonic()))

    def _whereabouts(self) -> dict[str, Any]:
        return {"op": "whereabouts", "ranks": self.roll_call.found}

    def tell(self, ruling: Ruling | None) -> None:
        """Sends a ruling to every guard."""
        if ruling is None:
            return
        if ruling.kind == "relaunch":
            ruling = dataclasses.replace(ruling, port=free_port())
        self.last = ruling
        self._send_all(dataclasses.asdict(ruling))

    def _send_all(self, message: dict[str, Any]) -> None:
        for connection in list(self.guards.values()):
            self._send(connection, message)

    @staticmethod
    def _send(connection: socket.socket, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # its end is noticed when it is read from
            send_line(connection, message)

    def linger(self, limit_s: float = 2.0) -> None:
        """After the last ruling: until the other guards have hung up, so that none finds the line dead before it has read it."""
        deadline = time.monotonic() + limit_s
        while self.guards and time.monotonic() < deadline:
            for key, _ in self.selector.select(timeout=0.1):
                if key.data is not None:
                    key.data()
        self.listener.close()
