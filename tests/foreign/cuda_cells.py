"""examples/hf_trainer.py with a model of half a billion parameters on two GPUs, one of which loses memory for good before step 7.

The allocator of that rank fails by itself then, in the middle of a step, while the other rank waits in a collective of NCCL.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from launch.machine import free_port
from tests.foreign import cells
from tests.launching import ROOT, launch_environment

LAUNCHERS = ("fsdp", "zero3")
MICRO, BLOCK, SAVE_STEPS, FAILS_AT = 16, 2048, 4, 7
SILENCE_S, START_S, LIMIT_S = 90.0, 150.0, 280.0
FAILURE: dict[str, Any] = {"kind": "limit", "rank": 1, "step": FAILS_AT, "share": MICRO, "spare": 0.6}
# Llama with 24 layers and 558 million parameters.
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 1280,
    "intermediate_size": 3456,
    "num_hidden_layers": 24,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "max_position_embeddings": BLOCK,
    "tie_word_embeddings": False,
}


def write_model(folder: Path) -> Path:
    """The folder of the model's config."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return folder


def command(launcher: str, corpus: Path, model: Path, folder: Path) -> list[str]:
    """What a user would type, by modules of this interpreter: its tools may not be on PATH."""
    flags: dict[str, Any] = {
        "train_file": corpus,
        "config_name": model,
        "output_dir": folder / "out",
        "block_size": BLOCK,
        "per_device_train_batch_size": MICRO,
        "max_steps": cells.STEPS,
        "save_steps": SAVE_STEPS,
        "save_total_limit": 1,
        "logging_steps": 1,
        "learning_rate": 1e-4,
        "bf16": True,
        "report_to": "none",
        "disable_tqdm": True,
    }
    words = [str(ROOT / "examples/hf_trainer.py"), *(word for name, value in flags.items() for word in (f"--{name}", str(value)))]
    port = str(free_port())
    if launcher == "fsdp":
        start = ["accelerate.commands.launch", "--config_file", str(ROOT / "fsdp_configs/full_shard.yaml")]
        start += ["--num_processes", str(cells.NUM_RANKS), "--main_process_port", port]
    else:
        start = ["deepspeed.launcher.runner", f"--num_gpus={cells.NUM_RANKS}", "--master_port", port]
        words += ["--deepspeed", str(ROOT / "ds_configs/zero3.json")]
    return [sys.executable, "-m", *start, *words]


def silence(trace: Path) -> Callable[[Path], bool]:
    """Says whether nothing was written for too long, neither output nor a record of a forward; before the first one it takes longer."""

    def is_over(output: Path) -> bool:
        records = list(trace.glob("*.jsonl"))
        newest = max(path.stat().st_mtime for path in (output, *records))
        return time.time() - newest > (SILENCE_S if records else START_S)

    return is_over


def printed_losses(output: str) -> list[float]:
    """What the Trainer printed of each step, in order, lives one after the other."""
    return [float(text) for text in re.findall(r"^\{'loss': '?([\d.eE+-]+)", output, flags=re.MULTILINE)]


def run(launcher: str, corpus: Path, model: Path, folder: Path, *, with_us: bool, changes: Mapping[str, Any] | None = None) -> cells.Run:
    """Runs the script with or without `harness run` before it. Its checkpoints are removed at the end: each is of several GB.

    Args:
        changes: for a rehearsal without GPUs: "words" in place of the command's, "failure", "environment".
    """
    told = dict(changes or {})
    folder.mkdir(parents=True)
    environ = launch_environment(cells.injected(folder, told.get("failure", FAILURE)), cpu=False) | told.get("environment", {})
    environ["OMP_NUM_THREADS"] = "4"
    tokens = told["words"](folder) if "words" in told else command(launcher, corpus, model, folder)
    if with_us:
        tokens = [sys.executable, "-m", "harness.runner", "--no_plan", "--ladder", "micro_batch", "--", *tokens]
    code, seconds, text = cells.run_tokens(tokens, environ, folder, LIMIT_S, silence(folder / "trace"))
    losses = dict(enumerate(printed_losses(text), start=1))
    shutil.rmtree(folder / "out", ignore_errors=True)
    return cells.Run(code, seconds, text, losses, cells.steps_of(folder / "trace", MICRO))


