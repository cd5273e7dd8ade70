"""What all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

# Tests that start real launchers, which run one at a time on a machine.
STARTS_RANKS = ("tests/distributed/", "tests/faults/test_signals.py", "tests/test_launch.py", "tests/cluster/test_slurm.py")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests that start ranks share one worker of pytest-xdist, so that no other one waits for them: several ranks fill a small machine.

    By the scheduler, not by `xdist_group`: pytest 9.2 does not let pytest-xdist 3.8 write the group into a test's name.
    """
    from xdist.scheduler import LoadScopeScheduling

    class OneWorkerForRanks(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "ranks" if nodeid.startswith(STARTS_RANKS) else nodeid

    return OneWorkerForRanks(config, log)


@pytest.fixture(autouse=True)
def environment_as_before() -> Iterator[None]:
    """A job that runs in the tests' own process sets variables (LOCAL_RANK for DeepSpeed) that would make the next test's one of many."""
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A job of one process inside the test's own; a crash of the job is an exception, not the end of the tests."""
    import torch.distributed as dist

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)

    def crash(code: int) -> None:
        raise AssertionError(f"the job ended with os._exit({code})")

    monkeypatch.setattr(os, "_exit", crash)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
