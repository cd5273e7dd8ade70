"""A process that waits to take a training process's place: what it gets, and that it is in nobody's way until then."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import guard_line, whereabouts
from harness.guard import parent_of
from harness.standby import NAME, VARIABLE, Standby, wait_for_turn
from tests.faults import jobs
from tests.launching import ROOT, Launch, children_of, launch_environment

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
    if "hangs" in sys.argv:
        signal.pause()
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
        command = ["bash", "-c", f'exec "$0" "$@" > "{tmp_path}/out" 2>&1', sys.executable, "-c", WAITING, str(tmp_path), *words]
        made.append(Standby(command, {"PYTHONPATH": str(ROOT)}))
        return made[-1]

    yield make
    for each in made:
        each.end()


def until(path: Path, is_there: Callable[[Path], bool] = Path.exists) -> None:
    deadline = time.monotonic() + 60
    while not is_there(path):
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.02)


def until_ready(standby: Standby) -> None:
    assert standby.line is not None
    assert select.select([standby.line], [], [], 30)[0]


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
    until_ready(standby)
    assert not standby.has_ended()
    child = give(standby)
    assert child is not None and child.wait(30) == 0
    # Nothing of what it did before.
    greeting, held, _, where, score, variable = json.loads((tmp_path / "out").read_text())
    assert (greeting, held, where, variable) == ("your turn", {"state": "a state"}, "a page", None)
    own = Path("/proc/self/oom_score_adj").read_text()
    assert score == own and int((tmp_path / "score").read_text()) == 1000  # the kernel's first choice while it waits


def test_it_is_not_taken_before_it_is_ready(standbys: Any, tmp_path: Path) -> None:
    """Its imports may hang, or end it; what the training process imports itself is told of."""
    standby = standbys("hangs")
    until(tmp_path / "waits")
    assert give(standby) is None
    assert standby.process.poll() == -signal.SIGKILL


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_without_a_word(number: signal.Signals, standbys: Any, tmp_path: Path) -> None:
    standby = standbys()
    until(tmp_path / "waits")
    standby.process.send_signal(number)
    assert standby.process.wait(10) == -number
    assert (tmp_path / "out").read_text() == "" and give(standby) is None


def test_an_interruption_is_left_to_the_guard(standbys: Any, tmp_path: Path) -> None:
    """Ctrl-C reaches every process of a terminal, also one whose interpreter has only begun."""
    standby = standbys()
    standby.process.send_signal(signal.SIGINT)
    until_ready(standby)
    standby.process.send_signal(signal.SIGINT)
    child = give(standby)
    assert child is not None and child.wait(30) == 0
    assert json.loads((tmp_path / "out").read_text())[0] == "your turn"


def test_the_training_process_is_interrupted_as_ever(standbys: Any, tmp_path: Path) -> None:
    standby = standbys("sleeps")
    until_ready(standby)
    child = give(standby)
    assert child is not None
    until(tmp_path / "out", lambda path: path.read_text() != "")
    child.send_signal(signal.SIGINT)
    assert child.wait(30) != 0
    assert "KeyboardInterrupt" in (tmp_path / "out").read_text()


def test_a_process_that_is_none_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    wait_for_turn(lambda: pytest.fail("prepares nothing"))


def test_a_run_goes_on_in_the_process_that_waited(tmp_path: Path) -> None:
    """The guard's second child writes the log after an update has run out of memory in the first."""
    (tmp_path / "inputs").mkdir()
    jobs.make_inputs(str(tmp_path / "inputs"))
    output = tmp_path / "out"
    command = jobs.arguments(tmp_path / "inputs", output, "single", "--oom_ladder", "gradient_checkpointing", "--oom_standby", "on")
    worker, environment = [sys.executable, "-m", "tests.distributed.oom_worker"], launch_environment({"HARNESS_TEST_OOM": "update:0:20"})
    launch = Launch([*worker, *command], environment, output, ROOT)
    try:
        launch.wait_for("train | step: 1/24")
        first, second = children_of(launch.process.pid)
        os.kill(first, signal.SIGSTOP)
        until(Path(f"/proc/{second}/comm"), lambda path: path.read_text().strip() == NAME)
        os.kill(first, signal.SIGCONT)
        until(Path(f"/proc/{second}/fd"), lambda path: output / "train.log" in [link.resolve() for link in path.iterdir()])
        assert parent_of(first) is None
        result = launch.finish()
    finally:
        launch.kill()
    assert result.returncode == 0, result.stdout
    assert result.rows[-1]["step"] == 24 and parent_of(second) is None
