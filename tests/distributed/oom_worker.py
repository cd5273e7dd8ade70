"""`run_clm.py` with out-of-memory errors raised where a test asks for them: the allocator's own exception at the place it would come from.

    HARNESS_TEST_OOM="forward:1:3 backward:all:9"     python -m tests.distributed.oom_worker <arguments of run_clm.py>

Each word is place:rank:call[:life]; rank is a number or "all", call counts from 1 the times the rank comes to that place in its life.
`life` is 0, the first, where it is left out; "all" is every life.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


from harness import guard_line


class Injector:
    """Raises once for each word, at the wanted place and count, on the wanted rank."""

    def __init__(self, text: str) -> None:
        self.rank = os.environ.get("RANK", "0")
        wanted = [(word + ":0").split(":")[:4] for word in text.split()]
        here = str(guard_line.attempt())
        self.wanted = {(place, int(call)) for place, rank, call, life in wanted if rank in ("all", self.rank) and life in ("all", here)}
        self.counts: dict[str, int] = {}

    def at(self, place: str) -> None:
        import torch

        self.counts[place] = self.counts.get(place, 0) + 1
        if (place, self.counts[place]) in self.wanted:
            print(f"[test] rank {self.rank} out of memory in {place}", flush=True)
            if place == "host-memory":
                take_host_memory()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (injected)")


def take_host_memory() -> None:
    """Takes the memory of the host, page by page, until the kernel ends this process."""
    blocks = []
    while True:
        blocks.append(bytearray(b"1") * 2**26)


def hook_model(module: Any, injector: Injector, compiled: bool) -> None:
    """Forward, recompute and backward of the second block; of a compiled one from outside, where the recompute is not seen."""
    from harness.modeling import layer_units

    block = layer_units(module)[1][1]
    inside = block if compiled else block.mlp

    def forward(*_: Any) -> None:
        # Under activation checkpointing the same module runs a second time, in backward.
        import torch

        if torch._C._current_graph_task_id() == -1:
            injector.at("forward" if module.training else "evaluation")
        else:
            injector.at("recompute")

    inside.register_forward_pre_hook(forward)
    inside.register_full_backward_hook(lambda *_: injector.at("backward"))


def wrap(owner: Any, name: str, place: str, injector: Injector) -> None:
    original: Callable[..., Any] = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        injector.at(place)
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


def install(injector: Injector) -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    from harness import job

    wrap(collectives.DefaultAllGather, "allocate", "gather-buffer", injector)
    wrap(collectives.DefaultReduceScatter, "allocate", "reduce-buffer", injector)
    from harness.sequence_parallel import SequenceParallel

    wrap(SequenceParallel, "allocate", "exchange-buffer", injector)
    wrap(job, "build_engine", "start", injector)
    make_recovery = job._recovery

    def make_and_hook(*args: Any, **kwargs: Any) -> Any:
        recovery = make_recovery(*args, **kwargs)
        engine = recovery.engine
        hook_model(engine.module, injector, getattr(getattr(engine, "blocks", None), "is_compiled", False))
        wrap(engine, "step", "update", injector)
        wrap(engine, "step", "host-memory", injector)
        wrap(engine, "save", "save", injector)
        if engine.name == "ddp" and engine.check is not None:
            wrap(engine, "_sum_gradients", "reduce-buffer", injector)
        if engine.name.startswith("zero"):
            hook_deepspeed(engine, injector)
        return recovery

    job._recovery = make_and_hook


def hook_deepspeed(engine: Any, injector: Injector) -> None:
    """Before the vote of a collective, where DeepSpeed has just allocated its buffer."""
    from deepspeed.comm import comm

    places = {"all_gather_into_tensor": "gather-buffer", "reduce_scatter_tensor": "reduce-buffer", "all_reduce": "reduce-buffer"}
    for name, place in places.items():
        original = getattr(comm.cdb, name)

        def collective(*args: Any, _original: Any = original, _place: str = place, **kwargs: Any) -> Any:
            if engine.in_step:
                injector.at(_place)
            return _original(*args, **kwargs)

        setattr(comm.cdb, name, collective)
    if engine.name == "zero3":
        hook_gathered_copies(engine, injector)


def hook_gathered_copies(engine: Any, injector: Injector) -> None:
    """Where DeepSpeed copies the second weight out of a buffer that it has gathered: half of the buffer's weights are there by then."""
    import torch
    from deepspeed.runtime.zero.partition_parameters import AllGatherCoalescedHandle

    wait, cat = AllGatherCoalescedHandle.wait, torch.cat

    def waiting(self: Any, *args: Any, **kwargs: Any) -> None:
        copies = [0]

        def counted(*tensors: Any, **options: Any) -> Any:
            copies[0] += 1
            if copies[0] == 2 and engine.in_step:
                injector.at("gathered-copy")
            return cat(*tensors, **options)

        torch.cat = counted
        try:
            wait(self, *args, **kwargs)
        finally:
            torch.cat = cat

    AllGatherCoalescedHandle.wait = waiting


if __name__ == "__main__":
    from harness import guard, run_clm

    if guard.needs_guard():
        sys.exit(guard.main())
    run_clm.stand_by(sys.argv[1:])
    install(Injector(os.environ.get("HARNESS_TEST_OOM", "")))
    sys.exit(run_clm.main())
