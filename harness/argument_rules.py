"""What the arguments of a run must fulfil by themselves: aliases that agree, values that are possible, flags that belong together.

What depends on templates, launcher and machine is in harness.check_config.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator

from harness import device_map_text
from harness.args import Arguments, DataArguments, LoraArguments, ModelArguments, TrainArguments, world_size_from_environment
from harness.findings import Finding
from harness.ladder import unknown_rungs
from harness.partition import size_problem
from harness.user_files import path_problem


def _error(name: str, message: str, fix: str = "") -> Finding:
    return Finding("error", "--" + name, message, fix)


def _early_stopping_problems(train: TrainArguments, typed: frozenset[str]) -> list[Finding]:
    key = "--early_stopping_patience"
    if train.early_stopping_patience is None:
        if "early_stopping_threshold" in typed:
            return [Finding("error", "--early_stopping_threshold", "has no effect alone", "add --early_stopping_patience 3")]
        return []
    found = []
    if train.early_stopping_patience < 1:
        found.append(Finding("error", key, f"must be at least 1, not {train.early_stopping_patience}"))
    if train.early_stopping_threshold < 0:
        found.append(Finding("error", "--early_stopping_threshold", f"must not be negative, but is {train.early_stopping_threshold}"))
    if train.eval_strategy == "no":
        found.append(Finding("error", key, "needs evaluations during training", "add --eval_strategy steps"))
    return found


def _profile_problems(train: TrainArguments) -> list[Finding]:
    if train.profile_steps is None:
        return []
    parts = train.profile_steps.split("-")
    if len(parts) > 2 or not all(part.isdecimal() for part in parts) or not 1 <= int(parts[0]) <= int(parts[-1]):
        return [Finding("error", "--profile_steps", f"must be steps like 10-12 or 10, not {train.profile_steps}", "the first step is 1")]
    if 0 < train.max_steps < int(parts[-1]):
        return [Finding("error", "--profile_steps", f"{train.profile_steps} is after the last step, {train.max_steps}", "earlier ones")]
    return []


def names_in_lora(args: Arguments) -> bool:
    """Whether flags of LoRA name modules or layers, which only the model can say to be right."""
    lora = args.lora
    named = [name for name in lora.target_modules if name not in ("", "all-linear")]
    others = (lora.target_layers, lora.rank_pattern, lora.alpha_pattern, lora.modules_to_save)
    return lora.lora_r is not None and bool(named or any(others))


def names_modules(args: Arguments) -> bool:
    """Whether any flag does: of LoRA, or a device map that is no strategy's name."""
    device_map = args.maps.device_map
    return names_in_lora(args) or (device_map is not None and (device_map.endswith(".json") or device_map.startswith(("{", "cuda"))))


def _lora_problems(lora: LoraArguments, typed: frozenset[str]) -> Iterator[Finding]:
    if lora.lora_r is None:
        for name in sorted(typed & {field.name for field in dataclasses.fields(lora)}):
            yield _error(name, "has no effect without adapters", "add --lora_r 8, or leave it out")
        return
    if lora.lora_r < 1:
        yield _error("lora_r", f"must be at least 1, not {lora.lora_r}")
    if lora.lora_alpha is not None and lora.lora_alpha < 1:
        yield _error("lora_alpha", f"must be at least 1, not {lora.lora_alpha}")
    if not 0 <= lora.lora_dropout < 1:
        yield _error("lora_dropout", f"must be at least 0 and below 1, not {lora.lora_dropout}")
    if lora.load_in_4bit and lora.use_dora:
        yield _error("use_dora", "needs the norms of the weights, which --load_in_4bit does not keep", "keep one of the two")
    if "all-linear" in lora.target_modules and len(lora.target_modules) > 1:
        yield _error("target_modules", "names all-linear and others too", "keep one of the two")
    for name, text in (("rank_pattern", lora.rank_pattern), ("alpha_pattern", lora.alpha_pattern)):
        try:
            pattern = json.loads(text) if text else {}
        except (ValueError, RecursionError) as error:
            where = f": {error.msg} at character {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
            yield _error(name, f"is not JSON{where}", f"quote it: --{name} '{{\"q_proj\": 16}}'")
            continue
        if not isinstance(pattern, dict) or not all(type(value) is int and value > 0 for value in pattern.values()):
            yield _error(name, f"must map module names to positive whole numbers, not {text}", f"write --{name} '{{\"q_proj\": 16}}'")
        elif any(value > _MOST["lora_r"] for value in pattern.values()):
            yield _error(name, f"has a number over {_MOST['lora_r']}", f"write --{name} '{{\"q_proj\": 16}}'")


