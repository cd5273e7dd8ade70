"""The memory model: what is measured under fake tensors, what the engines add, and what both say about real and published peaks."""

from __future__ import annotations

import dataclasses
import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import memory
from harness.engine_memory import PROCESS_HOST_BYTES, engine_memory, offload_ratios, offloaded_share, zero3_sub_groups
from harness.findings import UserError
from harness.ladder import MemorySettings
from harness.model_shape import (
    LayerKind,
    Measured,
    ModelShape,
    RunShape,
    ZeroOptions,
    at,
    closed_form_layers,
    closed_form_loss,
    top,
)

MIB = 2**20


@pytest.fixture(autouse=True, scope="module")
def no_garbage_collection() -> Iterator[None]:
    """Imports and fake runs make millions of objects that stay: looking through them takes a third of these tests' time."""
    gc.disable()
    yield
    gc.enable()


KIND = LayerKind(num_parameters=1000, num_trainable=1000, num_active=1000, num_small=20, largest_tensor=400)
SHAPE = ModelShape(
    hidden_size=10,
    intermediate_size=40,
    num_heads=2,
    num_key_value_heads=1,
    head_dim=5,
    vocab_size=100,
    kinds=(KIND,),
    kind_of_layer=(0, 0, 0, 0),
    num_root=2010,
    num_root_trainable=2010,
    num_embedding=1000,
    num_head=1000,
)
P = 6010  # 4 layers and everything else

TINY: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "tie_word_embeddings": False,
}


def request_for(path: Path, **options: Any) -> Any:
    from harness.activation_probe import ProbeRequest

    return ProbeRequest(model=str(path), **{"block_size": 256, **options})


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


# ------------------------------------------------------------------------------------------------------------------- the meter


def test_meter_follows_lifetimes_to_the_byte() -> None:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from harness.live_bytes import LiveBytes

    with FakeTensorMode():
        known = torch.empty(1000)
        meter = LiveBytes()
        meter.ignore(known)
        with meter:
            a = torch.empty(1024)  # 4096 bytes
            meter.mark("one")
            b = a + 1
            view = b[:10]
            meter.mark("two")
            del a
            meter.mark("three")
            del b
            meter.mark("four")  # the view holds the storage
            del view
            meter.mark("five")
            known.add_(1)
            torch.empty(1)  # a block of the allocator
            meter.mark("six")
    assert [meter.marks[name][0] for name in ("one", "two", "three", "four", "five", "six")] == [4096, 8192, 4096, 4096, 0, 0]
    assert meter.trace == [4096, 8192, 512]


