"""Packing and order: every token is trained on exactly once, in one order whatever the number of ranks and workers."""

from __future__ import annotations

import collections
import itertools
import multiprocessing
import os
import signal
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import packing, token_store
from harness.batches import IGNORE, collate, make_sample
from harness.findings import UserError
from harness.permutation import Permutation
from harness.step_loader import SampleList, StepLoader, eval_batches, longest_step, num_eval_batches

LENGTHS = st.lists(st.integers(2, 40), min_size=1, max_size=30)


def write_store(folder, lengths, mask=None):
    """A store in which token number i of the corpus is i, so that a token says where it comes from."""
    folder.mkdir()
    total = int(sum(lengths))
    writer = token_store.TokenWriter(folder, max_token_id=max(total, 1), masked=mask is not None)
    writer.add(np.arange(total, dtype=np.uint32), np.array(lengths, dtype=np.int64), mask)
    writer.close({"dropped": {}, "notes": {}})
    return token_store.TokenStore(folder)


def dataset(store, block_size, packing_name, overlong="split", isolate=True, split=None):
    plan = store.folder / f"{packing_name}-{block_size}-{overlong}-{'all' if split is None else split.key()}"
    if not plan.exists():
        plan.mkdir()
        token_store.write_plan(plan, store, split, block_size, packing_name, overlong)
    return token_store.TokenizedDataset(store, plan, isolate)


def predicted(sample):
    """Tokens of a sample that the shifted loss really sees."""
    labels = sample["labels"][1:]
    return labels[labels != IGNORE].tolist()


def firsts_of(lengths):
    return set((np.cumsum(lengths) - np.array(lengths)).tolist())


@pytest.mark.parametrize("name", ["concat", "best_fit", "none"])
@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, block_size=st.integers(2, 24))
def test_every_token_but_a_documents_first_is_predicted_exactly_once(tmp_path_factory, name, lengths, block_size):
    store = write_store(tmp_path_factory.mktemp("store") / "s", lengths)
    data = dataset(store, block_size, name)
    counted = collections.Counter(token for i in range(len(data)) for token in predicted(data[i]))
    total = sum(lengths)
    assert counted == collections.Counter(set(range(total)) - firsts_of(lengths))
    assert data.lengths.tolist() == [len(data[i]["input_ids"]) for i in range(len(data))]
    assert max(data.lengths) <= block_size
    assert data.num_tokens == total + data.plan["counts"]["num_cuts"]
    if name == "concat":
        assert all(length == block_size for length in data.lengths[:-1])


@pytest.mark.parametrize("name", ["concat", "best_fit", "none"])
@settings(max_examples=30, deadline=None)
@given(lengths=LENGTHS, block_size=st.integers(2, 24))
def test_documents_of_a_sample_are_told_apart(tmp_path_factory, name, lengths, block_size):
    store = write_store(tmp_path_factory.mktemp("store") / "s", lengths)
    data = dataset(store, block_size, name)
    document_of = np.repeat(np.arange(len(lengths)), lengths)
    for i in range(len(data)):
        sample = data[i]
        assert {key: value.dtype.name for key, value in sample.items()} == {
            "input_ids": "int64",
            "labels": "int64",
            "position_ids": "int64",
            "document_ids": "int32",
        }
        position = 0
        for number, (start, length) in enumerate(data.pieces(i)):
            part = slice(position, position + length)
            assert sample["input_ids"][part].tolist() == list(range(start, start + length))
            assert len(set(document_of[start : start + length])) == 1
            assert sample["document_ids"][part].tolist() == [number] * length
            assert sample["position_ids"][part].tolist() == list(range(length))
            assert sample["labels"][part].tolist() == [IGNORE, *range(start + 1, start + length)]
            position += length
        assert position == len(sample["input_ids"])


def test_without_isolation_the_next_documents_first_token_is_predicted_too(tmp_path):
    store = write_store(tmp_path / "s", [3, 4, 2])
    data = dataset(store, 9, "concat", isolate=False)
    sample = data[0]
    assert sample["labels"].tolist() == list(range(9))
    assert sample["position_ids"].tolist() == list(range(9))
    assert sample["document_ids"].tolist() == [0] * 9


@pytest.mark.parametrize("isolate", [True, False])
def test_windows_do_not_show_in_concatenation(tmp_path, monkeypatch, isolate):
    lengths = np.random.default_rng(0).integers(2, 50, 200).tolist()
    store = write_store(tmp_path / "s", lengths)
    whole = dataset(store, 64, "concat", isolate=isolate)
    expected = [whole.pieces(i) for i in range(len(whole))]
    monkeypatch.setattr(packing, "WINDOW_DOCUMENTS", 7)
    store = write_store(tmp_path / "t", lengths)
    windowed = dataset(store, 64, "concat", isolate=isolate)
    assert [windowed.pieces(i) for i in range(len(windowed))] == expected


