"""From the first forward of a step to its commit vote the host reads nothing from the device: not in one process, DDP or FSDP2.

A rank that waits for its device cannot take part in recovery, and a host that waits cannot run ahead. (DeepSpeed reads it many times.)
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp

from launch.machine import free_port
from tests.sync_counter import SyncCounter

OVERRIDES = "hidden_size=32,intermediate_size=48,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,max_position_embeddings=64"
PACKED = "two documents in a row, kept apart"


def build(engine: str, checkpointing: str, coordinator: Any) -> Any:
    from harness import modeling
    from harness.engines.build import build_engine, initial_settings, master_dtype
    from harness.parsing import parse_args
    from harness.votes import checker, make_vote

    flags = f"--model_type llama --config_overrides {OVERRIDES} --tokenizer_name bytes --train_file none --output_dir none --use_cpu"
    flags += f" --precision bf16 --per_device_train_batch_size 2 --activation_checkpointing {checkpointing} --loss_chunk_size 8"
    args = parse_args(flags.split() + (["--fsdp", "full_shard"] if engine == "fsdp" else []))
    config = modeling.load_config(args.model)
    dtype = master_dtype(engine, "bf16")
    empty = modeling.build_empty(args.model, config, modeling.load_tokenizer(args.model), dtype=dtype, seed=0)
    made, _ = build_engine(engine, args, coordinator, empty, initial_settings(args, engine), "bf16", 10)
    made.install_votes(checker(make_vote(coordinator)))
    return made


def batch(kind: str) -> Any:
    from harness.batches import make_sample, make_step_batch

    samples = [make_sample(np.arange(16) + number) for number in range(4)]
    if kind == PACKED:
        for sample in samples:
            sample["document_ids"][9:] = 1
            sample["position_ids"][9:] -= 9
    return make_step_batch(samples, 0.0)


def places(engine: Any, kind: str) -> tuple[dict[str, int], dict[str, int]]:
    """What waits in forward and backward, and in the update."""
    for _ in range(2):  # the first update makes the optimizer's state
        engine.forward_backward(batch(kind), 60)
        engine.step()
    with SyncCounter() as step:
        engine.forward_backward(batch(kind), 60)
    with SyncCounter() as update:
        engine.step()
    return dict(step.places), dict(update.places)


@pytest.fixture(scope="module")
def alone() -> Iterator[Any]:
    from harness import coordination

    coordinator = coordination.start(use_cpu=True, timeout_s=60)
    yield coordinator
    coordinator.close()


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_one_process_never_waits(checkpointing: str, alone: Any) -> None:
    engine = build("ddp", checkpointing, alone)
    for kind in ("whole", PACKED):
        assert places(engine, kind) == ({}, {}), kind


def test_what_waits_is_found(alone: Any) -> None:
    engine = build("ddp", "none", alone)
    engine.module.model.layers[1].register_forward_hook(lambda module, inputs, output: output * float(output.sum() != 7))
    engine.module.model.layers[1].mlp.down_proj.weight.register_hook(lambda gradient: gradient * bool(gradient.any()))
    step, update = places(engine, "whole")
    assert sorted(place.split(":")[0] for place in step) == ["aten._local_scalar_dense at test_no_sync.py"] * 2
    assert sum(step.values()) == 4 and update == {}  # of two micro-batches


def rank_main(rank: int, port: int, failures: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    torch.set_num_threads(1)
    from harness import coordination

    coordinator = coordination.start(use_cpu=True, timeout_s=60)
    for engine in ("ddp", "fsdp"):
        made = build(engine, "selective", coordinator)
        for kind in ("whole", PACKED):
            found = places(made, kind)
            if found != ({}, {}):
                failures.put(f"rank {rank}, {engine}, {kind}: {found}")
    failures.put(f"rank {rank} done")
    torch.distributed.barrier()
    os._exit(0)


def test_ranks_of_ddp_and_fsdp_never_wait() -> None:
    messages = mp.get_context("spawn").SimpleQueue()
    mp.spawn(rank_main, args=(free_port(), messages), nprocs=2)
    found = []
    while not messages.empty():
        found.append(messages.get())
    assert sorted(found) == ["rank 0 done", "rank 1 done"]
