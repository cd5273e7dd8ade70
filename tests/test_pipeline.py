"""The pipeline on CPU: places are labels there, so copies and schedule can be seen and gradients compared with the plain model's.

What CPU cannot show is that the devices work at the same time; tests/gpu/test_device_map.py and benchmarks/device_map.py do.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import random
import threading
import weakref
from typing import Any

import pytest
import torch

from harness.blocks import set_activation_checkpointing
from harness.boundaries import CpuCopies
from harness.model_units import find_units
from harness.pipeline import Pipeline
from harness.placement import meta_model

LENGTHS = (7, 12, 5, 9, 7, 11)


def _model(kind: str, tied: bool = False, layers: int = 4, **more: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    wide = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers, "num_attention_heads": 4}
    own: dict[str, dict[str, Any]] = {
        "llama": {**wide, "num_key_value_heads": 2},
        "gemma3_text": {**wide, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4},
        "gpt2": {"n_embd": 32, "n_layer": layers, "n_head": 4, "n_positions": 64, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
        "opt": {**wide, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
        "gpt_neox": wide,
        "mixtral": {**wide, "num_key_value_heads": 2, "num_local_experts": 4},
        "t5": {
            "d_model": 32,
            "d_ff": 48,
            "d_kv": 8,
            "num_heads": 4,
            "num_layers": layers,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
        },
    }
    own[kind] |= more
    config = AutoConfig.for_model(
        kind, vocab_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=tied, **own[kind]
    )
    torch.manual_seed(0)
    auto: Any = AutoModelForSeq2SeqLM if kind == "t5" else AutoModelForCausalLM
    return auto.from_config(config).train()


def _map(model: Any, num_places: int) -> dict[str, Any]:
    """Blocks in equal runs over places "a", "b", ...; what comes before on the first, what comes after on the last."""
    units = find_units(meta_model(model.config))  # on meta, because only there the order is that of execution
    blocks = [unit for unit in units if unit.is_block]
    place = {unit.names[0]: "abcdefgh"[min(index * num_places // len(blocks), num_places - 1)] for index, unit in enumerate(blocks)}
    result: dict[str, Any] = {}
    last = "a"
    for unit in units:
        last = place.get(unit.names[0], last)
        result.update(dict.fromkeys(unit.names, last))
    return result


class _Sent(CpuCopies):
    """Notes where copies go."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[Any] = []

    def start(self, tensor: torch.Tensor, device: Any) -> tuple[torch.Tensor, Any]:
        self.targets.append(device)
        return super().start(tensor, device)


def _batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 64, (2, length), generator=generator) for length in LENGTHS]


def _loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids, use_cache=False).loss / len(LENGTHS)


