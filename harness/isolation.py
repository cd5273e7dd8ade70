"""Documents of a pack do not see each other: how transformers' models are told, and which of them cannot keep documents apart."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from harness import varlen_attention
from harness.findings import Finding

_documents: tuple[Tensor | None, Tensor | None] = (None, None)


def isolate_packed_documents() -> None:
    """Lets transformers' mask code take the documents of a pack from us, and knows our attention of documents.

    It would find them itself from the positions, reading the GPU once a forward; it would find none where padding follows, nor where a
    model makes its masks without a word of positions, as gpt_oss and opt do.
    """
    from transformers import masking_utils

    masking_utils.find_packed_sequence_indices = lambda position_ids: _documents[0]
    interfaces = masking_utils.AttentionMaskInterface
    for name in ("sdpa", "eager", "flex_attention"):
        plain = interfaces._global_mapping[name]
        if not getattr(plain, "keeps_apart", False):
            interfaces.register(name, _keeping_apart(plain))
    varlen_attention.register(lambda: (_documents[1], _documents[0] is not None))


def _keeping_apart(plain: Any) -> Any:
    """A function of transformers that makes masks, whose masks keep documents apart too."""
    from transformers.masking_utils import and_masks, packed_sequence_mask_function

    @functools.wraps(plain)
    def mask(*args: Any, **kwargs: Any) -> Any:
        ids = _documents[0]
        if (
            ids is not None
            and ids.shape == (kwargs.get("batch_size"), kwargs.get("kv_length"))
            and kwargs.get("q_length", ids.shape[1]) == ids.shape[1]
        ):
            kwargs["mask_function"] = and_masks(kwargs["mask_function"], packed_sequence_mask_function(ids))
            kwargs["allow_is_causal_skip"] = False
        return plain(*args, **kwargs)

    mask.keeps_apart = True  # type: ignore[attr-defined]
    return mask


@contextlib.contextmanager
def documents(document_ids: Tensor | None, document_ends: Tensor | None = None) -> Iterator[None]:
    """Within, attention does not cross documents.

    Args:
        document_ids: (batch, seq) int, or None for plain causal attention.
        document_ends: `harness.batches.document_ends` of them, for the attention that takes no mask.
    """
    global _documents
    previous, _documents = _documents, (document_ids, document_ends)
    try:
        yield
    finally:
        _documents = previous


def _source_of(model: nn.Module) -> str:
    """The Python file of the model's class; empty where there is none."""
    module = sys.modules.get(type(model).__module__)
    try:
        return "" if module is None else inspect.getsource(module)
    except OSError:
        return ""


def can_isolate(model: nn.Module) -> bool:
    """True when documents of a pack can be kept apart: masks are made by transformers' mask code, and tokens meet in attention only."""
    return "create_causal_mask" in _source_of(model) and not list(mixing_layers(model))


def mixing_layers(model: Any) -> Iterator[str]:
    """Kinds of layers that carry what a token says to later ones outside of attention, where no mask keeps documents apart."""
    kinds = {str(kind) for kind in getattr(model.config.get_text_config(), "layer_types", None) or ()}
    yield from sorted(kind for kind in kinds if any(word in kind for word in ("linear", "conv", "mamba", "recurrent")))
    if any(isinstance(module, nn.Conv1d) for module in model.modules()):
        yield "convolutions over tokens"


def causal_findings(model: Any, keeps_documents_apart: bool) -> list[Finding]:
    """Why tokens of this model would see what they must not: what they are to predict, or another document of their pack."""
    kind = type(model).__name__
    found: list[Finding] = []
    if is_encoder(model):
        message = f"{kind} is an encoder by its config: every token would see those that it is to predict"
        fix = "set is_decoder to true in the model's config.json, or with --config_overrides is_decoder=true"
        found.append(Finding("error", "is_decoder", message, fix))
    if keeps_documents_apart and not can_isolate(model):
        mixing = ", ".join(mixing_layers(model))
        message = f"{kind} cannot keep the documents of a pack apart{f' ({mixing})' if mixing else ''}"
        found.append(Finding("error", "--no_document_isolation", message, "add --no_document_isolation, or use --packing none"))
    return found


def is_encoder(model: Any) -> bool:
    """True when every token would see those that it is to predict: the model's code makes causal masks only with `is_decoder`."""
    source = _source_of(model)
    return getattr(model.config, "is_decoder", None) is False and "config.is_decoder" in source and "create_bidirectional_mask" in source


def can_attend_by_length(model: Any) -> bool:
    """True when a model on `sdpa` may as well take `varlen`, which keeps the documents of a pack apart without a mask.

    Its layers hand everything to transformers' attention functions, and ask for nothing that ours has not.
    """
    if model.config._attn_implementation != "sdpa" or list(varlen_attention.findings(model.config.get_text_config(), "cuda")):
        return False
    source = _source_of(model)
    # Sinks and biases; a mask that the layers read themselves; windows that only masks have, or only layers.
    asks = any(word in source for word in ("s_aux", "position_bias", "allow_is_causal_skip=False"))
    says_windows = "create_sliding_window_causal_mask" in source and re.search(r"sliding_window=(self|getattr)", source)
    if getattr(model.config.get_text_config(), "sliding_window", None) and not says_windows:
        return False
    return can_isolate(model) and not asks and bool(model._can_set_attn_implementation())
