"""Saving while training goes on, finding what can be resumed, and exporting a model.

A save copies every rank's shards to host memory and returns; threads write the files, hash them and finish the folder. No rank waits in a
collective for it: the ranks leave each other marks in the folder (see harness.checkpoint_files), so a rank that fails to write makes the
save fail, with its reason in the log, and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from harness import checkpoint_files as files
from harness import disk_room, own_checkpoints
from harness.coordination import Coordinator
from harness.findings import user_error

log = logging.getLogger("harness")


class SavesAndLoads(Protocol):
    """What a checkpoint needs of an engine."""

    name: str

    def save(self, directory: Path) -> Future[None]: ...

    def load(self, directory: Path) -> None: ...


def _rng_name(process_index: int) -> str:
    return f"rng-{process_index}.json"


def _one_line(error: BaseException) -> str:
    """An error as one line; of the exception that collects those of all ranks, the first."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (first, _) = next(iter(failures.items()))
        return f"rank {rank}: {_one_line(first)}"
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 1 << 28 else f"{num_bytes / 2**20:.1f} MiB"


def _why_not_written(error: BaseException, folder: Path) -> str:
    """The error as one line; where next to nothing is free, that too: torch's writers say "unexpected pos 704 vs 598" on a full disk."""
    reason = _one_line(error)
    with contextlib.suppress(OSError):
        free_bytes = shutil.disk_usage(folder).free
        if free_bytes < _LITTLE_ROOM_BYTES or disk_room.is_full(error):
            return f"{reason} (the disk is full: {free_bytes / 2**20:.1f} MiB free at {folder.parent}; {disk_room.MAKE_ROOM})"
    return reason


_LITTLE_ROOM_BYTES = 1 << 20
_PEER_FAILED = "another rank could not write its files"


class PendingSave:
    """One save that is being written by threads.

    Attributes:
        error: why this rank gave up.
        peer_failed: set when the ranks, asking each other, learn that one gave up: its mark in the folder may be missing on a full disk.
        moved_at_s: when this rank's threads last got on (monotonic clock), so that one which hangs on a dead disk is noticed.
    """

    def __init__(self, step: int, marks: files.Marks, final: Path) -> None:
        self.step, self.marks, self.final = step, marks, final
        self.error: str | None = None
        self.peer_failed = False
        self.moved_at_s = time.monotonic()
        self.threads: list[threading.Thread] = []

    def start(
        self,
        written: Future[None],
        timeout_s: float,
        on_complete: Callable[[Path], None],
        on_manifest: Callable[[Path], None] = lambda manifest: None,
    ) -> None:
        self.threads.append(threading.Thread(target=self._hash_own, args=(written, timeout_s), daemon=True))
        if self.marks.process_index == 0:
            self.threads.append(threading.Thread(target=self._finish, args=(timeout_s, on_complete, on_manifest), daemon=True))
        for thread in self.threads:
            thread.start()

    def _hash_own(self, written: Future[None], timeout_s: float) -> None:
        """This rank's share of the work after its files are written: hash every n-th file of all."""
        marks = self.marks
        try:
            self._watch(written)
            marks.leave("written")
            marks.wait("written", timeout_s, self._reason_to_give_up)
            marks.leave("hashed", files.hash_share(marks.folder, marks.process_index, marks.num_processes, self._moves))
        except BaseException as error:  # torch's CheckpointException is no Exception; a thread that dies silently is waited for
            self.error = _why_not_written(error, marks.folder)
            # On a full disk there is room for the mark when this rank takes something of its own away.
            (marks.folder / _rng_name(marks.process_index)).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # else the others learn it when they next ask each other
                marks.leave("failed", self.error)

    def _moves(self) -> None:
        self.moved_at_s = time.monotonic()

    def _watch(self, written: Future[None]) -> None:
        """Until the engine's files are written; notes whether they grow."""
        size = -1
        while True:
            with contextlib.suppress(TimeoutError):
                written.result(timeout=1.0)
                break
            if written.done():  # a TimeoutError of its own
                written.result()
            now = files.size_of(self.marks.folder)
            if now != size:
                size = now
                self._moves()
        self._moves()

    def _finish(self, timeout_s: float, on_complete: Callable[[Path], None], on_manifest: Callable[[Path], None]) -> None:
        marks = self.marks
        try:
            shares = marks.wait("hashed", timeout_s, self._reason_to_give_up)
            marks.clear()
            files.complete(marks.folder, self.final, shares, on_manifest)
            on_complete(self.final)
        except BaseException as error:
            self.error = self.error or _why_not_written(error, marks.folder)
            # The folder goes in Checkpointer.finish, when no rank writes into it any more.

    def _reason_to_give_up(self) -> str | None:
        return self.error or (_PEER_FAILED if self.peer_failed else None)

    def is_running(self) -> bool:
        return any(thread.is_alive() for thread in self.threads)


