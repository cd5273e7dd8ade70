"""The loss of a causal LM as a sum over label tokens, without ever holding all logits.

The mean over a whole optimizer step (all micro-batches, all ranks) is this sum divided by the step's number of label tokens, so how
a step is cut into micro-batches and ranks does not change it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

IGNORE = -100


def cross_entropy_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of -log p(target) in float32.

    Args:
        logits: (tokens, vocabulary)
        targets: (tokens,) with -100 where there is no loss.
    """
    return F.cross_entropy(logits.float(), targets, ignore_index=IGNORE, reduction="sum")


def chunked_cross_entropy_sum(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk_size: int) -> Tensor:
    """`cross_entropy_sum` of `hidden @ weight.T + bias` with the logits of at most `chunk_size` tokens alive at once.

    Each chunk's logits are computed again in backward. In forward plus backward this costs one more product with the head
    and saves 4 to 12 bytes x tokens x vocabulary.

    Args:
        hidden: (tokens, hidden_size)
        weight: (vocabulary, hidden_size)
        targets: (tokens,) with -100 where there is no loss.
        chunk_size: tokens; 0 means all at once.

    Returns:
        Scalar float32.
    """

    def one(chunk: Tensor, goal: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return cross_entropy_sum(F.linear(chunk, weight, bias), goal)

    if not chunk_size or hidden.shape[0] <= chunk_size:
        return one(hidden, targets, weight, bias)
    total = hidden.new_zeros((), dtype=torch.float32)
    for chunk, goal in zip(hidden.split(chunk_size), targets.split(chunk_size), strict=True):
        # preserve_rng_state: nothing random in here, and saving the state would read the GPU.
        total = total + checkpoint(one, chunk, goal, weight, bias, use_reentrant=False, preserve_rng_state=False)
    return total


def shifted_targets(labels: Tensor) -> Tensor:
    """Labels moved one place left, so that position i holds what comes after token i; the last has none. (batch, seq) -> same."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE)


def head_is_plain(model: nn.Module) -> bool:
    """True when the model's logits are exactly its output embedding applied to the decoder's last hidden state.

    Read off the source of the model's forward: anything else done to the logits (soft caps, scales) means False, and the loss then
    takes the logits that the model itself computes.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if not isinstance(head, nn.Linear) or not hasattr(model, "get_decoder"):
        return False
    try:
        source = inspect.getsource(type(model).forward)
    except (OSError, TypeError):
        return False
    # Statements have blanks around "=", keyword arguments have none.
    assignments = re.findall(r"^\s*(?:lm_)?logits = (.+)$", source, flags=re.MULTILINE)
    names = [name for name, module in model.named_modules() if module is head]
    plain = re.compile(
        r"self\.(\w+)\((hidden_states|outputs\[0\]|outputs\.last_hidden_state)(\[:, slice_indices(, :)?\])?\)(\.contiguous\(\))?$"
    )
    return len(assignments) == 1 and (match := plain.match(assignments[0].strip())) is not None and match.group(1) in names


def install_loss(model: Any, chunk_size: int) -> None:
    """Makes `model(input_ids=..., labels=...)` return the summed loss (scalar float32) instead of logits.

    Without labels the model behaves as before. The forward of the instance is replaced, not the class, so that wrappers (FSDP2, DDP,
    DeepSpeed, peft) still run their hooks around it.
    """
    original: Callable[..., Any] = model.forward
    plain = head_is_plain(model)
    router_loss = float(getattr(model.config, "router_aux_loss_coef", 0.0) or 0.0)
    wants_router_loss = bool(getattr(model.config, "output_router_logits", False)) and router_loss > 0

    def forward(*args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        if labels is None:
            return original(*args, **kwargs)
        targets = shifted_targets(labels).flatten()
        if plain and not wants_router_loss:
            kwargs.setdefault("use_cache", False)
            hidden = model.get_decoder()(*args, **kwargs)[0]  # (batch, seq, hidden)
            head = model.get_output_embeddings()
            return chunked_cross_entropy_sum(hidden.flatten(0, 1), head.weight, head.bias, targets, chunk_size)
        outputs = original(*args, **kwargs)
        loss = cross_entropy_sum(outputs.logits.flatten(0, 1), targets)
        if wants_router_loss and getattr(outputs, "aux_loss", None) is not None:
            # HF adds coefficient x aux_loss to the mean; in a sum it weighs as many tokens as the micro-batch has.
            loss = loss + router_loss * outputs.aux_loss.to(loss.device) * (targets != IGNORE).sum()
        return loss

    forward.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    model.forward = forward
