"""Real out-of-memory on this machine's GPUs: one rank's memory is limited in mid-run, or the batch does not fit from the start.

    python benchmarks/recovery.py --output benchmarks/results/recovery.json [--num_gpus 2] [--only fsdp,ddp]

For each engine a clean run and runs in which, before step 6, the last rank may use no more than weights, optimizer state and a share of
what its steps needed on top of them so far: 85 % (one step down will do), 30 % (a jump over several), and for zero3 half of weights and
optimizer state (only offload helps: all ranks start again). Then a micro-batch far too large, which the dry run before step 1 brings
down. Reported: whether it finished, what the ladder did, seconds lost, and the largest difference of a step's loss and of its gradient's
norm from the clean run's (Adam takes gradients of any scale, so that the loss alone does not tell whether a step that was done again
counted each of them once).
The learning rate is small, so that the differences of rounding that a GPU makes from run to run do not grow. Prints a table last.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
LIMIT_VARIABLE = "HARNESS_BENCHMARK_LIMIT_AT_STEP"
SHARE_VARIABLE = "HARNESS_BENCHMARK_LIMIT_SHARE"
STEPS = 12
SPOKEN = re.compile(r"\.\.\.$|train \| ")  # of the log, what is in the result already
DETAILS = ("losses", "step_times_s", "grad_norms", "phases", "timeline")  # in the file only


def worker() -> int:
    """`run_clm.py` whose last rank has its memory limited before one step, as another program on the card would do."""
    from harness import guard, guard_line, run_clm

    if guard.needs_guard():
        return guard.main()
    run_clm.stand_by(sys.argv[1:])
    import torch

    from harness import trainer

    at, share = int(os.environ.get(LIMIT_VARIABLE, "0")), float(os.environ.get(SHARE_VARIABLE, "1"))
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    original, read = trainer.Trainer._global_counts, trainer.StepWatch.read
    peaks = [0]
    kept = Path(sys.argv[sys.argv.index("--output_dir") + 1]).with_suffix(".limit")
    total = torch.cuda.get_device_properties(0).total_memory
    if guard_line.attempt() and rank == size - 1 and kept.exists():  # the other program is still there
        torch.cuda.set_per_process_memory_fraction(float(kept.read_text()) / total, int(os.environ["LOCAL_RANK"]))

    def reading(self: Any) -> dict[str, Any]:  # the log resets the allocator's peak after each row
        peaks[0] = max(peaks[0], torch.cuda.max_memory_allocated())
        return read(self)

    def limited(self: Any, batch: Any) -> tuple[int, int]:
        if at and rank == size - 1 and self.state.step == at - 1 and not kept.exists():
            device = torch.cuda.current_device()
            torch.cuda.empty_cache()
            held, peak = torch.cuda.memory_allocated(device), peaks[0]
            limit = held + (peak - held) * share if share > 0 else held * -share + (peak - held)
            kept.write_text(str(limit))
            torch.cuda.set_per_process_memory_fraction(limit / total, device)
            print(f"[benchmark] rank {rank} limited to {limit / 2**30:.2f} GiB (peak was {peak / 2**30:.2f})", flush=True)
        return original(self, batch)

    trainer.StepWatch.read = reading  # type: ignore[method-assign]
    trainer.Trainer._global_counts = limited  # type: ignore[method-assign]
    return run_clm.main(sys.argv[1:])


def run(
    name: str, engine: list[str], micro: int, limit_at: int, share: float, num_gpus: int, folder: Path, timeout_s: float
) -> dict[str, Any]:
    from benchmarks.launched import failure_of, free_port, log_end, read_rows
    from benchmarks.launched import run as run_command
    from benchmarks.main_job import SHAPE_1B, arguments

    output = folder / name
    more = [*engine, "--save_strategy", "no", "--save_final", "False", "--activation_checkpointing", "none"]
    more += ["--gradient_accumulation_steps", "4" if micro == 4 else "1"]
    tokens = arguments(SHAPE_1B, 2048, STEPS, micro, output, folder / "cache", more)
    tokens[tokens.index("--logging_steps") + 1] = "1"
    tokens[tokens.index("--learning_rate") + 1] = "1e-5"
    launcher = ["torch.distributed.run", "--nproc_per_node", str(num_gpus), "--master_port", str(free_port())]
    command = [sys.executable, "-m", *launcher, __file__, *tokens]
    limits = {LIMIT_VARIABLE: str(limit_at), SHARE_VARIABLE: str(share)}
    started, log = time.monotonic(), folder / f"{name}.log"
    code = run_command(command, log, timeout_s, HARNESS_BENCHMARK_WORKER="1", **limits)
    rows = read_rows(output)
    ladder = json.loads((output / "ladder.json").read_text()) if (output / "ladder.json").exists() else {"steps_down": []}
    train = [row for row in rows if row["kind"] == "train"]
    result = {
        "name": name,
        "code": code,
        "seconds": round(time.monotonic() - started, 1),
        "losses": {row["step"]: row["loss"] for row in train},
        "step_times_s": {row["step"]: row["step_time_s"] for row in train},
        "tokens_per_second_per_gpu": train[-1]["tokens_per_second_per_gpu"] if train else None,
        "peak_memory_gib": max((row.get("peak_memory_gib") or 0 for row in train), default=0),
        "grad_norms": {row["step"]: row["grad_norm"] for row in train},
        "steps_down": ladder["steps_down"],
        "lost_steps": sum(row.get("lost_steps") or 0 for row in rows if row.get("event") == "resume"),
        "between_rows_s": max((after["time_s"] - before["time_s"] for before, after in itertools.pairwise(train)), default=0.0),
    }
    text = log.read_text(errors="replace")
    dated = output / "train.log"
    lines = dated.read_text(encoding="utf-8", errors="replace").splitlines() if dated.exists() else []
    result["timeline"] = [line for line in lines if not SPOKEN.search(line)]
    result["phases"] = [line.strip() for line in text.splitlines() if ": done in " in line and "rank" not in line.split(":")[0]]
    if code != 0:
        result["tail"] = failure_of(output, 4000) or log_end(log, 4000)
    return result


def largest_difference(ours: dict[int, float], theirs: dict[int, float]) -> float:
    """Relative to `theirs`, over the steps that both have; NaN where there is none."""
    return max((abs(ours[step] - value) / value for step, value in theirs.items() if value and ours.get(step)), default=float("nan"))


def main() -> int:
    if os.environ.get("HARNESS_BENCHMARK_WORKER"):
        return worker()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True)
    parser.add_argument("--num_gpus", type=int, default=None)
    parser.add_argument("--only", default="fsdp,zero3,ddp")
    parser.add_argument("--cases", default="", help="ends of the cases' names, separated by commas; default: all")
    parser.add_argument("--more", default="", help="further flags of run_clm.py for every run, such as '--torch_compile False'")
    parser.add_argument("--timeout_s", type=float, default=300)
    options = parser.parse_args()
    import torch

    from benchmarks.launched import card_facts

    num_gpus = options.num_gpus or torch.cuda.device_count()
    folder = Path(tempfile.mkdtemp(prefix="recovery-"))
    configs = ("zero1", "zero2", "zero2_offload", "zero3")
    engines = {name: ["--deepspeed", str(ROOT / "ds_configs" / f"{name}.json")] for name in configs}
    engines |= {"fsdp": ["--fsdp", "full_shard"], "ddp": []}
    results: list[dict[str, Any]] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a run's processes end with it
    for name in options.only.split(","):
        cases: list[tuple[str, int, int, float, list[str]]] = [(f"{name}-clean", 4, 0, 1.0, []), (f"{name}-limited", 4, 6, 0.85, [])]
        if name == "fsdp":
            cases += [
                ("fsdp-jump", 4, 6, 0.3, ["--auto_memory", "on"]),  # with the planner's estimates of all rungs
                ("fsdp-no-votes", 4, 0, 1.0, ["--no_oom_recovery"]),
                ("fsdp-too-large", 48, 0, 1.0, ["--auto_memory", "off"]),
            ]
        if name == "zero3":
            cases.append(("zero3-relaunch", 4, 6, -0.5, ["--oom_ladder", "optimizer_offload"]))
        for case, micro, limit_at, share, more in cases:
            if options.cases and not case.endswith(tuple(options.cases.split(","))):
                continue
            results.append(
                run(case, [*engines[name], *more, *options.more.split()], micro, limit_at, share, num_gpus, folder, options.timeout_s)
            )
            print(json.dumps({key: value for key, value in results[-1].items() if key not in DETAILS}), flush=True)
            facts = card_facts(num_gpus, sys.argv)
            Path(options.output).write_text(json.dumps({"facts": facts, "results": results}, indent=1))
    heads = f"{'lost s':>7s} {'gap s':>7s} {'lost steps':>10s} {'loss diff':>10s} {'norm diff':>10s}  ladder"
    print(f"{'run':16s} {'code':>7s} {'tok/s/gpu':>10s} {'GiB':>6s} {heads}")
    clean = {row["name"].split("-")[0]: row for row in results if row["name"].endswith("clean")}
    for row in results:
        reference = clean.get(row["name"].split("-")[0], {})
        difference, norm_difference = (largest_difference(row[key], reference.get(key, {})) for key in ("losses", "grad_norms"))
        lost = sum(step.get("seconds", 0) for step in row["steps_down"])
        changes = "; ".join(f"{step['phase']}@rank{step['rank']}: {step['change']}" for step in row["steps_down"])
        speed = row["tokens_per_second_per_gpu"] or 0
        print(
            f"{row['name']:16s} {row['code']!s:>7s} {speed:10.1f} {row['peak_memory_gib']:6.1f} {lost:7.2f}"
            f" {row['between_rows_s']:7.1f} {row['lost_steps']:10d} {difference:10.2e} {norm_difference:10.2e}  {changes}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
