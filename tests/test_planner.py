"""`harness plan`: what it refuses, what it considers, the ladder, the report, and one plan from a config file to the end."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given as property_test
from hypothesis import settings as property_settings
from hypothesis import strategies as st

from harness import planner
from harness.candidates import Limits, micro_batches, pareto, plan_engine, variants
from harness.cards import card_bytes
from harness.findings import UserError
from harness.ladder import MemorySettings
from harness.machine import Gpu, Machine
from harness.model_shape import LayerKind, Measured, ModelShape, RunShape
from harness.plan_report import format_comparison, format_ladder, settings_text, start_line
from harness.step_time import Hardware, step_time

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30
LAYER = LayerKind(218_112_000, 218_112_000, 218_112_000, num_small=8192, largest_tensor=58_720_256)
SHAPE = ModelShape(
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128256,
    kinds=(LAYER,),
    kind_of_layer=(0,) * 32,
    num_root=1_050_677_248,
    num_root_trainable=1_050_677_248,
    num_embedding=525_336_576,
    num_head=525_336_576,
    model_type="llama",
    max_positions=8192,
)
MEASURED = Measured(SHAPE, 4096)
H100 = Hardware()
CARD = Limits(int(79.1 * GIB), 900 * GIB)


@pytest.fixture
def no_measuring(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Closed forms of an 8B Llama instead of a child process; returns what would have been asked."""
    asked: list[dict[str, Any]] = []

    def measure(requests: Any) -> Measured:
        asked.extend(requests)
        return Measured(SHAPE, requests[0]["block_size"] or 4096)

    monkeypatch.setattr(planner, "measure", measure)
    monkeypatch.setattr(planner, "detect_machine", Machine)
    return asked


