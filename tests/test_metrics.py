"""The log format: strict JSON lines, the console line, resumed runs, and that logging never ends a run."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from harness.metrics import (
    METRICS_FILE,
    MetricsLog,
    StepMetrics,
    format_console,
    from_json_line,
    last_train_step,
    parse_console,
    read_metrics,
    summarize,
    to_json_line,
)


def make_log(folder: Any, **options: Any) -> tuple[MetricsLog, list[str]]:
    lines: list[str] = []
    return MetricsLog(folder, write_line=lines.append, progress_bar=False, **options), lines


def strict(text: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_json_line_is_strict_and_reads_back() -> None:
    row = {"kind": "train", "step": 3, "loss": math.nan, "grad_norm": math.inf, "low": -math.inf, "lr": 2.0000000000000003e-06}
    line = to_json_line(row)
    assert strict(line) == {
        "kind": "train",
        "step": 3,
        "loss": None,
        "grad_norm": None,
        "low": None,
        "lr": 2.0000000000000003e-06,
        "nonfinite": {"loss": "nan", "grad_norm": "inf", "low": "-inf"},
    }
    back = from_json_line(line)
    assert math.isnan(back.pop("loss"))
    assert back == {"kind": "train", "step": 3, "grad_norm": math.inf, "low": -math.inf, "lr": 2.0000000000000003e-06}


def test_nonfinite_inside_lists_stays_strict() -> None:
    assert strict(to_json_line({"peaks": [1.5, math.nan], "by_rank": {0: math.inf}})) == {"peaks": [1.5, "nan"], "by_rank": {"0": "inf"}}


def test_tensors_and_numpy_scalars_become_numbers() -> None:
    numpy = pytest.importorskip("numpy")

    class ZeroDimTensor:
        def item(self) -> float:
            return 0.5

    assert strict(to_json_line({"a": ZeroDimTensor(), "b": numpy.float32(0.25), "c": numpy.int64(7)})) == {"a": 0.5, "b": 0.25, "c": 7}


def test_console_line_of_a_step() -> None:
    row = StepMetrics(
        step=10,
        max_steps=100,
        epoch=0.1,
        loss=2.5,
        grad_norm=0.75,
        learning_rate=2.0000000000000003e-06,
        num_input_tokens=81920,
        num_label_tokens=80000,
        tokens_per_second_per_gpu=8371.25,
        mfu=0.4125,
        step_time_s=2.446,
        peak_memory_gib=34.1,
        micro_batch_size=4,
        gradient_accumulation_steps=2,
        extra={"loss_is": "mean"},
    )
    line = format_console(row)
    assert line == (
        "train | step: 10/100 | epoch: 0.1 | loss: 2.5 | grad_norm: 0.75 | lr: 2e-06 | tokens: 81920 | label_tokens: 80000 | "
        "tok/s/gpu: 8371.25 | mfu: 41.25% | s/step: 2.446 | peak_gib: 34.1 | micro_batch: 4 | accumulation: 2 | loss_is: mean"
    )
    assert parse_console(line) == {"kind": "train", **row.to_row(), "learning_rate": 2e-06}


@pytest.mark.parametrize(
    "fields",
    [
        {"rung": {"micro_batch_size": 4, "param_offload": "none"}, "seconds": 1.2},
        {"reason": "a | b: c"},
        {"reason": "12"},
        {"reason": "nan"},
        {"reason": ""},
        {"reason": " padded "},
        {"reason": "two\nlines"},
        {"reason": "true"},
        {"reason": "Grüße, 世界"},
        {"ok": True, "ranks": [0, 3]},
        {"limit_gib": math.inf},
        {"count": 0, "share": 0.0},
    ],
)
def test_events_round_trip_through_the_console(fields: dict[str, Any]) -> None:
    line = format_console({"event": "step_down", "step": 12, **fields}, "event")
    assert "\n" not in line
    prefixed = f"2031-02-03 04:05:06,007 INFO [rank 0] {line}"
    assert parse_console(prefixed) == {"kind": "event", "event": "step_down", "step": 12, **fields}


def test_console_shows_nan() -> None:
    row = parse_console(format_console({"step": 1, "loss": math.nan, "grad_norm": math.inf}))
    assert row is not None and math.isnan(row["loss"]) and row["grad_norm"] == math.inf


@pytest.mark.parametrize(
    "line", ["", "train", "step: 3 | loss: 2", "an event happened", "{'loss': 2.5}", "Epoch 1 | loss 3", "train | what"]
)
def test_other_lines_are_not_ours(line: str) -> None:
    assert parse_console(line) is None


def test_extra_may_not_shadow_a_field() -> None:
    with pytest.raises(ValueError, match="extra must not repeat loss"):
        StepMetrics(step=1, extra={"loss": 2.0}).to_row()


def test_file_and_console_get_every_row(tmp_path: Any) -> None:
    log, lines = make_log(tmp_path / "out", max_steps=20)
    log.event("start", num_processes=2)
    log.log(StepMetrics(step=1, loss=3.0))
    log.log({"step": 1, "eval_loss": 2.5}, kind="eval")
    log.log({"gpu": 0, "utilization": 97}, kind="gpu")
    rows = [strict(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]  # before close: each line is flushed
    for row in rows:
        assert isinstance(row.pop("time_s"), float)
    assert rows == [
        {"kind": "event", "event": "start", "num_processes": 2},
        {"kind": "train", "step": 1, "loss": 3.0, "max_steps": 20},
        {"kind": "eval", "step": 1, "eval_loss": 2.5},
        {"kind": "gpu", "gpu": 0, "utilization": 97},
    ]
    assert lines == ["event: start | num_processes: 2", "train | step: 1/20 | loss: 3", "eval | step: 1 | eval_loss: 2.5"]
    log.close()
    log.log({"step": 2})  # after close: ignored, not an error
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 4


def test_other_processes_write_nothing(tmp_path: Any, capsys: Any) -> None:
    log = MetricsLog(tmp_path / "out", enabled=False)
    log.log(StepMetrics(step=1, loss=3.0))
    log.event("start")
    log.progress(1)
    log.close("finished")
    assert not (tmp_path / "out").exists()
    assert capsys.readouterr().out == ""


def test_default_console_is_standard_output(capsys: Any) -> None:
    log = MetricsLog(None)
    log.log(StepMetrics(step=1, loss=3.0))
    assert capsys.readouterr().out == "train | step: 1 | loss: 3\n"


def test_unknown_kind_is_refused() -> None:
    log, _ = make_log(None)
    with pytest.raises(ValueError, match="kind must be one of train, eval"):
        log.log({"step": 1}, kind="training")  # type: ignore[arg-type]


def test_resume_appends_and_the_reader_drops_what_was_computed_again(tmp_path: Any) -> None:
    first, _ = make_log(tmp_path)
    for step in (1, 2, 3, 4):
        first.log(StepMetrics(step=step, loss=10.0 + step))
    first.log({"step": 4, "eval_loss": 9.0}, kind="eval")
    first.event("oom", step=5)
    second, _ = make_log(tmp_path)
    second.event("resume", step=2)
    second.log(StepMetrics(step=3, loss=23.0))
    read = read_metrics(tmp_path)
    assert [(row["step"], row["loss"]) for row in read.of_kind("train")] == [(1, 11.0), (2, 12.0), (3, 23.0)]
    assert read.of_kind("eval") == []
    assert [row["event"] for row in read.of_kind("event")] == ["oom", "resume"]
    assert read.num_superseded == 3
    kept = read_metrics(tmp_path, keep_superseded=True).of_kind("train")
    assert [(row["step"], row.get("superseded", False)) for row in kept] == [(1, False), (2, False), (3, True), (4, True), (3, False)]


def test_a_step_logged_again_without_an_event_counts_once(tmp_path: Any) -> None:
    log, _ = make_log(tmp_path)
    for step, loss in ((10, 1.0), (20, 2.0), (30, 3.0), (20, 4.0), (30, 5.0)):
        log.log(StepMetrics(step=step, loss=loss))
    assert [(row["step"], row["loss"]) for row in read_metrics(tmp_path).rows] == [(10, 1.0), (20, 4.0), (30, 5.0)]


def test_torn_line_of_a_killed_run(tmp_path: Any) -> None:
    log, _ = make_log(tmp_path)
    log.log(StepMetrics(step=1, loss=1.0))
    log.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "step": 2, "lo')
    again, _ = make_log(tmp_path)
    again.log(StepMetrics(step=2, loss=2.0))
    read = read_metrics(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["loss"]) for row in read.rows] == [(1, 1.0), (2, 2.0)]
    assert read.num_bad_lines == 1


def test_line_separators_inside_texts_do_not_cut_lines(tmp_path: Any) -> None:
    log, lines = make_log(tmp_path)
    log.event("note", text="a\u2028b\x85c")
    assert read_metrics(tmp_path).rows[0]["text"] == "a\u2028b\x85c"
    assert len(lines[0].splitlines()) == 1


class ListTracker:
    def __init__(self, fail: bool = False) -> None:
        self.rows: list[tuple[dict[str, Any], int | None]] = []
        self.fail = fail
        self.finished = False

    def log(self, values: dict[str, Any], step: int | None) -> None:
        if self.fail:
            raise ConnectionError("no network")
        self.rows.append((values, step))

    def finish(self) -> None:
        self.finished = True


def test_trackers_get_numbers_and_a_failing_one_does_not_end_the_run(capsys: Any) -> None:
    good, bad = ListTracker(), ListTracker(fail=True)
    log, _ = make_log(None, trackers=[bad, good])
    log.log(StepMetrics(step=1, loss=3.0, extra={"note": "x", "on": True}))
    log.log(StepMetrics(step=2, loss=2.0))
    log.log({"step": 2, "eval_loss": 2.5}, kind="eval")
    log.event("oom", step=2)
    log.close()
    assert good.rows == [({"train/loss": 3.0}, 1), ({"train/loss": 2.0}, 2), ({"eval/loss": 2.5}, 2)]
    assert good.finished and not bad.finished
    assert capsys.readouterr().err == "WARNING metrics: ListTracker failed and is off from now on: no network\n"


def test_full_disk_does_not_end_the_run(tmp_path: Any, capsys: Any) -> None:
    log, lines = make_log(tmp_path)

    class FullDisk:
        def write(self, content: bytes) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            pass

    log._file.close()
    log._file = FullDisk()
    log.log(StepMetrics(step=1, loss=3.0))
    log.log(StepMetrics(step=2, loss=3.0))
    log.close()
    assert log.num_lost_rows == 2
    assert lines == ["train | step: 1 | loss: 3", "train | step: 2 | loss: 3"]
    assert capsys.readouterr().err.count("No space left on device") == 1


def test_rows_of_a_full_disk_are_written_once_there_is_room_and_are_in_the_summary(tmp_path: Any) -> None:
    log, _ = make_log(tmp_path)
    log.log(StepMetrics(step=18, loss=3.0, num_input_tokens=180))

    class Disk:
        """Takes `room` bytes more of what the real file takes."""

        def __init__(self, file: Any, room: int) -> None:
            self.file, self.room = file, room

        def write(self, content: bytes) -> int:
            if not self.room:
                raise OSError(28, "No space left on device")
            written = self.file.write(content[: self.room])
            self.room -= written
            return int(written)

        def close(self) -> None:
            self.file.close()

    disk = log._file = Disk(log._file, room=10)
    log.log(StepMetrics(step=21, loss=2.0, num_input_tokens=210))
    log.log(StepMetrics(step=24, loss=1.0, num_input_tokens=240))
    assert [row["step"] for row in read_metrics(tmp_path).rows] == [18]
    assert (log.summary()["step"], log.summary()["final_loss"], log.summary()["num_input_tokens"]) == (24, 1.0, 240)
    disk.room = 10_000
    log.close("finished", 24)
    found = read_metrics(tmp_path)
    assert found.num_bad_lines == 0 and log.num_lost_rows == 0
    assert [(row["kind"], row["step"]) for row in found.rows] == [("train", 18), ("train", 21), ("train", 24), ("summary", 24)]
    assert found.rows[-1]["final_loss"] == 1.0


def test_the_summary_of_a_run_that_was_stopped_between_two_rows_has_its_own_counts(tmp_path: Any) -> None:
    log, _ = make_log(tmp_path)
    log.log(StepMetrics(step=5, loss=2.0, num_input_tokens=50, num_label_tokens=45))
    log.close("preempted", 7, {"num_input_tokens": 70, "num_label_tokens": 63})
    last = read_metrics(tmp_path).rows[-1]
    assert {name: last[name] for name in ("kind", "status", "step", "num_input_tokens", "num_label_tokens", "final_loss")} == {
        "kind": "summary", "status": "preempted", "step": 7, "num_input_tokens": 70, "num_label_tokens": 63, "final_loss": 2.0
    }  # fmt: skip


def test_the_last_step_of_a_life_that_was_killed(tmp_path: Any) -> None:
    assert last_train_step(tmp_path / "none") == 0
    log, _ = make_log(tmp_path)
    log.event("start")
    assert last_train_step(tmp_path / METRICS_FILE) == 0
    for step in (1, 2, 30, 7):  # 7 after a resume at 6: the last row counts, not the highest
        log.log(StepMetrics(step=step, loss=4.0))
    log.log({"step": 9, "eval_loss": 3.0}, kind="eval")
    log.close()
    with open(tmp_path / METRICS_FILE, "a") as file:
        file.write('{"kind": "train", "step": 8, "lo')
    assert last_train_step(tmp_path / METRICS_FILE) == 7


def test_summary_of_all_lives(tmp_path: Any) -> None:
    first, _ = make_log(tmp_path)
    first.log(StepMetrics(step=1, loss=4.0, tokens_per_second_per_gpu=10.0, peak_memory_gib=9.0))
    first.log({"step": 1, "eval_loss": 3.0}, kind="eval")
    second, lines = make_log(tmp_path)
    second.event("oom", rank=1)
    second.event("resume", step=1, lost_steps=4)
    second.log(StepMetrics(step=2, loss=math.nan, tokens_per_second_per_gpu=100.0, peak_memory_gib=8.0, num_skipped_steps=1))
    second.log(
        StepMetrics(step=3, loss=2.0, tokens_per_second_per_gpu=110.0, peak_memory_gib=8.5, num_input_tokens=96, num_skipped_steps=1)
    )
    second.log({"step": 3, "eval_loss": 3.5}, kind="eval")
    second.close("finished", 4)
    summary = read_metrics(tmp_path).of_kind("summary")[0]
    assert summary.pop("wall_time_s") >= summary.pop("life_wall_time_s") >= 0
    assert summary.pop("time_s") > 0
    assert summary == {
        "kind": "summary",
        "status": "finished",
        "step": 4,
        "final_loss": 2.0,
        "last_eval_loss": 3.5,
        "best_eval_loss": 3.0,
        "median_tokens_per_second_per_gpu": 100.0,
        "peak_memory_gib": 9.0,
        "num_input_tokens": 96,
        "num_skipped_steps": 1,
        "num_nonfinite_rows": 1,
        "num_steps_down": 1,
        "num_lost_steps": 4,
        "num_events": 2,
        "num_lives": 2,
    }
    assert lines[-1].startswith("summary | step: 4 | ")
    assert summarize([]) == {}


def train_row(time_s: float, step: int, **more: Any) -> dict[str, Any]:
    return {"kind": "train", "time_s": time_s, "step": step, "loss": 1.0, **more}


def test_time_between_lives_does_not_count() -> None:
    first = [train_row(100.0, 1), train_row(130.0, 2, superseded=True)]
    again = [train_row(1015.0, 2, life_began_s=1000.0), train_row(1020.0, 3)]
    assert summarize(first[:1])["wall_time_s"] == 0.0
    assert "num_lives" not in summarize(first)
    summary = summarize([*first, *again])
    assert (summary["wall_time_s"], summary["life_wall_time_s"], summary["num_lives"]) == (50.0, 20.0, 2)
    third = [{"kind": "event", "event": "oom", "time_s": 5003.0, "life_began_s": 5000.0}, train_row(5007.0, 4)]
    third.insert(1, {"kind": "event", "event": "resume", "time_s": 5004.0, "step": 3})
    assert (summarize([*first, *again, *third])["wall_time_s"], summarize([*first, *again, *third])["num_lives"]) == (57.0, 3)
    # A file of before lives said when they began.
    old = [train_row(100.0, 1), {"kind": "event", "event": "resume", "time_s": 900.0, "step": 1}, train_row(920.0, 2)]
    assert (summarize(old)["wall_time_s"], summarize(old)["life_wall_time_s"]) == (20.0, 20.0)


def test_only_the_first_row_of_a_later_life_says_when_it_began(tmp_path: Any) -> None:
    for step in (1, 2):
        log, lines = make_log(tmp_path)
        log.log(StepMetrics(step=step, loss=1.0))
        log.event("save", step=step)
        log.close()
        assert lines == [f"train | step: {step} | loss: 1", f"event: save | step: {step}"]
    rows = read_metrics(tmp_path).rows
    assert ["life_began_s" in row for row in rows] == [False, False, True, False]
    assert rows[1]["time_s"] <= rows[2]["life_began_s"] <= rows[2]["time_s"]


def test_progress_bar_does_not_swallow_lines(capsys: Any) -> None:
    log = MetricsLog(None, max_steps=2, progress_bar=True)
    log.progress(1)
    log.log(StepMetrics(step=1, loss=3.0))
    log.close()
    assert "train | step: 1/2 | loss: 3\n" in capsys.readouterr().out
