"""AdamW with averages in bfloat16: torch's updates up to rounding, rounding that has no drift, states that survive files and restarts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness import bf16_adam
from harness.bf16_adam import AdamWBf16, round_by_chance_

ADAM: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8}


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((32, 16), (7,), (16, 8))]


def optimizers(dtype: torch.dtype = torch.float32) -> tuple[torch.optim.AdamW, AdamWBf16]:
    """torch's and ours over equal parameters, in two groups."""
    made = []
    for kind, more in ((torch.optim.AdamW, {"fused": True}), (AdamWBf16, {})):
        first, second, third = parameters(dtype)
        groups = [{"params": [first, third], "weight_decay": 0.1}, {"params": [second], "weight_decay": 0.0}]
        made.append(kind(groups, **ADAM, **more))
    return made[0], made[1]


def flat(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def update(optimizer: torch.optim.Optimizer, number: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(number)
    for parameter in flat(optimizer):
        parameter.grad = (scale * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype)
    optimizer.step()


@pytest.mark.parametrize("piece", [2**24, 100])
def test_updates_are_torchs_up_to_rounding(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf16_adam, "BF16_UPDATE_PIECE", piece)
    theirs, ours = optimizers()
    for optimizer in (theirs, ours):
        update(optimizer, 0)
    # The averages of the first update were not rounded before it.
    assert all(torch.equal(one, two) for one, two in zip(flat(theirs), flat(ours), strict=True))
    for number in range(1, 60):
        for optimizer in (theirs, ours):
            update(optimizer, number, 1.0 if number < 30 else 0.1)
    for one, two in zip(flat(theirs), flat(ours), strict=True):
        assert 0 < (one - two).norm() < 1e-3 * one.norm()
        state = ours.state[two]
        assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype, state["step"].item()) == (torch.bfloat16, torch.bfloat16, 60.0)
        for name in ("exp_avg", "exp_avg_sq"):
            expected = theirs.state[one][name]
            assert (state[name].float() - expected).norm() < 2e-2 * expected.norm()


def test_the_average_of_squares_falls_when_gradients_do() -> None:
    """Rounded to the nearest it would stay where it was for ever."""
    ours = AdamWBf16([nn.Parameter(torch.zeros(4096))], **ADAM)
    (parameter,) = flat(ours)
    parameter.grad = torch.ones(4096)
    ours.step()
    before = ours.state[parameter]["exp_avg_sq"].float().mean()
    for _ in range(700):
        parameter.grad = torch.zeros(4096)
        ours.step()
    assert ours.state[parameter]["exp_avg_sq"].float().mean() / before == pytest.approx(0.999**700, rel=5e-3)
    assert (0.999 * torch.ones(1, dtype=torch.bfloat16)).to(torch.bfloat16) == 1.0  # what rounding to the nearest does


def test_rounding_is_to_a_neighbour_without_drift_and_depends_on_the_update() -> None:
    rounds = []
    for number in range(256):
        values = torch.full((512,), 1.001)
        round_by_chance_(values, torch.tensor(float(number)))
        rounds.append(values)
    assert torch.cat(rounds).unique().tolist() == [1.0, 1.0078125]
    share = torch.stack(rounds).mean(dim=0)  # of each place, over the updates
    assert (share - 1.001).abs().max() < 1e-4
    assert not torch.equal(rounds[0], rounds[1])
    again = torch.full((512,), 1.001)
    round_by_chance_(again, torch.tensor(7.0))
    assert torch.equal(again, rounds[7])
    exact = torch.tensor([0.0, -1.5, 3.0e38, float("inf"), -float("inf")])
    kept = exact.to(torch.bfloat16).float()
    rounded = kept.clone()
    round_by_chance_(rounded, torch.tensor(3.0))
    assert torch.equal(rounded, kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_that_is_left_out_changes_nothing(dtype: torch.dtype) -> None:
    _, ours = optimizers(dtype)
    for number in range(3):
        update(ours, number)
    before = copy.deepcopy(ours.state_dict()["state"])
    weights = [parameter.detach().clone() for parameter in flat(ours)]
    ours.found_inf, ours.grad_scale = torch.ones(()), None
    update(ours, 3, float("nan"))
    after = ours.state_dict()["state"]
    assert all(torch.equal(one, two) for one, two in zip(weights, flat(ours), strict=True))
    assert all(torch.equal(after[key][name], before[key][name]) for key in before for name in before[key])
    ours.found_inf = torch.zeros(())
    update(ours, 3)
    assert all(state["step"] == 4 for state in ours.state.values())
    assert not any(torch.equal(one, two) for one, two in zip(weights, flat(ours), strict=True))


def test_weights_without_float32_masters_move_by_less_than_their_rounding() -> None:
    """An update of a thousandth of a bfloat16's distance to its neighbour is made by one weight in a thousand."""
    theirs, ours = (
        kind([nn.Parameter(torch.ones(20000, dtype=torch.bfloat16))], lr=1e-5, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, **more)  # type: ignore[operator]
        for kind, more in ((torch.optim.AdamW, {"fused": True}), (AdamWBf16, {}))
    )
    for optimizer in (theirs, ours):
        for _ in range(20):
            flat(optimizer)[0].grad = torch.ones(20000, dtype=torch.bfloat16)
            optimizer.step()
    assert flat(theirs)[0].float().mean() == 1.0
    assert 1 - flat(ours)[0].detach().float().mean().item() == pytest.approx(20 * 1e-5, rel=0.15)


def test_a_loaded_state_goes_on_to_the_bit() -> None:
    _, ours = optimizers()
    for number in range(3):
        update(ours, number)
    _, other = optimizers()
    with torch.no_grad():
        for one, two in zip(flat(other), flat(ours), strict=True):
            one.copy_(two)
    other.load_state_dict(copy.deepcopy(ours.state_dict()))
    assert all(state["exp_avg"].dtype == torch.bfloat16 for state in other.state.values())
    for optimizer in (ours, other):
        update(optimizer, 3)
    assert all(torch.equal(one, two) for one, two in zip(flat(other), flat(ours), strict=True))


SIZES = "hidden_size=32,intermediate_size=64,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2"


def engine_with(optim: str, coordinator: Any, *flags: str, settings: dict[str, Any] | None = None) -> Any:
    from harness import modeling
    from harness.engines.base import materialise_optimizer
    from harness.engines.build import build_engine, initial_settings, master_dtype
    from harness.parsing import parse_args

    base = f"--model_type llama --config_overrides {SIZES} --tokenizer_name bytes --train_file none --output_dir none --precision fp32"
    args = parse_args([*base.split(), "--optim", optim, "--learning_rate", "1e-3", *flags])
    config = modeling.load_config(args.model)
    empty = modeling.build_empty(args.model, config, modeling.load_tokenizer(args.model), dtype=master_dtype("ddp", "fp32"), seed=0)
    begin = initial_settings(args, "ddp").replace(**(settings or {}))
    engine = build_engine("ddp", args, coordinator, empty, begin, "fp32", 100)[0]
    materialise_optimizer(engine.module, engine.optimizer)
    return engine


def forward(engine: Any, step: int) -> None:
    import numpy as np

    from harness.batches import make_sample, make_step_batch

    ids = np.random.default_rng(step).integers(0, 259, (2, 16))
    engine.forward_backward(make_step_batch([make_sample(row) for row in ids], 0.0, pin_memory=False), 30)


def train(engine: Any, first: int, last: int) -> None:
    for step in range(first, last):
        forward(engine, step)
        engine.step()


def test_checkpoints_and_snapshots_hold_it_and_other_optimizers_take_it_over(alone: None, tmp_path: Path) -> None:
    from harness import coordination

    coordinator = coordination.start(timeout_s=60)
    straight = engine_with("adamw_bf16", coordinator)
    assert {state["exp_avg"].dtype for state in straight.optimizer.state.values()} == {torch.bfloat16}
    assert {state["step"].item() for state in straight.optimizer.state.values()} == {0.0}
    train(straight, 0, 3)
    straight.save(tmp_path).result()
    snapshot = copy.deepcopy(straight.snapshot_state())
    train(straight, 3, 5)
    for way in ("file", "snapshot"):
        resumed = engine_with("adamw_bf16", coordinator)
        resumed.load(tmp_path) if way == "file" else resumed.load_snapshot(snapshot)
        assert {state["exp_avg_sq"].dtype for state in resumed.optimizer.state.values()} == {torch.bfloat16}
        train(resumed, 3, 5)
        assert all(torch.equal(one, two) for one, two in zip(straight.module.parameters(), resumed.module.parameters(), strict=True)), way
    whole = engine_with("adamw_torch_fused", coordinator)
    whole.load(tmp_path)
    assert {state["exp_avg"].dtype for state in whole.optimizer.state.values()} == {torch.float32}
    train(whole, 3, 5)
    back = engine_with("adamw_bf16", coordinator)
    whole.save(tmp_path / "whole").result()
    back.load(tmp_path / "whole")
    for one, two, three in zip(straight.module.parameters(), whole.module.parameters(), back.module.parameters(), strict=True):
        assert (one - two).norm() < 1e-3 * one.norm() and torch.equal(two, three)
        average, rounded = whole.optimizer.state[two]["exp_avg"], back.optimizer.state[three]["exp_avg"]
        assert rounded.dtype == torch.bfloat16 and torch.equal(rounded, average.to(torch.bfloat16))
        assert back.optimizer.state[three]["step"] == 5
    coordinator.close()


def test_a_rung_halves_the_averages_and_keeps_what_they_were(alone: None, tmp_path: Path) -> None:
    """The step that ran out of memory is made again with half the state; until then, and to the bit, it is torch's optimizer."""
    from harness import coordination
    from harness.coordination import StopFlag
    from harness.ladder import parse_ladder
    from harness.recovery import Recovery

    coordinator = coordination.start(timeout_s=60)
    plain = engine_with("adamw_torch_fused", coordinator)
    engine = engine_with("adamw_torch_fused", coordinator, "--oom_ladder", "optimizer_bf16")
    for each in (plain, engine):
        train(each, 0, 3)
    assert all(torch.equal(one, two) for one, two in zip(plain.module.parameters(), engine.module.parameters(), strict=True))
    before = {id(key): state["exp_avg"].clone() for key, state in engine.optimizer.state.items()}
    failed: list[str] = []

    def fail(*_: Any) -> None:
        if not failed:
            failed.append("forward")
            raise torch.OutOfMemoryError("CUDA out of memory (injected)")

    engine.module.model.layers[0].mlp.register_forward_pre_hook(fail)
    recovery = Recovery(coordinator, StopFlag(), engine, parse_ladder(["optimizer_bf16"], engine.settings))
    recovery.run("step", lambda: forward(engine, 3))
    assert [step["change"] for step in recovery.steps_down] == ["optimizer_bf16 False -> True"]
    for key, state in engine.optimizer.state.items():
        assert state["exp_avg"].dtype == torch.bfloat16 and torch.equal(state["exp_avg"], before[id(key)].to(torch.bfloat16))
    engine.step()
    train(plain, 3, 6)
    train(engine, 4, 6)
    for one, two in zip(plain.module.parameters(), engine.module.parameters(), strict=True):
        assert 0 < (one - two).norm() < 1e-3 * one.norm()
    assert not engine.apply(engine.settings.replace(optimizer_bf16=False))  # it does not go back up
    assert not plain.apply(plain.settings.replace(optimizer_bf16=True))
    # The next life begins where this one was.
    engine.save(tmp_path).result()
    resumed = engine_with("adamw_torch_fused", coordinator, settings={"optimizer_bf16": True})
    resumed.load(tmp_path)
    for each in (engine, resumed):
        train(each, 6, 8)
    assert all(torch.equal(one, two) for one, two in zip(resumed.module.parameters(), engine.module.parameters(), strict=True))
    coordinator.close()
