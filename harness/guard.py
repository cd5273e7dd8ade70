"""The light parent of each rank: starts the training process, hands signals on, and sees that nothing outlives its launcher.

`run_clm.py` becomes a guard when it is started, and the guard starts it again as its child. A guard imports no torch and needs about
15 MB. What it is for:

- a launcher that dies (the deepspeed runner leaves its ranks behind when it is killed) ends the run with a save, not with orphans;
- a guard that dies takes its child with it;
- the child's exit code and signal reach the launcher unchanged, and `exit.json` names a signal that killed it from outside;
- when a rank has waited for the others for too long, or has crashed, the guards tell where each rank is (harness.whereabouts);
- a child that must come back with smaller settings is started again, on all ranks, without the launcher's notice (harness.relaunch_hub);
- a request to stop that comes between two lives, when a child could only be killed by it, ends all ranks as a run that was stopped.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Protocol

from harness import cgroups, guard_line, whereabouts
from harness.guard_line import die_with_parent
from harness.processes import open_standard_files
from harness.relaunch_hub import (
    IN_ORDER,
    PREEMPTED,
    RELAUNCH,
    Hub,
    Lines,
    Report,
    Ruling,
    Rulings,
    gone,
    send_line,
    signal_text,
    watch_peer,
)
from harness.standby import Standby

CHILD_VARIABLE = "HARNESS_CHILD"
NO_GUARD_VARIABLE = "HARNESS_NO_GUARD"
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
POLL_S = 0.5
STACKS_FILE = "stacks-rank-{rank}.txt"
MAX_RANKS_TOLD = 64  # of a large job: what a packet to the training process holds
ORPHANED = "the launcher is gone"
# A launcher that is gone is a request to stop; after this long the child is killed.
ORPHAN_GRACE_S = 30.0
# Between a ruling and the end of a child that does not end by itself.
FAIL_GRACE_S = 5.0
RELAUNCH_GRACE_S = 0.5
# A guard whose child has ended leaves without the hub's word after this long: it failed, or ended in order while others still write.
LAST_WORD_S = 20.0
IN_ORDER_S = 60.0
# The kernel ends several processes for one lack of memory: the one that waits first, the child a moment later.
KERNEL_KILLS_S = 10.0
_LAUNCHER_PROGRAMS = {"torchrun", "deepspeed", "accelerate", "accelerate-launch"}
_LAUNCHER_MODULES = {
    "torch.distributed.run",
    "torch.distributed.launch",
    "deepspeed.launcher.runner",
    "deepspeed.launcher.launch",
    "accelerate.commands.launch",
}


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


class Child(Protocol):
    """The training process, as subprocess.Popen shows it."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...

    def send_signal(self, sig: int, /) -> None: ...


