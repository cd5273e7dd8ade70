"""The choice of a device map: strategies, the memory they have, and what they decide, in numbers.

`balanced` and `dynamic` are ours, the other words are accelerate's. How they differ: transformers' `auto` is its `balanced`, which
evens out the bytes of the weights alone and lets the last card take what is left. Ours evens out what a run will really hold
(weights, gradients, optimizer state, activations, the head's logits), by an exact split over cards of unequal size, and leaves out a
card that is nearly full. `dynamic` takes `auto` while that is even enough (`--balance_threshold`) and fits, and `balanced` otherwise.

Where micro-batches are to pass through the cards together, `balanced` takes, of the splits whose fullest card has at most 1.10 of its
share, the one whose busiest card has least to do. Bytes and time may contradict each other: the logits of a large vocabulary can weigh
as much as all blocks, and even bytes would leave the head's card without a block. So where a split that fills no card beyond 80 % is
a quarter faster or more, it is taken, and the log says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Optional

import torch
from torch import nn

from harness import device_map_text
from harness.args import Arguments, DeviceMapArguments
from harness.findings import UserError, user_error
from harness.model_files import MODEL_CODE_ERRORS, what_failed
from harness.model_units import MapJob, block_classes, check_device_map, describe_components, device_of, find_units, with_tables_along
from harness.partition import (
    OFF_CARD,
    BalanceReport,
    Device,
    Unit,
    analyze_device_balance,
    fair_shares,
    format_gib,
    loads_of,
    normal_device,
    pipeline_speedup,
    split_contiguous,
    split_for_time,
)

log = logging.getLogger("harness")

# What a card's allocator, cuBLAS and the CUDA context take besides tensors; transformers leaves the same share on one card.
USABLE_SHARE = 0.9
# How far over its fair share a card may be for the sake of time, and how much faster an uneven split must be.
EVEN_ENOUGH, MUCH_FASTER = 1.10, 1.25
FILL = 0.8
GB = 10**9


@dataclasses.dataclass(frozen=True)
class Placing:
    """What a map is made for.

    Attributes:
        cards: usable bytes of each card, by index; empty without GPUs.
        free: bytes free on each card before anything was taken off, for messages and --min_memory_gb.
        host: bytes usable in host memory ("cpu") and on disk ("disk"); empty when weights must stay on cards.
        job: what the run needs besides the weights.
        force_balance: equal shares on every card, however little is free there.
        min_memory_bytes: cards with less free memory are left out.
        threshold: imbalance up to which `dynamic` keeps `auto`.
        no_split_modules: classes of the blocks, when the model does not say.
    """

    cards: Mapping[Device, int]
    free: Mapping[Device, int]
    host: Mapping[Device, int] = dataclasses.field(default_factory=dict)
    job: MapJob = dataclasses.field(default_factory=MapJob)
    force_balance: bool = False
    min_memory_bytes: int = 2 * GB
    threshold: float = 0.3
    no_split_modules: Optional[Sequence[str]] = None


@dataclasses.dataclass(frozen=True)
class MapChoice:
    """A map and why it is this one.

    Attributes:
        strategy: the strategy that made it; for `dynamic` the one it came down to.
        device_map: device by module, complete.
        report: what each device holds and how even that is.
        decisions: one sentence for each decision, with its numbers.
        in_flight: micro-batches between forward and backward that the cards have room for.
    """

    strategy: str
    device_map: dict[str, Device]
    report: BalanceReport
    decisions: tuple[str, ...] = ()
    in_flight: int = 1


# ------------------------------------------------------------------------------------------------------------ what there is


def free_memory() -> dict[Device, int]:
    """Free bytes of each visible card, by index; empty without CUDA."""
    if not torch.cuda.is_available():
        return {}
    return {index: int(torch.cuda.mem_get_info(index)[0]) for index in range(torch.cuda.device_count())}


def placing(maps: DeviceMapArguments, free: Mapping[Device, int], job: MapJob | None = None, host_bytes: int | None = None) -> Placing:
    """What the flags make of the memory there is.

    Args:
        free: free bytes of each card.
        host_bytes: free host memory; default: this machine's.

    Raises:
        UserError: --max_memory names a card that is not there.
    """
    limits: dict[Device, int] = {}
    if maps.max_memory is not None:
        limits = device_map_text.parse_max_memory(maps.max_memory, len(free))
    # As in accelerate, naming some devices leaves out the others.
    only_cards = any(isinstance(device, int) for device in limits)
    cards = {card: min(size, limits.get(card, 0)) if only_cards else int(size * USABLE_SHARE) for card, size in free.items()}
    cards = {card: size for card, size in cards.items() if size > 0}
    host: dict[Device, int] = {}
    if not maps.exclude_cpu:
        if host_bytes is None:
            import psutil

            host_bytes = int(psutil.virtual_memory().available * USABLE_SHARE)
        host = {"cpu": limits.get("cpu", host_bytes), "disk": limits.get("disk", sys.maxsize)}
    return Placing(
        cards=cards,
        free=dict(free),
        host=host,
        job=job or MapJob(),
        force_balance=maps.force_balance,
        min_memory_bytes=int(maps.min_memory_gb * GB),
        threshold=maps.balance_threshold,
    )


def meta_model(config: Any, dtype: torch.dtype | None = None, trust_remote_code: bool = False) -> Any:
    """The model of a config on the meta device, ties made: no memory, no weights.

    Raises:
        UserError: neither a causal nor a sequence-to-sequence LM.
    """
    import transformers
    from accelerate import init_empty_weights

    auto: Any = transformers.AutoModelForSeq2SeqLM if getattr(config, "is_encoder_decoder", False) else transformers.AutoModelForCausalLM
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if dtype is not None:
        options["dtype"] = dtype
    try:
        with init_empty_weights(include_buffers=True):
            model = auto.from_config(config, **options)
    except MODEL_CODE_ERRORS as error:
        raise user_error("--model_name_or_path", what_failed(error), "give a causal or sequence-to-sequence LM") from None
    model.tie_weights()
    # init_empty_weights moves what modules register; a table made inside a module's own method may still be real.
    return model.to("meta")


# -------------------------------------------------------------------------------------------------------------- strategies


def _needs(units: Sequence[Unit]) -> str:
    weights, total = sum(unit.weight_bytes for unit in units), sum(unit.num_bytes for unit in units)
    return f"{format_gib(total)} are needed" + (f" ({format_gib(weights)} of them weights)" if total != weights else "")


def _free_text(free: Mapping[Device, int]) -> str:
    return ", ".join(f"GPU {card}: {format_gib(size)} free" for card, size in free.items()) or "no GPU"


def _does_not_fit(units: Sequence[Unit], where: Placing, why: str) -> UserError:
    fixes = [
        "lower --min_memory_gb, --force_balance to use every card, --exclude_cpu False to read a model through host memory",
        "or need less: a smaller --per_device_train_batch_size, --activation_checkpointing full, LoRA",
    ]
    return user_error("--device_map", f"{why}: {_needs(units)}; {_free_text(where.free)}", "; ".join(fixes))


def step_times(units: Sequence[Unit], job: MapJob) -> list[float]:
    """Relative time of each part in a step: forward once, backward twice that, and a block's forward again where it is recomputed."""
    again = 1.0 if job.activation_checkpointing else 0.0
    return [unit.work * (3.0 + (again if unit.is_block else 0.0)) for unit in units]


