"""Builds docker/Dockerfile on a base of our own making, with no daemon and no image from elsewhere: buildah in a chroot; needs root.

The base is a minimal Debian with a compiler, and the torch of the Python that runs the tests. Or, in seconds, it is this machine: empty
folders, over which its system and packages are mounted read-only, and its Python. Then nothing is left for pip to bring or to compile.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.launching import ROOT

NAME = "localhost/harness-test"
PROGRAMS = ["buildah", "podman", "runc", "mmdebstrap"]
PACKAGES = ["buildah", "podman", "runc", "crun", "mmdebstrap"]
PYTHON = (3, 11)  # Debian 12's
_BASE = """\
FROM scratch
ADD base.tar /
COPY packages /usr/local/lib/python3.11/dist-packages
"""
_THIS_MACHINE = """\
FROM scratch
COPY root /
ENV PATH=/opt/python/bin:/usr/local/bin:/usr/bin:/bin LD_LIBRARY_PATH=/opt/python/lib
"""
# How the image's pip reaches what pip reaches here.
_OF_PIP = ["/etc/ssl/certs/ca-certificates.crt", "/etc/pip.conf"]


class Images:
    """Images in a store of their own.

    Args:
        folder: for the store and everything that is made on the way; some GB.

    Attributes:
        mounts: folders of this machine that every container gets: --volume and its value, and so on.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_root = tempfile.mkdtemp(prefix="run-", dir="/tmp")  # podman takes at most 50 characters
        self.store = ["--root", str(folder / "store"), "--runroot", self.run_root, "--storage-driver", "overlay"]
        self.mounts: list[str] = []

    def make_base_of_this_machine(self) -> str:
        """Returns the base's name."""
        context = self.folder / "base"
        root = context / "root"
        places = {"/usr": "/usr", sysconfig.get_path("purelib"): "/opt/packages"}
        for name in ("usr", "etc", "tmp", "var/tmp", "root", "opt/packages"):
            (root / name).mkdir(parents=True)
        for name in ("tmp", "var/tmp"):
            (root / name).chmod(0o1777)
        for name in ("bin", "sbin", "lib", "lib64"):
            (root / name).symlink_to(f"usr/{name}")
        for name in ("passwd", "group", "nsswitch.conf", "ld.so.cache", "alternatives"):
            source = Path("/etc", name)
            if source.is_dir():
                shutil.copytree(source, root / "etc" / name, symlinks=True)
            elif source.exists():
                shutil.copy(source, root / "etc" / name)
        # Not its own packages: what else this machine has is none of the image's.
        left_out = shutil.ignore_patterns("site-packages", "test", "tests", "idlelib", "*.a")
        shutil.copytree(sys.base_prefix, root / "opt/python", symlinks=True, ignore=left_out)
        site_packages = next((root / "opt/python/lib").glob("python3.*")) / "site-packages"
        site_packages.mkdir()
        (site_packages / "packages.pth").write_text("/opt/packages\n")
        (context / "Containerfile").write_text(_THIS_MACHINE)
        self.mounts = [word for here, there in places.items() for word in ("--volume", f"{here}:{there}:ro")]
        self._build("localhost/harness-test-machine", [str(context)])
        return "localhost/harness-test-machine"

    def make_base(self) -> str:
        """Returns the base's name."""
        context = self.folder / "base"
        context.mkdir(parents=True)
        system = "python3,python3-venv,python3-dev,g++,ca-certificates"
        _run(["mmdebstrap", "--quiet", "--variant=minbase", f"--include={system}", "bookworm", str(context / "base.tar")], timeout_s=900)
        link_package("torch", context / "packages", set())
        (context / "Containerfile").write_text(_BASE)
        self._build("localhost/harness-test-base", [str(context)])
        shutil.rmtree(context)
        return "localhost/harness-test-base"

    def build(self, base: str) -> None:
        """Builds docker/Dockerfile on this base; the image's name is NAME."""
        arguments = ["--build-arg", f"BASE_IMAGE={base}", "--build-arg", "DS_ACCELERATOR=cpu"]
        mounts = [*self.mounts, *(word for path in _OF_PIP if Path(path).exists() for word in ("--volume", f"{path}:{path}:ro"))]
        ignore = ["--ignorefile", str(ROOT / "docker/Dockerfile.dockerignore")]
        self._build(NAME, [*arguments, *mounts, *ignore, "--file", str(ROOT / "docker/Dockerfile"), str(ROOT)])

    def _build(self, name: str, words: Sequence[str]) -> None:
        _run(["buildah", *self.store, "bud", "--isolation", "chroot", "--pull-never", "--format", "docker", "--tag", name, *words], 3000)

    def run(self, options: Sequence[str], image: str, *words: str, timeout_s: float = 600) -> subprocess.CompletedProcess[str]:
        """A container of this machine's network, with limits that a process without privileges may set."""
        limits = ["--ulimit", "nofile=20000:20000", "--ulimit", "nproc=4096:4096", "--network", "host"]
        command = [
            "podman",
            *self.store,
            "--runtime",
            "runc",
            "--cgroup-manager",
            "cgroupfs",
            "run",
            "--rm",
            *limits,
            *self.mounts,
            *options,
            image,
            *words,
        ]
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s)

    def close(self) -> None:
        """Removes everything, mounts too."""
        subprocess.run(["buildah", *self.store, "rm", "--all"], capture_output=True)
        subprocess.run(["podman", *self.store, "rmi", "--all", "--force"], capture_output=True)
        for folder in (self.folder, self.run_root):
            shutil.rmtree(folder, ignore_errors=True)


def problem(debian: bool = True) -> str | None:
    """Why an image cannot be built here; None where it can.

    Args:
        debian: on the base that is made of Debian's packages.
    """
    if os.geteuid() != 0:
        return "building an image in a chroot needs root"
    allowed = subprocess.run(["unshare", "--mount", "mount", "--bind", "/usr", "/usr"], capture_output=True, text=True)
    if allowed.returncode != 0:
        return f"this system forbids mount namespaces: {allowed.stderr.strip()}"
    if not debian:
        return "the base takes a Python that is not the system's" if Path(sys.base_prefix) == Path("/usr") else None
    if sys.version_info[:2] != PYTHON:
        return f"the base has Python {PYTHON[0]}.{PYTHON[1]}, and takes torch from the Python that runs the tests"
    return None


def link_package(name: str, target: Path, seen: set[str]) -> None:
    """Makes a folder with hard links to an installed package's files, and to those of what it requires."""
    if name in seen:
        return
    seen.add(name)
    try:
        package = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:  # of another platform, or an extra
        return
    for file in package.files or []:
        source = Path(str(package.locate_file(file))).resolve()
        if ".." not in file.parts and source.is_file():
            link = target / file
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.exists():
                _link(source, link)
    for line in package.requires or []:
        required = re.match(r"[\w.-]+", line)
        if required and "extra ==" not in line:
            link_package(re.sub(r"[-_.]+", "-", required[0]).lower(), target, seen)


def _link(source: Path, link: Path) -> None:
    try:
        os.link(source, link)
    except OSError:  # another file system
        shutil.copy2(source, link)


def _run(command: list[str], timeout_s: float) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s)
    assert done.returncode == 0, f"{command[:2]} ended with {done.returncode}\n{done.stdout[-4000:]}"
