"""Every rule about a DeepSpeed JSON by itself: keys, types, values, and what contradicts what inside the file.

What the file and the flags say about each other is in `harness.templates`.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harness import deepspeed_keys as keys
from harness.args import argument_names
from harness.deepspeed_json import BATCH_KEYS, get_value, is_number, without_nulls
from harness.findings import Finding
from harness.machine import GIB, Machine

_BOOL_WORDS = ("true", "false", "yes", "no", "on", "off")
# Sizes that guides tell to lower when memory runs out; written at their default they free nothing.
_MEMORY_KEYS = (
    "reduce_bucket_size",
    "allgather_bucket_size",
    "stage3_prefetch_bucket_size",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "sub_group_size",
)
_STAGE3_KEYS = ("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_nontrainable_weights")


def check_deepspeed(config: Mapping[str, Any], *, num_processes: int | None = None, machine: Machine | None = None) -> list[Finding]:
    """Everything that is wrong or odd in a DeepSpeed JSON, whatever the flags say.

    Args:
        config: the JSON as read.
        num_processes: for values that must divide it; None where not known.
        machine: for values that must fit it; None where not known.
    """
    config = without_nulls(config)
    findings = list(_key_findings(config))
    if any(finding.severity == "error" and finding.message.startswith(("must be a block", "must be text")) for finding in findings):
        return findings  # the other rules look into the blocks, and names up
    findings += _zero_findings(config, num_processes, machine)
    findings += _offload_findings(config, machine)
    findings += _precision_findings(config, machine)
    findings += _optimizer_findings(config)
    findings += _schedule_findings(config)
    findings += _other_findings(config)
    return findings


# ---------------------------------------------------------------- keys and types


def _key_findings(config: Mapping[str, Any], prefix: str = "") -> Iterator[Finding]:
    known = keys.BLOCKS.get(prefix)
    for key, value in config.items():
        path = f"{prefix}.{key}" if prefix else key
        if known is None:
            continue  # a block whose keys we do not know
        if path in keys.REMOVED:
            yield Finding("error", path, f"was removed from DeepSpeed, which refuses it ({keys.DEEPSPEED_VERSION})", keys.REMOVED[path])
        elif key not in known:
            yield _misplaced(path, key, prefix)
        else:
            if path in keys.DEPRECATED:
                yield Finding("warning", path, "is an old name or has no effect any more", f"write {keys.DEPRECATED[path]}")
            yield from _type_findings(path, value, known[key])
            if known[key].kind == "block" and isinstance(value, Mapping):
                yield from _key_findings(value, path)


def _misplaced(path: str, key: str, prefix: str) -> Finding:
    """An unknown key: where it belongs, if it is a key of another block or a flag, or what was meant."""
    blocks = [name for name, known in keys.BLOCKS.items() if key in known and name != prefix and name != "bfloat16"]
    head, _, tail = key.rpartition(".")
    if head and tail in keys.BLOCKS.get(head, {}):
        nested = "".join(f'{{"{part}": ' for part in key.split(".")) + "..." + "}" * len(key.split("."))
        return Finding("error", path, "is a path, and DeepSpeed knows only blocks inside blocks", f"write {nested}")
    if key == "max_grad_norm":
        return Finding(
            "error", path, "is not DeepSpeed's name for it", 'write "gradient_clipping" at the top of the file, or --max_grad_norm'
        )
    if key in ("lr", "learning_rate") and not prefix:
        return Finding("error", path, "is no key of the file", 'write it in "optimizer": {"params": {"lr": ...}}, or type --learning_rate')
    if key in argument_names():
        return Finding("error", path, "is an argument of the run, not a key of the DeepSpeed file", f"take it out and type --{key}")
    if len(blocks) == 1 and key not in ("enabled", "type", "params"):
        where = f'into the block "{blocks[0]}"' if blocks[0] else "to the top of the file"
        return Finding("error", path, "stands in the wrong block", f"move it {where}")
    close = difflib.get_close_matches(key, list(keys.BLOCKS.get(prefix, {})), n=1, cutoff=0.6)
    return Finding("error", path, "unknown key", f'did you mean "{close[0]}"?' if close else "remove it")


def _type_findings(path: str, value: Any, key: keys.Key) -> Iterator[Finding]:
    if key.kind == "any":
        return
    if value is None:
        if key.kind in ("bool", "int", "float"):
            yield Finding("error", path, "is null", "remove it, or write a value")
        return
    if key.kind == "block":
        if not isinstance(value, Mapping):
            example = f'"{path.rpartition(".")[2]}": {{"enabled": true}}' if isinstance(value, bool) else "{ ... }"
            yield Finding("error", path, f"must be a block in braces, not {value!r}", f"write {example}")
    elif value == "auto":
        if path not in keys.FILLED_AUTO:
            yield Finding("error", path, 'cannot be "auto": nothing of the run decides it', f"write a {key.kind}, or remove it")
    elif key.kind == "bool":
        if not isinstance(value, bool):
            fix = f"write {'true' if str(value).lower() in ('true', 'yes', 'on', '1') else 'false'} without quotes"
            yield Finding("error", path, f"must be true or false, not {value!r}", fix)
    elif key.kind in ("int", "float"):
        if isinstance(value, (int, float)) and not isinstance(value, bool) and not is_number(value):
            shown = f"{value}" if isinstance(value, float) else f"an integer of {len(str(abs(value)))} digits"
            yield Finding("error", path, f"must be a finite number, not {shown}", "write a number that a float can hold, or remove it")
        elif not is_number(value):
            yield Finding("error", path, f"must be a number, not {value!r}", _number_fix(value, path))
        elif key.kind == "int" and value != int(value):
            yield Finding("error", path, f"must be a whole number, not {value!r}", f"write {round(value)}")
    elif key.kind == "list":
        if not isinstance(value, list):
            yield Finding("error", path, f"must be a list, not {value!r}", "write it in [ ]")
    elif not isinstance(value, str):
        yield Finding("error", path, f"must be text, not {value!r}", "write it in double quotes")


def _number_fix(value: Any, path: str) -> str:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        return 'write a number, or "auto"' if path in keys.FILLED_AUTO else "write a number"
    return f"write {number:g} without quotes"


# ---------------------------------------------------------------- ZeRO


def _number_at(config: Mapping[str, Any], path: str, default: float = 0) -> float:
    value = get_value(config, path, default)
    return value if is_number(value) else default


def _zero_findings(config: Mapping[str, Any], num_processes: int | None, machine: Machine | None) -> Iterator[Finding]:
    zero = get_value(config, "zero_optimization", {})
    stage = _number_at(zero, "stage")
    if "zero_optimization" not in config:
        yield Finding("warning", "zero_optimization", "is missing: nothing is sharded", 'add "zero_optimization": {"stage": 2}')
    elif stage not in (0, 1, 2, 3):
        yield Finding("error", "zero_optimization.stage", f"there is no stage {stage:g}", "1, 2 or 3")
    elif stage == 0 and is_number(get_value(config, "zero_optimization.stage", 0)):  # one that is no number is said elsewhere
        yield Finding("warning", "zero_optimization.stage", "0 shards nothing: that is DDP", "1, 2 or 3")
    if stage < 3:
        for key in zero:
            if key.startswith("stage3_") and zero[key] is not False:
                yield Finding("info", f"zero_optimization.{key}", f"has no effect in stage {stage:g}", "remove it, or use stage 3")
        for key in _STAGE3_KEYS:
            if zero.get(key) is True or (not isinstance(zero.get(key), bool) and _number_at(zero, key) > 1):
                yield Finding("error", f"zero_optimization.{key}", f"needs stage 3, not {stage:g}", "remove it, or use stage 3")
    if stage in (0, 3) and zero.get("compute_grad_norm") is False:
        yield Finding("error", "zero_optimization.compute_grad_norm", f"false is for stages 1 and 2, not {stage:g}", "remove it")
    group = _number_at(zero, "zero_hpz_partition_size", 1)
    if num_processes and group > 1 and num_processes % group:
        message = f"{group:g} does not divide the {num_processes} processes"
        yield Finding("error", "zero_optimization.zero_hpz_partition_size", message, "the number of cards of one machine")
    yield from _size_findings(zero, machine)


def _size_findings(zero: Mapping[str, Any], machine: Machine | None) -> Iterator[Finding]:
    for key in _MEMORY_KEYS:
        path, value = f"zero_optimization.{key}", zero.get(key)
        default = keys.ZERO[key].default
        if not is_number(value):
            continue
        if value < 0 or (key == "reduce_bucket_size" and value == 0):
            yield Finding("error", path, f"must be positive, not {value:g}", f'remove it (DeepSpeed takes {default:.0e}), or "auto"')
        elif value == default:
            yield Finding("info", path, f"{value:.0e} is DeepSpeed's default: it frees nothing", "remove it, or lower it")
        elif key.endswith("bucket_size") and 0 < value < 1000:
            message = f"{value:g} elements make a collective of each parameter: the unit is elements, not megabytes"
            yield Finding("warning", path, message, f"write {int(value) * 500_000} for {value:g} MB of 16-bit values")
        elif machine and machine.gpus and key.endswith("bucket_size"):
            num_buffers = 2 if zero.get("overlap_comm", zero.get("stage") == 3) else 1
            needed = 2 * value * num_buffers
            if needed > 0.25 * machine.min_gpu_memory_bytes:
                message = f"{value:.0e} elements take {needed / GIB:.1f} GiB of a card with {machine.min_gpu_memory_bytes / GIB:.0f} GiB"
                yield Finding("warning", path, message, 'write "auto", or lower it')


# ---------------------------------------------------------------- offload


def _offload_findings(config: Mapping[str, Any], machine: Machine | None) -> Iterator[Finding]:
    zero = get_value(config, "zero_optimization", {})
    stage = _number_at(zero, "stage")
    for part, needed in (("offload_param", 3), ("offload_optimizer", 1)):
        block = zero.get(part)
        if not isinstance(block, Mapping):
            continue
        path, device = f"zero_optimization.{part}", block.get("device", "none")
        if device not in ("none", "cpu", "nvme"):
            yield Finding("error", f"{path}.device", f"{device!r} is not known", '"cpu", "nvme" or "none"')
        if device in ("cpu", "nvme") and stage < needed:
            wanted = "stage 3" if needed == 3 else "stage 1, 2 or 3"
            yield Finding("error", path, f"needs {wanted}, not {stage:g}", f"set the stage, or remove {part}")
        if device == "nvme":
            yield from _nvme_findings(block, path, stage, config)
        elif "nvme_path" in block and block["nvme_path"] not in (None, "auto"):
            yield Finding("info", f"{path}.nvme_path", f"has no effect with device {device!r}", 'remove it, or set "device": "nvme"')
    ratio = get_value(zero, "offload_optimizer.ratio")
    if is_number(ratio):
        if not 0 <= ratio <= 1:
            yield Finding("error", "zero_optimization.offload_optimizer.ratio", f"is a share between 0 and 1, not {ratio:g}")
        elif ratio < 1 and stage != 3:
            yield Finding(
                "error", "zero_optimization.offload_optimizer.ratio", f"below 1 needs stage 3, not {stage:g}", "remove it, or use stage 3"
            )
    if "aio" in config and not any(get_value(zero, f"{part}.device") == "nvme" for part in ("offload_param", "offload_optimizer")):
        yield Finding("info", "aio", "has no effect: nothing is offloaded to NVMe", "remove it")


def _nvme_findings(block: Mapping[str, Any], path: str, stage: float, config: Mapping[str, Any]) -> Iterator[Finding]:
    folder = block.get("nvme_path")
    if stage in (1, 2):
        yield Finding("error", f"{path}.device", f"nvme needs stage 3, not {stage:g}", 'use stage 3, or "device": "cpu"')
    if not folder:
        yield Finding("error", f"{path}.nvme_path", "is missing", 'name a folder on a local NVMe disk, or "auto" for --nvme_path')
    elif isinstance(folder, str) and folder != "auto":
        yield from nvme_folder_findings(folder, f"{path}.nvme_path")
    if "aio" not in config:
        yield Finding("info", "aio", "is missing: DeepSpeed's default settings for the disk are used")


def nvme_folder_findings(folder: str, key: str) -> Iterator[Finding]:
    """What speaks against a folder for offloading, as it is on this machine.

    Args:
        folder: as the user wrote it; DeepSpeed makes it, and what is missing above it.
        key: what the user wrote it for.
    """
    path = Path(folder)
    existing = next((parent for parent in (path, *path.parents) if os.path.exists(parent)), Path("/"))
    if not path.is_absolute():
        yield Finding("warning", key, f"{folder} is relative to where the job is started", "write it from the root")
    elif existing == Path("/"):
        yield Finding("error", key, f"{folder} does not exist on this machine", "name a folder on a local NVMe disk")
    elif not existing.is_dir():
        yield Finding("error", key, f"{existing} is a file", "name a folder on a local NVMe disk")
    elif not os.access(existing, os.W_OK) or _filesystem_of(existing) in ("proc", "sysfs"):
        yield Finding("error", key, f"cannot write to {existing}", "choose a folder you may write to")
    elif _filesystem_of(existing) in ("tmpfs", "ramfs", "nfs", "nfs4", "cifs", "lustre", "fuse.sshfs"):
        kind = _filesystem_of(existing)
        what = "lies in host memory" if kind in ("tmpfs", "ramfs") else "is a network disk"
        yield Finding("warning", key, f"{folder} {what} ({kind})", "name a folder on a local NVMe disk")
    elif existing != path:
        message = f"{folder} does not exist: it is made in {existing}, on that disk"
        yield Finding("warning", key, message, f"where a disk belongs there, mount it first; else: mkdir -p {folder}")


def _filesystem_of(path: Path) -> str:
    """Type of the file system a path is on, by the longest mount point above it; "" where that cannot be read."""
    best, kind = "", ""
    try:
        lines = Path("/proc/mounts").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        fields = line.split()
        mount = fields[1].replace("\\040", " ")
        if len(mount) >= len(best) and (str(path) + "/").startswith(mount.rstrip("/") + "/"):
            best, kind = mount, fields[2]
    return kind


# ---------------------------------------------------------------- precision


def _precision_findings(config: Mapping[str, Any], machine: Machine | None) -> Iterator[Finding]:
    fp16, bf16 = get_value(config, "fp16.enabled"), get_value(config, "bf16.enabled", get_value(config, "bfloat16.enabled"))
    if fp16 is True and bf16 is True:
        yield Finding(
            "error", "fp16.enabled", "fp16.enabled=True and bf16.enabled=True exclude each other", 'keep one, or set both to "auto"'
        )
    if bf16 is True and machine and not machine.supports_bf16:
        old = next(gpu for gpu in machine.gpus if gpu.compute_capability < (8, 0))
        version = ".".join(map(str, old.compute_capability))
        yield Finding("error", "bf16.enabled", f"{old.name} (compute capability {version}) has no bf16", 'use fp16, or "auto"')
    scale = get_value(config, "fp16.loss_scale", 0)
    if is_number(scale) and scale < 0:
        yield Finding("error", "fp16.loss_scale", f"must not be negative, but is {scale:g}", "0 for dynamic scaling")
    elif is_number(scale) and scale > 0 and "loss_scale_window" in config["fp16"]:
        message = f"a fixed loss scale of {scale:g} makes loss_scale_window and its like useless, and overflows cannot be escaped"
        yield Finding("warning", "fp16.loss_scale", message, "0 for dynamic scaling")
    for key in ("loss_scale_window", "min_loss_scale", "hysteresis"):
        value = get_value(config, f"fp16.{key}")
        if is_number(value) and value <= 0:
            yield Finding(
                "error", f"fp16.{key}", f"must be positive, not {value:g}", f"remove it (DeepSpeed takes {keys.FP16[key].default})"
            )
    power = _number_at(config, "fp16.initial_scale_power")
    if power > 24:
        message = f"a first loss scale of 2^{power:g} costs about {power - 16:g} skipped steps"
        yield Finding("warning", "fp16.initial_scale_power", message, "16")
    if get_value(config, "bf16.bf16_optimizer_states") is True and get_value(config, "bf16.bf16_master_weights_and_grads") is not True:
        yield Finding("error", "bf16.bf16_optimizer_states", "needs bf16_master_weights_and_grads", "set both or none")
    offloads = get_value(config, "zero_optimization.offload_optimizer.device") in ("cpu", "nvme")
    if get_value(config, "fp16.fp16_master_weights_and_grads") is True and not offloads:
        message = "works only with the optimizer offloaded to the CPU"
        yield Finding("error", "fp16.fp16_master_weights_and_grads", message, "add offload_optimizer, or remove it")
    for path in ("communication_data_type", "seq_parallel_communication_data_type", "data_types.grad_accum_dtype"):
        value = get_value(config, path)
        if isinstance(value, str) and value.lower() not in ("fp32", "fp16", "bf16"):
            yield Finding("error", path, f"{value} is not known", '"fp32", "fp16" or "bf16"')


# ---------------------------------------------------------------- optimizer and schedule


def _optimizer_findings(config: Mapping[str, Any]) -> Iterator[Finding]:
    if "optimizer" not in config:
        return
    kind, params = get_value(config, "optimizer.type"), get_value(config, "optimizer.params", {})
    if kind is None:
        yield Finding("error", "optimizer.type", "is missing", '"AdamW", or remove the block and use --optim')
        return
    by_name = {name.lower(): name for name in keys.OPTIMIZERS}
    if str(kind).lower() not in by_name:
        close = difflib.get_close_matches(str(kind).lower(), list(by_name), n=1, cutoff=0.4)
        fix = f'did you mean "{by_name[close[0]]}"?' if close else "remove the block and use --optim"
        yield Finding("error", "optimizer.type", f"DeepSpeed has no optimizer {kind!r}", fix)
    elif str(kind).lower() in ("adam", "adamw"):
        for key in params:
            if key not in keys.ADAM_PARAMS and key != "max_grad_norm":
                close = difflib.get_close_matches(
                    key.replace("learning_rate", "lr").replace("beta1", "betas"), keys.ADAM_PARAMS, n=1, cutoff=0.5
                )
                fix = f'did you mean "{close[0]}"?' if close else "remove it"
                yield Finding("error", f"optimizer.params.{key}", f"is no parameter of {kind}", fix)
        if params.get("amsgrad") is True:
            yield Finding("error", "optimizer.params.amsgrad", "DeepSpeed's fused Adam has no AMSGrad", "remove it")
    if "max_grad_norm" in params:
        yield Finding(
            "error",
            "optimizer.params.max_grad_norm",
            "is no parameter of the optimizer",
            'write "gradient_clipping" at the top of the file',
        )
    for key, low, strict in (("lr", 0, True), ("eps", 0, True), ("weight_decay", 0, False)):
        value = params.get(key)
        if is_number(value) and (value < low or (strict and value == low)):
            yield Finding("error", f"optimizer.params.{key}", f"must be {'positive' if strict else 'at least 0'}, not {value:g}")
    betas = params.get("betas")
    if isinstance(betas, list) and (len(betas) != 2 or any(is_number(beta) and not 0 <= beta < 1 for beta in betas)):
        yield Finding("error", "optimizer.params.betas", f"must be two numbers of at least 0 and below 1, not {betas}", "[0.9, 0.999]")


def _schedule_findings(config: Mapping[str, Any]) -> Iterator[Finding]:
    if "scheduler" not in config:
        return
    kind, params = get_value(config, "scheduler.type"), get_value(config, "scheduler.params", {})
    if kind is None:
        yield Finding("error", "scheduler.type", "is missing", '"WarmupDecayLR", or remove the block and use --lr_scheduler_type')
        return
    if not isinstance(kind, str) or kind not in keys.SCHEDULERS:
        close = [name for name in keys.SCHEDULERS if str(kind).lower() in name.lower()]
        close = close or difflib.get_close_matches(str(kind), list(keys.SCHEDULERS), n=1, cutoff=0.4)
        fix = f'did you mean "{close[0]}"?' if close else "remove the block and use --lr_scheduler_type"
        yield Finding("error", "scheduler.type", f"DeepSpeed has no schedule {kind!r}", fix)
        return
    for key in params:
        if key not in keys.SCHEDULERS[kind]:
            close = difflib.get_close_matches(key, keys.SCHEDULERS[kind], n=1, cutoff=0.5)
            fix = f'did you mean "{close[0]}"?' if close else "remove it"
            yield Finding("error", f"scheduler.params.{key}", f"is no parameter of {kind}", fix)
    warmup, total = params.get("warmup_num_steps"), params.get("total_num_steps")
    if is_number(warmup) and (warmup < 1 or warmup != int(warmup)):
        yield Finding(
            "error", "scheduler.params.warmup_num_steps", f"must be a whole number of at least 1, not {warmup:g}", "1 for no warm-up"
        )
    if is_number(total) and is_number(warmup) and warmup >= total:
        message = f"warm-up of {warmup:g} steps is not shorter than the schedule of {total:g}"
        yield Finding("warning", "scheduler.params.total_num_steps", message, 'set it to "auto"')
    low, high = params.get("warmup_min_lr"), params.get("warmup_max_lr")
    if is_number(low) and is_number(high) and low > high:
        yield Finding("error", "scheduler.params.warmup_min_lr", f"{low:g} is over warmup_max_lr {high:g}", "0")
    rate = get_value(config, "optimizer.params.lr")
    if is_number(rate) and is_number(high) and rate != high:
        message = f"warmup_max_lr {high:g} replaces the optimizer's lr {rate:g}"
        yield Finding("warning", "scheduler.params.warmup_max_lr", message, 'make the two equal, or set one to "auto"')
    shape = params.get("warmup_type")
    if kind.startswith("Warmup") and shape is None and _number_at(params, "warmup_num_steps") > 1:
        message = "is missing: DeepSpeed's warm-up is then logarithmic, where transformers' is linear"
        yield Finding("info", "scheduler.params.warmup_type", message, '"linear" for the same curve as without this block')
    elif shape not in (None, "linear", "log", "auto"):
        yield Finding("error", "scheduler.params.warmup_type", f"{shape!r} is not known", '"linear" or "log"')


# ---------------------------------------------------------------- the rest


def _other_findings(config: Mapping[str, Any]) -> Iterator[Finding]:
    for key in BATCH_KEYS:
        value = config.get(key)
        if is_number(value) and value < 1:
            yield Finding("error", key, f"must be at least 1, not {value:g}", '"auto"')
    clipping = config.get("gradient_clipping")
    if is_number(clipping) and clipping < 0:
        yield Finding("error", "gradient_clipping", f"must not be negative, but is {clipping:g}", "0 turns clipping off")
    steps = config.get("steps_per_print")
    if is_number(steps) and steps < 1:
        yield Finding("error", "steps_per_print", f"must be at least 1, not {steps:g}", "remove it")
    operation = config.get("gradient_allreduce_op", "mean")
    if operation not in ("mean", "sum"):
        yield Finding("error", "gradient_allreduce_op", f"{operation!r} is not known", '"mean"')
    elif operation == "sum":
        yield Finding("error", "gradient_allreduce_op", "sum would multiply every gradient by the number of processes", '"mean"')
    for key, what in keys.UNSUPPORTED.items():
        block = config.get(key)
        if isinstance(block, Mapping):
            active = bool(block) and block.get("enabled") is not False and block.get("autotp_size") != 1
        else:
            active = block not in (None, False, 1)
        if active and key == "sequence_parallel_size":
            yield Finding("error", key, f"{what} is asked for by a flag of the run", f"remove it, and give --{key} {block}")
        elif active:
            yield Finding("error", key, f"{what} is not supported here", "remove it")
    if "activation_checkpointing" in config:
        message = "has no effect on transformers' models"
        yield Finding("info", "activation_checkpointing", message, "type --activation_checkpointing full")
    for key in ("tensorboard", "wandb", "csv_monitor", "comet"):
        if get_value(config, f"{key}.enabled") is True:
            yield Finding("info", key, "DeepSpeed writes its own log beside the run's", "remove it and use --report_to")
    for path in ("wall_clock_breakdown", "memory_breakdown", "flops_profiler.enabled", "comms_logger.enabled"):
        if get_value(config, path) is True:
            yield Finding("warning", path, "is for debugging: it waits for the GPU in every step", "set it to false for real runs")
    if get_value(config, "zero_optimization.stage3_gather_16bit_weights_on_model_save") is True:
        message = "has no effect: final/ is written tensor by tensor"
        yield Finding("info", "zero_optimization.stage3_gather_16bit_weights_on_model_save", message, "remove it")
    if config.get("dataloader_drop_last") is not None:
        yield Finding("info", "dataloader_drop_last", "has no effect: the data loader is the harness's", "remove it")
