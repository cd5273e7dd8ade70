"""FLOPs by hand, cards through a made-up NVML, and watching a run by its files."""

from __future__ import annotations

import json
import sys
import threading
import time
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness import monitor
from harness.metrics import MetricsLog, StepMetrics, read_metrics


def config(**values: Any) -> types.SimpleNamespace:
    base = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 10, "intermediate_size": 16}
    return types.SimpleNamespace(**(base | values))


def test_flops_of_a_dense_model() -> None:
    # 1,000 parameters of which 80 are the input embedding; attention 6 * 3 layers * 8 * 5 tokens
    assert monitor.model_flops_per_token(config(), 5, 1000) == 6 * 920 + 6 * 3 * 8 * 5


def test_flops_of_a_tied_embedding_count_it_once_as_the_head() -> None:
    assert monitor.model_flops_per_token(config(tie_word_embeddings=True), 0, 1000) == 6 * 1000


def test_flops_with_frozen_weights() -> None:
    assert monitor.model_flops_per_token(config(tie_word_embeddings=True), 0, 1000, num_trainable=100) == pytest.approx(4 * 1000 + 2 * 100)


def test_flops_of_a_sliding_window_and_of_mixed_layers() -> None:
    attention = 6 * 8
    tied = {"tie_word_embeddings": True}
    assert monitor.model_flops_per_token(config(sliding_window=4, **tied), 100, 0) == attention * 3 * 8
    assert monitor.model_flops_per_token(config(sliding_window=4, use_sliding_window=False, **tied), 100, 0) == attention * 3 * 100
    kinds = ["sliding_attention", "full_attention", "linear_attention"]
    assert monitor.model_flops_per_token(config(sliding_window=4, layer_types=kinds, **tied), 100, 0) == attention * (8 + 100)


def test_flops_of_experts_count_those_a_token_passes() -> None:
    moe = config(num_local_experts=8, num_experts_per_tok=2, tie_word_embeddings=True)
    idle = 3 * 6 * (3 * 8 * 16)  # layers * idle experts * three matrices
    assert monitor.model_flops_per_token(moe, 0, 20_000) == 6 * (20_000 - idle)


def test_flops_of_real_configs() -> None:
    transformers = pytest.importorskip("transformers")
    llama = transformers.LlamaConfig(
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336, vocab_size=128256
    )
    # 8,030,261,248 parameters, 525,336,576 of them the input embedding
    assert monitor.model_flops_per_token(llama, 4096, 8_030_261_248) == 6 * (8_030_261_248 - 525_336_576) + 6 * 32 * 4096 * 4096
    # GPT-2: 124,439,808 parameters, tied head, 1024 learned positions of 768
    assert (
        monitor.model_flops_per_token(transformers.GPT2Config(), 1024, 124_439_808) == 6 * (124_439_808 - 1024 * 768) + 6 * 12 * 768 * 1024
    )


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("Tesla V100-SXM2-32GB", 125e12),
        ("NVIDIA H20", 148e12),
        ("Some Card 9000", None),
        ("", None),
    ],
)
def test_peak_flops(name: str, flops: float | None) -> None:
    assert monitor.peak_flops(name) == flops


@pytest.mark.parametrize(
    ("visible", "indices"),
    [(None, [0, 1, 2]), ("", []), ("2,0", [2, 0]), ("1,7,0", [1]), ("GPU-bb", [1]), ("GPU-", []), ("-1", []), ("0, 1", [0, 1])],
)
def test_visible_indices(visible: str | None, indices: list[int]) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert monitor.visible_indices(environ, ["GPU-aa11", "GPU-bb22", "GPU-cc33"]) == indices


class FakeNvml(types.ModuleType):
    """Two cards; the second one answers nothing beyond its name and memory."""

    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = NVML_VOLATILE_ECC = NVML_TEMPERATURE_GPU = NVML_CLOCK_SM = 0

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.num_open = 0

    def nvmlInit(self) -> None:
        self.num_open += 1

    def nvmlShutdown(self) -> None:
        self.num_open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return b"NVIDIA H100 80GB HBM3"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return types.SimpleNamespace(used=3 * 2**30, total=80 * 2**30)

    def __getattr__(self, name: str) -> Any:
        answers = {
            "nvmlDeviceGetUtilizationRates": types.SimpleNamespace(gpu=97),
            "nvmlDeviceGetPowerUsage": 412_300,
            "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            "nvmlDeviceGetCurrentClocksThrottleReasons": 0x4 | 0x40 | 0x1,
            "nvmlDeviceGetTotalEccErrors": 0,
            "nvmlDeviceGetUUID": "GPU-aa11",
            "nvmlDeviceGetTemperature": 61,
            "nvmlDeviceGetClockInfo": 1980,
            "nvmlDeviceGetComputeRunningProcesses": [types.SimpleNamespace(pid=2**30, usedGpuMemory=2**30)],
        }
        if name not in answers:
            raise AttributeError(name)

        def answer(handle: int, *_: Any) -> Any:
            if handle == 1:
                raise RuntimeError("Not Supported")
            return answers[name]

        return answer


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    library = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    return library


