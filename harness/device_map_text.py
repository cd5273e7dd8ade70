"""What a user writes about devices: `--device_map`, `--max_memory`, lists of layers. Read and checked without torch."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence
from typing import Any

from harness.findings import Finding, UserError, is_count, user_error
from harness.partition import OFF_CARD, Device, normal_device, parse_size
from harness.user_files import parse_json, read_user_text

DEVICE_MAPS: tuple[str, ...] = ("auto", "balanced", "balanced_low_0", "sequential", "dynamic", "cpu")


def resolve(maps: Any, engine: str | None, num_processes: int) -> list[Finding]:
    """The older names become `maps.device_map`; returns what is wrong with the placement flags.

    Args:
        maps: the flags of harness.args.DeviceMapArguments.
        engine: "deepspeed" or "fsdp" where the user gave that flag.
        num_processes: of this launch.
    """
    problems: list[Finding] = []

    def bad(key: str, message: str, fix: str = "") -> None:
        problems.append(Finding("error", "--" + key, message, fix))

    asked = {"device_map": maps.device_map, "device_map_strategy": maps.device_map_strategy}
    asked["use_balanced_device_map"] = "balanced" if maps.use_balanced_device_map else None
    asked["use_dynamic_device_map"] = "dynamic" if maps.use_dynamic_device_map else None
    given = {name: value for name, value in asked.items() if value is not None}
    if len(set(given.values())) > 1:
        bad("device_map", " and ".join(f"--{name} ({value})" for name, value in given.items()) + " disagree", "keep one")
    elif given:
        maps.device_map = next(iter(given.values()))
        problems += check_device_map_text(maps.device_map)
        problems += refuse_in_launch(maps.device_map, num_processes)
        if engine:
            bad("device_map", f"is an engine of its own, but --{engine} was given too", "keep one")
    if not maps.min_memory_gb >= 0:
        bad("min_memory_gb", f"must not be negative, but is {maps.min_memory_gb}")
    if not 0 <= maps.balance_threshold <= 1:
        bad("balance_threshold", f"must be between 0 and 1, not {maps.balance_threshold}")
    if maps.in_flight_micro_batches < 0:
        bad("in_flight_micro_batches", f"must not be negative, but is {maps.in_flight_micro_batches}", "0 means all of a step")
    if maps.max_memory is not None:
        try:
            parse_max_memory(maps.max_memory, num_gpus=0)
        except UserError as error:
            problems += error.findings
    return problems


def check_device_map_text(text: str) -> list[Finding]:
    """What is wrong with a --device_map value: a strategy, cuda:N, or a JSON object as text or file."""
    if text in DEVICE_MAPS or re.fullmatch(r"cuda(:\d+)?", text):
        return []
    if text.startswith("{") or text.endswith(".json"):
        try:
            read_device_map(text)
        except UserError as error:
            return error.findings
        return []
    close = difflib.get_close_matches(text, DEVICE_MAPS, n=1)
    fix = f"did you mean {close[0]}?" if close else f"use {', '.join(DEVICE_MAPS)}, cuda:N or a JSON object"
    return [Finding("error", "--device_map", f"{text!r} is not known", fix)]


def read_device_map(text: str) -> dict[str, Any]:
    """A map written as JSON, in place or in a file: module names and devices.

    Raises:
        UserError: unreadable, no JSON object, or a device that is neither a card nor cpu nor disk.
    """
    key = "--device_map"
    if not text.startswith("{"):
        text = read_user_text(text, key, "give the path of an existing JSON file")
    try:
        values = parse_json(text)
    except ValueError as error:
        where = f"{error.msg} at character {error.pos}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise user_error(key, f"is not JSON: {where}", 'quote it: \'{"model": 0, "lm_head": 1}\'') from None
    if not isinstance(values, dict) or not values:
        raise user_error(key, "must be a JSON object of modules and devices", 'write \'{"model": 0, "lm_head": 1}\'')
    wrong = {name: value for name, value in values.items() if not _is_device(value)}
    if wrong:
        raise UserError(
            Finding("error", key, f"{name}: {value!r} is not a device", "use a card's number, cuda:N, cpu or disk")
            for name, value in wrong.items()
        )
    return values


def _is_device(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        return False
    device = normal_device(value)
    return device in OFF_CARD or (isinstance(device, int) and device >= 0)


def refuse_in_launch(device_map: str | None, num_processes: int) -> list[Finding]:
    """A device map spreads one process over all cards; in a launch of several they would all load onto the same cards."""
    if device_map is None or num_processes <= 1:
        return []
    message = f"{device_map} is for one process, but num_processes is {num_processes}"
    fix = "start it with plain python, or drop --device_map and use --deepspeed or --fsdp"
    return [Finding("error", "--device_map", message, fix)]


def parse_max_memory(text: str, num_gpus: int, key: str = "--max_memory") -> dict[Device, int]:
    """Reads `--max_memory`: one size for every card ("40GB"), or one a device ("0:60GB,1:40GB,cpu:200GB").

    Args:
        num_gpus: how many cards a single size applies to, and the bound of the indices.

    Returns:
        Bytes by device; a device that is not named is not in it.

    Raises:
        UserError: every part that is not understood, together.
    """
    problems: list[Finding] = []
    limits: dict[Device, int] = {}

    def bad(part: str, why: str, fix: str = "write 40GB, or 0:60GB,1:40GB,cpu:200GB") -> None:
        problems.append(Finding("error", key, f"{part!r} {why}", fix))

    for part in text.split(","):
        name, colon, size_text = part.rpartition(":")
        name = name.strip().removeprefix("cuda:")
        try:
            size = parse_size(size_text)
        except ValueError:
            bad(part, "is not a size")
            continue
        if not colon:
            if "," in text:
                bad(part, "has no device before it")
            limits.update(dict.fromkeys(range(num_gpus), size))
            continue
        device: Device = int(name) if is_count(name) else name
        if isinstance(device, str) and device not in OFF_CARD:
            bad(part, "names neither a card's number nor cpu or disk")
        elif isinstance(device, int) and num_gpus and device >= num_gpus:
            bad(part, f"names card {device}, but there are {num_gpus}", f"use 0 to {num_gpus - 1}")
        elif device in limits:
            bad(part, f"names {device} twice", "keep one")
        else:
            limits[device] = size
    if problems:
        raise UserError(problems)
    return limits


def ranges_text(numbers: Sequence[int]) -> str:
    """Numbers as ranges: [0, 1, 2, 5] is "0-2,5"."""
    parts: list[str] = []
    ordered = sorted(set(numbers))
    start = 0
    for position in range(1, len(ordered) + 1):
        if position == len(ordered) or ordered[position] != ordered[position - 1] + 1:
            first, last = ordered[start], ordered[position - 1]
            parts.append(str(first) if first == last else f"{first}-{last}")
            start = position
    return ",".join(parts)


def parse_ranges(text: str, limit: int, key: str) -> list[int]:
    """Reads "0,5,10-20" as numbers, sorted, each once.

    Args:
        limit: numbers must be below it.

    Raises:
        UserError: every part that is no number or range below `limit`.
    """
    numbers: set[int] = set()
    problems: list[Finding] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if match is None:
            problems.append(Finding("error", key, f"{part!r} is neither a number nor a range", "write 0,5,10-20"))
            continue
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            problems.append(Finding("error", key, f"{part!r} runs backwards", f"write {last}-{first}"))
        elif last >= limit:
            problems.append(Finding("error", key, f"{part!r}: the highest is {limit - 1}", f"use 0 to {limit - 1}"))
        else:
            numbers.update(range(first, last + 1))
    if problems:
        raise UserError(problems)
    return sorted(numbers)
