"""DeepSpeed's operators in torch's folder of compiled extensions: what is there, and locks that killed compilations leave behind.

torch compiles an extension under a lock file, `<extensions>/<version>/<name>/lock`, which carries neither a process id nor a time limit
(torch.utils.file_baton). A job killed while it compiles leaves the file, and every later job of this user waits for it without end and
without a word. Seen with deepspeed_shm_comm, which DeepSpeed compiles at the first start on a CPU machine.

A lock is removed only where its owner is known to be gone: whoever compiles keeps the file open, which shows on its own machine; and jobs
of ours write into it which machine that is. The folder may be on a disk that other machines or containers share: where the owner may be one
of them, it is waited for, up to a limit.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger("harness")


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


def find_ninja() -> None:
    """torch compiles with the `ninja` of PATH. DeepSpeed's own is beside the interpreter, where only an activated environment looks."""
    beside = Path(sys.executable).parent
    if shutil.which("ninja") is None and (beside / "ninja").exists():
        os.environ["PATH"] = os.pathsep.join(filter(None, (os.environ.get("PATH"), str(beside))))


class LockedBuildError(RuntimeError):
    """A lock stayed for longer than any compilation takes, or the one who held it died."""


def this_machine() -> str:
    """Tells the processes that this one can see from all others: the boot of the machine, the container's process numbers, and its name."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')} {platform.node()}"


def is_held(lock: Path) -> bool:
    """Whether a process that can be seen from here has the lock open, as the one that compiles has."""
    wanted = str(lock.resolve())
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # processes of others, and those that just ended
            if os.readlink(link) == wanted:
                return True
    return False


def is_private(folder: Path) -> bool:
    """Whether nobody but the processes that can be seen from here can compile in the folder.

    A disk of this machine, seen from outside of all containers, or a container's own layer; a bound folder may be in other containers too.
    """
    path = str(folder.resolve())
    mounts = [line.split() for line in Path("/proc/mounts").read_text(encoding="utf-8", errors="replace").splitlines()]
    holding = [(len(fields[1]), fields[2]) for fields in mounts if path == fields[1] or path.startswith(fields[1].rstrip("/") + "/")]
    kind = max(holding, default=(0, ""))[1]
    sees_all = os.readlink("/proc/self/ns/pid") == _FIRST_PID_NAMESPACE
    return kind in ("overlay", "tmpfs") or (sees_all and kind in _DISKS)


_FIRST_PID_NAMESPACE = "pid:[4026531836]"  # a constant of Linux, PROC_PID_INIT_INO
_DISKS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs")


_GIVEN_BACK_S = 0.5  # between closing and removing, on a busy machine


def _is_same_file(path: Path, status: os.stat_result) -> bool:
    with contextlib.suppress(OSError):
        now = path.stat()
        return (now.st_ino, now.st_dev, now.st_mtime_ns) == (status.st_ino, status.st_dev, status.st_mtime_ns)
    return False


def owner_of(lock: Path) -> str:
    """Name of the machine that compiles, where its job wrote it; else empty."""
    with contextlib.suppress(OSError, IndexError):
        return lock.read_text(encoding="utf-8", errors="replace").split(" ", 2)[2]
    return ""


def is_abandoned(lock: Path, patience_s: float = 60.0) -> bool:
    """Whether the one who took the lock is known to be gone.

    A lock that is given back is closed first and removed then, and the processes are not looked through in an instant: what nobody has
    open is looked at a second time, and must be the same lock.

    Args:
        patience_s: a lock that bears no name is given so long: it may have been made just now, and be opened next.
    """
    try:
        mark, status = lock.read_text(encoding="utf-8", errors="replace"), lock.stat()
    except OSError:
        return False
    age_s = time.time() - status.st_mtime
    if is_held(lock) or status.st_uid != os.geteuid():  # what another user's processes have open is not shown
        return False
    if not (mark == this_machine() if mark else age_s >= patience_s and is_private(lock.parent)):
        return False
    time.sleep(_GIVEN_BACK_S)
    return _is_same_file(lock, status) and not is_held(lock) and _is_same_file(lock, status)


def clear_abandoned_locks(folder: Path | None = None, patience_s: float = 60.0) -> list[Path]:
    """Removes the locks of compilations that are known to have ended; call it before anything is compiled.

    Args:
        folder: stands for torch's folder of extensions.

    Returns:
        The locks that were removed.
    """
    root = extensions_folder() if folder is None else folder
    removed: list[Path] = []
    for lock in sorted([*root.glob("*/lock"), *root.glob("*/*/lock")]):
        if is_abandoned(lock, patience_s):
            lock.unlink(missing_ok=True)
            removed.append(lock)
    return removed


def wait_for_lock(lock: Path, limit_s: float) -> None:
    """Until the lock is gone.

    Raises:
        LockedBuildError: its owner has died, or the limit has passed; says what to do.
    """
    started = time.monotonic()
    deadline, said = started + limit_s, False
    while lock.exists():
        if not said and time.monotonic() > started + 2.0:
            log.info("waiting until %s is compiled by another process", lock.parent.name)
            said = True
        if is_abandoned(lock):
            raise LockedBuildError(
                f"the compilation of {lock.parent.name} that this process waited for was killed: start again, or rm {lock}"
            )
        if time.monotonic() > deadline:
            where = f" on {owner}" if (owner := owner_of(lock)) else ""
            raise LockedBuildError(
                f"{lock.parent.name} has been locked for {limit_s:.0f} s by a compilation{where}: if none runs on any machine that shares"
                f" the folder, rm {lock}"
            )
        time.sleep(0.2)


def limit_waits(limit_s: float) -> None:
    """From here on torch's compilations in this process write into their lock whose it is, and wait for another's at most `limit_s`."""
    from torch.utils.file_baton import FileBaton

    take = FileBaton.try_acquire

    def try_acquire(baton: Any) -> bool | None:
        taken = take(baton)
        if taken:
            with contextlib.suppress(OSError):
                Path(baton.lock_file_path).write_text(this_machine(), encoding="utf-8")
        return taken

    if not hasattr(take, "__wrapped__"):
        functools.update_wrapper(try_acquire, take)
        FileBaton.try_acquire = try_acquire  # type: ignore[method-assign, assignment]
    FileBaton.wait = lambda baton: wait_for_lock(Path(baton.lock_file_path), limit_s)  # type: ignore[method-assign, assignment]
