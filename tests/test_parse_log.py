"""Logs of many programs, with exact values; copies, resumes, failures; CSV, JSON and plots."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest

from harness import parse_log
from harness.log_formats import number
from harness.metrics import MetricsLog, StepMetrics
from harness.parse_log import find_runs, main, parse_run, parse_text, plot_losses, rank_of_path, table, to_csv, to_json


def rows_of(text: str) -> list[dict[str, Any]]:
    return parse_text(text).records


def train_row(source: str, **values: Any) -> dict[str, Any]:
    return {"kind": "train", **values, "source": source}


DEEPSPEED_AND_BAR = (
    "\r 10%|#         | 10/100 [00:20<03:00,  2.00s/it][2031-02-03 04:05:06,007] [INFO] [loss_scaler.py:190:update_scale] "
    "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768\n"
    "\r          \r{'loss': 2.5, 'grad_norm': 0.75, 'learning_rate': 2.0000000000000003e-06, 'epoch': 0.1}\n"
    "\r 11%|#1        | 11/100 [00:22<02:58,  2.00s/it]\n"
    "[2031-02-03 04:05:30,001] [INFO] [logging.py:96:log_dist] [Rank 0] step=20, skipped=6, lr=[0.0001], mom=[(0.9, 0.999)]\n"
)


def test_bar_deepspeed_and_dict_share_lines() -> None:
    run = parse_text(DEEPSPEED_AND_BAR)
    assert run.records == [
        train_row("hf", step=10, loss=2.5, grad_norm=0.75, learning_rate=2.0000000000000003e-06, epoch=0.1),
        train_row("deepspeed", step=20, num_skipped_steps=6, num_updates=14, learning_rate=1e-4) | {"rank": 0},
    ]
    assert run.events == [{"event": "overflow", "step": 10, "loss_scale_from": 65536, "loss_scale_to": 32768}]
    assert run.progress == (11, 100)
    assert run.first_failure is None


def test_deepspeed_hysteresis_and_throughput() -> None:
    run = parse_text(
        "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 4096, but hysteresis is 2. Reducing hysteresis to 1\n"
        "[2031-02-03 04:05:30,001] [INFO] [timer.py:264:stop] epoch=0/micro_step=40/global_step=20, RunningAvgSamplesPerSec=12.5, "
        "CurrSamplesPerSec=13.25, MemAllocated=1.25GB, MaxMemAllocated=3.5GB\n"
        "[INFO] [logging.py:96:log_dist] [Rank 0] step=30, skipped=0, lr=[1e-05, 2e-05], mom=[[0.9, 0.999], [0.9, 0.999]]\n"
        "[Rank 0] step=40, skipped=0, lr=[np.float64(3e-05)], mom=[0.9]\n"
        "[deepspeed] OVERFLOW! Skipping step. Gradients are non-finite, weights were not updated.\n"
    )
    assert run.records[0] == train_row(
        "deepspeed_throughput",
        step=20,
        epoch=0,
        num_micro_batches=40,
        average_samples_per_second=12.5,
        samples_per_second=13.25,
        memory_gib=1.25,
        peak_memory_gib=3.5,
    )
    assert [(row["learning_rate"], row.get("learning_rates")) for row in run.records[1:]] == [(1e-05, [1e-05, 2e-05]), (3e-05, None)]
    assert run.events == [
        {"event": "overflow", "loss_scale": 4096, "hysteresis_from": 2, "hysteresis_to": 1},
        {"event": "overflow", "step": 40},
    ]


def test_deepspeed_pipeline_line() -> None:
    assert rows_of("steps: 10 loss: 2.5000 iter time (s): 0.512 samples/sec: 31.250\n") == [
        train_row("step_line", step=10, loss=2.5, step_time_s=0.512, samples_per_second=31.25)
    ]


def test_dicts_with_texts_for_numbers_and_a_bar_of_evaluation() -> None:
    text = (
        "Map: 100%|##########| 500/500 [00:01<00:00, 400.00 examples/s]\n"
        "Loading weights: 100%|##########| 2/2 [00:01<00:00, 1.40it/s]\n"
        "\r  0%|          | 0/40 [00:00<?, ?it/s]\r 25%|##5       | 10/40 [00:05<00:15,  2.00it/s]"
        "\r                                  \r{'loss': '2.312', 'grad_norm': '1.5', 'learning_rate': '4.5e-05', 'epoch': '0.25'}\n"
        "\r 25%|##5       | 10/40 [00:05<00:15,  2.00it/s]\n"
        "\r  0%|          | 0/8 [00:00<?, ?it/s]\x1b[A\r 50%|#####     | 4/8 [00:00<00:00,  9.00it/s]\x1b[A"
        "\r100%|##########| 8/8 [00:01<00:00,  9.00it/s]\x1b[A"
        "\r{'eval_loss': '2.25', 'eval_runtime': '1.1', 'eval_samples_per_second': '58.2', 'epoch': '0.25'}\n"
        "\r 50%|#####     | 20/40 [00:12<00:10,  2.00it/s]\r{'loss': 'nan', 'grad_norm': 'inf', 'learning_rate': '4e-05', 'epoch': '0.5'}\n"
        "{'train_runtime': '21.5', 'train_samples_per_second': '29.77', 'train_loss': '2.1', 'epoch': '1'}\n"
    )
    run = parse_text(text)
    assert run.records[0] == train_row("hf", step=10, loss=2.312, grad_norm=1.5, learning_rate=4.5e-05, epoch=0.25)
    assert run.records[1] == {
        "kind": "eval",
        "step": 10,
        "eval_loss": 2.25,
        "eval_runtime": 1.1,
        "eval_samples_per_second": 58.2,
        "epoch": 0.25,
        "source": "hf",
    }
    assert run.records[2]["step"] == 20
    assert math.isnan(run.records[2]["loss"]) and run.records[2]["grad_norm"] == math.inf
    assert run.records[3]["kind"] == "summary" and run.records[3]["train_runtime"] == 21.5 and run.records[3]["train_loss"] == 2.1
    assert run.progress == (20, 40)


def test_dicts_without_a_bar_have_no_step_and_stay_apart() -> None:
    text = "{'loss': 2.0, 'epoch': 0.1}\n{'loss': 1.0, 'epoch': 0.2}\n{'loss': nan, 'learning_rate': 0.0, 'epoch': 0.3}\n"
    rows = rows_of(text)
    assert [row.get("step") for row in rows] == [None, None, None]
    assert [row["epoch"] for row in table(parse_text(text))] == [0.1, 0.2, 0.3]
    assert math.isnan(rows[2]["loss"]) and rows[2]["learning_rate"] == 0.0


def test_two_dicts_under_one_lagging_bar_are_both_kept() -> None:
    text = (
        "\r 1%| | 1/100 [00:01<01:39, 1.0it/s]\r{'loss': 3.0, 'epoch': 0.01}\n{'loss': 2.9, 'epoch': 0.01}\n{'loss': 2.8, 'epoch': 0.02}\n"
    )
    assert [row["loss"] for row in table(parse_text(text))] == [3.0, 2.9, 2.8]


def test_bar_drawn_after_a_dict_corrects_a_lagging_step() -> None:
    text = (
        "\r  3%|3         | 1/32 [00:00<00:04,  6.77it/s]\r       \r{'loss': '4.2', 'epoch': '0.19'}\n"
        "\r  9%|9         | 3/32 [00:00<00:04,  6.77it/s]\r 16%|#5        | 5/32 [00:00<00:01, 22.61it/s]"
        "\r       \r{'loss': '4.1', 'epoch': '0.38'}\n\r 19%|#8        | 6/32 [00:00<00:01, 22.61it/s]\n"
        "\r  0%|          | 0/8 [00:00<?, ?it/s]\x1b[A\r      \r\x1b[A{'eval_loss': '4.0', 'epoch': '0.5'}\n"
        "\r 25%|##5       | 8/32 [00:00<00:01, 22.61it/s]\n\r100%|##########| 8/8 [00:00<00:00, 201.56it/s]\x1b[A\n"
    )
    assert [(row["kind"], row["step"]) for row in rows_of(text)] == [("train", 3), ("train", 6), ("eval", 8)]


def test_metrics_table_at_the_end() -> None:
    text = (
        "***** train metrics *****\n  epoch                    =        3.0\n  train_loss               =     2.1408\n"
        "  train_runtime            = 0:12:05.50\n  train_samples            =       1234\n"
        "***** eval metrics *****\n  eval_loss  =  2.2\n  perplexity = 9.025\n"
    )
    assert rows_of(text) == [
        {"kind": "summary", "epoch": 3.0, "train_loss": 2.1408, "train_runtime": 725.5, "train_samples": 1234, "source": "hf_table"},
        {"kind": "eval", "eval_loss": 2.2, "perplexity": 9.025, "source": "hf_table"},
    ]


STEP_LINES: list[tuple[str, str, dict[str, Any]]] = [
    ("step and loss", "step 100: loss 2.5", {"step": 100, "loss": 2.5}),
    ("colons", "Step: 7, Loss: 3.25e+00, LR: 1e-4", {"step": 7, "loss": 3.25, "learning_rate": 1e-4}),
    ("equals", "global_step=1,200 train_loss=.5 ppl=1.6487", {"step": 1200, "loss": 0.5, "perplexity": 1.6487}),
    (
        "out of a total",
        "2031-02-03 04:05:06 | INFO | Step 10/1000 | loss: 2.5 | lr: 3.00e-04 | grad_norm: 1.25 | 12,345 tok/s",
        {"step": 10, "max_steps": 1000, "loss": 2.5, "learning_rate": 3e-4, "grad_norm": 1.25, "tokens_per_second": 12345},
    ),
    (
        "iter, milliseconds, percent",
        "iter 10: loss 2.5000, time 123.45ms, mfu 41.25%",
        {"step": 10, "loss": 2.5, "step_time_s": 0.12345, "mfu": 0.4125},
    ),
    ("two losses", "step 250: train loss 2.4100, val loss 2.5200", {"step": 250, "loss": 2.41, "eval_loss": 2.52}),
    (
        "values first",
        "step    1/1000 | loss 11.0150 (+nanz)| norm 15.3 (+nanz)| lr 4.29e-07 | 1234.5 ms | 12.5% bf16 MFU | 424242 tok/s",
        {
            "step": 1,
            "max_steps": 1000,
            "loss": 11.015,
            "grad_norm": 15.3,
            "learning_rate": 4.29e-07,
            "step_time_s": 1.2345,
            "mfu": 0.125,
            "tokens_per_second": 424242,
        },
    ),
    (
        "coloured, units",
        "[titan] 2031-02-03 04:05:06,007 - root - INFO - \x1b[31mstep: 10  \x1b[32mloss:  8.1234  \x1b[33mgrad_norm:  1.4  "
        "\x1b[34mmemory: 39.50GiB(41.25%)  \x1b[35mtps: 6,543  \x1b[36mtflops: 12.3  \x1b[37mmfu: 37.5%\x1b[39m",
        {
            "step": 10,
            "loss": 8.1234,
            "grad_norm": 1.4,
            "peak_memory_gib": 39.5,
            "tokens_per_second_per_gpu": 6543,
            "mfu": 0.375,
        },
    ),
    (
        "no blanks",
        "Step 12 | loss:1.8125 lr:2e-05 tokens_per_second_per_gpu:987.5 ",
        {"step": 12, "loss": 1.8125, "learning_rate": 2e-05, "tokens_per_second_per_gpu": 987.5},
    ),
    (
        "micro-batches first",
        "Epoch 1 | iter 40 step 10 | loss train: 2.5, val: n/a | iter time: 250.00 ms (step) remaining time: 0:01:02",
        {"step": 10, "epoch": 1, "loss": 2.5, "step_time_s": 0.25},
    ),
    (
        "iterations of Megatron",
        " [2031-02-03 04:05:06] iteration      100/  500000 | consumed samples:         3200 | elapsed time per iteration (ms): 1250.0 | "
        "learning rate: 1.500000E-04 | global batch size:    32 | lm loss: 6.500000E+00 | loss scale: 65536.0 | grad norm: 1.250 | "
        "number of skipped iterations:   0 | number of nan iterations:   0 |",
        {
            "step": 100,
            "max_steps": 500000,
            "num_samples": 3200,
            "step_time_s": 1.25,
            "learning_rate": 1.5e-4,
            "global_batch_size": 32,
            "loss": 6.5,
            "loss_scale": 65536.0,
            "grad_norm": 1.25,
        },
    ),
    (
        "fairseq's counters",
        "2031-02-03 04:05:06 | INFO | train | epoch 001:     10 / 100 loss=9.5, ppl=724.1, num_updates=10, lr=1e-05, gnorm=2.5",
        {"step": 10, "epoch": 1, "loss": 9.5, "perplexity": 724.1, "learning_rate": 1e-05, "grad_norm": 2.5},
    ),
    ("nan", "step 3 - loss: nan - grad norm: inf", {"step": 3, "loss": "nan", "grad_norm": math.inf}),
    ("a tensor", "step 3 loss: tensor(2.5000, device='cuda:0', grad_fn=<NllLossBackward0>)", {"step": 3, "loss": 2.5}),
    ("tokens in thousands", "step 8 loss 2.0 tokens: 12.5k", {"step": 8, "loss": 2.0, "num_input_tokens": 12500.0}),
]


@pytest.mark.parametrize(("text", "expected"), [case[1:] for case in STEP_LINES], ids=[case[0] for case in STEP_LINES])
def test_step_lines(text: str, expected: dict[str, Any]) -> None:
    (row,) = rows_of(text + "\n")
    assert row.pop("kind") == "train" and row.pop("source") == "step_line"
    if expected["loss"] == "nan":
        assert math.isnan(row.pop("loss"))
        expected = {name: value for name, value in expected.items() if name != "loss"}
    assert row == expected


@pytest.mark.parametrize(
    "line",
    [
        "Saving model checkpoint to out/checkpoint-100",
        "Loss spikes are normal in step one",
        "step 100: saved, 3 losses kept",
        "Resuming from step 100",
        "Use the step argument. loss = criterion(x)",
        '  File "train.py", line 10, in step',
        "[INFO] {'hidden_size': 64, 'layers': 2}",
        "warmup steps: 10",
    ],
)
def test_other_lines_are_no_records(line: str) -> None:
    assert rows_of(line + "\n") == []


def test_bars_with_a_postfix() -> None:
    text = (
        "\rEpoch 0:   0%|          | 0/50 [00:00<?, ?it/s]"
        "\rEpoch 0:  20%|##        | 10/50 [00:01<00:04, 9.50it/s, v_num=0, train_loss=2.500, lr=1e-3]"
        "\rEpoch 0:  20%|##        | 10/50 [00:01<00:04, 9.50it/s, v_num=0, train_loss=2.400, lr=1e-3]"
        "\rEpoch 1:  20%|##        | 10/50 [00:07<00:04, 9.50it/s, v_num=0, train_loss=1.500, lr=5e-4]\n"
    )
    assert rows_of(text) == [
        train_row("bar", step=10, loss=2.4, learning_rate=1e-3, epoch=0),
        train_row("bar", step=60, loss=1.5, learning_rate=5e-4, epoch=1),
    ]


def test_json_lines_of_others() -> None:
    text = (
        '{"_step": 5, "train/loss": 2.5, "train/learning_rate": 0.001, "note": "x"}\n'
        'INFO {"step": 6, "loss": NaN, "perf": {"mfu": 0.4}}\n{"model": "llama", "layers": 2}\n'
    )
    rows = rows_of(text)
    assert rows[0] == train_row("json", step=5, loss=2.5) | {"train/learning_rate": 0.001}
    assert math.isnan(rows[1]["loss"]) and rows[1]["perf/mfu"] == 0.4
    assert len(rows) == 2


def test_trainer_state_and_csv_files(tmp_path: Path) -> None:
    state = {"log_history": [{"loss": 2.5, "step": 10, "epoch": 0.5}, {"eval_loss": 2.25, "step": 10}, {"train_runtime": 3.5, "step": 20}]}
    for step, rows in ((10, 2), (20, 3)):
        folder = tmp_path / "run" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": state["log_history"][:rows]}))
    run = parse_run(tmp_path / "run")
    assert [(row["kind"], row["step"]) for row in run.records] == [("train", 10), ("eval", 10), ("summary", 20)]
    assert table(run) == [{"loss": 2.5, "step": 10, "epoch": 0.5, "eval_loss": 2.25}]

    (tmp_path / "metrics.csv").write_text("epoch,step,train_loss,val_loss\n0,9,2.5,\n0,9,,2.75\n")
    assert parse_run(tmp_path / "metrics.csv").records == [
        train_row("csv", epoch=0, step=9, loss=2.5),
        {"kind": "eval", "epoch": 0, "step": 9, "eval_loss": 2.75, "source": "csv"},
    ]


def test_own_console_lines_read_back() -> None:
    lines: list[str] = []
    log = MetricsLog(None, write_line=lambda line: lines.append(f"2031-02-03 04:05:06,007 INFO {line}"), max_steps=20, progress_bar=False)
    log.event("step_down", step=9, rung={"micro_batch_size": 2})
    log.log(StepMetrics(step=10, loss=2.5, learning_rate=1e-4, mfu=0.4125, tokens_per_second_per_gpu=8371.25))
    log.log({"step": 10, "eval_loss": 2.25}, kind="eval")
    log.close("finished")
    run = parse_text("\n".join(lines))
    assert run.records[0] == train_row("harness", step=10, max_steps=20, loss=2.5, learning_rate=1e-4) | {
        "tokens_per_second_per_gpu": 8371.25,
        "mfu": 0.4125,
    }
    assert run.records[1] == {"kind": "eval", "step": 10, "eval_loss": 2.25, "source": "harness"}
    assert run.records[2]["kind"] == "summary" and run.records[2]["status"] == "finished"
    assert run.events == [{"kind": "event", "event": "step_down", "step": 9, "rung": {"micro_batch_size": 2}}]


def test_own_run_folder(tmp_path: Path) -> None:
    lines: list[str] = []
    log = MetricsLog(tmp_path, write_line=lines.append, progress_bar=False)
    for step in (1, 2, 3):
        log.log(StepMetrics(step=step, loss=4.0 - step / 3))
    log.event("resume", step=1)
    log.log(StepMetrics(step=2, loss=3.0))
    (tmp_path / "train.log").write_text("\n".join(lines) + "\nTraceback (most recent call last):\nValueError: too bad\n")
    run = parse_run(tmp_path)
    assert [(row["step"], row["loss"]) for row in run.records] == [(1, 4.0 - 1 / 3), (2, 3.0)]
    assert run.num_superseded == 2
    assert run.first_failure is not None and run.first_failure.message == "ValueError: too bad"


@pytest.mark.parametrize("prefix", ["[rank{}]: ", "[default{}]:", "{}: ", "[1,{}]<stdout>:", "2031-02-03 04:05:06,007 [rank {}] "])
def test_copies_of_several_ranks_count_once(prefix: str) -> None:
    text = "".join(f"{prefix.format(rank)}step {step} loss {loss}\n" for step, loss in ((1, 2.5), (2, 2.0)) for rank in range(4))
    run = parse_text(text)
    assert [(row["step"], row["loss"], row["rank"]) for row in run.records] == [(1, 2.5, 0), (2, 2.0, 0)]
    assert run.num_duplicates == 6 and run.differences == []


def test_copies_without_any_rank_count_once() -> None:
    run = parse_text("step 1 loss 2.5\nstep 1 loss 2.5\nstep 2 loss 2.5\n{'loss': 1.5, 'epoch': 1.0}\n{'loss': 1.5, 'epoch': 1.0}\n")
    assert [row.get("step") for row in run.records] == [1, 2, None]
    assert run.num_duplicates == 2


def test_ranks_that_report_their_own_loss_are_told_apart() -> None:
    text = "".join(f"[rank{rank}]: step 5 loss {loss}\n" for rank, loss in ((1, 2.0), (0, 1.0), (2, 3.0), (3, 6.0)))
    run = parse_text(text)
    assert run.records == [train_row("step_line", step=5, loss=1.0) | {"rank": 0}]
    assert run.differences == ["step 5: ranks report different losses: 1.0 (rank 0), 2.0 (rank 1), 3.0 (rank 2), 6.0 (rank 3)"]


def test_resumed_console_log_keeps_the_later_life() -> None:
    run = parse_text("step 1 loss 3\nstep 2 loss 2\nstep 3 loss 1\nRestarting\nstep 2 loss 2.5\nstep 3 loss 1.5\n")
    assert [(row["step"], row["loss"]) for row in run.records] == [(1, 3), (2, 2.5), (3, 1.5)]
    assert run.num_superseded == 2


ROOT_CAUSE = """
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2031-02-03_04:05:09
  host      : node
  rank      : 0 (local_rank: 0)
  exitcode  : -6 (pid: 11)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2031-02-03_04:05:08
  host      : node
  rank      : 1 (local_rank: 1)
  exitcode  : {code} (pid: 12)
