"""Processes that share samples: what is refused before anything is loaded, the arithmetic of batches, and what the planner makes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import memory, planner, step_time
from harness.batches import collate, make_sample
from harness.findings import UserError
from harness.ladder import MemorySettings
from harness.model_shape import Measured, RunShape, closed_form_layers
from harness.sequence_rules import KEY, model_findings
from tests.checking import Rule, check_both, rule_id, run_findings, zero
from tests.test_memory import SHAPE, TINY, write_config

# ---- refusals ----

RULES = [
    Rule(KEY, "error", "must be at least 1, not 0", f"{KEY} 0", f"{KEY} 1"),
    Rule(KEY, "error", "3 does not divide the 8 processes of this run -> one of 1, 2, 4, 8", f"{KEY} 3", f"{KEY} 4"),
    Rule(KEY, "error", "16 does not divide the 8 processes", f"{KEY} 16", f"{KEY} 8"),
    Rule(
        "--target_batch_size",
        "error",
        "6 is no multiple of per_device_train_batch_size * processes = 2 * 2",
        f"{KEY} 4 --per_device_train_batch_size 2 --target_batch_size 6",
        f"{KEY} 4 --per_device_train_batch_size 2 --target_batch_size 4",
    ),
]


@pytest.mark.parametrize("rule", RULES, ids=rule_id)
def test_rules_of_flags(rule: Rule) -> None:
    check_both(rule, lambda flags: run_findings(flags))


def test_a_device_map_and_machines_with_fewer_processes() -> None:
    (found,) = [finding for finding in run_findings(f"--device_map auto {KEY} 2", num_processes=1) if finding.key == KEY]
    assert found.line() == (
        f"error   {KEY}: a device map is one process, with nobody to share samples with -> torchrun with --fsdp full_shard"
    )
    across = run_findings(f"{KEY} 8", num_processes=8, LOCAL_WORLD_SIZE="4")
    (found,) = [finding for finding in across if finding.key == KEY]
    assert found.severity == "warning" and "8 processes share a sample, and a machine has 4" in found.message
    assert [finding for finding in run_findings(f"{KEY} 4", num_processes=8, LOCAL_WORLD_SIZE="4") if finding.key == KEY] == []


@pytest.mark.parametrize(
    ("config", "size", "message"),
    [
        ({"num_attention_heads": 12}, 8, "8 does not divide the model's 12 attention heads -> one of 2, 3, 4, 6, 12"),
        ({"num_attention_heads": 12, "num_key_value_heads": 4}, 6, None),  # keys are repeated
        ({"n_head": 12}, 5, "5 does not divide the model's 12 attention heads"),
        ({"layer_types": ["full_attention", "linear_attention", "sliding_attention"]}, 2, "layers of the kind linear_attention"),
        ({"layer_types": ["full_attention", "sliding_attention", "chunked_attention"]}, 2, None),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4}}, 2, "rotary positions (longrope) depend on the length"),
        ({"rope_scaling": {"type": "dynamic"}}, 2, "rotary positions (dynamic)"),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, 2, "rotary positions (dynamic)"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, 2, None),
        ({"output_router_logits": True, "router_aux_loss_coef": 0.01}, 2, "the router's own loss"),
        ({"output_router_logits": False, "router_aux_loss_coef": 0.01}, 2, None),
        ({"num_attention_heads": 12, "layer_types": ["linear_attention"]}, 1, None),
    ],
)
def test_rules_of_models(config: dict[str, Any], size: int, message: str | None) -> None:
    lines = [finding.line() for finding in model_findings(size, config.get)]
    assert lines == [] if message is None else len(lines) == 1 and message in lines[0]


def test_heads_of_a_local_model_are_read_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_attention_heads": 6}))
    found = run_findings(f"--config_name {tmp_path} {KEY} 4")
    assert [finding.message for finding in found if finding.key == KEY] == ["4 does not divide the model's 6 attention heads"]


def test_a_deepspeed_file_counts_what_is_different(tmp_path: Path) -> None:
    """8 processes, 4 a sample: 2 different micro-batches at a time."""
    from harness.parsing import parse_args
    from harness.templates import apply_template_to_args

    words = ["--model_type", "llama", "--output_dir", "out", "--per_device_train_batch_size", "2", KEY, "4"]
    args = parse_args(words)
    assert apply_template_to_args(zero() | {"train_batch_size": 12}, args, 8) == []
    assert (args.train.per_device_train_batch_size, args.train.gradient_accumulation_steps) == (2, 3)


# ---- rows ----


def test_padding_to_a_multiple_needs_no_mask() -> None:
    rows = [make_sample(np.arange(5)), make_sample(np.arange(7))]
    shared = collate(rows, 0, multiple_of=4)
    assert shared.input_ids.shape == (2, 8) and shared.document_ids is None
    assert shared.num_label_tokens == 4 + 6 and shared.labels[0, 5:].tolist() == [-100] * 3
    assert collate(rows, 0).document_ids is not None
    rows[0]["document_ids"][2:] = 1  # two documents are kept apart all the same
    assert collate(rows, 0, multiple_of=4).document_ids is not None


# ---- the planner ----


def measured(path: Path, size: int, mode: str, **options: Any) -> dict[str, Any]:
    from harness import activation_probe

    request = activation_probe.ProbeRequest(model=str(path), block_size=64, sequence_parallel_size=size, **options)
    model = activation_probe.build(request)
    layers, kinds = activation_probe.cut(model, activation_probe.describe(model)["kind_of_layer"])
    return activation_probe.measure_layers(model, layers, kinds, request, "bf16", mode)


def test_one_process_of_two_is_measured_on_the_models_own_code(tmp_path: Path) -> None:
    path = write_config(tmp_path, TINY | {"num_hidden_layers": 3})
    whole, half = (measured(path, size, "none") for size in (1, 2))
    ratio = half["layers"][0]["forward_kept"][1] / whole["layers"][0]["forward_kept"][1]
    assert 0.5 <= ratio < 0.62  # queries, keys and values are kept once more: as they came, and as they are used
    assert half["layers"][0]["forward_flops"] == pytest.approx(whole["layers"][0]["forward_flops"] / 2)
    plain, packed = (measured(path, 2, "full", documents=documents) for documents in (False, True))
    assert plain["layers"][0]["forward_kept"] == [0, 2 * TINY["hidden_size"] * 32]
    # The mask of packed documents is of whole rows on every process: 64 x 64 bytes.
    assert 64 * 64 <= packed["forward_base"][1] - plain["forward_base"][1] < 64 * 64 + 64 * 16


def test_heads_that_cannot_be_shared_are_not_measured(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="3 does not divide the model's 8 attention heads"):
        measured(write_config(tmp_path, TINY), 3, "none")


def test_closed_forms_of_one_process_of_four() -> None:
    whole, quarter = closed_form_layers(SHAPE, "bf16", "none", 16), closed_form_layers(SHAPE, "bf16", "none", 16, 4)
    assert quarter.layers[0].forward_kept == (0.0, whole.layers[0].forward_kept[1] / 4)
    assert quarter.layers[0].forward_flops == whole.layers[0].forward_flops / 4


def phases(size: int) -> Callable[[str], dict[str, float]]:
    run = RunShape("fsdp", 4, 16, samples_per_step=2, sequence_parallel_size=size)
    found = memory.estimate_memory(MemorySettings(2, "full", 0), Measured(SHAPE, 16, sequence_parallel_size=size), run)
    return lambda name: {phase.name: phase for phase in found.phases}[name].parts


def test_a_quarter_of_a_sample_is_a_quarter_of_activations_and_loss() -> None:
    whole, quarter = phases(1), phases(4)
    for part in ("activations", "loss"):
        assert quarter("loss")[part] == pytest.approx(whole("loss")[part] / 4)
    for part in ("parameters", "optimizer", "gather"):
        assert quarter("backward")[part] == whole("backward")[part]
    with pytest.raises(ValueError, match="measured for 1 processes a sample, not 2"):
        memory.estimate_memory(MemorySettings(1), Measured(SHAPE, 16), RunShape("fsdp", 4, 16, sequence_parallel_size=2))


def test_what_attention_sends() -> None:
    """2 heads of 5 and one of keys, which both processes get: (2 queries + 2 keys + 2 values + 2 outputs) x 5 x 8 tokens x 2 bytes."""
    run = RunShape("fsdp", 4, 16, samples_per_step=3, sequence_parallel_size=2)
    once = (2 + 2 + 2 + 2) * 5 * 8 * 2 // 2 * len(SHAPE.kind_of_layer)  # half of it stays here
    shared = Measured(SHAPE, 16, sequence_parallel_size=2)
    assert (SHAPE.num_heads, SHAPE.num_key_value_heads, SHAPE.head_dim) == (2, 1, 5)
    assert step_time._exchanged_bytes(shared, run, MemorySettings(3)) == 3 * 2 * once
    assert step_time._exchanged_bytes(shared, run, MemorySettings(3, "full")) == 3 * 3 * once
    alone = RunShape("fsdp", 4, 16, samples_per_step=3)
    assert step_time._exchanged_bytes(Measured(SHAPE, 16), alone, MemorySettings(3)) == 0


def test_the_plan_says_who_shares(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(planner, "measure", lambda asked: Measured(SHAPE, 64, sequence_parallel_size=asked[0]["sequence_parallel_size"]))
    words = f"--model a --engine fsdp --num_gpus 4 --gpu H100 --block_size 64 --per_device_train_batch_size 3 {KEY}"
    assert planner.main([*words.split(), "2"]) == 0
    printed = capsys.readouterr().out
    assert "6 samples x 64 tokens an optimizer step, each shared by 2 cards" in printed
    assert f"{KEY} 2" in printed.split("start it")[1]
    assert planner.main([*words.split(), "3"]) == 2
    assert "3 does not divide the 4 processes of this run" in capsys.readouterr().err
