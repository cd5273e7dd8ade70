"""The summary of a profile: exact shares of known intervals, and a run on the CPU."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from harness.findings import UserError
from harness.parsing import parse_args
from harness.profiling import Shares, StepProfiler, kind_of, length, shares, union


def test_union_and_length() -> None:
    assert union([(3, 4), (0, 1), (0.5, 2), (2, 2.5)]) == [(0, 2.5), (3, 4)]
    assert length([(3, 4), (0, 1), (0.5, 2)]) == 3.0
    assert union([]) == [] and length([]) == 0


def test_shares_add_up() -> None:
    compute, communication, copies = [(0.0, 4.0), (6.0, 8.0)], [(3.0, 5.0), (7.0, 7.5)], [(4.5, 5.5), (9.0, 10.0)]
    found = shares(compute, communication, copies)
    assert found == Shares(total=10, compute=6, exposed_communication=1, exposed_copies=1.5, idle=1.5, communication=2.5)
    assert shares([], [], []) is None


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("Memcpy DtoH (Device -> Pinned)", "copies"),
        ("Memset (Device)", "copies"),
        ("nvjet_sm90_tst_128x256_64x4", "compute"),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_the_asked_steps_are_recorded_and_no_others(tmp_path: Path) -> None:
    profiler = StepProfiler("2-3", tmp_path / "profile", 0, torch.device("cpu"))
    for step in range(1, 6):
        profiler.before(step)
        with torch.profiler.record_function(f"step {step}"):
            torch.ones(8, 8) @ torch.ones(8, 8)
        profiler.after(step)
    trace = json.loads(gzip.decompress((tmp_path / "profile" / "trace-0.json.gz").read_bytes()))
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"step 2", "step 3"} <= names and not names & {"step 1", "step 4", "step 5"}
    summary = (tmp_path / "profile" / "summary.txt").read_text()
    assert summary.startswith("steps 2 to 3, rank 0, cpu") and "aten::mm" in summary


@pytest.mark.parametrize(
    ("steps", "message"),
    [("3-2", "like 10-12 or 10, not 3-2"), ("0", "not 0"), ("a", "not a"), ("1-2-3", "not 1-2-3"), ("9-11", "after the last step, 10")],
)
def test_wrong_steps_are_refused(steps: str, message: str) -> None:
    base = ["--model_name_or_path", "gpt2", "--output_dir", "out", "--max_steps", "10"]
    assert parse_args([*base, "--profile_steps", "10"]).train.profile_steps == "10"
    with pytest.raises(UserError, match=message):
        parse_args([*base, f"--profile_steps={steps}"])
