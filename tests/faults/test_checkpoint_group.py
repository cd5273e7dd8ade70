"""A collective of the writers that came to its limit fails one save, not every later one."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from concurrent.futures import Future
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

LIMIT_S = 2.0


def save_three_times(rank: int, folder: str, result: Connection) -> None:
    """The first save finds rank 1 later than the limit: two processes that were stopped together see no more of it than that."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from harness.checkpoint import Checkpointer
    from harness.coordination import Coordinator

    logging.disable(logging.CRITICAL)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    coordinator = Coordinator(2, rank, rank, 2, torch.device("cpu"), "gloo", LIMIT_S, host_group=dist.new_group(backend="gloo"))
    coordinator.checkpoint_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=LIMIT_S))

    class Engine:
        name = "ddp"
        num_saves = 0

        def save(self, directory: Path) -> Future[None]:
            self.num_saves += 1
            if self.num_saves == 1 and rank == 1:
                time.sleep(1.5 * LIMIT_S)
            state = {"weight": torch.full((4,), float(self.num_saves))}
            return dcp.async_save(state, checkpoint_id=str(directory), process_group=coordinator.checkpoint_group)  # type: ignore[return-value]

        def load(self, directory: Path) -> None:
            raise AssertionError("nothing is loaded here")

    output = Path(folder) / "out"
    checkpointer = Checkpointer(output, Engine(), coordinator)
    outcomes = [checkpointer.save(step, {"step": step}, wait=True) for step in (1, 2, 3)]
    if rank == 0:
        result.send((outcomes, checkpointer.last_failure))
    result.close()
    dist.barrier(group=coordinator.host_group)
    time.sleep(0.1)
    os._exit(0)


@pytest.mark.slow
def test_after_a_save_that_came_to_the_limit_the_next_ones_are_written(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    ranks: list[Any] = [context.Process(target=save_three_times, args=(rank, str(tmp_path), theirs), daemon=True) for rank in range(2)]
    for rank in ranks:
        rank.start()
    theirs.close()
    try:
        assert ours.poll(120)
        outcomes, failure = ours.recv()
        assert outcomes == [False, True, True]
        assert "imed out" in failure or "closed" in failure or "closure" in failure
        assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["checkpoint-2", "checkpoint-3"]
    finally:
        for rank in ranks:
            rank.join(10)
            rank.kill()
