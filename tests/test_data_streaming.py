"""Streams: one order for any number of ranks, resumed at once, three windows on disk."""

from __future__ import annotations

import collections
import json

import pytest
import yaml

from harness.args import DataArguments
from harness.data import build_loader, dry_run_step, prepare_data
from harness.findings import UserError
from harness.parsing import parse_args
from harness.streaming import StreamDataset
from tests.data_tokenizers import byte_tokenizer


@pytest.fixture
def made(monkeypatch):
    """Numbers of the windows that were tokenised."""
    numbers = []
    original = StreamDataset._build
    monkeypatch.setattr(
        StreamDataset, "_build", lambda self, target, number, *rest: (numbers.append(number), original(self, target, number, *rest))
    )
    return numbers


def loaders(folder, cache, num_processes=1, files=("a.jsonl", "b.jsonl"), strategy="random", seed=7, say=lambda line: None, **options):
    options = {"block_size": 128, "packing": "none", "streaming_buffer_size": 10} | options
    names = {} if "dataset_name" in options else {"train_file": [str(folder / name) for name in files]}
    args = DataArguments(streaming=True, data_cache_dir=str(cache), train_sampling_strategy=strategy, **names, **options)
    result = []
    for rank in range(num_processes):
        data = prepare_data(args, byte_tokenizer(), max_positions=128, seed=seed, say=say, is_local_main=rank == 0)
        result.append(build_loader(args, data, global_batch_size=6, num_processes=num_processes, process_index=rank, seed=seed))
    return result


def corpus(folder, sizes=(37, 18)):
    number = 0
    for name, size in zip("ab", sizes, strict=True):
        rows = [json.dumps({"text": f"row {number + i}"}) for i in range(size)]
        (folder / f"{name}.jsonl").write_text("\n".join(rows))
        number += size


def rows_of(parts):
    """Row numbers of a step, rank by rank."""
    tokenizer = byte_tokenizer()
    return [
        int(tokenizer.decode(sample["input_ids"].tolist()).removesuffix("</s>").split()[1]) for part in parts for sample in part.samples
    ]


def test_the_order_is_the_same_for_any_number_of_ranks_and_every_row_comes_once_an_epoch(tmp_path):
    corpus(tmp_path)
    orders = []
    for num_processes in (1, 2, 3):
        ranks = loaders(tmp_path, tmp_path / f"cache{num_processes}", num_processes)
        orders.append([rows_of([rank.step(k) for rank in ranks]) for k in range(55)])
    assert orders[0] == orders[1] == orders[2]
    flat = [row for step in orders[0] for row in step]
    for epoch in range(6):
        assert sorted(flat[epoch * 55 : (epoch + 1) * 55]) == list(range(55))
    assert flat[:10] != list(range(10))
    assert sorted(flat[:10]) == list(range(10))  # shuffled within a window
    assert flat[:55] != flat[55:110]
    sequential = loaders(tmp_path, tmp_path / "s", strategy="sequential")[0]
    assert [row for k in range(9) for row in rows_of([sequential.step(k)])] == list(range(54))
    assert sequential.step(8).epoch == 0.0
    assert sequential.step(9).epoch == 1.0


@pytest.mark.parametrize("resumed_ranks", [1, 3])
def test_resuming_goes_on_where_it_was_without_reading_what_came_before(tmp_path, made, resumed_ranks):
    corpus(tmp_path)
    ranks = loaders(tmp_path, tmp_path / "cache", 2)
    steps = [[rank.step(k) for rank in ranks] for k in range(5)]
    state = json.loads(json.dumps(ranks[0].state_dict(5)))
    assert state == ranks[1].state_dict(5)
    assert state["number"] == 3  # sample 30 is the first of window 3
    expected = [rows_of([rank.step(k) for rank in ranks]) for k in range(5, 30)]
    made.clear()
    elsewhere = loaders(tmp_path, tmp_path / "other", resumed_ranks)
    made.clear()
    for rank in elsewhere:
        rank.load_state_dict(state)
    assert [rows_of([rank.step(k) for rank in elsewhere]) for k in range(5, 30)] == expected
    assert min(made) == 3
    assert len(steps) == 5


def test_without_a_checkpoint_the_place_is_found_from_the_cache(tmp_path, made):
    corpus(tmp_path)
    first = loaders(tmp_path, tmp_path / "cache")[0]
    expected = [rows_of([first.step(k)]) for k in range(20)]
    count = len(made)
    again = loaders(tmp_path, tmp_path / "cache")[0]
    assert [rows_of([step]) for step in again.prefetching(15, 5)] == expected[15:]
    assert len(made) - count <= 4  # a window that was deleted meanwhile, and those read ahead
    assert [rows_of([again.step(k)]) for k in (2, 16)] == [expected[2], expected[16]]  # backwards too


