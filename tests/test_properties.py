"""What must hold for any input: batch sizes, packing, the order of samples, the user's little languages, logs, ladders.

The examples are the same in every run; HYPOTHESIS_PROFILE=long tries many others (see tests/conftest.py).
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from harness.args import Arguments
from harness.batches import IGNORE, make_sample
from harness.check_launch import read_hostfile
from harness.deepspeed_json import BATCH_KEYS, solve_batch
from harness.device_map_text import parse_max_memory, parse_ranges, ranges_text
from harness.findings import UserError
from harness.ladder import MemorySettings, Rung, SeenMemory, default_ladder, is_lower, next_settings, parse_ladder, unknown_rungs
from harness.metrics import StepMetrics, format_console, from_json_line, parse_console, to_json_line
from harness.parse_log import parse_text
from harness.partition import Device, parse_size
from harness.step_loader import StepLoader
from harness.templates import resolve_deepspeed_config
from tests.test_data_packing import dataset, firsts_of, predicted, write_store

COUNTS = st.integers(1, 64)
MAYBE_COUNTS = st.none() | COUNTS


# ---- batch arithmetic


@given(st.integers(1, 512), MAYBE_COUNTS, MAYBE_COUNTS, st.integers(1, 32), st.integers(1, 16))
def test_batch_sizes_multiply_to_the_total_or_say_what_would(
    total: int, micro: int | None, accumulation: int | None, processes: int, wanted: int
) -> None:
    size, steps, finding = solve_batch(total, micro, accumulation, processes, wanted)
    if finding is None:
        assert size * steps * processes == total
        assert micro in (None, size) and accumulation in (None, steps)
        assert micro is not None or accumulation is not None or size <= wanted
        return
    assert str(total) in finding.message
    for offered in finding.fix.removeprefix("set ").split(" or "):
        key, _, number = offered.rpartition(": ") if ": " in offered else ("train_batch_size", "", offered)
        changed = {"train_batch_size": total, BATCH_KEYS[1]: micro, BATCH_KEYS[2]: accumulation} | {key: int(number)}
        assert solve_batch(*(changed[name] for name in BATCH_KEYS), processes, wanted)[2] is None  # type: ignore[arg-type]


@given(st.fixed_dictionaries({}, optional={key: COUNTS | st.just("auto") for key in BATCH_KEYS}), st.integers(1, 16))
def test_a_templates_batch_keys_are_completed_or_refused(keys: dict[str, Any], processes: int) -> None:
    args = Arguments()
    args.train.precision = "bf16"
    config, findings = resolve_deepspeed_config(keys, args, processes, total_steps=10, hidden_size=64, precision="bf16")
    if not findings:
        total, micro, accumulation = (config[key] for key in BATCH_KEYS)
        assert total == micro * accumulation * processes
        assert all(config[key] == value for key, value in keys.items() if value != "auto")
    assert all(finding.severity == "error" and finding.fix for finding in findings)


# ---- packing (more of it in tests/test_data_packing.py)


@given(
    st.lists(st.integers(2, 40), min_size=1, max_size=20),
    st.integers(2, 24),
    st.sampled_from(["concat", "best_fit", "none"]),
    st.sampled_from(["split", "truncate", "drop"]),
)
def test_packed_tokens_come_once_and_see_only_their_document(lengths: list[int], block: int, packing: str, overlong: str) -> None:
    assume(overlong == "split" or packing != "concat")
    assume(overlong != "drop" or min(lengths) <= block)
    with tempfile.TemporaryDirectory() as folder:
        data = dataset(write_store(Path(folder) / "s", lengths), block, packing, overlong)
        samples = [data[index] for index in range(len(data))]
        cut = [
            min(length, block) if overlong == "truncate" else 0 if overlong == "drop" and length > block else length for length in lengths
        ]
        starts = np.cumsum(lengths) - np.array(lengths)
        kept = {token for start, length in zip(starts.tolist(), cut, strict=True) for token in range(start, start + length)}
        counted = collections.Counter(token for sample in samples for token in predicted(sample))
        assert counted == collections.Counter(kept - firsts_of(lengths))
        document_of = np.repeat(np.arange(len(lengths)), lengths)
        for sample in samples:
            ids, documents = sample["input_ids"], sample["document_ids"]
            assert len(ids) <= block
            # Two tokens are of one document of the sample only if they are of one document; positions count from its beginning here.
            for number in range(int(documents[-1]) + 1):
                own = ids[documents == number]
                assert len(set(document_of[own].tolist())) == 1
                assert sample["position_ids"][documents == number].tolist() == list(range(len(own)))
            labelled = sample["labels"] != IGNORE
            assert (sample["labels"][labelled] == ids[labelled]).all() and not labelled[0]


# ---- the order of samples


class Lengths:
    """A dataset as the order of a loader sees it."""

    def __init__(self, size: int) -> None:
        self.lengths = 2 + np.arange(size) % 7

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Any:
        return make_sample(np.arange(int(self.lengths[index])))


def loader(size: int, batch: int, ranks: int, rank: int, **options: Any) -> StepLoader:
    return StepLoader(Lengths(size), global_batch_size=batch, num_processes=ranks, process_index=rank, seed=5, **options)


def of_steps(size: int, batch: int, ranks: int, steps: range, state: dict[str, Any] | None = None, **options: Any) -> list[list[int]]:
    loaders = [loader(size, batch, ranks, rank, **options) for rank in range(ranks)]
    for each in loaders:
        each.load_state_dict(state or {})
    return [[int(index) for each in loaders for index in each.indices(step)] for step in steps]


@given(
    st.integers(1, 120),
    st.lists(st.sampled_from([1, 2, 3, 4, 6, 12]), min_size=1, max_size=4),
    st.integers(1, 3),
    st.sampled_from(["random", "sequential", "group_by_length"]),
    st.booleans(),
    st.data(),
)
def test_each_sample_once_an_epoch_for_any_ranks_and_stops(
    size: int, ranks: list[int], epochs: int, strategy: str, drop_last: bool, data: Any
) -> None:
    """A run of several lives, each on another number of ranks and stopped anywhere."""
    batch = 12
    assume(size >= max(ranks) and (size >= batch or not drop_last))
    options = {"strategy": strategy, "drop_last": drop_last}
    per_epoch = loader(size, batch, 1, 0, **options).steps_per_epoch
    whole = of_steps(size, batch, 1, range(epochs * per_epoch), **options)
    stops = sorted(data.draw(st.lists(st.integers(0, len(whole)), min_size=len(ranks) - 1, max_size=len(ranks) - 1)))
    lives = itertools.pairwise([0, *stops, len(whole)])
    pieced = [
        step
        for count, (first, last) in zip(ranks, lives, strict=True)
        for step in of_steps(size, batch, count, range(first, last), **options)
    ]
    assert pieced == whole
    for epoch in range(epochs):
        seen = [index for step in whole[epoch * per_epoch : (epoch + 1) * per_epoch] for index in step]
        assert len(seen) == len(set(seen)) == (per_epoch * batch if drop_last else size)


@given(st.integers(12, 90), st.lists(st.tuples(st.integers(1, 12), st.integers(0, 9)), min_size=1, max_size=4), st.booleans())
@example(48, [(8, 3), (16, 2)], False)
@example(20, [(7, 3), (5, 0), (3, 9)], False)
def test_another_batch_goes_on_with_the_samples_that_are_left(size: int, lives: list[tuple[int, int]], drop_last: bool) -> None:
    """Each life has another number of samples per step (--force_resume); within an epoch no sample comes twice, and none is left out."""
    step, state, seen = 0, None, collections.Counter[tuple[int, int]]()
    old = None
    for batch, num_steps in lives:
        assume(batch <= size)
        current = loader(size, batch, 1, 0, drop_last=drop_last)
        if old is not None and old != batch:
            current.go_on(step, old, state or {})
        else:
            current.load_state_dict(state or {})
        for index in range(step, step + num_steps):
            epoch, _ = current._place(index, batch, current.begin)
            seen.update((epoch, int(number)) for number in current.indices(index))
        step, state, old = step + num_steps, current.state_dict(step + num_steps), batch
    # To the end of the epoch after the next.
    last = current.num_steps(current._place(step, batch, current.begin)[0] + 2)
    for index in range(step, last):
        epoch, _ = current._place(index, batch, current.begin)
        seen.update((epoch, int(number)) for number in current.indices(index))
    assert set(seen.values()) <= {1}
    if not drop_last and seen:
        epochs = max(epoch for epoch, _ in seen) + 1
        assert len(seen) == epochs * size
        assert current.step(last - 1).epoch == epochs


# ---- little languages


SIZES = st.tuples(st.integers(1, 999), st.sampled_from(["B", "KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"]))
DEVICES = st.integers(0, 15) | st.sampled_from(["cpu", "disk"])


@given(st.dictionaries(DEVICES, SIZES, min_size=1, max_size=6), st.sampled_from([",", ", ", " ,"]), st.booleans())
def test_limits_of_memory_are_read_as_written(limits: dict[Device, tuple[int, str]], comma: str, cuda: bool) -> None:
    def name(device: Device) -> str:
        return f"cuda:{device}" if cuda and isinstance(device, int) else str(device)

    text = comma.join(f"{name(device)}:{number}{unit}" for device, (number, unit) in limits.items())
    expected = {device: parse_size(f"{number}{unit}") for device, (number, unit) in limits.items()}
    assert parse_max_memory(text, num_gpus=16) == expected
    number, unit = next(iter(limits.values()))
    assert parse_max_memory(f"{number} {unit}", num_gpus=3) == dict.fromkeys(range(3), parse_size(f"{number}{unit}"))


@given(st.text(st.sampled_from("0123456789.,:-+eE cudapisk GiBMKT\u0663\u00b2"), max_size=24))
@example("9" * 400 + "GB")
def test_any_text_is_a_limit_of_memory_or_a_users_mistake(text: str) -> None:
    try:
        limits = parse_max_memory(text, num_gpus=4)
    except UserError as error:
        assert all(finding.key == "--max_memory" and finding.message for finding in error.findings)
    else:
        assert all(isinstance(size, int) and size >= 0 for size in limits.values())


@given(st.sets(st.integers(0, 200), min_size=1))
def test_ranges_are_read_as_written(numbers: set[int]) -> None:
    assert parse_ranges(ranges_text(sorted(numbers)), 201, "--layers") == sorted(numbers)


HOSTS = st.from_regex(r"[a-z][a-z0-9.-]{0,12}", fullmatch=True)


@given(
    st.dictionaries(HOSTS, st.integers(1, 64), min_size=1, max_size=6), st.sampled_from(["\n", "\r\n", "\n\n", "\n# c\n"]), st.booleans()
)
def test_a_hostfile_is_read_as_written(hosts: dict[str, int], ending: str, commented: bool) -> None:
    with tempfile.NamedTemporaryFile("w", newline="") as file:
        file.write("".join(f"  {host}\tslots={slots}{' # c' * commented}{ending}" for host, slots in hosts.items()))
        file.flush()
        assert read_hostfile(file.name) == hosts


# ---- logs


FINITE = st.floats(allow_nan=False, allow_infinity=False, width=32)
NAMES = st.from_regex(r"[a-z][a-z_]{0,9}", fullmatch=True).filter(lambda name: name not in StepMetrics.__dataclass_fields__)
NOT_EXTRA = {
    "kind",
    "time_s",
    "nonfinite",
    "event",
    "superseded",
    "life_began_s",
    "lr",
    "tokens",
    "label_tokens",
    "micro_batch",
    "accumulation",
}
ROWS = st.builds(
    StepMetrics,
    step=st.integers(1, 10**9),
    loss=st.floats(),
    epoch=st.none() | FINITE,
    grad_norm=st.none() | st.floats(),
    learning_rate=st.none() | FINITE,
    num_input_tokens=st.none() | st.integers(0, 10**15),
    micro_batch_size=st.none() | st.integers(1, 64),
    num_skipped_steps=st.none() | st.integers(0, 9),
    extra=st.dictionaries(
        NAMES.filter(lambda name: name not in NOT_EXTRA and name != "skipped"), FINITE | st.text(max_size=12), max_size=3
    ),
)


def equal(first: Any, second: Any, relative: float) -> bool:
    if isinstance(first, float) or isinstance(second, float):
        return bool(np.isclose(first, second, rtol=relative, atol=0, equal_nan=True)) or first == second
    return bool(first == second)


@given(ROWS)
def test_a_row_of_metrics_is_read_back(row: StepMetrics) -> None:
    """From its JSON line exactly, from its console line to six digits, there also between other programs' lines."""
    values = row.to_row()
    again = from_json_line(to_json_line(values))
    assert again.keys() == values.keys() and all(equal(again[name], value, 0.0) for name, value in values.items())
    line = format_console(row)
    printed = parse_console(line)
    assert printed is not None and printed.pop("kind") == "train"
    assert printed.keys() == values.keys() and all(equal(printed[name], value, 1e-5) for name, value in values.items())
    (found,) = parse_text(f"[INFO] something else\n2031-02-03 04:05:06 {line}\n\r 5%|#    | 5/100 [00:01<00:19]\n").records
    assert found["step"] == row.step and equal(found["loss"], row.loss, 1e-5)


