"""Where a rank is: read from outside of a process that waits, is stopped, has crashed, or knows nothing of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.relaunch_hub import COLLECT_S, FRESH_S, RollCall
from harness.whereabouts import VARIABLE, Whereabouts, describe, late, place_of, who_hangs
from tests.launching import ROOT

CHILD = """
import os, sys, time
from harness import whereabouts
kind = sys.argv[1]
def stand():
    print("ready", flush=True)
    time.sleep(60)
if kind == "never begun":
    stand()
whereabouts.begin()
with whereabouts.waiting("tokens of the step"):
    pass
if kind == "in python":
    stand()
if kind == "abort":
    os.abort()
if kind == "abort in a worker":
    worker = os.fork()
    if worker == 0:
        os.abort()
    os.waitpid(worker, 0)
    stand()
if kind == "noted":
    print("ready", flush=True)
    sys.stdin.readline()
    print(whereabouts.note_of_guard(), flush=True)
    stand()
with whereabouts.waiting("commit vote"):
    stand()
"""


STANDS = ("<string>:6 stand", "<string>:7 stand")  # it says so, and sleeps


class Process:
    """A child as a guard starts it."""

    def __init__(self, kind: str) -> None:
        self.where = Whereabouts()
        self.child = subprocess.Popen(
            [sys.executable, "-c", CHILD, kind],
            env={**os.environ, VARIABLE: str(self.where.descriptor), "PYTHONPATH": str(ROOT)},
            pass_fds=[self.where.descriptor],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def line(self) -> str:
        assert self.child.stdout is not None
        return self.child.stdout.readline().strip()


@pytest.fixture
def processes() -> Iterator[Any]:
    made: list[Process] = []

    def make(kind: str) -> Process:
        made.append(Process(kind))
        return made[-1]

    yield make
    for process in made:
        process.child.kill()
        process.child.wait()
        process.where.close()


def test_a_process_that_runs_python_shows_its_place_and_lives_on(processes: Any) -> None:
    process = processes("in python")
    assert process.line() == "ready"
    for _ in range(2):
        found = process.where.look(process.child.pid, limit_s=10.0)
        assert (found["number"], found["waiting"], found["name"]) == (1, False, "tokens of the step")
        assert found["at"] in STANDS
        assert "state" not in found
    assert process.child.poll() is None


def test_a_process_that_waits_names_the_wait(processes: Any) -> None:
    process = processes("waits")
    assert process.line() == "ready"
    found = process.where.look(process.child.pid)
    assert (found["number"], found["waiting"], found["name"]) == (2, True, "commit vote")
    assert 0 <= found["for_s"] < 30


def test_a_stopped_process_is_not_waited_for(processes: Any) -> None:
    process = processes("waits")
    assert process.line() == "ready"
    process.child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.child.pid, os.WSTOPPED | os.WNOWAIT)
    started = time.monotonic()
    found = process.where.look(process.child.pid, limit_s=5.0)
    assert time.monotonic() - started < 2
    assert found["state"] == "is stopped by a signal such as SIGSTOP" and "at" not in found


def test_a_process_without_the_handler_is_not_killed_by_being_asked(processes: Any) -> None:
    process = processes("never begun")
    assert process.line() == "ready"
    found = process.where.look(process.child.pid)
    assert (found["number"], found["name"]) == (0, "") and "at" not in found
    assert process.child.poll() is None


def test_a_crash_leaves_its_stacks(processes: Any) -> None:
    process = processes("abort")
    assert process.child.wait(30) == -signal.SIGABRT
    assert process.where.stacks().startswith("Fatal Python error: Aborted")
    assert place_of(process.where.stacks()) == "<string>:16 <module>"
    assert process.where.look(process.child.pid)["state"] == "has ended"


def test_a_worker_that_crashes_is_not_taken_for_the_process(processes: Any) -> None:
    process = processes("abort in a worker")
    assert process.line() == "ready"
    assert process.where.stacks() == ""
    assert process.where.look(process.child.pid, limit_s=10.0)["at"] in STANDS


def test_the_guard_says_why_it_asks_for_a_stop(processes: Any) -> None:
    process = processes("noted")
    assert process.line() == "ready"
    process.where.note("the launcher is gone")
    assert process.child.stdin is not None
    process.child.stdin.write("\n")
    process.child.stdin.flush()
    assert process.line() == "the launcher is gone"


SUM = "torch/distributed/distributed_c10d.py:3045 all_reduce, from harness/coordination.py:121 sum"
STACKS = """Thread 0x00007f13 (most recent call first):
  File "/usr/lib/python3.12/threading.py", line 331 in wait
  File "/srv/harness/checkpoint.py", line 9 in _finish

Current thread 0x00007f45 [MainThread] (most recent call first):
  File "/env/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", line 3045 in all_reduce
  File "/srv/clone/harness/coordination.py", line 121 in sum
  File "/srv/clone/harness/trainer.py", line 9 in train
