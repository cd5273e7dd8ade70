"""Which modules of a model get LoRA adapters, and peft's configuration for them; every name is checked against the model."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from harness.args import LoraArguments
from harness.findings import Finding, UserError, user_error


def parse_layers(text: str, num_layers: int) -> list[int]:
    """Layer numbers from "0,1,2", "10-20" or both.

    Raises:
        UserError: not such a list, or a number that the model does not have.
    """
    layers: set[int] = set()
    for part in text.replace(" ", "").split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if not match or (match[2] is not None and int(match[2]) < int(match[1])):
            raise user_error("--target_layers", f"cannot read '{part or text}'", "write 0,1,2 or 10-20")
        layers.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    outside = sorted(layer for layer in layers if layer >= num_layers)
    if outside:
        raise user_error("--target_layers", f"layer {outside[0]} out of range 0-{num_layers - 1}", f"the model has {num_layers} layers")
    return sorted(layers)


def linear_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Full name -> module of every linear layer that can carry an adapter; not the output head.

    A model's own kind of linear layer that computes something else is none: Llama 4's router returns two tensors.
    """
    from transformers.pytorch_utils import Conv1D

    head = _head(model)
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and module is not head and not _computes_something_else(type(module))
    }


def _computes_something_else(kind: Any) -> bool:
    from transformers.pytorch_utils import Conv1D

    # Those of quantisation libraries have a forward of their own too, and peft knows them.
    is_of_a_model = kind.__module__.split(".")[0] in ("transformers", "transformers_modules")
    return is_of_a_model and kind.forward not in (nn.Linear.forward, Conv1D.forward)


def not_adapted_by_peft(names: Iterable[str], model: nn.Module) -> dict[str, str]:
    """Names of linear layers that peft does not adapt in this kind of model -> why. Asked of peft, so it follows its version.

    In mixtures of experts whose weights transformers 5 has fused, peft takes the names that an expert's layers once had (gate_proj,
    up_proj, down_proj) for the fused weights: dense and shared layers with these names would lose their adapters when they are loaded.
    """
    from peft import LoraConfig
    from peft.tuners import tuners_utils

    kind = getattr(getattr(model, "config", None), "model_type", None)
    convert: Any = None
    with contextlib.suppress(ImportError):  # versions before transformers 5
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers as convert
    check = getattr(tuners_utils, "_check_lora_target_modules_mamba", None)
    found = {}
    for name in names:
        config = LoraConfig(target_modules=[name])
        try:
            if check is not None:
                check(config, model, name)
        except ValueError:
            found[name] = f"peft adapts none in {kind}, whose kernel reads the weight itself"
            continue
        try:
            if convert is not None:
                convert(config, model=model, conversions=None)
            is_taken = name not in (config.target_modules or ())
        except ValueError:  # one of two weights that are fused
            is_taken = True
        if is_taken:
            found[name] = f"peft takes the name in {kind} for the experts' fused weights, not for a layer"
    return found


def _suffixes(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name.rsplit(".", 1)[-1] for name in names))


def _matches(name: str, wanted: str) -> bool:
    """Whether a module is meant by a target name, as peft decides it."""
    return name == wanted or name.endswith("." + wanted)


def _layer_of(name: str) -> tuple[str, int] | None:
    """(name of the list, number) of the block that a module is in: "model.layers.3.mlp.up_proj" -> ("layers", 3)."""
    match = re.search(r"(?:^|\.)([A-Za-z_]\w*)\.(\d+)(?:\.|$)", name)
    return (match[1], int(match[2])) if match else None


def read_past_their_layer(linear: Mapping[str, nn.Module], model: nn.Module) -> dict[str, str]:
    """Names of linear layers whose weight their block hands to a product or kernel of its own -> why they are left out: an adapter on one
    would get no gradient, or do nothing where the kernel is installed. Found in the source of the blocks' classes.
    """
    found: dict[str, str] = {}
    seen: set[type] = set()
    for full in linear:
        block = type(model.get_submodule(full.rpartition(".")[0]))
        if block in seen:
            continue
        seen.add(block)
        with contextlib.suppress(OSError, TypeError):  # a class without a file
            for match in re.finditer(r"\bself\.(\w+)\.weight(?: @|,\n|\.type\()", inspect.getsource(block)):
                found[match[1]] = f"{block.__name__} reads the weight past the layer, so an adapter would do nothing"
    names = _suffixes(linear)
    return {name: why for name, why in found.items() if name in names}


@dataclasses.dataclass(frozen=True)
class Targets:
    """Which modules get adapters.

    Attributes:
        names: as peft's `target_modules`.
        modules: full names of the modules.
        layers: numbers of the blocks, None for all.
        layers_pattern: name of the list of blocks.
        left_out: names of linear layers that all-linear cannot mean here -> why.
    """

    names: list[str]
    modules: list[str]
    layers: list[int] | None = None
    layers_pattern: str | None = None
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)


