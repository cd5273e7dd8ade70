"""Rules about the flags of a run: against each other, against the model's folder, and against the machine.

Imports neither torch nor transformers.
"""

from __future__ import annotations

import dataclasses
import difflib
import errno
import glob
import importlib.util
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.args import Arguments
from harness.check_savers import saver_findings
from harness.checkpoint_files import no_checkpoint, step_of
from harness.findings import Finding
from harness.host_checks import size_text
from harness.machine import GIB, Machine
from harness.model_files import impossible_sizes, impossible_values, names_a_path
from harness.node_facts import num_local_processes
from harness.sequence_rules import KEY as SEQUENCE_KEY
from harness.sequence_rules import job_findings, model_findings
from harness.user_files import instead_of, parse_json, read_text

# transformers' schedules (SchedulerType), and the keyword each of some needs.
SCHEDULE_NAMES = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "reduce_lr_on_plateau",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
)
_SCHEDULE_NEEDS = {
    "cosine_with_min_lr": ("min_lr", "min_lr_rate"),
    "cosine_warmup_with_min_lr": ("min_lr", "min_lr_rate"),
    "warmup_stable_decay": ("num_decay_steps",),
}
_DTYPES = {"float32": ("fp32", "float"), "bfloat16": ("bf16",), "float16": ("fp16", "half"), "auto": ()}
_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "comet_ml": "comet_ml"}
_LITTLE_ROOM_BYTES = 16 * 2**20
_WEIGHT_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Flags of harness.args.DeviceMapArguments that choose no map but shape it.
_MAP_ONLY = frozenset(
    ["force_balance", "exclude_cpu", "min_memory_gb", "balance_threshold", "max_memory", "offload_folder", "in_flight_micro_batches"]
)
# What a run reads and adds to in its output folder: a pipe under such a name would block it for ever.
_RUN_FILES = ("config.json", "exit.json", "ladder.json", "plan.json", "metrics.jsonl", "train.log", ".lock")
_FLASH = ("flash_attention_2", "flash_attention_3")


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """What a model's folder says about it, without loading anything.

    Attributes:
        model_type: its architecture; None where not known.
        max_positions: longest sample it can take; None where not known.
        num_params: its parameters, from the size of its weight files; None where there are none.
        problems: why the folder cannot be used.
        config: what its config.json says of the language model.
    """

    model_type: str | None = None
    max_positions: int | None = None
    num_params: int | None = None
    problems: tuple[Finding, ...] = ()
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def model_facts(args: Arguments) -> ModelFacts:
    """Reads config.json and the weight files' sizes of a local model; a hub name tells nothing here."""
    model = args.model
    source, key = (model.model_name_or_path, "--model_name_or_path") if model.model_name_or_path else (model.config_name, "--config_name")
    if source is None:
        return ModelFacts(model_type=model.model_type)
    path = Path(source).expanduser()
    try:
        return _facts_of(source, path, key)
    except PermissionError as error:  # of a folder that may not be entered
        message = f"cannot read {error.filename or path}: {error.strerror}"
        return ModelFacts(problems=(Finding("error", key, message, "give a model that you may read"),))


def _facts_of(source: str, path: Path, key: str) -> ModelFacts:
    if not path.exists():
        if names_a_path(source):
            fix = instead_of(source) or "an existing folder, or a name on the hub"
            return ModelFacts(problems=(Finding("error", key, f"{source} does not exist", fix),))
        return ModelFacts()
    file = path / "config.json" if path.is_dir() else path
    try:
        config = parse_json(read_text(file))
    except PermissionError:
        raise
    except OSError as error:
        if error.errno == errno.EINVAL:
            return ModelFacts(problems=(Finding("error", key, f"{file} is not a regular file", "copy the model again"),))
        return ModelFacts(problems=(Finding("error", key, f"{source} has no config.json", "the folder that save_pretrained wrote"),))
    except ValueError as error:
        return ModelFacts(problems=(Finding("error", key, f"{file} is not JSON: {error}", "copy the model again"),))
    if not isinstance(config, dict):
        return ModelFacts(problems=(Finding("error", key, f"{file} holds no JSON object", "copy the model again"),))
    config = (config.get("text_config") or config) | {"model_type": config.get("model_type")}
    if impossible := [*impossible_sizes(config.get), *impossible_values(config.get)]:
        return ModelFacts(config["model_type"], problems=tuple(impossible))
    positions = config.get("max_position_embeddings", config.get("n_positions"))
    num_params, problems = _weights(path, config, key) if path.is_dir() and key == "--model_name_or_path" else (None, ())
    return ModelFacts(config.get("model_type"), positions, num_params, problems, config)


