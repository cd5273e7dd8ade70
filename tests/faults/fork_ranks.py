"""Jobs whose ranks are forked from a process that has imported everything, so that a life costs two seconds and not twenty.

    with ForkServer() as server:
        result = server.run(arguments, num_processes=2, folder=tmp_path / "life-0")  # to its end, as run_launcher
        life = server.start(arguments, num_processes=2, folder=tmp_path / "life-1")
        os.kill(life.ranks[1], signal.SIGKILL)
        assert life.wait(60) == 1

Each life has the processes that a real launch has: a launcher, under it a guard per rank (harness.guard.Guard itself), and under each
guard the rank, which calls `harness.run_clm.main`. Only how they come to be differs: by fork instead of exec.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from harness.guard import NO_GUARD_VARIABLE, Child, Guard, die_with_parent, needs_guard, parent_of
from tests.faults import forked_script
from tests.launching import Result, children_of, output_dir_of

# torch's autograd and gloo start threads in the ranks; the server must have none, for a fork copies only the thread that forks.
_SERVER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
}
_MODULES = (
    "torch",
    "harness.run_clm",
    "harness.job",
    "harness.engines.ddp",
    "harness.engines.fsdp",
    "harness.engines.zero",
    "harness.check_config",
    "harness.templates",
    "harness.trackers",
    "harness.parse_log",
    "matplotlib.pyplot",
    "peft",
    "transformers.models.llama.modeling_llama",
    "transformers.optimization",
    "transformers.trainer_pt_utils",
    "torch.utils.cpp_extension",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # imported with any optimizer, and with it torch's compiler
)
_PR_SET_CHILD_SUBREAPER = 36
PEERS_GRACE_S = 15.0
ORPHANS_S = 10.0  # as tests.launching


# ---- the server's side ----


class _ForkedChild:
    """A forked process as subprocess.Popen shows it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, sig: int, /) -> None:
        os.kill(self.pid, sig)


class _ForkingGuard(Guard):
    """The guard of a rank that calls run_clm.main in a fork of this process."""

    def __init__(self, arguments: list[str], launcher: int) -> None:
        super().__init__(arguments)
        entry = parent_of(launcher)
        assert entry is not None
        self.launchers = [(launcher, entry[1])]

    def start_child(self, environment: dict[str, str], descriptors: tuple[int, ...]) -> Child:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            return _ForkedChild(pid)
        os.environ |= environment
        self.selector.close()
        for connection in (self.line, self.to_hub, self.hub and self.hub.listener):
            if connection is not None:
                connection.close()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        die_with_parent(parent)
        leave_with(lambda: _run_clm(self.command))


def _run_clm(arguments: list[str]) -> int:
    from harness import run_clm

    if wanted := os.environ.get("HARNESS_TEST_OOM"):
        from tests.distributed import oom_worker

        oom_worker.install(oom_worker.Injector(wanted))
    if seen := os.environ.get("HARNESS_TEST_FROZEN"):
        from tests import frozen

        frozen.install(seen)
    if fault := os.environ.get("HARNESS_TEST_FAULT"):
        from tests.faults import inject

        inject.install(fault)
    if cells := os.environ.get("HARNESS_TEST_OOM_CELLS"):
        from tests.faults import oom_matrix

        oom_matrix.install(cells)
    sys.argv = ["run_clm.py", *arguments]
    return run_clm.main(arguments)


