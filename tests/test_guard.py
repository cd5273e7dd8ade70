"""Guards and their hub: the rules as pure code, and real guards over children that import no torch."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import guard
from harness.guard import parent_of
from harness.relaunch_hub import MAX_RELAUNCHES, SILENT_S, Lines, Report, Ruling, Rulings, watch_peer
from tests.launching import ROOT

OOM = {"phase": "update"}


def kind_of(ruling: Any) -> str | None:
    return None if ruling is None else ruling.kind


# ---- the rules


def test_all_in_order_is_done() -> None:
    rules = Rulings(2)
    assert rules.add(Report(0, 0, 0), 0.0) is None
    assert kind_of(rules.add(Report(1, 0, 75), 1.0)) == "done"
    assert rules.lost(1) is None


def test_the_cause_may_come_after_the_failures_it_made() -> None:
    rules = Rulings(3, wait_s=5.0)
    assert rules.add(Report(0, 0, 1), 10.0) is None
    assert rules.add(Report(2, 0, -6), 10.1) is None
    assert rules.tick(14.9) is None
    ruling = rules.add(Report(1, 0, 86, OOM), 14.9)
    assert ruling is not None and (ruling.kind, ruling.attempt, ruling.cause) == ("relaunch", 1, {"phase": "update", "rank": 1})
    assert rules.tick(100.0) is None
    # What still comes from the life before counts no more.
    assert rules.add(Report(2, 0, 1), 15.0) is None and rules.tick(100.0) is None
    assert [kind_of(rules.add(Report(rank, 1, 0), 16.0)) for rank in range(3)] == [None, None, "done"]


def test_a_failure_alone_ends_all_in_time_or_when_all_have_ended() -> None:
    rules = Rulings(3, wait_s=5.0)
    rules.add(Report(1, 0, 7), 10.0)
    ruling = rules.tick(15.0)
    assert ruling is not None and (ruling.kind, ruling.why) == ("fail", "rank 1 ended with exit code 7")
    rules = Rulings(2, wait_s=5.0)
    rules.add(Report(1, 0, -9), 10.0)
    ruling = rules.add(Report(0, 0, 0), 10.0)
    assert ruling is not None and (ruling.kind, ruling.why) == ("fail", "rank 1 ended with signal 9 (SIGKILL)")


def test_a_guard_that_is_gone_ends_all_once() -> None:
    rules = Rulings(2)
    assert kind_of(rules.lost(1)) == "fail"
    assert rules.lost(0) is None
    assert rules.add(Report(0, 0, 86, OOM), 0.0) is None


def test_a_guard_whose_process_ended_in_order_may_leave_but_nobody_starts_again_without_it() -> None:
    rules = Rulings(2)
    assert rules.add(Report(1, 0, 0), 0.0) is None
    assert rules.lost(1) is None  # the other still writes
    assert rules.add(Report(0, 0, 0), 100.0) == Ruling("done", 0)
    rules = Rulings(2)
    assert (rules.add(Report(1, 0, 0), 0.0), rules.lost(1)) == (None, None)
    ruling = rules.add(Report(0, 0, 86, {"phase": "save"}), 100.0)
    assert ruling == Ruling("fail", 0, why="rank 0 ran out of memory when rank 1 had already ended")


def test_relaunches_end() -> None:
    rules = Rulings(1)
    kinds = [kind_of(rules.add(Report(0, attempt, 86, OOM), 0.0)) for attempt in range(MAX_RELAUNCHES + 1)]
    assert kinds == ["relaunch"] * MAX_RELAUNCHES + ["fail"]


def test_lines_may_arrive_in_pieces_and_must_be_objects() -> None:
    lines = Lines()
    assert lines.feed(b'{"a": 1}\n{"b"') == [{"a": 1}]
    assert lines.feed(b": 2}\n") == [{"b": 2}]
    for bad in (b"[1]\n", b"x\n", b"y" * (Lines.MAX_BYTES + 1)):
        with pytest.raises(ValueError):
            Lines().feed(bad)


# ---- real guards

CHILD = """
import json, os, pathlib, signal, sys, time
from harness import guard, guard_line
folder, kind, victim = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
if guard.needs_guard():
    sys.exit(guard.main())
