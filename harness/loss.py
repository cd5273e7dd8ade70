"""The loss of a causal LM as a sum over label tokens, without ever holding all logits.

The mean over a whole optimizer step (all micro-batches, all ranks) is this sum divided by the step's number of label tokens, so how
a step is cut into micro-batches and ranks does not change it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.compiling import Compiled

IGNORE = -100


def cross_entropy_sum(logits: Tensor, targets: Tensor, token_losses: Tensor | None = None) -> Tensor:
    """Sum of -log p(target) in float32.

    Args:
        logits: (tokens, vocabulary)
        targets: (tokens,) with -100 where there is no loss.
        token_losses: (tokens,) float32, filled with the loss of every token where given.
    """
    if token_losses is None:
        return F.cross_entropy(logits.float(), targets, ignore_index=IGNORE, reduction="sum")
    losses = F.cross_entropy(logits.float(), targets, ignore_index=IGNORE, reduction="none")
    token_losses.copy_(losses.detach())
    return losses.sum()


def chunked_cross_entropy_sum(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    chunk_size: int,
    *,
    compiled: bool = False,
    token_losses: Tensor | None = None,
) -> Tensor:
    """`cross_entropy_sum` of `hidden @ weight.T + bias` with the logits of at most `chunk_size` tokens alive at once.

    Gradients are computed in forward, while a chunk's logits are there, so the head is multiplied three times, as without chunks. Only
    float16, whose small gradients need the loss scale that backward brings, computes each chunk's logits again in backward.

    Args:
        hidden: (tokens, hidden_size)
        weight: (vocabulary, hidden_size)
        targets: (tokens,) with -100 where there is no loss.
        chunk_size: tokens; 0 means all at once, by autograd.
        compiled: softmax and its gradient as one compiled kernel.
        token_losses: (tokens,) float32, filled with the loss of every token where given.

    Returns:
        Scalar float32.
    """

    def one(place: Tensor | None, chunk: Tensor, goal: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return cross_entropy_sum(F.linear(chunk, weight, bias), goal, place)

    if not chunk_size:
        return one(token_losses, hidden, targets, weight, bias)
    hiddens, goals = hidden.split(chunk_size), targets.split(chunk_size)
    places = [None] * len(goals) if token_losses is None else token_losses.split(chunk_size)
    chunks = list(zip(places, hiddens, goals, strict=True))
    if not torch.is_grad_enabled():
        return torch.stack([one(*chunk, weight, bias) for chunk in chunks]).sum()
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    if dtype != torch.float16:
        loss: Tensor = _FusedLoss.apply(
            hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype), targets, chunk_size, compiled, token_losses
        )
        return loss
    total = hidden.new_zeros((), dtype=torch.float32)
    for place, *chunk in chunks:
        # preserve_rng_state: nothing random in here, and saving the state would read the GPU. `place` is written, so it is no argument:
        # arguments must be the same in backward.
        total = total + checkpoint(functools.partial(one, place), *chunk, weight, bias, use_reentrant=False, preserve_rng_state=False)
    return total


def loss_and_gradient(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of every token, (tokens,), and the gradient of their sum with respect to the logits, softmax minus one-hot, in their dtype.

    Args:
        logits: (tokens, vocabulary)
        targets: (tokens,) with -100 where there is no loss.
    """
    kept = (targets != IGNORE)[:, None]
    goal = targets.clamp(min=0)[:, None]
    log_p = F.log_softmax(logits, dim=-1, dtype=torch.float32)
    losses = torch.where(kept, -log_p.gather(-1, goal), 0.0).squeeze(-1)
    if torch.compiler.is_compiling():  # one kernel; nothing of this is ever in memory
        hit = torch.arange(logits.shape[-1], device=logits.device) == goal
        gradient = torch.where(kept, log_p.exp() - hit.float(), 0.0)
    else:  # 4 bytes a logit beside the logits, used again and again
        gradient = log_p.exp_().scatter_add_(-1, goal, log_p.new_full(goal.shape, -1.0)).masked_fill_(~kept, 0.0)
    return losses, gradient.to(logits.dtype)


@functools.cache
def _compiled_loss_and_gradient() -> Callable[..., Any]:
    return Compiled(loss_and_gradient, "the loss")


class _FusedLoss(torch.autograd.Function):
    """The head and the loss as one operation; what backward needs is the gradients themselves, not the logits.

    The weight's gradient is summed over chunks in the weight's dtype, as autograd sums it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        chunk_size: int,
        compiled: bool,
        token_losses: Tensor | None,
    ) -> Tensor:
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if of_hidden else None
        grad_weight = torch.zeros_like(weight) if of_weight else None
        grad_bias = torch.zeros_like(bias) if of_bias and bias is not None else None
        total = hidden.new_zeros((), dtype=torch.float32)
        softmax = _compiled_loss_and_gradient() if compiled else loss_and_gradient
        for start in range(0, hidden.shape[0], chunk_size):
            part = slice(start, start + chunk_size)
            chunk = hidden[part]
            losses, gradient = softmax(F.linear(chunk, weight, bias), targets[part])
            total += losses.sum()
            if token_losses is not None:
                token_losses[part] = losses
            if grad_hidden is not None:
                torch.mm(gradient, weight, out=grad_hidden[part])
            if grad_weight is not None:
                torch.addmm(grad_weight, gradient.T, chunk, out=grad_weight)
            if grad_bias is not None:
                grad_bias += gradient.sum(0)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        (scale,) = outer  # a scalar on the device; the host does not read it
        of_inputs = (None if gradient is None else gradient.mul_(scale) for gradient in ctx.saved_tensors)
        return *of_inputs, None, None, None, None


def shifted_targets(labels: Tensor) -> Tensor:
    """Labels moved one place left, so that position i holds what comes after token i; the last has none. (batch, seq) -> same."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE)


