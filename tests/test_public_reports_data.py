"""What people reported about other tools, tried on this one: reading data, and what is printed and read back.

A test's name begins with the case's number, its docstring has the reports; values are those of the smallest input that shows the fault.
(B45, a rank that prepares while others wait, is in tests/test_data_isolation.py.)
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.args import DataArguments
from harness.batches import collate, make_sample
from harness.coordination import setup_logging
from harness.data import build_loader, prepare_data
from harness.data_sources import FileReader, expand
from harness.findings import UserError
from harness.loss import shifted_targets
from harness.parse_log import parse_text
from tests.data_tokenizers import byte_tokenizer, word_tokenizer

LATIN = bytes.fromhex("63 61 66 E9 20 6E 6F 69 72 0A 70 6C 61 69 6E 0A")
LINES = b"first\n\n   \nsecond\r\nlast"


def texts(path: Path, content: bytes, **options: Any) -> list[str]:
    path.write_bytes(content)
    reader = FileReader(**options)
    return [row.values["text"] for row in reader.rows(expand([str(path)], reader.key))]


# ---- padding


def test_b39_padding_with_eos_hides_no_real_eos(tmp_path: Path) -> None:
    """https://github.com/huggingface/trl/issues/976, https://github.com/huggingface/transformers/issues/4122,
    https://github.com/huggingface/blog/issues/1302

    A tokenizer without a pad token; by what the tokens are, the real eos would be lost: [[1, 2, -100], [1, -100, -100]].
    """
    tokenizer = word_tokenizer("E a b", eos_token="E")
    num_tokens = len(tokenizer)
    (tmp_path / "a.jsonl").write_text('{"text": "a b"}\n{"text": "a"}\n')
    args = DataArguments(train_file=[str(tmp_path / "a.jsonl")], data_cache_dir=str(tmp_path / "cache"), packing="none", block_size=8)
    args.validation_split_percentage, args.train_sampling_strategy = 0, "sequential"
    prepared = prepare_data(args, tokenizer, max_positions=64, seed=0, say=lambda line: None, is_local_main=True)
    loader = build_loader(args, prepared, global_batch_size=2, num_processes=1, process_index=0, seed=0)
    (micro,) = loader.step(0).micro_batches(2)
    own = collate([make_sample(np.array([1, 2, 0])), make_sample(np.array([1, 0]))], pad_id=tokenizer.eos_token_id)
    assert own.labels.tolist() == [[1, 2, 0], [1, 0, -100]]
    # Of a document from a file the first token has no label at all, for nothing predicts it; what is predicted is the same.
    assert shifted_targets(micro.labels).tolist() == shifted_targets(own.labels).tolist() == [[2, 0, -100], [0, -100, -100]]
    assert micro.num_label_tokens == 3  # two of the first, one of the second: the first token of each has no prediction
    assert micro.document_ids is not None and micro.document_ids.tolist() == [[0, 0, 0], [0, 0, 1]]  # which the mask is made of
    assert len(tokenizer) == num_tokens == 4 and tokenizer.pad_token is None


# ---- bytes and lines


def test_b41_a_file_that_is_not_utf8(tmp_path: Path) -> None:
    """https://github.com/huggingface/datasets/issues/6641"""
    with pytest.raises(UserError) as caught:
        texts(tmp_path / "a.txt", LATIN)
    (finding,) = caught.value.findings
    assert finding.message == f"{tmp_path}/a.txt, line 1: byte 0xe9 at offset 3 is not UTF-8" and "--data_encoding" in finding.fix
    read = texts(tmp_path / "a.txt", LATIN, encoding="latin-1", line_mode=True)
    assert read == ["café noir", "plain"] and len(read[0]) == 9
    assert texts(tmp_path / "a.txt", b"\xef\xbb\xbfabc") == ["abc"]
    assert texts(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": "abc"}\n') == ["abc"]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.csv", "a.tsv"])
