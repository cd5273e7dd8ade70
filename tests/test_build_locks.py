"""Compiled operators: which are there, and what is said before one is compiled. Locks of killed compilations: gone when nobody compiles."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness import build_locks
from harness.build_locks import LockedBuildError, clear_abandoned_locks, extensions_folder, is_compiled, limit_waits, this_machine
from tests.launching import children_of


def lock_of(root: Path, name: str, age_s: float = 0.0, mark: str = "") -> Path:
    lock = root / name / "lock"
    lock.parent.mkdir(parents=True)
    lock.write_text(mark)
    os.utime(lock, (time.time() - age_s,) * 2)
    return lock


@pytest.fixture
def private(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_locks, "is_private", lambda folder: True)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_locks, "is_private", lambda folder: False)


def test_a_lock_of_this_machine_that_nobody_has_open_goes_at_once(shared: None, tmp_path: Path) -> None:
    lock = lock_of(tmp_path, "py311_cpu/deepspeed_shm_comm", mark=this_machine())
    (lock.parent / "build.ninja").touch()
    assert clear_abandoned_locks(tmp_path) == [lock]
    assert not lock.exists() and (lock.parent / "build.ninja").exists()


def test_a_lock_that_is_open_stays_whoever_has_it(private: None, tmp_path: Path) -> None:
    lock = lock_of(tmp_path, "py311_cpu/cpu_adam", 3600, mark=this_machine())
    with open(lock) as file:
        compiler = subprocess.Popen(["sleep", "60"], pass_fds=[file.fileno()])
    try:
        assert clear_abandoned_locks(tmp_path) == [] and lock.exists()
    finally:
        compiler.kill()
        compiler.wait()
    assert clear_abandoned_locks(tmp_path) == [lock]


@pytest.mark.parametrize("taken", [False, True], ids=["gone", "and taken by the next"])
@pytest.mark.parametrize("mark", [True, False], ids=["named", "of a minute ago"])
def test_a_lock_that_is_given_back_while_it_is_looked_at_is_nobodys_failure(
    mark: bool, taken: bool, private: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen where a look through all processes takes a while: the other rank had just found its operator compiled."""
    lock = lock_of(tmp_path, "cpu_adam", 61.0, mark=this_machine() if mark else "")
    owner = os.open(lock, os.O_RDONLY)
    taken_as: list[int] = []

    def give_back() -> None:
        lock.unlink()
        if taken:
            taken_as.append(os.open(lock, os.O_CREAT | os.O_EXCL))

    timer, is_held = threading.Timer(0.1, give_back), build_locks.is_held

    def closed_meanwhile(path: Path) -> bool:
        if timer.ident is None:
            os.close(owner)
            timer.start()
        return is_held(path)

    monkeypatch.setattr(build_locks, "is_held", closed_meanwhile)
    assert not build_locks.is_abandoned(lock)
    timer.join()
    assert lock.exists() is taken
    assert build_locks.is_abandoned(lock) is False
    for file in taken_as:
        os.close(file)


@pytest.mark.parametrize(("mark", "age_s"), [("another-boot pid:[1] node7", 3600), ("", 3600)])
def test_a_lock_that_may_be_another_machines_stays(mark: str, age_s: float, shared: None, tmp_path: Path) -> None:
    lock = lock_of(tmp_path, "cpu_adam", age_s, mark)
    assert clear_abandoned_locks(tmp_path) == [] and lock.exists()
    assert build_locks.owner_of(lock) == ("node7" if mark else "")


@pytest.mark.parametrize(("age_s", "goes"), [(61.0, True), (30.0, False)])
def test_a_lock_without_a_name_in_a_folder_of_this_machine_is_given_a_minute(
    age_s: float, goes: bool, private: None, tmp_path: Path
) -> None:
    lock = lock_of(tmp_path, "fused_adam", age_s)
    assert clear_abandoned_locks(tmp_path) == [lock] * goes


def test_nothing_compiled_yet(tmp_path: Path) -> None:
    assert clear_abandoned_locks(tmp_path / "nix") == []


@pytest.mark.parametrize(
    ("mounts", "namespace", "expected"),
    [
        ("/ ext4\n", "pid:[4026531836]", True),
        ("/ ext4\n", "pid:[4026531999]", False),  # a folder of the host, perhaps, which other containers have too
        ("/ overlay\n", "pid:[4026531999]", True),
        ("/ ext4\n/home nfs4\n", "pid:[4026531836]", False),
    ],
)
def test_whose_folder_it_is(mounts: str, namespace: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"source {line} rw 0 0\n" for line in mounts.splitlines())
    monkeypatch.setattr(build_locks.Path, "read_text", lambda path, **_: text if str(path) == "/proc/mounts" else "")
    monkeypatch.setattr(build_locks.os, "readlink", lambda path, *_, **__: namespace)
    monkeypatch.setattr(build_locks.Path, "resolve", lambda path: path)
    assert build_locks.is_private(Path("/home/me/extensions")) is expected


