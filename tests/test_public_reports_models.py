"""What people reported about other tools, tried on this one: device maps, adapters, exports, hidden states.

A test's name begins with the case's number, its docstring has the reports; values are those of the smallest input that shows the fault.
What needs several processes is in tests/distributed/test_public_reports.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.args import LoraArguments, ModelArguments
from harness.export import export_model
from harness.findings import UserError
from harness.lora import attach_lora
from harness.lora_targets import find_targets
from harness.model_units import block_classes, check_device_map, device_of, find_units, tied_groups
from harness.partition import Device
from harness.placement import choose_device_map, get_model_input_device, get_model_output_device, meta_model
from tests.checking import ROOT
from tests.test_device_maps import where
from tests.test_lora import IDS, arguments, llama, neox, num_trainable, ranks

GPT2_MAP: dict[str, Any] = {"transformer.wte": 0, "transformer.wpe": 0, "transformer.h": 0}
FOUR_LAYERS = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
LAYER_BYTES, EMBEDDING_BYTES = 10_368, 4_096
BUDGETS: dict[Device, int] = {0: 26_736, 1: 30_000}


def meta(kind: str, **values: Any) -> Any:
    from transformers import AutoConfig

    return meta_model(AutoConfig.for_model(kind, **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **values}), torch.float32)


def gpt2() -> Any:
    return meta("gpt2", n_embd=16, n_layer=2, n_head=2, vocab_size=64, n_positions=32)


def llama_of_four(tied: bool) -> Any:
    return meta("llama", **FOUR_LAYERS, num_key_value_heads=2, tie_word_embeddings=tied)


# ---- device maps


def test_b24_a_map_that_leaves_modules_out_names_all_of_them() -> None:
    """https://github.com/huggingface/transformers/issues/23294"""
    model = gpt2()
    (finding,) = check_device_map(model, GPT2_MAP, 1)
    assert finding.severity == "error" and finding.message == "leaves 2 modules without a device: transformer.ln_f, lm_head"
    assert check_device_map(model, {**GPT2_MAP, "transformer.ln_f": 0, "lm_head": 0}, 1) == []


def test_b24_a_map_in_another_familys_names_says_what_this_one_has() -> None:
    """https://github.com/huggingface/transformers/issues/23294"""
    unknown, missing = check_device_map(gpt2(), {"model": 0, "lm_head": 0}, 1)
    assert unknown.message == "GPT2LMHeadModel has no module model" and unknown.fix == "its top modules are transformer, lm_head"
    assert "transformer.wte, transformer.wpe, transformer.h.0, transformer.h.1, transformer.ln_f" in missing.message


@pytest.mark.parametrize(
    ("kind", "values", "block", "names"),
    [
        ("gpt2", {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 64}, "GPT2Block", "transformer.h.1"),
        (
            "opt",
            {"hidden_size": 16, "ffn_dim": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "word_embed_proj_dim": 16},
            "OPTDecoderLayer",
            "model.decoder.layers.1",
        ),
        ("falcon", {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}, "FalconDecoderLayer", "transformer.h.1"),
        (
            "t5",
            {"d_model": 16, "d_ff": 16, "d_kv": 8, "num_heads": 2, "num_layers": 2},
            "T5Block",
            "shared encoder.block.1 decoder.block.1",
        ),
    ],
)
def test_b24_families_are_known_by_their_own_word(kind: str, values: dict[str, Any], block: str, names: str) -> None:
    """https://github.com/huggingface/transformers/issues/23294: no table of names, so no family is a special case."""
    model = meta(kind, vocab_size=64, **{key: value for key, value in values.items() if key != "vocab_size"})
    assert block_classes(model) == {block}
    units = find_units(model)
    assert set(names.split()) <= {name for unit in units for name in unit.names}
    assert check_device_map(model, {name: 0 for unit in units for name in unit.names}, 1) == []


