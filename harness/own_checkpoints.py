"""Which checkpoints this user's runs have written: hashes of their manifests, kept outside of them, in a folder of the user's own.

The files that torch's distributed checkpoints and DeepSpeed keep beside the tensors are pickles: whoever reads one runs what its writer put
into it. So an engine's files are read only where the checkpoint's manifest, whose hashes they all have, is one that a run of this user has
written. Whoever sends a checkpoint can forge everything in it, but not what is in this folder.

The name of a record is the hash of the manifest, so a checkpoint may be moved or copied. The folder must be there in the next start: where
the home folder is not kept (containers) or not shared (some clusters), HARNESS_STATE_DIR says where else.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

from harness import checkpoint_files, disk_room
from harness.findings import UserError, user_error

VARIABLE = "HARNESS_STATE_DIR"
FLAG = "--trust_checkpoint"


def state_folder(environ: Mapping[str, str] | None = None) -> Path:
    """The user's folder for what runs remember.

    Raises:
        RuntimeError: this user has no home folder, and nothing says what to take instead.
    """
    environ = os.environ if environ is None else environ
    if folder := environ.get(VARIABLE):
        return Path(folder).absolute()
    if state := environ.get("XDG_STATE_HOME"):
        return Path(state) / "harness"
    return Path.home() / ".local/state/harness"


def _records() -> Path:
    return state_folder() / "checkpoints"


def _is_ours_alone(path: Path) -> bool:
    """Nobody else can write it."""
    status = path.lstat()
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022


def record(manifest: Path) -> str | None:
    """Remembers a checkpoint that this run has written; call it before the checkpoint counts as complete.

    Returns:
        Why it could not be done; the checkpoint is as good as any, but the next start will not know whose it is.
    """
    content = json.dumps({"path": str(manifest.parent.absolute()), "written_at_s": time.time()}) + "\n"
    try:
        folder = _records()
    except RuntimeError as error:
        return str(error)
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        if not _is_ours_alone(folder):
            return f"others can write to {folder}"
        handle = os.open(folder / checkpoint_files.sha256_of(manifest), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        checkpoint_files.sync_folder(folder)
    except OSError as error:  # which names no path once the file is open
        return f"cannot write to {folder}: {error.strerror}; {disk_room.write_fix(error)}"
    return None


def is_own(checkpoint: Path) -> bool:
    """Whether a run of this user has written the manifest that the checkpoint has now."""
    try:
        entry = _records() / checkpoint_files.sha256_of(checkpoint / checkpoint_files.MANIFEST)
        return _is_ours_alone(entry.parent) and _is_ours_alone(entry)
    except (OSError, RuntimeError):
        return False


def refusal(checkpoint: Path, trust: bool) -> UserError | None:
    """The error for a checkpoint whose files must not be read; None for one's own, and for any that is trusted by flag.

    Its files are still to be compared with the manifest (checkpoint_files.problem_of).
    """
    if trust or is_own(checkpoint):
        return None
    try:
        known = f"no run of yours that {_records()} knows of has written {checkpoint}"
    except RuntimeError:
        known = f"who wrote {checkpoint} cannot be known, because this user has no home folder"
    return user_error(
        FLAG,
        f"{known}, and reading its files can run code that is in them",
        f"if you know who made it, add {FLAG}; where home folders are not kept or shared, set {VARIABLE} to a folder that is",
    )
