"""What a job does when a process is killed at some moment, or asked to stop at a special one. Other faults: test_scenarios.py."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.faults import jobs
from tests.faults.fork_ranks import PEERS_GRACE_S, ForkServer, Life
from tests.faults.kill9 import run_engine


def wait_for_step(life: Life, output: Path, step: int) -> None:
    life.wait_for(f"train | step: {step}/{jobs.NUM_STEPS} ")


@pytest.mark.parametrize("engine", jobs.ENGINES)
def test_killed_and_started_again_ends_as_if_nothing_had_been(engine: str, server: ForkServer, inputs: Path, tmp_path: Path) -> None:
    # Seeds are chosen so that over the engines every victim is killed, within a save and outside of one.
    seed = {"single": 2, "ddp": 2, "fsdp": 0, "zero2": 1, "zero3": 2}[engine]
    (outcome,) = run_engine(server, inputs, engine, [seed], tmp_path)
    assert outcome.problems == []
    if not engine.startswith("zero"):  # a rank whose peer died ends by itself, before the launcher would kill it
        assert outcome.gone_s < PEERS_GRACE_S - 3
    assert 1 <= outcome.killed_at < jobs.NUM_STEPS


def test_without_rank_0_the_others_say_so(server: ForkServer, inputs: Path, tmp_path: Path) -> None:
    life = server.start(jobs.arguments(inputs, tmp_path / "out", "ddp", "--ddp_timeout", "4"), 2, tmp_path / "life", ranks_started=[1])
    assert life.wait(60) == {1: 1}
    assert "rank 0 was not there at 127.0.0.1:" in life.output()


def test_a_stop_at_a_step_that_was_just_saved_keeps_that_checkpoint(server: ForkServer, inputs: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    # Every step is saved, so the stop comes at one that was; with one checkpoint kept, a second save would leave none for a moment.
    command = jobs.arguments(inputs, output, "single", "--save_steps", "1", "--save_total_limit", "1")
    life = server.start(command, 1, tmp_path / "life")
    wait_for_step(life, output, 3)
    os.kill(life.guards[0], signal.SIGHUP)  # a closed terminal asks to stop like all else
    assert life.wait(100) == {0: 75}
    (step,) = jobs.complete_checkpoints(output)
    assert life.output().count(f"checkpoint {output}/checkpoint-{step} complete") == 1
