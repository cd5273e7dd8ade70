"""Starts a training run with the launcher its engine needs, and ends with the run's own exit code.

    python launch/run.py --engine zero3 --num_processes 4 -- --model_name_or_path gpt2 --train_file a.txt --output_dir out
    python launch/run.py --engine fsdp --config_file my.yaml --dry_run -- --output_dir out ...
    python launch/run.py --target slurm --num_nodes 2 --num_processes 8 -- --output_dir out ...

Launcher options come first; from `--`, or from the first option that is not one of them, everything belongs to the script.
Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if sys.path and sys.path[0] and Path(sys.path[0]).resolve() == ROOT / "launch":
    sys.path[0] = str(ROOT)  # run by path: import from the clone, wherever it lies

from harness import processes  # noqa: E402
from launch import auto_engine, cluster, machine  # noqa: E402
from launch.command import ALIASES, ENGINES, LaunchError, Options, Plan, find_python, make_plan, script_value, shell_line  # noqa: E402

EXIT_FILE = "exit.json"
PREEMPTED = 75
_FLAGS_WITHOUT_VALUE = {"dry_run", "help", "h"}
# Where the nodes' own launchers learn what the command line does not say: Kubeflow's names, then Slurm's and Kubernetes'.
_NODE_VARIABLES = {
    "num_nodes": ("PET_NNODES",),
    "node_rank": ("PET_NODE_RANK", "SLURM_NODEID", "JOB_COMPLETION_INDEX"),
    "master_addr": ("PET_MASTER_ADDR",),
    "master_port": ("PET_MASTER_PORT",),
}


# ---- the command line ----


def _parser() -> argparse.ArgumentParser:
    class Raising(argparse.ArgumentParser):
        def error(self, message: str):  # type: ignore[no-untyped-def]
            raise LaunchError(message)

    parser = Raising(
        prog="launch/run.py",
        allow_abbrev=False,
        usage="launch/run.py [launcher options] [--] [arguments of harness/run_clm.py]",
        description="Starts a training run. Hyphens and underscores are the same.",
    )
    add = parser.add_argument
    add("--engine", default="auto", choices=ENGINES, help="auto: one process: plain python; several: the fastest that fits; else fsdp")
    add("--num_processes", "--num_gpus", "--nproc", type=int, help="processes on this machine; default: one per visible GPU")
    add("--config_file", "--config", help="the launcher's config: accelerate's YAML for fsdp, DeepSpeed's JSON for zero1-3")
    add("--template", help="name of a file in ds_configs/ or fsdp_configs/, instead of --config_file")
    add("--hostfile", help="deepspeed's host file: several machines over ssh")
    add("--num_nodes", type=int, help="machines (default 1); run the same command on each")
    add("--node_rank", type=int, help="number of this machine, from 0; Slurm, Kubernetes and Kubeflow say it in the environment")
    add("--master_addr", help="address of machine 0")
    add("--master_port", type=int, help="port on machine 0; default: a free one on one machine, 29500 on several")
    add("--script", help="another script than harness/run_clm.py")
    add("--launcher_arg", action="append", default=[], metavar="ARG", help="one more argument for the launcher: --launcher_arg=--quiet")
    add("--grace_s", type=float, default=35.0, help="seconds the processes get to stop after an interrupt")
    add("--preempted_code", type=int, default=PREEMPTED, help="what a run ends with that was stopped after a save, in place of 75")
    add("--dry_run", action="store_true", help="print the command, or with --target k8s the manifests, only")
    add("--target", default="local", choices=("local", "slurm", "k8s"), help="where it runs: here, or submitted to a cluster")
    add("--name", default="harness", help="the job's name on the cluster")
    add(
        "--sbatch_arg",
        action="append",
        default=[],
        metavar="ARG",
        help="slurm: one more for sbatch: --sbatch_arg=--time=9:00:00",
    )
    add("--kind", choices=cluster.KINDS, help="k8s: what is created; default: job")
    add("--image", help="k8s: the container image")
    add("--cpus", type=int, help="k8s: cores a node")
    add("--memory", help="k8s: host memory a node, for example 512Gi")
    return parser


def split_command_line(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Cuts a command line into the launcher's tokens (full names, underscores) and the script's."""
    known = set(Options.__dataclass_fields__) | set(ALIASES) | _FLAGS_WITHOUT_VALUE
    own: list[str] = []
    index = 0
    while index < len(argv):
        token = argv[index]
        if token == "--":
            return own, list(argv[index + 1 :])
        flag, equals, value = token.partition("=")
        name = flag.lstrip("-").replace("-", "_")
        if not token.startswith("-") or name not in known:
            return own, list(argv[index:])
        full = ALIASES.get(name, name)
        own.append(flag if full == "h" else f"--{full}{equals}{value}")
        index += 1
        if not equals and name not in _FLAGS_WITHOUT_VALUE and index < len(argv) and argv[index] != "--":
            own.append(argv[index])
            index += 1
    return own, []


