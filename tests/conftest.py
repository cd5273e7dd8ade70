"""What all tests share."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.faults.fork_ranks import ForkServer

# Under nohup, and in the background of a script, signals are ignored that tests send; what they start inherits that.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _handler)

# What runs remember of their checkpoints stays out of the home folder of whoever tests.
if "HARNESS_STATE_DIR" not in os.environ:  # else a worker of pytest-xdist, which has its controller's
    os.environ["HARNESS_STATE_DIR"] = tempfile.mkdtemp(prefix="harness-test-state-")
    atexit.register(shutil.rmtree, os.environ["HARNESS_STATE_DIR"], ignore_errors=True)

# Examples of property tests: the same in every run, or with HYPOTHESIS_PROFILE=long many others.
settings.register_profile("same", derandomize=True, deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("long", deadline=None, max_examples=3000, print_blob=True, suppress_health_check=list(HealthCheck))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

# Tests that share a worker: those that start ranks, by launcher or by fork, and those of the documents, which share a small run. Ranks
# wait for each other and for launchers a third of their time, so those of the second kind go beside the first.
ONE_WORKER = {
    "ranks": ("tests/distributed/", "tests/faults/"),
    "launched": ("tests/foreign/test_launchers.py", "tests/foreign/test_redo.py", "tests/test_launch.py", "tests/cluster/test_s"),
    "readme": ("tests/test_readme.py",),
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests that start ranks share two workers of pytest-xdist at most: several ranks fill a small machine.

    By the scheduler, not by `xdist_group`: pytest 9.2 does not let pytest-xdist 3.8 write the group into a test's name.
    """
    from xdist.scheduler import LoadScopeScheduling

    class OneWorkerEach(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((name for name, paths in ONE_WORKER.items() if nodeid.startswith(paths)), nodeid)

    return OneWorkerEach(config, log)


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    """Starts jobs by fork, for what does not depend on the launcher."""
    from tests.faults.fork_ranks import ForkServer

    with ForkServer() as running:
        yield running


@pytest.fixture(autouse=True)
def environment_as_before() -> Iterator[None]:
    """A job that runs in the tests' own process sets variables (LOCAL_RANK for DeepSpeed) that would make the next test's one of many."""
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def log_as_at_the_start() -> None:
    """A job that ran in this process has sent its log to the console and kept it from pytest, which then sees every line twice."""
    log = logging.getLogger("harness")
    for handler in list(log.handlers):
        if not type(handler).__module__.startswith("_pytest"):  # pytest takes its own away itself
            log.removeHandler(handler)
            handler.close()
    log.propagate = True
    log.setLevel(logging.NOTSET)


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
