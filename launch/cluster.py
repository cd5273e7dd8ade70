"""A run on a cluster, from the same arguments as one on this machine: the sbatch command, or Kubernetes manifests.

    python launch/run.py --target slurm --num_nodes 2 --num_processes 8 --dry_run -- --output_dir out ...
    python launch/run.py --target k8s --image my/harness:1 --num_nodes 2 --num_processes 8 --dry_run -- --output_dir /output/run ...

Both start this launcher once on each node, so what holds for one machine (signals, exit codes, the ladder) holds there.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.command import DEFAULT_PORT, ROOT, LaunchError, Options, script_value

# Of each node, as in launch/k8s.
DEFAULT_GPUS = 8
KINDS = ("job", "trainjob", "pytorchjob")
# Below terminationGracePeriodSeconds of the manifests.
POD_GRACE_S = 100.0
# PyTorchJob makes a new pod only for codes from 128 on.
PYTORCHJOB_RETRIED_CODE = 138


def check(options: Options) -> None:
    """Refuses what the scheduler decides, and what the target has no use for.

    Raises:
        LaunchError: with all of it, one line each.
    """
    problems: list[str] = []
    for name in ("node_rank", "master_addr", "master_port", "hostfile"):
        if getattr(options, name) is not None:
            problems.append(f"--{name} with --target {options.target}: the scheduler gives it to each node; leave it out")
    if options.num_nodes < 1:
        problems.append(f"--num_nodes must be at least 1, not {options.num_nodes}")
    if options.target == "slurm":
        for name in ("image", "kind", "cpus", "memory"):
            if getattr(options, name) is not None:
                problems.append(f"--{name} is for --target k8s; Slurm's own options are handed on with --sbatch_arg=--NAME=VALUE")
    elif options.sbatch_arg:
        problems.append("--sbatch_arg is for --target slurm")
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?", options.name):
        problems.append(f"--name {options.name}: lower-case letters, digits and hyphens, beginning with a letter, at most 52")
    if problems:
        raise LaunchError("\n".join(problems))


def node_options(options: Options) -> list[str]:
    """The launcher's options that every node's launcher gets as they were given here."""
    tokens = ["--engine", options.engine]
    for name in ("template", "config_file", "script", "num_processes"):
        value = getattr(options, name)
        tokens += [] if value is None else [f"--{name}", str(value)]
    return [*tokens, *(f"--launcher_arg={argument}" for argument in options.launcher_arg)]


# ---- Slurm ----


def slurm_command(options: Options, script_args: Sequence[str]) -> list[str]:
    """The sbatch command of a run."""
    check(options)
    command = ["sbatch", f"--job-name={options.name}", f"--nodes={options.num_nodes}", f"--export=ALL,HARNESS_ROOT={ROOT}"]
    if script_value(script_args, "use_cpu") is None:
        command.append(f"--gpus-per-node={options.num_processes or DEFAULT_GPUS}")
    return [*command, *options.sbatch_arg, str(ROOT / "launch/slurm.sbatch"), *node_options(options), "--", *script_args]


# ---- Kubernetes ----


def manifests(options: Options, script_args: Sequence[str]) -> list[dict[str, Any]]:
    """The objects of a run: those of launch/k8s/<kind>.yaml with the run's name, image, size and arguments.

    Raises:
        LaunchError: wrong options, or PyYAML is not there.
    """
    check(options)
    kind = options.kind or "job"
    change = {"job": _job, "trainjob": _trainjob, "pytorchjob": _pytorchjob}[kind]
    documents = _read(ROOT / "launch/k8s" / f"{kind}.yaml")
    change({document["kind"]: document for document in documents}, options, list(script_args))
    return documents


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        import yaml
    except ModuleNotFoundError:
        raise LaunchError("--target k8s needs PyYAML: pip install pyyaml") from None
    # Through JSON, so that what the file writes once and uses twice becomes two objects.
    return json.loads(json.dumps(list(yaml.safe_load_all(path.read_text(encoding="utf-8")))))


def text_of(documents: Sequence[dict[str, Any]]) -> str:
    """Manifests as `kubectl apply -f -` reads them."""
    import yaml

    return yaml.safe_dump_all(documents, sort_keys=False, width=140)


def _arguments(options: Options, script_args: list[str], meeting: dict[str, str], *more: str) -> list[str]:
    """What launch/run.py gets in each pod; `meeting` is how the nodes find each other, where the operator does not say."""
    several = ["--num_nodes", str(options.num_nodes), *(word for name, value in meeting.items() for word in (f"--{name}", value))]
    grace = ["--grace_s", f"{POD_GRACE_S:.0f}"]
    return [*node_options(options), *(several if options.num_nodes > 1 and meeting else []), *grace, *more, "--", *script_args]


def _size(resources: dict[str, dict[str, str]], options: Options, script_args: Sequence[str]) -> None:
    """Changes what a pod asks for; requests equal limits."""
    wanted = {"cpu": options.cpus, "memory": options.memory, "nvidia.com/gpu": options.num_processes}
    for amounts in resources.values():
        amounts.update({name: str(value) for name, value in wanted.items() if value is not None})
        if script_value(script_args, "use_cpu") is not None:
            amounts.pop("nvidia.com/gpu", None)


def _container(pod_spec: dict[str, Any], options: Options) -> dict[str, Any]:
    (container,) = pod_spec["containers"]
    container["image"] = options.image or container["image"]
    return container


def _job(documents: dict[str, Any], options: Options, script_args: list[str]) -> None:
    service, job = documents["Service"], documents["Job"]
    service["metadata"]["name"] = job["metadata"]["name"] = options.name
    service["spec"]["selector"] = {"batch.kubernetes.io/job-name": options.name}
    job["spec"]["completions"] = job["spec"]["parallelism"] = options.num_nodes
    job["spec"]["backoffLimit"] = 3 * options.num_nodes
    pod = job["spec"]["template"]["spec"]
    pod["subdomain"] = options.name
    container = _container(pod, options)
    meeting = {"node_rank": "$(JOB_COMPLETION_INDEX)", "master_addr": f"{options.name}-0.{options.name}", "master_port": str(DEFAULT_PORT)}
    container["args"] = _arguments(options, script_args, meeting)
    _size(container["resources"], options, script_args)


def _trainjob(documents: dict[str, Any], options: Options, script_args: list[str]) -> None:
    runtime, job = documents["TrainingRuntime"], documents["TrainJob"]
    trainer = job["spec"]["trainer"]
    for document in (runtime, job):
        document["metadata"]["name"] = options.name
    job["spec"]["runtimeRef"]["name"] = options.name
    runtime["spec"]["mlPolicy"]["numNodes"] = trainer["numNodes"] = options.num_nodes
    trainer["numProcPerNode"] = options.num_processes or trainer["numProcPerNode"]
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    trainer["image"] = _container(replicated["template"]["spec"]["template"]["spec"], options)["image"]
    trainer["args"] = _arguments(options, script_args, {})
    _size(trainer["resourcesPerNode"], options, script_args)


def _pytorchjob(documents: dict[str, Any], options: Options, script_args: list[str]) -> None:
    job = documents["PyTorchJob"]
    job["metadata"]["name"] = options.name
    job["spec"]["runPolicy"]["backoffLimit"] = 3 * options.num_nodes
    replicas = job["spec"]["pytorchReplicaSpecs"]
    replicas["Worker"]["replicas"] = options.num_nodes - 1
    if options.num_nodes == 1:
        del replicas["Worker"]
    meeting = {"node_rank": "$(RANK)", "master_addr": "$(MASTER_ADDR)", "master_port": "$(MASTER_PORT)"}
    for replica in replicas.values():
        container = _container(replica["template"]["spec"], options)
        container["args"] = _arguments(options, script_args, meeting, "--preempted_code", str(PYTORCHJOB_RETRIED_CODE))
        _size(container["resources"], options, script_args)


# ---- handing it to the cluster ----


def submit(options: Options, script_args: Sequence[str]) -> int:
    """Submits the run, or with --dry_run prints what would be submitted. Returns the exit code.

    Raises:
        LaunchError: wrong options.
    """
    text: str | None = None
    if options.target == "slurm":
        command = slurm_command(options, script_args)
        shown = shlex.join(command) + "\n"
    else:
        command = ["kubectl", "apply", "-f", "-"]
        shown = text = text_of(manifests(options, script_args))
    if options.dry_run:
        print(shown, end="")
        return 0
    try:
        return subprocess.run(command, input=text, text=True).returncode
    except OSError as error:
        raise LaunchError(f"cannot start {command[0]}: {error.strerror}; --dry_run prints what it would have got") from None
