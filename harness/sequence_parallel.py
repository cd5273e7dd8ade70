"""Several processes share each sample: each has a slice of its tokens, and for attention all tokens of some heads (Ulysses).

Everything in a decoder but attention works on single tokens, so a process that has a slice of a sample needs 1/N of the activations.
Around attention one exchange turns "some tokens, all heads" into "all tokens, some heads", a second one back. Heads of keys and values are
repeated where there are fewer of them than processes. (Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509.)

Our own exchange and not the one that DeepSpeed has, which accelerate and transformers use too: every collective of a step must be voted on,
and the masks of packed documents and sliding windows must be those of whole rows, also in a block that is compiled.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from harness.batches import MicroBatch, collate, make_sample
from harness.coordination import Coordinator
from harness.findings import user_error
from harness.sequence_rules import KEY

_ATTACHED = "_sequence_parallel"
_groups: dict[str, SequenceParallel] = {}
# Of the forward that runs: (processes a sample, position of every token of the whole rows). Masks are made for these.
_rows: tuple[int, Tensor] | None = None


# ---------------------------------------------------------------------------------------------------------------- the exchange


@torch.library.custom_op("harness::exchange", mutates_args=(), schema="(Tensor parts, str group) -> Tensor")
def exchange(parts: Tensor, group: str) -> Tensor:
    """Sends part j to the group's j-th process. parts: (N, ...) contiguous; returns the same shape, what the j-th sent to this one.

    One operation for autograd and compilers, with the vote inside; its gradient is the same exchange of the gradients.
    """
    shared = _groups[group]
    received = shared.allocate(parts)
    shared.check()
    dist.all_to_all_single(received, parts, group=shared.group)
    return received


@exchange.register_fake
def _(parts: Tensor, group: str) -> Tensor:
    return torch.empty_like(parts)


def _keep_group(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.group = inputs[1]


def _exchange_back(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return exchange(gradient.contiguous(), ctx.group), None


exchange.register_autograd(_exchange_back, setup_context=_keep_group)


# -------------------------------------------------------------------------------------------------------- attention and its masks


def _with_whole_rows(
    shared: SequenceParallel, inner: Callable[..., Any], name: str, module: nn.Module, states: tuple[Tensor, ...], mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention of this process's heads over all tokens.

    Args:
        inner: transformers' function for it.
        states: queries, keys, values (batch, heads, own tokens, width), each with its own number of heads.
        mask: of whole rows.

    Returns:
        (batch, own tokens, all heads, width), as transformers' functions do, and no weights.
    """
    size, tokens = shared.size, states[0].shape[2]
    repeats = math.lcm(states[1].shape[1], size) // states[1].shape[1]
    query, key, value = states[0], *(each.repeat_interleave(repeats, 1) if repeats > 1 else each for each in states[1:])
    width = max(each.shape[-1] for each in states)
    device = query.device.type
    if torch.is_autocast_enabled(device):  # attention would compute in it anyway; in float32, norms' outputs would be sent
        query, key, value = (each.to(torch.get_autocast_dtype(device)) for each in (query, key, value))
    parts = [F.pad(each, (0, width - each.shape[-1])).unflatten(1, (size, -1)) for each in (query, key, value)]
    heads = [each.shape[2] for each in parts]
    received = exchange(torch.cat(parts, 2).transpose(0, 1).contiguous(), shared.name)  # (N, batch, heads of all three, tokens, width)
    rows = received.permute(1, 2, 0, 3, 4).flatten(2, 3).split(heads, 1)
    query, key, value = (row[..., : each.shape[-1]] for row, each in zip(rows, states, strict=True))
    for extra in ("position_bias", "s_aux"):  # biases of pairs of tokens, sinks of heads
        if kwargs.get(extra) is not None:
            raise user_error(KEY, f"{type(module).__name__} has a {extra} in its attention, which cannot be shared", "leave it out")
    if kwargs.pop("position_ids", None) is not None and "flash" in name:  # finds documents by them, also when computed again in backward
        kwargs["position_ids"] = shared.positions
    output = inner(module, query, key, value, mask, **kwargs)[0]  # (batch, all tokens, own heads, width)
    back = exchange(output.unflatten(1, (size, tokens)).transpose(0, 1).contiguous(), shared.name)  # (N, batch, tokens, heads, width)
    return back.permute(1, 2, 0, 3, 4).flatten(2, 3), None


