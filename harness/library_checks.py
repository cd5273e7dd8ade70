"""Installed packages against what this project supports: versions, missing ones, look-alikes, unmet wishes, build tools."""

from __future__ import annotations

import configparser
import dataclasses
import importlib.metadata
import importlib.util
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from harness.findings import Finding, Severity

# Not required, but looked at: what each is for.
OPTIONAL: dict[str, str] = {
    "liger-kernel": "fused layers and loss",
    "flash-attn": "attention kernels",
    "bitsandbytes": "8-bit optimizer, 4-bit weights",
    "torchao": "float8",
    "matplotlib": "plots",
    "tensorboard": "logs for TensorBoard",
}
# Packages whose own wishes about the versions of others are compared with what is installed.
_LOOKED_INTO = (
    "accelerate",
    "datasets",
    "deepspeed",
    "peft",
    "transformers",
    "torchvision",
    "torchaudio",
    "liger-kernel",
    "torchao",
    "xformers",
)
# Where an unmet wish breaks the import, not just a feature.
_BREAKING = frozenset({"torch", "transformers", "tokenizers", "huggingface-hub", "safetensors"})


def canonical(name: str) -> str:
    """A package name as PyPI compares it."""
    return name.lower().replace("_", "-").replace(".", "-")


def installed_versions() -> dict[str, str]:
    """Canonical name -> version of everything importable; the first on the path counts, as for import."""
    versions: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name and distribution.version:
            versions.setdefault(canonical(name), distribution.version)
    return versions


def project_requirements() -> list[Requirement]:
    """What this project needs: from its metadata where it is installed, else from the clone's setup.cfg."""
    setup = Path(__file__).resolve().parent.parent / "setup.cfg"
    if setup.is_file():
        parser = configparser.ConfigParser()
        parser.read(setup, encoding="utf-8")
        lines = parser.get("options", "install_requires", fallback="").splitlines()
    else:
        try:
            lines = importlib.metadata.requires("harness") or []
        except importlib.metadata.PackageNotFoundError:
            return []
    requirements = [Requirement(line) for line in map(str.strip, lines) if line]
    return [requirement for requirement in requirements if requirement.marker is None or requirement.marker.evaluate({"extra": ""})]


def _pip_line(requirement: Requirement) -> str:
    specifier = str(requirement.specifier)
    if canonical(requirement.name) == "torch":
        return f'install a torch build for this machine\'s CUDA: pip install "torch{specifier}"'
    return f'pip install "{requirement.name}{specifier}"'


def check_requirements(requirements: Sequence[Requirement], versions: Mapping[str, str]) -> list[Finding]:
    """One finding per package that is missing or outside the supported range.

    Below the minimum is an error; above the tested range only a warning, because it may well work.
    """
    findings = []
    for requirement in requirements:
        version = versions.get(canonical(requirement.name))
        if version is None:
            findings.append(Finding("error", requirement.name, "is not installed", _pip_line(requirement)))
            continue
        try:
            parsed = Version(version)
        except InvalidVersion:
            findings.append(Finding("warning", requirement.name, f"has a version that cannot be compared: {version}"))
            continue
        if requirement.specifier.contains(parsed, prereleases=True):
            continue
        lower = [spec for spec in requirement.specifier if spec.operator in (">=", ">", "==", "~=")]
        too_old = any(not spec.contains(parsed, prereleases=True) for spec in lower)
        message = f"{version} is {'below the supported' if too_old else 'newer than the tested'} {requirement.specifier}"
        findings.append(Finding("error" if too_old else "warning", requirement.name, message, _pip_line(requirement)))
    return findings


def check_wishes(versions: Mapping[str, str], requires: Callable[[str], Sequence[str] | None]) -> list[Finding]:
    """Installed packages whose own requirements the others do not meet: torchvision for another torch, transformers for another tokenizers.

    Args:
        requires: name -> its requirement lines (`importlib.metadata.requires`).
    """
    findings = []
    for name in _LOOKED_INTO:
        if name not in versions:
            continue
        for line in requires(name) or ():
            try:
                requirement = Requirement(line)
            except InvalidRequirement:
                continue
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            wanted = canonical(requirement.name)
            version = versions.get(wanted)
            if version is None or not requirement.specifier or requirement.specifier.contains(version, prereleases=True):
                continue
            severity: Severity = "error" if wanted in _BREAKING else "warning"
            message = f"{versions[name]} wants {requirement.name}{requirement.specifier}, installed is {version}"
            findings.append(Finding(severity, name, message, f'pip install "{requirement.name}{requirement.specifier}", or another {name}'))
    return findings


