"""Where a life of a run begins: the plan, what an earlier life had come down to, one step below; and what a dry run teaches."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness import guard_line, memory, run_plan
from harness.findings import UserError
from harness.ladder import MemorySettings
from harness.model_shape import Measured
from harness.oom_reports import write_ladder
from harness.parsing import from_config
from harness.run_plan import JobFacts
from harness.starting_settings import DryRunWatch, Start, choose_start, job_facts
from tests.test_planner import SHAPE

GIB = 2**30
CARD = "NVIDIA H100 80GB HBM3"


class Alone:
    """One process that agrees with itself."""

    num_processes = num_local_processes = 1
    is_main_process = True

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)

    def max(self, values: list[float], what: str = "") -> list[float]:
        return values

    def broadcast(self, value: Any) -> Any:
        return value


@pytest.fixture(autouse=True)
def small_world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(run_plan, "measure", lambda requests: Measured(SHAPE, requests[0]["block_size"]))
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(guard_line.CAUSE_VARIABLE, raising=False)
    monkeypatch.setattr(logging.getLogger("harness"), "propagate", True)
    caplog.set_level(logging.INFO)


def arguments(**flags: Any) -> Any:
    return from_config({"model_type": "llama", "output_dir": "out", "fsdp": "full_shard", **flags})


def facts(card_gib: float = 79.1) -> JobFacts:
    return JobFacts("fsdp", 1, 1, CARD, int(card_gib * GIB), 2048, 8, "bf16", 900 * GIB, may_relaunch=True)


def start(folder: Path, job: JobFacts | None = None, **flags: Any) -> Start:
    args = arguments(**flags)
    return choose_start(args, "fsdp", folder, Alone(), block_size=2048, num_parameters=10**9, facts=job)  # type: ignore[arg-type]


def test_the_first_life_takes_the_plan_and_writes_it_down(tmp_path: Path) -> None:
    first = start(tmp_path, facts(150))
    assert first.plan is not None
    assert first.settings == first.plan.settings != MemorySettings(8, loss_chunk_size=1024)
    assert json.loads((tmp_path / "plan.json").read_text())["fits"] is True
    ladder = json.loads((tmp_path / "ladder.json").read_text())
    assert ladder["now"] == first.settings.to_dict()
    assert [rung["need_bytes"] for rung in ladder["ladder"]] == [rung.need_bytes for rung in first.plan.ladder]


@pytest.mark.parametrize("flags", [{"auto_memory": "suggest"}, {"oom_ladder": ["micro_batch"]}])
def test_what_is_only_suggested_is_not_taken(tmp_path: Path, flags: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    kept = start(tmp_path, facts(150), **flags)
    assert kept.settings == MemorySettings(8, loss_chunk_size=1024)
    assert kept.plan is None
    assert ("suggested, not taken" in caplog.text) is ("auto_memory" in flags)


def test_a_users_own_ladder_stays_when_a_plan_is_asked_for_too(tmp_path: Path) -> None:
    """Also where the planner finds nothing that fits: its own one rung took the place of the user's."""
    flags = {"auto_memory": "on", "oom_ladder": ["micro_batch=2", "activation_checkpointing=full"]}
    for size in (150, 1):
        (tmp_path / str(size)).mkdir()
        kept = start(tmp_path / str(size), facts(size), **flags)
        asked = MemorySettings(8, loss_chunk_size=1024)
        assert list(kept.ladder) == [asked, asked.replace(micro_batch_size=2), kept.ladder[1].replace(activation_checkpointing="full")]  # type: ignore[union-attr]
        assert kept.plan is not None


def test_rungs_of_other_engines_are_refused_with_all_that_free_nothing(tmp_path: Path) -> None:
    words = ["micro_batch=8", "reduce_bucket_size=5e8", "in_flight_micro_batches=2", "param_offload", "reshard_after_forward"]
    with pytest.raises(UserError) as refused:
        start(tmp_path, oom_ladder=words)
    text = str(refused.value)
    assert [word in text for word in words] == [True, True, True, False, True]  # FSDP2 can offload; it reshards already
    assert "a setting of zero, the engine is fsdp" in text and len(refused.value.findings) == 4


