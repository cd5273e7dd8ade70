"""Locks that killed compilations leave: gone when nobody compiles, kept while somebody does."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from harness.build_locks import clear_stale_build_locks, extensions_folder


def lock_of(root: Path, name: str, age_s: float) -> Path:
    lock = root / name / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (time.time() - age_s,) * 2)
    return lock


def test_an_old_lock_without_a_compiler_goes(tmp_path: Path) -> None:
    locks = [lock_of(tmp_path, "py311_cpu/deepspeed_shm_comm", 3600), lock_of(tmp_path, "fused_adam", 61)]
    (tmp_path / "fused_adam/build.ninja").touch()
    assert clear_stale_build_locks(tmp_path) == sorted(locks)
    assert [lock.exists() for lock in locks] == [False, False]
    assert (tmp_path / "fused_adam/build.ninja").exists()


def test_a_lock_whose_compiler_runs_stays(tmp_path: Path) -> None:
    lock = lock_of(tmp_path, "py311_cpu/cpu_adam", 3600)
    compiler = subprocess.Popen(["sleep", "60"], cwd=lock.parent)
    try:
        assert clear_stale_build_locks(tmp_path) == []
        assert lock.exists()
    finally:
        compiler.kill()
        compiler.wait()
    assert clear_stale_build_locks(tmp_path) == [lock]


def test_a_young_lock_is_given_time(tmp_path: Path) -> None:
    lock = lock_of(tmp_path, "py311_cpu/cpu_adam", 0)
    started = time.monotonic()
    assert clear_stale_build_locks(tmp_path, patience_s=0.5) == [lock]
    assert time.monotonic() - started >= 0.4


def test_nothing_compiled_yet(tmp_path: Path) -> None:
    assert clear_stale_build_locks(tmp_path / "nix") == []


@pytest.mark.parametrize(
    ("environ", "expected"),
    [({"TORCH_EXTENSIONS_DIR": "/a"}, "/a"), ({"XDG_CACHE_HOME": "/c"}, "/c/torch_extensions"), ({}, "HOME/.cache/torch_extensions")],
)
def test_folder(environ: dict[str, str], expected: str) -> None:
    assert str(extensions_folder(environ)) == expected.replace("HOME", str(Path.home()))


def test_torch_uses_that_folder() -> None:
    from torch.utils.cpp_extension import get_default_build_root

    environ = {name: value for name, value in os.environ.items() if name != "TORCH_EXTENSIONS_DIR"}
    assert str(extensions_folder(environ)) == get_default_build_root()
