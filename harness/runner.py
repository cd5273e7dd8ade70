"""Runs another training script under the memory ladder: `harness run [options] -- LAUNCH COMMAND`.

    harness run -- accelerate launch --config_file x.yaml train.py --per_device_train_batch_size 8 --output_dir out
    harness run --ladder micro_batch,gradient_checkpointing -- deepspeed --num_gpus=4 train.py --deepspeed ds.json ...
    harness run -- torchrun --nproc_per_node 4 train.py ...        harness run -- python train.py ...

The command is started as it is. Where a rank runs out of memory, all ranks are ended within seconds (not after NCCL's time limit), and the
command is started again one rung lower, from its newest whole checkpoint:

    harness run: rank 1 ran out of memory after 74 s: CUDA out of memory. Tried to allocate 2.00 GiB
    harness run: attempt 2 of 10: micro_batch_size 8 -> 4
      - --per_device_train_batch_size 8
      + --per_device_train_batch_size 4
      - --gradient_accumulation_steps 1
      + --gradient_accumulation_steps 2
      + --resume_from_checkpoint out/checkpoint-60
      + PYTORCH_ALLOC_CONF=expandable_segments:True

Rungs are edits of flags, of copies of the DeepSpeed JSON, accelerate's YAML or the script's own settings file, and of the environment; the
user's files are never written to. Every other failure ends with the command's own exit code and is not tried again. Copies and the record
(record.json) are in the folder OUTPUT_DIR-harness_run, or --run_dir.

For one machine. Imports no torch.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import math
import os
import secrets
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from harness import build_locks, cgroups, disk_room, foreign_plan, rank_hook
from harness.check_launch import is_our_script
from harness.checkpoint_files import write_json
from harness.findings import WITHOUT_FLAG, Finding, FindingParser, UserError, format_findings, printable, user_error
from harness.foreign_checkpoints import latest_complete
from harness.foreign_command import NAMES, Command, read_command
from harness.foreign_settings import Edited, ForeignSettings, settings_json
from harness.ladder import MemorySettings, Rung, describe_change, next_settings, seen_memory, worst_report
from harness.machine import detect_machine
from harness.partition import size_problem
from harness.processes import Ended, Job
from harness.user_files import named_path

RECORD = "record.json"
FINISHED, FAILED, STOPPED, OUT_OF_MEMORY = "finished", "failed", "stopped", "out of memory"
# Between the first report of a rank and the end of all: ranks that ran out of memory at the same time report too.
GATHER_S = 0.5


def say(text: str) -> None:
    _print(f"harness run: {text}")


def _print(line: str) -> None:
    """To the errors; that nobody reads them, or that they go to a full disk, ends no training."""
    with contextlib.suppress(OSError):
        print(printable(line), file=sys.stderr, flush=True)


# ---- the command line


def _parser() -> FindingParser:
    usage = "harness run [options] -- LAUNCH COMMAND"
    layout = argparse.RawDescriptionHelpFormatter
    parser = FindingParser(prog="harness run", usage=usage, description=__doc__, formatter_class=layout)
    add = parser.add_argument
    add("--ladder", default="", help="rungs in your order: micro_batch,gradient_checkpointing,optimizer_offload,param_offload")
    add("--max_attempts", type=int, default=10, help="starts of the command in all")
    add("--names", nargs="+", default=[], metavar="WHAT=NAME", help=f"flags of the script that have other names: {', '.join(NAMES)}")
    add("--run_dir", type=named_path, help="folder for copies and the record (default: OUTPUT_DIR-harness_run, else ./harness_run)")
    add("--gpu_memory", help="of a card, for the plan: 80GB (default: this machine's)")
    add("--no_plan", action="store_true", help="do not ask the planner; rungs are taken in the ladder's order")
    add("--grace_s", type=float, default=35.0, help="seconds the processes get to stop after an interrupt")
    add("--dry_run", action="store_true", help="print the plan and every rung's change; start nothing")
    return parser


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """(our options, the command).

    Raises:
        UserError: unknown options, or no command.
    """
    tokens = list(argv)
    at = tokens.index("--") if "--" in tokens else len(tokens)
    options, found = _parser().read(tokens[:at])
    words = [finding.key for finding in found if finding.message == WITHOUT_FLAG]
    if words and at == len(tokens):
        begin = tokens.index(words[0])
        fix = shlex.join(["harness", "run", *tokens[:begin], "--", *tokens[begin:]])
        raise user_error("harness run", f"has no -- before the command {words[0]}", fix)
    if options.max_attempts < 1:
        found.append(Finding("error", "--max_attempts", f"must be at least 1, not {options.max_attempts}"))
    if not 0 <= options.grace_s < math.inf:
        found.append(Finding("error", "--grace_s", f"must be a number of seconds, 0 or more, not {options.grace_s}", "--grace_s 35"))
    if options.gpu_memory is not None and (problem := size_problem(options.gpu_memory)):
        found.append(Finding("error", "--gpu_memory", problem, "write for example 80GB or 79.1GiB"))
    for pair in options.names:
        what, _, name = pair.partition("=")
        if what not in NAMES or not name:
            found.append(Finding("error", "--names", f"'{pair}' is not one of ours = one of yours", f"use {', '.join(NAMES)}"))
    if found:
        raise UserError(found)
    return options, tokens[at + 1 :]


# ---- one start of the command


@dataclasses.dataclass(frozen=True)
class Attempt:
    """How one start of the command ended.

    Attributes:
        ended: the launcher's end.
        seconds: wall time.
        reports: of the ranks that ran out of memory.
        num_ranks: ranks that were there.
        has_hook: the hook was in at least one of them.
        ended_after_s: from the first report until no process was left.
    """

    ended: Ended
    seconds: float
    reports: list[dict[str, Any]]
    num_ranks: int
    has_hook: bool
    ended_after_s: float | None = None


def start(edited: Edited, environ: Mapping[str, str], grace_s: float) -> Attempt:
    """Runs the command to its end; where a rank runs out of memory, that is soon.

    Raises:
        UserError: it cannot be started.
    """
    with TemporaryDirectory(prefix="harness-run-") as temporary:
        hook, reports = Path(temporary) / "hook", Path(temporary) / "reports"
        rank_hook.install_into(hook)
        reports.mkdir()

        def is_lost() -> bool:
            if not rank_hook.told(reports, rank_hook.OUT_OF_MEMORY):
                return False
            time.sleep(GATHER_S)
            return True

        build_locks.clear_abandoned_locks()
        num_kernel_kills, started = cgroups.num_kernel_kills(), time.monotonic()
        own = {**environ, **edited.environ}
        try:
            ended = Job(edited.tokens, {**own, **rank_hook.environment(hook, reports, own)}, grace_s, is_lost).run()
        except OSError as error:
            raise user_error(
                "harness run", f"cannot start {edited.tokens[0]}: {error.strerror}", "give the command as you would type it"
            ) from None
        found = rank_hook.told(reports, rank_hook.OUT_OF_MEMORY)
        ended_after_s = round(time.time() - found[0]["at_s"], 1) if found else None
        if not found and ended.code != 0 and cgroups.num_kernel_kills() > num_kernel_kills:
            found = [{"rank": -1, "failure": "the kernel killed a process: the memory limit of the container or machine", "memory": "host"}]
        present = rank_hook.told(reports, rank_hook.PRESENT)
        num_ranks = len({message["rank"] for message in present} - {None})
        return Attempt(ended, time.monotonic() - started, found, max(1, num_ranks), bool(present), ended_after_s)


# ---- the ladder


class Runner:
    """Starts a command, and starts it again one rung lower for as long as it runs out of memory.

    Args:
        settings: of the command.
        ladder: fastest first, with the planner's estimates where there are some.
        folder: for copies and the record.
    """

    def __init__(
        self, options: argparse.Namespace, settings: ForeignSettings, ladder: Sequence[MemorySettings | Rung], folder: Path
    ) -> None:
        self.options, self.settings, self.ladder, self.folder = options, settings, ladder, folder
        self.now = settings.start
        self.started_s = time.time()
        self.has_record = True
        self.record: dict[str, Any] = {"command": list(settings.command.tokens), "attempts": []}

    def run(self) -> int:
        """Returns the exit code: the command's, or 1 where it ran out of memory on the last rung."""
        resume: Path | None = None
        change = "as it is"
        for number in itertools.count(1):
            edited = self.settings.edited(self.now, self.folder / f"attempt-{number}", resume)
            say(f"attempt {number} of {self.options.max_attempts}: {change}")
            for line in edited.diff:
                _print(f"  {line}")
            attempt = start(edited, os.environ, self.options.grace_s)
            self._note(number, change, edited, attempt, resume)
            if not attempt.reports or attempt.ended.stopped_by is not None:
                return self._end(attempt)
            lower = self._after(attempt)
            if lower is None or number >= self.options.max_attempts:
                return self._out_of_memory("no lower rung is left" if lower is None else f"--max_attempts {number} is reached")
            change, self.now = describe_change(self.now, lower), lower
            resume = self._checkpoint(attempt.num_ranks)
        raise AssertionError("unreachable")

    def _after(self, attempt: Attempt) -> MemorySettings | None:
        """The next rung after a lack of memory."""
        report = {"requested_gib": None, "allocated_gib": None, "limit_gib": None, **_worst(attempt.reports)}
        say(f"rank {report['rank']} ran out of memory after {attempt.seconds:.0f} s: {report['failure']}")
        if report.get("memory") == "host":  # what moves to the host makes it worse
            old = self.now
            return next_settings(
                [_settings_of(rung) for rung in self.ladder],
                old,
                allowed=lambda new: (new.optimizer_offload, new.param_offload) == (old.optimizer_offload, old.param_offload),
            )
        return next_settings(self.ladder, self.now, seen_memory(report))

    def _checkpoint(self, num_ranks: int) -> Path | None:
        """What the next attempt goes on from."""
        given = self.settings.value("resume")
        folder = self.settings.value("output_dir")
        if self.settings.resume is None:
            say("the script takes no --resume_from_checkpoint: it starts anew unless it looks for checkpoints by itself")
            return None
        found, passed = latest_complete(Path(str(folder)), num_ranks, self.started_s) if folder else (None, [])
        for line in passed:
            say(line)
        if (
            found is not None
            and self.settings.command.script.restores_count
            and self.now.micro_batch_size != self.settings.start.micro_batch_size
        ):
            say("accelerate's load_state restores the count of micro-batches, with which the first step would be cut short:")
            say(f"{found} is passed over; with accelerator.step = 0 after load_state in the script it would not be")
            found = None
        if found is None:
            say(f"no checkpoint of this run yet: {'from ' + str(given) if given else 'from the beginning'}")
        elif not self.settings.command.script.resumes and self.settings.command.script.is_known:
            say("the script never mentions resume_from_checkpoint: hand it to trainer.train(), or training starts anew")
        return found

    # ---- the end

    def _end(self, attempt: Attempt) -> int:
        code = attempt.ended.code
        ended_by_itself = FINISHED if code == 0 else FAILED
        result = ended_by_itself if attempt.ended.stopped_by is None else STOPPED
        if attempt.ended.stopped_by is not None and code == 1:  # launchers call every end 1; a batch script must see that it was asked for
            code = 128 + attempt.ended.stopped_by
        if result == FAILED:
            if not attempt.has_hook:
                say("no process of the command told whether it ran out of memory (python -I or -E, or TORCH_DEVICE_BACKEND_AUTOLOAD=0?)")
            say(f"the command failed with exit code {code}; that was no lack of memory, so it is not tried again")
            if self.now != self.settings.start:
                say("this attempt was not your command as it is: see its changes above")
        return self._close(result, code)

    def _out_of_memory(self, why: str) -> int:
        say(f"out of memory, and {why}. What helps: more GPUs with FSDP or ZeRO-3, offload, shorter samples, LoRA, or an 8-bit optimizer")
        return self._close(OUT_OF_MEMORY, 1)

    def _note(self, number: int, change: str, edited: Edited, attempt: Attempt, resume: Path | None) -> None:
        self.record["attempts"].append(
            {
                "command": edited.tokens,
                "environment": edited.environ,
                "change": change,
                "settings": settings_json(self.now),
                "gradient_accumulation_steps": self.settings.global_share // self.now.micro_batch_size,
                "resume_from_checkpoint": None if resume is None else str(resume),
                "seconds": round(attempt.seconds, 1),
                "exit_code": attempt.ended.code,
                "num_ranks": attempt.num_ranks,
                "num_killed": attempt.ended.num_killed,
                "out_of_memory": attempt.reports,
                "ended_after_s": attempt.ended_after_s,
            }
        )
        self._keep()

    def _keep(self) -> None:
        """After every attempt: whoever is killed in the next one has left how far it had come down."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(self.folder / RECORD, self.record)
        except OSError as error:  # the command's own end is what counts
            self.has_record = False
            say(f"no record: {disk_room.named(error) or f'cannot write {self.folder / RECORD}: {error.strerror or error}'}")

    def _close(self, result: str, code: int) -> int:
        attempts = self.record["attempts"]
        self.record |= {"result": result, "exit_code": code, "seconds": round(time.time() - self.started_s, 1)}
        self._keep()
        count = len(attempts)
        below = f", settings now: {describe_change(self.settings.start, self.now)}" if self.now != self.settings.start else ""
        times = f"{count} attempt{'s' if count > 1 else ''}, {self.record['seconds']:.0f} s"
        say(f"{result} with exit code {code} after {times}{below}" + (f"; record: {self.folder / RECORD}" if self.has_record else ""))
        if result == FINISHED and count > 1:
            say(f"to start there next time: {shlex.join(self.settings.edited(self.now, self.folder / f'attempt-{count}').tokens)}")
        return code


def _worst(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    known = [{"requested_gib": None, "allocated_gib": None, "limit_gib": None, **each} for each in reports]
    return known[worst_report(known)]


def _settings_of(rung: MemorySettings | Rung) -> MemorySettings:
    return rung.settings if isinstance(rung, Rung) else rung


def _make_ladder(options: argparse.Namespace, settings: ForeignSettings) -> Sequence[MemorySettings | Rung]:
    """The user's, the planner's, or the usual order."""
    words = [word for word in options.ladder.replace(",", " ").split() if word]
    usual = settings.ladder(words)
    if words or options.no_plan:
        return usual
    found, line = foreign_plan.plan(settings, detect_machine(), options.gpu_memory)
    say(line)
    return (settings.rungs(found) if found is not None else []) or usual


def _show(settings: ForeignSettings, ladder: Sequence[MemorySettings | Rung], folder: Path) -> None:
    """For --dry_run: the command as it was understood, and what each rung would change."""
    for line in settings.understood():
        print(printable(line))
    if len(ladder) < 2:
        print("no rung can be put into this command: at an out-of-memory it could not start again")
    with TemporaryDirectory(prefix="harness-run-") as temporary:
        for above, rung in itertools.pairwise(map(_settings_of, ladder)):
            print(f"rung {describe_change(above, rung)}")
            for line in settings.edited(rung, Path(temporary)).diff:
                print(printable(f"  {line.replace(temporary, str(folder / 'attempt-N'))}"))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command under the ladder.

    Returns:
        Its exit code; 1 where it ran out of memory on the last rung, or what an attempt needs cannot be written; 2 for wrong input.
    """
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except UserError as error:
        print(format_findings(error.findings), file=sys.stderr)
        return 2