def _aliases(args: Arguments) -> Iterator[Finding]:
    """Makes --bf16, --fp16 and --gradient_checkpointing the values that they stand for, and turns off what 4 bits do not go with."""
    train = args.train
    asked = {name for name, on in (("bf16", train.bf16), ("fp16", train.fp16)) if on}
    if "precision" in args.typed and train.precision != "auto":
        asked.add(train.precision)
    if len(asked) > 1:
        yield _error("precision", f"{' and '.join(sorted(asked))} were both asked for", "keep one of --precision, --bf16, --fp16")
    elif asked:
        train.precision = asked.pop()
    typed_level = train.activation_checkpointing if "activation_checkpointing" in args.typed else None
    if train.gradient_checkpointing:
        if typed_level not in (None, "full"):
            yield _error("gradient_checkpointing", f"means full, but --activation_checkpointing is {typed_level}", "keep one")
        train.activation_checkpointing = "full"
    elif train.gradient_checkpointing is False and typed_level == "full":
        yield _error("gradient_checkpointing", "is off, but --activation_checkpointing is full", "keep one")
    if args.lora.load_in_4bit:
        if args.model.torch_compile is None:  # bitsandbytes' kernels are not for the compiler
            args.model.torch_compile = False
        if "auto_memory" not in args.typed:  # the planner counts 16 bits a weight
            train.auto_memory = "off"


# The largest values that mean anything, far above all in use; beyond them the run would end, or be taken apart, in some library.
_MAX_SEED = 2**32 - 1  # of NumPy's generators
_MOST = {
    **{"seed": _MAX_SEED, "data_seed": _MAX_SEED, "ddp_timeout": 10**9, "target_batch_size": 10**9},
    **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"), 10**6),
    **{"dataloader_num_workers": 1024, "preprocessing_num_workers": 1024, "lora_r": 10**6, "lora_alpha": 10**6},
}
_MOST_OF_ALL = 2**53  # from there on not every whole number is a float
_LEAST = {"seed": 0, "data_seed": 0, "ddp_timeout": 1}
_MAY_BE_INFINITE = frozenset(["max_grad_norm"])  # the norm is measured, nothing is clipped
_PATHS = (
    *("output_dir", "data_cache_dir", "cache_dir", "model_name_or_path", "config_name", "tokenizer_name", "dataset_name", "dataset_mix"),
    *("train_file", "validation_file", "resume_from_checkpoint", "nvme_path", "offload_folder"),
)


def _limit_problems(args: Arguments) -> Iterator[Finding]:
    """Numbers and paths that no machine can take."""
    for name, value in args.to_dict().items():
        if isinstance(value, float) and not math.isfinite(value) and not (name in _MAY_BE_INFINITE and value > 0):
            yield _error(name, f"must be a finite number, not {value}", "leave it out for the default")
        elif isinstance(value, (int, float)) and value > _MOST.get(name, _MOST_OF_ALL) and name not in _MAY_BE_INFINITE:
            shown = value if value < 10**20 else f"{len(str(int(value)))} digits"
            yield _error(name, f"must be at most {_MOST.get(name, _MOST_OF_ALL)}, not {shown}", "a smaller number")
        elif isinstance(value, int) and value < _LEAST.get(name, -_MOST_OF_ALL):
            yield _error(name, f"must be at least {_LEAST.get(name, -_MOST_OF_ALL)}, not {value}", "a larger number")
        elif name in _PATHS:
            for path in value if isinstance(value, list) else [value]:
                if isinstance(path, str) and (problem := path_problem(path)):
                    yield _error(name, problem, "a shorter path" if "long" in problem else "another path")


def _number_problems(train: TrainArguments, data: DataArguments) -> Iterator[Finding]:
    """Numbers outside of what is possible."""
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
        if getattr(train, name) < 1:
            yield _error(name, f"must be at least 1, not {getattr(train, name)}")
    for name in ("learning_rate", "weight_decay", "max_grad_norm", "warmup_steps", "adam_epsilon", "gpu_monitor_interval_s"):
        if getattr(train, name) < 0:
            yield _error(name, f"must not be negative, but is {getattr(train, name)}")
    for name in ("adam_beta1", "adam_beta2"):
        if not 0 <= getattr(train, name) < 1:
            yield _error(name, f"must be at least 0 and below 1, not {getattr(train, name)}")
    if train.max_steps == 0 or train.max_steps < -1:
        yield _error("max_steps", f"must be positive, or -1 for whole epochs, not {train.max_steps}")
    if train.max_steps < 0 and not train.num_train_epochs > 0:
        yield _error("num_train_epochs", f"must be positive, not {train.num_train_epochs}")
    for name in ("logging_steps", "save_steps", "eval_steps"):
        value = getattr(train, name)
        if value is not None and not value > 0:
            yield _error(name, f"must be positive, not {value}")
    for name in ("snapshot_steps", "loss_chunk_size"):
        if getattr(train, name) < 0:
            yield _error(name, f"must not be negative, but is {getattr(train, name)}")
    least = {"max_train_samples": 1, "max_eval_samples": 1, "preprocessing_num_workers": 1, "dataloader_num_workers": 0, "block_size": 2}
    values = {name: (getattr(data, name), number) for name, number in least.items()} | {"save_total_limit": (train.save_total_limit, 1)}
    for name, (value, number) in values.items():
        if value is not None and value < number:
            yield _error(name, f"must be at least {number}, not {value}")
    if not 0 <= data.validation_split_percentage < 100:
        yield _error("validation_split_percentage", f"must be at least 0 and below 100, not {data.validation_split_percentage}")
    if train.gpu_memory is not None and (problem := size_problem(train.gpu_memory)):
        yield _error("gpu_memory", problem, "write for example 80GB or 20GiB")


