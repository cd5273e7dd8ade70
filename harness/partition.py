"""Arithmetic of placing a model's parts on unequal devices: sizes as text, fair shares, contiguous splits, balance figures.

Pure code, no torch: the same functions serve a run on four cards and a plan made on a laptop.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Union

from harness.findings import is_count

Device = Union[int, str]
"""A GPU's index, "cpu" or "disk": the keys that accelerate's `max_memory` and the values that its device maps have."""

OFF_CARD: tuple[str, ...] = ("cpu", "disk")

_UNITS: dict[str, int] = {"": 1, "B": 1}
_UNITS |= {prefix + "B": 1000**power for power, prefix in enumerate("KMGT", start=1)}
_UNITS |= {prefix + "IB": 1024**power for power, prefix in enumerate("KMGT", start=1)}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")

GIB = 1024**3


def parse_size(text: str) -> int:
    """Bytes of a size such as "40GB" (10^9), "40GiB" (2^30) or "1024" (bytes), as accelerate reads them.

    Raises:
        ValueError: not a size.
    """
    match = _SIZE.fullmatch(text)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{text!r} is not a size; write for example 40GB or 40GiB")
    size = float(match[1]) * _UNITS[match[2].upper()]
    if not math.isfinite(size):
        raise ValueError(f"{text!r} is more than there can be")
    return int(size)


def size_problem(text: str) -> str:
    """Why a text is no size of memory; empty where it is one."""
    digits = text.strip().removeprefix("-")
    if digits.replace(".", "", 1).isdigit():
        return f"{text} has no unit"
    try:
        size = parse_size(digits) * (1 if digits == text.strip() else -1)
    except ValueError:
        return f"{text!r} is not a size"
    return "" if size > 0 else f"must be positive, not {text}"


def format_gib(num_bytes: float) -> str:
    """Bytes as GiB for people, with enough digits for a test model's few kilobytes to show."""
    gib = num_bytes / GIB
    return f"{gib:.2f} GiB" if gib >= 0.01 or num_bytes == 0 else f"{num_bytes / 1024:.1f} KiB"


@dataclasses.dataclass(frozen=True)
class Unit:
    """Modules that must sit on one device: a block, a leaf module, or several modules that share weights.

    Attributes:
        names: the modules' names, the one that runs first in front; the keys of a device map.
        weight_bytes: parameters and buffers, shared ones counted once.
        training_bytes: gradients and optimizer state of what trains.
        activation_bytes: what the unit keeps between forward and backward, or its peak use in between if that is all.
        is_block: one of the model's repeated blocks.
        work: weights that one token is multiplied with on its way forward, a relative time; of blocks and the head.
    """

    names: tuple[str, ...]
    weight_bytes: int
    training_bytes: int = 0
    activation_bytes: int = 0
    is_block: bool = False
    work: float = 0.0

    @property
    def num_bytes(self) -> int:
        return self.weight_bytes + self.training_bytes + self.activation_bytes


def fair_shares(total: float, capacities: Sequence[float], fill: float = 0.8) -> list[float]:
    """How much of `total` each device should carry.

    Equal shares, because the cards of a pipeline that do equal work are busy equally long. A card too small for that is
    filled to `fill` of its capacity and the others take the rest; when the whole is so large that every card would
    be filled further than that, all are filled to the same degree, which leaves none of them nearer to its limit.

    Args:
        capacities: bytes of each device.
        fill: share of a card that may be used before the others take over.
    """
    room = sum(capacities)
    if room <= 0:
        return [0.0] * len(capacities)
    degree = max(fill, total / room)
    limits = [degree * capacity for capacity in capacities]
    shares = [0.0] * len(limits)
    rest = total
    by_limit = sorted(range(len(limits)), key=lambda index: limits[index])
    for position, index in enumerate(by_limit):
        shares[index] = min(limits[index], rest / (len(limits) - position))
        rest -= shares[index]
    return shares


