"""What happens to every name that `TrainingArguments` and HF's `run_clm.py` have had: taken, renamed, without effect, or refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from harness.findings import Finding


@dataclasses.dataclass(frozen=True)
class Name:
    """Fate of one name that run_clm.py does not take under that name.

    Attributes:
        fate: "renamed" to `to`, accepted with "no_effect", or "refused".
        reason: one clause for the user.
    """

    fate: Literal["renamed", "no_effect", "refused"]
    reason: str
    to: str = ""


NAMES: dict[str, Name] = {
    "evaluation_strategy": Name("renamed", "older name", "eval_strategy"),
    "no_cuda": Name("renamed", "older name", "use_cpu"),
    "per_gpu_train_batch_size": Name("renamed", "older name", "per_device_train_batch_size"),
    "per_gpu_eval_batch_size": Name("renamed", "older name", "per_device_eval_batch_size"),
    "dtype": Name("renamed", "other name", "torch_dtype"),
    "device": Name("refused", "a run places its model by --device_map cuda:N, cpu, balanced, ..."),
}


def translate(tokens: Sequence[str], known: Sequence[str]) -> tuple[list[str], list[Finding]]:
    """Rewrites a command line's older names to today's.

    Args:
        tokens: command-line tokens.
        known: the names that are taken as they are.

    Returns:
        The new tokens, and one finding per name that was renamed, has no effect, or is refused.
    """
    taken = set(known)
    result: list[str] = []
    findings: list[Finding] = []
    skipping = False
    for token in tokens:
        if not token.startswith("--"):
            if not skipping:
                result.append(token)
            continue
        skipping = False
        flag, equals, value = token.partition("=")
        name = flag[2:].replace("-", "_")
        rule = None if name in taken else NAMES.get(name)
        if rule is None:
            result.append(token)
        elif rule.fate == "renamed":
            result.append(f"--{rule.to}{equals}{value}")
        elif rule.fate == "no_effect":
            findings.append(Finding("info", f"--{name}", f"has no effect here: {rule.reason}"))
            skipping = True
        else:
            findings.append(Finding("error", f"--{name}", f"is not supported: {rule.reason}"))
            skipping = True
    return result, findings