rank, size, life = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), guard_line.attempt()

def write(name, value):
    path = folder / f".{name}-{rank}"
    path.write_text(json.dumps(value))
    path.rename(folder / name)  # read by others as soon as it is there

def broadcast(value):
    path = folder / f"hub-{life}"
    if rank == 0:
        write(path.name, value)
    while not path.exists():
        time.sleep(0.01)
    return json.loads(path.read_text())

if kind == "late" and rank != victim and life == 0:
    write(f"life-{life}-{rank}", ["", None, "", os.getpid()])
    time.sleep(1)  # the other has long asked for a new start when this one's guard learns where the hub is
if (kind == "asked before" and (rank != victim or size == 1)) or (kind == "peer gone" and rank == victim):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
guard_line.join_hub(broadcast)
guard_line.tell_folder(folder, 0.0)
memory = guard_line.held().get("state")
seen = os.pread(memory, 3, 0).decode() if memory is not None else ""
write(f"life-{life}-{rank}", [os.environ["MASTER_PORT"], guard_line.cause(), seen, os.getpid()])
while not all((folder / f"life-{life}-{other}").exists() for other in range(size)):
    time.sleep(0.01)
if life == 1 and kind.startswith("new life"):
    if "deaf" in kind and rank != victim:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
    if "hears" in kind:
        guard_line.hears_signals()
        write(f"hears-{rank}", 0)
    time.sleep(60)
if life == 0:
    handle = os.memfd_create("state")
    os.write(handle, f"r{rank}!".encode())
    assert guard_line.hold("state", handle)
    if rank == victim:
        if kind == "bug":
            sys.exit(7)
        if kind == "sleep":
            time.sleep(60)
        while kind in ("asked before", "peer gone") and not (folder / "go").exists():
            time.sleep(0.01)
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        guard_line.relaunch({"phase": "update"})
    if kind == "asked before":
        time.sleep(60)
    if kind == "stuck":
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
        time.sleep(60)
    if kind == "peer fails first":
        sys.exit(1)
    time.sleep(60)
"""


def until(holds: Callable[[], bool], limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


LAUNCHER = """
import json, os, subprocess, sys
command, environments = json.loads(sys.argv[1])
for child in [subprocess.Popen(command, env={**os.environ, **environment}) for environment in environments]:
    child.wait()
