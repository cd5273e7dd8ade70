"""Models built empty and filled block by block; the byte tokenizer; the loss without all logits."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.args import ModelArguments
from harness.blocks import set_activation_checkpointing
from harness.findings import UserError
from harness.isolation import documents, isolate_packed_documents
from harness.loss import chunked_cross_entropy_sum, cross_entropy_sum, head_is_plain, install_loss, shifted_targets
from harness.modeling import (
    build_empty,
    byte_tokenizer,
    fill,
    fit_vocabulary,
    layer_units,
    load_config,
    load_tokenizer,
    num_parameters,
    unknown_attention,
)
from harness.parsing import parse_args

CPU = torch.device("cpu")
TINY = "hidden_size=32,intermediate_size=48,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,max_position_embeddings=64"


def scratch(overrides: str = TINY, model_type: str = "llama", seed: int = 5) -> Any:
    args = ModelArguments(model_type=model_type, config_overrides=overrides, tokenizer_name="bytes")
    return fill(build_empty(args, load_config(args), byte_tokenizer(), dtype=torch.float32, seed=seed), CPU)


@pytest.mark.parametrize("text", ["plain", "tabs\tand\nnewlines\r\n", "grüße 你好 🙂", "", " leading", "\x00\x7f"])
def test_bytes_go_in_and_come_out(text: str) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_byte_tokenizer_is_saved_and_loaded_like_any_other(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    byte_tokenizer().save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded("ab é")["input_ids"] == byte_tokenizer()("ab é")["input_ids"]
    assert (loaded.bos_token, loaded.eos_token, loaded.pad_token, len(loaded)) == ("<|bos|>", "<|eos|>", "<|pad|>", 259)


def test_initial_weights_depend_on_the_seed_only() -> None:
    first, again, other = scratch(), scratch(), scratch(seed=6)
    pairs = list(zip(first.parameters(), again.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(one, two) for one, two, _ in pairs)
    assert any(not torch.equal(one, three) for one, _, three in pairs)


def test_initial_weights_have_the_configs_spread() -> None:
    model = scratch(TINY + ",initializer_range=0.05")
    layer = model.model.layers[1]
    assert layer.mlp.up_proj.weight.std().item() == pytest.approx(0.05, rel=0.1)
    assert torch.equal(layer.input_layernorm.weight, torch.ones(32))
    assert not torch.equal(layer.mlp.up_proj.weight, model.model.layers[0].mlp.up_proj.weight)


def test_tied_weights_stay_tied_and_count_once() -> None:
    tied, untied = scratch(TINY + ",tie_word_embeddings=true"), scratch()
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert num_parameters(untied) - num_parameters(tied) == 259 * 32


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_neox", "opt", "qwen3", "mixtral", "phi3", "falcon"])
def test_other_architectures_load_what_transformers_saved(model_type: str, tmp_path: Path) -> None:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    default = CONFIG_MAPPING[model_type]()
    small = {
        "hidden_size": 32, "n_embd": 32, "intermediate_size": 48, "ffn_dim": 48, "num_hidden_layers": 2, "n_layer": 2,
        "num_attention_heads": 4, "n_head": 4, "num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 8, "vocab_size": 259,
        "word_embed_proj_dim": 32, "num_local_experts": 4, "max_position_embeddings": 64, "n_positions": 64, "pad_token_id": 0,
    }  # fmt: skip
    kind = type(default)
    known = {name: value for name, value in small.items() if hasattr(default, name) and not isinstance(getattr(kind, name, None), property)}
    config = kind(**known)
    torch.manual_seed(0)
    original = AutoModelForCausalLM.from_config(config).eval()
    original.save_pretrained(tmp_path)
    args = ModelArguments(model_name_or_path=str(tmp_path), tokenizer_name="bytes")
    filled = fill(build_empty(args, load_config(args), byte_tokenizer(), dtype=torch.float32, seed=0), CPU).eval()
    ids = torch.randint(0, 259, (2, 16))
    assert torch.equal(filled(input_ids=ids).logits, original(input_ids=ids).logits)
    assert len(layer_units(filled)) == 2


@pytest.mark.parametrize("tied", [True, False])
def test_a_block_is_gone_when_the_next_one_is_made(tied: bool) -> None:
    """A model that is sharded while it is filled needs room for its shards and one whole block, not for all its weights."""
    overrides = f"{TINY},tie_word_embeddings={str(tied).lower()}"
    args = ModelArguments(model_type="llama", config_overrides=overrides, tokenizer_name="bytes")
    empty = build_empty(args, load_config(args), byte_tokenizer(), dtype=torch.float32, seed=5)
    whole: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def shard(name: str, module: torch.nn.Module) -> None:
        alive.append(sum(each() is not None for each in whole))
        if name == "":
            return
        for inner in module.modules():
            for key, parameter in inner._parameters.items():
                if parameter is not None:
                    whole.append(weakref.ref(parameter))
                    inner._parameters[key] = torch.nn.Parameter(parameter.detach().flatten()[:1].clone())

    model = fill(empty, CPU, shard)
    assert alive == [0, 0, 0] and len(whole) == 18  # two layers of nine
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied


def test_damaged_and_missing_weights_are_named(tmp_path: Path) -> None:
    args = ModelArguments(model_name_or_path=str(tmp_path), tokenizer_name="bytes")
    scratch().config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"no \.safetensors files"):
        build_empty(args, load_config(args), byte_tokenizer(), dtype=torch.float32, seed=0)
    (tmp_path / "model.safetensors").write_bytes(b"not a tensor file")
    with pytest.raises(UserError, match="damaged"):
        fill(build_empty(args, load_config(args), byte_tokenizer(), dtype=torch.float32, seed=0), CPU)


def stored(folder: Path, change: Any = None, **config: Any) -> ModelArguments:
    """A folder with a small llama whose stored tensors went through `change`."""
    from safetensors.torch import load_file, save_file

    model = scratch(TINY + ",tie_word_embeddings=" + str(config.pop("tied", False)).lower())
    for name, value in config.items():
        setattr(model.config, name, value)
    if "vocab_size" in config:
        model.config.pad_token_id = model.config.bos_token_id = model.config.eos_token_id = None
    model.save_pretrained(folder)
    if change is not None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return ModelArguments(model_name_or_path=str(folder), tokenizer_name="bytes")


def filled(args: ModelArguments) -> Any:
    return fill(build_empty(args, load_config(args), byte_tokenizer(), dtype=torch.float32, seed=0), CPU)


def test_a_weight_that_is_not_stored_is_named_and_nothing_is_drawn_for_it(tmp_path: Path) -> None:
    args = stored(tmp_path, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(UserError) as caught:
        filled(args)
    [finding] = caught.value.findings
    assert finding.key == "--model_name_or_path"
    assert finding.message == f"1 of the 21 weights of LlamaForCausalLM are not in {tmp_path}: model.layers.1.mlp.up_proj.weight"


def test_an_untied_head_that_is_not_stored_is_missing_and_a_tied_one_is_not(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"1 of the 21 weights .*: lm_head\.weight"):
        filled(stored(tmp_path / "untied", lambda tensors: tensors.pop("lm_head.weight")))

    def as_head(tensors: dict[str, Any]) -> None:  # as some programs store a tied model
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    model, before = filled(stored(tmp_path / "tied", as_head, tied=True)), scratch(TINY + ",tie_word_embeddings=true")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, before.lm_head.weight)


def test_weights_of_another_architecture_are_refused(tmp_path: Path) -> None:
    stored(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(UserError, match=r"\d+ of the \d+ weights of GPT2LMHeadModel are not in .*: .*, \.\.\."):
        filled(ModelArguments(model_name_or_path=str(tmp_path), tokenizer_name="bytes"))


def test_integers_and_scaled_numbers_are_no_weights(tmp_path: Path) -> None:
    for kind, spelt in ((torch.int8, "I8"), (torch.uint8, "U8"), (torch.int64, "I64"), (torch.float8_e4m3fn, "F8_E4M3")):

        def change(tensors: dict[str, Any], kind: torch.dtype = kind) -> None:
            tensors["model.norm.weight"] = tensors["model.norm.weight"].to(kind)

        with pytest.raises(UserError, match=rf"such as model.norm.weight \({spelt}\)"):
            filled(stored(tmp_path / spelt, change))


def test_only_rows_of_new_tokens_are_drawn(tmp_path: Path) -> None:
    def shorter(*names: str) -> Any:
        return lambda tensors: tensors.update({name: tensors[name][:24].clone() for name in names})

    # Fewer rows than the model's: once a size that contradicts the config, once the tokens that the vocabulary lacks.
    with pytest.raises(UserError, match=r"a stored tensor has shape \(24, 32\), the model's \(48, 32\)"):
        filled(stored(tmp_path / "rows", shorter("model.layers.0.mlp.gate_proj.weight")))
    args = stored(tmp_path / "tokens", shorter("model.embed_tokens.weight", "lm_head.weight"), vocab_size=24)
    model, before = filled(args), scratch(TINY)
    assert model.lm_head.weight.shape == (259, 32)
    assert torch.equal(model.lm_head.weight[:24], before.lm_head.weight[:24])
    assert 0.01 < float(model.lm_head.weight[24:].detach().std()) < 0.03
    with pytest.raises(UserError, match=r"shape \(24, 32\), the model's \(48, 32\)"):
        filled(
            stored(
                tmp_path / "both",
                shorter("model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.gate_proj.weight"),
                vocab_size=24,
            )
        )


@pytest.mark.parametrize(
    ("change", "key", "message"),
    [
        ({"hidden_act": "silue"}, "hidden_act", "unknown activation silue"),
        ({"rope_parameters": {"rope_type": "yarm", "rope_theta": 1e4}}, "rope_parameters", "unknown rope_type yarm"),
        ({"attention_dropout": 2}, "attention_dropout", "must be a number from 0 to 1, not 2"),
        ({"max_position_embeddings": 0}, "max_position_embeddings", "must be a positive whole number, not 0"),
    ],
)
def test_values_of_a_config_that_no_model_can_have_are_named(change: dict[str, Any], key: str, message: str, tmp_path: Path) -> None:
    config = scratch().config.to_dict()
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(UserError) as caught:
        load_config(ModelArguments(config_name=str(tmp_path), tokenizer_name="bytes"))
    assert [(finding.key, finding.message) for finding in caught.value.findings] == [(key, message)]


@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        (
            "hiden_size=1,num_hidden_layers=two,head_dim=0",
            [
                "LlamaConfig has no 'hiden_size'",
                "num_hidden_layers=two is not a number",
                "head_dim: must be a positive whole number, not 0",
            ],
        ),
        # transformers itself names the first of these.
        (
            "hidden_size=64,num_attention_heads=5,num_key_value_heads=3,hidden_act=gelo",
            ["5 heads cannot share 3", "unknown activation gelo"],
        ),
    ],
)
def test_all_that_is_wrong_with_overrides_is_said_of_the_flag(overrides: str, messages: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        load_config(ModelArguments(model_type="llama", config_overrides=overrides, tokenizer_name="bytes"))
    assert {finding.key for finding in caught.value.findings} == {"--config_overrides"}
    for finding, message in zip(caught.value.findings, messages, strict=True):
        assert message in finding.message


def test_of_a_configs_file_only_what_was_changed_is_said_of_the_flag(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**scratch().config.to_dict(), "attention_dropout": 2}))
    with pytest.raises(UserError) as caught:
        load_config(ModelArguments(config_name=str(tmp_path), config_overrides="head_dim=0", tokenizer_name="bytes"))
    assert [finding.key for finding in caught.value.findings] == ["--config_overrides", "attention_dropout"]


@pytest.mark.parametrize(
    ("name", "fix"), [("sdp", "did you mean sdpa?"), ("nix", "eager, "), ("varlen", None), ("kernels-community/flash-attn", None)]
)
def test_an_attention_that_transformers_does_not_know(name: str, fix: str | None) -> None:
    isolate_packed_documents()
    found = unknown_attention(name)
    assert (found is None) is (fix is None)
    assert found is None or (found.message == f"{name} is not known" and found.fix.startswith(fix or ""))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "[]", "holds no JSON object"),
        ("tokenizer.json", "[" * 3000 + "]" * 3000, "cannot be read: nested too deeply"),
        ("tokenizer.json", "{}", "is no tokenizer: "),
        ("tokenizer_config.json", "[]", "holds no JSON object"),
        ("tokenizer_config.json", '{"tokenizer_class": 3}', "tokenizer_class is 3, not a text"),
        ("special_tokens_map.json", "[]", "holds no JSON object"),
    ],
)
def test_a_damaged_file_of_a_tokenizer_is_named(name: str, content: str, message: str, tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as caught:
        load_tokenizer(ModelArguments(model_name_or_path="nowhere", tokenizer_name=str(tmp_path)))
    [finding] = caught.value.findings
    assert finding.key == "--tokenizer_name"
    assert finding.message.replace(": tok", " tok").startswith(f"{tmp_path}/{name} {message}")


def test_vocabulary_below_the_tokenizers_is_refused() -> None:
    args = ModelArguments(model_type="llama", config_overrides=TINY + ",vocab_size=100", tokenizer_name="bytes")
    with pytest.raises(UserError, match="100 is less than the tokenizer's 259"):
        fit_vocabulary(load_config(args), byte_tokenizer(), args)


@pytest.mark.parametrize("chunk", [0, 1, 7, 24, 1000])
def test_chunked_loss_and_gradients_equal_the_whole(chunk: int) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(24, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)
    targets = torch.randint(0, 50, (24,))
    targets[::5] = -100
    expected = cross_entropy_sum(hidden @ weight.T, targets)
    wanted = torch.autograd.grad(expected, (hidden, weight))
    loss = chunked_cross_entropy_sum(hidden, weight, None, targets, chunk)
    got = torch.autograd.grad(loss, (hidden, weight))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert all(torch.allclose(one, two, atol=1e-5) for one, two in zip(got, wanted, strict=True))


def test_targets_are_the_next_tokens() -> None:
    assert shifted_targets(torch.tensor([[1, 2, 3], [4, -100, 6]])).tolist() == [[2, 3, -100], [-100, 6, -100]]


@pytest.mark.parametrize(
    ("model_type", "plain"), [("llama", True), ("gpt2", True), ("gemma2", False), ("cohere", False), ("granite", False)]
)
def test_the_installed_loss_is_the_models_own(model_type: str, plain: bool) -> None:
    """Also where the model scales or caps its logits: those models keep computing their logits themselves."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING[model_type]()
    for name, value in {
        "hidden_size": 32, "n_embd": 32, "intermediate_size": 48, "num_hidden_layers": 2, "n_layer": 2, "num_attention_heads": 4,
        "n_head": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "pad_token_id": 0, "layer_types": None,
    }.items():  # fmt: skip
        if hasattr(config, name):
            setattr(config, name, value)
    if model_type == "gemma2":
        config.layer_types = ["sliding_attention", "full_attention"]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(0, 64, (2, 12))
    labels = ids.clone()
    labels[0, :4] = -100
    expected = model(input_ids=ids, labels=labels).loss * (labels[:, 1:] != -100).sum()
    assert head_is_plain(model) is plain
    install_loss(model, 5)
    assert model(input_ids=ids, labels=labels).item() == pytest.approx(expected.item(), rel=1e-5)
    assert model(input_ids=ids).logits.shape == (2, 12, 64)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_checkpointed_gradients_are_the_same(mode: str) -> None:
    ids = torch.randint(0, 259, (2, 16))
    gradients = []
    for each in ("none", mode):
        model = scratch()
        install_loss(model, 0)
        set_activation_checkpointing(model, each)
        model.train()
        model(input_ids=ids, labels=ids).backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.equal(one, two) for one, two in zip(*gradients, strict=True))


