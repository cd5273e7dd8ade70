"""Fine-tunes with TRL's SFTTrainer: a script as TRL's documentation has it, on a tiny model of its own.

    accelerate launch --num_processes 2 examples/trl_sft.py --train_file corpus.txt --max_steps 20 --output_dir out
    harness run -- accelerate launch --num_processes 2 examples/trl_sft.py --train_file corpus.txt --max_steps 20 --output_dir out

With `--oom_recovery` its trainer is the one of harness.callbacks, which redoes a step that ran out of memory in place.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer, TrlParser


@dataclasses.dataclass
class ScriptArguments:
    """What SFTConfig does not have."""

    train_file: str = dataclasses.field(metadata={"help": "text; every byte is a token"})
    block_size: int = dataclasses.field(default=64, metadata={"help": "tokens per sample"})
    oom_recovery: bool = dataclasses.field(default=False, metadata={"help": "redo steps that run out of memory"})


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte value; SFTTrainer wants a tokenizer although the samples are tokens already."""
    words = {chr(0x100 + byte): byte for byte in range(255)} | {"<end>": 255}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")


def main() -> None:
    script, training = TrlParser((ScriptArguments, SFTConfig)).parse_args_and_config()
    set_seed(training.seed)
    data, size = Path(script.train_file).read_bytes(), script.block_size
    samples = [list(data[start : start + size]) for start in range(0, len(data) // size * size, size)]
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    trainer_class = SFTTrainer
    if script.oom_recovery:
        from harness.callbacks import OomRecoveryMixin

        class RecoveringTrainer(OomRecoveryMixin, SFTTrainer):
            pass

        trainer_class = RecoveringTrainer
    trainer = trainer_class(
        model=AutoModelForCausalLM.from_config(config),
        args=training,
        train_dataset=Dataset.from_dict({"input_ids": samples}),
        processing_class=byte_tokenizer(),
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_state()
    # On CPUs (gloo) a process that ends while a thread still holds the last collective's tensors is aborted: all training done, code 134.
    trainer.accelerator.wait_for_everyone()
    time.sleep(0.1)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