@pytest.mark.parametrize("place", [0, 1, 5])
def test_b41_every_kind_of_text_file_names_file_line_and_offset(name: str, place: int, tmp_path: Path) -> None:
    """https://github.com/huggingface/datasets/issues/6641, its neighbours."""
    line = {"a.txt": b"plain\n", "a.jsonl": b'{"text": "x"}\n', "a.json": b'{"text": "x"}\n', "a.csv": b"x,y\n", "a.tsv": b"x\ty\n"}[name]
    first = {"a.csv": b"text,b\n", "a.tsv": b"text\tb\n"}.get(name, line)
    content = first + line * place + line[:-2] + b"\xe9" + line[-2:]
    offset = content.index(b"\xe9")
    with pytest.raises(UserError) as caught:
        texts(tmp_path / name, content)
    assert f"{tmp_path}/{name}, line {place + 2}: byte 0xe9 at offset {offset} is not UTF-8" in str(caught.value)


def test_b43_lines_documents_and_files_with_nothing(tmp_path: Path) -> None:
    """https://github.com/huggingface/transformers/issues/12971, https://github.com/huggingface/datasets/issues/870,
    https://github.com/unslothai/unsloth/pull/7183, https://stackoverflow.com/questions/65145526

    Line by line, as newlines are wanted or not: three samples; as documents: one, with its newlines.
    """
    assert texts(tmp_path / "a.txt", LINES, line_mode=True) == ["first", "second", "last"]
    assert texts(tmp_path / "a.txt", LINES) == ["first\n\n   \nsecond\nlast"]
    for content in (b"", b"\n", b" \n\t\r\n"):
        (tmp_path / "good.txt").write_text("good")
        with pytest.raises(UserError, match=f"{tmp_path}/empty.txt is empty or blank"):
            (tmp_path / "empty.txt").write_bytes(content)
            list(FileReader().rows(expand([str(tmp_path / "good.txt"), str(tmp_path / "empty.txt")], "--train_file")))


@pytest.mark.parametrize("mode", ["line", "document"])
def test_b43_no_sample_is_empty_and_newlines_are_tokens(mode: str, tmp_path: Path) -> None:
    """https://github.com/huggingface/transformers/issues/12971: down to the token ids."""
    (tmp_path / "a.txt").write_bytes(LINES)
    tokenizer = byte_tokenizer()
    args = DataArguments(train_file=[str(tmp_path / "a.txt")], data_cache_dir=str(tmp_path / "cache"), packing="none", block_size=64)
    args.validation_split_percentage, args.train_sampling_strategy, args.text_mode = 0, "sequential", mode
    data = prepare_data(args, tokenizer, max_positions=64, seed=0, say=lambda line: None, is_local_main=True).train
    assert data is not None
    read = [tokenizer.decode(data[index]["input_ids"], skip_special_tokens=True) for index in range(len(data))]
    assert read == (["first", "second", "last"] if mode == "line" else ["first\n\n   \nsecond\nlast"])
    assert all(len(data[index]["input_ids"]) > 1 for index in range(len(data)))


# ---- what is printed, and what is read back


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    """The harness's logger, as it was afterwards."""
    logger = logging.getLogger("harness")
    level, propagate = logger.level, logger.propagate
    yield logger
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(level)
    logger.propagate = propagate


