"""Starts real launchers for tests: own session, free port, one thread per rank, a time limit, and nothing left behind.

    result = run_launcher("torchrun", 2, ["--output_dir", str(out), ...], output_dir=out)
    assert result.returncode == 0, result.stdout
    assert result.exit_json["code"] == 0 and len(result.rows) == 20

One launch runs at a time on a machine, also under pytest-xdist: two ranks fill two cores.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from harness.processes import processes_with, send
from launch.machine import free_port

ROOT = Path(__file__).resolve().parent.parent
RUN_CLM = ROOT / "harness/run_clm.py"
Kind = Literal["python", "torchrun", "deepspeed", "accelerate", "run"]
_TEST_MARK = "HARNESS_TEST_LAUNCH"
# What an outer launcher or the developer's shell may have left; a test's launch decides these itself.
_FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
_FOREIGN += ("HARNESS_LAUNCH_ID", "HARNESS_EXIT_FILE")
_FOREIGN_PREFIXES = ("ACCELERATE_", "FSDP_", "TORCHELASTIC_", "PET_", "SLURM_", "DS_", "PYTEST_")


@dataclasses.dataclass
class Result:
    """What a launch left.

    Attributes:
        returncode: the launcher's own; negative where a signal killed it. Launchers fold codes: see exit_json for the run's.
        stdout: everything that any process printed, stderr too.
        output_dir: the run's folder.
        seconds: wall time.
    """

    returncode: int
    stdout: str
    output_dir: Path | None
    seconds: float

    @property
    def exit_json(self) -> dict[str, Any] | None:
        """out/exit.json, None where the run left none."""
        path = self.output_dir / "exit.json" if self.output_dir else None
        return json.loads(path.read_text()) if path and path.exists() else None

    def metrics(self) -> list[dict[str, Any]]:
        """All rows of out/metrics.jsonl; each line must be strict JSON."""
        path = self.output_dir / "metrics.jsonl" if self.output_dir else None
        if path is None or not path.exists():
            return []

        def refuse(constant: str) -> Any:
            raise ValueError(f"{path}: {constant} is not JSON")

        return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl that are about training steps."""
        return [row for row in self.metrics() if "loss" in row]

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.rows]


def launch_command(
    kind: Kind,
    num_processes: int,
    script_args: Sequence[str],
    *,
    script: Path = RUN_CLM,
    launcher_args: Sequence[str] = (),
    config_file: Path | None = None,
) -> list[str]:
    """The command a user would type.

    Args:
        kind: "run" is our launch/run.py; `launcher_args` then holds its options (--engine ...).
        config_file: accelerate's YAML.
    """
    tools, port = Path(sys.executable).parent, str(free_port())
    count = str(num_processes)
    if kind == "python":
        start = [sys.executable, *launcher_args, str(script)]
    elif kind == "torchrun":
        start = [str(tools / "torchrun"), "--nproc_per_node", count, "--master_addr", "127.0.0.1", "--master_port", port]
        start += [*launcher_args, str(script)]
    elif kind == "deepspeed":
        start = [str(tools / "deepspeed"), f"--num_gpus={count}", "--master_addr", "127.0.0.1", "--master_port", port]
        start += [*launcher_args, str(script)]
    elif kind == "accelerate":
        start = [str(tools / "accelerate"), "launch"] + (["--config_file", str(config_file)] if config_file else ["--multi_gpu"])
        start += ["--num_processes", count, "--num_machines", "1", "--machine_rank", "0", "--main_process_ip", "127.0.0.1"]
        start += ["--main_process_port", port, *launcher_args, str(script)]
    else:
        start = [sys.executable, str(ROOT / "launch/run.py"), "--num_processes", count]
        start += ["--config_file", str(config_file)] if config_file else []
        start += [*launcher_args, *([] if script == RUN_CLM else ["--script", str(script)]), "--"]
    return [*start, *script_args]


def launch_environment(extra_env: Mapping[str, str] | None = None, cpu: bool = True) -> dict[str, str]:
    """A clean environment for a launch: offline, one thread per process, no GPU unless `cpu` is off."""
    environ = {name: value for name, value in os.environ.items() if name not in _FOREIGN and not name.startswith(_FOREIGN_PREFIXES)}
    environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    if cpu:
        environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    return environ | dict(extra_env or {})


