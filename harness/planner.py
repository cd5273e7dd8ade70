"""`harness plan`: memory and speed of a run before it starts, and the fastest settings that fit. Needs no GPU and no weights.

    harness plan --model meta-llama/Llama-3.1-8B --engine zero3 --num_gpus 4 --gpu_memory 80GB --block_size 4096
    harness plan --model config.json --engine auto --gpu H100 --num_gpus 8 --json

`--model` is a folder, a config.json, or a hub name whose config is in the local cache. The batch given by
--per_device_train_batch_size and --gradient_accumulation_steps is the optimizer step, which every setting keeps.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.candidates import OFFLOADING, EnginePlan, Limits, plan_engine
from harness.cards import CARDS, WITHOUT_BF16, card_bytes, card_of_size, hardware_of, is_size_of, known_card
from harness.check_savers import accumulation_findings, in_backward_findings, optimizer_findings
from harness.engine_memory import GIB, OPTIMIZER_STATE_BYTES
from harness.findings import Finding, FindingParser, UserError, format_findings, user_error
from harness.ladder import MemorySettings
from harness.machine import Machine, detect_machine
from harness.memory import lora_request, machine_factors, measure
from harness.model_files import config_problems, names_a_path
from harness.model_shape import ENGINES, EngineName, Measured, RunShape, ZeroOptions
from harness.monitor import peak_flops
from harness.partition import parse_size, size_problem
from harness.plan_report import format_comparison, format_estimate, format_job, format_ladder, settings_text, start_line
from harness.sequence_rules import job_findings
from harness.step_time import Hardware


def _parser() -> FindingParser:
    layout = argparse.RawDescriptionHelpFormatter
    parser = FindingParser(prog="harness plan", allow_abbrev=False, description=__doc__, formatter_class=layout)
    add = parser.add_argument
    add("--model", "--model_name_or_path", "--config_name", dest="model", help="folder, config.json, or hub name in the local cache")
    add("--model_type", help="an architecture's default config instead")
    add("--config_overrides", help="changes to the config: 'hidden_size=64,num_hidden_layers=2'")
    add("--cache_dir", help="where models from the hub are kept")
    add("--trust_remote_code", action="store_true", help="run model code that comes with the model")
    add("--engine", default="auto", choices=[*ENGINES, "auto"], help="auto compares all that several processes can use")
    add("--num_gpus", "--num_processes", dest="num_gpus", type=int, help="cards of the whole job (default: this machine's)")
    add("--gpus", help="memory of each card, 24GB,24GB,12GB: plans the device map of one process; its other flags: --gpus 1GB --help")
    add("--gpus_per_node", type=int, default=8, help="cards of one machine, where the job has several")
    add("--gpu", help=f"kind of card: {', '.join(CARDS)} (default: this machine's)")
    add("--gpu_memory", help="memory of one card: 80GB as on its label, or exactly: 79.1GiB")
    add("--host_memory", help="host memory of one node that the job may use: 500GB")
    add("--nvme", action="store_true", help="an NVMe disk may hold parameters and states (ZeRO-3)")
    add("--link_bandwidth", help="bytes a second between cards of a node per rank: 300GB")
    add("--network_bandwidth", help="the same between nodes: 40GB")
    add("--block_size", type=int, help="tokens per sample (default: the model's limit, at most 4096)")
    add("--per_device_train_batch_size", type=int, default=8, help="samples per micro-batch and process, as asked for")
    add("--gradient_accumulation_steps", type=int, default=1, help="micro-batches per optimizer step, as asked for")
    add("--precision", choices=["bf16", "fp16", "fp32"], help="default: bf16, or fp16 on a card without it")
    add("--optim", default="adamw_torch_fused", choices=list(OPTIMIZER_STATE_BYTES))
    add("--optim_in_backward", action="store_true", help="parameters are updated in backward, and their gradients freed")
    add("--activation_checkpointing", choices=["none", "selective", "full"], help="keep this one (default: all are tried)")
    add("--loss_chunk_size", type=int, default=1024, help="tokens whose logits exist at once in the loss; 0: all")
    choices = ["sdpa", "eager", "flash_attention_2", "flex_attention", "varlen"]
    add("--attn_implementation", choices=choices, help="default: varlen for packed documents, where card and model have it, else sdpa")
    add("--document_isolation", type=_boolean, default=True, metavar="BOOL", help="documents of a pack do not see each other")
    add("--optimizer_offload", type=float, help="keep this share of the optimizer states on the host")
    add("--param_offload", choices=["none", "cpu", "nvme"], help="keep parameters there")
    add("--sequence_parallel_size", type=int, default=1, help="cards that share each sample, a slice of its tokens each")
    add("--shard_group_size", type=int, help="fsdp: cards that share one copy (hybrid sharding)")
    add("--reduce_bucket_size", type=int, help="zero: elements (default: the template's auto)")
    add("--max_live_parameters", type=int, help="zero3: elements (default: DeepSpeed's 1e9)")
    add("--use_liger_kernel", action="store_true", help="Liger's fused norms and feed-forward")
    add("--lora_r", type=int, help="r of LoRA adapters: the model itself is frozen")
    add("--target_modules", nargs="+", default=["all-linear"], help="names of the layers that get an adapter")
    add("--lora_dropout", type=float, default=0.0)
    add("--snapshot", action="store_true", help="count two snapshots of each rank in host memory")
    add("--json", action="store_true", help="one JSON object")
    return parser


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0", "yes", "no"):
        raise argparse.ArgumentTypeError(f"true or false, not {text}")
    return text.lower() in ("true", "1", "yes")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; hyphens and underscores are the same.

    Raises:
        UserError: unknown flags and impossible values, all at once.
    """
    tokens = []
    for token in argv:
        flag, equals, value = token.partition("=")
        tokens.append(flag.replace("-", "_").replace("__", "--", 1) + equals + value if token.startswith("--") else token)
    options, problems = _parser().read(tokens)
    settled = {finding.key for finding in problems}
    more = [Finding("error", f"--{key}", message, fix) for key, message, fix in _problems(options)]
    problems += [finding for finding in more if finding.key not in settled]
    if problems:
        raise UserError(problems)
    return options