def _weights(folder: Path, config: Mapping[str, Any], key: str) -> tuple[int | None, tuple[Finding, ...]]:
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    for index in folder.glob("*.index.json"):
        try:
            names = sorted({str(name) for name in parse_json(read_text(index))["weight_map"].values()})
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None, (Finding("error", key, f"{index} is damaged", "copy the model again"),)
        missing = [name for name in names if not os.path.exists(folder / name)]
        if missing:
            message = f"{folder} lacks {len(missing)} of {len(names)} weight files: {', '.join(missing[:3])}"
            return None, (Finding("error", key, message, "copy the model again"),)
    if not files:
        return None, (Finding("error", key, f"{folder} has a config but no weights", f"--config_name {folder} to train from scratch"),)
    if odd := [file for file in files if not file.is_file()]:
        return None, (Finding("error", key, f"{odd[0]} is not a regular file", "copy the model again"),)
    dtype = str(config.get("dtype", config.get("torch_dtype", "float32"))).removeprefix("torch.")
    return sum(file.stat().st_size for file in files) // _WEIGHT_DTYPE_BYTES.get(dtype, 4), ()


def check_arguments(args: Arguments, *, engine: str, num_processes: int, environ: Mapping[str, str], machine: Machine) -> list[Finding]:
    """Everything wrong or odd in the flags.

    Args:
        args: the arguments, after the template decided.
        engine: as `choose_engine` says.
        num_processes: processes of the job.
        environ: what the launcher exported.
        machine: where it runs.
    """
    facts = model_facts(args)
    num_local = num_local_processes(environ, num_processes)
    return [
        *facts.problems,
        *_process_findings(args, engine, num_local, machine),
        *_sequence_findings(args, engine, num_processes, num_local, facts),
        *_precision_findings(args, machine),
        *_kernel_findings(args, machine),
        *_four_bit_findings(args, engine),
        *_optimizer_findings(args),
        *saver_findings(args, engine, num_processes, environ, machine),
        *_schedule_findings(args),
        *_interval_findings(args),
        *_batch_findings(args, num_processes),
        *_data_findings(args, facts, machine),
        *_folder_findings(args, facts),
        *_tracker_findings(args),
        *_no_effect_findings(args, engine, num_processes, machine),
    ]


def offload_findings(args: Arguments, machine: Machine, num_machines: int, bytes_per_param: int, key: str) -> Iterator[Finding]:
    """Whether offloaded state fits the host.

    Args:
        args: for the model.
        machine: for its memory.
        num_machines: over which the state is spread.
        bytes_per_param: offloaded bytes for each parameter.
        key: the setting that offloads.
    """
    num_params = model_facts(args).num_params
    if num_params is None or not machine.host_memory_bytes:
        return
    needed = num_params * bytes_per_param / num_machines
    if needed > machine.host_memory_bytes:
        state = f"{needed / GIB:.0f} GiB of state for {num_params / 1e9:.1f}B parameters"
        message = f"{state}, but the host has {machine.host_memory_bytes / GIB:.0f} GiB"
        yield Finding("error", key, message, "more machines, NVMe offload, or no offload")


# ---------------------------------------------------------------- processes, precision, kernels