@dataclasses.dataclass(frozen=True)
class Apex:
    """What stands under the name apex: "absent", "nvidia" (fused optimizers and norms) or "other" (PyPI's package of that name)."""

    kind: str


def find_apex(find_spec: Callable[[str], object | None] = importlib.util.find_spec) -> Apex:
    """Looks at apex without importing it: NVIDIA's has `apex.optimizers` and `apex.normalization`."""
    spec = find_spec("apex")
    if spec is None:
        return Apex("absent")
    folders = [Path(folder) for folder in getattr(spec, "submodule_search_locations", None) or ()]
    is_nvidia = any((folder / "optimizers").is_dir() and (folder / "normalization").is_dir() for folder in folders)
    return Apex("nvidia" if is_nvidia else "other")


def check_lookalikes(versions: Mapping[str, str], apex: Apex) -> list[Finding]:
    """Packages that carry the name of another one, or shadow it."""
    findings = []
    if apex.kind == "other":
        message = "is not NVIDIA's Apex (PyPI's package of that name is something else); torch's fused optimizers are used"
        findings.append(Finding("warning", "apex", message, "pip uninstall apex"))
    if "pynvml" in versions and "nvidia-ml-py" in versions:
        message = "both the old pynvml package and nvidia-ml-py are installed; they own the same module"
        findings.append(Finding("warning", "pynvml", message, "pip uninstall pynvml, then pip install --force-reinstall nvidia-ml-py"))
    return findings


def check_build_tools(torch_cuda: str | None, nvcc_cuda: str | None, which: Callable[[str], str | None] = shutil.which) -> list[Finding]:
    """What DeepSpeed needs to compile its operators at the start of a run.

    Args:
        torch_cuda: CUDA version that torch was built for; None: a CPU build.
        nvcc_cuda: version of the CUDA compiler; None: there is none.
    """
    findings = []
    if which("g++") is None and which("c++") is None:
        message = "no C++ compiler: DeepSpeed's CPU Adam and async I/O cannot be built, so offload to host or NVMe cannot run"
        findings.append(Finding("warning", "g++", message, "apt-get install g++"))
    if which("ninja") is None:
        findings.append(Finding("warning", "ninja", "is not on the PATH: extensions cannot be built", "pip install ninja"))
    if torch_cuda is not None:
        if nvcc_cuda is None:
            message = "no CUDA compiler: DeepSpeed's fused GPU operators cannot be built; torch's are used"
            findings.append(Finding("info", "nvcc", message, f"install the CUDA {torch_cuda} toolkit and set CUDA_HOME"))
        elif nvcc_cuda.split(".")[0] != torch_cuda.split(".")[0]:
            message = f"compiles for CUDA {nvcc_cuda}, torch was built for {torch_cuda}: DeepSpeed refuses to build its operators"
            findings.append(Finding("warning", "nvcc", message, f"install the CUDA {torch_cuda} toolkit and set CUDA_HOME"))
    return findings


def check_libraries() -> tuple[dict[str, str], list[Finding]]:
    """Everything above on this installation.

    Returns:
        name -> version of what this project uses, and what there is to say.
    """
    versions = installed_versions()
    requirements = project_requirements()
    apex = find_apex()
    findings = check_requirements(requirements, versions)
    findings += check_wishes(versions, importlib.metadata.requires)
    findings += check_lookalikes(versions, apex)
    named = [canonical(requirement.name) for requirement in requirements] + list(OPTIONAL)
    facts = {name: versions.get(name, "absent") for name in named}
    facts["apex"] = {"absent": "absent", "nvidia": "NVIDIA's", "other": "not NVIDIA's"}[apex.kind]
    return facts, findings
