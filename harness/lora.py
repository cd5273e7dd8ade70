"""LoRA adapters through peft: attached to the empty model, checked, and written as peft reads them.

Adapters are attached while the model is still on the meta device, so that loading and sharding by blocks (see harness.modeling) does them
too: each block's adapters are drawn from the seed and the block's place, equal on every rank and under every engine.

From one's own script:

    from harness.lora import check_lora_r_consistency, train_lora
    result = check_lora_r_consistency(model, {"r": 8})      # result["is_consistent"], result["mismatched_layers"], ...
    train_lora({"model_name_or_path": "gpt2", "r": 8, "alpha": 16, "output_dir": "out"}, dataloader)
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import math
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from harness import disk_room
from harness.args import LoraArguments
from harness.file_modes import give_usual_mode
from harness.findings import Finding, UserError, user_error
from harness.lora_targets import build_config, pattern_matches

ADAPTER = "default"
BASE_FOLDER = "base"  # in a run's folder: the base model, where it was made from scratch and so is nowhere else
_ADAPTER_PARAMETER = re.compile(r"\.(lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector)\.")
_SAVED_PREFIX = "base_model.model."


# ------------------------------------------------------------------------------------------------------------ attaching and filling


def stored_name(name: str) -> str | None:
    """Name of a parameter in the base model's files; None for an adapter's own.

    A module of `--modules_to_save` is there twice, frozen and trained; both start from the stored weights.
    """
    if _ADAPTER_PARAMETER.search(name):
        return None
    return name.replace(".base_layer.", ".").replace(".original_module.", ".").replace(f".modules_to_save.{ADAPTER}.", ".")


def base_weights(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The base model's weights under their own names, each once, out of those of a model with adapters."""
    seen: set[str] = set()
    for name, tensor in weights:
        stored = stored_name(name)
        if stored is not None and stored not in seen:
            seen.add(stored)
            yield stored, tensor


