"""States that wait in host memory until they are written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_a_sharded_state_is_written_as_it_was_when_it_was_copied(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    from harness.engines import dcp
    from harness.host_copies import HostCopies

    mesh, copies, first = init_device_mesh("cpu", (1,)), HostCopies(), torch.arange(12.0).view(3, 4)
    for step in range(3):  # the host memory is used again
        weight = distribute_tensor(first + step, mesh, [Shard(0)])
        state = {
            "model": {"weight": weight, "tied": weight},
            "optimizer": {"step": torch.tensor(float(step)), "lr": 0.5, "whole": first + step},
        }
        copy = dcp.staged(state, copies)
        weight.to_local().zero_()
        state["optimizer"]["whole"].zero_()
        sharded = copy["model"]["weight"]
        assert isinstance(sharded, DTensor) and (sharded.device_mesh, sharded.placements) == (mesh, (Shard(0),))
        assert sharded.to_local().data_ptr() == copy["model"]["tied"].to_local().data_ptr()
        folder = tmp_path / str(step)
        checkpoint.async_save(copy, async_stager=dcp._Staged(), checkpoint_id=str(folder)).result()  # type: ignore[arg-type]
        read = {"model": {"weight": torch.empty(3, 4)}, "optimizer": {"step": torch.empty(()), "lr": 0.0, "whole": torch.empty(3, 4)}}
        checkpoint.load(read, checkpoint_id=str(folder))
        assert torch.equal(read["model"]["weight"], first + step) and torch.equal(read["optimizer"]["whole"], first + step)  # type: ignore[arg-type]
        assert (float(read["optimizer"]["step"]), read["optimizer"]["lr"]) == (step, 0.5)
