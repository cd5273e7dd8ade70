"""Trains a causal LM. Start it with any launcher:

    deepspeed --num_gpus=4 harness/run_clm.py --model_name_or_path gpt2 --train_file a.txt --output_dir out --deepspeed ds.json
    accelerate launch --config_file fsdp_configs/full_shard.yaml harness/run_clm.py ...
    torchrun --nproc_per_node 4 harness/run_clm.py ...
    python harness/run_clm.py ...

From one's own script: `from harness.run_clm import train; train({"model_name_or_path": ..., "output_dir": ...}, train_dataset=rows)`.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):  # run by path: the clone's root, not harness/, is where imports start
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import contextlib
import importlib
import logging
import os
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from harness import build_locks, disk_room, guard_line, run_folder, standby, whereabouts
from harness.args import Arguments, world_size_from_environment
from harness.findings import Finding, UserError, format_findings, has_errors
from harness.parsing import ParsingError, parse_args, tokens_of
from harness.processes import open_standard_files
from harness.run_folder import FAILED, FINISHED, PREEMPTED, WRONG_INPUT

log = logging.getLogger("harness")

# How long a rank with wrong input waits for rank 0 to print the whole message.
RANK_0_TELLS_S = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Parses, checks, trains. Returns the exit code: 0 finished, 1 failed, 2 wrong input, 75 preempted after a complete save."""
    open_standard_files()
    tokens = list(sys.argv[1:] if argv is None else argv)
    stand_by(tokens)
    started_s = time.time()
    try:
        return run(_parse(tokens), started_s=started_s)
    except UserError as error:
        return _wrong_input(error, _output_dir_of(tokens), "--debug" in tokens, started_s)


def _parse(tokens: Sequence[str]) -> Arguments:
    try:
        return parse_args(tokens)
    except ParsingError as error:
        from harness.check_config import with_paths

        raise with_paths(error) from None


def stand_by(tokens: Sequence[str]) -> None:
    """In a process that the guard keeps for a new start (harness.standby): returns when that begins. In any other does nothing.

    A script around `main` that does something itself before it calls this first.
    """
    standby.wait_for_turn(lambda: _prepare(tokens))


def _prepare(tokens: Sequence[str]) -> None:
    """What needs neither a GPU nor another rank."""
    args = parse_args(tokens)
    _set_environment(Path(str(args.train.output_dir)))  # before torch is there
    from harness import hub, next_life

    importlib.import_module("harness.job")  # whatever the check finds
    next_life.import_ahead(args, check(args))
    hub.answers.cache_clear()  # it is asked again when the turn comes


def train(config: Mapping[str, Any] | Arguments, train_dataset: Any = None) -> int:
    """Trains from one's own script, under any launcher.

    Args:
        config: the names of `run_clm.py`'s flags with values, or parsed `Arguments`.
        train_dataset: rows with "input_ids" and optionally "labels"; instead of `train_file` or `dataset_name`.

    Returns:
        The exit code, as `main`.

    Raises:
        UserError: wrong input.
    """
    return run(config if isinstance(config, Arguments) else _parse(tokens_of(config)), train_dataset, started_s=time.time())


def run(args: Arguments, train_dataset: Any = None, *, started_s: float) -> int:
    """One job from parsed arguments; ends with an exit code and `exit.json`. Raises UserError for wrong input."""
    folder = Path(str(args.train.output_dir))
    rank = int(os.environ.get("RANK", "0"))
    whereabouts.begin()
    engine = check(args, train_dataset)
    from harness import coordination, job, next_life, oom_reports, recovery

    # torch 2.13 announces other names for collectives that DeepSpeed and older torch do not have, once per call site and rank.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")

    _set_environment(folder)
    coordination.setup_logging(debug=args.train.debug)
    try:
        coordinator = coordination.start(use_cpu=args.train.use_cpu, timeout_s=args.train.ddp_timeout, arguments=args.to_dict())
    except coordination.PeerFailedError as error:
        log.error("%s", error, extra={"all_ranks": True})
        if rank == 0:
            with contextlib.suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
        run_folder.record_exit(folder, FAILED, f"{error}", rank, started_s)
        return FAILED
    guard_line.join_hub(coordinator.broadcast)
    guard_line.tell_folder(folder, started_s)
    next_life.ask_for_standby(args, coordinator)
    stop = coordination.StopFlag()
    _take_signals(stop)
    guard_line.hears_signals()
    _end_before_training(stop, folder, rank, started_s)
    code, reason = FAILED, ""
    try:
        with contextlib.ExitStack() as stack:
            job.open_folder(folder, args, coordinator, stack)
            try:
                finished = job.run_job(args, engine, folder, coordinator, stop, train_dataset)
            except KeyboardInterrupt:
                if not stop.outcome:
                    raise
                finished = stop.outcome == "finished"  # only what is drawn and said at the end is missing
        code = FINISHED if finished else PREEMPTED
        reason = "finished" if finished else _why_stopped(stop)
    except UserError:
        coordinator.close()
        raise
    except BaseException as error:
        if not args.train.no_oom_recovery and guard_line.can_relaunch() and oom_reports.is_out_of_memory(error):
            recovery.relaunch_alone("start or end", error, coordinator)
        reason = _say_why(error, rank, coordinator)
        follows = isinstance(error, coordination.PeerFailedError)
        run_folder.record_exit(folder, FAILED, reason, rank, started_s, is_consequence=follows)
        # The other ranks wait in a collective for this one: leave at once, the launcher ends them.
        sys.stdout.flush()
        os._exit(FAILED)
    finally:
        stop.saves = True  # whatever comes now, it is no longer this job that a signal ends
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)
    # Before the others are waited for: what was reached is true whatever becomes of them. Other ranks tell it to their node's launcher.
    run_folder.record_exit(folder if rank == 0 else None, code, reason, rank, started_s)
    try:
        coordinator.close()
    except coordination.PeerFailedError as error:
        log.error("%s, after this rank was done: %s", error, reason, extra={"all_ranks": True})
        return FAILED
    return code


