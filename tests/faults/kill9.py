"""SIGKILL at random moments: a rank, its guard or the launcher dies; after the same command again the run ends as if nothing had been.

    python -m tests.faults.kill9 --seeds 50 --output benchmarks/results/kill9.md
    python -m tests.faults.kill9 --seeds 3 --engine fsdp

One line per seed, a table at the end; exit code 1 if any seed fails. A seed decides who dies and when: after a random step plus a random
part of a step's time, or, for every third seed, a few milliseconds after the temporary folder of a random checkpoint has appeared.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.faults import jobs
from tests.faults.fork_ranks import ForkServer, Life

VICTIMS = ("rank", "guard", "launcher")
GONE_WITHIN_S = 40.0
LIFE_LIMIT_S = 400.0


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a seed does.

    Attributes:
        victim: who is killed; `rank` tells which of several.
        step: the kill comes after this step was logged; or after so many saves have begun.
        while_saving: wait for a save instead of a step.
        delay: share of a step's time (of 30 ms when saving) between that and the kill.
    """

    victim: str
    rank: int
    step: int
    while_saving: bool
    delay: float


def plan_of(engine: str, seed: int) -> Plan:
    source = random.Random(f"{engine} {seed}")
    while_saving = seed % 3 == 2
    last = jobs.NUM_STEPS // jobs.SAVE_STEPS if while_saving else jobs.NUM_STEPS
    rank = source.randrange(jobs.ENGINES[engine].num_processes)
    return Plan(source.choice(VICTIMS), rank, source.randrange(1, last), while_saving, source.random())


@dataclasses.dataclass
class Outcome:
    """Of one seed.

    Attributes:
        killed_at: steps that had been logged when the victim died.
        resumed_at: step of the checkpoint that the next life went on from; 0 for none.
        in_save: a checkpoint was being written at that moment.
        gone_s: seconds until nothing of the job was running.
        problems: what was not as it must be.
    """

    plan: Plan
    killed_at: int = 0
    resumed_at: int = 0
    in_save: bool = False
    gone_s: float = 0.0
    problems: list[str] = dataclasses.field(default_factory=list)


def _num_logged(output: Path) -> int:
    with contextlib.suppress(OSError):
        return (output / "metrics.jsonl").read_bytes().count(b'"kind": "train"')
    return 0


def _wait_for_moment(plan: Plan, life: Life, output: Path) -> None:
    """Returns when the plan says so, or when the life has ended before."""
    deadline = time.monotonic() + LIFE_LIMIT_S
    seen: set[str] = set()
    while life.processes() and time.monotonic() < deadline:
        if plan.while_saving:
            seen |= {path.name for path in output.glob(".tmp-checkpoint-*")}
            if len(seen) >= plan.step:
                time.sleep(0.03 * plan.delay)
                return
        elif _num_logged(output) >= plan.step:
            rows = jobs.train_rows(output)
            time.sleep(float(rows[-1]["step_time_s"]) * plan.delay if rows else 0.0)
            return
        time.sleep(0.001 if plan.while_saving else 0.004)


def _kill(plan: Plan, life: Life) -> None:
    victim = {"rank": life.ranks[plan.rank], "guard": life.guards[plan.rank], "launcher": life.launcher}[plan.victim]
    with contextlib.suppress(ProcessLookupError):
        os.kill(victim, signal.SIGKILL)


def run_seed(server: ForkServer, inputs: Path, engine: str, seed: int, reference: Path, folder: Path) -> Outcome:
    """Kills, gives the same command again, and compares with the uninterrupted run's folder."""
    outcome = Outcome(plan_of(engine, seed))
    output, size = folder / "out", jobs.ENGINES[engine].num_processes
    command = jobs.arguments(inputs, output, engine)
    life = server.start(command, size, folder / "life-1")
    _wait_for_moment(outcome.plan, life, output)
    killed_s = time.monotonic()
    _kill(outcome.plan, life)
    outcome.killed_at = _num_logged(output)
    outcome.in_save = any(output.glob(".tmp-checkpoint-*"))
    try:
        life.wait(GONE_WITHIN_S)
    except AssertionError as error:
        outcome.problems.append(str(error))
        return outcome
    outcome.gone_s = time.monotonic() - killed_s
    if outcome.plan.victim == "rank":
        reason = json.loads((output / "exit.json").read_text())["reason"]
        if reason != f"rank {outcome.plan.rank} was killed by signal 9 (SIGKILL)":
            outcome.problems.append(f"exit.json says {reason}")
    again = server.start(command, size, folder / "life-2")
    codes = again.wait(LIFE_LIMIT_S)
    if codes != dict.fromkeys(range(size), 0):
        outcome.problems.append(f"the second life ended with {codes}\n{again.output()}")
        return outcome
    resumed = [row["step"] for row in _events(output, "resume")]
    outcome.resumed_at = resumed[-1] if resumed else 0
    outcome.problems += jobs.differences(jobs.train_rows(output), jobs.train_rows(reference), engine, inputs)
    outcome.problems += _check_folder(output, reference, engine, outcome.resumed_at)
    return outcome


def _events(output: Path, name: str) -> list[dict[str, Any]]:
    from harness.metrics import read_metrics

    return [row for row in read_metrics(output).of_kind("event") if row["event"] == name]


