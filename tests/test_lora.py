"""LoRA: targets, attaching to empty and filled models, r consistency, ranks, export, merge, older dictionaries."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness import lora as lora_module
from harness.args import LoraArguments
from harness.findings import UserError
from harness.lora import (
    attach_lora,
    check_after_build,
    check_first_update,
    check_lora_r_consistency,
    compare_ranks,
    export_adapter,
    fingerprint,
    merge_adapter,
    rows_of,
    run_config,
    stored_name,
    untrained_flags,
)
from harness.lora_targets import find_targets, parse_layers
from harness.parsing import parse_args

torch.set_num_threads(1)


def llama(num_layers: int = 2, hidden_size: int = 16, bare: bool = False, device: str = "cpu") -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=hidden_size,
        intermediate_size=24,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return (LlamaModel if bare else LlamaForCausalLM)(config)


def neox() -> Any:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    return GPTNeoXForCausalLM(
        GPTNeoXConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    )


def arguments(**values: Any) -> LoraArguments:
    return LoraArguments(**{"lora_r": 4, "target_modules": ["q_proj", "v_proj"], **values})


def num_trainable(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def messages(error: pytest.ExceptionInfo[UserError]) -> list[str]:
    return [finding.line() for finding in error.value.findings]


IDS = torch.arange(12).reshape(2, 6)


# ---- targets


def test_names_that_do_not_exist_list_those_that_do() -> None:
    with pytest.raises(UserError) as error:
        find_targets(arguments(), neox())
    fix = "choose from query_key_value, dense, dense_h_to_4h, dense_4h_to_h, or all-linear"
    assert messages(error) == [
        f"error   --target_modules: q_proj is not in GPTNeoXForCausalLM -> {fix}",
        f"error   --target_modules: v_proj is not in GPTNeoXForCausalLM -> {fix}",
    ]


def test_one_wrong_name_among_right_ones_is_refused() -> None:
    with pytest.raises(UserError) as error:
        attach_lora(neox(), arguments(target_modules=["query_key_value", "no_such"]))
    assert len(messages(error)) == 1 and "no_such is not in" in messages(error)[0]


def test_a_module_that_is_no_layer_is_refused() -> None:
    with pytest.raises(UserError, match="self_attn is no linear layer"):
        find_targets(arguments(target_modules=["self_attn"]), llama())


def test_all_linear_leaves_the_head_out() -> None:
    targets = find_targets(arguments(target_modules=["all-linear"]), llama())
    assert targets.names == ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert len(targets.modules) == 14


# Models in which some linear layers cannot have adapters: experts fused by transformers 5 whose layers' names peft takes for them, layers
# read by a kernel, routers that return two tensors.
ODD = {
    "deepseek_v3": {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "qwen3_next": {"num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 16, "num_hidden_layers": 4}
    | {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    "llama4_text": {"num_local_experts": 2, "intermediate_size_mlp": 32},
    "mamba": {},
}


def odd(kind: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    common = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    common |= {
        "num_key_value_heads": 4,
        "head_dim": 8,
        "moe_intermediate_size": 16,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    default = AutoConfig.for_model(kind)
    config = AutoConfig.for_model(kind, **{name: value for name, value in (common | ODD[kind]).items() if hasattr(default, name)})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("kind", "left_out", "names"),
    [
        ("deepseek_v3", ["gate_proj", "up_proj", "down_proj"], ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]),
        ("glm4_moe", ["gate_proj", "up_proj", "down_proj"], ["q_proj", "k_proj", "v_proj", "o_proj"]),
        ("qwen3_next", ["gate_proj", "up_proj", "down_proj"], None),
        ("llama4_text", [], ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
        ("mamba", ["out_proj", "dt_proj", "x_proj"], ["in_proj"]),
    ],
)
def test_all_linear_means_what_peft_adapts(kind: str, left_out: list[str], names: list[str] | None, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    odd(kind).save_pretrained(tmp_path / "base")
    model, attached = trained_model(tmp_path / "base", target_modules=["all-linear"])
    assert sorted(attached.left_out) == sorted(left_out)
    found = {name.rsplit(".", 1)[-1] for name in attached.modules}
    assert found == set(names) if names is not None else not found & set(left_out)
    expected = model(IDS).logits
    weights = ((name, parameter.detach()) for name, parameter in model.named_parameters())
    export_adapter(tmp_path / "adapter", weights, attached, None, is_main_process=True)
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), str(tmp_path / "adapter")).eval()
    torch.testing.assert_close(loaded(IDS).logits, expected)
    merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(IDS).logits, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "names", "message"),
    [
        (
            "deepseek_v3",
            ["o_proj", "down_proj"],
            "down_proj can have no adapter: peft takes the name in deepseek_v3",
        ),
        (
            "glm4_moe",
            ["model.layers.0.mlp.up_proj"],
            "mlp.up_proj can have no adapter: peft takes the name in glm4_moe",
        ),
        ("mamba", ["out_proj"], "out_proj can have no adapter: peft adapts none in mamba"),
        ("llama4_text", ["router"], "router is no linear layer"),
        ("deepseek_v3", ["no_such"], "no_such is not in DeepseekV3ForCausalLM"),
    ],
)
def test_names_that_peft_does_not_adapt_here_are_refused(kind: str, names: list[str], message: str) -> None:
    model = odd(kind)
    with pytest.raises(UserError) as error:
        attach_lora(model, arguments(target_modules=names))
    (line,) = messages(error)
    assert message in line
    choices = line.split("choose from ")[1].removesuffix(", or all-linear").split(", ")
    assert attach_lora(model, arguments(target_modules=choices)).modules


@pytest.mark.parametrize(
    ("text", "layers"), [("0", [0]), ("0,1,2", [0, 1, 2]), ("10-12", [10, 11, 12]), ("3, 0-1", [0, 1, 3]), ("1,1", [1])]
)
def test_layer_numbers(text: str, layers: list[int]) -> None:
    assert parse_layers(text, 20) == layers


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,7", "layer 7 out of range 0-1"),
        ("0-2", "layer 2 out of range 0-1"),
        ("x", "cannot read 'x'"),
        ("1-0", "cannot read '1-0'"),
        ("-1", "cannot read '-1'"),
    ],
)
def test_layer_numbers_that_do_not_exist(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_layers(text, 2)


@pytest.mark.parametrize(("bare", "module"), [(False, "model.layers.1.self_attn.q_proj"), (True, "layers.1.self_attn.q_proj")])
def test_chosen_layers_with_and_without_a_head(bare: bool, module: str) -> None:
    attached = attach_lora(llama(bare=bare), arguments(target_modules=["q_proj"], target_layers="1"))
    assert attached.modules == [module]


def test_chosen_layers_out_of_range() -> None:
    with pytest.raises(UserError, match="layer 7 out of range 0-1"):
        attach_lora(llama(), arguments(target_modules=["q_proj"], target_layers="1,7"))


def test_patterns_and_modules_to_save_must_match_something() -> None:
    lora = arguments(rank_pattern='{"k_proj": 8}', alpha_pattern='{"q_proj": 8}', modules_to_save=["no_head"])
    with pytest.raises(UserError) as error:
        attach_lora(llama(), lora)
    assert [finding.key for finding in error.value.findings] == ["--rank_pattern", "--modules_to_save"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["layers"], "layers is a list of modules"),
        (["q_proj"], r"q_proj is to be trained whole, and .*q_proj gets an adapter"),
        (["self_attn"], r"self_attn is to be trained whole, and .*q_proj gets an adapter"),
    ],
)
def test_what_cannot_be_trained_whole_is_named(names: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        attach_lora(llama(), arguments(target_modules=["q_proj"], modules_to_save=names))
    assert [finding.key for finding in error.value.findings] == ["--modules_to_save"]


def test_an_empty_name_is_none() -> None:
    attached = attach_lora(llama(), arguments(target_modules=["q_proj"], modules_to_save=[""]))
    assert attached.modules == ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"]


# ---- attaching


def test_fresh_adapter_changes_nothing_and_trains_only_itself() -> None:
    model = llama(3).eval()
    before = model(IDS).logits
    frozen = {name: parameter.clone() for name, parameter in model.named_parameters()}
    attached = attach_lora(model, arguments())
    assert num_trainable(model) == 768  # 3 layers x 2 modules x 4 x (16 + 16)
    assert torch.equal(model.eval()(IDS).logits, before)
    assert attached.config.lora_alpha == 8
    assert all(torch.equal(parameter, frozen[str(stored_name(name))]) for name, parameter in model.named_parameters() if stored_name(name))
    assert all(parameter.requires_grad == (stored_name(name) is None) for name, parameter in model.named_parameters())


def test_dora() -> None:
    model = llama(3).eval()
    before = model(IDS).logits
    attach_lora(model, arguments(use_dora=True))
    assert num_trainable(model) == 864
    torch.testing.assert_close(model(IDS).logits, before, rtol=0, atol=1e-5)


def test_modules_to_save_start_equal_and_train() -> None:
    model = llama().eval()
    before = model(IDS).logits
    attach_lora(model, arguments(modules_to_save=["lm_head"]))
    assert num_trainable(model) == 512 + 32 * 16
    assert torch.equal(model(IDS).logits, before)


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("from_files", [False, True])
def test_empty_model_filled_by_blocks_equals_one_that_was_filled(tmp_path: Path, use_dora: bool, from_files: bool) -> None:
    from harness.args import ModelArguments
    from harness.modeling import build_empty, fill

    source = llama(3)
    source.save_pretrained(tmp_path)
    args = ModelArguments(model_name_or_path=str(tmp_path)) if from_files else ModelArguments(config_name=str(tmp_path))
    tokenizer: Any = range(32)
    if not from_files:
        tokenizer = type("Tokenizer", (), {"__len__": lambda self: 32, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1})()
    empty = build_empty(args, source.config, tokenizer, dtype=torch.float32, seed=3)
    attached = attach_lora(empty.model, arguments(use_dora=use_dora, modules_to_save=["lm_head"]), seed=3)
    empty.stored_name, empty.init_block, empty.frozen_dtype = stored_name, attached.init_block, torch.bfloat16
    model = fill(empty, torch.device("cpu"))
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert {parameter.dtype for parameter in model.parameters() if parameter.requires_grad} == {torch.float32}
    assert {parameter.dtype for parameter in model.parameters() if not parameter.requires_grad} == {torch.bfloat16}
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if "lora_B" in name:
            assert not parameter.any()
        if "lora_A" in name:
            assert parameter.abs().max() > 0
    saved = parameters["lm_head.modules_to_save.default.weight"]
    torch.testing.assert_close(saved, parameters["lm_head.original_module.weight"].float(), rtol=0.01, atol=0)
    q_proj = "model.layers.2.self_attn.q_proj"
    if from_files:
        assert torch.equal(parameters[f"{q_proj}.base_layer.weight"], source.get_parameter(f"{q_proj}.weight").bfloat16())
    if use_dora:
        norms = torch.linalg.norm(parameters[f"{q_proj}.base_layer.weight"].float(), dim=1)
        assert torch.equal(parameters[f"{q_proj}.lora_magnitude_vector.default.weight"], norms)
    assert len(attached.digests) == 3 * 2 * (3 if use_dora else 2)


def test_same_seed_same_adapters() -> None:
    digests = [attach_lora(llama(), arguments(), seed=seed).digests for seed in (1, 1, 2)]
    assert digests[0] == digests[1] != digests[2]


# ---- r consistency


def test_consistent_r() -> None:
    model = llama()
    attached = attach_lora(model, arguments(rank_pattern='{"v_proj": 2}'))
    result = check_lora_r_consistency(model, attached.config)
    assert result["is_consistent"] and result["expected_r"] == 4 and result["method"] == "config and shapes"
    assert result["actual_r_values"] == {
        f"model.layers.{layer}.self_attn.{name}": r for layer in (0, 1) for name, r in (("q_proj", 4), ("v_proj", 2))
    }


def test_wrong_r_is_named() -> None:
    model = llama()
    attach_lora(model, arguments(target_modules=["q_proj"]))
    layer: Any = model.model.layers[1].self_attn.q_proj
    layer.lora_A["default"].weight = nn.Parameter(torch.zeros(8, 16))
    assert check_lora_r_consistency(model, {"r": 4})["mismatched_layers"] == [
        "model.layers.1.self_attn.q_proj: lora_A has r 8, lora_B has r 4"
    ]
    layer.lora_B["default"].weight = nn.Parameter(torch.zeros(16, 8))
    result = check_lora_r_consistency(model, {"lora_r": 4})
    assert not result["is_consistent"]
    assert result["mismatched_layers"] == ["model.layers.1.self_attn.q_proj: r is 8, expected 4"]
    assert check_lora_r_consistency(model, {"r": 4, "rank_pattern": {"layers.1.self_attn.q_proj": 8}})["is_consistent"]


def test_wrapped_by_peft_and_without_a_config() -> None:
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"]))
    assert check_lora_r_consistency(wrapped)["expected_r"] == 2 and check_lora_r_consistency(wrapped)["is_consistent"]
    assert check_lora_r_consistency(wrapped.base_model.model, {})["method"] == "shapes"


def test_model_without_lora_says_so() -> None:
    result = check_lora_r_consistency(llama(), {"r": 8})
    assert (result["is_consistent"], result["method"]) == (False, "none")
    assert result["mismatched_layers"] == ["the model has no LoRA parameters"]


def test_sharded_shapes_are_read_whole() -> None:
    model = llama()
    attach_lora(model, arguments(target_modules=["q_proj"]))
    for parameter in model.parameters():
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0)
    assert check_lora_r_consistency(model, {"r": 4})["is_consistent"]


# ---- ranks


def ranks(*models: nn.Module) -> list[str]:
    return [finding.message for finding in compare_ranks([fingerprint(model) for model in models])]


def test_equal_ranks_pass() -> None:
    models = [llama(), llama()]
    for model in models:
        attach_lora(model, arguments(), seed=1)
    assert ranks(*models) == []


def test_ranks_that_differ() -> None:
    first, other_r, other_seed, other_alpha = llama(), llama(), llama(), llama()
    attach_lora(first, arguments(), seed=1)
    attach_lora(other_r, arguments(lora_r=8), seed=1)
    attach_lora(other_seed, arguments(), seed=2)
    attach_lora(other_alpha, arguments(lora_alpha=32), seed=1)
    name = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert ranks(first, llama()) == ["rank 1: 0 LoRA tensors, rank 0: 8"]
    assert ranks(first, other_r) == [f"{name} has shape (8, 16) on rank 1, (4, 16) on rank 0"]
    assert ranks(first, first, other_seed) == [f"{name}: values differ between rank 2 and rank 0"]
    assert ranks(first, other_alpha) == [f"{name} has scaling 8.0 on rank 1, 2.0 on rank 0"]


def test_check_after_build_warns_or_raises() -> None:
    model = llama()
    attached = attach_lora(model, arguments())
    attached.config.r = 8

    def alone(value: Any) -> list[Any]:
        return [value]

    assert len(check_after_build(model, attached, alone)) == 4
    assert check_after_build(model, attached, alone, check_r=False) == []
    with pytest.raises(UserError, match="r is 4, expected 8"):
        check_after_build(model, attached, alone, strict=True)


def test_first_update_must_move_every_adapter() -> None:
    model = llama()
    attach_lora(model, arguments(target_modules=["q_proj", "v_proj"]))
    names, flags = untrained_flags(model)
    assert len(names) == 4 and flags == [0.0] * 4
    stuck: Any = model.model.layers[1].self_attn.v_proj
    for module in model.modules():
        if hasattr(module, "lora_B") and module is not stuck:
            nn.init.ones_(module.lora_B["default"].weight)
    with pytest.raises(RuntimeError, match=r"1 of 4 LoRA modules got no gradient in the first update: model\.layers\.1\.self_attn\.v_proj"):
        check_first_update(*untrained_flags(model))
    nn.init.ones_(stuck.lora_B["default"].weight)
    check_first_update(*untrained_flags(model))


# ---- writing


def trained_model(base: Path, **values: Any) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base)
    attached = attach_lora(model, arguments(**values), base_name=str(base))
    torch.manual_seed(5)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.3)
    return model.eval(), attached


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"use_dora": True},
        {"use_rslora": True, "lora_alpha": 3, "rank_pattern": '{"v_proj": 2}', "alpha_pattern": '{"q_proj": 7}'},
        {"modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"], "target_layers": "1"},
        {"target_modules": ["embed_tokens", "q_proj"]},
    ],
    ids=["plain", "dora", "patterns", "head", "layers", "embedding"],
)
def test_adapter_loads_into_peft_and_merges(tmp_path: Path, values: dict[str, Any]) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    llama().save_pretrained(tmp_path / "base")
    model, attached = trained_model(tmp_path / "base", **values)
    expected = model(IDS).logits
    weights = ((name, parameter.detach()) for name, parameter in model.named_parameters())
    export_adapter(tmp_path / "adapter", weights, attached, None, is_main_process=True, card="# adapter")
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), str(tmp_path / "adapter")).eval()
    assert torch.equal(loaded(IDS).logits, expected)
    merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(merged(IDS).logits, expected, rtol=1e-4, atol=1e-5)
    assert not any("lora" in name for name in merged.state_dict())


def test_empty_or_missing_adapters_are_not_written(tmp_path: Path) -> None:
    model = llama()
    attached = attach_lora(model, arguments(target_modules=["q_proj"]))
    weights = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    with pytest.raises(RuntimeError, match=r"incomplete: model\.layers\.0\.self_attn\.q_proj, model\.layers\.1"):
        export_adapter(tmp_path / "a", iter([]), attached, None, is_main_process=True)
    with pytest.raises(RuntimeError, match="incomplete"):
        export_adapter(tmp_path / "a", ((name, torch.empty(0)) for name, _ in weights), attached, None, is_main_process=True)
    assert list(tmp_path.iterdir()) == []
    export_adapter(tmp_path / "a", iter(weights), attached, None, is_main_process=False)
    assert list(tmp_path.iterdir()) == []


def test_merge_without_an_adapter(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no adapter"):
        merge_adapter(tmp_path, tmp_path / "out")


TINY = "hidden_size=16,intermediate_size=24,num_hidden_layers=2,num_attention_heads=2,num_key_value_heads=2"


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("more", [{}, {"device_map": "cpu"}], ids=["ddp", "device_map"])
def test_a_model_made_from_scratch_is_kept_for_its_adapters(more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from harness import job
    from harness.export_cli import export_checkpoint
    from harness.run_clm import main

    (tmp_path / "a.txt").write_text("some text to train on, and then some more of it. " * 40)
    frozen: dict[str, torch.Tensor] = {}

    def at_the_end(folder: Path, engine: Any, *more: Any) -> None:
        frozen.update((name, weight.clone()) for name, weight in lora_module.base_weights(engine.full_weights()))
        write(folder, engine, *more)

    write = job._export
    monkeypatch.setattr(job, "_export", at_the_end)
    values = {"model_type": "llama", "config_overrides": TINY, "tokenizer_name": "bytes", "train_file": tmp_path / "a.txt"}
    values |= {"data_cache_dir": tmp_path / "cache", "output_dir": tmp_path / "out", "block_size": 32, "max_steps": 2, "lora_r": 2}
    values |= {"per_device_train_batch_size": 2, "learning_rate": 0.01, "modules_to_save": "lm_head", **more}
    assert main([token for name, value in values.items() for token in (f"--{name}", str(value))]) == 0
    checked = json.loads((tmp_path / "out/lora.json").read_text())
    assert (checked["is_consistent"], checked["expected_r"], checked["mismatched_layers"]) == (True, 2, [])
    assert set(checked["actual_r_values"].values()) == {2} and len(checked["actual_r_values"]) == 14
    base = load_file(tmp_path / "out/base/model.safetensors")
    assert base.keys() == frozen.keys() and all(torch.equal(base[name], value) for name, value in frozen.items())

    (tmp_path / "out").rename(tmp_path / "moved")
    export_checkpoint(tmp_path / "moved/checkpoint-2", tmp_path / "merged", merge=True)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "moved/base")
    before = plain(IDS).logits
    expected = PeftModel.from_pretrained(plain, str(tmp_path / "moved/final"))(IDS).logits
    assert (expected - before).abs().max() > 1e-3
    torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(IDS).logits, expected, rtol=1e-4, atol=1e-5)

    (tmp_path / "moved/base").rename(tmp_path / "kept")
    with pytest.raises(UserError, match=r"the base model of its adapters, .*/out/base, is not there -> say where it is: --base_model"):
        export_checkpoint(tmp_path / "moved/checkpoint-2", tmp_path / "again", merge=True)
    assert not (tmp_path / "again").exists()
    export_checkpoint(tmp_path / "moved/checkpoint-2", tmp_path / "again", merge=True, base_model=str(tmp_path / "kept"))
    assert (tmp_path / "again/model.safetensors").read_bytes() == (tmp_path / "merged/model.safetensors").read_bytes()
    with pytest.raises(UserError, match=r"base model: .*/nowhere cannot be loaded: .* -> say where it is: --base_model"):
        export_checkpoint(tmp_path / "moved/checkpoint-2", tmp_path / "no", merge=True, base_model=str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="--base_model: has no effect alone"):
        export_checkpoint(tmp_path / "moved/checkpoint-2", tmp_path / "no", base_model="gpt2")


# ---- arguments


def flags(*tokens: str) -> list[str]:
    return ["--model_name_or_path", "m", "--train_file", "t", "--output_dir", "o", *tokens]


def test_flags() -> None:
    args = parse_args(flags("--lora_r", "8", "--target_modules", "q_proj", "v_proj", "--target-layers", "0-1", "--use_dora"))
    assert dataclasses.asdict(args.lora) == dataclasses.asdict(
        LoraArguments(lora_r=8, target_modules=["q_proj", "v_proj"], target_layers="0-1", use_dora=True)
    )


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["--lora_alpha", "16"], "--lora_alpha: has no effect without adapters"),
        (["--lora_r", "0"], "--lora_r: must be at least 1, not 0"),
        (["--lora_r", "8", "--lora_alpha", "0"], "--lora_alpha: must be at least 1, not 0"),
        (["--lora_r", "8", "--lora_dropout", "1"], "--lora_dropout: must be at least 0 and below 1, not 1.0"),
        (["--lora_r", "8", "--target_modules", "all-linear", "q_proj"], "--target_modules: names all-linear and others too"),
        (["--lora_r", "8", "--rank_pattern", "{q_proj: 4}"], "--rank_pattern: is not JSON"),
        (["--lora_r", "8", "--alpha_pattern", '{"q_proj": "4"}'], "--alpha_pattern: must map module names to positive whole numbers"),
    ],
)
def test_wrong_flags(tokens: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        parse_args(flags(*tokens))
    assert len(messages(error)) == 1 and message in messages(error)[0]


# ---- one's own script


def test_older_names() -> None:
    config = {"model": "m", "batch_size": 2, "num_epochs": 3, "r": 4, "alpha": 8, "precision": "bfloat16", "target_batch_size": 8}
    config |= {"pkg": "shop", "version": 2, "knowledge_type": "faq"}
    assert run_config(config) == {
        "model_name_or_path": "m",
        "per_device_train_batch_size": 2,
        "num_train_epochs": 3,
        "lora_r": 4,
        "lora_alpha": 8,
        "precision": "bf16",
        "target_batch_size": 8,
        "run_name": "shop-2-faq",
    }
    assert run_config({})["lora_r"] == 8
    with pytest.raises(UserError, match="and lora_r say the same thing"):
        run_config({"r": 4, "lora_r": 8})


def test_rows_of_a_data_loader() -> None:
    batches = [
        {"input_ids": torch.tensor([[1, 2, 3], [4, 5, 0]]), "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]])},
        {"input_ids": [6, 7], "labels": [-100, 7]},
    ]
    assert rows_of(batches) == [
        {"input_ids": [1, 2, 3], "labels": [1, 2, 3]},
        {"input_ids": [4, 5], "labels": [4, 5]},
        {"input_ids": [6, 7], "labels": [-100, 7]},
    ]
    assert rows_of([[{"input_ids": [1]}, {"input_ids": [2, 3]}]]) == rows_of([{"input_ids": [1]}, {"input_ids": [2, 3]}])
    for batch, what in (({"ids": [1]}, "one with ids"), (torch.ones(2), "a Tensor"), (["text"], "a str")):
        with pytest.raises(UserError, match=f"a batch must be a mapping with input_ids, not {what}"):
            rows_of([batch])


def test_train_lora_hands_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    class Runner:
        @staticmethod
        def train(config: dict[str, Any], train_dataset: Any) -> int:
            seen.update(config=config, rows=train_dataset)
            return 0

    monkeypatch.setattr(lora_module.importlib, "import_module", lambda name: Runner)
    assert lora_module.train_lora({"r": 2, "model": "m"}, [{"input_ids": [1, 2]}]) == 0
    assert seen == {"config": {"lora_r": 2, "model_name_or_path": "m"}, "rows": [{"input_ids": [1, 2], "labels": [1, 2]}]}