def test_a_wait_for_another_process_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(build_locks.log, "propagate", True)
    caplog.set_level("INFO", logger="harness")
    lock = lock_of(tmp_path, "cpu_adam")
    with open(lock, "rb"), pytest.raises(LockedBuildError, match="has been locked for"):
        build_locks.wait_for_lock(lock, 3.0)
    assert caplog.messages == ["waiting until cpu_adam is compiled by another process"]


def test_torchs_own_wait_has_a_limit_and_its_lock_a_name(shared: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.file_baton import FileBaton

    for name in ("try_acquire", "wait"):
        monkeypatch.setattr(FileBaton, name, getattr(FileBaton, name))
    limit_waits(0.5)
    limit_waits(0.5)  # a second engine in this process
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    owner, waiter = FileBaton(str(lock)), FileBaton(str(lock))
    assert owner.try_acquire() and not waiter.try_acquire()
    assert lock.read_text() == this_machine()
    with pytest.raises(LockedBuildError) as caught:
        waiter.wait()
    where = f"by a compilation on {os.uname().nodename}"
    assert str(caught.value) == (f"cpu_adam has been locked for 0 s {where}: if none runs on any machine that shares the folder, rm {lock}")
    assert owner.fd is not None
    os.close(owner.fd)  # as when it is killed
    with pytest.raises(LockedBuildError, match="that this process waited for was killed: start again"):
        waiter.wait()
    lock.unlink()
    waiter.wait()


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


def test_what_another_process_did_not_finish_is_compiled_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else a run ends with "cannot open shared object file" because some other run was ended while it compiled."""
    from torch.utils.cpp_extension import JIT_EXTENSION_VERSIONER

    from harness.engines import zero

    def jit_load(builder: object, verbose: bool = True) -> str:
        if "cpu_adam" in JIT_EXTENSION_VERSIONER.entries:  # torch takes it for built
            raise ImportError("cpu_adam.so: cannot open shared object file")
        return "built"

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(logging.getLogger("harness"), "propagate", True)
    monkeypatch.setattr(zero.OpBuilder, "jit_load", jit_load)
    monkeypatch.setitem(JIT_EXTENSION_VERSIONER.entries, "cpu_adam", object())
    zero.announce_compilations()
    assert zero.OpBuilder.jit_load(SimpleNamespace(name="cpu_adam")) == "built"
    assert any("compiling it here" in message for message in caplog.messages)


def test_a_compilation_that_is_ended_gives_its_lock_back(tmp_path: Path) -> None:
    """It ends with the guard whose number it was given, and so do the compilers below it."""
    source = tmp_path / "slow.cpp"
    source.write_text("#include <torch/extension.h>\n")
    code = (
        "import sys; from harness.compile_ahead import end_with; end_with(int(sys.argv[1]))\n"
        "from torch.utils.cpp_extension import load; load('slow', sys.argv[2], build_directory=sys.argv[3])"
    )
    guard = subprocess.Popen(["sleep", "60"])
    arguments = [str(guard.pid), str(source), str(tmp_path)]
    compiling = subprocess.Popen([sys.executable, "-c", code, *arguments], stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while not ((tmp_path / "build.ninja").exists() and children_of(compiling.pid)):  # the compiler is at work
            assert time.monotonic() < deadline and compiling.poll() is None
            time.sleep(0.05)
        guard.kill()
        guard.wait()
        assert compiling.wait(20) == 143
        assert not (tmp_path / "lock").exists() and not (tmp_path / "slow.so").exists()
        time.sleep(0.5)
        with pytest.raises(ProcessLookupError):  # nobody of its session is left
            os.killpg(compiling.pid, 0)
    finally:
        guard.kill()
        guard.wait()
        if compiling.poll() is None:
            os.killpg(compiling.pid, 9)
            compiling.wait()


@pytest.mark.parametrize(("path", "beside", "expected"), [("", True, "{bin}"), ("/no", True, "/no:{bin}"), ("/no", False, "/no")])
def test_the_ninja_of_an_environment_that_is_not_activated_is_found(
    path: str, beside: bool, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if beside:
        (tmp_path / "ninja").touch(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", path)
    for _ in range(2):  # what is found is not added again
        build_locks.find_ninja()
    assert os.environ["PATH"] == expected.format(bin=tmp_path)
