"""Float8 layers keep names, shapes and dtypes of their weights, compute nearly the same, and are refused where they cannot run."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.findings import UserError
from harness.float8 import check_float8, convert_to_float8, gathers_float8, plain


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_converted_layers_compute_nearly_the_same(recipe: str) -> None:
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    block = torch.nn.Sequential(torch.nn.Linear(32, 64, bias=False), torch.nn.SiLU(), torch.nn.Linear(64, 32), torch.nn.Linear(32, 10))
    names = {name: (parameter.shape, parameter.dtype) for name, parameter in block.named_parameters()}
    inputs = torch.randn(16, 32)
    expected = block(inputs)
    assert convert_to_float8(block, recipe, emulate=True) == 2  # ten outputs are no multiple of 16
    assert {name: (parameter.shape, parameter.dtype) for name, parameter in block.named_parameters()} == names
    got = block(inputs)
    assert 1e-4 * expected.norm() < (got - expected).norm() < 0.1 * expected.norm()
    got.sum().backward()
    assert all(parameter.grad is not None and parameter.grad.dtype == torch.float32 for parameter in block.parameters())


@pytest.mark.parametrize(
    ("capability", "message"), [((8, 0), r"NVIDIA A100 \(compute capability 8.0\) has no float8"), ((8, 9), None), ((9, 0), None)]
)
def test_old_cards_are_refused_by_name(capability: tuple[int, int], message: str | None, monkeypatch: Any) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA A100")
    if message is None:
        check_float8(torch.device("cuda"))
        return
    with pytest.raises(UserError, match=message):
        check_float8(torch.device("cuda"))


def test_without_a_card_or_torchao_it_is_refused(monkeypatch: Any) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    with pytest.raises(UserError, match="no float8 arithmetic on cpu"):
        check_float8(torch.device("cpu"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="torchao is not installed -> pip install torchao"):
        check_float8(torch.device("cuda"))


def test_weights_are_gathered_in_float8_where_that_gains_something() -> None:
    on_card = {"num_shards": 2, "offloads": False}
    assert gathers_float8(None, "tensorwise", **on_card) and gathers_float8(True, "tensorwise", **on_card)
    assert not gathers_float8(False, "tensorwise", **on_card) and not gathers_float8(None, "rowwise", **on_card)
    assert not gathers_float8(None, "tensorwise", num_shards=1, offloads=False) and gathers_float8(
        True, "tensorwise", num_shards=1, offloads=False
    )
    assert not gathers_float8(None, "tensorwise", num_shards=2, offloads=True)
    for recipe, offloads, reason in (("rowwise", False, "--fp8 is rowwise"), ("tensorwise", True, "weights live in host memory")):
        with pytest.raises(UserError, match=f"--fp8_all_gather.*one scale a tensor.*{reason}"):
            gathers_float8(True, recipe, num_shards=2, offloads=offloads)


def test_only_weights_that_divide_by_the_ranks_are_gathered_in_float8() -> None:
    pytest.importorskip("torchao")
    block = torch.nn.Sequential(torch.nn.Linear(32, 96), torch.nn.Linear(96, 32), torch.nn.Linear(32, 10))
    values = block[0].weight.detach().clone()
    assert convert_to_float8(block, "tensorwise", gather_over=3, emulate=True) == 2
    wrapped = [type(layer.weight.data) is not torch.Tensor for layer in block]
    assert wrapped == [True, False, False]  # 96 rows, 32 rows, and a layer that stays as it was
    assert torch.equal(plain(block[0].weight.data), values) and block[0].weight.dtype == torch.float32


def test_a_run_that_gathers_in_float8_trains_saves_and_goes_on(alone: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    from harness import coordination
    from harness.engines import fsdp
    from tests.test_bf16_adam import train

    monkeypatch.setattr(fsdp, "check_float8", lambda device: None)
    monkeypatch.setattr(fsdp, "convert_to_float8", functools.partial(convert_to_float8, emulate=True))
    coordinator = coordination.start(timeout_s=60)
    straight = fsdp_engine(coordinator)
    weight = straight.module.model.layers[0].mlp.up_proj.weight
    scale = float(weight._local_tensor._precomputed_scale)
    assert scale == pytest.approx(448 / float(plain(weight._local_tensor).abs().max()))
    train(straight, 0, 3)
    assert float(weight._local_tensor._precomputed_scale) == pytest.approx(448 / float(plain(weight._local_tensor).abs().max())) != scale
    straight.save(tmp_path).result()
    snapshot = copy.deepcopy(straight.snapshot_state())
    assert {type(value) for value in snapshot["model"].values()} == {torch.Tensor}
    train(straight, 3, 5)
    weights = dict(straight.full_weights())
    assert {type(value) for value in weights.values()} == {torch.Tensor}
    for way in ("file", "snapshot"):
        resumed = fsdp_engine(coordinator)
        resumed.load(tmp_path) if way == "file" else resumed.load_snapshot(snapshot)
        train(resumed, 3, 5)
        assert all(torch.equal(value, weights[name]) for name, value in resumed.full_weights()), way
    # What is on disk says nothing of float8.
    without = fsdp_engine(coordinator, "--fp8", "no", "--fp8_all_gather", "False")
    without.load(tmp_path)
    before = {name: value.clone() for name, value in without.full_weights()}
    train(without, 3, 5)
    for name, value in without.full_weights():
        moved = (weights[name] - before[name]).norm()
        assert 0 < (value - weights[name]).norm() < 0.5 * moved, name
    coordinator.close()


def fsdp_engine(coordinator: Any, *flags: str) -> Any:
    from harness import modeling
    from harness.engines.base import materialise_optimizer
    from harness.engines.build import build_engine, initial_settings, master_dtype
    from harness.parsing import parse_args
    from tests.test_bf16_adam import SIZES

    base = f"--model_type llama --config_overrides {SIZES} --tokenizer_name bytes --train_file none --output_dir none --precision bf16"
    more = "--fsdp full_shard --learning_rate 1e-3 --fp8 tensorwise --fp8_all_gather True"
    args = parse_args([*base.split(), *more.split(), *flags])
    config = modeling.load_config(args.model)
    empty = modeling.build_empty(args.model, config, modeling.load_tokenizer(args.model), dtype=master_dtype("fsdp", "bf16"), seed=0)
    engine = build_engine("fsdp", args, coordinator, empty, initial_settings(args, "fsdp"), "bf16", 100)[0]
    materialise_optimizer(engine.module, engine.optimizer)
    return engine