def _attention(name: str, original: Callable[..., Any] | None) -> Callable[..., Any]:
    """What transformers' models call in the place of `original`; that itself in models whose samples nobody shares.

    Args:
        original: None for eager attention, which each architecture has its own of.
    """

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
        here = getattr(module, _ATTACHED, None)
        inner: Any = original or (here[1] if here is not None else _own_eager(module))
        if here is None or not here[0].is_active:
            return inner(module, query, key, value, attention_mask, **kwargs)
        return _with_whole_rows(here[0], inner, name, module, (query, key, value), attention_mask, **kwargs)

    attend.of_harness = True  # type: ignore[attr-defined]
    return attend


def _own_eager(module: nn.Module) -> Callable[..., Any] | None:
    return getattr(sys.modules.get(type(module).__module__), "eager_attention_forward", None)


def _mask(original: Callable[..., Any]) -> Callable[..., Any]:
    """Transformers' function for a mask, for whole rows while a forward has slices of them."""

    @functools.wraps(original)
    def mask(*args: Any, **kwargs: Any) -> Any:
        if _rows is not None:
            kwargs |= {name: kwargs[name] * _rows[0] for name in ("q_length", "kv_length")}
        return original(*args, **kwargs)

    mask.of_harness = True  # type: ignore[attr-defined]
    return mask


def _register(name: str) -> None:
    """Puts our functions in the place of transformers' for one attention implementation, once a process."""
    from transformers import AttentionInterface, masking_utils

    functions, masks = AttentionInterface(), masking_utils.AttentionMaskInterface()
    if not hasattr(functions.get(name), "of_harness"):
        AttentionInterface.register(name, _attention(name, functions.get(name)))
    if name in masks and not hasattr(masks[name], "of_harness"):
        masking_utils.AttentionMaskInterface.register(name, _mask(masks[name]))
    remap = getattr(masking_utils, "remap_positions_for_packed_sequence", None)  # from 5.18 on: a token's place in its document
    if remap is not None and not hasattr(remap, "of_harness"):

        def of_whole_rows(function: Callable[..., Any], position_ids: Tensor) -> Any:
            return remap(function, position_ids if _rows is None else _rows[1])

        of_whole_rows.of_harness = True  # type: ignore[attr-defined]
        masking_utils.remap_positions_for_packed_sequence = of_whole_rows  # type: ignore[assignment]


# --------------------------------------------------------------------------------------------------------------------- the group


