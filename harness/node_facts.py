"""What must be the same on all nodes and ranks of a job, compared before anything is computed.

Each node has an installation, a clone and an environment of its own, and each rank its arguments and what it finds in files. Where they
differ, a job hangs in its first collective or, worse, trains something else on one rank. So everyone says what it has through the job's
store, and rank 0 says to all what differs.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import socket
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from harness.findings import Finding

# A difference in one of these gives other numbers, or collectives that do not match.
PACKAGES = ("torch", "transformers", "accelerate", "peft", "deepspeed", "datasets", "tokenizers", "safetensors", "numpy", "liger-kernel")
# Settings of libraries that are meant for the whole job; those of one node's network are not among them.
_PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_", "TORCHINDUCTOR_", "PYTORCH_", "CUBLAS_", "DS_")
_OF_ONE_NODE = ("IFNAME", "_HCA", "_DEBUG", "_DEBUG_FILE", "_FILE", "_DIR", "_PATH", "_PORT", "_ADDR")
# Arguments that launchers set for each process.
_OF_ONE_PROCESS = ("local_rank",)
_SETTINGS_FILES = (".json", ".yaml", ".yml", ".jinja")
_MAX_SETTINGS_BYTES = 1 << 20
_KEY = "node_facts"
_VERDICT = "node_facts/verdict"
# How much longer than rank 0 the others wait: it has to notice first.
VERDICT_MARGIN_S = 10.0


class Store(Protocol):
    """What is used of torch.distributed's store."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...


def code_digests(package: Path | None = None) -> dict[str, str]:
    """A short digest of each source file of this package."""
    package = package or Path(__file__).resolve().parent
    files = sorted(package.rglob("*.py"))
    return {str(path.relative_to(package)): hashlib.sha256(path.read_bytes()).hexdigest()[:12] for path in files}


def facts_of_this_process(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What each rank has for itself, as JSON.

    Args:
        arguments: the run's, as resolved here.
    """
    known = {name: value for name, value in arguments.items() if name not in _OF_ONE_PROCESS}
    return {"node": socket.gethostname(), "arguments": known, "files": _digests(known)}


def _digests(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Of the settings files that arguments name."""
    found = {}
    for name, value in arguments.items():
        if isinstance(value, str) and value.endswith(_SETTINGS_FILES):
            with contextlib.suppress(OSError, ValueError):
                path = Path(value)
                if path.is_file() and path.stat().st_size < _MAX_SETTINGS_BYTES:
                    found[name] = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    return found


def facts_of_this_node(arguments: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What this node has, as JSON.

    Args:
        arguments: the run's, as resolved here.
    """
    environ = os.environ if environ is None else environ
    versions = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    settings = {name: value for name, value in environ.items() if name.startswith(_PREFIXES) and not name.endswith(_OF_ONE_NODE)}
    own = {"num_processes": num_local_processes(environ, 1), "versions": versions, "code": code_digests(), "environment": settings}
    return facts_of_this_process(arguments) | own


def compare(facts: Mapping[int, Mapping[str, Any]]) -> list[Finding]:
    """What differs from the first rank's facts.

    Args:
        facts: of each node, by the rank of its first process; and of other ranks, what is their own.
    """
    first = facts[min(facts)]
    findings: list[Finding] = []
    for rank in sorted(facts):
        is_here = facts[rank]["node"] == first["node"]
        names = [f"rank {each}" if is_here else _name(facts, each) for each in (min(facts), rank)]
        findings += _differences_of_a_rank(first, facts[rank], *names)
    ranks = [rank for rank in sorted(facts) if "versions" in facts[rank]]
    if len(ranks) < 2:
        return findings
    sizes = [facts[rank]["num_processes"] for rank in ranks]
    if len(set(sizes)) > 1:
        shown = ", ".join(f"{facts[rank]['num_processes']} on {_name(facts, rank)}" for rank in ranks)
        findings.append(Finding("error", "nodes", f"of unequal size: {shown}", "start as many processes on each node"))
    for rank in ranks[1:]:
        findings += _differences(first, facts[rank], _name(facts, ranks[0]), _name(facts, rank))
    return findings


def _name(facts: Mapping[int, Mapping[str, Any]], rank: int) -> str:
    return f"{facts[rank]['node']} (rank {rank})"


def _differences_of_a_rank(first: Mapping[str, Any], other: Mapping[str, Any], here: str, there: str) -> list[Finding]:
    findings: list[Finding] = []
    unequal = _unequal(first["arguments"], other["arguments"])
    for name, ours, theirs in unequal:
        findings.append(Finding("error", f"--{name}", f"{ours!r} on {here}, {theirs!r} on {there}", "the same command everywhere"))
    for name, _, _ in _unequal(first["files"], other["files"]):
        if name not in {argument for argument, _, _ in unequal}:
            message = f"{other['arguments'][name]} on {there} is not the file that {here} has"
            findings.append(Finding("error", f"--{name}", message, "the same file everywhere"))
    return findings


def _differences(first: Mapping[str, Any], other: Mapping[str, Any], here: str, there: str) -> list[Finding]:
    findings: list[Finding] = []
    for name, ours, theirs in _unequal(first["versions"], other["versions"]):
        message = f"{ours or 'missing'} on {here}, {theirs or 'missing'} on {there}"
        findings.append(Finding("error", name, message, "install the same version on all nodes"))
    files = [name for name, _, _ in _unequal(first["code"], other["code"])]
    if files:
        shown = ", ".join(files[:4]) + (f" and {len(files) - 4} more" if len(files) > 4 else "")
        findings.append(Finding("error", "harness", f"the code on {there} is not that on {here}: {shown}", "the same commit on all nodes"))
    for name, ours, theirs in _unequal(first["environment"], other["environment"]):
        message = f"{'not set' if ours is None else ours} on {here}, {'not set' if theirs is None else theirs} on {there}"
        findings.append(Finding("warning", name, message, "pass it to all nodes, or to none"))
    return findings


def _unequal(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    names = [*ours, *(name for name in theirs if name not in ours)]
    return [(name, ours.get(name), theirs.get(name)) for name in names if ours.get(name) != theirs.get(name)]


def agree(store: Store, rank: int, size: int, facts: Mapping[str, Any], timeout_s: float) -> list[Finding]:
    """Compares all ranks' facts; called by every rank of a job, before its first collective.

    Returns:
        The same findings on every rank.

    Raises:
        RuntimeError: a rank did not say its part within the limit.
    """
    limit = timedelta(seconds=timeout_s)
    store.set(f"{_KEY}/{rank}", json.dumps(facts, default=str))
    if rank == 0:
        store.wait([f"{_KEY}/{other}" for other in range(size)], limit)
        told = {other: json.loads(store.get(f"{_KEY}/{other}")) for other in range(size)}
        findings = compare(told)
        store.set(_VERDICT, json.dumps([vars(finding) for finding in findings]))
    store.wait([_VERDICT], limit + timedelta(seconds=VERDICT_MARGIN_S))
    return [Finding(**each) for each in json.loads(store.get(_VERDICT))]


def num_local_processes(environ: Mapping[str, str], default: int) -> int:
    """Processes of the job on this node, as the launcher says: torchrun and accelerate in LOCAL_WORLD_SIZE, deepspeed in LOCAL_SIZE."""
    return int(environ.get("LOCAL_WORLD_SIZE", environ.get("LOCAL_SIZE", str(default))))


def of_several_nodes(environ: Mapping[str, str]) -> bool:
    """Whether the launcher's environment describes a job on more than one node."""
    size = int(environ.get("WORLD_SIZE", "1"))
    return num_local_processes(environ, size) < size
