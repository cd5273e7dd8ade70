"""Documents of a pack do not see each other, and ranks that wait for data do not run into a collective's time limit."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import time

import numpy as np
import pytest

from harness.batches import IGNORE, collate, document_ends, make_sample
from harness.data import prepare_data
from tests.data_tokenizers import byte_tokenizer

COMPILED_FLEX = pytest.param("flex_attention, compiled", marks=pytest.mark.slow)
ATTENTION = ["sdpa", "eager", "varlen", "flex_attention", COMPILED_FLEX]
A1, A2, B = [5, 6, 7, 8, 9], [15, 16, 17, 18, 19], [30, 31, 32, 33]


def pack(*documents):
    """A sample of several documents, as a `TokenizedDataset` makes it."""
    parts = [make_sample(np.array(document)) for document in documents]
    for number, part in enumerate(parts):
        part["labels"][0] = IGNORE
        part["document_ids"][:] = number
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


@functools.cache
def tiny_llama(attention):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config).eval()


def token_losses(attention, batch):
    """Loss of every predicted token (b, s - 1), 0 where none is predicted."""
    import torch

    from harness import isolation

    isolation.isolate_packed_documents()
    name, _, compiled = attention.partition(", ")
    # The same masks, without minutes of compiling.
    stance = torch.compiler.set_stance("default" if compiled else "force_eager")
    with torch.no_grad(), isolation.documents(batch.document_ids, batch.document_ends), stance:
        logits = tiny_llama(name)(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten(), reduction="none", ignore_index=IGNORE
    ).view(batch.input_ids.shape[0], -1)


@pytest.mark.parametrize("attention", ATTENTION)
def test_a_document_does_not_change_another_ones_loss_to_the_last_bit(attention):
    import torch

    losses = [token_losses(attention, collate([pack(first, B)], pad_id=0, multiple_of=16)) for first in (A1, A2)]
    of_b = slice(len(A1), len(A1) + len(B) - 1)
    assert torch.equal(losses[0][:, of_b], losses[1][:, of_b])
    assert not torch.equal(losses[0][:, : len(A1) - 1], losses[1][:, : len(A1) - 1])
    assert losses[0][0, len(A1) - 1] == 0  # the first token of B is not predicted from A
    assert losses[0][0, len(A1) + len(B) - 1 :].tolist() == [0] * 7  # padding
    joined = collate([pack(A1, B)], pad_id=0)
    joined.document_ids.zero_()
    joined.document_ends = torch.from_numpy(document_ends(joined.document_ids.numpy()))
    other = collate([pack(A2, B)], pad_id=0)
    other.document_ids.zero_()
    other.document_ends = torch.from_numpy(document_ends(other.document_ids.numpy()))
    assert not torch.equal(token_losses(attention, joined)[:, of_b], token_losses(attention, other)[:, of_b])  # the test can fail


@pytest.mark.parametrize("attention", ATTENTION)
def test_packed_documents_have_the_losses_of_each_alone(attention):
    import torch

    packed = token_losses(attention, collate([pack(A1, B, A2)], pad_id=0, multiple_of=8))
    alone = [token_losses(attention, collate([pack(document)], pad_id=0)) for document in (A1, B, A2)]
    expected = torch.cat([torch.cat([losses[0], losses.new_zeros(1)]) for losses in alone])[:-1]
    torch.testing.assert_close(packed[0, : len(expected)], expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("attention", ["sdpa", "eager", "varlen"])
def test_padding_alone_needs_no_mask(attention):
    """What `single_documents` promises: with one document per row, plain causal attention gives the same real tokens."""
    import torch

    batch = collate([pack(A1), pack(B)], pad_id=3)
    assert batch.single_documents
    masked = token_losses(attention, batch)
    batch.document_ids = batch.document_ends = None
    torch.testing.assert_close(token_losses(attention, batch), masked, rtol=0, atol=2e-6)


def test_where_documents_end():
    ids = np.array([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0]], dtype=np.int32)
    assert document_ends(ids).tolist() == [0, 2, 5, 6, *[12] * 13]
    assert len(document_ends(np.arange(16).reshape(1, 16))) == 17
    assert len(document_ends(np.arange(17).reshape(1, 17))) == 33


@pytest.mark.parametrize("model_type", ["mistral", "gemma3_text", "deepseek_v3"])
def test_attention_without_a_mask_is_that_with_one(model_type):
    """Windows of 3 and 5 tokens, scores scaled otherwise, values of another width than keys; losses and gradients."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from harness import isolation

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 64}
    own = {
        "mistral": {"num_key_value_heads": 2, "sliding_window": 3, "head_dim": 8},
        "gemma3_text": {"num_key_value_heads": 1, "sliding_window": 5, "head_dim": 16, "query_pre_attn_scalar": 7},
        "deepseek_v3": {
            "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12,
            "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
        },
    }  # fmt: skip
    config = AutoConfig.for_model(model_type, **sizes, **own[model_type])
    isolation.isolate_packed_documents()
    found = []
    batch = collate([pack(A1, B, A2), pack(B, A1)], pad_id=0)
    for attention in ("sdpa", "varlen"):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        rows = []
        for micro in (batch, collate([pack(A1 + A2)], pad_id=0)):
            with isolation.documents(micro.document_ids, micro.document_ends):
                model(input_ids=micro.input_ids, position_ids=micro.position_ids, labels=micro.labels, use_cache=False).loss.backward()
            rows.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]))
            model.zero_grad()
        found.append(rows)
    for masked, plain in zip(*found, strict=True):
        torch.testing.assert_close(plain, masked, rtol=0, atol=2e-6)