def _problems(options: argparse.Namespace) -> list[tuple[str, str, str]]:
    found = []
    for name in ("num_gpus", "gpus_per_node", "per_device_train_batch_size", "gradient_accumulation_steps", "shard_group_size", "lora_r"):
        value = getattr(options, name)
        if value is not None and value < 1:
            found.append((name, f"must be at least 1, not {value}", ""))
    for name in ("reduce_bucket_size", "max_live_parameters"):
        value = getattr(options, name)
        if value is not None and value < 1:
            found.append((name, f"must be at least 1, not {value}", ""))
    if options.block_size is not None and options.block_size < 2:
        found.append(("block_size", f"must be at least 2, not {options.block_size}", ""))
    if options.loss_chunk_size < 0:
        found.append(("loss_chunk_size", f"must not be negative, but is {options.loss_chunk_size}", ""))
    if options.optimizer_offload is not None and not 0 <= options.optimizer_offload <= 1:
        found.append(("optimizer_offload", f"is a share between 0 and 1, not {options.optimizer_offload}", ""))
    if not 0 <= options.lora_dropout < 1:
        found.append(("lora_dropout", f"must be at least 0 and below 1, not {options.lora_dropout}", ""))
    if options.model is None and options.model_type is None:
        found.append(("model", "no model was given", "give --model with a folder, a config.json or a hub name, or --model_type"))
    if options.model is not None:
        path = Path(options.model).expanduser()
        if names_a_path(options.model) and not path.exists():
            found.append(("model", f"{options.model} does not exist", "give a folder, a config.json, or a hub name that is in the cache"))
        elif path.is_file() and path.suffix != ".json":
            found.append(("model", f"{options.model} is no config.json", "give the model's folder or its config.json"))
        elif path.exists():
            found += [("model", *problem) for problem in config_problems(path / "config.json" if path.is_dir() else path)]
    if not options.lora_r and options.target_modules != ["all-linear"]:
        found.append(("target_modules", "is only used with --lora_r", "add --lora_r 16"))
    if options.model is not None and options.model_type is not None:
        found.append(("model_type", "and --model were both given", "keep one"))
    for name in ("gpu_memory", "host_memory", "link_bandwidth", "network_bandwidth"):
        text = getattr(options, name)
        if text is not None and (problem := size_problem(text)):
            found.append((name, problem, "write for example 80GB or 79.1GiB"))
    if options.gpu is not None and peak_flops(options.gpu) is None:
        found.append(("gpu", f"unknown card {options.gpu}", f"give one of {', '.join(CARDS)}, or --gpu_memory"))
    card = known_card(options.gpu or "")
    if options.precision == "bf16" and card in WITHOUT_BF16:
        found.append(("precision", f"a {card} (compute capability {WITHOUT_BF16[card]}) has no bf16", "give --precision fp16"))
    groups = options.shard_group_size
    if groups and options.num_gpus and options.num_gpus % groups:
        found.append(("shard_group_size", f"{options.num_gpus} cards cannot be cut into groups of {groups}", ""))
    if options.param_offload not in (None, "none") and options.engine in ("ddp", "device_map", "zero1", "zero2"):
        found.append(("param_offload", f"{options.engine} keeps whole weights on the card", "use --engine zero3 or fsdp"))
    return found