def _process_findings(args: Arguments, engine: str, num_local: int, machine: Machine) -> Iterator[Finding]:
    num_gpus = len(machine.gpus)
    if args.train.use_cpu:
        if num_gpus:
            yield Finding("info", "--use_cpu", f"leaves {num_gpus} cards idle")
        return
    if num_gpus and num_local > num_gpus:
        message = f"{num_local} processes on this machine, which has {num_gpus} cards"
        yield Finding("error", "num_processes", message, f"start {num_gpus} processes, or add --use_cpu")
    elif num_local < num_gpus and engine != "device_map":
        yield Finding("info", "num_processes", f"{num_local} of {num_gpus} cards are used", f"start {num_gpus} processes for all")
    if num_local == 1 and engine == "fsdp":
        yield Finding("info", "num_processes", "one process has nothing to shard with", "start one process for each card")


def _sequence_findings(args: Arguments, engine: str, num_processes: int, num_local: int, facts: ModelFacts) -> Iterator[Finding]:
    """Processes that share samples."""
    size = args.train.sequence_parallel_size
    yield from job_findings(size, engine, num_processes)
    yield from model_findings(size, facts.config.get)
    if 1 < size <= num_processes and num_processes % size == 0 and num_local % size:
        message = f"{size} processes share a sample, and a machine has {num_local}: attention sends all that it reads over the network"
        yield Finding("warning", SEQUENCE_KEY, message, "a number that divides the processes of a machine")


def _precision_findings(args: Arguments, machine: Machine) -> Iterator[Finding]:
    precision = args.train.precision
    on_gpu = bool(machine.gpus) and not args.train.use_cpu
    if precision == "bf16" and on_gpu and not machine.supports_bf16:
        old = next(gpu for gpu in machine.gpus if gpu.compute_capability < (8, 0))
        version = ".".join(map(str, old.compute_capability))
        yield Finding("error", "--precision", f"{old.name} (compute capability {version}) has no bf16", "--precision fp16, or auto")
    if precision == "fp16" and not on_gpu:
        yield Finding("warning", "--precision", "fp16 on a CPU is slow and overflows", "--precision fp32, or bf16")
    if args.train.tf32 and not (on_gpu and machine.supports_bf16):
        yield Finding("info", "--tf32", "has no effect without a card of compute capability 8.0", "remove it")
    dtype = args.model.torch_dtype
    if dtype is not None and dtype not in _DTYPES:
        close = [name for name, others in _DTYPES.items() if dtype in others] or difflib.get_close_matches(dtype, list(_DTYPES), n=1)
        yield Finding(
            "error",
            "--torch_dtype",
            f"{dtype} is not known",
            f"did you mean {close[0]}?" if close else "float32, bfloat16, float16 or auto",
        )


def _kernel_findings(args: Arguments, machine: Machine) -> Iterator[Finding]:
    model, precision = args.model, args.train.precision
    on_gpu = bool(machine.gpus) and not args.train.use_cpu
    attention = model.attn_implementation
    if precision == "fp32" and (attention in _FLASH or (attention == "varlen" and on_gpu)):
        yield Finding("error", "--attn_implementation", f"{attention} has no fp32", "--precision bf16, or --attn_implementation sdpa")
    if attention in _FLASH:
        if not on_gpu:
            yield Finding("error", "--attn_implementation", f"{attention} needs a GPU", "--attn_implementation sdpa")
        elif importlib.util.find_spec("flash_attn") is None:
            fix = "pip install flash-attn --no-build-isolation, or --attn_implementation sdpa"
            yield Finding("error", "--attn_implementation", f"{attention} needs the package flash-attn", fix)
    elif attention == "flash_attention":
        yield Finding("error", "--attn_implementation", "flash_attention is not known", "did you mean flash_attention_2?")
    if model.torch_compile and model.no_custom_kernels:
        yield Finding("error", "--torch_compile", "and --no_custom_kernels contradict each other", "keep one")
    if model.torch_compile_backend and model.torch_compile is False:
        yield Finding("error", "--torch_compile_backend", "has no effect with --torch_compile False", "keep one")
    if model.use_liger_kernel:
        if model.no_custom_kernels:
            yield Finding("error", "--use_liger_kernel", "and --no_custom_kernels contradict each other", "keep one")
        elif model.torch_compile:
            problem = "and --torch_compile contradict each other: the compiler cannot see what Liger's kernels write into"
            yield Finding("error", "--use_liger_kernel", problem, "keep one; compiled layers are fused too")
        elif importlib.util.find_spec("liger_kernel") is None:
            yield Finding("error", "--use_liger_kernel", "needs the package liger-kernel", "pip install liger-kernel, or remove the flag")
        elif not on_gpu:
            yield Finding("error", "--use_liger_kernel", "needs a GPU", "remove the flag")
    optim = args.train.optim
    if optim == "adamw_apex_fused" and not on_gpu:
        yield Finding("error", "--optim", "adamw_apex_fused needs a GPU", "--optim adamw_torch_fused")
    if optim == "adamw_8bit" and importlib.util.find_spec("torchao") is None:
        yield Finding("error", "--optim", "adamw_8bit needs the package torchao", "pip install torchao, or --optim adamw_torch_fused")