def split_contiguous(
    sizes: Sequence[float], shares: Sequence[float], limits: Sequence[float], also: tuple[Sequence[float], Sequence[float]] | None = None
) -> list[int] | None:
    """Cuts a sequence of parts into one run per device so that the fullest device, against its fair share, is least full.

    Dynamic programme over (parts placed, devices used), exact: O(parts^2 x devices), a few milliseconds for a hundred
    blocks. Among equally full splits the one with the smaller sum of squares wins, so that the rest is even as well.

    Args:
        sizes: bytes of each part, in the order of execution.
        shares: the fair share of each device; a device with share 0 gets nothing.
        limits: bytes that a device can hold.
        also: (another size of each part, what a device can hold of it).

    Returns:
        For each part its device's position, never decreasing; None when the parts do not fit in this order.
    """
    starts = [0.0, *itertools.accumulate(sizes)]
    num_parts = len(sizes)
    others, other_limits = also if also is not None else ([0.0] * num_parts, [0.0] * len(limits))
    other_starts = [0.0, *itertools.accumulate(others)]
    # best[n]: (fullest ratio, sum of squared ratios) of placing the first n parts on the devices so far.
    best: list[tuple[float, float] | None] = [(0.0, 0.0)] + [None] * num_parts
    choices: list[list[int]] = []
    for share, limit, other_limit in zip(shares, limits, other_limits, strict=True):
        following: list[tuple[float, float] | None] = list(best)
        choice = list(range(num_parts + 1))
        for end in range(1, num_parts + 1) if share > 0 else ():
            for begin in range(end - 1, -1, -1):
                load = starts[end] - starts[begin]
                if load > limit or other_starts[end] - other_starts[begin] > other_limit:
                    break
                before = best[begin]
                if before is None:
                    continue
                ratio = load / share
                candidate = (max(before[0], ratio), before[1] + ratio * ratio)
                current = following[end]
                if current is None or candidate < current:
                    following[end], choice[end] = candidate, begin
        best = following
        choices.append(choice)
    if best[num_parts] is None:
        return None
    positions = [0] * num_parts
    end = num_parts
    for device in range(len(choices) - 1, -1, -1):
        begin = choices[device][end]
        positions[begin:end] = [device] * (end - begin)
        end = begin
    return positions


def loads_of(sizes: Sequence[float], positions: Sequence[int], num_devices: int) -> list[float]:
    """What each device has of the parts' sizes."""
    loads = [0.0] * num_devices
    for size, position in zip(sizes, positions, strict=True):
        loads[position] += size
    return loads


def split_for_time(sizes: Sequence[float], work: Sequence[float], shares: Sequence[float], limits: Sequence[float]) -> list[int] | None:
    """The contiguous split whose busiest device has least work; among those the most even one by size. Exact, as `split_contiguous`.

    Args:
        work: relative time of each part; other arguments as in `split_contiguous`.
    """
    evenly = [1.0 if share > 0 else 0.0 for share in shares]
    fastest = split_contiguous(work, evenly, [math.inf] * len(limits), also=(sizes, limits))
    if fastest is None:
        return None
    most = max(loads_of(work, fastest, len(limits))) * (1 + 1e-9)
    return split_contiguous(sizes, shares, limits, also=(work, [most] * len(limits)))


@dataclasses.dataclass(frozen=True)
class DeviceShare:
    """What one device holds under a map."""

    components: tuple[str, ...]
    num_bytes: int
    ideal_bytes: float


@dataclasses.dataclass(frozen=True)
class BalanceReport:
    """How evenly a map loads the cards; "cpu" and "disk" are listed but do not enter the ratios.

    Attributes:
        devices: what each device holds.
        imbalance_ratio: largest relative deviation from the ideal share, by bytes where bytes are known, else by count.
        imbalance_ratio_by_count: the same by number of components; the ideal is an equal number.
        balance_score: 1 / (1 + variance of the number of components), 1 for equal numbers.
    """

    devices: dict[Device, DeviceShare]
    imbalance_ratio: float
    imbalance_ratio_by_count: float
    balance_score: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "devices": {
                str(device): {"components": list(share.components), "num_bytes": share.num_bytes, "ideal_bytes": round(share.ideal_bytes)}
                for device, share in self.devices.items()
            },
            "imbalance_ratio": round(self.imbalance_ratio, 4),
            "imbalance_ratio_by_count": round(self.imbalance_ratio_by_count, 4),
            "balance_score": round(self.balance_score, 4),
        }