def test_documents_of_a_pack_do_not_see_each_other() -> None:
    model = scratch().eval()
    ids = torch.randint(0, 259, (1, 20))
    which = torch.tensor([[0] * 8 + [1] * 12])
    positions = torch.tensor([[*range(8), *range(12)]])
    changed = ids.clone()
    changed[0, :8] = torch.randint(0, 259, (8,))
    with torch.no_grad(), documents(which):
        packed = model(input_ids=ids, position_ids=positions).logits
        other = model(input_ids=changed, position_ids=positions).logits
    alone = model(input_ids=ids[:, 8:]).logits
    assert torch.equal(packed[:, 8:], other[:, 8:])
    assert torch.allclose(packed[:, 8:], alone, atol=1e-5)


def test_a_runs_arguments_are_no_models_config(tmp_path: Path) -> None:
    """Both are in a config.json, and both name an architecture: the run's would be a model of that architecture's default size."""
    arguments = parse_args(["--model_type", "llama", "--output_dir", str(tmp_path)])
    (tmp_path / "config.json").write_text(json.dumps(arguments.to_dict()))
    for source in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(UserError, match=r"holds a run's arguments; its model's config is .*/model/config.json"):
            load_config(ModelArguments(config_name=str(source)))


@pytest.mark.parametrize("model_type", ["qwen3", "gemma3_text", "gpt2", "mistral"])
def test_overrides_make_a_config_that_can_be_saved(model_type: str, tmp_path: Path) -> None:
    """Also where the config holds one entry a layer, or other names for the same thing."""
    from transformers import AutoConfig

    config = load_config(ModelArguments(model_type=model_type, config_overrides="num_hidden_layers=3,hidden_size=64"))
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert (loaded.num_hidden_layers, loaded.hidden_size) == (3, 64)
    assert len(getattr(loaded, "layer_types", None) or [0] * 3) == 3