def _refuse_our_script(command: Command) -> None:
    """Raises UserError for run_clm.py, which has a ladder of its own that reaches much further."""
    script, following = command.tokens[command.script_at], command.script_tokens
    before = command.tokens[command.script_at - 1] if command.script_at else ""
    is_train = script == "train" and is_our_script(before, [script])
    is_train |= any(is_our_script(word, [after]) for word, after in itertools.pairwise(command.tokens[:3]))  # also python bin/harness train
    if is_train or is_our_script(script, following):
        what = "harness train" if is_train else script
        message = f"starts {what}, which steps down by itself when memory runs out: harness run is for other people's scripts"
        raise user_error("harness run", message, f"start it without harness run: {shlex.join(command.tokens)}")


def _try_folder(folder: Path, key: str) -> None:
    """Makes a folder, writes a block into it, and takes away again what it has made: now, not when hours of training are to be kept.

    Other nodes may do the same on the same disk: what one takes away under another's hands is tried again.

    Raises:
        UserError: it cannot be a folder, or not be written.
        OSError: the disk is full.
    """
    for tries_left in reversed(range(10)):
        try:
            _write_and_take_away(folder, key)
            return
        except (FileNotFoundError, FileExistsError) as error:
            if not tries_left:
                raise _not_to_be_written(folder, key, error) from None
            time.sleep(secrets.randbelow(200) / 1000)  # not in step with the others
        except OSError as error:
            if disk_room.is_full(error):
                raise
            raise _not_to_be_written(folder, key, error) from None


