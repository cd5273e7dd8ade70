"""On two GPUs: samples shared by two processes train like whole ones, in half the memory for what comes of their length, without waiting.

Two processes run this file (`python -m tests.gpu.test_sequence_parallel out.json 2 sdpa 8192 1 True`): samples shared by so many,
attention, tokens of a sample, documents in it, layers compiled. About four minutes in all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from launch.machine import free_port

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

ROOT = Path(__file__).resolve().parents[2]
STEPS, GLOBAL_BATCH, VOCABULARY = 5, 2, 259
SIZES = "hidden_size=1024,intermediate_size=4096,num_hidden_layers=6,num_attention_heads=16,num_key_value_heads=4"


def build(coordinator: Any, attention: str, tokens: int, compiled: str) -> Any:
    from harness import modeling
    from harness.engines.build import build_engine, initial_settings, master_dtype
    from harness.parsing import parse_args

    words = f"--model_type llama --config_overrides {SIZES},max_position_embeddings={tokens} --tokenizer_name bytes --train_file none"
    words += (
        f" --output_dir none --precision bf16 --fsdp full_shard --per_device_train_batch_size 1 --learning_rate 1e-3 --block_size {tokens}"
    )
    args = parse_args([*words.split(), "--attn_implementation", attention, "--torch_compile", compiled])
    config = modeling.load_config(args.model)
    empty = modeling.build_empty(args.model, config, modeling.load_tokenizer(args.model), dtype=master_dtype("fsdp", "bf16"), seed=0)
    return build_engine("fsdp", args, coordinator, empty, initial_settings(args, "fsdp"), "bf16", 100)[0]


def batch_of(coordinator: Any, tokens: int, num_documents: int) -> Any:
    """This process's samples of a step; all processes together have the same two, however many share them."""
    from harness.batches import make_sample, make_step_batch

    source, samples = np.random.default_rng(0), []
    for _ in range(GLOBAL_BATCH):
        sample = make_sample(source.integers(0, VOCABULARY, tokens))
        for number in range(1, num_documents):
            begin = number * tokens // num_documents + 7
            sample["document_ids"][begin:] = number
            sample["position_ids"][begin:] = np.arange(tokens - begin)
        samples.append(sample)
    share = GLOBAL_BATCH // coordinator.num_data_parallel
    first = coordinator.data_parallel_index * share
    return make_step_batch(samples[first : first + share], 0.0, pin_memory=coordinator.device.type == "cuda")


def main(output: str, size: int, attention: str, tokens: int, num_documents: int, compiled: str) -> None:
    """Writes the loss of each step, the peak of allocated memory, and that a step does not wait for the device."""
    from harness import coordination

    coordinator = coordination.start(timeout_s=300, use_cpu=not torch.cuda.is_available())
    coordinator.sequence_parallel_size = size
    engine = build(coordinator, attention, tokens, compiled)
    batch = batch_of(coordinator, tokens, num_documents)
    num_label_tokens = GLOBAL_BATCH * (tokens - 1)
    losses: list[float] = []
    for step in range(STEPS):
        if step == 1 and coordinator.device.type == "cuda":  # compiled, and the optimizer's state is there
            torch.cuda.reset_peak_memory_stats()
        loss = engine.forward_backward(batch, num_label_tokens)
        losses.append(coordinator.sum([float(loss)])[0] / num_label_tokens)
        engine.step()
    found: dict[str, Any] = {"losses": losses}
    if coordinator.device.type == "cuda":
        found["peak_bytes"] = coordinator.max([float(torch.cuda.max_memory_allocated())])[0]
        if num_documents == 1:  # flex attention's masks are made by code that may read them
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            engine.forward_backward(batch, num_label_tokens)
            torch.cuda.set_sync_debug_mode("default")
            found["waits"] = False
    if coordinator.is_main_process:
        Path(output).write_text(json.dumps(found))
    coordinator.close()


def run(folder: Path, size: int, attention: str, tokens: int, num_documents: int, compiled: bool) -> dict[str, Any]:
    output = folder / f"{size}-{attention}-{tokens}.json"
    environ = {**os.environ, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    values = (output, size, attention, tokens, num_documents, compiled)
    words = [sys.executable, "-m", "tests.gpu.test_sequence_parallel", *map(str, values)]
    ranks = [subprocess.Popen(words, env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}, cwd=ROOT) for rank in range(2)]
    try:
        assert [rank.wait(300) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    return json.loads(output.read_text())  # type: ignore[no-any-return]


def test_a_long_sample_needs_half_the_activations(tmp_path: Path) -> None:
    whole, shared = (run(tmp_path, size, "sdpa", 32768, 1, compiled=True) for size in (1, 2))
    print(f"peak of allocated memory: whole {whole['peak_bytes'] / 2**30:.2f} GiB, shared {shared['peak_bytes'] / 2**30:.2f} GiB")
    assert shared["losses"] == pytest.approx(whole["losses"], rel=5e-3)
    assert shared["peak_bytes"] < 0.65 * whole["peak_bytes"]
    assert shared["waits"] is False


def test_packed_documents_stay_apart(tmp_path: Path) -> None:
    whole = run(tmp_path, 1, "sdpa", 4096, 3, compiled=False)
    for attention in ("sdpa", "flex_attention"):
        shared = run(tmp_path, 2, attention, 4096, 3, compiled=False)
        assert shared["losses"] == pytest.approx(whole["losses"], rel=5e-3), attention


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), sys.argv[6])