def _fill_in_nodes(values: dict[str, Any], environ: Mapping[str, str]) -> None:
    """Takes from the environment what the command line does not say of the nodes; of a job on one node only that it is one."""
    for name, variables in _NODE_VARIABLES.items():
        text = next((environ[variable] for variable in variables if variable in environ), None)
        if values[name] is None and text is not None:
            if name != "master_addr" and not text.isdigit():
                raise LaunchError(f"{variables[0]}={text} of the environment is no number; say it with --{name}")
            values[name] = text if name == "master_addr" else int(text)
        if name == "num_nodes" and values[name] in (None, 1):
            return


def read_options(argv: Sequence[str]) -> tuple[Options, list[str]]:
    """Parses the launcher's part.

    Returns:
        The options, and the script's arguments untouched.

    Raises:
        LaunchError: a wrong value, or options that contradict each other.
    """
    own, script_args = split_command_line(argv)
    values = vars(_parser().parse_args(own))
    if values["target"] == "local" and values["hostfile"] is None:
        _fill_in_nodes(values, os.environ)
    if values["num_nodes"] is None:
        values["num_nodes"] = 1
    options = Options(**values)
    if options.target != "local":
        return options, script_args
    problems: list[str] = []
    if options.num_processes is not None and options.num_processes < 1:
        problems.append(f"--num_processes must be at least 1, not {options.num_processes}")
    if options.num_nodes < 1:
        problems.append(f"--num_nodes must be at least 1, not {options.num_nodes}")
    if options.config_file and options.template:
        problems.append("--config_file and --template were both given: keep one")
    if options.num_nodes > 1 and not options.hostfile:
        if options.node_rank is None:
            problems.append("--num_nodes needs --node_rank (0 on the first machine)")
        if options.master_addr is None and not os.environ.get("MASTER_ADDR"):
            problems.append("--num_nodes needs --master_addr (address of machine 0)")
    if options.node_rank is not None and not options.hostfile and not 0 <= options.node_rank < options.num_nodes:
        problems.append(f"--node_rank must be from 0 to {options.num_nodes - 1}, not {options.node_rank}")
    if problems:
        raise LaunchError("\n".join(problems))
    return options, script_args


# ---- running it ----


def read_exit_file(output_dir: Path | None) -> bytes:
    """The raw exit.json of an output folder; empty where there is none."""
    try:
        return (output_dir / EXIT_FILE).read_bytes() if output_dir else b""
    except OSError:
        return b""


def final_code(plan: Plan, ended: processes.Ended, exit_before: bytes, told: bytes = b"") -> tuple[int, str]:
    """The run's own code where it wrote one, else what the launcher and the signals say.

    Args:
        exit_before: exit.json as it was before the start; the same bytes afterwards are an older run's.
        told: what the run wrote into the file that HARNESS_EXIT_FILE named; counts before exit.json.

    Returns:
        The code, and a line for the user ("" when there is nothing to say).
    """
    raw = told or read_exit_file(plan.output_dir)
    if raw and raw != exit_before:
        try:
            report = json.loads(raw)
            code, reason = int(report["code"]), str(report.get("reason", ""))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return ended.code or 1, f"the run's {EXIT_FILE} cannot be read; the launcher ended with {ended.code}"
        differs = "" if ended.code == code else f" (the launcher ended with {ended.code})"
        return code, f"exit code {code}{': ' + reason if reason else ''}{differs}" if code or differs else ""
    if ended.stopped_by is not None:
        return 128 + ended.stopped_by, f"stopped by {signal.Signals(ended.stopped_by).name}; the run left no {EXIT_FILE}"
    if ended.code == 0 and plan.must_report and not {"-h", "--help"} & set(plan.command):
        # deepspeed's runner ends with 0 when a signal killed its ranks.
        return 1, f"the launcher ended with 0, but the run left no {EXIT_FILE}: it did not finish"
    return ended.code, f"the launcher ended with {ended.code}" if ended.code else ""