def _largest_deviation(values: Sequence[float], ideals: Sequence[float]) -> float:
    pairs = [(value, ideal) for value, ideal in zip(values, ideals, strict=True) if ideal > 0]
    return max((abs(value - ideal) / ideal for value, ideal in pairs), default=0.0)


def analyze_device_balance(
    device_map: Mapping[str, Any],
    component_bytes: Mapping[str, int] | None = None,
    capacities: Mapping[Device, float] | None = None,
) -> BalanceReport:
    """Measures how evenly a device map loads the cards.

    Three cards with 9, 13 and 14 components have a ratio of 0.25 by count: the ideal is 12, the largest deviation 3.

    Args:
        device_map: device of each component; an index, "cuda:1", a torch.device, "cpu" or "disk".
        component_bytes: bytes of each component. Without it everything is by count.
        capacities: bytes of each card that could be used: the ideal shares follow them (`fair_shares`), and a card that
            the map leaves empty counts as empty. Without it the ideal is an equal share for each card of the map.
    """
    held: dict[Device, list[str]] = {}
    for name, raw in device_map.items():
        held.setdefault(normal_device(raw), []).append(name)
    for device in capacities or ():
        if device not in OFF_CARD:
            held.setdefault(device, [])
    sizes = component_bytes or {}
    loads = {device: sum(sizes.get(name, 0) for name in names) for device, names in held.items()}
    cards = sorted((device for device in held if device not in OFF_CARD), key=str)
    if not cards:  # everything on the host: one device, balanced by definition
        cards = list(held)[:1]
    total = float(sum(loads[card] for card in cards))
    if capacities is None:
        shares = [total / len(cards)] * len(cards) if cards else []
    else:
        shares = fair_shares(total, [float(capacities.get(card, 0)) for card in cards])
    ideals = dict(zip(cards, shares, strict=True))
    counts = [float(len(held[card])) for card in cards]
    mean = sum(counts) / len(counts) if counts else 0.0
    by_count = _largest_deviation(counts, [mean] * len(counts))
    variance = sum((count - mean) ** 2 for count in counts) / len(counts) if counts else 0.0
    by_bytes = _largest_deviation([loads[card] for card in cards], shares)
    ordered = sorted(held, key=lambda device: (isinstance(device, str), str(device).zfill(8)))
    return BalanceReport(
        devices={device: DeviceShare(tuple(held[device]), loads[device], ideals.get(device, 0.0)) for device in ordered},
        imbalance_ratio=by_bytes if component_bytes else by_count,
        imbalance_ratio_by_count=by_count,
        balance_score=1.0 / (1.0 + variance),
    )


def normal_device(raw: Any) -> Device:
    """One spelling for a device: 1 for 1, "1", "cuda:1" and torch.device("cuda", 1); "cpu" and "disk" as they are."""
    text = str(raw)
    index = text.removeprefix("cuda:")
    if is_count(index):
        return int(index)
    return 0 if text == "cuda" else text


def num_tasks_bound(num_micro_batches: int, depth: int) -> int:
    """In-flight depth that is in force: 0 means all micro-batches, and more than there are is the same."""
    return num_micro_batches if depth <= 0 else min(depth, num_micro_batches)


def pipeline_speedup(loads: Sequence[float], num_micro_batches: int) -> float:
    """What filling the pipeline can win over one card at a time: all the work over the time of the busiest stage and its fill.

    With equal stages it is n x stages / (n + stages - 1) for n micro-batches (GPipe, arXiv:1811.06965, section 2).
    """
    busiest, total = max(loads, default=0.0), float(sum(loads))
    if busiest <= 0 or math.isclose(total, busiest):
        return 1.0
    return num_micro_batches * total / (total + (num_micro_batches - 1) * busiest)
