"""From arguments to the engine that was asked for, and the check that it is what came out."""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path
from typing import Any

import torch

from harness.args import Arguments
from harness.check_savers import in_backward_findings
from harness.coordination import Coordinator
from harness.deepspeed_keys import zero_size
from harness.engines.base import Build, Engine, compute_dtype
from harness.findings import UserError, has_errors, user_error
from harness.four_bit import then_quantised
from harness.ladder import MemorySettings
from harness.lora import BASE_FOLDER, AttachedLora, attach_lora, check_after_build, stored_name
from harness.modeling import EmptyModel, layer_units, num_parameters
from harness.sequence_parallel import SequenceParallel, check_losses
from harness.templates import fsdp_template_of, load_deepspeed_template, resolve_deepspeed_config, with_memory_settings

log = logging.getLogger("harness")


def resolve_precision(precision: str, device: torch.device) -> str:
    """ "auto" becomes bf16 where the device computes in it, else fp16 on a GPU, else fp32."""
    if precision != "auto":
        return precision
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    return "fp32"


def master_dtype(engine: str, precision: str, wanted: str | None = None, config: Any = None) -> torch.dtype:
    """dtype in which the model is built: float32 shards or copies, but DeepSpeed keeps its own float32 masters of 16-bit weights.

    Args:
        wanted: `--torch_dtype`: "bfloat16" trains in pure bf16, without float32 masters; "auto" takes the model's own dtype.

    Raises:
        UserError: not a dtype, or one that contradicts the precision.
    """
    if wanted is None or engine == "zero":
        return compute_dtype(precision) if engine == "zero" else torch.float32
    name = wanted.removeprefix("torch.")
    dtype = getattr(config, "dtype", None) or torch.float32 if name == "auto" else getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise user_error("--torch_dtype", f"{wanted} is not a floating-point dtype", "float32, bfloat16, float16 or auto")
    if dtype == torch.float16 and precision == "fp16":
        raise user_error("--torch_dtype", "float16 weights cannot be trained with a loss scale", "use float32, or --precision bf16")
    return dtype


def spread_over_cards(engine: str, args: Arguments, coordinator: Coordinator) -> str:
    """The engine of one process: started without a launcher on a machine with several GPUs, it uses all of them, by a device map."""
    alone = coordinator.num_processes == 1 and "WORLD_SIZE" not in os.environ
    if engine == "ddp" and alone and coordinator.device.type == "cuda" and torch.cuda.device_count() > 1 and not args.lora.load_in_4bit:
        log.info("one process and %d GPUs: --device_map dynamic (--device_map cuda:0 uses one)", torch.cuda.device_count())
        args.maps.device_map = "dynamic"
        return "device_map"
    return engine


def initial_settings(args: Arguments, engine: str) -> MemorySettings:
    """The memory settings that arguments and template ask for."""
    settings = MemorySettings(
        micro_batch_size=args.train.per_device_train_batch_size,
        activation_checkpointing=args.train.activation_checkpointing,  # type: ignore[arg-type]
        loss_chunk_size=args.train.loss_chunk_size,
        activation_offload=args.train.activation_offload,
    )
    if engine == "fsdp":
        template = fsdp_template_of(args, os.environ)
        assert template is not None
        offload = "cpu" if template.cpu_offload else "none"
        settings = settings.replace(reshard_after_forward=template.reshard_after_forward, param_offload=offload)
        settings = settings.replace(activation_offload=settings.activation_offload or template.activation_offload)
    elif engine == "device_map":
        settings = settings.replace(in_flight_micro_batches=args.maps.in_flight_micro_batches)
    elif engine == "zero":
        zero = (load_deepspeed_template(args, os.environ) or {}).get("zero_optimization", {})
        offload_optimizer = zero.get("offload_optimizer", {})
        settings = settings.replace(
            optimizer_offload=float(offload_optimizer.get("ratio", 1.0)) if offload_optimizer.get("device", "none") != "none" else 0.0,
            param_offload=zero.get("offload_param", {}).get("device", "none"),
            reduce_bucket_size=zero_size(zero, "reduce_bucket_size"),
        )
        if zero.get("stage") == 3:
            settings = settings.replace(
                prefetch_bucket_size=zero_size(zero, "stage3_prefetch_bucket_size"),
                max_live_parameters=zero_size(zero, "stage3_max_live_parameters"),
            )
    return settings


def _resolved_ds_config(
    args: Arguments, coordinator: Coordinator, model: Any, settings: MemorySettings, precision: str, total_steps: int
) -> dict[str, Any]:
    template = load_deepspeed_template(args, os.environ)
    assert template is not None
    template = with_memory_settings(template, settings)
    text = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    config, findings = resolve_deepspeed_config(
        template,
        args,
        coordinator.num_processes,
        total_steps=total_steps,
        hidden_size=int(getattr(text, "hidden_size", 0) or 0) or None,
        precision=precision,
        largest_parameter=max(parameter.numel() for parameter in model.parameters()),
        largest_layer=max((num_parameters(unit) for _, unit in layer_units(model)), default=None),
    )
    if has_errors(findings):
        raise UserError(findings)
    # The optimizer may be ours, and DeepSpeed need not insist on its own CPU optimizer for it.
    config.setdefault("zero_allow_untested_optimizer", True)
    if args.train.optim and not args.train.optim.startswith("adamw"):
        config.setdefault("zero_force_ds_cpu_optimizer", False)
    config["steps_per_print"] = 10**9  # our log has these lines
    return config


