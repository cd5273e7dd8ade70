"""Flags that save memory in the optimizer, beside what they do not go with: refused with what to do instead."""

from __future__ import annotations

import pytest

from tests.checking import AMPERE, CPU, ROOT, Rule, check_both, rule_id, run_findings

DS = f"--deepspeed {ROOT}/ds_configs/zero2.json"
RULES = [  # (flags, machine, processes) that break a rule and that do not
    Rule("--optim", "error", "not for DeepSpeed", (f"--optim adamw_bf16 {DS}", AMPERE, 8), ("--optim adamw_bf16", AMPERE, 8)),
    Rule("--optim", "error", "not for DeepSpeed", (f"--optim adamw_bf16 {DS}", CPU, 2), (f"--optim adamw_torch {DS}", CPU, 2)),
]


@pytest.mark.parametrize("rule", RULES, ids=rule_id)
def test_savers(rule: Rule) -> None:
    check_both(rule, lambda case: run_findings(case[0], machine=case[1], num_processes=case[2]))
