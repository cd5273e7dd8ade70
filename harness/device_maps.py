"""Device maps for one process with many GPUs: made, loaded, and planned without any GPU.

    python -m harness.device_maps --model config.json --gpus 24GB,24GB,12GB --block_size 4096

What each strategy does is told in `harness.placement`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from harness import device_map_text
from harness.args import DeviceMapArguments, ModelArguments
from harness.findings import Finding, FindingParser, UserError, format_findings, user_error
from harness.model_units import MapJob, describe_components, device_of, find_units
from harness.modeling import load_config
from harness.partition import OFF_CARD, Device, format_gib, parse_size, pipeline_speedup
from harness.placement import MapChoice, choose_device_map, deepest_fit, free_memory, log_choice, meta_model, placing, step_times

log = logging.getLogger("harness")


def create_balanced_device_map(
    model_name_or_path: str,
    force_balance: bool = False,
    exclude_cpu: bool = True,
    *,
    max_memory: Mapping[Device, int] | None = None,
    min_memory_gb: float = 2.0,
    dtype: torch.dtype | None = None,
    job: MapJob | None = None,
    no_split_modules: Iterable[str] | None = None,
) -> dict[str, Device]:
    """The `balanced` map of a model for the cards of this machine, or for those in `max_memory`.

    Args:
        max_memory: usable bytes by device, instead of what is free here.
        no_split_modules: classes of the blocks, when the model does not say.

    Returns:
        Device by module, complete: for `from_pretrained(..., device_map=...)`.

    Raises:
        UserError: no model there, a block class it does not have, or not enough memory.
    """
    model = meta_model(load_config(ModelArguments(model_name_or_path=model_name_or_path)), dtype)
    flags = DeviceMapArguments(force_balance=force_balance, exclude_cpu=exclude_cpu, min_memory_gb=min_memory_gb)
    where = placing(flags, free_memory(), job)
    if max_memory is not None:
        cards = {device: size for device, size in max_memory.items() if device not in OFF_CARD}
        host: dict[Device, int] = {} if exclude_cpu else {device: size for device, size in max_memory.items() if device in OFF_CARD}
        where = dataclasses.replace(where, cards=cards, free=cards, host=host)
    if no_split_modules is not None:
        where = dataclasses.replace(where, no_split_modules=tuple(no_split_modules))
    return choose_device_map(model, "balanced", where).device_map


def apply_balanced_device_map(
    model_name_or_path: str, device_map_config: Mapping[str, Any] | DeviceMapArguments, **options: Any
) -> tuple[Any, Any, dict[str, Device]]:
    """Loads a model under a device map, and its tokenizer.

    Args:
        device_map_config: the flags of harness.args.DeviceMapArguments by name ({"device_map": "dynamic", "exclude_cpu": False}),
            or a map of modules and devices.
        options: more arguments of `from_pretrained`, for example dtype.

    Returns:
        Model, tokenizer, and the map that is in force.

    Raises:
        UserError: no model there, a wrong map, or not enough memory.
    """
    from transformers import AutoTokenizer

    names = {field.name for field in dataclasses.fields(DeviceMapArguments)}
    if isinstance(device_map_config, DeviceMapArguments):
        flags = dataclasses.replace(device_map_config)
    elif set(device_map_config) <= names:
        flags = DeviceMapArguments(**dict(device_map_config))
    else:
        flags = DeviceMapArguments(device_map=json.dumps({name: str(raw) for name, raw in device_map_config.items()}))
    problems = device_map_text.resolve(flags, None, 1)
    if problems:
        raise UserError(problems)
    model, choice = load_model(model_name_or_path, flags, **options)
    return model, AutoTokenizer.from_pretrained(model_name_or_path), choice.device_map


def load_model(model_name_or_path: str, flags: DeviceMapArguments, revision: str = "main", **options: Any) -> tuple[Any, MapChoice]:
    """Loads a model under the map that the flags make of this machine's memory.

    With `dynamic`, a map that turns out not to load (another process took the memory meanwhile) is replaced by the other one.
    """
    config = load_config(ModelArguments(model_name_or_path=model_name_or_path, model_revision=revision))
    dtype = options.get("dtype", "auto")
    empty = meta_model(config, getattr(config, "dtype", None) if dtype == "auto" else dtype)
    where = placing(flags, free_memory())
    choice = choose_device_map(empty, flags.device_map or "dynamic", where)
    log_choice(empty, choice, where.free)

    def load(device_map: Mapping[str, Device]) -> Any:
        if "disk" in device_map.values():
            options["offload_folder"] = flags.offload_folder
        where_to: dict[str, Any] = {"device_map": dict(device_map), "use_safetensors": True, **options}
        return type(empty).from_pretrained(model_name_or_path, revision=revision, **where_to)

    retry = None
    try:
        model = load(choice.device_map)
    except torch.OutOfMemoryError as error:
        if (flags.device_map or "dynamic") != "dynamic" or choice.strategy not in ("auto", "balanced"):
            reason = str(error).splitlines()[0]
            raise user_error("--device_map", f"{choice.strategy} ran out of memory: {reason}", "lower --max_memory") from None
        retry = "balanced" if choice.strategy == "auto" else "auto"
    if retry is not None:  # outside the except block, whose traceback would keep the half-loaded model alive
        torch.cuda.empty_cache()
        log.warning("device map: %s did not load, %s is tried", choice.strategy, retry)
        choice = choose_device_map(empty, retry, placing(flags, free_memory()))
        model = load(choice.device_map)
    model.eval()
    for card in where.free:
        log.info("GPU %s after loading: %s in use", card, format_gib(torch.cuda.memory_allocated(card)))
    for name, parameter in model.named_parameters():
        log.debug("%s on %s", name, parameter.device)
    return model, choice


# ------------------------------------------------------------------------------------------------------------------- planning


@dataclasses.dataclass(frozen=True)
class MapPlan:
    """A map planned for cards that need not be there.

    Attributes:
        model: what was planned.
        choice: the map and why.
        rows: one a device: device, capacity, weights, training, activations, total (bytes), components.
        speedup: of `in_flight` micro-batches through the pipeline over one at a time, by the cards' shares of the work.
    """

    model: str
    choice: MapChoice
    rows: tuple[dict[str, Any], ...]
    speedup: float
    in_flight: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "strategy": self.choice.strategy,
            "decisions": list(self.choice.decisions),
            "devices": [dict(row) for row in self.rows],
            "balance": self.choice.report.to_dict(),
            "pipeline_speedup": round(self.speedup, 3),
            "in_flight": self.in_flight,
            "device_map": self.choice.device_map,
        }

    def text(self) -> str:
        """The plan as a table, one line a device."""
        columns = ("weights_bytes", "training_bytes", "activation_bytes", "total_bytes")
        lines = [f"{self.model}: device map {self.choice.strategy}"]
        lines += [f"  {decision}" for decision in self.choice.decisions]
        heads = ("weights", "training", "activations", "total")
        lines.append(f"{'device':<8}{'memory':>11}" + "".join(f"{head:>13}" for head in heads) + f"{'used':>7}  parts")
        for row in self.rows:
            capacity = row["capacity_bytes"]
            used = f"{100 * row['total_bytes'] / capacity:.0f}%" if capacity else ""
            figures = "".join(f"{format_gib(row[column]):>13}" for column in columns)
            lines.append(f"{row['device']:<8}{format_gib(capacity) if capacity else '':>11}{figures}{used:>7}  {row['parts']}")
        report = self.choice.report
        lines.append(f"imbalance {report.imbalance_ratio:.2f} by bytes, {report.imbalance_ratio_by_count:.2f} by parts")
        lines.append(f"{self.in_flight} micro-batches in flight: up to {self.speedup:.2f}x over one card at a time")
        return "\n".join(lines)


def plan_device_map(
    config: Any,
    gpus: Sequence[int],
    *,
    strategy: str = "dynamic",
    flags: DeviceMapArguments | None = None,
    job: MapJob | None = None,
    dtype: torch.dtype | None = None,
    host_bytes: int = 0,
) -> MapPlan:
    """Plans a map without GPUs and without weights.

    Args:
        config: a transformers config.
        gpus: free bytes of each card.
        flags: force_balance, min_memory_gb, balance_threshold, exclude_cpu, max_memory.
        job: what the run needs besides weights; default: reading the model only.
        host_bytes: host memory that may be used when `exclude_cpu` is off.
    """
    job = job or MapJob()
    model = meta_model(config, dtype)
    free: dict[Device, int] = dict(enumerate(gpus))
    where = placing(flags or DeviceMapArguments(), free, job, host_bytes)
    choice = deepest_fit(model, strategy, where)
    units = find_units(model, dataclasses.replace(job, in_flight=choice.in_flight))
    rows = []
    work: list[float] = []
    for device in [*free, *(device for device in choice.report.devices if device not in free)]:
        held = [unit for unit in units if device_of(choice.device_map, unit.names[0]) == device]
        names = [name for unit in held for name in unit.names]
        work.append(sum(step_times(held, job)))
        rows.append(
            {
                "device": f"GPU {device}" if isinstance(device, int) else device,
                "capacity_bytes": free.get(device, 0),
                "weights_bytes": sum(unit.weight_bytes for unit in held),
                "training_bytes": sum(unit.training_bytes for unit in held),
                "activation_bytes": sum(unit.activation_bytes for unit in held),
                "total_bytes": sum(unit.num_bytes for unit in held),
                "parts": describe_components(model, names),
            }
        )
    title = getattr(config, "_name_or_path", "") or config.model_type
    return MapPlan(title, choice, tuple(rows), pipeline_speedup(work, choice.in_flight), choice.in_flight)


def parse_gpus(text: str) -> list[int]:
    """Reads "24GB,24GB,12GB" or "4x80GB" as bytes of each card.

    Raises:
        UserError: a part that is no size.
    """
    cards: list[int] = []
    for part in text.split(","):
        count, times, size = part.rpartition("x")
        try:
            cards += [parse_size(size)] * (int(count) if times else 1)
        except ValueError:
            raise user_error("--gpus", f"{part!r} is not a size", "write 24GB,24GB,12GB or 4x80GB") from None
    return cards


def parser() -> FindingParser:
    """The flags of a plan of a device map."""
    parser = FindingParser(prog="harness plan", description="Plan a device map without GPUs.")
    parser.add_argument(
        "--model", "--model_name_or_path", "--config_name", dest="model", required=True, help="config.json, model folder or hub name"
    )
    parser.add_argument("--engine", choices=["device_map"], default="device_map", help="the only one for unequal cards in one process")
    parser.add_argument("--gpus", required=True, help="memory of each card: 24GB,24GB,12GB or 4x80GB")
    parser.add_argument("--device_map", "--device-map", default="dynamic", help="strategy, or a map as JSON")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"], help="dtype of the weights")
    parser.add_argument("--inference", action="store_true", help="weights only: nothing trains")
    parser.add_argument("--lora_r", "--lora-r", type=int, default=None, help="r of LoRA adapters: only they train")
    parser.add_argument("--block_size", "--block-size", type=int, default=1024, help="tokens per sample")
    batch = ["--per_device_train_batch_size", "--per-device-train-batch-size", "--micro_batch_size", "--micro-batch-size"]
    parser.add_argument(*batch, dest="micro_batch_size", type=int, default=1, help="samples per micro-batch")
    parser.add_argument("--in_flight_micro_batches", "--in-flight-micro-batches", type=int, default=8, help="micro-batches in flight")
    parser.add_argument("--activation_checkpointing", "--activation-checkpointing", choices=["none", "full"], default="none")
    parser.add_argument("--loss_chunk_size", "--loss-chunk-size", type=int, default=1024, help="tokens whose logits exist at once")
    parser.add_argument("--force_balance", "--force-balance", action="store_true", help="equal shares on every card")
    parser.add_argument("--min_memory_gb", "--min-memory-gb", type=float, default=2.0, help="leave out smaller cards")
    parser.add_argument("--balance_threshold", "--balance-threshold", type=float, default=0.3, help="imbalance dynamic accepts")
    parser.add_argument("--max_memory", "--max-memory", default=None, help="as in training")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a planned map; exit code 2 for wrong input or a model that does not fit."""
    try:
        return _plan(*parser().read(argv))
    except UserError as error:
        print(format_findings(error.findings), file=sys.stderr)
        return 2