def _hardware(options: argparse.Namespace, machine: Machine) -> tuple[Hardware, int]:
    """The card's speed and its memory in bytes.

    Raises:
        UserError: no card was named and none is here.
    """
    here = machine.gpus[0].name if machine.gpus and not options.gpu and not options.gpu_memory else None
    name = options.gpu or here
    if name is None and options.gpu_memory is None:
        raise user_error("--gpu_memory", "this machine has no GPU, and no card was named", "give --gpu_memory 80GB, or --gpu H100")
    if name is None:
        name = card_of_size(card_bytes(options.gpu_memory))
    card = known_card(name)
    num_bytes = int(CARDS[card][0] * GIB) if card else 0
    if options.gpu_memory:
        num_bytes = card_bytes(options.gpu_memory)
    elif here:
        num_bytes = machine.min_gpu_memory_bytes
    if not num_bytes:
        raise user_error("--gpu_memory", f"the memory of a {name} is not known", "give --gpu_memory 80GB")
    hardware = hardware_of(name)
    if options.link_bandwidth:
        hardware = dataclasses.replace(hardware, link_bandwidth=float(parse_size(options.link_bandwidth)))
    if options.network_bandwidth:
        hardware = dataclasses.replace(hardware, network_bandwidth=float(parse_size(options.network_bandwidth)))
    return hardware, num_bytes


def _attention(options: argparse.Namespace) -> str:
    """What was chosen, or what a run takes by itself; a model that cannot take varlen is measured with a mask."""
    by_length = options.document_isolation and options.precision != "fp32" and known_card(options.gpu or "") not in WITHOUT_BF16
    return options.attn_implementation or ("varlen" if by_length else "sdpa")


def _request(options: argparse.Namespace, engines: Sequence[EngineName]) -> dict[str, Any]:
    """What must be measured, in each way in which weights look inside the products."""
    modes = list(dict.fromkeys(RunShape(engine, 1, 2, precision=options.precision).weights for engine in engines))
    chunks = [options.loss_chunk_size] + ([] if options.loss_chunk_size else [1024])
    pinned = options.activation_checkpointing
    return {
        "model": options.model,
        "model_type": options.model_type,
        "config_overrides": options.config_overrides,
        "cache_dir": options.cache_dir,
        "trust_remote_code": options.trust_remote_code,
        "attention": _attention(options),
        "block_size": options.block_size,
        "checkpointing": ["none", pinned] if pinned not in (None, "none") else (["none"] if pinned else ["none", "selective", "full"]),
        "loss_chunks": chunks,
        "lora": lora_request(options.lora_r, options.lora_dropout, options.target_modules),
        "documents": options.document_isolation,
        "weights": modes,
        "sequence_parallel_size": options.sequence_parallel_size,
    }


