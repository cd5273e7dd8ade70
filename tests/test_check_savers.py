"""Flags that save memory in the optimizer, beside what they do not go with: refused with what to do instead."""

from __future__ import annotations

import dataclasses

import pytest

from tests.checking import AMPERE, CPU, ROOT, VOLTA, Rule, check_both, rule_id, run_findings

DS = f"--deepspeed {ROOT}/ds_configs/zero2.json"
FLAG, FSDP = "--optim_in_backward", "--fsdp full_shard"
IN_BACKWARD = f"{FLAG} --max_grad_norm 0"
HALVES = "--oom_ladder optimizer_bf16"
ONE_CARD = dataclasses.replace(AMPERE, gpus=AMPERE.gpus[:1])
RULES = [  # (flags, machine, processes) that break a rule and that do not
    Rule("--optim", "error", "not for DeepSpeed", (f"--optim adamw_bf16 {DS}", AMPERE, 8), ("--optim adamw_bf16", AMPERE, 8)),
    Rule("--optim", "error", "not for DeepSpeed", (f"--optim adamw_bf16 {DS}", CPU, 2), (f"--optim adamw_torch {DS}", CPU, 2)),
    Rule("--oom_ladder", "error", "has them so from", (f"{HALVES} --optim adamw_bf16", CPU, 1), (HALVES, CPU, 1)),
    Rule("--oom_ladder", "error", "has none of that kind", (f"{HALVES} --optim sgd", CPU, 1), (HALVES, CPU, 1)),
    Rule(FLAG, "error", "is not for DeepSpeed", (f"{IN_BACKWARD} {DS}", AMPERE, 8), (f"{IN_BACKWARD} {FSDP}", AMPERE, 8)),
    Rule(FLAG, "error", "is not for DDP", (IN_BACKWARD, AMPERE, 8), (f"{IN_BACKWARD} --use_cpu", AMPERE, 1)),
    Rule(FLAG, "error", "not for device maps", (f"{IN_BACKWARD} --device_map auto", AMPERE, 1), (IN_BACKWARD, CPU, 1)),
    Rule(FLAG, "error", "not for device maps", (IN_BACKWARD, AMPERE, 1), (IN_BACKWARD, ONE_CARD, 1)),
    Rule(FLAG, "error", "does not go with fp16", (f"{IN_BACKWARD} {FSDP} --fp16", VOLTA, 2), (f"{IN_BACKWARD} --precision fp32", CPU, 1)),
    Rule(FLAG, "error", "does not go with fp16", (f"{IN_BACKWARD} {FSDP}", VOLTA, 2), (f"{IN_BACKWARD} {FSDP} --bf16", AMPERE, 8)),
    Rule(FLAG, "error", "weights live in host memory", (f"{IN_BACKWARD} --fsdp 'full_shard offload'", AMPERE, 8), ("", AMPERE, 8)),
    Rule(FLAG, "error", "cannot leave out", (f"{IN_BACKWARD} --optim sgd", CPU, 1), (f"{IN_BACKWARD} --optim adamw_bf16", CPU, 1)),
    Rule(FLAG, "error", "--max_grad_norm 1:", (FLAG, CPU, 1), (IN_BACKWARD, CPU, 1)),
    Rule(FLAG, "error", "with 4 micro-batches", (f"{IN_BACKWARD} --gradient_accumulation_steps 4", CPU, 1), (IN_BACKWARD, CPU, 1)),
    Rule(
        FLAG,
        "error",
        "with 2 micro-batches",
        (f"{IN_BACKWARD} {FSDP} --target_batch_size 32", CPU, 2),
        (f"{IN_BACKWARD} {FSDP} --target_batch_size 16", CPU, 2),
    ),
    Rule(
        "--oom_ladder",
        "error",
        "param_offload frees nothing",
        (f"{IN_BACKWARD} {FSDP} --oom_ladder gradient_checkpointing param_offload", CPU, 2),
        (f"{FSDP} --oom_ladder gradient_checkpointing param_offload", CPU, 2),
    ),
]


@pytest.mark.parametrize("rule", RULES, ids=rule_id)
def test_savers(rule: Rule) -> None:
    check_both(rule, lambda case: run_findings(case[0], machine=case[1], num_processes=case[2]))
