"""`harness layers` on small models on CPU: equal to `output_hidden_states=True`, also through host memory and disk."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.findings import UserError
from harness.hidden_states import MANIFEST, StateFolder, StateWriter, compare, main, read_prompts

PROMPTS = ["Hello there", "one prompt a line, of another length"]


def _save(folder: Path, kind: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    from harness.modeling import byte_tokenizer

    wide = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    sliding = ["sliding_attention", "full_attention", "sliding_attention"]
    own: dict[str, dict[str, Any]] = {
        "llama": wide,
        "gemma3_text": {**wide, "head_dim": 16, "sliding_window": 4, "layer_types": sliding},
        "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64},
        "t5": {"d_model": 64, "d_ff": 96, "d_kv": 16, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 3},
    }
    config = AutoConfig.for_model(kind, vocab_size=300, pad_token_id=0, **own[kind])
    torch.manual_seed(0)
    auto: Any = AutoModelForSeq2SeqLM if kind == "t5" else AutoModelForCausalLM
    model = auto.from_config(config).eval()
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    (folder / "prompts.txt").write_text("\n\n".join(PROMPTS) + "\n", encoding="utf-8")
    return model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    result = {}
    for kind in ("llama", "gemma3_text", "gpt2", "t5"):
        folder = tmp_path_factory.mktemp(kind)
        result[kind] = (folder, _save(folder, kind))
    return result


def _layers(folder: Path, output: Path, *flags: str) -> int:
    offload = str(output.parent / "offload")
    prompts = [] if "--prompts" in flags else ["--prompts", str(folder / "prompts.txt")]
    return main(["--model", str(folder), "--output", str(output), "--offload-folder", offload, *prompts, *flags])


def _expected(model: Any, folder: StateFolder, number: int) -> Any:
    ids = torch.tensor([folder.manifest["token_ids"][number]])
    inputs = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(input_ids=ids, output_hidden_states=True, **inputs)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt2"])
def test_every_layer_equals_output_hidden_states(models: dict[str, tuple[Path, Any]], kind: str, tmp_path: Path) -> None:
    folder, model = models[kind]
    assert _layers(folder, tmp_path / "out") == 0
    states = StateFolder(tmp_path / "out", "")
    assert states.manifest["num_layers"] == 3 and len(states.files) == 2 * 4
    for number in range(2):
        hidden = _expected(model, states, number).hidden_states
        assert len(hidden) == 4
        for layer, expected in enumerate(hidden):
            assert torch.equal(states.get(f"{number}.{layer}"), expected)
    entry = states.manifest["states"][0]
    first = states.get("0.0")
    assert entry["shape"] == list(first.shape) and entry["norm"] == pytest.approx(float(first.norm()))


def test_the_first_state_of_gpt2_is_tokens_plus_positions(models: dict[str, tuple[Path, Any]], tmp_path: Path) -> None:
    folder, model = models["gpt2"]
    assert _layers(folder, tmp_path / "out", "--test-type", "multi", "--layers", "0") == 0
    states = StateFolder(tmp_path / "out", "")
    ids = torch.tensor([states.manifest["token_ids"][0]])
    expected = model.transformer.wte(ids) + model.transformer.wpe(torch.arange(ids.shape[1]))
    assert torch.equal(states.get("0.0"), expected)


def test_an_encoder_and_a_decoder(models: dict[str, tuple[Path, Any]], tmp_path: Path) -> None:
    folder, model = models["t5"]
    assert _layers(folder, tmp_path / "out") == 0
    states = StateFolder(tmp_path / "out", "")
    output = _expected(model, states, 1)
    for prefix, hidden in (("encoder", output.encoder_hidden_states), ("decoder", output.decoder_hidden_states)):
        for layer, expected in enumerate(hidden):
            assert torch.equal(states.get(f"1.{prefix}.{layer}"), expected)
    assert len(states.files) == 2 * (3 + 4)


@pytest.mark.parametrize("how", ["map", "max_memory"])
def test_through_host_memory_and_disk(models: dict[str, tuple[Path, Any]], how: str, tmp_path: Path) -> None:
    folder, model = models["llama"]
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "cpu",
              "model.norm": "disk", "model.rotary_emb": "cpu", "lm_head": "disk"}  # fmt: skip
    flags = ["--device_map", json.dumps(places)] if how == "map" else ["--max-memory", "cpu:350KB"]
    assert _layers(folder, tmp_path / "out", *flags) == 0
    states = StateFolder(tmp_path / "out", "")
    assert set(states.manifest["device_map"].values()) == {"cpu", "disk"}
    for number in range(2):
        for layer, expected in enumerate(_expected(model, states, number).hidden_states):
            assert torch.equal(states.get(f"{number}.{layer}"), expected)


def test_full_writes_the_logits(models: dict[str, tuple[Path, Any]], tmp_path: Path) -> None:
    folder, model = models["llama"]
    assert _layers(folder, tmp_path / "out", "--test-type", "full") == 0
    states = StateFolder(tmp_path / "out", "")
    assert list(states.files) == ["0.logits", "1.logits"]
    assert torch.equal(states.get("1.logits"), _expected(model, states, 1).logits)


@pytest.mark.parametrize(("kind", "layer"), [("llama", 1), ("llama", 3), ("gemma3_text", 2), ("gemma3_text", 3), ("gpt2", 2)])
def test_a_single_layer_from_saved_inputs(models: dict[str, tuple[Path, Any]], kind: str, layer: int, tmp_path: Path) -> None:
    folder, _ = models[kind]
    assert _layers(folder, tmp_path / "all") == 0
    flags = ["--test-type", "single", "--layers", str(layer), "--inputs", str(tmp_path / "all"), "--compare", str(tmp_path / "all")]
    assert _layers(folder, tmp_path / "one", *flags) == 0
    rows = json.loads((tmp_path / "one" / "compare.json").read_text())
    assert [row["key"] for row in rows] == [f"0.{layer}", f"1.{layer}"]
    assert all(row["max_error"] < 1e-5 and row["cosine"] > 0.999999 for row in rows)
    places = StateFolder(tmp_path / "one", "").manifest["device_map"]
    blocks = {name: place for name, place in places.items() if name.rpartition(".")[2].isdigit()}
    assert [name.rpartition(".")[2] for name, place in blocks.items() if place == "cpu"] == [str(layer - 1)]


def test_a_pipe_for_a_manifest_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / MANIFEST)
    with pytest.raises(UserError, match=f"holds no {MANIFEST}"):
        StateFolder(tmp_path, "--compare")


def test_a_single_layer_on_random_states(models: dict[str, tuple[Path, Any]], tmp_path: Path) -> None:
    folder, _ = models["llama"]
    assert _layers(folder, tmp_path / "one", "--test-type", "single", "--layers", "2") == 0
    assert StateFolder(tmp_path / "one", "").get("0.2").shape == (1, 64, 64)


def test_compare_shows_what_differs(models: dict[str, tuple[Path, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = models["llama"]
    assert _layers(folder, tmp_path / "a") == 0
    assert _layers(folder, tmp_path / "b", "--dtype", "bf16", "--compare", str(tmp_path / "a")) == 0
    rows = {row["key"]: row for row in compare(StateFolder(tmp_path / "b", ""), StateFolder(tmp_path / "a", ""))}
    assert len(rows) == 8 and all(0 < row["max_error"] < 0.1 and row["cosine"] > 0.999 for row in rows.values())
    assert "max error" in capsys.readouterr().out
    same = compare(StateFolder(tmp_path / "a", ""), StateFolder(tmp_path / "a", ""))
    assert all(row["max_error"] == 0.0 and row["cosine"] == pytest.approx(1.0) for row in same)


def test_a_layer_of_zeros_or_nan_is_an_error(
    models: dict[str, tuple[Path, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    folder, _ = models["llama"]
    broken = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        broken.model.embed_tokens.weight.zero_()
        broken.model.layers[1].mlp.down_proj.weight.fill_(float("nan"))
    broken.save_pretrained(tmp_path / "broken")
    (tmp_path / "broken" / "prompts.txt").write_text("a\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "broken" / name).write_bytes((folder / name).read_bytes())
    assert _layers(tmp_path / "broken", tmp_path / "out") == 1
    message = capsys.readouterr().err
    assert "0.0: is all zeros" in message and "0.2: has values that are not finite" in message
    assert len(StateFolder(tmp_path / "out", "").manifest["problems"]) == 4


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--layers", "0,4"], "'4': the highest is 3"),
        (["--test-type", "single"], "--test-type single needs it"),
        (["--test-type", "single", "--layers", "0"], "from 1 on"),
        (["--prompts", "no/such.txt"], "cannot read no/such.txt"),
        (["--compare", "no/such"], "holds no manifest.json"),
        (["--device_map", '{"model.layers": 0}'], "without a device"),
        (["--device_map", "cuda:9"], "names card 9, but there are 0"),
    ],
)
def test_wrong_input(models: dict[str, tuple[Path, Any]], flags: list[str], message: str, tmp_path: Path, capsys: Any) -> None:
    assert _layers(models["llama"][0], tmp_path / "out", *flags) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out" / MANIFEST).exists()


def test_a_model_without_a_tokenizer_takes_another(models: dict[str, tuple[Path, Any]], tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "bare"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "prompts.txt"):
        (folder / name).write_bytes((models["llama"][0] / name).read_bytes())
    assert _layers(folder, tmp_path / "none") == 2
    message = capsys.readouterr().err
    assert f"--tokenizer_name: no tokenizer in {folder}: " in message and "or give --tokenizer_name bytes" in message
    for name in ("bytes", str(models["llama"][0])):
        assert _layers(folder, tmp_path / "out", "--tokenizer-name", name, "--layers", "0") == 0
        ids = StateFolder(tmp_path / "out", "").manifest["token_ids"]
        assert [len(each) for each in ids] == [len(prompt) for prompt in PROMPTS]


def test_missing_arguments_are_named_as_findings(capsys: Any) -> None:
    assert main([]) == 2
    expected = [f"  error   --{name}: is required -> see harness layers --help" for name in ("model", "output")]
    assert capsys.readouterr().err.splitlines() == expected


def test_quantised_weights_are_refused_without_the_package_or_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The folder is not there either: what can be said without it comes first, all of it.
    flags = ["--quantization", "int8", "--balance_threshold", "2"]
    for found, reason in ((None, "needs the package bitsandbytes -> pip install bitsandbytes"), (object(), "needs a GPU")):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, found=found: found)
        assert _layers(tmp_path / "none", tmp_path / "out", *flags) == 2
        message = capsys.readouterr().err
        assert f"--quantization: {reason}" in message and "--balance_threshold" in message and "/none" not in message


@pytest.mark.parametrize("name", ["nope", "org/nope"])
def test_a_name_that_is_nowhere_fails_at_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub import constants

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: nobody answers there
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(urllib.request, "getproxies", dict)
        started = time.monotonic()
        assert main(["--model", name, "--output", str(tmp_path / "out")]) == 2
        assert time.monotonic() - started < 15  # with huggingface_hub's retries it is 40
    message = capsys.readouterr().err
    assert f"{name} is neither a folder nor in the cache, and 127.0.0.1:" in message
    assert "does not answer" in message


def test_pieces_hold_no_more_than_their_size(tmp_path: Path) -> None:
    (tmp_path / "states-00007.safetensors").write_bytes(b"of an earlier run")
    writer = StateWriter(tmp_path, shard_bytes=1000)
    for number in range(5):
        writer.add(str(number), torch.full((1, 100), float(number + 1)))  # 400 bytes each
    writer.close({})
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == ["states-00000.safetensors", "states-00001.safetensors"]
    folder = StateFolder(tmp_path, "")
    assert [folder.files[str(number)][-13:-12] for number in range(5)] == ["0", "0", "0", "1", "1"]
    assert folder.get("4").unique().tolist() == [5.0]


def test_prompts(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes("\ufeffone\n\n  \ntwo ä\n".encode())
    assert read_prompts(str(tmp_path / "p.txt")) == ["one", "two ä"]
    (tmp_path / "p.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="is not UTF-8"):
        read_prompts(str(tmp_path / "p.txt"))


def test_states_on_a_full_disk_are_one_error_and_no_part_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensors: object, path: Path) -> None:
        path.write_bytes(b"part")
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    writer = StateWriter(tmp_path)
    writer.add("0.1", torch.ones(4))
    with pytest.raises(OSError, match=f"cannot write {tmp_path}/states-00000.safetensors of 0.0 MiB: No space left on device"):
        writer.close({})
    assert not list(tmp_path.iterdir())