@pytest.fixture
def no_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    library = types.ModuleType("pynvml")
    library.nvmlInit = lambda: (_ for _ in ()).throw(RuntimeError("Driver Not Loaded"))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pynvml", library)


def test_sample(cards: FakeNvml) -> None:
    first, second = monitor.sample_gpus(with_processes=True)
    assert first == monitor.GpuSample(
        index=0,
        name="NVIDIA H100 80GB HBM3",
        uuid="GPU-aa11",
        memory_used_gib=3.0,
        memory_total_gib=80.0,
        utilization_percent=97,
        power_w=412.3,
        power_limit_w=700.0,
        temperature_c=61,
        sm_clock_mhz=1980,
        throttled=("power cap", "thermal (hardware)"),
        ecc_errors=0,
        processes=(monitor.GpuProcess(2**30, 1.0),),  # a process of another container: no user, no command
    )
    assert second == monitor.GpuSample(1, "NVIDIA H100 80GB HBM3", "", 3.0, 80.0)
    assert [card.index for card in monitor.sample_gpus([1, 7])] == [1]
    assert cards.num_open == 0


def test_own_process_has_a_name(cards: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    (process,) = monitor._processes([types.SimpleNamespace(pid=os.getpid(), usedGpuMemory=None)])
    assert process.memory_gib is None and process.user and "python" in (process.command or "")


def test_the_cards_of_other_nodes_come_with_a_row_of_training(tmp_path: Path) -> None:
    """Two nodes of two ranks: the second node's main process has looked, the first one's writes."""
    from harness import job

    log, latest = MetricsLog(tmp_path, console=False), monitor.LatestRow()
    latest.put({"node": 1, "gpus": [{"gpu": 0, "power_w": 100.0}]})
    latest.put({"node": 1, "gpus": [{"gpu": 0, "power_w": 200.0}]})
    rows: list[Any] = [None, None, latest.take(), latest.take()]
    assert rows[3] is None  # once
    job._share_samples(monitor.LatestRow(), SimpleNamespace(gather=lambda own: rows), log)  # type: ignore[arg-type]
    (row,) = read_metrics(tmp_path).rows
    assert (row["kind"], row["node"], row["gpus"]) == ("gpu", 1, [{"gpu": 0, "power_w": 200.0}])
    follower = monitor.RunFollower(tmp_path)
    follower.poll()
    assert set(follower.gpus) == {1}


def test_monitor_thread_writes_rows_and_stops(cards: FakeNvml, tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, console=False)
    seen = threading.Event()

    def write(row: dict[str, Any]) -> None:
        log.log(row, kind="gpu")
        seen.set()

    watcher = monitor.GpuMonitor(write, indices=[0], interval_s=60, node=1, step=lambda: 7)
    assert watcher.start()
    assert seen.wait(10)
    watcher.stop()
    (row,) = read_metrics(tmp_path).rows
    row.pop("time_s")
    assert row == {
        "kind": "gpu",
        "node": 1,
        "at_step": 7,
        "gpus": [
            {
                "gpu": 0,
                "utilization_percent": 97,
                "memory_used_gib": 3.0,
                "memory_total_gib": 80.0,
                "power_w": 412.3,
                "temperature_c": 61,
                "throttled": ["power cap", "thermal (hardware)"],
            }
        ],
    }
    assert cards.num_open == 0 and not any(thread.name == "gpu-monitor" for thread in threading.enumerate())


def test_monitor_uses_the_visible_cards(cards: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    rows: list[dict[str, Any]] = []
    seen = threading.Event()
    watcher = monitor.GpuMonitor(lambda row: (rows.append(row), seen.set())[0], interval_s=60)
    watcher.start()
    assert seen.wait(10)
    watcher.stop()
    assert rows == [{"gpus": [{"gpu": 1, "memory_used_gib": 3.0, "memory_total_gib": 80.0}]}]


def test_monitor_without_cards_does_nothing(no_cards: None) -> None:
    assert monitor.sample_gpus() == []
    watcher = monitor.GpuMonitor(lambda row: None)
    assert watcher.start() is False
    watcher.stop()


def test_failing_write_ends_the_thread_quietly(cards: FakeNvml, caplog: pytest.LogCaptureFixture) -> None:
    def write(row: dict[str, Any]) -> None:
        raise OSError("disk gone")

    watcher = monitor.GpuMonitor(write, indices=[0], interval_s=0.01)
    watcher.start()
    assert watcher._thread is not None
    watcher._thread.join(10)
    assert not watcher._thread.is_alive()
    watcher.stop()


def write_run(folder: Path) -> MetricsLog:
    log = MetricsLog(folder, console=False, max_steps=100)
    log.event("start")
    for step, seconds in ((10, 9.0), (20, 2.0), (30, 2.0)):
        log.log(StepMetrics(step=step, loss=4.0 - step / 100, step_time_s=seconds, mfu=0.4125, tokens_per_second_per_gpu=8371.25))
    log.log({"step": 30, "eval_loss": 3.5}, kind="eval")
    log.log({"gpus": [{"gpu": 0, "utilization_percent": 97, "memory_used_gib": 3.0, "memory_total_gib": 80.0}]}, kind="gpu")
    log.event("step_down", step=30, micro_batch_size=2)
    return log


def test_follower_reads_what_is_added(tmp_path: Path) -> None:
    log = write_run(tmp_path)
    follower = monitor.RunFollower(tmp_path)
    follower.poll()
    assert follower.train["step"] == 30 and follower.evaluation["eval_loss"] == 3.5
    assert [event["event"] for event in follower.events] == ["start", "step_down"]
    assert follower.eta_s(follower.train["time_s"] + 1.5) == 70 * 2.0 - 1.5
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "step": 40, ')
    follower.poll()
    assert follower.train["step"] == 30  # half a line waits
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('"loss": 1.0, "max_steps": 100}\n')
    follower.poll()
    assert follower.train["step"] == 40
    log.close()
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 1}\n')  # another run in the same place
    follower.poll()
    assert follower.train == {"kind": "train", "step": 1} and follower.events == []


def test_status_as_text(tmp_path: Path) -> None:
    write_run(tmp_path)
    follower = monitor.RunFollower(tmp_path)
    follower.poll()
    lines = monitor.format_status(follower.status(follower.events[-1]["time_s"]))
    assert lines[0] == f"{tmp_path}: running, last row 0:00:00 ago"
    assert lines[1] == "step 30/100 (30.0%)   epoch -   left 0:02:20"
    assert lines[2] == "loss 3.7   lr -   grad norm -   tokens/s per GPU 8,371   MFU 41.2%   peak GiB -   micro-batch - x -"
    assert lines[3:] == [
        "evaluation at step 30: eval_loss 3.5",
        "node 0 gpu 0   97%   3/80 GiB   - W   - C",
        "event start: ",
        "event step_down: step=30, micro_batch_size=2",
    ]


def test_status_of_a_run_that_ended_and_of_one_that_has_not_begun(tmp_path: Path) -> None:
    follower = monitor.RunFollower(tmp_path)
    follower.poll()
    assert follower.status(0.0)["state"] == "waiting"
    write_run(tmp_path)
    follower.poll()
    now = follower.events[-1]["time_s"]
    (tmp_path / "exit.json").write_text(json.dumps({"code": 1, "reason": "out of memory", "rank": 0, "time": now - 100}))
    assert follower.status(now)["state"] == "running"  # the file is an earlier life's
    (tmp_path / "exit.json").write_text(json.dumps({"code": 1, "reason": "out of memory", "rank": 0, "time": now}))
    status = follower.status(now)
    assert (status["state"], status["eta_s"]) == ("ended", None)
    assert monitor.format_status(status)[-1] == "exit code 1: out of memory"


def test_main(tmp_path: Path, capsys: Any, no_cards: None) -> None:
    assert monitor.main([]) == 0
    assert capsys.readouterr().out == "no NVIDIA GPU found on this machine\n"
    write_run(tmp_path)
    assert monitor.main([str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["train"]["step"] == 30
    assert monitor.main([str(tmp_path / "no")]) == 2
    assert "is not a folder" in capsys.readouterr().err
    assert monitor.main(["--interval", "0"]) == 2


def test_main_lists_cards(capsys: Any, cards: FakeNvml) -> None:
    assert monitor.main(["--once"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "[0] NVIDIA H100 80GB HBM3  61 C  97%  3.0/80.0 GiB  412.3/700 W  throttled: power cap, thermal (hardware)",
        f"      ?  pid {2**30}  1.00 GiB",
        "[1] NVIDIA H100 80GB HBM3  - C  -%  3.0/80.0 GiB  -/- W",
    ]


def test_control_characters_in_what_a_run_wrote_are_written_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"kind": "event", "event": "\x1b[2J", "time_s": 1.0, "why": "a\rb"}) + "\n")
    (tmp_path / "exit.json").write_text(json.dumps({"code": 1, "reason": "\x1b]0;title\x07", "time": 2.0}))
    assert monitor.main([str(tmp_path), "--once"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[-2:] == ["event \\x1b[2J: why=a\\rb", "exit code 1: \\x1b]0;title\\x07"]


def test_what_cannot_be_read_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    assert monitor.main([str(tmp_path), "--once"]) == 1
    text = f"cannot be read: {tmp_path / 'metrics.jsonl'}: Is a directory"
    assert capsys.readouterr().out.splitlines() == [f"{tmp_path}: unknown", text]
    (tmp_path / "exit.json").write_text(json.dumps({"code": 0, "reason": "finished", "time": time.time()}))
    assert monitor.main([str(tmp_path), "--once"]) == 1
    assert capsys.readouterr().out.splitlines() == [f"{tmp_path}: ended", text, "exit code 0: finished"]
    (tmp_path / "metrics.jsonl").rmdir()
    assert monitor.main([str(tmp_path), "--once"]) == 0