@given(st.lists(st.tuples(FINITE, FINITE), min_size=1, max_size=5), st.sampled_from(["\n", "\r\n"]))
def test_dictionaries_of_the_trainer_are_read_back(pairs: list[tuple[float, float]], ending: str) -> None:
    rows = [{"loss": loss, "learning_rate": rate, "epoch": float(number)} for number, (loss, rate) in enumerate(pairs, start=1)]
    run = parse_text("".join(f"{row}{ending}" for row in rows))
    assert [{name: record[name] for name in rows[0]} for record in run.records] == rows


# ---- ladders


SETTINGS = st.builds(
    MemorySettings,
    micro_batch_size=st.integers(1, 64),
    activation_checkpointing=st.sampled_from(["none", "selective", "full"]),
    loss_chunk_size=st.sampled_from([0, 128, 1024]),
    activation_offload=st.booleans(),
    reshard_after_forward=st.booleans(),
    reduce_bucket_size=st.none() | st.integers(1, 10**9),
    max_live_parameters=st.none() | st.integers(1, 10**9),
    optimizer_offload=st.sampled_from([0.0, 0.5, 1.0]),
    param_offload=st.sampled_from(["none", "cpu", "nvme"]),
    in_flight_micro_batches=st.integers(0, 16),
    optimizer_bf16=st.booleans(),
)
WORDS = st.sampled_from(
    [
        "micro_batch",
        "gradient_checkpointing",
        "activation_checkpointing=selective",
        "activation_offload",
        "reshard_after_forward",
        "optimizer_bf16",
        "optimizer_offload",
        "optimizer_offload=0.5",
        "param_offload",
    ]
)
NUMBERED = st.tuples(
    st.sampled_from(["micro_batch", "loss_chunk_size", "reduce_bucket_size", "stage3_max_live_parameters", "in_flight_micro_batches"]),
    st.integers(-5, 10**6) | st.sampled_from(["5e8", "1e400", "nan", "inf", "-1e9", "", "x", "1.5"]),
).map(lambda pair: f"{pair[0]}={pair[1]}")


