"""Two nodes on one machine: network namespaces with addresses of their own, joined by a cable; needs root.

with two_nodes() as nodes:
    subprocess.run([*nodes[1].enter, "ping", "-c1", nodes[0].address])
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Node:
    """One of the two.

    Attributes:
        address: that the other one reaches it by.
        interface: its network interface.
        enter: what comes before a command that is to run there.
    """

    address: str
    interface: str
    enter: tuple[str, ...]


def problem() -> str | None:
    """Why this machine cannot have them; None where it can."""
    try:
        with two_nodes():
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces here: {error}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextlib.contextmanager
def two_nodes() -> Iterator[tuple[Node, Node]]:
    """Makes them, and takes them away at the end.

    Raises:
        CalledProcessError, OSError: not root, or the system forbids it.
    """
    mark = f"h{os.getpid()}"
    names, cables = (f"{mark}a", f"{mark}b"), (f"{mark}x", f"{mark}y")
    made = []
    try:
        for name in names:
            _ip("netns", "add", name)
            made.append(name)
        _ip("link", "add", cables[0], "netns", names[0], "type", "veth", "peer", "name", cables[1], "netns", names[1])
        for number, (name, cable) in enumerate(zip(names, cables, strict=True), start=1):
            _ip("-n", name, "addr", "add", f"10.73.0.{number}/24", "dev", cable)
            _ip("-n", name, "link", "set", cable, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield tuple(  # type: ignore[misc]
            Node(f"10.73.0.{number}", cable, ("ip", "netns", "exec", name))
            for number, (name, cable) in enumerate(zip(names, cables, strict=True), start=1)
        )
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
