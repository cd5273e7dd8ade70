"""Attention of packed documents by torch's kernel for rows of any length: `--attn_implementation varlen`.

No mask of pairs of tokens is made. The kernel is told where documents end and does the work of each alone, so that isolation costs no
memory, and less time than attention across documents. On a GPU it is flash attention, in 16 bits, without a further package; elsewhere
each document goes through `scaled_dot_product_attention` by itself, which is slow and computes the same.

transformers hands a model's layers what its mask function returns. Here that is where documents end, one tensor for all layers, so that a
compiled layer gets it as an input.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.findings import Finding

NAME = "varlen"
KEY = "--attn_implementation"
MAX_HEAD_DIM = 256
_takes_fewer_keys = False  # known from `register` on; a compiled layer must not ask
_INSTEAD = "--attn_implementation flex_attention, or sdpa"


def register(ends: Callable[[], tuple[Tensor | None, bool]]) -> None:
    """Makes the name known to transformers.

    Args:
        ends: asked by every forward: where documents end, see `attend`, and whether documents are to be kept apart.
    """
    global _takes_fewer_keys
    if importlib.util.find_spec("torch.nn.attention.varlen") is not None:
        from torch.nn.attention.varlen import varlen_attn

        _takes_fewer_keys = "enable_gqa" in inspect.signature(varlen_attn).parameters
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    def mask(*_: Any, **__: Any) -> Tensor | None:
        found, isolated = ends()
        if isolated and found is None:
            raise RuntimeError("documents are to be kept apart, and nobody said where they end")
        if found is not None and (dynamo := sys.modules.get("torch._dynamo")) is not None:
            # Else layers are compiled for the first number of documents, and once more at the first batch with another, whenever it comes.
            dynamo.maybe_mark_dynamic(found, 0)
        return found

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within documents.

    Args:
        query, key, value: (batch, heads, tokens, width); keys and values may have fewer heads, and values another width.
        attention_mask: (n + 1,) int32, 0 and where each document ends among the batch x tokens of all rows, none across rows; further
            entries repeat the last. None where each row is one document.
        sliding_window: tokens that one sees, itself among them.

    Returns:
        (batch, tokens, heads, width of values), and no weights.

    Raises:
        ValueError: more than that was asked for.
    """
    if dropout or any(kwargs.get(name) is not None for name in ("softcap", "s_aux", "position_bias")):
        raise ValueError(f"{type(module).__name__} asks for dropout, sinks, biases or capped scores, which {NAME} attention has not")
    batch, heads, tokens, width = query.shape
    window = None if sliding_window is None or sliding_window >= tokens else sliding_window
    if attention_mask is None and window is None:
        grouped = key.shape[1] != heads
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
        return output.transpose(1, 2), None
    ends = attention_mask
    if ends is None:
        ends = torch.arange(0, batch * tokens + 1, tokens, dtype=torch.int32, device=query.device)
    if query.device.type != "cuda":
        return _one_by_one(query, key, value, ends, scaling, window), None
    if torch.is_autocast_enabled("cuda"):  # as torch does it for its other kernels; norms leave float32
        query, key, value = (each.to(torch.get_autocast_dtype("cuda")) for each in (query, key, value))
    value_width = value.shape[-1]
    value = F.pad(value, (0, width - value_width)) if value_width < width else value
    rows = [each.transpose(1, 2).flatten(0, 1) for each in (query, key, value)]
    output = _packed(rows[0], rows[1], rows[2], ends, tokens, rows[0].shape[1] // rows[1].shape[1], _how(scaling, window))
    return output.unflatten(0, (batch, tokens))[..., :value_width], None


def is_available(device: torch.device, precision: str) -> bool:
    """Whether torch and this card have the kernel: 16 bits, compute capability 8.0 and later."""
    found = importlib.util.find_spec("torch.nn.attention.varlen") is not None
    return found and device.type == "cuda" and precision != "fp32" and torch.cuda.get_device_capability(device) >= (8, 0)


def _how(scaling: float | None, window: int | None) -> dict[str, Any]:
    return {"scale": scaling, "window_size": (-1 if window is None else window - 1, 0)}


def _packed(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, queries_of_a_key: int, how: dict[str, Any]) -> Tensor:
    """torch's function. Older ones (2.11) do not say that they take fewer keys than queries: there keys are repeated."""
    from torch.nn.attention.varlen import varlen_attn

    if queries_of_a_key > 1 and _takes_fewer_keys:
        how = {**how, "enable_gqa": True}
    elif queries_of_a_key > 1:
        key, value = (each.repeat_interleave(queries_of_a_key, 1) for each in (key, value))
    output: Any = varlen_attn(query, key, value, ends, ends, longest, longest, **how)
    return output


def _one_by_one(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, scaling: float | None, window: int | None) -> Tensor:
    """(batch, tokens, heads, width) of documents that are computed one after the other."""
    batch, heads, tokens, _ = query.shape
    places = ends.tolist()
    grouped = key.shape[1] != heads
    pieces = []
    for begin, end in itertools.pairwise(places):
        if begin == end:
            continue
        row, first, length = begin // tokens, begin % tokens, end - begin
        one, two, three = (each[row : row + 1, :, first : first + length] for each in (query, key, value))
        mask = None
        if window is not None and window < length:
            mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril().triu(1 - window)
        causal = mask is None
        output = F.scaled_dot_product_attention(one, two, three, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=grouped)
        pieces.append(output.squeeze(0).transpose(0, 1))
    return torch.cat(pieces).unflatten(0, (batch, tokens))


def findings(config: Any, device: str) -> Iterator[Finding]:
    """What a model has that this attention has not.

    Args:
        config: of the model's text part.
        device: "cuda" or another.
    """

    def refused(message: str) -> Finding:
        return Finding("error", KEY, f"{NAME}: {message}", _INSTEAD)

    for name, what in (("attention_dropout", "dropout"), ("attn_pdrop", "dropout"), ("attn_logit_softcapping", "capped scores")):
        if getattr(config, name, None):
            yield refused(f"the model has {what} in its attention ({name})")
    if getattr(config, "attention_chunk_size", None):
        yield refused("the model attends within chunks (attention_chunk_size)")
    if getattr(config, "use_bidirectional_attention", None):
        yield refused("the model attends in both directions (use_bidirectional_attention)")
    if config.model_type == "gpt_oss":
        yield refused("the model has sinks in its attention")
    heads = getattr(config, "num_attention_heads", None)
    width = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
    if device == "cuda" and width > MAX_HEAD_DIM:
        yield refused(f"heads of {width}, and its kernel takes {MAX_HEAD_DIM}")