@pytest.mark.parametrize(
    ("size", "is_mixed"), [(1009 * 512, False), (3 * 1009 * 512 + 64, True), (4096, False), (5 * 1009 * 512 + 512, False)]
)
def test_one_step_of_many_samples_tells_a_share_from_a_constant(size: int, is_mixed: bool) -> None:
    """The last size is that of a parameter: a copy of a weight is one."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from harness.live_bytes import LiveBytes

    with FakeTensorMode():
        weight = torch.empty(5 * 512 * 1009 + 512, dtype=torch.uint8)
        x = torch.empty(1009 * 3, 8)
        with LiveBytes(samples=1009) as meter:
            meter.ignore(weight)
            kept = torch.empty(size, dtype=torch.uint8)
            meter.mark("kept")
            product = x @ torch.empty(8, 4)
            meter.mark("product")
            del kept, product
    rounded = -(-size // 512) * 512
    assert (meter.marks["kept"][0], meter.marks_per_sample["kept"][0]) == ((0, 512) if size == 1009 * 512 else (rounded, 0))
    assert meter.is_mixed is is_mixed
    assert meter.marks_per_sample["product"][1] == 2 * 3 * 8 * 4 and meter.marks["product"][2] == 0
    assert (meter.live, meter.live_per_sample) == (0, 0)


@pytest.mark.parametrize("mode", ["none", "full"])
def test_what_is_neither_share_nor_constant_is_measured_with_one_and_two_samples(mode: str, tmp_path: Path) -> None:
    """Tokens of all samples padded together, as some kernels of experts do: a share and a constant in one allocation."""
    import torch

    from harness import activation_probe
    from harness.blocks import set_activation_checkpointing

    request = request_for(write_config(tmp_path, TINY))
    model = activation_probe.build(request)
    layers, kinds = activation_probe.cut(model, activation_probe.describe(model)["kind_of_layer"])
    plain = activation_probe.measure_layers(model, layers, kinds, request, "bf16", mode)
    for layer in layers:  # in 16 bits: 1024 bytes a sample, and 512 more
        layer.mlp.register_forward_hook(
            lambda module, args, out: (out, torch.cat([out.flatten()[: 512 * len(out)], out.flatten()[:256]]))[0]
        )
    padded = activation_probe.measure_layers(model, layers, kinds, request, "bf16", mode)
    assert padded["layers"][0]["forward_kept"] == plain["layers"][0]["forward_kept"]  # it is gone at once
    set_activation_checkpointing(model, mode)
    many = activation_probe.run_layers(model, layers, request, "bf16", activation_probe.MANY_SAMPLES, by_sample=True)
    assert many.is_mixed
    one, two = (activation_probe.run_layers(model, layers, request, "bf16", batch) for batch in (1, 2))
    expected = activation_probe._Lines.between(one, two)
    assert expected is not None and padded == expected.reduce(kinds)


def test_meter_counts_flops_of_products_and_attention() -> None:
    import torch
    import torch.nn.functional as F
    from torch._subclasses.fake_tensor import FakeTensorMode

    from harness.live_bytes import LiveBytes

    with FakeTensorMode():
        x, w = torch.empty(8, 16), torch.empty(16, 32)
        q = torch.empty(1, 4, 64, 32)
        with LiveBytes() as meter:
            x @ w
            assert meter.flops == 2 * 8 * 16 * 32
            F.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert meter.flops == 2 * 8 * 16 * 32 + 2 * (2 * 4 * 64 * 64 * 32) // 2


# ---------------------------------------------------------------------------------------------------- measured against whole models


def whole_run(config_path: Path, weights: str, mode: str, batch: int, **options: Any) -> tuple[int, int, Any]:
    """Highest points of forward and of backward of the whole model, run under the meter with no layer taken away."""
    from harness import activation_probe
    from harness.blocks import set_activation_checkpointing
    from harness.modeling import layer_units

    request = request_for(config_path, **options)
    model = activation_probe.build(request)
    layers = [unit for _, unit in activation_probe._blocks(layer_units(model))]
    set_activation_checkpointing(model, mode)
    model.train()
    meter = activation_probe.run_layers(model, layers, request, weights, batch)
    return max(meter.trace[: meter.marks["end"][1]]), max(meter.trace[meter.marks["backward"][1] :]), meter


def predicted_peaks(config_path: Path, weights: str, mode: str, batch: int, **options: Any) -> tuple[float, float]:
    """The same from a few layers and micro-batches of 1 and 2."""
    from harness import activation_probe

    request = request_for(config_path, **options)
    model = activation_probe.build(request)
    shape = activation_probe.describe(model)
    layers, kinds = activation_probe.cut(model, shape["kind_of_layer"])
    assert len(layers) < len(shape["kind_of_layer"])
    values = activation_probe.measure_layers(model, layers, kinds, request, weights, mode)
    answer = {"shape": shape, "layers": [{"weights": weights, "checkpointing": mode, **values}], "losses": [], "failures": []}
    measured = Measured.from_dict({**answer, "unsupported": []}, request.block_size)
    found = measured.layers[weights, mode]
    order = measured.shape.kind_of_layer
    kept = sum(at(found.layers[kind].forward_kept, batch) for kind in order)
    under = at(found.forward_start, batch) + kept - at(found.layers[order[-1]].forward_kept, batch)
    end = at(found.forward_base, batch) + kept
    forward = max(under + top(found.layers[order[-1]].forward_peak, batch), end + top(found.norm_forward_peak, batch))
    below, backward = at(found.backward_base, batch), 0.0
    for kind in order:
        below += at(found.layers[kind].backward_kept, batch)
        backward = max(backward, below + top(found.layers[kind].backward_peak, batch))
    return forward, max(backward, below + top(found.norm_backward_peak, batch))


@pytest.mark.parametrize(("weights", "mode"), [("bf16", "none"), ("bf16", "full"), ("autocast", "selective")])
def test_three_layers_predict_five(tmp_path: Path, weights: str, mode: str) -> None:
    path = write_config(tmp_path, TINY)
    forward, backward, _ = whole_run(path, weights, mode, batch=5)
    assert predicted_peaks(path, weights, mode, batch=5) == (pytest.approx(forward, rel=2e-3), pytest.approx(backward, rel=2e-3))


@pytest.mark.parametrize(
    ("config", "options"),
    [
        pytest.param({**TINY, "model_type": "qwen3", "head_dim": 64}, {"attention": "eager"}, id="qwen3-eager", marks=pytest.mark.slow),
        pytest.param(
            {"model_type": "gpt2", "n_embd": 128, "n_layer": 4, "n_head": 4, "vocab_size": 512}, {}, id="gpt2", marks=pytest.mark.slow
        ),
        pytest.param(
            {
                **TINY,
                "model_type": "gemma3_text",
                "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
                "head_dim": 32,
                "sliding_window": 64,
                "tie_word_embeddings": True,
            },
            {},
            id="gemma3-two-kinds-tied",
        ),
        pytest.param(
            {**TINY, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 5}, {}, id="mixture"
        ),
        pytest.param(TINY, {"documents": True}, id="documents-apart"),
    ],
)
def test_few_layers_predict_other_architectures(tmp_path: Path, config: dict[str, Any], options: dict[str, Any]) -> None:
    path = write_config(tmp_path, {key: value for key, value in config.items() if key != "architectures"})
    forward, backward, _ = whole_run(path, "bf16", "none", 3, **options)
    assert predicted_peaks(path, "bf16", "none", 3, **options) == (pytest.approx(forward, rel=0.01), pytest.approx(backward, rel=0.01))


def test_description_of_a_mixture_counts_what_a_token_passes(tmp_path: Path) -> None:
    from harness import activation_probe

    config = {**TINY, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    model = activation_probe.build(request_for(write_config(tmp_path, config)))
    shape = ModelShape.from_dict(activation_probe.describe(model))
    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    experts = 5 * 4 * 3 * 256 * 768
    assert shape.num_active == shape.num_parameters - experts // 2


def test_lora_keeps_fewer_activations_and_trains_only_adapters(tmp_path: Path) -> None:
    from harness import activation_probe

    lora = memory.lora_request(4, target_modules=["q_proj", "v_proj"])
    request = request_for(write_config(tmp_path, TINY), lora=lora)
    model = activation_probe.build(request)
    shape = activation_probe.describe(model)
    assert ModelShape.from_dict(shape).num_trainable == 5 * 4 * (256 + 256 + 256 + 128)
    layers, kinds = activation_probe.cut(model, shape["kind_of_layer"])
    kept = activation_probe.measure_layers(model, layers, kinds, request, "bf16", "full")["layers"][0]["forward_kept"]
    assert kept[1] == 2 * 256 * 256  # the input of the layer and nothing else


def test_adapters_that_match_nothing_are_said_so(tmp_path: Path) -> None:
    from harness import activation_probe

    with pytest.raises(UserError, match="q_prj is not in") as error:
        activation_probe.build(request_for(write_config(tmp_path, TINY), lora=memory.lora_request(4, target_modules=["q_prj"])))
    assert error.value.findings[0].key == "--target_modules" and "q_proj" in error.value.findings[0].fix


def test_adapters_compute_in_the_dtype_that_the_engine_casts_to(tmp_path: Path) -> None:
    """What selective checkpointing keeps of them is half in 16 bits; only attention has something in float32 always."""
    from harness import activation_probe

    request = request_for(write_config(tmp_path, TINY), lora=memory.lora_request(4))
    model = activation_probe.build(request)
    layers, kinds = activation_probe.cut(model, activation_probe.describe(model)["kind_of_layer"])
    kept = {
        weights: activation_probe.measure_layers(model, layers, kinds, request, weights, "selective")["layers"][0]["forward_kept"][1]
        for weights in ("bf16", "fp32")
    }
    assert kept["bf16"] < 0.55 * kept["fp32"]


# ------------------------------------------------------------------------------------------------------------------------ the loss


@pytest.mark.parametrize("weights", ["bf16", "autocast"])
@pytest.mark.parametrize("chunk", [0, 512])
def test_closed_form_of_the_loss_is_what_is_measured(weights: str, chunk: int) -> None:
    from harness.activation_probe import measure_loss

    shape = {"hidden_size": 128, "vocab_size": 32000, "head_trainable": True}
    tokens = 4096
    peak, _ = measure_loss(shape, weights, tokens, chunk)
    model = dataclasses.replace(SHAPE, hidden_size=128, vocab_size=32000)
    closed = closed_form_loss(model, weights, chunk)  # type: ignore[arg-type]
    assert peak == pytest.approx(at(closed.line, tokens), rel=0.02)


def test_chunks_only_add_the_gradient_of_their_input() -> None:
    from harness.activation_probe import measure_losses

    shape = {"hidden_size": 128, "vocab_size": 32000, "head_trainable": True}
    chunked, whole = measure_losses(shape, "bf16", 1024, [512, 0])
    assert chunked["line"][1] == 2 * 128
    assert whole["line"][1] == pytest.approx(12 * 32000, rel=1e-3)
    assert chunked["flops_per_token"] == 6 * 128 * 32000
    assert whole["flops_per_token"] == 6 * 128 * 32000


def test_published_rows_of_head_and_loss() -> None:
    """Eight published peaks of an A100, none off by more than 0.5 %."""
    from benchmarks.published_rows import loss_rows

    errors = [row.error for row in loss_rows()]
    assert len(errors) == 8
    assert max(map(abs, errors)) < 0.005


def test_formula_of_the_published_rows_is_what_the_code_does() -> None:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from benchmarks.published_rows import head_and_loss_bytes
    from harness.live_bytes import LiveBytes

    tokens, hidden, vocabulary = 512, 128, 4096
    with FakeTensorMode():
        weight = torch.nn.Parameter(torch.empty(vocabulary, hidden, dtype=torch.bfloat16))
        weight.grad = torch.empty_like(weight)
        x = torch.empty(tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
        goal = torch.zeros(tokens, dtype=torch.long)
        meter = LiveBytes(in_place_shape=weight.shape)
        for tensor in (weight, weight.grad, x, goal):
            meter.ignore(tensor)
        with meter:
            torch.nn.functional.cross_entropy(torch.nn.functional.linear(x, weight), goal).backward()
    before = 2 * 2 * vocabulary * hidden + 2 * hidden * tokens  # weight, its gradient and the input, which the meter leaves out
    assert max(meter.trace) + before <= head_and_loss_bytes(tokens, hidden, vocabulary)
    assert max(meter.trace) + before == pytest.approx(head_and_loss_bytes(tokens, hidden, vocabulary), rel=0.1)


def test_published_difference_of_8_and_128_ranks() -> None:
    """Llama 3.1 8B under FSDP2: 82.4 GiB on 8 ranks, 67.0 on 128; the states explain it to a tenth."""
    from benchmarks.published_rows import state_difference_bytes

    layer = LayerKind(218_112_000, 218_112_000, 218_112_000)
    shape = dataclasses.replace(SHAPE, kinds=(layer,), kind_of_layer=(0,) * 32, num_root=1_050_677_248, num_root_trainable=1_050_677_248)
    assert shape.num_parameters == 8_030_261_248
    difference = state_difference_bytes(Measured(shape, 1024), 8, 128)
    assert difference == pytest.approx(16 * 8_030_261_248 * (1 / 8 - 1 / 128))
    assert difference / 2**30 == pytest.approx(15.4, rel=0.1)


# ---------------------------------------------------------------------------------------------------------------------- the engines


def states_of(engine: str, processes: int, settings: MemorySettings | None = None, **run: Any) -> tuple[float, float, float]:
    parts = engine_memory(SHAPE, RunShape(engine, processes, 16, **run), settings or MemorySettings(1))  # type: ignore[arg-type]
    return parts.parameters, parts.gradients + parts.growing_gradients * P, parts.optimizer


@pytest.mark.parametrize(
    ("engine", "processes", "expected"),
    [
        ("ddp", 1, (4 * P, 4 * P, 8 * P)),
        ("ddp", 4, (4 * P, 4 * P, 8 * P)),
        ("fsdp", 4, (4 * P / 4, 4 * P / 4, 8 * P / 4)),
        ("zero1", 4, (2 * P, 2 * P / 4 + 2 * P, 12 * P / 4)),  # the reduced part of the last step is still there
        ("zero2", 4, (2 * P, 2 * P / 4, 12 * P / 4)),
        ("zero3", 4, (2 * P / 4 + 2 * (4 * 20 + 10), 2 * P / 4, 12 * P / 4)),  # norms stay whole
        ("device_map", 2, (4 * P / 2, 4 * P / 2, 8 * P / 2)),
    ],
)
def test_states(engine: str, processes: int, expected: tuple[float, ...]) -> None:
    assert states_of(engine, processes) == pytest.approx(expected)


def test_gradients_of_ddp_stay_only_with_torchs_reducer() -> None:
    voted = engine_memory(SHAPE, RunShape("ddp", 4, 16), MemorySettings(1))
    alone = engine_memory(SHAPE, RunShape("ddp", 1, 16, ddp_reducer=True), MemorySettings(1))
    reducer = engine_memory(SHAPE, RunShape("ddp", 4, 16, ddp_reducer=True), MemorySettings(1))
    assert (voted.gradients, voted.growing_gradients) == (alone.gradients, alone.growing_gradients) == (0, 4)
    assert (reducer.gradients, reducer.growing_gradients) == (4 * P, 0)


def test_states_of_offload_go_to_the_host() -> None:
    on_host = MemorySettings(1, optimizer_offload=1.0)
    both = MemorySettings(1, optimizer_offload=1.0, param_offload="cpu")
    assert states_of("zero2", 4, on_host) == (2 * P, 0, 0)
    assert states_of("zero3", 4, both) == (2 * (4 * 20 + 10), 0, 0)
    assert states_of("fsdp", 4, MemorySettings(1, param_offload="cpu")) == (0, 0, 0)
    host = engine_memory(SHAPE, RunShape("zero2", 4, 16), on_host).host - PROCESS_HOST_BYTES
    assert host == 16 * P / 4
    host = engine_memory(SHAPE, RunShape("fsdp", 4, 16), MemorySettings(1, param_offload="cpu")).host - PROCESS_HOST_BYTES
    assert host == 16 * P / 4
    snapshots = engine_memory(SHAPE, RunShape("fsdp", 4, 16, snapshots=True), MemorySettings(1)).host - PROCESS_HOST_BYTES
    assert snapshots == 2 * 12 * P / 4


def test_a_share_of_the_optimizer_on_the_host() -> None:
    """DeepSpeed keeps whole sub-groups on the card: of 8 of matrices (and one of norms), with a ratio of 0.25 the first 6."""
    run = {"zero": ZeroOptions(sub_group_size=400)}
    assert zero3_sub_groups(SHAPE, RunShape("zero3", 2, 16, **run)) == (8, 9)  # type: ignore[arg-type]
    _, _, optimizer = states_of("zero3", 2, MemorySettings(1, optimizer_offload=0.25), **run)
    assert optimizer == pytest.approx(6 / 8 * 12 * P / 2)
    _, _, all_of_it = states_of("zero3", 2, MemorySettings(1, optimizer_offload=0.5))
    assert all_of_it == 12 * P / 2  # two sub-groups: the one of all matrices stays


@pytest.mark.parametrize(("sub_group_size", "shares"), [(400, [0.25, 0.5, 0.75]), (500, [2 / 7, 4 / 7, 6 / 7]), (3000, []), (10**9, [])])
def test_ratios_that_deepspeed_can_offload(sub_group_size: int, shares: list[float]) -> None:
    run = RunShape("zero3", 2, 16, zero=ZeroOptions(sub_group_size=sub_group_size))
    ratios = offload_ratios(SHAPE, run)
    assert [offloaded_share(SHAPE, run, ratio) for ratio in ratios] == pytest.approx(shares)
    matrices, groups = zero3_sub_groups(SHAPE, run)
    for ratio, share in zip(ratios, shares, strict=True):
        assert int((1 - ratio) * groups) == round((1 - share) * matrices)  # DeepSpeed's own line


def test_frozen_weights_cost_two_bytes() -> None:
    lora = dataclasses.replace(
        SHAPE,
        kinds=(dataclasses.replace(KIND, num_parameters=1010, num_trainable=10),),
        num_root_trainable=0,
        head_trainable=False,
    )
    parts = engine_memory(lora, RunShape("fsdp", 2, 16, lora=True), MemorySettings(1))
    assert parts.parameters == (4 * 40 + 2 * P) / 2
    assert parts.optimizer == 8 * 40 / 2
    assert parts.head_gradient == 0


def test_buffers_of_deepspeed_follow_their_settings() -> None:
    run = RunShape("zero2", 2, 16)
    assert engine_memory(SHAPE, run, MemorySettings(1)).buffers == 2 * 2 * 1000  # "auto" is one layer; two of them
    assert engine_memory(SHAPE, run, MemorySettings(1, reduce_bucket_size=500)).buffers == 2 * 2 * 500
    alone = dataclasses.replace(run, zero=ZeroOptions(overlap_comm=False))
    assert engine_memory(SHAPE, alone, MemorySettings(1)).buffers == 2 * 1000
    live = [engine_memory(SHAPE, RunShape("zero3", 2, 16), MemorySettings(1, max_live_parameters=n)).loss_gather for n in (500, 10**9)]
    assert live == [2 * (500 + 2010 + 1000), 2 * P]


def pools_of(engine: str, processes: int, settings: MemorySettings | None = None, **run: Any) -> float:
    run = {"samples_per_step": 1, **run}
    return engine_memory(SHAPE, RunShape(engine, processes, 16, **run), settings or MemorySettings(1)).pools  # type: ignore[arg-type]


def test_memory_of_other_streams_is_kept_apart() -> None:
    """A layer has 1000 parameters, what is outside the layers 2010, P together; 16-bit products."""
    on_host, both = MemorySettings(1, optimizer_offload=1.0), MemorySettings(1, optimizer_offload=1.0, param_offload="cpu")
    gathered = 2 * (2010 + 2 * 1000)
    assert pools_of("fsdp", 4) == gathered + 4 * P / 4
    assert pools_of("fsdp", 1) == 4 * P  # nothing is gathered
    assert pools_of("fsdp", 4, samples_per_step=2) == gathered + 4 * P / 4 + 4 * 2010 / 4
    assert pools_of("fsdp", 4, MemorySettings(1, param_offload="cpu")) == gathered + (4 + 2) * 2010 / 4 + 4 * 2010 / 4
    assert pools_of("fsdp", 4, shard_group_size=2) == gathered + 4 * P / 2
    assert pools_of("zero2", 4) == 4 * P / 4 + 2 * 1000
    assert pools_of("zero2", 4, on_host) == (2 * 2 + 4) * 1000  # the embedding is the largest tensor
    assert pools_of("zero3", 4) == 2 * (P + 1000) + 2 * 1000
    assert pools_of("zero3", 4, both) == 2 * (P + 1000) + (2 + 6 / 4) * 1000
    assert pools_of("ddp", 4) == pools_of("device_map", 2) == 0


def test_reserved_memory_is_the_computing_streams_and_the_others() -> None:
    """What is reduced and gathered elsewhere is not on top of the highest moment: it is kept through the whole step."""
    for engine in ("ddp", "fsdp", "zero2", "zero3"):
        found = memory.estimate_memory(MemorySettings(1), Measured(SHAPE, 16), RunShape(engine, 2, 16))  # type: ignore[arg-type]
        own = {phase.name: phase.total_bytes - phase.pooled_bytes for phase in found.phases}
        assert found.pool_bytes == pools_of(engine, 2, samples_per_step=8)
        update = own.pop("update")
        assert found.dry_run_reserved_bytes == pytest.approx(1.03 * max(own.values()) + found.pool_bytes, abs=2)
        assert found.reserved_bytes >= found.dry_run_reserved_bytes - 1
        if engine != "zero3":
            assert found.reserved_bytes == pytest.approx(1.03 * max(*own.values(), update) + found.pool_bytes, abs=2)


def test_unknown_optimizer_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown optimizer lion; known are adamw_torch_fused"):
        memory.estimate_memory(MemorySettings(1), Measured(SHAPE, 16), RunShape("ddp", 1, 16, optimizer="lion"))


def test_fsdp_agrees_with_torchs_own_tracker() -> None:
    """torch's FSDPMemTracker follows a real `fully_shard` step on a fake group of 8; no figure of ours may be 4 % off."""
    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import LlamaConfig, LlamaForCausalLM

    from harness import activation_probe
    from harness.blocks import set_activation_checkpointing
    from harness.isolation import isolate_packed_documents
    from harness.loss import install_loss

    sizes = {**TINY, "hidden_size": 512, "intermediate_size": 1536, "vocab_size": 16384}
    config = LlamaConfig(**{key: value for key, value in sizes.items() if key not in ("model_type", "architectures")}, use_cache=False)
    isolate_packed_documents()

    def tracked(mode: str, reshard: bool) -> float:
        with FakeTensorMode():
            with torch.device("meta"):
                model = LlamaForCausalLM(config)
            install_loss(model, 0)
            set_activation_checkpointing(model, mode)
            model.train()
            mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            for module in [*model.model.layers, model]:
                fully_shard(module, mesh=mesh, mp_policy=mixed, reshard_after_forward=reshard)
            model.to_empty(device="cpu")
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()  # before the tracker: it counts what sharding propagation makes as real
            optimizer.zero_grad()
            ids = torch.zeros((2, 512), dtype=torch.long)
            tracker = FSDPMemTracker(mod=model, optm=optimizer)
            tracker.track_inputs((ids,))
            with tracker:
                model(input_ids=ids, labels=ids).backward()
            (snapshot,) = tracker.get_tracker_snapshot("peak").values()
            return float(snapshot["Total"])

    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (8,))
        cases = [("none", True), ("full", False)]
        seen = [tracked(mode, reshard) for mode, reshard in cases]
    finally:
        dist.destroy_process_group()
    request = activation_probe.ProbeRequest(block_size=512, weights=("bf16",))
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    shape = activation_probe.describe(model)
    layers, kinds = activation_probe.cut(model, shape["kind_of_layer"])
    points = [
        {"weights": "bf16", "checkpointing": mode, **activation_probe.measure_layers(model, layers, kinds, request, "bf16", mode)}
        for mode in ("none", "full")
    ]
    losses = activation_probe.measure_losses(shape, "bf16", 512, [0])
    answer = {"shape": shape, "layers": points, "losses": losses, "failures": [], "unsupported": []}
    measured = Measured.from_dict(answer, 512)
    run = RunShape("fsdp", 8, 512, samples_per_step=2)
    for (mode, reshard), expected in zip(cases, seen, strict=True):
        settings = MemorySettings(2, mode, 0, reshard_after_forward=reshard)  # type: ignore[arg-type]
        estimate = memory.estimate_memory(settings, measured, run)
        assert estimate.allocated_bytes - memory.WORKSPACE_BYTES == pytest.approx(expected, rel=0.04), (mode, reshard)


