"""Signals and deaths under the real launchers: what is saved, what is left running, and how the same command goes on.

Each launcher runs one job through its lives: asked to stop by SIGTERM to the launcher, by SIGUSR1 to every process (as a batch system
sends it), or by the death of the launcher, and at last left alone. The losses are those of a run that nobody interrupted.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults import forked_script, jobs
from tests.faults.fork_ranks import ForkServer, child_of, is_running
from tests.launching import ROOT, Kind, Launch, Result, launched

NUM_STEPS = 160
GONE_WITHIN_S = 40.0

# launcher: ranks, engine as jobs.ENGINES has it, options of the launch
LAUNCHERS: dict[Kind, tuple[int, str, dict[str, Any]]] = {
    "python": (1, "single", {}),
    "torchrun": (2, "ddp", {}),
    "accelerate": (2, "fsdp", {"config_file": ROOT / "fsdp_configs/full_shard.yaml"}),
    "deepspeed": (2, "zero2", {}),
}


def command(inputs: Path, output: Path, engine: str) -> list[str]:
    more = ["--num_train_epochs", str(NUM_STEPS // jobs.NUM_STEPS + 1), "--max_steps", str(NUM_STEPS), "--save_steps", "1000"]
    return jobs.arguments(inputs, output, engine, *more)


@pytest.fixture(scope="module")
def straight(server: ForkServer, inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, Any]]]:
    """Rows of an uninterrupted run with an engine; forked, so that it costs little."""

    def run(engine: str) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("straight")
        size = jobs.ENGINES[engine].num_processes
        life = server.start(command(inputs, folder / "out", engine), size, folder / "life")
        assert life.wait(300) == dict.fromkeys(range(size), 0), life.output()
        return jobs.train_rows(folder / "out")

    return run


def last_step(output: Path) -> int:
    rows = jobs.train_rows(output) if (output / "metrics.jsonl").exists() else []
    return max((row["step"] for row in rows), default=0)


def wait_for_next_steps(launch: Launch, output: Path, after: int) -> None:
    deadline = time.monotonic() + 200
    while last_step(output) <= after + 1:
        assert launch.process.poll() is None, launch.output()
        assert time.monotonic() < deadline, launch.output()
        time.sleep(0.1)


def stop_by_term(launch: Launch) -> None:
    for _ in range(3):  # impatient people and batch systems repeat themselves
        if launch.process.poll() is None:
            launch.signal(signal.SIGTERM)
        time.sleep(0.05)


def stop_by_usr1(launch: Launch) -> None:
    for pid in launch.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)


def kill_launcher(launch: Launch) -> None:
    launch.signal(signal.SIGKILL)


def check_stopped(result: Result, output: Path, before: int) -> int:
    """The step at which a life stopped: saved whole, after steps of its own, before the end."""
    assert result.exit_json is not None and result.exit_json["code"] == 75, result.stdout
    step = last_step(output)
    assert before < step < NUM_STEPS
    assert jobs.complete_checkpoints(output)[0] == step
    assert jobs.leftovers(output) == []
    return step


STOPS: dict[str, Callable[[Launch], None]] = {"term": stop_by_term, "usr1": stop_by_usr1, "kill": kill_launcher}


# A launch costs ten seconds and more: the short run has each way once, and its last lives are forked. How a
# launcher starts a run that goes on is deepspeed's second life, and in the long form all of them.
LONG = {"python": ["term", "usr1"], "torchrun": list(STOPS), "accelerate": list(STOPS), "deepspeed": list(STOPS)}


@pytest.mark.parametrize(
    ("kind", "stops", "last"),
    [
        ("python", ["usr1"], "forked"),
        pytest.param("torchrun", ["usr1"], "forked", marks=pytest.mark.slow),  # ranks: deepspeed's; the signal: the single process's
        pytest.param("accelerate", ["term"], "forked", marks=pytest.mark.slow),  # its launcher is torchrun's
        ("deepspeed", ["term", "kill"], "forked"),
        *(pytest.param(kind, stops, "launched", marks=pytest.mark.slow) for kind, stops in LONG.items()),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_stopped_runs_go_on_exactly(
    kind: Kind,
    stops: list[str],
    last: str,
    server: ForkServer,
    inputs: Path,
    straight: Callable[[str], list[dict[str, Any]]],
    tmp_path: Path,
) -> None:
    size, engine, options = LAUNCHERS[kind]
    output, step = tmp_path / "out", 0
    arguments = command(inputs, output, engine)
    # The launcher of a later life is its own, also where what it starts is forked.
    forked = {"script": Path(forked_script.__file__), "extra_env": {forked_script.SERVER_VARIABLE: server.address}}
    for number, stop in enumerate(stops):
        ways = options | (forked if number and last == "forked" else {})
        with launched(kind, size, arguments, output_dir=output, **ways) as launch:
            wait_for_next_steps(launch, output, step)
            STOPS[stop](launch)
            step = check_stopped(launch.finish(400, orphans_s=GONE_WITHIN_S), output, step)
    if last == "forked":
        result = server.run(arguments, size, tmp_path / "life", timeout_s=400)
    else:
        with launched(kind, size, arguments, output_dir=output, **options) as launch:
            result = launch.finish(400)
    assert result.returncode == 0, result.stdout
    assert jobs.exit_code(output) == 0
    tolerance = jobs.ENGINES[engine].relative_tolerance
    rows, expected = jobs.train_rows(output), straight(engine)
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    different = [
        (row["step"], row["loss"], other["loss"])
        for row, other in zip(rows, expected, strict=True)
        if abs(row["loss"] - other["loss"]) > tolerance * other["loss"]
    ]
    assert different == []


# ---- deaths, with ranks that only sleep: what ends whom does not depend on the training ----

SLEEPER = """
import os, sys, time
sys.path.insert(0, {root!r})
from harness import guard
if guard.needs_guard():
    sys.exit(guard.main())