def _split(units: Sequence[Unit], shares: Sequence[float], limits: Sequence[float], where: Placing, notes: list[str]) -> list[int] | None:
    """Even by bytes, and within that, or far from it where bytes and time contradict each other, fast; as told above."""
    sizes, times = [float(unit.num_bytes) for unit in units], step_times(units, where.job)
    even = split_contiguous(sizes, shares, limits)
    num = where.job.in_flight
    if even is None or num < 2 or not where.job.num_tokens or not any(times):
        return even
    ratios = [load / share for load, share in zip(loads_of(sizes, even, len(shares)), shares, strict=True) if share > 0]
    most = max(EVEN_ENOUGH, *ratios) * (1 + 1e-9)
    within = split_for_time(sizes, times, shares, [min(limit, most * share) for limit, share in zip(limits, shares, strict=True)])
    assert within is not None  # `even` is one of them
    if where.force_balance:
        return within
    uneven = split_for_time(sizes, times, shares, [FILL * limit for limit in limits])
    if uneven is None:
        return within
    speeds = [pipeline_speedup(loads_of(times, positions, len(shares)), num) for positions in (within, uneven)]
    if speeds[1] < MUCH_FASTER * speeds[0]:
        return within
    fullest = max(load / share for load, share in zip(loads_of(sizes, uneven, len(shares)), shares, strict=True) if share > 0)
    notes.append(
        f"bytes and time contradict each other: an even split would be {speeds[1] / speeds[0]:.2f}x slower, so the fullest card"
        f" has {fullest:.2f} of its share, which it has room for"
    )
    return uneven


