"""Out-of-memory that cannot be redone in process: the guards start all ranks again, lower, from the last state there is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.faults import jobs
from tests.faults.fork_ranks import ForkServer, Life

# Rungs that leave the micro-batch, and so the random numbers of dropout, as they are.
RECOMPUTE = ("--oom_ladder", "gradient_checkpointing")
HOST_ADAM = ("--oom_ladder", "optimizer_offload")
OFFLOAD = ("--oom_ladder", "param_offload")


def run(server: ForkServer, inputs: Path, output: Path, engine: str, injected: str, *more: str) -> Life:
    command = jobs.arguments(inputs, output, engine, *more)
    count = jobs.ENGINES[engine].num_processes
    return server.start(command, count, output.parent / "life", environment={"HARNESS_TEST_OOM": injected})


def events(output: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == "event"]


def steps_down(output: Path) -> list[dict[str, Any]]:
    return list(json.loads((output / "ladder.json").read_text())["steps_down"])


SNAPSHOT_STEPS = 5
# An update fails at step 7: the last checkpoint is of step 4, the last snapshot of step 5.
CASES = {
    # engine, what fails, ladder, phase of the report, change, updates that are made again
    "update of one process": ("single", "update:0:7", RECOMPUTE, "update", "activation_checkpointing none -> full", 1),
    "update of ddp": ("ddp", "update:1:7", RECOMPUTE, "update", "activation_checkpointing none -> full", 1),
    "save of fsdp": ("fsdp", "save:1:2", RECOMPUTE, "save", "activation_checkpointing none -> full", 3),
    "start of fsdp": ("fsdp", "start:0:1", RECOMPUTE, "start or end", "activation_checkpointing none -> full", 0),
    "forward of fsdp, to offload": ("fsdp", "forward:1:13", OFFLOAD, "step", "param_offload none -> cpu", 0),
    "forward of zero3, to another Adam": ("zero3", "forward:1:13", HOST_ADAM, "step", "optimizer_offload 0.0 -> 1.0", 0),
    "update of zero3": ("zero3", "update:0:7", RECOMPUTE, "update", "activation_checkpointing none -> full", 1),
}


# The others in the long form; the whole matrix is tests.faults.oom_matrix.
SHORT = ("update of one process", "start of fsdp", "forward of fsdp, to offload", "forward of zero3, to another Adam")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in SHORT else [pytest.mark.slow]) for name in CASES])
def test_all_ranks_start_again_and_the_run_is_the_same(
    name: str, server: ForkServer, inputs: Path, references: Any, tmp_path: Path
) -> None:
    engine, injected, ladder, phase, change, lost_steps = CASES[name]
    output = tmp_path / "out"
    life = run(server, inputs, output, engine, injected, *ladder, "--snapshot_steps", str(SNAPSHOT_STEPS))
    codes = life.wait(200)
    assert set(codes.values()) == {0}, life.output()
    tolerance = 1e-4 if "another Adam" in name else None  # DeepSpeed's rounds in another order than torch's
    assert jobs.differences(jobs.train_rows(output), jobs.train_rows(references(engine)), engine, inputs, tolerance) == []
    (step,) = steps_down(output)
    assert (step["phase"], step["change"], step["way"]) == (phase, change, "relaunch")
    assert "starting all ranks again (life 2)" in life.output()
    resumed = [row["lost_steps"] for row in events(output) if row["event"] == "resume"]
    assert resumed == ([] if name.startswith("start") else [lost_steps])
    assert jobs.leftovers(output) == []


def test_the_end_of_the_ladder_ends_a_run_that_cannot_even_start(server: ForkServer, inputs: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    life = run(server, inputs, output, "ddp", "start:1:1:all", *RECOMPUTE)
    assert set(life.wait(120).values()) == {1}, life.output()
    report = json.loads((output / "exit.json").read_text())
    assert report["code"] == 1
    assert "nothing left to lower" in report["reason"] and "activation_checkpointing none -> full" in report["reason"]


def test_without_recovery_the_first_failure_is_the_end(server: ForkServer, inputs: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    life = run(server, inputs, output, "ddp", "update:1:3", "--no_oom_recovery")
    assert 1 in life.wait(120).values()
    assert "starting all ranks again" not in life.output()


def test_ddp_goes_on_as_fsdp(server: ForkServer, inputs: Path, references: Any, tmp_path: Path) -> None:
    output = tmp_path / "out"
    command = ("--engine", "auto", "--activation_checkpointing", "full", "--per_device_train_batch_size", "1")
    life = run(server, inputs, output, "ddp", "forward:0:21", *command, "--gradient_accumulation_steps", "2")
    assert set(life.wait(200).values()) == {0}, life.output()
    (step,) = steps_down(output)
    assert step["change"] == "engine  -> fsdp"
    rows, expected = jobs.train_rows(output), jobs.train_rows(references("ddp"))
    assert [row["step"] for row in rows] == list(range(1, jobs.NUM_STEPS + 1))
    assert "engine=fsdp num_processes=2" in life.output()
    # Micro-batches of one sample have other dropout than the reference's of two; the curve stays close.
    assert [row["num_label_tokens"] for row in rows] == [row["num_label_tokens"] for row in expected]
    assert rows[-1]["loss"] == pytest.approx(expected[-1]["loss"], rel=0.05)