def tiny_model(model_type, attention, **more):
    """A model of two small layers, whatever its family calls them."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    sizes = {
        "hidden_size": 32, "n_embd": 32, "d_model": 32, "word_embed_proj_dim": 32, "vocab_size": 64, "head_dim": 8,
        "intermediate_size": 48, "ffn_dim": 48, "ffn_dim_multiplier": 48, "moe_intermediate_size": 16,
        "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "num_dense_layers": 1,
        "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 3,
        "max_position_embeddings": 64, "n_positions": 64, "max_seq_len": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    }  # fmt: skip
    made = CONFIG_MAPPING[model_type]
    known = {name: value for name, value in sizes.items() if hasattr(made(), name) and (model_type, name) != ("falcon", "head_dim")}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(made(**{**known, "layer_types": None, **more}), attn_implementation=attention).eval()


@pytest.mark.parametrize(
    ("model_type", "attention"),
    [
        ("gpt_oss", "eager"), ("opt", "sdpa"), ("opt", "eager"), ("bloom", "eager"), ("mpt", "eager"), ("biogpt", "sdpa"),
        ("xglm", "eager"), ("afmoe", "sdpa"), ("gpt2", "sdpa"), ("gptj", "sdpa"), ("falcon", "sdpa"), ("gemma3_text", "sdpa"),
    ],
)  # fmt: skip
def test_no_document_of_a_pack_sees_another_in_any_family(model_type, attention):
    """Some of them make their masks without saying where documents begin; nor does a token see the next."""
    import torch

    from harness import isolation

    isolation.isolate_packed_documents()
    more = {"gptj": {"rotary_dim": 4}, "falcon": {"num_kv_heads": 4}}.get(model_type, {})
    model = tiny_model(model_type, attention, **more)
    assert isolation.can_isolate(model)
    batch = collate([pack(A1, B, A2)], pad_id=0)

    def outputs(place, token):
        ids = batch.input_ids.clone()
        ids[0, place] = token
        with isolation.documents(batch.document_ids, batch.document_ends), torch.no_grad():
            return model(input_ids=ids, position_ids=batch.position_ids, use_cache=False).logits[0]

    plain, other_first, other_last = outputs(2, int(batch.input_ids[0, 2])), outputs(2, 50), outputs(13, 50)
    begin, end = len(A1), len(A1 + B)
    torch.testing.assert_close(other_first[begin:], plain[begin:], rtol=0, atol=1e-6)
    torch.testing.assert_close(other_last[:13], plain[:13], rtol=0, atol=1e-6)
    assert (other_first[2:begin] - plain[2:begin]).abs().max() > 1e-4
    assert end == 9 and plain.shape[0] == 14


def test_models_that_mix_tokens_outside_of_attention_and_encoders_are_known():
    from harness import isolation

    def named(model_type, **more):
        import torch

        with torch.device("meta"):
            return tiny_model(model_type, "sdpa", **more)

    hybrid = named("qwen3_next", layer_types=["linear_attention", "full_attention"])
    assert list(isolation.mixing_layers(hybrid)) == ["linear_attention", "convolutions over tokens"] and not isolation.can_isolate(hybrid)
    assert list(isolation.mixing_layers(named("gpt2"))) == []  # its products are called Conv1D
    assert isolation.is_encoder(named("bert")) and not isolation.is_encoder(named("bert", is_decoder=True))
    assert not isolation.is_encoder(named("llama")) and not isolation.is_encoder(named("opt"))


@pytest.mark.parametrize(
    ("model_type", "more", "can"),
    [
        ("llama", {}, True),
        ("gemma3_text", {}, True),
        ("phimoe", {"sliding_window": None}, True),
        ("phimoe", {}, False),  # its layers do not know of their window
        ("doge", {}, False),
        ("opt", {}, True),
        ("llama", {"attention_dropout": 0.1}, False),
        ("gemma3_text", {"use_bidirectional_attention": True}, False),
        ("gpt_oss", {}, False),
        ("qwen3_next", {"layer_types": ["linear_attention", "full_attention"]}, False),
    ],
)
def test_which_models_take_attention_by_length_unasked(model_type, more, can):
    """Where they do, it is that with a mask."""
    import torch

    from harness import isolation

    isolation.isolate_packed_documents()
    model = tiny_model(model_type, "eager" if model_type == "gpt_oss" else "sdpa", **more)
    assert isolation.can_attend_by_length(model) is can
    if not can:
        return
    batch = collate([pack(A1, B, A2), pack(B, A1)], pad_id=0)
    found = []
    for name in ("sdpa", "varlen"):
        model.set_attn_implementation(name)
        with isolation.documents(batch.document_ids, batch.document_ends), torch.no_grad():
            found.append(model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits)
    torch.testing.assert_close(found[1][0], found[0][0], rtol=0, atol=5e-6)
    torch.testing.assert_close(found[1][1, :9], found[0][1, :9], rtol=0, atol=5e-6)


@pytest.mark.parametrize(
    ("model_type", "sizes", "message"),
    [
        ("llama", {"attention_dropout": 0.1}, "varlen: the model has dropout in its attention (attention_dropout)"),
        ("gemma2", {"attn_logit_softcapping": 50.0}, "varlen: the model has capped scores"),
        ("gpt_oss", {}, "varlen: the model has sinks"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "varlen: the model attends in both directions"),
        ("llama4_text", {"attention_chunk_size": 8}, "varlen: the model attends within chunks"),
        ("llama", {}, ""),
    ],
)
def test_what_attention_without_a_mask_has_not_is_refused(model_type, sizes, message):
    from transformers import AutoConfig

    from harness import varlen_attention

    config = AutoConfig.for_model(model_type, **sizes)
    found = [finding.message for finding in varlen_attention.findings(config, "cpu")]
    assert len(found) == bool(message) and message in "".join(found)
    wide = AutoConfig.for_model("llama", head_dim=512)
    assert "heads of 512" in next(varlen_attention.findings(wide, "cuda")).message


def _rank(rank, folder, delay_s, limit_s, fail):
    """A rank that prepares data between two collectives, the data taking longer than a collective may."""
    import datetime

    import torch
    import torch.distributed as dist

    from harness import preparation
    from harness.args import DataArguments

    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=limit_s))
    original = preparation.Preparer._tokenise

    def slow(self, target, source, name):
        time.sleep(delay_s)
        if fail:
            raise RuntimeError("the disk is gone")
        original(self, target, source, name)
        with open(f"{folder}/made", "a") as file:
            file.write(f"{rank}\n")

    preparation.Preparer._tokenise = slow
    args = DataArguments(train_file=[f"{folder}/a.jsonl"], data_cache_dir=f"{folder}/cache", block_size=16)
    dist.all_reduce(torch.ones(1))
    begin = time.monotonic()
    outcome = {}
    try:
        data = prepare_data(args, byte_tokenizer(), max_positions=64, seed=0, say=lambda line: None, is_local_main=rank == 0)
        total = torch.ones(1)
        dist.all_reduce(total)
        outcome = {"samples": len(data.train), "total": total.item()}
    except Exception as error:
        outcome = {"error": str(error)}
    outcome |= {"seconds": time.monotonic() - begin, "stopped_at_s": time.time()}
    with open(f"{folder}/rank{rank}.json", "w") as file:
        json.dump(outcome, file)
    os._exit(0)  # the peer may be gone: do not wait for it in the group's destructor


def run_two_ranks(folder, delay_s, limit_s, fail=False):
    (folder / "a.jsonl").write_text("\n".join(json.dumps({"text": f"row {number}"}) for number in range(60)))
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_rank, args=(rank, str(folder), delay_s, limit_s, fail)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(("delay_s", "limit_s"), [(5, 2), pytest.param(8, 4, marks=pytest.mark.slow)])
def test_b45_a_rank_may_wait_for_data_longer_than_a_collective_may_take(tmp_path, delay_s, limit_s):
    """https://github.com/hiyouga/LlamaFactory/issues/2424, https://github.com/NVIDIA/nccl/issues/708

    (On several nodes without a shared disk each makes its own: tests/test_data_cache.py.)
    """
    first, second = run_two_ranks(tmp_path, delay_s, limit_s)
    assert first["samples"] == second["samples"] > 0
    assert first["total"] == second["total"] == 2
    assert min(first["seconds"], second["seconds"]) >= delay_s
    assert (tmp_path / "made").read_text().split() == ["0"]


def test_b45_a_rank_whose_peer_fails_in_preparing_stops_with_its_reason(tmp_path):
    """https://github.com/huggingface/transformers/issues/27925"""
    first, second = run_two_ranks(tmp_path, 2, 2, fail=True)
    assert first["error"] == "the disk is gone"
    assert "the disk is gone" in second["error"]
    assert second["stopped_at_s"] - first["stopped_at_s"] < 10


def test_a_layer_is_compiled_once_for_any_number_of_documents():
    """A rank that met another number in mid-run kept all of them waiting for seconds, while it compiled its layers again."""
    import torch
    from torch._dynamo.testing import CompileCounter
    from transformers.masking_utils import AttentionMaskInterface

    from harness import isolation

    isolation.isolate_packed_documents()
    mask = AttentionMaskInterface._global_mapping["varlen"]
    counter = CompileCounter()
    layer = torch.compile(lambda hidden, attention_mask: hidden * attention_mask.sum(), fullgraph=True, backend=counter)
    sizes = []
    for length in (8, 2, 1):
        ids = np.repeat(np.arange(64 // length), length)[None]
        ends = torch.from_numpy(document_ends(ids))
        sizes.append(len(ends))
        with isolation.documents(torch.from_numpy(ids), ends):
            assert layer(torch.ones(2), mask()).tolist() == [float(ends.sum())] * 2
    assert sizes == [17, 33, 65]
    assert counter.frame_count == 1
