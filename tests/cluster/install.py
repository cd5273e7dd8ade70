"""System programs that a test needs: installed where tests may install, else a reason to skip."""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest


def need(programs: list[str], packages: list[str]) -> None:
    """Skips the test unless all programs are there. Where CI is set and we are root on Debian or Ubuntu, they are installed first."""
    if not _missing(programs):
        return
    command = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *packages]
    if not os.environ.get("CI") or os.geteuid() != 0 or shutil.which("apt-get") is None:
        pytest.skip(f"{', '.join(_missing(programs))} not installed: {' '.join(command)}")
    done = _install(tuple(command))
    if missing := _missing(programs):
        pytest.skip(f"{', '.join(missing)} cannot be installed: {done[-500:]}")


@functools.cache
def _install(command: tuple[str, ...]) -> str:
    """Runs apt-get, once a process for the same packages; its output. A mirror that does not answer costs two minutes, not the tests."""
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    patience = ["-o", "Acquire::http::Timeout=20", "-o", "Acquire::https::Timeout=20", "-o", "Acquire::Retries=1"]
    # Another worker of the tests may be installing: apt-get does not wait for itself.
    with open(Path(tempfile.gettempdir()) / "harness-test-install.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            subprocess.run(["apt-get", *patience, "update", "-q"], env=environ, capture_output=True, timeout=120)
            done = subprocess.run(
                [command[0], *patience, *command[1:]], env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600
            )
        except subprocess.TimeoutExpired as error:
            return f"{' '.join(map(str, error.cmd))} did not end in {error.timeout:.0f} s"
    return done.stdout


def _missing(programs: list[str]) -> list[str]:
    return [name for name in programs if shutil.which(name) is None]
