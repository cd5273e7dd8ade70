"""Is the planner's fastest really the fastest? Every setting of one job, in one run of this machine's GPUs, against the predictions.

    python benchmarks/ranking.py --output benchmarks/results/ranking.json [--engine fsdp] [--num_gpus 2]

A Llama of 1.5 billion parameters (benchmarks/main_job.py), 8 samples of 2,048 tokens a rank and step. One job is started; every 5 steps
its engine takes the next settings in place, as the ladder does, and the last 3 of those steps are timed. Layers are not compiled: each
change would compile again. Prints a table last, and how much slower the planner's choice is than the fastest.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
STEPS_EACH, TIMED, SAMPLES, SEQUENCE = 5, 3, 8, 2048
ENGINES = {"fsdp": ["--fsdp", "full_shard"], "ddp": [], "zero3": ["--deepspeed", str(ROOT / "ds_configs" / "zero3.json")]}
WORKER = "HARNESS_RANKING_WORKER"


def settings_of(engine: str) -> list[dict[str, Any]]:
    """Micro-batch by checkpointing, and, under FSDP2, weights kept between forward and backward."""
    table = [
        {"micro_batch_size": micro, "activation_checkpointing": mode} for mode in ("none", "selective", "full") for micro in (8, 4, 2, 1)
    ]
    if engine == "fsdp":
        table += [{"micro_batch_size": micro, "activation_checkpointing": "full", "reshard_after_forward": False} for micro in (8, 1)]
    return table


def worker(engine: str, tokens: list[str]) -> int:
    """One rank, whose engine takes the next settings every `STEPS_EACH` steps."""
    from harness import guard, run_clm

    if guard.needs_guard():
        return guard.main()
    run_clm.stand_by(tokens)
    from harness import trainer

    counts, table = trainer.Trainer._global_counts, settings_of(engine)

    def changed(self: Any, batch: Any) -> Any:
        number, first = divmod(self.state.step, STEPS_EACH)
        if first == 0 and number < len(table):
            base = self.engine.settings.replace(reshard_after_forward=True) if engine == "fsdp" else self.engine.settings
            if not self.engine.apply(base.replace(**table[number])):
                raise RuntimeError(f"{engine} cannot take {table[number]} in place")
        return counts(self, batch)

    trainer.Trainer._global_counts = changed  # type: ignore[method-assign]
    return run_clm.main(tokens)


def shape(smoke: bool) -> tuple[str, int]:
    """Sizes of the model, and tokens of a sample."""
    from benchmarks.main_job import SHAPE_1B

    small = "hidden_size=32,intermediate_size=64,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,vocab_size=300"
    return (small, 64) if smoke else (SHAPE_1B, SEQUENCE)


def measure_all(engine: str, num_gpus: int, folder: Path, timeout_s: float, smoke: bool) -> tuple[list[dict[str, Any]], str]:
    """The rows of the table that were timed, and the end of the log where the job failed."""
    from benchmarks.launched import free_port, log_end, read_rows, run
    from benchmarks.main_job import arguments

    table, output = settings_of(engine), folder / "out"
    more = [*ENGINES[engine], "--save_strategy", "no", "--save_final", "False", "--torch_compile", "False", "--snapshot_steps", "0"]
    tokens = arguments(*shape(smoke), len(table) * STEPS_EACH, SAMPLES, output, folder / "cache", more)
    tokens[tokens.index("--logging_steps") + 1] = "1"
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={num_gpus}", f"--master_port={free_port()}", __file__]
    command += ["--engine", engine, "--child", *tokens]
    code = run(command, folder / "log", timeout_s, **{WORKER: "1"})
    events = read_rows(output)
    train = {row["step"]: row for row in events if row["kind"] == "train"}
    rows = []
    for number, settings in enumerate(table):
        numbers = range(number * STEPS_EACH + STEPS_EACH - TIMED + 1, (number + 1) * STEPS_EACH + 1)
        steps = [train[step] for step in numbers if step in train]
        if len(steps) == TIMED:
            step_s, peak_gib = statistics.median(row["step_time_s"] for row in steps), steps[-1].get("peak_memory_gib") or 0.0
            rows.append({**settings, "step_s": step_s, "peak_gib": peak_gib})
    return rows, "" if code == 0 else f"code {code}\n" + log_end(folder / "log", 2500)


def predict(engine: Any, num_gpus: int, rows: list[dict[str, Any]], smoke: bool) -> None:
    """Adds the planner's step time and peak to each row."""
    import torch

    from harness.candidates import evaluate
    from harness.cards import hardware_of
    from harness.ladder import MemorySettings
    from harness.memory import measure
    from harness.model_shape import RunShape
    from harness.step_time import Hardware

    sizes, sequence = shape(smoke)
    liger = torch.cuda.is_available() and importlib.util.find_spec("liger_kernel") is not None
    run = RunShape(engine, num_gpus, sequence, samples_per_step=SAMPLES, num_local_processes=num_gpus, fused_layers=liger)
    request = {
        "model_type": "llama",
        "config_overrides": sizes,
        "block_size": sequence,
        "weights": [run.weights],
        "checkpointing": ["none", "selective", "full"],
        "loss_chunks": [1024],
        "documents": True,
    }
    measured, hardware = measure([request]), hardware_of(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else Hardware()
    for row in rows:
        changed = {key: row[key] for key in ("micro_batch_size", "activation_checkpointing", "reshard_after_forward") if key in row}
        candidate = evaluate(MemorySettings(SAMPLES, "none", 1024).replace(**changed), measured, run, hardware)
        row |= {
            "predicted_step_s": round(candidate.time.total_s, 4),
            "predicted_peak_gib": round(candidate.estimate.allocated_bytes / 2**30, 2),
        }


def table_text(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'micro':>5s} {'checkpointing':13s} {'reshard':7s} {'step s':>8s} {'predicted':>9s} {'GiB':>7s} {'predicted':>9s}"]
    for row in sorted(rows, key=lambda row: row["step_s"]):
        lines.append(
            f"{row['micro_batch_size']:5d} {row['activation_checkpointing']:13s} {row.get('reshard_after_forward', True)!s:7s}"
            f" {row['step_s']:8.3f} {row['predicted_step_s']:9.3f} {row['peak_gib']:7.2f} {row['predicted_peak_gib']:9.2f}"
        )
    return "\n".join(lines)


def main() -> int:
    if os.environ.get(WORKER):
        place = sys.argv.index("--child")
        return worker(sys.argv[sys.argv.index("--engine") + 1], sys.argv[place + 1 :])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--engine", choices=sorted(ENGINES), default="fsdp")
    parser.add_argument("--num_gpus", type=int)
    parser.add_argument("--timeout_s", type=float, default=240)
    parser.add_argument("--smoke", action="store_true", help="tiny model on CPU ranks, to see that the script works")
    options = parser.parse_args()
    import torch

    from benchmarks.launched import card_facts

    num_gpus = options.num_gpus or (2 if options.smoke else torch.cuda.device_count())
    rows, failed = measure_all(options.engine, num_gpus, Path(tempfile.mkdtemp(prefix="ranking-")), options.timeout_s, options.smoke)
    if failed:
        print(failed, file=sys.stderr)
    if not rows:
        return 1
    predict(options.engine, num_gpus, rows, options.smoke)
    chosen, fastest = min(rows, key=lambda row: row["predicted_step_s"]), min(rows, key=lambda row: row["step_s"])
    slower = chosen["step_s"] / fastest["step_s"] - 1
    facts = card_facts(num_gpus, sys.argv)
    options.output.write_text(json.dumps({"facts": facts, "engine": options.engine, "slower": slower, "rows": rows}, indent=1) + "\n")
    print(table_text(rows))
    print(f"{len(rows)} settings; the planner's fastest is {100 * slower:.1f} % slower than the fastest")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
