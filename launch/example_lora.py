"""LoRA from one's own script, start to end, on a CPU in a minute:

    python launch/example_lora.py --output_dir out            # a tiny model made here
    python launch/example_lora.py --model my/llama --lora_r 16 --target_modules q_proj v_proj --output_dir out
    torchrun --nproc_per_node 2 launch/example_lora.py --output_dir out

It checks r, shows how a balanced device map would place the model on two cards, trains adapters on samples of its own, loads them with peft
and merges them into the base model.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

SENTENCES = ("the cat sat on the mat", "a dog ran to the gate", "the sun set by the sea", "rain fell on the old roof")


def make_tiny_model(folder: Path) -> None:
    """A random Llama of 40,000 parameters with a byte tokenizer; made once, by the first process."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from harness.modeling import byte_tokenizer

    if (folder / "tokenizer_config.json").exists():
        return
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=128,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)  # last: its files say that the model is whole


def batches(tokenizer: Any, num_samples: int, batch_size: int = 4) -> Iterator[dict[str, Any]]:
    """What one's own data loader would give: padded batches. How it batches does not matter, the run's arguments decide."""
    texts = [SENTENCES[index % len(SENTENCES)] + tokenizer.eos_token for index in range(num_samples)]
    for start in range(0, num_samples, batch_size):
        yield tokenizer(texts[start : start + batch_size], padding=True, return_tensors="pt")


def show_r_check(model_folder: str, lora_r: int, target_modules: list[str]) -> None:
    """Attaches adapters to a model in memory and compares r in the config with their shapes, for a right and a wrong config."""
    from transformers import AutoModelForCausalLM

    from harness.args import LoraArguments
    from harness.lora import attach_lora, check_lora_r_consistency

    model = AutoModelForCausalLM.from_pretrained(model_folder)
    attached = attach_lora(model, LoraArguments(lora_r=lora_r, target_modules=target_modules))
    for config in (attached.config, {"r": lora_r + 1}):
        result = check_lora_r_consistency(model, config)
        text = "consistent" if result["is_consistent"] else f"{len(result['mismatched_layers'])} layers differ"
        print(f"r check: expected {result['expected_r']}, {len(result['actual_r_values'])} adapters, {text}")


def show_balanced_map(model_folder: str) -> None:
    """The balanced device map of the model for two made-up cards that it just does not fit on one of."""
    from harness.args import ModelArguments
    from harness.device_maps import create_balanced_device_map
    from harness.modeling import load_config
    from harness.placement import meta_model

    model = meta_model(load_config(ModelArguments(model_name_or_path=model_folder)))
    num_bytes = sum(parameter.numel() * 4 for parameter in model.parameters())
    device_map = create_balanced_device_map(model_folder, max_memory={0: num_bytes, 1: num_bytes}, min_memory_gb=0)
    for card in (0, 1):
        print(f"card {card}: {', '.join(name for name, device in device_map.items() if device == card)}")


def show_result(adapter: Path, merged: Path, base: str) -> None:
    """Loads the adapter with peft, merges it, and compares the two."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from harness.lora import merge_adapter

    ids = AutoTokenizer.from_pretrained(base)(SENTENCES[0], return_tensors="pt").input_ids
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(base)
        before = float(plain(ids, labels=ids).loss)
        with_adapter = PeftModel.from_pretrained(plain, str(adapter))
        after = float(with_adapter(ids, labels=ids).loss)
        merge_adapter(adapter, merged, base)
        both = float(AutoModelForCausalLM.from_pretrained(merged)(ids, labels=ids).loss)
    print(f"loss of a training sentence: base {before:.4f}, with the adapter {after:.4f}, merged {both:.4f}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the example; returns the exit code of the training."""
    parser = argparse.ArgumentParser(description="LoRA from one's own script.")
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--model", help="a local model; default: a tiny one made here")
    parser.add_argument("--lora_r", type=int, default=4)
    parser.add_argument("--target_modules", nargs="+", default=["all-linear"])
    parser.add_argument("--use_dora", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(argv)

    from transformers import AutoTokenizer

    from harness.lora import train_lora

    is_main = os.environ.get("RANK", "0") == "0"
    output = Path(options.output_dir)
    base = options.model or str(output / "tiny_model")
    if options.model is None and is_main:
        make_tiny_model(Path(base))
    if options.model is None and not is_main:
        _wait_for(Path(base) / "tokenizer_config.json")
    if is_main:
        show_r_check(base, options.lora_r, options.target_modules)
        show_balanced_map(base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # only fills rows: padding is taken off again
    config = {
        "model_name_or_path": base,
        "output_dir": str(output / "run"),
        "r": options.lora_r,
        "alpha": 2 * options.lora_r,
        "target_modules": options.target_modules,
        "use_dora": options.use_dora,
        "target_batch_size": 8,
        "batch_size": 4,
        "learning_rate": 1e-2,
        "max_steps": options.steps,
        "logging_steps": 5,
        "save_strategy": "no",
        "validation_split_percentage": 0,
        "packing": "none",
    }
    code = train_lora(config, batches(tokenizer, num_samples=64))
    if code == 0 and is_main:
        show_result(output / "run" / "final", output / "merged", base)
    return code


def _wait_for(path: Path, limit_s: float = 120.0) -> None:
    """The first process makes the model before any process group exists, so the others look for its last file."""
    import time

    deadline = time.monotonic() + limit_s
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} did not appear in {limit_s:.0f} s")
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
