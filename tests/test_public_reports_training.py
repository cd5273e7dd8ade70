"""What people reported about other tools, tried on this one: loss, learning rate, out-of-memory, resuming, checkpoints.

A test's name begins with the case's number, its docstring has the reports; values are those of the smallest input that shows the fault.
"""

from __future__ import annotations

import concurrent.futures
import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness import resume as resume_module
from harness.args import TrainArguments
from harness.batches import make_sample, make_step_batch
from harness.coordination import Coordinator, StopFlag
from harness.findings import UserError
from harness.ladder import MemorySettings, parse_ladder
from harness.oom_reports import EndOfLadderError, is_out_of_memory
from harness.optim import build_scheduler
from harness.recovery import Recovery
from harness.step_loader import SampleList, StepLoader, longest_step
from harness.trainer import StepWatch
from tests.test_checkpoint import FileEngine, Meeting, ThreadCoordinator, names, on_ranks
from tests.test_wrong_input import TINY

log = logging.getLogger("harness")
OOM = "CUDA out of memory. Tried to allocate 2.00 GiB"


def rows(count: int, length: int = 6) -> list[dict[str, list[int]]]:
    return [{"input_ids": [1 + (index + place) % 50 for place in range(length)]} for index in range(count)]


def train(folder: Path, data: list[dict[str, list[int]]], **values: Any) -> int:
    """A job of one process in the tests' own, on a tiny model."""
    from harness.run_clm import train as run

    config = {
        "model_type": "llama",
        "config_overrides": TINY,
        "tokenizer_name": "bytes",
        "precision": "fp32",
        "logging_steps": 1,
        "use_cpu": True,
        "save_strategy": "no",
        "save_final": False,
        "output_dir": str(folder),
        **values,
    }
    return run(config, train_dataset=data)


def log_of(folder: Path, kind: str = "train") -> list[dict[str, Any]]:
    return [row for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if row["kind"] == kind]


def loaders(count: int, *, batch: int, processes: int = 1, seed: int = 3, **options: Any) -> list[StepLoader]:
    data = SampleList(rows(count, 2))
    return [
        StepLoader(data, global_batch_size=batch, num_processes=processes, process_index=rank, seed=seed, **options)
        for rank in range(processes)
    ]


def samples(ranks: list[StepLoader], step: int) -> list[int]:
    return [int(index) for loader in ranks for index in loader.indices(step)]


# ---- learning rate and loss


def test_b03_the_learning_rate_does_not_know_how_many_processes_there_are() -> None:
    """https://github.com/huggingface/accelerate/issues/2926, https://github.com/Lightricks/LTX-Video-Trainer/issues/67

    Stepped once for each of four processes it would be 6.6667e-4 after 10 steps and 0 after 25. That no engine steps it so is seen by
    every test that compares rates of several processes with one's (tests/distributed).
    """
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1e-3)
    scheduler = build_scheduler(optimizer, TrainArguments(learning_rate=1e-3, lr_scheduler_type="linear", warmup_steps=10), 100)
    after = {}
    for step in range(1, 101):
        optimizer.step()
        scheduler.step()
        after[step] = optimizer.param_groups[0]["lr"]
    assert after[10] == 1e-3 and after[25] == pytest.approx(8.3333e-4, rel=1e-5) and after[100] == 0.0
    assert sorted(after.values(), reverse=True)[0] == after[10]
    for processes in (1, 4):  # the number of steps, which the schedule goes by
        assert loaders(400, batch=4 * processes, processes=processes)[0].num_steps(1) == 400 // (4 * processes)


class Counting(Coordinator):
    """A rank of four whose peers brought given sums; counts what it takes part in."""

    others: float = 0.0
    num_sums = num_others = 0

    def sum(self, values: Any, what: str = "sum") -> list[float]:
        self.num_sums += 1
        return [values[0] + self.others, *values[1:]]

    def max(self, values: Any, what: str = "max") -> list[float]:
        self.num_others += 1
        return list(values)


def watch(others: float = 0.0) -> tuple[StepWatch, Counting]:
    coordinator = Counting(4, 0, 0, 4, torch.device("cpu"), "gloo", 5.0)
    coordinator.others = others
    result = StepWatch(coordinator, 0.0, None)
    result.grad_norm = torch.tensor(1.0)
    return result, coordinator


