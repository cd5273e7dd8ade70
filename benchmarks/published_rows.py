"""Predicted against published peak memory: rows other projects have printed, with the error of each.

    python benchmarks/published_rows.py            prints the table and writes benchmarks/results/published_rows.md

Nothing here is fitted to a row. What differs from our own engines is said in the row: other states per parameter, another loss.
"Allocated" and "active" are compared with predicted tensors, "reserved" with the allocator's share on top, "nvidia-smi" with CUDA and
NCCL too. Publishers' models are not always transformers' own code, and some figures are read off a plot.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __package__ in (None, ""):
    sys.path.insert(0, str(ROOT))

from harness.engine_memory import GIB  # noqa: E402
from harness.ladder import MemorySettings  # noqa: E402
from harness.memory import CONTEXT_BYTES, NCCL_BYTES, RESERVED_FACTOR, WORKSPACE_BYTES, estimate_memory, lora_request, measure  # noqa: E402
from harness.model_shape import Measured, RunShape  # noqa: E402

MIB = 2**20
GB = 10**9
MEASURED_BLOCK = 1024  # without a mask every activation is linear in the tokens, so one length tells all

LLAMA3_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
LLAMA32_3B = {
    **LLAMA3_8B,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
LLAMA2_70B = {
    **LLAMA3_8B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "vocab_size": 32000,
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One published figure beside its prediction, bytes."""

    name: str
    source: str
    metric: str
    published: float
    predicted: float
    note: str = ""

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


def head_and_loss_bytes(num_tokens: int, hidden: int = 4096, vocabulary: int = 128256, fused: bool = False) -> float:
    """Peak of a 16-bit output projection with cross-entropy, forward and backward, its gradient kept from the step before.

    Whole: weight, gradient and new gradient; logits, log-softmax and their gradient in 16 bits; input and its gradient.
    Fused (Liger): one more copy of the weight's size; 1/32 of the tokens' logits at a time (vocabulary over hidden size, rounded up),
    in 16 bits and twice in 32.
    """
    weight = 2 * vocabulary * hidden
    inputs = 2 * 2 * hidden * num_tokens
    if not fused:
        return 3 * weight + 6 * num_tokens * vocabulary + inputs
    chunks = -(-vocabulary // hidden)
    return 4 * weight + 10 * (num_tokens / chunks) * vocabulary + inputs


def _measured(config: dict[str, object], lora: dict[str, object] | None = None) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}), encoding="utf-8")
        request = {"model": str(path), "block_size": MEASURED_BLOCK, "weights": ["bf16"], "loss_chunks": [1024, 0], "lora": lora}
        return measure([request])


def _predict(
    measured: Measured,
    run: RunShape,
    settings: MemorySettings,
    metric: str,
    *,
    states: tuple[float, float, float] | None = None,
    loss_bytes: float | None = None,
) -> float:
    """Peak in the terms of `metric`.

    Args:
        states: bytes per parameter of weights, gradients and optimizer where they are not those of our engine (4, 4, 8).
        loss_bytes: per token and word, where the loss is not ours.
    """
    estimate = estimate_memory(settings, measured, run)
    peak, computing = 0.0, 0.0
    for phase in estimate.phases:
        parts = dict(phase.parts)
        if states is not None:
            for name, share in zip(("parameters", "gradients", "optimizer"), (states[0] / 4, states[1] / 4, states[2] / 8), strict=True):
                parts[name] = parts.get(name, 0.0) * share
        if loss_bytes is not None and phase.name == "loss":
            parts["loss"] = loss_bytes * settings.micro_batch_size * run.block_size * measured.shape.vocab_size
        peak, computing = max(peak, sum(parts.values())), max(computing, sum(parts.values()) - phase.pooled_bytes)
    if metric in ("active", "allocated"):
        return peak - WORKSPACE_BYTES
    peak = RESERVED_FACTOR[1] * computing + estimate.pool_bytes
    if metric == "nvidia-smi":
        peak += CONTEXT_BYTES[1] + (NCCL_BYTES[1] if run.num_processes > 1 else 0)
    return peak


def state_difference_bytes(measured: Measured, few: int, many: int) -> float:
    """Weights, gradients and optimizer states that a rank of `few` holds more than one of `many`."""

    def states(ranks: int) -> float:
        run = RunShape("fsdp", ranks, measured.block_size)
        parts = estimate_memory(MemorySettings(1), measured, run).phases[-1].parts  # the update: everything resident
        return parts["parameters"] + parts["gradients"] + parts["optimizer"]

    return states(few) - states(many)


def loss_rows() -> Iterator[Row]:
    """Rows 13 and 14: one projection with cross-entropy, h 4096, V 128256 (A100)."""
    source = "Liger-Kernel benchmark/data/all_benchmark_data.csv"
    for num_tokens, plain, fused in (
        (4096, 6092.3, 4245.5),
        (8192, 9162.3, 4467.0),
        (16384, 15302.4, 4910.4),
        (32768, 27582.5, 5794.6),
    ):
        yield Row(f"head and loss, {num_tokens} tokens", source, "allocated", plain * MIB, head_and_loss_bytes(num_tokens))
        predicted = head_and_loss_bytes(num_tokens, fused=True)
        yield Row(f"the same, fused, {num_tokens} tokens", source, "allocated", fused * MIB, predicted)


