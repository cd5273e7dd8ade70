"""What happens to every name that `TrainingArguments` and HF's `run_clm.py` have had: taken, renamed, without effect, or refused.

Covers `TrainingArguments` of transformers 4.40 to 5.24 and the arguments of its `examples/pytorch/language-modeling/run_clm.py`. A name
that becomes a flag of ours is removed here; nothing else needs to change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from harness.findings import Finding


@dataclasses.dataclass(frozen=True)
class Name:
    """Fate of one name that run_clm.py does not take under that name.

    Attributes:
        fate: "renamed" to `to`, accepted with "no_effect", or "refused".
        reason: one clause for the user.
        to: the name that is taken instead.
        value: for a switch that became a value of `to` (`--adafactor` is `--optim adafactor`).
        fix: what to do instead of a refused name.
        neutral: lower-case values with which a refused name asks for nothing, beside none, null, false and the empty text.
    """

    fate: Literal["renamed", "no_effect", "refused"]
    reason: str
    to: str = ""
    value: str = ""
    fix: str = ""
    neutral: tuple[str, ...] = ()


_RENAMED: dict[str, str] = {
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "dtype": "torch_dtype",
}

# Reason -> names, separated by blanks. Nothing that is learnt depends on these.
_NO_EFFECT: dict[str, str] = {
    "evaluation computes the loss, its perplexity and nothing else": (
        "prediction_loss_only do_predict eval_accumulation_steps eval_do_concat_batches include_inputs_for_metrics include_for_metrics "
        "batch_eval_metrics eval_use_gather_object label_names ray_scope use_legacy_prediction_loop use_cache"
    ),
    "evaluation runs as training does": "jit_mode_eval",
    "log lines come from the main process; --debug shows more": "log_level log_level_replica log_on_each_node",
    "a log line comes every --logging_steps": "logging_strategy",
    "trackers write below --output_dir": "logging_dir",
    "non-finite losses are always shown; --nan_policy says what follows": "logging_nan_inf_filter",
    "the trackers' own settings and environment variables decide": ("project trackio_space_id trackio_bucket_id trackio_static_space_id"),
    "it is always measured": "include_tokens_per_second include_num_input_tokens_seen skip_memory_metrics",
    "weights are always safetensors": "save_safetensors",
    "every process writes its own part": "save_on_each_node",
    "checkpoints are always complete, so that a run can go on": "save_only_model restore_callback_states_from_checkpoint",
    "resuming goes straight to its place in the data": "ignore_data_skip",
    "a stopped run always saves": "enable_jit_checkpoint",
    "the device is found by itself; --use_cpu turns GPUs off": "use_mps_device use_ipex",
    "mixed precision is PyTorch's own": "fp16_opt_level fp16_backend half_precision_backend",
    "NCCL on GPUs, gloo on CPUs": "ddp_backend",
    "DDP is set up for the model as it is": "ddp_broadcast_buffers ddp_static_graph",
    "the loader reads ahead and keeps its workers and order by itself": (
        "dataloader_prefetch_factor dataloader_persistent_workers dataloader_pin_memory dataloader_multiprocessing_context "
        "dataloader_in_order dispatch_batches"
    ),
    "samples hold only what the model takes": "remove_unused_columns",
    "lengths are known from tokenising": "length_column_name",
    "layers to wrap are found in the model itself": "fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap",
    "memory is looked after by the memory settings": "auto_find_batch_size torch_empty_cache_steps",
    "activation checkpointing is never reentrant": "gradient_checkpointing_kwargs activation_checkpointing_kwargs",
    "the loss is always averaged over the tokens of all processes": "average_tokens_across_devices",
    "layers are compiled one by one, in the compiler's default mode": "torchdynamo torch_compile_mode",
    "all of Liger's fused layers that fit are used, or none": "liger_kernel_config",
    "nothing is uploaded": (
        "hub_model_id hub_strategy hub_token hub_private_repo hub_always_push hub_revision push_to_hub_model_id "
        "push_to_hub_organization push_to_hub_token"
    ),
    "the fast tokenizer is used where there is one": "use_fast_tokenizer",
    "weights never need twice their size in host memory": "low_cpu_mem_usage",
}

# Name -> (reason, what to do instead, values that ask for nothing).
_REFUSED: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "push_to_hub": ("nothing is uploaded", "upload the folder final/ after the run with 'hf upload'", ()),
    "token": ("a secret does not belong on a command line", "log in with 'hf auth login', or set HF_TOKEN", ()),
    "use_auth_token": ("a secret does not belong on a command line", "log in with 'hf auth login', or set HF_TOKEN", ()),
    "keep_linebreaks": ("line breaks are part of the text", "leave it out, or clean the files first", ("true", "1")),
    "eval_delay": ("evaluations start with the first interval", "leave it out", ("0", "0.0")),
    "label_smoothing_factor": ("the loss is plain cross-entropy", "leave it out", ("0", "0.0")),
    "neftune_noise_alpha": ("no noise is added to embeddings", "leave it out", ("0", "0.0")),
    "optim_args": ("optimizers take their named arguments", "use --adam_beta1, --adam_beta2, --adam_epsilon, --weight_decay", ()),
    "optim_target_modules": ("optimizers treat all layers alike", "use LoRA (--lora_r) to train with less memory", ()),
    "split_batches": ("batch sizes are per process", "divide --per_device_train_batch_size by the number of processes", ()),
    "accelerator_config": ("the data loader is not accelerate's", "leave it out; batch sizes are per process", ("{}",)),
    "fsdp_config": (
        "FSDP is set up by --fsdp or by accelerate's YAML",
        "use 'accelerate launch --config_file fsdp_configs/full_shard.yaml', or --fsdp alone",
        ("{}",),
    ),
    "parallelism_config": ("it is read from accelerate's YAML", "start with 'accelerate launch --config_file'", ()),
    "tp_size": ("there is no tensor parallelism", "use --fsdp full_shard or --deepspeed with ZeRO-3", ("0", "1")),
    "tpu_num_cores": ("TPUs are not supported", "leave it out", ()),
    "tpu_metrics_debug": ("TPUs are not supported", "leave it out", ()),
    "mp_parameters": ("SageMaker's model parallelism is not supported", "use --fsdp full_shard or --deepspeed", ()),
    "past_index": ("models with a recurrent past are not supported", "leave it out", ("-1",)),
}

NAMES: dict[str, Name] = {
    **{old: Name("renamed", "older name", to=new) for old, new in _RENAMED.items()},
    "adafactor": Name("renamed", "older switch", to="optim", value="adafactor"),
    "group_by_length": Name("renamed", "older switch", to="train_sampling_strategy", value="group_by_length"),
    **{name: Name("no_effect", reason) for reason, names in _NO_EFFECT.items() for name in names.split()},
    **{name: Name("refused", reason, fix=fix, neutral=neutral) for name, (reason, fix, neutral) in _REFUSED.items()},
}

# Values of flags we take that HF spells otherwise: flag -> its value, lower case -> ours. "" is a flag without a value.
VALUES: dict[str, dict[str, str]] = {
    "optim": {"adamw_hf": "adamw_torch", "adamw_bnb_8bit": "adamw_8bit", "adamw_torch_8bit": "adamw_8bit"},
    "activation_checkpointing": {"": "full", "true": "full", "false": "none"},
    "debug": {"underflow_overflow": "true"},
}
_NOTHING = ("", "none", "null", "false")
_TRUE = ("true", "1", "yes", "y", "t")


def translate(
    tokens: Sequence[str],
    known: Collection[str],
    names: Mapping[str, Name] | None = None,
    values: Mapping[str, Mapping[str, str]] | None = None,
) -> tuple[list[str], list[Finding]]:
    """Rewrites a command line's older names to today's.

    `--no_x` is `--x False`, as transformers' parser has it for switches that are on by default.

    Args:
        tokens: command-line tokens.
        known: the names that are taken as they are.
        names: stands for `NAMES`.
        values: stands for `VALUES`.

    Returns:
        The new tokens, and one finding for each name that was renamed, has no effect, or is refused. A value is never repeated in a
        finding: it may be a secret.
    """
    names = NAMES if names is None else names
    values = VALUES if values is None else values
    result: list[str] = []
    findings: dict[str, Finding] = {}
    for flag, given in _flags(tokens):
        name = flag.partition("=")[0].removeprefix("--").replace("-", "_")
        rule = None if name in known else names.get(name)
        if rule is None and name.startswith("no_") and name not in known and name[3:] not in known:
            name = name[3:]
            rule, given = names.get(name), ["False"]
        if rule is None:
            result += _with_our_values(flag, given, values)
            continue
        text = " ".join([*flag.split("=", 1)[1:], *given])
        bare = "=" not in flag and not given
        finding: Finding | None = None
        if rule.fate == "renamed":
            new = _renamed(rule, text, bare)
            result += new
            if new:  # a switch that was off became nothing
                ours = f"--{rule.to} {rule.value}".rstrip()
                finding = Finding("info", f"--{name}", f"is {ours} here: {rule.reason}")
        elif rule.fate == "no_effect":
            finding = Finding("info", f"--{name}", f"has no effect here: {rule.reason}")
        elif bare or text.strip().lower() not in (*_NOTHING, *rule.neutral):
            finding = Finding("error", f"--{name}", f"is not supported: {rule.reason}", rule.fix)
        if finding is not None:
            findings[name] = finding
    return result, list(findings.values())


def _flags(tokens: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Each flag with the tokens that follow it; leading tokens without a flag come under ""."""
    groups: list[tuple[str, list[str]]] = []
    for token in tokens:
        if token.startswith("--"):
            groups.append((token, []))
        elif groups:
            groups[-1][1].append(token)
        else:
            groups.append(("", [token]))
    return groups


def _renamed(rule: Name, text: str, bare: bool) -> list[str]:
    """The tokens of a renamed flag."""
    if rule.value:
        return [f"--{rule.to}={rule.value}"] if bare or text.strip().lower() in _TRUE else []
    return [f"--{rule.to}"] if bare else [f"--{rule.to}={text}"]


def _with_our_values(flag: str, given: list[str], values: Mapping[str, Mapping[str, str]]) -> list[str]:
    """The tokens of a flag we take, with HF's spelling of its value replaced by ours."""
    if not flag:
        return given
    head, equals, attached = flag.partition("=")
    ours = values.get(head.removeprefix("--").replace("-", "_"), {})
    typed = attached if equals else (given[0] if given else "")
    if typed.lower() in ours and (equals or len(given) <= 1):
        return [f"{head}={ours[typed.lower()]}", *(given if equals else [])]
    return [flag, *given]
