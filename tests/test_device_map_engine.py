"""The device-map engine in one CPU process: the same losses as plain training, step by step, whatever the depth, also after a failed step.

Its places are one host here; several cards are for tests/gpu/test_device_map.py.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness.batches import StepBatch, make_sample, make_step_batch
from harness.modeling import build_empty, byte_tokenizer, load_config
from harness.parsing import parse_args


def _args(tmp_path: Path, *flags: str) -> Any:
    overrides = "hidden_size=32,intermediate_size=48,num_hidden_layers=3,num_attention_heads=4,num_key_value_heads=2"
    base = ["--output_dir", str(tmp_path), "--model_type", "llama", "--config_overrides", overrides, "--tokenizer_name", "bytes"]
    base += ["--use_cpu", "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "4", "--learning_rate", "1e-2"]
    return parse_args([*base, "--block_size", "16", "--loss_chunk_size", "5", *flags])


def _build(engine: str, args: Any) -> Any:
    from harness.coordination import Coordinator
    from harness.engines.build import build_engine, initial_settings

    coordinator = Coordinator(1, 0, 0, 1, torch.device("cpu"), "gloo", 60.0)
    empty = build_empty(args.model, load_config(args.model), byte_tokenizer(), dtype=torch.float32, seed=0)
    return build_engine(engine, args, coordinator, empty, initial_settings(args, engine), "fp32", 10)[0]


def _steps(num: int) -> list[StepBatch]:
    generator = np.random.default_rng(0)
    lengths = generator.integers(8, 17, (num, 8))
    return [make_step_batch([make_sample(generator.integers(0, 250, length)) for length in row], 0.0) for row in lengths]


def _train(engine: Any, steps: list[StepBatch]) -> list[float]:
    losses = []
    for batch in steps:
        losses.append(float(engine.forward_backward(batch, batch.num_label_tokens)))
        engine.step()
    return losses


@pytest.mark.parametrize("depth", ["0", "1", "2"])
def test_losses_are_those_of_plain_training(tmp_path: Path, depth: str) -> None:
    plain = _build("ddp", _args(tmp_path))
    mapped = _build("device_map", _args(tmp_path, "--device_map", "cpu", "--in_flight_micro_batches", depth))
    assert mapped.settings.in_flight_micro_batches == (int(depth) or 4)
    steps = _steps(3)
    assert _train(mapped, steps) == pytest.approx(_train(plain, copy.deepcopy(steps)), rel=1e-6)
    weights = dict(plain.full_weights())
    for name, weight in mapped.full_weights():
        torch.testing.assert_close(weight, weights[name], rtol=1e-5, atol=1e-6)
    micro = steps[0].micro_batches(2)[0]
    assert float(mapped.eval_loss(micro)) == pytest.approx(float(plain.eval_loss(micro)), rel=1e-5)
    assert "one process, map cpu" in mapped.describe()


@pytest.mark.slow
def test_compiled_layers_lose_as_plain_ones(tmp_path: Path) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    flags = ["--device_map", "cpu", "--activation_checkpointing", "full", "--loss_chunk_size", "0"]
    steps = [make_step_batch([make_sample(np.random.default_rng(0).integers(0, 250, 16)) for _ in range(8)], 0.0)] * 2
    expected = _train(_build("device_map", _args(tmp_path, *flags)), steps)
    counters.clear()
    compiled = _build("device_map", _args(tmp_path, *flags, "--torch_compile", "--torch_compile_backend", "aot_eager"))
    assert _train(compiled, steps) == pytest.approx(expected, rel=1e-5)
    assert compiled.blocks.is_compiled and counters["stats"]["unique_graphs"] == 1  # one for all layers, micro-batches and threads
    assert compiled.apply(compiled.settings.replace(activation_checkpointing="none")) and compiled.blocks.mode == "none"


def test_each_micro_batch_reports_its_own_rows_whatever_runs_in_between(tmp_path: Path) -> None:
    engine = _build("device_map", _args(tmp_path, "--device_map", "cpu", "--in_flight_micro_batches", "2"))
    (batch,) = _steps(1)
    reported: dict[tuple[int, ...], list[float]] = {}
    batch.report = lambda micro, rows: reported.update({tuple(micro.input_ids[:, 0].tolist()): rows.tolist()})
    total = float(engine.forward_backward(batch, batch.num_label_tokens))
    expected = {
        tuple(micro.input_ids[:, 0].tolist()): [float(engine.eval_loss(alone)) for alone in _rows(micro)]
        for micro in batch.micro_batches(2)
    }
    assert reported.keys() == expected.keys() and len(reported) == 4
    for key, rows in reported.items():
        assert rows == pytest.approx(expected[key], rel=1e-5)
    assert sum(map(sum, reported.values())) == pytest.approx(total, rel=1e-5)


def _rows(micro: Any) -> list[Any]:
    """A micro-batch of each row."""
    names = ("input_ids", "labels", "position_ids", "document_ids")
    tensors = [{name: None if (whole := getattr(micro, name)) is None else whole[row : row + 1] for name in names} for row in range(2)]
    return [dataclasses.replace(micro, report=None, **each) for each in tensors]


def test_a_failed_step_is_redone_with_other_settings(tmp_path: Path) -> None:
    expected = _train(_build("ddp", _args(tmp_path)), _steps(2))
    engine = _build("device_map", _args(tmp_path, "--device_map", "cpu"))
    first, second = _steps(2)
    calls = 0

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    handle = engine.module.model.layers[1].register_full_backward_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        engine.forward_backward(first, first.num_label_tokens)
    handle.remove()
    engine.reset_step()
    assert all(parameter.grad is None for parameter in engine.module.parameters())
    smaller = engine.settings.replace(micro_batch_size=1, in_flight_micro_batches=2, activation_checkpointing="full")
    assert engine.apply(smaller) and engine.settings == smaller and engine.pipeline.recompute
    assert not engine.apply(smaller.replace(param_offload="cpu"))
    assert _train(engine, [first, second]) == pytest.approx(expected, rel=1e-5)


def _run(folder: Path, name: str, *flags: str) -> list[dict[str, Any]]:
    """A whole run in this process; its metrics."""
    from harness.run_clm import main

    overrides = "hidden_size=32,intermediate_size=48,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2"
    base = ["--model_type", "llama", "--config_overrides", overrides, "--tokenizer_name", "bytes", "--train_file", str(folder / "a.txt")]
    base += ["--data_cache_dir", str(folder / "cache"), "--output_dir", str(folder / name), "--use_cpu", "--block_size", "32"]
    base += ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2", "--max_steps", "4", "--learning_rate", "1e-2"]
    base += ["--logging_steps", "1", "--save_steps", "2", "--eval_steps", "2", "--validation_split_percentage", "20"]
    assert main([*base, *flags]) == 0
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def _losses(rows: list[dict[str, Any]], key: str = "loss") -> dict[int, float]:
    return {row["step"]: row[key] for row in rows if key in row}


@pytest.mark.usefixtures("alone")
def test_a_run_evaluates_saves_resumes_and_exports(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    (tmp_path / "a.txt").write_text("".join(f"line {number}: some text to train on\n" for number in range(200)))
    plain = _run(tmp_path, "plain")
    mapped = _run(tmp_path, "mapped", "--device_map", "cpu")
    assert _losses(mapped) == pytest.approx(_losses(plain), rel=1e-5) and len(_losses(mapped)) == 4
    assert _losses(mapped, "eval_loss") == pytest.approx(_losses(plain, "eval_loss"), rel=1e-5) and _losses(mapped, "eval_loss")
    # What either saved the other goes on from.
    for name, source, flags in (("on", "plain", ["--device_map", "cpu"]), ("back", "mapped", [])):
        rows = _run(tmp_path, name, "--resume_from_checkpoint", str(tmp_path / source / "checkpoint-2"), *flags)
        assert _losses(rows) == pytest.approx({step: loss for step, loss in _losses(plain).items() if step > 2}, rel=1e-4)
    final = {name: load_file(tmp_path / name / "final" / "model.safetensors") for name in ("plain", "mapped", "on", "back")}
    for name in ("mapped", "on", "back"):
        for key, weight in final["plain"].items():
            torch.testing.assert_close(final[name][key], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_adapters_train_under_a_map(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"line {number}: some text to train on\n" for number in range(200)))
    adapters = ["--lora_r", "2", "--eval_strategy", "no"]
    plain, mapped = _run(tmp_path, "plain", *adapters), _run(tmp_path, "mapped", "--device_map", "cpu", *adapters)
    assert _losses(mapped) == pytest.approx(_losses(plain), rel=1e-5) and len(_losses(mapped)) == 4
    one, other = (tmp_path / name / "final" / "adapter_model.safetensors" for name in ("plain", "mapped"))
    assert one.stat().st_size == other.stat().st_size > 0


def test_weights_stay_where_the_map_says_and_unplaceable_ones_are_refused(tmp_path: Path) -> None:
    from harness.findings import UserError

    with pytest.raises(UserError, match="names card 0, but there are 0"):
        _build("device_map", _args(tmp_path, "--device_map", '{"model": 0, "lm_head": 0}'))
    with pytest.raises(UserError, match="from where they cannot be trained"):
        _build("device_map", _args(tmp_path, "--device_map", '{"model": "cpu", "lm_head": "disk"}'))


def test_one_process_with_several_cards_uses_them_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.coordination import Coordinator
    from harness.engines.build import spread_over_cards

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    args = _args(tmp_path)
    card, host = torch.device("cuda", 0), torch.device("cpu")
    assert spread_over_cards("ddp", args, Coordinator(1, 0, 0, 1, host, "gloo", 60.0)) == "ddp"
    assert spread_over_cards("ddp", args, Coordinator(2, 0, 0, 2, card, "gloo", 60.0)) == "ddp"
    assert spread_over_cards("fsdp", args, Coordinator(1, 0, 0, 1, card, "gloo", 60.0)) == "fsdp" and args.maps.device_map is None
    assert spread_over_cards("ddp", args, Coordinator(1, 0, 0, 1, card, "gloo", 60.0)) == "device_map"
    assert args.maps.device_map == "dynamic"
    monkeypatch.setenv("WORLD_SIZE", "1")  # a launcher was asked for one process
    assert spread_over_cards("ddp", _args(tmp_path), Coordinator(1, 0, 0, 1, card, "gloo", 60.0)) == "ddp"
