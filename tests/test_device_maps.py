"""Device maps on meta models: ten architectures, equal and unequal cards; no weights, no GPU."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.args import DeviceMapArguments
from harness.device_maps import apply_balanced_device_map, create_balanced_device_map, main, parse_gpus, plan_device_map
from harness.findings import UserError
from harness.model_units import MapJob, block_classes, check_device_map, device_of, find_units, tied_groups
from harness.parsing import parse_args
from harness.partition import Device, fair_shares
from harness.placement import (
    Placing,
    choose_device_map,
    deepest_fit,
    get_model_input_device,
    get_model_output_device,
    meta_model,
    placement_lines,
    placing,
)
from harness.planner import main as harness_plan

GB = 10**9


def _config(kind: str) -> Any:
    from transformers import AutoConfig

    common = {"vocab_size": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    wide = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 12, "num_attention_heads": 4}
    own: dict[str, dict[str, Any]] = {
        "llama": {**wide, "num_key_value_heads": 2},
        "qwen3": {**wide, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True},
        "gemma3_text": {**wide, "num_key_value_heads": 2, "head_dim": 16},
        "gpt2": {"n_embd": 64, "n_layer": 12, "n_head": 4, "n_positions": 64},
        "gpt_neox": wide,
        "opt": {"hidden_size": 64, "ffn_dim": 128, "num_hidden_layers": 12, "num_attention_heads": 4, "word_embed_proj_dim": 64},
        "falcon": {"hidden_size": 64, "num_hidden_layers": 12, "num_attention_heads": 4},
        "phi3": {**wide, "num_key_value_heads": 2},
        "mixtral": {**wide, "num_key_value_heads": 2, "num_local_experts": 4},
        "t5": {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_heads": 4, "num_layers": 6, "num_decoder_layers": 6},
    }
    return AutoConfig.for_model(kind, **{**common, **own[kind]})


ARCHITECTURES = ["llama", "qwen3", "gemma3_text", "gpt2", "gpt_neox", "opt", "falcon", "phi3", "mixtral", "t5"]
_models: dict[str, Any] = {}


def model_of(kind: str) -> Any:
    if kind not in _models:
        _models[kind] = meta_model(_config(kind), torch.bfloat16)
    return _models[kind]


def where(cards: dict[Device, int], **changes: Any) -> Placing:
    return Placing(**{"cards": cards, "free": cards, "min_memory_bytes": 0, **changes})


def load_of(model: Any, device_map: dict[str, Any], job: MapJob) -> dict[Device, int]:
    loads: dict[Device, int] = {}
    for unit in find_units(model, job):
        device = device_of(device_map, unit.names[0])
        assert device is not None
        loads[device] = loads.get(device, 0) + unit.num_bytes
    return loads


CARDS: dict[str, list[float]] = {
    "one": [1.0],
    "two": [1.0, 1.0],
    "three": [1.0, 1.0, 1.0],
    "eight": [1.0] * 8,
    "24/24/12": [24 / 60, 24 / 60, 12 / 60],
    "one nearly full": [0.7, 0.7, 0.02],
}


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize("cards", list(CARDS))
def test_balanced_maps(kind: str, cards: str) -> None:
    model = model_of(kind)
    job = MapJob(training_bytes_per_param=6, num_tokens=64, in_flight=2, loss_chunk_size=16)
    units = find_units(model, job)
    total = sum(unit.num_bytes for unit in units)
    # Sizes relative to the model: the cards can hold 1.25 to 10 times of it together.
    scale = 1.25 * total
    sizes: dict[Device, int] = {index: int(scale * share) for index, share in enumerate(CARDS[cards])}
    floor = int(0.05 * scale)
    choice = choose_device_map(model, "balanced", where(sizes, job=job, min_memory_bytes=floor))

    assert check_device_map(model, choice.device_map, len(sizes)) == []  # complete, blocks whole, ties together
    usable = [size for size in sizes.values() if size >= floor]
    loads = load_of(model, choice.device_map, job)
    assert set(loads) <= {index for index, size in sizes.items() if size >= floor}
    assert all(loads.get(index, 0) <= size for index, size in sizes.items())
    shares = fair_shares(total, [float(size) for size in usable])
    largest = max(unit.num_bytes for unit in units)
    for index, share in enumerate(shares):
        # Within 1.10 of the ideal where the blocks are fine enough for it; never a whole block over.
        assert loads.get(index, 0) <= max(1.10 * share, share + largest)
        if largest <= 0.1 * share:
            assert loads.get(index, 0) <= 1.10 * share


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize("strategy", ["auto", "balanced_low_0", "sequential", "dynamic"])
def test_other_strategies_give_complete_maps(kind: str, strategy: str) -> None:
    model = model_of(kind)
    total = sum(unit.weight_bytes for unit in find_units(model))
    sizes: dict[Device, int] = {0: total, 1: total, 2: total}
    choice = choose_device_map(model, strategy, where(sizes))
    assert check_device_map(model, choice.device_map, 3) == []
    if strategy == "sequential":
        assert set(choice.device_map.values()) == {0}


def test_the_order_is_that_of_execution() -> None:
    names = [unit.names for unit in find_units(model_of("opt"))]
    # OPT registers its final norm before its blocks and runs it after them.
    assert names[0] == ("model.decoder.embed_tokens", "lm_head") and names[1] == ("model.decoder.embed_positions",)
    assert names[2] == ("model.decoder.layers.0",) and names[-1] == ("model.decoder.final_layer_norm",)
    llama = [unit.names[0] for unit in find_units(model_of("llama"))]
    assert llama == ["model.embed_tokens", "model.rotary_emb", *(f"model.layers.{i}" for i in range(12)), "model.norm", "lm_head"]


def test_bytes_of_units() -> None:
    units = find_units(model_of("llama"), MapJob(training_bytes_per_param=12, num_tokens=10, in_flight=3, loss_chunk_size=4))
    block = next(unit for unit in units if unit.is_block)
    params = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128 + 2 * 64
    assert block.weight_bytes == 2 * params and block.training_bytes == 12 * params
    # Inputs and outputs of the seven matrix products, 2 bytes, 1.2 for norms and residuals, 10 tokens, 3 micro-batches.
    width = 2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128)
    assert block.activation_bytes == int(3 * 10 * 1.2 * 2 * width)
    head = next(unit for unit in units if "lm_head" in unit.names)
    assert head.activation_bytes == 12 * 4 * 512 + 3 * 2 * 10 * 64
    checkpointed = find_units(model_of("llama"), MapJob(num_tokens=10, in_flight=3, activation_checkpointing=True))
    assert next(unit for unit in checkpointed if unit.is_block).activation_bytes == 3 * 2 * 10 * 64


def test_lora_counts_only_what_trains() -> None:
    units = find_units(model_of("llama"), MapJob(training_bytes_per_param=12, lora_r=8))
    block = next(unit for unit in units if unit.is_block)
    width = 2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128)
    assert block.training_bytes == 12 * 8 * width
    assert units[0].training_bytes == 0  # the embedding


def test_tied_head_stays_with_the_embedding_and_counts_once() -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=1, vocab_size=32,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = meta_model(config, torch.float32)
    units = find_units(model)
    assert units[0].names == ("model.embed_tokens", "lm_head") and units[0].weight_bytes == 32 * 32 * 4
    total = sum(unit.weight_bytes for unit in units)
    budgets: dict[Device, int] = {0: int(0.8 * total), 1: int(0.9 * total)}
    for strategy in ("balanced", "auto"):
        device_map = choose_device_map(model, strategy, where(budgets)).device_map
        assert device_map["lm_head"] == device_map["model.embed_tokens"] == 0
        assert set(device_map.values()) == {0, 1}
    apart = {**device_map, "lm_head": 1}
    (finding,) = check_device_map(model, apart, 2)
    assert "model.embed_tokens on 0, lm_head on 1" in finding.message


def test_a_hand_written_map_is_checked_before_anything_is_loaded() -> None:
    model = model_of("gpt2")
    (finding,) = check_device_map(model, {"transformer.wte": 0, "transformer.wpe": 0, "transformer.h": 0}, 1)
    assert finding.message == "leaves 2 modules without a device: transformer.ln_f, lm_head"
    assert check_device_map(model, {"transformer": 0, "lm_head": 0}, 1) == []
    findings = check_device_map(model, {"model": 0, "lm_head": 0}, 1)
    assert findings[0].message == "GPT2LMHeadModel has no module model" and findings[0].fix == "its top modules are transformer, lm_head"
    with pytest.raises(UserError, match="without a device"):
        choose_device_map(model, '{"transformer": 0}', where({0: GB}))


def test_every_mistake_of_a_map_is_reported() -> None:
    device_map = {"model": 0, "model.layers.3.mlp": 1, "model.layers.4": 7, "model.norm": "tpu", "lm_head": 0}
    messages = [finding.message for finding in check_device_map(model_of("llama"), device_map, 2)]
    assert messages == [
        "names card 7, but there are 2",
        "'tpu' is not a device",
        "cuts model.layers.3 (LlamaDecoderLayer) in two: devices 0 and 1",
    ]


def test_a_wrong_block_class_is_refused_with_the_right_one() -> None:
    with pytest.raises(UserError) as caught:
        find_units(model_of("llama"), no_split_modules=["DecoderLayer"])
    assert caught.value.findings[0].message == "LlamaForCausalLM has no class DecoderLayer"
    assert caught.value.findings[0].fix == "this model's blocks are LlamaDecoderLayer"
    assert block_classes(model_of("falcon")) == {"FalconDecoderLayer"} and block_classes(model_of("t5")) == {"T5Block"}


def test_a_model_without_known_blocks_gets_auto_and_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = meta_model(_config("llama"), torch.bfloat16)
    model._no_split_modules = None
    with caplog.at_level(logging.WARNING, logger="harness"):
        choice = choose_device_map(model, "balanced", where({0: GB, 1: GB}))
    assert choice.strategy == "auto" and "does not name its blocks" in caplog.text
    assert {device_of(choice.device_map, name) for name, _ in model.named_parameters()} == {0, 1}


def test_no_card_with_enough_memory() -> None:
    model = model_of("llama")
    small: dict[Device, int] = {0: 1_500_000_000, 1: 600_000_000}
    with pytest.raises(UserError) as caught:
        choose_device_map(model, "balanced", where(small, min_memory_bytes=2 * GB))
    (finding,) = caught.value.findings
    assert "no card has 2 GB free" in finding.message and "GPU 0: 1.40 GiB free, GPU 1: 0.56 GiB free" in finding.message
    assert "--min_memory_gb" in finding.fix and "--force_balance" in finding.fix
    forced = choose_device_map(model, "balanced", where(small, min_memory_bytes=2 * GB, force_balance=True))
    assert set(forced.device_map.values()) == {0, 1}


def test_dynamic_says_why() -> None:
    model = model_of("llama")
    total = sum(unit.weight_bytes for unit in find_units(model))
    assert choose_device_map(model, "dynamic", where({})).device_map == {"": "cpu"}
    assert choose_device_map(model, "dynamic", where({0: 2 * total})).decisions == ("one GPU: auto",)
    kept = choose_device_map(model, "dynamic", where({0: total, 1: total}, threshold=1.0))
    assert (
        kept.strategy == "auto" and kept.decisions[-1].startswith("auto is kept: imbalance 0.") and kept.decisions[-1].endswith("within 1")
    )
    rebalanced = choose_device_map(model, "dynamic", where({0: total, 1: total}, threshold=0.0))
    assert rebalanced.strategy == "balanced" and [note.split(":")[0] for note in rebalanced.decisions] == [
        "auto is uneven",
        "balanced is used",
    ]
    assert rebalanced.report.imbalance_ratio <= kept.report.imbalance_ratio
    with pytest.raises(UserError, match="neither auto nor balanced fits"):
        choose_device_map(model, "dynamic", where({0: total // 4, 1: total // 4}))


def test_dynamic_falls_back_to_auto_when_balanced_cannot_be() -> None:
    model = model_of("llama")
    total = sum(unit.weight_bytes for unit in find_units(model))
    # No card has the free memory that balanced asks for; auto does not look at that.
    choice = choose_device_map(model, "dynamic", where({0: total, 1: total}, threshold=0.0, min_memory_bytes=10 * total))
    assert choice.strategy == "auto" and choice.decisions[-1].startswith("balanced cannot be loaded (no card has")


def _llama(layers: int, hidden: int, wide: int) -> Any:
    from transformers import LlamaConfig

    shape = {"hidden_size": hidden, "intermediate_size": wide, "num_hidden_layers": layers, "num_attention_heads": 32, "vocab_size": 128256}
    return meta_model(LlamaConfig(**shape, num_key_value_heads=8, tie_word_embeddings=False), torch.bfloat16)


def _layers(model: Any, device_map: dict[str, Any]) -> list[int]:
    places = [device_of(device_map, unit.names[0]) for unit in find_units(model) if unit.is_block]
    return [places.count(card) for card in (0, 1)]


def test_rotary_tables_are_where_the_first_block_is() -> None:
    model = _llama(32, 4096, 14336)
    cards: dict[Device, int] = {0: 130 * GB, 1: 130 * GB}
    job = MapJob(training_bytes_per_param=6, num_tokens=2048, in_flight=8, activation_checkpointing=True)
    for strategy in ("auto", "balanced", "dynamic", '{"model": 0, "model.rotary_emb": 1, "lm_head": 1}'):
        device_map = choose_device_map(model, strategy, where(cards, job=job)).device_map
        # accelerate goes by registration, where the tables come behind the norm, on the last card.
        assert device_of(device_map, "model.rotary_emb") == device_of(device_map, "model.layers.0") == 0
    assert choose_device_map(model, '{"model": 0, "lm_head": 1}', where(cards)).device_map == {"model": 0, "lm_head": 1}


def test_of_even_splits_the_fastest_is_taken() -> None:
    model = _llama(16, 2048, 8192)
    cards: dict[Device, int] = {0: 130 * GB, 1: 130 * GB}
    job = MapJob(training_bytes_per_param=6, num_tokens=8192, in_flight=8, activation_checkpointing=True, loss_chunk_size=3072)
    choice = choose_device_map(model, "balanced", where(cards, job=job))
    # The head is 4.3 blocks of weights, and not computed again: 40 on the first card, 24 + 12.9 on the second. By bytes it is 11 to 5.
    assert _layers(model, choice.device_map) == [10, 6] and choice.decisions == ()
    assert max(share.num_bytes / share.ideal_bytes for share in choice.report.devices.values()) <= 1.10
    alone = choose_device_map(model, "balanced", where(cards, job=dataclasses.replace(job, in_flight=1)))
    assert _layers(model, alone.device_map) == [13, 3]  # one micro-batch at a time: nothing to win, so as even as can be


def test_logits_do_not_drive_all_blocks_to_the_other_card_while_there_is_room() -> None:
    model = _llama(16, 2048, 8192)
    job = MapJob(training_bytes_per_param=6, num_tokens=8192, in_flight=8, activation_checkpointing=True, loss_chunk_size=0)
    choice = choose_device_map(model, "balanced", where({0: 130 * GB, 1: 130 * GB}, job=job))
    assert _layers(model, choice.device_map) == [10, 6]
    assert choice.decisions[0].startswith("bytes and time contradict each other: an even split would be 1.39x slower")
    # Where the cards are nearly full, bytes decide; and where they are to be equal whatever happens.
    for size, forced in ((17, False), (130, True)):
        even = choose_device_map(model, "balanced", where({0: size * GB, 1: size * GB}, job=job, force_balance=forced))
        assert _layers(model, even.device_map)[1] <= 2 and even.decisions == ()
        assert max(share.num_bytes / share.ideal_bytes for share in even.report.devices.values()) <= 1.10


def test_what_spills_to_the_host_is_an_error_unless_allowed() -> None:
    model = model_of("llama")
    total = sum(unit.weight_bytes for unit in find_units(model))
    cards: dict[Device, int] = {0: int(0.4 * total)}
    with pytest.raises(UserError, match="the cards do not have enough memory"):
        choose_device_map(model, "balanced", where(cards))
    spilled = choose_device_map(model, "balanced", where(cards, host={"cpu": int(0.4 * total), "disk": 10**15})).device_map
    assert set(spilled.values()) == {0, "cpu", "disk"} and check_device_map(model, spilled, 1) == []


def test_in_flight_depth_is_what_fits() -> None:
    model = model_of("llama")
    deep = MapJob(num_tokens=4096, in_flight=8)
    eight = sum(unit.num_bytes for unit in find_units(model, deep))
    two = sum(unit.num_bytes for unit in find_units(model, MapJob(num_tokens=4096, in_flight=2)))
    assert deepest_fit(model, "balanced", where({0: eight, 1: eight}, job=deep)).in_flight == 8
    tight = deepest_fit(model, "balanced", where({0: int(0.6 * two), 1: int(0.6 * two)}, job=deep))
    assert tight.in_flight == 2 and tight.decisions[0] == "2 of 8 micro-batches fit in flight"


def test_inputs_go_to_the_embedding_and_labels_to_the_head() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=4, vocab_size=32)
        )
    device_map = {"model.embed_tokens": 2, "model.rotary_emb": 2, "model.layers.0": 2, "model.layers.1": 2, "model.layers.2": 3,
                  "model.layers.3": 3, "model.norm": 3, "lm_head": 3}  # fmt: skip
    assert get_model_input_device(model, device_map) == 2 and get_model_output_device(model, device_map) == 3
    model.hf_device_map = {"model": "cuda:1", "lm_head": 0}
    assert get_model_input_device(model) == 1 and get_model_output_device(model) == 0
    # Weights that wait in host memory are brought to the first card, and so is what they are given.
    assert get_model_input_device(model, {**device_map, "model.embed_tokens": "cpu"}) == 2
    del model.hf_device_map
    assert get_model_input_device(model) == "meta"


def test_limits_from_flags() -> None:
    free: dict[Device, int] = {0: 80 * GB, 1: 40 * GB, 2: 10 * GB}
    assert placing(DeviceMapArguments(), free).cards == {0: 72 * GB, 1: 36 * GB, 2: 9 * GB}
    assert placing(DeviceMapArguments(max_memory="20GB"), free).cards == {0: 20 * GB, 1: 20 * GB, 2: 10 * GB}
    named = placing(DeviceMapArguments(max_memory="0:60GB,1:40GB,cpu:200GB", exclude_cpu=False), free)
    assert named.cards == {0: 60 * GB, 1: 40 * GB} and named.host["cpu"] == 200 * GB
    assert placing(DeviceMapArguments(max_memory="cpu:5GB"), free).host == {}  # --exclude_cpu is the default


def test_one_line_a_card() -> None:
    model = model_of("llama")
    free: dict[Device, int] = {0: 58_320_000_000, 1: 24 * GB, 2: GB}
    choice = choose_device_map(model, "balanced", Placing(cards=free, free=free))
    lines = placement_lines(model, choice, free)
    assert lines[0].startswith("GPU 0: 58.32 GB [embedding + rotary_emb + layers 0-")
    assert lines[1].startswith("GPU 1: 24.00 GB [layers ") and lines[1].endswith("-11 + norm + head]")
    assert lines[2] == "GPU 2: 1.00 GB [nothing]"
    assert placement_lines(model, choice, free, {2: "NVIDIA L4"}) == [*lines[:2], "GPU 2: 1.00 GB [nothing] NVIDIA L4"]


def test_a_plan_needs_no_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _config("llama").save_pretrained(tmp_path)
    code = main(["--model", str(tmp_path / "config.json"), "--gpus", "24GB,24GB,12GB", "--block-size", "64", "--json"])
    plan = json.loads(capsys.readouterr().out)
    assert code == 0 and [device["device"] for device in plan["devices"]] == ["GPU 0", "GPU 1", "GPU 2"]
    assert [device["capacity_bytes"] for device in plan["devices"]] == [24 * GB, 24 * GB, 12 * GB]
    assert check_device_map(model_of("llama"), plan["device_map"], 3) == []
    assert main(["--model", str(tmp_path / "config.json"), "--gpus", "24GB,24GB,12GB", "--block_size", "64"]) == 0
    text = capsys.readouterr().out
    assert text.count("\nGPU ") == 3 and "micro-batches in flight" in text
    assert main(["--model", str(tmp_path / "config.json"), "--gpus", "24Gb,x", "--block_size", "64"]) == 2
    assert "'x' is not a size" in capsys.readouterr().err
    flags = ["--engine", "device_map", "--gpus=2x24GB", "--model", str(tmp_path / "config.json"), "--block_size", "64"]
    assert harness_plan([*flags, "--per_device_train_batch_size", "2"]) == 0
    assert capsys.readouterr().out.count("\nGPU ") == 2
    assert parse_gpus("2x80GB,1GB") == [80 * GB, 80 * GB, GB]


def test_the_plan_is_the_map_a_run_would_get() -> None:
    job = MapJob(training_bytes_per_param=12, num_tokens=64, in_flight=4)
    plan = plan_device_map(_config("mixtral"), [24 * GB, 24 * GB], job=job, dtype=torch.float32, flags=DeviceMapArguments(min_memory_gb=0))
    model = meta_model(_config("mixtral"), torch.float32)
    cards = placing(DeviceMapArguments(min_memory_gb=0), {0: 24 * GB, 1: 24 * GB}, job)
    assert plan.choice.device_map == deepest_fit(model, "dynamic", cards).device_map
    assert sum(row["weights_bytes"] for row in plan.rows) == sum(unit.weight_bytes for unit in find_units(model))
    assert 1 < plan.speedup < 2


def test_python_interface(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from harness.modeling import byte_tokenizer

    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(_config("qwen3"))
    plain.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    total = sum(parameter.numel() * 4 for parameter in plain.parameters())
    device_map = create_balanced_device_map(str(tmp_path), max_memory={0: total, 1: total}, min_memory_gb=0, dtype=torch.float32)
    assert check_device_map(plain, device_map, 2) == [] and set(device_map.values()) == {0, 1}
    with pytest.raises(UserError, match="no card has 2 GB free"):
        create_balanced_device_map(str(tmp_path), max_memory={0: total})
    model, tokenizer, used = apply_balanced_device_map(str(tmp_path), {"device_map": "cpu"})
    assert used == {"": "cpu"} and tokenizer("a")["input_ids"] and tied_groups(model) == [("model.embed_tokens", "lm_head")]
    ids = torch.arange(8)[None]
    assert torch.equal(model(ids).logits, plain.eval()(ids).logits)
    with pytest.raises(UserError, match="has no module transformer"):
        apply_balanced_device_map(str(tmp_path), {"transformer": "cpu"})


BASE = ["--output_dir", "out", "--model_type", "llama"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--device-map", "balanced"], "balanced"),
        (["--device_map_strategy", "auto"], "auto"),
        (["--use_balanced_device_map"], "balanced"),
        (["--use-dynamic-device-map", "True"], "dynamic"),
        (["--use_dynamic_device_map", "False", "--device_map", "cuda:1"], "cuda:1"),
        (["--device_map", "auto", "--device_map_strategy", "auto"], "auto"),
        ([], None),
    ],
)
def test_flags(flags: list[str], expected: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert parse_args([*BASE, *flags]).maps.device_map == expected


def test_flag_values_and_defaults() -> None:
    maps = parse_args(BASE).maps
    assert (maps.force_balance, maps.exclude_cpu, maps.min_memory_gb, maps.balance_threshold) == (False, True, 2.0, 0.3)
    assert maps.offload_folder == "offload"
    maps = parse_args([*BASE, "--force-balance", "--exclude-cpu", "False", "--max-memory", "0:60GB,cpu:2GB"]).maps
    assert (maps.force_balance, maps.exclude_cpu, maps.max_memory) == (True, False, "0:60GB,cpu:2GB")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--device_map", "auto", "--use_balanced_device_map"], "--device_map (auto) and --use_balanced_device_map (balanced) disagree"),
        (["--use_dynamic_device_map", "--use_balanced_device_map"], "disagree"),
        (["--device", "cuda:0"], "--device: unknown argument -> did you mean --device_map?"),
        (["--device_map", "dynamik"], "did you mean dynamic?"),
        (["--balance_threshold", "1.5"], "must be between 0 and 1, not 1.5"),
        (["--min_memory_gb", "-1"], "must not be negative"),
        (["--max_memory", "lots"], "'lots' is not a size"),
        (["--device_map", "auto", "--deepspeed", "zero3.json"], "--deepspeed was given too"),
    ],
)
def test_wrong_flags(flags: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_args([*BASE, *flags])
    assert message in str(caught.value)


def test_a_launch_of_several_processes_refuses_a_map(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="balanced is for one process, but num_processes is 2"):
        parse_args([*BASE, "--device_map", "balanced"])


def test_a_model_without_weights_never_runs_kernels_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not know meta tensors: they ran at address 0, and every later use of the card was an illegal memory access."""
    import sys
    import types

    from harness.model_units import execution_order

    ran: list[str] = []

    class JITFunction:
        def run(self, *_: Any) -> None:
            ran.append("kernel")

    class Fused(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            JITFunction().run(input)
            return super().forward(input)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.fused, self.first = torch.nn.Linear(4, 4), Fused(4, 4), torch.nn.Embedding(4, 4)

        def forward(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
            return self.last(self.fused(self.first(input_ids)))

    jit = types.ModuleType("triton.runtime.jit")
    jit.JITFunction = JITFunction  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, jit.__name__, jit)
    with torch.device("meta"):
        model = Model()
    order = execution_order(model, dict(model.named_children()))
    assert not ran
    assert order.index("first") < order.index("fused")  # known up to the kernel
    JITFunction().run()
    assert ran == ["kernel"]
