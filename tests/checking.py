"""What the checker's tests share: machines to check for, and rules given as one input that breaks them and one that does not."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.check_config import check_run
from harness.findings import Finding
from harness.machine import GIB, Gpu, Machine
from harness.parsing import parse_args

ROOT = Path(__file__).resolve().parent.parent
CPU = Machine(num_cpus=4, host_memory_bytes=64 * GIB)
AMPERE = Machine((Gpu("A100", 80 * GIB, (8, 0)),) * 8, num_cpus=64, host_memory_bytes=512 * GIB)
VOLTA = Machine((Gpu("V100", 16 * GIB, (7, 0)),) * 2, num_cpus=16, host_memory_bytes=64 * GIB)


@dataclasses.dataclass(frozen=True)
class Rule:
    """One rule: the finding that `bad` gives and `good` does not."""

    key: str
    severity: str
    text: str
    bad: Any
    good: Any


def found(findings: list[Finding], rule: Rule) -> bool:
    return any(
        finding.key == rule.key and finding.severity == rule.severity and rule.text in f"{finding.message} -> {finding.fix}"
        for finding in findings
    )


def check_both(rule: Rule, check: Callable[[Any], list[Finding]]) -> None:
    bad, good = check(rule.bad), check(rule.good)
    assert found(bad, rule), [finding.line() for finding in bad]
    leftover = [finding.line() for finding in good if finding.key == rule.key and rule.severity == finding.severity]
    assert leftover == []


def rule_id(rule: Rule) -> str:
    return f"{rule.key}:{rule.text}".replace(" ", "_")[:60]


def zero(stage: Any = 3, **values: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **values}}


def optimizer(**params: Any) -> dict[str, Any]:
    return zero() | {"optimizer": {"type": "AdamW", "params": params}}


def fsdp(top: dict[str, Any] | None = None, **values: Any) -> dict[str, Any]:
    block = {"fsdp_version": 2, "fsdp_cpu_ram_efficient_loading": False, **{f"fsdp_{key}": value for key, value in values.items()}}
    return {"distributed_type": "FSDP", "num_processes": 4, "fsdp_config": block, **(top or {})}


def sizes(replicate: int, shard: int, **others: int) -> dict[str, Any]:
    values = {"dp_replicate_size": replicate, "dp_shard_size": shard, **others}
    return {"parallelism_config": {f"parallelism_config_{key}": value for key, value in values.items()}}


def deepspeed(top: dict[str, Any] | None = None, **values: Any) -> dict[str, Any]:
    return {"distributed_type": "DEEPSPEED", "num_processes": 4, "deepspeed_config": values, **(top or {})}


GPU4 = {"distributed_type": "MULTI_GPU", "num_processes": 4}


def run_findings(flags: str, machine: Machine = AMPERE, num_processes: int = 8, **environ: str) -> list[Finding]:
    tokens = shlex.split(flags)
    if not {"--model_type", "--model_name_or_path", "--config_name"} & set(tokens):
        tokens += ["--model_type", "llama"]
    if "--output_dir" not in tokens:
        tokens += ["--output_dir", "/var/tmp/harness-checks/out"]
    return check_run(parse_args(tokens), num_processes=num_processes, environ=environ, machine=machine)