def _four_bit_findings(args: Arguments, engine: str) -> Iterator[Finding]:
    if not args.lora.load_in_4bit:
        return
    if importlib.util.find_spec("bitsandbytes") is None:
        yield Finding("error", "--load_in_4bit", "needs the package bitsandbytes", "pip install bitsandbytes, or remove the flag")
    if engine not in ("ddp", "fsdp"):
        message = f"does not work under {engine}, which moves or copies weights without what is needed to read them"
        yield Finding("error", "--load_in_4bit", message, "--fsdp full_shard, or torchrun without --fsdp and --deepspeed")


# ---------------------------------------------------------------- optimizer, schedule, intervals


def _optimizer_findings(args: Arguments) -> Iterator[Finding]:
    train = args.train
    if train.learning_rate > 0.1:
        yield Finding("warning", "--learning_rate", f"{train.learning_rate:g} is very large", "a value like 5e-5")
    elif train.learning_rate == 0:
        yield Finding("warning", "--learning_rate", "0 trains nothing", "a value like 5e-5")
    if train.weight_decay >= 1:
        yield Finding("warning", "--weight_decay", f"{train.weight_decay:g} shrinks weights faster than they learn", "a value like 0.1")
    if train.optim in ("sgd", "adafactor"):
        for name in ("adam_beta1", "adam_beta2", "adam_epsilon"):
            if name in args.typed:
                yield Finding("info", f"--{name}", f"has no effect with --optim {train.optim}", "remove it")


def _schedule_findings(args: Arguments) -> Iterator[Finding]:
    train = args.train
    name = train.lr_scheduler_type
    if name not in SCHEDULE_NAMES:
        close = difflib.get_close_matches(name, SCHEDULE_NAMES, n=1, cutoff=0.4)
        fix = f"did you mean {close[0]}?" if close else ", ".join(SCHEDULE_NAMES)
        yield Finding("error", "--lr_scheduler_type", f"{name} is not known", fix)
    options = json.loads(train.lr_scheduler_kwargs) if train.lr_scheduler_kwargs else {}
    needed = _SCHEDULE_NEEDS.get(name, ())
    if needed and not any(option in options for option in needed):
        fix = f"--lr_scheduler_kwargs '{{\"{needed[0]}\": ...}}'"
        yield Finding("error", "--lr_scheduler_kwargs", f"{name} needs {' or '.join(needed)}", fix)
    warmup = train.warmup_ratio if train.warmup_ratio is not None else train.warmup_steps
    if 0 < train.max_steps <= warmup and {"warmup_steps", "warmup_ratio"} & args.typed:
        message = f"{warmup:g} steps of warm-up, but the run has {train.max_steps}: the learning rate never reaches its peak"
        yield Finding("warning", "--warmup_steps", message, f"a number below {train.max_steps}")
    if name == "constant" and warmup:
        yield Finding("warning", "--warmup_steps", "has no effect with --lr_scheduler_type constant", "constant_with_warmup")