# -------------------------------------------------------------------------------------------------------------------- the estimate


def estimate(settings: MemorySettings | None = None, engine: str = "fsdp", processes: int = 4, **run: Any) -> memory.MemoryEstimate:
    shape = RunShape(engine, processes, 16, **run)  # type: ignore[arg-type]
    return memory.estimate_memory(settings or MemorySettings(1), Measured(SHAPE, 16), shape)


def test_gradients_of_earlier_micro_batches_are_there_in_forward() -> None:
    once = estimate(MemorySettings(8), samples_per_step=8)
    often = estimate(MemorySettings(4), samples_per_step=8)
    forward = {phase.name: phase for phase in once.phases}["forward"]
    assert "gradients" not in forward.parts
    assert {phase.name: phase for phase in often.phases}["forward"].parts["gradients"] == 4 * P / 4


def test_card_total_is_allocated_with_allocator_and_context() -> None:
    alone, many = estimate(engine="ddp", processes=1), estimate(engine="ddp", processes=2)
    assert alone.expected_bytes == pytest.approx(alone.allocated_bytes * 1.03 + memory.CONTEXT_BYTES[1], abs=2)
    assert many.expected_bytes == pytest.approx(many.allocated_bytes * 1.03 + memory.CONTEXT_BYTES[1] + memory.NCCL_BYTES[1], abs=2)
    assert alone.low_bytes < alone.expected_bytes < alone.high_bytes
    assert alone.allocated_bytes == int(max(phase.total_bytes for phase in alone.phases))
    assert alone.parts == {phase.name: phase for phase in alone.phases}[alone.peak_phase].parts


