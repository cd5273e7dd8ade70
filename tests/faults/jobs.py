"""The job that the fault tests interrupt: one epoch of a tiny model with dropout, and what must be true of its folder afterwards."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.launching import ROOT

NUM_SAMPLES, GLOBAL_BATCH = 96, 4
NUM_STEPS = NUM_SAMPLES // GLOBAL_BATCH
SAVE_STEPS = 4
SEED = 42
DS = ROOT / "ds_configs"


@dataclasses.dataclass(frozen=True)
class EngineCase:
    """How an engine is asked for, and how exactly it repeats itself.

    Attributes:
        relative_tolerance: of a loss after resuming; 0 is bit-equal.
    """

    num_processes: int
    flags: tuple[str, ...] = ()
    relative_tolerance: float = 0.0


ENGINES = {
    "single": EngineCase(1),
    "ddp": EngineCase(2),
    "fsdp": EngineCase(2, ("--fsdp", "full_shard")),
    "zero2": EngineCase(2, ("--deepspeed", str(DS / "zero2.json")), 1e-6),
    "zero3": EngineCase(2, ("--deepspeed", str(DS / "zero3.json")), 1e-6),
}


def sample_length(index: int) -> int:
    """Tokens of sample `index`, its end-of-text token included. All differ, so that the sum over a step tells which samples it had."""
    return 21 + (index * 37) % NUM_SAMPLES


def make_inputs(folder: str) -> None:
    """Writes `data.jsonl`, `model/` (random weights, attention dropout) and `label_tokens.json` (see label_tokens_by_step)."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from harness.modeling import byte_tokenizer

    root = Path(folder)
    source = random.Random(0)
    texts = ["".join(source.choice("abcdefgh ") for _ in range(sample_length(index) - 1)) for index in range(NUM_SAMPLES)]
    (root / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    torch.manual_seed(7)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=259,
        max_position_embeddings=256,
        attention_dropout=0.1,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(root / "model")
    byte_tokenizer().save_pretrained(root / "model")
    counts = {case.num_processes: label_tokens_by_step(case.num_processes) for case in ENGINES.values()}
    (root / "label_tokens.json").write_text(json.dumps(counts))


def arguments(inputs: Path, output: Path, engine: str, *more: str) -> list[str]:
    """run_clm.py's arguments. The same for every life of a run."""
    case = ENGINES[engine]
    values = {
        "model_name_or_path": inputs / "model",
        "train_file": inputs / "data.jsonl",
        "packing": "none",
        "block_size": 256,
        "validation_split_percentage": 0,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": GLOBAL_BATCH // (2 * case.num_processes),
        "num_train_epochs": 1,
        "learning_rate": 1e-2,
        "warmup_steps": 3,
        "logging_steps": 1,
        "precision": "fp32",
        "seed": SEED,
        "save_steps": SAVE_STEPS,
        "save_total_limit": 2,
        "ddp_timeout": 60,
        "data_cache_dir": inputs / "cache",
        "output_dir": output,
    }
    return [*(token for name, value in values.items() for token in (f"--{name}", str(value))), *case.flags, *more]


def train_rows(output: Path) -> list[dict[str, Any]]:
    """The rows of the steps that count, as a reader of the run's metrics sees them."""
    from harness.metrics import read_metrics

    return read_metrics(output).of_kind("train")


def exit_code(output: Path) -> int | None:
    """Of exit.json; None without."""
    path = output / "exit.json"
    return int(json.loads(path.read_text())["code"]) if path.exists() else None


def complete_checkpoints(output: Path) -> list[int]:
    """Steps of the checkpoints whose files all have the hashes of their manifest, newest first."""
    from harness import checkpoint_files

    return [
        checkpoint_files.step_of(folder)
        for folder in checkpoint_files.list_checkpoints(output)
        if checkpoint_files.problem_of(folder) is None
    ]


class _Lengths:
    """A dataset as the loader's order sees it."""

    def __len__(self) -> int:
        return NUM_SAMPLES


def label_tokens_by_step(num_processes: int) -> list[int]:
    """Label tokens of each step, from the loader's own order.

    Raises:
        AssertionError: a sample is in no step, or in two.
    """
    from harness.step_loader import StepLoader

    loaders = [
        StepLoader(_Lengths(), global_batch_size=GLOBAL_BATCH, num_processes=num_processes, process_index=rank, seed=SEED)  # type: ignore[arg-type]
        for rank in range(num_processes)
    ]
    steps = [[int(index) for loader in loaders for index in loader.indices(step)] for step in range(NUM_STEPS)]
    assert sorted(index for step in steps for index in step) == list(range(NUM_SAMPLES))
    return [sum(sample_length(index) - 1 for index in step) for step in steps]  # the first token has no prediction


def differences(
    rows: Sequence[dict[str, Any]], reference: Sequence[dict[str, Any]], engine: str, inputs: Path, relative_tolerance: float | None = None
) -> list[str]:
    """What distinguishes a resumed run from the uninterrupted one; empty if nothing does.

    Losses, gradient norms and learning rates are compared, and the samples of each step: by its label tokens, with the loader's order.
    """
    case = ENGINES[engine]
    tolerance = case.relative_tolerance if relative_tolerance is None else relative_tolerance
    found: list[str] = []
    steps = [row["step"] for row in rows]
    if steps != list(range(1, NUM_STEPS + 1)):
        return [f"steps are {steps}"]
    totals = [0, *(row["num_label_tokens"] for row in rows)]
    used = [after - before for before, after in itertools.pairwise(totals)]
    if used != json.loads((inputs / "label_tokens.json").read_text())[str(case.num_processes)]:
        found.append(f"label tokens by step are {used}: other samples than the order has")
    for row, expected in zip(rows, reference, strict=True):
        for name in ("loss", "grad_norm", "learning_rate"):
            if abs(row[name] - expected[name]) > tolerance * abs(expected[name]):
                found.append(f"step {row['step']}: {name} {row[name]!r}, uninterrupted {expected[name]!r}")
    return found


def lost_samples(rows: Sequence[dict[str, Any]], engine: str, inputs: Path) -> int:
    """Samples that no step of a run has had, or another step than the order says: by label tokens, between the rows that there are."""
    wanted = json.loads((inputs / "label_tokens.json").read_text())[str(ENGINES[engine].num_processes)]
    lost, step, total = 0, 0, 0
    for row in sorted(rows, key=lambda row: row["step"]):
        if row["num_label_tokens"] - total != sum(wanted[step : row["step"]]):
            lost += GLOBAL_BATCH * (row["step"] - step)
        step, total = row["step"], row["num_label_tokens"]
    return lost + GLOBAL_BATCH * (NUM_STEPS - step)


def weight_difference(folder: Path, reference: Path) -> float:
    """Largest difference between the weights of two exported models, relative to the largest weight."""
    from safetensors.numpy import load_file

    ours, theirs = (load_file(path / "model.safetensors") for path in (folder, reference))
    assert ours.keys() == theirs.keys()
    return float(max(abs(ours[name] - theirs[name]).max() for name in ours) / max(abs(value).max() for value in theirs.values()))


def leftovers(output: Path) -> list[str]:
    """Temporary files and folders that a finished run must not leave."""
    return sorted(path.name for pattern in (".tmp*", ".old*", "*.tmp") for path in output.glob(pattern))
