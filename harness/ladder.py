"""`MemorySettings`: everything that changes how much memory a step needs but not what it computes.

Pure code: imports neither torch nor transformers, so that it can be tested and used (by a planner on a laptop) without them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from harness.findings import Finding, UserError

ActivationCheckpointing = Literal["none", "selective", "full"]
Offload = Literal["none", "cpu", "nvme"]


@dataclasses.dataclass(frozen=True)
class MemorySettings:
    """Settings of one rank that change memory and speed but not the mathematics of an optimizer step; only the last one rounds more.

    Attributes:
        micro_batch_size: samples of a step that go through the model at once, per rank.
        activation_checkpointing: "none", "selective" (attention and every second matmul are kept), or "full".
        loss_chunk_size: tokens whose logits are alive at once in the loss; 0 computes all logits of a micro-batch.
        activation_offload: what activation checkpointing keeps of a block, its input, waits in host memory for backward.
        reshard_after_forward: FSDP2 frees a layer's gathered weights after its forward.
        reduce_bucket_size: DeepSpeed's `reduce_bucket_size` in elements; None leaves the template's.
        prefetch_bucket_size: DeepSpeed's `stage3_prefetch_bucket_size` in elements; None leaves the template's.
        max_live_parameters: DeepSpeed's `stage3_max_live_parameters` in elements; None leaves the template's.
        optimizer_offload: share of the optimizer state kept in host memory, 0.0 to 1.0.
        param_offload: where sharded parameters live between uses.
        in_flight_micro_batches: device map: micro-batches between their forward and their backward; 0 means all of a step.
        engine: with `--engine auto` only: "fsdp", "zero2" or "zero3" where the run has come down to it; "" is the one that was asked for.
        optimizer_bf16: the averages of `--optim adamw_torch_fused` are kept in bfloat16 from here on; a rung where somebody names it.
    """

    micro_batch_size: int
    activation_checkpointing: ActivationCheckpointing = "none"
    loss_chunk_size: int = 0
    activation_offload: bool = False
    reshard_after_forward: bool = True
    reduce_bucket_size: int | None = None
    prefetch_bucket_size: int | None = None
    max_live_parameters: int | None = None
    optimizer_offload: float = 0.0
    param_offload: Offload = "none"
    in_flight_micro_batches: int = 0
    engine: str = ""
    optimizer_bf16: bool = False

    def __post_init__(self) -> None:
        if self.micro_batch_size < 1:
            raise ValueError(f"micro_batch_size must be at least 1, not {self.micro_batch_size}")
        if not 0.0 <= self.optimizer_offload <= 1.0:
            raise ValueError(f"optimizer_offload is a share between 0 and 1, not {self.optimizer_offload}")

    def replace(self, **changes: Any) -> MemorySettings:
        """A copy with some values changed."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def differing(self, other: MemorySettings) -> set[str]:
        """Names of the settings that are not the same."""
        ours, theirs = self.to_dict(), other.to_dict()
        return {name for name in ours if ours[name] != theirs[name]}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> MemorySettings:
        """Reads what `to_dict` wrote.

        Raises:
            TypeError: no mapping, or a key that is not a setting.
            ValueError: a value that the setting cannot have.
        """
        settings = cls(**values)
        choices = (
            (_STRENGTH, settings.activation_checkpointing),
            (_OFFLOAD_STRENGTH, settings.param_offload),
            (_SHARDING_STRENGTH, settings.engine),
        )
        counts = (getattr(settings, name) for name in ("micro_batch_size", *_COUNTS.values()))
        if (
            any(not isinstance(word, str) or word not in known for known, word in choices)
            or any(type(count) not in (int, type(None)) or (count or 0) < 0 for count in counts)
            or any(
                type(flag) is not bool for flag in (settings.activation_offload, settings.reshard_after_forward, settings.optimizer_bf16)
            )
        ):
            raise ValueError(f"impossible settings {values}")
        return settings


# Below this many tokens a micro-batch no longer fills a GPU's matrix units, and halving it costs more than recomputing activations.
EFFICIENT_TOKENS = 8192


