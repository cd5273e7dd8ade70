"""Gradients after a failed forward or backward under FSDP2 are the ones of an undisturbed step, not only the loss.

The trap: gradients that a failed backward left on gathered parameters are added to the retry's, exactly doubling some of them, while the
loss looks right. Both ways of resetting are tried: torch's public one (2.13) and ours for older versions.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from harness.engines import fsdp_reset
from launch.machine import free_port
from tests.distributed.failing_step import fails
from tests.faults.fork_ranks import ForkServer

PUBLIC, OWN = "public reset", "reset for older torch"
PLACES = ("forward of micro-batch 2", "backward of micro-batch 1", "backward of micro-batch 2", "recompute of micro-batch 2")


def build(recompute: bool) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM

    from harness.blocks import set_activation_checkpointing

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    set_activation_checkpointing(model, "full" if recompute else "none")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model.train()


def gradients(model: Any) -> list[torch.Tensor]:
    return [parameter.grad.to_local().clone() for parameter in model.parameters()]


def step(model: Any, batches: list[torch.Tensor], fail_at: str) -> bool:
    """Two micro-batches; True when the wanted failure came."""
    runs = [lambda ids=ids: model(input_ids=ids, labels=ids).loss.backward() for ids in batches]
    return fails(model.model.layers[1].mlp, runs, fail_at)


def rank_main(rank: int, port: int, ways: list[str]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    source = torch.Generator().manual_seed(rank)
    batches = [torch.randint(0, 64, (2, 16), generator=source) for _ in range(2)]
    wrong = []
    for way, place in itertools.product(ways, PLACES):
        model = build(recompute=place.startswith("recompute"))
        assert not step(model, batches, "")
        expected = gradients(model)
        model.zero_grad()
        if not step(model, batches, place):
            wrong.append(f"{way}, {place}: nothing failed")
        model.zero_grad()
        if way == PUBLIC:
            model.reset_iter_state()
        else:
            fsdp_reset.reset(model)
        model.zero_grad()
        assert not step(model, batches, "")
        bad = [index for index, (one, two) in enumerate(zip(gradients(model), expected, strict=True)) if not torch.equal(one, two)]
        if bad:
            wrong.append(f"{way}, {place}: gradients {bad} differ")
    dist.barrier()
    dist.destroy_process_group()
    assert not wrong, "\n".join(wrong)


def two_ranks(ways: list[str]) -> None:
    mp.start_processes(rank_main, args=(free_port(), ways), nprocs=2, start_method="fork")


def test_recovered_gradients_are_right(server: ForkServer, tmp_path: Path) -> None:
    """Both ways in one pair of processes, forked where everything is imported."""
    from torch.distributed.fsdp import FSDPModule

    from tests.distributed import test_fsdp_reset

    server.call(test_fsdp_reset.two_ranks, [PUBLIC, OWN] if hasattr(FSDPModule, "reset_iter_state") else [OWN], output=tmp_path / "out")
