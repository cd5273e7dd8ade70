"""What can go wrong around a job, one function a fault: it makes the fault, gives the same command again where the job ended, and compares.

Every scenario ends with a finished run whose steps, samples, losses and weights are those of the uninterrupted one; `lost_steps` of them
were made twice. What the user must be told is checked as well. `python -m tests.faults` runs them all, tests/faults/test_scenarios.py some.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.faults import jobs
from tests.faults.fork_ranks import ForkServer, Life
from tests.faults.inject import SLOW_S

LIMIT_S = 300.0
SHORT_TIMEOUT_S = 5
STOPPED_S = 20.0


class NotPossibleError(Exception):
    """This machine does not let the fault be made."""


@dataclasses.dataclass
class Case:
    """One fault under one engine.

    Attributes:
        folder: of this case; its run is in `output`.
        reference: folder of the uninterrupted run.
        lives: started so far.
        problems: what was not as it must be.
        lost_steps: made again by a later life.
        lost_samples: had by no step of the finished run; None where its log is not there.
        stopped_s: how long a stopped rank stands still.
    """

    server: ForkServer
    inputs: Path
    engine: str
    folder: Path
    reference: Path
    lives: list[Life] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)
    lost_steps: int = 0
    lost_samples: int | None = None
    stopped_s: float = STOPPED_S

    @property
    def size(self) -> int:
        return jobs.ENGINES[self.engine].num_processes

    @property
    def output(self) -> Path:
        return self.folder / "out"

    def start(self, *more: str, fault: str = "") -> Life:
        environment = {"HARNESS_TEST_FAULT": fault} if fault else {}
        command = jobs.arguments(self.inputs, self.output, self.engine, *more)
        self.lives.append(self.server.start(command, self.size, self.folder / f"life-{len(self.lives) + 1}", environment=environment))
        return self.lives[-1]

    def run(self, code: int, *more: str, fault: str = "") -> Life:
        """A life to its end; a problem where a rank ends with another code (None of ranks that a signal ended)."""
        life = self.start(*more, fault=fault)
        self.end(life, code)
        return life

    def end(self, life: Life, code: int) -> None:
        codes = life.wait(LIMIT_S)
        if jobs.exit_code(self.output) != code or (code in (0, 2, 75) and codes != dict.fromkeys(range(self.size), code)):
            self.problems.append(f"codes {codes}, exit.json {jobs.exit_code(self.output)} instead of {code}\n{life.output()[-3000:]}")

    def expect(self, what: str, found: object, wanted: object) -> None:
        if found != wanted:
            self.problems.append(f"{what}: {found!r} instead of {wanted!r}")

    def expect_text(self, pattern: str, text: str) -> None:
        if not re.search(pattern, text):
            self.problems.append(f"nothing like {pattern!r} in\n{text[-2000:]}")

    @property
    def reason(self) -> str:
        return str(json.loads((self.output / "exit.json").read_text())["reason"])

    def events(self, name: str) -> list[dict[str, Any]]:
        from harness.metrics import read_metrics

        return [row for row in read_metrics(self.output).of_kind("event") if row["event"] == name]

    def finish(self, *more: str) -> None:
        """The same command again, to the end; counts what it makes again."""
        has_log = (self.output / "metrics.jsonl").exists()
        reached = max((row["step"] for row in jobs.train_rows(self.output)), default=0) if has_log else 0
        before = len(self.events("resume")) if has_log else 0
        self.run(0, *more)
        resumed = [row["step"] for row in self.events("resume")][before:]
        self.lost_steps += reached - (resumed[0] if resumed else 0)

    def count_samples(self) -> None:
        self.lost_samples = jobs.lost_samples(jobs.train_rows(self.output), self.engine, self.inputs)

    def compare(self) -> None:
        """With the uninterrupted run."""
        self.count_samples()
        if self.problems:
            return
        self.problems += jobs.differences(jobs.train_rows(self.output), jobs.train_rows(self.reference), self.engine, self.inputs)
        difference = jobs.weight_difference(self.output / "final", self.reference / "final")
        if difference > jobs.ENGINES[self.engine].relative_tolerance:
            self.problems.append(f"final weights differ by {difference:.2e}")
        if left := jobs.leftovers(self.output):
            self.problems.append(f"left behind: {left}")


def wait_for_step(life: Life, step: int) -> None:
    life.wait_for(f"train | step: {step}/{jobs.NUM_STEPS} ")


def _stopped(case: Case, step: int = 9) -> None:
    """A first life that is asked to stop and saves."""
    life = case.start()
    wait_for_step(life, step)
    os.kill(life.guards[-1], signal.SIGTERM)
    case.end(life, 75)


# ---- the faults


def asked_to_stop(case: Case) -> None:
    _stopped(case)
    case.expect("reason", re.sub("SIGTERM|a signal on another rank", "...", case.reason), "stopped by ... after a complete save")
    case.finish()
    case.compare()


def launcher_gone(case: Case) -> None:
    """The launcher is killed: the run stops after a save, and says why."""
    life = case.start()
    wait_for_step(life, 5)
    os.kill(life.launcher, signal.SIGKILL)
    life.wait(LIMIT_S)
    case.expect("code", jobs.exit_code(case.output), 75)
    case.expect("reason", case.reason, "stopped after a complete save, because the launcher is gone")
    case.finish()
    case.compare()


def stands_still(case: Case) -> None:
    """A rank is stopped for a while: it is waited for."""
    life = case.start()
    wait_for_step(life, 3)
    os.kill(life.ranks[-1], signal.SIGSTOP)
    time.sleep(case.stopped_s)
    os.kill(life.ranks[-1], signal.SIGCONT)
    case.end(life, 0)
    case.compare()


def damaged_checkpoint(case: Case, damage: str = "truncated") -> None:
    """The newest checkpoint is damaged: the one before is taken, and that is said."""
    _stopped(case)
    newest, older = jobs.complete_checkpoints(case.output)
    files = sorted((case.output / f"checkpoint-{newest}" / "state").rglob("*"), key=lambda path: path.stat().st_size * path.is_file())
    content = bytearray(files[-1].read_bytes())
    content[len(content) // 2] ^= 4
    files[-1].write_bytes(content[: len(content) // 2] if damage == "truncated" else content)
    case.finish()
    name = files[-1].relative_to(case.output / f"checkpoint-{newest}")
    skipped = [(Path(row["path"]).name, row["reason"].startswith(str(name))) for row in case.events("checkpoint_skipped")]
    case.expect("skipped", skipped, [(f"checkpoint-{newest}", True)])
    case.expect("resumed at", [row["step"] for row in case.events("resume")], [older])
    case.compare()


def flipped_bit(case: Case) -> None:
    damaged_checkpoint(case, "a bit flipped")


def changed_data(case: Case) -> None:
    """The training file changes between two starts: refused with the reason; with the old one the run goes on."""
    _stopped(case)
    data, kept = case.inputs / "data.jsonl", case.folder / "data.jsonl"
    shutil.copy2(data, kept)
    try:
        rows = data.read_text().splitlines()
        data.write_text("\n".join([rows[1], rows[0], *rows[2:]]) + "\n")
        life = case.run(2)
        case.expect_text("the training data or its preparation has changed", life.output())
    finally:
        os.replace(kept, data)
    case.finish()
    case.compare()


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    folder.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, text=True)
    if mounted.returncode != 0:
        raise NotPossibleError(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def full_disk(case: Case) -> None:
    """The disk is full while a checkpoint is due: older ones stay, training goes on, and later ones are written where there is room."""
    with small_disk(case.output, "8m"):
        life = case.start()
        wait_for_step(life, 5)
        filler = case.output / ".filler"
        with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
            while file.write(b"0" * 4096):
                pass
        life.wait_for(f"checkpoint of step {2 * jobs.SAVE_STEPS} was not written")
        filler.unlink()
        case.end(life, 0)
        case.expect("complete", jobs.complete_checkpoints(case.output)[0], jobs.NUM_STEPS)
        rows = {row["step"] for row in jobs.train_rows(case.output)}
        # What was logged while there was no room is on the console; the run itself has every step.
        case.expect("last step", max(rows), jobs.NUM_STEPS)
        case.count_samples()
        difference = jobs.weight_difference(case.output / "final", case.reference / "final")
        case.expect("final weights equal", difference <= jobs.ENGINES[case.engine].relative_tolerance, True)


def read_only_folder(case: Case) -> None:
    """The output folder cannot be written: refused before anything is loaded; once it can, the run begins."""
    with small_disk(case.output, "8m"):
        subprocess.run(["mount", "-o", "remount,ro", str(case.output)], check=True)
        life = case.start()
        case.expect("codes", life.wait(LIMIT_S), dict.fromkeys(range(case.size), 2))
        case.expect_text(f"cannot write to {case.output}", life.output())
        subprocess.run(["mount", "-o", "remount,rw", str(case.output)], check=True)
        case.run(0)
        case.compare()


def second_job(case: Case) -> None:
    """A second job in the folder is refused, and the first one goes on."""
    first = case.start()
    wait_for_step(first, 1)
    second = case.start()
    case.expect("codes of the second", second.wait(LIMIT_S), dict.fromkeys(range(case.size), 2))
    case.expect_text(f"another run is writing to {re.escape(str(case.output))}", second.output())
    case.end(first, 0)
    case.compare()


def vanished_folder(case: Case) -> None:
    """The output folder is removed while training: what was trained is not thrown away, and the end says what is missing."""
    life = case.start()
    life.wait_for(f"checkpoint {case.output}/checkpoint-{jobs.SAVE_STEPS} complete")
    shutil.rmtree(case.output)
    life.wait(LIMIT_S)
    printed = life.output()
    case.expect_text(f"checkpoint of step {jobs.NUM_STEPS} was not written: {re.escape(str(case.output))} is gone", printed)
    case.expect_text(rf"train \| step: {jobs.NUM_STEPS}/{jobs.NUM_STEPS} ", printed)
    case.expect("code", jobs.exit_code(case.output), 1)
    why = f"the checkpoint of step {jobs.NUM_STEPS} was not written ({case.output} is gone); newest complete one: none"
    case.expect("reason", case.reason, f"NotSavedError: {why}")
    difference = jobs.weight_difference(case.output / "final", case.reference / "final")
    case.expect("final weights equal", difference <= jobs.ENGINES[case.engine].relative_tolerance, True)


def never_arrives(case: Case) -> None:
    """A rank that is never started is named within the limit; with all ranks the same command runs."""
    case.output.mkdir(parents=True)
    command = jobs.arguments(case.inputs, case.output, case.engine, "--ddp_timeout", str(SHORT_TIMEOUT_S))
    started = time.monotonic()
    life = case.server.start(command, case.size, case.folder / "without", ranks_started=range(case.size - 1))
    case.expect("codes", life.wait(60), dict.fromkeys(range(case.size - 1), 1))
    case.expect("took about the limit", SHORT_TIMEOUT_S < time.monotonic() - started < SHORT_TIMEOUT_S + 25, True)
    late = f"rank {case.size - 1} of {case.size} did not arrive within {SHORT_TIMEOUT_S} s (--ddp_timeout): see what it printed"
    case.expect("reason", case.reason, late)
    case.finish()
    case.compare()


def clock_forward(case: Case) -> None:
    case.run(0, fault=" ".join(f"forward:{rank}:6" for rank in range(case.size)))
    case.compare()


def clock_back(case: Case) -> None:
    """A day back on all ranks, and on one alone."""
    case.run(0, fault=f"back:{case.size - 1}:6")
    seconds = case.events("save")[-1]["duration_s"] if case.events("save") else 0.0
    case.expect("a save took from 0 to 60 s", 0 <= seconds < 60, True)
    case.compare()


def slow_rank(case: Case) -> None:
    """Named in the log, and waited for."""
    rank = case.size - 1
    life = case.run(0, fault=f"slow:{rank}:4")
    case.expect_text(rf"rank {rank} is the slowest: others wait for it \d+\.\d+ s of each step of \d+\.\d+ s", life.output())
    lags = [row["lag_s"] for row in jobs.train_rows(case.output) if row.get("slowest_rank") == rank and row["step"] > 4]
    case.expect("most steps have a lag of about its sleep", sum(SLOW_S / 2 < lag < 4 * SLOW_S for lag in lags) > jobs.NUM_STEPS // 2, True)
    case.compare()


def _named(case: Case, life: Life, rank: int, pattern: str) -> None:
    """Of a hung rank: its name and place are in the reason and, for all ranks, in exit.json and in files."""
    report = json.loads((case.output / "exit.json").read_text())
    case.expect_text(pattern, report["reason"])
    case.expect("ranks in exit.json", sorted(report.get("ranks", {})), [str(each) for each in range(case.size)])
    case.expect_text(rf"rank {rank} ", report.get("ranks", {}).get(str(rank), ""))
    case.expect_text(rf"rank {rank} ", life.output())


def hangs(case: Case) -> None:
    """A rank hangs in Python: after the limit it is named with its place in the code, and all end; the same command goes on."""
    rank = case.size - 1
    started = time.monotonic()
    life = case.run(1, "--ddp_timeout", str(SHORT_TIMEOUT_S), fault=f"hang:{rank}:6")
    case.expect("over within a minute", time.monotonic() - started < 60, True)
    _named(case, life, rank, rf"; rank {rank} left '.*' \d+\.\d s ago, is at faults/inject\.py:\d+ raise_in, from harness/\w+\.py:\d+ ")
    case.expect_text(r"raise_in", (case.output / f"stacks-rank-{rank}.txt").read_text())
    case.finish("--ddp_timeout", "60")
    case.compare()


def stopped_for_good(case: Case) -> None:
    rank = case.size - 1
    life = case.start("--ddp_timeout", str(SHORT_TIMEOUT_S))
    wait_for_step(life, 5)
    os.kill(life.ranks[rank], signal.SIGSTOP)
    case.end(life, 1)
    _named(case, life, rank, rf"; rank {rank} is stopped by a signal such as SIGSTOP")
    case.finish("--ddp_timeout", "60")
    case.compare()


def aborts(case: Case) -> None:
    """A rank aborts in a library: the reason says where, and its stacks are kept."""
    rank = case.size - 1
    case.run(1, fault=f"abort:{rank}:6")
    place = r"at faults/inject\.py:\d+ raise_in, from harness/\w+\.py:\d+ \w+"
    case.expect_text(rf"^rank {rank} was killed by signal 6 \(SIGABRT\) {place}; the stacks .* stacks-rank-{rank}\.txt", case.reason)
    case.expect_text("Fatal Python error: Aborted", (case.output / f"stacks-rank-{rank}.txt").read_text())
    case.finish()
    case.compare()


def not_a_number(case: Case) -> None:
    """The gradients of one step are NaN: its update is left out, which is said, and the run goes on with finite weights."""
    life = case.run(0, fault=f"nan:{case.size - 1}:6")
    case.expect_text("1 of the last 1 updates were left out: non-finite gradients", life.output())
    rows, reference = jobs.train_rows(case.output), jobs.train_rows(case.reference)
    case.expect("steps", [row["step"] for row in rows], list(range(1, jobs.NUM_STEPS + 1)))
    case.expect("samples", [row["num_label_tokens"] for row in rows], [row["num_label_tokens"] for row in reference])
    case.expect("left out", rows[-1]["num_skipped_steps"], 1)
    finite = [row["loss"] is not None and abs(row["loss"]) < 100 for row in rows]
    case.expect("finite losses", [row["step"] for row, fine in zip(rows, finite, strict=True) if not fine], [6])
    case.count_samples()
    case.lost_steps = 1


def dead_loader_worker(case: Case) -> None:
    case.run(1, "--dataloader_num_workers", "1", fault=f"loader:{case.size - 1}:6")
    case.expect_text("a data loader worker died", case.reason)
    case.finish("--dataloader_num_workers", "1")
    case.compare()


# name of the fault in the table: the scenario, and whether it takes several ranks
SCENARIOS: dict[str, tuple[Callable[[Case], None], int]] = {
    "SIGTERM": (asked_to_stop, 1),
    "launcher killed": (launcher_gone, 1),
    f"SIGSTOP for {STOPPED_S:.0f} s": (stands_still, 2),
    "SIGSTOP for good": (stopped_for_good, 2),
    "a rank hangs": (hangs, 2),
    "a rank aborts": (aborts, 1),
    "a slow rank": (slow_rank, 2),
    "full disk while saving": (full_disk, 1),
    "read-only output folder": (read_only_folder, 1),
    "output folder removed": (vanished_folder, 1),
    "second job in the folder": (second_job, 1),
    "a rank never arrives": (never_arrives, 2),
    "truncated checkpoint file": (damaged_checkpoint, 1),
    "flipped bit in a checkpoint": (flipped_bit, 1),
    "training file changed": (changed_data, 1),
    "clock a day forward": (clock_forward, 1),
    "clock of one rank a day back": (clock_back, 1),
    "NaN in a step": (not_a_number, 1),
    "data loader's worker killed": (dead_loader_worker, 1),
}


def run(name: str, case: Case) -> str:
    """One scenario by its name in the table. Returns "" where all was as it must be, "not possible: ..." or what was not."""
    scenario, _ = SCENARIOS[name]
    try:
        scenario(case)
    except NotPossibleError as error:
        return f"not possible: {error}"
    except Exception as error:
        case.problems.append(f"{type(error).__name__}: {error}")
    finally:
        for life in case.lives:
            life.kill()
    return "; ".join(case.problems)


def uninterrupted(server: ForkServer, inputs: Path, engine: str, folder: Path) -> Path:
    """Folder of the run that nothing happens to."""
    size = jobs.ENGINES[engine].num_processes
    life = server.start(jobs.arguments(inputs, folder / "out", engine), size, folder / "life")
    assert life.wait(LIMIT_S) == dict.fromkeys(range(size), 0), life.output()
    return folder / "out"