def _model_problems(model: ModelArguments) -> Iterator[Finding]:
    if not (model.model_name_or_path or model.config_name or model.model_type):
        fix = "give --model_name_or_path, or --config_name / --model_type to train from scratch"
        yield _error("model_name_or_path", "no model was given", fix)
    if model.model_name_or_path and (model.config_name or model.model_type):
        other = "config_name" if model.config_name else "model_type"
        yield _error(other, f"trains from scratch, but --model_name_or_path {model.model_name_or_path} was given too", "keep one")
    if model.config_overrides and model.model_name_or_path:
        yield _error("config_overrides", "is for training from scratch", "use it with --config_name or --model_type")


def _combination_problems(args: Arguments) -> Iterator[Finding]:
    """Flags that exclude or need each other."""
    train = args.train
    if not train.output_dir:
        yield _error("output_dir", "is missing", "say where the run is written: --output_dir out")
    if train.target_batch_size is not None:
        if train.target_batch_size < 1:
            yield _error("target_batch_size", f"must be at least 1, not {train.target_batch_size}")
        if "gradient_accumulation_steps" in args.typed:
            yield _error(
                "target_batch_size", "sets the accumulation, and --gradient_accumulation_steps was given too", "keep one of the two"
            )
    if train.warmup_ratio is not None:
        if not 0 <= train.warmup_ratio <= 1:
            yield _error("warmup_ratio", f"must be between 0 and 1, not {train.warmup_ratio}")
        elif "warmup_steps" in args.typed and train.warmup_steps:
            yield _error("warmup_ratio", "and --warmup_steps were both given", "keep one of the two")
    if args.data.streaming and train.max_steps < 0:
        yield _error("max_steps", "is missing: nobody knows how many steps an epoch of a stream has", "give --max_steps with --streaming")
    if args.lora.load_in_4bit and (args.model.model_type or args.model.config_name):
        yield _error("load_in_4bit", "is for a model that has its weights; one made from scratch has none to keep", "leave it out")
    if train.bf16_full_eval and train.fp16_full_eval:
        yield _error("bf16_full_eval", "and --fp16_full_eval were both given", "keep one")
    if train.deepspeed and train.fsdp:
        yield _error("deepspeed", "and --fsdp were both given", "keep one engine")
    if train.no_oom_recovery and train.oom_ladder:
        yield _error("oom_ladder", "says how to go on, and --no_oom_recovery not to", "keep one of the two")
    if train.load_best_model_at_end:
        if train.eval_strategy == "no":
            yield _error("load_best_model_at_end", "needs evaluations during training", "add --eval_strategy steps")
        if train.save_strategy == "no":
            yield _error("load_best_model_at_end", "needs checkpoints", "remove --save_strategy no")
    if train.lr_scheduler_kwargs:
        try:
            if not isinstance(json.loads(train.lr_scheduler_kwargs), dict):
                yield _error("lr_scheduler_kwargs", f"must be a JSON object, not {train.lr_scheduler_kwargs}")
        except json.JSONDecodeError as error:
            message = f"is not JSON: {error.msg} at character {error.pos}"
            yield _error("lr_scheduler_kwargs", message, "quote it: '{\"num_cycles\": 2}'")


def resolve(args: Arguments) -> list[Finding]:
    """Aliases become the one value that is used. Returns every contradiction and every impossible value, as errors."""
    train = args.train
    limits = list(_limit_problems(args))
    beyond = {finding.key for finding in limits}  # what else is wrong with such a value is of no use
    problems = [
        *_aliases(args),
        *_number_problems(train, args.data),
        *_combination_problems(args),
        *_model_problems(args.model),
        *_early_stopping_problems(train, args.typed),
        *unknown_rungs(train.oom_ladder),
        *_profile_problems(train),
    ]
    engine = next((name for name in ("deepspeed", "fsdp") if getattr(train, name)), None)
    problems += device_map_text.resolve(args.maps, engine, world_size_from_environment())
    problems += _lora_problems(args.lora, args.typed)
    return [*limits, *(finding for finding in problems if finding.key not in beyond)]
