"""tests/distributed/test_zero_reset.py on cards, where gradients are reduced on a stream of their own and copied to the host beside it."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from launch.machine import free_port
from tests.distributed.test_zero_reset import DEVICES, DTYPES, wrong_updates

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def rank_main(rank: int, num_ranks: int, port: int, overlap: bool) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    import deepspeed

    torch.use_deterministic_algorithms(True)  # weights are compared to the bit
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    deepspeed.init_distributed("nccl")
    cases = list(itertools.product((1, 2, 3), DEVICES, DTYPES))
    wrong = wrong_updates(cases, seed=rank, device=f"cuda:{rank}", overlap_comm=overlap)
    dist.barrier()
    dist.destroy_process_group()
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("overlap", [False, True], ids=["in step", "overlapped"])
def test_updates_after_a_failed_try_are_right_on_cards(overlap: bool) -> None:
    num_ranks = min(2, torch.cuda.device_count())
    mp.spawn(rank_main, args=(num_ranks, free_port(), overlap), nprocs=num_ranks)