============================================================
"""


def test_first_failure_is_not_the_last_line() -> None:
    text = (
        "[rank0]:[2031-02-03 04:05:09,100] [rank0]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)\n"
        "[rank1]: Traceback (most recent call last):\n"
        '[rank1]:   File "train.py", line 3, in <module>\n'
        "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.1 GiB\n"
        "[rank0]: Traceback (most recent call last):\n"
        "[rank0]: torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited\n"
        "Traceback (most recent call last):\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n" + ROOT_CAUSE.format(code=1)
    )
    run = parse_text(text, "job.out")
    assert run.first_failure is not None
    assert run.first_failure.rank == 1
    assert run.first_failure.message == (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.1 GiB"
    )
    assert run.first_failure.line == 4
    assert len(run.failures) == 4


def test_first_failure_in_time_across_files(tmp_path: Path) -> None:
    folder = tmp_path / "logs" / "attempt_0"
    for rank, (second, error) in enumerate(
        ((9, "RuntimeError: Connection closed by peer"), (8, "ValueError: bad batch"), (10, "KeyError: 3"))
    ):
        (folder / str(rank)).mkdir(parents=True)
        text = f"2031-02-03 04:05:{second:02d},500 ERROR stopping\nTraceback (most recent call last):\n{error}\n"
        (folder / str(rank) / "stderr.log").write_text(text)
    run = parse_run(tmp_path / "logs")
    assert run.first_failure is not None
    assert (run.first_failure.rank, run.first_failure.message) == (1, "ValueError: bad batch")
    assert [failure.rank for failure in run.failures] == [1, 0, 2]
    assert run.failures[1].is_consequence and not run.failures[2].is_consequence


def test_kill_without_a_traceback_is_named() -> None:
    run = parse_text(ROOT_CAUSE.format(code=-9))
    assert run.first_failure is not None
    assert run.first_failure.rank == 1
    assert run.first_failure.message == "exit code -9 (SIGKILL: often the kernel's out-of-memory killer)"


def test_without_a_cause_the_first_consequence_is_reported() -> None:
    run = parse_text("[rank2]: socketPollConnect poll() returned 1, no POLLOUT\n[rank1]: Broken pipe\n")
    assert run.first_failure is not None and run.first_failure.rank == 2


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank3.log", 3),
        ("rank_12.out", 12),
        ("stderr.2", 2),
        ("a/attempt_0/5/stdout.log", 5),
        ("train.log", None),
        ("out/7/train.log", None),
    ],
)
def test_rank_of_path(name: str, rank: int | None) -> None:
    assert rank_of_path(Path(name)) == rank


@pytest.mark.parametrize(
    ("text", "value"), [("1,234", 1234), ("-2.5e-05", -2.5e-05), ("inf", math.inf), ("12.", 12.0), ("1,234.5", 1234.5), (".5", 0.5)]
)
def test_numbers(text: str, value: float) -> None:
    assert number(text) == value


def write_runs(folder: Path) -> list[Path]:
    paths = []
    for name, factor in (("a", 1.0), ("b", 2.0)):
        log = MetricsLog(folder / name, console=False)
        for step in (1, 2):
            log.log(StepMetrics(step=step, loss=factor / step, learning_rate=1e-4, tokens_per_second_per_gpu=100.0 * factor))
        log.log({"step": 2, "eval_loss": math.inf}, kind="eval")
        paths.append(folder / name)
    return paths


def test_csv_of_two_runs(tmp_path: Path) -> None:
    runs = [parse_run(path) for path in write_runs(tmp_path)]
    rows = list(csv.reader(io.StringIO(to_csv(runs))))
    assert rows[0] == ["run", "step", "loss", "eval_loss", "learning_rate", "tokens_per_second_per_gpu"]
    assert rows[1:] == [
        [str(tmp_path / "a"), "1", "1.0", "", "0.0001", "100.0"],
        [str(tmp_path / "a"), "2", "0.5", "inf", "0.0001", "100.0"],
        [str(tmp_path / "b"), "1", "2.0", "", "0.0001", "200.0"],
        [str(tmp_path / "b"), "2", "1.0", "inf", "0.0001", "200.0"],
    ]


def test_json_is_strict(tmp_path: Path) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    (path, _) = write_runs(tmp_path)
    (run,) = json.loads(to_json([parse_run(path)]), parse_constant=refuse)["runs"]
    assert [(row["kind"], row["step"]) for row in run["records"]] == [("train", 1), ("train", 2), ("eval", 2)]
    assert run["records"][2]["eval_loss"] is None and run["records"][2]["nonfinite"] == {"eval_loss": "inf"}
    assert run["summary"]["final_loss"] == 0.5 and run["summary"]["median_tokens_per_second_per_gpu"] == 100.0
    assert run["first_failure"] is None


def test_find_runs(tmp_path: Path) -> None:
    paths = write_runs(tmp_path)
    assert find_runs(tmp_path) == paths
    assert find_runs(paths[0]) == [paths[0]]
    assert find_runs(paths[0] / "metrics.jsonl") == [paths[0] / "metrics.jsonl"]


def test_main_prints_a_table_and_writes_files(tmp_path: Path, capsys: Any) -> None:
    log = tmp_path / "job.out"
    log.write_bytes(DEEPSPEED_AND_BAR.encode())
    assert main([str(log), "--csv", str(tmp_path / "x.csv"), "--json", str(tmp_path / "x.json")]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[1].split() == ["step", "epoch", "loss", "grad_norm", "learning_rate", "num_skipped_steps", "num_updates"]
    assert shown[2].split() == ["10", "0.1", "2.5", "0.75", "2e-06"]
    assert shown[3].split() == ["20", "0.0001", "6", "14"]
    assert (tmp_path / "x.csv").read_text().splitlines()[1] == "10,0.1,2.5,0.75,2.0000000000000003e-06,,"
    assert json.loads((tmp_path / "x.json").read_text())["runs"][0]["progress"] == [11, 100]


def test_main_thins_long_tables(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "job.out").write_text("".join(f"step {step} loss {step}\n" for step in range(1, 101)))
    main([str(tmp_path / "job.out"), "--rows", "4"])
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown[2:6]] == ["1", "34", "67", "100"]
    assert shown[6] == "  (4 of 100 rows; --rows 0 shows all)"


def test_main_names_what_is_wrong(tmp_path: Path, capsys: Any) -> None:
    assert main([str(tmp_path / "no")]) == 2
    assert f"{tmp_path / 'no'}: does not exist" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 2
    assert "holds no metrics.jsonl" in capsys.readouterr().err
    (tmp_path / "prose.txt").write_text("nothing to see\n")
    assert main([str(tmp_path / "prose.txt")]) == 1
    assert "no metrics found" in capsys.readouterr().out
    assert main([str(tmp_path / "prose.txt"), "--plot", "los"]) == 2
    assert "does not know los -> choose from loss" in capsys.readouterr().err


PLOT_FIX = f"choose from {', '.join(parse_log.PLOTS)}; --png FILE is where the picture goes"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("my-plot.png", f"--plot: does not know my-plot.png -> {PLOT_FIX}"),
        (",", f"--plot: names nothing to draw -> {PLOT_FIX}"),
        ("mfu", "--plot: found no mfu in these logs"),
    ],
)
def test_a_plot_that_cannot_be_is_refused_before_anything_is_written(names: str, message: str, tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "job.out").write_text("step 1 loss 2.0\n")
    assert main([str(tmp_path / "job.out"), "--csv", str(tmp_path / "x.csv"), "--plot", names]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["job.out"]


def test_what_vanishes_or_cannot_be_read_in_a_folder_is_passed_over(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    for name in ("a.log", "b.log", "c.log"):
        (tmp_path / name).write_text("step 1 loss 2.0\n")
    (tmp_path / "gone").mkdir()
    scandir, read_text = os.scandir, parse_log.read_text

    def vanishing(path: Any) -> Any:
        if str(path).endswith("gone"):
            os.rmdir(path)
        return scandir(path)

    def failing(path: Path, **options: Any) -> str:
        if path.name == "a.log":
            (tmp_path / "b.log").unlink()
        if path.name == "c.log":
            raise PermissionError(13, "Permission denied")
        return read_text(path, **options)

    monkeypatch.setattr(os, "scandir", vanishing)
    monkeypatch.setattr(parse_log, "read_text", failing)
    assert main([str(tmp_path)]) == 0
    assert not (tmp_path / "gone").exists()
    assert capsys.readouterr().out.splitlines() == [
        str(tmp_path),
        "  step  loss",
        "     1     2",
        f"  note    cannot be read: {tmp_path / 'c.log'}: Permission denied",
    ]


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    paths = write_runs(tmp_path)
    assert main([*map(str, paths), "--plot", "loss,lr,memory,throughput", "--png", str(tmp_path / "both.png")]) == 0
    plot_losses(paths[0] / "metrics.jsonl", tmp_path / "plots" / "one.png")
    for png in (tmp_path / "both.png", tmp_path / "plots" / "one.png"):
        assert png.read_bytes().startswith(b"\x89PNG\r\n") and png.stat().st_size > 5000


def test_curves_hold_exactly_the_finite_points(tmp_path: Path) -> None:
    run = parse_text("step 1 loss 3.0\nstep 2 loss nan\nstep 4 loss 1.0\n", "r")
    assert parse_log.curves([run], ("loss",)) == [("r", [1.0, 4.0], [3.0, 1.0])]


def test_lives_of_a_run_are_told_apart(tmp_path: Path) -> None:
    rows = [
        {"kind": "train", "time_s": 100.0, "step": 1, "loss": 2.0},
        {"kind": "train", "time_s": 110.0, "step": 2, "loss": 1.5},
        {"kind": "event", "event": "resume", "time_s": 1005.0, "step": 2, "life_began_s": 1000.0},
        {"kind": "train", "time_s": 1020.0, "step": 3, "loss": 1.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = parse_run(tmp_path)
    summary = json.loads(to_json([run]))["runs"][0]["summary"]
    assert (summary["wall_time_s"], summary["life_wall_time_s"], summary["num_lives"], summary["num_events"]) == (30.0, 20.0, 2, 1)
    assert "resume step=2" in parse_log.format_run(run) and "life_began_s" not in parse_log.format_run(run)


@pytest.mark.parametrize("run", [" " * 8000, "1" * 8000, "a" * 8000, "loss" + " " * 8000 + "x", " " * 8000 + "}", "A." * 4000])
def test_lines_that_go_on_and_on_are_read_in_a_moment(run: str) -> None:
    began_s = time.process_time()
    log = parse_text(f"step 1 loss 2.0 {run}\n{run}\nstep 2 loss 1.5\n")
    assert [row["loss"] for row in log.records] == [2.0, 1.5]
    assert time.process_time() - began_s < 1  # blanks took 3 s, digits half a minute


@pytest.mark.parametrize("flag", ["--csv", "--json", "--png"])
def test_an_output_never_takes_the_place_of_a_log(flag: str, tmp_path: Path, capsys: Any) -> None:
    log, link, hard = tmp_path / "a.log", tmp_path / "link", tmp_path / "hard"
    log.write_text("step 1 loss 2.0\n")
    link.symlink_to(log)
    hard.hardlink_to(log)
    plots = ["--plot", "loss"] if flag == "--png" else []
    for source in (log, tmp_path):
        for target in (log, link, hard):
            assert main([str(source), flag, str(target), *plots]) == 2
            assert f"error   {flag}: {target} is the log {log}, which would be lost -> name another file" in capsys.readouterr().err
    assert log.read_text() == "step 1 loss 2.0\n"


def test_outputs_that_cannot_be_written_are_one_message(tmp_path: Path, capsys: Any) -> None:
    log = tmp_path / "a.log"
    log.write_text("step 1 loss 2.0\n")
    missing = tmp_path / "missing" / "a.out"
    for target, why in ((tmp_path, "Is a directory"), (missing, "No such file or directory")):
        for flag in ("--csv", "--json", "--png"):
            assert main([str(log), flag, str(target), *(["--plot", "loss"] if flag == "--png" else [])]) == 2
            expected = f"error   {flag}: cannot write {target}: {why} -> name a file in a folder with room"
            assert capsys.readouterr().err.strip() == expected
    for flag in ("--csv", "--json"):
        assert main([str(log), flag, "/dev/full"]) == 1
        line = capsys.readouterr().err.strip()
        assert line.startswith("error   harness logs: cannot write /dev/full: No space left on device") and "\n" not in line
    assert [path.name for path in tmp_path.iterdir()] == ["a.log"]
    both = str(tmp_path / "both")
    assert main([str(log), "--csv", both, "--json", both]) == 2
    assert f"error   --json: {both} is written by --csv too" in capsys.readouterr().err


def test_a_logs_control_characters_are_written_out(tmp_path: Path, capsys: Any) -> None:
    log = tmp_path / "a.log"
    log.write_text("step 1 loss 2.0\nTraceback (most recent call last):\nValueError: \x9b2J\x07 gone \x1b\n")
    assert main([str(log)]) == 0
    shown = capsys.readouterr().out
    assert "ValueError: \\x9b2J\\x07 gone \\x1b" in shown
    assert not any(sign in shown for sign in "\x9b\x07\x1b")