def test_checkpoint_size() -> None:
    assert estimate(engine="fsdp").checkpoint_bytes == 12 * P
    assert estimate(engine="zero3").checkpoint_bytes == 14 * P


def test_unmeasured_parts_are_named() -> None:
    assert estimate().closed_forms == ("activations (none)", "loss")


def test_micro_batches_in_flight_under_a_device_map() -> None:
    def activations(depth: int) -> float:
        settings = MemorySettings(1, loss_chunk_size=8, in_flight_micro_batches=depth)
        found = estimate(settings, engine="device_map", processes=2, samples_per_step=8)
        return {phase.name: phase for phase in found.phases}["loss"].parts["activations"]

    assert activations(4) == pytest.approx(4 * activations(1))
    assert activations(0) == pytest.approx(8 * activations(1))


def test_other_block_size_is_refused() -> None:
    with pytest.raises(ValueError, match="measured for blocks of 16 tokens, not 32"):
        memory.estimate_memory(MemorySettings(1), Measured(SHAPE, 16), RunShape("ddp", 1, 32))


def test_activations_scale_with_the_micro_batch() -> None:
    layers = closed_form_layers(SHAPE, "bf16", "full", 16)
    assert layers.layers[0].forward_kept == (0.0, 2 * 10 * 16)
    none = closed_form_layers(SHAPE, "bf16", "none", 16)
    assert none.layers[0].forward_kept == (0.0, 16 * (16 * 10 + 4 * 10 + 4 * 5 + 8 * 40 + 4 * 2))


