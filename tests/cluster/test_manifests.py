"""launch/k8s/: every field is one that Kubernetes and the operators know, and launch/run.py renders the same from its arguments."""

from __future__ import annotations

import copy
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch import cluster, run
from launch.command import LaunchError, make_plan
from tests.cluster.manifests import problems
from tests.launching import ROOT

FOLDER = ROOT / "launch/k8s"
FILES = ["storage", "job", "trainjob", "pytorchjob"]
VERSIONS = ["1.34", "1.37"]
LINE = "--target k8s --engine fsdp --num_nodes 2 --num_processes 8"


def documents(name: str) -> list[dict[str, Any]]:
    # Through JSON, so that nothing in it is one object at two places.
    return json.loads(json.dumps(list(yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text()))))


def rendered(line: str, script_args: list[str]) -> list[dict[str, Any]]:
    options, rest = run.read_options([*shlex.split(line), "--", *script_args])
    return cluster.manifests(options, rest)


def parts(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every object and list inside a document, with where it is."""
    if isinstance(value, (dict, list)):
        yield path, value
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from parts(each, (*path, key))


def found(document: Any, key: str) -> list[Any]:
    """The values of all fields of one name."""
    return [part[key] for _, part in parts(document) if isinstance(part, dict) and key in part]


def at(document: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        document = document[key]
    return document


# ---- the files ----


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", FILES)
def test_every_field_is_known(name: str, version: str) -> None:
    assert [problem for document in documents(name) for problem in problems(document, version)] == []


@pytest.mark.parametrize("name", FILES)
def test_a_wrong_name_of_any_field_is_noticed(name: str) -> None:
    """Each object of each file, with a field too many; where keys are free (labels, amounts) there is nothing to know."""
    free = {"labels", "selector", "requests", "limits", "torch"}
    for document in documents(name):
        places = [path for path, part in parts(document) if isinstance(part, dict) and not (path and path[-1] in free)]
        places = [path for path in places if not {"Worker", "spec", "template"} <= set(path)]  # the master's pod again
        assert len(places) >= 3
        for place in places:
            wrong = copy.deepcopy(document)
            at(wrong, place)["notAField"] = "x"
            assert problems(wrong, VERSIONS[-1]), place


def test_wrong_values_are_noticed() -> None:
    service, job = documents("job")
    job["spec"]["completions"] = "two"
    service["spec"]["ports"] = [{"port": "http"}]
    assert problems(job, VERSIONS[0]) and problems(service, VERSIONS[0])
    runtime, train = documents("trainjob")
    runtime["spec"]["mlPolicy"]["numNodes"] = "2"
    train["spec"]["trainer"]["args"] = "--engine"
    assert problems(runtime, VERSIONS[0]) and problems(train, VERSIONS[0])
    (pytorch,) = documents("pytorchjob")
    pytorch["spec"]["pytorchReplicaSpecs"]["Master"]["restartPolicy"] = "Exit"
    assert problems(pytorch, VERSIONS[0]) == ["spec.pytorchReplicaSpecs.Master.restartPolicy: one of Always, ExitCode, Never, OnFailure"]


@pytest.mark.parametrize("name", FILES[1:])
def test_pods_have_what_training_needs_and_no_privileges(name: str) -> None:
    pods = [pod for document in documents(name) for pod in found(document, "spec") if "containers" in pod]
    assert pods
    for pod in pods:
        (container,) = pod["containers"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
        assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
        claims = [claim["metadata"]["name"] for claim in documents("storage")]
        assert [mounts[path]["persistentVolumeClaim"]["claimName"] for path in ("/cache", "/output")] == claims
        assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] > 0
        security = container["securityContext"]
        assert security["capabilities"] == {"drop": ["ALL"]} and not security["allowPrivilegeEscalation"]
        assert {"privileged", "hostNetwork", "hostIPC", "hostPID", "hostPath"}.isdisjoint(
            key for _, part in parts(pod) for key in part if isinstance(key, str)
        )
        assert pod["terminationGracePeriodSeconds"] > cluster.POD_GRACE_S
        assert pod["automountServiceAccountToken"] is False


@pytest.mark.parametrize("name", ["job", "trainjob"])
def test_ends_are_told_apart(name: str) -> None:
    """By the rules in their order, as the Job controller reads them: the first that matches decides, and none counts as a crash."""
    (policy,) = [policy for document in documents(name) for policy in found(document, "podFailurePolicy")]
    (pod,) = [pod for document in documents(name) for pod in found(document, "spec") if "containers" in pod]
    assert pod["restartPolicy"] == "Never"  # podFailurePolicy needs it
    container = pod["containers"][0]["name"]
    disruption = [{"type": "DisruptionTarget", "status": "True"}]

    def action(code: int, evicted: bool = False) -> str:
        for rule in policy["rules"]:
            codes = rule.get("onExitCodes", {"containerName": container, "operator": "In", "values": []})
            assert codes["containerName"] == container and codes["operator"] == "In" and sorted(set(codes["values"])) == codes["values"]
            if code in codes["values"] or (evicted and rule.get("onPodConditions") == disruption):
                return rule["action"]
        return "Count"

    assert [action(code) for code in (75, 2, 137, 1, 134)] == ["Ignore", "FailJob", "FailJob", "Count", "Count"]
    assert action(137, evicted=True) == action(1, evicted=True) == "Ignore"


def test_the_operator_of_pytorchjobs_makes_new_pods_after_a_save() -> None:
    (document,) = documents("pytorchjob")
    for replica in document["spec"]["pytorchReplicaSpecs"].values():
        (container,) = replica["template"]["spec"]["containers"]
        code = int(container["args"][container["args"].index("--preempted_code") + 1])
        assert replica["restartPolicy"] == "ExitCode" and 128 <= code <= 255
        assert container["name"] == "pytorch" and container["ports"][0]["name"] == "pytorchjob-port"


# ---- rendering ----


@pytest.mark.parametrize("kind", cluster.KINDS)
def test_the_files_are_what_is_rendered(kind: str) -> None:
    (arguments,) = {tuple(part) for document in documents(kind) for part in found(document, "args")}
    script_args = list(arguments[arguments.index("--") + 1 :])
    assert rendered(f"{LINE} --kind {kind}", script_args) == documents(kind)


@pytest.mark.parametrize("kind", cluster.KINDS)
def test_names_sizes_and_arguments_are_the_users(kind: str) -> None:
    line = f"--target k8s --kind {kind} --name big-1 --image me/x:3 --num_nodes 4 --num_processes 2 --cpus 16 --memory 100Gi --engine zero3"
    result = rendered(line, ["--output_dir", "/output/my run"])
    assert [problem for document in result for problem in problems(document, VERSIONS[-1])] == []
    assert {document["metadata"]["name"] for document in result} == {"big-1"}
    assert {image for document in result for image in found(document, "image")} == {"me/x:3"}
    amounts = {"cpu": "16", "memory": "100Gi", "nvidia.com/gpu": "2"}
    resources = [each for document in result for key in ("resources", "resourcesPerNode") for each in found(document, key)]
    assert [each for each in resources if "storage" not in each["requests"]] == [{"requests": amounts, "limits": amounts}] * len(resources)
    text = json.dumps(result)
    assert "harness-0" not in text and '"harness"' not in text
    counts = {"job": [4, 4], "trainjob": [4, 4], "pytorchjob": [1, 3]}[kind]
    keys = {"job": ("completions", "parallelism"), "trainjob": ("numNodes",), "pytorchjob": ("replicas",)}[kind]
    assert [count for key in keys for document in result for count in found(document, key)] == counts
    for arguments in [part for document in result for part in found(document, "args")]:
        assert arguments[:4] == ["--engine", "zero3", "--num_processes", "2"] and arguments[-2:] == ["--output_dir", "/output/my run"]


@pytest.mark.parametrize("kind", cluster.KINDS)
def test_one_node_without_gpus(kind: str) -> None:
    result = rendered(f"--target k8s --kind {kind} --num_processes 2", ["--use_cpu", "--output_dir", "/output/x"])
    assert [problem for document in result for problem in problems(document, VERSIONS[-1])] == []
    assert "nvidia.com/gpu" not in json.dumps(result) and "--node_rank" not in json.dumps(result)
    assert [list(replicas) for document in result for replicas in found(document, "pytorchReplicaSpecs")] in ([], [["Master"]])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", cluster.KINDS)
def test_pods_start_the_launcher_of_the_engine(kind: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The container's arguments, with the variables that the cluster sets, lead to torchrun with the right rank on each node."""
    where = {"job": "big-0.big", "trainjob": "big-node-0-0.big", "pytorchjob": "big-master-0"}[kind]
    environ = {
        "job": {"JOB_COMPLETION_INDEX": str(rank)},
        "trainjob": {"PET_NNODES": "2", "PET_NODE_RANK": str(rank), "PET_MASTER_ADDR": where, "PET_MASTER_PORT": "29400"},
        "pytorchjob": {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": where, "MASTER_PORT": "29500"},
    }[kind]
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("launch.machine.is_this_machine", lambda address: False)
    monkeypatch.setattr("launch.machine.port_is_free", lambda port: True)
    line = f"--target k8s --kind {kind} --name big --num_nodes 2 --num_processes 4 --engine ddp"
    result = rendered(line, ["--output_dir", "/output/x"])
    arguments = next(part for document in result for part in found(document, "args"))
    expanded = [re.sub(r"\$\((\w+)\)", lambda match: environ[match[1]], word) for word in arguments]
    options, script_args = run.read_options(expanded)
    plan = make_plan(options, script_args, environ, [f"GPU-{number}" for number in range(4)])
    port = {"trainjob": "29400"}.get(kind, "29500")
    expected = f"--nnodes 2 --node_rank {rank} --nproc_per_node 4 --master_addr {where} --master_port {port}"
    assert shlex.join(plan.command[1:11]) == expected
    assert options.grace_s == 100 and options.preempted_code == (138 if kind == "pytorchjob" else 75)


def test_dry_run_prints_what_kubectl_reads() -> None:
    command = [sys.executable, str(ROOT / "launch/run.py"), *shlex.split(LINE), "--dry_run", "--", "--output_dir", "/output/x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert [document["kind"] for document in yaml.safe_load_all(done.stdout)] == ["Service", "Job"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--target k8s --name Big_Run", "--name Big_Run: lower-case letters"),
        ("--target k8s --master_addr a --node_rank 1", "--node_rank with --target k8s: the scheduler gives it"),
        ("--target k8s --sbatch_arg=--time=1", "--sbatch_arg is for --target slurm"),
        ("--target slurm --image x", "--image is for --target k8s"),
        ("--target k8s --num_nodes 0", "--num_nodes must be at least 1, not 0"),
        ("--target k8s --kind pod", "invalid choice: 'pod'"),
    ],
)
def test_wrong_options(line: str, message: str) -> None:
    with pytest.raises(LaunchError, match=re.escape(message)):
        options, script_args = run.read_options([*shlex.split(line), "--", "--output_dir", "x"])
        (cluster.slurm_command if options.target == "slurm" else cluster.manifests)(options, script_args)


def test_a_cluster_tool_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run.main([*shlex.split(LINE), "--", "--output_dir", "x"]) == 2
    assert "cannot start kubectl: No such file or directory; --dry_run prints" in capsys.readouterr().err
