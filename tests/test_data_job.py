"""Data in a whole job of one process: a stream that goes on where it was, and the losses of a mixture's sources."""

from __future__ import annotations

import collections
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

TINY = "hidden_size=32,intermediate_size=64,num_hidden_layers=1,num_attention_heads=2,num_key_value_heads=1,max_position_embeddings=64"


pytestmark = pytest.mark.usefixtures("alone")


def run(folder: Path, **changes: object) -> list[dict[str, Any]]:
    """A job; returns what it logged."""
    import torch.distributed as dist

    from harness.run_clm import main

    if dist.is_initialized():  # of a job that was killed
        dist.destroy_process_group()
    values: dict[str, object] = {
        "model_type": "llama",
        "config_overrides": TINY,
        "tokenizer_name": "bytes",
        "block_size": 32,
        "packing": "none",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "logging_steps": 1,
        "data_cache_dir": folder / "cache",
        "output_dir": folder / "out",
        "save_strategy": "no",
        "save_final": False,
        **changes,
    }
    assert main([token for name, value in values.items() for token in (f"--{name}", str(value))]) == 0
    return [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]


def rows_file(path: Path, texts: list[str]) -> Path:
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return path


def test_a_streamed_run_that_was_killed_goes_on_with_every_row_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed at step 8, resumed at 6 with an empty cache: nothing between the first window, which is shown, and the place is read."""
    from harness.engines.ddp import DdpEngine
    from harness.streaming import StreamDataset, StreamLoader

    rows_file(tmp_path / "a.jsonl", [f"row {number:03d}" for number in range(60)])
    steps: dict[int, list[int]] = {}
    windows: list[int] = []
    step, build, update = StreamLoader.step, StreamDataset._build, DdpEngine.step
    num_updates = 0

    def recorded(self: StreamLoader, index: int) -> Any:
        batch = step(self, index)
        # the byte tokenizer's ids of digits are three bytes after "row "
        steps[index] = [int(bytes(self.dataset.preparer.tokenizer.decode(sample["input_ids"][4:7]), "ascii")) for sample in batch.samples]
        return batch

    def counted(self: StreamDataset, target: Path, number: int, *rest: Any) -> None:
        windows.append(number)
        build(self, target, number, *rest)

    def dies(self: DdpEngine) -> Any:
        nonlocal num_updates
        num_updates += 1
        if num_updates == 8:
            while not (tmp_path / "out" / "checkpoint-6" / "COMPLETE").exists():
                time.sleep(0.02)
            raise RuntimeError("the node is gone")
        return update(self)

    monkeypatch.setattr(StreamLoader, "step", recorded)
    monkeypatch.setattr(StreamDataset, "_build", counted)
    monkeypatch.setattr(DdpEngine, "step", dies)
    arguments: dict[str, object] = {
        "streaming": True,
        "train_file": tmp_path / "a.jsonl",
        "streaming_buffer_size": 10,
        "max_steps": 15,
        "save_strategy": "steps",
        "save_steps": 3,
    }
    with pytest.raises(AssertionError, match=r"os\._exit"):
        run(tmp_path, **arguments)
    before = dict(steps)
    assert sorted(before) == list(range(8))
    shutil.rmtree(tmp_path / "cache")
    steps.clear()
    windows.clear()
    rows = run(tmp_path, **arguments)
    assert next(row["step"] for row in rows if row.get("event") == "resume") == 6
    assert sorted(steps) == list(range(6, 15))
    assert steps[6] == before[6] and steps[7] == before[7]
    seen = collections.Counter(row for index in range(15) for row in (before | steps)[index])
    assert seen == dict.fromkeys(range(60), 1)
    assert sorted(set(windows)) == [0, 2, 3, 4, 5, 6]  # sample 24 is in window 2; window 6, the next epoch's first, is read ahead
    state = json.loads((tmp_path / "out" / "checkpoint-15" / "trainer_state.json").read_text())["data"]
    assert state == {"number": 6, "epoch": 0, "start": 60, "source": {"file": 0, "rows": 60, "near": [59 * 20, 59, 59]}}


def test_the_losses_of_a_mixtures_sources_are_logged_and_add_up(tmp_path: Path) -> None:
    rows_file(tmp_path / "many.jsonl", [f"many {number} of these" for number in range(40)])
    rows_file(tmp_path / "few.jsonl", ["few"] * 10)
    rows_file(tmp_path / "held.jsonl", ["few of them"] * 3)
    sources = [
        {"name": "many", "weight": 3, "train_file": [str(tmp_path / "many.jsonl")], "validation_file": [str(tmp_path / "held.jsonl")]},
        {"name": "few", "weight": 1, "train_file": [str(tmp_path / "few.jsonl")], "validation_file": [str(tmp_path / "few.jsonl")]},
    ]
    (tmp_path / "mix.yaml").write_text(json.dumps({"sources": sources}))
    rows = run(tmp_path, dataset_mix=tmp_path / "mix.yaml", max_steps=4, logging_steps=2, eval_strategy="steps", eval_steps=4)
    train = [row for row in rows if row["kind"] == "train"]
    assert len(train) == 2
    for row, before in zip(train, [0, train[0]["num_label_tokens"]], strict=True):
        count = row["num_label_tokens"] - before
        assert {"loss/many", "loss/few"} <= row.keys()
        # the label tokens of "few" follow from the two means and the whole
        of_few = (row["loss"] - row["loss/many"]) / (row["loss/few"] - row["loss/many"]) * count
        assert of_few == pytest.approx(round(of_few), abs=0.02) and round(of_few) % 3 == 0 and 0 < of_few < count
    evaluation = next(row for row in rows if row["kind"] == "eval")
    parts = [evaluation["eval_loss/many"] * 3 * 11, evaluation["eval_loss/few"] * 10 * 3]
    assert evaluation["eval_loss"] == pytest.approx(sum(parts) / 63, rel=1e-6)


def test_documents_are_kept_apart_without_a_mask_where_the_card_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unasked; `sdpa`, models that cannot and documents that need not be kept apart stay what they were."""
    from harness import varlen_attention

    data = rows_file(tmp_path / "a.jsonl", [f"the {number} of all numbers" for number in range(30)])
    common: dict[str, object] = {"train_file": data, "packing": "concat", "max_steps": 4, "overwrite_output_dir": True}
    masked = [row["loss"] for row in run(tmp_path, **common) if row["kind"] == "train"]
    monkeypatch.setattr(varlen_attention, "is_available", lambda device, precision: precision == "fp32")  # its CPU form

    def attention(**changes: object) -> tuple[list[float], str | None]:
        rows = run(tmp_path, **common, **changes)
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        return [row["loss"] for row in rows if row["kind"] == "train"][-4:], config["attn_implementation"]

    losses, name = attention()
    assert name == "varlen" and losses == pytest.approx(masked, rel=1e-5)
    assert "documents are kept apart by varlen attention, without a mask" in (tmp_path / "out" / "train.log").read_text()
    assert attention(attn_implementation="sdpa")[1] == "sdpa"
    for changes in ({"document_isolation": False}, {"no_custom_kernels": True}, {"config_overrides": f"{TINY},attention_dropout=0.1"}):
        assert attention(**changes)[1] is None


def test_what_cannot_be_kept_apart_or_sees_the_future_is_said_before_the_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from harness.run_clm import main

    data = rows_file(tmp_path / "a.jsonl", ["a", "b"])
    words = ["--tokenizer_name", "bytes", "--train_file", str(data), "--output_dir", str(tmp_path / "out"), "--max_steps", "1"]
    sizes = "hidden_size=32,intermediate_size=48,num_hidden_layers=2,num_attention_heads=4"
    assert main([*words, "--model_type", "bert", "--config_overrides", sizes]) == 2
    assert "is_decoder: BertLMHeadModel is an encoder by its config" in capsys.readouterr().err
