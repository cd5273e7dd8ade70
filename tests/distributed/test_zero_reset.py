"""Updates after a failed forward or backward under ZeRO are the ones of an undisturbed step, whatever DeepSpeed had counted until then.

The trap: with optimizer state in host memory under stage 2, the first micro-batches' gradients of the retry were overwritten by the
last's. The loss of the step was right, and Adam takes gradients of any scale, so only later losses told. Plain SGD tells at once.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.checkpoint import checkpoint

from harness.engines import zero, zero_reset
from launch.machine import free_port
from tests.distributed.failing_step import fails
from tests.faults.fork_ranks import ForkServer

# What the retry does is two micro-batches where the failed try was one, and three where it was two.
PLACES = (
    "forward of micro-batch 1",
    "forward of micro-batch 2",
    "backward of micro-batch 1",
    "backward of micro-batch 2",
    "recompute of micro-batch 2",
    "end of micro-batch 1",
)
DEVICES = ("none", "cpu")
# Weights in bfloat16 sum up in float32 in another buffer.
BF16 = {"bf16": {"enabled": True}}
DTYPES: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": BF16, "bf16, sums in fp32": {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}}


def config(stage: int, device: str, dtype: str, **more: Any) -> dict[str, Any]:
    """DeepSpeed's, for a model this small; `more` goes into its "zero_optimization"."""
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": 600, "stage3_param_persistence_threshold": 40, **more}
    if device != "none":
        zero["offload_optimizer"] = {"device": device}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,
        **DTYPES[dtype],
    }


class Model(torch.nn.Module):
    """Two recomputed blocks, of which the first has a frozen part, as under LoRA."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(32, 16)
        self.blocks = torch.nn.ModuleList(
            [torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.Tanh(), torch.nn.Linear(24, 16)) for _ in "ab"]
        )
        self.head = torch.nn.Linear(16, 32, bias=False)
        self.blocks[0][0].requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        states = self.embed(ids)
        for block in self.blocks:
            states = states + checkpoint(block, states, use_reentrant=False)
        return torch.nn.functional.cross_entropy(self.head(states)[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def build(ds_config: dict[str, Any]) -> Any:
    import deepspeed

    model = Model()
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1.0)
    return deepspeed.initialize(model=model, config=ds_config, optimizer=optimizer, dist_init_required=False)[0]


def micro_batches(engine: Any, batches: list[torch.Tensor], fail_at: str) -> bool:
    """All micro-batches of a step; True when the wanted failure came."""

    def run(ids: torch.Tensor) -> None:
        engine.set_gradient_accumulation_boundary(ids is batches[-1])
        engine.backward(engine(ids) * (len(ids) / 6), scale_wrt_gas=False)

    return fails(engine.module.blocks[1], [functools.partial(run, ids) for ids in batches], fail_at)


def weights(engine: Any) -> list[torch.Tensor]:
    from deepspeed.utils import safe_get_full_fp32_param

    return [safe_get_full_fp32_param(weight).clone() for weight in engine.module.parameters() if weight.requires_grad]


def two_steps(engine: Any, samples: list[torch.Tensor], fail_at: str) -> tuple[list[torch.Tensor], list[float], bool]:
    """Weights and gradient norms after two steps, the first of which fails once, with larger micro-batches than it is then made of."""
    norms, failed = [], False
    for number, step in enumerate(samples):
        if fail_at and number == 0:
            failed = micro_batches(engine, list(step.split(3)), fail_at)
            zero_reset.reset(engine)
        assert not micro_batches(engine, list(step.split(2)), "")
        engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    return weights(engine), norms, failed


def wrong_updates(cases: list[tuple[int, str, str]], seed: int, device: str = "cpu", **zero: Any) -> list[str]:
    """What differs after a failed try from a run without one, for each case and place; called in step on all ranks.

    Args:
        cases: (ZeRO stage, device of the optimizer's state, dtypes).
        seed: of this rank's samples.
        device: where the model is.
        zero: more for DeepSpeed's "zero_optimization".
    """
    source = torch.Generator().manual_seed(seed)
    samples = [torch.randint(0, 32, (6, 8), generator=source).to(device) for _ in range(2)]
    wrong = []
    for case in cases:
        expected, norms, _ = two_steps(build(config(*case, **zero)), samples, "")
        for place in PLACES:
            got, got_norms, failed = two_steps(build(config(*case, **zero)), samples, place)
            if not failed:
                wrong.append(f"stage {case}, {place}: nothing failed")
            bad = [index for index, (one, two) in enumerate(zip(got, expected, strict=True)) if not torch.equal(one, two)]
            if bad or got_norms != norms:
                wrong.append(f"stage {case}, {place}: weights {bad} differ, norms {got_norms} instead of {norms}")
    return wrong


def rank_main(rank: int, port: int, cases: list[tuple[int, str, str]]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    import deepspeed

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    deepspeed.init_distributed("gloo")
    dist.barrier()
    zero.unname_shared_memory(rank)
    gc.collect()
    gc.freeze()  # DeepSpeed collects garbage whenever an engine is built
    wrong = wrong_updates(cases, seed=rank)
    dist.barrier()
    dist.destroy_process_group()
    assert not wrong, "\n".join(wrong)


def two_ranks(cases: list[tuple[int, str, str]]) -> None:
    mp.start_processes(rank_main, args=(free_port(), cases), nprocs=2, start_method="fork")


def check(server: ForkServer, cases: list[tuple[int, str, str]], output: Path) -> None:
    """All in one pair of processes, forked where everything is imported."""
    from tests.distributed import test_zero_reset

    server.call(test_zero_reset.two_ranks, cases, output=output)


def test_updates_after_a_failed_try_are_right(server: ForkServer, tmp_path: Path) -> None:
    check(server, [(2, "cpu", "fp32"), (2, "none", "bf16"), (3, "cpu", "bf16")], tmp_path / "out")


@pytest.mark.slow
def test_updates_after_a_failed_try_are_right_under_every_stage(server: ForkServer, tmp_path: Path) -> None:
    check(server, list(itertools.product((1, 2, 3), DEVICES, DTYPES)), tmp_path / "out")