@pytest.mark.parametrize(
    ("override", "fix"),
    [("hiden_size=64", "did you mean hidden_size?"), ("zzz=1", "use the names of the model's config.json")],
)
def test_unknown_override_names_the_nearest(override: str, fix: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(ModelArguments(model_type="llama", config_overrides=override))
    assert [finding.fix for finding in caught.value.findings] == [fix]


def test_fused_kernels_are_of_the_model_they_were_put_into(monkeypatch: pytest.MonkeyPatch) -> None:
    """Liger changes transformers' module beside the model: a later model of the same process would be made of its kernels too."""
    import sys
    import types

    from transformers.models.llama import modeling_llama

    from harness.modeling import apply_kernels

    own_norm, own_mlp = modeling_llama.LlamaRMSNorm, modeling_llama.LlamaMLP

    def put_in(model: Any, **_: bool) -> None:
        modeling_llama.LlamaRMSNorm = modeling_llama.LlamaMLP = torch.nn.Identity  # type: ignore[assignment, misc]
        model.fused = True

    fake = types.ModuleType("liger_kernel.transformers.monkey_patch")
    fake.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": None}  # type: ignore[attr-defined]
    fake._apply_liger_kernel_to_instance = put_in  # type: ignore[attr-defined]
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: fake)
    model = scratch()
    assert apply_kernels(model, ModelArguments(), torch.device("cuda")) and model.fused
    assert (modeling_llama.LlamaRMSNorm, modeling_llama.LlamaMLP) == (own_norm, own_mlp)