def _interval_findings(args: Arguments) -> Iterator[Finding]:
    train = args.train
    total = train.max_steps
    if total > 0:
        if train.save_strategy == "steps" and train.save_steps > total and "save_steps" in args.typed:
            message = f"{train.save_steps:g} is over --max_steps {total}: only the last step is saved"
            yield Finding("info", "--save_steps", message, f"a number up to {total}")
        if train.eval_strategy == "steps" and (train.eval_steps or 0) > total:
            message = f"{train.eval_steps:g} is over --max_steps {total}: nothing is evaluated during training"
            yield Finding("warning", "--eval_steps", message, f"a number up to {total}")
        if train.logging_steps > total and "logging_steps" in args.typed:
            yield Finding("info", "--logging_steps", f"{train.logging_steps:g} is over --max_steps {total}", f"a number up to {total}")
        if {"max_steps", "num_train_epochs"} <= args.typed:
            yield Finding("info", "--num_train_epochs", f"has no effect beside --max_steps {total}", "keep one")
    if train.eval_strategy == "no" and "eval_steps" in args.typed:
        yield Finding("warning", "--eval_steps", "has no effect with --eval_strategy no", "add --eval_strategy steps")
    if train.load_best_model_at_end and train.save_strategy == train.eval_strategy == "steps":
        every = train.eval_steps or train.logging_steps
        if train.save_steps % every:
            message = f"{train.save_steps:g} is no multiple of --eval_steps {every:g}: a best step may have no checkpoint"
            yield Finding("error", "--save_steps", message, f"{max(1, round(train.save_steps / every)) * every:g}")
    elif (
        train.load_best_model_at_end
        and train.save_strategy != train.eval_strategy
        and "no" not in (train.save_strategy, train.eval_strategy)
    ):
        message = f"needs one rhythm, but saving goes by {train.save_strategy} and evaluation by {train.eval_strategy}"
        yield Finding("error", "--load_best_model_at_end", message, f"--save_strategy {train.eval_strategy}")
    if train.metric_for_best_model not in ("eval_loss", "eval_perplexity", "loss", "perplexity"):
        yield Finding("error", "--metric_for_best_model", f"{train.metric_for_best_model} is not computed", "eval_loss or eval_perplexity")
    if train.ddp_timeout < 60:
        message = f"{train.ddp_timeout} s is shorter than a slow save or evaluation"
        yield Finding("warning", "--ddp_timeout", message, "1800")


# ---------------------------------------------------------------- batch and data


def _batch_findings(args: Arguments, num_processes: int) -> Iterator[Finding]:
    train, data = args.train, args.data
    total, micro = train.target_batch_size, train.per_device_train_batch_size
    num_processes = num_processes // max(1, train.sequence_parallel_size) or 1  # those that have different samples
    unit = micro * num_processes
    if total is not None and total % unit:
        message = f"{total} is no multiple of per_device_train_batch_size * processes = {micro} * {num_processes}"
        fixes = [f"--target_batch_size {max(1, round(total / unit)) * unit}"]
        if total % num_processes == 0:
            per_process = total // num_processes
            size = max(size for size in range(1, min(micro, per_process) + 1) if per_process % size == 0)
            fixes.append(f"--per_device_train_batch_size {size}")
        yield Finding("error", "--target_batch_size", message, " or ".join(fixes))
    step = total or unit * train.gradient_accumulation_steps
    if data.max_train_samples is not None:
        if data.max_train_samples < num_processes:
            message = f"{data.max_train_samples} samples for {num_processes} processes"
            yield Finding("error", "--max_train_samples", message, f"at least {num_processes}, or fewer processes")
        elif data.max_train_samples < step:
            message = f"{data.max_train_samples} samples do not fill one optimizer step of {step}"
            yield Finding("warning", "--max_train_samples", message, f"at least {step}, or a smaller batch")
    if 0 < train.loss_chunk_size < 64:
        message = f"{train.loss_chunk_size} tokens at once make the loss slow and save nothing more"
        yield Finding("warning", "--loss_chunk_size", message, "1024")


def path_findings(args: Arguments) -> list[Finding]:
    """What is wrong with the files and folders that are named, whatever else is wrong."""
    facts = model_facts(args)
    return [*facts.problems, *_input_findings(args), *_folder_findings(args, facts)]


