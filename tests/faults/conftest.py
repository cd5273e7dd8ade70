"""One set of inputs for the fault tests of a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import jobs
from tests.faults.fork_ranks import ForkServer


@pytest.fixture(scope="session")
def inputs(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    server.call(jobs.make_inputs, str(folder), output=folder / "inputs.txt")
    return folder