def _balanced(model: nn.Module, units: Sequence[Unit], where: Placing, notes: list[str]) -> dict[str, Device]:
    """Our split: a run of consecutive parts a card. What is remarkable about it is added to `notes`."""
    enough = {card: size for card, size in where.cards.items() if where.free.get(card, size) >= where.min_memory_bytes}
    cards = dict(where.cards) if where.force_balance else enough
    if not cards:
        raise _does_not_fit(units, where, f"no card has {where.min_memory_bytes / GB:g} GB free")
    total = float(sum(unit.num_bytes for unit in units))
    if where.force_balance:
        shares, limits = [total / len(cards)] * len(cards), [float("inf")] * len(cards)
    else:
        limits = [float(size) for size in cards.values()]
        shares = fair_shares(total, limits, FILL)
    positions = _split(units, shares, limits, where, notes)
    if positions is None:
        if where.host:
            return _by_accelerate(model, units, where, "sequential")
        raise _does_not_fit(units, where, "the cards do not have enough memory")
    order = list(cards)
    return {name: order[position] for unit, position in zip(units, positions, strict=True) for name in unit.names}


@contextlib.contextmanager
def _quiet_accelerate() -> Iterator[None]:
    """Without its remarks on planned cards that this machine does not have and on ties that are kept anyway."""
    logger = logging.getLogger("accelerate.utils.modeling")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def _by_accelerate(model: nn.Module, units: Sequence[Unit], where: Placing, strategy: str) -> dict[str, Device]:
    """accelerate's own `auto` (= its `balanced`), `balanced_low_0` or `sequential`, by bytes of the weights."""
    from accelerate.utils import get_balanced_memory, infer_auto_device_map

    if not where.cards and not where.host:
        raise _does_not_fit(units, where, "there is no card")
    classes = sorted(block_classes(model, where.no_split_modules))
    memory: dict[Any, Any] = {**where.cards, "cpu": where.host.get("cpu", 0)}
    with _quiet_accelerate():
        if strategy != "sequential":
            low = strategy == "balanced_low_0"
            memory = get_balanced_memory(model, max_memory=memory, no_split_module_classes=classes, low_zero=low)
        inferred = infer_auto_device_map(model, max_memory=memory, no_split_module_classes=classes)
    result = {name: device_of(inferred, name) for unit in units for name in unit.names}
    missing = [name for name, device in result.items() if device is None]
    assert not missing, f"accelerate left out {missing}"
    placed = {name: device for name, device in result.items() if device is not None}
    if not where.host and any(device in OFF_CARD for device in placed.values()):
        raise _does_not_fit(units, where, f"{strategy} does not fit on the cards")
    return placed


def _report(units: Sequence[Unit], device_map: Mapping[str, Device], where: Placing) -> BalanceReport:
    sizes = {name: unit.num_bytes if position == 0 else 0 for unit in units for position, name in enumerate(unit.names)}
    explicit = {name: device for name in sizes if (device := device_of(device_map, name)) is not None}
    usable = {card: size for card, size in where.cards.items() if where.free.get(card, size) >= where.min_memory_bytes}
    return analyze_device_balance(explicit, sizes, usable or where.cards or None)


def _overfull(report: BalanceReport, where: Placing) -> list[str]:
    return [
        f"GPU {device} would hold {format_gib(share.num_bytes)} of {format_gib(where.cards[device])}"
        for device, share in report.devices.items()
        if device in where.cards and share.num_bytes > where.cards[device]
    ]