"""


@pytest.mark.parametrize(
    ("stacks", "place"),
    [
        (STACKS, SUM),
        (
            STACKS.replace("Current thread", "Thread"),
            SUM,
        ),
        ("Current thread 0x1 (most recent call first):\n" + STACKS.splitlines()[2] + "\n", "harness/checkpoint.py:9 _finish"),
        ("Fatal Python error: Aborted\n\nCurrent thread 0x1 (most recent call first):\n  <no Python frame>\n", ""),
        ("", ""),
    ],
)
def test_the_main_threads_place(stacks: str, place: str) -> None:
    assert place_of(stacks) == place


def position(number: int, waiting: bool, **more: Any) -> dict[str, Any]:
    return {"number": number, "waiting": waiting, "for_s": 5.2, "name": "commit vote", **more}


def test_who_has_not_come_is_told_from_who_waits() -> None:
    found: dict[str, Any] = {"0": position(7, True), "1": position(6, False, at="harness/data.py:3 read"), "2": position(7, True)}
    assert late(found) == ["1"]
    assert who_hangs(found) == "; rank 1 left 'commit vote' 5.2 s ago, is at harness/data.py:3 read"
    found["3"] = {}  # whoever is not there at all is waited for first
    assert who_hangs(found) == "; rank 3 says nothing"
    assert describe(0, found["0"]) == "rank 0 waits for the others in 'commit vote' for 5.2 s"


def test_who_waited_to_the_limit_is_not_named_but_the_stopped_one_that_was_further() -> None:
    """Rank 0 sits in a collective of the engine; rank 1 was stopped in the vote before it, and so seems to wait."""
    found = {"0": position(7, False, asked=True), "1": position(7, True, state="is stopped by a signal such as SIGSTOP")}
    assert late(found) == ["1"]
    del found["1"]["state"]
    assert late(found) == [] and who_hangs(found) == "; rank 1 waits for the others in 'commit vote' for 5.2 s"


def test_in_a_collective_that_all_have_come_to_whoever_cannot_run_is_named_else_all() -> None:
    found = {str(rank): position(7, True, at="torch/x.py:1 wait") for rank in range(6)}
    assert late(found) == []
    assert who_hangs(found).endswith("; 2 more") and who_hangs(found).count("rank") == 4
    found["5"]["state"] = "waits for a disk or a network file system"
    assert who_hangs(found).startswith(
        "; rank 5 waits for a disk or a network file system, waits for the others in 'commit vote' for 5.2 s"
    )
    assert who_hangs({}) == ""


def test_a_roll_call_is_made_once_for_many_that_ask_and_ends_without_those_that_say_nothing() -> None:
    call = RollCall(3)
    assert call.ask(100.0) == "ask" and call.ask(100.1) == "wait"
    assert [call.add(0, {"number": 1}), call.add(2, {"number": 2})] == [False, False]
    assert not call.tick(100.0 + COLLECT_S)
    assert call.tick(100.1 + COLLECT_S)
    assert call.found == {"0": {"number": 1}, "1": {}, "2": {"number": 2}}
    assert not call.tick(200.0) and not call.add(1, {"number": 9})  # too late
    assert call.found["1"] == {}
    assert call.ask(100.0 + FRESH_S - 1) == "tell" and call.ask(100.0 + FRESH_S) == "ask"
    assert [call.add(rank, {}) for rank in range(3)] == [False, False, True]


def test_stacks_of_a_rank_are_of_the_users_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from harness import guard

    monkeypatch.setattr(guard.signal, "signal", lambda number, action: None)
    monkeypatch.setattr(guard.signal, "set_wakeup_fd", lambda descriptor: -1)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    parent = guard.Guard(["true"])
    parent.folder = tmp_path
    old = os.umask(0o027)
    try:
        assert parent._write_stacks("Thread") == "stacks-rank-0.txt"
    finally:
        os.umask(old)
    assert (tmp_path / "stacks-rank-0.txt").stat().st_mode & 0o777 == 0o640


def test_the_rank_that_the_others_wait_for_is_named_once_it_lags_twice_in_a_row(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import logging

    from harness.trainer import LagWatch

    monkeypatch.setattr(logging.getLogger("harness"), "propagate", True)
    watch, silent = LagWatch(True), LagWatch(False)
    lagging, even = [9.0, 1.0, 8.0], [4.0, 3.9, 4.1]
    # Ten steps in 20 s: a lag counts from 0.4 s a step on.
    assert watch.look(lagging, 20.0, 10) == {"slowest_rank": 1, "lag_s": 0.8}
    assert watch.look(even, 20.0, 10) == {}
    assert watch.look(lagging, 20.0, 10) == {"slowest_rank": 1, "lag_s": 0.8}
    assert caplog.messages == []
    for _ in range(3):
        assert watch.look(lagging, 20.0, 10) == silent.look(lagging, 20.0, 10) == {"slowest_rank": 1, "lag_s": 0.8}
    assert caplog.messages == ["rank 1 is the slowest: others wait for it 0.80 s of each step of 2.00 s"]
    assert watch.look([0.1, 0.0], 0.1, 10) == {}  # a tenth of each step, but of a very short one: noise
