"""The DeepSpeed JSON as a file and as plain data: reading with good messages, dotted paths, and its batch arithmetic.

Key names are DeepSpeed's (https://www.deepspeed.ai/docs/config-json/, checked against 0.19.8). Imports neither torch nor deepspeed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from harness.findings import Finding, UserError, user_error
from harness.user_files import json_problem, parse_json, parse_yaml, read_user_text, refuse_other_kind

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# Where "auto" is a value DeepSpeed itself understands.
_DEEPSPEED_AUTO = ("pipeline.stages", "data_types.keep_in_fp32_modules")


_BLOCKS = (
    *("optimizer", "scheduler", "params", "fp16", "bf16", "zero_optimization", "offload_optimizer", "offload_param"),
    *("activation_checkpointing", "aio", "flops_profiler", "comms_logger", "tensorboard", "wandb", "csv_monitor"),
)


def read_deepspeed_config(path: str | Path) -> dict[str, Any]:
    """A DeepSpeed JSON file, or the JSON text itself where the value starts with a brace.

    Raises:
        UserError: not there, not UTF-8, not JSON (with line and column), of another kind, a key twice (with both lines), or not an object.
    """
    text, name = str(path), "the JSON text"
    if not text.lstrip().startswith("{"):
        name = text
        text = read_user_text(path, "--deepspeed", "give the path of an existing JSON file")
    duplicates: list[str] = []

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                duplicates.append(key)
            seen[key] = value
        return seen

    try:
        values = parse_json(text, object_pairs_hook=no_duplicates)
    except ValueError as error:
        if name != "the JSON text":
            _refuse_yaml_of_another_kind(text, name)
        fix = "JSON has no comments, no trailing commas and double quotes only"
        raise user_error("--deepspeed", f"{name} {json_problem(error)}", fix) from None
    if duplicates:
        raise UserError(
            Finding("error", key, f"stands twice in {name}{_lines_of_duplicates(text, key)}", "keep one")
            for key in dict.fromkeys(duplicates)
        )
    if not isinstance(values, dict):
        raise user_error("--deepspeed", f"{name} holds a {type(values).__name__}, not an object", 'it must start with "{"')
    refuse_other_kind(values, "--deepspeed", name)
    return without_nulls(values)


def _refuse_yaml_of_another_kind(text: str, path: str) -> None:
    try:
        values = parse_yaml(text)
    except ValueError:
        return
    if isinstance(values, dict):
        refuse_other_kind(values, "--deepspeed", path)


def _lines_of_duplicates(text: str, key: str) -> str:
    """ ", lines 3 and 9": PyYAML's parser keeps the positions that json throws away, and reads almost all JSON."""

    def visit(node: yaml.Node | None) -> Iterator[int]:
        if isinstance(node, yaml.MappingNode):
            lines = [name.start_mark.line + 1 for name, _ in node.value if name.value == key]
            if len(lines) > 1:
                yield from lines
        if isinstance(node, yaml.CollectionNode):
            for child in node.value:
                for part in child if isinstance(child, tuple) else (child,):
                    yield from visit(part)

    try:
        lines = list(visit(yaml.compose(text, Loader=yaml.SafeLoader)))
    except yaml.YAMLError:
        lines = []
    return f", lines {' and '.join(map(str, lines))}" if lines else ""


def without_nulls(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without blocks that are null, which DeepSpeed takes for blocks that are not there; other nulls stay."""
    kept = {key: value for key, value in config.items() if value is not None or key not in _BLOCKS}
    return {key: without_nulls(value) if isinstance(value, Mapping) else value for key, value in kept.items()}


def get_value(config: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """The value at a dotted path, or the default where any part of the path is missing."""
    node: Any = config
    for part in path.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return default
        node = node[part]
    return node


def set_value(config: dict[str, Any], path: str, value: Any) -> None:
    """Sets the value at a dotted path and makes the blocks on the way."""
    *parents, last = path.split(".")
    for part in parents:
        config = config.setdefault(part, {})
    config[last] = value


def unresolved(config: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted paths of the values that are still "auto" (those that DeepSpeed understands itself are not listed)."""
    found: list[str] = []
    for key, value in config.items():
        path = prefix + key
        if isinstance(value, Mapping):
            found += unresolved(value, path + ".")
        elif value == "auto" and path not in _DEEPSPEED_AUTO:
            found.append(path)
    return found


def is_open(config: Mapping[str, Any], path: str) -> bool:
    return get_value(config, path, "auto") in ("auto", None)


def decides(config: Mapping[str, Any], path: str) -> bool:
    return not is_open(config, path)


def is_number(value: Any, length: int = 1) -> TypeGuard[Any]:
    """A number that can be computed with (JSON files hold NaN and Infinity too, and integers beyond all floats); or so many of them."""
    if length > 1:
        return isinstance(value, (list, tuple)) and len(value) == length and all(is_number(item) for item in value)
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


def is_equal(first: Any, second: Any) -> bool:
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(is_equal(*pair) for pair in zip(first, second, strict=True))
    return math.isclose(first, second, rel_tol=1e-9, abs_tol=0.0)


def solve_batch(
    total: int, micro: int | None, accumulation: int | None, num_processes: int, wanted_micro: int
) -> tuple[int, int, Finding | None]:
    """Micro-batch and accumulation for a given total; the finding says why it cannot be."""
    names = " * ".join(BATCH_KEYS[1:]) + " * processes"
    if micro is not None and accumulation is not None:
        if total == micro * accumulation * num_processes:
            return micro, accumulation, None
        fixes = [f"train_batch_size: {micro * accumulation * num_processes}"]
        if total % (micro * num_processes) == 0:
            fixes.append(f"gradient_accumulation_steps: {total // (micro * num_processes)}")
        if total % (accumulation * num_processes) == 0:
            fixes.append(f"train_micro_batch_size_per_gpu: {total // (accumulation * num_processes)}")
        message = f"train_batch_size is not {names}: {total} != {micro} * {accumulation} * {num_processes}"
        return micro, accumulation, Finding("error", "train_batch_size", message, "set " + " or ".join(fixes))
    if micro is not None or accumulation is not None:
        known, key = (micro, BATCH_KEYS[1]) if micro is not None else (accumulation, BATCH_KEYS[2])
        assert known is not None
        unit = known * num_processes
        if total % unit:
            down, up = total // unit * unit, (total // unit + 1) * unit
            near = f"{down} or {up}" if down else str(up)
            message = f"{total} is not a multiple of {key} * processes = {known} * {num_processes} (train_batch_size = {names})"
            return 1, 1, Finding("error", "train_batch_size", message, f"set train_batch_size: {near}")
        other = total // unit
        return (known, other, None) if micro is not None else (other, known, None)
    if total % num_processes:
        down, up = total // num_processes * num_processes, (total // num_processes + 1) * num_processes
        near = f"{down} or {up}" if down else str(up)
        message = f"{total} samples cannot be split evenly over {num_processes} processes"
        return 1, 1, Finding("error", "train_batch_size", message, f"set train_batch_size: {near}")
    per_process = total // num_processes
    micro = max(size for size in range(1, min(wanted_micro, per_process) + 1) if per_process % size == 0)
    return micro, per_process // micro, None