def build_engine(
    engine: str,
    args: Arguments,
    coordinator: Coordinator,
    empty_model: EmptyModel,
    settings: MemorySettings,
    precision: str,
    total_steps: int,
) -> tuple[Engine, dict[str, Any]]:
    """Builds the engine, filling and sharding the model.

    Args:
        engine: "ddp", "fsdp", "zero" or "device_map".

    Returns:
        The engine, and the template as used (written into the run's folder).

    Raises:
        UserError: what only the model can show to be wrong in a template.
    """
    if args.train.optim_in_backward and (
        problems := list(in_backward_findings(engine, coordinator.num_processes, precision, offloads=settings.param_offload != "none"))
    ):
        raise UserError(problems)
    lora = attach_adapters(engine, args, empty_model, precision) if args.lora.lora_r is not None else None
    sequence = SequenceParallel.join(coordinator) if coordinator.sequence_parallel_size > 1 else None
    if sequence is not None:
        sequence.install(empty_model.model)
    build = Build(args, coordinator, empty_model, settings, precision, total_steps, lora, sequence)
    used: dict[str, Any] = {}
    made: Any
    if engine == "zero":
        from harness.engines.zero import ZeroEngine

        used = _resolved_ds_config(args, coordinator, empty_model.model, settings, precision, total_steps)
        made = ZeroEngine(build, used)
    elif engine == "fsdp":
        from harness.engines.fsdp import FsdpEngine

        template = fsdp_template_of(args, os.environ)
        if settings.engine == "fsdp" and template is None:  # come down from DDP
            template = fsdp_template_of(dataclasses.replace(args, train=dataclasses.replace(args.train, fsdp="full_shard")), os.environ)
        assert template is not None
        made = FsdpEngine(build, template)
        used = {key: value for key, value in vars(template).items() if key != "notes"}
    elif engine == "device_map":
        from harness.engines.device_map import DeviceMapEngine

        made = DeviceMapEngine(build)
        used = {"strategy": made.choice.strategy, "device_map": made.choice.device_map, "decisions": list(made.choice.decisions)}
    else:
        from harness.engines.ddp import DdpEngine

        made = DdpEngine(build)
    log.info("engine=%s num_processes=%d backend=%s precision=%s", made.name, coordinator.num_processes, coordinator.backend, precision)
    log.info("layout: %s", made.describe())
    if sequence is not None:
        prove_shared_samples(made, sequence, args, coordinator, empty_model.config, precision)
    if lora is not None:
        checked = check_after_build(
            made.module, lora, coordinator.gather, check_r=args.lora.check_r_consistency, strict=args.lora.strict_r_check
        )
        for finding in checked:
            log.warning("%s", finding.line())
        log.info("LoRA: r=%d, %d modules, consistent on all ranks", lora.config.r, len(lora.modules))
    return made, used


def prove_shared_samples(
    engine: Any, sequence: SequenceParallel, args: Arguments, coordinator: Coordinator, config: Any, precision: str
) -> None:
    """Before anything is trained: the model's loss is the same whether processes share its samples or not.

    Raises:
        UserError: it is not.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    tolerance = 1e-3 if precision == "fp32" and not args.train.tf32 else 5e-2  # of 16 bits, whose products round by their shape
    with engine.blocks.uncompiled():
        apart = check_losses(
            sequence, engine.eval_loss, coordinator, int(text.vocab_size), isolate=args.data.keeps_documents_apart, tolerance=tolerance
        )
    log.info("samples are shared by %d processes each; loss within %.1e of that of whole samples", sequence.size, apart)


def attach_adapters(engine: str, args: Arguments, empty_model: EmptyModel, precision: str) -> AttachedLora:
    """Puts LoRA adapters into the empty model; the frozen rest is kept in the compute dtype, the adapters in float32.

    Raises:
        UserError: names that are not in the model, or what an engine cannot do.
    """
    if args.lora.use_dora and engine == "zero":
        template = load_deepspeed_template(args, os.environ) or {}
        if template.get("zero_optimization", {}).get("stage") == 3:
            raise user_error("--use_dora", "reads base weights that ZeRO-3 has not gathered", "use FSDP or ZeRO-2, or leave it out")
    model = empty_model.model
    base = args.model.model_name_or_path or str(Path(str(args.train.output_dir)).resolve() / BASE_FOLDER)
    lora = attach_lora(model, args.lora, seed=args.train.seed, base_name=base)
    for why in dict.fromkeys(lora.left_out.values()):
        log.info("LoRA: no adapters for %s: %s", ", ".join(name for name, of in lora.left_out.items() if of == why), why)
    empty_model.stored_name, empty_model.init_block = stored_name, lora.init_block
    if engine != "zero":  # DeepSpeed keeps one dtype, and float32 masters of what trains
        empty_model.frozen_dtype = compute_dtype(precision)
    if args.lora.load_in_4bit:
        num_blocks = len(layer_units(model))
        empty_model.init_block = then_quantised(lora.init_block, num_blocks, compute_dtype(precision))
    return lora
