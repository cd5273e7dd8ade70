"""Templates of the run: the DeepSpeed JSON and what `accelerate launch` exports, brought together with the arguments.

One source of truth: `apply_launch_to_args` first writes what the template decides into the arguments, and `resolve_deepspeed_config`
then fills whatever the template leaves open ("auto", or not there) from the arguments. A value of the template that differs from a
flag the user typed is an error that names both. Imports no torch, so that wrong input is reported before anything is loaded.

Key names are DeepSpeed's (https://www.deepspeed.ai/docs/config-json/, checked against 0.19.8); the values for "auto" bucket sizes are
those of transformers' DeepSpeed integration.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.args import Arguments, TrainArguments, world_size_from_environment
from harness.deepspeed_json import (
    BATCH_KEYS,
    decides,
    get_value,
    is_equal,
    is_number,
    is_open,
    read_deepspeed_config,
    set_value,
    solve_batch,
)
from harness.findings import Finding, UserError, user_error
from harness.fsdp_templates import FsdpTemplate, fsdp_from_environment, fsdp_from_flag, mixed_precision_of
from harness.ladder import MemorySettings

ADAM_TYPES = ("adam", "adamw")
# Optimizers of ours that DeepSpeed counts as tested with ZeRO, and those it may replace by its CPU Adam.
TESTED_OPTIMIZERS = ("adamw_torch_fused", "adamw_torch", "adamw_apex_fused")
# DeepSpeed's schedules and the transformers schedule with the same shape.
SCHEDULES = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_PRECISION_FLAGS = ("precision", "bf16", "fp16")


# ---------------------------------------------------------------- which engine


def load_deepspeed_template(args: Arguments, environ: Mapping[str, str]) -> dict[str, Any] | None:
    """The DeepSpeed template of a run: `--deepspeed`, else what accelerate's YAML with a DeepSpeed section says, else None.

    Raises:
        UserError: from `read_deepspeed_config`, or a number in accelerate's section that is none.
    """
    if args.train.deepspeed:
        return read_deepspeed_config(args.train.deepspeed)
    if not _is_true(environ, "ACCELERATE_USE_DEEPSPEED"):
        return None
    path = environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if path != "none":
        config = read_deepspeed_config(path)
    else:
        stage = _number_of(environ, "ACCELERATE_DEEPSPEED_ZERO_STAGE", 2)
        config = dict.fromkeys(BATCH_KEYS, "auto") | {"gradient_clipping": "auto", "zero_optimization": {"stage": int(stage)}}
        for part, variable in (("optimizer", "OPTIMIZER"), ("param", "PARAM")):
            device = environ.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{variable}_DEVICE", "none")
            if device != "none":
                offload = {"device": device}
                if device == "nvme":
                    nvme_path = environ.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{variable}_NVME_PATH", "none")
                    offload["nvme_path"] = "auto" if nvme_path == "none" else nvme_path
                config["zero_optimization"][f"offload_{part}"] = offload
    for key, variable in (("gradient_accumulation_steps", "GRADIENT_ACCUMULATION_STEPS"), ("gradient_clipping", "GRADIENT_CLIPPING")):
        text = environ.get(f"ACCELERATE_{variable}", "auto")
        if text not in ("auto", "none") and config.get(key, "auto") == "auto":
            number = _number_of(environ, f"ACCELERATE_{variable}", 1)
            config[key] = int(number) if key == "gradient_accumulation_steps" else number
    return config


def fsdp_template_of(args: Arguments, environ: Mapping[str, str]) -> FsdpTemplate | None:
    """The FSDP template of a run: what `accelerate launch` exported, else `--fsdp`, else None."""
    template = fsdp_from_environment(environ)
    if template is None and args.train.fsdp:
        template = fsdp_from_flag(args.train.fsdp)
    return template


def choose_engine(args: Arguments, environ: Mapping[str, str]) -> tuple[str, list[Finding]]:
    """ "zero", "fsdp", "ddp" or "device_map", from the arguments and what the launcher exported; contradictions are error findings."""
    findings: list[Finding] = []
    train = args.train
    with_deepspeed, with_fsdp = _is_true(environ, "ACCELERATE_USE_DEEPSPEED"), _is_true(environ, "ACCELERATE_USE_FSDP")
    device_map = args.to_dict().get("device_map")
    if train.deepspeed and (train.fsdp or with_fsdp):
        other = "--fsdp" if train.fsdp else "accelerate's YAML (distributed_type: FSDP)"
        findings.append(Finding("error", "--deepspeed", f"asks for ZeRO and {other} for FSDP", "keep one of the two"))
    if train.fsdp and with_deepspeed:
        message = "asks for FSDP and accelerate's YAML (distributed_type: DEEPSPEED) for ZeRO"
        findings.append(Finding("error", "--fsdp", message, "keep one of the two"))
    file = environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if train.deepspeed and with_deepspeed and file not in ("none", train.deepspeed):
        message = f"is {train.deepspeed}, but accelerate's YAML names {file}"
        findings.append(Finding("error", "--deepspeed", message, "leave --deepspeed out, or name the same file"))
    if _is_true(environ, "ACCELERATE_USE_MEGATRON_LM"):
        findings.append(Finding("error", "distributed_type", "MEGATRON_LM is not supported", "FSDP or DEEPSPEED"))
    if train.deepspeed or with_deepspeed:
        engine = "zero"
    elif train.fsdp or with_fsdp:
        engine = "fsdp"
        findings += _fsdp_findings(train, environ)
    else:
        engine = "device_map" if device_map else "ddp"
        # The deepspeed launcher exports CROSS_SIZE next to torchrun's variables; nothing else does.
        if "CROSS_SIZE" in environ and int(environ.get("WORLD_SIZE", "1")) > 1:
            message = "the deepspeed launcher was used without a DeepSpeed file: this runs as DDP"
            findings.append(Finding("warning", "--deepspeed", message, "add --deepspeed ds_configs/zero2.json"))
    if device_map:
        num_processes = int(environ.get("WORLD_SIZE", "1"))
        if engine != "device_map":
            findings.append(
                Finding("error", "--device_map", f"{device_map} and the {engine} engine exclude each other", "keep one of the two")
            )
        elif num_processes > 1:
            message = f"{device_map} needs one process, but num_processes is {num_processes}"
            findings.append(Finding("error", "--device_map", message, "start it with plain python, or leave --device_map out"))
    return engine, findings


def _fsdp_findings(train: TrainArguments, environ: Mapping[str, str]) -> list[Finding]:
    try:
        exported = fsdp_from_environment(environ)
        flag = fsdp_from_flag(train.fsdp) if train.fsdp else None
    except UserError as error:
        return error.findings
    if exported and flag and (exported.sharding_strategy, exported.cpu_offload) != (flag.sharding_strategy, flag.cpu_offload):
        yaml_says = exported.sharding_strategy + (" offload" if exported.cpu_offload else "")
        message = f"is {train.fsdp}, but accelerate's YAML says {yaml_says}"
        return [*exported.notes, Finding("error", "--fsdp", message, "leave --fsdp out, or make the two equal")]
    return list(exported.notes) if exported else []


# ---------------------------------------------------------------- the template decides


def apply_launch_to_args(args: Arguments, environ: Mapping[str, str], num_processes: int) -> tuple[str, list[Finding]]:
    """Chooses the engine and writes into the arguments what its template, or the launcher, decides.

    Returns:
        The engine's name, and everything there is to say; errors where the user typed something else than the template holds.
    """
    engine, findings = choose_engine(args, environ)
    try:
        if engine == "zero" and not any(finding.severity == "error" for finding in findings):
            template = load_deepspeed_template(args, environ)
            assert template is not None
            findings += apply_template_to_args(template, args, num_processes)
        elif engine == "fsdp":
            fsdp = fsdp_template_of(args, environ)
            findings += apply_fsdp_to_args(fsdp, args) if fsdp else []
    except UserError as error:
        findings += error.findings
    problems: list[Finding] = []
    precision = mixed_precision_of(environ, problems)
    findings += problems + _apply_precision(args, precision, "mixed_precision", f"mixed_precision={precision}")
    return engine, list(dict.fromkeys(findings))


def apply_fsdp_to_args(template: FsdpTemplate, args: Arguments) -> list[Finding]:
    """Writes precision and activation checkpointing of an FSDP template into the arguments; returns the contradictions."""
    findings = _apply_precision(args, template.mixed_precision, "mixed_precision", f"mixed_precision={template.mixed_precision}")
    if template.activation_checkpointing:
        key = "fsdp_activation_checkpointing"
        typed = {"activation_checkpointing", "gradient_checkpointing"} & args.typed
        if typed and args.train.activation_checkpointing == "none":
            findings.append(_mismatch(key, True, f"--{min(typed)}", "none"))
        elif args.train.activation_checkpointing == "none":
            args.train.activation_checkpointing = "full"
    return findings


@dataclasses.dataclass(frozen=True)
class _Link:
    """A key of the DeepSpeed file and the arguments that mean the same.

    Attributes:
        path: dotted path in the file.
        names: argument names; two names stand for a list of two.
        needs: the block without which the key has no meaning; "" for a key of its own.
    """

    path: str
    names: tuple[str, ...]
    needs: str = ""

    def value(self, train: TrainArguments) -> Any:
        values = [getattr(train, name) for name in self.names]
        return values if len(values) > 1 else values[0]

    def store(self, train: TrainArguments, value: Any) -> None:
        for name, item in zip(self.names, value if len(self.names) > 1 else [value], strict=True):
            setattr(train, name, float(item))


_LINKS = (
    _Link("gradient_clipping", ("max_grad_norm",)),
    _Link("optimizer.params.lr", ("learning_rate",), "optimizer"),
    _Link("optimizer.params.betas", ("adam_beta1", "adam_beta2"), "optimizer"),
    _Link("optimizer.params.eps", ("adam_epsilon",), "optimizer"),
    _Link("optimizer.params.weight_decay", ("weight_decay",), "optimizer"),
    _Link("scheduler.params.warmup_max_lr", ("learning_rate",), "scheduler"),
)


def apply_template_to_args(template: Mapping[str, Any], args: Arguments, num_processes: int | None = None) -> list[Finding]:
    """Writes what a DeepSpeed template decides into the arguments: batch, learning rate, schedule, precision, clipping, logging.

    "auto" and missing keys decide nothing. A flag that was typed and differs from the template is left alone and reported.

    Args:
        template: the JSON as read.
        args: changed in place.
        num_processes: processes of the job; None: as the launcher exported.

    Returns:
        Errors for contradictions and impossible batch sizes, each with both values.
    """
    findings: list[Finding] = []
    for link in _LINKS:
        value = get_value(template, link.path)
        if value is None or value == "auto" or (link.path == "scheduler.params.warmup_max_lr" and decides(template, "optimizer.params.lr")):
            continue
        if not is_number(value, len(link.names)):
            findings.append(_not_a_number(link.path, value))
        elif not is_equal(value, link.value(args.train)):
            if set(link.names) & args.typed:
                findings.append(_mismatch(link.path, value, "--" + " --".join(link.names), link.value(args.train)))
            else:
                link.store(args.train, value)
    findings += _apply_batch(template, args, world_size_from_environment() if num_processes is None else num_processes)
    findings += _apply_precision(args, template_precision(template), *_precision_key(template))
    findings += _apply_schedule(template, args)
    findings += _apply_optimizer(template, args)
    steps = get_value(template, "steps_per_print")
    if is_number(steps) and math.isfinite(steps) and steps >= 1:
        if "logging_steps" not in args.typed:
            args.train.logging_steps = float(steps)
        elif steps != args.train.logging_steps:
            message = f"{steps} is DeepSpeed's own interval; the run logs every {args.train.logging_steps:g} steps as typed"
            findings.append(Finding("info", "steps_per_print", message))
    return findings


def template_precision(template: Mapping[str, Any]) -> str | None:
    """ "fp16", "bf16" or "fp32" where a DeepSpeed template decides it, None where it leaves it to the run."""
    fp16 = get_value(template, "fp16.enabled")
    bf16 = get_value(template, "bf16.enabled", get_value(template, "bfloat16.enabled"))
    if fp16 is True:
        return "fp16"
    if bf16 is True:
        return "bf16"
    return "fp32" if fp16 is False and bf16 is False else None


def _precision_key(template: Mapping[str, Any]) -> tuple[str, str]:
    """The key that decides the precision, and what it says in the form `key=value`."""
    precision = template_precision(template)
    if precision == "fp32":
        return "fp16.enabled", "fp16.enabled=False and bf16.enabled=False"
    return f"{precision}.enabled", f"{precision}.enabled=True"


def _apply_precision(args: Arguments, decided: str | None, key: str, says: str) -> list[Finding]:
    train = args.train
    typed = set(_PRECISION_FLAGS) & args.typed
    if decided is None or train.precision == decided:
        return []
    if train.precision != "auto" and typed:
        fix = f'make the two equal, or set "{key}" to "auto"' if "." in key else "make the two equal, or leave it out of accelerate's YAML"
        return [Finding("error", key, f"the template says {says}, but the run's precision is {train.precision}", fix)]
    switched_off = {"fp16": train.fp16, "bf16": train.bf16}.get(decided)
    if switched_off is False and decided in typed:
        return [Finding("error", key, f"the template says {says}, but --{decided} is False", "make the two equal")]
    train.precision = decided
    return []


def _apply_batch(template: Mapping[str, Any], args: Arguments, num_processes: int) -> list[Finding]:
    """Solves total = micro x accumulation x processes for what is not given, and stores micro-batch and accumulation."""
    train, findings = args.train, []
    num_processes = num_processes // max(1, train.sequence_parallel_size) or 1  # those that have different samples
    flags = {"train_micro_batch_size_per_gpu": "per_device_train_batch_size", "gradient_accumulation_steps": "gradient_accumulation_steps"}
    flags["train_batch_size"] = "target_batch_size"
    given: dict[str, int | None] = {}
    for key in BATCH_KEYS:
        value, flag = template.get(key), flags[key]
        typed = getattr(train, flag) if flag in args.typed else None
        if value is None or value == "auto":
            given[key] = typed
            continue
        if not is_number(value) or value != int(value) or value < 1:
            findings.append(Finding("error", key, f"must be a positive whole number, not {value!r}", 'write a number, or "auto"'))
            continue
        given[key] = int(value)
        if typed is not None and typed != value:
            findings.append(_mismatch(key, value, "--" + flag, typed))
    if findings:
        return findings
    total, micro, accumulation = (given[key] for key in BATCH_KEYS)
    if total is None:
        micro = train.per_device_train_batch_size if micro is None else micro
        accumulation = train.gradient_accumulation_steps if accumulation is None else accumulation
    else:
        micro, accumulation, problem = solve_batch(total, micro, accumulation, num_processes, train.per_device_train_batch_size)
        if problem:
            return [problem]
    train.per_device_train_batch_size, train.gradient_accumulation_steps = micro, accumulation
    return []


def _apply_schedule(template: Mapping[str, Any], args: Arguments) -> list[Finding]:
    kind = get_value(template, "scheduler.type")
    if not isinstance(kind, str):  # what else it may be is said where the file is checked
        return []
    findings: list[Finding] = []
    ours = SCHEDULES.get(kind)
    if "lr_scheduler_type" in args.typed and args.train.lr_scheduler_type != ours:
        findings.append(_mismatch("scheduler.type", kind, "--lr_scheduler_type", args.train.lr_scheduler_type, "remove one of the two"))
    elif ours:
        args.train.lr_scheduler_type = ours
    warmup = get_value(template, "scheduler.params.warmup_num_steps")
    if warmup is None or warmup == "auto":
        return findings
    if not is_number(warmup):
        return [*findings, _not_a_number("scheduler.params.warmup_num_steps", warmup)]
    typed = {"warmup_steps", "warmup_ratio"} & args.typed
    # DeepSpeed wants at least 1, which stands for "no warm-up".
    if "warmup_steps" in typed and args.train.warmup_steps >= 1 and args.train.warmup_steps != warmup:
        findings.append(_mismatch("scheduler.params.warmup_num_steps", warmup, "--warmup_steps", args.train.warmup_steps))
    elif typed and (args.train.warmup_ratio or 0 < args.train.warmup_steps < 1):
        share = args.train.warmup_ratio or args.train.warmup_steps
        findings.append(_mismatch("scheduler.params.warmup_num_steps", warmup, f"--{min(typed)}", share))
    elif not typed:
        args.train.warmup_steps, args.train.warmup_ratio = float(warmup), None
    return findings


def _apply_optimizer(template: Mapping[str, Any], args: Arguments) -> list[Finding]:
    kind = get_value(template, "optimizer.type")
    if kind is None or "optim" not in args.typed:
        return []
    if str(kind).lower() in ADAM_TYPES and args.train.optim.startswith("adamw"):
        return []
    return [_mismatch("optimizer.type", kind, "--optim", args.train.optim, "remove one of the two")]


# ---------------------------------------------------------------- filling what is open


def resolve_deepspeed_config(
    template: Mapping[str, Any],
    args: Arguments,
    num_processes: int,
    *,
    total_steps: int | None,
    hidden_size: int | None,
    precision: str,
    largest_parameter: int | None = None,
    largest_layer: int | None = None,
) -> tuple[dict[str, Any], list[Finding]]:
    """The DeepSpeed configuration of this run: every "auto" filled, every open key that the run decides added.

    May be called early for its findings, with None for what is not known yet (those keys stay "auto"; see `unresolved`), and again later.
    A template without an "optimizer" or "scheduler" block gets none: the optimizer and schedule are then built by the caller.

    Args:
        template: the JSON as read; not changed.
        args: the arguments; not changed.
        num_processes: processes of the job.
        total_steps: optimizer steps of the run.
        hidden_size: the model's hidden size, for "auto" bucket sizes.
        precision: "bf16", "fp16", "fp32", or "auto" where not known yet.
        largest_parameter: elements of the model's largest parameter, for an "auto" offload_param.buffer_size.
        largest_layer: elements of its largest layer, for "auto" bucket sizes.

    Returns:
        The configuration, and all findings of `apply_template_to_args` with those about precision and the schedule's length.
    """
    config = copy.deepcopy(dict(template))
    run = dataclasses.replace(args, train=copy.deepcopy(args.train))
    findings = apply_template_to_args(template, run, num_processes)
    train = run.train
    micro, accumulation = train.per_device_train_batch_size, train.gradient_accumulation_steps
    config.update(zip(BATCH_KEYS, (micro * accumulation * num_processes, micro, accumulation), strict=True))
    for link in _LINKS:
        if (not link.needs or link.needs in config) and is_open(config, link.path) and _takes(config, link.path):
            set_value(config, link.path, link.value(train))
    findings += _fill_precision(config, precision)
    findings += _fill_schedule(config, train, total_steps)
    _fill_zero(config, train, hidden_size, largest_parameter, largest_layer)
    if "optimizer" not in config and train.optim not in TESTED_OPTIMIZERS:
        config.setdefault("zero_allow_untested_optimizer", True)
        config.setdefault("zero_force_ds_cpu_optimizer", False)
    return config, list(dict.fromkeys(findings))


def num_warmup_steps(train: TrainArguments, total_steps: int | None) -> int | None:
    """Steps of warm-up; a share of all steps is rounded up, as in transformers. None where the total is needed and not known."""
    share = train.warmup_ratio if train.warmup_ratio is not None else train.warmup_steps
    if train.warmup_ratio is None and not 0 < share < 1:
        return int(share)
    return None if total_steps is None else math.ceil(total_steps * share)


def _takes(config: Mapping[str, Any], path: str) -> bool:
    """Whether the configured optimizer or schedule has this parameter ("auto" says that it has)."""
    if get_value(config, path) == "auto":
        return True
    if path.endswith(".warmup_max_lr"):
        return str(get_value(config, "scheduler.type")) in ("WarmupLR", "WarmupDecayLR")
    if path.startswith("optimizer."):
        return path.endswith((".lr", ".weight_decay")) or str(get_value(config, "optimizer.type", "")).lower() in ADAM_TYPES
    return True


def _fill_precision(config: dict[str, Any], precision: str) -> list[Finding]:
    decided = template_precision(config)
    if precision == "auto":
        return []
    if decided is not None and decided != precision:
        key, says = _precision_key(config)
        fix = f'make the two equal, or set "{key}" to "auto"'
        return [Finding("error", key, f"the template says {says}, but the run's precision is {precision}", fix)]
    old_name = "bfloat16" in config and "bf16" not in config
    for name, block in (("fp16", "fp16"), ("bf16", "bfloat16" if old_name else "bf16")):
        if is_open(config, f"{block}.enabled"):
            set_value(config, f"{block}.enabled", precision == name)
        elif get_value(config, f"{block}.enabled") is False and precision == name:
            message = f"the template says {name}.enabled=False, but the run's precision is {precision}"
            return [Finding("error", f"{name}.enabled", message, f'make the two equal, or set "{name}.enabled" to "auto"')]
    return []


def _fill_schedule(config: dict[str, Any], train: TrainArguments, total_steps: int | None) -> list[Finding]:
    kind = get_value(config, "scheduler.type")
    if not isinstance(kind, str):
        return []
    findings: list[Finding] = []
    params: dict[str, Any] = config["scheduler"].setdefault("params", {})
    for name, value in (("warmup_min_lr", 0.0), ("warmup_min_ratio", 0.0), ("cos_min_ratio", 0.0), ("warmup_type", "linear")):
        if params.get(name) == "auto":
            params[name] = value
    if kind in SCHEDULES and is_open(params, "warmup_num_steps"):
        warmup = num_warmup_steps(train, total_steps)
        if warmup is not None:
            params["warmup_num_steps"] = max(1, warmup)  # DeepSpeed refuses 0
    if kind in ("WarmupDecayLR", "WarmupCosineLR") and total_steps is not None:
        if is_open(params, "total_num_steps"):
            params["total_num_steps"] = total_steps
        elif params["total_num_steps"] != total_steps:
            message = f"the schedule ends at step {params['total_num_steps']}, the run at step {total_steps}"
            findings.append(Finding("warning", "scheduler.params.total_num_steps", message, 'remove it, or set it to "auto"'))
        warmup = params.get("warmup_num_steps")
        if is_number(warmup) and warmup >= total_steps:
            message = f"warm-up takes {warmup} steps, but the run has {total_steps}: the learning rate never reaches its peak"
            findings.append(Finding("warning", "scheduler.params.warmup_num_steps", message, f"set it below {total_steps}"))
    return findings


def _fill_zero(
    config: dict[str, Any], train: TrainArguments, hidden_size: int | None, largest_parameter: int | None, largest_layer: int | None
) -> None:
    zero = config.get("zero_optimization")
    if not isinstance(zero, dict):
        return
    if hidden_size is not None:
        # Buckets of one layer, so that the next layer comes, and the last one's gradients go, in one piece beside this one's work. (One
        # square matrix, transformers' choice for "auto", is less than a feed-forward matrix.) Norms and biases are never partitioned.
        layer = max(largest_layer or 0, hidden_size * hidden_size)
        sizes = {"reduce_bucket_size": layer, "stage3_prefetch_bucket_size": layer, "stage3_param_persistence_threshold": 10 * hidden_size}
        zero.update({key: size for key, size in sizes.items() if zero.get(key) == "auto"})
    for part in ("offload_optimizer", "offload_param"):
        if get_value(zero, f"{part}.nvme_path") == "auto":
            zero[part]["nvme_path"] = train.nvme_path or str(Path(train.output_dir or ".") / "nvme")
    if get_value(zero, "offload_param.buffer_size") == "auto":
        default = 100_000_000  # DeepSpeed's; a buffer must hold the largest parameter
        zero["offload_param"]["buffer_size"] = max(default, largest_parameter or 0)


def with_memory_settings(template: Mapping[str, Any], settings: MemorySettings) -> dict[str, Any]:
    """A DeepSpeed template with what a ladder's settings say beyond it: offload, bucket sizes, ZeRO's stage.

    `sub_group_size` stays: a checkpoint of ZeRO-3 loads into any offload, but not into other sub-groups.
    """
    config = copy.deepcopy(dict(template))
    zero = config.setdefault("zero_optimization", {})
    if settings.engine.startswith("zero"):
        zero["stage"] = int(settings.engine.removeprefix("zero"))
    if settings.optimizer_offload > 0 and get_value(zero, "offload_optimizer.device", "none") == "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if settings.optimizer_offload < 1:
            zero["offload_optimizer"]["ratio"] = settings.optimizer_offload
    if settings.param_offload == "cpu" and get_value(zero, "offload_param.device", "none") == "none":
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    for key, value in (
        ("reduce_bucket_size", settings.reduce_bucket_size),
        ("stage3_prefetch_bucket_size", settings.prefetch_bucket_size),
        ("stage3_max_live_parameters", settings.max_live_parameters),
    ):
        if value is not None:
            zero[key] = value
    return config


# ---------------------------------------------------------------- small helpers


def _mismatch(key: str, value: Any, flag: str, typed: Any, fix: str = "") -> Finding:
    message = f"the template says {key}={value}, but {flag} is {typed}"
    return Finding("error", key, message, fix or f'make the two equal, or set "{key.split(".")[-1]}" to "auto"')


def _not_a_number(path: str, value: Any) -> Finding:
    return Finding("error", path, f"must be a number, not {value!r}", 'write it without quotes, or "auto"')


def _is_true(environ: Mapping[str, str], variable: str) -> bool:
    return environ.get(variable, "false").lower() in ("1", "true", "yes", "on")


def _number_of(environ: Mapping[str, str], variable: str, default: float) -> float:
    text = environ.get(variable, str(default))
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise user_error(variable.removeprefix("ACCELERATE_").lower(), f"{text} is not a number", "mend accelerate's YAML")
    return number
