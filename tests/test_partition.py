"""Sizes, fair shares, contiguous splits and balance figures: pure arithmetic, so every expectation is exact."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from harness.device_map_text import check_device_map_text, parse_max_memory, parse_ranges, ranges_text, read_device_map, refuse_in_launch
from harness.findings import UserError
from harness.partition import (
    analyze_device_balance,
    fair_shares,
    format_gib,
    loads_of,
    normal_device,
    parse_size,
    pipeline_speedup,
    split_contiguous,
    split_for_time,
)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("40GB", 40 * 10**9), ("40GiB", 40 * 2**30), ("1.5gb", 1_500_000_000), ("512MB", 512_000_000), ("1024", 1024), (" 2 TB ", 2 * 10**12)],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GB", "40XB", "-1GB", "4 0GB", "1e3"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


def test_max_memory() -> None:
    assert parse_max_memory("40GB", 2) == {0: 40 * 10**9, 1: 40 * 10**9}
    assert parse_max_memory("0:60GB,1:40GB,cpu:200GB", 4) == {0: 60 * 10**9, 1: 40 * 10**9, "cpu": 200 * 10**9}
    assert parse_max_memory("cuda:1:40GiB, disk:1TB", 2) == {1: 40 * 2**30, "disk": 10**12}


def test_max_memory_reports_every_mistake_at_once() -> None:
    with pytest.raises(UserError) as caught:
        parse_max_memory("0:60XB,5:1GB,tpu:1GB,1:1GB,1:2GB,3GB", 2)
    messages = [finding.message for finding in caught.value.findings]
    assert messages == [
        "'0:60XB' is not a size",
        "'5:1GB' names card 5, but there are 2",
        "'tpu:1GB' names neither a card's number nor cpu or disk",
        "'1:2GB' names 1 twice",
        "'3GB' has no device before it",
    ]


def test_ranges() -> None:
    assert parse_ranges("0,5,10-12, 5", 20, "--layers") == [0, 5, 10, 11, 12]
    assert ranges_text([3, 0, 1, 2, 7, 9, 10]) == "0-3,7,9-10"
    assert ranges_text([]) == ""
    with pytest.raises(UserError) as caught:
        parse_ranges("x,9-3,20", 20, "--layers")
    assert len(caught.value.findings) == 3
    assert caught.value.findings[2].message == "'20': the highest is 19"


def test_shares_are_equal_until_a_card_is_too_small_and_proportional_when_all_are_tight() -> None:
    assert fair_shares(30, [100, 100, 100]) == [10, 10, 10]
    assert fair_shares(36, [24, 24, 12]) == pytest.approx([13.2, 13.2, 9.6])  # the small card is filled to 80 %
    assert fair_shares(54, [24, 24, 12]) == pytest.approx([21.6, 21.6, 10.8])  # all to 90 %
    assert fair_shares(5, []) == []
    assert sum(fair_shares(17.5, [3, 80, 9, 41])) == pytest.approx(17.5)


def test_a_split_is_the_best_of_all_contiguous_ones() -> None:
    generator = random.Random(0)
    for _ in range(60):
        sizes = [generator.randint(1, 20) for _ in range(generator.randint(1, 8))]
        limits = [float(generator.randint(8, 60)) for _ in range(generator.randint(1, 3))]
        shares = fair_shares(sum(sizes), limits)

        def fullest(positions: tuple[int, ...], sizes: list[int] = sizes, shares: list[float] = shares) -> float:
            return max(sum(s for s, p in zip(sizes, positions, strict=True) if p == d) / shares[d] for d in range(len(shares)))

        def fits(positions: tuple[int, ...], sizes: list[int] = sizes, limits: list[float] = limits) -> bool:
            loads = [sum(s for s, p in zip(sizes, positions, strict=True) if p == d) for d in range(len(limits))]
            return all(load <= limit for load, limit in zip(loads, limits, strict=True))

        ordered = (
            positions for positions in itertools.product(range(len(limits)), repeat=len(sizes)) if list(positions) == sorted(positions)
        )
        possible = [positions for positions in ordered if fits(positions)]
        found = split_contiguous(sizes, shares, limits)
        if not possible:
            assert found is None
        else:
            assert found is not None and fits(tuple(found)) and found == sorted(found)
            assert fullest(tuple(found)) == pytest.approx(min(map(fullest, possible)))


def test_a_split_for_time_is_the_fastest_that_fits_and_of_those_the_most_even() -> None:
    generator = random.Random(1)
    for _ in range(60):
        sizes = [generator.randint(1, 20) for _ in range(generator.randint(2, 8))]
        work = [generator.randint(0, 5) for _ in sizes]
        limits = [float(generator.randint(10, 70)) for _ in range(generator.randint(2, 3))]
        shares = fair_shares(sum(sizes), limits)

        def rank(positions: tuple[int, ...], sizes: Any = sizes, work: Any = work, limits: Any = limits, shares: Any = shares) -> Any:
            loads, times = loads_of(sizes, positions, len(limits)), loads_of(work, positions, len(limits))
            if any(load > limit for load, limit in zip(loads, limits, strict=True)):
                return (float("inf"), 0.0)
            return (max(times), max(load / share for load, share in zip(loads, shares, strict=True)))

        ordered = (list(one) for one in itertools.combinations_with_replacement(range(len(limits)), len(sizes)))
        best = min(rank(tuple(positions)) for positions in ordered)
        found = split_for_time(sizes, work, shares, limits)
        assert (found is None) == (best[0] == float("inf"))
        if found is not None:
            assert found == sorted(found) and rank(tuple(found)) == pytest.approx(best)


def test_a_device_without_a_share_gets_nothing() -> None:
    assert split_contiguous([5, 5], [5, 0, 5], [100, 100, 100]) == [0, 2]
    assert split_contiguous([5, 50], [20, 20], [30, 30]) is None


def _map(*counts: int) -> dict[str, int]:
    return {f"part{device}.{number}": device for device, count in enumerate(counts) for number in range(count)}


def test_balance_by_count() -> None:
    report = analyze_device_balance(_map(9, 13, 14))
    assert report.imbalance_ratio == 0.25  # the ideal is 12, the largest deviation 3
    assert report.balance_score == pytest.approx(1 / (1 + (9 + 1 + 4) / 3))
    assert len(report.devices[2].components) == 14
    assert round(analyze_device_balance(_map(12, 11, 12)).imbalance_ratio, 2) == 0.06
    assert analyze_device_balance(_map(4, 4)).balance_score == 1.0


def test_balance_by_bytes_and_the_cards_left_empty() -> None:
    report = analyze_device_balance({"a": 0, "b": "cuda:1", "c": "cpu"}, {"a": 30, "b": 10, "c": 99})
    assert report.imbalance_ratio == 0.5 and report.imbalance_ratio_by_count == 0.0
    assert report.devices["cpu"].num_bytes == 99 and report.devices[0].ideal_bytes == 20
    idle = analyze_device_balance({"a": 0}, {"a": 30}, {0: 100, 1: 100, 2: 100})
    assert idle.imbalance_ratio == 2.0 and idle.devices[2].components == ()


def test_device_spellings() -> None:
    assert [normal_device(raw) for raw in (1, "1", "cuda:1", "cuda", "cpu", "disk")] == [1, 1, 1, 0, "cpu", "disk"]


def test_device_map_texts() -> None:
    for good in ("auto", "balanced", "balanced_low_0", "sequential", "dynamic", "cpu", "cuda:3", '{"model": 0, "lm_head": "cpu"}'):
        assert check_device_map_text(good) == []
    assert check_device_map_text("balancd")[0].fix == "did you mean balanced?"
    assert "line" not in check_device_map_text('{"model": 0,}')[0].message and "JSON" in check_device_map_text('{"model": 0,}')[0].message
    assert read_device_map('{"model": 0}') == {"model": 0}
    with pytest.raises(UserError, match="True is not a device"):
        read_device_map('{"model": true}')


def test_device_maps_are_for_one_process() -> None:
    assert refuse_in_launch("balanced", 1) == [] and refuse_in_launch(None, 8) == []
    (finding,) = refuse_in_launch("balanced", 2)
    assert finding.message == "balanced is for one process, but num_processes is 2" and finding.key == "--device_map"


def test_pipeline_speedup() -> None:
    assert pipeline_speedup([1, 1], 8) == pytest.approx(16 / 9)
    assert pipeline_speedup([1, 1, 1, 1], 8) == pytest.approx(32 / 11)
    assert pipeline_speedup([3, 0], 8) == 1.0
    assert pipeline_speedup([2, 1], 1) == 1.0


def test_gib() -> None:
    assert format_gib(3 * 2**30) == "3.00 GiB" and format_gib(10368) == "10.1 KiB" and format_gib(0) == "0.00 GiB"
