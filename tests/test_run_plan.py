"""The planner inside a run: what it keeps, what it changes, where it starts, the ladder below, and what a dry run teaches it."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from harness import memory, run_plan
from harness.findings import UserError, user_error
from harness.ladder import MemorySettings
from harness.model_shape import Measured, RunShape, ZeroOptions
from harness.parsing import from_config
from harness.run_plan import JobFacts, StartPlan, plan_start
from tests.test_planner import SHAPE

GIB = 2**30
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def closed_forms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """Closed forms of an 8B Llama in the place of a child process, and an empty cache; returns what was asked."""
    asked: list[dict[str, Any]] = []

    def measure(requests: Any) -> Measured:
        asked.extend(requests)
        return Measured(SHAPE, requests[0]["block_size"])

    monkeypatch.setattr(run_plan, "measure", measure)
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    return asked


def facts(engine: str = "fsdp", card_gib: float = 79.1, **changes: Any) -> JobFacts:
    values: dict[str, Any] = {"num_processes": 8, "num_local_processes": 8, "gpu_name": "NVIDIA H100 80GB HBM3", "block_size": 4096}
    values |= {"samples_per_rank": 8, "precision": "bf16", "host_bytes": 900 * GIB, "may_relaunch": True}
    return JobFacts(engine=engine, gpu_bytes=int(card_gib * GIB), **{**values, **changes})


def plan(asked: MemorySettings | None = None, job: JobFacts | None = None, can_offload: bool = True, **flags: Any) -> StartPlan:
    """A plan of a run that was started with these flags."""
    defaults = {"fsdp": "full_shard"} if job is None or job.engine == "fsdp" else {}
    args = from_config({"model_type": "llama", "output_dir": "out", **defaults, **flags})
    found = plan_start(args, asked or MemorySettings(8, loss_chunk_size=1024), job or facts(), {}, can_offload=can_offload)
    assert found is not None
    return found


def test_without_a_word_from_the_user_the_fastest_that_fits_is_taken() -> None:
    found = plan()
    assert found.settings.micro_batch_size * found.candidate.accumulation == 8
    assert found.candidate.need_bytes("start") <= 79.1 * GIB
    assert "does not fit" in found.lines[1]
    assert found.changed == ()
    fitting = [row for row in found.content["rejected"] if not row["misfit"]]
    assert fitting == []
    assert all(row["step_time_s"] < found.candidate.time.total_s for row in found.content["rejected"])


def test_what_was_typed_stays_where_it_fits() -> None:
    asked = MemorySettings(1, "full", loss_chunk_size=1024)
    found = plan(asked, per_device_train_batch_size=1, gradient_checkpointing=True)
    assert found.settings == asked
    assert len([line for line in found.lines if "as asked" in line]) == 0


def test_what_was_typed_and_cannot_fit_is_changed_and_said() -> None:
    found = plan(MemorySettings(8, loss_chunk_size=1024), per_device_train_batch_size=8, activation_checkpointing="none")
    assert found.settings.micro_batch_size < 8
    assert found.settings.activation_checkpointing == "none"  # a smaller micro-batch was enough
    assert found.changed == ("micro_batch_size",)
    assert "changed although it was given, because nothing fits with it: micro_batch_size" in found.lines


def test_offload_comes_last_and_only_where_it_can_be_built() -> None:
    small = facts("zero3", card_gib=14.0, num_processes=8)
    template = {"deepspeed": str(ROOT / "ds_configs/zero3.json")}
    found = plan(job=small, **template)
    assert found.settings.optimizer_offload > 0
    assert set(found.changed) & {"optimizer_offload", "param_offload"}
    assert found.candidate.need_bytes("start") == found.candidate.estimate.high_bytes  # a miss costs a new start
    without = plan(job=small, can_offload=False, **template)
    assert without.settings.optimizer_offload == 0
    assert not without.content["fits"]
    assert any(line.startswith("nothing is predicted to fit; these settings need the least") for line in without.lines)


def test_a_templates_offload_stays() -> None:
    asked = MemorySettings(8, loss_chunk_size=1024, optimizer_offload=1.0, param_offload="cpu")
    found = plan(asked, facts("zero3"), deepspeed=str(ROOT / "ds_configs/zero3_offload.json"))
    assert (found.settings.optimizer_offload, found.settings.param_offload) == (1.0, "cpu")


@pytest.mark.parametrize("may_relaunch", [True, False])
def test_ladder_below_the_start_gets_slower_and_smaller(may_relaunch: bool) -> None:
    found = plan(job=facts("zero3", may_relaunch=may_relaunch), deepspeed=str(ROOT / "ds_configs/zero3.json"))
    rungs = found.ladder
    assert rungs[0].settings == found.settings
    times = [rung.step_time_s or 0.0 for rung in rungs]
    assert times == sorted(times)
    assert all((rung.need_bytes or 0.0) < (rungs[0].need_bytes or 0.0) for rung in rungs[1:])
    differing = {name for rung in rungs for name, value in rung.settings.to_dict().items() if value != found.settings.to_dict()[name]}
    assert (differing <= run_plan.IN_PLACE) is not may_relaunch
    free: dict[str, Any] = {"micro_batch_size": 1, "activation_checkpointing": "none", "activation_offload": False}
    in_place = [rung for rung in rungs if rung.settings.replace(**free) == found.settings.replace(**free)]
    last = in_place[-1].settings
    assert (last.micro_batch_size, last.activation_checkpointing, last.activation_offload) == (1, "full", True)


def test_a_miss_that_is_redone_in_place_is_risked_and_others_are_not() -> None:
    bold, careful = plan(), plan(no_oom_recovery=True)
    assert bold.candidate.estimate.expected_bytes <= 79.1 * GIB
    assert careful.candidate.estimate.high_bytes <= 79.1 * GIB
    middle = (careful.candidate.estimate.high_bytes + careful.candidate.estimate.expected_bytes) / 2 / GIB
    assert plan(job=facts(card_gib=middle)).settings == careful.settings
    assert plan(job=facts(card_gib=middle), no_oom_recovery=True).settings != careful.settings


@pytest.mark.parametrize(("update_gib", "need_gib"), [(50, 66.0), (57, 66.0), (60, 69.0)])
def test_an_update_that_does_not_fit_is_not_risked(update_gib: int, need_gib: float) -> None:
    """Of 60 GiB allocated at the peak; the allocator may take 8 % more of an update, where 3 % are expected."""
    phases = (memory.Phase("backward", {"activations": 60.0 * GIB}), memory.Phase("update", {"update": 1.0 * update_gib * GIB}))
    estimate = memory.MemoryEstimate(phases, 60 * GIB, 62 * GIB, 66 * GIB, 74 * GIB, 0, 0, 0, reserved_bytes=int(61.8 * GIB))
    candidate = dataclasses.replace(plan().candidate, estimate=estimate)
    assert candidate.need_bytes("start") == pytest.approx(need_gib * GIB, abs=1)
    assert candidate.need_bytes("expected") == 66 * GIB


def test_engine_auto_spreads_what_does_not_fit() -> None:
    found = plan(job=facts("ddp"), engine="auto")
    assert found.settings.engine == "fsdp"
    assert found.candidate.engine == "fsdp"
    alone = plan(job=facts("ddp"))
    assert not alone.content["fits"]
    assert alone.settings.engine == ""


def test_a_planner_that_fails_does_not_stop_the_run(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def measure(requests: Any) -> Measured:
        raise user_error("--model", "the model could not be measured: Segmentation fault")

    monkeypatch.setattr(run_plan, "measure", measure)
    monkeypatch.setattr(logging.getLogger("harness"), "propagate", True)
    args = from_config({"model_type": "llama", "output_dir": "out"})
    assert plan_start(args, MemorySettings(8), facts("ddp"), {}) is None
    assert "no memory plan, starting with what was asked for" in caplog.text
    assert plan_start(args, MemorySettings(8), facts("device_map"), {}) is None  # plans itself


def test_request_follows_the_arguments(closed_forms: list[dict[str, Any]]) -> None:
    plan(job=facts("ddp", card_gib=900), lora_r=8, packing="none", attn_implementation="eager")
    (request,) = closed_forms
    assert request["lora"] == {"lora_r": 8, "lora_dropout": 0.0, "target_modules": ["all-linear"]}
    assert (request["documents"], request["attention"], request["weights"], request["loss_chunks"]) == (
        False,
        "eager",
        ["autocast"],
        [1024],
    )


def test_sizes_of_a_template_are_read() -> None:
    template = json.loads((ROOT / "ds_configs/zero3.json").read_text())
    assert run_plan.zero_options(template) == ZeroOptions(pin_memory=False)
    bare = run_plan.zero_options({"zero_optimization": {"stage": 2}})
    assert (bare.reduce_bucket_size, bare.overlap_comm) == (500_000_000, False)


def test_hybrid_sharding_is_seen() -> None:
    args = from_config({"model_type": "llama", "output_dir": "out", "fsdp": "hybrid_shard"})
    run = run_plan.run_shape(args, "fsdp", facts(num_processes=16), {})
    assert (run.num_shards, run.num_processes) == (8, 16)
    whole = run_plan.run_shape(from_config({"model_type": "llama", "output_dir": "out", "fsdp": "full_shard"}), "fsdp", facts(), {})
    assert (whole.shard_group_size, whole.reduce_in_float32) == (None, True)
    flags = {"model_type": "llama", "output_dir": "out", "fsdp": "full_shard", "reduce_dtype": "bf16"}
    assert run_plan.run_shape(from_config(flags), "fsdp", facts(), {}).reduce_in_float32 is False


@pytest.mark.parametrize(
    ("total", "free", "asked", "usable"),
    [
        (80, 79, None, 80),  # a context of our own
        (80, 50, None, 52),  # others hold 28
        (80, 79, "20GiB", 20),
        (80, 10, "40GiB", 12),
    ],
)
def test_what_others_hold_of_a_card_is_theirs(total: int, free: int, asked: str | None, usable: int) -> None:
    assert run_plan.usable_bytes(total * GIB, free * GIB, asked) == usable * GIB


def test_a_dry_run_corrects_the_next_plan(tmp_path: Path) -> None:
    first = plan()
    predicted = max(phase.total_bytes for phase in first.candidate.estimate.phases if phase.name != "update")
    line = run_plan.learn(first, facts().gpu_name, int(1.1 * predicted), int(1.2 * predicted), int(1.2 * predicted) + GIB)
    assert "(+10.0 %)" in line
    factors = memory.machine_factors(facts().gpu_name, "fsdp")
    assert factors.allocated == pytest.approx(1.1)
    second = plan(first.settings, per_device_train_batch_size=first.settings.micro_batch_size)
    assert second.content["asked"]["estimate"]["allocated_bytes"] == pytest.approx(1.1 * first.candidate.estimate.allocated_bytes, rel=1e-6)
    assert "corrected by the dry runs on this machine" in " ".join(second.lines)


def test_plan_is_written_whole(tmp_path: Path) -> None:
    found = plan()
    run_plan.write_plan(tmp_path, found)
    written = json.loads((tmp_path / "plan.json").read_text())
    assert MemorySettings.from_dict(written["chosen"]["settings"]) == found.settings
    assert written["ladder"][0]["need_bytes"] == found.candidate.estimate.expected_bytes
    assert [path.name for path in tmp_path.glob("plan*")] == ["plan.json"]


@pytest.mark.parametrize(
    ("value", "message"),
    [("80", "80 has no unit"), ("lots", "'lots' is not a size"), ("-1GB", "must be positive, not -1GB"), ("0GB", "must be positive")],
)
def test_nonsense_for_a_cards_memory(value: str, message: str) -> None:
    with pytest.raises(UserError, match="--gpu_memory") as caught:
        from_config({"model_type": "llama", "output_dir": "out", "gpu_memory": value})
    assert message in str(caught.value)


def test_suggestion_as_flags() -> None:
    assert run_plan.flags_of(plan()).startswith("--per_device_train_batch_size ")
    assert isinstance(plan().candidate.run, RunShape)