def test_b07_the_loss_of_a_step_is_the_mean_over_its_tokens() -> None:
    """https://github.com/huggingface/transformers/pull/34191, https://github.com/meta-pytorch/torchtune/pull/1917

    Two label tokens of loss 1.0 and six of loss 3.0: 20/8, not the mean of the means.
    """
    step, _ = watch()
    step.add(torch.tensor(2 * 1.0) + torch.tensor(6 * 3.0), 10, 8)
    assert step.read()["loss"] == 2.5


@pytest.mark.parametrize("lengths", [(3, 7), (7, 3), (2, 9, 4), (5, 5)])
def test_b07_gradients_are_those_of_one_batch_of_all_tokens(lengths: tuple[int, ...]) -> None:
    """https://github.com/huggingface/transformers/pull/34191: (3, 7) are the report's two and six label tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from harness.engines.base import micro_batch_loss
    from harness.loss import install_loss

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, attn_implementation="eager"
    )
    model: Any = LlamaForCausalLM(config)
    install_loss(model, 0)
    batch = make_step_batch([make_sample(np.arange(length) + 1) for length in lengths], 0.0)
    assert batch.num_label_tokens == sum(length - 1 for length in lengths)
    gradients = []
    for size in (1, len(lengths)):
        model.zero_grad()
        total = 0.0
        for micro in batch.micro_batches(size):
            loss = micro_batch_loss(model, micro, torch.device("cpu")) / batch.num_label_tokens
            loss.backward()
            total += float(loss.detach())
        gradients.append((total, [parameter.grad.clone() for parameter in model.parameters()]))
    (one, first), (whole, second) = gradients
    assert one == pytest.approx(whole, rel=1e-6)
    for mine, theirs in zip(first, second, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_e13_the_logged_loss_is_the_mean_over_ranks() -> None:
    """https://github.com/snowflakedb/ArcticTraining/issues/62, https://github.com/huggingface/accelerate/pull/399

    Ranks with losses 1, 2, 3 and 6 and equally many tokens: 3.0. One sum over ranks for a row of the log, none in other steps. (That
    each rank brings its own sum is seen in tests/distributed, where several processes log what one does.)
    """
    tokens = 10
    step, coordinator = watch(others=(2.0 + 3.0 + 6.0) * tokens)
    step.add(torch.tensor(1.0 * tokens), 4 * tokens, 4 * tokens)
    assert step.read()["loss"] == 3.0 and coordinator.num_sums == 1
    step, coordinator = watch(others=3 * 5.0)
    for _ in range(3):
        step.add(torch.tensor(5.0), 4, 4)
    assert (coordinator.num_sums, coordinator.num_others) == (0, 0)
    assert step.read()["loss"] == (3 * 5.0 + 3 * 5.0) / 12 and coordinator.num_sums == 1


# ---- out of memory


def test_b09_the_dry_run_takes_the_longest_samples_together() -> None:
    """https://github.com/hiyouga/LlamaFactory/issues/3668"""
    lengths = [5, 900, 12, 40, 880, 7]
    data = SampleList([{"input_ids": list(range(length))} for length in lengths])
    for num_samples in (2, 4, 6, 8):
        first = longest_step(data, num_samples).micro_batches(2)[0]
        assert tuple(first.input_ids.shape) == (2, 900) and first.input_ids.numel() == 1800
        again = num_samples > len(lengths)  # where a step has more samples than there are
        assert sorted(int((row != -100).sum()) for row in first.labels) == [900 if again else 880, 900]


def failing(limit: int, calls: list[int], after: int = 0) -> Callable[..., Any]:
    """The engines' forward, with no memory for micro-batches of more than `limit` samples once `after` were let through."""
    from harness.engines import ddp

    real = ddp.micro_batch_loss

    def forward(call: Any, micro: Any, device: Any) -> Any:
        calls.append(len(micro.input_ids))
        if len(calls) > after and len(micro.input_ids) > limit:
            raise torch.OutOfMemoryError(OOM)
        return real(call, micro, device)

    return forward


