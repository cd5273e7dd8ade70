"""What a run prepares for its next life: whether a process waits to begin it (harness.standby), and what that one imports ahead."""

from __future__ import annotations

import importlib
import logging

import torch

from harness import cgroups, guard_line, modeling, standby
from harness.args import Arguments
from harness.coordination import Coordinator
from harness.host_threads import ask_cpu_once
from harness.machine import free_host_bytes

log = logging.getLogger("harness")

# Memory of the host that a process takes which has imported everything, counted generously, and the cores that its imports keep busy.
STANDBY_BYTES = 2 * 2**30
STANDBY_CORES = 2


def ask_for_standby(args: Arguments, coordinator: Coordinator) -> bool:
    """Has the guard keep a process ready for the next life, where there may be one (`--oom_standby`). Returns whether it was asked."""
    wanted = args.train.oom_standby
    if args.train.no_oom_recovery or wanted == "off" or not standby.is_able:
        return False
    if wanted == "auto":
        num_local = coordinator.num_local_processes
        has_room = free_host_bytes() >= 4 * STANDBY_BYTES * num_local and cgroups.usable_cores() >= STANDBY_CORES * num_local
        ran_out = (guard_line.cause() or {}).get("memory") == "host"  # of what such a process takes more of
        if coordinator.device.type != "cuda" or not has_room or ran_out:
            return False
    if not guard_line.ask_for_standby():
        return False
    log.info("a process beside each rank's imports everything and waits, for a new start after an out-of-memory (--oom_standby off: none)")
    return True


def import_ahead(args: Arguments, engine_name: str) -> None:
    """Imports what a run with these arguments will, without touching a GPU."""
    config = modeling.load_config(args.model)
    tokenizer = modeling.load_tokenizer(args.model)
    modeling.build_empty(args.model, config, tokenizer, dtype=torch.bfloat16, seed=args.train.seed)
    names = [f"harness.engines.{engine_name}", "torch._dynamo", "transformers.optimization", "transformers.trainer_pt_utils", "peft"]
    if engine_name == "zero":  # its Muon comes with any optimizer
        names += ["deepspeed.ops.adam", "deepspeed.module_inject", "deepspeed.runtime.zero.muon.muon_optimizer"]
        ask_cpu_once()
    for name in names:
        importlib.import_module(name)
