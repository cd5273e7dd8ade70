"""Device maps on two or more GPUs: the same losses as one card, hidden states of one card, and cards that work at the same time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

ROOT = Path(__file__).resolve().parents[2]
OVERRIDES = "hidden_size=256,intermediate_size=512,num_hidden_layers=8,num_attention_heads=8,num_key_value_heads=4"


def _config(tied: bool = False, **changes: Any) -> Any:
    from transformers import LlamaConfig

    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "vocab_size": 1000}
    config = LlamaConfig(**{**shape, **changes}, tie_word_embeddings=tied)
    config.use_cache = False
    return config


def _model(config: Any, device_map: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    from harness.engines.device_map import fill_placed
    from harness.modeling import EmptyModel

    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    return fill_placed(EmptyModel(model, model.config, None, dtype, 0), device_map).train()


def _balanced(config: Any, num_cards: int = 2) -> dict[str, Any]:
    from harness.placement import Placing, choose_device_map, meta_model

    cards: dict[Any, int] = dict.fromkeys(range(num_cards), 10**11)
    return choose_device_map(meta_model(config), "balanced", Placing(cards=cards, free=cards)).device_map


def _calls(
    model: Any, pipeline: Any, num: int, step: int, length: int = 64, dtype: torch.dtype = torch.bfloat16
) -> list[Callable[[], Any]]:
    from harness.placement import torch_device

    generator = torch.Generator().manual_seed(step)
    calls = []
    for _ in range(num):
        ids = torch.randint(0, model.config.vocab_size, (2, length), generator=generator)
        start, end = ids.to(torch_device(pipeline.input_device)), ids.to(torch_device(pipeline.head_device))

        def loss(start: Any = start, end: Any = end) -> Any:
            with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
                return model(input_ids=start, labels=end).loss / num

        calls.append(loss)
    return calls


def _losses(config: Any, device_map: dict[str, Any], depth: int, steps: int = 20, checkpointing: str = "none") -> list[float]:
    from harness.blocks import set_activation_checkpointing
    from harness.pipeline import Pipeline

    model = _model(config, device_map)
    set_activation_checkpointing(model, checkpointing)
    pipeline = Pipeline(model, device_map)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = []
    for step in range(steps):
        results = pipeline.run(_calls(model, pipeline, 8, step), depth)
        losses.append(sum(float(loss) for loss in results))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return losses


# Twenty steps where one process follows another through the same arithmetic; fewer where only gradients may differ.
@pytest.mark.parametrize(
    ("tied", "checkpointing", "steps", "depths"),
    [(False, "none", 20, (0, 1)), (True, "none", 5, (0,)), (False, "full", 5, (3,)), (True, "full", 5, (0,))],
)
def test_steps_lose_as_on_one_card(tied: bool, checkpointing: str, steps: int, depths: tuple[int, ...]) -> None:
    config = _config(tied)
    device_map = _balanced(config)
    assert set(device_map.values()) == {0, 1}
    single = _losses(config, {"": 0}, 0, steps, checkpointing)
    for depth in depths:
        assert _losses(config, device_map, depth, steps, checkpointing) == pytest.approx(single, abs=1e-3)


def _odd_maps(config: Any) -> list[dict[str, Any]]:
    """Maps that come back to a card: rotary tables behind the norm, as accelerate has them, and blocks in turn with the head in front."""
    balanced = _balanced(config)
    turns: dict[str, Any] = {f"model.layers.{layer}": layer % 2 for layer in range(config.num_hidden_layers)}
    turns |= {"model.embed_tokens": 1, "model.rotary_emb": 0, "model.norm": 0, "lm_head": 1}
    return [balanced, {**balanced, "model.rotary_emb": 1}, turns]


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_in_float32_are_those_of_one_card(tied: bool) -> None:
    from harness.pipeline import Pipeline

    config = _config(tied)
    found = []
    for device_map in ({"": 0}, *_odd_maps(config)):
        model = _model(config, device_map)
        pipeline = Pipeline(model, device_map)
        pipeline.run(_calls(model, pipeline, 6, 0, dtype=torch.float32))
        found.append({name: parameter.grad.cpu() for name, parameter in model.named_parameters()})
        assert all(parameter.grad.device == parameter.device for parameter in model.parameters())
    assert len(found) == 4
    for other in found[1:]:
        for name, gradient in found[0].items():
            torch.testing.assert_close(other[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_compiled_blocks_on_both_cards_have_the_gradients_of_plain_ones() -> None:
    from harness.blocks import Blocks
    from harness.pipeline import Pipeline

    config = _config(num_hidden_layers=4)
    device_map = _balanced(config)
    found = []
    for backend in (None, "inductor"):
        model = _model(config, device_map)
        blocks = Blocks(model, backend)
        blocks.set_checkpointing("full")
        pipeline = Pipeline(model, device_map, recompute=True)
        pipeline.run(_calls(model, pipeline, 4, 0, dtype=torch.float32))
        assert blocks.is_compiled == (backend is not None)  # else it has fallen back
        found.append({name: parameter.grad.cpu() for name, parameter in model.named_parameters()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-3, atol=1e-5)


def test_an_embedding_on_the_second_card() -> None:
    from harness.pipeline import Pipeline
    from harness.placement import get_model_input_device, get_model_output_device

    config = _config()
    swapped: dict[str, Any] = {name: 1 - device for name, device in _balanced(config).items()}
    model = _model(config, swapped)
    model.hf_device_map = swapped
    assert (get_model_input_device(model), get_model_output_device(model)) == (1, 0)
    pipeline = Pipeline(model, swapped)
    assert (pipeline.input_device, pipeline.head_device) == (1, 0)
    losses = pipeline.run(_calls(model, pipeline, 4, 0))
    assert all(loss.device == torch.device("cuda", 0) and torch.isfinite(loss) for loss in losses)


def test_both_cards_work_at_the_same_time() -> None:
    from harness.pipeline import Pipeline

    config = _config(hidden_size=4096, intermediate_size=14336, num_hidden_layers=8, num_attention_heads=32, num_key_value_heads=8)
    device_map = _balanced(config)
    model = _model(config, device_map, torch.bfloat16)
    pipeline = Pipeline(model, device_map)
    seconds = {}
    for depth in (1, 0, 1, 0):  # the first of each warms up
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        started = time.perf_counter()
        pipeline.run(_calls(model, pipeline, 8, 0, length=1024), depth)
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        seconds[depth] = time.perf_counter() - started
        model.zero_grad(set_to_none=True)
    # The bound at 8 micro-batches is 9/16; how near it comes is a matter of the host, and of benchmarks/device_map.py.
    assert seconds[0] < seconds[1], seconds


def test_a_real_out_of_memory_leaves_both_cards_usable() -> None:
    from harness.pipeline import Pipeline

    config = _config()
    device_map = _balanced(config)
    model = _model(config, device_map)
    pipeline = Pipeline(model, device_map)
    expected = [float(loss) for loss in pipeline.run(_calls(model, pipeline, 4, 0))]
    model.zero_grad(set_to_none=True)
    before = [torch.cuda.memory_allocated(card) for card in (0, 1)]
    handle = model.model.layers[6].register_forward_pre_hook(lambda *_: torch.empty(2**50, dtype=torch.uint8, device="cuda:1"))
    failed = False
    try:
        pipeline.run(_calls(model, pipeline, 4, 0))
    except torch.OutOfMemoryError:
        failed = True
    handle.remove()
    assert failed
    model.zero_grad(set_to_none=True)
    slack = 2**22  # the loss buffers of allocator and cuBLAS
    assert all(torch.cuda.memory_allocated(card) <= before[card] + slack for card in (0, 1))
    assert [float(loss) for loss in pipeline.run(_calls(model, pipeline, 4, 0), 2)] == pytest.approx(expected, abs=1e-4)


def _start_run(folder: Path, text: Path, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "harness/run_clm.py"), "--model_type", "llama", "--config_overrides", OVERRIDES]
    command += ["--tokenizer_name", "bytes", "--train_file", str(text), "--block_size", "128", "--per_device_train_batch_size", "2"]
    command += ["--gradient_accumulation_steps", "8", "--max_steps", "20", "--logging_steps", "1", "--save_strategy", "no"]
    command += ["--output_dir", str(folder), "--learning_rate", "1e-3", "--warmup_steps", "2", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "4"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def _losses_of_run(process: subprocess.Popen[str], folder: Path) -> list[float]:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output[-6000:]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def test_a_run_by_map_loses_as_a_run_on_one_card(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"line {number}: all work and no play makes number {number} a dull one" for number in range(4000)))
    flags = {
        "one": ["--device_map", "cuda:0"],
        "balanced": ["--device_map", "balanced"],
        "depth1": ["--device_map", "balanced", "--in_flight_micro_batches", "1"],
    }
    # Side by side: most of their time is starting.
    running = {name: _start_run(tmp_path / name, text, *more) for name, more in flags.items()}
    losses = {name: _losses_of_run(process, tmp_path / name) for name, process in running.items()}
    assert len(losses["one"]) == 20
    for name in ("balanced", "depth1"):
        assert losses[name] == pytest.approx(losses["one"], abs=1e-3)
    assert (tmp_path / "balanced" / "final" / "model.safetensors").exists()


def test_hidden_states_are_those_of_one_card(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from harness.hidden_states import StateFolder, main
    from harness.modeling import byte_tokenizer

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(_config()).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    common = ["--model", str(tmp_path / "model"), "--min_memory_gb", "0"]
    assert main([*common, "--output", str(tmp_path / "spread"), "--device_map", "balanced", "--force_balance"]) == 0
    states = StateFolder(tmp_path / "spread", "")
    assert {"0", "1"} <= set(states.manifest["device_map"].values())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", device_map={"": 0}).eval()
    ids = torch.tensor([states.manifest["token_ids"][0]], device="cuda:0")
    with torch.no_grad():
        hidden = model(ids, output_hidden_states=True).hidden_states
    assert len(hidden) == 9
    for layer, expected in enumerate(hidden):
        torch.testing.assert_close(states.get(f"0.{layer}"), expected.cpu(), rtol=1e-4, atol=1e-5)
    # With most of the weights in host memory and on disk, and computed on the card.
    flags = ["--output", str(tmp_path / "offload"), "--offload_folder", str(tmp_path / "scratch"), "--max_memory", "0:6MB,cpu:6MB"]
    assert main([*common, *flags, "--device_map", "sequential", "--compare", str(tmp_path / "spread")]) == 0
    assert {"cpu", "disk"} <= set(StateFolder(tmp_path / "offload", "").manifest["device_map"].values())
    rows = json.loads((tmp_path / "offload" / "compare.json").read_text())
    assert len(rows) == 9 and all(row["max_error"] < 1e-3 for row in rows)
