"""Folders that several processes want and one makes: once per node, without any collective.

A process that waits here waits on files, so no time limit of NCCL or gloo can hit it, however long the work takes. What is relied on
is only what also holds on a disk that several nodes share: creating a file exclusively, and renaming. The lock saves double work; that
a result is whole does not depend on it, because results appear by a rename of a finished folder.

    <cache>/<name>/            the result
    <cache>/.<name>.lock       held while it is made; its holder touches it every second
    <cache>/.<name>.failed     the reason why making it failed last
    <cache>/.<name>.<id>.tmp/  being made
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from harness import disk_room
from harness.findings import Finding, UserError, user_error

HEARTBEAT_S = 1.0
STALE_S = 60.0
"""A lock that nobody touched for this long, as the waiting process's own clock has it, belongs to a dead process."""
POLL_S = 0.2
HEAD_START_S = 3.0
"""Processes other than a node's first let that one begin, so that it is the one that shows progress."""
_OLD_TMP_S = 24 * 3600.0


class PreparationError(RuntimeError):
    """Another process of this node failed in preparing; the message is its reason."""


def make_once(
    cache: Path,
    name: str,
    build: Callable[[Path], None],
    *,
    first: bool = True,
    rebuild: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Path:
    """The folder `cache/name`; made by `build` unless it is there.

    Args:
        cache: folder of all results; created.
        name: what identifies the result: equal names mean equal contents.
        build: fills an existing empty folder, all or nothing. Runs in one of the processes that call this at the same time.
        first: this process may begin at once; others give it a head start.
        rebuild: make it anew even if it is there. Only the process that finds it so and is `first` does.
        say: told when there is something to wait for.

    Raises:
        UserError: `build` raised one, here or in another process; or the cache cannot be written.
        PreparationError: `build` failed otherwise in another process.
    """
    target = cache / name
    _create(cache)
    if rebuild and first and target.exists():
        discard(target)
    failed_before = _read_failure(cache, name)
    waiting_since = time.monotonic()
    told = False
    watch = _LockWatch(cache / f".{name}.lock")
    while not target.exists():
        failure = _read_failure(cache, name)
        if failure is not None and failure != failed_before:
            raise _as_error(failure)
        may_begin = first or time.monotonic() - waiting_since > HEAD_START_S
        if may_begin and _acquire(watch, cache):
            with watch.held():
                if not target.exists():  # made between our look and our lock
                    _build(cache, name, build)
            break
        if not told and watch.owner():
            say(f"waiting for {watch.owner()} to prepare {name}")
            told = True
        time.sleep(POLL_S)
    return target


def _acquire(watch: _LockWatch, cache: Path) -> bool:
    try:
        return watch.try_acquire()
    except OSError as error:
        raise _cache_error(error, cache) from None


def _build(cache: Path, name: str, build: Callable[[Path], None]) -> None:
    _remove_old(cache, name)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(cache / f".{name}.failed")
    temporary = cache / f".{name}.{uuid.uuid4().hex[:12]}.tmp"
    try:
        temporary.mkdir()
        build(temporary)
        _publish(temporary, cache / name)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        reason = _as_user_error(error, cache)
        with contextlib.suppress(OSError):
            _write_failure(cache, name, reason)
        if reason is not error:
            raise reason from error
        raise


def _publish(temporary: Path, target: Path) -> None:
    """Renames a finished folder; if another node was first, its equal result stays."""
    try:
        os.rename(temporary, target)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        shutil.rmtree(temporary, ignore_errors=True)


def _create(cache: Path) -> None:
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if not os.access(cache, os.W_OK):
            raise PermissionError(errno.EACCES, "not writable", str(cache))
    except OSError as error:
        raise _cache_error(error, cache) from None


def _cache_error(error: OSError, cache: Path) -> UserError:
    message = f"cannot write tokenised data to {cache}: {error.strerror}"
    return user_error("--data_cache_dir", message, disk_room.write_fix(error))


def _as_user_error(error: BaseException, cache: Path) -> BaseException:
    """No space, no quota and no permission are the user's to mend, not a traceback."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return _cache_error(error, cache)
    return error


def discard(target: Path) -> None:
    """Moves a result away before deleting it: it is there whole or not at all."""
    away = target.with_name(f".{target.name}.{uuid.uuid4().hex[:12]}.tmp")
    with contextlib.suppress(FileNotFoundError):
        os.rename(target, away)
        shutil.rmtree(away, ignore_errors=True)


def _remove_old(cache: Path, name: str) -> None:
    """Deletes what a killed process left of this result. Fresh folders stay: on a shared disk they may be another node's."""
    for path in cache.glob(f".{name}.*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _OLD_TMP_S:
                shutil.rmtree(path, ignore_errors=True)


def write_atomically(path: Path, text: str) -> None:
    """A file that is there whole or not at all."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _write_failure(cache: Path, name: str, error: BaseException) -> None:
    findings = [[f.severity, f.key, f.message, f.fix] for f in error.findings] if isinstance(error, UserError) else None
    record = {"id": uuid.uuid4().hex, "findings": findings, "reason": f"{type(error).__name__}: {error}", "host": socket.gethostname()}
    write_atomically(cache / f".{name}.failed", json.dumps(record))


def _read_failure(cache: Path, name: str) -> dict[str, Any] | None:
    try:
        return json.loads((cache / f".{name}.failed").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _as_error(failure: dict[str, Any]) -> Exception:
    if failure["findings"]:
        return UserError(Finding(*values) for values in failure["findings"])
    return PreparationError(f"the process that prepares the data failed on {failure['host']}: {failure['reason']}")


class _LockWatch:
    """One process's view of a lock file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: tuple[int, int] | None = None
        self._seen_at = 0.0

    def try_acquire(self) -> bool:
        self._break_if_dead()
        try:
            descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        except FileExistsError:
            return False
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump({"host": socket.gethostname(), "pid": os.getpid()}, file)
        except OSError:  # a full disk: a lock that names nobody would be waited for
            with contextlib.suppress(OSError):
                os.unlink(self.path)
            raise
        return True

    def _holder(self) -> dict[str, Any]:
        try:
            return json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # gone, or created this instant and still empty
            return {}

    def owner(self) -> str:
        """Who holds the lock, in words; empty if nobody does."""
        holder = self._holder()
        return f"process {holder['pid']} on {holder['host']}" if holder else ""

    def _break_if_dead(self) -> None:
        """Removes the lock of a process that is dead on this host, or that has not touched it for STALE_S."""
        try:
            status = os.stat(self.path)
        except OSError:
            self._seen = None
            return
        mark = (status.st_ino, status.st_mtime_ns)
        now = time.monotonic()
        if mark != self._seen:
            self._seen, self._seen_at = mark, now
        holder = self._holder()
        dead_here = holder.get("host") == socket.gethostname() and not _is_alive(holder["pid"])
        if dead_here or now - self._seen_at > STALE_S:
            away = self.path.with_name(f"{self.path.name}.{uuid.uuid4().hex[:12]}")
            with contextlib.suppress(OSError):
                os.rename(self.path, away)
                os.unlink(away)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Touches the lock while the body runs, and releases it afterwards."""
        done = threading.Event()

        def touch() -> None:
            while not done.wait(HEARTBEAT_S):
                with contextlib.suppress(OSError):
                    os.utime(self.path)

        thread = threading.Thread(target=touch, name="cache-lock", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            with contextlib.suppress(OSError):
                os.unlink(self.path)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
