"""A Slurm cluster of four nodes on this machine: a controller and four node daemons of our own, on the loopback interface; needs root.

with Slurm(folder) as slurm:
    job = slurm.submit("--nodes=2", "job.sh", "its", "arguments")
    assert slurm.wait(job)["JobState"] == "COMPLETED"
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from harness.processes import processes_with, send
from launch.machine import free_port
from tests.launching import launch_environment

PROGRAMS = ["slurmctld", "slurmd", "sbatch", "munged"]
PACKAGES = ["slurm-wlm", "slurmctld", "slurmd", "slurm-client", "munge"]
NODES = ("n1", "n2", "n3", "n4")
# States that a job stays in.
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=6
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
SlurmdTimeout=10
ReturnToService=2
MpiDefault=none
KillWait=30
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
{nodes}
PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """The daemons, as children of this process, with all their files in one folder.

    What makes it fit a test: jobs start at once, credentials expire after 6 s (the time that a job which is queued again waits), a node
    that does not answer is down after 10 s, and nodes may promise more cores than there are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.environ = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self.jobs: list[str] = []

    def __enter__(self) -> Slurm:
        for name in ("munge", "state", *(f"spool/{node}" for node in NODES)):
            (self.folder / name).mkdir(parents=True)
        host = socket.gethostname()
        lines = [f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=4 RealMemory=4000" for node in NODES]
        conf = _CONF.format(host=host, port=free_port(), folder=self.folder, nodes="\n".join(lines), names=",".join(NODES))
        (self.folder / "slurm.conf").write_text(conf)
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        key = self.folder / "munge/key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        files = [f"--{name}-file={self.folder}/munge/{name}" for name in ("key", "pid", "log", "seed")]
        self._start("munged", "munged", "--foreground", "--force", f"--socket={self.folder}/munge/socket", *files)
        self._until(lambda: (self.folder / "munge/socket").exists())
        self._start("slurmctld", "slurmctld", "-D", "-i")
        for node in NODES:
            self.start_node(node)
        self._until(lambda: len(re.findall(r"^n\d idle", self.tell("sinfo", "-h", "-N", "-o", "%N %T"), re.MULTILINE)) == len(NODES))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for job in self.jobs:
            self.tell("scancel", "--quiet", "--signal=KILL", "--full", job)
            self.tell("scancel", "--quiet", job)
        with contextlib.suppress(AssertionError):
            self._until(lambda: not self.tell("squeue", "-h"), 10)
        for daemon in reversed(self.daemons.values()):
            daemon.terminate()
        for daemon in self.daemons.values():
            try:
                daemon.wait(5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        # Steps that their daemon did not end.
        send(processes_with("SLURM_CONF", self.environ["SLURM_CONF"]), signal.SIGKILL)

    def start_node(self, node: str) -> None:
        self._start(node, "slurmd", "-D", "-N", node)

    def kill_node(self, node: str) -> None:
        """As if the node had lost its power: the daemon, the steps it started, and their processes end at once.

        What processes of tests.faults.forked_script stand for ends with them.
        """
        steps = subprocess.run(["pgrep", "-f", f"slurmstepd.*{node}"], capture_output=True, text=True).stdout.split()
        victims = {int(pid) for pid in steps} | {self.daemons[node].pid}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                environ = (entry / "environ").read_bytes().split(b"\0")
                if f"SLURMD_NODENAME={node}".encode() in environ and f"SLURM_CONF={self.folder}/slurm.conf".encode() in environ:
                    victims.add(int(entry.name))
        for pid in victims - {os.getpid()}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.daemons[node].wait()

    def submit(self, *words: str, environ: Mapping[str, str] | None = None, cwd: Path) -> str:
        """sbatch with these words. Returns the job's number."""
        # A job gets the environment of who submits it.
        mine = {**launch_environment(environ), "SLURM_CONF": self.environ["SLURM_CONF"]}
        done = subprocess.run(["sbatch", "--parsable", *words], env=mine, cwd=cwd, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        self.jobs.append(done.stdout.strip())
        return self.jobs[-1]

    def tell(self, *command: str) -> str:
        """What a Slurm command prints."""
        return subprocess.run(command, env=self.environ, capture_output=True, text=True, timeout=60).stdout

    def job(self, number: str) -> dict[str, str]:
        """A job as `scontrol show job` has it."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.tell("scontrol", "--oneliner", "show", "job", number)))

    def wait(self, number: str, timeout_s: float = 300.0) -> dict[str, str]:
        """Waits until a job has ended for good. Returns its facts."""
        self._until(lambda: self.job(number)["JobState"] in ENDED, timeout_s)
        return self.job(number)

    def _start(self, name: str, *command: str) -> None:
        with open(self.folder / f"{name}.out", "ab") as log:
            self.daemons[name] = subprocess.Popen(command, env=self.environ, stdout=log, stderr=log, start_new_session=True)

    def _until(self, condition, timeout_s: float = 30.0) -> None:  # type: ignore[no-untyped-def]
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"not in {timeout_s:.0f} s; see {self.folder}\n{self.tell('squeue', '-l')}"
            time.sleep(0.2)
