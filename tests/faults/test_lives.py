"""What a job does when something around it goes wrong: two in one folder, a folder taken away, ranks that stand still or never come."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
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


def test_a_second_job_in_the_folder_is_refused_and_harms_nothing(server: ForkServer, inputs: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    command = jobs.arguments(inputs, output, "ddp")
    first = server.start(command, 2, tmp_path / "first")
    wait_for_step(first, output, 1)
    second = server.start(command, 2, tmp_path / "second")
    assert second.wait(100) == {0: 2, 1: 2}
    assert f"another run is writing to {output}" in second.output()
    assert first.wait(200) == {0: 0, 1: 0}
    assert jobs.exit_code(output) == 0
    assert [row["step"] for row in jobs.train_rows(output)] == list(range(1, jobs.NUM_STEPS + 1))


def test_without_its_folder_a_job_trains_to_the_end_and_says_what_is_missing(server: ForkServer, inputs: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    life = server.start(jobs.arguments(inputs, output, "ddp"), 2, tmp_path / "life")
    life.wait_for(f"checkpoint {output}/checkpoint-{jobs.SAVE_STEPS} complete")
    shutil.rmtree(output)
    codes = life.wait(200)
    printed = life.output()
    assert f"checkpoint of step {jobs.NUM_STEPS} was not written: {output} is gone" in printed
    assert f"train | step: {jobs.NUM_STEPS}/{jobs.NUM_STEPS} " in printed
    assert set(codes.values()) == {1}
    report = json.loads((output / "exit.json").read_text())
    assert report["code"] == 1
    assert report["reason"] == (
        f"NotSavedError: the checkpoint of step {jobs.NUM_STEPS} was not written ({output} is gone); newest complete one: none"
    )
    assert (output / "final" / "model.safetensors").stat().st_size > 0  # what was trained is not thrown away


def test_a_rank_that_never_arrives_is_named_in_time(server: ForkServer, inputs: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    started = time.monotonic()
    life = server.start(jobs.arguments(inputs, output, "ddp", "--ddp_timeout", "6"), 2, tmp_path / "life", ranks_started=[0])
    assert life.wait(60) == {0: 1}
    assert time.monotonic() - started > 6
    reason = "rank 1 of 2 did not arrive within 6 s (--ddp_timeout): see what it printed"
    assert reason in life.output()
    assert json.loads((output / "exit.json").read_text())["reason"] == reason


def test_without_rank_0_the_others_say_so(server: ForkServer, inputs: Path, tmp_path: Path) -> None:
    life = server.start(jobs.arguments(inputs, tmp_path / "out", "ddp", "--ddp_timeout", "4"), 2, tmp_path / "life", ranks_started=[1])
    assert life.wait(60) == {1: 1}
    assert "rank 0 was not there at 127.0.0.1:" in life.output()


def test_a_rank_that_stands_still_for_a_while_is_waited_for(server: ForkServer, inputs: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    life = server.start(jobs.arguments(inputs, output, "fsdp"), 2, tmp_path / "life")
    wait_for_step(life, output, 3)
    os.kill(life.ranks[1], signal.SIGSTOP)
    time.sleep(20)
    before = len(jobs.train_rows(output))
    assert before < jobs.NUM_STEPS
    assert len(life.processes()) == 5
    os.kill(life.ranks[1], signal.SIGCONT)
    assert life.wait(200) == {0: 0, 1: 0}
    assert [row["step"] for row in jobs.train_rows(output)] == list(range(1, jobs.NUM_STEPS + 1))


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
