"""From arguments to the engine that was asked for, and the check that it is what came out."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from harness.args import Arguments
from harness.coordination import Coordinator
from harness.engines.base import Build, Engine
from harness.findings import UserError, has_errors
from harness.ladder import MemorySettings
from harness.modeling import EmptyModel
from harness.templates import fsdp_template_of, load_deepspeed_template, resolve_deepspeed_config

log = logging.getLogger("harness")


def resolve_precision(precision: str, device: torch.device) -> str:
    """ "auto" becomes bf16 where the device computes in it, else fp16 on a GPU, else fp32."""
    if precision != "auto":
        return precision
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    return "fp32"


def master_dtype(engine: str, precision: str) -> torch.dtype:
    """dtype in which the model is built: float32 shards or copies, but DeepSpeed keeps its own float32 masters of 16-bit weights."""
    if engine == "zero":
        return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]
    return torch.float32


def initial_settings(args: Arguments, engine: str) -> MemorySettings:
    """The memory settings that arguments and template ask for."""
    settings = MemorySettings(
        micro_batch_size=args.train.per_device_train_batch_size,
        activation_checkpointing=args.train.activation_checkpointing,  # type: ignore[arg-type]
        loss_chunk_size=args.train.loss_chunk_size,
    )
    if engine == "fsdp":
        template = fsdp_template_of(args, os.environ)
        assert template is not None
        offload = "cpu" if template.cpu_offload else "none"
        settings = settings.replace(reshard_after_forward=template.reshard_after_forward, param_offload=offload)
    elif engine == "zero":
        zero = (load_deepspeed_template(args, os.environ) or {}).get("zero_optimization", {})
        offload_optimizer = zero.get("offload_optimizer", {})
        settings = settings.replace(
            optimizer_offload=float(offload_optimizer.get("ratio", 1.0)) if offload_optimizer.get("device", "none") != "none" else 0.0,
            param_offload=zero.get("offload_param", {}).get("device", "none"),
        )
    return settings


def _resolved_ds_config(args: Arguments, coordinator: Coordinator, model: Any, precision: str, total_steps: int) -> dict[str, Any]:
    template = load_deepspeed_template(args, os.environ)
    assert template is not None
    text = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    config, findings = resolve_deepspeed_config(
        template,
        args,
        coordinator.num_processes,
        total_steps=total_steps,
        hidden_size=int(getattr(text, "hidden_size", 0) or 0) or None,
        precision=precision,
        largest_parameter=max(parameter.numel() for parameter in model.parameters()),
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
        engine: "ddp", "fsdp" or "zero".

    Returns:
        The engine, and the template as used (written into the run's folder).

    Raises:
        UserError: what only the model can show to be wrong in a template.
    """
    build = Build(args, coordinator, empty_model, settings, precision, total_steps)
    used: dict[str, Any] = {}
    made: Any
    if engine == "zero":
        from harness.engines.zero import ZeroEngine

        used = _resolved_ds_config(args, coordinator, empty_model.model, precision, total_steps)
        made = ZeroEngine(build, used)
    elif engine == "fsdp":
        from harness.engines.fsdp import FsdpEngine

        template = fsdp_template_of(args, os.environ)
        assert template is not None
        made = FsdpEngine(build, template)
        used = {key: value for key, value in vars(template).items() if key != "notes"}
    else:
        from harness.engines.ddp import DdpEngine

        made = DdpEngine(build)
    log.info("engine=%s num_processes=%d backend=%s precision=%s", made.name, coordinator.num_processes, coordinator.backend, precision)
    log.info("layout: %s", made.describe())
    return made, used