def choose_device_map(model: Any, strategy: str, where: Placing) -> MapChoice:
    """Turns a `--device_map` value into a complete map.

    Args:
        model: on the meta device.
        strategy: auto, balanced, balanced_low_0, sequential, dynamic, cpu, cuda, cuda:N, or a JSON object as text or file.

    Raises:
        UserError: it does not fit, or the given map is wrong; everything that is wrong with it, together.
    """
    units = find_units(model, where.job, where.no_split_modules)
    notes: list[str] = []

    def choice(name: str, device_map: Mapping[str, Device]) -> MapChoice:
        device_map = with_tables_along(model, units, device_map)
        return MapChoice(name, device_map, _report(units, device_map, where), tuple(notes))

    if strategy == "cpu":
        return choice("cpu", {"": "cpu"})
    if strategy.startswith("{") or strategy.endswith(".json"):
        given = {name: normal_device(raw) for name, raw in device_map_text.read_device_map(strategy).items()}
        problems = check_device_map(model, given, len(where.free))
        if problems:
            raise UserError(problems)
        return choice("given", given)
    if match := re.fullmatch(r"cuda(?::(\d+))?", strategy):
        card = int(match[1] or 0)
        problems = check_device_map(model, {"": card}, len(where.free))
        if problems:
            raise UserError(problems)
        return choice(strategy, {"": card})
    if strategy != "sequential" and not block_classes(model, where.no_split_modules) and strategy != "auto":
        notes.append(f"{type(model).__name__} does not name its blocks, so {strategy} cannot keep them whole: auto is used")
        log.warning(notes[-1])
        strategy = "auto"
    if strategy == "dynamic":
        return _dynamic(model, units, where)
    if strategy == "balanced":
        device_map = _balanced(model, units, where, notes)
        return choice("balanced", device_map)
    return choice(strategy, _by_accelerate(model, units, where, strategy))


def deepest_fit(model: Any, strategy: str, where: Placing) -> MapChoice:
    """`choose_device_map` with as many micro-batches in flight as asked for, or as many as fit: half as often as needed.

    Raises:
        UserError: it does not fit with a single one either.
    """
    depth = max(where.job.in_flight, 1)
    while True:
        tried = dataclasses.replace(where, job=dataclasses.replace(where.job, in_flight=depth))
        try:
            choice = choose_device_map(model, strategy, tried)
        except UserError:
            if depth == 1:
                raise
            depth = (depth + 1) // 2
            continue
        notes = choice.decisions
        if depth != where.job.in_flight:
            notes = (f"{depth} of {where.job.in_flight} micro-batches fit in flight", *notes)
        return dataclasses.replace(choice, decisions=notes, in_flight=depth)


def _dynamic(model: Any, units: Sequence[Unit], where: Placing) -> MapChoice:
    """auto where it is even enough and fits, else balanced, else auto all the same; every decision with its numbers."""
    notes: list[str] = []

    def attempt(name: str, make: Callable[[], dict[str, Device]]) -> tuple[MapChoice | None, str]:
        try:
            device_map = make()
        except UserError as error:
            return None, error.findings[0].message
        device_map = with_tables_along(model, units, device_map)
        return MapChoice(name, device_map, _report(units, device_map, where)), ""

    def done(result: MapChoice, note: str) -> MapChoice:
        notes.append(note)
        return dataclasses.replace(result, decisions=tuple(notes))

    if not where.cards:
        device_map: dict[str, Device] = {"": "cpu"}
        weights = sum(unit.weight_bytes for unit in units)
        if where.host and weights > where.host["cpu"]:
            device_map = _by_accelerate(model, units, where, "sequential")
            note = f"no GPU, and {format_gib(weights)} of weights for {format_gib(where.host['cpu'])} of host memory: the rest on disk"
            return done(MapChoice("sequential", device_map, _report(units, device_map, where)), note)
        return done(MapChoice("cpu", device_map, _report(units, device_map, where)), "no GPU: everything in host memory")
    auto, why_not = attempt("auto", lambda: _by_accelerate(model, units, where, "auto"))
    if len(where.cards) == 1 and auto is not None:
        return done(auto, "one GPU: auto")
    tight = _overfull(auto.report, where) if auto is not None else []
    if auto is None:
        notes.append(f"auto cannot be loaded: {why_not}")
    elif tight:
        notes.append(f"auto leaves no room for training: {'; '.join(tight)}")
    else:
        ratio = auto.report.imbalance_ratio
        if ratio <= where.threshold:
            return done(auto, f"auto is kept: imbalance {ratio:.2f} is within {where.threshold:g}")
        notes.append(f"auto is uneven: imbalance {ratio:.2f} is over {where.threshold:g}")
    balanced, why_not = attempt("balanced", lambda: _balanced(model, units, where, notes))
    if balanced is not None:
        return done(balanced, f"balanced is used: imbalance {balanced.report.imbalance_ratio:.2f}")
    if auto is None or (not where.host and tight):
        raise _does_not_fit(units, where, "neither auto nor balanced fits on the cards")
    return done(auto, f"balanced cannot be loaded ({why_not}): auto is used")