_TAKEN_OUT = (
    r"\w*outputs?(\[0\]|\.last_hidden_state)|slice_logits_to_keep\(hidden_states, logits_to_keep\)|hidden_states\[:, slice_indices(, :)?\]"
)


def head_is_plain(model: nn.Module) -> bool:
    """True when the model's logits are exactly its output embedding applied to the decoder's last hidden state.

    Read off the source of the model's forward: anything else done to the logits (soft caps, scales) means False, and the loss then
    takes the logits that the model itself computes.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    # A subclass may do more than a product; a decoder that is the model itself gives logits.
    decoder = getattr(model, "get_decoder", lambda: None)()
    if type(head) is not nn.Linear or decoder is None or decoder is model:
        return False
    try:
        source = inspect.getsource(type(model).forward)
    except (OSError, TypeError):
        return False
    # Statements have blanks around "=", keyword arguments have none.
    assignments = re.findall(r"^\s*(?:lm_)?logits = (.+)$", source, flags=re.MULTILINE)
    names = [name for name, module in model.named_modules() if module is head]
    # What comes between the decoder and the head may only be taken out of the decoder's output.
    between = re.findall(r"^\s*hidden_states = (.+)$", source, flags=re.MULTILINE)
    if not all(re.fullmatch(_TAKEN_OUT, value.strip()) for value in between):
        return False
    plain = re.compile(
        r"self\.(\w+)\((hidden_states|outputs\[0\]|outputs\.last_hidden_state)(\[:, slice_indices(, :)?\])?\)(\.contiguous\(\))?$"
    )
    return len(assignments) == 1 and (match := plain.match(assignments[0].strip())) is not None and match.group(1) in names


def has_router_loss(config: Any) -> bool:
    """True where a mixture's router adds a loss of its own, made of what all layers put out."""
    return bool(getattr(config, "output_router_logits", False)) and float(getattr(config, "router_aux_loss_coef", 0.0) or 0.0) > 0


Share = Callable[[dict[str, Any], Tensor], contextlib.AbstractContextManager[tuple[dict[str, Any], Tensor]]]
"""Around a forward: (keyword arguments, targets) -> what of them this process computes (`harness.sequence_parallel`)."""


def install_loss(model: Any, chunk_size: int, *, compiled: bool = False, share: Share | None = None) -> None:
    """Makes `model(input_ids=..., labels=...)` return the summed loss (scalar float32) instead of logits.

    Without labels the model behaves as before. With a function as `report` too, it is called with the loss of every row, (batch,)
    float32 without a gradient. The forward of the instance is replaced, not the class, so that wrappers (FSDP2, DDP,
    DeepSpeed, peft) still run their hooks around it.

    Args:
        chunk_size: as in `chunked_cross_entropy_sum`.
        compiled: the loss's own operations as compiled kernels.
        share: where several processes share the samples; None: whole ones. The loss is then of this process's part.
    """
    original: Callable[..., Any] = model.forward
    plain = head_is_plain(model)
    router_loss = float(getattr(model.config, "router_aux_loss_coef", 0.0) or 0.0)
    wants_router_loss = has_router_loss(model.config)

    def forward(*args: Any, labels: Tensor | None = None, report: Callable[[Tensor], None] | None = None, **kwargs: Any) -> Any:
        if labels is None:
            return original(*args, **kwargs)
        targets = shifted_targets(labels)
        with contextlib.nullcontext((kwargs, targets)) if share is None else share(kwargs, targets) as (own, goals):
            token_losses = None if report is None else torch.empty(goals.numel(), dtype=torch.float32, device=goals.device)
            loss = loss_of(goals.flatten(), token_losses, *args, **own)
        if report is not None and token_losses is not None:
            report(token_losses.view_as(goals).sum(1))
        return loss

    def loss_of(targets: Tensor, token_losses: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
        if plain and not wants_router_loss:
            kwargs.setdefault("use_cache", False)
            hidden = model.get_decoder()(*args, **kwargs)[0].flatten(0, 1)  # (batch x seq, hidden)
            head = model.get_output_embeddings()
            return chunked_cross_entropy_sum(
                hidden, head.weight, head.bias, targets, chunk_size, compiled=compiled, token_losses=token_losses
            )
        outputs = original(*args, **kwargs)
        loss = cross_entropy_sum(outputs.logits.flatten(0, 1), targets, token_losses)
        if wants_router_loss and getattr(outputs, "aux_loss", None) is not None:
            # HF adds coefficient x aux_loss to the mean; in a sum it weighs as many tokens as the micro-batch has.
            loss = loss + router_loss * outputs.aux_loss.to(loss.device) * (targets != IGNORE).sum()
        return loss

    forward.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    model.forward = forward
