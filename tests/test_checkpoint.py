"""Saving in the background, finding what can be resumed, and what a failed save leaves: real folders, an engine of one file."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from traceback import StackSummary
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from harness import checkpoint, checkpoint_files, run_folder
from harness.checkpoint import Checkpointer
from harness.coordination import Coordinator
from harness.disk_room import MAKE_ROOM
from harness.findings import UserError


class Meeting:
    """A collective of threads: each brings a value and leaves with all of them."""

    def __init__(self, size: int) -> None:
        self.barrier, self.values = threading.Barrier(size), [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.barrier.wait(30)
        self.values[rank] = value
        self.barrier.wait(30)
        return list(self.values)


class ThreadCoordinator(Coordinator):
    """Ranks that are threads of this process."""

    meeting: Meeting
    num_renewed = 0

    def renew_checkpoint_group(self) -> None:
        self.gather(None)
        self.num_renewed += 1

    def gather(self, value: Any) -> list[Any]:
        return self.meeting.exchange(self.process_index, value)

    def broadcast(self, value: Any) -> Any:
        return self.gather(value)[0]

    def max(self, values: Any, what: str = "max") -> list[float]:
        return [max(column) for column in zip(*self.gather(list(values)), strict=True)]


def coordinators(count: int) -> list[Coordinator]:
    meeting = Meeting(count)
    made: list[Coordinator] = []
    for rank in range(count):
        coordinator = ThreadCoordinator(count, rank, rank, count, torch.device("cpu"), "gloo", 20.0)
        coordinator.meeting = meeting
        made.append(coordinator)
    return made


class FileEngine:
    """Writes `size_bytes` in a thread of its own; `broken` says where it fails."""

    name = "ddp"

    def __init__(self, rank: int = 0, size_bytes: int = 1000, broken: str = "") -> None:
        self.rank, self.size_bytes, self.broken = rank, size_bytes, broken
        self.threads = ThreadPoolExecutor(1)
        self.loaded: bytes | None = None

    def save(self, directory: Path) -> Future[None]:
        if self.broken == "at start":
            raise OSError(28, "No space left on device")
        return self.threads.submit(self._write, directory)

    def _write(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        if self.broken == "in the background":
            raise OSError(28, "No space left on device")
        if self.broken == "in torch's writer":  # which reports by an exception that `except Exception` does not see
            raise CheckpointException("writing", {self.rank: (RuntimeError("No space left on device"), StackSummary())})
        (directory / f"shard-{self.rank}.bin").write_bytes(os.urandom(self.size_bytes))

    def load(self, directory: Path) -> None:
        self.loaded = (directory / f"shard-{self.rank}.bin").read_bytes()


class Log:
    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, event: str, **fields: Any) -> None:
        self.events.append((event, fields))

    def of(self, event: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.events if name == event]


def make(output: Path, **options: Any) -> tuple[Checkpointer, FileEngine, Log]:
    engine, log = options.pop("engine", FileEngine()), Log()
    return Checkpointer(output, engine, coordinators(1)[0], on_event=log, **options), engine, log


def on_ranks(count: int, body: Callable[[Coordinator], Any]) -> list[Any]:
    """Runs `body` once per rank, each in a thread."""
    with ThreadPoolExecutor(count) as pool:
        return [job.result(60) for job in [pool.submit(body, coordinator) for coordinator in coordinators(count)]]


def names(output: Path) -> list[str]:
    return sorted(path.name for path in output.iterdir())


def test_a_save_returns_before_it_is_written_and_is_complete_when_waited_for(tmp_path: Path) -> None:
    checkpointer, engine, log = make(tmp_path)
    gate = threading.Event()
    engine.threads.submit(gate.wait)
    assert checkpointer.save(3, {"step": 3})
    assert names(tmp_path) == [".tmp-checkpoint-3"]
    gate.set()
    assert checkpointer.finish()
    assert names(tmp_path) == ["checkpoint-3"]
    assert names(tmp_path / "checkpoint-3") == ["COMPLETE", "manifest.json", "rng-0.json", "state", "trainer_state.json"]
    assert checkpoint_files.problem_of(tmp_path / "checkpoint-3") is None
    assert [fields["step"] for fields in log.of("save")] == [3] and log.of("save_failed") == []


def test_the_models_files_are_in_every_checkpoint_and_hashed(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    checkpointer, _, _ = make(tmp_path, model_files=tmp_path / "model")
    assert checkpointer.save(1, {}, wait=True)
    assert "model/config.json" in json.loads((tmp_path / "checkpoint-1" / "manifest.json").read_text())


@pytest.mark.parametrize("damage", ["truncated", "bit flipped"])
def test_damage_in_the_newest_is_noticed_said_and_the_one_before_is_used(damage: str, tmp_path: Path) -> None:
    checkpointer, engine, log = make(tmp_path)
    for step in (1, 2):
        assert checkpointer.save(step, {"step": step}, wait=True)
    shard = tmp_path / "checkpoint-2" / "state" / "shard-0.bin"
    content = bytearray(shard.read_bytes())
    content[500] ^= 4
    shard.write_bytes(content[:700] if damage == "truncated" else content)
    reason = {
        "truncated": "state/shard-0.bin has 700 bytes, not 1000",
        "bit flipped": "state/shard-0.bin is damaged (its sha256 differs from the manifest's)",
    }[damage]
    found = checkpointer.find("auto")
    assert found == tmp_path / "checkpoint-1"
    assert log.of("checkpoint_skipped") == [{"path": str(tmp_path / "checkpoint-2"), "reason": reason}]
    checkpointer.load(found)
    assert engine.loaded == (tmp_path / "checkpoint-1" / "state" / "shard-0.bin").read_bytes()
    with pytest.raises(UserError) as caught:
        checkpointer.find(str(tmp_path / "checkpoint-2"))
    assert caught.value.findings[0].message == f"{tmp_path / 'checkpoint-2'}: {reason}"


def test_without_a_usable_checkpoint_auto_begins_and_latest_refuses(tmp_path: Path) -> None:
    checkpointer, _, _ = make(tmp_path)
    assert checkpointer.find("auto") is None
    with pytest.raises(UserError, match=f"no usable checkpoint in {tmp_path}: there is none"):
        checkpointer.find("latest")
    (tmp_path / "checkpoint-4").mkdir()
    with pytest.raises(UserError, match="checkpoint-4: not complete"):
        checkpointer.find("latest")
    with pytest.raises(UserError, match="nowhere: does not exist"):
        checkpointer.find("nowhere")


def test_a_runs_folder_given_as_a_checkpoint_is_told_its_newest(tmp_path: Path) -> None:
    checkpointer, _, _ = make(tmp_path)
    checkpointer.save(1, {}, wait=True)
    with pytest.raises(UserError) as caught:
        checkpointer.find(str(tmp_path))
    [finding] = caught.value.findings
    assert (finding.message, finding.fix) == (f"{tmp_path} is no checkpoint, it holds 1", f"the newest one: {tmp_path}/checkpoint-1")


def test_rotation_keeps_the_limit_and_the_best(tmp_path: Path) -> None:
    checkpointer, _, _ = make(tmp_path, keep=2)
    for step in (1, 2, 3, 4):
        checkpointer.best = tmp_path / "checkpoint-1"
        assert checkpointer.save(step, {}, wait=True)
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-3", "checkpoint-4"]


def test_of_several_processes_one_rotates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    rotate = checkpoint_files.rotate

    def counted(*args: Any) -> list[Path]:
        calls.append(threading.current_thread().name)
        return rotate(*args)

    monkeypatch.setattr(checkpoint.files, "rotate", counted)

    def body(coordinator: Coordinator) -> bool:
        checkpointer = Checkpointer(tmp_path, FileEngine(coordinator.process_index), coordinator, keep=1)
        return all(checkpointer.save(step, {}, wait=True) for step in (1, 2, 3))

    assert on_ranks(2, body) == [True, True]
    assert len(calls) == 3
    assert names(tmp_path) == ["checkpoint-3"]
    assert names(tmp_path / "checkpoint-3" / "state") == ["shard-0.bin", "shard-1.bin"]


@pytest.mark.parametrize("broken", ["at start", "in the background", "in torch's writer"])
@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_that_cannot_write_fails_the_save_and_nothing_else(broken: str, rank: int, tmp_path: Path) -> None:
    def body(coordinator: Coordinator) -> tuple[list[bool], list[str]]:
        engine, log = FileEngine(coordinator.process_index), Log()
        checkpointer = Checkpointer(tmp_path, engine, coordinator, keep=1, on_event=log)
        done = [checkpointer.save(1, {}, wait=True)]
        engine.broken = broken if coordinator.process_index == rank else ""
        done.append(checkpointer.save(2, {}, wait=True))
        there = names(tmp_path)
        coordinator.gather(None)
        if coordinator.is_main_process:
            assert there == ["checkpoint-1"]  # nothing older went, nothing half-written stays
        engine.broken = ""
        done.append(checkpointer.save(3, {}, wait=True))
        assert coordinator.num_renewed == 1  # type: ignore[attr-defined]
        return done, [fields["reason"] for fields in log.of("save_failed")]

    results = on_ranks(2, body)
    assert [done for done, _ in results] == [[True, False, True]] * 2
    for _, reasons in results:
        assert len(reasons) == 1 and "No space left on device" in reasons[0]
    assert names(tmp_path) == ["checkpoint-3"]


def test_too_little_room_is_seen_before_anything_is_written(tmp_path: Path) -> None:
    checkpointer, _, log = make(tmp_path, state_bytes=2**60)
    assert not checkpointer.save(1, {})
    (failed,) = log.of("save_failed")
    assert failed["reason"].startswith(f"a checkpoint needs about 1073741824.00 GiB, {tmp_path} has ")
    assert names(tmp_path) == []


def test_too_little_room_for_a_small_model_is_said_in_small_units(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        checkpointer, _, log = make(disk, state_bytes=3 << 20)
        assert not checkpointer.save(1, {})
        assert log.of("save_failed")[0]["reason"] == f"a checkpoint needs about 3.0 MiB, {disk} has 0.1 MiB free; {MAKE_ROOM}"


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_fails_the_save_and_leaves_older_ones(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "2m") as disk:
        checkpointer, engine, log = make(disk, keep=1)
        assert checkpointer.save(1, {}, wait=True)
        engine.size_bytes = 4 * 2**20
        assert checkpointer.save(2, {})  # begins: the room is missing only while the thread writes
        assert not checkpointer.finish()
        (failed,) = log.of("save_failed")
        full = f"the disk is full: 0.0 MiB free at {disk}; {MAKE_ROOM}"
        assert failed["step"] == 2 and failed["reason"] == f"OSError: [Errno 28] No space left on device ({full})"
        assert names(disk) == ["checkpoint-1"] and checkpointer.find("latest") == disk / "checkpoint-1"
        engine.size_bytes = 1000
        assert checkpointer.save(3, {}, wait=True)
        assert names(disk) == ["checkpoint-3"]


def test_the_report_of_an_end_that_has_no_room_is_left_out(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        with contextlib.suppress(OSError), open(disk / "full", "wb", buffering=0) as file:
            while file.write(b"0" * 4096):
                pass
        run_folder.record_exit(disk, 1, "killed")
        assert names(disk) == ["full"]
        (disk / "full").unlink()
        run_folder.record_exit(disk, 1, "killed")
        report = (disk / "exit.json").read_text()
        assert json.loads(report)["reason"] == "killed" and report.endswith("}\n")
        run_folder.add_ranks(disk, {"0": "main"}, 0.0)
        report = (disk / "exit.json").read_text()
        assert json.loads(report)["ranks"] == {"0": "main"} and report.endswith("}\n")


@pytest.mark.parametrize(
    ("reports", "told"),
    [
        ([("rank 1 has ended", 1, True), ("rank 1 was killed", 1, False)], "rank 1 was killed"),
        ([("rank 1 was killed", 1, False), ("rank 1 has ended", 1, True)], "rank 1 was killed"),
        ([("rank 1 has ended", 1, True), ("stopped by SIGTERM", 75, False)], "rank 1 has ended"),  # by the launcher, because of that
        ([("rank 1 has ended", 1, True), ("rank 1 is silent", 1, True)], "rank 1 has ended"),
        ([("rank 1 was killed", 1, False), ("rank 0: a bug", 1, False)], "rank 1 was killed"),
    ],
)
def test_the_cause_of_an_end_is_told_whoever_is_first(reports: list[tuple[str, int, bool]], told: str, tmp_path: Path) -> None:
    for number, (reason, code, follows) in enumerate(reports):
        run_folder.record_exit(tmp_path, code, reason, number, 1.0, is_consequence=follows)
        if number == 0:
            run_folder.add_ranks(tmp_path, {"0": "main"}, 1.0)
    report = json.loads((tmp_path / "exit.json").read_text())
    assert report["reason"] == told and report["ranks"] == {"0": "main"}
    assert ("is_consequence" in report) == (told == "rank 1 has ended")


def test_a_save_that_is_there_already_is_not_written_again(tmp_path: Path) -> None:
    checkpointer, _, _ = make(tmp_path)
    assert checkpointer.save(1, {}, wait=True)
    before = (tmp_path / "checkpoint-1" / "state" / "shard-0.bin").read_bytes()
    assert checkpointer.save(1, {}, wait=True)
    assert (tmp_path / "checkpoint-1" / "state" / "shard-0.bin").read_bytes() == before


def test_a_folder_that_was_removed_is_not_made_again(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    checkpointer, _, log = make(output)
    shutil.rmtree(output)
    assert not checkpointer.save(1, {})
    assert log.of("save_failed")[0]["reason"] == f"{output} is gone" and not output.exists()