@pytest.mark.usefixtures("alone")
def test_b09_a_smaller_micro_batch_keeps_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """https://github.com/huggingface/transformers/issues/13794, https://github.com/EuroEval/EuroEval/pull/69

    Micro-batches of 8, accumulated twice, that never fit above 1, from the third step on: 8x2, 4x4, 2x8, 1x16.
    """
    values = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "max_steps": 4, "learning_rate": 1e-2}
    ladder = {"oom_ladder": ["micro_batch", "micro_batch", "micro_batch"]}
    data = rows(64)
    assert train(tmp_path / "plain", data, **values) == 0
    calls: list[int] = []
    with monkeypatch.context() as patch:
        from harness.engines import ddp

        patch.setattr(ddp, "micro_batch_loss", failing(1, calls, after=6))  # dry run, and two steps of two
        assert train(tmp_path / "oom", data, **values, **ladder) == 0
    assert calls == [8] * 6 + [8, 4, 2] + [1] * 16 + [1] * 16
    plain, low = log_of(tmp_path / "plain"), log_of(tmp_path / "oom")
    assert [(row["micro_batch_size"], row["gradient_accumulation_steps"]) for row in low] == [(8, 2), (8, 2), (1, 16), (1, 16)]
    assert [row["loss"] for row in low] == pytest.approx([row["loss"] for row in plain], rel=1e-5)
    assert [row["grad_norm"] for row in low] == pytest.approx([row["grad_norm"] for row in plain], rel=1e-4)
    assert low[-1]["num_label_tokens"] == 4 * 16 * 5  # each step's samples once
    said = [line for line in capsys.readouterr().out.splitlines() if "redoing the same samples" in line]
    assert [line.split("): ")[1].split(";")[0] for line in said] == [f"micro_batch_size {a} -> {a // 2}" for a in (8, 4, 2)]
    assert all("out of memory on rank 0 in phase 'step' at step 3 (CUDA out of memory" in line for line in said)
    settings = [rung.micro_batch_size for rung in parse_ladder(ladder["oom_ladder"], MemorySettings(8))]
    assert settings == [8, 4, 2, 1] and [16 // micro for micro in settings] == [2, 4, 8, 16]


@pytest.mark.usefixtures("alone")
def test_e05_the_end_of_the_ladder_says_what_was_tried_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """https://github.com/huggingface/accelerate/issues/1934, https://github.com/open-edge-platform/geti/pull/4872

    The allocator's own message is in ours. Its exception is not chained to it: it would keep alive every tensor of the step that failed.
    """
    from harness.engines import ddp

    calls: list[int] = []
    monkeypatch.setattr(ddp, "micro_batch_loss", failing(0, calls))
    with pytest.raises(AssertionError, match=r"ended with os._exit\(1\)"):
        train(tmp_path, rows(16), per_device_train_batch_size=8, max_steps=2, oom_ladder=["micro_batch"] * 3)
    assert calls == [8, 4, 2, 1]
    reason = json.loads((tmp_path / "exit.json").read_text())["reason"]
    assert f"nothing left to lower: {OOM}" in reason and "before step 1" in reason
    assert "Tried: micro_batch_size 8 -> 4; micro_batch_size 4 -> 2; micro_batch_size 2 -> 1" in reason


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("NCCL error: unhandled cuda error"), False),
        (torch.OutOfMemoryError("any text"), True),
        # neighbours
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (MemoryError(), True),
        (RuntimeError("NCCL error in: a.cpp:1, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), False),
        (ValueError("CUDA out of memory"), False),
        (EndOfLadderError(OOM), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_e05_which_errors_are_out_of_memory(error: BaseException, expected: bool) -> None:
    """https://github.com/huggingface/accelerate/issues/1934"""
    assert is_out_of_memory(error) is expected


class Engine:
    """Of one setting; notes what is asked of it."""

    resettable = True

    def __init__(self) -> None:
        self.settings, self.num_resets = MemorySettings(2), 0

    def install_votes(self, check: Callable[[], None]) -> None:
        self.check = check

    def apply(self, settings: MemorySettings) -> bool:
        self.settings = settings
        return True

    def reset_step(self) -> None:
        self.num_resets += 1


class SummingCoordinator(ThreadCoordinator):
    def sum(self, values: Any, what: str = "sum") -> list[float]:
        return [float(sum(column)) for column in zip(*self.gather(list(values)), strict=True)]


@pytest.mark.parametrize("place", ["forward", "after a bucket"])
def test_b11_out_of_memory_on_one_rank_stops_all_at_the_same_place(place: str) -> None:
    """https://github.com/pytorch/pytorch/issues/44353, https://github.com/pytorch/pytorch/issues/18853,
    https://github.com/HannesStark/FlowSite/pull/1

    Two ranks, five steps, in each a sum of the step's number over ranks; the second rank runs out of memory in step 3. Better than
    skipping step 3 on both ([2, 4, 8, 10]) or ending the job: both redo it, also where a sum of it had gone out already, and no sum
    mixes two steps, as [2, 4, 7, 9] would.
    """
    meeting = Meeting(2)

    def rank(index: int) -> tuple[list[float], int, list[int]]:
        coordinator = SummingCoordinator(2, index, 0, 1, torch.device("cpu"), "gloo", 20.0)  # each on a node: votes by collective
        coordinator.meeting = meeting
        engine = Engine()
        ladder = [MemorySettings(2), MemorySettings(1)]
        recovery = Recovery(coordinator, StopFlag(), engine, ladder)  # type: ignore[arg-type]
        done, tries = 0, []
        recovery.current_step = lambda: done

        def step(number: int) -> float:
            tries.append(number)
            fails = index == 1 and number == 3 and engine.settings.micro_batch_size == 2
            if fails and place == "forward":
                raise torch.OutOfMemoryError(OOM)
            engine.check()
            total = coordinator.sum([number])[0]
            if fails:
                raise torch.OutOfMemoryError(OOM)
            return total

        sums = []
        for number in range(1, 6):
            sums.append(recovery.run("step", step, number))
            done = number
        return sums, engine.num_resets, tries

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            results = [future.result(30) for future in [pool.submit(rank, index) for index in (0, 1)]]
    finally:
        log.removeHandler(handler)
    assert results == [([2.0, 4.0, 6.0, 8.0, 10.0], 1, [1, 2, 3, 3, 4, 5])] * 2
    assert said == [f"out of memory on rank 1 in phase 'step' at step 3 ({OOM}): micro_batch_size 2 -> 1; redoing the same samples"]


# ---- resuming


@pytest.mark.usefixtures("alone")
def test_b13_another_cut_of_the_same_batch_keeps_the_number_of_steps(tmp_path: Path) -> None:
    """https://github.com/huggingface/transformers/issues/43708, https://github.com/huggingface/transformers/issues/22580

    48 samples, micro-batches of 2 accumulated 4 times, a checkpoint at step 3, then micro-batches of 8: 6 steps before and after.
    """
    data = rows(48)
    values = {"num_train_epochs": 1, "save_strategy": "steps", "save_steps": 3, "learning_rate": 1e-2}
    first = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, **values}
    assert train(tmp_path / "first", data, **first) == 0
    whole = log_of(tmp_path / "first")
    assert [row["step"] for row in whole] == [1, 2, 3, 4, 5, 6]
    checkpoint = str(tmp_path / "first/checkpoint-3")
    again = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "resume_from_checkpoint": checkpoint, **values}
    assert train(tmp_path / "again", data, **again) == 0
    rest = log_of(tmp_path / "again")
    assert [row["step"] for row in rest] == [4, 5, 6]
    assert [row["loss"] for row in rest] == pytest.approx([row["loss"] for row in whole[3:]], rel=1e-4)

    # Another batch is refused with both numbers and what is done and left; forced, it takes the other 24 samples in 2 steps of 16.
    another = {**again, "gradient_accumulation_steps": 2}
    with pytest.raises(UserError) as caught:
        train(tmp_path / "refused", data, **another)
    assert "the checkpoint had 8 samples per step, this run has 16; 24 samples of the epoch are trained on, 2 steps are left" in str(
        caught.value
    )
    assert train(tmp_path / "forced", data, **another, force_resume=True) == 0
    forced = log_of(tmp_path / "forced")
    assert [row["step"] for row in forced] == [4, 5] and math.ceil((48 - 24) / 16) == 2
    assert forced[-1]["num_label_tokens"] == 48 * 5 == whole[-1]["num_label_tokens"]  # every sample once in the epoch
    assert forced[-1]["epoch"] == 1.0 and forced[-1]["learning_rate"] > 0
    state = json.loads((tmp_path / "forced/checkpoint-5/trainer_state.json").read_text())
    assert state["data"] == {"begin": [3, 0, 24]} and state["state"]["step"] == 5


def test_b15_resuming_in_the_middle_of_an_epoch_sees_each_sample_once() -> None:
    """https://github.com/huggingface/accelerate/issues/2016, https://github.com/wyim-pgl/transgenic/issues/59

    Shuffling again and skipping by index would see {0, 1, 2, 6} twice and {4, 7, 8, 9} never.
    """
    before = loaders(10, batch=2)
    seen = [samples(before, step) for step in range(2)]
    state = before[0].state_dict(2)
    after = loaders(10, batch=2)
    after[0].load_state_dict(state)
    resumed = [samples(after, step) for step in range(2, 5)]
    assert resumed == [samples(loaders(10, batch=2), step) for step in range(2, 5)]
    assert sorted(index for step in seen + resumed for index in step) == list(range(10))


def test_b17_zero_shards_of_another_number_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/3810, https://github.com/deepspeedai/DeepSpeed/issues/2898

    Better than refusing: four ranks' shards are converted to the universal format and loaded by six (tests/distributed/test_resume.py
    does it). Only what cannot be converted is refused, with both numbers and two ways on.
    """
    saved = {"engine": "zero3", "num_processes": 4, "template": {"zero_optimization": {"stage": 3}}}
    now = {**saved, "num_processes": 6}
    assert resume_module.loads_directly(saved, saved) and not resume_module.loads_directly(saved, now)
    assert resume_module.compare(saved, now) == []

    class Checkpointer:
        output_dir = tmp_path

    def cannot(source: Path, target: Path) -> None:
        raise RuntimeError("no such format")

    monkeypatch.setattr(resume_module, "convert_zero", cannot)
    coordinator = Coordinator(1, 0, 0, 1, torch.device("cpu"), "gloo", 5.0)
    with (
        pytest.raises(UserError) as caught,
        resume_module._readable(tmp_path / "checkpoint-3", saved, now, Checkpointer(), coordinator),  # type: ignore[arg-type]
    ):
        pass
    (finding,) = caught.value.findings
    assert "zero3 on 4 processes cannot be converted (RuntimeError: no such format); this run is zero3 on 6" in finding.message
    assert "start 4 processes with the same template" in finding.fix and "from its weights alone" in finding.fix


@pytest.mark.parametrize(("saved_by", "resumed_by"), [(8, 32), (32, 8), (1, 16), (4, 1)])
def test_e17_more_ranks_than_saved_states(saved_by: int, resumed_by: int) -> None:
    """https://github.com/pytorch/torchtitan/issues/409

    No rank has a state of its own, so none can be missing: where a step's samples are follows from its number.
    """
    before = loaders(200, batch=32, processes=saved_by)
    assert [loader.state_dict(3) for loader in before] == [{}] * saved_by
    after = loaders(200, batch=32, processes=resumed_by)
    seen = [index for step in range(3) for index in samples(before, step)]
    rest = [index for step in range(3, 7) for index in samples(after, step)]
    assert sorted(seen + rest) == list(range(200))


def test_e19_two_nodes_that_share_a_disk_delete_each_old_checkpoint_once(tmp_path: Path) -> None:
    """https://github.com/huggingface/transformers/issues/20988, https://github.com/huggingface/transformers/issues/28015

    Both processes are the first of their node. Who rotates is counted in tests/test_checkpoint.py.
    """
    from harness.checkpoint import Checkpointer
    from harness.checkpoint_files import problem_of

    def body(coordinator: Coordinator) -> list[bool]:
        coordinator.local_process_index, coordinator.num_local_processes = 0, 1
        checkpointer = Checkpointer(tmp_path, FileEngine(coordinator.process_index), coordinator, keep=1)
        return [checkpointer.save(step, {}, wait=True) for step in (1, 2, 3)]

    assert on_ranks(2, body) == [[True, True, True]] * 2
    assert names(tmp_path) == ["checkpoint-3"] and problem_of(tmp_path / "checkpoint-3") is None
