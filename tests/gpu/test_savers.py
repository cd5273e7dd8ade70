"""On a GPU: optimizers and gathering that take less, with the weights of those that take more; a step of them does not wait either."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu.test_fast_paths import alone, batch, build, losses, step_without_waiting  # noqa: F401

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
FSDP = ["--fsdp", "full_shard"]


@pytest.mark.parametrize("flags", [[], FSDP])
def test_averages_in_bfloat16_train_like_float32_and_take_half(alone: Any, flags: list[str]) -> None:  # noqa: F811
    engine = "fsdp" if flags else "ddp"
    whole, half = build(alone, engine, *flags), build(alone, engine, *flags, "--optim", "adamw_bf16")
    assert losses(half) == pytest.approx(losses(whole), rel=5e-3)
    sizes = []
    for made in (whole, half):
        averages = [state[name] for state in made.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        sizes.append(sum(average.numel() * average.element_size() for average in averages))
    assert sizes[1] == sizes[0] / 2
    half.forward_backward(batch(1), 1020)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        half.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("flags", [[], FSDP])
@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_bf16"])
def test_updates_in_backward_make_the_same_weights_with_less_memory(alone: Any, optim: str, flags: list[str]) -> None:  # noqa: F811
    """The order of sums differs between two runs of some kernels; weights are compared by what the updates have moved them."""
    engine = "fsdp" if flags else "ddp"
    common = [*flags, "--optim", optim, "--max_grad_norm", "0", "--per_device_train_batch_size", "4"]
    after, inside = build(alone, engine, *common), build(alone, engine, *common, "--optim_in_backward")
    start = [parameter.detach().clone() for parameter in after.module.parameters()]
    assert losses(inside) == pytest.approx(losses(after), rel=1e-3)
    for first, one, two in zip(start, after.module.parameters(), inside.module.parameters(), strict=True):
        moved = (one - first).norm()
        assert float((one - two).norm() / moved) < 0.2
    peaks = []
    short = batch(0, 16)  # of which a step keeps little beside gradients
    for made in (after, inside):
        made.forward_backward(short, 60)  # compiles
        made.step()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        made.forward_backward(short, 60)
        torch.cuda.synchronize()
        peaks.append((torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before))
        made.step()
    gradients = 4 * sum(parameter.numel() for parameter in after.module.parameters())
    assert peaks[0][0] >= gradients > 4 * peaks[1][0], (peaks, gradients)
    assert peaks[1][1] < peaks[0][1], (peaks, gradients)
    step_without_waiting(inside)


@pytest.mark.parametrize("compiled", [True, False])
def test_weights_gathered_in_float8_train_like_those_cast_after(alone: Any, compiled: bool) -> None:  # noqa: F811
    pytest.importorskip("torchao")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("the card has no float8")
    common = [*FSDP, "--fp8", "tensorwise", *([] if compiled else ["--torch_compile", "False"])]
    after, before = build(alone, "fsdp", *common), build(alone, "fsdp", *common, "--fp8_all_gather")
    assert before.gathers_float8 and not after.gathers_float8  # one process gains nothing by it
    assert losses(before) == pytest.approx(losses(after), rel=2e-2)
    assert before.blocks.is_compiled is compiled
    assert {type(value) for value in before.snapshot_state()["model"].values()} == {torch.Tensor}
    step_without_waiting(before)