class Guard:
    """Runs one training process, and starts it again where the guards of the job agree on it."""

    def __init__(self, command: list[str]) -> None:
        self.command = command
        self.rank, self.num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.launchers = launchers_above(os.getpid())
        self.kill_at_s: float | None = None
        self.leave_at_s: float | None = None
        self.child: Child | None = None
        self.standby: Standby | None = None
        self.selector = selectors.DefaultSelector()
        self.hub: Hub | None = None
        self.rules = Rulings(1)
        self.to_hub: socket.socket | None = None
        self.hub_host = ""
        self.from_hub = Lines()
        self.ruling: Ruling | None = None
        self.attempt = 0
        self.reported = self.is_orphan = False
        self.stop_signal = ""  # what asked to stop
        self.child_hears = True  # signals; a child of a later life says when
        self.cause: dict[str, Any] | None = None
        self.held: dict[str, int] = {}
        self.where: whereabouts.Whereabouts | None = None
        self.asked_from: str | None = None  # the child's place in the code, when it asked where the others are
        self.found: dict[str, dict[str, Any]] = {}
        self.folder: Path | None = None
        self.started_s = time.time()
        self.killed_by = ""
        if self.num_ranks > 1 and self.rank == 0:
            everywhere = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", self.num_ranks))) < self.num_ranks
            self.hub = Hub(self.num_ranks, self.selector, everywhere=everywhere)
        self.read_end, write_end = os.pipe()
        for end in (self.read_end, write_end):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(write_end)
        self.selector.register(self.read_end, selectors.EVENT_READ, self._take_signals)
        for number in (*FORWARDED, signal.SIGCHLD):
            # Under nohup a closed terminal is no reason to stop.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda *_: None)

    def run(self) -> int:
        """Starts the child and stays until it has ended for good. Returns its exit code; dies of the child's signal if that killed it."""
        self._start()
        while True:
            for key, _ in self.selector.select(timeout=POLL_S):
                key.data()
            if self.hub is not None:
                self.hub.tick()
            self._watch_launchers()
            self._watch_memory()
            if self.child is not None and self.child.poll() is not None:
                code = self._after_end(self.child)
                if code is not None:
                    self._hang_up()
                    return self._leave(code)

    # ---- the child

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        os.set_inheritable(theirs.fileno(), True)
        if self.where is not None:
            self.where.close()
        self.where, self.asked_from, self.found = whereabouts.Whereabouts(), None, {}
        environment = {
            whereabouts.VARIABLE: str(self.where.descriptor),
            guard_line.LINE_VARIABLE: str(theirs.fileno()),
            guard_line.ATTEMPT_VARIABLE: str(self.attempt),
            guard_line.HELD_VARIABLE: json.dumps(self.held),
            CHILD_VARIABLE: str(os.getpid()),
        }
        if self.hub is not None:
            environment[guard_line.HUB_VARIABLE] = json.dumps({"port": self.hub.port, "secret": self.hub.secret})
        if self.ruling is not None:  # a life after the first
            environment[guard_line.CAUSE_VARIABLE] = json.dumps(self.ruling.cause)
            if self.num_ranks > 1:
                # The launcher's store keeps keys of the life before.
                environment |= {"MASTER_PORT": str(self.ruling.port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
        self.ruling, self.cause, self.reported = None, None, False
        self.child_hears = self.attempt == 0
        self.leave_at_s = self.kill_at_s = None
        self.num_kernel_kills, self.kernel_killed_s = cgroups.num_kernel_kills(), float("-inf")
        self.line = ours
        self.selector.register(ours, selectors.EVENT_READ, lambda: self._hear_child(ours))
        self.child = self.start_child(environment, (theirs.fileno(), self.where.descriptor, *self.held.values()))
        theirs.close()

    def start_child(self, environment: dict[str, str], descriptors: tuple[int, ...]) -> Child:
        """Starts the training process.

        Args:
            environment: what is added to this process's own.
            descriptors: files that stay open in it.
        """
        standby, self.standby = self.standby, None
        if standby is not None and (child := standby.take(environment, descriptors)) is not None:
            return child
        parent = os.getpid()
        return subprocess.Popen(
            self.command,
            env={**os.environ, **environment},
            pass_fds=descriptors,
            preexec_fn=lambda: die_with_parent(parent),
        )

    def _watch_memory(self) -> None:
        if self.standby is not None and self.standby.has_ended():
            self.standby.end()
            self.standby = None
        if (kills := cgroups.num_kernel_kills()) > self.num_kernel_kills:  # whomever it chose: another rank's may be next
            self.num_kernel_kills, self.kernel_killed_s = kills, time.monotonic()

    def _was_killed_for_memory(self) -> bool:
        """Whether the kernel has ended a process of this container for memory a moment ago; asked after a SIGKILL of the child."""
        recently = time.monotonic() - self.kernel_killed_s < KERNEL_KILLS_S
        return recently or cgroups.num_kernel_kills() > self.num_kernel_kills

    def _hear_child(self, line: socket.socket) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(line, guard_line.MAX_PACKET_BYTES, 1)
        except OSError:
            data, descriptors = b"", []
        if not data:
            self.selector.unregister(line)
            line.close()
            return
        message = json.loads(data)
        if message["op"] == "hub" and self.to_hub is None:
            self._call_hub(message)
        elif message["op"] == "where":
            self.asked_from = str(message["at"])
            self._ask_where()
        elif message["op"] == "hears":
            self.child_hears = True
        elif message["op"] == "standby" and self.standby is None:
            self.standby = Standby(self.command, {CHILD_VARIABLE: str(os.getpid())})
        elif message["op"] == "cause":
            self.cause = message["cause"]
        elif message["op"] == "folder":
            self.folder, self.started_s = Path(message["path"]), float(message["started_s"])
        elif message["op"] == "hold" and descriptors:
            old = self.held.pop(message["name"], None)
            if old is not None:
                os.close(old)
            self.held[message["name"]] = descriptors.pop()
        for number in descriptors:
            os.close(number)

    def _after_end(self, child: Child) -> int | None:
        """What a child that has ended leads to: an exit code of this process, or None where it is not known yet or a new child runs."""
        assert child.returncode is not None
        if self._is_to_stop():
            return self._stopped()
        if not self.reported:
            while self.line.fileno() >= 0:  # what it said last
                self._hear_child(self.line)
            self.reported = True
            self.leave_at_s = time.monotonic() + (LAST_WORD_S if child.returncode not in IN_ORDER else IN_ORDER_S)
            cause = self._why(child.returncode)
            self.killed_by = self._signal_from_outside(child.returncode, cause)
            if child.returncode == -signal.SIGABRT and cause is None:
                self._ask_where()  # NCCL's watchdog aborts a process whose collective does not end: where are the others?
            if cause is None:
                self._record_kill()  # at once: the others fail because of it, and the first reason stays
            self._report(Report(self.rank, self.attempt, child.returncode, cause))
            if child.returncode == RELAUNCH and self._is_to_stop():  # a job of one process has its ruling at once
                return self._stopped()
        if self.ruling is not None and self.ruling.kind == "relaunch" and not self.stop_signal:
            self.attempt = self.ruling.attempt
            if self.rank == 0:
                print(f"starting all ranks again (life {self.attempt + 1})", file=sys.stderr, flush=True)
            self._start()
            return None
        alone = self.num_ranks > 1 and self.to_hub is None
        stops = self.ruling is not None and self.ruling.kind == "relaunch"  # the hub has been told, and will rule so
        if (self.ruling is None or stops) and not alone and time.monotonic() < (self.leave_at_s or 0):
            return None
        self._record_kill()
        failed = self.ruling if self.ruling is not None and self.ruling.kind == "fail" else None
        ended_by_us = child.returncode < 0 and self.kill_at_s is not None
        if failed is not None and failed.is_known:
            self._record(failed.why)
        elif ended_by_us and self.is_orphan:
            self._record(f"rank {self.rank} was ended without a save, because {ORPHANED}", is_consequence=True)
        elif failed is not None and (ended_by_us or child.returncode == RELAUNCH):  # it could not say why any more
            self._record(f"rank {self.rank} was ended, because {failed.why}", is_consequence=True)
        elif child.returncode == RELAUNCH:
            self._record(f"rank {self.rank} ran out of memory, and the guard of rank 0 could not be asked to start all ranks again")
        return 1 if child.returncode == RELAUNCH or (ended_by_us and failed is not None) else child.returncode

    def _is_to_stop(self) -> bool:
        return self.ruling is not None and self.ruling.kind == "stop"

    def _stopped(self) -> int:
        assert self.ruling is not None
        self._record(self.ruling.why, code=PREEMPTED)
        return PREEMPTED

    def _why(self, code: int) -> dict[str, Any] | None:
        """A lack of memory that the child reported or the kernel ended it for."""
        if code == RELAUNCH:
            return self.cause or {"phase": "unknown"}
        if code == -signal.SIGKILL and self.kill_at_s is None and self._was_killed_for_memory():
            return {"phase": "unknown", "memory": "host", "failure": "killed by the kernel: the memory limit of the container or machine"}
        return None

    def _signal_from_outside(self, code: int, cause: dict[str, Any] | None) -> str:
        """What is to be said of a child that a signal ended which was not this guard's; empty for any other end."""
        if code >= 0 or self.kill_at_s is not None:
            return ""
        who = ", " + cause["failure"].removeprefix("killed ") if cause and "failure" in cause else ""
        stacks = self.where.stacks() if self.where is not None else ""
        place = whereabouts.place_of(stacks[stacks.rfind("Fatal Python error") :]) if "Fatal Python error" in stacks else ""
        at = f" at {place}; the stacks of its threads are in {self._write_stacks(stacks)}" if place else ""
        return f"rank {self.rank} was killed by {signal_text(-code)}{who}{at}"

    def _record_kill(self) -> None:
        if self.killed_by:
            print(self.killed_by, file=sys.stderr, flush=True)
            self._record(self.killed_by)
            self.killed_by = ""

    def _record(self, reason: str, is_consequence: bool = False, code: int | None = None) -> None:
        from harness.run_folder import FAILED, record_exit  # only now: a guard is to stay small

        record_exit(self.folder, FAILED if code is None else code, reason, self.rank, self.started_s, is_consequence=is_consequence)

    # ---- where everybody is

    def _ask_where(self) -> None:
        """Begins to find out where all ranks are."""
        if self.to_hub is None:
            self._take_whereabouts({str(self.rank): self._position()})
            return
        with contextlib.suppress(OSError):
            send_line(self.to_hub, {"op": "where"})

    def _position(self) -> dict[str, Any]:
        """Where this guard's own process is; the stacks of its threads go to the run's folder."""
        if self.where is None or self.child is None:
            return {}
        code = self.child.poll()
        found = self.where.look(self.child.pid)
        if code is not None:
            found["state"] = f"has ended with {f'exit code {code}' if code >= 0 else signal_text(-code)}"
            found["at"] = whereabouts.place_of(self.where.stacks())
        elif self.asked_from is not None:
            found |= {"at": self.asked_from, "asked": True}
        self._write_stacks(self.where.stacks())
        return found

    def _write_stacks(self, stacks: str) -> str:
        """Returns the name of the file."""
        name = STACKS_FILE.format(rank=self.rank)
        if self.folder is not None and stacks:
            with contextlib.suppress(OSError):
                (self.folder / name).write_text(stacks, encoding="utf-8")
        return name

    def _take_whereabouts(self, found: dict[str, dict[str, Any]]) -> None:
        self.found = found
        if self.asked_from is None:
            return
        late = whereabouts.late(found)
        told = [*late, *(rank for rank in found if rank not in late)][:MAX_RANKS_TOLD]
        with contextlib.suppress(OSError):
            self.line.send(json.dumps({rank: found[rank] for rank in sorted(told, key=int)}).encode())

    # ---- the hub

    def _call_hub(self, message: dict[str, Any]) -> None:
        try:
            connection = socket.create_connection(("127.0.0.1" if self.rank == 0 else message["host"], message["port"]), timeout=10.0)
            watch_peer(connection)
            send_line(connection, {"rank": self.rank, "secret": message["secret"], "node": socket.gethostname()})
        except OSError as error:
            print(f"rank {self.rank} cannot reach the guard of rank 0: {error}; no relaunch", file=sys.stderr, flush=True)
            return
        self.to_hub, self.hub_host = connection, str(message["host"])
        self.selector.register(connection, selectors.EVENT_READ, self._hear_hub)

    def _report(self, report: Report) -> None:
        if self.num_ranks == 1:
            self._obey(self.rules.add(report, time.monotonic()))
        elif self.to_hub is not None:
            with contextlib.suppress(OSError):
                send_line(self.to_hub, {"attempt": report.attempt, "code": report.code, "cause": report.cause})

    def _hear_hub(self) -> None:
        assert self.to_hub is not None
        try:
            data = self.to_hub.recv(65536)
            messages = self.from_hub.feed(data)
        except (OSError, ValueError):
            data, messages = b"", []
        for message in messages:
            if message.get("op") == "where":
                with contextlib.suppress(OSError):
                    send_line(self.to_hub, {"op": "position", "position": self._position()})
            elif message.get("op") == "whereabouts":
                self._take_whereabouts(message["ranks"])
            else:
                self._obey(Ruling(**message))
        if not data:
            self.selector.unregister(self.to_hub)
            self.to_hub.close()
            if self.ruling is None or self.ruling.kind == "relaunch":
                self._obey(Ruling("fail", self.attempt, why=gone(0, self.hub_host), is_known=True))

    def _obey(self, ruling: Ruling | None) -> None:
        if ruling is None:
            return
        self.ruling = ruling
        if ruling.kind == "relaunch" and self.stop_signal:
            self._stop_between_lives()
            return
        if ruling.kind == "done" or self.child is None or self.child.poll() is not None:
            return
        if ruling.kind == "fail":
            print(f"rank {self.rank}: ending, because {ruling.why}", file=sys.stderr, flush=True)
            self._ask_to_stop(ruling.why)
        # A peer of a rank that must come back sits in a collective with it, maybe in a GPU wait: nothing of it can be saved. So it is
        # between two lives.
        grace_s = FAIL_GRACE_S if ruling.kind == "fail" else RELAUNCH_GRACE_S
        self.kill_at_s = min(self.kill_at_s or float("inf"), time.monotonic() + grace_s)

    def _hang_up(self) -> None:
        if self.standby is not None:
            self.standby.end()
        if self.rank == 0 and self.found:
            from harness.run_folder import add_ranks

            add_ranks(self.folder, {rank: whereabouts.describe(rank, found) for rank, found in self.found.items()}, self.started_s)
        if self.to_hub is not None and self.to_hub.fileno() >= 0:
            self.selector.unregister(self.to_hub)
            self.to_hub.close()
        if self.hub is not None:
            self.hub.linger()

    # ---- signals and launchers

    def _take_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in os.read(self.read_end, 64):
                if number in FORWARDED:
                    self.stop_signal = signal.Signals(number).name
                    if self._is_between_lives():
                        self._stop_between_lives()
                    else:
                        self._send(signal.Signals(number))

    def _is_between_lives(self) -> bool:
        """From an end that leads to a new start until the child of that start handles signals."""
        returns = self.child is not None and self.child.poll() == RELAUNCH
        return returns or not self.child_hears or (self.ruling is not None and self.ruling.kind == "relaunch")

    def _stop_between_lives(self) -> None:
        """All ranks stop, wherever in their new start they are: nothing of this life is worth a save, and a launcher waits for seconds."""
        if self.num_ranks == 1:
            self._obey(self.rules.stop(self.stop_signal))
        elif self.to_hub is not None:
            with contextlib.suppress(OSError):
                send_line(self.to_hub, {"op": "stop", "signal": self.stop_signal})

    def _send(self, number: signal.Signals) -> None:
        assert self.child is not None
        if self.child.poll() is None:
            self.child.send_signal(number)

    def _ask_to_stop(self, why: str) -> None:
        """Args:
        why: for the child's own report of its end; else it would know only the signal.
        """
        if why and self.where is not None:
            self.where.note(why)
        self._send(signal.SIGTERM)

    def _watch_launchers(self) -> None:
        if self.kill_at_s is None:
            if all(is_alive(pid, started) for pid, started in self.launchers):
                return
            print(f"{ORPHANED}: stopping, after a save if training has begun", file=sys.stderr, flush=True)
            self.is_orphan = not self.stop_signal  # else it was asked to stop before, and the launcher has only not waited for it
            self.stop_signal = self.stop_signal or "the end of the launcher"
            self.kill_at_s = time.monotonic() + ORPHAN_GRACE_S
            if self._is_between_lives() and (self.num_ranks == 1 or self.to_hub is not None):
                self._stop_between_lives()
            else:
                self._ask_to_stop(ORPHANED if self.is_orphan else "")
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
    open_standard_files()
    return Guard([sys.executable, *sys.orig_argv[1:]]).run()
