"""What the arguments of a run must fulfil by themselves: aliases that agree, values that are possible, flags that belong together.

What depends on templates, launcher and machine is in harness.check_config.
"""

from __future__ import annotations

import dataclasses
import json

from harness import device_map_text
from harness.args import Arguments, LoraArguments, TrainArguments, world_size_from_environment
from harness.findings import Finding, UserError
from harness.ladder import unknown_rungs
from harness.partition import size_problem


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


def _lora_problems(lora: LoraArguments, typed: frozenset[str]) -> list[Finding]:
    found: list[Finding] = []

    def bad(key: str, message: str, fix: str = "") -> None:
        found.append(Finding("error", "--" + key, message, fix))

    if lora.lora_r is None:
        for name in sorted(typed & {field.name for field in dataclasses.fields(lora)}):
            bad(name, "has no effect without adapters", "add --lora_r 8, or leave it out")
        return found
    if lora.lora_r < 1:
        bad("lora_r", f"must be at least 1, not {lora.lora_r}")
    if lora.lora_alpha is not None and lora.lora_alpha < 1:
        bad("lora_alpha", f"must be at least 1, not {lora.lora_alpha}")
    if not 0 <= lora.lora_dropout < 1:
        bad("lora_dropout", f"must be at least 0 and below 1, not {lora.lora_dropout}")
    if "all-linear" in lora.target_modules and len(lora.target_modules) > 1:
        bad("target_modules", "names all-linear and others too", "keep one of the two")
    for name, text in (("rank_pattern", lora.rank_pattern), ("alpha_pattern", lora.alpha_pattern)):
        try:
            pattern = json.loads(text) if text else {}
        except json.JSONDecodeError as error:
            bad(name, f"is not JSON: {error.msg} at character {error.pos}", f"quote it: --{name} '{{\"q_proj\": 16}}'")
            continue
        if not isinstance(pattern, dict) or not all(type(value) is int and value > 0 for value in pattern.values()):
            bad(name, f"must map module names to positive whole numbers, not {text}", f"write --{name} '{{\"q_proj\": 16}}'")
    return found