@given(SETTINGS, st.sampled_from([1, 128, 4096, 10**6]))
def test_the_default_ladder_goes_down_and_ends(start: MemorySettings, block: int) -> None:
    offloads = [{"optimizer_offload": 1.0}, {"param_offload": "cpu"}]
    check_ladder(default_ladder(start, block_size=block, offloads=offloads), start)


@given(SETTINGS, st.lists(WORDS | NUMBERED, max_size=6))
def test_a_ladder_of_ones_own_goes_down_or_is_refused(start: MemorySettings, words: list[str]) -> None:
    try:
        ladder = parse_ladder(words, start)
    except UserError as error:
        assert all(finding.key == "--oom_ladder" for finding in error.findings)
        return
    assert unknown_rungs(words) == []
    assert len(ladder) == len(words) + 1
    check_ladder(ladder, start)


def check_ladder(ladder: list[MemorySettings], start: MemorySettings) -> None:
    assert ladder[0] == start
    assert all(is_lower(below, above) and not is_lower(above, below) for above, below in itertools.pairwise(ladder))
    current: MemorySettings | None = start
    for _ in range(len(ladder)):
        assert current is not None
        following = next_settings(ladder, current)
        assert following is None or is_lower(following, current)
        current = following
        if current is None:
            break
    assert current is None


NEEDS = st.integers(1, 10**12).map(float)


@given(st.lists(st.tuples(SETTINGS, NEEDS), min_size=1, max_size=8, unique_by=lambda pair: pair[0]), NEEDS, st.none() | NEEDS)
def test_a_computed_ladder_needs_less_each_time_and_ends(
    rungs: list[tuple[MemorySettings, float]], limit: float, seen: float | None
) -> None:
    ladder = [Rung(settings, need) for settings, need in rungs]
    needs = dict(rungs)
    current, taken = ladder[0].settings, 0
    while (following := next_settings(ladder, current, SeenMemory(limit, seen, seen))) is not None:
        assert needs[following] < needs[current]
        current, taken = following, taken + 1
        assert taken < len(ladder)


def test_what_is_tried_does_not_depend_on_luck() -> None:
    """The profile of the tests, unless another is asked for."""
    from hypothesis import settings

    with contextlib.suppress(KeyError):
        import os

        pytest.skip(f"HYPOTHESIS_PROFILE={os.environ['HYPOTHESIS_PROFILE']}")
    assert settings().derandomize and settings().max_examples <= 100