def _check_folder(output: Path, reference: Path, engine: str, resumed_at: int) -> list[str]:
    """What is wrong with a finished run's folder."""
    problems: list[str] = []
    second = jobs.NUM_STEPS - jobs.SAVE_STEPS
    if second < resumed_at < jobs.NUM_STEPS:  # the first life was asked to stop, and saved there
        second = resumed_at
    if jobs.exit_code(output) != 0:
        problems.append(f"exit.json says {jobs.exit_code(output)}")
    if (kept := jobs.complete_checkpoints(output)) != [jobs.NUM_STEPS, second]:
        problems.append(f"complete checkpoints are {kept}")
    if left := jobs.leftovers(output):
        problems.append(f"left behind: {left}")
    difference = jobs.weight_difference(output / "final", reference / "final")
    if difference > jobs.ENGINES[engine].relative_tolerance:
        problems.append(f"final weights differ by {difference:.2e}")
    return problems


def run_engine(server: ForkServer, inputs: Path, engine: str, seeds: Sequence[int], folder: Path) -> list[Outcome]:
    """The uninterrupted run, then each seed; prints a line for each."""
    size = jobs.ENGINES[engine].num_processes
    straight = server.start(jobs.arguments(inputs, folder / "straight", engine), size, folder / "life-straight")
    codes = straight.wait(LIFE_LIMIT_S)
    assert codes == dict.fromkeys(range(size), 0), straight.output()
    outcomes: list[Outcome] = []
    for seed in seeds:
        outcome = run_seed(server, inputs, engine, seed, folder / "straight", folder / f"seed-{seed}")
        outcomes.append(outcome)
        moment = f"{outcome.plan.victim} {outcome.plan.rank} killed after step {outcome.killed_at}{' while saving' * outcome.in_save}"
        went_on = f"all gone after {outcome.gone_s:.1f} s, resumed at {outcome.resumed_at}"
        print(f"{engine:7s} seed {seed:2d}: {moment}, {went_on}: {'; '.join(outcome.problems) or 'equal'}", flush=True)
    return outcomes


def table(results: dict[str, list[Outcome]], earlier: str = "") -> str:
    """Markdown, one row per engine.

    Args:
        earlier: a table whose rows of other engines are kept.
    """
    lines = [
        "| engine | ranks | equal | rank / guard / launcher killed | while saving | steps done again, most | all gone within |",
        "|---|---|---|---|---|---|---|",
    ]
    for engine, case in jobs.ENGINES.items():
        outcomes = results.get(engine)
        if not outcomes:
            lines += [line for line in earlier.splitlines() if line.startswith(f"| {engine} |")]
            continue
        good = sum(not outcome.problems for outcome in outcomes)
        kinds = " / ".join(str(sum(outcome.plan.victim == victim for outcome in outcomes)) for victim in VICTIMS)
        saving = sum(outcome.in_save for outcome in outcomes)
        again = max(outcome.killed_at - outcome.resumed_at for outcome in outcomes)
        gone = max(outcome.gone_s for outcome in outcomes)
        exact = "bit-equal" if case.relative_tolerance == 0 else f"within {case.relative_tolerance:.0e}"
        row = [engine, case.num_processes, f"{good}/{len(outcomes)} {exact}", kinds, saving, max(again, 0), f"{gone:.1f} s"]
        lines.append("| " + " | ".join(map(str, row)) + " |")
    return "\n".join(lines)


def report(results: dict[str, list[Outcome]], earlier: str) -> str:
    return f"""# SIGKILL at random moments

`python -m tests.faults.kill9 --seeds 50 --output benchmarks/results/kill9.md`: one epoch of {jobs.NUM_SAMPLES} samples in
{jobs.NUM_STEPS} steps on CPU ranks (gloo), attention dropout on, a checkpoint every {jobs.SAVE_STEPS} steps. Each seed kills a rank, its
guard or the launcher with SIGKILL at a random moment, then gives the same command again. "Equal" is: steps 1 to {jobs.NUM_STEPS} without
gap or repeat, every sample exactly once, losses, gradient norms, learning rates and final weights those of the uninterrupted run, the two
newest checkpoints complete, no temporary file.

"All gone within" counts from the kill until no process of the job runs.

{table(results, earlier)}
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="SIGKILL at random moments, and the same command again.")
    parser.add_argument("--seeds", type=int, default=20, help="seeds per engine")
    parser.add_argument("--first_seed", type=int, default=0)
    parser.add_argument("--engine", action="append", choices=list(jobs.ENGINES), help="only this one; may be repeated")
    parser.add_argument("--output", type=Path, help="Markdown file for the table; rows of engines that are not run stay")
    options = parser.parse_args(argv)
    results: dict[str, list[Outcome]] = {}
    with tempfile.TemporaryDirectory(prefix="kill9-") as name, ForkServer() as server:
        inputs = Path(name)
        server.call(jobs.make_inputs, name, output=inputs / "inputs.txt")
        for engine in options.engine or jobs.ENGINES:
            seeds = range(options.first_seed, options.first_seed + options.seeds)
            results[engine] = run_engine(server, inputs, engine, seeds, inputs / engine)
            print(json.dumps({engine: [not outcome.problems for outcome in results[engine]]}), flush=True)
            if options.output:  # after each engine: what is done is not lost
                earlier = options.output.read_text(encoding="utf-8") if options.output.exists() else ""
                options.output.write_text(report(results, earlier), encoding="utf-8")
    print(table(results))
    return int(any(outcome.problems for outcomes in results.values() for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