def _input_findings(args: Arguments) -> Iterator[Finding]:
    for name in ("train_file", "validation_file"):
        for pattern in getattr(args.data, name):
            if not glob.glob(os.path.expanduser(pattern)):
                yield Finding("error", f"--{name}", f"{pattern} does not exist", instead_of(pattern) or "an existing file, folder or glob")
    tokenizer = args.model.tokenizer_name
    # Asking the hub for it takes a while, and the longer without a network.
    is_other = tokenizer is not None and tokenizer != "bytes" and not Path(tokenizer).exists()
    if tokenizer and is_other and difflib.get_close_matches(tokenizer.lower(), ["bytes"], cutoff=0.8):
        yield Finding("error", "--tokenizer_name", f"there is no {tokenizer}", "did you mean bytes?")
    if tokenizer and tokenizer.startswith(("/", "./", "../", "~")) and not Path(tokenizer).expanduser().exists():
        yield Finding("error", "--tokenizer_name", f"{tokenizer} does not exist", "an existing folder, a name on the hub, or bytes")


def _data_findings(args: Arguments, facts: ModelFacts, machine: Machine) -> Iterator[Finding]:
    yield from _input_findings(args)
    data = args.data
    if data.block_size is not None and facts.max_positions is not None and data.block_size > facts.max_positions:
        message = f"{data.block_size} is over the model's limit of {facts.max_positions}"
        yield Finding("error", "--block_size", message, f"--block_size {facts.max_positions}")
    has_validation = bool(data.validation_file) or data.validation_split_percentage > 0 or bool(data.dataset_name)
    if args.train.eval_strategy != "no" and not has_validation:
        message = f"{args.train.eval_strategy}, but there is nothing to evaluate on"
        yield Finding("error", "--eval_strategy", message, "--validation_file, or --validation_split_percentage 5")
    workers = data.preprocessing_num_workers
    if workers is not None and workers > machine.num_cpus:
        yield Finding("info", "--preprocessing_num_workers", f"{workers} on {machine.num_cpus} cores gains nothing", str(machine.num_cpus))
    overrides = args.model.config_overrides
    for part in overrides.split(",") if overrides else ():
        if not part.partition("=")[2].strip():
            yield Finding("error", "--config_overrides", f"{part.strip()!r} is not name=value", "hidden_size=64,num_hidden_layers=2")


# ---------------------------------------------------------------- folders, trackers, flags without effect


def _named_as_checkpoints(folder: Path) -> list[Path]:
    """Empty also where the folder may not be read, which is said elsewhere."""
    return [path for path in folder.glob("checkpoint-*") if step_of(path) >= 0]


def _folder_findings(args: Arguments, facts: ModelFacts) -> Iterator[Finding]:
    train = args.train
    if train.output_dir:
        target = Path(train.output_dir).absolute()
        existing = next(parent for parent in (target, *target.parents) if parent.exists())
        if not existing.is_dir():
            yield Finding("error", "--output_dir", f"{existing} is a file", "a folder")
        elif not os.access(existing, os.W_OK):
            yield Finding("error", "--output_dir", f"cannot write to {existing}", "choose a folder you may write to")
        elif odd := [target / name for name in _RUN_FILES if (target / name).exists() and not (target / name).is_file()]:
            yield Finding("error", "--output_dir", f"{odd[0]} is not a regular file", "remove it, or choose another folder")
        elif odd := [path for path in _named_as_checkpoints(target) if not path.is_dir()]:
            yield Finding("error", "--output_dir", f"{odd[0]} is not a folder, and a checkpoint is to be one", "move it away")
        else:
            free = shutil.disk_usage(existing).free
            needed = 16 * (facts.num_params or 0)  # a checkpoint (fp32 and Adam) and final/
            if free < needed + _LITTLE_ROOM_BYTES:
                least = f"logs, metrics and the tokenizer's files need up to {size_text(_LITTLE_ROOM_BYTES)}"
                wants = f"one checkpoint needs about {size_text(needed)}" if free < needed else least
                message = f"{size_text(free)} are free at {existing}, and {wants}"
                yield Finding("warning", "--output_dir", message, "another disk, or --save_strategy no")
    resume = train.resume_from_checkpoint
    if resume and resume.lower() == "latest" and train.output_dir and not _named_as_checkpoints(Path(train.output_dir)):
        message = f"latest, and there is no checkpoint in {train.output_dir}"
        yield Finding("error", "--resume_from_checkpoint", message, "leave it out to start anew, or name a checkpoint's folder")
    if resume and resume.lower() not in ("auto", "latest", "true"):
        if not Path(resume).is_dir():
            what = "is a file" if Path(resume).exists() else "does not exist"
            yield Finding("error", "--resume_from_checkpoint", f"{resume} {what}", "auto, latest, or a checkpoint folder")
        elif none := no_checkpoint(Path(resume)):
            yield Finding("error", "--resume_from_checkpoint", *none)
    if resume and train.overwrite_output_dir:
        yield Finding("error", "--resume_from_checkpoint", "and --overwrite_output_dir contradict each other", "keep one")