def _gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def _plain(model: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = copy.deepcopy(model)
    losses = []
    for ids in _batches():
        loss = _loss(model, ids)
        loss.backward()
        losses.append(float(loss.detach()))
    return losses, _gradients(model)


def _piped(model: Any, device_map: dict[str, Any], depth: int = 0, **options: Any) -> tuple[list[float], dict[str, torch.Tensor], Pipeline]:
    pipeline = Pipeline(model, device_map, **options)
    calls = [lambda ids=ids: _loss(model, ids) for ids in _batches()]
    losses = [float(loss) for loss in pipeline.run(calls, depth)]
    gradients = _gradients(model)
    model.zero_grad(set_to_none=True)
    return losses, gradients, pipeline


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt2", "opt", "gpt_neox", "mixtral"])
@pytest.mark.parametrize("num_places", [2, 4])
def test_gradients_are_the_plain_models(kind: str, num_places: int) -> None:
    model = _model(kind)
    losses, gradients = _plain(model)
    for depth in (0, 1, 3):
        found, piped, pipeline = _piped(model, _map(model, num_places), depth)
        assert found == losses
        assert piped.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert torch.equal(piped[name], gradient), name  # the same sums in the same order
        pipeline.close()


def test_a_tied_head_makes_a_ring() -> None:
    model = _model("llama", tied=True)
    losses, gradients = _plain(model)
    found, piped, pipeline = _piped(model, _map(model, 3))
    # The embedding's place comes twice: tokens go in there, and the head is there.
    assert [device for kind, index, device in pipeline.order if index == 0 and kind == "forward"] == ["a", "b", "c", "a"]
    assert [device for kind, index, device in pipeline.order if index == 0 and kind == "backward"] == ["a", "c", "b", "a"]
    assert found == losses
    for name, gradient in gradients.items():
        torch.testing.assert_close(piped[name], gradient, rtol=1e-5, atol=1e-7)


ODD = ["llama", "gemma3_text", "gpt2", "opt", "gpt_neox", "mixtral", "t5"]


@pytest.mark.parametrize("kind", ODD)
def test_any_map_has_the_plain_models_gradients(kind: str) -> None:
    # Places come back, tables are apart from their blocks, the head is before the body: what crosses was not made where it was last.
    model = _model(kind, layers=5 if kind != "t5" else 3)
    losses, gradients = _plain(model)
    units = find_units(meta_model(model.config))
    for seed in range(4):
        generator = random.Random(seed)
        device_map = {name: place for unit in units if (place := generator.choice("abc")) for name in unit.names}
        found, piped, pipeline = _piped(model, device_map, seed % 3, blocks_at_once=seed)
        assert found == losses, device_map
        assert piped.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(piped[name], gradient, rtol=1e-4, atol=1e-6, msg=f"{name} under {device_map}")
        pipeline.close()


def test_gradients_go_to_the_place_that_made_what_crossed() -> None:
    model = _model("t5", layers=2)
    device_map = {"shared": "a", "encoder.embed_tokens": "a", "decoder.embed_tokens": "a", "lm_head": "a"}
    for stack, places in {"encoder": "ab", "decoder": "cd"}.items():
        device_map |= {f"{stack}.block.{index}": place for index, place in enumerate(places)} | {f"{stack}.final_layer_norm": places[-1]}
    copies = _Sent()
    _, _, pipeline = _piped(model, device_map, 1, copies=copies)
    visits = [(kind, device) for kind, index, device in pipeline.order if index == 0]
    assert "".join(device for kind, device in visits if kind == "forward") == "abacda"
    assert "".join(device for kind, device in visits if kind == "backward") == "adcaba"
    # Backward of a micro-batch, from the head: the decoder's output. From d: hidden states and the bias of positions, made on c, and the
    # encoder's output, made on b. From c: the decoder's embeddings, made on a, and the encoder's output. From b: hidden states and bias.
    sent = copies.targets[-8:]
    assert (sent[0], sorted(sent[1:4]), sorted(sent[4:6]), sent[6:]) == ("d", ["b", "c", "c"], ["a", "b"], ["a", "a"])


def test_accelerates_map_with_the_table_at_the_end() -> None:
    # For this config on two equal cards accelerate's auto goes by registration: the embedding on 0, rotary_emb behind the norm on 1.
    model = _model("llama", layers=4)
    losses, gradients = _plain(model)
    blocks = {f"model.layers.{index}": "a" if index < 2 else "b" for index in range(4)}
    device_map = {"model.embed_tokens": "a", **blocks, "model.norm": "b", "model.rotary_emb": "b", "lm_head": "b"}
    found, piped, pipeline = _piped(model, device_map)
    assert "".join(device for kind, index, device in pipeline.order if index == 0) == "abba"  # the table is not worth a stretch
    assert found == losses and all(torch.equal(piped[name], gradient) for name, gradient in gradients.items())


def test_runs_of_blocks_are_cut_on_one_place_too() -> None:
    model = _model("llama", layers=6)
    losses, gradients = _plain(model)
    copies = _Sent()
    found, piped, pipeline = _piped(model, _map(model, 2), blocks_at_once=2, copies=copies)
    # Three blocks a place: two, a pause, one more; copies as without, four there and one back.
    assert "".join(device for kind, index, device in pipeline.order if index == 0) == "aabb" + "bbaa"
    assert len(copies.targets) == 5 * len(LENGTHS)
    assert found == losses and all(torch.equal(piped[name], gradient) for name, gradient in gradients.items())


def test_a_routers_loss_goes_through_all_places_as_one_graph() -> None:
    model = _model("mixtral", output_router_logits=True, router_aux_loss_coef=0.1)
    losses, gradients = _plain(model)
    found, piped, pipeline = _piped(model, _map(model, 2), whole=True)
    assert [index for _, index, _ in pipeline.order] == [index for index in range(len(LENGTHS)) for _ in range(2)]
    assert found == losses and all(torch.equal(piped[name], gradient) for name, gradient in gradients.items())


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_activation_checkpointing_and_autocast(checkpointing: bool, dtype: torch.dtype) -> None:
    model = _model("llama")
    if checkpointing:
        set_activation_checkpointing(model, "full")
    reference = copy.deepcopy(model)

    def loss_of(which: Any, ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            return _loss(which, ids)

    expected = []
    for ids in _batches():
        loss = loss_of(reference, ids)
        loss.backward()
        expected.append(float(loss.detach()))
    pipeline = Pipeline(model, _map(model, 2), recompute=checkpointing)
    assert [float(loss) for loss in pipeline.run([lambda ids=ids: loss_of(model, ids) for ids in _batches()])] == expected
    piped = _gradients(model)
    for name, gradient in _gradients(reference).items():
        # One bf16 copy of a weight may serve several micro-batches: the same values in another order of rounding.
        torch.testing.assert_close(piped[name], gradient, rtol=0, atol=0 if dtype == torch.float32 else 1e-3)


def test_frozen_parts_and_adapters() -> None:
    model = _model("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.2" in name or "layers.3" in name)
    _, gradients = _plain(model)
    _, piped, _ = _piped(model, _map(model, 4))  # places a and b are frozen altogether
    assert piped.keys() == gradients.keys() and gradients
    assert all(torch.equal(piped[name], gradient) for name, gradient in gradients.items())


def test_the_order_is_one_forward_one_backward() -> None:
    model = _model("llama", layers=4)
    _, _, pipeline = _piped(model, _map(model, 2))
    text = [f"{kind[0].upper()}{index}{device}" for kind, index, device in pipeline.order]
    assert len(text) == 4 * len(LENGTHS) and len(set(text)) == len(text)
    # The last place alternates from the start; the first runs ahead until the first gradients come back, and no further.
    assert [step for step in text if step.endswith("b")] == [f"{kind}{index}b" for index in range(6) for kind in "FB"]
    first = [step for step in text if step.endswith("a")]
    assert first[0] == "F0a" and first[-1] == "B5a" and first != sorted(first, key=lambda step: (step[0] == "B", step))
    assert [step for step in first if step[0] == "B"] == [f"B{index}a" for index in range(6)]


def _simulated_ms(order: list[tuple[str, int, Any]], blocks: dict[Any, list[int]], limit: int) -> float:
    """When two cards end what one host gives them in this order; a card takes `limit` launches ahead of its work, then the host waits.

    A block here stands for two of an 8B Llama, 2048 tokens: 2 ms and 35 launches each forward, 6.6 ms and 105 launches backward with
    recomputation; a launch takes the host 0.02 ms.

    Args:
        blocks: numbers of blocks of each card's stretches.
    """
    row = [(card, number) for card, numbers in blocks.items() for number in numbers]
    forward, backward = dict.fromkeys(range(8), 0), dict.fromkeys(range(8), len(row))
    ended: dict[tuple[int, int], float] = {}  # by micro-batch and place in its row of tasks
    queues: dict[Any, list[float]] = {card: [] for card in blocks}
    host = 0.0
    for kind, index, card in order:
        if kind == "forward":
            place, cost, launches = forward[index], 4.0, 70
            forward[index] += 1
            task = place
        else:
            backward[index] -= 1
            place, cost, launches = backward[index], 13.2, 210
            task = 2 * len(row) - 1 - place
        assert row[place][0] == card
        queue = queues[card]
        for _ in range(row[place][1] * launches):
            host += 0.02
            if len(queue) >= limit:
                host = max(host, queue[-limit])
            begin = max(host, queue[-1] if queue else 0.0, ended.get((index, task - 1), 0.0))
            queue.append(begin + cost / launches)
        ended[index, task] = queue[-1]
    return max(queue[-1] for queue in queues.values())


def test_two_cards_stay_busy_although_a_card_takes_only_a_thousand_launches_ahead() -> None:
    model = _model("llama", layers=16)
    ids = _batches()[0]
    work, times = 8 * 32 * 8.6, {}
    for at_once, stretches in ((0, [8]), (2, [2, 2, 2, 2])):
        pipeline = Pipeline(model, _map(model, 2), recompute=True, blocks_at_once=at_once)
        pipeline.run([lambda: _loss(model, ids)] * 8)
        times[at_once] = _simulated_ms(pipeline.order, {"a": stretches, "b": stretches}, 1024)
        unlimited = _simulated_ms(pipeline.order, {"a": stretches, "b": stretches}, 10**9)
        assert work / unlimited == pytest.approx(16 / 9, rel=0.03)  # what the schedule allows at 8 micro-batches
        pipeline.close()
    assert work / times[0] < 1.55  # while the host waits in the middle of sixteen blocks, the other card runs dry
    assert work / times[2] == pytest.approx(16 / 9, rel=0.03)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_no_more_in_flight_than_asked(depth: int) -> None:
    model = _model("llama")
    _, _, pipeline = _piped(model, _map(model, 4), depth)
    in_flight: set[int] = set()
    most = 0
    left = dict.fromkeys(range(len(LENGTHS)), 4)
    for kind, index, _ in pipeline.order:
        in_flight.add(index)
        most = max(most, len(in_flight))
        if kind == "backward":
            left[index] -= 1
            if not left[index]:
                in_flight.remove(index)
    assert most == depth
    if depth == 1:
        assert [index for _, index, _ in pipeline.order] == [index for index in range(len(LENGTHS)) for _ in range(8)]


def test_each_boundary_copies_each_tensor_once() -> None:
    model = _model("llama")
    copies = CpuCopies()
    _piped(model, _map(model, 2), copies=copies)
    # There: the hidden states, cos, sin and position ids, whatever the number of blocks behind; back: the gradient of the hidden states.
    per_batch = copies.num_copies / len(LENGTHS)
    deeper = _model("llama", layers=8)
    more = CpuCopies()
    _piped(deeper, _map(deeper, 2), copies=more)
    assert more.num_copies == copies.num_copies and per_batch == 5


def test_a_failure_leaves_nothing_running_and_the_next_try_is_right() -> None:
    model = _model("llama")
    losses, gradients = _plain(model)
    pipeline = Pipeline(model, _map(model, 3))
    calls = [lambda ids=ids: _loss(model, ids) for ids in _batches()]
    pipeline.run(calls)
    threads = threading.active_count()
    for where in (lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")),):
        handle = model.model.layers[3].register_forward_pre_hook(where)
        with pytest.raises(torch.OutOfMemoryError):
            pipeline.run(calls)
        handle.remove()
        handle = model.model.layers[1].register_full_backward_hook(where)
        with pytest.raises(torch.OutOfMemoryError):
            pipeline.run(calls)
        handle.remove()
    assert threading.active_count() == threads
    model.zero_grad(set_to_none=True)
    assert [float(loss) for loss in pipeline.run(calls, 2)] == losses
    assert all(torch.equal(gradient, _gradients(model)[name]) for name, gradient in gradients.items())


def test_threads_are_kept_for_later_steps_and_pipelines() -> None:
    # Libraries keep plans and handles per thread: a new one for each micro-batch would make them anew each time.
    alive: set[int | None] = set()
    for depth in (0, 0, 2):
        model = _model("llama")
        used: list[int] = []
        model.model.layers[0].register_forward_pre_hook(lambda *_, used=used: used.append(threading.get_ident()))
        _piped(model, _map(model, 2), depth)
        assert len(used) == len(LENGTHS) and threading.get_ident() not in used
        alive = alive or {thread.ident for thread in threading.enumerate()}
        assert set(used) <= alive and {thread.ident for thread in threading.enumerate()} == alive


def test_settings_of_the_caller_hold_in_the_threads() -> None:
    import torch._dynamo.config as config

    model = _model("llama")
    seen: list[int] = []
    model.model.layers[0].register_forward_pre_hook(lambda *_: seen.append(config.recompile_limit))
    for limit in (77, 78):  # also in a thread that is kept
        with config.patch(recompile_limit=limit):
            _piped(model, _map(model, 2))
    assert seen == [77] * len(LENGTHS) + [78] * len(LENGTHS)


def test_nothing_of_a_step_waits_for_the_garbage_collector() -> None:
    model = _model("llama")
    pipeline = Pipeline(model, _map(model, 2))
    seen: list[weakref.ref[torch.Tensor]] = []

    def note(_module: Any, _args: Any, output: torch.Tensor) -> None:
        seen.append(weakref.ref(output))

    handle = model.model.layers[1].register_forward_hook(note)  # the last block before the boundary
    gc.disable()
    try:
        pipeline.run([lambda ids=ids: _loss(model, ids) for ids in _batches()])
        assert len(seen) == len(LENGTHS) and all(reference() is None for reference in seen)
        failing = model.model.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
        with contextlib.suppress(ZeroDivisionError):
            pipeline.run([lambda ids=ids: _loss(model, ids) for ids in _batches()])
        failing.remove()
        assert len(seen) > len(LENGTHS) and all(reference() is None for reference in seen)
    finally:
        gc.enable()
        handle.remove()


def test_a_stretch_lets_go_of_what_it_kept_when_its_backward_is_done() -> None:
    model = _model("llama")
    pipeline = Pipeline(model, _map(model, 2), blocks_at_once=1)
    kept: list[weakref.ref[torch.Tensor]] = []
    alive: list[list[bool]] = []
    for layer in (1, 2, 3):
        model.model.layers[layer].register_forward_pre_hook(lambda _module, args: kept.append(weakref.ref(args[0])))
        model.model.layers[layer - 1].register_full_backward_pre_hook(lambda *_: alive.append([one() is not None for one in kept]))
    gc.disable()
    try:
        pipeline.run([lambda: _loss(model, _batches()[0])])
    finally:
        gc.enable()
    # Inputs of blocks 1, 2, 3, when backward reaches block 2, 1, 0: of the blocks behind it, none is left.
    assert alive == [[True, True, False], [True, False, False], [False, False, False]]


def test_the_model_is_left_as_it_was() -> None:
    model = _model("gpt2")
    before = {name: type(module) for name, module in model.named_modules()}
    names = [name for name, _ in model.named_parameters()]
    pipeline = Pipeline(model, _map(model, 2))
    changed = [name for name, module in model.named_modules() if type(module) is not before[name]]
    assert "transformer.h.0" in changed and all(isinstance(model.get_submodule(name), before[name]) for name in changed)
    assert [name for name, _ in model.named_parameters()] == names
    assert type(model.transformer.h[0]).__name__ == "GPT2Block"
    ids = _batches()[0]
    with torch.no_grad(), pipeline.whole_forward():
        inside = model(ids).logits
    pipeline.close()
    assert {name: type(module) for name, module in model.named_modules()} == before
    with torch.no_grad():
        assert torch.equal(model(ids).logits, inside)
