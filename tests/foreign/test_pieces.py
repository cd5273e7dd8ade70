"""How a batch of somebody else's loop is cut, what a piece counts, and what happens where a step cannot be redone."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from harness import rank_hook
from harness.safe_loop import OomSafe, can_redo, hand_over
from harness.step_redo import num_label_tokens, num_rows, pieces_of, share
from tests.foreign import cells, cuda_cells, inject


def test_pieces() -> None:
    batch = {
        "input_ids": torch.arange(10).view(5, 2),
        "labels": torch.tensor([[1, 1], [1, -100], [1, 1], [1, 1], [1, -100]]),
        "names": list("abcde"),
        "scale": torch.tensor(2.0),
        "kind": "text",
    }
    assert num_rows(batch) == 5 and pieces_of(batch, None) == [batch] and pieces_of(batch, 5) == [batch]
    pieces = pieces_of(batch, 2)
    assert [piece["input_ids"].tolist() for piece in pieces] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9]]]
    assert [piece["names"] for piece in pieces] == [["a", "b"], ["c", "d"], ["e"]]
    assert {(float(piece["scale"]), piece["kind"]) for piece in pieces} == {(2.0, "text")}
    # Labels are shifted: of each sample the second counts, unless it is masked.
    assert [int(num_label_tokens(piece)) for piece in pieces] == [1, 2, 0]
    assert [float(share(piece, batch)) for piece in pieces] == pytest.approx([1 / 3, 2 / 3, 0])
    assert share(batch, batch) == 1.0
    first, second = pieces_of((torch.ones(3, 1), torch.zeros(3)), 2)
    assert [len(part) for part in (*first, *second)] == [2, 2, 1, 1]
    assert share(first, (torch.ones(3, 1), torch.zeros(3))) == pytest.approx(2 / 3)


class Memory:
    """A layer that fails for more than `rows` samples at once, and the accelerator of a job of one process around it."""

    def __init__(self, rows: int, kind: str = "NO") -> None:
        torch.manual_seed(0)
        self.model, self.rows, self.seen = nn.Linear(2, 1), rows, []
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.accelerator: Any = SimpleNamespace(
            distributed_type=kind,
            num_processes=1,
            process_index=0,
            local_process_index=0,
            is_main_process=True,
            device=torch.device("cpu"),
            sync_gradients=True,
            backward=lambda loss: loss.backward(),
            _models=[self.model],
            _optimizers=[self.optimizer],
        )

    def loss(self, part: dict[str, torch.Tensor]) -> torch.Tensor:
        self.seen.append(len(part["x"]))
        if len(part["x"]) > self.rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return self.model(part["x"]).square().mean()


def gradients(rows: int, num_batches: int = 1) -> tuple[list[float], list[float], list[int]]:
    memory = Memory(rows)
    found = []
    for number in range(num_batches):
        memory.accelerator.sync_gradients = number == num_batches - 1
        batch = {"x": torch.arange(12.0).view(6, 2) + number}
        with OomSafe(memory.accelerator, batch) as cut:
            found.append(float(cut(memory.loss)))
    return found, memory.model.weight.grad.view(-1).tolist(), memory.seen


def test_a_batch_that_does_not_fit_gives_the_same_loss_and_gradient() -> None:
    whole, cut = gradients(6), gradients(2)
    assert cut[0] == pytest.approx(whole[0]) and cut[1] == pytest.approx(whole[1])
    assert cut[2] == [6, 3, 1, 1, 1, 1, 1, 1]


def test_the_micro_batches_before_the_one_that_failed_are_computed_again_once() -> None:
    memory_of = []
    for rows in (6, 3):
        memory = Memory(6)
        for number in range(2):
            memory.accelerator.sync_gradients = number == 1
            memory.rows = 6 if number == 0 else rows
            OomSafe(memory.accelerator, None)(memory.loss)({"x": torch.arange(12.0).view(6, 2) + number})
        memory_of.append(memory)
    whole, redone = memory_of
    assert redone.model.weight.grad.tolist() == [pytest.approx(row) for row in whole.model.weight.grad.tolist()]
    assert redone.seen == [6, 6, 3, 3, 3, 3]


def test_the_optimizers_state_is_there_before_the_first_update() -> None:
    memory = Memory(6)
    OomSafe(memory.accelerator, None)(memory.loss)({"x": torch.ones(6, 2)})
    (state, _) = memory.optimizer.state.values()
    assert float(state["step"]) == 0 and float(state["exp_avg"].abs().sum()) == 0


def test_single_samples_that_do_not_fit_are_the_end() -> None:
    memory = Memory(0)
    with pytest.raises(torch.OutOfMemoryError, match=r"2.00 GiB. \(rank 0, with single samples\)"):
        OomSafe(memory.accelerator, None)(memory.loss)({"x": torch.ones(4, 2)})


def test_other_errors_go_through() -> None:
    memory = Memory(6)
    with pytest.raises(ZeroDivisionError), OomSafe(memory.accelerator, {"x": torch.ones(4, 2)}) as cut:
        cut(lambda part: 1 / 0)
    with pytest.raises(TypeError, match="needs the batch"), OomSafe(memory.accelerator, None):
        pass


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED"])
def test_where_a_step_cannot_be_redone_the_runner_is_told(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(2, kind)
    assert not can_redo(memory.accelerator)
    monkeypatch.setenv(rank_hook.REPORTS_VARIABLE, str(tmp_path))
    monkeypatch.setenv("RANK", "3")

    def ended(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", ended)
    with pytest.raises(SystemExit), OomSafe(memory.accelerator, {"x": torch.ones(4, 2)}) as cut:
        cut(memory.loss)
    (report,) = [json.loads(path.read_text()) for path in tmp_path.glob("oom-3-*.json")]
    assert (report["rank"], report["requested_gib"], report["memory"]) == (3, 2.0, "device")


def test_without_a_runner_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv(rank_hook.REPORTS_VARIABLE, raising=False)
    hand_over(torch.OutOfMemoryError("x"))
    assert "harness run -- ..." in caplog.text


def test_fsdp2_reduces_after_every_micro_batch() -> None:
    from harness.callbacks import reduce_every_micro_batch

    def accelerator(version: int | None, **kwargs: Any) -> Any:
        plugin = None if version is None else SimpleNamespace(fsdp_version=version)
        return SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin), gradient_state=SimpleNamespace(plugin_kwargs=kwargs))

    changed = accelerator(2)
    assert reduce_every_micro_batch(changed) and changed.gradient_state.plugin_kwargs == {"sync_each_batch": True}
    assert not reduce_every_micro_batch(changed)
    assert not reduce_every_micro_batch(accelerator(None)) and not reduce_every_micro_batch(accelerator(1))


def test_the_callback_alone_allocates_the_optimizers_state() -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    from harness.callbacks import OomRecoveryCallback

    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    Accelerator(cpu=True)
    try:
        OomRecoveryCallback().on_train_begin(None, None, None, model=model, optimizer=optimizer)  # type: ignore[arg-type]
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
    assert sorted(optimizer.state[model.weight]) == ["exp_avg", "exp_avg_sq", "step"]


def test_the_longest_batch() -> None:
    from harness.callbacks import longest_batch

    samples = [{"input_ids": [0] * length} for length in (3, 9, 1, 5)]
    loader = SimpleNamespace(dataset=samples, collate_fn=lambda rows: [len(row["input_ids"]) for row in rows])
    assert longest_batch(loader, 2) == [9, 5] and longest_batch(loader, 8) == [9, 5, 3, 1]
    assert longest_batch(SimpleNamespace(dataset=iter(samples), collate_fn=list), 2) is None
    assert longest_batch(SimpleNamespace(dataset=[{"text": "x"}], collate_fn=list), 2) is None


class Card:
    """What the limit asks of torch.cuda: 100 bytes in all."""

    def __init__(self, held: int, peak: int) -> None:
        self.held, self.peak, self.calls = held, peak, []  # type: ignore[var-annotated]

    def memory_allocated(self) -> int:
        return self.held

    def max_memory_allocated(self) -> int:
        return self.peak

    def mem_get_info(self) -> tuple[int, int]:
        return 50, 100

    def reset_peak_memory_stats(self) -> None:
        self.calls.append("reset")

    def empty_cache(self) -> None:
        self.calls.append("empty")

    def set_per_process_memory_fraction(self, fraction: float) -> None:
        self.calls.append(fraction)


def test_a_card_loses_memory_once_and_for_all_later_lives(tmp_path: Path) -> None:
    settings = {"step": 3, "spare": 0.6}
    first = Card(held=10, peak=60)
    limit = inject.CardLimit(tmp_path / "limit.json", settings, first)
    for step in (1, 2, 3, 3, 4):
        limit.before_step(step)
    assert first.calls == ["reset", "empty", 0.4]  # 10 held, 60 % of the 50 on top, of 100
    assert json.loads((tmp_path / "limit.json").read_text())["limit_bytes"] == 40
    later = Card(held=5, peak=5)
    again = inject.CardLimit(tmp_path / "limit.json", settings, later)
    for step in (1, 2, 3):
        again.before_step(step)
    assert later.calls == ["empty", 0.4]


def test_what_a_run_on_gpus_came_to(tmp_path: Path) -> None:
    record = {
        "result": "finished",
        "attempts": [
            {"change": "as it is", "seconds": 30.0, "ended_after_s": 2.5, "out_of_memory": [{"failure": "CUDA out of memory"}]},
            {"change": "micro_batch_size 16 -> 8", "seconds": 40.0, "resume_from_checkpoint": "out/checkpoint-4"},
        ],
    }
    (tmp_path / "out-harness_run").mkdir()
    (tmp_path / "out-harness_run" / "record.json").write_text(json.dumps(record))
    samples = [[[rank * 1000 + step * 16 + place for place in range(16)] for step in range(1, 13)] for rank in range(2)]
    losses = [3.0 - step / 10 for step in range(1, 7)] + [3.0 - step / 10 for step in range(5, 13)]
    losses[7] *= 1.01  # step 6 again, after the four of a checkpoint
    found = cells.Run(0, 70.0, "", dict(enumerate(losses, start=1)), {rank: [samples[rank][:7], samples[rank][4:]] for rank in range(2)})
    result = cuda_cells.outcome(found, tmp_path)
    assert result["resumed_at_step"] == 4 and result["steps_after_that"] == 8 and result["samples_per_step"] == [32]
    assert result["same_samples_in_steps_done_twice"] is True and result["steps_done_twice"] == [5, 6]
    assert result["largest_relative_loss_difference_in_them"] == pytest.approx(0.01)
    assert (result["all_ranks_ended_after_s"], result["attempts"]) == (2.5, 2)
    found.steps[1][1][1] = found.steps[1][1][0]  # one rank repeats a step's samples
    assert cuda_cells.outcome(found, tmp_path)["same_samples_in_steps_done_twice"] is False


def test_losses_that_a_trainer_prints() -> None:
    lines = [
        "loading",
        "{'loss': '11.07', 'grad_norm': '1.5'}",
        "{'loss': 10.5, 'epoch': 0.2}",
        "{'train_runtime': 3.0, 'train_loss': 9.0}",
    ]
    text = "\n".join(lines)
    assert cuda_cells.printed_losses(text) == [11.07, 10.5]


def test_silence_counts_from_the_last_sign_of_life(tmp_path: Path) -> None:
    output, record = tmp_path / "output.txt", tmp_path / "rank0-1.jsonl"
    is_over = cuda_cells.silence(tmp_path)
    output.write_text("")
    now = output.stat().st_mtime
    os.utime(output, (now - cuda_cells.SILENCE_S - 1, now - cuda_cells.SILENCE_S - 1))
    assert not is_over(output)  # it has not begun to train
    record.write_text("[1]\n")
    assert not is_over(output)
    os.utime(record, (now - cuda_cells.SILENCE_S - 1, now - cuda_cells.SILENCE_S - 1))
    assert is_over(output)
