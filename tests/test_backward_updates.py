"""Updates inside backward: the same weights as updates after it, one gradient at a time, and nothing updated where nothing may be."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from harness.engine_memory import engine_memory
from harness.ladder import MemorySettings
from harness.model_shape import RunShape

SIZES = "hidden_size=32,intermediate_size=64,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,tie_word_embeddings=true"


@pytest.fixture
def coordinator(alone: None) -> Any:
    from harness import coordination

    made = coordination.start(timeout_s=60)
    yield made
    made.close()


def build(coordinator: Any, *flags: str) -> Any:
    from harness import modeling
    from harness.engines.base import materialise_optimizer
    from harness.engines.build import build_engine, initial_settings, master_dtype
    from harness.parsing import parse_args

    base = f"--model_type llama --config_overrides {SIZES} --tokenizer_name bytes --train_file none --output_dir none --precision fp32"
    more = "--learning_rate 1e-3 --weight_decay 0.1 --max_grad_norm 0 --lr_scheduler_type linear"
    args = parse_args([*base.split(), *more.split(), "--per_device_train_batch_size", "4", *flags])
    config = modeling.load_config(args.model)
    empty = modeling.build_empty(args.model, config, modeling.load_tokenizer(args.model), dtype=master_dtype("ddp", "fp32"), seed=0)
    engine = build_engine("ddp", args, coordinator, empty, initial_settings(args, "ddp"), "fp32", 10)[0]
    materialise_optimizer(engine.module, engine.optimizer)
    return engine


def forward_backward(engine: Any, step: int) -> None:
    from harness.batches import make_sample, make_step_batch

    ids = np.random.default_rng(step).integers(0, 259, (4, 16))
    engine.forward_backward(make_step_batch([make_sample(row) for row in ids], 0.0, pin_memory=False), 60)


def weights(engine: Any) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in engine.module.parameters()]


def equal(one: list[torch.Tensor], two: list[torch.Tensor]) -> list[bool]:
    return [torch.equal(first, second) for first, second in zip(one, two, strict=True)]


def gradients(engine: Any) -> int:
    return sum(parameter.grad is not None for parameter in engine.module.parameters())


@pytest.mark.parametrize("micro", [4, 2])
def test_weights_are_those_of_updates_after_backward(micro: int, coordinator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.backward_updates import BackwardUpdates

    after, inside = build(coordinator), build(coordinator, "--optim_in_backward")
    count = len(list(inside.module.parameters()))
    alive = []
    original = BackwardUpdates._update
    monkeypatch.setattr(BackwardUpdates, "_update", lambda self, *rest: (alive.append(gradients(inside)), original(self, *rest)))
    for engine in (after, inside):
        assert engine.apply(engine.settings.replace(micro_batch_size=micro))
    for step in range(3):
        forward_backward(after, step)
        forward_backward(inside, step)
        assert gradients(inside) == 0 and inside.updates.has_begun
        norms = [engine.step() for engine in (after, inside)]
        assert norms[1] == pytest.approx(float(norms[0]), rel=1e-6) and not inside.updates.has_begun
    assert all(equal(weights(after), weights(inside)))
    assert after.learning_rate() == inside.learning_rate() == pytest.approx(7e-4)
    # One micro-batch a step: each gradient is the only one. With two, those of the first wait for the second.
    assert alive == ([1] * count if micro == 4 else list(range(count, 0, -1))) * 3
    one, two = (engine.optimizer.state_dict() for engine in (after, inside))
    assert one["param_groups"] == two["param_groups"] and one["state"].keys() == two["state"].keys()
    assert all(torch.equal(one["state"][key][name], two["state"][key][name]) for key in one["state"] for name in one["state"][key])


def test_a_gradient_that_is_not_finite_leaves_its_parameter_alone(coordinator: Any) -> None:
    engine = build(coordinator, "--optim_in_backward")
    names = [name for name, _ in engine.module.named_parameters()]
    bad = names.index("model.layers.1.mlp.up_proj.weight")
    handle = list(engine.module.parameters())[bad].register_hook(lambda gradient: gradient * float("nan"))
    before = weights(engine)
    forward_backward(engine, 0)
    assert not torch.isfinite(engine.step()) and engine.num_skipped_steps() == 1
    assert [index for index, same in enumerate(equal(before, weights(engine))) if same] == [bad]
    handle.remove()
    forward_backward(engine, 1)
    assert torch.isfinite(engine.step()) and engine.num_skipped_steps() == 1
    assert not any(equal(before, weights(engine)))


def test_a_step_that_only_tries_updates_nothing(coordinator: Any) -> None:
    engine = build(coordinator, "--optim_in_backward")
    before = weights(engine)
    with engine.updates.left_out():
        forward_backward(engine, 0)
    assert all(equal(before, weights(engine))) and gradients(engine) == 0 and not engine.updates.has_begun
    assert {float(state["step"]) for state in engine.optimizer.state.values()} == {0.0}


def fails_in(engine: Any, place: str) -> Any:
    """Raises once, in the backward of the first block, or in the forward."""
    block = engine.module.model.layers[0]
    raised: list[str] = []

    def fail(*_: Any) -> None:
        if not raised:
            raised.append(place)
            raise torch.OutOfMemoryError("CUDA out of memory (injected)")

    return block.mlp.register_full_backward_hook(fail) if place == "backward" else block.mlp.register_forward_pre_hook(fail)


def recovery_of(engine: Any, coordinator: Any, monkeypatch: pytest.MonkeyPatch, guarded: bool) -> Any:
    from harness import guard_line
    from harness.coordination import StopFlag
    from harness.ladder import default_ladder
    from harness.recovery import Recovery

    monkeypatch.setattr(guard_line, "can_relaunch", lambda: guarded)
    return Recovery(coordinator, StopFlag(), engine, default_ladder(engine.settings, block_size=16))


def test_what_was_not_updated_yet_is_made_again(coordinator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, engine = build(coordinator), build(coordinator, "--optim_in_backward")
    fails_in(engine, "forward")
    recovery = recovery_of(engine, coordinator, monkeypatch, guarded=False)
    recovery.run("step", forward_backward, engine, 0)
    forward_backward(plain, 0)
    for each in (plain, engine):
        each.step()
    assert all(equal(weights(plain), weights(engine)))
    assert [step["change"] for step in recovery.steps_down] == ["activation_checkpointing none -> selective"]


def test_after_the_first_update_all_start_again(coordinator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from harness import guard_line
    from harness.oom_reports import EndOfLadderError

    class StartedAgain(BaseException):
        pass

    told: list[dict[str, Any]] = []

    def relaunch(report: dict[str, Any]) -> None:
        told.append(report)
        raise StartedAgain

    monkeypatch.setattr(guard_line, "relaunch", relaunch)
    engine = build(coordinator, "--optim_in_backward")
    fails_in(engine, "backward")
    recovery = recovery_of(engine, coordinator, monkeypatch, guarded=True)
    recovery.before_relaunch = lambda: pytest.fail("what is half updated must not be kept")
    with pytest.raises(StartedAgain):
        recovery.run("step", forward_backward, engine, 0)
    assert engine.updates.has_begun and recovery.steps_down == []
    assert (told[0]["phase"], told[0]["agreed"], told[0]["rank"]) == ("step", False, 0) and "begun" not in told[0]
    alone = build(coordinator, "--optim_in_backward")
    fails_in(alone, "backward")
    with pytest.raises(EndOfLadderError, match="updated in backward: the step cannot be made again"):
        recovery_of(alone, coordinator, monkeypatch, guarded=False).run("step", forward_backward, alone, 0)
    # In the dry run nothing is updated, so it is made again.
    dry = build(coordinator, "--optim_in_backward")
    before = weights(dry)
    fails_in(dry, "backward")
    recovery = recovery_of(dry, coordinator, monkeypatch, guarded=False)
    recovery.dry_run(forward_backward, dry, 0)
    assert all(equal(before, weights(dry))) and len(recovery.steps_down) == 1


def test_the_planner_counts_no_gradients_of_the_whole_model() -> None:
    from tests.test_planner import SHAPE

    for engine, processes in (("ddp", 1), ("fsdp", 8)):
        run = RunShape(engine, processes, 4096, samples_per_step=4)  # type: ignore[arg-type]
        inside = dataclasses.replace(run, in_backward=True)
        for micro, expected in ((4, 0.0), (2, 4.0 / processes)):
            assert engine_memory(SHAPE, inside, MemorySettings(micro)).growing_gradients == expected
            assert engine_memory(SHAPE, run, MemorySettings(micro)).growing_gradients == 4.0 / processes
        assert engine_memory(SHAPE, inside, MemorySettings(4)).reduce + engine_memory(SHAPE, inside, MemorySettings(4)).pending > 0


def test_other_engines_refuse_it_when_they_are_built() -> None:
    from harness.check_savers import in_backward_findings

    keys = [("zero", 2, "bf16", False), ("device_map", 1, "bf16", False), ("ddp", 2, "bf16", False), ("fsdp", 2, "fp16", False)]
    assert all(len(list(in_backward_findings(*key[:3], offloads=key[3]))) == 1 for key in keys)
    fine = [("fsdp", 2, "bf16"), ("ddp", 1, "fp32")]
    assert not any(list(in_backward_findings(*key, offloads=False)) for key in fine)
