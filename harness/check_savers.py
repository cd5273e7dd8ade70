"""What does not go together with the flags that save memory in the optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from harness.args import Arguments, TrainArguments
from harness.findings import Finding, UserError
from harness.machine import Machine
from harness.templates import fsdp_template_of

_FLAG = "--optim_in_backward"
# Optimizers that leave out an update by a flag on the device: the host reads nothing inside backward.
_IN_BACKWARD = ("adamw_torch_fused", "adamw_bf16")
_FIRST_WITH_BF16 = (8, 0)


def saver_findings(args: Arguments, engine: str, num_processes: int, environ: Mapping[str, str], machine: Machine) -> Iterator[Finding]:
    """Errors of `--optim adamw_bf16` and `--optim_in_backward`.

    Args:
        engine: "ddp", "fsdp", "zero" or "device_map".
    """
    train = args.train
    yield from optimizer_findings(train.optim, engine)
    if "optimizer_bf16" in train.oom_ladder and train.optim != "adamw_torch_fused":
        reason = "has them so from the start" if train.optim == "adamw_bf16" else "has none of that kind"
        message = f"optimizer_bf16 keeps the averages of adamw_torch_fused in bfloat16; --optim {train.optim} {reason}"
        yield Finding("error", "--oom_ladder", message, "leave it out")
    if not train.optim_in_backward:
        return
    if engine == "ddp" and num_processes == 1 and len(machine.gpus) > 1 and "WORLD_SIZE" not in environ and not train.use_cpu:
        engine = "device_map"  # which one process with several cards gets without asking
    has_no_bf16 = any(gpu.compute_capability < _FIRST_WITH_BF16 for gpu in machine.gpus) and not train.use_cpu
    precision = "fp16" if train.precision == "auto" and has_no_bf16 else train.precision
    yield from in_backward_findings(engine, num_processes, precision, offloads=_offloads(args, engine, environ))
    yield from _settings_findings(train, num_processes)


def optimizer_findings(optim: str, engine: str) -> Iterator[Finding]:
    """Where `--optim adamw_bf16` cannot run."""
    if optim == "adamw_bf16" and engine == "zero":
        message = "adamw_bf16 is not for DeepSpeed, which keeps optimizer states in files and copies of its own as float32"
        yield Finding("error", "--optim", message, "--fsdp full_shard, or --optim adamw_torch_fused")


def _offloads(args: Arguments, engine: str, environ: Mapping[str, str]) -> bool:
    try:
        template = fsdp_template_of(args, environ) if engine == "fsdp" else None
    except UserError:  # said elsewhere
        return False
    return template is not None and template.cpu_offload


def in_backward_findings(engine: str, num_processes: int, precision: str, *, offloads: bool) -> Iterator[Finding]:
    """Where a parameter cannot be updated in backward, as errors.

    Args:
        precision: "bf16", "fp16", "fp32" or, where it is not known yet, "auto".
        offloads: weights live in host memory.
    """
    if engine == "zero":
        yield Finding("error", _FLAG, "is not for DeepSpeed, which updates its own copies of weights", "--fsdp full_shard")
    elif engine == "device_map":
        message = "is not for device maps, whose backward runs on several cards at once"
        yield Finding("error", _FLAG, message, "one process a card, with --fsdp full_shard")
    elif engine == "ddp" and num_processes > 1:
        message = "is not for DDP, which sums gradients over processes when all of them are there"
        yield Finding("error", _FLAG, message, "--fsdp full_shard, which keeps a share of weights and states too")
    if precision == "fp16":
        message = "does not go with fp16, whose loss scale is right or wrong for all gradients at once"
        yield Finding("error", _FLAG, message, "--precision bf16 or fp32")
    if offloads:
        yield Finding("error", _FLAG, "frees nothing where weights live in host memory: their gradients do too", "leave one of the two out")


def accumulation_findings(accumulation: int) -> Iterator[Finding]:
    """Where updates in backward would leave gradients of a whole step in memory all the same."""
    if accumulation > 1:
        message = f"frees nothing with {accumulation} micro-batches in a step: gradients of all but the last one stay"
        yield Finding("error", _FLAG, message, "one larger micro-batch, --gradient_accumulation_steps 1")


def _settings_findings(train: TrainArguments, num_processes: int) -> Iterator[Finding]:
    if train.optim not in _IN_BACKWARD:
        message = f"--optim {train.optim} cannot leave out an update of one parameter"
        yield Finding("error", _FLAG, message, "--optim adamw_torch_fused or adamw_bf16")
    if train.max_grad_norm > 0:
        message = f"does not go with --max_grad_norm {train.max_grad_norm:g}: the norm is known when all updates are made"
        yield Finding("error", _FLAG, message, "--max_grad_norm 0")
    if any(word.partition("=")[0] == "param_offload" for word in train.oom_ladder):
        message = "param_offload frees nothing with --optim_in_backward: gradients of weights in host memory stay there"
        yield Finding("error", "--oom_ladder", message, "leave it out")
    accumulation = train.gradient_accumulation_steps
    if train.target_batch_size is not None:
        accumulation = train.target_batch_size // max(1, train.per_device_train_batch_size * num_processes)
    yield from accumulation_findings(accumulation)
