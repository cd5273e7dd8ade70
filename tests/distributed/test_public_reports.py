"""What people reported about other tools, tried on this one: what needs several processes.

A test's name begins with the case's number, its docstring has the reports. Elsewhere in this folder: ranks whose adapters differ (B37,
test_lora_job.py), an out-of-memory on one rank (B11, test_oom.py), ZeRO shards on another number of processes (B17, test_resume.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.data_tokenizers import word_tokenizer
from tests.faults.fork_ranks import ForkServer
from tests.launching import ROOT, Result

WORDS = [f"w{number}" for number in range(66)]
ZERO3 = ["--deepspeed", str(ROOT / "ds_configs/zero3.json")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, and two models with a tokenizer of 70 tokens: one with a vocabulary of 64, one with a padded one of 128."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("reports")
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": " ".join(WORDS[i % 60 : i % 60 + 6])}) + "\n" for i in range(160)))
    tokenizer = word_tokenizer(" ".join(WORDS), special=("<a>",), bos_token="<s>", eos_token="</s>")
    assert len(tokenizer) == 70
    for size in (64, 128):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=size,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            bos_token_id=1,
            eos_token_id=2,
        )
        LlamaForCausalLM(config).save_pretrained(folder / str(size))
        tokenizer.save_pretrained(folder / str(size))
    return folder


def train(server: ForkServer, folder: Path, output: Path, num_processes: int, vocabulary: int, *more: str, steps: int = 2) -> Result:
    values = {
        "model_name_or_path": folder / str(vocabulary),
        "train_file": folder / "data.jsonl",
        "data_cache_dir": folder / "cache",
        "output_dir": output,
        "block_size": 16,
        "packing": "none",
        "validation_split_percentage": 0,
        "per_device_train_batch_size": 8 // num_processes,
        "max_steps": steps,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
    }
    arguments = [token for name, value in values.items() for token in (f"--{name}", str(value))]
    result = server.run([*arguments, *more], num_processes, output.with_name(f"{output.name}-life"))
    assert result.returncode == 0, result.stdout
    return result


def test_b03_rates_and_losses_of_four_processes_are_those_of_one(server: ForkServer, folder: Path, tmp_path: Path) -> None:
    """https://github.com/huggingface/accelerate/issues/2926, https://github.com/snowflakedb/ArcticTraining/issues/62 (E13)

    A fifth of the case's schedule: 20 steps, 2 of warm-up; the rate of step k + 1 is the one after k steps. The logged loss is the mean
    over all samples of the step, whichever rank had them.
    """
    flags = ["--warmup_steps", "2", "--lr_scheduler_type", "linear", "--precision", "fp32", "--no_oom_recovery"]
    one, four = (train(server, folder, tmp_path / str(count), count, 128, *flags, steps=20) for count in (1, 4))
    for result in (one, four):
        rates = [row["learning_rate"] for row in result.rows]
        assert len(rates) == 20 and rates[2] == 1e-3 and rates[5] == pytest.approx(8.3333e-4, rel=1e-5)
        assert rates[19] == pytest.approx(1e-3 / 18, rel=1e-6)
    assert four.losses == pytest.approx(one.losses, rel=1e-5)


def test_b20_frozen_16_bit_weights_and_trained_adapters_under_fsdp(server: ForkServer, folder: Path, tmp_path: Path) -> None:
    """https://github.com/axolotl-ai-cloud/axolotl/issues/1494, https://github.com/huggingface/trl/issues/1723,
    https://github.com/huggingface/peft/issues/1702, https://github.com/mosaicml/llm-foundry/issues/414,
    https://github.com/huggingface/peft/issues/1731 (B36)

    Base in bf16, adapters in fp32, one of the layer's seven modules adapted, with DoRA's magnitudes: better than casting or refusing, it
    trains so, because FSDP2 shards each parameter by itself.
    """
    flags = ["--fsdp", "full_shard", "--precision", "bf16", "--lora_r", "4", "--target_modules", "q_proj", "--use_dora"]
    result = train(server, folder, tmp_path / "out", 2, 128, *flags)
    check_adapter(result, tmp_path / "out/final", num_tensors=6)


def test_b21_a_padded_vocabulary_stays_under_zero3(server: ForkServer, folder: Path, tmp_path: Path) -> None:
    """https://github.com/huggingface/transformers/issues/23019

    128 rows, as 50304, for a tokenizer of 70, as 50257: nothing is resized, though a partitioned embedding has no rows of its own.
    """
    result = train(server, folder, tmp_path / "out", 2, 128, *ZERO3, "--lora_r", "4", "--target_modules", "q_proj")
    check_adapter(result, tmp_path / "out/final", num_tensors=4)
    assert json.loads((tmp_path / "out/model/config.json").read_text())["vocab_size"] == 128


def check_adapter(result: Result, final: Path, num_tensors: int) -> None:
    """The first step ran on a fresh adapter that changes nothing, and all of its parts were written."""
    import math

    from safetensors.torch import load_file

    assert len(result.losses) == 2 and all(math.isfinite(loss) and 4.0 < loss < 6.0 for loss in result.losses)  # about ln(128)
    tensors = load_file(final / "adapter_model.safetensors")
    assert len(tensors) == num_tensors and all(tensor.numel() for tensor in tensors.values())
    assert all(bool(tensor.any()) for tensor in tensors.values())  # lora_B too has moved from zero


def test_b21_a_grown_vocabulary_under_zero3(server: ForkServer, folder: Path, tmp_path: Path) -> None:
    """https://github.com/huggingface/transformers/issues/26398: never 0 rows. (The same under all engines: test_main_job.py.)"""
    from safetensors.torch import load_file

    result = train(server, folder, tmp_path / "out", 2, 64, *ZERO3, "--precision", "fp32")
    assert 4.0 < result.losses[0] < 4.6  # ln(70) is 4.25
    config: dict[str, Any] = json.loads((tmp_path / "out/final/config.json").read_text())
    assert config["vocab_size"] == 70
    weights = load_file(tmp_path / "out/final/model.safetensors")
    assert weights["model.embed_tokens.weight"].shape == weights["lm_head.weight"].shape == (70, 16)