# ------------------------------------------------------------------------------------------------------------------ nonsense in


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "--model: no model was given"),
        ("--model a --model_type llama", "--model_type: and --model were both given"),
        ("--model a --gpu_memory 80", "--gpu_memory: 80 has no unit -> write for example 80GB or 79.1GiB"),
        ("--model a --gpu_memory lots", "--gpu_memory: 'lots' is not a size"),
        ("--model a --gpu_memory 0GB", "--gpu_memory: must be positive, not 0GB"),
        ("--model a --gpu_memory=-80GB", "--gpu_memory: must be positive, not -80GB"),
        ("--model a --gpu_memory=-80", "--gpu_memory: -80 has no unit"),
        ("--model a --num_gpus 0", "--num_gpus: must be at least 1, not 0"),
        ("--model a --num_gpus -4", "--num_gpus: must be at least 1, not -4"),
        ("--model a --num_gpus four", "--num_gpus: invalid int value: 'four'"),
        ("--model a --block_size 1", "--block_size: must be at least 2, not 1"),
        ("--model a --per_device_train_batch_size 0", "--per_device_train_batch_size: must be at least 1, not 0"),
        ("--model a --loss_chunk_size -1", "--loss_chunk_size: must not be negative, but is -1"),
        ("--model a --optimizer_offload 2", "--optimizer_offload: is a share between 0 and 1, not 2.0"),
        ("--model a --gpu abacus", "--gpu: unknown card abacus"),
        ("--model a --engine horovod", "--engine: invalid choice: 'horovod'"),
        ("--model a --engine fsdp --num_gpus 6 --shard_group_size 4", "--shard_group_size: 6 cards cannot be cut into groups of 4"),
        ("--model a --engine ddp --param_offload cpu", "--param_offload: ddp keeps whole weights on the card"),
        ("--model a --gpu H100 --engine zero3 --optim adamw_bf16", "--optim: adamw_bf16 is not for DeepSpeed"),
        ("--model a --gpu H100 --num_gpus 2 --engine ddp --optim_in_backward", "--optim_in_backward: is not for DDP"),
        (
            "--model a --gpu H100 --num_gpus 2 --optim_in_backward --gradient_accumulation_steps 4",
            "--optim_in_backward: frees nothing with 4 micro-batches",
        ),
        ("--model a --lora_r 0", "--lora_r: must be at least 1, not 0"),
        ("--model a --target_modules q_proj", "--target_modules: is only used with --lora_r"),
        ("--model ./nothere/config.json", "--model: ./nothere/config.json does not exist"),
        (f"--model {__file__}", "test_planner.py is no config.json"),
        ("--model a --gpu_mem 80GB", "--gpu_mem: unknown argument -> did you mean --gpu_memory?"),
        (
            "--gpus 24GB --engine zero3 --model a --gpu-memory=80GB",
            "  error   --gpus: plans device maps; --gpu_memory with --num_gpus plans engines"
            " -> leave out --gpus, or --engine zero3, --gpu_memory",
        ),
        ("--gpus=24GB --engine device_map", "  error   --model: is required -> see harness plan --help"),
    ],
)
def test_nonsense_is_one_clear_message(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert planner.main(words.split()) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert len(printed.err.splitlines()) == 1
    assert printed.out == ""


def test_all_problems_at_once() -> None:
    with pytest.raises(UserError) as caught:
        planner.parse(["--num_gpus", "0", "--gpu_memory", "80", "--block_size", "0"])
    assert [finding.key for finding in caught.value.findings] == ["--num_gpus", "--block_size", "--model", "--gpu_memory"]


def test_no_card_here_and_none_named(no_measuring: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert planner.main(["--model", "a"]) == 2
    assert "--gpu_memory: this machine has no GPU, and no card was named" in capsys.readouterr().err


def test_hyphens_are_underscores() -> None:
    options = planner.parse(["--model", "a-b", "--gpu-memory=80GB", "--per-device-train-batch-size", "3"])
    assert (options.model, options.gpu_memory, options.per_device_train_batch_size) == ("a-b", "80GB", 3)


@pytest.mark.parametrize(("text", "gib"), [("80GB", 78.8), ("80GiB", 80.0), ("141GB", 138.885), ("24 GB", 23.64)])
def test_a_card_label_is_what_cuda_shows(text: str, gib: float) -> None:
    assert card_bytes(text) / GIB == pytest.approx(gib)


def test_cards_of_this_machine_are_the_default() -> None:
    machine = Machine((Gpu("NVIDIA H200", 150 * 10**9, (9, 0)),) * 4, 16, 10**12)
    options = planner.parse(["--model", "a"])
    hardware, num_bytes = planner._hardware(options, machine)
    assert (hardware.name, num_bytes, hardware.memory_bandwidth) == ("NVIDIA H200", 150 * 10**9, 4.8e12)
    named, num_bytes = planner._hardware(planner.parse(["--model", "a", "--gpu", "A100"]), machine)
    assert (named.peak_flops, num_bytes) == (312e12, int(79.2 * GIB))
    by_size, _ = planner._hardware(planner.parse(["--model", "a", "--gpu_memory", "80GB"]), Machine())
    assert by_size.name == "H100"


# --------------------------------------------------------------------------------------------------------------- what is considered


def test_micro_batches_cut_a_step_evenly() -> None:
    assert micro_batches(8) == [1, 2, 4, 8]
    assert micro_batches(12) == [1, 2, 3, 4, 6, 12]
    assert micro_batches(7) == [1, 7]
    many = micro_batches(5040)
    assert len(many) <= 12
    assert all(5040 % size == 0 for size in many)


def test_variants_keep_the_optimizer_step_and_what_was_typed() -> None:
    run = RunShape("zero3", 4, 4096, samples_per_step=4)
    given = MemorySettings(4, "full", 1024)
    everything = list(variants(MEASURED, run, given, CARD))
    assert len(everything) == len(set(everything)) == 3 * 2 * 3 * 5  # places, buffers, sizes, modes: two also with inputs on the host
    fixed = list(variants(MEASURED, run, given, CARD, pinned={"activation_checkpointing", "micro_batch_size"}))
    assert {(s.activation_checkpointing, s.micro_batch_size) for s in fixed} == {("full", 4)}
    assert all(s.optimizer_offload == 0 for s in variants(MEASURED, run, given, CARD, offload=False))
    assert all(s.optimizer_offload == 1 for s in variants(MEASURED, run, given, CARD, offload=True))
    missing = dataclasses.replace(MEASURED, unsupported=frozenset({"selective"}))
    assert {s.activation_checkpointing for s in variants(missing, run, given, CARD)} == {"none", "full"}
    on_disk = [s for s in variants(MEASURED, run, given, dataclasses.replace(CARD, nvme=True)) if s.param_offload == "nvme"]
    assert len(on_disk) == 2 * 3 * 5
    asked = list(variants(MEASURED, run, given.replace(activation_offload=True), CARD))
    assert len(asked) == 3 * 2 * 3 * 3 and all(s.activation_offload for s in asked)
    for engine in ("device_map", "ddp"):  # a map has none; inputs below 1 MiB stay on the card
        small = dataclasses.replace(MEASURED, block_size=8)
        alone = RunShape(engine, 4, 8, samples_per_step=4)  # type: ignore[arg-type]
        assert not any(s.activation_offload for s in variants(small, alone, given, CARD))


@pytest.mark.parametrize(("optimizer", "parameters"), [(0.3, "none"), (1.0, "nvme"), (1.0, "cpu"), (0.0, "none")])
def test_where_states_were_put_stays_in_every_variant(optimizer: float, parameters: Any) -> None:
    given = MemorySettings(4, loss_chunk_size=1024, optimizer_offload=optimizer, param_offload=parameters)
    run = RunShape("zero3", 4, 4096, samples_per_step=4)
    found = list(variants(MEASURED, run, given, CARD, pinned={"optimizer_offload", "param_offload"}))
    assert {(s.optimizer_offload, s.param_offload) for s in found} == {(optimizer, parameters)}
    assert len(found) == 2 * 3 * 5


def test_ladder_gets_slower_and_smaller() -> None:
    plan = plan_engine(MEASURED, RunShape("fsdp", 8, 4096, samples_per_step=8), H100, MemorySettings(8, loss_chunk_size=1024), CARD)
    times = [candidate.time.total_s for candidate in plan.ladder]
    needs = [candidate.estimate.high_bytes for candidate in plan.ladder]
    assert times == sorted(times)
    assert needs == sorted(needs, reverse=True)
    assert plan.chosen is not None and plan.chosen in plan.ladder
    faster = plan.ladder[: plan.ladder.index(plan.chosen)]
    assert all(candidate.misfit(CARD) for candidate in faster)
    fitting = [candidate for candidate in plan.candidates if not candidate.misfit(CARD)]
    assert plan.chosen.time.total_s == min(candidate.time.total_s for candidate in fitting)
    assert plan.largest_micro_batch == max(candidate.settings.micro_batch_size for candidate in fitting)


@dataclasses.dataclass(frozen=True)
class _Cost:
    total_s: float


@dataclasses.dataclass(frozen=True)
class _Point:
    time: _Cost
    need: int

    def need_bytes(self, figure: str) -> int:
        return self.need


@property_settings(max_examples=60, deadline=None)
@property_test(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 10**6)), min_size=1, max_size=30))
def test_nothing_beats_a_rung(costs: list[tuple[int, int]]) -> None:
    points = [_Point(_Cost(float(seconds)), need) for seconds, need in costs]
    ladder = pareto(points)  # type: ignore[arg-type,var-annotated]
    for rung in ladder:
        assert not any(p.time.total_s <= rung.time.total_s and p.need < rung.need_bytes("high") for p in points)
    # Whatever fits at all fits with the last rung.
    assert ladder[-1].need_bytes("high") == min(point.need for point in points)


