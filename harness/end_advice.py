"""What a run says when nothing is left to lower: where the memory of a card goes, and what would help, in GiB.

    Expected at the peak with these settings (backward, 61.20 GiB): weights 12.01, optimizer state 24.02, activations 18.40, ...
    By estimate a card would need, instead of 63.10 GiB: 34.20 with 4 GPUs instead of 2 (fits); 55.00 with --block_size 1024; ...

Estimates of the memory planner for the job at hand; where it has nothing to say of it, neither is said.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import importlib.util
import logging
import os
from typing import Any

from harness.args import Arguments
from harness.candidates import Candidate, evaluate
from harness.cards import card_of_size, hardware_of
from harness.engine_memory import GIB, OPTIMIZER_STATE_BYTES
from harness.ladder import MemorySettings
from harness.memory import lora_request, machine_factors, measure
from harness.model_shape import RunShape
from harness.run_plan import JobFacts, engine_name, probe_request, run_shape

log = logging.getLogger("harness")

# All ranks must have ended a minute after the last failure; measuring a model anew takes some 10 s.
TIMEOUT_S = 40.0
# A sample of so many tokens may be shared by several cards.
LONG_TOKENS = 8192
LORA_R = 16


def advice(args: Arguments, facts: JobFacts, settings: MemorySettings) -> str:
    """Two sentences on the lowest settings; on the main process only.

    Returns:
        "" where the planner does not know the engine or the model.
    """
    try:
        return _advice(args, facts, settings)
    except Exception as error:  # the run is over: what ended it must be said, whatever becomes of the advice
        log.debug("no advice: %s", error)
        return ""


def _advice(args: Arguments, facts: JobFacts, settings: MemorySettings) -> str:
    engine = engine_name(args, settings.engine or facts.engine, os.environ)
    if engine is None or args.train.optim not in OPTIMIZER_STATE_BYTES:
        return ""
    run = run_shape(args, engine, facts, os.environ)
    jobs = {"": (run, probe_request(args, run)), **_changes(args, run)}
    with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
        futures = {name: pool.submit(_estimate, args, facts, settings, *job) for name, job in jobs.items()}
        estimates = {name: future.result() for name, future in futures.items()}
    now = estimates.pop("")
    if now is None:
        return ""
    parts = sorted(now.estimate.parts.items(), key=lambda part: -part[1])
    shown = ", ".join(f"{name.replace('_', ' ')} {value / GIB:.2f}" for name, value in parts if value >= 0.005 * GIB)
    need, limit = now.estimate.expected_bytes, facts.gpu_bytes
    text = f" Expected at the peak with these settings ({now.estimate.peak_phase}, {now.estimate.allocated_bytes / GIB:.2f} GiB): {shown}."
    less = {name: each.estimate.expected_bytes for name, each in estimates.items() if each and each.estimate.expected_bytes < need}
    if less:
        changes = "; ".join(f"{size / GIB:.2f} with {name}{' (fits)' if size <= limit else ''}" for name, size in less.items())
        text += f" By estimate a card would need, instead of {need / GIB:.2f} GiB: {changes}."
    return text


def _changes(args: Arguments, run: RunShape) -> dict[str, tuple[RunShape, dict[str, Any]]]:
    """Jobs that need less, by what the user would change."""
    request = probe_request(args, run)
    changes = {}
    if run.engine != "ddp":
        more = dataclasses.replace(run, num_processes=2 * run.num_processes, num_local_processes=2 * run.num_local_processes)
        if run.shard_group_size is not None:
            more = dataclasses.replace(more, shard_group_size=2 * run.shard_group_size)
        changes[f"{more.num_processes} GPUs instead of {run.num_processes}"] = (more, request)
    elif run.num_processes > 1:
        changes["--engine fsdp"] = (dataclasses.replace(run, engine="fsdp"), request)
    size = 2 * run.sequence_parallel_size
    if run.block_size >= LONG_TOKENS and run.num_processes % size == 0:
        shared = dataclasses.replace(run, sequence_parallel_size=size, samples_per_step=2 * run.samples_per_step)
        changes[f"--sequence_parallel_size {size}"] = (shared, probe_request(args, shared))
    if run.block_size >= 256:
        half = dataclasses.replace(run, block_size=run.block_size // 2)
        changes[f"--block_size {half.block_size}"] = (half, probe_request(args, half))
    if not run.lora:
        changes[f"--lora_r {LORA_R}"] = (dataclasses.replace(run, lora=True), {**request, "lora": lora_request(LORA_R)})
    if OPTIMIZER_STATE_BYTES[run.optimizer] > OPTIMIZER_STATE_BYTES["adamw_bf16"] and not run.engine.startswith("zero"):
        changes["--optim adamw_bf16"] = (dataclasses.replace(run, optimizer="adamw_bf16"), request)
    if run.optimizer.startswith("adamw_") and run.optimizer != "adamw_8bit" and importlib.util.find_spec("torchao") is not None:
        changes["--optim adamw_8bit"] = (dataclasses.replace(run, optimizer="adamw_8bit"), request)
    return changes


def _estimate(args: Arguments, facts: JobFacts, settings: MemorySettings, run: RunShape, request: dict[str, Any]) -> Candidate | None:
    """The lowest settings in one of those jobs; None where the model could not be measured in time."""
    modes = sorted({"none", settings.activation_checkpointing})
    needed = {"weights": [run.weights], "checkpointing": modes, "loss_chunks": [settings.loss_chunk_size]}
    try:
        measured = measure([{**request, **needed}], timeout_s=TIMEOUT_S)
    except Exception as error:
        log.debug("no estimate for %s: %s", run, error)
        return None
    factors = machine_factors(facts.gpu_name, run.engine) if facts.gpu_name else None
    hardware = hardware_of(facts.gpu_name or card_of_size(facts.gpu_bytes))
    return evaluate(settings.replace(engine=""), measured, run, hardware, factors)