# --------------------------------------------------------------------------------------------------------- child process and caches


def test_a_cached_measurement_starts_no_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    path = write_config(tmp_path, TINY)
    request = {"model": str(path), "block_size": 64, "weights": ["bf16"]}
    answer = {
        "block_size": 64,
        "shape": dataclasses.asdict(SHAPE),
        "layers": [],
        "losses": [{"weights": "bf16", "chunk": 0, "line": [1.0, 2.0], "flops_per_token": 3.0}],
        "failures": [],
        "unsupported": ["selective"],
    }
    started = []

    class Child:
        returncode = 0

        def communicate(self, timeout: float) -> tuple[str, str]:
            return json.dumps(answer), ""

        def poll(self) -> int:
            return 0

    def start(request: dict[str, Any]) -> Child:
        started.append(request)
        return Child()

    monkeypatch.setattr(memory, "_start_child", start)
    first = memory.measure([request])
    assert memory.measure([request]) == first
    assert len(started) == 1
    assert first.losses["bf16", 0].line == (1.0, 2.0)
    assert first.unsupported == {"selective"}
    write_config(tmp_path, {**TINY, "hidden_size": 512})
    memory.measure([request])
    assert len(started) == 2


def test_a_child_that_dies_is_one_clear_message(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="could not be measured: Segmentation fault"):
        memory._answer_of(-11, "", "warning\nSegmentation fault\n\n")
    finding = {"severity": "error", "key": "--model", "message": "no", "fix": ""}
    with pytest.raises(UserError, match="error   --model: no"):
        memory._answer_of(2, json.dumps({"findings": [finding]}), "")


IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"num_attention_heads": 300}, "The hidden size (256) is not a multiple of the number of attention heads (300)"),
    ({"num_attention_heads": 7}, "The hidden size (256) is not a multiple of the number of attention heads (7)"),
    ({"model_type": "qwen3", "num_attention_heads": 300, "head_dim": 8}, "300 heads are more than the hidden size 256"),
    ({"num_key_value_heads": 3}, "8 heads cannot share 3 key-value heads"),
    ({"num_hidden_layers": -2}, "num_hidden_layers: must be a positive whole number, not -2"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers: 1000000000 is beyond all models; at most 10,000"),
    ({"hidden_size": "256"}, "hidden_size"),
    ({"rms_norm_eps": -1e-6}, "rms_norm_eps: must be a small number that is not negative, not -1e-06"),
    ({"rms_norm_eps": 3.0}, "rms_norm_eps: must be a small number"),
    ({"rope_theta": 0, "rope_parameters": None}, "rope_theta: must be a positive number, not 0"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}}, "rope_theta: must be a positive number, not -1.0"),
    ({"model_type": "no_such_model"}, "--config_name: unknown architecture no_such_model"),
    ({"model_type": "lama"}, "unknown architecture lama -> did you mean llama?"),
]


@pytest.mark.parametrize(("changes", "message"), IMPOSSIBLE)
def test_impossible_configs_are_one_message(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """Wherever a config.json is read: the planner, the run and the device maps all read it here."""
    from harness.args import ModelArguments
    from harness.modeling import load_config

    with pytest.raises(UserError) as caught:
        load_config(ModelArguments(config_name=str(write_config(tmp_path, {**TINY, **changes}))))
    assert message in str(caught.value)
    assert len(caught.value.findings) == 1


@pytest.mark.parametrize(
    ("name", "is_path"),
    [("gpt2", False), ("meta-llama/Llama-3.1-8B", False), ("./gpt2", True), ("/models/a", True), ("a/b/c", True), ("config.json", True)],
)
def test_a_name_on_the_hub_is_no_folder_that_does_not_exist(name: str, is_path: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoConfig

    from harness.args import ModelArguments
    from harness.modeling import load_config

    def not_here(source: str, **options: Any) -> Any:
        raise OSError(f"{source} is not in the cache")

    monkeypatch.setattr(AutoConfig, "from_pretrained", not_here)
    with pytest.raises(UserError, match="does not exist" if is_path else "nor in the cache"):
        load_config(ModelArguments(model_name_or_path=name))


def test_a_run_refuses_impossible_sizes_before_anything_is_loaded(tmp_path: Path) -> None:
    from harness.check_arguments import model_facts
    from harness.parsing import from_config

    def problems(text: str) -> list[str]:
        path = tmp_path / "config.json"
        path.write_text(text, encoding="utf-8")
        facts = model_facts(from_config({"config_name": str(path), "output_dir": "out"}))
        return [finding.message for finding in facts.problems]

    assert problems(json.dumps({**TINY, "num_attention_heads": 300})) == ["300 heads are more than the hidden size 256"]
    assert problems(json.dumps({**TINY, "vocab_size": 0, "hidden_size": -1})) == [
        "must be a positive whole number, not -1",
        "must be a positive whole number, not 0",
    ]
    assert problems("[1]") == [f"{tmp_path}/config.json holds no JSON object"]
    assert problems(json.dumps(TINY)) == []


def test_measurements_correct_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path))
    assert memory.machine_factors("H100", "fsdp") == memory.Factors()
    memory.record_measurement("H100", "fsdp", 1000, 1100, 1100, 1210, 1510)
    memory.record_measurement("H100", "fsdp", 1000, 1100, 1050, 1060, 1260)
    factors = memory.machine_factors("H100", "fsdp")
    assert factors == memory.Factors(allocated=1.1, reserved=1.1, outside_bytes=300)
    assert memory.machine_factors("H100", "ddp") == memory.Factors()
    plain = estimate()
    corrected = memory.estimate_memory(MemorySettings(1), Measured(SHAPE, 16), RunShape("fsdp", 4, 16), factors)
    assert corrected.allocated_bytes == pytest.approx(1.1 * plain.allocated_bytes, abs=2)
    assert corrected.expected_bytes == pytest.approx(1.1 * plain.reserved_bytes + 300, abs=4)
    # What the next dry run is compared with is the uncorrected figure, or corrections would go on growing or shrinking.
    assert corrected.dry_run_reserved_bytes == plain.dry_run_reserved_bytes > 0 < corrected.pool_bytes == plain.pool_bytes
    update = plain.update_bytes - (plain.expected_bytes - plain.reserved_bytes)
    assert corrected.update_bytes == pytest.approx(1.1 * update + 300, abs=4)