def test_expected_figure_lets_in_what_the_high_one_keeps_out() -> None:
    run = RunShape("fsdp", 8, 4096, samples_per_step=4)
    base = plan_engine(MEASURED, run, H100, MemorySettings(4, loss_chunk_size=1024), CARD)
    target = base.ladder[0]
    between = Limits((target.estimate.expected_bytes + target.estimate.high_bytes) // 2)
    careful = plan_engine(MEASURED, run, H100, MemorySettings(4, loss_chunk_size=1024), between)
    bold = plan_engine(MEASURED, run, H100, MemorySettings(4, loss_chunk_size=1024), between, figure="expected")
    assert bold.chosen is not None and careful.chosen is not None
    assert bold.chosen.settings == target.settings != careful.chosen.settings


def test_host_memory_keeps_offload_out() -> None:
    run = RunShape("zero2", 1, 4096, samples_per_step=1)
    roomy = plan_engine(MEASURED, run, H100, MemorySettings(1, loss_chunk_size=1024), CARD)
    tight = plan_engine(MEASURED, run, H100, MemorySettings(1, loss_chunk_size=1024), dataclasses.replace(CARD, host_bytes=64 * GIB))
    assert roomy.chosen is not None and roomy.chosen.settings.optimizer_offload == 1
    assert tight.chosen is None
    assert not any(candidate.offload for candidate in tight.candidates)


# ------------------------------------------------------------------------------------------------------------------------ step time


def seconds(engine: str = "fsdp", processes: int = 8, hardware: Hardware = H100, samples: int = 8, **settings: Any) -> Any:
    run = RunShape(engine, processes, 4096, samples_per_step=samples)  # type: ignore[arg-type]
    return step_time(MemorySettings(**{"micro_batch_size": 4, "loss_chunk_size": 1024, **settings}), MEASURED, run, hardware)


def test_recompute_and_offload_cost_time() -> None:
    none, selective, full = (seconds(activation_checkpointing=mode).total_s for mode in ("none", "selective", "full"))
    assert none < selective < full < 1.5 * none
    assert seconds(param_offload="cpu").total_s > 1.3 * none
    assert seconds("zero3", optimizer_offload=0.5).total_s < seconds("zero3", optimizer_offload=1.0).total_s


def test_inputs_on_the_host_cost_what_compute_does_not_hide() -> None:
    stays, moves = (seconds(activation_checkpointing="full", activation_offload=on) for on in (False, True))
    one_way = 32 * 4 * 4096 * 4096 * 2 / 20e9  # layers, samples, tokens, hidden size, bytes; over PCIe
    assert one_way < stays.compute_s / 2 / 4  # of two micro-batches, a quarter is forward: all hidden
    assert moves.offload_s - stays.offload_s == pytest.approx(2 * 2 * 0.12 * one_way)
    slow = dataclasses.replace(H100, pcie_bandwidth=0.2e9)
    assert seconds(hardware=slow, activation_checkpointing="full", activation_offload=True).total_s > 1.5 * stays.total_s
    assert seconds(activation_offload=True) == seconds()  # without checkpointing nothing moves


def test_inputs_of_blocks_go_to_the_host_before_weights_do() -> None:
    """Of a long block: a card that is too small for the inputs of all layers, on a host that has room for them."""
    run = RunShape("fsdp", 8, 65536, samples_per_step=1)
    measured = dataclasses.replace(MEASURED, block_size=65536)
    plan = plan_engine(measured, run, H100, MemorySettings(1, loss_chunk_size=1024), CARD)
    inputs = 32 * 65536 * 4096 * 2
    without = [c for c in plan.candidates if not c.settings.activation_offload and not c.offload]
    smallest = min(c.estimate.expected_bytes for c in without)
    limits = dataclasses.replace(CARD, gpu_bytes=int(smallest - inputs / 2))
    tight = plan_engine(measured, run, H100, MemorySettings(1, loss_chunk_size=1024), limits, figure="expected")
    assert tight.chosen is not None
    assert (tight.chosen.settings.activation_offload, tight.chosen.settings.param_offload) == (True, "none")
    assert tight.chosen.estimate.host_bytes >= 8 * inputs
    poor = plan_engine(
        measured, run, H100, MemorySettings(1, loss_chunk_size=1024), dataclasses.replace(limits, host_bytes=8 * inputs), figure="expected"
    )
    assert not any(c.settings.activation_offload for c in poor.candidates)


def test_micro_batches_in_flight_fill_the_cards() -> None:
    one, many = (seconds("device_map", 4, micro_batch_size=1, in_flight_micro_batches=depth).compute_s for depth in (1, 8))
    assert one / many == pytest.approx(0.58 * 32 / 11)  # 1.69; 1.67 was measured


def test_bytes_sent_follow_the_engine() -> None:
    parameters = SHAPE.num_parameters
    share = 7 / 8
    assert seconds("ddp").communicated_bytes == 2 * share * 4 * parameters
    assert seconds("fsdp").communicated_bytes == pytest.approx(2 * share * (4 + 4) * parameters)  # two micro-batches
    assert seconds("zero3").communicated_bytes == pytest.approx(2 * share * 6 * parameters)
    assert seconds("zero2").communicated_bytes == pytest.approx(3 * share * 2 * parameters)
    assert seconds("ddp", processes=1).communicated_bytes == 0


def test_a_slow_link_turns_the_ranking_round() -> None:
    slow = dataclasses.replace(H100, link_bandwidth=5e9)
    assert seconds("fsdp", micro_batch_size=8).total_s < seconds("fsdp", micro_batch_size=1).total_s
    assert seconds("fsdp", hardware=slow).exposed_communication_s > 5 * seconds("fsdp").exposed_communication_s


def test_tokens_per_second_are_those_of_an_h100_node() -> None:
    """8B on 8 H100s with full checkpointing: published runs lie between 40 and 65 thousand tokens a second."""
    plan = plan_engine(MEASURED, RunShape("fsdp", 8, 4096, samples_per_step=8), H100, MemorySettings(4, "full", 1024), CARD)
    assert 40_000 < plan.given.tokens_per_s < 75_000


# ------------------------------------------------------------------------------------------------------------------------- the report


def test_report_of_one_engine(no_measuring: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    words = "--model m --engine zero3 --num_gpus 4 --gpu_memory 80GB --block_size 4096 --gradient_accumulation_steps 2"
    assert planner.main(words.split()) == 0
    text = capsys.readouterr().out
    for part in ("8.03 billion parameters", "4 x H100 with 78.8 GiB", "64 samples x 4096 tokens an optimizer step", "start here", "ladder"):
        assert part in text
    assert "deepspeed --num_gpus 4 harness/run_clm.py --model_name_or_path m --deepspeed ds_configs/zero3.json --block_size 4096" in text
    assert [request["weights"] for request in no_measuring] == [["bf16"]]
    assert (no_measuring[0]["documents"], no_measuring[0]["attention"]) == (True, "varlen")  # as the run that it tells to start
    assert planner.main([*words.split(), "--attn_implementation", "sdpa", "--document_isolation", "false"]) == 0
    assert "--attn_implementation sdpa --no_document_isolation" in capsys.readouterr().out
    assert (no_measuring[1]["documents"], no_measuring[1]["attention"]) == (False, "sdpa")


def test_auto_compares_engines_with_and_without_offload(no_measuring: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    words = "--model m --num_gpus 4 --gpu_memory 80GB --host_memory 900GB --block_size 4096"
    assert planner.main(words.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    start = lines.index("engines")
    names = [line.strip().split("  ")[0] for line in lines[start + 2 : start + 11]]
    assert names == ["ddp", "zero1", "zero1 + offload", "zero2", "zero2 + offload", "zero3", "zero3 + offload", "fsdp", "fsdp + offload"]
    assert [request["weights"] for request in no_measuring] == [["autocast", "bf16"]]


@pytest.mark.parametrize(
    ("words", "card"),
    [
        ("--gpu_memory 80GB", "8 x H100 with 78.8 GiB"),
        ("--gpu_memory 8GB", "8 x card, as fast as a T4, with 7.9 GiB"),
        ("--gpu H100 --gpu_memory 10GB", "8 x H100 with 9.8 GiB"),  # a part of one
    ],
)
def test_a_card_is_named_only_where_it_is_one(words: str, card: str, no_measuring: Any, capsys: pytest.CaptureFixture[str]) -> None:
    planner.main(["--model", "a", "--num_gpus", "8", "--engine", "fsdp", *words.split()])
    assert card in capsys.readouterr().out.splitlines()[1]


@pytest.mark.parametrize(
    ("words", "precision"),
    [("--gpu T4", "fp16"), ("--gpu V100 --precision fp32", "fp32"), ("--gpu H100", "bf16"), ("--gpu_memory 8GB", "bf16")],
)
def test_a_card_without_bf16_is_planned_in_fp16(words: str, precision: str, no_measuring: Any, capsys: pytest.CaptureFixture[str]) -> None:
    planner.main(["--model", "a", "--num_gpus", "8", "--engine", "fsdp", *words.split()])
    assert f"; {precision}, adamw" in capsys.readouterr().out


def test_bf16_on_a_card_without_it_and_samples_over_the_limit_are_refused(no_measuring: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "a", "--num_gpus", "8", "--engine", "fsdp"]
    assert planner.main([*words, "--gpu", "T4", "--precision", "bf16"]) == 2
    assert "--precision: a T4 (compute capability 7.5) has no bf16 -> give --precision fp16" in capsys.readouterr().err
    limit = 8192
    assert planner.main([*words, "--gpu", "H100", "--block_size", str(limit + 1)]) == 2
    assert f"--block_size: {limit + 1} is over the model's limit of {limit} -> --block_size {limit}" in capsys.readouterr().err


def test_savers_leave_the_engines_that_have_them(no_measuring: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def plans(words: str) -> dict[str, Any]:
        planner.main(["--model", "a", "--gpu", "H100", "--num_gpus", "8", "--block_size", "4096", "--json", *words.split()])
        found = json.loads(capsys.readouterr().out)
        return {"command": found["command"], **{plan["name"]: plan["given"] for plan in found["plans"]}}

    half = plans("--optim adamw_bf16")
    assert set(half) == {"command", "ddp", "fsdp", "fsdp + offload"}
    inside = plans("--optim adamw_bf16 --optim_in_backward --per_device_train_batch_size 1")
    assert set(inside) == {"command", "fsdp"} and "--optim adamw_bf16 --optim_in_backward --max_grad_norm 0" in inside["command"]
    whole = plans("--optim_in_backward --per_device_train_batch_size 4")["command"]  # cut in two it would free nothing
    assert "--per_device_train_batch_size 4 --gradient_accumulation_steps 1" in whole
    after = plans("--optim adamw_bf16 --per_device_train_batch_size 1")["fsdp"]
    phases = [
        {phase["name"]: phase["parts"].get("gradients", 0.0) for phase in each["estimate"]["phases"]} for each in (after, inside["fsdp"])
    ]
    assert phases[0]["update"] == 4 * SHAPE.num_parameters / 8 and phases[1]["update"] == 0.0


def test_json_is_the_same_plan(no_measuring: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--model m --engine fsdp --num_gpus 8 --gpu H100 --block_size 4096 --json"
    assert planner.main(words.split()) == 0
    values = json.loads(capsys.readouterr().out)
    (plan,) = values["plans"]
    assert values["model"]["num_parameters"] == SHAPE.num_parameters
    assert values["chosen"] == plan["chosen"]
    assert [rung["fits"] for rung in plan["ladder"]].index(True) == [rung["settings"] for rung in plan["ladder"]].index(
        plan["chosen"]["settings"]
    )
    assert MemorySettings.from_dict(plan["chosen"]["settings"]).micro_batch_size * plan["chosen"]["gradient_accumulation_steps"] == 8


def test_nothing_fits_says_so(no_measuring: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--model m --engine ddp --num_gpus 8 --gpu_memory 24GB --block_size 4096"
    assert planner.main(words.split()) == 1
    text = capsys.readouterr().out
    assert "nothing fits: the smallest settings" in text
    assert "more cards" in text


def test_block_size_defaults_to_the_models_limit(no_measuring: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert planner.main(["--model", "m", "--engine", "fsdp", "--num_gpus", "8", "--gpu", "H100"]) == 0
    assert "64 samples x 4096 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("engine", "settings", "words", "change"),
    [
        ("ddp", {}, "torchrun --nproc_per_node 4 harness/run_clm.py M", ""),
        ("fsdp", {}, "accelerate launch --config_file fsdp_configs/full_shard.yaml --num_processes 4", ""),
        ("fsdp", {"reshard_after_forward": False}, "fsdp_configs/shard_grad_op.yaml", ""),
        ("fsdp", {"param_offload": "cpu"}, "fsdp_configs/full_shard_offload.yaml", ""),
        ("zero1", {}, "--deepspeed ds_configs/zero1.json", ""),
        ("zero2", {"optimizer_offload": 1.0}, "--deepspeed ds_configs/zero2_offload.json", ""),
        ("zero3", {"optimizer_offload": 1.0, "param_offload": "cpu"}, "--deepspeed ds_configs/zero3_offload.json", ""),
        ("zero3", {"optimizer_offload": 1.0}, "--deepspeed ds_configs/zero3_offload.json", 'remove "offload_param"'),
        ("zero3", {"max_live_parameters": 7}, "--deepspeed ds_configs/zero3.json", 'set "stage3_max_live_parameters" to 7'),
        ("zero3", {"optimizer_offload": 1.0, "param_offload": "nvme"}, "--deepspeed ds_configs/zero3_nvme.json", ""),
        ("device_map", {}, "python harness/run_clm.py M --device_map dynamic", ""),
        ("device_map", {"in_flight_micro_batches": 2}, "--device_map dynamic --in_flight_micro_batches 2", ""),
    ],
)
def test_start_line_names_files_that_exist(engine: str, settings: dict[str, Any], words: str, change: str) -> None:
    from harness.candidates import evaluate

    run = RunShape(engine, 4, 4096, samples_per_step=8)  # type: ignore[arg-type]
    candidate = evaluate(MemorySettings(2, "full", 512, **settings), MEASURED, run, H100)
    line, changes = start_line(candidate, ["M"])
    assert words in line
    assert changes == change
    tail = "--block_size 4096 --per_device_train_batch_size 2 --gradient_accumulation_steps 4 --activation_checkpointing full"
    assert f"{tail} --loss_chunk_size 512" in line
    for word in line.split():
        if word.startswith(("ds_configs/", "fsdp_configs/", "harness/")):
            assert (ROOT / word).is_file(), word


def test_flags_of_the_start_line_are_run_clms(no_measuring: Any) -> None:
    from harness.args import argument_names

    known = set(argument_names()) | {"num_processes", "config_file", "num_gpus", "nproc_per_node"}
    run = RunShape("zero3", 4, 4096, samples_per_step=8)
    plan = plan_engine(MEASURED, run, H100, MemorySettings(8, loss_chunk_size=1024), CARD)
    assert plan.chosen is not None
    line, _ = start_line(plan.chosen, planner._model_flags(planner.parse(["--model_type", "llama", "--optim", "sgd"])))
    assert {word[2:] for word in line.split() if word.startswith("--")} <= known


def test_text_of_settings_and_tables() -> None:
    run = RunShape("zero3", 4, 4096, samples_per_step=8)
    plan = plan_engine(MEASURED, run, H100, MemorySettings(8), CARD)
    assert settings_text(plan.given) == "8 x 1, checkpointing none, whole logits"
    assert format_ladder(plan).count("start here") == 1
    assert "too big" in format_ladder(plan)
    assert len(format_comparison([("zero3", plan), ("again", plan)]).splitlines()) == 4


# ----------------------------------------------------------------------------------------------------------- from a config to the end


def test_a_plan_of_an_8b_config_from_the_command_line(tmp_path: Path) -> None:
    """No GPU, no weights, under 2 GiB; asked again, the answer comes from the cache."""
    import resource

    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    environment = {**os.environ, "HARNESS_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    words = ["--model", str(path), "--engine", "fsdp", "--num-gpus", "8", "--gpu-memory", "80GB", "--json"]
    command = [sys.executable, "-m", "harness.memory", *words]
    first = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert first.returncode == 0, first.stderr
    values = json.loads(first.stdout)
    assert values["closed_forms"] == []
    assert values["model"]["num_parameters"] == 8_030_261_248
    assert values["chosen"]["estimate"]["closed_forms"] == []
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20 < 2.0
    (kept,) = (tmp_path / "cache" / "activations").iterdir()  # one measurement, also of the size of a block that the model allows
    assert json.loads(kept.read_text())["block_size"] == 4096
    written = kept.stat().st_mtime_ns
    second = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert second.stdout == first.stdout
    assert [file.stat().st_mtime_ns for file in kept.parent.iterdir()] == [written]  # read, not measured again


LARGE: dict[str, tuple[dict[str, Any], int, int]] = {  # config, parameters, of which a token passes through
    "70B": (
        {
            "model_type": "llama",
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "tie_word_embeddings": False,
        },
        70_553_706_496,
        70_553_706_496,
    ),
    "mixture": (
        {
            "model_type": "qwen3_moe",
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "moe_intermediate_size": 2560,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "vocab_size": 151936,
            "tie_word_embeddings": False,
        },
        386_490_880_000,
        31_650_000_000,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(LARGE))
def test_a_plan_of_a_very_large_model(name: str, tmp_path: Path) -> None:
    """64 cards: what does not fit any other way goes partly to the host, whole sub-groups of ZeRO-3's."""
    config, num_parameters, num_active = LARGE[name]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    words = ["--model", str(path), "--num_gpus", "64", "--gpu", "H100", "--host_memory", "1800GB", "--block_size", "4096", "--json"]
    environment = {**os.environ, "HARNESS_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "harness.memory", *words], capture_output=True, text=True, cwd=ROOT, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["closed_forms"] == []
    assert plan["model"]["num_parameters"] == pytest.approx(num_parameters, rel=1e-4)
    assert plan["model"]["num_active"] == pytest.approx(num_active, rel=1e-3)
    assert plan["chosen"]["engine"] in ("zero3", "fsdp")
    assert (plan["chosen"]["settings"]["optimizer_offload"] > 0) is (name == "mixture")


@pytest.mark.parametrize(
    ("text", "message"),
    [("5", "holds no JSON object"), ("{", "is not JSON: line 1 column 2: Expecting property name enclosed in double quotes")],
)
def test_a_config_that_holds_no_settings(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    for model in (file, tmp_path):
        assert planner.main(["--gpu_memory", "80GB", "--model", str(model)]) == 2
        assert capsys.readouterr().err == f"  error   --model: {file} {message} -> copy the model again\n"