@dataclasses.dataclass
class AttachedLora:
    """A model's adapters.

    Attributes:
        config: peft's.
        modules: full names of the modules that have one.
        seed: their values are drawn from it.
        left_out: names of linear layers that all-linear could not mean -> why.
        digests: parameter name -> digest of its first value, filled as blocks are initialised.
    """

    config: Any
    modules: list[str]
    seed: int
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)
    digests: dict[str, str] = dataclasses.field(default_factory=dict)
    _names: dict[int, str] = dataclasses.field(default_factory=dict)

    @torch.no_grad()
    def init_block(self, modules: Sequence[nn.Module], index: int, device: torch.device) -> None:
        """Draws the adapters of one block whose base weights are in place, before it is sharded.

        A as Linear layers are, B zero (embeddings the other way round), DoRA's magnitudes the norms of the base weights: the fresh adapter
        changes nothing. Copies of `--modules_to_save` start equal to the original.

        Args:
            modules: all modules of the block, in a fixed order.
            index: the block's place.
        """
        from peft.tuners.lora import LoraLayer
        from peft.utils.other import ModulesToSaveWrapper

        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(self.seed * 1_000_003 + 500_009 + index)
            for module in modules:
                if isinstance(module, LoraLayer):
                    _init_adapter(module)
                    self._digest(module)
                elif isinstance(module, ModulesToSaveWrapper):
                    saved = module.modules_to_save[ADAPTER]
                    for target, source in zip(saved.parameters(), module.original_module.parameters(), strict=True):
                        target.copy_(source)

    def name_modules(self, model: nn.Module) -> None:
        """Remembers the modules' names: they must still be known when blocks are initialised out of the model's sight."""
        self._names = {id(module): name for name, module in model.named_modules()}

    def _digest(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            full = f"{self._names[id(module)]}.{name}"
            if _ADAPTER_PARAMETER.search(full):
                values = parameter.detach().to("cpu", torch.float32).contiguous().numpy().tobytes()
                self.digests[full] = hashlib.sha256(values).hexdigest()[:16]


def adapter_facts(lora: AttachedLora) -> dict[str, Any]:
    """What decides the shapes of adapters, for checkpoints: state of one shape cannot be loaded into another."""
    config = lora.config
    own_r = dict(sorted((config.rank_pattern or {}).items()))
    saved = sorted(config.modules_to_save or [])
    return {
        "r": config.r,
        "rank_pattern": own_r,
        "modules": sorted(lora.modules),
        "modules_to_save": saved,
        "use_dora": bool(config.use_dora),
    }


def _init_adapter(module: Any) -> None:
    if ADAPTER in module.lora_A:
        nn.init.kaiming_uniform_(module.lora_A[ADAPTER].weight, a=math.sqrt(5))
        nn.init.zeros_(module.lora_B[ADAPTER].weight)
    if ADAPTER in module.lora_embedding_A:
        nn.init.zeros_(module.lora_embedding_A[ADAPTER])
        nn.init.normal_(module.lora_embedding_B[ADAPTER])
    magnitudes = getattr(module, "lora_magnitude_vector", {})
    if ADAPTER in magnitudes:
        weight = module.get_base_layer().weight
        if isinstance(module.get_base_layer(), nn.Embedding) or getattr(module, "fan_in_fan_out", False):
            weight = weight.T
        magnitude = magnitudes[ADAPTER].weight
        magnitude.copy_(torch.linalg.norm(weight.float(), dim=1).reshape(magnitude.shape))


def attach_lora(model: nn.Module, lora: LoraArguments, *, seed: int = 0, base_name: str | None = None) -> AttachedLora:
    """Puts adapters into a model in place and freezes everything else.

    On a model that has its weights the adapters are ready; on an empty one (meta device) `init_block` has to be called block by block.

    Raises:
        UserError: see `build_config`.
    """
    from peft import inject_adapter_in_model

    config, targets = build_config(lora, model, base_name)
    is_empty = any(parameter.is_meta for parameter in model.parameters())
    inject_adapter_in_model(config, model, adapter_name=ADAPTER, low_cpu_mem_usage=is_empty)
    modules = [name for name, module in model.named_modules() if _is_adapted(module)]
    if sorted(modules) != sorted(targets.modules):
        odd = sorted(set(modules) ^ set(targets.modules))
        raise user_error("--target_modules", f"peft adapted other modules than were asked for, such as {odd[0]}", "name them in full")
    attached = AttachedLora(config, modules, seed, targets.left_out)
    attached.name_modules(model)
    if not is_empty:
        device = next(model.parameters()).device
        attached.init_block([module for _, module in model.named_modules()], 0, device)
    return attached


def _is_adapted(module: nn.Module) -> bool:
    from peft.tuners.lora import LoraLayer

    return isinstance(module, LoraLayer)


# ------------------------------------------------------------------------------------------------------------ checks


class RConsistency(TypedDict):
    """What `check_lora_r_consistency` returns.

    is_consistent: every adapter has the r that is expected, in A and in B.
    expected_r: from the config; None where there is none.
    actual_r_values: module -> r, from the shapes.
    mismatched_layers: one text per module that is off.
    method: "config and shapes", "shapes" (no config to compare with) or "none" (no LoRA parameters).
    """

    is_consistent: bool
    expected_r: int | None
    actual_r_values: dict[str, int]
    mismatched_layers: list[str]
    method: str


def full_shape(parameter: Tensor) -> tuple[int, ...]:
    """Shape of the whole parameter, also of one that is sharded."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def check_lora_r_consistency(model: nn.Module, config: Any = None) -> RConsistency:
    """Compares r in peft's config with the shapes of lora_A and lora_B, and these with each other.

    `rank_pattern` is respected, DoRA's magnitudes have no r; sharded parameters (FSDP2, ZeRO-3) are read by their full shape.

    Args:
        model: with adapters, wrapped in a PeftModel or not.
        config: peft's `LoraConfig`, a dictionary with "r" (or "lora_r") and maybe "rank_pattern", or None: the model's own.
    """
    expected_r, pattern = _expected(model, config)
    sides: dict[str, dict[str, int]] = {}
    for name, parameter in model.named_parameters():
        match = re.match(r"(.*)\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B)\.[^.]+(?:\.weight)?$", name)
        if match:
            shape = full_shape(parameter)
            side = match[2][-1]
            sides.setdefault(match[1], {})[side] = shape[0] if side == "A" else shape[1]
    if not sides:
        text = "the model has no LoRA parameters"
        return RConsistency(is_consistent=False, expected_r=expected_r, actual_r_values={}, mismatched_layers=[text], method="none")
    mismatched = []
    for module, found in sides.items():
        wanted = next((value for key, value in pattern.items() if pattern_matches(key, module)), expected_r)
        if set(found) != {"A", "B"}:
            mismatched.append(f"{module}: has only lora_{next(iter(found))}")
        elif found["A"] != found["B"]:
            mismatched.append(f"{module}: lora_A has r {found['A']}, lora_B has r {found['B']}")
        elif wanted is not None and found["A"] != wanted:
            mismatched.append(f"{module}: r is {found['A']}, expected {wanted}")
    return RConsistency(
        is_consistent=not mismatched,
        expected_r=expected_r,
        actual_r_values={module: found.get("A", found.get("B", 0)) for module, found in sides.items()},
        mismatched_layers=mismatched,
        method="shapes" if expected_r is None else "config and shapes",
    )


def write_r_check(folder: Path, model: nn.Module, attached: AttachedLora) -> None:
    """Writes what `check_lora_r_consistency` finds into `lora.json`."""
    result = check_lora_r_consistency(model, attached.config)
    (folder / "lora.json").write_text(json.dumps(result, indent=1), encoding="utf-8")


def _expected(model: nn.Module, config: Any) -> tuple[int | None, dict[str, int]]:
    if config is None:
        configs = getattr(model, "peft_config", None)
        config = configs.get(ADAPTER) if isinstance(configs, dict) else configs
    if config is None:
        return None, {}
    if isinstance(config, Mapping):
        r = config.get("r", config.get("lora_r"))
        return (None if r is None else int(r)), dict(config.get("rank_pattern") or {})
    return int(config.r), dict(getattr(config, "rank_pattern", None) or {})


def fingerprint(model: nn.Module, attached: AttachedLora | None = None) -> dict[str, dict[str, Any]]:
    """What must be equal on all ranks, small enough to be sent: for each LoRA parameter its full shape, scaling and values' digest.

    Args:
        attached: has the digests of the first values, for parameters that are sharded since; without it whole tensors are hashed here.
    """
    result: dict[str, dict[str, Any]] = {}
    scalings = {
        name: float(getattr(module, "scaling", {}).get(ADAPTER, 0.0)) for name, module in model.named_modules() if _is_adapted(module)
    }
    for name, parameter in model.named_parameters():
        if not _ADAPTER_PARAMETER.search(name):
            continue
        digest = attached.digests.get(name) if attached else None
        if digest is None and type(parameter.data) is Tensor and not hasattr(parameter, "ds_shape"):
            digest = hashlib.sha256(parameter.detach().to("cpu", torch.float32).contiguous().numpy().tobytes()).hexdigest()[:16]
        module = _ADAPTER_PARAMETER.split(name)[0]
        result[name] = {"shape": full_shape(parameter), "scaling": scalings.get(module), "digest": digest}
    return result


def compare_ranks(fingerprints: Sequence[Mapping[str, Mapping[str, Any]]]) -> list[Finding]:
    """Differences between ranks' adapters, the first one of each rank; empty where all agree.

    Args:
        fingerprints: of `fingerprint`, in rank order.
    """
    first = fingerprints[0]
    findings = []
    for rank, other in enumerate(fingerprints[1:], start=1):
        message = _difference(rank, first, other)
        if message:
            findings.append(Finding("error", "LoRA", message, "give every rank the same arguments and seed"))
    return findings


def _difference(rank: int, first: Mapping[str, Mapping[str, Any]], other: Mapping[str, Mapping[str, Any]]) -> str:
    if len(first) != len(other):
        return f"rank {rank}: {len(other)} LoRA tensors, rank 0: {len(first)}"
    for name in first:
        if name not in other:
            return f"rank {rank} has no {name}"
        mine, theirs = first[name], other[name]
        if mine["shape"] != theirs["shape"]:
            return f"{name} has shape {tuple(theirs['shape'])} on rank {rank}, {tuple(mine['shape'])} on rank 0"
        if mine["scaling"] != theirs["scaling"]:
            return f"{name} has scaling {theirs['scaling']} on rank {rank}, {mine['scaling']} on rank 0"
        if mine["digest"] != theirs["digest"]:
            return f"{name}: values differ between rank {rank} and rank 0"
    return ""


def check_after_build(
    model: nn.Module, attached: AttachedLora, gather: Callable[[Any], list[Any]], *, check_r: bool = True, strict: bool = False
) -> list[Finding]:
    """Checks r on this rank and everything across ranks.

    Args:
        gather: a value -> the values of all ranks.
        check_r: compare r (`--check_r_consistency`).
        strict: a wrong r is an error (`--strict_r_check`), not a warning.

    Returns:
        Warnings.

    Raises:
        UserError: ranks differ, or r is wrong and `strict`; equal on all ranks.
    """
    findings: list[Finding] = []
    if check_r:
        result = check_lora_r_consistency(model, attached.config)
        severity: Any = "error" if strict else "warning"
        findings += [Finding(severity, "LoRA r", text) for text in result["mismatched_layers"]]
    reports = gather((fingerprint(model, attached), findings))
    across = compare_ranks([report[0] for report in reports])
    everywhere = list(dict.fromkeys(finding for _, found in reports for finding in found))
    errors = across + [finding for finding in everywhere if finding.severity == "error"]
    if errors:
        raise UserError(errors)
    return everywhere


def untrained_flags(model: nn.Module) -> tuple[list[str], list[float]]:
    """Names of the parameters that start at zero (lora_B), and 1.0 for each that has a non-zero element on this rank.

    Under sharding the flags of all ranks are to be combined by their maximum. Reads the device once.
    """
    names, flags = [], []
    for name, parameter in model.named_parameters():
        if re.search(r"\.(lora_B|lora_embedding_A)\.", name):
            local = getattr(parameter, "ds_tensor", parameter)
            local = local.to_local() if hasattr(local, "to_local") else local
            names.append(name)
            flags.append((local.detach() != 0).any())
    return names, torch.stack(flags).float().tolist() if flags else []


def check_first_update(names: Sequence[str], flags: Sequence[float]) -> None:
    """After the first update every lora_B must have moved from zero, else its module gets no gradient and never trains.

    Raises:
        RuntimeError: naming the modules.
    """
    stuck = [_ADAPTER_PARAMETER.split(name)[0] for name, flag in zip(names, flags, strict=True) if not flag]
    if stuck:
        shown = ", ".join(stuck[:5]) + (f" and {len(stuck) - 5} more" if len(stuck) > 5 else "")
        raise RuntimeError(f"{len(stuck)} of {len(names)} LoRA modules got no gradient in the first update: {shown}")


# ------------------------------------------------------------------------------------------------------------ writing and merging


def saved_name(name: str) -> str | None:
    """Name of a trained parameter in `adapter_model.safetensors`, as peft writes it; None for one that is not saved."""
    if _ADAPTER_PARAMETER.search(name):
        name = name.replace(f".lora_magnitude_vector.{ADAPTER}.weight", ".lora_magnitude_vector")
        return _SAVED_PREFIX + re.sub(rf"\.{ADAPTER}(?=\.|$)", "", name)
    if f".modules_to_save.{ADAPTER}." in name:
        return _SAVED_PREFIX + name.replace(f".modules_to_save.{ADAPTER}.", ".")
    return None


def export_adapter(
    folder: Path, weights: Iterator[tuple[str, Tensor]], attached: AttachedLora, tokenizer: Any, *, is_main_process: bool, card: str = ""
) -> None:
    """Writes an adapter folder that peft and transformers load; called on every rank, only the main process writes.

    Args:
        weights: (name, whole tensor); others than trained ones are passed over.
        card: text of README.md.

    Raises:
        RuntimeError: an adapter is missing or empty.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in weights:
        key = saved_name(name)
        if key is not None and is_main_process:
            tensors[key] = (
                tensor.detach().to("cpu", torch.float32 if tensor.dtype == torch.float32 else tensor.dtype, copy=True).contiguous()
            )
    if not is_main_process:
        return
    empty = [name for name, tensor in tensors.items() if tensor.numel() == 0]
    without = [module for module in attached.modules if not any(name.startswith(f"{_SAVED_PREFIX}{module}.") for name in tensors)]
    if empty or without:
        raise RuntimeError(f"the adapter would be incomplete: {', '.join([*empty, *without][:5])}")
    from safetensors.torch import save_file

    temporary = folder.with_name(f".tmp-{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    config = attached.config
    try:
        with disk_room.unfinished(temporary, folder, sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())):
            temporary.mkdir(parents=True)
            save_file(tensors, str(temporary / "adapter_model.safetensors"), metadata={"format": "pt"})
            give_usual_mode(temporary / "adapter_model.safetensors")
            config.inference_mode = True
            config.save_pretrained(str(temporary))
            if tokenizer is not None:
                tokenizer.save_pretrained(temporary)
            if card:
                (temporary / "README.md").write_text(card, encoding="utf-8")
    finally:
        config.inference_mode = False
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)


