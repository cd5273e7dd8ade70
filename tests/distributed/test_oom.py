"""Out-of-memory on some ranks at every place of a step, under every engine: the run goes on with the same samples and the same losses.

One launch takes several failures, one after the other down the ladder, in the dry run and in steps 1 and later. The clean run that all are
compared with is one process: engines agree to the last printed digit (test_main_job).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import two_nodes
from tests.distributed.test_main_job import DS, make_model_folder
from tests.faults.fork_ranks import ForkServer
from tests.launching import ROOT, Kind, Result, run_launcher, run_on_nodes

STEPS = 8
WORKER = ROOT / "tests" / "distributed" / "oom_worker.py"


@pytest.fixture(scope="module")
def job(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("oom")
    make_model_folder(folder / "model")
    (folder / "data.txt").write_text("".join(f"line {number} of a text that is long enough to train on\n" for number in range(300)))
    result = run(server, folder, "clean", 1, [], "")
    assert result.returncode == 0, result.stdout
    return {"folder": folder, "losses": result.losses, "gradient_norms": gradient_norms(result), "evaluations": evaluations(result)}


def arguments(folder: Path, name: str, num_processes: int, more: list[str]) -> list[str]:
    values = {
        "model_name_or_path": folder / "model",
        "train_file": folder / "data.txt",
        "block_size": 64,
        "validation_split_percentage": 10,
        "per_device_train_batch_size": 16 // num_processes,
        "per_device_eval_batch_size": 4,
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "precision": "fp32",
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_strategy": "no",
        "data_cache_dir": folder / "cache",
        "output_dir": folder / name,
    }
    return [*(token for key, value in values.items() for token in (f"--{key}", str(value))), *more]


def run(server: ForkServer, folder: Path, name: str, num_processes: int, more: list[str], injected: str) -> Result:
    environ = {"HARNESS_TEST_OOM": injected}
    return server.run(arguments(folder, name, num_processes, more), num_processes, folder / f"{name}-life", environment=environ)


def evaluations(result: Result) -> list[float]:
    return [row["eval_loss"] for row in result.metrics() if row["kind"] == "eval"]


def gradient_norms(result: Result) -> list[float]:
    """Adam takes gradients of any scale, so losses do not tell one that was summed twice."""
    return [row["grad_norm"] for row in result.rows]


STEP = "step"
ENGINES: dict[str, tuple[int, list[str], str, list[tuple[str, str]]]] = {
    # The ladder from micro-batch 8: selective, full, 4, 2, 1.
    "one process": (
        1, [], "forward:0:1 backward:0:6 recompute:0:9 evaluation:0:2",
        [(STEP, "forward"), (STEP, "backward"), (STEP, "recompute"), ("evaluate", "evaluation")],
    ),
    "ddp": (
        2, [], "forward:1:1 backward:0:6 recompute:all:9 reduce-buffer:1:6 evaluation:1:2",
        [(STEP, "forward"), (STEP, "backward"), (STEP, "recompute"), (STEP, "reduce-buffer"), ("evaluate", "evaluation")],
    ),
    "fsdp": (
        2, ["--fsdp", "full_shard"],
        "gather-buffer:1:2 backward:0:4 reduce-buffer:1:9 recompute:all:14 forward:0:20 evaluation:1:2",
        [(STEP, "gather-buffer"), (STEP, "backward"), (STEP, "reduce-buffer"), (STEP, "recompute"), (STEP, "forward"),
         ("evaluate", "evaluation")],
    ),
    "fsdp compiled": (
        2, ["--fsdp", "full_shard", "--torch_compile", "--torch_compile_backend", "aot_eager"],
        "gather-buffer:1:2 backward:0:4 reduce-buffer:1:9 forward:0:14 evaluation:1:2",
        [(STEP, "gather-buffer"), (STEP, "backward"), (STEP, "reduce-buffer"), (STEP, "forward"), ("evaluate", "evaluation")],
    ),
    "zero2": (
        2, ["--deepspeed", str(DS / "zero2.json")],
        "forward:1:1 backward:0:4 reduce-buffer:1:6 recompute:all:9 evaluation:1:2",
        [(STEP, "forward"), (STEP, "backward"), (STEP, "reduce-buffer"), (STEP, "recompute"), ("evaluate", "evaluation")],
    ),
    "zero3": (
        2, ["--deepspeed", str(DS / "zero3.json")],
        "gathered-copy:1:1 backward:0:4 gather-buffer:1:20 recompute:all:9 gathered-copy:0:40 evaluation:1:2",
        [(STEP, "gathered-copy"), (STEP, "backward"), (STEP, "gather-buffer"), (STEP, "recompute"), (STEP, "gathered-copy"),
         ("evaluate", "evaluation")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if "compiled" in name else ()) for name in ENGINES])
def test_the_run_goes_on_with_the_same_losses(name: str, server: ForkServer, job: dict[str, Any]) -> None:
    num_processes, more, injected, places = ENGINES[name]
    result = run(server, job["folder"], name.replace(" ", "-"), num_processes, more, injected)
    check(result, job, places)


@pytest.mark.slow  # a launcher has no part in a redo: the ranks above are forked
@pytest.mark.parametrize(("kind", "name"), [("torchrun", "fsdp"), ("deepspeed", "zero3")])
def test_the_run_goes_on_under_the_real_launcher(kind: Kind, name: str, job: dict[str, Any]) -> None:
    num_processes, more, injected, places = ENGINES[name]
    tokens = arguments(job["folder"], f"{name}-{kind}", num_processes, more)
    check(run_launcher(kind, num_processes, tokens, script=WORKER, extra_env={"HARNESS_TEST_OOM": injected}), job, places)


def check(result: Result, job: dict[str, Any], places: list[tuple[str, str]]) -> None:
    assert result.returncode == 0, result.stdout
    down = [row for row in result.metrics() if row["kind"] == "event" and row["event"] == "oom"]
    assert sorted(row["phase"] for row in down) == sorted(phase for phase, _ in places), result.stdout
    for _, place in places:
        assert f"out of memory in {place}" in result.stdout, place
    assert result.losses == pytest.approx(job["losses"], rel=1e-4)
    assert gradient_norms(result) == pytest.approx(job["gradient_norms"], rel=1e-4)
    assert evaluations(result) == pytest.approx(job["evaluations"], rel=1e-4)
    assert [row["step"] for row in result.rows] == list(range(1, STEPS + 1))
    ladder = json.loads((result.output_dir / "ladder.json").read_text())  # type: ignore[operator]
    assert len(ladder["steps_down"]) == len(places)


def test_the_end_of_the_ladder_says_what_was_tried(server: ForkServer, job: dict[str, Any]) -> None:
    injected = " ".join(f"forward:1:{call}" for call in range(1, 40))
    more = ["--fsdp", "full_shard", "--oom_ladder", "micro_batch=4", "micro_batch"]
    result = run(server, job["folder"], "end", 2, more, injected)
    assert result.returncode != 0
    assert result.exit_json is not None and result.exit_json["code"] == 1
    for words in ("nothing left to lower", "micro_batch_size 8 -> 4; micro_batch_size 4 -> 2", "--lora_r"):
        assert words in result.exit_json["reason"]


def test_two_nodes_step_down_together_and_start_again_together(job: dict[str, Any]) -> None:
    if reason := two_nodes.problem():
        pytest.skip(reason)
    tokens = arguments(job["folder"], "nodes", 2, ["--fsdp", "full_shard", "--snapshot_steps", "2"])
    # On the second node: a step that both redo, and an update after which both start again, over a fresh port of the first.
    environ = {"HARNESS_TEST_OOM": "backward:1:4 update:1:6"}
    with two_nodes.two_nodes() as nodes:
        results = run_on_nodes(nodes, tokens, script=WORKER, extra_env=environ, output_dir=job["folder"] / "nodes")
    assert [result.returncode for result in results] == [0, 0], results[0].stdout + results[1].stdout
    result = results[0]
    down = [(row["phase"], row["way"], row["rank"]) for row in result.metrics() if row["kind"] == "event" and row["event"] == "oom"]
    assert down == [("step", "redo", 1), ("update", "relaunch", 1)]
    (resumed,) = [row for row in result.metrics() if row["kind"] == "event" and row["event"] == "resume"]
    assert (resumed["step"], resumed["path"], resumed["lost_steps"]) == (4, "snapshot in host memory", 1)
    counted = {row["step"]: row["loss"] for row in result.rows if row["kind"] == "train"}
    assert list(counted.values()) == pytest.approx(job["losses"], rel=1e-4)