class Checkpointer:
    """Writes and finds the checkpoints of one run.

    Args:
        output_dir: the run's folder, on a disk that all ranks see.
        engine: what is saved.
        keep: `--save_total_limit`.
        state_bytes: size of one checkpoint over all ranks, to check the disk before.
        model_files: folder with the model's config and tokenizer, copied into each checkpoint so that it can be exported alone.
        on_event: called on the main process with (event, fields) for the log of metrics.
        trust: read checkpoints that no run of this user has written.
    """

    def __init__(
        self,
        output_dir: Path,
        engine: SavesAndLoads,
        coordinator: Coordinator,
        *,
        keep: int | None = None,
        state_bytes: int = 0,
        model_files: Path | None = None,
        on_event: Callable[..., None] = lambda event, **fields: None,
        trust: bool = False,
    ) -> None:
        self.trust, self.is_warned = trust, False
        self.output_dir, self.engine, self.coordinator = output_dir, engine, coordinator
        self.keep, self.state_bytes, self.model_files, self.on_event = keep, state_bytes, model_files, on_event
        self.pending: PendingSave | None = None
        self.writing: list[Future[None]] = []
        self.last_complete: Path | None = None
        self.best: Path | None = None
        self.last_failure: str | None = None
        self.timeout_s = coordinator.timeout_s
        if coordinator.is_main_process:
            files.clean_temporary(output_dir)

    def save(self, step: int, trainer_state: dict[str, Any], *, wait: bool = False) -> bool:
        """Starts a checkpoint of this step; called on all ranks at the same step.

        Args:
            trainer_state: JSON; the same on all ranks.
            wait: return when it is complete (at the end, and before the job gives up its place).

        Returns:
            False when it could not be started or, with `wait`, not be completed; the reason is logged and training can go on.
        """
        self.finish()
        started = time.monotonic()
        name = files.checkpoint_name(step)
        folder = self.output_dir / f".tmp-{name}"
        marks = files.Marks(folder, self.coordinator.process_index, self.coordinator.num_processes)
        is_main = self.coordinator.is_main_process
        # A request to stop may come at a step that was just saved. Writing it again would take the finished one away first.
        final = self.output_dir / name
        is_there = is_main and self.last_complete == final and (final / files.COMPLETE).exists()
        is_there, problem = self.coordinator.broadcast((is_there, self._prepare(folder) if is_main and not is_there else None))
        if is_there:
            return True
        if problem:
            self._report_failure(step, problem)
            return False
        # Two agreements: in what the engine does all ranks take part, so none may stay out because its first file could not be written.
        problem = self._first_problem(lambda: self._write_states(folder, trainer_state))
        if problem is None:
            problem = self._first_problem(lambda: self._start_engine(folder))
        if problem:
            self._settle()
            self.coordinator.gather(None)  # nobody writes into the folder any more
            if is_main:
                shutil.rmtree(folder, ignore_errors=True)
            self.coordinator.renew_checkpoint_group()
            self._report_failure(step, problem)
            return False
        self.pending = PendingSave(step, marks, final)
        self.pending.start(self.writing[-1], self.timeout_s, lambda path: self._completed(path, step, started), self._remember)
        stood_still_s = time.monotonic() - started
        log.debug("checkpoint of step %d: training stood still for %.2f s", step, stood_still_s)
        self.on_event("save_started", step=step, stood_still_s=round(stood_still_s, 3))
        return self.finish() if wait else True

    def _first_problem(self, act: Callable[[], None]) -> str | None:
        """Runs something on every rank; the first rank's reason why it could not, the same on all."""
        problem = None
        try:
            act()
        except OSError as error:
            problem = f"rank {self.coordinator.process_index}: {disk_room.named(error) or _one_line(error)}"
        return next((reason for reason in self.coordinator.gather(problem) if reason), None)

    def _write_states(self, folder: Path, trainer_state: dict[str, Any]) -> None:
        if self.coordinator.is_main_process:
            files.write_json(folder / files.STATE_FILE, trainer_state)
            if self.model_files is not None:
                with disk_room.naming(folder / files.MODEL_FOLDER):
                    shutil.copytree(self.model_files, folder / files.MODEL_FOLDER)
        files.write_json(folder / _rng_name(self.coordinator.process_index), files.random_state())

    def _start_engine(self, folder: Path) -> None:
        with disk_room.naming(folder, self.state_bytes):
            self.writing.append(self.engine.save(folder / files.ENGINE_FOLDER))

    def _prepare(self, folder: Path) -> str | None:
        """Main process: makes the temporary folder and looks at the disk. Returns what is wrong, if anything."""
        if not self.output_dir.is_dir():  # not made again: whoever removed it may have given the name to another run
            return f"{self.output_dir} is gone"
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            free_bytes = shutil.disk_usage(folder).free
        except OSError as error:
            return f"{error}; {disk_room.write_fix(error)}"
        if free_bytes < self.state_bytes:
            shutil.rmtree(folder, ignore_errors=True)
            needed = f"a checkpoint needs about {_size(self.state_bytes)}, {self.output_dir} has {_size(free_bytes)} free"
            return f"{needed}; {disk_room.MAKE_ROOM}"
        return None

    def _completed(self, path: Path, step: int, started: float) -> None:
        self.last_complete = path
        protect = [self.best] if self.best else []
        gone = files.rotate(self.output_dir, self.keep, protect)
        log.info("checkpoint %s complete after %.1f s%s", path, time.monotonic() - started, f"; deleted {len(gone)} older" if gone else "")
        self.on_event("save", step=step, path=str(path), duration_s=round(time.monotonic() - started, 3))

    def _remember(self, manifest: Path) -> None:
        problem = own_checkpoints.record(manifest)
        if problem and not self.is_warned:
            self.is_warned = True
            log.warning(
                "%s: the next start will read this run's checkpoints only with %s; %s=FOLDER says where to remember them",
                problem,
                own_checkpoints.FLAG,
                own_checkpoints.VARIABLE,
            )

    def _report_failure(self, step: int, reason: str) -> None:
        self.last_failure = reason
        log.error("checkpoint of step %d was not written: %s. Older checkpoints are as they were; training goes on.", step, reason)
        self.on_event("save_failed", step=step, reason=reason)

    def finish(self) -> bool:
        """Waits for the save that is being written; called on all ranks. Returns False when it failed."""
        if self.pending is not None:
            # Asking each other, not only their own threads, the ranks notice at once when one of them is gone.
            running = True
            while running:
                self._check_moves(self.pending)
                own = [float(self.pending.is_running()), float(self.pending.error is not None)]
                running, self.pending.peer_failed = map(bool, self.coordinator.max(own, "checkpoint being written"))
                time.sleep(0.02 if running else 0.0)
        self._settle()
        if self.pending is None:
            return True
        pending, self.pending = self.pending, None
        errors = [error for error in self.coordinator.gather(pending.error) if error]
        if errors:
            if self.coordinator.is_main_process:
                shutil.rmtree(pending.marks.folder, ignore_errors=True)
            # A failed collective of the writers breaks their group; of this reason or another, a new one costs next to nothing.
            self.coordinator.renew_checkpoint_group()
            self._report_failure(pending.step, next((error for error in errors if _PEER_FAILED not in error), errors[0]))
        elif self.coordinator.num_processes > 1:
            self.last_complete = pending.final
        return not errors

    def _check_moves(self, pending: PendingSave) -> None:
        """Raises TimeoutError where this rank's files do not grow any more: a thread that hangs in the kernel cannot be ended."""
        if pending.is_running() and time.monotonic() > pending.moved_at_s + 2 * self.timeout_s:
            rank, seconds = self.coordinator.process_index, 2 * self.timeout_s
            raise TimeoutError(f"rank {rank} has written nothing of checkpoint {pending.step} to {self.output_dir} within {seconds:.0f} s")

    def _settle(self) -> None:
        """Waits until this rank's engine writes no more, also of a save that was given up; what went wrong is reported elsewhere."""
        for future in self.writing:
            future.exception()
        self.writing.clear()

    def find(self, wanted: str) -> Path | None:
        """The checkpoint to resume from, verified by its hashes; called on all ranks, which share the reading.

        Args:
            wanted: "auto" (None if there is none), "latest" (there must be one), or a folder.

        Raises:
            UserError: nothing usable where there must be.
        """
        if wanted not in ("auto", "latest"):
            folder = Path(wanted)
            none = self.coordinator.broadcast(files.no_checkpoint(folder) if self.coordinator.is_main_process else None)
            if none is not None and folder.is_dir():
                raise user_error("--resume_from_checkpoint", *none)
            problem = "does not exist" if not folder.is_dir() else self._verify(folder)
            if problem:
                raise user_error("--resume_from_checkpoint", f"{wanted}: {problem}", "give another, or 'latest' for the newest usable one")
            self._refuse_foreign(folder)
            return folder
        skipped: list[str] = []
        for folder in self.coordinator.broadcast(files.list_checkpoints(self.output_dir)):
            problem = self._verify(folder)
            if problem is None:
                self._refuse_foreign(folder)
                return folder
            skipped.append(f"{folder.name}: {problem}")
            log.warning("skipping %s: %s", folder, problem)
            self.on_event("checkpoint_skipped", path=str(folder), reason=problem)
        if wanted == "latest":
            reasons = "; ".join(skipped) or "there is none"
            raise user_error(
                "--resume_from_checkpoint", f"no usable checkpoint in {self.output_dir}: {reasons}", "leave it out to start anew"
            )
        return None

    def _refuse_foreign(self, folder: Path) -> None:
        """Raises UserError, on all ranks, for a checkpoint that is not this user's own; the main process's home folder decides."""
        error = self.coordinator.broadcast(own_checkpoints.refusal(folder, self.trust) if self.coordinator.is_main_process else None)
        if error is not None:
            raise error

    def _verify(self, folder: Path) -> str | None:
        coordinator = self.coordinator
        problems = coordinator.gather(files.problem_of(folder, coordinator.process_index, coordinator.num_processes))
        return next((problem for problem in problems if problem), None)

    def load(self, folder: Path, *, random_states: bool = True, engine: bool = True) -> None:
        """Restores engine and random states, or one of them; called on all ranks."""
        if engine:
            self.engine.load(folder / files.ENGINE_FOLDER)
        rng = folder / _rng_name(self.coordinator.process_index)
        if random_states and rng.exists():
            files.restore_random_state(json.loads(rng.read_text(encoding="utf-8")))
        self.last_complete = folder


def main(argv: Sequence[str] | None = None) -> int:
    """`harness export`: see harness.export_cli."""
    from harness.export_cli import main as export

    return export(argv)


if __name__ == "__main__":
    sys.exit(main())
