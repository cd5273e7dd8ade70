"""A step of the Trainer, of TRL's, of an accelerate loop that runs out of memory on one rank is redone in place, with the same result."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.faults.fork_ranks import ForkServer
from tests.foreign import jobs

STEPS = 4


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("foreign") / "corpus.txt"
    source = random.Random(0)
    path.write_text("".join(source.choice("abcdefgh ") for _ in range(64 * 100)))
    return path


def flags(name: str, corpus: Path, folder: Path, micro: int, accumulation: int) -> list[str]:
    values: dict[str, Any] = {
        "train_file": corpus,
        "output_dir": folder / "out",
        "max_steps": STEPS,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": accumulation,
        "learning_rate": 1e-3,
        "save_steps": 100,
    }
    if name != "accelerate_loop":
        values |= {"logging_steps": 1, "report_to": "none", "use_cpu": "True", "disable_tqdm": "True", "oom_recovery": "True"}
        values |= {"gradient_checkpointing": "False", "bf16": "False", "save_strategy": "no"}
    tokens = [token for key, value in values.items() for token in (f"--{key}", str(value))]
    return tokens if name != "accelerate_loop" else [*tokens, "--oom_safe"]


def losses(name: str, folder: Path) -> list[float]:
    if name == "accelerate_loop":
        return [json.loads(line)["loss"] for line in (folder / "out/log.jsonl").read_text().splitlines()]
    history = json.loads((folder / "out/trainer_state.json").read_text())["log_history"]
    return [row["loss"] for row in history if "loss" in row]


def run(
    server: ForkServer, name: str, corpus: Path, folder: Path, num_ranks: int, micro: int, accumulation: int, failure: dict[str, Any]
) -> list[dict[str, Any]]:
    """Runs a script; what each rank says was lowered, which must be the same on all."""
    folder.mkdir()
    server.call(
        jobs.ranks, name, str(folder), num_ranks, failure, flags(name, corpus, folder, micro, accumulation), output=folder / "log.txt"
    )
    (lowered,) = {(folder / f"log-{rank}.json").read_text() for rank in range(num_ranks)}
    return json.loads(lowered)


# A step has two micro-batches. With a Trainer the first forward is the dry run's, so its failure is in step 1, and the loop's in step 2.
FAILURES = {
    "forward": {"rank": 1, "step": 2, "share": 8, "rows": 3},
    "backward": {"rank": 0, "step": 2, "share": 8, "rows": 3, "place": "backward"},
}


@pytest.mark.parametrize("name", ["hf_trainer", "accelerate_loop", "trl_sft"])
def test_a_step_is_redone_with_the_same_result(server: ForkServer, corpus: Path, tmp_path: Path, name: str) -> None:
    if name == "trl_sft":
        pytest.importorskip("trl")
    assert run(server, name, corpus, tmp_path / "clean", 1, 8, 2, {}) == []
    clean = losses(name, tmp_path / "clean")
    assert len(clean) == STEPS and clean[-1] < clean[0]
    for place, failure in FAILURES.items():
        lowered = run(server, name, corpus, tmp_path / place, 2, 4, 2, failure)
        assert [(step["rank"], step["change"]) for step in lowered] == [(failure["rank"], "samples at once 4 -> 2")]
        assert losses(name, tmp_path / place) == pytest.approx(clean, rel=2e-6)