@pytest.mark.parametrize("strategy", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_b26_a_tied_head_stays_with_the_embedding(strategy: str) -> None:
    """https://github.com/huggingface/accelerate/issues/993, https://github.com/huggingface/accelerate/issues/661"""
    model = llama_of_four(tied=True)
    units = find_units(model)
    assert [unit.weight_bytes for unit in units if unit.is_block] == [LAYER_BYTES] * 4
    assert tied_groups(model) == [("model.embed_tokens", "lm_head")]
    assert next(unit.weight_bytes for unit in units if "lm_head" in unit.names) == EMBEDDING_BYTES  # once
    choice = choose_device_map(model, strategy, where(BUDGETS, host={"cpu": 10**9}))
    first = {name: device_of(choice.device_map, name) for name in ("model.embed_tokens", "lm_head")}
    assert first["model.embed_tokens"] == first["lm_head"] == 0
    assert check_device_map(model, choice.device_map, 2) == []


def test_b26_a_map_that_separates_them_is_refused_and_none_unties_them(tmp_path: Path) -> None:
    """https://github.com/huggingface/accelerate/issues/661"""
    from transformers import LlamaConfig, LlamaForCausalLM

    from harness.engines.device_map import fill_placed
    from harness.modeling import build_empty, load_config

    model = llama_of_four(tied=True)
    apart = {"model": 0, "lm_head": 1}
    (finding,) = check_device_map(model, apart, 2)
    assert finding.message == "separates modules that share weights: model.embed_tokens on 0, lm_head on 1"
    config = LlamaConfig(**FOUR_LAYERS, num_key_value_heads=2, tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    original = LlamaForCausalLM(config)
    original.save_pretrained(tmp_path)
    args = ModelArguments(model_name_or_path=str(tmp_path))
    empty = build_empty(args, load_config(args), [0] * 64, dtype=torch.float32, seed=0)
    placed = fill_placed(empty, {"model": "cpu", "lm_head": "cpu"})
    assert placed.lm_head.weight is placed.model.embed_tokens.weight
    assert num_trainable(placed) == num_trainable(original)


def test_b28_inputs_go_where_the_embedding_is() -> None:
    """https://github.com/huggingface/transformers/issues/30115, https://github.com/huggingface/transformers/issues/34706"""
    model = llama_of_four(tied=False)
    device_map: dict[str, Any] = {"model.embed_tokens": 2, "model.rotary_emb": 2, "model.layers.0": 2, "model.layers.1": 2}
    device_map |= {"model.layers.2": 3, "model.layers.3": 3, "model.norm": 3, "lm_head": 3}
    assert (get_model_input_device(model, device_map), get_model_output_device(model, device_map)) == (2, 3)
    turned = {name: 5 - device for name, device in device_map.items()}
    assert (get_model_input_device(model, turned), get_model_output_device(model, turned)) == (3, 2)  # not the lowest number
    mixed = {name: "cpu" if device == 2 else "meta" for name, device in device_map.items()}
    assert (get_model_input_device(model, mixed), get_model_output_device(model, mixed)) == ("cpu", "meta")


def test_e09_no_block_is_cut_and_a_wrong_class_name_is_refused() -> None:
    """https://github.com/huggingface/accelerate/issues/1730: accelerate cuts layer 1 between both cards, silently."""
    model = llama_of_four(tied=True)
    with pytest.raises(UserError) as caught:
        find_units(model, no_split_modules=["DecoderLayer"])
    (finding,) = caught.value.findings
    assert finding.message == "LlamaForCausalLM has no class DecoderLayer"
    assert finding.fix == "this model's blocks are LlamaDecoderLayer"
    for kind, name in (("falcon", "FalconDecoderLayer"), ("gpt2", "GPT2Block")):
        other = meta(kind, vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
        with pytest.raises(UserError, match=f"this model's blocks are {name}"):
            block_classes(other, ["DecoderLayer"])
    for strategy in ("auto", "balanced", "sequential"):
        device_map = choose_device_map(model, strategy, where(BUDGETS, host={"cpu": 10**9})).device_map
        for layer in range(4):
            inside = [name for name, _ in model.named_parameters() if name.startswith(f"model.layers.{layer}.")]
            assert len({device_of(device_map, name) for name in inside}) == 1


# ---- adapters


def test_b31_targets_that_the_model_does_not_have() -> None:
    """https://github.com/huggingface/peft/issues/294, https://github.com/hiyouga/LlamaFactory/issues/750"""
    with pytest.raises(UserError) as caught:
        find_targets(arguments(target_modules=["q_proj", "v_proj"]), neox())
    assert [finding.message.split(" ")[0] for finding in caught.value.findings] == ["q_proj", "v_proj"]
    assert all("query_key_value, dense, dense_h_to_4h, dense_4h_to_h" in finding.fix for finding in caught.value.findings)
    with pytest.raises(UserError) as caught:
        attach_lora(neox(), arguments(target_modules=["query_key_value", "no_such"]))
    assert [finding.message for finding in caught.value.findings] == ["no_such is not in GPTNeoXForCausalLM"]
    assert len(attach_lora(neox(), arguments(target_modules=["query_key_value"])).modules) == 2


def test_b33_chosen_layers() -> None:
    """https://github.com/huggingface/peft/issues/2155, https://github.com/huggingface/peft/issues/3610"""
    with_head = attach_lora(llama(), arguments(target_modules=["q_proj"], target_layers="1"))
    assert with_head.modules == ["model.layers.1.self_attn.q_proj"]
    bare = attach_lora(llama(bare=True), arguments(target_modules=["q_proj"], target_layers="1"))
    assert bare.modules == ["layers.1.self_attn.q_proj"]
    for layers in ("1,7", "7", "0-7"):
        with pytest.raises(UserError, match=r"layer \d out of range 0-1"):
            attach_lora(llama(), arguments(target_modules=["q_proj"], target_layers=layers))
    with pytest.raises(UserError, match="layer 7 out of range 0-1"):
        attach_lora(llama(), arguments(target_modules=["q_proj"], target_layers="1,7"))


@pytest.mark.parametrize(("use_dora", "expected"), [(False, 768), (True, 864)])
def test_b36_a_fresh_adapter_changes_nothing(use_dora: bool, expected: int) -> None:
    """https://github.com/huggingface/peft/issues/1731, https://github.com/huggingface/peft/issues/1984"""
    model = llama(3).eval()
    before = model(IDS).logits
    attach_lora(model, arguments(use_dora=use_dora))
    assert num_trainable(model) == expected == 768 + (6 * 16 if use_dora else 0)
    torch.testing.assert_close(model(IDS).logits, before, rtol=0, atol=1e-5)


def test_b36_dora_is_refused_before_launch_where_it_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """https://github.com/huggingface/peft/issues/1731: under ZeRO-3; under FSDP it trains (tests/distributed/test_public_reports.py)."""
    from harness.check_config import main

    flags = ["--num_processes", "2", "--model_type", "llama", "--output_dir", str(tmp_path / "out"), "--lora_r", "4", "--use_cpu"]
    for template, use_dora, code in (("zero3", "True", 2), ("zero3_offload", "True", 2), ("zero2", "True", 0), ("zero3", "False", 0)):
        assert main([*flags, "--deepspeed", str(ROOT / f"ds_configs/{template}.json"), "--use_dora", use_dora]) == code
        text = capsys.readouterr().out
        assert ("--use_dora: reads base weights that ZeRO-3 has not gathered -> use FSDP or ZeRO-2" in text) == (code == 2), text


def test_b37_ranks_whose_adapters_differ() -> None:
    """https://github.com/Kent0n-Li/ChatDoctor/issues/49, https://github.com/yifan123/flow_grpo/issues/245,
    https://github.com/huggingface/accelerate/issues/1481

    The comparison itself; on two processes, where both end with the message: tests/distributed/test_lora_job.py.
    """

    def adapted(seed: int = 0, r: int = 8) -> Any:
        model = llama()
        attach_lora(model, LoraArguments(lora_r=r, target_modules=["q_proj", "v_proj"]), seed=seed)
        return model

    name = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert ranks(adapted(), llama()) == ["rank 1: 0 LoRA tensors, rank 0: 8"]
    assert ranks(adapted(), adapted(r=4)) == [f"{name} has shape (4, 16) on rank 1, (8, 16) on rank 0"]
    assert ranks(adapted(), adapted(seed=1)) == [f"{name}: values differ between rank 1 and rank 0"]
    assert ranks(adapted(), adapted(), adapted()) == []


# ---- export and hidden states


class Tokenizer:
    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize("fault", ["empty", "half", "missing", "unknown", None])
def test_e07_an_export_has_the_models_own_shapes_or_is_not_there(fault: str | None, tmp_path: Path) -> None:
    """https://github.com/huggingface/accelerate/issues/2155: what an unsharded view would have given, and their neighbours."""
    from safetensors.torch import load_file

    model = llama()
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    norm = "model.norm.weight"
    if fault == "missing":
        del weights[norm]
    elif fault is not None:
        weights["other" if fault == "unknown" else norm] = torch.zeros(0 if fault == "empty" else 8)

    def export() -> None:
        export_model(
            tmp_path / "final", iter(weights.items()), shapes, model.config, Tokenizer(), dtype=torch.float32, is_main_process=True
        )

    if fault is None:
        export()
        written = load_file(tmp_path / "final/model.safetensors")
        assert {name: tuple(tensor.shape) for name, tensor in written.items()} == shapes
        return
    message = {
        "empty": r"model.norm.weight has shape \(0,\), not \(16,\)",
        "half": r"model.norm.weight has shape \(8,\), not \(16,\)",
        "missing": "model.norm.weight is missing",
        "unknown": r"other has shape \(8,\), not None",
    }[fault]
    with pytest.raises(RuntimeError, match=message):
        export()
    assert list(tmp_path.iterdir()) == []


def test_e01_gpt2_has_one_state_more_than_layers(tmp_path: Path) -> None:
    """https://github.com/huggingface/transformers/issues/1528"""
    from transformers import GPT2Config, GPT2LMHeadModel

    from harness.hidden_states import StateFolder, main
    from harness.modeling import byte_tokenizer

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=3, n_head=2, vocab_size=300, n_positions=32)).eval()
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("sixsix"[: 6 - _num_special(byte_tokenizer())])
    flags = ["--model", str(tmp_path / "model"), "--output", str(tmp_path / "out"), "--prompts", str(tmp_path / "prompts.txt")]
    assert main(flags) == 0
    states = StateFolder(tmp_path / "out", "")
    ids = torch.tensor([states.manifest["token_ids"][0]])
    assert ids.shape == (1, 6) and list(states.files) == ["0.0", "0.1", "0.2", "0.3"]
    assert all(states.get(key).shape == (1, 6, 16) for key in states.files)
    assert torch.equal(states.get("0.0"), model.transformer.wte(ids) + model.transformer.wpe(torch.arange(6)))
    assert json.loads((tmp_path / "out/manifest.json").read_text())["num_layers"] == 3


def _num_special(tokenizer: Any) -> int:
    return len(tokenizer("").input_ids)
