"""FSDP2 with averages in bfloat16 and updates inside backward: the losses of plain training, also over a failure between two updates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.test_main_job import make_model_folder
from tests.distributed.test_oom import STEPS, arguments
from tests.faults.fork_ranks import ForkServer
from tests.launching import Result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("updates")
    make_model_folder(made / "model")
    (made / "data.txt").write_text("".join(f"line {number} of a text that is long enough to train on\n" for number in range(300)))
    return made


def run(server: ForkServer, folder: Path, name: str, num_processes: int, more: str, injected: str = "") -> Result:
    flags = [*arguments(folder, name, num_processes, ["--max_grad_norm", "0"]), *more.split()]
    result = server.run(flags, num_processes, folder / f"{name}-life", environment={"HARNESS_TEST_OOM": injected})
    assert result.returncode == 0, result.stdout
    return result


def test_losses_are_those_of_plain_training(server: ForkServer, folder: Path) -> None:
    plain = run(server, folder, "plain", 1, "")
    # Three groups are reduced in a step, the dry run's among them, two buffers each: step 4 fails when one group has been updated.
    saving = "--fsdp full_shard --optim adamw_bf16 --optim_in_backward --snapshot_steps 2 --save_strategy steps --save_steps 6"
    inside = run(server, folder, "inside", 2, saving, "forward:0:2 reduce-buffer:1:27")
    down = [(row["phase"], row["way"]) for row in inside.metrics() if row["kind"] == "event" and row["event"] == "oom"]
    assert down == [("step", "redo"), ("step", "relaunch")], inside.stdout
    assert "updated in backward: starting all ranks again" in inside.stdout
    (resumed,) = [row for row in inside.metrics() if row["kind"] == "event" and row["event"] == "resume"]
    assert (resumed["step"], resumed["path"], resumed["lost_steps"]) == (2, "snapshot in host memory", 1)
    losses = {row["step"]: row["loss"] for row in inside.rows}
    assert list(losses) == list(range(1, STEPS + 1))
    assert list(losses.values()) == pytest.approx(plain.losses, rel=1e-3)
    norms = {row["step"]: row["grad_norm"] for row in inside.rows}
    assert list(norms.values()) == pytest.approx([row["grad_norm"] for row in plain.rows], rel=1e-2)
    ladder = json.loads((folder / "inside" / "ladder.json").read_text())
    assert [step["way"] for step in ladder["steps_down"]] == ["redo", "relaunch"]
    # From its checkpoint, and with updates after backward, it goes on as it did.
    source = f"--resume_from_checkpoint {folder / 'inside' / 'checkpoint-6'}"
    after = run(server, folder, "after", 2, f"--fsdp full_shard --optim adamw_bf16 {source}")
    assert after.losses == pytest.approx([losses[7], losses[8]], rel=1e-6)
