"""On two GPUs: QLoRA under FSDP2 trains as on one, and each card holds half of the packed weights."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness.metrics import read_metrics
from launch.machine import free_port

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"),
]
ROOT = Path(__file__).resolve().parents[2]


def make_model(folder: Path) -> None:
    """Llama with 8 layers, 0.2 billion parameters in bfloat16, and a text to train on."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from harness.modeling import byte_tokenizer

    torch.manual_seed(0)
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 16}
    LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=16, vocab_size=259)).to(torch.bfloat16).save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    (folder / "text.txt").write_text("\n".join(f"{number} times {number} is {number * number}." for number in range(8000)))


def train(folder: Path, output: Path, num_processes: int, *more: str) -> list[float]:
    values = {"model_name_or_path": folder / "model", "train_file": folder / "text.txt", "data_cache_dir": folder / "cache"}
    values |= {"output_dir": output, "block_size": 256, "max_steps": 10, "logging_steps": 1, "save_strategy": "no", "lora_r": 8}
    values |= {"validation_split_percentage": 0, "per_device_train_batch_size": 8 // num_processes, "learning_rate": 1e-3}
    flags = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(num_processes), "--master_port", str(free_port())]
    command = [*start, str(ROOT / "harness/run_clm.py"), *flags, "--load_in_4bit", *more]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return [row["loss"] for row in read_metrics(output / "metrics.jsonl").of_kind("train")]


def test_two_cards_train_packed_weights_as_one_does(tmp_path: Path) -> None:
    make_model(tmp_path)
    one = train(tmp_path, tmp_path / "one", 1, "--precision", "bf16")
    two = train(tmp_path, tmp_path / "two", 2, "--precision", "bf16", "--fsdp", "full_shard")
    assert len(one) == 10 and one[-1] < one[0] - 0.05
    assert two == pytest.approx(one, rel=1e-2)
    print(json.dumps({"one": one, "two": two}))
