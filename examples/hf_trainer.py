"""Trains a causal language model with transformers' Trainer, as most scripts do: nothing in it is this project's, but one optional line.

    torchrun --nproc_per_node 2 examples/hf_trainer.py --train_file corpus.txt --max_steps 20 --output_dir out
    harness run -- torchrun --nproc_per_node 2 examples/hf_trainer.py --train_file corpus.txt --max_steps 20 --output_dir out

With `--oom_recovery` its Trainer is the one of harness.callbacks, which redoes a step that ran out of memory in place.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, HfArgumentParser, LlamaConfig, Trainer, TrainingArguments, set_seed


@dataclasses.dataclass
class ScriptArguments:
    """What TrainingArguments does not have."""

    train_file: str = dataclasses.field(metadata={"help": "text; every byte is a token"})
    config_name: str | None = dataclasses.field(default=None, metadata={"help": "config of the model (default: a tiny Llama)"})
    block_size: int = dataclasses.field(default=64, metadata={"help": "tokens per sample"})
    oom_recovery: bool = dataclasses.field(default=False, metadata={"help": "redo steps that run out of memory"})


class Blocks(torch.utils.data.Dataset):
    """A file cut into samples of `block_size` bytes."""

    def __init__(self, path: str, block_size: int) -> None:
        data = torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8).long()
        self.blocks = data[: len(data) // block_size * block_size].view(-1, block_size)  # (samples, tokens)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.blocks[index], "labels": self.blocks[index]}


def build_model(config_name: str | None) -> torch.nn.Module:
    """From a config, with fresh weights."""
    if config_name is not None:
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config_name))
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    return AutoModelForCausalLM.from_config(config)


def main() -> None:
    script, training = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(training.seed)
    trainer_class = Trainer
    if script.oom_recovery:
        from harness.callbacks import OomRecoveryMixin

        class RecoveringTrainer(OomRecoveryMixin, Trainer):
            pass

        trainer_class = RecoveringTrainer
    trainer = trainer_class(
        model=build_model(script.config_name), args=training, train_dataset=Blocks(script.train_file, script.block_size)
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_state()
    # On CPUs (gloo) a process that ends while a thread still holds the last collective's tensors is aborted: all training done, code 134.
    trainer.accelerator.wait_for_everyone()
    time.sleep(0.1)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