def test_concat_by_hand(tmp_path):
    data = dataset(write_store(tmp_path / "s", [5, 4, 3]), 4, "concat")
    assert [data.pieces(i) for i in range(len(data))] == [[(0, 4)], [(3, 2), (5, 2)], [(6, 3), (9, 1)], [(9, 3)]]
    assert data.plan["counts"]["num_cuts"] == 3


def test_best_fit_by_hand():
    part = packing.best_fit(np.array([0, 3, 9, 13, 15]), np.array([3, 6, 4, 2, 5]), 10)
    samples = np.split(np.arange(5), np.cumsum(part.pieces)[:-1])
    # 6+4 fill one sample exactly; 5, 3 and 2 fill the other
    assert [[(int(part.starts[i]), int(part.lengths[i])) for i in sample] for sample in samples] == [
        [(0, 3), (13, 2), (15, 5)],
        [(3, 6), (9, 4)],
    ]


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=60))
def test_best_fit_is_best_fit_decreasing(lengths):
    part = packing.best_fit(np.cumsum(lengths) - np.array(lengths), np.array(lengths), 20)
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting, key=lambda i: rooms[i])] -= length
        else:
            rooms.append(20 - length)
    used = np.add.reduceat(part.lengths, np.cumsum(part.pieces) - part.pieces)
    assert sorted(20 - used) == sorted(rooms)
    assert sorted(part.lengths.tolist()) == sorted(lengths)


def test_overlong_documents(tmp_path):
    store = write_store(tmp_path / "s", [3, 10, 4])
    split, cut, dropped = (dataset(store, 4, "none", overlong) for overlong in ("split", "truncate", "drop"))
    assert [split.pieces(i) for i in range(len(split))] == [[(0, 3)], [(3, 4)], [(6, 4)], [(9, 4)], [(13, 4)]]
    assert [cut.pieces(i) for i in range(len(cut))] == [[(0, 3)], [(3, 4)], [(13, 4)]]
    assert (cut.plan["counts"]["num_truncated"], cut.plan["counts"]["num_truncated_tokens"]) == (1, 6)
    assert [dropped.pieces(i) for i in range(len(dropped))] == [[(0, 3)], [(13, 4)]]
    assert (dropped.plan["counts"]["num_dropped"], dropped.plan["counts"]["num_dropped_tokens"]) == (1, 10)


def test_pieces_in_which_nothing_is_trained_on_are_dropped_and_counted(tmp_path):
    mask = np.array([0] * 8 + [1] * 2 + [0, 1, 1], dtype=np.uint8)
    store = write_store(tmp_path / "s", [10, 3], mask)
    data = dataset(store, 4, "none")
    assert [data.pieces(i) for i in range(len(data))] == [[(6, 4)], [(10, 3)]]
    assert data[0]["labels"].tolist() == [IGNORE, IGNORE, 8, 9]
    assert (data.plan["counts"]["num_unlabelled"], data.plan["counts"]["num_unlabelled_tokens"]) == (2, 8)


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(2, 40), min_size=2, max_size=60), percent=st.floats(0.5, 60))
def test_held_out_documents_are_not_trained_on(tmp_path_factory, lengths, percent):
    store = write_store(tmp_path_factory.mktemp("store") / "s", lengths)
    train_split, eval_split = token_store.divide(store, percent)
    sides = [dataset(store, 16, "concat", split=split) for split in (train_split, eval_split)]
    tokens = [{token for i in range(len(side)) for token in side[i]["input_ids"].tolist()} for side in sides]
    assert not tokens[0] & tokens[1]
    assert tokens[0] and tokens[1]
    if len(lengths) >= 20:
        assert tokens[0] | tokens[1] == set(range(sum(lengths)))


@settings(max_examples=100, deadline=None)
@given(size=st.integers(1, 3000), seed=st.integers(-5, 2**70))
def test_a_permutation_has_every_index_once(size, seed):
    permutation = Permutation(size, seed)
    values = permutation(np.arange(size))
    assert sorted(values.tolist()) == list(range(size))
    assert permutation(np.array([size - 1])).tolist() == [values[-1]]


def test_the_permutation_is_the_same_everywhere_and_mixes():
    assert Permutation(10, 3)(np.arange(10)).tolist() == [2, 6, 4, 3, 0, 9, 8, 5, 1, 7]
    values = Permutation(10_000, 1)(np.arange(10_000))
    assert abs(np.corrcoef(values, np.arange(10_000))[0, 1]) < 0.05
    assert Permutation(10**12, 5)(np.array([10**12 - 1]))[0] < 10**12