# ------------------------------------------------------------------------------------------------------- of other families

DEEPSEEK = (
    "hidden_size=32,intermediate_size=48,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=4,q_lora_rank=16,kv_lora_rank=8,"
    "qk_rope_head_dim=8,head_dim=8,qk_nope_head_dim=8,v_head_dim=12,n_routed_experts=4,num_experts_per_tok=2,n_group=1,topk_group=1,"
    "moe_intermediate_size=16,first_k_dense_replace=1"
)


@pytest.mark.usefixtures("alone")
def test_what_is_stored_without_being_a_parameter_is_loaded_kept_and_exported(tmp_path: Path) -> None:
    """The bias that balances a mixture's experts decides where tokens go."""
    from transformers import AutoModelForCausalLM

    from harness import export_cli, run_clm

    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    stored = scratch(DEEPSEEK, "deepseek_v3")
    bias = torch.tensor([5.3, -5.01, 5.001, -4.9999])
    dict(stored.named_buffers())[name].copy_(bias)
    stored.save_pretrained(tmp_path / "stored")
    byte_tokenizer().save_pretrained(tmp_path / "stored")
    (tmp_path / "a.txt").write_text("many words of a text\n" * 60)
    words = {"model_name_or_path": tmp_path / "stored", "train_file": tmp_path / "a.txt", "output_dir": tmp_path / "out", "max_steps": 1}
    more = {"block_size": 32, "save_steps": 1, "precision": "bf16", "data_cache_dir": tmp_path / "cache"}
    assert run_clm.main([token for key, value in {**words, **more}.items() for token in (f"--{key}", str(value))]) == 0
    assert export_cli.main([str(tmp_path / "out" / "checkpoint-1"), str(tmp_path / "again")]) == 0
    for folder in (tmp_path / "out" / "final", tmp_path / "again"):
        found = dict(AutoModelForCausalLM.from_pretrained(folder).named_buffers())
        assert torch.equal(found[name], bias), folder