def find_targets(lora: LoraArguments, model: nn.Module) -> Targets:
    """Resolves `--target_modules` and `--target_layers` on a model.

    Raises:
        UserError: names that match nothing, with those that exist; layers out of range.
    """
    linear = linear_modules(model)
    embeddings = {name: module for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    usable = {**linear, **embeddings}
    if model_head := _head_name(model):
        usable[model_head] = model.get_submodule(model_head)
    wanted = [name for name in lora.target_modules if name]
    suffixes = _suffixes(linear)
    means_all = wanted in ([], ["all-linear"])
    refused = not_adapted_by_peft(dict.fromkeys([*suffixes, *([] if means_all else wanted)]), model)
    choices = [name for name in suffixes if name not in refused]
    left_out = {**read_past_their_layer(linear, model), **refused} if means_all else {}
    names = [name for name in choices if name not in left_out] if means_all else wanted
    fix = f"choose from {', '.join(choices)}, or all-linear"
    everything = [name for name, _ in model.named_modules()]
    problems = [
        Finding("error", "--target_modules", f"{name} can have no adapter: {refused[name]}", fix)
        for name in names
        if name in refused and any(_matches(full, name) for full in usable)
    ]
    for name in names:
        if any(_matches(full, name) for full in usable):
            continue
        exists = any(_matches(full, name) for full in everything)
        message = f"{name} is no linear layer" if exists else f"{name} is not in {type(model).__name__}"
        problems.append(Finding("error", "--target_modules", message, fix))
    pattern, layers = None, None
    if lora.target_layers:
        try:
            pattern, layers = _wanted_layers(lora.target_layers, model, linear)
        except UserError as error:
            problems += error.findings
    if problems:
        raise UserError(problems)
    modules = [full for full in usable if any(_matches(full, name) for name in names)]
    if pattern is None or layers is None:
        return Targets(names, modules, left_out=left_out)
    modules = [full for full in modules if _layer_of(full) is not None and _layer_of(full) in {(pattern, layer) for layer in layers}]
    if not modules:
        raise user_error("--target_layers", f"none of {', '.join(names)} is in layers {lora.target_layers}", "leave it out")
    return Targets(names, modules, layers, pattern, left_out)


def _wanted_layers(text: str, model: nn.Module, linear: Iterable[str]) -> tuple[str, list[int]]:
    """(name of the list of blocks, numbers in it) that `--target_layers` means.

    Raises:
        UserError: unreadable, out of range, or the model has no numbered layers.
    """
    lists: dict[str, int] = {}
    for full in linear:
        if found := _layer_of(full):
            lists[found[0]] = max(lists.get(found[0], 0), found[1] + 1)
    if not lists:
        raise user_error("--target_layers", f"{type(model).__name__} has no numbered layers", "leave it out")
    pattern = max(lists, key=lambda name: lists[name])
    return pattern, parse_layers(text, lists[pattern])


def _head_name(model: nn.Module) -> str | None:
    head = _head(model)
    return next((name for name, module in model.named_modules() if module is head), None) if head is not None else None


def _head(model: Any) -> nn.Module | None:
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None


def build_config(lora: LoraArguments, model: nn.Module, base_name: str | None = None) -> tuple[Any, Targets]:
    """peft's `LoraConfig` for a model, with everything checked against it.

    Args:
        base_name: where the base model comes from; written into the adapter's config.

    Raises:
        UserError: all that is wrong with names, layers and patterns.
    """
    from peft import LoraConfig

    assert lora.lora_r is not None
    problems: list[Finding] = []
    try:
        targets = find_targets(lora, model)
    except UserError as error:  # the rest is then compared with all that could get an adapter
        problems += error.findings
        names = list(linear_modules(model))
        targets = Targets(_suffixes(names), names)
    rank_pattern: dict[str, int] = json.loads(lora.rank_pattern or "{}")  # checked with the other arguments
    alpha_pattern: dict[str, int] = json.loads(lora.alpha_pattern or "{}")
    problems += [
        Finding("error", f"--{flag}", f"{key} matches no module that gets an adapter", f"choose from {', '.join(targets.names)}")
        for flag, pattern in (("rank_pattern", rank_pattern), ("alpha_pattern", alpha_pattern))
        for key in pattern
        if not any(pattern_matches(key, name) for name in targets.modules)
    ]
    problems += _saved_problems([name for name in lora.modules_to_save if name], targets, model)
    if problems:
        raise UserError(problems)
    config = LoraConfig(
        r=lora.lora_r,
        lora_alpha=lora.lora_alpha if lora.lora_alpha is not None else 2 * lora.lora_r,
        lora_dropout=lora.lora_dropout,
        target_modules=list(targets.names),
        layers_to_transform=targets.layers,
        layers_pattern=targets.layers_pattern,
        modules_to_save=[name for name in lora.modules_to_save if name] or None,
        use_dora=lora.use_dora,
        use_rslora=lora.use_rslora,
        rank_pattern=rank_pattern,
        alpha_pattern=alpha_pattern,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base_name,
    )
    return config, targets


def _saved_problems(names: Sequence[str], targets: Targets, model: nn.Module) -> Iterator[Finding]:
    """What `--modules_to_save` names and cannot be trained whole: no module, a container, or one with adapters in or around it."""
    modules = dict(model.named_modules())
    for name in names:
        found = [full for full in modules if _matches(full, name)]
        if not found:
            known = [*_suffixes(linear_modules(model)), *(_suffixes([head]) if (head := _head_name(model)) else [])]
            message = f"{name} is not in {type(model).__name__}"
            yield Finding("error", "--modules_to_save", message, f"choose from {', '.join(dict.fromkeys(known))}")
        elif any(isinstance(modules[full], (nn.ModuleList, nn.ModuleDict)) for full in found):
            yield Finding("error", "--modules_to_save", f"{name} is a list of modules and computes nothing itself", "name what is in it")
        elif inside := [target for target in targets.modules if any(f"{target}.".startswith(f"{full}.") for full in found)]:
            message = f"{name} is to be trained whole, and {inside[0]} gets an adapter"
            yield Finding("error", "--modules_to_save", message, f"leave {name} out, or name other --target_modules")


def pattern_matches(key: str, name: str) -> bool:
    """Whether a key of rank_pattern means a module, as peft decides it."""
    return re.match(rf"(.*\.)?({key})$", name) is not None
