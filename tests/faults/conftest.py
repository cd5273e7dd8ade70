"""One set of inputs for the fault tests of a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults import jobs, scenarios
from tests.faults.fork_ranks import ForkServer


@pytest.fixture(scope="session")
def inputs(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    server.call(jobs.make_inputs, str(folder), output=folder / "inputs.txt")
    return folder


@pytest.fixture(scope="session")
def references(server: ForkServer, inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of the uninterrupted run of an engine, made when it is first asked for."""
    made: dict[str, Path] = {}

    def folder(engine: str) -> Path:
        if engine not in made:
            made[engine] = scenarios.uninterrupted(server, inputs, engine, tmp_path_factory.mktemp(f"reference-{engine}"))
        return made[engine]

    return folder
