"""All faults under all engines; the long form of tests/faults.

    python -m tests.faults --output benchmarks/results/faults.md
    python -m tests.faults --engine fsdp --fault "a rank hangs" --kills 0

One line a fault and engine, a table at the end; exit code 1 where one was not survived. `--kills` is the number of SIGKILLs at random
moments under each engine (tests.faults.kill9).
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.faults import jobs, kill9, scenarios
from tests.faults.fork_ranks import ForkServer

ROOT = Path(__file__).resolve().parents[2]
KILLED = "SIGKILL of a rank, its guard or the launcher"
HOST_MEMORY = "host memory full, a rank killed by the kernel"


@dataclasses.dataclass
class Row:
    """Of the table.

    Attributes:
        lost_steps: most that one fault has cost.
        lost_samples: of all.
        skipped: why the fault could not be made here.
    """

    fault: str
    engine: str
    tried: int = 0
    survived: int = 0
    lost_steps: int = 0
    lost_samples: int = 0
    skipped: str = ""

    def text(self) -> str:
        if self.skipped:
            return f"| {self.fault} | {self.engine} | 0 | | | | {self.skipped} |"
        note = _NOTES.get(self.fault, "")
        return f"| {self.fault} | {self.engine} | {self.tried} | {self.survived} | {self.lost_steps} | {self.lost_samples} | {note} |"


_NOTES = {
    "NaN in a step": "the update of that step is left out, by --nan_policy skip",
    "output folder removed": "the log goes with the folder: samples are those of the console",
    HOST_MEMORY: "in a memory group of its own",
}


def run_scenarios(server: ForkServer, inputs: Path, engine: str, faults: Sequence[str], folder: Path) -> list[Row]:
    """Each fault once."""
    reference = scenarios.uninterrupted(server, inputs, engine, folder / "reference")
    rows: list[Row] = []
    for number, fault in enumerate(faults):
        if scenarios.SCENARIOS[fault][1] > jobs.ENGINES[engine].num_processes:
            continue
        started = time.monotonic()
        case = scenarios.Case(server, inputs, engine, folder / f"fault-{number}", reference)
        problem = scenarios.run(fault, case)
        row = Row(fault, engine, 1, int(not problem), case.lost_steps, case.lost_samples or 0)
        if problem.startswith("not possible"):
            row.skipped = problem
        rows.append(row)
        said = problem or f"survived, {row.lost_steps} steps made again, {row.lost_samples} samples lost"
        print(f"{engine:7s} {fault}: {said} ({time.monotonic() - started:.0f} s)", flush=True)
    return rows


def run_kills(server: ForkServer, inputs: Path, engine: str, count: int, folder: Path) -> Row:
    """SIGKILLs at random moments. `run_engine` compares every sample, so that one that is survived has lost none."""
    outcomes = kill9.run_engine(server, inputs, engine, range(count), folder)
    again = max(outcome.killed_at - outcome.resumed_at for outcome in outcomes)
    return Row(KILLED, engine, count, sum(not outcome.problems for outcome in outcomes), max(0, again))


def run_host_memory() -> Row:
    """By pytest: the kernel's limit needs a group of its own for the whole job."""
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-m", "slow or not slow", "tests/faults/test_host_memory.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, env={**os.environ, "OMP_NUM_THREADS": "1"})
    print(done.stdout.splitlines()[-1] if done.stdout else done.stderr, flush=True)
    row = Row(HOST_MEMORY, "single", 1, int(done.returncode == 0))
    if found := re.search(r"SKIPPED.*?: (.*)", done.stdout):
        row.skipped = f"not possible: {found[1]}"
    return row


def report(rows: Sequence[Row], kills: int, seconds: float) -> str:
    tried, survived = sum(row.tried for row in rows if not row.skipped), sum(row.survived for row in rows if not row.skipped)
    samples = sum(row.lost_samples for row in rows)
    lines = "\n".join(row.text() for row in rows)
    return f"""# Faults

`python -m tests.faults --kills {kills} --output benchmarks/results/faults.md`: one epoch of {jobs.NUM_SAMPLES} samples in {jobs.NUM_STEPS}
steps on CPU ranks (gloo), a checkpoint every {jobs.SAVE_STEPS} steps. Each fault is made in a run of its own, and the same command is given
again where the job ended. Survived is: the user is told what the scenario in `tests/faults/scenarios.py` asks for, and the finished run has
the steps, samples, losses and weights of the run that nothing happened to (bit-equal; ZeRO within 1e-6).

Lost steps are updates that were made again, the most of one fault. Lost samples are those that no step had, or another step than in the
order of the run.

**{tried} faults tried, {survived} survived, {samples} samples lost**, in {seconds / 60:.0f} minutes.

| fault | engine | tried | survived | lost steps | lost samples | |
|---|---|---|---|---|---|---|
{lines}
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description="All faults under all engines.")
    parser.add_argument("--engine", action="append", choices=list(jobs.ENGINES), help="only this one; may be repeated")
    parser.add_argument("--fault", action="append", choices=list(scenarios.SCENARIOS), help="only this one; may be repeated")
    parser.add_argument("--kills", type=int, default=50, help="SIGKILLs under each engine")
    parser.add_argument("--output", type=Path, help="Markdown file for the table")
    options = parser.parse_args(argv)
    started = time.monotonic()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="faults-") as name, ForkServer() as server:
        inputs = Path(name)
        server.call(jobs.make_inputs, name, output=inputs / "inputs.txt")
        for engine in options.engine or jobs.ENGINES:
            folder = inputs / engine
            rows += run_scenarios(server, inputs, engine, options.fault or list(scenarios.SCENARIOS), folder)
            if options.kills:
                rows.append(run_kills(server, inputs, engine, options.kills, folder / "kills"))
            if options.output:  # after each engine: what is done is not lost
                options.output.write_text(report(rows, options.kills, time.monotonic() - started), encoding="utf-8")
    if not options.fault and not options.engine:
        rows.append(run_host_memory())
    text = report(rows, options.kills, time.monotonic() - started)
    if options.output:
        options.output.write_text(text, encoding="utf-8")
    print(text)
    return int(any(row.survived < row.tried for row in rows if not row.skipped))


if __name__ == "__main__":
    sys.exit(main())
