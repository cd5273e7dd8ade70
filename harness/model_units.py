"""What a model is made of, for placing it on devices: its blocks, in the order in which they run, tied weights together, with sizes.

Everything is read off the model itself, never from a table of layer names: blocks by the classes in `_no_split_modules`, ties by
shared parameters, the order by one forward on meta tensors. So it holds for any causal or sequence-to-sequence model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import logging
import math
import re
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Optional

import torch
from torch import nn

from harness.device_map_text import ranges_text
from harness.findings import Finding, UserError
from harness.partition import Device, Unit, normal_device

log = logging.getLogger(__name__)

# Saved for backward per token and block, over 2 bytes x (inputs + outputs of all matrix products): Llama's audited
# 16h + 4q + 4kv + 8f against 14h + 4q + 4kv + 6f by that count. The rest is norms (kept in float32) and residuals.
_SAVED_FACTOR = 1.2


@dataclasses.dataclass(frozen=True)
class MapJob:
    """What a run needs on top of the weights; the default is reading a model without training it.

    Attributes:
        training_bytes_per_param: gradient and optimizer state of one trainable parameter; 12 for AdamW on float32 weights.
        lora_r: r of LoRA adapters: then only they train.
        num_tokens: tokens of one micro-batch (samples x block size).
        in_flight: micro-batches between their forward and their backward.
        activation_checkpointing: blocks keep only their input.
        loss_chunk_size: tokens whose logits exist at once; 0 for all of a micro-batch.
    """

    training_bytes_per_param: float = 0.0
    lora_r: Optional[int] = None
    num_tokens: int = 0
    in_flight: int = 1
    activation_checkpointing: bool = False
    loss_chunk_size: int = 0


def block_classes(model: nn.Module, given: Iterable[str] | None = None) -> set[str]:
    """Class names of the blocks that must stay whole; those in the model, of its own list or of `given`.

    Returns:
        The names; empty when the model does not say and has none.

    Raises:
        UserError: `given` names a class that the model does not have.
    """
    present = {type(module).__name__ for module in model.modules()}
    own = {name for name in (getattr(model, "_no_split_modules", None) or ()) if name in present}
    if given is None:
        return own
    asked = set(given)
    problems = []
    for name in sorted(asked - present):
        near = sorted(own) or difflib.get_close_matches(name, sorted(present), n=1, cutoff=0.3)
        fix = f"this model's blocks are {', '.join(near)}" if near else "name a class of this model"
        problems.append(Finding("error", "no_split_modules", f"{type(model).__name__} has no class {name}", fix))
    if problems:
        raise UserError(problems)
    return asked


def _owners(model: nn.Module, classes: set[str]) -> dict[str, nn.Module]:
    """The smallest pieces that may be placed apart: blocks, leaf modules, and modules with weights of their own beside children."""
    owners: dict[str, nn.Module] = {}

    def visit(name: str, module: nn.Module) -> None:
        direct = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        children = list(module.named_children())
        # The root cannot be one piece; a tensor that sits on it directly becomes a piece under its own name.
        if type(module).__name__ in classes or not children or (direct and name):
            owners[name] = module
            return
        for child_name, child in children:
            visit(f"{name}.{child_name}" if name else child_name, child)

    visit("", model)
    return owners


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


@contextlib.contextmanager
def _recording(owners: Mapping[str, nn.Module], order: list[str]) -> Iterator[None]:
    def noter(name: str) -> Any:
        def note(_module: nn.Module, _args: Any) -> None:
            order.append(name)

        return note

    handles = [module.register_forward_pre_hook(noter(name)) for name, module in owners.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _eager_attention(config: Any) -> Iterator[None]:
    """Within, masks are always made in full: whether SDPA could do without one depends on the mask's values."""
    before = getattr(config, "_attn_implementation", None)
    if before is not None:
        config._attn_implementation = "eager"
    try:
        yield
    finally:
        if before is not None:
            config._attn_implementation = before


