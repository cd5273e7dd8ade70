"""Measures what a training step keeps in memory, on the model's own code, with fake tensors: no GPU, no weights, no arithmetic.

A child process of the memory planner (`python -m harness.activation_probe '<request as JSON>'` prints one JSON object), because torch
and transformers take seconds to import, because an attention kernel can take the process with it, and because the planner itself then
stays a few megabytes big. The model is built on the meta device, cut to its first few layers (one more than needed to see every kind of
layer), its parameters are replaced by fake CPU tensors, and one forward and backward runs under a dispatch mode that follows the
lifetime of every storage. Between two layers the same amount is added each time, so the first layers tell the rest: 2 and 3 layers
predict 32 to the byte (tests/test_memory.py).

What fake tensors do not see: kernels written in Triton (Liger), flash attention from a wheel, flex attention (it ends the process on
CPU), fragmentation, and whatever CUDA and NCCL allocate themselves. `harness.memory` adds those in closed form.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import gc
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from harness.findings import UserError, user_error
from harness.sequence_rules import model_findings

# Changes with the meaning of the numbers below, so that older cached answers are not taken for new ones.
PROBE_VERSION = 3

MAX_MEASURED_LAYERS = 14
# Of the step that tells what is there for each sample: a prime that no model has among its sizes.
MANY_SAMPLES = 10007


@dataclasses.dataclass(frozen=True)
class ProbeRequest:
    """What to measure.

    Attributes:
        model: folder, config.json or hub name in the local cache; None with `model_type`.
        block_size: tokens per sample; None for what the model can take, at most 4096.
        weights: "bf16" (parameters in 16 bits, no autocast), "autocast" (float32 parameters, 16-bit autocast), "fp32".
        checkpointing: modes of activation checkpointing.
        loss_chunks: chunk sizes of the loss, tokens; 0 is all at once.
        lora: values of LoraArguments, or None.
        documents: attention keeps the documents of a pack apart, so a mask exists, unless `attention` needs none: flash and flex
            attention, and varlen where the model can take it.
        sequence_parallel_size: processes that share each sample; what one of them has is measured.
    """

    model: str | None = None
    model_type: str | None = None
    config_overrides: str | None = None
    cache_dir: str | None = None
    trust_remote_code: bool = False
    attention: str = "sdpa"
    block_size: int | None = 1024
    weights: Sequence[str] = ("bf16",)
    checkpointing: Sequence[str] = ("none", "selective", "full")
    loss_chunks: Sequence[int] = (1024, 0)
    lora: dict[str, Any] | None = None
    documents: bool = False
    sequence_parallel_size: int = 1

    @property
    def own_tokens(self) -> int:
        """Of a sample, what one process has."""
        assert self.block_size is not None
        return -(-self.block_size // self.sequence_parallel_size)


# -------------------------------------------------------------------------------------------------------------------- the model


def build(request: ProbeRequest) -> Any:
    """The whole model on the meta device, adapters attached.

    Raises:
        UserError: no such model, not a causal LM, impossible sizes.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    from harness.args import ModelArguments
    from harness.isolation import isolate_packed_documents
    from harness.model_files import MODEL_CODE_ERRORS, what_failed
    from harness.modeling import load_config

    is_file = request.model is not None and request.model.endswith(".json")
    arguments = ModelArguments(
        model_name_or_path=None if is_file else request.model,
        config_name=request.model if is_file else None,
        model_type=request.model_type,
        config_overrides=request.config_overrides,
        cache_dir=request.cache_dir,
        trust_remote_code=request.trust_remote_code,
    )
    config = load_config(arguments)
    attention = request.attention if request.attention in ("sdpa", "eager") else "sdpa"
    isolate_packed_documents()
    options = {"dtype": torch.float32, "trust_remote_code": request.trust_remote_code}
    try:
        with torch.device("meta"), no_init_weights():
            try:
                model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, **options)
            except (ValueError, ImportError):
                if attention == "eager":
                    raise
                model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", **options)
    except MODEL_CODE_ERRORS as error:
        raise user_error("--model", f"cannot build this model: {what_failed(error)[:200]}", "check the config") from None
    model.tie_weights()
    text = model.config.get_text_config()
    if problems := list(model_findings(request.sequence_parallel_size, lambda name: getattr(text, name, None))):
        raise UserError(problems)
    if request.lora:
        from harness.args import LoraArguments
        from harness.lora import attach_lora

        attach_lora(model, LoraArguments(**request.lora))
    if request.sequence_parallel_size > 1:
        from harness.sequence_parallel import SequenceParallel

        SequenceParallel(request.sequence_parallel_size).install(model)
    return model


