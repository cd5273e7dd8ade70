"""A process that waits to take a training process's place: what it gets, and that it is in nobody's way until then."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import guard_line, whereabouts
from harness.guard import parent_of
from harness.standby import VARIABLE, Standby, wait_for_turn
from tests.launching import ROOT

# Says when it waits, and when its turn has come what it was given.
WAITING = """
import json, os, pathlib, signal, sys
from harness import guard_line, standby, whereabouts
folder = pathlib.Path(sys.argv[1])

def prepare():
    print("printed while it prepared")
    os.write(2, b"and by a library")
    (folder / "score").write_text(pathlib.Path("/proc/self/oom_score_adj").read_text())
    (folder / "waits").touch()
    if "raises" in sys.argv:
        raise RuntimeError("what it needs is not there")

standby.wait_for_turn(prepare)
held = {name: os.pread(number, 10, 0).decode() for name, number in guard_line.held().items()}
line = guard_line.can_relaunch()
where = os.pread(int(os.environ[whereabouts.VARIABLE]), 10, 0).decode()
score = pathlib.Path("/proc/self/oom_score_adj").read_text()
print(json.dumps([os.environ["GREETING"], held, line, where, score, os.environ.get(standby.VARIABLE)]), flush=True)
if "sleeps" in sys.argv:
    signal.pause()
"""


@pytest.fixture
def standbys(tmp_path: Path) -> Iterator[Any]:
    made = []

    def make(*words: str) -> Standby:
        # Its output is the test's own, in a file.
        command = ["bash", "-c", 'exec "$0" "$@" > "$1/out" 2>&1', sys.executable, "-c", WAITING, str(tmp_path), *words]
        command[3:] = [sys.executable, "-c", WAITING, str(tmp_path), *words]
        command[2] = f'exec "$0" "$@" > "{tmp_path}/out" 2>&1'
        made.append(Standby(command, {"PYTHONPATH": str(ROOT)}))
        return made[-1]

    yield make
    for each in made:
        each.end()


def until(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.02)


def give(standby: Standby) -> subprocess.Popen[bytes] | None:
    """Three files: the line to a guard, a page of whereabouts, and memory."""
    files = [os.memfd_create(name) for name in ("line", "where", "state")]
    for number, text in zip(files, (b"", b"a page", b"a state"), strict=True):
        os.write(number, text)
    line, where, state = files
    environment = {
        guard_line.LINE_VARIABLE: str(line),
        whereabouts.VARIABLE: str(where),
        guard_line.HELD_VARIABLE: json.dumps({"state": state}),
        "GREETING": "your turn",
    }
    child = standby.take(environment, files)
    for number in files:
        os.close(number)
    return child


@pytest.mark.parametrize("words", [(), ("raises",)])
def test_it_becomes_the_training_process_with_environment_and_files(words: tuple[str, ...], standbys: Any, tmp_path: Path) -> None:
    standby = standbys(*words)
    until(tmp_path / "waits")
    assert not standby.has_ended()
    child = give(standby)
    assert child is not None and child.wait(30) == 0
    # Nothing of what it did before.
    greeting, held, _, where, score, variable = json.loads((tmp_path / "out").read_text())
    assert (greeting, held, where, variable) == ("your turn", {"state": "a state"}, "a page", None)
    own = Path("/proc/self/oom_score_adj").read_text()
    assert score == own and int((tmp_path / "score").read_text()) == 1000  # the kernel's first choice while it waits


def test_it_may_be_given_its_turn_while_it_prepares(standbys: Any, tmp_path: Path) -> None:
    child = give(standbys())
    assert child is not None and child.wait(30) == 0
    assert json.loads((tmp_path / "out").read_text())[0] == "your turn"


def test_it_ends_with_its_guard(tmp_path: Path) -> None:
    code = "import sys, time; from harness.standby import Standby; made = Standby(sys.argv[1:], {}); print(made.process.pid, flush=True); "
    guard = subprocess.Popen(
        [sys.executable, "-c", code + "time.sleep(60)", sys.executable, "-c", WAITING, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert guard.stdout is not None
    pid = int(guard.stdout.readline())
    until(tmp_path / "waits")
    guard.kill()
    guard.wait()
    deadline = time.monotonic() + 10
    while parent_of(pid) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_it_is_not_needed_any_more(standbys: Any, tmp_path: Path) -> None:
    standby = standbys()
    until(tmp_path / "waits")
    standby.line.close()  # the guard has left
    assert standby.process.wait(10) == 0
    assert (tmp_path / "out").read_text() == ""


def test_without_it_a_new_process_is_started(standbys: Any, tmp_path: Path) -> None:
    standby = standbys()
    until(tmp_path / "waits")
    standby.process.kill()
    standby.process.wait()
    assert standby.has_ended() and give(standby) is None
    assert Standby([str(tmp_path / "no such program")], {}).has_ended()


def test_signals_wait_for_its_turn(standbys: Any, tmp_path: Path) -> None:
    """Ctrl-C reaches every process of a terminal; the guard ends the one that waits when the run has ended."""
    standby = standbys("sleeps")
    until(tmp_path / "waits")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        standby.process.send_signal(number)
    time.sleep(0.2)
    assert not standby.has_ended()
    child = give(standby)
    assert child is not None and child.wait(30) in (-signal.SIGTERM, -signal.SIGHUP)


def test_a_process_that_is_none_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    wait_for_turn(lambda: pytest.fail("prepares nothing"))
