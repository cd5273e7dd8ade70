"""QLoRA: refused with its reason where it cannot run; where it can, only the adapters train, beside weights of 4 bits."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness.findings import UserError
from harness.parsing import parse_args
from tests.checking import run_findings

HAS_PACKAGE = importlib.util.find_spec("bitsandbytes") is not None
needs_package = pytest.mark.skipif(not HAS_PACKAGE, reason="bitsandbytes is not installed")
FLAGS = "--model_name_or_path gpt2 --lora_r 4 --load_in_4bit"

torch.set_num_threads(1)


def of_4_bits(flags: str) -> list[str]:
    return [finding.line() for finding in run_findings(flags) if finding.key == "--load_in_4bit"]


def pretend(monkeypatch: pytest.MonkeyPatch, spec: Any) -> None:
    """What is found under the name bitsandbytes."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: spec if name == "bitsandbytes" else find_spec(name, *more))


def test_without_the_package_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, None)
    assert of_4_bits(FLAGS) == ["error   --load_in_4bit: needs the package bitsandbytes -> pip install bitsandbytes, or remove the flag"]
    assert of_4_bits("--lora_r 4") == []


def test_engines_that_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, importlib.util.find_spec("torch"))
    assert of_4_bits(FLAGS) == []
    assert of_4_bits(f"{FLAGS} --fsdp full_shard") == []
    (line,) = of_4_bits(f"{FLAGS} --device_map balanced")
    assert line.startswith("error   --load_in_4bit: does not work under device_map, which")


def test_what_it_turns_off_and_needs() -> None:
    common = ["--model_name_or_path", "gpt2", "--output_dir", "out", "--load_in_4bit"]
    args = parse_args([*common, "--lora_r", "4"])
    assert (args.model.torch_compile, args.train.auto_memory) == (False, "off")
    assert parse_args([*common, "--lora_r", "4", "--auto_memory", "on"]).train.auto_memory == "on"
    for more, message in [([], "--load_in_4bit: has no effect without adapters"), (["--lora_r", "4", "--use_dora"], "--use_dora: needs")]:
        with pytest.raises(UserError, match=message):
            parse_args([*common, *more])
    with pytest.raises(UserError, match="--load_in_4bit: is for a model that has its weights"):
        parse_args(["--model_type", "llama", "--output_dir", "out", "--lora_r", "4", "--load_in_4bit"])


@needs_package
@pytest.mark.parametrize(("bias", "dtype"), [(False, torch.float32), (True, torch.bfloat16), (True, torch.float16)])
def test_a_quantised_layer_computes_the_same_but_for_rounding(bias: bool, dtype: torch.dtype) -> None:
    from harness.four_bit import PackedLinear

    torch.manual_seed(0)
    linear = nn.Linear(128, 64, bias=bias).requires_grad_(False)
    inputs = torch.randn(3, 128, requires_grad=True)
    quantised = PackedLinear(linear, dtype)
    assert quantised.weight.dtype == dtype and quantised.weight.nbytes == 64 * 128 // 2
    torch.testing.assert_close(quantised(inputs), linear(inputs), rtol=0, atol=0.25)
    quantised(inputs).sum().backward()
    assert inputs.grad is not None
    torch.testing.assert_close(inputs.grad, linear.weight.sum(0).expand(3, -1), rtol=0, atol=0.25)


@needs_package
@pytest.mark.usefixtures("alone")
def test_a_job_trains_adapters_beside_4_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from harness import job
    from harness.export_cli import export_checkpoint
    from harness.metrics import read_metrics
    from harness.modeling import num_parameters
    from harness.run_clm import main
    from tests.test_lora import llama

    model = llama(hidden_size=64)
    model.resize_token_embeddings(259)
    model.save_pretrained(tmp_path / "base")
    (tmp_path / "a.txt").write_text("some text to train on, and then some more of it. " * 40)
    packed: list[dict[str, torch.Tensor]] = []
    counted: list[int] = []

    def weights_of(engine: Any) -> dict[str, torch.Tensor]:
        counted[:] = [num_parameters(engine.module)]
        return {name: value.clone().view(torch.uint8) for name, value in engine.module.named_parameters() if hasattr(value, "quant_state")}

    write = job._export
    monkeypatch.setattr(job, "_keep_base", lambda args, folder, engine, *more: packed.append(weights_of(engine)))
    monkeypatch.setattr(job, "_export", lambda folder, engine, *more: (packed.append(weights_of(engine)), write(folder, engine, *more)))
    values = {"model_name_or_path": tmp_path / "base", "tokenizer_name": "bytes", "train_file": tmp_path / "a.txt", "lora_r": 4}
    values |= {"data_cache_dir": tmp_path / "cache", "output_dir": tmp_path / "out", "block_size": 32, "max_steps": 8, "load_in_4bit": True}
    values |= {"per_device_train_batch_size": 4, "learning_rate": 0.03, "logging_steps": 1, "modules_to_save": "lm_head"}
    assert main([token for name, value in values.items() for token in (f"--{name}", str(value))]) == 0
    losses = [row["loss"] for row in read_metrics(tmp_path / "out").of_kind("train")]
    assert losses[-1] < losses[0] - 0.3
    # 2 blocks of 7 linear layers, half a byte a weight, the same to the bit at the end.
    assert len(packed[0]) == 14 and all(torch.equal(packed[1][name], value) for name, value in packed[0].items())
    assert counted == [2 * (4 * 64 * 64 + 3 * 64 * 24) + 3 * 259 * 64 + 5 * 64 + 2 * (4 * 4 * 2 * 64 + 3 * 4 * (64 + 24))]
    assert packed[0]["model.layers.1.self_attn.q_proj.base_layer.weight"].nbytes == 64 * 64 // 2

    ids = torch.arange(12).reshape(2, 6)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    expected = PeftModel.from_pretrained(plain, str(tmp_path / "out/final"))(ids).logits
    export_checkpoint(tmp_path / "out/checkpoint-8", tmp_path / "merged", merge=True)
    torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(ids).logits, expected, rtol=1e-4, atol=1e-5)