class Launch:
    """A running launcher. Use it through `launched`, or let `run_launcher` do all of it."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], output_dir: Path | None, cwd: Path | None) -> None:
        self.mark = uuid.uuid4().hex
        self.command, self.output_dir = list(command), output_dir
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the launch
        self._started = time.monotonic()
        self.process = subprocess.Popen(
            self.command,
            env={**environ, _TEST_MARK: self.mark},
            stdout=self._log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=cwd or ROOT,
            start_new_session=True,
        )

    def output(self) -> str:
        """What was printed so far."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode("utf-8", "replace")

    def processes(self) -> list[int]:
        """Every living process of this launch, found by its environment, whatever its parent or group."""
        return processes_with(_TEST_MARK, self.mark)

    def wait_for(self, text: str, timeout_s: float = 120.0) -> None:
        """Waits until `text` was printed.

        Raises:
            AssertionError: the launcher ended before, or time is up.
        """
        deadline = time.monotonic() + timeout_s
        while text not in self.output():
            assert self.process.poll() is None, f"ended with {self.process.returncode} before printing {text!r}\n{self.output()}"
            assert time.monotonic() < deadline, f"did not print {text!r} in {timeout_s:.0f} s\n{self.output()}"
            time.sleep(0.1)

    def signal(self, signum: int, group: bool = False) -> None:
        """Signals the launcher, or its whole process group as a terminal does."""
        if group:
            os.killpg(self.process.pid, signum)
        else:
            self.process.send_signal(signum)

    def finish(self, timeout_s: float = 300.0, orphans_s: float = 10.0) -> Result:
        """Waits for the end.

        Raises:
            AssertionError: not done in `timeout_s` (everything is killed), or processes left `orphans_s` after the launcher's end.
        """
        try:
            returncode = self.process.wait(max(0.1, timeout_s - (time.monotonic() - self._started)))
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"not done in {timeout_s:.0f} s: {self.command}\n{self.output()}") from None
        seconds = time.monotonic() - self._started
        deadline = time.monotonic() + orphans_s
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        if left:
            names = [_command_line(pid) for pid in left]
            self.kill()
            raise AssertionError(f"{len(left)} process(es) left {orphans_s:.0f} s after the launcher ended: {names}\n{self.output()}")
        return Result(returncode, self.output(), self.output_dir, seconds)

    def kill(self) -> None:
        """Kills every process of this launch."""
        for _ in range(50):
            left = self.processes()
            send(left, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.1)
            if not left:
                return


def children_of(pid: int) -> list[int]:
    """In the order in which they were started.

    Raises:
        OSError: there is no such process.
    """
    return [int(number) for number in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        return f"{pid} (gone)"


@contextlib.contextmanager
def only_launch_of_this_machine() -> Iterator[None]:
    """Waits for every other launch of the tests on this machine, and keeps them waiting."""
    with open(Path(tempfile.gettempdir()) / f"harness-test-launch-{os.getuid()}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def launched(
    kind: Kind,
    num_processes: int,
    script_args: Sequence[str],
    *,
    output_dir: Path | None = None,
    extra_env: Mapping[str, str] | None = None,
    cpu: bool = True,
    cwd: Path | None = None,
    script: Path = RUN_CLM,
    launcher_args: Sequence[str] = (),
    config_file: Path | None = None,
) -> Iterator[Launch]:
    """A running launch, for tests that signal or watch it; what is left of it at the end of the block is killed."""
    command = launch_command(kind, num_processes, script_args, script=script, launcher_args=launcher_args, config_file=config_file)
    with only_launch_of_this_machine():
        launch = Launch(command, launch_environment(extra_env, cpu), output_dir, cwd)
        try:
            yield launch
        finally:
            launch.kill()


def run_on_nodes(
    nodes: Sequence[Any],
    script_args: Sequence[str],
    *,
    script: Path,
    extra_env: Mapping[str, str],
    output_dir: Path,
    timeout_s: float = 300.0,
) -> list[Result]:
    """torchrun with one rank on each node of tests.two_nodes.

    Returns:
        What each node's launcher left.
    """
    port = str(free_port())
    with only_launch_of_this_machine(), contextlib.ExitStack() as stack:
        launches = []
        for number, node in enumerate(nodes):
            rendezvous = ["--nnodes", str(len(nodes)), "--node_rank", str(number), "--master_addr", nodes[0].address, "--master_port", port]
            command = [*node.enter, str(Path(sys.executable).parent / "torchrun"), "--nproc_per_node", "1", *rendezvous, str(script)]
            environ = launch_environment({"GLOO_SOCKET_IFNAME": node.interface, **extra_env})
            launches.append(Launch([*command, *script_args], environ, output_dir, None))
            stack.callback(launches[-1].kill)
        return [launch.finish(timeout_s) for launch in launches]


def output_dir_of(script_args: Sequence[str]) -> Path | None:
    """The last `--output_dir` among the arguments."""
    found = None
    for index, token in enumerate(script_args):
        name, _, value = token.partition("=")
        if name in ("--output_dir", "--output-dir"):
            found = Path(value or script_args[index + 1])
    return found


def run_launcher(
    kind: Kind,
    num_processes: int,
    script_args: Sequence[str],
    *,
    timeout_s: float = 300.0,
    output_dir: Path | None = None,
    **options: Any,
) -> Result:
    """Runs a launch to its end, and asserts that it leaves no process behind.

    Args:
        num_processes: ranks on this machine.
        script_args: what follows the script.
        output_dir: where exit.json and metrics.jsonl are read; found in `script_args` when not given.
        options: see `launched`.
    """
    with launched(kind, num_processes, script_args, output_dir=output_dir or output_dir_of(script_args), **options) as launch:
        return launch.finish(timeout_s)