def leave_with(function: Callable[[], int]) -> NoReturn:
    """Ends this forked process with the function's result as exit code, whatever happens in it."""
    code = 1
    try:
        code = function()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _redirect(path: Path) -> None:
    """Standard output and errors of this process into a file."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        sys.stdout.flush()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)


def _guard_of(rank: int, request: dict[str, Any], port: int, launcher: int) -> int:
    os.setsid()  # as torchrun starts its workers: no signal reaches them through a group
    _redirect(Path(request["folder"]) / f"rank-{rank}.txt")
    size = str(request["num_processes"])
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **request["environment"]}
    arguments: list[str] = request["arguments"]
    return _ForkingGuard(arguments, launcher).run() if needs_guard() else _run_clm(arguments)


def _launcher(request: dict[str, Any], reply: int) -> int:
    """What a launcher does: starts the ranks, and when one fails ends the others. Returns the first failure's code."""
    os.setsid()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    guards: dict[int, int] = {}
    for rank in request["ranks_started"]:
        pid = os.fork()
        if pid == 0:
            leave_with(functools.partial(_guard_of, rank, request, port, os.getppid()))
        guards[pid] = rank
    os.write(reply, json.dumps(list(guards)).encode() + b"\n")
    os.close(reply)
    codes: dict[int, int] = {}
    kill_at_s = float("inf")
    while guards:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in guards:
            codes[guards.pop(pid)] = code = os.waitstatus_to_exitcode(status)
            if code and kill_at_s == float("inf"):
                kill_at_s = time.monotonic() + PEERS_GRACE_S
                for other in guards:
                    os.kill(other, signal.SIGTERM)
        elif time.monotonic() > kill_at_s:
            for other in guards:
                os.kill(other, signal.SIGKILL)
            kill_at_s = float("inf")
        else:
            time.sleep(0.02)
    (Path(request["folder"]) / "codes.json").write_text(json.dumps(codes))
    return next((code if code > 0 else 128 - code for code in codes.values() if code), 0)


def serve(address: str) -> None:
    """Imports everything, then forks lives on request: a JSON object a line on standard input, one answer a line on standard output.

    Args:
        address: of a socket for `tests.faults.forked_script`.
    """
    import ctypes
    import importlib

    for name in _MODULES:
        importlib.import_module(name)
    # What is imported stays: a collection in a rank need not go through it, nor copy the pages that it is in.
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests run under nohup
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"the server has {threads} threads"
    # Guards whose launcher was killed become the server's children, and leave no zombies where process 1 reaps none.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    scripts = forked_script.listen(address)
    print("ready", flush=True)
    while True:
        asked = select.select([0, scripts], [], [], 0.1)[0]
        if scripts in asked:
            forked_script.serve(scripts, _run_clm)
        if 0 in asked:
            line = sys.stdin.readline()
            if not line:
                return
            request = json.loads(line)
            if "function" in request:
                _call(request)
            else:
                _fork_life(request)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _call(request: dict[str, Any]) -> None:
    """Runs a function in a fork, waits for it, and answers with its exit code."""
    import importlib

    pid = os.fork()
    if pid == 0:
        _redirect(Path(request["output"]))

        def run() -> int:
            getattr(importlib.import_module(request["module"]), request["function"])(*request["arguments"])
            return 0

        leave_with(run)
    print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])), flush=True)


def _fork_life(request: dict[str, Any]) -> None:
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        _redirect(Path(request["folder"]) / "launcher.txt")
        leave_with(lambda: _launcher(request, write_end))
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        guards = json.loads(pipe.readline())
    print(json.dumps({"launcher": pid, "guards": guards}), flush=True)


# ---- the tests' side ----


def is_running(pid: int) -> bool:
    """Alive and no zombie."""
    return parent_of(pid) is not None


