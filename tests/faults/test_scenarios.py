"""Faults around a job, each under one engine; under all engines: `python -m tests.faults`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults import jobs, scenarios
from tests.faults.fork_ranks import ForkServer

# What the short form leaves out is covered by a neighbour: a flipped bit by a cut file, SIGTERM by the launchers' own tests, a dead worker
# by the loader's, a folder that cannot be written by those of wrong input.
SHORT = {
    "launcher killed": "single",
    f"SIGSTOP for {scenarios.STOPPED_S:.0f} s": "fsdp",
    "a rank hangs": "ddp",
    "a rank aborts": "single",
    "a slow rank": "ddp",
    "full disk while saving": "single",
    "output folder removed": "ddp",
    "second job in the folder": "ddp",
    "a rank never arrives": "ddp",
    "truncated checkpoint file": "single",
    "training file changed": "single",
    "clock of one rank a day back": "single",
    "NaN in a step": "single",
}
SHORT_STOP_S = 3.0


@pytest.mark.parametrize(
    ("fault", "engine"),
    [
        *SHORT.items(),
        *(pytest.param(name, "ddp", marks=pytest.mark.slow) for name in scenarios.SCENARIOS if name not in SHORT),
    ],
)
def test_a_fault_costs_no_sample(
    fault: str, engine: str, server: ForkServer, inputs: Path, references: Callable[[str], Path], tmp_path: Path
) -> None:
    case = scenarios.Case(server, inputs, engine, tmp_path, references(engine), stopped_s=SHORT_STOP_S)
    problem = scenarios.run(fault, case)
    if problem.startswith("not possible"):
        pytest.skip(problem)
    assert problem == ""
    assert case.lost_samples == (None if fault == "output folder removed" else 0)  # with the folder went the log that shows them
    assert case.lost_steps <= 2 * jobs.SAVE_STEPS
