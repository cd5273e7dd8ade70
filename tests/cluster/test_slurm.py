"""launch/slurm.sbatch: under stand-ins of Slurm's commands, and on a real controller with four node daemons."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launch import cluster, run
from tests.cluster import install, slurm
from tests.faults import forked_script
from tests.faults.fork_ranks import ForkServer
from tests.launching import ROOT, only_launch_of_this_machine

SCRIPT = ROOT / "launch/slurm.sbatch"
STEPS = 45


# ---- the command ----


def test_the_command_from_the_launchers_arguments() -> None:
    line = "--target slurm --name big --num_nodes 4 --num_processes 2 --engine zero3 --template zero3_offload --sbatch_arg=--time=9:00:00"
    options, script_args = run.read_options([*shlex.split(line), "--", "--output_dir", "my out"])
    assert shlex.join(cluster.slurm_command(options, script_args)) == (
        f"sbatch --job-name=big --nodes=4 --export=ALL,HARNESS_ROOT={ROOT} --gpus-per-node=2 --time=9:00:00 {SCRIPT}"
        " --engine zero3 --template zero3_offload --num_processes 2 -- --output_dir 'my out'"
    )
    for flags, gpus in (([], ["--gpus-per-node=8"]), (["--use_cpu"], [])):
        options, script_args = run.read_options(["--target", "slurm", "--", *flags])
        assert [word for word in cluster.slurm_command(options, script_args) if word.startswith("--gpus")] == gpus


# ---- the script, without Slurm ----


class Stage:
    """The script with stand-ins of srun and scontrol that write down how they were called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls = folder / "calls"
        tools = folder / "bin"
        tools.mkdir()
        srun = f'#!/bin/bash\nprintf "srun %s\\n" "${{*@Q}}" >> {self.calls}\neval "$SRUN"\n'
        scontrol = f'#!/bin/bash\nprintf "scontrol %s\\n" "${{*@Q}}" >> {self.calls}\n'
        scontrol += (
            'case "$*" in "show hostnames"*) printf "a1\\na2\\n" | head -n "$NODES";; *"show job"*) echo "JobId=7 JobState=$STATE";; esac\n'
        )
        for name, text in (("srun", srun), ("scontrol", scontrol), ("sleep", "#!/bin/bash\n")):
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)
        self.environ = {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "h"}
        self.environ |= {"SLURM_JOB_NODELIST": "a[1-2]", "SLURM_CPUS_ON_NODE": "16", "NODES": "2", "STATE": "RUNNING", "SRUN": "exit 0"}
        self.environ |= {"HARNESS_PYTHON": "/bin/true", "HOME": str(folder)}

    def start(self, *words: str, **environ: str) -> subprocess.Popen[str]:
        command = ["bash", str(SCRIPT), *words]
        everything = subprocess.STDOUT
        return subprocess.Popen(command, env=self.environ | environ, cwd=self.folder, stdout=subprocess.PIPE, stderr=everything, text=True)

    def run(self, *words: str, **environ: str) -> tuple[int, str]:
        process = self.start(*words, **environ)
        output, _ = process.communicate(timeout=30)
        return process.returncode, output

    def called(self, program: str) -> list[list[str]]:
        lines = self.calls.read_text().splitlines() if self.calls.exists() else []
        return [words[1:] for words in map(shlex.split, lines) if words[0] == program]


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_each_node_starts_the_launcher(stage: Stage) -> None:
    code, output = stage.run("--engine", "fsdp", "--", "--output_dir", "my out")
    assert code == 0, output
    (words,) = stage.called("srun")
    place = words.index("/bin/true")
    assert {"--ntasks-per-node=1", "--cpus-per-task=16", "--kill-on-bad-exit=0", "--wait=60", "--output=slurm-logs/%x-%j-%N.log"} <= set(
        words[:place]
    )
    meeting = ["--num_nodes", "2", "--master_addr", "a1", "--master_port", "20007"]
    assert words[place + 1 :] == [str(ROOT / "launch/run.py"), *meeting, "--engine", "fsdp", "--", "--output_dir", "my out"]
    assert (stage.folder / "slurm-logs").is_dir()


