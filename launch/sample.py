"""Loads a trained model with plain transformers and lets it go on from a prompt: python launch/sample.py out/final "async def "."""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> int:
    if len(sys.argv) != 3:
        print("usage: python launch/sample.py MODEL_FOLDER PROMPT", file=sys.stderr)
        return 2
    folder, prompt = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(0)
    tokens = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    longest = getattr(model.config, "max_position_embeddings", 2048)
    generated = model.generate(
        **tokens,
        max_new_tokens=min(200, longest - tokens["input_ids"].shape[1]),
        do_sample=True,
        temperature=0.7,
        use_cache=True,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
    )
    print(tokenizer.decode(generated[0], skip_special_tokens=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