@contextlib.contextmanager
def _without_triton() -> Iterator[None]:
    """Within, a kernel written in Triton raises: it does not know meta tensors, would run at address 0, and leave the GPU unusable."""
    jit = getattr(sys.modules.get("triton.runtime.jit"), "JITFunction", None)
    if jit is None:
        yield
        return

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("a Triton kernel cannot run on meta tensors")

    run = jit.run
    jit.run = refuse
    try:
        yield
    finally:
        jit.run = run


_orders: weakref.WeakKeyDictionary[nn.Module, dict[tuple[str, ...], list[str]]] = weakref.WeakKeyDictionary()


def execution_order(model: nn.Module, owners: Mapping[str, nn.Module]) -> list[str]:
    """Names of `owners` in the order of their first use, found by one forward of 8 tokens on meta tensors.

    Registration order is not enough: OPT's final norm is registered before its blocks and runs after them. A piece that
    the forward did not reach (it failed half-way, or the piece is unused) follows its predecessor in registration order.
    A model that is not on meta is not run.
    """
    known = _orders.setdefault(model, {})
    if tuple(owners) in known:
        return known[tuple(owners)]
    order: list[str] = []
    if all(tensor.device.type == "meta" for tensor in _tensors(model)):
        ids = torch.zeros(1, 8, dtype=torch.long, device="meta")
        # No attention mask, a cache, eager attention: elsewhere transformers reads values, and meta tensors have none.
        inputs: dict[str, Any] = {"input_ids": ids, "use_cache": True}
        config = getattr(model, "config", None)
        if getattr(config, "is_encoder_decoder", False):
            inputs["decoder_input_ids"] = ids
        training = model.training
        model.eval()
        try:
            with _eager_attention(config), _recording(owners, order), _without_triton(), torch.no_grad():
                model(**inputs)
        except Exception as error:  # a model's own code may refuse meta tensors; the order so far is still right
            log.debug("order of execution known up to %s: %s", order[-1] if order else "the start", error)
        finally:
            model.train(training)
    seen = list(dict.fromkeys(order))
    following = {name: index for index, name in enumerate(seen)}
    previous = -1
    keyed: list[tuple[float, int, str]] = []
    for position, name in enumerate(owners):
        key = float(following[name]) if name in following else previous + 0.5
        previous = int(key)
        keyed.append((key, position, name))
    known[tuple(owners)] = [name for _, _, name in sorted(keyed)]
    return known[tuple(owners)]


def _saved_bytes_per_token(block: nn.Module, experts_used: int) -> float:
    """Bytes that one token leaves in a block between forward and backward, in 2-byte arithmetic, nothing recomputed."""
    width = 0
    for parameter in block.parameters():
        if parameter.ndim == 2:
            width += parameter.shape[0] + parameter.shape[1]
        elif parameter.ndim == 3:  # (experts, out, in): a token passes through some of them
            width += experts_used * (parameter.shape[1] + parameter.shape[2])
    return _SAVED_FACTOR * 2 * width


def _work(module: nn.Module, experts_used: int) -> int:
    """Weights that one token is multiplied with."""
    matrices = [parameter for parameter in module.parameters() if parameter.ndim in (2, 3)]
    return sum(math.prod(matrix.shape[-2:]) * (experts_used if matrix.ndim == 3 else 1) for matrix in matrices)


def _lora_params(module: nn.Module, r: int) -> int:
    return sum(r * (parameter.shape[-1] + parameter.shape[-2]) for parameter in module.parameters() if parameter.ndim >= 2)


def find_units(model: nn.Module, job: MapJob | None = None, no_split_modules: Iterable[str] | None = None) -> list[Unit]:
    """The model as a sequence of parts that may each sit on another device, in the order in which they run.

    Parts that share a parameter (an embedding and its tied head) are one part, at the place of the first.

    Args:
        model: may be on the meta device; weights count in the dtype they have.
        job: what each part needs besides its weights.
        no_split_modules: classes of the blocks, when the model does not say or says it wrongly.
    """
    job = job or MapJob()
    classes = block_classes(model, no_split_modules)
    owners = _owners(model, classes)
    order = execution_order(model, owners)
    sharing: dict[int, str] = {}  # a tensor's id -> the part that had it first
    groups: dict[str, list[str]] = {}
    for name in order:
        firsts = {sharing[id(tensor)] for tensor in _tensors(owners[name]) if id(tensor) in sharing}
        if not any(True for _ in _tensors(owners[name])):
            continue
        home = min(firsts, key=order.index) if firsts else name
        members = [name]
        for first in firsts - {home}:
            members += groups.pop(first)
        groups.setdefault(home, []).extend(members)
        for member in groups[home]:
            sharing.update((id(tensor), home) for tensor in _tensors(owners[member]))
    direct = [(name, tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers()) if "." not in name]
    head = _name_of(model, getattr(model, "get_output_embeddings", lambda: None)())
    units = [_unit(model, names, owners, classes, job, head) for names in groups.values()]
    loose = [Unit((name,), tensor.numel() * tensor.element_size()) for name, tensor in direct if id(tensor) not in sharing]
    return loose + units