def _run_shape(options: argparse.Namespace, engine: EngineName, num_gpus: int) -> RunShape:
    return RunShape(
        engine=engine,
        num_processes=num_gpus,
        block_size=options.block_size,
        samples_per_step=options.per_device_train_batch_size * options.gradient_accumulation_steps,
        num_local_processes=options.gpus_per_node,
        precision=options.precision,
        optimizer=options.optim,
        in_backward=options.optim_in_backward,
        lora=options.lora_r is not None,
        fused_layers=options.use_liger_kernel,
        shard_group_size=options.shard_group_size if engine == "fsdp" else None,
        sequence_parallel_size=options.sequence_parallel_size,
        snapshots=options.snapshot,
        zero=ZeroOptions(),
    )


def _given(options: argparse.Namespace, engine: EngineName) -> tuple[MemorySettings, set[str]]:
    """The settings as asked for, and which of them are fixed by having been typed."""
    zero = engine.startswith("zero")
    pinned = {name for name in ("activation_checkpointing",) if getattr(options, name) is not None}
    if options.optimizer_offload is not None and zero:
        pinned.add("optimizer_offload")
    if options.param_offload is not None and engine in ("fsdp", "zero3"):
        pinned.add("param_offload")
    if options.optim_in_backward:  # of several micro-batches in a step all but the last would keep their gradients
        pinned.add("micro_batch_size")
    given = MemorySettings(
        micro_batch_size=options.per_device_train_batch_size,
        activation_checkpointing=options.activation_checkpointing or "none",
        loss_chunk_size=options.loss_chunk_size,
        optimizer_offload=(options.optimizer_offload or 0.0) if zero else 0.0,
        param_offload=(options.param_offload or "none") if engine in ("fsdp", "zero3") else "none",
        reduce_bucket_size=options.reduce_bucket_size if zero else None,
        max_live_parameters=options.max_live_parameters if engine == "zero3" else None,
    )
    for name in ("reduce_bucket_size", "max_live_parameters"):
        if getattr(given, name) is not None:
            pinned.add(name)
    return given, pinned


def engines_for(choice: str, num_gpus: int) -> list[EngineName]:
    """The engines to consider: on one card sharding over processes has nothing to share, but ZeRO and FSDP can still offload."""
    if choice != "auto":
        return [engine for engine in ENGINES if engine == choice]
    return ["ddp", "zero1", "zero2", "zero3", "fsdp"]


def _engines(options: argparse.Namespace, num_gpus: int) -> list[EngineName]:
    """The engines to consider that have what the optimizer's flags ask for.

    Raises:
        UserError: the one that was asked for has not.
    """
    engines = engines_for(options.engine, num_gpus)
    offloads = options.param_offload not in (None, "none")

    def problems(engine: EngineName) -> list[Finding]:
        family = "zero" if engine.startswith("zero") else engine
        found = list(optimizer_findings(options.optim, family))
        if options.optim_in_backward:
            found += in_backward_findings(family, num_gpus, options.precision, offloads=offloads)
            found += accumulation_findings(options.gradient_accumulation_steps)
        return found

    able = [engine for engine in engines if not problems(engine)]
    if not able:
        raise UserError(problems(engines[-1]))
    return able


