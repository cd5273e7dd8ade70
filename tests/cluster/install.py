"""System programs that a test needs: installed where tests may install, else a reason to skip."""

from __future__ import annotations

import fcntl
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
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    # Another worker of the tests may be installing: apt-get does not wait for itself.
    with open(Path(tempfile.gettempdir()) / "harness-test-install.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(["apt-get", "update", "-q"], env=environ, capture_output=True, timeout=300)
        done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)
    if missing := _missing(programs):
        pytest.skip(f"{', '.join(missing)} cannot be installed: {done.stdout[-500:]}")


def _missing(programs: list[str]) -> list[str]:
    return [name for name in programs if shutil.which(name) is None]
