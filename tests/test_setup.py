"""The scripts that install and check: what they run, in which order, and when they have nothing to do."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Stands for python3: writes down how it is called, makes a venv by copying itself.
FAKE_PYTHON = """#!/usr/bin/env bash
echo "$(basename "$0") $*" >> "$CALLS"
[ "$1" = -c ] && exit "${FAKE_TOO_OLD:-0}"
if [ "$1 $2" = "-m venv" ]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; fi
if [ "$2 $3" = "pip config" ]; then [ -n "$FAKE_INDEX" ] && echo "$FAKE_INDEX"; exit; fi
if [[ "$2" =~ ^(pip|uv)$ ]] && [[ "$*" =~ ${FAKE_FAILING:-nothing fails} ]]; then exit 1; fi
exit 0
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder like a fresh clone, with a made-up python3 first in PATH."""
    root = tmp_path / "a clone"
    (root / "launch").mkdir(parents=True)
    for name in ("launch/env.sh", "launch/test.sh", "constraints.txt", "setup.cfg"):
        shutil.copy(ROOT / name, root / name)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python3").write_text(FAKE_PYTHON)
    (tmp_path / "bin/python3").chmod(0o755)
    return root


def bash(clone: Path, script: str, **extra: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PATH": f"{clone.parent}/bin:{os.environ['PATH']}", "CALLS": str(clone.parent / "calls"), **extra}
    return subprocess.run(["bash", "-c", script], cwd=clone.parent, env=environ, capture_output=True, text=True, timeout=60)


def calls(clone: Path) -> list[str]:
    """How python was called since the last look."""
    path = clone.parent / "calls"
    lines = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return lines


INSTALL = '. "a clone/launch/env.sh" && install_all test && echo "python=$python"'


def installs_of(made: list[str]) -> list[str]:
    return [line for line in made if " install " in line]


def test_installs_once(clone: Path) -> None:
    done = bash(clone, INSTALL)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"python={clone}/.venv/bin/python"
    made = calls(clone)
    assert [line.split()[0:3] for line in made][:2] == [["python3", "-c", "import"], ["python3", "-m", "venv"]]
    first, second = installs_of(made)
    assert all(f"-c {clone}/constraints.txt " in line for line in (first, second))
    # deepspeed's setup imports torch, so it is built after torch is there, and without a build environment of its own.
    assert first.startswith("python -m pip ") and {"torch", "numpy", "uv"} <= set(first.split())
    assert second.startswith("python -m uv ") and second.endswith(f"--no-build-isolation -e {clone}[test]")
    assert "--default-index" not in second

    assert bash(clone, INSTALL).returncode == 0
    assert installs_of(calls(clone)) == []


def test_uv_asks_the_index_of_pip(clone: Path) -> None:
    bash(clone, INSTALL, FAKE_INDEX="https://mirror.example/simple")
    assert "--default-index https://mirror.example/simple " in installs_of(calls(clone))[-1]


def test_pip_installs_where_uv_cannot(clone: Path) -> None:
    assert bash(clone, INSTALL, FAKE_FAILING="-m uv").returncode == 0
    _, by_uv, *by_pip = installs_of(calls(clone))
    assert " -m uv " in by_uv and all(line.startswith("python -m pip ") and "--no-compile" in line for line in by_pip)
    assert by_pip[0].endswith("--no-build-isolation deepspeed")
    assert by_pip[1].endswith(f"--no-build-isolation -e {clone}[test]")


@pytest.mark.parametrize("name", ["constraints.txt", "setup.cfg"])
def test_installs_again_when_the_pins_change(clone: Path, name: str) -> None:
    bash(clone, INSTALL)
    calls(clone)
    with (clone / name).open("a") as file:
        file.write("\n# changed\n")
    assert bash(clone, INSTALL).returncode == 0
    again = calls(clone)
    assert len(installs_of(again)) == 2
    assert not [line for line in again if " venv " in line]


def test_an_environment_without_pip_is_made_again(clone: Path) -> None:
    """Its making was interrupted before pip was there."""
    (clone / ".venv/bin").mkdir(parents=True)
    (clone / ".venv/bin/python").write_text("#!/bin/sh\nexit 1\n")
    (clone / ".venv/bin/python").chmod(0o755)
    assert bash(clone, INSTALL).returncode == 0
    assert len([line for line in calls(clone) if " venv " in line]) == 1


def test_a_failed_installation_is_tried_again(clone: Path) -> None:
    failed = bash(clone, INSTALL, FAKE_FAILING="-m uv|deepspeed")
    assert failed.returncode == 1 and "not installed: pip says above why" in failed.stderr
    assert calls(clone)[-1].endswith("deepspeed")
    assert bash(clone, INSTALL).returncode == 0
    assert len(installs_of(calls(clone))) == 2


def test_an_old_python_is_refused(clone: Path) -> None:
    done = bash(clone, INSTALL, FAKE_TOO_OLD="1")
    assert done.returncode == 2 and "3.10 or newer is needed" in done.stderr
    assert not (clone / ".venv").exists()


@pytest.mark.parametrize("failing", ["", "ruff", "mypy", "lint-imports"])
def test_every_check_runs_and_one_failure_fails(clone: Path, failing: str) -> None:
    bash(clone, INSTALL)
    calls(clone)
    for tool in ("ruff", "mypy", "lint-imports"):
        path = clone / ".venv/bin" / tool
        path.write_text(f'#!/usr/bin/env bash\necho "{tool} $*" >> "$CALLS"\nexit {int(tool == failing)}\n')
        path.chmod(0o755)
    done = bash(clone, 'bash "a clone/launch/test.sh" tests/test_x.py')
    assert done.returncode == (1 if failing else 0)
    made, deadline = list[str](), time.monotonic() + 20
    while sum("harness.compile_ahead" in line for line in made) < 2 and time.monotonic() < deadline:  # one is still beside the tests
        made += [line for line in calls(clone) if " -c " not in line]
        time.sleep(0.05)
    # What every rank needs somewhere beside the others and before the tests, what only offloading needs beside those.
    compiled = [line for line in made if "harness.compile_ahead" in line]
    assert sorted(re.sub(r"\d+", "N", line) for line in compiled) == [
        f"python -m harness.compile_ahead N {name}Builder" for name in ("CPUAdam", "ShareMemComm")
    ]
    needed = next(line for line in compiled if "ShareMem" in line)
    assert made.index(needed) < made.index(next(line for line in made if "pytest" in line))
    assert [line for line in made if line not in compiled] == [
        "ruff check .",
        "ruff format --check .",
        "mypy ",
        "lint-imports ",
        "python launch/audit.py",
        "python -m pytest -n 2 --dist loadscope tests/test_x.py",
    ]
    failed = [line for line in done.stderr.splitlines() if line.startswith("FAILED: ")]
    assert len(failed) == {"": 0, "ruff": 2}.get(failing, 1) and all(failing in line for line in failed)


def test_everything_installed_is_pinned() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    extras = config["options.extras_require"]
    wanted = "\n".join([config["options"]["install_requires"], *(extras[name] for name in ("test", "logging", "plots"))])
    names = {re.split(r"[<>=\[; ]", line)[0].lower() for line in wanted.splitlines() if line}
    pinned = {line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    assert names - pinned == set()


def test_ci_runs_the_test_script() -> None:
    assert os.access(ROOT / ".ci/run", os.X_OK)
    assert "launch/test.sh" in (ROOT / ".ci/run").read_text()