def resolve(args: Arguments) -> Arguments:
    """Aliases become the one value that is used; contradictions and impossible values are errors, all at once.

    Raises:
        UserError: with every problem found.
    """
    train, data, model = args.train, args.data, args.model
    problems: list[Finding] = []

    def bad(key: str, message: str, fix: str = "") -> None:
        problems.append(Finding("error", "--" + key, message, fix))

    asked = {name for name, on in (("bf16", train.bf16), ("fp16", train.fp16)) if on}
    if "precision" in args.typed and train.precision != "auto":
        asked.add(train.precision)
    if len(asked) > 1:
        bad("precision", f"{' and '.join(sorted(asked))} were both asked for", "keep one of --precision, --bf16, --fp16")
    elif asked:
        train.precision = asked.pop()
    if train.gradient_checkpointing:
        if "activation_checkpointing" in args.typed and train.activation_checkpointing != "full":
            bad("gradient_checkpointing", f"means full, but --activation_checkpointing is {train.activation_checkpointing}", "keep one")
        train.activation_checkpointing = "full"
    elif train.gradient_checkpointing is False and "activation_checkpointing" in args.typed and train.activation_checkpointing == "full":
        bad("gradient_checkpointing", "is off, but --activation_checkpointing is full", "keep one")

    for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
        if getattr(train, name) < 1:
            bad(name, f"must be at least 1, not {getattr(train, name)}")
    if train.target_batch_size is not None:
        if train.target_batch_size < 1:
            bad("target_batch_size", f"must be at least 1, not {train.target_batch_size}")
        if "gradient_accumulation_steps" in args.typed:
            bad("target_batch_size", "sets the accumulation, and --gradient_accumulation_steps was given too", "keep one of the two")
    for name in ("learning_rate", "weight_decay", "max_grad_norm", "warmup_steps", "adam_epsilon", "gpu_monitor_interval_s"):
        if not getattr(train, name) >= 0:
            bad(name, f"must not be negative, but is {getattr(train, name)}")
    for name in ("adam_beta1", "adam_beta2"):
        if not 0 <= getattr(train, name) < 1:
            bad(name, f"must be at least 0 and below 1, not {getattr(train, name)}")
    if train.warmup_ratio is not None:
        if not 0 <= train.warmup_ratio <= 1:
            bad("warmup_ratio", f"must be between 0 and 1, not {train.warmup_ratio}")
        elif "warmup_steps" in args.typed and train.warmup_steps:
            bad("warmup_ratio", "and --warmup_steps were both given", "keep one of the two")
    if train.max_steps == 0 or train.max_steps < -1:
        bad("max_steps", f"must be positive, or -1 for whole epochs, not {train.max_steps}")
    if train.max_steps < 0 and not train.num_train_epochs > 0:
        bad("num_train_epochs", f"must be positive, not {train.num_train_epochs}")
    for name in ("logging_steps", "save_steps"):
        if not getattr(train, name) > 0:
            bad(name, f"must be positive, not {getattr(train, name)}")
    if train.eval_steps is not None and not train.eval_steps > 0:
        bad("eval_steps", f"must be positive, not {train.eval_steps}")
    if train.save_total_limit is not None and train.save_total_limit < 1:
        bad("save_total_limit", f"must be at least 1, not {train.save_total_limit}")
    if train.gpu_memory is not None and (problem := size_problem(train.gpu_memory)):
        bad("gpu_memory", problem, "write for example 80GB or 20GiB")
    if train.snapshot_steps < 0:
        bad("snapshot_steps", f"must not be negative, but is {train.snapshot_steps}")
    if train.loss_chunk_size < 0:
        bad("loss_chunk_size", f"must not be negative, but is {train.loss_chunk_size}")
    if not train.output_dir:
        bad("output_dir", "is missing", "say where the run is written: --output_dir out")
    if not (model.model_name_or_path or model.config_name or model.model_type):
        bad("model_name_or_path", "no model was given", "give --model_name_or_path, or --config_name / --model_type to train from scratch")
    if model.model_name_or_path and (model.config_name or model.model_type):
        other = "config_name" if model.config_name else "model_type"
        bad(other, f"trains from scratch, but --model_name_or_path {model.model_name_or_path} was given too", "keep one")
    if model.config_overrides and model.model_name_or_path:
        bad("config_overrides", "is for training from scratch", "use it with --config_name or --model_type")
    if data.block_size is not None and data.block_size < 2:
        bad("block_size", f"must be at least 2, not {data.block_size}")
    least = {"max_train_samples": 1, "max_eval_samples": 1, "preprocessing_num_workers": 1, "dataloader_num_workers": 0}
    for name, number in least.items():
        value = getattr(data, name)
        if value is not None and value < number:
            bad(name, f"must be at least {number}, not {value}")
    if not 0 <= data.validation_split_percentage < 100:
        bad("validation_split_percentage", f"must be at least 0 and below 100, not {data.validation_split_percentage}")
    if data.streaming and train.max_steps < 0:
        bad("max_steps", "is missing: nobody knows how many steps an epoch of a stream has", "give --max_steps with --streaming")
    if train.bf16_full_eval and train.fp16_full_eval:
        bad("bf16_full_eval", "and --fp16_full_eval were both given", "keep one")
    if train.deepspeed and train.fsdp:
        bad("deepspeed", "and --fsdp were both given", "keep one engine")
    problems += _early_stopping_problems(train, args.typed)
    problems += unknown_rungs(train.oom_ladder)
    problems += _profile_problems(train)
    if train.load_best_model_at_end:
        if train.eval_strategy == "no":
            bad("load_best_model_at_end", "needs evaluations during training", "add --eval_strategy steps")
        if train.save_strategy == "no":
            bad("load_best_model_at_end", "needs checkpoints", "remove --save_strategy no")
    for name in ("lr_scheduler_kwargs",):
        text = getattr(train, name)
        if text:
            try:
                if not isinstance(json.loads(text), dict):
                    bad(name, f"must be a JSON object, not {text}")
            except json.JSONDecodeError as error:
                bad(name, f"is not JSON: {error.msg} at character {error.pos}", "quote it: '{\"num_cycles\": 2}'")
    engine = next((name for name in ("deepspeed", "fsdp") if getattr(train, name)), None)
    problems += device_map_text.resolve(args.maps, engine, world_size_from_environment())
    problems += _lora_problems(args.lora, args.typed)
    if problems:
        raise UserError(problems)
    return args
