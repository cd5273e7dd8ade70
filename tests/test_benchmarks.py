"""Benchmarks that train: their rows, what they count and compare, and one system on the CPU. Speed itself is measured by calling them."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest

from benchmarks import contenders, float8_curve, startup, throughput
from benchmarks.contenders import GROUPS, SYSTEMS, Trial
from benchmarks.llama_shapes import num_parameters


def trial(system: str, work: Path | str = "none", **values: Any) -> Trial:
    sizes = {"micro_batch": 2, "samples": 2, "sequence": 2048, "steps": 2, "num_gpus": 1, "profile": False}
    return Trial(system=system, size="tiny", work=str(work), **{**sizes, **values})


def test_parameters_of_matrix_products() -> None:
    assert num_parameters("8B") == (8_030_261_248 - 65 * 4096,) * 2  # the known size of this shape, without its norms
    assert num_parameters("8B", lora_r=16) == (8_029_995_008 + 41_943_040, 41_943_040)


def test_every_group_and_rival_is_a_system() -> None:
    assert {name for names in GROUPS.values() for name in names} == set(SYSTEMS)
    assert {system.rival for system in SYSTEMS.values()} - {""} <= set(SYSTEMS)
    for system in SYSTEMS.values():
        assert not system.deepspeed or (throughput.ROOT / "ds_configs" / f"{system.deepspeed}.json").exists()


def test_rows_of_documents_have_the_same_tokens_and_labels_isolated_or_not() -> None:
    apart, together = (contenders.make_rows(trial(name)) for name in ("isolated-mask", "packed"))
    assert len(apart) == len(together) == 4 and apart[0] is apart[2]
    for index, (row, plain) in enumerate(zip(apart[:2], together[:2], strict=True)):
        lengths = contenders.document_lengths(2048, index)
        assert sum(lengths) == 2048 and len(lengths) > 1
        assert row["position_ids"] == [position for length in lengths for position in range(length)]
        assert row["document_ids"] == [number for number, length in enumerate(lengths) for _ in range(length)]
        assert [at for at, label in enumerate(row["labels"]) if label == -100] == [sum(lengths[:n]) for n in range(len(lengths))]
        assert {name: row[name] for name in ("input_ids", "labels")} == plain


def test_the_table_names_the_best_run_and_what_isolation_costs() -> None:
    def row(system: str, micro_batch: int, speed: float) -> dict[str, Any]:
        figures = {"tokens_per_second_per_gpu": speed, "peak_gib": 9.5, "mfu": None, "attention": "sdpa"}
        return {"system": system, "size": "1B", "micro_batch": micro_batch, **figures}

    failed = {"system": "fsdp", "size": "1B", "micro_batch": 4, "failure": "out of memory"}
    lines = throughput.table([failed, row("isolated-mask", 2, 960), row("packed", 1, 900), row("packed", 2, 1000)]).splitlines()
    assert lines[2:] == [
        "| 1B | fsdp | 4 | out of memory | | | | |",
        "| 1B | packed | 2 | 1,000 |  | 9.5 | sdpa |  |",
        "| 1B | isolated-mask | 2 | 960 |  | 9.5 | sdpa | 0.96 x packed, costs 4.0 % |",
    ]


def test_a_system_of_ours_trains(tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from harness import modeling

    monkeypatch.setattr(modeling, "build_empty", modeling.build_empty)  # the trial puts its own there
    monkeypatch.setitem(SYSTEMS, "isolated", contenders.System("ours", rows="isolated"))  # one process shares nothing out
    wanted = trial("isolated", tmp_path, profile=True, sequence=700)
    result = contenders.run_ours(wanted)
    assert result["attention"] == "sdpa" and result["settings"]["micro_batch_size"] == 2 and result["note"] == ""
    assert 6 < result["loss"] < 6.5 and result["step_s"] > 0  # log(512) = 6.24
    assert (wanted.run_folder / contenders.PROFILE_FILE).read_text().startswith("steps 1 to 1, rank 0, cpu")


def test_parts_of_a_start_add_up() -> None:
    log = (
        "2026-01-02 10:00:05 arguments that differ from the defaults: none\n2026-01-02 10:00:08 data: start\n"
        "2026-01-02 10:00:08 data: done in 0.5 s\n2026-01-02 10:00:12 model: done in 3.2 s; GPU memory 1.00 GiB\n"
        "2026-01-02 10:00:13 dry run: done in 1.0 s\n2026-01-02 10:00:15 training: done in 2.5 s\n"
    )

    started_s = datetime.datetime(2026, 1, 2, 10).timestamp()
    found = startup.parts(log, {"time_s": started_s + 14.5, "step_time_s": 0.75}, started_s)
    phases = {"data": 0.5, "model": 3.2, "dry run": 1.0, "first step": 0.75, "rest": 1.05}
    assert found == {"before the log": 5.0, "before the data": 3.0, **phases}


def test_a_curve_is_within_noise_where_it_is_no_further_from_bf16_than_another_start() -> None:
    def curve(name: str, apart: float) -> dict[str, Any]:
        return {"run": name, "losses": [9.0] * 50 + [2.0 + apart] * 10 + [1.0 - apart] * 10}

    runs = [curve("bf16", 0.0), curve("noise", 0.5), curve("tensorwise", 0.25), curve("rowwise", 0.75)]
    found = float8_curve.compare([*runs, {"run": "tensorwise-gathered", "losses": [], "failure": "ended with 1"}])
    assert found == {
        "noise": {"mean": 0.5, "largest": 0.5, "end": -0.5},
        "tensorwise": {"mean": 0.25, "largest": 0.25, "end": -0.25, "within_noise": True},
        "rowwise": {"mean": 0.75, "largest": 0.75, "end": -0.75, "within_noise": False},
    }
    assert float8_curve.compare(runs[:1]) == {}
