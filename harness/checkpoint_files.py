"""Files of a checkpoint folder: names, manifest of hashes, completeness, rotation. Knows nothing of engines or tensors.

    checkpoint-<step>/
      trainer_state.json   step, epoch, tokens, best metric, what the run was
      rng-<rank>.json      random states of one rank
      state/               the engine's own files
      model/               the model's config and tokenizer
      manifest.json        size and sha256 of every file above
      COMPLETE             last; without it the folder is not used

While being written the folder is called `.tmp-checkpoint-<step>`; the rename happens when every rank's files are there and hashed.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import json
import os
import random
import re
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from harness import disk_room
from harness.user_files import parse_json

MANIFEST, COMPLETE, STATE_FILE, ENGINE_FOLDER, MODEL_FOLDER = "manifest.json", "COMPLETE", "trainer_state.json", "state", "model"
_NAME = re.compile(r"checkpoint-(\d+)$")
_MARKS = ".marks"


def checkpoint_name(step: int) -> str:
    return f"checkpoint-{step}"


def step_of(folder: Path) -> int:
    """Optimizer step of a checkpoint folder by its name; -1 for any other name."""
    match = _NAME.match(folder.name)
    return int(match.group(1)) if match else -1


def list_checkpoints(output_dir: Path) -> list[Path]:
    """All checkpoint folders of a run, newest first, complete or not."""
    if not output_dir.is_dir():
        return []
    return sorted((path for path in output_dir.iterdir() if path.is_dir() and step_of(path) >= 0), key=step_of, reverse=True)


def no_checkpoint(folder: Path) -> tuple[str, str] | None:
    """For a folder that was given as a checkpoint, ours or one of transformers' Trainer, and cannot be one.

    Returns:
        (what is wrong, what to give instead), or None where it can be a checkpoint, whole or not.
    """
    try:
        if (folder / STATE_FILE).exists() or (folder / MANIFEST).exists() or step_of(folder) >= 0:
            return None
        inside = [path for path in list_checkpoints(folder) if (path / COMPLETE).exists() or (path / STATE_FILE).exists()]
    except OSError as error:
        return f"{folder} cannot be looked into: {error.strerror}", "a folder that you may read"
    if inside:
        return f"{folder} is no checkpoint, it holds {len(inside)}", f"the newest one: {inside[0]}"
    return f"{folder} is no checkpoint and holds none", f"a folder like out/{checkpoint_name(500)}, or 'latest' for the newest usable one"


def write_json(path: Path, value: Any) -> None:
    """Writes a file whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with disk_room.naming(path):
            with open(temporary, "w", encoding="utf-8") as file:
                json.dump(value, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Makes renames inside a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def data_files(folder: Path) -> list[Path]:
    """Every file of a checkpoint that its manifest covers, in a fixed order."""
    skip = {MANIFEST, COMPLETE}
    return sorted(
        path for path in folder.rglob("*") if path.is_file() and path.name not in skip and _MARKS not in path.relative_to(folder).parts
    )


def hash_share(folder: Path, index: int, count: int, on_file: Callable[[], object] = lambda: None) -> dict[str, dict[str, Any]]:
    """Size and hash of every `count`-th file from `index` on, by path relative to the folder; calls `on_file` after each."""
    share: dict[str, dict[str, Any]] = {}
    for path in data_files(folder)[index::count]:
        share[str(path.relative_to(folder))] = {"size_bytes": path.stat().st_size, "sha256": sha256_of(path)}
        on_file()
    return share


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder; those that come and go meanwhile may be missed."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total


@dataclasses.dataclass
class Marks:
    """Signs that the ranks of a job leave each other in a folder on the shared disk; no rank waits in a collective for them."""

    folder: Path
    process_index: int
    num_processes: int

    def leave(self, kind: str, content: Any = None) -> None:
        marks = self.folder / _MARKS
        marks.mkdir(exist_ok=True)
        write_json(marks / f"{kind}-{self.process_index}.json", content)

    def wait(self, kind: str, timeout_s: float, give_up: Callable[[], str | None] = lambda: None) -> list[Any]:
        """What every rank left under `kind`, in rank order.

        Raises:
            RuntimeError: a rank left "failed", or some did not come within the limit; names them.
        """
        deadline = time.monotonic() + timeout_s
        marks = self.folder / _MARKS
        while True:
            for rank in range(self.num_processes):
                failed = marks / f"failed-{rank}.json"
                if failed.exists():
                    raise RuntimeError(f"rank {rank}: {json.loads(failed.read_text(encoding='utf-8'))}")
            paths = [marks / f"{kind}-{rank}.json" for rank in range(self.num_processes)]
            missing = [rank for rank, path in enumerate(paths) if not path.exists()]
            if not missing:
                return [json.loads(path.read_text(encoding="utf-8")) for path in paths]
            if time.monotonic() > deadline:
                raise RuntimeError(f"ranks {missing} had not written their files after {timeout_s:.0f} s")
            if reason := give_up():
                raise RuntimeError(reason)
            time.sleep(0.02)

    def clear(self) -> None:
        shutil.rmtree(self.folder / _MARKS, ignore_errors=True)


def complete(
    folder: Path, final: Path, shares: Sequence[dict[str, Any]], on_manifest: Callable[[Path], object] = lambda manifest: None
) -> None:
    """Writes the manifest, renames the folder to its final name, and marks it complete.

    Args:
        on_manifest: called with the manifest's path before the checkpoint can be taken for complete.
    """
    manifest: dict[str, Any] = {}
    for share in shares:
        manifest.update(share)
    write_json(folder / MANIFEST, manifest)
    on_manifest(folder / MANIFEST)
    if final.exists():  # an incomplete one of an earlier life
        shutil.rmtree(final)
    os.replace(folder, final)
    (final / COMPLETE).write_text("", encoding="utf-8")
    sync_folder(final)
    sync_folder(final.parent)


def problem_of(folder: Path, index: int = 0, count: int = 1) -> str | None:
    """Why a checkpoint cannot be used, or None. Hashes every `count`-th file from `index` on, so that ranks can share the reading."""
    if not (folder / COMPLETE).exists():
        return "not complete (it was still being written when the job ended)"
    try:
        manifest = parse_json((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "its manifest cannot be read"
    if not isinstance(manifest, dict) or not all(
        isinstance(each, dict) and {"size_bytes", "sha256"} <= each.keys() for each in manifest.values()
    ):
        return "its manifest is not one"
    if outside := [name for name in manifest if ".." in Path(name).parts or Path(name).is_absolute()]:
        return f"its manifest names {outside[0]}, outside the folder"
    # The engines' libraries look for files by pattern: one that was put there would be read unseen.
    added = [name for name in (str(path.relative_to(folder)) for path in data_files(folder / ENGINE_FOLDER)) if name not in manifest]
    if added:
        return f"its manifest does not have {added[0]}"
    for name in sorted(manifest)[index::count]:
        path = folder / name
        if not os.path.isfile(path):
            return f"{name} is missing"
        if path.stat().st_size != manifest[name]["size_bytes"]:
            return f"{name} has {path.stat().st_size} bytes, not {manifest[name]['size_bytes']}"
        if sha256_of(path) != manifest[name]["sha256"]:
            return f"{name} is damaged (its sha256 differs from the manifest's)"
    return None


def rotate(output_dir: Path, keep: int | None, protect: Iterable[Path] = ()) -> list[Path]:
    """Deletes the oldest complete checkpoints beyond `keep`; incomplete ones are left, protected ones too. Returns what went.

    Called by one process of the job, after the newest is complete.
    """
    if keep is None:
        return []
    protected = {path.resolve() for path in protect}
    done = [path for path in list_checkpoints(output_dir) if (path / COMPLETE).exists()]
    gone = [path for path in done[keep:] if path.resolve() not in protected]
    for path in gone:
        # Under another name first: a half-deleted folder must not look like a checkpoint.
        doomed = path.with_name(f".old-{path.name}")
        shutil.rmtree(doomed, ignore_errors=True)
        os.replace(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)
    return gone


def clean_temporary(output_dir: Path) -> None:
    """Removes what killed saves and rotations left behind."""
    for pattern in (".tmp-checkpoint-*", ".old-checkpoint-*"):
        for path in output_dir.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def random_state() -> dict[str, Any]:
    """All random states of this process as JSON: Python's, numpy's, torch's on the CPU and on this process's GPU."""
    import numpy as np
    import torch

    def text(state: Any) -> str:
        return base64.b64encode(state.cpu().numpy().tobytes()).decode()

    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "numpy": [name, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],  # type: ignore[arg-type]
        "torch": text(torch.get_rng_state()),
    }
    if torch.cuda.is_available():
        state["cuda"] = text(torch.cuda.get_rng_state())
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Undoes `random_state`."""
    import numpy as np
    import torch

    def tensor(text: str) -> Any:
        return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)

    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(tensor(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensor(state["cuda"]))