def _num(parameters: Sequence[Any]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def describe(model: Any) -> dict[str, Any]:
    """Sizes of a model (see `harness.model_shape.ModelShape`) and, per layer, which kind it is of."""
    from harness.loss import head_is_plain
    from harness.modeling import layer_units

    text = model.config.get_text_config()
    units = _blocks(layer_units(model))
    patterns = getattr(text, "layer_types", None) or []
    kinds: dict[Any, int] = {}
    kind_of_layer: list[int] = []
    described: list[dict[str, Any]] = []
    seen: set[int] = set()
    share = _active_share(text)
    for index, (_, unit) in enumerate(units):
        parameters = list(unit.parameters())
        shapes = tuple((tuple(p.shape), p.requires_grad) for p in parameters)
        key = (type(unit).__name__, shapes, patterns[index] if index < len(patterns) else None)
        if key not in kinds:
            kinds[key] = len(kinds)
            experts = [p for p in parameters if p.dim() == 3]
            described.append(
                {
                    "num_parameters": _num(parameters),
                    "num_trainable": _num([p for p in parameters if p.requires_grad]),
                    "num_active": int(_num(parameters) - _num(experts) * (1 - share)),
                    "num_small": _num([p for p in parameters if p.dim() < 2]),
                    "largest_tensor": max((p.numel() for p in parameters), default=0),
                    "num_tensors": len(parameters),
                }
            )
        kind_of_layer.append(kinds[key])
        seen |= {id(p) for p in parameters}
    root = [p for p in model.parameters() if id(p) not in seen]
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    heads = int(getattr(text, "num_attention_heads", None) or 1)
    hidden = int(getattr(text, "hidden_size", 0) or embedding.weight.shape[1])
    return {
        "model_type": model.config.model_type,
        "hidden_size": hidden,
        "intermediate_size": int(getattr(text, "intermediate_size", None) or 4 * hidden),
        "num_heads": heads,
        "num_key_value_heads": int(getattr(text, "num_key_value_heads", None) or heads),
        "head_dim": int(getattr(text, "head_dim", None) or hidden // heads),
        "vocab_size": int(embedding.weight.shape[0]),
        "kinds": described,
        "kind_of_layer": kind_of_layer,
        "num_root": _num(root),
        "num_root_trainable": _num([p for p in root if p.requires_grad]),
        "num_embedding": embedding.weight.numel(),
        "num_head": 0 if head is None else head.weight.numel(),
        "tied": head is not None and head.weight is embedding.weight,
        "head_trainable": head is not None and bool(head.weight.requires_grad),
        "plain_head": head_is_plain(model),
        "max_positions": _max_positions(text),
    }


def _max_positions(text: Any) -> int | None:
    from harness.modeling import max_positions

    return max_positions(text)


def _active_share(text: Any) -> float:
    """Experts that see a token, as a share of all; 1.0 for a dense model."""
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        experts = getattr(text, name, None)
        if isinstance(experts, int) and experts > 0:
            return min(1.0, float(getattr(text, "num_experts_per_tok", None) or 1) / experts)
    return 1.0


def _blocks(units: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Of all unsplittable modules, those of the longest list: the decoder's layers."""
    families: dict[str, list[tuple[str, Any]]] = {}
    for name, unit in units:
        families.setdefault(name.rpartition(".")[0], []).append((name, unit))
    return max(families.values(), key=len, default=[])


def cut(model: Any, kind_of_layer: Sequence[int]) -> tuple[list[Any], list[int]]:
    """Shortens the model in place to the layers that must be measured; returns them and their kinds.

    Layer 0 differs from others of its kind by what the embedding leaves behind, and the last one by the final norm, so every kind is
    wanted once in between.
    """
    from harness.modeling import layer_units

    inner = set(kind_of_layer[1:-1]) or set(kind_of_layer)
    length = next(
        (n for n in range(3, MAX_MEASURED_LAYERS + 1) if inner <= set(kind_of_layer[1 : n - 1])),
        MAX_MEASURED_LAYERS,
    )
    length = min(length, len(kind_of_layer))
    units = _blocks(layer_units(model))
    parent = model.get_submodule(units[0][0].rpartition(".")[0])
    del parent[length:]
    text = model.config.get_text_config()
    for name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, length)
            break
    return [unit for _, unit in units[:length]], list(kind_of_layer[:length])


def replace_by_fake(model: Any, dtype: Any, lora_dtype: Any) -> list[Any]:
    """Puts fake CPU tensors in the place of meta parameters and buffers, tied ones once; returns them. Call inside FakeTensorMode.

    `Module.to_empty` cannot be used: torch refuses to swap fake parameters.
    """
    import torch

    memo: dict[int, tuple[Any, Any]] = {}
    for name, module in model.named_modules():
        wide = lora_dtype if "lora_" in name else dtype
        for table, is_parameter in ((module._parameters, True), (module._buffers, False)):
            for key, old in table.items():
                if old is None:
                    continue
                if id(old) not in memo:
                    new = torch.empty(old.shape, dtype=wide if old.is_floating_point() and is_parameter else old.dtype, device="cpu")
                    new = torch.nn.Parameter(new, requires_grad=old.requires_grad) if is_parameter else new
                    memo[id(old)] = (old, new)
                table[key] = memo[id(old)][1]
    return [new for _, new in memo.values()]


# -------------------------------------------------------------------------------------------------------------- the measurement


@contextlib.contextmanager
def _hooks(meter: Any, layers: Sequence[Any], state: dict[str, bool]) -> Iterator[None]:
    """Marks the meter before and after every layer's forward and when the gradient of its output arrives."""
    handles = []

    def first_tensor(output: Any) -> Any:
        return output[0] if isinstance(output, tuple) else output

    for index, layer in enumerate(layers):

        def before(module: Any, args: Any, index: int = index) -> None:
            if state["forward"]:  # a recompute in backward runs the same hooks
                meter.mark(f"before {index}")

        def after(module: Any, args: Any, output: Any, index: int = index) -> None:
            if state["forward"]:
                meter.mark(f"after {index}")
                first_tensor(output).register_hook(lambda gradient, index=index: meter.mark(f"gradient {index}"))

        handles += [layer.register_forward_pre_hook(before), layer.register_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _no_gradients_kept(parameters: Sequence[Any]) -> Callable[[], None]:
    """Drops every parameter's gradient as soon as it is complete: engines account for gradients, a step only holds one at a time."""
    handles = [
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
        for parameter in parameters
        if parameter.requires_grad
    ]

    def release() -> None:
        for handle in handles:
            handle.remove()

    return release


def _context(weights: str) -> Any:
    import torch

    return torch.autocast("cpu", torch.bfloat16, enabled=weights == "autocast")


def _base_dtype(weights: str, *, frozen: bool) -> Any:
    """Of the parameters that are not adapters: a frozen base has its weights in the dtype of the products, also under autocast."""
    import torch

    return torch.bfloat16 if weights == "bf16" or (weights == "autocast" and frozen) else torch.float32


def run_layers(model: Any, layers: Sequence[Any], request: ProbeRequest, weights: str, batch: int, by_sample: bool = False) -> Any:
    """One forward and backward of the decoder (without head and loss); returns the meter with its trace and marks.

    Args:
        batch: samples of the micro-batch.
        by_sample: tell apart what is there for each sample; `batch` is a large prime.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from harness.isolation import documents
    from harness.live_bytes import LiveBytes

    with FakeTensorMode():
        # Engines that cast whatever they gather cast adapters too; autocast finds them in float32.
        adapters = torch.bfloat16 if weights == "bf16" else torch.float32
        tensors = replace_by_fake(model, _base_dtype(weights, frozen=bool(request.lora)), adapters)
        meter = LiveBytes(num_experts=_num_experts(model), samples=batch if by_sample else 0)
        for tensor in tensors:
            meter.ignore(tensor)
        state = {"forward": True}
        release = _no_gradients_kept([t for t in tensors if isinstance(t, torch.nn.Parameter)])
        whole = (batch, request.own_tokens * request.sequence_parallel_size)
        inputs = {"input_ids": torch.zeros(whole, dtype=torch.long)}
        pack = torch.zeros(whole, dtype=torch.long) if request.documents and _needs_mask(model, request) else None
        with _shared(model, request, inputs) as inputs, _hooks(meter, layers, state), documents(pack), meter:
            with _context(weights):
                hidden = [model.get_decoder()(**inputs, use_cache=False)[0]]
                meter.mark("end")
            state["forward"] = False
            gradient = [torch.empty_like(hidden[0])]
            meter.mark("backward")
            torch.autograd.backward(hidden, gradient)
            meter.mark("done")
        release()
    return meter


def _needs_mask(model: Any, request: ProbeRequest) -> bool:
    """Whether documents are kept apart by a mask."""
    from harness.isolation import can_attend_by_length

    return request.attention in ("sdpa", "eager") or (request.attention == "varlen" and not can_attend_by_length(model))


@contextlib.contextmanager
def _shared(model: Any, request: ProbeRequest, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What the model gets where processes share samples: one process's part. Fake tensors are exchanged with nobody."""
    if request.sequence_parallel_size == 1:
        yield inputs
        return
    from harness.sequence_parallel import attached

    with attached(model).sharing(inputs, inputs["input_ids"]) as (own, _):
        yield own


def measure_layers(
    model: Any, layers: Sequence[Any], kinds: Sequence[int], request: ProbeRequest, weights: str, mode: str
) -> dict[str, Any]:
    """Each allocation is a constant plus a share per sample. One micro-batch of very many samples tells them apart, where each is one or
    the other; else micro-batches of 1 and of 2 samples do.

    Returns:
        A `harness.model_shape.LayerMemory` as a dict.
    """
    from harness.blocks import set_activation_checkpointing

    set_activation_checkpointing(model, mode)
    model.train()
    if request.lora and mode != "none":
        model.enable_input_require_grads()  # a frozen embedding has no gradient, and checkpointing would then drop the adapters'
    many = run_layers(model, layers, request, weights, MANY_SAMPLES, by_sample=True)
    if not many.is_mixed:
        return _Lines.of(many).reduce(kinds)
    one, two = (run_layers(model, layers, request, weights, batch) for batch in (1, 2))
    return (_Lines.between(one, two) or _Peaks(one, two)).reduce(kinds)


def _num_experts(model: Any) -> int:
    text = model.config.get_text_config()
    found = (getattr(text, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts"))
    return next((value for value in found if isinstance(value, int) and value > 0), 1)


Line = list[int]  # [constant bytes, bytes per sample]


def envelope(lines: Iterable[tuple[int, int]]) -> list[Line]:
    """Those of the lines constant + slope x samples that are the highest somewhere from 1 sample on."""
    unique = set(lines)
    best = {max(unique, key=lambda line: (line[0] + line[1] * n, line[1])) for n in (*range(1, 17), *(2**k for k in range(5, 21)))}
    return [list(line) for line in sorted(best)]


class _Lines:
    """A step whose allocations are known as lines, (constant bytes, bytes per sample).

    Attributes:
        trace: what is alive after each allocation.
        marks: name -> (what is alive, allocations so far, FLOPs per sample so far).
    """

    def __init__(self, trace: list[tuple[int, int]], marks: dict[str, tuple[tuple[int, int], int, int]]) -> None:
        self.trace, self.marks = trace, marks

    @classmethod
    def of(cls, meter: Any) -> _Lines:
        """Of one step that told them apart."""
        marks = {}
        for name, (live, place, _) in meter.marks.items():
            share, flops = meter.marks_per_sample[name]
            marks[name] = ((live, share), place, flops)
        return cls(list(zip(meter.trace, meter.trace_per_sample, strict=True)), marks)

    @classmethod
    def between(cls, one: Any, two: Any) -> _Lines | None:
        """Of the same step with 1 and with 2 samples; None where they allocated differently."""
        if len(one.trace) != len(two.trace) or any(one.marks[name][1] != two.marks[name][1] for name in one.marks):
            return None
        return cls([_line(*pair) for pair in zip(one.trace, two.trace, strict=True)], _marks_between(one, two))

    def live(self, name: str) -> tuple[int, int]:
        return self.marks[name][0]

    def peak(self, start: str, stop: str, above: tuple[int, int]) -> list[Line]:
        """The highest the trace gets between two marks, over `above`."""
        found = [self.live(start), *self.trace[self.marks[start][1] : self.marks[stop][1]]]
        return envelope((line[0] - above[0], line[1] - above[1]) for line in found)

    def flops(self, start: str, stop: str) -> int:
        return self.marks[stop][2] - self.marks[start][2]

    def reduce(self, kinds: Sequence[int]) -> dict[str, Any]:
        """What each kind of layer adds, and what remains when all layers are taken off."""
        last = len(kinds) - 1
        layers: dict[int, dict[str, Any]] = {}
        for index in sorted(range(last + 1), key=lambda i: (0 < i < last, i)):  # inner layers last: their values are the ones that count
            before, gradient = f"before {index}", f"gradient {index}"
            following = f"before {index + 1}" if index < last else f"after {index}"
            kept = _minus(self.live(following), self.live(before))
            previous = layers.get(kinds[index], {})
            layers[kinds[index]] = {
                "forward_kept": kept,
                "backward_kept": _minus(self.live(gradient), self.live(f"gradient {index - 1}"))
                if index
                else previous.get("backward_kept", kept),
                "forward_peak": self.peak(before, following, self.live(before)),
                "backward_peak": self.peak(gradient, f"gradient {index - 1}" if index else "done", self.live(gradient)),
                "forward_flops": self.flops(before, following),
                "backward_flops": self.flops(gradient, f"gradient {index - 1}")
                if index
                else previous.get("backward_flops", self.flops(gradient, "done")),
            }
        forward = [layers[kind]["forward_kept"] for kind in kinds]
        end = self.live("end")
        return {
            "forward_start": _minus(self.live(f"before {last}"), *forward[:-1]),
            "forward_base": _minus(end, *forward),
            "backward_base": _minus(self.live(f"gradient {last}"), *(layers[kind]["backward_kept"] for kind in kinds)),
            "norm_forward_peak": self.peak(f"after {last}", "end", end),
            "norm_backward_peak": self.peak("backward", f"gradient {last}", self.live(f"gradient {last}")),
            "layers": [layers[kind] for kind in sorted(layers)],
        }


class _Peaks(_Lines):
    """Two steps with other operations for another number of samples: only their peaks can be compared."""

    def __init__(self, one: Any, two: Any) -> None:
        super().__init__([], _marks_between(one, two))
        self.meters = one, two

    def peak(self, start: str, stop: str, above: tuple[int, int]) -> list[Line]:
        one, two = (max([m.marks[start][0], *m.trace[m.marks[start][1] : m.marks[stop][1]]]) for m in self.meters)
        line = _line(one, two)
        return envelope([(line[0] - above[0], line[1] - above[1])])


def _line(one: int, two: int) -> tuple[int, int]:
    """Through the bytes with 1 and with 2 samples."""
    return 2 * one - two, two - one


def _marks_between(one: Any, two: Any) -> dict[str, tuple[tuple[int, int], int, int]]:
    return {name: (_line(live, two.marks[name][0]), place, two.marks[name][2] - flops) for name, (live, place, flops) in one.marks.items()}


def _minus(value: tuple[int, int], *others: tuple[int, int]) -> Line:
    return [value[0] - sum(other[0] for other in others), value[1] - sum(other[1] for other in others)]


def measure_loss(shape: dict[str, Any], weights: str, num_tokens: int, chunk: int) -> tuple[int, int]:
    """Peak of the loss above its input (forward and backward, the input's gradient included), and its FLOPs."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from harness.live_bytes import LiveBytes
    from harness.loss import chunked_cross_entropy_sum

    with FakeTensorMode():
        dtype = _base_dtype(weights, frozen=not shape["head_trainable"])
        hidden = torch.empty((num_tokens, shape["hidden_size"]), dtype=dtype, requires_grad=True)
        head = torch.nn.Parameter(torch.empty((shape["vocab_size"], shape["hidden_size"]), dtype=dtype), shape["head_trainable"])
        targets = torch.zeros((num_tokens,), dtype=torch.long)
        meter = LiveBytes(in_place_shape=head.shape)
        for tensor in (hidden, head, targets):
            meter.ignore(tensor)
        release = _no_gradients_kept([head])
        with meter:
            with _context(weights):
                loss = [chunked_cross_entropy_sum(hidden, head, None, targets, chunk)]
            torch.autograd.backward(loss)
        release()
    return max(meter.trace), meter.flops


def measure_losses(shape: dict[str, Any], weights: str, block_size: int, chunks: Sequence[int]) -> list[dict[str, Any]]:
    """Memory of the loss per chunk size, as lines in the number of tokens of a micro-batch.

    With chunks only the input's gradient grows with the tokens, so three chunks tell all; without, two sizes do.
    """
    results = []
    for chunk in chunks:
        first, second = (3 * chunk, 4 * chunk) if chunk else (block_size, 8 * block_size)
        (low, low_flops), (high, high_flops) = (measure_loss(shape, weights, tokens, chunk) for tokens in (first, second))
        slope = (high - low) / (second - first)
        results.append(
            {
                "weights": weights,
                "chunk": chunk,
                "line": [low - slope * first, slope],
                "flops_per_token": (high_flops - low_flops) / (second - first),
            }
        )
    return results


# What takes long is begun first, so that the workers end together.
_LONGEST_FIRST = ("selective", "none", "full", "loss")
# What the forked workers find in their memory: (model, layers, their kinds, shape, request). A fake model cannot be sent to them.
_measured_model: tuple[Any, list[Any], list[int], dict[str, Any], ProbeRequest] | None = None


def _measure(job: tuple[str, str]) -> Any:
    """One piece of work in a worker: (weights, checkpointing mode), or (weights, "loss")."""
    assert _measured_model is not None
    model, layers, kinds, shape, request = _measured_model
    gc.disable()  # nothing here is freed by it, and its timing must not show
    weights, what = job
    if what == "loss":
        return measure_losses(shape, weights, request.own_tokens, request.loss_chunks if shape["plain_head"] else [0])
    return {"weights": weights, "checkpointing": what, **measure_layers(model, layers, kinds, request, weights, what)}


def probe(request: ProbeRequest) -> dict[str, Any]:
    """Everything asked for; the answer is what `harness.model_shape.Measured.from_dict` reads.

    The pieces run in two forked workers: twice as fast on two cores, and a kernel that ends its process ends only that.

    Raises:
        UserError: no such model, or one that cannot be built.
    """
    global _measured_model
    model = build(request)
    shape = describe(model)
    if request.block_size is None:
        request = dataclasses.replace(request, block_size=min(4096, shape["max_positions"] or 1024))
    layers, kinds = cut(model, shape["kind_of_layer"])
    _measured_model = (model, layers, kinds, shape, request)
    answer: dict[str, Any] = {"version": PROBE_VERSION, "block_size": request.block_size, "shape": shape}
    answer |= {"layers": [], "losses": [], "failures": [], "unsupported": []}
    jobs = [(weights, mode) for weights in request.weights for mode in request.checkpointing]
    jobs += [(weights, "loss") for weights in request.weights if request.loss_chunks]
    if not jobs:
        return answer
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
        futures = {job: pool.submit(_measure, job) for job in sorted(jobs, key=lambda job: _LONGEST_FIRST.index(job[1]))}
        for (weights, what), future in [(job, futures[job]) for job in jobs]:
            try:
                values = future.result()
                answer["losses" if what == "loss" else "layers"] += values if what == "loss" else [values]
            except UserError:
                answer["unsupported"].append(what)
            except Exception as error:  # any model's code may do what fake tensors cannot: closed forms take over
                reason = f"{type(error).__name__}: {str(error)[:200]}"
                answer["failures"].append({"weights": weights, "checkpointing": what, "reason": reason})
    return answer


def main(argv: Sequence[str]) -> int:
    """Prints the answer to the request in `argv[0]` as JSON; findings instead, and exit code 2, when the request is wrong."""
    import warnings

    warnings.simplefilter("ignore")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a plan reads what is here; it waits for no network
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    request = ProbeRequest(**json.loads(argv[0]))
    if request.lora is None and not request.trust_remote_code:  # peft needs it, and a model's own code may
        sys.modules.setdefault("accelerate", None)  # type: ignore[arg-type]
    real_stdout = os.dup(1)
    os.dup2(2, 1)  # whatever libraries print must not get into the JSON
    try:
        answer, code = probe(request), 0
    except UserError as error:
        answer, code = {"findings": [dataclasses.asdict(finding) for finding in error.findings]}, 2
    with os.fdopen(real_stdout, "w", encoding="utf-8") as stream:
        json.dump(answer, stream)
    return code


if __name__ == "__main__":
    # Importing torch and transformers makes millions of objects that stay: looking through them for garbage takes a quarter of the time.
    gc.disable()
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # taking them apart takes as long
