"""A training loop of one's own on accelerate, with gradient accumulation, checkpoints and resume.

    accelerate launch --num_processes 2 examples/accelerate_loop.py --train_file corpus.txt --max_steps 20 --output_dir out
    harness run -- accelerate launch --num_processes 2 examples/accelerate_loop.py --train_file corpus.txt --max_steps 20 --output_dir out

With `--oom_safe` a batch that runs out of memory is cut and redone in place; see `step` for what that takes.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--train_file", required=True, help="text; every byte is a token")
    add("--output_dir", type=Path, required=True)
    add("--block_size", type=int, default=64, help="tokens per sample")
    add("--per_device_train_batch_size", type=int, default=8)
    add("--gradient_accumulation_steps", type=int, default=1)
    add("--max_steps", type=int, default=20)
    add("--save_steps", type=int, default=5)
    add("--learning_rate", type=float, default=1e-3)
    add("--gradient_checkpointing", action="store_true")
    add("--resume_from_checkpoint", type=Path)
    add("--oom_safe", action="store_true", help="cut and redo batches that run out of memory")
    add("--local_rank", type=int, default=0, help="given by the deepspeed launcher")
    return parser.parse_args()


def samples_of(path: str, block_size: int) -> list[torch.Tensor]:
    """A file cut into samples of `block_size` bytes."""
    data = torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8).long()
    return list(data[: len(data) // block_size * block_size].view(-1, block_size))


def collate(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    batch = torch.stack(rows)
    return {"input_ids": batch, "labels": batch.clone()}


def step(accelerator: Accelerator, model: Any, batch: dict[str, torch.Tensor], safe: bool) -> torch.Tensor:
    """Forward and backward of one micro-batch; its loss."""
    if safe:
        from harness import oom_safe

        with oom_safe(accelerator, batch) as cut:
            return cut(lambda part: model(**part).loss)
    loss = model(**batch).loss
    accelerator.backward(loss)
    return loss.detach()


def main() -> None:
    args = parse()
    set_seed(42)
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    model = AutoModelForCausalLM.from_config(config)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    samples = samples_of(args.train_file, args.block_size)
    shuffled = [samples[index] for index in torch.randperm(len(samples), generator=torch.Generator().manual_seed(0))]
    loader = DataLoader(shuffled, batch_size=args.per_device_train_batch_size, collate_fn=collate, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    done = 0
    if args.resume_from_checkpoint is not None:
        accelerator.load_state(str(args.resume_from_checkpoint))
        accelerator.step = 0  # it counts micro-batches, of which a step may have another number now
        done = int(args.resume_from_checkpoint.name.removeprefix("step_"))
    model.train()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    losses: list[torch.Tensor] = []
    for batch in skip_first_batches(loader, done * args.gradient_accumulation_steps):
        with accelerator.accumulate(model):
            losses.append(step(accelerator, model, batch, args.oom_safe))
            optimizer.step()
            optimizer.zero_grad()
        if not accelerator.sync_gradients:
            continue
        done += 1
        loss = accelerator.reduce(torch.stack(losses).mean(), "mean").item()
        losses = []
        if accelerator.is_main_process:
            with open(args.output_dir / "log.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": done, "loss": loss}) + "\n")
        if done % args.save_steps == 0:
            accelerator.save_state(str(args.output_dir / f"step_{done}"))
        if done >= args.max_steps:
            break
    # gloo's threads must be done with the last collective's tensors: torch waits for them while it holds Python's lock, which they need.
    accelerator.wait_for_everyone()
    time.sleep(0.1)
    accelerator.end_training()


if __name__ == "__main__":
    main()