open(os.path.join(sys.argv[-1], "child-" + os.environ.get("RANK", "0")), "w").write(f"{{os.getppid()}} {{os.getpid()}}")
time.sleep(600)
"""


def sleepers(folder: Path, size: int, launch: Launch) -> list[tuple[int, int]]:
    """(guard, child) of each rank, once all are there."""
    deadline = time.monotonic() + 200
    while True:
        texts = [path.read_text().split() for path in sorted(folder.glob("child-*"))]
        if len(texts) == size and all(len(text) == 2 for text in texts):
            return [(int(guard), int(child)) for guard, child in texts]
        assert launch.process.poll() is None and time.monotonic() < deadline, launch.output()
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("kind", "victim", "returncode"),
    [
        ("torchrun", "guard", 1),
        ("deepspeed", "child", 247),
        pytest.param("torchrun", "child", 1, marks=pytest.mark.slow),
        pytest.param("deepspeed", "guard", 247, marks=pytest.mark.slow),
        pytest.param("torchrun", "launcher", -9, marks=pytest.mark.slow),
        pytest.param("deepspeed", "launcher", -9, marks=pytest.mark.slow),
    ],
)
def test_when_one_process_is_killed_nothing_is_left(kind: Kind, victim: str, returncode: int, tmp_path: Path) -> None:
    script = tmp_path / "sleeper.py"
    script.write_text(SLEEPER.format(root=str(ROOT)))
    with launched(kind, 2, [str(tmp_path)], script=script) as launch:
        ranks = sleepers(tmp_path, 2, launch)
        pid = {"guard": ranks[1][0], "child": ranks[1][1], "launcher": launch.process.pid}[victim]
        os.kill(pid, signal.SIGKILL)
        started = time.monotonic()
        result = launch.finish(300, orphans_s=GONE_WITHIN_S)
        assert time.monotonic() - started < GONE_WITHIN_S
    assert result.returncode == returncode


def test_under_nohup_a_closed_terminal_ends_nothing(tmp_path: Path) -> None:
    script = tmp_path / "sleeper.py"
    script.write_text(SLEEPER.format(root=str(ROOT)))
    guard = subprocess.Popen(["nohup", sys.executable, str(script), str(tmp_path)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        child = child_of(guard.pid)
        while not (tmp_path / "child-0").exists():
            assert guard.poll() is None
            time.sleep(0.05)
        guard.send_signal(signal.SIGHUP)
        time.sleep(1)
        assert guard.poll() is None and is_running(child)
        guard.send_signal(signal.SIGTERM)
        assert guard.wait(30) == -signal.SIGTERM  # the child has no handler; its end is handed on
        assert not is_running(child)
    finally:
        guard.kill()