"""


class Guards:
    """Guards of a job, with children that do as they are told; `processes` is a launcher alone where they have one."""

    def __init__(self, folder: Path, kind: str, victim: int, num_ranks: int = 2, *, launcher: bool = False) -> None:
        self.folder = folder
        script = folder / "child.py"
        script.write_text(CHILD)
        common = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HARNESS_")}
        command = [sys.executable, str(script), str(folder), kind, str(victim)]
        environments = [{**inherited, **common, "RANK": str(rank), "PYTHONPATH": str(ROOT)} for rank in range(num_ranks)]
        if launcher:
            (folder / "torchrun").write_text(LAUNCHER)
            command, environments = [sys.executable, str(folder / "torchrun"), json.dumps([command, environments])], [inherited]
        self.processes = [subprocess.Popen(command, env=each, stderr=subprocess.PIPE, text=True) for each in environments]

    def wait(self) -> list[int]:
        codes = [process.wait(timeout=40) for process in self.processes]
        for pid in self.children():
            assert parent_of(pid) is None, f"{pid} was left behind"
        return codes

    def lives(self, number: int) -> list[Any]:
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob(f"life-{number}-*"))]

    def wait_until_joined(self) -> None:
        """Until rank 0's guard has one line to its process, one listener, and both ends of its own line to the hub, and each peer's."""

        def num_sockets(folder: str) -> int:
            found = 0
            for name in os.listdir(folder):
                with contextlib.suppress(OSError):  # closed meanwhile
                    found += os.readlink(f"{folder}/{name}").startswith("socket:")
            return found

        until(lambda: len(self.lives(0)) == len(self.processes))
        until(lambda: num_sockets(f"/proc/{self.processes[0].pid}/fd") == 3 + len(self.processes))

    def children(self) -> list[int]:
        return [life[3] for path in self.folder.glob("life-*") if (life := json.loads(path.read_text()))]


@pytest.mark.parametrize(("kind", "victim"), [("oom", 0), ("oom", 1), ("stuck", 0), ("stuck", 1), ("peer fails first", 1), ("late", 0)])
def test_all_ranks_start_again_with_what_they_had_left_in_memory(kind: str, victim: int, tmp_path: Path) -> None:
    guards = Guards(tmp_path, kind, victim)
    assert guards.wait() == [0, 0]
    (port_0, cause_0, seen_0, _), (port_1, cause_1, seen_1, _) = guards.lives(1)
    assert port_0 == port_1 != "1"
    assert cause_0 == cause_1 == {"phase": "update", "rank": victim}
    assert (seen_0, seen_1) == ("r0!", "r1!" if kind != "late" else seen_1)


def test_one_process_starts_again_by_itself(tmp_path: Path) -> None:
    guards = Guards(tmp_path, "oom", 0, num_ranks=1)
    assert guards.wait() == [0]
    assert guards.lives(1)[0][1:3] == [{"phase": "update", "rank": 0}, "r0!"]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_bug_is_not_started_again(victim: int, tmp_path: Path) -> None:
    guards = Guards(tmp_path, "bug", victim)
    codes = guards.wait()
    assert codes[victim] == 7
    assert codes[1 - victim] == 1  # ended by its guard: no launcher did it here
    # The bug itself left no reason, so the guard's stands.
    reason = json.loads((tmp_path / "exit.json").read_text())["reason"]
    assert reason == f"rank {1 - victim} was ended, because rank {victim} ended with exit code 7"
    assert guards.lives(1) == []
    assert f"ending, because rank {victim} ended with exit code 7" in str(guards.processes[1 - victim].stderr.read())  # type: ignore[union-attr]


@pytest.mark.parametrize(("victim", "num_ranks"), [(1, 2), (0, 1)])
def test_a_signal_from_outside_is_named(victim: int, num_ranks: int, tmp_path: Path) -> None:
    guards = Guards(tmp_path, "killed", victim, num_ranks)
    codes = guards.wait()
    assert codes[victim] == -9 and codes[:victim] == [1] * victim
    report = json.loads((tmp_path / "exit.json").read_text())
    assert report.pop("time") > 0
    # The guard of the other rank ended that one's process with a signal too: no reason to speak of.
    assert report == {"code": 1, "reason": f"rank {victim} was killed by signal 9 (SIGKILL)", "rank": victim}
    assert "was killed by signal 9 (SIGKILL)" in str(guards.processes[victim].stderr.read())  # type: ignore[union-attr]


def guard_over(child: Any, monkeypatch: pytest.MonkeyPatch) -> guard.Guard:
    """The guard of a job of one process, in this process, which keeps its signals; `child` is what it starts."""
    monkeypatch.setattr(guard.Guard, "start_child", lambda self, environment, descriptors: child)
    monkeypatch.setattr(guard.signal, "signal", lambda number, action: None)
    monkeypatch.setattr(guard.signal, "set_wakeup_fd", lambda descriptor: -1)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return guard.Guard(["true"])


def test_a_kill_by_the_kernel_for_memory_says_so_unless_all_start_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended:
        returncode = -9

        def poll(self) -> int:
            return -9

    kills = iter([3, 4, 4, 5])
    monkeypatch.setattr(guard.cgroups, "num_kernel_kills", lambda: next(kills))
    parent = guard_over(Ended(), monkeypatch)
    parent.folder = tmp_path
    parent._start()
    assert parent._after_end(parent.child) is None  # all start again
    assert parent.attempt == 1 and not (tmp_path / "exit.json").exists()
    parent.stop_signal = "SIGTERM"  # the user does not want another life
    assert parent._after_end(parent.child) == -9
    assert json.loads((tmp_path / "exit.json").read_text())["reason"] == (
        "rank 0 was killed by signal 9 (SIGKILL), by the kernel: the memory limit of the container or machine"
    )


@pytest.mark.parametrize(("seconds", "is_kernel"), [(0.5, True), (60.0, False)])
def test_the_kernel_may_choose_another_process_first(seconds: float, is_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that waits, or another rank's: the next to be killed for the same lack of memory is the child."""
    now, kills = [100.0], [3]
    monkeypatch.setattr(guard.cgroups, "num_kernel_kills", lambda: kills[0])
    monkeypatch.setattr(guard.time, "monotonic", lambda: now[0])
    parent = guard_over(None, monkeypatch)
    parent._start()
    assert parent._why(-9) is None
    kills[0] = 4
    parent._watch_memory()
    now[0] += seconds
    assert (parent._why(-9) is not None) == is_kernel
    parent._start()  # the next life's own
    assert parent._why(-9) is None


