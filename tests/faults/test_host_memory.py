"""The kernel ends a rank because the memory limit of its group is reached: an out-of-memory of the host, with rungs of its own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.cgroups import OWN, ROOT
from tests.faults import jobs
from tests.launching import ROOT as PROJECT

LIMIT_BYTES = 3 * 2**30


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory group of its own with a limit; the test is skipped where none can be made."""
    parents = [(ROOT / "memory", "memory.limit_in_bytes"), (ROOT, "memory.max")]
    parent, name = next(((each, file) for each, file in parents if (each / file).exists() or file == "memory.max"), parents[1])
    folder = parent / f"harness-test-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir()
        (folder / name).write_text(str(LIMIT_BYTES))
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no memory group can be made here: {error}")
    yield folder
    with contextlib.suppress(OSError):
        folder.rmdir()


@pytest.mark.slow
def test_a_kill_by_the_kernel_is_an_out_of_memory_of_the_host(group: Path, inputs: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    command = [sys.executable, "-m", "tests.distributed.oom_worker", *jobs.arguments(inputs, output, "single", "--snapshot_steps", "2")]
    environment = dict(os.environ, HARNESS_TEST_OOM="host-memory:0:7 host-memory:0:3:1", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")

    def join() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=400, preexec_fn=join)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    steps = json.loads((output / "ladder.json").read_text())["steps_down"]
    assert [(step["memory"], step["change"], step["way"]) for step in steps] == [
        ("host", "no snapshots in host memory", "relaunch"),
        ("host", "no loader workers", "relaunch"),
    ]
    assert all("killed by the kernel" in step["failure"] for step in steps)
    rows = jobs.train_rows(output)
    assert [row["step"] for row in rows][-1] == jobs.NUM_STEPS
    assert OWN.exists()
