"""Compiled operators: which are there, and what is said before one is compiled. Locks of killed compilations: gone when nobody compiles."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.build_locks import clear_stale_build_locks, extensions_folder, is_compiled


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


def test_what_is_compiled(tmp_path: Path) -> None:
    mine, others = f"py{sys.version_info.major}{sys.version_info.minor}_cpu", "py27_cpu"
    for folder in (mine, others):
        (tmp_path / "torch_extensions" / folder / "cpu_adam").mkdir(parents=True)
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    (tmp_path / "torch_extensions" / others / "cpu_adam/cpu_adam.so").touch()  # another Python's
    assert not is_compiled("cpu_adam", environ=environ)
    library = tmp_path / "torch_extensions" / mine / "cpu_adam/cpu_adam.so"
    library.touch()
    assert is_compiled("cpu_adam", environ=environ) and not is_compiled("fused_adam", environ=environ)
    assert is_compiled("cpu_adam", environ={"TORCH_EXTENSIONS_DIR": str(library.parent.parent)})
    source = tmp_path / "torch.py"
    source.touch()
    os.utime(library, (time.time() - 60,) * 2)  # torch was installed again since
    assert not is_compiled("cpu_adam", [source], environ)


def test_only_what_is_compiled_is_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from harness.engines import zero

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(logging.getLogger("harness"), "propagate", True)
    caplog.set_level(logging.INFO, "harness")
    monkeypatch.setattr(zero.OpBuilder, "jit_load", lambda builder, verbose=True: f"loaded {builder.name}")
    zero.announce_compilations()
    zero.announce_compilations()  # a second engine in this process
    (tmp_path / "fused_adam").mkdir()
    (tmp_path / "fused_adam/fused_adam.so").touch()
    for name in ("cpu_adam", "fused_adam"):
        assert zero.OpBuilder.jit_load(SimpleNamespace(name=name), verbose=False) == f"loaded {name}"
    assert caplog.messages == ["compiling DeepSpeed's CPU Adam, once on this machine: about a minute"]
