"""What a job and its model must fulfil so that several processes can share each sample (`--sequence_parallel_size`).

Imports no torch: all of it is found before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from harness.findings import Finding

KEY = "--sequence_parallel_size"
# Layers in which tokens meet in attention only, so that whole rows there are enough.
_ATTENTION_LAYERS = frozenset(["full_attention", "sliding_attention", "chunked_attention"])
# Rotary frequencies that follow from the longest position of a batch: processes that see different parts would disagree.
_LENGTH_DEPENDENT = frozenset(["dynamic", "longrope"])


def job_findings(size: int, engine: str, num_processes: int) -> Iterator[Finding]:
    """Whether the processes of a job can be cut into groups of `size`.

    Args:
        engine: "ddp", "fsdp", "zero" or "device_map".
    """
    if size < 1:
        yield Finding("error", KEY, f"must be at least 1, not {size}", "1 for none")
    elif size > 1 and engine == "device_map":
        yield Finding("error", KEY, "a device map is one process, with nobody to share samples with", "torchrun with --fsdp full_shard")
    elif num_processes % size:
        fits = [count for count in range(1, num_processes + 1) if num_processes % count == 0]
        message = f"{size} does not divide the {num_processes} processes of this run"
        yield Finding("error", KEY, message, f"one of {', '.join(map(str, fits))}, or another number of processes")


def model_findings(size: int, value_of: Callable[[str], Any]) -> Iterator[Finding]:
    """Whether a model can be trained by `size` processes a sample.

    Args:
        value_of: the model's config by name, None for what it does not say.
    """
    if size <= 1:
        return
    heads = value_of("num_attention_heads") or value_of("n_head")
    if isinstance(heads, int) and heads % size:
        fits = [count for count in range(2, heads + 1) if heads % count == 0]
        fix = f"one of {', '.join(map(str, fits))}" if fits else "leave it out"
        yield Finding("error", KEY, f"{size} does not divide the model's {heads} attention heads", fix)
    others = sorted({str(kind) for kind in value_of("layer_types") or ()} - _ATTENTION_LAYERS)
    if others:
        message = f"the model has layers of the kind {', '.join(others)}, in which tokens meet outside of attention"
        yield Finding("error", KEY, message, "leave it out")
    kinds = sorted(_rope_types(value_of("rope_parameters") or value_of("rope_scaling")) & _LENGTH_DEPENDENT)
    if kinds:
        message = f"the model's rotary positions ({', '.join(kinds)}) depend on the length of the sample, of which each process sees a part"
        yield Finding("error", KEY, message, "leave it out, or a model with another rope_type")
    if value_of("output_router_logits") and float(value_of("router_aux_loss_coef") or 0.0) > 0:
        message = "the router's own loss is made of whole samples, of which each process sees a part"
        yield Finding("error", KEY, message, "leave it out, or output_router_logits=false in the model's config")


def _rope_types(parameters: Any) -> set[str]:
    """Kinds of rotary embedding, of all kinds of layers."""
    if not isinstance(parameters, dict):
        return set()
    kinds = {str(parameters[name]) for name in ("rope_type", "type") if parameters.get(name)}
    return kinds.union(*(_rope_types(value) for value in parameters.values()))