def _say_why(error: BaseException, rank: int, coordinator: Any) -> str:
    """Logs why this rank gives up, with a traceback unless it is nothing that code could mend; returns the reason as one line."""
    from harness.trainer import NotSavedError

    if isinstance(error, KeyboardInterrupt):
        reason = "stopped at once by a second Ctrl-C, without a save"
        log.error("%s; the same command goes on from the newest complete checkpoint", reason)
        return reason
    from harness.coordination import is_over_the_limit

    found = guard_line.ask_whereabouts(whereabouts.place_of_error(error)) if is_over_the_limit(error) else {}
    no_room = disk_room.named(error)
    reason = (no_room or f"{type(error).__name__}: {error}").splitlines()[0] + coordinator.silent_ranks(error)
    for other, each in found.items():
        log.error("%s", whereabouts.describe(other, each), extra={"all_ranks": True})
    reason += whereabouts.who_hangs(found)
    if isinstance(error, NotSavedError) or no_room:
        starts_anew = isinstance(error, NotSavedError) and not error.older
        then = "starts from the beginning" if starts_anew else "goes on from there"
        log.error("rank %d failed: %s; once it can be written, the same command %s", rank, reason, then)
    else:
        log.error("rank %d failed: %s\n%s", rank, reason, traceback.format_exc(), extra={"all_ranks": True})
    return reason


def _why_stopped(stop: Any) -> str:
    """The guard knows more than the signal that it sent."""
    if why := whereabouts.note_of_guard():
        return f"stopped after a complete save, because {why}"
    return f"stopped by {stop.signal_name or 'a signal on another rank'} after a complete save"


def check(args: Arguments, train_dataset: Any = None) -> str:
    """Everything that can be found wrong before data and weights are; prints what there is to say. Returns the engine's name.

    Loads torch only where flags name modules of the model.

    Raises:
        UserError: with all errors found.
    """
    from harness.argument_rules import names_modules
    from harness.check_arguments import kernel_findings
    from harness.check_config import check_names, check_run
    from harness.templates import apply_launch_to_args

    num_processes = world_size_from_environment()
    findings = [*args.notes, *check_run(args, num_processes=num_processes, environ=os.environ)]
    engine, more = apply_launch_to_args(args, os.environ, num_processes)
    findings = list(dict.fromkeys([*findings, *more, *kernel_findings(args, engine)]))
    if names_modules(args):
        _set_environment(Path(str(args.train.output_dir)))  # before torch is there
        findings += check_names(args, findings)
    data = args.data
    if train_dataset is None and not (data.dataset_name or data.train_file or getattr(data, "dataset_mix", None)):
        findings.append(
            Finding("error", "--train_file", "no training data was given", "give --train_file, --dataset_name or --dataset_mix")
        )
    if has_errors(findings):
        raise UserError(findings)
    if findings and int(os.environ.get("RANK", "0")) == 0:
        print(format_findings(findings), flush=True)
    return engine