def make_plans(options: argparse.Namespace, machine: Machine) -> tuple[Measured, Hardware, list[tuple[str, EnginePlan]]]:
    """Measures the model and plans every engine asked for.

    Raises:
        UserError: wrong input.
    """
    hardware, gpu_bytes = _hardware(options, machine)
    if options.precision is None:
        is_here = options.gpu is None and options.gpu_memory is None
        is_old = not machine.supports_bf16 if is_here else known_card(options.gpu or "") in WITHOUT_BF16
        options.precision = "fp16" if is_old else "bf16"
    num_gpus = options.num_gpus or len(machine.gpus) or 1
    host = parse_size(options.host_memory) if options.host_memory else (machine.host_memory_bytes if machine.gpus else None)
    limits = Limits(gpu_bytes, host, options.nvme)
    engines = _engines(options, num_gpus)
    if wrong := list(job_findings(options.sequence_parallel_size, engines[0], num_gpus)):
        raise UserError(wrong)
    measured = measure([_request(options, engines)])
    limit = measured.shape.max_positions
    if limit is not None and measured.block_size > limit:
        raise user_error("--block_size", f"{measured.block_size} is over the model's limit of {limit}", f"--block_size {limit}")
    options.block_size = measured.block_size  # where none was given, it is the model's
    plans = []
    for engine in engines:
        run = _run_shape(options, engine, num_gpus)
        given, pinned = _given(options, engine)
        if given.activation_checkpointing in measured.unsupported:
            raise user_error("--activation_checkpointing", f"{measured.shape.model_type} does not support it", "use none")
        factors = machine_factors(hardware.name, engine) if machine.gpus and not options.gpu else None
        ways: list[tuple[str, bool | None]] = [(engine, None)]
        if options.engine == "auto":
            typed = {"optimizer_offload", "param_offload"} & pinned
            ways = [(engine, False if engine not in OFFLOADING else None)] if typed else [(engine, False)]
            ways += [(f"{engine} + offload", True)] if engine in OFFLOADING and not typed else []
        if options.optim_in_backward:  # weights on the host keep their gradients there, all of them
            ways = [(engine, False)]
        for name, offload in ways:
            plan = plan_engine(measured, run, hardware, given, limits, pinned=pinned, offload=offload, factors=factors)
            plans.append((name, plan))
    return measured, hardware, plans


def best_of(plans: Sequence[tuple[str, EnginePlan]]) -> EnginePlan | None:
    """The plan whose chosen settings are the fastest; None where nothing fits."""
    fitting = [plan for _, plan in plans if plan.chosen is not None]
    return min(fitting, key=lambda plan: plan.chosen.time.total_s if plan.chosen else 0.0, default=None)


def _model_flags(options: argparse.Namespace) -> list[str]:
    if options.model_type:
        flags = [f"--model_type {options.model_type} --tokenizer_name ..."]
    elif options.model.endswith(".json"):
        flags = [f"--config_name {options.model} --tokenizer_name ..."]
    else:
        flags = [f"--model_name_or_path {options.model}"]
    if options.config_overrides:
        flags.append(f"--config_overrides '{options.config_overrides}'")
    if options.lora_r:
        flags.append(f"--lora_r {options.lora_r}")
        flags += [f"--target_modules {' '.join(options.target_modules)}"] if options.target_modules != ["all-linear"] else []
    if options.optim != "adamw_torch_fused":
        flags.append(f"--optim {options.optim}")
    if options.optim_in_backward:
        flags.append("--optim_in_backward --max_grad_norm 0")
    if options.attn_implementation:
        flags.append(f"--attn_implementation {options.attn_implementation}")
    if not options.document_isolation:
        flags.append("--no_document_isolation")
    return flags


def report(options: argparse.Namespace, measured: Measured, hardware: Hardware, plans: Sequence[tuple[str, EnginePlan]]) -> str:
    """The plan for people."""
    best = best_of(plans)
    shown = best or min((plan for _, plan in plans), key=lambda plan: plan.smallest.need_bytes(plan.figure))
    is_named = bool(options.gpu) or not options.gpu_memory or is_size_of(hardware.name, shown.limits.gpu_bytes)
    card = hardware.name if is_named else f"card, as fast as a {hardware.name},"
    blocks = [format_job(measured, shown.given.run, shown.limits, card)]
    if len(plans) > 1:
        blocks.append(format_comparison(plans))
    given = shown.given
    misfit = given.misfit(shown.limits, shown.figure)
    blocks.append(format_estimate(given.estimate, f"as asked for: {given.engine}, {settings_text(given)}: {misfit or 'fits'}"))
    chosen = shown.chosen
    if chosen is not None and chosen.settings != given.settings:
        blocks.append(format_estimate(chosen.estimate, f"chosen: {chosen.engine}, {settings_text(chosen)}"))
    blocks.append(format_ladder(shown))
    if chosen is None:
        need = shown.smallest.need_bytes(shown.figure) / GIB
        text = f"nothing fits: the smallest settings ({settings_text(shown.smallest)}) need {need:.1f} GiB of a card"
        blocks.append(text + "; more cards, a shorter --block_size, offload (--host_memory) or --lora_r would help")
    else:
        line, change = start_line(chosen, _model_flags(options))
        blocks.append("start it\n  " + line + (f"\n  in a copy of the template: {change}" if change else ""))
    learnt = shown.factors.describe() if shown.factors is not None else ""
    notes = [learnt] if learnt else []
    notes += [f"not measured, closed form instead: {failure}" for failure in measured.failures]
    if options.attn_implementation in ("flash_attention_2", "flex_attention", "varlen"):
        notes.append(f"{options.attn_implementation} is taken to keep what sdpa keeps without a mask")
    if options.use_liger_kernel:
        notes.append("what Liger's layers save is a closed form")
    notes.append("states are counted; activations and loss measured on the model's own code; buffers and speed are closed forms")
    return "\n\n".join([*blocks, "\n".join(notes)])


