"""The Llamas that benchmarks train, built from a config (untied), and what a token of one costs.

MFU = tokens/s x FLOPs per token / peak FLOP/s of the card in bf16. FLOPs per token = 6 x parameters that multiply (the head among them; 2
forward, 2 for the input's gradient, 2 for the weight's) + 6 x layers x heads x head_dim x sequence: causal attention counts once,
recomputation does not. With LoRA the frozen weights have no gradient of their own: 4 for each of them, 6 for each adapter's.
"""

from __future__ import annotations

from typing import Any

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16},
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "head_dim": 64},
    "3B": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24, "head_dim": 128},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "head_dim": 128},
}


def shape_of(size: str) -> dict[str, Any]:
    """Arguments of a LlamaConfig."""
    small = size == "tiny"
    return {
        **SHAPES[size],
        "num_key_value_heads": 2 if small else 8,
        "vocab_size": 512 if small else 128256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    }


def _layer_products(size: str) -> list[tuple[int, int]]:
    """(inputs, outputs) of the linear layers of one decoder layer."""
    shape = shape_of(size)
    hidden, intermediate = shape["hidden_size"], shape["intermediate_size"]
    queries, keys = shape["num_attention_heads"] * shape["head_dim"], shape["num_key_value_heads"] * shape["head_dim"]
    attention = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)]
    return [*attention, (hidden, intermediate), (hidden, intermediate), (intermediate, hidden)]


def num_parameters(size: str, lora_r: int = 0) -> tuple[int, int]:
    """(all parameters of matrix products, those that train): the norms are left out; with `lora_r` every linear layer but the head is
    adapted, and only adapters train.
    """
    shape, products = shape_of(size), _layer_products(size)
    base = shape["num_hidden_layers"] * sum(a * b for a, b in products) + 2 * shape["vocab_size"] * shape["hidden_size"]
    adapters = shape["num_hidden_layers"] * sum(lora_r * (a + b) for a, b in products)
    return base + adapters, adapters if lora_r else base


def mfu(size: str, sequence: int, tokens_per_second: float, lora_r: int = 0) -> float | None:
    """Model FLOP utilisation of a card; None without a card whose peak is known."""
    import torch
    from transformers import LlamaConfig

    from harness.monitor import model_flops_per_token, peak_flops

    peak = peak_flops(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else None
    if peak is None:
        return None
    flops = model_flops_per_token(LlamaConfig(**shape_of(size)), sequence, *num_parameters(size, lora_r))
    return round(tokens_per_second * flops / peak, 4)