def _set_environment(folder: Path) -> None:
    """Before torch is imported: an allocator that does not fragment, NCCL's flight recorder, unless the user chose otherwise, and ninja.

    The recorder keeps the last collectives of each rank; torch writes them to `folder`/nccl-rank-<rank> when a collective on GPUs has not
    ended within --ddp_timeout. `torchfrtrace --prefix nccl-rank- FOLDER` of torch compares them.
    """
    for name, older, value in (
        ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "2000"),
        ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(folder.absolute() / "nccl-rank-")),
    ):
        if older not in os.environ:
            os.environ.setdefault(name, value)
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed reads it even for one process
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    build_locks.find_ninja()


def _take_signals(stop: Any) -> None:
    def ask(number: int, frame: Any) -> None:
        # One Ctrl-C arrives several times (terminal, launcher, guard); one more a while later means now.
        if number == signal.SIGINT and stop and time.monotonic() - stop.asked_at_s > 3:
            raise KeyboardInterrupt
        stop.ask(signal.Signals(number).name)

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
            continue  # under nohup a closed terminal is no reason to stop
        with contextlib.suppress(ValueError):  # not in the main thread of somebody's program
            signal.signal(number, ask)


def _end_before_training(stop: Any, folder: Path, rank: int, started_s: float) -> None:
    """A signal before training ends the process at once: there is nothing to save, and what it waits for (data, another rank, a compiler)
    may take longer than a launcher waits. Code 75, so that a batch system starts the job again.

    Python's own handlers run when the library's call that the main thread is in returns; what wakes this thread comes in time.
    """
    if guard_line.attempt() > 0:  # what the life before has left in memory is saved first
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    except ValueError:  # not in the main thread of somebody's program
        return
    told = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)

    def leave() -> None:
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, told)

    # Workers that are forked, and ended by a signal at any time, tell nobody.
    os.register_at_fork(
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, told),
        after_in_child=leave,
        after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, told),
    )

    def watch() -> None:
        while not stop.saves:
            for number in os.read(reader, 64):
                if not stop.saves and number in told:
                    why = whereabouts.note_of_guard()  # which knows more than the signal that it sent
                    reason = f"stopped{'' if why else f' by {signal.Signals(number).name}'} before training had begun"
                    reason += f", because {why}" if why else ""
                    print(f"rank {rank}: {reason}", file=sys.stderr, flush=True)
                    run_folder.record_exit(folder if rank == 0 else None, PREEMPTED, reason, rank, started_s)
                    os._exit(PREEMPTED)

    threading.Thread(target=watch, name="signals before training", daemon=True).start()


def _output_dir_of(tokens: Sequence[str]) -> Path | None:
    for index, token in enumerate(tokens):
        name, equals, value = token.partition("=")
        if name.replace("-", "_") == "__output_dir" and (equals or index + 1 < len(tokens)):
            return Path(value if equals else tokens[index + 1])
    return None


def _wrong_input(error: UserError, folder: Path | None, debug: bool, started_s: float) -> int:
    rank = int(os.environ.get("RANK", "0"))
    if rank == 0:
        print(format_findings(error.findings, "wrong input, nothing was started:"), file=sys.stderr, flush=True)
        if debug:
            traceback.print_exc()
        # A refused folder is another run's, a running job writes its own end, and one that has ended keeps what it wrote.
        is_refused = any(finding.key == "--output_dir" for finding in error.findings) and folder is not None and folder.exists()
        if folder is not None and (is_refused or run_folder.has_ended(folder) or run_folder.is_taken(folder)):
            folder = None
        if folder is not None:
            with contextlib.suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
        run_folder.record_exit(folder, WRONG_INPUT, run_folder.explain(error), 0, started_s)
    else:  # the launcher of another node learns it from its own processes
        run_folder.record_exit(None, WRONG_INPUT, run_folder.explain(error), rank, started_s)
        if _outlives_rank_0():
            print(f"rank {rank}: wrong input: {run_folder.explain(error)}", file=sys.stderr, flush=True)
    return WRONG_INPUT


def _outlives_rank_0() -> bool:
    """Gives rank 0, which tells the user what is wrong, the time to do it: a launcher ends all ranks when the first one leaves. True when
    no launcher has ended this rank by then: rank 0 has no such error (a file that one node lacks), or its launcher leaves ranks alone.
    """
    ended: list[int] = []
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(each, lambda number, _frame: ended.append(number))
    # The ranks of one node one after the other: the first of them to leave ends the others.
    until_s = time.monotonic() + RANK_0_TELLS_S + 0.5 * int(os.environ.get("LOCAL_RANK", "0"))
    while not ended and time.monotonic() < until_s:
        time.sleep(0.05)
    return not ended


if __name__ == "__main__":
    from harness import guard

    sys.exit(guard.main() if guard.needs_guard() else main())