def _plan(options: argparse.Namespace, problems: list[Finding]) -> int:
    job = MapJob(
        # AdamW in float32: 4 bytes of gradient and 8 of state; a weight kept in 16 bits has a gradient of 2 and states of 2 each.
        training_bytes_per_param=0.0 if options.inference else (12.0 if options.dtype == "float32" else 6.0),
        lora_r=options.lora_r,
        num_tokens=0 if options.inference else options.micro_batch_size * options.block_size,
        in_flight=1 if options.inference else options.in_flight_micro_batches,
        activation_checkpointing=options.activation_checkpointing == "full",
        loss_chunk_size=options.loss_chunk_size,
    )
    flags = DeviceMapArguments(
        force_balance=options.force_balance,
        min_memory_gb=options.min_memory_gb,
        balance_threshold=options.balance_threshold,
        max_memory=options.max_memory,
    )
    problems += device_map_text.check_device_map_text(options.device_map)
    if problems:
        raise UserError(problems)
    config = load_config(ModelArguments(model_name_or_path=options.model))
    dtype = getattr(torch, options.dtype)
    plan = plan_device_map(config, parse_gpus(options.gpus), strategy=options.device_map, flags=flags, job=job, dtype=dtype)
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(plan.to_dict(), indent=2) if options.json else plan.text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
