"""What `--engine auto` starts on several GPUs: the engine and template that `harness plan` finds to be the fastest that fit.

Standard library only; the planner runs as a process of its own, with the interpreter that has the packages.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from launch.command import ROOT, script_value, yaml_scalars

# The run's flags that the planner takes under the same name.
SHARED_FLAGS = (
    "model_name_or_path",
    "config_name",
    "model_type",
    "config_overrides",
    "cache_dir",
    "trust_remote_code",
    "block_size",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "activation_checkpointing",
    "loss_chunk_size",
    "attn_implementation",
    "document_isolation",
    "use_liger_kernel",
    "optim",
    "optim_in_backward",
    "lora_r",
    "lora_dropout",
    "gpu_memory",
    "sequence_parallel_size",
)
_SWITCHES = ("trust_remote_code", "use_liger_kernel", "optim_in_backward")
_TRUE = ("", "true", "1", "yes")
TIMEOUT_S = 180.0


@dataclasses.dataclass(frozen=True)
class Choice:
    """Engine and template of a run; `note` is for the user, `spread` says that the run may spread itself further when memory runs out."""

    engine: str
    template: str | None
    note: str
    spread: bool = False


def flag_values(script_args: Sequence[str]) -> dict[str, str]:
    """The run's arguments that matter here, from its flags and from its YAML file; flags win."""
    config = script_value(script_args, "config")
    found = yaml_scalars(Path(config)) if config else {}
    names = (*SHARED_FLAGS, "precision", "bf16", "fp16", "gradient_checkpointing", "target_batch_size", "use_cpu")
    typed = {name: value for name in names if (value := script_value(script_args, name)) is not None}
    return {**found, **typed}


def planner_arguments(script_args: Sequence[str], num_processes: int) -> list[str] | None:
    """The planner's command line for a run; None where the run names no model."""
    values = flag_values(script_args)
    if not any(name in values for name in ("model_name_or_path", "config_name", "model_type")):
        return None
    words = ["--engine", "auto", "--num_gpus", str(num_processes), "--json"]
    for name in SHARED_FLAGS:
        value = values.get(name)
        if value is None:
            continue
        if name in _SWITCHES:
            words += [f"--{name}"] if value.lower() in _TRUE else []
        else:
            words += [f"--{name}={value}"]
    precision = next((name for name in ("bf16", "fp16") if values.get(name, "false").lower() in _TRUE), values.get("precision", "auto"))
    if precision != "auto":
        words.append(f"--precision={precision}")
    if values.get("gradient_checkpointing", "false").lower() in _TRUE and "activation_checkpointing" not in values:
        words.append("--activation_checkpointing=full")
    wanted, micro = values.get("target_batch_size", ""), values.get("per_device_train_batch_size", "8")
    if wanted.isdigit() and micro.isdigit():
        words.append(f"--gradient_accumulation_steps={max(1, int(wanted) // (int(micro) * num_processes))}")
    return words


def template_of(engine: str, settings: Mapping[str, Any]) -> str | None:
    """The file of ds_configs/ or fsdp_configs/ that a plan's settings stand for; None where the engine has none."""
    parameters, optimizer = settings["param_offload"], settings["optimizer_offload"]
    if engine == "fsdp":
        return "full_shard_offload" if parameters != "none" else ("full_shard" if settings["reshard_after_forward"] else "shard_grad_op")
    if not engine.startswith("zero"):
        return None
    if parameters == "nvme":
        return "zero3_nvme"
    if engine == "zero3" and optimizer == 1 and parameters == "cpu":
        return "zero3_offload"
    return "zero2_offload" if engine in ("zero1", "zero2") and optimizer == 1 else engine


def read_plan(text: str) -> Choice:
    """The choice in the planner's JSON; without one that fits, FSDP2 with offload, which needs the least of the cards.

    Raises:
        ValueError: not such a plan.
    """
    try:
        plan = json.loads(text)
        chosen = plan["chosen"]
        if chosen is None:
            return Choice("fsdp", "full_shard_offload", "auto: no engine is predicted to fit; fsdp with offload needs the least of a card")
        engine, template = chosen["engine"], template_of(chosen["engine"], chosen["settings"])
        if template == "zero2_offload":
            engine = "zero2"
        needs = f"{chosen['estimate']['expected_bytes'] / 2**30:.1f} GiB of a card, {chosen['tokens_per_s']:,.0f} tokens/s predicted"
        others = {each["name"] for each in plan["plans"] if each["chosen"] is None}
        note = f"auto: {engine}{f' ({template})' if template not in (None, engine) else ''}: {needs}"
        note += f"; does not fit: {', '.join(sorted(others))}" if others else ""
        return Choice(engine, template, note, spread=engine in ("ddp", "zero1", "zero2"))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a plan: {type(error).__name__} {error}") from None


def choose(
    python: str,
    script_args: Sequence[str],
    num_processes: int,
    environ: Mapping[str, str],
    run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run,
) -> Choice | None:
    """Asks the planner; None, where it has no answer, with nothing said: the run will report its own wrong input better.

    Args:
        python: interpreter that has the packages.
        run: stands for subprocess.run.
    """
    words = planner_arguments(script_args, num_processes)
    if words is None:
        return None
    try:
        done = run(
            [python, "-m", "harness.planner", *words],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env={**environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
        )
        return read_plan(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
