"""What `harness plan` says of somebody else's command, where its model, template and cards can be read.

The planner needs torch, so it is a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness.findings import is_count
from harness.foreign_command import flag_value
from harness.foreign_settings import ForeignSettings
from harness.machine import Machine

TIMEOUT_S = 120.0
_COUNT_FLAGS = ("num_processes", "nproc_per_node", "num_gpus", "nproc-per-node")


def num_ranks_of(settings: ForeignSettings, machine: Machine) -> int:
    """Ranks that the command will start: as it says, else one per card for the launchers that do so."""
    command = settings.command
    for name in _COUNT_FLAGS:
        if (value := flag_value(command.launcher_tokens, name)) is not None:
            return int(value) if is_count(value) else max(1, len(machine.gpus))
    if settings.yaml is not None and is_count(str(settings.yaml.content.get("num_processes", ""))):
        return int(settings.yaml.content["num_processes"])
    return max(1, len(machine.gpus)) if command.launcher in ("accelerate", "deepspeed") else 1


def planner_words(settings: ForeignSettings, num_ranks: int, gpu_memory: str | None) -> list[str] | None:
    """The planner's command line; None where the command does not say which model."""
    model = settings.value("model")
    if not isinstance(model, str):
        return None
    start = settings.start
    words = ["--json", "--engine", settings.engine, "--num_gpus", str(num_ranks), "--model", model]
    words += ["--per_device_train_batch_size", str(start.micro_batch_size), "--gradient_accumulation_steps", str(settings.accumulation)]
    # The model's own loss computes all logits of a micro-batch at once.
    words += ["--loss_chunk_size", "0", "--precision", _precision(settings)]
    if start.activation_checkpointing == "full":
        words += ["--activation_checkpointing", "full"]
    if start.optimizer_offload:
        words += ["--optimizer_offload", str(start.optimizer_offload)]
    if start.param_offload != "none":
        words += ["--param_offload", start.param_offload]
    tokens = settings.value("block_size")
    if is_count(str(tokens)):
        words += ["--block_size", str(tokens)]
    return [*words, *(["--gpu_memory", gpu_memory] if gpu_memory else [])]


def _precision(settings: ForeignSettings) -> str:
    words = settings.command.script_tokens
    for name in ("bf16", "fp16"):
        if (flag_value(words, name) or "").lower() not in ("false", "0", "no") and flag_value(words, name) is not None:
            return name
    mixed = flag_value(settings.command.launcher_tokens, "mixed_precision")
    mixed = mixed or (settings.yaml.content.get("mixed_precision") if settings.yaml is not None else None)
    return mixed if mixed in ("bf16", "fp16") else ("bf16" if settings.command.script.parser == "trl" else "fp32")


def plan(settings: ForeignSettings, machine: Machine, gpu_memory: str | None) -> tuple[dict[str, Any] | None, str]:
    """(the plan, a line about it): the plan is None where there is none, and the line says why."""
    if not machine.gpus and not gpu_memory:
        return None, "no plan: this machine shows no GPU (--gpu_memory 80GB plans for one)"
    words = planner_words(settings, num_ranks_of(settings, machine), gpu_memory)
    if words is None:
        return None, "no plan: the command does not say which model it trains"
    try:
        done = subprocess.run(
            [sys.executable, "-m", "harness.planner", *words],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            cwd=Path.cwd(),
            stdin=subprocess.DEVNULL,
        )
        found = json.loads(done.stdout)
        (only,) = found["plans"]
    except (OSError, ValueError, KeyError, subprocess.TimeoutExpired) as error:
        said = done.stderr.strip().splitlines()[-1:] if "done" in locals() else []
        return None, f"no plan: {said[0].strip() if said else type(error).__name__}"
    given = only["given"]
    fits = f"fits, with about {given['estimate']['expected_bytes'] / 2**30:.1f} GiB of a card"
    return found, f"plan: {settings.engine} as it is {given['misfit'] or fits}"
