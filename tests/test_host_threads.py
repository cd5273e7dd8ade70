"""Threads for an optimizer on the host."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness import host_threads
from harness.cgroups import usable_cores
from harness.host_threads import optimizer_threads, take_cores

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("chosen", "processes", "cores", "threads"),
    [
        ("1", 2, 32, 16),
        (None, 4, 30, 7),
        ("", 0, 8, 8),
        ("4", 2, 32, None),  # somebody's choice
        ("1", 8, 8, None),  # there are no more
        ("1", 8, 4, None),
    ],
)
def test_each_process_takes_its_part_of_the_cores(chosen: str | None, processes: int, cores: int, threads: int | None) -> None:
    assert optimizer_threads(chosen, processes, cores) == threads


def test_the_environment_is_changed_only_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    told: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    monkeypatch.setattr(host_threads, "usable_cores", lambda: 12)
    environ = {"OMP_NUM_THREADS": "1"}
    assert take_cores(4, environ) == 3
    assert environ == {"OMP_NUM_THREADS": "3"} and told == [3]
    assert take_cores(4, environ) is None and environ == {"OMP_NUM_THREADS": "3"} and told == [3]


def test_the_cpu_is_asked_once_for_all_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    cpuinfo = pytest.importorskip("cpuinfo")
    asked: list[int] = []

    def ask() -> dict[str, str]:
        asked.append(1)
        time.sleep(0.2)
        return {"arch": "X86_64"}

    monkeypatch.setattr(cpuinfo, "get_cpu_info", ask)
    thread = host_threads.ask_cpu_once()
    answers = [cpuinfo.get_cpu_info() for _ in range(3)]
    again = host_threads.ask_cpu_once()
    assert thread is not None and again is not None
    thread.join()
    again.join()
    assert answers == [{"arch": "X86_64"}] * 3 and asked == [1]


_CHILD = """
import os, torch
from harness.host_threads import take_cores
assert take_cores(1) == TAKEN
from deepspeed.ops.adam import DeepSpeedCPUAdam

def ticks():  # of each thread, in user mode
    return {task: int(open(f"/proc/self/task/{task}/stat").read().rpartition(")")[2].split()[11]) for task in os.listdir("/proc/self/task")}

parameter = torch.nn.Parameter(torch.ones(1 << 24))
optimizer = DeepSpeedCPUAdam([parameter])
parameter.grad = torch.ones_like(parameter)
optimizer.step()
before = ticks()
for _ in range(60):
    optimizer.step()
after = ticks()
print("worked:", sum(after[task] - before.get(task, 0) > 5 for task in after))
"""


@pytest.mark.slow  # DeepSpeed compiles the operator where it has not been before
@pytest.mark.skipif(usable_cores() < 2, reason="one core")
def test_deepspeeds_operator_works_on_all_of_them() -> None:
    cores = usable_cores()
    environ = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    done = subprocess.run(
        [sys.executable, "-c", _CHILD.replace("TAKEN", str(cores))], env=environ, capture_output=True, text=True, timeout=500
    )
    assert f"worked: {cores}\n" in done.stdout, done.stdout + done.stderr
