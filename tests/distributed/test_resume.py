"""Resume: other numbers of ranks, other engines, transformers' Trainer's checkpoints, and what is exported from a checkpoint.

Each run saves every third of its ten steps; the next one in a chain begins from the last of these under another layout. Whatever the chain,
the losses are those of the run that was never interrupted.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_main_job import DS, NUM_STEPS, arguments, documents, make_model_folder, trainer_losses
from tests.faults.fork_ranks import ForkServer
from tests.launching import Result

STEPS = 10
TOLERANCE = 2e-5
ENGINES: dict[str, list[str]] = {
    "ddp": [],
    "fsdp": ["--fsdp", "full_shard"],
    "zero2": ["--deepspeed", str(DS / "zero2.json")],
    "zero3": ["--deepspeed", str(DS / "zero3.json")],
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("inputs")
    texts = documents()
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    make_model_folder(folder / "model")
    return {"folder": folder, "texts": texts}


def run(server: ForkServer, inputs: dict[str, Any], output: Path, num_processes: int, micro: int, *more: str) -> Result:
    command = arguments(inputs, output, num_processes, micro, *more)
    return server.run(command, num_processes, output.with_name(f"{output.name}-life"))


def train(
    server: ForkServer, inputs: dict[str, Any], output: Path, engine: str, num_processes: int, *more: str, source: Path | None = None
) -> Result:
    """One run of ten steps, from a checkpoint if one is given."""
    wanted = ["--max_steps", str(STEPS), "--save_steps", "3", *ENGINES[engine], *more]
    wanted += ["--resume_from_checkpoint", str(source)] if source else []
    result = run(server, inputs, output, num_processes, 8 // num_processes, *wanted)
    assert result.returncode == 0, result.stdout
    assert f"engine={engine} num_processes={num_processes}" in result.stdout
    return result


@pytest.fixture(scope="module")
def straight(server: ForkServer, inputs: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Result:
    result = train(server, inputs, tmp_path_factory.mktemp("straight") / "out", "fsdp", 2)
    assert len(result.losses) == STEPS
    return result


def checkpoint_of(result: Result, step: int) -> Path:
    assert result.output_dir is not None
    return result.output_dir / f"checkpoint-{step}"


def check_continued(result: Result, straight: Result, step: int) -> None:
    assert [row["step"] for row in result.rows] == list(range(step + 1, STEPS + 1))
    assert result.losses == pytest.approx(straight.losses[step:], rel=TOLERANCE)
    assert [row["learning_rate"] for row in result.rows] == [row["learning_rate"] for row in straight.rows[step:]]
    assert result.rows[-1]["num_label_tokens"] == straight.rows[-1]["num_label_tokens"]


def test_two_ranks_then_four_then_one(server: ForkServer, inputs: dict[str, Any], straight: Result, tmp_path: Path) -> None:
    four = train(server, inputs, tmp_path / "four", "fsdp", 4, source=checkpoint_of(straight, 3))
    check_continued(four, straight, 3)
    assert four.stdout.count("saved by 2 processes, resumed by 4") == 1
    one = train(server, inputs, tmp_path / "one", "ddp", 1, source=checkpoint_of(four, 6))
    check_continued(one, straight, 6)


@pytest.mark.slow
def test_zero_to_another_stage_then_four_ranks_then_another_engine(
    server: ForkServer, inputs: dict[str, Any], straight: Result, tmp_path: Path
) -> None:
    zero2 = train(server, inputs, tmp_path / "zero2", "zero2", 2, source=checkpoint_of(straight, 3))
    check_continued(zero2, straight, 3)
    zero3 = train(server, inputs, tmp_path / "zero3", "zero3", 2, source=checkpoint_of(zero2, 6))
    check_continued(zero3, straight, 6)
    assert zero3.stdout.count("taken over from zero2 on 2 processes") == 1
    four = train(server, inputs, tmp_path / "four", "zero3", 4, source=checkpoint_of(zero3, 9))
    check_continued(four, straight, 9)
    ddp = train(server, inputs, tmp_path / "ddp", "ddp", 1, source=checkpoint_of(zero3, 9))
    check_continued(ddp, straight, 9)
    assert not list(tmp_path.glob("*/.tmp*"))
    check_export(checkpoint_of(zero3, STEPS), tmp_path / "zero3" / "final", tmp_path / "exported")


def check_export(checkpoint: Path, final: Path, output: Path) -> None:
    """An export in this process holds the very values that the job wrote at its end, and continues a text in the same way."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from harness.checkpoint import main

    assert main([str(checkpoint), str(output), "--dtype", "fp32"]) == 0
    expected, exported = load_file(final / "model.safetensors"), load_file(output / "model.safetensors")
    assert sorted(exported) == sorted(expected) and "lm_head.weight" not in exported  # tied weights once
    assert all(torch.equal(exported[name], expected[name]) for name in expected)
    tokenizer = AutoTokenizer.from_pretrained(output)
    ids = tokenizer("alpha", return_tensors="pt").input_ids
    texts = [
        AutoModelForCausalLM.from_pretrained(folder).generate(ids, max_new_tokens=8, do_sample=False).tolist() for folder in (final, output)
    ]
    assert texts[0] == texts[1]
    card = (output / "README.md").read_text()
    assert f"Trained for {STEPS} optimizer steps" in card
    for text in (card, (final / "README.md").read_text()):
        assert re.search(r"- training data: /\S+/data\.jsonl \(prepared as \w", text), text