def default_ladder(start: MemorySettings, *, block_size: int, offloads: Sequence[Mapping[str, Any]] = ()) -> list[MemorySettings]:
    """Rungs in an order that is right for most models, fastest first; each needs less memory than the one before.

    Args:
        start: the settings in force; the first rung.
        block_size: tokens of the longest sample.
        offloads: changes that this engine and machine can make after all others, in order.

    Returns:
        `start` and everything below it, down to micro-batches of one sample with full activation checkpointing, and offload.
    """
    rungs = [start]

    def lower(**changes: Any) -> None:
        rungs.append(rungs[-1].replace(**changes))

    while rungs[-1].in_flight_micro_batches > 1:
        lower(in_flight_micro_batches=rungs[-1].in_flight_micro_batches // 2)
    if not start.reshard_after_forward:
        lower(reshard_after_forward=True)
    while rungs[-1].micro_batch_size // 2 * block_size >= EFFICIENT_TOKENS:
        lower(micro_batch_size=rungs[-1].micro_batch_size // 2)
    for mode in ("selective", "full"):
        if _STRENGTH[mode] > _STRENGTH[rungs[-1].activation_checkpointing]:
            lower(activation_checkpointing=mode)
    while rungs[-1].micro_batch_size > 1:
        lower(micro_batch_size=rungs[-1].micro_batch_size // 2)
    for changes in offloads:
        if is_lower(rungs[-1].replace(**changes), rungs[-1]):
            lower(**changes)
    return rungs


_STRENGTH = {"none": 0, "selective": 1, "full": 2}
_OFFLOAD_STRENGTH = {"none": 0, "cpu": 1, "nvme": 2}
# How far parameters, gradients and optimizer state are spread over ranks; "" is what arguments and template ask for.
_SHARDING_STRENGTH = {"": 0, "ddp": 0, "zero1": 1, "zero2": 2, "fsdp": 3, "zero3": 3}
_UNBOUNDED = 1 << 60


def is_lower(below: MemorySettings, above: MemorySettings) -> bool:
    """True when `below` needs less memory than `above` in at least one setting and more in none."""
    pairs = [
        (above.micro_batch_size, below.micro_batch_size),
        (_STRENGTH[below.activation_checkpointing], _STRENGTH[above.activation_checkpointing]),
        (above.loss_chunk_size or _UNBOUNDED, below.loss_chunk_size or _UNBOUNDED),
        (above.reduce_bucket_size or _UNBOUNDED, below.reduce_bucket_size or _UNBOUNDED),
        (above.prefetch_bucket_size or _UNBOUNDED, below.prefetch_bucket_size or _UNBOUNDED),
        (above.max_live_parameters or _UNBOUNDED, below.max_live_parameters or _UNBOUNDED),
        (_OFFLOAD_STRENGTH[below.param_offload], _OFFLOAD_STRENGTH[above.param_offload]),
        (_SHARDING_STRENGTH[below.engine], _SHARDING_STRENGTH[above.engine]),
        (int(below.reshard_after_forward), int(above.reshard_after_forward)),
        (int(below.activation_offload), int(above.activation_offload)),
        (int(below.optimizer_bf16), int(above.optimizer_bf16)),
        (below.optimizer_offload, above.optimizer_offload),
        (above.in_flight_micro_batches or _UNBOUNDED, below.in_flight_micro_batches or _UNBOUNDED),
    ]
    return all(more >= less for more, less in pairs) and any(more > less for more, less in pairs)


def parse_ladder(words: Sequence[str], start: MemorySettings) -> list[MemorySettings]:
    """An explicit ladder: each word is one step down from the one before.

    Args:
        words: "micro_batch" (halves it), "micro_batch=N", "gradient_checkpointing", "activation_checkpointing=selective|full",
            "activation_offload" (with activation checkpointing), "reshard_after_forward", "in_flight_micro_batches=N",
            "loss_chunk_size=N", "optimizer_bf16", "optimizer_offload[=share]", "param_offload", and DeepSpeed's "reduce_bucket_size=N",
            "stage3_prefetch_bucket_size=N", "stage3_max_live_parameters=N".
        start: the settings in force.

    Raises:
        UserError: a word that is not known, or one that would free nothing; the message holds the value in force.
    """
    rungs = [start]
    problems: list[Finding] = []
    for word in words:
        try:
            changes = _changes_of(word, rungs[-1])
            rung = rungs[-1].replace(**changes)
        except (KeyError, ValueError) as error:
            problems.append(_not_a_rung(word, error))
            continue
        if not is_lower(rung, rungs[-1]):
            name = next(iter(changes))
            now = getattr(rungs[-1], name)
            problems.append(Finding("error", "--oom_ladder", f"'{word}' would free nothing: {name} is {now} at that place", "leave it out"))
            continue
        rungs.append(rung)
    if problems:
        raise UserError(problems)
    return rungs


def _not_a_rung(word: str, error: Exception) -> Finding:
    reason = f" ({error})" if isinstance(error, ValueError) else ""
    fix = (
        "micro_batch[=N], gradient_checkpointing, activation_checkpointing=selective|full, activation_offload, reshard_after_forward,"
        " loss_chunk_size=N, optimizer_bf16, optimizer_offload[=share], param_offload, reduce_bucket_size=N, stage3_prefetch_bucket_size=N,"
        " stage3_max_live_parameters=N or in_flight_micro_batches=N"
    )
    return Finding("error", "--oom_ladder", f"'{word}' is not a rung{reason}", f"use {fix}")


def unknown_rungs(words: Sequence[str]) -> list[Finding]:
    """What can be said of `--oom_ladder` before the settings in force are known: words that are no rung, or have a wrong value."""
    found = []
    for word in words:
        try:
            MemorySettings(_UNBOUNDED).replace(**_changes_of(word, MemorySettings(_UNBOUNDED)))
        except (KeyError, ValueError) as error:
            found.append(_not_a_rung(word, error))
    return found


_COUNTS = {
    "in_flight_micro_batches": "in_flight_micro_batches",
    "loss_chunk_size": "loss_chunk_size",
    "reduce_bucket_size": "reduce_bucket_size",
    "stage3_prefetch_bucket_size": "prefetch_bucket_size",
    "stage3_max_live_parameters": "max_live_parameters",
}


def _count(text: str) -> int:
    """A whole number above 0, also as 5e8, which is how DeepSpeed's own files have them."""
    number = float(text)
    if not number.is_integer() or number < 1:
        raise ValueError("a whole number above 0")
    return int(number)


def _changes_of(word: str, above: MemorySettings) -> dict[str, Any]:
    name, equals, value = word.partition("=")
    if name == "micro_batch":
        return {"micro_batch_size": _count(value) if equals else max(1, above.micro_batch_size // 2)}
    if name == "gradient_checkpointing" and not equals:
        return {"activation_checkpointing": "full"}
    if name == "activation_checkpointing":
        if value not in ("selective", "full"):
            raise ValueError("selective or full")
        return {name: value}
    if name in ("reshard_after_forward", "activation_offload", "optimizer_bf16") and not equals:
        if name == "activation_offload" and above.activation_checkpointing == "none" and above.micro_batch_size != _UNBOUNDED:
            raise ValueError("there is no activation checkpointing at that place")
        return {name: True}
    if name in _COUNTS:
        return {_COUNTS[name]: _count(value)}
    if name == "optimizer_offload":
        return {name: float(value) if equals else 1.0}
    if name == "param_offload" and value in ("", "cpu"):
        return {name: "cpu"}
    raise KeyError("no such rung")


def _is_estimate(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e30)


@dataclasses.dataclass(frozen=True)
class Rung:
    """Settings of a ladder with what they were predicted to need.

    Attributes:
        need_bytes: predicted peak of a card; None where nobody has computed it.
        step_time_s: predicted seconds of an optimizer step.
        host_bytes: predicted host memory of a node.
    """

    settings: MemorySettings
    need_bytes: float | None = None
    step_time_s: float | None = None
    host_bytes: float | None = None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Rung:
        """Reads what `to_dict` wrote.

        Raises:
            TypeError: a key that is neither a setting nor an estimate.
        """
        names = ("need_bytes", "step_time_s", "host_bytes")
        if not isinstance(values, Mapping) or any(not _is_estimate(values.get(name)) for name in names):
            raise TypeError("no settings with estimates")
        settings = MemorySettings.from_dict({name: value for name, value in values.items() if name not in names})
        return cls(settings, **{name: values.get(name) for name in names})

    def to_dict(self) -> dict[str, Any]:
        """The settings' own names, and the estimates where there are any."""
        estimates = {"need_bytes": self.need_bytes, "step_time_s": self.step_time_s, "host_bytes": self.host_bytes}
        return {**self.settings.to_dict(), **{name: value for name, value in estimates.items() if value is not None}}


@dataclasses.dataclass(frozen=True)
class SeenMemory:
    """What a rank that ran out of memory saw, bytes; None where it could not tell.

    Attributes:
        limit_bytes: what the card has, or what the run may use of it.
        requested_bytes: the allocation that failed.
        allocated_bytes: alive when it failed.
    """

    limit_bytes: float | None = None
    requested_bytes: float | None = None
    allocated_bytes: float | None = None


def worst_report(reports: Sequence[dict[str, Any]]) -> int:
    """The rank that lacked the most: of those whose allocation failed, the one furthest over its limit; 0 where none says."""

    def lack(rank: int) -> float:
        each = reports[rank]
        return float((each["allocated_gib"] or 0.0) + (each["requested_gib"] or 0.0) - (each["limit_gib"] or 0.0))

    return max((rank for rank, each in enumerate(reports) if each["failure"]), key=lack, default=0)


def seen_memory(report: dict[str, Any]) -> SeenMemory:
    """A rank's report in the ladder's terms."""

    def num_bytes(name: str) -> float | None:
        return report[name] * 2**30 if report[name] else None

    return SeenMemory(num_bytes("limit_gib"), num_bytes("requested_gib"), num_bytes("allocated_gib"))


def correction(need_bytes: float, seen: SeenMemory) -> float:
    """By how much predictions must at least be multiplied, when settings predicted to need `need_bytes` ran out of memory."""
    at_least = max(seen.limit_bytes or 0.0, (seen.allocated_bytes or 0.0) + (seen.requested_bytes or 0.0))
    return max(1.0, at_least / need_bytes)


# A rung is worth its step if it is predicted to need this much less than what ran out of memory.
WORTH_A_STEP = 0.97
# What a rung may be predicted to need of the limit where trying it costs a second. The prediction has room for CUDA's context, which an
# allocator's limit does not count, and for what the allocator keeps, which it gives back when memory is short.
WORTH_A_TRY = 1.15


def next_settings(
    ladder: Sequence[MemorySettings | Rung],
    current: MemorySettings,
    seen: SeenMemory | None = None,
    allowed: Callable[[MemorySettings], bool] = lambda settings: True,
    in_process: Callable[[MemorySettings], bool] = lambda settings: False,
) -> MemorySettings | None:
    """Where to go on after `current` ran out of memory; None at the end of the ladder.

    With estimates: they are corrected by what was seen, and the fastest rung that then fits is next, however far down it is; where none
    fits, the smallest, as long as it is smaller than what is in force. Without estimates: the first rung that needs less in one setting
    and more in none.

    Args:
        ladder: fastest first.
        seen: of the rank that had the least room.
        allowed: which settings may be taken now.
        in_process: which ones are taken in a second, without a new start: they are tried also where they are predicted to fit just not.
    """
    rungs = [rung if isinstance(rung, Rung) else Rung(rung) for rung in ladder]
    now = next((rung.need_bytes for rung in rungs if rung.settings == current and rung.need_bytes is not None), None)
    open_rungs = [rung for rung in rungs if rung.settings != current and allowed(rung.settings)]
    if now is None:
        return next((rung.settings for rung in open_rungs if is_lower(rung.settings, current)), None)
    smaller = [rung for rung in open_rungs if rung.need_bytes is not None and rung.need_bytes < now]
    # A small step is better than none.
    smaller = [rung for rung in smaller if (rung.need_bytes or 0.0) < WORTH_A_STEP * now] or smaller
    if seen is not None and seen.limit_bytes:
        factor = correction(now, seen)
        room = {False: seen.limit_bytes, True: WORTH_A_TRY * seen.limit_bytes}
        fitting = [rung for rung in smaller if (rung.need_bytes or 0.0) * factor <= room[in_process(rung.settings)]]
        if not fitting and smaller:
            return min(smaller, key=lambda rung: rung.need_bytes or 0.0).settings
        smaller = fitting
    return smaller[0].settings if smaller else None


def describe_change(old: MemorySettings, new: MemorySettings) -> str:
    """What differs, for people: "micro_batch_size 4 -> 2"."""
    before, after = old.to_dict(), new.to_dict()
    return ", ".join(f"{name} {before[name]} -> {after[name]}" for name in before if before[name] != after[name])
