"""Full disks: every writer of a run's files names the path and what to do, and leaves nothing half-written."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from harness import checkpoint_files, disk_room, node_cache, own_checkpoints, run_folder
from harness.args import Arguments
from harness.disk_room import MAKE_ROOM
from harness.findings import UserError

FULL, NO_RIGHT = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@pytest.mark.parametrize(
    ("error", "is_full"),
    [
        (FULL, True),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), True),
        (RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"), True),
        (NO_RIGHT, False),
        (RuntimeError("another"), False),
    ],
)
def test_a_full_disk_is_told_from_other_errors(error: Exception, is_full: bool, tmp_path: Path) -> None:
    assert disk_room.is_full(error) is is_full
    assert disk_room.write_fix(error) == (MAKE_ROOM if is_full else "choose a folder you may write to")
    with pytest.raises(OSError if is_full else type(error)) as caught, disk_room.naming(tmp_path / "final", 3 << 20):
        raise error
    if is_full:
        assert isinstance(caught.value, OSError)
        assert str(caught.value.strerror).startswith(f"cannot write {tmp_path}/final of 3.0 MiB: ")
        assert str(caught.value.strerror).endswith(f" MiB free); {MAKE_ROOM}")
    else:
        assert caught.value is error


def full_file(monkeypatch: pytest.MonkeyPatch, error: OSError = FULL) -> None:
    """From here on files can be made, but nothing can be brought onto the disk."""

    def refuse(handle: int) -> None:
        raise type(error)(error.errno, error.strerror)

    monkeypatch.setattr(os, "fsync", refuse)


def test_the_probe_of_a_folder_writes_something_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk_room.fill_probe(tmp_path / ".writable")
    full_file(monkeypatch)
    args: Any = Arguments()
    with pytest.raises(UserError) as caught:
        run_folder.prepare(tmp_path, args)
    [finding] = caught.value.findings
    assert (finding.key, finding.message) == ("--output_dir", f"cannot write to {tmp_path}: No space left on device")
    assert finding.fix == MAKE_ROOM
    full_file(monkeypatch, NO_RIGHT)
    with pytest.raises(UserError, match="choose a folder you may write to"):
        run_folder.prepare(tmp_path, args)
    assert list(tmp_path.iterdir()) == []


def test_a_json_file_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint_files.write_json(tmp_path / "ladder.json", {"now": 1})
    full_file(monkeypatch)
    with pytest.raises(OSError, match=rf"cannot write {tmp_path}/ladder.json: No space left on device \(.* free\); {MAKE_ROOM}"):
        checkpoint_files.write_json(tmp_path / "ladder.json", {"now": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["ladder.json"]
    assert json.loads((tmp_path / "ladder.json").read_text()) == {"now": 1}

    def refuse(*_args: Any, **_options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match=f"cannot write {tmp_path}/config.json: .*; {MAKE_ROOM}"):
        run_folder._write(tmp_path / "config.json", {})
    with pytest.raises(OSError, match="No space"):
        node_cache.write_atomically(tmp_path / "facts.json", "{}")
    assert [path.name for path in tmp_path.iterdir()] == ["ladder.json"]


def test_a_cache_on_a_full_disk_is_named_and_no_empty_lock_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(node_cache.json, "dump", refuse)
    with pytest.raises(UserError) as caught:
        node_cache.make_once(tmp_path, "tokens", lambda folder: None)
    [finding] = caught.value.findings
    assert finding.message == f"cannot write tokenised data to {tmp_path}: No space left on device"
    assert (finding.key, finding.fix) == ("--data_cache_dir", MAKE_ROOM)
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_what_runs_remember_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(own_checkpoints.VARIABLE, str(tmp_path / "state"))
    (tmp_path / "manifest.json").write_text("{}")
    full_file(monkeypatch)
    problem = own_checkpoints.record(tmp_path / "manifest.json")
    assert problem == f"cannot write to {tmp_path}/state/checkpoints: No space left on device; {MAKE_ROOM}"


def test_an_export_names_its_size_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from transformers import LlamaConfig

    from harness import export
    from harness.modeling import byte_tokenizer

    def refuse(*_args: Any, **_options: Any) -> None:
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", refuse)
    weights = {"weight": torch.zeros(1024, 1024)}
    shapes = {name: tuple(value.shape) for name, value in weights.items()}
    with pytest.raises(OSError, match=rf"cannot write {tmp_path}/final of 2.0 MiB: No space left on device \(.*\); {MAKE_ROOM}"):
        export.export_model(
            tmp_path / "final", iter(weights.items()), shapes, LlamaConfig(), byte_tokenizer(), dtype=torch.bfloat16, is_main_process=True
        )
    assert list(tmp_path.iterdir()) == []