def with_tables_along(model: nn.Module, units: Sequence[Unit], device_map: Mapping[str, Any]) -> dict[str, Device]:
    """The map with parts that have no weights (rotary tables) on the card of what runs next.

    A table elsewhere makes the two cards wait for each other's queues in every forward, and saves no memory. accelerate's maps, which go by
    the order of registration, have it at the end.

    Args:
        units: in the order of execution.
    """
    result = {name: normal_device(raw) for name, raw in device_map.items()}
    following: Device | None = None
    modules = dict(model.named_modules())
    for unit in reversed(units):
        if any(name not in modules or any(True for _ in modules[name].parameters()) for name in unit.names):
            following = device_of(device_map, unit.names[0])
        elif isinstance(following, int):
            result |= {name: following for name in unit.names if device_of(device_map, name) != following}
    return result


def _text_config(model: nn.Module) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _unit(
    model: nn.Module, names: Sequence[str], owners: Mapping[str, nn.Module], classes: set[str], job: MapJob, head: str | None
) -> Unit:
    tensors = {id(tensor): tensor for name in names for tensor in _tensors(owners[name])}
    trained = sum(tensor.numel() for tensor in tensors.values() if isinstance(tensor, nn.Parameter) and tensor.requires_grad)
    is_block = any(type(owners[name]).__name__ in classes for name in names)
    if job.lora_r is not None:
        trained = sum(_lora_params(owners[name], job.lora_r) for name in names) if is_block else 0
    activations = 0.0
    text = _text_config(model)
    used = int(getattr(text, "num_experts_per_tok", 1) or 1)
    if job.num_tokens:
        hidden_bytes = 2 * job.num_tokens * int(getattr(text, "hidden_size", 0) or 0)
        if is_block:
            kept = hidden_bytes if job.activation_checkpointing else job.num_tokens * _saved_bytes_per_token(owners[names[0]], used)
            activations = job.in_flight * kept
        if head in names:
            # float32 logits, their log-softmax and its gradient: 12 bytes per token and word while the loss is computed.
            tokens = min(job.num_tokens, job.loss_chunk_size or job.num_tokens)
            activations += 12 * tokens * int(getattr(text, "vocab_size", 0) or 0) + job.in_flight * hidden_bytes
    return Unit(
        names=tuple(names),
        weight_bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()),
        training_bytes=int(job.training_bytes_per_param * trained),
        activation_bytes=int(activations),
        is_block=is_block,
        work=float(sum(_work(owners[name], used) for name in names if is_block or name == head)),
    )


def _name_of(model: nn.Module, wanted: nn.Module | None) -> str | None:
    if wanted is None:
        return None
    return next((name for name, module in model.named_modules() if module is wanted), None)


def device_of(device_map: Mapping[str, Any], name: str) -> Device | None:
    """The device of a module or tensor: that of the longest entry which is the name or one of its parents; None if there is none."""
    while True:
        if name in device_map:
            return normal_device(device_map[name])
        if not name:
            return None
        name = name.rpartition(".")[0]


