"""Inputs of blocks that wait in host memory: the same gradients, each moved once, and a rung of the ladder."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from harness import activation_offload
from harness.activation_offload import HostActivations
from harness.engine_memory import offloaded_input_bytes
from harness.findings import UserError
from harness.ladder import MemorySettings, parse_ladder
from harness.model_shape import RunShape

LEAST_BYTES = activation_offload._LEAST_BYTES
SIZES = "hidden_size=32,intermediate_size=64,num_hidden_layers=4,num_attention_heads=4,num_key_value_heads=2"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "_LEAST_BYTES", 0)


def build(coordinator: Any, *flags: str) -> Any:
    from harness import modeling
    from harness.engines.build import build_engine, initial_settings, master_dtype
    from harness.parsing import parse_args

    base = f"--model_type llama --config_overrides {SIZES} --tokenizer_name bytes --train_file none --output_dir none --precision fp32"
    args = parse_args([*base.split(), "--per_device_train_batch_size", "2", *flags])
    config = modeling.load_config(args.model)
    empty = modeling.build_empty(args.model, config, modeling.load_tokenizer(args.model), dtype=master_dtype("ddp", "fp32"), seed=0)
    return build_engine("ddp", args, coordinator, empty, initial_settings(args, "ddp"), "fp32", 100)[0]


def gradients(engine: Any) -> list[torch.Tensor]:
    from harness.batches import make_sample, make_step_batch

    ids = np.random.default_rng(0).integers(0, 259, (4, 16))
    engine.module.zero_grad(set_to_none=True)
    engine.forward_backward(make_step_batch([make_sample(row) for row in ids], 0.0, pin_memory=False), 60)
    return [parameter.grad.clone() for parameter in engine.module.parameters()]


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_are_the_same_and_each_input_moves_once(compiled: bool, alone: None) -> None:
    from harness import coordination

    coordinator = coordination.start(timeout_s=60)
    compiling = ["--torch_compile", "--torch_compile_backend", "aot_eager"] if compiled else []
    for mode in ("full", "selective"):
        flags = [*compiling, "--activation_checkpointing", mode]
        expected = gradients(build(coordinator, *flags))
        engine = build(coordinator, *flags, "--activation_offload")
        for _ in range(2):
            assert all(torch.equal(one, two) for one, two in zip(gradients(engine), expected, strict=True))
        # Two steps of two micro-batches of four blocks; the inputs of the last two blocks never leave.
        assert (engine.blocks.host.num_saved, engine.blocks.host.num_fetched) == (16, 8)
        assert engine.apply(engine.settings.replace(activation_offload=False)) and engine.blocks.host is None
        assert all(torch.equal(one, two) for one, two in zip(gradients(engine), expected, strict=True))
    coordinator.close()


def test_only_tensors_of_the_input_s_shape_move() -> None:
    weight = torch.nn.Parameter(torch.ones(3, 4))
    host = HostActivations(torch.device("cpu"), least_bytes=0)
    hidden = torch.randn(3, 4, requires_grad=True)
    result = host.call(lambda value: value * weight + (value @ torch.ones(4, 2)).sum(), hidden)
    result.sum().backward()
    assert host.num_saved == 1  # the weight, of the same shape, and the product's other side stay
    assert hidden.grad is not None and weight.grad is not None and torch.equal(weight.grad, hidden.detach())
    with torch.no_grad():
        host.call(lambda value: value * weight, hidden)
    assert host.num_saved == 1


def test_nothing_outlives_its_graph() -> None:
    host = HostActivations(torch.device("cpu"), least_bytes=0)
    hidden = torch.randn(8, 4, requires_grad=True)
    kept = []
    for _ in range(5):
        hidden = host.call(lambda value: checkpoint(lambda x: torch.sin(x) * 2, value, use_reentrant=False), hidden)
    node = host.newest() if host.newest is not None else None
    while node is not None:
        kept.append(weakref.ref(node))
        node = node.before() if node.before is not None else None
    assert len(kept) == 5
    del hidden, node
    host.clear()
    gc.collect()
    assert [each() for each in kept] == [None] * 5


def test_the_rung_needs_checkpointing() -> None:
    start = MemorySettings(4)
    last = parse_ladder(["gradient_checkpointing", "activation_offload"], start)[-1]
    assert (last.activation_checkpointing, last.activation_offload) == ("full", True)
    with pytest.raises(UserError, match="no activation checkpointing at that place"):
        parse_ladder(["activation_offload"], start)
    with pytest.raises(UserError, match="would free nothing"):
        parse_ladder(["activation_offload", "activation_offload"], start.replace(activation_checkpointing="full"))


def test_the_planner_counts_what_moves() -> None:
    run = RunShape("fsdp", 2, 1024)
    settings = MemorySettings(4, "full", activation_offload=True)
    assert offloaded_input_bytes(settings, run, 512) == 4 * 1024 * 512 * 2
    assert offloaded_input_bytes(settings, RunShape("ddp", 2, 1024), 512) == 4 * 1024 * 512 * 4
    assert offloaded_input_bytes(settings.replace(activation_checkpointing="none"), run, 512) == 0
    assert offloaded_input_bytes(settings.replace(activation_offload=False), run, 512) == 0


def test_inputs_too_small_to_move_are_not_counted() -> None:
    from harness.engine_memory import LEAST_OFFLOADED_BYTES

    assert LEAST_OFFLOADED_BYTES == 2**20 == LEAST_BYTES
    run = RunShape("fsdp", 2, 1024)
    settings = MemorySettings(1, "full", activation_offload=True)
    assert [offloaded_input_bytes(settings, run, hidden) for hidden in (511, 512)] == [0.0, float(2**20)]
    assert offloaded_input_bytes(settings, RunShape("device_map", 2, 1024), 4096) == 0


def test_the_default_ladder_has_it_on_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.parsing import parse_args
    from harness.starting_settings import make_ladder

    args = parse_args(["--model_type", "llama", "--train_file", "none", "--output_dir", "none"])
    found = {}
    for on_card, engine in ((True, "ddp"), (False, "ddp"), (True, "device_map")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda on_card=on_card: on_card)
        ladder = make_ladder(args, engine, MemorySettings(2), block_size=128, num_parameters=10, num_processes=2)
        found[on_card, engine] = [(rung.micro_batch_size, rung.activation_checkpointing, rung.activation_offload) for rung in ladder]
    without = [(2, "none", False), (2, "selective", False), (2, "full", False), (1, "full", False)]
    assert found == {(True, "ddp"): [*without, (1, "full", True)], (False, "ddp"): without, (True, "device_map"): without}


def test_the_flag_without_checkpointing_is_refused(tmp_path: Path) -> None:
    from harness.check_arguments import check_arguments
    from harness.machine import Machine
    from harness.parsing import parse_args

    base = ["--model_type", "llama", "--config_overrides", SIZES, "--train_file", "none", "--output_dir", str(tmp_path / "out")]
    found = {}
    for name, engine, more in (("none", "ddp", []), ("full", "ddp", ["--gradient_checkpointing"]), ("map", "device_map", [])):
        args = parse_args([*base, "--activation_offload", *more])
        findings = check_arguments(args, engine=engine, num_processes=1, environ={}, machine=Machine())
        found[name] = [finding.message for finding in findings if finding.key == "--activation_offload"]
    assert found["full"] == [] and "without activation checkpointing" in found["none"][0] and "device map" in found["map"][0]