@pytest.mark.parametrize("rank", [0, 1])
def test_a_dead_guard_ends_the_job(rank: int, tmp_path: Path) -> None:
    guards = Guards(tmp_path, "sleep", 0)
    guards.wait_until_joined()
    guards.processes[rank].send_signal(signal.SIGKILL)
    codes = guards.wait()
    assert codes[rank] == -9 and codes[1 - rank] == 1
    reason = json.loads((tmp_path / "exit.json").read_text())["reason"]
    node = "127.0.0.1" if rank == 0 else socket.gethostname()
    assert reason.startswith(f"the guard of rank {rank} on {node} is gone: its node is down or cut off")


def test_a_dead_guard_is_the_reason_also_where_its_peer_asks_for_a_new_start(tmp_path: Path) -> None:
    guards = Guards(tmp_path, "peer gone", 0)
    guards.wait_until_joined()
    guards.processes[1].send_signal(signal.SIGKILL)
    time.sleep(0.3)
    (tmp_path / "go").touch()
    assert guards.wait() == [1, -9]
    assert json.loads((tmp_path / "exit.json").read_text())["reason"].startswith("the guard of rank 1 on ")


def test_a_dead_guard_is_the_reason_also_where_its_peer_has_said_that_it_lost_a_peer(tmp_path: Path) -> None:
    guards = Guards(tmp_path, "sleep", 0)
    guards.wait_until_joined()
    lost = {"code": 1, "reason": "Connection reset by peer", "rank": 0, "time": time.time(), "is_consequence": True}
    (tmp_path / "exit.json").write_text(json.dumps(lost))
    guards.processes[1].send_signal(signal.SIGKILL)
    assert guards.wait() == [1, -9]
    assert json.loads((tmp_path / "exit.json").read_text())["reason"].startswith("the guard of rank 1 on ")