def _not_to_be_written(folder: Path, key: str, error: OSError) -> UserError:
    at = f" at {error.filename}" if error.filename not in (None, str(folder)) else ""
    return user_error(key, f"cannot write to {folder}: {error.strerror or error}{at}", "choose a folder you may write to")


def _write_and_take_away(folder: Path, key: str) -> None:
    made: list[Path] = []
    try:
        for each in reversed([folder, *folder.parents]):
            if not each.exists():
                each.mkdir()
                made.append(each)
        if not folder.is_dir():
            raise user_error(key, f"{folder} is a file", "give a folder")
        with disk_room.naming(folder):
            disk_room.fill_probe(folder / f".tmp-harness-run-{secrets.token_hex(8)}")
    finally:
        for each in reversed(made):
            with contextlib.suppress(OSError):
                each.rmdir()


def _run(argv: Sequence[str]) -> int:
    options, tokens = parse(argv)
    names = dict(pair.split("=", 1) for pair in options.names)
    command = read_command(tokens)
    _refuse_our_script(command)
    settings = ForeignSettings(command, {what: name.lstrip("-").replace("-", "_") for what, name in names.items()}, os.environ)
    output = settings.value("output_dir")
    folder = options.run_dir or (Path(f"{str(output).rstrip('/')}-harness_run") if output else Path("harness_run"))
    try:
        if output:
            _try_folder(Path(str(output)), "--output_dir")
        _try_folder(folder, "--run_dir")
    except OSError as error:
        return _full(error)
    ladder = _make_ladder(options, settings)
    if options.dry_run:
        _show(settings, ladder, folder)
        return 0
    try:
        return Runner(options, settings, ladder, folder).run()
    except OSError as error:  # of the copies for an attempt
        return _full(error)


def _full(error: OSError) -> int:
    """Says in one line what could not be written. Returns 1."""
    key = str(error.filename or "harness run")
    fix = "" if disk_room.named(error) else disk_room.write_fix(error)
    _print("  " + Finding("error", key, error.strerror or str(error), fix).line())
    return 1


if __name__ == "__main__":
    sys.exit(main())
