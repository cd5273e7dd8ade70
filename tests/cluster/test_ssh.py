"""deepspeed over ssh, as a host file asks for it: two addresses of this machine behind an ssh daemon of our own."""

from __future__ import annotations

import getpass
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launch.machine import free_port, port_is_free
from tests.cluster import install
from tests.cluster.test_slurm import STEPS, arguments
from tests.launching import ROOT, Launch, launch_environment, only_launch_of_this_machine

HOSTS = ("127.0.0.2", "127.0.0.3")


@pytest.fixture
def ssh(tmp_path: Path) -> Iterator[Path]:
    """The folder of an `ssh` that reaches the daemon without asking."""
    install.need(["sshd", "ssh", "pdsh"], ["openssh-server", "openssh-client", "pdsh"])
    folder, port = tmp_path / "ssh", free_port()
    folder.mkdir(mode=0o700)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd's own, for giving up privileges
    listen = "".join(f"ListenAddress {host}\n" for host in HOSTS)
    (folder / "sshd_config").write_text(
        f"Port {port}\n{listen}HostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\nStrictModes no\nUsePAM no\nPidFile none\n"
    )
    options = f"-o IdentityFile={folder}/user -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR -p {port}"
    (folder / "bin").mkdir()
    (folder / "bin/ssh").write_text(f'#!/bin/sh\nexec {_which("ssh")} {options} "$@"\n')
    (folder / "bin/ssh").chmod(0o755)
    daemon = subprocess.Popen([_which("sshd"), "-D", "-e", "-f", str(folder / "sshd_config")], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 20
        while port_is_free(port):
            assert daemon.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        yield folder / "bin"
    finally:
        daemon.terminate()
        daemon.wait()


def _which(program: str) -> str:
    return subprocess.run(["which", program], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.slow
def test_a_host_file_starts_both_machines(ssh: Path, tmp_path: Path) -> None:
    if getpass.getuser() != "root":
        pytest.skip("an ssh daemon lets others than root in only with passwords or PAM")
    (tmp_path / "hosts").write_text("".join(f"{host} slots=1\n" for host in HOSTS))
    (tmp_path / "data.txt").write_text("".join(f"line {number} of a text that is long enough to train on\n" for number in range(400)))
    command: list[Any] = [sys.executable, ROOT / "launch/run.py", "--engine", "zero2", "--hostfile", tmp_path / "hosts"]
    command += ["--master_addr", "127.0.0.1", "--master_port", free_port(), "--", *arguments(tmp_path, "out", 2)]
    environ = launch_environment({"PATH": f"{ssh}{os.pathsep}{os.environ['PATH']}", "GLOO_SOCKET_IFNAME": "lo"})
    with only_launch_of_this_machine():
        launch = Launch([str(word) for word in command], environ, tmp_path / "out", tmp_path)
        try:
            result = launch.finish(300)
        finally:
            launch.kill()
    assert result.returncode == 0, result.stdout
    assert "num_processes=2" in result.stdout and [row["step"] for row in result.rows] == list(range(1, STEPS + 1))
    assert all(f"{host}: " in result.stdout for host in HOSTS)  # what pdsh puts before each line