def test_a_peer_that_says_nothing_is_noticed_within_the_limit() -> None:
    """The settings as the kernel has them; what they do is tested between two nodes."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as connection:
        watch_peer(connection)
        options = {
            name: connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}")) for name in ("KEEPIDLE", "KEEPINTVL", "KEEPCNT")
        }
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert options["KEEPIDLE"] + options["KEEPINTVL"] * options["KEEPCNT"] == SILENT_S == 30
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000


def test_a_stop_request_is_stronger_than_a_relaunch(tmp_path: Path) -> None:
    guards = Guards(tmp_path, "sleep", 0, num_ranks=1)
    until(lambda: bool(guards.lives(0)))
    guards.processes[0].send_signal(signal.SIGTERM)
    assert guards.wait() == [-15]
    assert guards.lives(1) == []


BETWEEN = "stopped by SIGTERM while all ranks were starting again; the same command goes on from the newest complete checkpoint"


@pytest.mark.parametrize(
    ("kind", "asked", "num_ranks"),
    [("new life", (0, 1), 2), ("new life", (1,), 2), ("new life deaf", (0,), 2), ("new life", (0,), 1)],
)
def test_a_stop_request_between_two_lives_stops_all_ranks(kind: str, asked: tuple[int, ...], num_ranks: int, tmp_path: Path) -> None:
    """Whoever of them is asked, and whether its new process has begun: a scheduler is to see 75, not a failure."""
    guards = Guards(tmp_path, kind, 0, num_ranks)
    until(lambda: len(guards.lives(1)) == num_ranks)
    for rank in asked:
        guards.processes[rank].send_signal(signal.SIGTERM)
    assert guards.wait() == [75] * num_ranks
    report = json.loads((tmp_path / "exit.json").read_text())
    assert (report["code"], report["reason"]) == (75, BETWEEN)
    assert guards.lives(2) == []


def test_the_end_of_the_launcher_between_two_lives_stops_all_ranks(tmp_path: Path) -> None:
    guards = Guards(tmp_path, "new life", 0, launcher=True)
    until(lambda: len(guards.lives(1)) == 2)
    guards.processes[0].kill()
    assert guards.processes[0].wait(timeout=40) == -9
    until(lambda: not any(map(parent_of, guards.children())))
    until((tmp_path / "exit.json").exists)
    report = json.loads((tmp_path / "exit.json").read_text())
    assert (report["code"], report["reason"]) == (75, BETWEEN.replace("SIGTERM", "the end of the launcher"))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_stop_request_before_the_end_of_a_life_stops_all_ranks(num_ranks: int, tmp_path: Path) -> None:
    """A guard was asked, but its process had not stopped yet when it, or another one's, ran out of memory."""
    guards = Guards(tmp_path, "asked before", 0, num_ranks)
    until(lambda: len(guards.lives(0)) == num_ranks)
    guards.processes[-1].send_signal(signal.SIGTERM)
    time.sleep(0.3)
    (tmp_path / "go").touch()
    assert guards.wait() == [75] * num_ranks
    assert json.loads((tmp_path / "exit.json").read_text())["reason"] == BETWEEN


def test_a_new_life_that_handles_signals_is_told(tmp_path: Path) -> None:
    guards = Guards(tmp_path, "new life hears", 0)
    until(lambda: len(list(tmp_path.glob("hears-*"))) == 2)
    time.sleep(0.3)  # the guards read it
    for process in guards.processes:
        process.send_signal(signal.SIGTERM)
    assert guards.wait() == [-15, -15]  # which these processes do not handle


# ---- signals before training

WAITING = """
import os, signal, sys, threading, time
from pathlib import Path
from harness import run_clm

class Stop:
    saves, asked = {saves}, ""
    def __bool__(self): return bool(self.asked)
    def ask(self, name): print(name, flush=True)

run_clm._take_signals(Stop())
stop = Stop()
run_clm._end_before_training(stop, Path(sys.argv[1]), 0, time.time())
if child := os.fork():
    os.kill(child, signal.SIGTERM)  # a worker that is ended tells nobody
    time.sleep(0.3)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    print("ready", flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize(("saves", "code"), [(False, 75), (True, -9)])
def test_a_signal_before_training_ends_a_run_that_waits(saves: bool, code: int, tmp_path: Path) -> None:
    """As for data or another rank; once training has begun it is only told."""
    command = [sys.executable, "-c", WAITING.format(saves=saves), str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        while "ready" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGUSR1)
        if saves:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1)
        else:
            process.wait(20)
            report = json.loads((tmp_path / "exit.json").read_text())
            assert (report["code"], report["reason"]) == (75, "stopped by SIGUSR1 before training had begun")
    finally:
        process.kill()
        process.wait()
    assert process.returncode == code


# ---- standard files


@pytest.mark.parametrize("closed", ["<&- >&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_files_that_were_closed_go_nowhere(closed: str, tmp_path: Path) -> None:
    """Without them a run's data would be printed into, and prints and flushes fail."""
    code = (
        "import os, subprocess, sys; from harness.processes import open_standard_files as ready; ready(); print('x', flush=True);"
        "print('y', file=sys.stderr, flush=True); data = open(sys.argv[1], 'w'); assert data.fileno() > 2;"
        "subprocess.run([sys.executable, '-c', 'import sys; print(1, flush=True); assert sys.stdout'], check=True)"
    )
    command = f'exec "$0" -c "$1" "$2" {closed}'
    done = subprocess.run(["bash", "-c", command, sys.executable, code, str(tmp_path / "data")], cwd=ROOT, timeout=60)
    assert done.returncode == 0 and (tmp_path / "data").read_text() == ""