def test_one_node_needs_no_meeting(stage: Stage) -> None:
    assert stage.run("--", "--output_dir", "x", NODES="1")[0] == 0
    (words,) = stage.called("srun")
    assert words[words.index("/bin/true") + 1 :] == [str(ROOT / "launch/run.py"), "--", "--output_dir", "x"]


@pytest.mark.parametrize(
    ("code", "others", "state", "requeue", "why"),
    [
        (75, "exit 0", "RUNNING", "1", "stopped after a complete save: queued again"),
        (1, "exit 1", "RUNNING", "1", "a node does not answer: queued again"),
        (1, "exit 0", "RUNNING", "1", ""),  # all nodes answer: a crash
        (2, "exit 1", "RUNNING", "1", ""),
        (75, "exit 0", "COMPLETING", "1", ""),  # cancelled
        (75, "exit 0", "RUNNING", "0", ""),
        (0, "exit 1", "RUNNING", "1", ""),
    ],
)
def test_what_is_queued_again(stage: Stage, code: int, others: str, state: str, requeue: str, why: str) -> None:
    srun = f'case "$1" in --overlap) {others};; *) exit {code};; esac'
    ended, output = stage.run(SRUN=srun, STATE=state, HARNESS_REQUEUE=requeue)
    assert ended == code, output
    assert (["requeue", "7"] in stage.called("scontrol")) == bool(why)
    assert why in output and ("queued again" in output) == bool(why)


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGTERM])
def test_signals_reach_the_tasks_and_their_end_is_waited_for(stage: Stage, signum: signal.Signals) -> None:
    saving = 'trap "echo saving; /bin/sleep 0.5; echo saved; exit 75" USR1 TERM; echo ready; while :; do /bin/sleep 0.05; done'
    process = stage.start(SRUN=saving, HARNESS_REQUEUE="0")
    assert process.stdout is not None
    while "ready" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signum)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 75 and "saved" in output, output


@pytest.mark.parametrize(
    ("runtime", "expected"),
    [
        ("pyxis", ["--container-image=my/image", "--container-mounts={root}:{root},{here}:{here},{state}:{state},/data:/data"]),
        ("apptainer", ["apptainer", "exec", "--nv", "--bind", "{state}", "/data"]),
        ("podman", ["podman", "--ulimit=memlock=-1", "--ipc=host", "{state}:{state}", "/data:/data", "SLURM_*", "HARNESS_*"]),
    ],
)
def test_containers(stage: Stage, runtime: str, expected: list[str]) -> None:
    code, output = stage.run("--", "--x", HARNESS_IMAGE="my/image", HARNESS_RUNTIME=runtime, HARNESS_MOUNTS="/data")
    assert code == 0, output
    (words,) = stage.called("srun")
    state = stage.folder / ".local/state/harness"  # what a run remembers is there in the next container too
    assert {word.format(root=ROOT, here=stage.folder, state=state) for word in expected} <= set(words)
    assert state.stat().st_mode & 0o777 == 0o700
    if runtime != "pyxis":
        assert words[words.index("my/image") + 1 :][:2] == ["/bin/true", str(ROOT / "launch/run.py")]


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"HARNESS_ROOT": "/"}, "/ is no clone of harness"),
        ({"HARNESS_IMAGE": "x", "HARNESS_RUNTIME": "docker"}, "one of pyxis, apptainer, podman"),
    ],
)
def test_what_cannot_work_is_refused(stage: Stage, environ: dict[str, str], message: str) -> None:
    code, output = stage.run(**environ)
    assert code == 2 and message in output
    assert stage.called("srun") == []


# ---- the script, under Slurm ----


@pytest.fixture(scope="module")
def cluster_of_four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Slurm]:
    if os.geteuid() != 0:
        pytest.skip("Slurm's daemons need root here")
    install.need(slurm.PROGRAMS, slurm.PACKAGES)
    folder = tmp_path_factory.mktemp("slurm")
    with only_launch_of_this_machine(), slurm.Slurm(folder) as running:
        yield running


