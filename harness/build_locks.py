"""DeepSpeed's operators in torch's folder of compiled extensions: what is there, and locks that killed compilations leave behind.

torch compiles an extension under a lock file, `<extensions>/<version>/<name>/lock`, which carries neither a process id nor a time limit
(torch.utils.file_baton). A job killed while it compiles leaves the file, and every later job of this user waits for it without end and
without a word. Seen with deepspeed_shm_comm, which DeepSpeed compiles at the first start on a CPU machine.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path


def extensions_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Where torch compiles extensions."""
    environ = os.environ if environ is None else environ
    if folder := environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(folder)
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_extensions"


def is_compiled(name: str, newer_than: Iterable[Path] = (), environ: Mapping[str, str] | None = None) -> bool:
    """Whether torch will find this extension compiled; else it compiles it when it is loaded.

    Args:
        name: of the operator, such as "cpu_adam".
        newer_than: files it is made from: it is compiled again where one of them is newer.
    """
    environ = os.environ if environ is None else environ
    # A folder of the user's own holds the extensions themselves, torch's has one for each Python and CUDA.
    version = "" if environ.get("TORCH_EXTENSIONS_DIR") else f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}_*/"
    made_from_s = max((path.stat().st_mtime for path in newer_than), default=0.0)
    return any(path.stat().st_mtime >= made_from_s for path in extensions_folder(environ).glob(f"{version}{name}/{name}.so"))


def is_being_built(folder: Path) -> bool:
    """Whether a process of this machine works in `folder`: ninja and the compilers it starts do."""
    wanted = str(folder.resolve())
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                if os.readlink(f"/proc/{entry}/cwd") == wanted:
                    return True
            except OSError:
                continue
    return False


def clear_stale_build_locks(folder: Path | None = None, patience_s: float = 60.0) -> list[Path]:
    """Removes the locks of compilations that no longer run; call it before anything is compiled.

    A lock younger than `patience_s` whose compiler is not to be seen may be a job that is just about to start it: it is waited for.

    Args:
        folder: stands for torch's folder of extensions.

    Returns:
        The locks that were removed.
    """
    root = extensions_folder() if folder is None else folder
    removed: list[Path] = []
    for lock in sorted([*root.glob("*/lock"), *root.glob("*/*/lock")]):
        while not is_being_built(lock.parent):
            try:
                age_s = time.time() - lock.stat().st_mtime
            except FileNotFoundError:
                break
            if age_s >= patience_s:
                lock.unlink(missing_ok=True)
                removed.append(lock)
                break
            time.sleep(min(1.0, patience_s))
    return removed