def wait_for_name(address: str, limit_s: float = 300.0) -> None:
    """Until the name of machine 0 can be looked up: in a cluster it gets one only when its container starts.

    After the limit the launcher goes on, and says itself what it cannot reach.
    """
    deadline = time.monotonic() + limit_s
    said = False
    while time.monotonic() < deadline:
        try:
            socket.getaddrinfo(address, None)
        except socket.gaierror as error:
            if not said:
                print(f"launch: waiting for the name {address} ({error.strerror})", file=sys.stderr, flush=True)
                said = True
            time.sleep(1.0)
        else:
            return


def plan_auto(options: Options, script_args: list[str]) -> list[str]:
    """With --engine auto on several GPUs of a machine: fills in and prints the memory planner's choice. Returns the script's arguments."""
    given = any(script_value(script_args, name) is not None for name in ("deepspeed", "fsdp", "device_map"))
    if options.engine != "auto" or options.script or options.config_file or options.template or options.num_nodes > 1 or given:
        return script_args
    on_cpu = script_value(script_args, "use_cpu") in ("", "true", "True", "1")
    cards = [] if on_cpu else machine.visible_gpus(os.environ, machine.physical_gpus())
    num_processes = options.num_processes or len(cards)
    if num_processes < 2 or not (cards or script_value(script_args, "gpu_memory")):
        return script_args
    choice = auto_engine.choose(find_python(), script_args, num_processes, os.environ)
    if choice is None:
        return script_args
    print(f"launch: {choice.note}", file=sys.stderr, flush=True)
    options.engine, options.template = choice.engine, choice.template
    return [*script_args, "--engine", "auto"] if choice.spread and script_value(script_args, "engine") is None else script_args


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        options, script_args = read_options(argv)
        if options.target != "local":
            return cluster.submit(options, script_args)
        script_args = plan_auto(options, script_args)
        plan = make_plan(options, script_args)
    except LaunchError as error:
        for line in str(error).splitlines():
            print(f"launch: error: {line}", file=sys.stderr)
        return 2
    for note in plan.notes:
        print(f"launch: {note}", file=sys.stderr)
    if options.dry_run:
        print(shell_line(plan))
        return 0
    print(f"launch: {shell_line(plan)}", file=sys.stderr, flush=True)
    code = start(plan, options)
    return options.preempted_code if code == PREEMPTED else code


def start(plan: Plan, options: Options) -> int:
    """Runs the plan to its end. Returns the exit code."""
    if options.num_nodes > 1 and (address := options.master_addr or os.environ.get("MASTER_ADDR")):
        wait_for_name(address)
    exit_before = read_exit_file(plan.output_dir)
    environ = {name: value for name, value in os.environ.items() if name not in plan.unset} | plan.environ
    with tempfile.TemporaryDirectory(prefix="harness-launch-") as folder:
        # A run with a wrong flag has no folder of its own to leave its code in.
        environ["HARNESS_EXIT_FILE"] = str(Path(folder) / EXIT_FILE)
        try:
            for path, text in plan.files.items():
                with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w", encoding="utf-8") as file:
                    file.write(text)
            ended = processes.Job(plan.command, environ, options.grace_s).run()
        except OSError as error:
            print(f"launch: error: cannot start {plan.command[0]}: {error.strerror}", file=sys.stderr)
            return 2
        finally:
            for path in plan.files:
                path.unlink(missing_ok=True)
        told = read_exit_file(Path(folder))
    if ended.num_killed:
        print(f"launch: {ended.num_killed} process(es) did not stop and were killed", file=sys.stderr)
    code, line = final_code(plan, ended, exit_before, told)
    if line:
        print(f"launch: {line}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