def get_model_input_device(model: Any, device_map: Mapping[str, Any] | None = None) -> Device:
    """Where input ids go: the input embedding's device, which is neither always card 0 nor the lowest one.

    Args:
        device_map: default: the model's own (`hf_device_map`); a model without one is asked for its weights' device.
    """
    return _place_of(model, model.get_input_embeddings(), device_map)


def get_model_output_device(model: Any, device_map: Mapping[str, Any] | None = None) -> Device:
    """Where labels go: the device of the head, whose logits the loss is computed from."""
    head = model.get_output_embeddings()
    return get_model_input_device(model, device_map) if head is None else _place_of(model, head, device_map)


def _place_of(model: Any, module: nn.Module, device_map: Mapping[str, Any] | None) -> Device:
    device_map = device_map if device_map is not None else getattr(model, "hf_device_map", None)
    name = next(name for name, candidate in model.named_modules() if candidate is module)
    place = device_of(device_map, name) if device_map else None
    if place is None:
        place = normal_device(next(module.parameters()).device)
    if place in OFF_CARD and device_map:
        # Offloaded weights are brought to the first card for their turn, and so are their inputs.
        cards = [device for raw in device_map.values() if isinstance(device := normal_device(raw), int)]
        place = min(cards) if cards else "cpu"
    return place


def torch_device(device: Device) -> torch.device:
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def device_map_for(args: Arguments, config: Any, job: MapJob, dtype: torch.dtype) -> MapChoice:
    """The map of a training run: by the flags, `dynamic` where they do not say, on the cards of this machine.

    Raises:
        UserError: it does not fit, or puts weights that are to be trained off the cards.
    """
    free = {} if args.train.use_cpu else free_memory()
    model = meta_model(config, dtype, args.model.trust_remote_code)
    result = deepest_fit(model, args.maps.device_map or "dynamic", placing(args.maps, free, job))
    off = sorted({str(device) for device in result.device_map.values() if device in OFF_CARD})
    if off and set(result.device_map.values()) != {"cpu"}:
        raise user_error(
            "--device_map", f"places weights on {' and '.join(off)}, from where they cannot be trained", "use --fsdp 'full_shard offload'"
        )
    log_choice(model, result, free)
    return result


def log_choice(model: nn.Module, choice: MapChoice, free: Mapping[Device, int]) -> None:
    """Logs the decisions, and each device with its capacity and what it gets; at debug level every module."""
    for decision in choice.decisions:
        log.info("device map: %s", decision)
    names: dict[Device, str] = {}
    if torch.cuda.is_available():
        names = {card: torch.cuda.get_device_name(card) for card in free if isinstance(card, int) and card < torch.cuda.device_count()}
    for line in placement_lines(model, choice, free, names):
        log.info(line)
    for name, device in choice.device_map.items():
        log.debug("%s on %s", name or "everything", device)


def placement_lines(
    model: nn.Module, choice: MapChoice, free: Mapping[Device, int], names: Mapping[Device, str] | None = None
) -> list[str]:
    """One line a device: "GPU 0: 58.32 GB [embedding + layers 0-7] NVIDIA H200"; cards without a part are listed too."""
    parts: dict[Device, list[str]] = {card: [] for card in free}
    for device, share in choice.report.devices.items():
        parts.setdefault(device, []).extend(share.components)
    lines = []
    for device, held in parts.items():
        what = describe_components(model, held)
        title = f"GPU {device}" if isinstance(device, int) else device
        line = f"{title}: {free[device] / GB:.2f} GB [{what}]" if device in free else f"{title}: [{what}]"
        lines.append(f"{line} {(names or {}).get(device, '')}".rstrip())
    return lines
