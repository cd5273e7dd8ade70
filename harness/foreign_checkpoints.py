"""Checkpoints that somebody else's script writes: which is the newest that a killed job left whole.

Known layouts: transformers' Trainer (`checkpoint-500/`, also with DeepSpeed's and FSDP's parts in it) and accelerate's `save_state`
(`step_500/`, `epoch_2/`, `checkpoint_3/`). Neither marks a checkpoint as complete, so the parts are looked at: one for each rank where
ranks write parts, no file cut short. Standard library only.
"""

from __future__ import annotations

import json
import re
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path

from harness.user_files import parse_json, read_text

_NAME = re.compile(r"(?:checkpoint|step|epoch)[-_](\d+)$")
TRAINER_STATE = "trainer_state.json"


def latest_complete(folder: Path, num_ranks: int, since_s: float) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint below a script's output folder.

    Args:
        num_ranks: that wrote it.
        since_s: older ones are another run's.

    Returns:
        The checkpoint, and one line for each newer one that was passed over.
    """
    passed: list[str] = []
    for path in _candidates(folder):
        if (problem := problem_of(path, num_ranks, since_s)) is None:
            return path, passed
        passed.append(f"{path.name} is passed over: {problem}")
    return None, passed


def _candidates(folder: Path) -> list[Path]:
    """Checkpoint folders, newest first."""
    if not folder.is_dir():
        return []
    # accelerate's automatic names put them into checkpoints/.
    below = [path for parent in (folder, folder / "checkpoints") if parent.is_dir() for path in parent.iterdir()]
    found = [path for path in below if path.is_dir() and _NAME.match(path.name)]
    return sorted(found, key=lambda path: (path.stat().st_mtime, int(_NAME.match(path.name).group(1))), reverse=True)  # type: ignore[union-attr]


def problem_of(path: Path, num_ranks: int, since_s: float) -> str | None:
    """Why a checkpoint cannot be gone on from; None where it is whole."""
    files = [file for file in path.rglob("*") if file.is_file()]
    if not files or max(file.stat().st_mtime for file in files) < since_s:
        return "it is from before this run"
    is_trainer = any(file.name.startswith("rng_state") for file in files) or (path / TRAINER_STATE).exists()
    problem = _trainer_problem(path, num_ranks) if is_trainer else _accelerate_problem(path, num_ranks)
    return problem or next((f"{file.relative_to(path)} is cut short" for file in files if not is_whole(file)), None)


def _trainer_problem(path: Path, num_ranks: int) -> str | None:
    try:
        parse_json(read_text(path / TRAINER_STATE))["global_step"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"{TRAINER_STATE}, which is written last, is not there or not whole"
    names = ["rng_state.pth"] if num_ranks == 1 else [f"rng_state_{rank}.pth" for rank in range(num_ranks)]
    if missing := [name for name in names if not (path / name).exists()]:
        return f"{missing[0]} is missing"
    if not _has_optimizer(path, "optimizer.pt", num_ranks):
        return "it has no complete state of the optimizer"
    return None


def _accelerate_problem(path: Path, num_ranks: int) -> str | None:
    names = [f"random_states_{rank}.pkl" for rank in range(num_ranks)]  # written last, one by each rank
    if missing := [name for name in names if not (path / name).exists()]:
        return f"{missing[0]} is missing"
    return None if _has_optimizer(path, "optimizer.bin", num_ranks) else "it has no complete state of the optimizer"


def _has_optimizer(path: Path, name: str, num_ranks: int) -> bool:
    """Whether the optimizer's state is there: one file, DeepSpeed's parts of all ranks, or torch's distributed checkpoint."""
    if (path / name).exists() or any((path / part / ".metadata").exists() for part in ("optimizer_0", "optimizer")):
        return True
    return any(len(parts) >= num_ranks for parts in _deepspeed_parts(path))


def _deepspeed_parts(path: Path) -> Iterator[list[Path]]:
    """The ranks' optimizer files of each of DeepSpeed's folders that a file `latest` names."""
    for latest in path.rglob("latest"):
        yield list((latest.parent / read_text(latest).strip()).glob("*_optim_states.pt"))


def is_whole(path: Path) -> bool:
    """False for a file that was cut short, as far as its format tells: torch's zip files end with an index, safetensors begin with one."""
    if path.suffix in (".pt", ".pth", ".bin", ".distcp"):
        return _is_zip_or_old(path)
    if path.suffix == ".safetensors":
        return _has_all_tensors(path)
    return True


def _is_zip_or_old(path: Path) -> bool:
    with open(path, "rb") as file:
        start = file.read(4)
    return zipfile.is_zipfile(path) if start[:2] == b"PK" else bool(start)


def _has_all_tensors(path: Path) -> bool:
    """https://huggingface.co/docs/safetensors: eight bytes for the header's length, the header, then the tensors."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        first = file.read(8)
        if len(first) < 8:
            return False
        (length,) = struct.unpack("<Q", first)
        if length > size:
            return False
        try:
            header = json.loads(file.read(length))
        except ValueError:
            return False
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return size >= 8 + length + max(ends, default=0)