class SequenceParallel:
    """This process among the N that share its samples.

    Attributes:
        size, rank: N, and which slice is this process's.
        group: of the exchanges; None where there are only fake tensors, which nobody sends.
        check: called before every exchange; raises where another process ran out of memory.
        is_active: False while every process has whole rows.
        positions: of the whole rows of the last forward; None before the first.
    """

    def __init__(self, size: int, rank: int = 0, group: dist.ProcessGroup | None = None) -> None:
        self.size, self.rank, self.group = size, rank, group
        self.name = "nobody" if group is None else str(group.group_name)
        self.check: Callable[[], None] = lambda: None
        self.is_active = True
        self.positions: Tensor | None = None
        self.groups: list[tuple[Any, int, int]] = []
        _groups[self.name] = self

    @classmethod
    def join(cls, coordinator: Coordinator) -> SequenceParallel:
        """With the process's neighbours; called on all ranks of the job."""
        size = coordinator.sequence_parallel_size
        group, _ = dist.new_subgroups(group_size=size, timeout=timedelta(seconds=coordinator.timeout_s))
        return cls(size, coordinator.process_index % size, group)

    def install(self, model: Any) -> None:
        """Lets the model's attention exchange; of an empty model, before it is sharded."""
        text = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
        for name in {str(model.config._attn_implementation), str(text._attn_implementation)} - {"None"}:
            _register(name)
        for module in model.modules():
            setattr(module, _ATTACHED, (self, _own_eager(module)))
            queries = getattr(module, "num_key_value_groups", 0)
            if isinstance(queries, int) and queries > 1:
                keys = text.num_attention_heads // queries
                own = text.num_attention_heads // math.lcm(keys, self.size)
                self.groups.append((module, queries, own))
        self._set_groups()

    def allocate(self, parts: Tensor) -> Tensor:
        """What an exchange receives into; there before the vote, so that nobody is left alone in the exchange for want of memory."""
        return torch.empty_like(parts)

    def _set_groups(self) -> None:
        """Queries of a key: fewer where keys are repeated. transformers' attention functions read it from the module."""
        for module, whole, own in self.groups:
            module.num_key_value_groups = own if self.is_active else whole

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, every process runs whole rows by itself."""
        self.is_active = False
        self._set_groups()
        try:
            yield
        finally:
            self.is_active = True
            self._set_groups()

    @contextlib.contextmanager
    def sharing(self, inputs: dict[str, Any], targets: Tensor) -> Iterator[tuple[dict[str, Any], Tensor]]:
        """Around a forward: this process's slice of what the model gets. Lengths must be multiples of N.

        Args:
            inputs: keyword arguments of the model; tensors are (batch, tokens).
            targets: (batch, tokens), shifted already: what follows a slice's last token is in the next slice.
        """
        global _rows
        if not self.is_active:
            yield inputs, targets
            return
        inputs = dict(inputs)
        if inputs.get("position_ids") is None:
            inputs["position_ids"] = torch.arange(targets.shape[1], device=targets.device).expand_as(targets)
        self.positions = inputs["position_ids"]
        before, _rows = _rows, (self.size, self.positions)
        try:
            yield {name: self._own(value) for name, value in inputs.items()}, self._own(targets)
        finally:
            _rows = before

    def _own(self, value: Any) -> Any:
        return value.chunk(self.size, 1)[self.rank].contiguous() if isinstance(value, Tensor) else value


def attached(model: nn.Module) -> SequenceParallel:
    """What was installed in a model."""
    shared: SequenceParallel = getattr(model, _ATTACHED)[0]
    return shared


# --------------------------------------------------------------------------------------------------------------------- the proof

_NUM_ROWS, _TOKENS = 2, 16


def check_losses(
    shared: SequenceParallel,
    eval_loss: Callable[[MicroBatch], Tensor],
    coordinator: Coordinator,
    vocab_size: int,
    *,
    isolate: bool,
    tolerance: float,
) -> float:
    """Two small batches with shared and with whole samples: the loss must be the same, whatever the architecture does with its tokens.

    Args:
        eval_loss: the engine's.
        isolate: documents of a pack are kept apart.
        tolerance: nats per token, of a row.

    Returns:
        The largest difference of a row, nats per token.

    Raises:
        UserError: the losses differ.
    """
    largest = 0.0
    for packed in (False, True) if isolate else (False,):
        micro = _small_batch(shared.size, vocab_size, packed)
        rows: list[list[float]] = []
        for context in (contextlib.nullcontext(), shared.paused()):
            with context:
                rows.append(_row_losses(micro, eval_loss, coordinator))
        # Shared rows are in parts, one on each process of a group; whole ones are on each.
        num_tokens = micro.num_label_tokens / _NUM_ROWS
        for parts, whole in zip(*rows, strict=True):
            ours, theirs = parts / num_tokens / coordinator.num_data_parallel, whole / num_tokens / coordinator.num_processes
            if not abs(ours - theirs) <= tolerance:  # NaN is no agreement either
                message = f"shared samples have another loss than whole ones, {ours:.4f} and {theirs:.4f}: tokens meet outside of attention"
                raise user_error(KEY, message, "leave it out")
            largest = max(largest, abs(ours - theirs))
    return largest


def _small_batch(size: int, vocab_size: int, packed: bool) -> MicroBatch:
    source, samples = np.random.default_rng(0), []
    for _ in range(_NUM_ROWS):
        sample = make_sample(source.integers(0, vocab_size, _TOKENS * size))
        if packed:
            begin = _TOKENS * size // 2 + 3  # within a slice
            sample["document_ids"][begin:] = 1
            sample["position_ids"][begin:] -= begin
        samples.append(sample)
    return collate(samples, 0, size)


def _row_losses(micro: MicroBatch, eval_loss: Callable[[MicroBatch], Tensor], coordinator: Coordinator) -> list[float]:
    """Loss of every row, summed over all processes."""
    found: list[Tensor] = []
    micro.report = lambda _, losses: found.append(losses)
    eval_loss(micro)
    return coordinator.sum(found[0].double().tolist(), "loss of shared samples")