def _tracker_findings(args: Arguments) -> Iterator[Finding]:
    names = args.train.report_to
    if "none" in names and len(names) > 1:
        yield Finding("error", "--report_to", f"none beside {', '.join(name for name in names if name != 'none')}", "keep one of the two")
    for name in names:
        package = _PACKAGES.get(name)
        if package and importlib.util.find_spec(package) is None:
            yield Finding(
                "error", "--report_to", f"{name} needs a package that is not installed", f"pip install {package.replace('_', '-')}"
            )


def _no_effect_findings(args: Arguments, engine: str, num_processes: int, machine: Machine) -> Iterator[Finding]:
    for name in ("ddp_find_unused_parameters", "ddp_bucket_cap_mb"):
        if name in args.typed and engine != "ddp":
            yield Finding("info", f"--{name}", f"has no effect with the {engine} engine", "remove it")
    # One process that sees several cards gets a map without asking for one.
    if engine in ("fsdp", "zero") or (engine == "ddp" and (num_processes > 1 or len(machine.gpus) < 2)):
        for name in sorted(args.typed & _MAP_ONLY):
            yield Finding("info", f"--{name}", f"has no effect with the {engine} engine: it is for device maps", "remove it")
    if "gpu_memory" in args.typed and engine == "device_map":
        yield Finding("warning", "--gpu_memory", "has no effect on a device map", f"--max_memory {args.train.gpu_memory}")
    if args.train.activation_offload and engine == "device_map":
        yield Finding("error", "--activation_offload", "a device map has no offload of activations", "remove it")
    elif args.train.activation_offload and args.train.activation_checkpointing == "none":
        problem = "has no effect without activation checkpointing: it moves what that keeps"
        yield Finding("error", "--activation_offload", problem, "--activation_checkpointing full")
    if "nvme_path" in args.typed and engine != "zero":
        yield Finding("warning", "--nvme_path", f"has no effect with the {engine} engine", "--deepspeed ds_configs/zero3_nvme.json")


def kernel_findings(args: Arguments, engine: str) -> Iterator[Finding]:
    """What of the fast paths the run's engine does not have.

    Args:
        engine: "ddp", "fsdp", "zero" or "device_map".
    """
    model, train = args.model, args.train
    if model.fp8 != "no":
        if model.no_custom_kernels:
            yield Finding("error", "--fp8", "and --no_custom_kernels contradict each other", "keep one")
        if engine != "fsdp":
            yield Finding("error", "--fp8", f"is there under FSDP2, not with the engine {engine}", "add --fsdp full_shard, or leave it out")
        if train.precision not in ("auto", "bf16"):
            yield Finding("error", "--fp8", f"goes with bf16, not {train.precision}", "--precision bf16")
        if args.lora.lora_r is not None:
            yield Finding("error", "--fp8", "and adapters do not go together", "leave --fp8 or --lora_r out")
    if model.fp8_all_gather and model.fp8 != "tensorwise":
        message = "needs one scale a tensor" if model.fp8 == "rowwise" else "has no effect without --fp8"
        yield Finding("error", "--fp8_all_gather", message, "--fp8 tensorwise, or leave it out")
    if train.reduce_dtype != "fp32" and engine != "fsdp":
        fix = 'in the DeepSpeed JSON: "communication_data_type"' if engine == "zero" else "leave it out"
        yield Finding("error", "--reduce_dtype", f"is there under FSDP2, not with the engine {engine}", fix)
