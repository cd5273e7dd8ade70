"""Files of a checkpoint: complete or not, damaged or not, rotated, and the signs that ranks leave each other."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import checkpoint_files as files


def make_checkpoint(output: Path, step: int, num_processes: int = 1) -> Path:
    """A complete checkpoint of three data files."""
    folder = output / f".tmp-checkpoint-{step}"
    (folder / "state").mkdir(parents=True)
    (folder / "trainer_state.json").write_text(json.dumps({"step": step}))
    (folder / "state" / "a.bin").write_bytes(bytes(range(256)) * 8)
    (folder / "state" / "b.bin").write_bytes(b"b" * 100)
    shares = [files.hash_share(folder, index, num_processes) for index in range(num_processes)]
    files.complete(folder, output / f"checkpoint-{step}", shares)
    return output / f"checkpoint-{step}"


def test_a_complete_checkpoint_has_no_problem_and_a_manifest_of_every_file(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, 7, num_processes=2)
    manifest = json.loads((folder / files.MANIFEST).read_text())
    assert sorted(manifest) == ["state/a.bin", "state/b.bin", "trainer_state.json"]
    assert manifest["state/b.bin"]["size_bytes"] == 100
    assert [files.problem_of(folder, index, 2) for index in range(2)] == [None, None]
    assert not (tmp_path / ".tmp-checkpoint-7").exists()


def flip_a_bit(folder: Path) -> None:
    content = bytearray((folder / "state" / "a.bin").read_bytes())
    content[1000] ^= 1
    (folder / "state" / "a.bin").write_bytes(content)


def rename_in_manifest(folder: Path) -> None:
    manifest = json.loads((folder / files.MANIFEST).read_text())
    manifest["../other.bin"] = manifest.pop("state/a.bin")
    (folder / files.MANIFEST).write_text(json.dumps(manifest))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "bit flipped": (flip_a_bit, "state/a.bin is damaged (its sha256 differs from the manifest's)"),
    "truncated": (lambda folder: (folder / "state" / "b.bin").write_bytes(b"b" * 99), "state/b.bin has 99 bytes, not 100"),
    "missing": (lambda folder: (folder / "state" / "b.bin").unlink(), "state/b.bin is missing"),
    "not complete": (lambda folder: (folder / files.COMPLETE).unlink(), "not complete (it was still being written when the job ended)"),
    "manifest cut": (lambda folder: (folder / files.MANIFEST).write_text('{"state'), "its manifest cannot be read"),
    "manifest of other things": (lambda folder: (folder / files.MANIFEST).write_text('{"state/a.bin": 3}'), "its manifest is not one"),
    "file added": (lambda folder: (folder / "state" / "c.pt").touch(), "its manifest does not have state/c.pt"),
    "manifest leads outside": (rename_in_manifest, "its manifest names ../other.bin, outside the folder"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_every_damage_is_named(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, 7)
    damage, message = DAMAGE[name]
    damage(folder)
    assert files.problem_of(folder) == message


def test_the_ranks_together_look_at_every_file(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, 7)
    flip_a_bit(folder)
    assert sum(files.problem_of(folder, index, 3) is not None for index in range(3)) == 1


def test_checkpoints_are_listed_by_step_newest_first_and_other_folders_left_out(tmp_path: Path) -> None:
    for step in (5, 100, 20):
        make_checkpoint(tmp_path, step)
    (tmp_path / "checkpoint-last").mkdir()
    (tmp_path / ".tmp-checkpoint-200").mkdir()
    assert [path.name for path in files.list_checkpoints(tmp_path)] == ["checkpoint-100", "checkpoint-20", "checkpoint-5"]
    assert files.list_checkpoints(tmp_path / "none") == []


def test_rotation_keeps_the_newest_complete_ones_and_the_protected_one(tmp_path: Path) -> None:
    folders = {step: make_checkpoint(tmp_path, step) for step in (1, 2, 3, 4, 5)}
    (folders[5] / files.COMPLETE).unlink()
    gone = files.rotate(tmp_path, 2, protect=[folders[1]])
    assert [path.name for path in gone] == ["checkpoint-2"]
    assert [path.name for path in files.list_checkpoints(tmp_path)] == ["checkpoint-5", "checkpoint-4", "checkpoint-3", "checkpoint-1"]
    assert files.rotate(tmp_path, None) == []


def test_what_killed_saves_and_rotations_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 1)
    for name in (".tmp-checkpoint-9", ".old-checkpoint-3", ".tmp-checkpoint-universal-checkpoint-4", "final"):
        (tmp_path / name).mkdir()
    files.clean_temporary(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1", "final"]


def test_marks_bring_every_ranks_word_in_rank_order_and_are_no_data(tmp_path: Path) -> None:
    ranks = [files.Marks(tmp_path, rank, 3) for rank in range(3)]
    for rank in (2, 0, 1):
        ranks[rank].leave("hashed", {"rank": rank})
    assert [word["rank"] for word in ranks[1].wait("hashed", 1)] == [0, 1, 2]
    assert files.data_files(tmp_path) == []
    ranks[0].clear()
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_failed_or_is_missing_is_named(tmp_path: Path) -> None:
    ranks = [files.Marks(tmp_path, rank, 3) for rank in range(3)]
    ranks[0].leave("written")
    with pytest.raises(RuntimeError, match=r"^ranks \[1, 2\] had not written their files after 0 s$"):
        ranks[0].wait("written", 0)
    with pytest.raises(RuntimeError, match=r"^no more$"):
        ranks[0].wait("written", 60, lambda: "no more")
    ranks[2].leave("failed", "No space left on device")
    with pytest.raises(RuntimeError, match=r"^rank 2: No space left on device$"):
        ranks[0].wait("written", 60)


def test_random_states_go_through_json_and_come_back() -> None:
    import numpy as np
    import torch

    def draw() -> list[float]:
        return [random.random(), float(np.random.normal()), float(np.random.normal()), float(torch.rand(()))]

    draw()
    state = json.loads(json.dumps(files.random_state()))
    expected = draw()
    assert draw() != expected
    files.restore_random_state(state)
    assert draw() == expected