def check_devices(devices: Iterable[Any], num_gpus: int, key: str = "--device_map") -> list[Finding]:
    """What is no device, or a card that is not there.

    Args:
        num_gpus: cards of this machine; negative when they are not known.
    """
    problems: list[Finding] = []
    for raw in dict.fromkeys(map(str, devices)):
        device = normal_device(raw)
        if isinstance(device, str) and device not in ("cpu", "disk", "meta"):
            problems.append(Finding("error", key, f"{device!r} is not a device", "use a card's number, cpu or disk"))
        elif isinstance(device, int) and 0 <= num_gpus <= device:
            fix = f"use 0 to {num_gpus - 1}" if num_gpus else "use cpu"
            problems.append(Finding("error", key, f"names card {device}, but there are {num_gpus}", fix))
    return problems


def check_device_map(model: nn.Module, device_map: Mapping[str, Any], num_gpus: int, key: str = "--device_map") -> list[Finding]:
    """Everything wrong with a map, before a byte of weights is read.

    A module without a device, an entry that is no module, blocks cut in two, tied weights apart, devices that are not there.

    Args:
        num_gpus: cards of this machine; negative when they are not known.
    """
    problems: list[Finding] = []

    def bad(message: str, fix: str = "") -> None:
        problems.append(Finding("error", key, message, fix))

    names = {name for name, _ in model.named_modules()} | {name for name, _ in model.named_parameters(remove_duplicate=False)}
    names |= {name for name, _ in model.named_buffers()}
    unknown = [name for name in device_map if name not in names]
    if unknown:
        top = ", ".join(name for name, _ in model.named_children())
        bad(f"{type(model).__name__} has no module {', '.join(unknown)}", f"its top modules are {top}")
    problems += check_devices(device_map.values(), num_gpus, key)
    classes = block_classes(model)
    owners = _owners(model, classes)
    missing: list[str] = []
    for name, module in owners.items():
        tensors = [f"{name}.{tensor}" for tensor, _ in (*module.named_parameters(remove_duplicate=False), *module.named_buffers())]
        devices = {device_of(device_map, tensor) for tensor in tensors}
        if None in devices:
            missing.append(name)
        elif len(devices) > 1:
            where = " and ".join(sorted(map(str, devices)))
            bad(f"cuts {name} ({type(module).__name__}) in two: devices {where}", f"give {name} one device")
    if missing:
        bad(f"leaves {len(missing)} module{'s' if len(missing) > 1 else ''} without a device: {', '.join(missing)}", "add them to the map")
    for group in tied_groups(model):
        places = {name: device_of(device_map, name) for name in group}
        if None not in places.values() and len(set(places.values())) > 1:
            where = ", ".join(f"{name} on {device}" for name, device in places.items())
            bad(f"separates modules that share weights: {where}", "give them the same device")
    return problems


def tied_groups(model: nn.Module) -> list[tuple[str, ...]]:
    """Modules that hold the same parameter, as groups of names: (("model.embed_tokens", "lm_head"),) for a tied Llama."""
    holders: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    return list(dict.fromkeys(tuple(dict.fromkeys(names)) for names in holders.values() if len(set(names)) > 1))


def describe_components(model: nn.Module, names: Iterable[str]) -> str:
    """Modules as a person would say them: "embedding + layers 0-7 + head"."""
    embedding = _name_of(model, getattr(model, "get_input_embeddings", lambda: None)())
    head = _name_of(model, getattr(model, "get_output_embeddings", lambda: None)())
    numbered: dict[str, list[int]] = {}
    words: dict[str, None] = {}
    containers = {name.rpartition(".")[0] for name, module in model.named_modules() if type(module).__name__ in block_classes(model)}
    for name in names:
        match = re.fullmatch(r"(.+)\.(\d+)", name)
        if match and match[1] in containers:
            # An encoder-decoder has two rows of blocks: say which.
            word = "layers" if len(containers) == 1 else f"{match[1].split('.')[0]} layers"
            numbered.setdefault(word, []).append(int(match[2]))
            words[word] = None
        elif name == embedding:
            words["embedding"] = None
        elif name == head:
            words["head"] = None
        elif name and not isinstance(model.get_submodule(name) if "." in name or hasattr(model, name) else None, nn.Embedding):
            words[name.rpartition(".")[2]] = None
        elif not name:
            words["everything"] = None
    return " + ".join(f"{word} {ranges_text(numbered[word])}" if word in numbered else word for word in words) or "nothing"
