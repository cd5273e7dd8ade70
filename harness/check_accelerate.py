"""Every rule about an accelerate YAML: what `accelerate launch` refuses, what it silently ignores, what does not fit the machine."""

from __future__ import annotations

import difflib
import functools
import importlib.util
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.deepspeed_json import is_number
from harness.findings import Finding, UserError
from harness.fsdp_templates import FSDP1_ONLY_KEYS, fsdp_from_environment
from harness.machine import Machine

ACCELERATE_VERSION = "1.15.0"
# Fields of accelerate's ClusterConfig; anything else at the top of the file is refused.
TOP_KEYS = frozenset(
    [
        "compute_environment",
        "distributed_type",
        "mixed_precision",
        "use_cpu",
        "debug",
        "num_processes",
        "machine_rank",
        "num_machines",
        "gpu_ids",
        "main_process_ip",
        "main_process_port",
        "rdzv_backend",
        "same_network",
        "main_training_function",
        "enable_cpu_affinity",
        "fp8_config",
        "deepspeed_config",
        "fsdp_config",
        "parallelism_config",
        "megatron_lm_config",
        "mpirun_config",
        "downcast_bf16",
        "tpu_name",
        "tpu_zone",
        "tpu_use_cluster",
        "tpu_use_sudo",
        "command_file",
        "commands",
        "tpu_vm",
        "tpu_env",
        "dynamo_config",
        "fp16",
        "dynamo_backend",
    ]
)
# Launcher options that a block of the file sets, without the block's prefix; unknown names are set on an object nobody reads.
FSDP_KEYS = frozenset(
    [
        "version",
        "offload_params",
        "min_num_params",
        "sharding_strategy",
        "reshard_after_forward",
        "auto_wrap_policy",
        "transformer_layer_cls_to_wrap",
        "backward_prefetch",
        "state_dict_type",
        "forward_prefetch",
        "use_orig_params",
        "cpu_ram_efficient_loading",
        "sync_module_states",
        "activation_checkpointing",
        "activation_checkpointing_offload",
        "ignored_modules",
    ]
)
PARALLEL_KEYS = frozenset(
    [
        "dp_replicate_size",
        "dp_shard_size",
        "tp_size",
        "cp_size",
        "cp_backend",
        "cp_comm_strategy",
        "sp_size",
        "sp_backend",
        "sp_seq_length",
        "sp_seq_length_is_variable",
        "sp_attn_implementation",
    ]
)
DEEPSPEED_KEYS = frozenset(
    [
        "deepspeed_config_file",
        "zero_stage",
        "offload_optimizer_device",
        "offload_param_device",
        "offload_optimizer_nvme_path",
        "offload_param_nvme_path",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "zero3_init_flag",
        "zero3_save_16bit_model",
        "deepspeed_hostfile",
        "deepspeed_exclusion_filter",
        "deepspeed_inclusion_filter",
        "deepspeed_multinode_launcher",
        "deepspeed_moe_layer_cls_names",
    ]
)
# accelerate refuses these beside a DeepSpeed file (ACCELERATE_CONFIG_DS_FIELDS).
_REFUSED_BESIDE_FILE = (
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_param_nvme_path",
    "offload_optimizer_nvme_path",
    "zero3_save_16bit_model",
)
_TYPES = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED")
_OTHER_TYPES = ("MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_XPU", "MULTI_HPU", "MULTI_NEURON", "MEGATRON_LM", "XLA")
_OLD_NAMES = {"backward_prefetch_policy": "backward_prefetch", "transformer_cls_to_wrap": "transformer_layer_cls_to_wrap"}


def check_accelerate(
    config: Mapping[str, Any],
    *,
    num_processes: int | None = None,
    machine: Machine | None = None,
    model_type: str | None = None,
) -> list[Finding]:
    """Everything that is wrong or odd in an accelerate YAML.

    Args:
        config: the YAML as read.
        num_processes: `--num_processes` where it was typed; it overrides the file's.
        machine: for the number of cards; None where not known.
        model_type: the model's architecture, for the names of its layers; None where not known.
    """
    findings = [*_key_findings(config), *_process_findings(config, num_processes, machine), *_precision_findings(config)]
    kind = str(config.get("distributed_type", "")).upper()
    if kind == "FSDP":
        findings += _fsdp_findings(config, num_processes, model_type)
    elif kind == "DEEPSPEED":
        findings += _deepspeed_findings(config)
    return findings