def seconds_after_limit(folder: Path) -> float | None:
    """From the moment the memory was taken away to the last sign of life."""
    limit = folder / "trace" / "limit.json"
    if not limit.exists():
        return None
    return round((folder / "output.txt").stat().st_mtime - json.loads(limit.read_text(encoding="utf-8"))["at_s"], 1)


def ending(found: cells.Run, folder: Path) -> dict[str, Any]:
    """How a run without us ended."""
    said = [line.strip()[:250] for line in found.output.splitlines() if "out of memory" in line]
    return {
        "exit_code": found.code,
        "ended_by_us_after_silence": found.code is None,
        "seconds": round(found.seconds, 1),
        "last_output_after_limit_s": seconds_after_limit(folder),
        "steps_done": len(found.losses),
        "said": said[0] if said else found.output[-500:],
    }


def outcome(found: cells.Run, folder: Path) -> dict[str, Any]:
    """How a run with `harness run` ended, and whether it went on where it was with the same samples and losses."""
    result: dict[str, Any] = {"exit_code": found.code, "seconds": round(found.seconds, 1)}
    limit = folder / "trace" / "limit.json"
    if limit.exists():
        gib = {
            name.replace("_bytes", "_gib"): round(value / 2**30, 2)
            for name, value in json.loads(limit.read_text()).items()
            if name != "at_s"
        }
        result["memory_of_rank_1"] = gib
    if not (folder / "out-harness_run" / "record.json").exists():
        return {**result, "said": found.output[-1500:]}
    record = cells.record_of(folder)
    attempts = record["attempts"]
    result |= {
        "result": record["result"],
        "attempts": len(attempts),
        "changes": [each["change"] for each in attempts],
        "seconds_of_attempts": [each["seconds"] for each in attempts],
        "all_ranks_ended_after_s": attempts[0]["ended_after_s"],
        "out_of_memory": [report.get("failure", "")[:250] for report in attempts[0]["out_of_memory"]],
    }
    if found.code != 0 or len(attempts) < 2:
        return {**result, "said": found.output[-1500:]}
    resumed = attempts[-1]["resume_from_checkpoint"]
    done = int(Path(resumed).name.rpartition("-")[2]) if resumed else 0
    batches = [cells.global_batches(found, life) for life in range(min(map(len, found.steps.values())))]
    num_first = len(found.losses) - (cells.STEPS - done)  # steps that the first life printed
    again = {step: found.losses[num_first + step - done] for step in range(done + 1, num_first + 1)}
    differences = [abs(loss - found.losses[step]) / found.losses[step] for step, loss in again.items()]
    return result | {
        "resumed_at_step": done,
        "steps_after_that": len(batches[-1]),
        "samples_per_step": sorted({len(batch) for life in batches for batch in life}),
        "same_samples_in_steps_done_twice": batches[-1][: num_first - done] == batches[0][done:num_first],
        "steps_done_twice": list(again),
        "largest_relative_loss_difference_in_them": max(differences, default=None),
        "losses": [round(loss, 4) for loss in found.losses.values()],
    }


def measure(
    launcher: str, corpus: Path, model: Path, folder: Path, logs: Path | None = None, changes: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """One row of the results; whatever goes wrong is in it.

    Args:
        logs: folder for what the commands printed; None: it is not kept.
        changes: as in `run`.
    """
    row: dict[str, Any] = {"script": "hf_trainer", "launcher": launcher}
    for name, with_us in (("with", True), ("without", False)):
        try:
            found = run(launcher, corpus, model, folder / name, with_us=with_us, changes=changes)
            row[name] = outcome(found, folder / name) if with_us else ending(found, folder / name)
        except Exception as error:  # the other half, and the next row, are worth having all the same
            row[name] = {"failed": f"{type(error).__name__}: {error}"[-1500:]}
        if logs is not None and (folder / name / "output.txt").exists():
            logs.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / name / "output.txt", logs / f"{launcher}-{name}.txt")
    return row