def test_b47_each_line_once_and_what_all_say_with_the_rank(
    log: logging.Logger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """https://github.com/tloen/alpaca-lora/pull/187, https://github.com/huggingface/accelerate/issues/381,
    https://github.com/pytorch/pytorch/issues/7134

    Four processes, known by the environment alone, before there is a process group; six lines on the console. Besides, train.log has the
    other ranks' warnings, for the one that is not the same on all, and an error is printed on whatever rank it is.
    """

    def printed(level: int = logging.WARNING) -> list[str]:
        setup_logging(tmp_path)
        setup_logging(tmp_path)  # handlers are replaced, not added
        log.info("start")
        log.log(level, "w")
        log.info("r", extra={"all_ranks": True})
        captured = capsys.readouterr()
        return [*captured.out.splitlines(), *captured.err.splitlines()]

    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert printed() == ["start", "w", "r"]
    (tmp_path / "train.log").unlink()
    monkeypatch.setenv("WORLD_SIZE", "4")
    lines = []
    for rank in range(4):
        monkeypatch.setenv("RANK", str(rank))
        lines += printed()
    assert lines == ["start", "w", "[rank 0] r", "[rank 1] r", "[rank 2] r", "[rank 3] r"]
    written = [line.split(" ", 2)[2] for line in (tmp_path / "train.log").read_text().splitlines()]
    assert written == [*lines[:3], *(f"[rank {rank}] {text}" for rank in (1, 2, 3) for text in ("w", "r"))]
    assert printed(logging.ERROR) == ["[rank 3] w", "[rank 3] r"]


SHARED_LINES = (
    "\r 10%|#         | 10/100 [00:20<03:00,  2.00s/it][2031-02-03 04:05:06,007] [INFO] [loss_scaler.py:190:update_scale] "
    "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768\n"
    "\r          \r{'loss': 2.5, 'grad_norm': 0.75, 'learning_rate': 2.0000000000000003e-06, 'epoch': 0.1}\n"
    "\r 11%|#1        | 11/100 [00:22<02:58,  2.00s/it]\n"
    "[2031-02-03 04:05:30,001] [INFO] [logging.py:96:log_dist] [Rank 0] step=20, skipped=6, lr=[0.0001], mom=[(0.9, 0.999)]\n"
)


def test_b48_bar_deepspeed_and_dict_on_shared_lines() -> None:
    """https://github.com/ymcui/Chinese-LLaMA-Alpaca/issues/534, https://github.com/deepspeedai/DeepSpeed/issues/931,
    https://github.com/unslothai/unsloth/issues/1548"""
    run = parse_text(SHARED_LINES)
    metrics, deepspeed = run.records
    assert {key: metrics[key] for key in ("step", "loss", "grad_norm", "learning_rate", "epoch")} == {
        "step": 10,
        "loss": 2.5,
        "grad_norm": 0.75,
        "learning_rate": 2.0000000000000003e-06,
        "epoch": 0.1,
    }
    assert run.events == [{"event": "overflow", "step": 10, "loss_scale_from": 65536, "loss_scale_to": 32768}]
    assert {key: deepspeed[key] for key in ("step", "num_skipped_steps", "num_updates", "learning_rate")} == {
        "step": 20,
        "num_skipped_steps": 6,
        "num_updates": 14,
        "learning_rate": 1e-4,
    }
    assert run.progress == (11, 100)


def test_b48_other_lines_of_deepspeed() -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/931"""
    run = parse_text(
        "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 4096, but hysteresis is 2. Reducing hysteresis to 1\n"
        "[2031-02-03 04:05:30,001] [INFO] [timer.py:264:stop] epoch=0/micro_step=40/global_step=20, RunningAvgSamplesPerSec=12.5, "
        "CurrSamplesPerSec=13.25, MemAllocated=1.25GB, MaxMemAllocated=3.5GB\n"
    )
    assert run.events == [{"event": "overflow", "loss_scale": 4096, "hysteresis_from": 2, "hysteresis_to": 1}]
    (record,) = run.records
    assert (record["source"], record["step"], record["epoch"]) == ("deepspeed_throughput", 20, 0)
    assert (record["average_samples_per_second"], record["num_micro_batches"], record["peak_memory_gib"]) == (12.5, 40, 3.5)


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\n\r", "\r\r\n"])
def test_b48_however_lines_end(ending: str) -> None:
    """https://github.com/unslothai/unsloth/issues/1548, its neighbours: logs that went through a terminal, Windows or `tee`."""
    run, expected = parse_text(SHARED_LINES.replace("\n", ending)), parse_text(SHARED_LINES)
    assert (run.records, run.events, run.progress) == (expected.records, expected.events, expected.progress)