def child_of(pid: int, timeout_s: float = 30.0) -> int:
    """The child of a process that has one, or soon will."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError, IndexError):
            return children_of(pid)[0]
        time.sleep(0.005)
    raise AssertionError(f"process {pid} has no child")


@dataclasses.dataclass
class Life:
    """One start of a job.

    Attributes:
        folder: what its processes printed (rank-<rank>.txt), and their exit codes by rank (codes.json).
        launcher, guards, ranks: process ids. Without guards (HARNESS_NO_GUARD), both are the ranks.
    """

    folder: Path
    launcher: int
    guards: list[int]
    ranks: list[int]

    def processes(self) -> list[int]:
        """Those that are running."""
        return [pid for pid in (self.launcher, *self.guards, *self.ranks) if is_running(pid)]

    def orphans(self) -> list[int]:
        """All that is running in its sessions, whoever started it: ranks of a second life, workers of a loader."""
        sessions = {self.launcher, *self.guards}
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if entry.name.isdigit() and os.getsid(int(entry.name)) in sessions and is_running(int(entry.name)):
                    found.append(int(entry.name))
        return found

    def output(self) -> str:
        """What all its processes printed."""
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')}" for path in sorted(self.folder.glob("*.txt")))

    def wait(self, timeout_s: float) -> dict[int, int]:
        """Waits until nothing of it runs. Returns the guards' exit codes by rank; empty if the launcher was killed.

        Raises:
            AssertionError: something still runs after `timeout_s`; it is killed.
        """
        deadline = time.monotonic() + timeout_s
        while left := self.processes():
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"{len(left)} process(es) still run after {timeout_s:.0f} s\n{self.output()}")
            time.sleep(0.02)
        codes = self.folder / "codes.json"
        return {int(rank): code for rank, code in json.loads(codes.read_text()).items()} if codes.exists() else {}

    def wait_for(self, text: str, timeout_s: float = 120.0) -> None:
        """Waits until a process of it has printed `text`."""
        deadline = time.monotonic() + timeout_s
        while text not in (output := self.output()):
            assert self.processes(), f"ended before printing {text!r}\n{output}"
            assert time.monotonic() < deadline, f"did not print {text!r} in {timeout_s:.0f} s\n{output}"
            time.sleep(0.02)

    def kill(self) -> None:
        """Kills all of it."""
        for pid in self.orphans():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class ForkServer:
    """Starts lives. Use as a context manager; what still runs at its end is killed.

    Attributes:
        address: where it takes the training processes of `tests.faults.forked_script`.
    """

    def __init__(self) -> None:
        self.lives: list[Life] = []

    def __enter__(self) -> ForkServer:
        root = Path(__file__).resolve().parent.parent.parent
        foreign = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "HARNESS_EXIT_FILE")
        environment = {name: value for name, value in os.environ.items() if name not in foreign} | _SERVER_ENVIRONMENT
        self.state = tempfile.TemporaryDirectory(prefix="harness-test-state-")
        environment.setdefault("HARNESS_STATE_DIR", self.state.name)
        self.address = f"{self.state.name}/scripts"
        self.process = subprocess.Popen(
            [sys.executable, "-c", "import sys; from tests.faults.fork_ranks import serve; serve(sys.argv[1])", self.address],
            cwd=root,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        while self._read() != "ready":
            assert self.process.poll() is None, "the server did not start"
        return self

    def _read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def start(
        self,
        arguments: Sequence[str],
        num_processes: int,
        folder: Path,
        *,
        environment: Mapping[str, str] | None = None,
        ranks_started: Sequence[int] | None = None,
    ) -> Life:
        """Starts a life.

        Args:
            arguments: of run_clm.py.
            folder: for what its processes print.
            ranks_started: only these of the ranks; default all.
        """
        folder.mkdir(parents=True)
        request = {
            "arguments": list(arguments),
            "num_processes": num_processes,
            "folder": str(folder),
            "environment": dict(environment or {}),
            "ranks_started": list(range(num_processes) if ranks_started is None else ranks_started),
        }
        answer = self._ask(request)
        guards = answer["guards"]
        ranks = guards if NO_GUARD_VARIABLE in request["environment"] else [child_of(guard) for guard in guards]
        life = Life(folder, answer["launcher"], guards, ranks)
        self.lives.append(life)
        return life

    def run(
        self,
        arguments: Sequence[str],
        num_processes: int,
        folder: Path,
        *,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 300.0,
    ) -> Result:
        """Runs a life to its end, and asserts that it leaves no process behind: as `run_launcher`, where the launcher does not matter.

        Returns:
            The first code that is not 0 as `returncode`; each rank's is in `folder`/codes.json.
        """
        started = time.monotonic()
        life = self.start(arguments, num_processes, folder, environment=environment)
        codes = life.wait(timeout_s)
        seconds = time.monotonic() - started
        assert len(codes) == num_processes, life.output()
        deadline = time.monotonic() + ORPHANS_S
        while (left := life.orphans()) and time.monotonic() < deadline:
            time.sleep(0.05)
        if left:
            life.kill()
            raise AssertionError(f"{len(left)} process(es) left {ORPHANS_S:.0f} s after the end\n{life.output()}")
        return Result(next((code for code in codes.values() if code), 0), life.output(), output_dir_of(arguments), seconds)

    def call(self, function: Callable[..., None], *arguments: Any, output: Path) -> None:
        """Runs a function of a module in a fork of the server, where everything is imported.

        Args:
            arguments: JSON values.
            output: file for what it prints.
        """
        request = {"module": function.__module__, "function": function.__name__, "arguments": arguments, "output": str(output)}
        assert self._ask(request) == 0, output.read_text()

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self._read())

    def __exit__(self, *_: object) -> None:
        for life in self.lives:
            life.kill()
        assert self.process.stdin is not None
        self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        if self.process.poll() is None:
            self.process.kill()
        self.state.cleanup()
