"""Which checkpoint of somebody else's script is whole."""

from __future__ import annotations

import json
import os
import struct
import zipfile
from pathlib import Path

from harness.foreign_checkpoints import latest_complete


def torch_file(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data.pkl", b"0" * 100)


def trainer_checkpoint(folder: Path, step: int, num_ranks: int = 2) -> Path:
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"0" * 8)
    torch_file(path / "optimizer.pt")
    for rank in range(num_ranks):
        torch_file(path / f"rng_state_{rank}.pth")
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    stamp = 1000.0 + step
    os.utime(path, (stamp, stamp))
    return path


def test_the_newest_whole_one(tmp_path: Path) -> None:
    good = trainer_checkpoint(tmp_path, 5)
    cases = {
        6: ("trainer_state.json", None, "trainer_state.json, which is written last, is not there or not whole"),
        7: ("trainer_state.json", b'{"global', "trainer_state.json, which is written last, is not there or not whole"),
        8: ("rng_state_1.pth", None, "rng_state_1.pth is missing"),
        9: ("optimizer.pt", None, "it has no complete state of the optimizer"),
        10: ("optimizer.pt", b"PK\x03\x04cut", "optimizer.pt is cut short"),
        11: ("model.safetensors", b"\x40", "model.safetensors is cut short"),
    }
    for step, (name, content, _) in cases.items():
        path = trainer_checkpoint(tmp_path, step)
        (path / name).unlink()
        if content is not None:
            (path / name).write_bytes(content)
        os.utime(path, (1000.0 + step, 1000.0 + step))
    found, passed = latest_complete(tmp_path, 2, 0.0)
    assert found == good
    assert passed == [f"checkpoint-{step} is passed over: {cases[step][2]}" for step in sorted(cases, reverse=True)]


def test_deepspeeds_and_torchs_parts(tmp_path: Path) -> None:
    path = trainer_checkpoint(tmp_path, 5)
    (path / "optimizer.pt").unlink()
    (path / "latest").write_text("global_step5")
    torch_file(path / "global_step5" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
    assert latest_complete(tmp_path, 2, 0.0)[0] is None
    torch_file(path / "global_step5" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt")
    assert latest_complete(tmp_path, 2, 0.0)[0] == path

    path = trainer_checkpoint(tmp_path / "fsdp", 5)
    (path / "optimizer.pt").unlink()
    (path / "optimizer_0").mkdir()
    (path / "optimizer_0" / ".metadata").write_bytes(b"x")
    assert latest_complete(tmp_path / "fsdp", 2, 0.0)[0] == path


def test_accelerates_own(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints" / "checkpoint_1"
    torch_file(path / "optimizer.bin")
    (path / "random_states_0.pkl").write_bytes(b"x")
    assert latest_complete(tmp_path, 2, 0.0)[1] == ["checkpoint_1 is passed over: random_states_1.pkl is missing"]
    (path / "random_states_1.pkl").write_bytes(b"x")
    assert latest_complete(tmp_path, 2, 0.0)[0] == path
    assert latest_complete(tmp_path, 2, 1e12) == (None, ["checkpoint_1 is passed over: it is from before this run"])
    assert latest_complete(tmp_path / "nowhere", 2, 0.0) == (None, [])