def test_export_of_a_sharded_checkpoint_in_another_dtype_and_in_several_files(straight: Result, tmp_path: Path) -> None:
    import torch

    from harness.export_cli import export_checkpoint
    from harness.stored_weights import SafetensorsFolder

    assert straight.output_dir is not None
    check_export(checkpoint_of(straight, STEPS), straight.output_dir / "final", tmp_path / "whole")
    export_checkpoint(checkpoint_of(straight, STEPS), tmp_path / "parts", "bf16", max_shard_bytes=20_000)
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) >= 3
    whole, parts = SafetensorsFolder(tmp_path / "whole"), SafetensorsFolder(tmp_path / "parts")
    assert sorted(whole.where) == sorted(parts.where)
    assert all(torch.equal(parts.get(name), whole.get(name).to(torch.bfloat16)) for name in whole.where)


def test_a_checkpoint_of_transformers_trainer_goes_on_as_the_trainer_would(
    server: ForkServer, inputs: dict[str, Any], tmp_path: Path
) -> None:
    texts = inputs["texts"]
    losses = trainer_losses(inputs["folder"] / "model", texts, tmp_path / "trainer", save_strategy="steps", save_steps=12)
    wanted = ["--resume_from_checkpoint", str(tmp_path / "trainer" / "checkpoint-12")]
    result = run(server, inputs, tmp_path / "out", 1, 4, *wanted)
    assert result.returncode == 0, result.stdout
    assert [row["step"] for row in result.rows] == list(range(13, NUM_STEPS + 1))
    assert result.losses == pytest.approx(losses[12:], rel=1e-4, abs=5e-5)
    assert "taken over from transformers' Trainer: weights, step 12, optimizer state, learning rate" in result.stdout


def test_a_changed_batch_is_refused_with_both_numbers_and_force_goes_on(
    server: ForkServer, inputs: dict[str, Any], straight: Result, tmp_path: Path
) -> None:
    wanted = ["--max_steps", str(STEPS), "--resume_from_checkpoint", str(checkpoint_of(straight, 9))]
    refused = run(server, inputs, tmp_path / "refused", 1, 4, *wanted, "--gradient_accumulation_steps", "1")
    assert refused.exit_json is not None and refused.exit_json["code"] == 2
    assert "the checkpoint had 8 samples per step, this run has 4" in refused.stdout
    assert "model: start" not in refused.stdout  # a large one takes minutes
    forced = run(server, inputs, tmp_path / "forced", 1, 4, *wanted, "--force_resume", "--precision", "bf16")
    assert forced.returncode == 0, forced.stdout
    assert [row["step"] for row in forced.rows] == [STEPS] and "precision fp32 -> bf16 (--force_resume: going on)" in forced.stdout


def test_early_stopping_ends_the_run_and_the_best_is_what_final_holds(server: ForkServer, inputs: dict[str, Any], tmp_path: Path) -> None:
    # The loss falls all the time: with "greater is better" the first evaluation is the best, and two more are without improvement.
    wanted = ["--eval_strategy", "steps", "--eval_steps", "2", "--validation_split_percentage", "20", "--early_stopping_patience", "2"]
    wanted += ["--load_best_model_at_end", "--metric_for_best_model", "eval_perplexity", "--greater_is_better", "--save_total_limit", "1"]
    output = tmp_path / "out"
    result = run(server, inputs, output, 1, 8, *wanted)
    assert result.returncode == 0, result.stdout
    assert [row["step"] for row in result.rows][-1] == 6
    assert "early stopping: 2 evaluations in a row without improvement" in result.stdout
    assert sorted(path.name for path in output.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-6"]
    check_best(output, tmp_path / "best")
    shutil.rmtree(tmp_path / "best")


def check_best(output: Path, exported: Path) -> None:
    import torch
    from safetensors.torch import load_file

    from harness.export_cli import export_checkpoint

    export_checkpoint(output / "checkpoint-2", exported)
    best, final = load_file(exported / "model.safetensors"), load_file(output / "final" / "model.safetensors")
    assert all(torch.equal(best[name], final[name]) for name in final)