def environment_of(config: Mapping[str, Any]) -> dict[str, str]:
    """What `accelerate launch` would export for this file, as far as the harness reads it."""
    environ = {"ACCELERATE_MIXED_PRECISION": str(config.get("mixed_precision") or "no")}
    kind = str(config.get("distributed_type", "")).upper()
    if kind == "FSDP":
        environ["ACCELERATE_USE_FSDP"] = "true"
        for key, value in _block(config, "fsdp_config").items():
            name = key.removeprefix("fsdp_").upper().replace("TRANSFORMER_LAYER_CLS", "TRANSFORMER_CLS")
            environ[f"FSDP_{name}"] = str(value).lower() if isinstance(value, bool) else str(value)
        parallel = _block(config, "parallelism_config")
        if parallel:
            environ["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
            for key, value in parallel.items():
                environ[f"PARALLELISM_CONFIG_{key.removeprefix('parallelism_config_').upper()}"] = str(value)
    elif kind == "DEEPSPEED":
        environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        for key, value in _block(config, "deepspeed_config").items():
            shared = ("gradient_accumulation_steps", "gradient_clipping")
            name = key if key in shared else "deepspeed_" + key.replace("deepspeed_config_file", "config_file")
            environ[f"ACCELERATE_{name.upper()}"] = str(value).lower() if isinstance(value, bool) else str(value)
    elif kind == "MEGATRON_LM":
        environ["ACCELERATE_USE_MEGATRON_LM"] = "true"
    return environ


def _block(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name)
    return value if isinstance(value, Mapping) else {}


# ---------------------------------------------------------------- keys


def _key_findings(config: Mapping[str, Any]) -> Iterator[Finding]:
    for key in config:
        if key in TOP_KEYS:
            continue
        bare = key.removeprefix("fsdp_")
        if key == "use_fsdp":
            yield Finding("error", key, "is a launcher option: accelerate refuses it in the file", "distributed_type: FSDP")
        elif bare in FSDP_KEYS:
            yield Finding("error", key, "stands at the top, where accelerate refuses it", f"move it into fsdp_config as fsdp_{bare}")
        elif key in DEEPSPEED_KEYS:
            yield Finding("error", key, "stands at the top, where accelerate refuses it", "move it into deepspeed_config")
        elif key.removeprefix("parallelism_config_") in PARALLEL_KEYS:
            yield Finding("error", key, "stands at the top, where accelerate refuses it", "move it into parallelism_config")
        else:
            yield _unknown(key, key, TOP_KEYS, "")
    for name, known, prefix in (
        ("fsdp_config", FSDP_KEYS, "fsdp_"),
        ("parallelism_config", PARALLEL_KEYS, "parallelism_config_"),
        ("deepspeed_config", DEEPSPEED_KEYS, ""),
    ):
        value = config.get(name)
        if value is not None and not isinstance(value, Mapping):
            yield Finding("error", name, f"must be a block of indented lines, not {value!r}")
        for key in _block(config, name):
            bare = key.removeprefix(prefix)
            if bare not in known:
                yield _unknown(f"{name}.{key}", _OLD_NAMES.get(bare, bare), known, prefix)
            elif name == "parallelism_config" and bare == key:
                yield Finding("error", f"{name}.{key}", "is ignored without its prefix", f"write {prefix}{key}")
    if "fp16" in config or "dynamo_backend" in config:
        old = "fp16" if "fp16" in config else "dynamo_backend"
        yield Finding("warning", old, "is the spelling of accelerate before 0.20", "mixed_precision" if old == "fp16" else "dynamo_config")
    if _block(config, "dynamo_config").get("dynamo_backend", "NO") not in ("NO", "no", False):
        yield Finding("warning", "dynamo_config", "has no effect: the harness compiles layers itself", "remove it")
    kind = str(config.get("distributed_type", "")).upper()
    for name, needed in (("fsdp_config", "FSDP"), ("deepspeed_config", "DEEPSPEED"), ("parallelism_config", "FSDP")):
        if _block(config, name) and kind != needed:
            severity: Any = "error" if name == "parallelism_config" else "warning"
            message = f"is {'refused' if severity == 'error' else 'ignored'} with distributed_type {kind or 'missing'}"
            yield Finding(severity, name, message, f"distributed_type: {needed}, or remove the block")


def _unknown(path: str, bare: str, known: frozenset[str], prefix: str) -> Finding:
    close = difflib.get_close_matches(bare, sorted(known), n=1, cutoff=0.6)
    where = "accelerate refuses it" if "." not in path else "accelerate takes it and nobody reads it"
    return Finding("error", path, f"unknown key: {where}", f"did you mean {prefix}{close[0]}?" if close else "remove it")


# ---------------------------------------------------------------- processes and machines


def _process_findings(config: Mapping[str, Any], typed: int | None, machine: Machine | None) -> Iterator[Finding]:
    kind = config.get("distributed_type")
    if kind is None:
        yield Finding("error", "distributed_type", "is missing: accelerate refuses the file", "FSDP, DEEPSPEED, MULTI_GPU or NO")
    elif str(kind).upper() in _OTHER_TYPES:
        yield Finding("error", "distributed_type", f"{kind} is not supported here", "FSDP, DEEPSPEED, MULTI_GPU or NO")
    elif kind is False:
        yield Finding("error", "distributed_type", "NO without quotes is the value false in YAML", "write 'NO'")
    elif str(kind) not in _TYPES:
        close = difflib.get_close_matches(str(kind).upper(), _TYPES, n=1, cutoff=0.5)
        yield Finding("error", "distributed_type", f"{kind} is not known", close[0] if close else "FSDP, DEEPSPEED, MULTI_GPU or NO")
    if config.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        message = f"{config['compute_environment']} is not supported here"
        yield Finding("error", "compute_environment", message, "LOCAL_MACHINE")
    count = config.get("num_processes")
    if typed is None:
        if count is None and kind not in ("NO", None):
            yield Finding(
                "error", "num_processes", "is missing: accelerate then wants --num_processes", "num_processes: gpu for one per card"
            )
        elif isinstance(count, str) and count not in ("gpu", "auto", "cpu"):
            fix = f"write {count} without quotes" if count.isdigit() else "a number, or gpu for one per card"
            yield Finding("error", "num_processes", f"{count!r} is text", fix)
        elif is_number(count) and (count < 1 or count != int(count)):
            yield Finding("error", "num_processes", f"must be a positive whole number, not {count}", "gpu for one per card")
    if count == "gpu" and typed is None and machine is not None and not machine.gpus:
        yield Finding("warning", "num_processes", "gpu: there is no card on this machine", "type --num_processes 2")
    total = typed if typed is not None else (int(count) if is_number(count) and count >= 1 else None)
    yield from _machine_findings(config, total, machine)
    yield from _gpu_id_findings(config, total)


def _machine_findings(config: Mapping[str, Any], total: int | None, machine: Machine | None) -> Iterator[Finding]:
    machines, rank = config.get("num_machines", 1) or 1, config.get("machine_rank", 0) or 0
    if not is_number(machines) or machines < 1:
        yield Finding("error", "num_machines", f"must be a positive whole number, not {machines!r}")
        return
    if machines > 1:
        if not config.get("main_process_ip"):
            yield Finding(
                "error", "main_process_ip", f"is missing for {machines} machines", "the address of the machine with machine_rank 0"
            )
        if not config.get("main_process_port"):
            message = f"{config.get('main_process_port')} is no port that {machines} machines could agree on"
            yield Finding("error", "main_process_port", message, "a port above 1024, the same on every machine")
        if config.get("num_processes") in ("gpu", "auto", "cpu"):
            message = f"{config['num_processes']} works on one machine only"
            yield Finding("error", "num_processes", message, "the number of processes on all machines together")
    if is_number(rank) and not 0 <= rank < machines:
        yield Finding("error", "machine_rank", f"{rank} is not below num_machines {machines}", f"0 to {int(machines) - 1}")
    if total is None:
        return
    if total % machines:
        message = f"{total} processes cannot be split evenly over {machines} machines"
        yield Finding("error", "num_processes", message, f"{total // int(machines) * int(machines) or int(machines)}")
    elif machine and machine.gpus and total // machines > len(machine.gpus) and config.get("use_cpu") is not True:
        message = f"{int(total // machines)} processes on this machine, which has {len(machine.gpus)} cards"
        yield Finding("error", "num_processes", message, f"--num_processes {len(machine.gpus) * int(machines)}")


def _gpu_id_findings(config: Mapping[str, Any], total: int | None) -> Iterator[Finding]:
    ids = config.get("gpu_ids")
    if ids in (None, "all") or total is None:
        return
    listed = [word for word in str(ids).split(",") if word.strip()]
    if len(set(listed)) != len(listed):
        yield Finding("error", "gpu_ids", f"{ids} names a card twice", "each card once")
    elif len(listed) != total and (config.get("num_machines") or 1) == 1:
        yield Finding("error", "gpu_ids", f"{ids} are {len(listed)} cards for {total} processes", f"num_processes: {len(listed)}")


# ---------------------------------------------------------------- precision, FSDP, DeepSpeed


def _precision_findings(config: Mapping[str, Any]) -> Iterator[Finding]:
    value = config.get("mixed_precision")
    if value is False:
        return  # YAML's reading of an unquoted no
    if value is not None and str(value) not in ("no", "bf16", "fp16", "fp8"):
        close = difflib.get_close_matches(str(value), ("bf16", "fp16"), n=1, cutoff=0.4)
        yield Finding("error", "mixed_precision", f"{value!r} is not known", close[0] if close else "bf16, fp16 or 'no'")
    elif value == "fp8":
        yield Finding("error", "mixed_precision", "fp8 is not supported here through accelerate", "bf16")


def _fsdp_findings(config: Mapping[str, Any], num_processes: int | None, model_type: str | None) -> Iterator[Finding]:
    fsdp = {key.removeprefix("fsdp_"): value for key, value in _block(config, "fsdp_config").items()}
    total = num_processes if num_processes is not None else config.get("num_processes")
    try:
        template = fsdp_from_environment(environment_of(config))
        assert template is not None
        yield from template.notes
        if is_number(total) and total >= 1:
            machines = config.get("num_machines")
            template.group_sizes(int(total), max(1, int(total) // (int(machines) if is_number(machines) and machines >= 1 else 1)))
    except UserError as error:
        yield from error.findings
    version = str(fsdp.get("version", 1))
    if version == "2":
        for key in FSDP1_ONLY_KEYS:
            bare = key.removeprefix("fsdp_")
            if bare in fsdp and bare not in ("sharding_strategy", "forward_prefetch"):
                yield Finding("info", f"fsdp_config.{key}", "has no effect in FSDP2", "remove it")
        if fsdp.get("forward_prefetch") is True:
            yield Finding("error", "fsdp_config.fsdp_forward_prefetch", "does not exist in FSDP2", "remove it")
    elif _block(config, "parallelism_config"):
        yield Finding("error", "parallelism_config", "needs fsdp_version: 2", "write fsdp_version: 2")
    if fsdp.get("cpu_ram_efficient_loading", True) is True:
        if fsdp.get("sync_module_states") is False:
            message = "false is refused by accelerate together with fsdp_cpu_ram_efficient_loading"
            yield Finding("error", "fsdp_config.fsdp_sync_module_states", message, "fsdp_cpu_ram_efficient_loading: false")
        elif "cpu_ram_efficient_loading" in fsdp:
            message = "is switched off: the harness reads every shard from the file on its own rank"
            yield Finding("info", "fsdp_config.fsdp_cpu_ram_efficient_loading", message, "fsdp_cpu_ram_efficient_loading: false")
    if fsdp.get("activation_checkpointing_offload") is True and fsdp.get("activation_checkpointing") is not True:
        message = "needs fsdp_activation_checkpointing"
        yield Finding("error", "fsdp_config.fsdp_activation_checkpointing_offload", message, "set both or none")
    policy = str(fsdp.get("auto_wrap_policy", "TRANSFORMER_BASED_WRAP")).upper()
    if policy == "NO_WRAP":
        message = "NO_WRAP gathers the whole model at once: full_shard then saves no parameter memory"
        yield Finding("warning", "fsdp_config.fsdp_auto_wrap_policy", message, "TRANSFORMER_BASED_WRAP")
    if policy == "SIZE_BASED_WRAP" and not fsdp.get("min_num_params"):
        message = "is missing or 0 for SIZE_BASED_WRAP: every module becomes a unit of its own"
        yield Finding("error", "fsdp_config.fsdp_min_num_params", message, "100000000")
    names = fsdp.get("transformer_layer_cls_to_wrap")
    if names and policy == "TRANSFORMER_BASED_WRAP":
        yield from wrap_class_findings([str(name) for name in names] if isinstance(names, list) else str(names).split(","), model_type)


def _deepspeed_findings(config: Mapping[str, Any]) -> Iterator[Finding]:
    block = _block(config, "deepspeed_config")
    file = block.get("deepspeed_config_file")
    if file is not None:
        if not Path(str(file)).is_file():
            yield Finding("error", "deepspeed_config.deepspeed_config_file", f"{file} does not exist", "the path of a DeepSpeed JSON")
        for key in _REFUSED_BESIDE_FILE:
            if key in block:
                yield Finding(
                    "error", f"deepspeed_config.{key}", "is refused beside deepspeed_config_file", "write it in the DeepSpeed file"
                )
        if config.get("mixed_precision") not in (None, False):
            message = "is refused beside deepspeed_config_file"
            yield Finding("error", "mixed_precision", message, "remove it; the DeepSpeed file or --precision decides")
        return
    stage = block.get("zero_stage", 2)
    if stage not in (0, 1, 2, 3):
        yield Finding("error", "deepspeed_config.zero_stage", f"there is no stage {stage!r}", "1, 2 or 3")
    for part in ("offload_optimizer_device", "offload_param_device"):
        device = block.get(part, "none")
        if device not in ("none", "cpu", "nvme"):
            yield Finding("error", f"deepspeed_config.{part}", f"{device!r} is not known", "cpu, nvme or none")
        elif part == "offload_param_device" and device != "none" and stage != 3:
            yield Finding("error", f"deepspeed_config.{part}", f"needs zero_stage 3, not {stage}", "zero_stage: 3, or none")
    if block.get("zero3_init_flag") is True and stage != 3:
        yield Finding("info", "deepspeed_config.zero3_init_flag", f"has no effect with zero_stage {stage}", "remove it")


# ---------------------------------------------------------------- the model's layers, read from its source without importing it


def wrap_class_findings(names: list[str], model_type: str | None) -> Iterator[Finding]:
    """Class names to wrap that the model does not have, with those it has.

    Args:
        names: as written in the file.
        model_type: the architecture; nothing is checked where it is None or not one of transformers'.
    """
    own, existing = layer_classes(model_type)
    for name in (name.strip() for name in names):
        if not existing or not name or name in existing:
            continue
        close = [other for other in existing if other.lower() == name.lower()]
        close = own or close or difflib.get_close_matches(name, existing, n=3, cutoff=0.6)
        listed = ", ".join(close or sorted(existing))
        message = f"{name} is no class of a {model_type} model"
        key = "fsdp_config.fsdp_transformer_layer_cls_to_wrap"
        yield Finding("error", key, message, f"{listed} (or leave it out: the harness asks the model)")


@functools.cache
def layer_classes(model_type: str | None) -> tuple[list[str], tuple[str, ...]]:
    """The layers that a model of transformers must not split, and all its classes.

    The source is searched as text: importing transformers takes seconds, and the check must not.

    Returns:
        ([], ()) where the architecture is not one of transformers'.
    """
    spec = importlib.util.find_spec("transformers")
    if not model_type or spec is None or not spec.submodule_search_locations:
        return [], ()
    name = model_type.replace("-", "_")
    source = Path(spec.submodule_search_locations[0]) / "models" / name / f"modeling_{name}.py"
    if not source.is_file():
        return [], ()
    text = source.read_text(encoding="utf-8")
    listed = re.findall(r"_no_split_modules\s*=\s*\[([^\]]*)\]", text)
    own = list(dict.fromkeys(re.findall(r"['\"](\w+)['\"]", " ".join(listed))))
    return own, tuple(re.findall(r"^class (\w+)\(.*(?:Module|Layer|Block|PreTrainedModel)\b.*\):", text, flags=re.MULTILINE))