def sample_list(lengths):
    return SampleList([{"input_ids": np.full(length, number)} for number, length in enumerate(lengths)])


def flat(lists):
    return list(itertools.chain.from_iterable(lists))


def numbers_of(step):
    return [int(sample["input_ids"][0]) for sample in step.samples[: len(step.samples) - step.num_fillers]]


@pytest.mark.parametrize("strategy", ["random", "sequential", "group_by_length"])
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_order_is_the_same_for_any_number_of_ranks(strategy, drop_last):
    data = sample_list(np.random.default_rng(1).integers(2, 30, 1303))
    orders = []
    for num_processes in (1, 2, 3, 8):
        loaders = [
            StepLoader(
                data,
                global_batch_size=24,
                num_processes=num_processes,
                process_index=rank,
                seed=7,
                strategy=strategy,
                drop_last=drop_last,
            )
            for rank in range(num_processes)
        ]
        assert {loader.steps_per_epoch for loader in loaders} == {54 if drop_last else 55}
        steps = range(2 * loaders[0].steps_per_epoch)
        orders.append([flat(numbers_of(loader.step(k)) for loader in loaders) for k in steps])
        sizes = {len(loader.step(k).samples) for loader in loaders for k in (0, 54)}
        assert sizes == {24 // num_processes}
    assert orders[0] == orders[1] == orders[2] == orders[3]
    epochs = [flat(orders[0][: len(orders[0]) // 2]), flat(orders[0][len(orders[0]) // 2 :])]
    for epoch in epochs:
        assert len(set(epoch)) == len(epoch) == (54 * 24 if drop_last else 1303)
    assert (epochs[0] == epochs[1]) == (strategy == "sequential")


def test_the_last_step_says_what_happens_to_it():
    data = sample_list([4] * 10)
    loader = StepLoader(data, global_batch_size=4, num_processes=2, process_index=1, seed=0)
    last = loader.step(2)
    assert (last.num_fillers, last.num_input_tokens, last.num_label_tokens, last.epoch) == (2, 0, 0, 1.0)
    assert [batch.num_label_tokens for batch in last.micro_batches(1)] == [0, 0]
    assert loader.describe().endswith("3 steps per epoch, order random; the last step has 2 samples and 2 zero-weight ones")
    dropping = StepLoader(data, global_batch_size=4, num_processes=2, process_index=1, seed=0, drop_last=True)
    assert dropping.describe().endswith("2 steps per epoch, order random; 2 samples of the last, short step are dropped in each epoch")


def test_resuming_in_the_middle_of_an_epoch_repeats_and_skips_nothing():
    data = sample_list([3] * 10)
    loader = StepLoader(data, global_batch_size=2, num_processes=1, process_index=0, seed=3)
    whole = [numbers_of(loader.step(k)) for k in range(5)]
    resumed = [numbers_of(step) for step in loader.prefetching(2, 3)]
    assert resumed == whole[2:]
    assert sorted(flat(whole[:2] + resumed)) == list(range(10))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_workers_change_nothing(num_workers):
    data = sample_list([3] * 23)
    options = {"global_batch_size": 4, "num_processes": 2, "process_index": 1, "seed": 5}
    expected = StepLoader(data, **options)
    loader = StepLoader(data, **options, num_workers=num_workers)
    steps = list(loader.prefetching(3, 7))
    assert [numbers_of(step) for step in steps] == [numbers_of(expected.step(k)) for k in range(3, 10)]
    assert [step.epoch for step in steps] == [(k + 1) / 6 for k in range(3, 10)]


class Failing:
    """Fails or dies on one sample."""

    lengths = np.full(8, 3)

    def __init__(self, die):
        self.die = die

    def __len__(self):
        return 8

    def __getitem__(self, index):
        import os

        if index == 5:
            if self.die:
                os._exit(1)
            raise OSError("disk gone")
        return make_sample(np.arange(3))


@pytest.mark.parametrize(("die", "message"), [(False, "failed: OSError: disk gone"), (True, "worker died: .*host memory")])
def test_a_worker_that_fails_gives_one_message_with_its_cause(die, message):
    loader = StepLoader(Failing(die), global_batch_size=2, num_processes=1, process_index=0, seed=0, strategy="sequential", num_workers=1)
    with pytest.raises(RuntimeError, match=message) as caught:
        list(loader.prefetching(0, 4))
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_worker_that_is_killed_does_not_interrupt_the_step_that_runs():
    data = sample_list([3] * 400)
    steps = StepLoader(data, global_batch_size=2, num_processes=1, process_index=0, seed=0, num_workers=1).prefetching(0, 200)
    next(steps)
    (worker,) = multiprocessing.active_children()
    os.kill(worker.pid, signal.SIGKILL)
    time.sleep(0.5)  # a step: a signal's handler would raise in here
    with pytest.raises(RuntimeError, match=r"worker died: .*host memory"):
        list(steps)


def test_steps_of_like_lengths():
    lengths = np.random.default_rng(2).integers(2, 1000, 4000)
    loader = StepLoader(sample_list(lengths), global_batch_size=8, num_processes=1, process_index=0, seed=1, strategy="group_by_length")
    spread = [np.ptp(lengths[loader.indices(k)]) for k in range(500)]
    assert np.mean(spread) < 30  # random steps: about 780
    longest = [lengths[loader.indices(k)].max() for k in range(50)]
    assert longest != sorted(longest, reverse=True)  # within a group, steps come in random order


def test_too_little_data_is_the_users_to_mend():
    with pytest.raises(UserError, match="3 training samples for 4 processes"):
        StepLoader(sample_list([3] * 3), global_batch_size=4, num_processes=4, process_index=0, seed=0)
    with pytest.raises(UserError, match="one optimizer step needs 4 samples, but there are 3"):
        StepLoader(sample_list([3] * 3), global_batch_size=4, num_processes=1, process_index=0, seed=0, drop_last=True)


def test_the_dry_run_takes_the_longest_samples():
    data = sample_list([5, 900, 12, 40, 880, 7])
    step = longest_step(data, 4)
    assert [len(sample["input_ids"]) for sample in step.samples] == [900, 880, 40, 12]
    assert tuple(step.micro_batches(2)[0].input_ids.shape) == (2, 900)
    more = longest_step(sample_list([5, 9]), 3)
    assert [len(sample["input_ids"]) for sample in more.samples] == [9, 5, 5]


@pytest.mark.parametrize("num_processes", [1, 2, 3, 8])
def test_evaluation_has_every_sample_once_and_equally_many_batches(num_processes):
    data = sample_list([3] * 13)
    ranks = [list(eval_batches(data, 2, num_processes, rank)) for rank in range(num_processes)]
    assert {len(batches) for batches in ranks} == {num_eval_batches(data, 2, num_processes)}
    seen = [
        int(row[0])
        for batches in ranks
        for batch in batches
        for row, labels in zip(batch.input_ids, batch.labels, strict=True)
        if labels.max() >= 0
    ]
    assert sorted(seen) == list(range(13))
    assert sum(batch.num_label_tokens for batches in ranks for batch in batches) == 13 * 2


def test_padding_never_hides_a_real_eos():
    eos, a, b = 0, 1, 2
    batch = collate([make_sample(np.array([a, b, eos])), make_sample(np.array([a, eos]))], pad_id=eos)
    assert batch.labels.tolist() == [[1, 2, 0], [1, 0, IGNORE]]
    assert batch.input_ids.tolist() == [[1, 2, 0], [1, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2], [0, 1, 0]]
    assert batch.document_ids.tolist() == [[0, 0, 0], [0, 0, 1]]
    assert (batch.num_label_tokens, batch.single_documents) == (3, True)


def test_micro_batches_are_padded_to_their_own_longest():
    data = sample_list([4, 9, 2, 2, 3])
    loader = StepLoader(data, global_batch_size=5, num_processes=1, process_index=0, seed=0, strategy="sequential")
    step = loader.step(0)
    assert [tuple(batch.input_ids.shape) for batch in step.micro_batches(2)] == [(2, 9), (2, 2), (1, 3)]
    assert [tuple(batch.input_ids.shape) for batch in step.micro_batches(3, multiple_of=8)] == [(3, 16), (2, 8)]
    assert [batch.document_ids is None for batch in step.micro_batches(2)] == [False, True, True]
    assert (step.longest, step.num_input_tokens, step.num_label_tokens) == (9, 20, 15)


def test_ones_own_rows():
    rows = [
        {"input_ids": [1, 2, 3, 9, 9], "attention_mask": [1, 1, 1, 0, 0]},
        {"input_ids": [4, 5], "labels": [IGNORE, 5], "document_ids": [0, 1], "position_ids": [0, 0]},
    ]
    data = SampleList(rows)
    assert data.lengths.tolist() == [3, 2]
    assert data[0]["labels"].tolist() == [1, 2, 3]
    assert data[1]["labels"].tolist() == [IGNORE, 5]
    assert data[1]["document_ids"].tolist() == [0, 1]
    with pytest.raises(UserError, match="row 0 has no input_ids, but text"):
        SampleList([{"text": "a"}])
    with pytest.raises(UserError, match="different lengths"):
        SampleList([{"input_ids": [1, 2], "labels": [1]}])
