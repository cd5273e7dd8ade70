"""Looks up what is installed among known vulnerabilities; part of launch/test.sh. Standard library only.

    python launch/audit.py [--pip_audit "COMMAND"] [--constraints FILE]

Where pip-audit and its database can be reached, a vulnerability that a newer version mends is an error, and one without such a version is
shown. Elsewhere what is installed must at least be what constraints.txt pins, which was looked up when the pins were made.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 180


def known_vulnerabilities(command: Sequence[str]) -> list[dict[str, Any]] | None:
    """Of all installed packages: name, version, id, fix_versions. None where pip-audit or its database is not to be had."""
    with tempfile.TemporaryDirectory(prefix="audit-") as folder:
        report = Path(folder) / "report.json"
        options = ["--format", "json", "--output", str(report), "--progress-spinner", "off", "--timeout", "10", "--skip-editable"]
        try:
            subprocess.run([*command, *options], capture_output=True, text=True, timeout=LIMIT_S, check=False)
            packages = json.loads(report.read_text(encoding="utf-8"))["dependencies"]
        except (OSError, ValueError, KeyError, subprocess.TimeoutExpired):
            return None
    return [
        {"name": package["name"], "version": package["version"], "id": found["id"], "fix_versions": found["fix_versions"]}
        for package in packages
        for found in package.get("vulns", [])
    ]


def unpinned(constraints: Path) -> list[str]:
    """One line for each installed package that is not the version pinned for it."""
    lines: list[str] = []
    for name, wanted in re.findall(r"^([\w.-]+)==(\S+)", constraints.read_text(encoding="utf-8"), re.MULTILINE):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if version.partition("+")[0] != wanted:  # +cpu, +cu130: builds of the same version
            lines.append(f"{name} is {version}, pinned is {wanted}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 where nothing is to be done, else 1."""
    parser = argparse.ArgumentParser(description="Known vulnerabilities of what is installed.")
    parser.add_argument("--pip_audit", default=f"{shlex.quote(sys.executable)} -m pip_audit", help="the command that runs pip-audit")
    parser.add_argument("--constraints", type=Path, default=ROOT / "constraints.txt")
    options = parser.parse_args(argv)
    found = known_vulnerabilities(shlex.split(options.pip_audit))
    if found is None:
        lines = unpinned(options.constraints)
        print("pip-audit or its database cannot be reached: versions are compared with the pins instead")
        print("\n".join(lines) or "all installed packages are as pinned")
        return int(bool(lines))
    mendable = [each for each in found if each["fix_versions"]]
    for each in found:
        fix = f"mended in {', '.join(each['fix_versions'])}" if each["fix_versions"] else "no version mends it yet"
        print(f"{each['name']} {each['version']}: {each['id']}, {fix}")
    print(f"{len(found)} known vulnerabilities, {len(mendable)} of them with a version that mends them")
    return int(bool(mendable))


if __name__ == "__main__":
    sys.exit(main())
