"""A run on two gloo ranks that starts where the memory planner says and steps down its ladder, and one that only hears the plan.

Same samples, same losses.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.faults.fork_ranks import ForkServer
from tests.launching import Result

CONFIG = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}


def run(server: ForkServer, folder: Path, name: str, num_processes: int, injected: str = "", **flags: Any) -> Result:
    values = {
        "config_name": folder / "config.json",
        "tokenizer_name": "bytes",
        "train_file": folder / "data.txt",
        "block_size": 256,
        "max_steps": 2,
        "logging_steps": 1,
        "precision": "fp32",
        "save_strategy": "no",
        "save_final": False,
        "data_cache_dir": folder / "cache",
        "gpu_memory": "1.65GiB",  # of which a CUDA context and NCCL would take 1.55
        "output_dir": folder / name,
        **flags,
    }
    tokens = [token for key, value in values.items() for token in (f"--{key}", str(value))]
    # Without guards only what the same processes can take is on the ladder.
    environ = {"HARNESS_CACHE": str(folder / "harness"), "HARNESS_TEST_OOM": injected, "HARNESS_NO_GUARD": "1"}
    return server.run(tokens, num_processes, folder / f"{name}-life", environment=environ)


def test_the_plan_is_taken_and_changes_no_loss(server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "data.txt").write_text("".join(f"line {number} of a text that is long enough to train on\n" for number in range(300)))
    planned = run(server, tmp_path, "planned", 2, "backward:1:3", fsdp="full_shard")  # the dry run is over by then
    assert planned.returncode == 0, planned.stdout
    plan = json.loads((tmp_path / "planned/plan.json").read_text())
    settings = plan["chosen"]["settings"]
    assert (settings["micro_batch_size"], settings["activation_checkpointing"]) != (8, "none")  # which does not fit
    assert settings["micro_batch_size"] * plan["chosen"]["gradient_accumulation_steps"] == 8
    assert plan["asked"]["misfit"].startswith("needs 1.7 GiB of a card")
    assert plan["changed"] == []
    assert plan["closed_forms"] == []
    assert "memory plan for fsdp on 2 x a card (1.650 GiB): start with" in planned.stdout
    # The ladder has what each rung was predicted to need; without a limit seen, the fastest that needs less was next.
    ladder = json.loads((tmp_path / "planned/ladder.json").read_text())
    rungs = ladder["ladder"]
    assert rungs[0] == {**settings, **{name: rungs[0][name] for name in ("need_bytes", "step_time_s", "host_bytes")}}
    assert rungs[0]["need_bytes"] == plan["chosen"]["estimate"]["expected_bytes"]
    assert all(rung["need_bytes"] < rungs[0]["need_bytes"] for rung in rungs[1:])
    (step,) = ladder["steps_down"]
    assert (step["phase"], step["rank"], step["way"], step["requested_gib"]) == ("step", 1, "redo", 2.0)
    below = [rung for rung in rungs[1:] if rung["need_bytes"] < 0.97 * rungs[0]["need_bytes"]] or rungs[1:]
    assert {name: below[0][name] for name in ladder["now"]} == ladder["now"] != settings
    assert planned.rows[-1]["micro_batch_size"] == ladder["now"]["micro_batch_size"]

    heard = run(server, tmp_path, "heard", 1, auto_memory="suggest", per_device_train_batch_size=16)
    assert heard.returncode == 0, heard.stdout
    assert "suggested, not taken (--auto_memory on takes it): --per_device_train_batch_size" in heard.stdout
    assert {row["micro_batch_size"] for row in heard.rows} == {16}
    assert [row["loss"] for row in planned.rows] == pytest.approx([row["loss"] for row in heard.rows], abs=1e-4)