def test_weights_from_scratch_are_those_of_each_familys_own_initialisation() -> None:
    """Some are drawn for a module by the one around it: gpt2's smaller projections, a router."""
    small = "n_embd=64,n_layer=2,n_head=4,n_positions=64"
    weights = dict(scratch(small, "gpt2").named_parameters())
    assert float(weights["transformer.h.1.mlp.c_fc.weight"].std()) == pytest.approx(0.02, rel=0.1)
    assert float(weights["transformer.h.1.mlp.c_proj.weight"].std()) == pytest.approx(0.02 / (2 * 2) ** 0.5, rel=0.1)
    mixture = (
        "hidden_size=32,intermediate_size=48,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,head_dim=8,num_experts=4,"
    )
    mixture += "num_experts_per_tok=2,moe_intermediate_size=16,shared_expert_intermediate_size=16,linear_num_value_heads=4,"
    mixture += "linear_num_key_heads=2,linear_key_head_dim=8,linear_value_head_dim=8"
    one, two = (dict(scratch(mixture, "qwen3_next", seed=3).named_parameters()) for _ in range(2))
    gate = "model.layers.0.mlp.gate.weight"
    assert float(one[gate].std()) == pytest.approx(0.02, rel=0.4)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_weights_that_nothing_draws_are_refused() -> None:
    overrides = "hidden_size=32,intermediate_size=48,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2"
    with pytest.raises(UserError, match="XIELUActivation: weights that ApertusModel does not initialise -> train from a stored model"):
        scratch(overrides, "apertus")


@pytest.mark.parametrize(
    ("model_type", "overrides", "plain"),
    [
        ("llama", "", True),
        ("deepseek_v3", "", True),
        ("minicpm3", "", False),  # divides what the decoder gives
        ("dory", "", False),  # its head is more than a product
        ("llama4_text", "intermediate_size_mlp=48,num_local_experts=2", False),  # its decoder is the model itself
    ],
)
def test_a_head_is_plain_where_nothing_else_is_done(model_type: str, overrides: str, plain: bool) -> None:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING[model_type]().get_text_config()
    with torch.device("meta"):
        assert head_is_plain(AutoModelForCausalLM.from_config(config)) is plain