def test_without_a_card_nothing_is_planned_unless_one_is_made_up(tmp_path: Path) -> None:
    ask: dict[str, Any] = {"block_size": 2048, "samples_per_rank": 8, "precision": "fp32"}
    assert job_facts(arguments(), "fsdp", Alone(), **ask) is None  # type: ignore[arg-type]
    made_up = job_facts(arguments(gpu_memory="20GiB"), "fsdp", Alone(), **ask)  # type: ignore[arg-type]
    assert made_up is not None
    assert (made_up.gpu_bytes, made_up.gpu_name, made_up.host_bytes) == (20 * GIB, "", None)
    off = arguments(gpu_memory="20GiB", auto_memory="off")  # known all the same: the end of a ladder speaks of it
    assert job_facts(off, "fsdp", Alone(), **ask) == made_up  # type: ignore[arg-type]
    start = choose_start(off, "fsdp", tmp_path, Alone(), block_size=2048, num_parameters=1000, facts=made_up)  # type: ignore[arg-type]
    assert start.plan is None


def test_a_restart_goes_on_where_the_run_had_come_down_to(tmp_path: Path) -> None:
    first = start(tmp_path, facts(150))
    below = first.ladder[2]
    lower = below if isinstance(below, MemorySettings) else below.settings
    write_ladder(tmp_path, 1, first.ladder, [{"change": "something"}], lower)
    assert start(tmp_path, facts(150)).settings == lower
    write_ladder(tmp_path, 1, first.ladder, [], lower)  # it never had to: planned anew
    assert start(tmp_path, facts(150)).settings == first.settings


def test_a_life_after_an_out_of_memory_corrects_the_estimates_of_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = start(tmp_path, facts(150))
    assert first.plan is not None
    needs = {rung.settings: rung.need_bytes or 0.0 for rung in first.plan.ladder}
    cause = {
        "phase": "update",
        "rank": 0,
        "failure": "CUDA out of memory",
        "limit_gib": 150.0,
        "requested_gib": 20.0,
        "allocated_gib": 149.0,
    }
    monkeypatch.setenv(guard_line.CAUSE_VARIABLE, json.dumps(cause))
    second = start(tmp_path, facts(150))
    factor = 169 * GIB / needs[first.settings]
    fitting = [rung for rung in first.plan.ladder if (rung.need_bytes or 0.0) * factor <= 150 * GIB]
    assert second.settings == fitting[0].settings
    assert second.plan is None  # no new plan
    written = json.loads((tmp_path / "ladder.json").read_text())
    assert written["now"] == second.settings.to_dict()
    assert len(written["steps_down"]) == 1
    assert {rung["need_bytes"] for rung in written["ladder"]} == set(needs.values())


def test_no_recovery_still_starts_where_it_fits(tmp_path: Path) -> None:
    careful = start(tmp_path, facts(150), no_oom_recovery=True)
    assert careful.plan is not None
    assert careful.settings == careful.plan.settings
    assert careful.ladder == ()
    assert careful.plan.candidate.estimate.high_bytes <= 150 * GIB


@pytest.mark.parametrize("failed", [False, True])
def test_a_dry_run_on_a_card_is_compared_with_its_prediction(
    tmp_path: Path, failed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun = start(tmp_path, facts(150))
    assert begun.plan is not None
    predicted = max(phase.total_bytes for phase in begun.plan.candidate.estimate.phases if phase.name != "update")
    values = {
        "reset_peak_memory_stats": None,
        "mem_get_info": (20 * GIB, 150 * GIB),
        "max_memory_allocated": int(0.9 * predicted),
        "max_memory_reserved": int(0.95 * predicted),
        "get_device_name": CARD,
    }
    for name, value in values.items():
        monkeypatch.setattr(torch.cuda, name, lambda device=None, value=value: value)
    recovery: Any = SimpleNamespace(steps_down=[{"change": "of an earlier life"}])
    watch = DryRunWatch(begun, recovery, Alone("cuda"))  # type: ignore[arg-type]
    if failed:
        recovery.steps_down.append({"allocated_gib": 1.2 * predicted / GIB, "requested_gib": 0.1 * predicted / GIB})
    watch.done()
    factors = memory.machine_factors(CARD, "fsdp")
    assert factors.allocated == pytest.approx(1.3 if failed else 0.9, rel=1e-6)
    assert ("(+30.0 %)" if failed else "(-10.0 %)") in caplog.text
    # 130 GiB of the card were in use, more than ours by far: somebody else's
    assert factors.outside_bytes == (
        0 if failed else min(130 * GIB, int(0.95 * predicted) + run_plan.MOST_OUTSIDE_BYTES) - int(0.95 * predicted)
    )