def merge_adapter(adapter: Path, output: Path, base: str | None = None, dtype: torch.dtype | None = None) -> None:
    """Adds an adapter's weights to its base model and writes the sum as an ordinary model folder; on the host, in one process.

    Args:
        adapter: folder of `export_adapter` or of peft.
        base: the base model, if it is not where the adapter's config says.
        dtype: of the written weights; None: the base model's.

    Raises:
        UserError: no adapter there, or no base model.
    """
    from peft import PeftConfig, PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not (adapter / "adapter_config.json").exists():
        raise user_error(str(adapter), "holds no adapter", "give a folder with adapter_config.json")
    if not (adapter / "adapter_model.safetensors").exists():
        raise user_error(str(adapter), "holds no adapter_model.safetensors; pickled weights are not read", "save it as safetensors")
    base = base or PeftConfig.from_pretrained(str(adapter)).base_model_name_or_path
    if not base:
        raise user_error(str(adapter), "does not say which base model it belongs to", "give the base model")
    try:
        model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype or "auto", use_safetensors=True)
    except (OSError, ValueError) as error:
        raise user_error("base model", f"{base} cannot be loaded: {str(error).splitlines()[0]}", "say where it is: --base_model") from None
    merged = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload(safe_merge=True)
    merged.save_pretrained(output)
    give_usual_mode(*output.glob("*.safetensors"))
    if any((adapter / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        AutoTokenizer.from_pretrained(str(adapter)).save_pretrained(output)


# ------------------------------------------------------------------------------------------------------------ one's own script

# Names that older scripts use in their dictionaries.
_OLDER_NAMES: dict[str, str] = {
    "alpha": "lora_alpha",
    "base_model": "model_name_or_path",
    "batch_size": "per_device_train_batch_size",
    "dropout": "lora_dropout",
    "epochs": "num_train_epochs",
    "lr": "learning_rate",
    "max_length": "block_size",
    "model": "model_name_or_path",
    "model_name": "model_name_or_path",
    "num_epochs": "num_train_epochs",
    "r": "lora_r",
}
_PRECISIONS: dict[str, str] = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
_RUN_NAME_PARTS = ("pkg", "version", "knowledge_type")


def run_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A dictionary of `run_clm.py`'s names from one that may use older names; `pkg`, `version` and `knowledge_type` name the run.

    Raises:
        UserError: one thing under two names.
    """
    result: dict[str, Any] = {}
    for name, value in config.items():
        if name in _RUN_NAME_PARTS:
            continue
        new = _OLDER_NAMES.get(name, name)
        if new in result:
            raise user_error(name, f"and {new} say the same thing", "keep one of the two")
        result[new] = _PRECISIONS.get(str(value), value) if new == "precision" else value
    parts = [str(config[name]) for name in _RUN_NAME_PARTS if config.get(name)]
    if parts:
        result.setdefault("run_name", "-".join(parts))
    result.setdefault("lora_r", 8)
    return result


def rows_of(dataloader: Iterable[Any]) -> list[dict[str, list[int]]]:
    """Samples of a data loader whose batches are mappings of tensors or lists, or lists of such; padding (attention_mask 0) is taken off.

    Returns:
        Rows with "input_ids" and "labels", both of the sample's own length.

    Raises:
        UserError: a batch without "input_ids".
    """
    rows: list[dict[str, list[int]]] = []
    for batch in (part for parts in dataloader for part in (parts if isinstance(parts, (list, tuple)) else [parts])):
        if not isinstance(batch, Mapping) or "input_ids" not in batch:
            what = f"one with {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
            raise user_error("dataloader", f"a batch must be a mapping with input_ids, not {what}", "a collate_fn that makes such")
        columns = {name: torch.as_tensor(batch[name]) for name in ("input_ids", "attention_mask", "labels") if name in batch}
        ids = columns["input_ids"]
        mask = columns.get("attention_mask", torch.ones_like(ids)).bool()
        labels = columns.get("labels", ids)
        for row, keep, label in zip(*(torch.atleast_2d(tensor) for tensor in (ids, mask, labels)), strict=True):
            rows.append({"input_ids": row[keep].tolist(), "labels": label[keep].tolist()})
    return rows


def train_lora(config: Mapping[str, Any], dataloader: Iterable[Any]) -> int:
    """Trains adapters from one's own script and data, under any launcher.

    Args:
        config: names of `run_clm.py`'s flags, or the older ones of `run_config`.
        dataloader: batches with "input_ids" and maybe "attention_mask" and "labels"; how it batches does not matter, the arguments decide.

    Returns:
        The exit code of the run, 0 when it is finished.

    Raises:
        UserError: wrong input.
    """
    # The job is made of layers above this one, so it is found by name when it is called for.
    return int(importlib.import_module("harness.run_clm").train(run_config(config), train_dataset=rows_of(dataloader)))