def test_rows_that_are_left_out_of_a_window_are_counted(tmp_path):
    lines = [json.dumps({"text": f"row {i}"}) for i in range(10)]
    lines[3], lines[5] = '{"text": ', '{"txet": "row 5"}'
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    said: list[str] = []
    (loader,) = loaders(tmp_path, tmp_path / "cache", files=["a.jsonl"], bad_rows="skip", say=said.append)
    assert [len(loader.step(0).samples)] == [6]
    assert "streaming, window 0: 10 rows; left out: 2 bad rows" in said


def test_the_disk_holds_few_windows(tmp_path):
    corpus(tmp_path, (300, 5))
    loader = loaders(tmp_path, tmp_path / "cache")[0]
    for k in range(45):
        loader.step(k)
    loader.dataset._ahead.shutdown()
    folders = [path for path in loader.dataset.folder.iterdir() if path.is_dir()]
    assert 2 <= len(folders) <= 4


def test_long_texts_are_not_cut_by_windows(tmp_path, monkeypatch):
    from harness import streaming

    monkeypatch.setattr(streaming, "SEGMENT_CHARS", 50)
    text = "".join(f"line {number}\n" for number in range(200))
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_text("short")
    loader = loaders(tmp_path, tmp_path / "cache", files=("a.txt", "b.txt"), streaming_buffer_size=3, strategy="sequential")[0]
    tokenizer = byte_tokenizer()
    seen, k = "", 0
    while "</s>short" not in seen:
        for sample in loader.step(k).samples:
            piece = tokenizer.decode(sample["input_ids"].tolist())
            seen += piece if not seen or seen.endswith("</s>") else piece[1:]  # without the repeated context token
        k += 1
    assert seen.startswith(text + "</s>short</s>")


def test_a_stream_of_a_named_dataset(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    folder = tmp_path / "set"
    folder.mkdir()
    corpus(folder)
    (folder / "README.md").write_text(
        f"---\n{yaml.safe_dump({'configs': [{'config_name': 'default', 'data_files': [{'split': 'train', 'path': '*.jsonl'}]}]})}---\n"
    )
    first = loaders(tmp_path, tmp_path / "cache", dataset_name=str(folder))[0]
    steps = [rows_of([first.step(k)]) for k in range(18)]
    assert sorted([row for step in steps for row in step][:55]) == list(range(55))
    state = json.loads(json.dumps(first.state_dict(4)))
    second = loaders(tmp_path, tmp_path / "other", dataset_name=str(folder))[0]
    second.load_state_dict(state)
    assert [rows_of([second.step(k)]) for k in range(4, 18)] == steps[4:]


def test_the_dry_run_takes_full_blocks(tmp_path):
    corpus(tmp_path)
    args = DataArguments(streaming=True, train_file=[str(tmp_path / "a.jsonl")], data_cache_dir=str(tmp_path / "c"), block_size=64)
    data = prepare_data(args, byte_tokenizer(), max_positions=128, seed=0, say=lambda line: None, is_local_main=True)
    step = dry_run_step(data, 3)
    assert [len(sample["input_ids"]) for sample in step.samples] == [64, 64, 64]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"files": ("none.jsonl",)}, "none.jsonl does not exist"),
        ({"files": ("blank.jsonl",)}, "no usable token in the first 1 rows"),
        ({"files": ("bad.jsonl",)}, r"bad.jsonl, line 2: no column 'text'"),
        ({"max_train_samples": 3}, "a stream has no first samples"),
        ({"strategy": "group_by_length"}, "a stream cannot be grouped by length"),
        ({"streaming_buffer_size": 0}, "must be at least 1, not 0"),
        ({"overlong": "drop", "block_size": 3}, "no sample is left of the first 10 rows"),
    ],
)
def test_wrong_input_is_named(tmp_path, options, message):
    corpus(tmp_path)
    (tmp_path / "blank.jsonl").write_text('{"text": " "}')
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\n{"txet": "y"}')
    with pytest.raises(UserError, match=message):
        loaders(tmp_path, tmp_path / "cache", **options)


def test_a_stream_needs_a_number_of_steps():
    with pytest.raises(UserError, match="give --max_steps with --streaming"):
        parse_args(["--model_type", "llama", "--train_file", "a.txt", "--output_dir", "out", "--streaming"])


def test_every_token_of_a_stream_is_trained_on_once_an_epoch(tmp_path):
    corpus(tmp_path)
    tokenizer = byte_tokenizer()
    for packing in ("concat", "best_fit"):
        loader = loaders(tmp_path, tmp_path / packing, packing=packing, block_size=16)[0]
        counted: collections.Counter[int] = collections.Counter()
        stream, position = loader.dataset, 0
        while True:
            epoch, sample = stream.sample(position)
            if epoch == 1:
                break
            counted.update(sample["labels"][1:][sample["labels"][1:] >= 0].tolist())
            position += 1
        expected = collections.Counter(
            token for i in range(55) for token in [*tokenizer(f"row {i}")["input_ids"], tokenizer.eos_token_id][1:]
        )
        assert counted == expected