def model_rows() -> Iterator[Row]:
    """Rows of whole models."""
    llama = _measured(LLAMA3_8B)
    titan = "torchtitan benchmarks/llama3_h100_202412"

    def fsdp(ranks: int, tokens: int, **options: object) -> RunShape:
        run = RunShape("fsdp", ranks, MEASURED_BLOCK, samples_per_step=tokens // MEASURED_BLOCK)
        return dataclasses.replace(run, **options)  # type: ignore[arg-type]

    def cut(tokens: int, mode: str, chunk: int = 0) -> MemorySettings:
        return MemorySettings(tokens // MEASURED_BLOCK, mode, chunk)  # type: ignore[arg-type]

    note = "its own model code; eager"
    for ranks, published in ((8, 82.4), (128, 67.0)):
        predicted = _predict(llama, fsdp(ranks, 16384), cut(16384, "selective"), "reserved")
        yield Row(f"8B FSDP {ranks}, 2 x 8192, selective", titan, "reserved", published * GIB, predicted, note)
    yield Row("difference of the two", titan, "reserved", 15.4 * GIB, state_difference_bytes(llama, 8, 128), "states only")
    predicted = _predict(llama, fsdp(8, 32768), cut(32768, "full"), "reserved", loss_bytes=14)
    yield Row("8B FSDP 8, 1 x 32768, full", titan, "reserved", 83.9 * GIB, predicted, "compiled, fp8; 16-bit logits kept")

    liger = "Liger-Kernel README plot, 8 x A100"
    pure = (2.0, 2.0, 4.0)
    for length, published in ((1024, 20.0), (2048, 23.5), (4096, 30.5), (8192, 48.0), (16384, 77.0)):
        run = fsdp(8, 8 * length, reduce_in_float32=False, fused_layers=True)
        predicted = _predict(llama, run, cut(8 * length, "full", 1024), "reserved", states=pure)
        yield Row(f"8B FSDP 8, 8 x {length}, full, Liger", liger, "reserved", published * GB, predicted, "16-bit states assumed; plot")
    for length, published in ((1024, 37.0), (2048, 61.0)):
        run = fsdp(8, 8 * length, reduce_in_float32=False)
        predicted = _predict(llama, run, cut(8 * length, "full"), "reserved", states=pure, loss_bytes=18)
        yield Row(f"8B FSDP 8, 8 x {length}, full, HF", liger, "reserved", published * GB, predicted, "older loss: 18 bytes a logit; plot")

    tune = "torchtune README, A100, 2 x 4096"
    llama3b = _measured(LLAMA32_3B)
    alone = RunShape("ddp", 1, MEASURED_BLOCK, samples_per_step=8)
    bf16 = dataclasses.replace(alone, engine="fsdp")  # 16-bit weights in the products, as there
    for name, mode, chunk, published in (("packed", "none", 0, 60.0), ("packed, chunked loss, checkpointing", "full", 1024, 24.9)):
        estimate = estimate_memory(MemorySettings(8, mode, chunk), llama3b, bf16)  # type: ignore[arg-type]
        best = 0.0
        for phase in estimate.phases:  # one process: nothing is gathered, nothing reduced
            kept = {key: value for key, value in phase.parts.items() if key in ("activations", "loss")}
            best = max(best, sum(kept.values()) + 8 * llama3b.shape.num_parameters)
        note = "8 bytes of states a parameter" + ("; compiled" if chunk else "")
        yield Row(f"3B one card, {name}", tune, "active", published * GIB, best, note)

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    large_model = _measured(LLAMA2_70B, lora_request(8, 0.1, targets))
    run = RunShape("zero3", 8, MEASURED_BLOCK, samples_per_step=16, lora=True)
    predicted = _predict(large_model, run, cut(16384, "full"), "nvidia-smi")
    yield Row("70B LoRA r 8, ZeRO-3 x 8, 8 x 2048, full", "PEFT docs, deepspeed.md, H100", "nvidia-smi", 64 * GB, predicted)


def rows() -> list[Row]:
    return [*loss_rows(), *model_rows()]


def markdown(table: list[Row]) -> str:
    """The table with the error of every row."""
    lines = [
        "# Predicted against published peak memory per GPU",
        "",
        "Written by `python benchmarks/published_rows.py`. No constant is fitted to these rows; MiB for the first eight, GiB below.",
        "",
        "| setting | published | predicted | error | metric | source | note |",
        "|---|--:|--:|--:|---|---|---|",
    ]
    for row in table:
        unit = MIB if row.name.startswith(("head", "the same")) else GIB
        lines.append(
            f"| {row.name} | {row.published / unit:.1f} | {row.predicted / unit:.1f} | {100 * row.error:+.1f} % "
            f"| {row.metric} | {row.source} | {row.note} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    text = markdown(rows())
    print(text)
    (ROOT / "benchmarks" / "results" / "published_rows.md").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
