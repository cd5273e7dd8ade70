"""What DeepSpeed's processes on CPUs talk by goes with them, and they talk without its name."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from harness.engines.zero import unname_shared_memory
from launch.machine import free_port
from tests.faults.fork_ranks import ForkServer


def rank_main(rank: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_SIZE="2")
    import deepspeed

    def names() -> list[str]:
        return [path.name for path in Path("/dev/shm").glob(f"deepspeed_*_127.0.0.1_{port}_{rank}")]

    dist.init_process_group("gloo")
    deepspeed.init_distributed("gloo", dist_init_required=False)
    dist.barrier()
    assert len(names()) == 1
    unname_shared_memory(rank)
    assert names() == []
    values = torch.full((64,), float(rank + 1))
    deepspeed.comm.inference_all_reduce(values)  # by that memory
    assert values.tolist() == [3.0] * 64
    dist.barrier()
    dist.destroy_process_group()


def two_ranks() -> None:
    mp.start_processes(rank_main, args=(free_port(),), nprocs=2, start_method="fork")


def test_it_has_no_name_and_is_still_there(server: ForkServer, tmp_path: Path) -> None:
    from tests.distributed import test_shared_memory

    server.call(test_shared_memory.two_ranks, output=tmp_path / "out")