@pytest.fixture(scope="module", params=["forked", pytest.param("started", marks=pytest.mark.slow)])
def training(request: pytest.FixtureRequest, server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Training:
    """With the training processes forked, which saves their imports; and in the long form as users have it."""
    folder = tmp_path_factory.mktemp("training")
    (folder / "data.txt").write_text("".join(f"line {number} of a text that is long enough to train on\n" for number in range(400)))
    result = server.run(arguments(folder, "clean", 1), 1, folder / "uninterrupted")
    assert result.returncode == 0, result.stdout
    is_forked = request.param == "forked"
    script = ROOT / "tests/faults/forked_script.py" if is_forked else ROOT / "tests/distributed/oom_worker.py"
    return Training(folder, script, is_forked, {forked_script.SERVER_VARIABLE: server.address}, result.losses)


@dataclasses.dataclass
class Training:
    """What the jobs of a test have in common.

    Attributes:
        folder: of their data and outputs.
        script: what the launchers start.
        is_forked: their training processes are.
        environ: what the script needs.
        losses: of each step, in an uninterrupted run of one process.
    """

    folder: Path
    script: Path
    is_forked: bool
    environ: dict[str, str]
    losses: list[float]


def arguments(folder: Path, name: str, num_processes: int) -> list[str]:
    values = {
        "model_type": "llama",
        "config_overrides": "hidden_size=64,intermediate_size=128,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2",
        "tokenizer_name": "bytes",
        "train_file": folder / "data.txt",
        "block_size": 64,
        "validation_split_percentage": 0,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 8 // num_processes,
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "precision": "fp32",
        "save_steps": 10,
        "save_final": "False",
        "data_cache_dir": folder / "cache",
        "output_dir": folder / name,
    }
    return ["--use_cpu", *(token for key, value in values.items() for token in (f"--{key}", str(value)))]


class SlurmRun:
    """A training job on two nodes of the cluster."""

    def __init__(self, running: slurm.Slurm, training: Training, name: str, engine: str, nodes: str, *more: str, **environ: str) -> None:
        self.slurm, self.training = running, training
        self.output = training.folder / name
        words = ["--nodes=2", f"--nodelist={nodes}", str(SCRIPT), "--num_processes", "1", "--engine", engine]
        words += ["--script", str(training.script), "--", *arguments(training.folder, name, 2), *more]
        environ |= {
            "HARNESS_ROOT": str(ROOT),
            "HARNESS_PYTHON": sys.executable,
            "HARNESS_MASTER_ADDR": "127.0.0.1",
            "HARNESS_INTERFACE": "lo",
            "HARNESS_LOGS": str(training.folder / f"{name}-logs"),
        }
        self.number = running.submit(*words, environ=training.environ | environ, cwd=training.folder)

    def rows(self) -> list[dict[str, Any]]:
        path = self.output / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []

    def until_step(self, step: int, start: int = 1) -> None:
        """Waits until a start of the job, counted from 1, has done a step."""
        deadline = time.monotonic() + 120
        while not self._is_at(step, start):
            assert time.monotonic() < deadline and self.slurm.job(self.number)["JobState"] not in slurm.ENDED, self.log()
            time.sleep(0.05)

    def _is_at(self, step: int, start: int) -> bool:
        rows = self.rows()
        begins = [0, *(place for place, row in enumerate(rows) if row.get("event") == "resume")]
        return len(begins) == start and any(row["kind"] == "train" and row["step"] >= step for row in rows[begins[-1] :])

    def log(self) -> str:
        logs = [self.training.folder / f"harness-{self.number}.log", *sorted(self.training.folder.glob(f"{self.output.name}-logs/*"))]
        return "".join(f"== {path}\n{path.read_text()}\n" for path in logs if path.exists())

    def finished(self) -> list[dict[str, Any]]:
        """Waits for the end, and checks that the run was the uninterrupted one. Returns its events."""
        facts = self.slurm.wait(self.number)
        assert facts["JobState"] == "COMPLETED", self.log()
        rows = self.rows()
        losses = {row["step"]: row["loss"] for row in rows if row["kind"] == "train"}
        assert list(losses) == list(range(1, STEPS + 1))
        assert list(losses.values()) == pytest.approx(self.training.losses, rel=1e-4)
        return [row for row in rows if row["kind"] == "event"]


@pytest.fixture(scope="module")
def jobs(cluster_of_four: slurm.Slurm, training: Training) -> dict[str, SlurmRun]:
    """One of each launcher (deepspeed's in the long form alone: on two nodes it takes minutes): on two nodes the one that is interrupted,
    on the others the rest, one after the other.
    """
    out_of_memory = {"HARNESS_TEST_OOM": "backward:1:9 update:1:12"}
    found = {
        "torchrun": SlurmRun(cluster_of_four, training, "ddp", "ddp", "n1,n2"),
        "accelerate": SlurmRun(cluster_of_four, training, "fsdp", "fsdp", "n3,n4", "--snapshot_steps", "2", **out_of_memory),
    }
    if not training.is_forked:
        found["deepspeed"] = SlurmRun(cluster_of_four, training, "zero2", "zero2", "n3,n4")
    return found


def test_interruptions_save_queue_again_and_go_on(cluster_of_four: slurm.Slurm, jobs: dict[str, SlurmRun]) -> None:
    """One job under torchrun, stopped in four ways; its losses are those of a run that nobody stopped."""
    job, tell = jobs["torchrun"], cluster_of_four.tell
    job.until_step(3)
    tell("scancel", "--signal=USR1", job.number)  # the tasks, as by hand
    job.until_step(13, start=2)
    assert "signal USR1: saving" not in job.log()
    tell("scancel", "--signal=USR1", "--batch", job.number)  # the script, as before the time limit
    job.until_step(23, start=3)
    assert "signal USR1: saving" in job.log() and job.log().count("stopped after a complete save: queued again") == 2
    tell("scontrol", "requeue", job.number)
    job.until_step(33, start=4)
    cluster_of_four.kill_node("n2")
    killed = time.monotonic()
    while "a node does not answer: queued again" not in job.log():
        assert time.monotonic() < killed + 90, job.log()
        time.sleep(0.2)
    assert "the guard of rank 1" in job.log()
    cluster_of_four.start_node("n2")
    steps = [event["step"] for event in job.finished() if event["event"] == "resume"]
    assert len(steps) == 4 and all(low <= step < STEPS for low, step in zip((3, 13, 20, 30), steps, strict=True)), steps
    assert cluster_of_four.job(job.number)["Restarts"] == "4"


def test_out_of_memory_on_one_node_steps_down_on_both(cluster_of_four: slurm.Slurm, jobs: dict[str, SlurmRun]) -> None:
    """Under accelerate; the second step down needs new processes, and the job keeps its place in the queue."""
    job = jobs["accelerate"]
    down = [(event["phase"], event["way"], event["rank"]) for event in job.finished() if event["event"] == "oom"]
    assert down == [("step", "redo", 1), ("update", "relaunch", 1)]
    assert cluster_of_four.job(job.number)["Restarts"] == "0"


def test_two_nodes_under_each_launcher(jobs: dict[str, SlurmRun]) -> None:
    if "deepspeed" in jobs:
        jobs["deepspeed"].finished()
    for engine, tool in (("torchrun", "torchrun"), ("accelerate", "accelerate launch"), ("deepspeed", "deepspeed")):
        if engine in jobs:
            assert f"{tool} --" in jobs[engine].log() and "num_processes=2" in jobs[engine].log()


def test_a_cancelled_job_saves_and_stays_cancelled(cluster_of_four: slurm.Slurm, training: Training) -> None:
    job = SlurmRun(cluster_of_four, training, "cancel", "ddp", "n3,n4")
    job.until_step(4)
    cluster_of_four.tell("scancel", job.number)
    assert cluster_of_four.wait(job.number)["JobState"] == "CANCELLED"
    deadline = time.monotonic() + 30
    while not (job.output / "exit.json").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert json.loads((job.output / "exit.json").read_text())["code"] == 75, job.log()
    assert list(job.output.glob("checkpoint-*/COMPLETE"))


def test_the_script_is_accepted_by_the_shell() -> None:
    assert subprocess.run(["bash", "-n", str(SCRIPT)]).returncode == 0
    if shutil.which("shellcheck"):
        assert subprocess.run(["shellcheck", "-s", "bash", str(SCRIPT)]).returncode == 0