def to_json(measured: Measured, hardware: Hardware, plans: Sequence[tuple[str, EnginePlan]], options: argparse.Namespace) -> dict[str, Any]:
    """The plan for machines."""
    best = best_of(plans)
    values: dict[str, Any] = {
        "model": {
            "model_type": measured.shape.model_type,
            "num_parameters": measured.shape.num_parameters,
            "num_trainable": measured.shape.num_trainable,
            "num_active": measured.shape.num_active,
        },
        "hardware": dataclasses.asdict(hardware),
        "plans": [],
        "chosen": best.chosen.to_dict() if best and best.chosen else None,
        "command": start_line(best.chosen, _model_flags(options))[0] if best and best.chosen else None,
        "closed_forms": list(measured.failures),
    }
    for name, plan in plans:
        values["plans"].append(
            {
                "name": name,
                "limits": dataclasses.asdict(plan.limits),
                "given": {**plan.given.to_dict(), "misfit": plan.given.misfit(plan.limits, plan.figure)},
                "chosen": plan.chosen.to_dict() if plan.chosen else None,
                "smallest_bytes": plan.smallest.need_bytes(plan.figure),
                "largest_micro_batch": plan.largest_micro_batch,
                "ladder": [{**rung.to_dict(), "fits": not rung.misfit(plan.limits, plan.figure)} for rung in plan.ladder],
            }
        )
    return values


def _plan_device_map(tokens: Sequence[str]) -> int:
    """The plan for --gpus; an engine, or a flag that only engines have, is wrong beside it."""
    from harness import device_maps

    names = [token.partition("=")[0].replace("-", "_").replace("__", "--", 1) for token in tokens]
    values = dict(zip(names, _values(tokens), strict=True))
    of_maps, of_engines = (
        {flag for action in each._actions for flag in action.option_strings} for each in (device_maps.parser(), _parser())
    )
    wrong = [f"--engine {values['--engine']}"] if values.get("--engine", "device_map") != "device_map" else []
    wrong += dict.fromkeys(name for name in names if name in of_engines - of_maps)
    if wrong:
        message = "plans device maps; --gpu_memory with --num_gpus plans engines"
        print(format_findings([Finding("error", "--gpus", message, f"leave out --gpus, or {', '.join(wrong)}")]), file=sys.stderr)
        return 2
    return device_maps.main(tokens)


def _values(tokens: Sequence[str]) -> list[str]:
    """What each token, taken as a flag, would have as its value."""
    return [token.partition("=")[2] or following for token, following in zip(tokens, [*tokens[1:], ""], strict=True)]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a plan. Returns 0, 1 where nothing fits, 2 for wrong input. With --gpus it is a device map's, for unequal cards."""
    tokens = list(sys.argv[1:] if argv is None else argv)
    if any(token.split("=", 1)[0] == "--gpus" for token in tokens):
        return _plan_device_map(tokens)
    try:
        options = parse(tokens)
        measured, hardware, plans = make_plans(options, detect_machine())
    except UserError as error:
        print(format_findings(error.findings), file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(to_json(measured, hardware, plans, options)))
    else:
        print(report(options, measured, hardware, plans))
    return 0 if best_of(plans) else 1


if __name__ == "__main__":
    sys.exit(main())
