"""System programs that a test needs: installed where tests may install, else a reason to skip."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest


def need(programs: list[str], packages: list[str]) -> None:
    """Skips the test unless all programs are there. Where CI is set and we are root on Debian or Ubuntu, they are installed first."""
    missing = [name for name in programs if shutil.which(name) is None]
    if not missing:
        return
    command = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *packages]
    if not os.environ.get("CI") or os.geteuid() != 0 or shutil.which("apt-get") is None:
        pytest.skip(f"{', '.join(missing)} not installed: {' '.join(command)}")
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(["apt-get", "update", "-q"], env=environ, capture_output=True, timeout=300)
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)
    if missing := [name for name in programs if shutil.which(name) is None]:
        pytest.skip(f"{', '.join(missing)} cannot be installed: {done.stdout[-500:]}")
