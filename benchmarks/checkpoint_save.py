"""How long training stands still for a save: in the background from page-locked copies, from ordinary copies, and waiting for the disk.

    python benchmarks/checkpoint_save.py --output benchmarks/results/checkpoint_save.json [--num_gpus 2] [--only fsdp-background]

The Llama of benchmarks/main_job.py with 1.5 billion parameters, 12 steps, a save after steps 4, 8 and 12 (the last one always waits for
the disk, so it is left out), under full_shard, zero3 and zero2. The first save allocates host memory, the second uses it again.
Prints a table last.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
ENGINES = {
    "fsdp": ["--fsdp", "full_shard"],
    "zero3": ["--deepspeed", str(ROOT / "ds_configs" / "zero3.json")],
    "zero2": ["--deepspeed", str(ROOT / "ds_configs" / "zero2.json")],
}
MODES = ("background", "ordinary_memory", "waiting")
TIMES_FILE = "SAVE_TIMES_FILE"


def child(mode: str, tokens: list[str]) -> int:
    """One rank of a job whose saves are timed from outside; `mode` says how they are made."""
    import torch
    import torch.distributed.checkpoint as checkpoint

    from harness import run_clm
    from harness.checkpoint import Checkpointer
    from harness.engines import dcp
    from harness.host_copies import HostCopies

    if mode == "ordinary_memory":
        dcp._save_from_gpu = lambda state, options: checkpoint.async_save(state, **options)
        HostCopies._copy_fast = lambda self, key, tensors: {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}  # type: ignore[method-assign]
    save = Checkpointer.save

    def timed(self: Checkpointer, step: int, trainer_state: dict[str, Any], *, wait: bool = False) -> bool:
        self.finish()  # an earlier save that is still being written is not this one's time
        torch.cuda.synchronize()
        started = time.monotonic()
        done = save(self, step, trainer_state, wait=wait or mode == "waiting")
        if self.coordinator.is_main_process and not wait:
            with open(os.environ[TIMES_FILE], "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "stood_still_s": round(time.monotonic() - started, 3)}) + "\n")
        return done

    Checkpointer.save = timed  # type: ignore[method-assign]
    return run_clm.main(tokens)


def run(engine: str, mode: str, num_gpus: int, folder: Path, port: int, timeout_s: float) -> dict[str, Any]:
    """Runs one job; its times per save, seconds."""
    from benchmarks.launched import log_end, read_rows
    from benchmarks.launched import run as run_command
    from benchmarks.main_job import SHAPE_1B

    output, times = folder / f"{engine}-{mode}", folder / f"{engine}-{mode}.jsonl"
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={num_gpus}", f"--master_port={port}", __file__]
    command += ["--child", mode, "--model_type", "llama", "--config_overrides", SHAPE_1B, "--tokenizer_name", "bytes"]
    command += ["--train_file", str(Path(os.__file__).parent / "*.py"), "--block_size", "1024", "--validation_split_percentage", "0"]
    command += ["--per_device_train_batch_size", "1", "--max_steps", "12", "--save_steps", "4", "--save_total_limit", "1"]
    command += ["--save_final", "False", "--logging_steps", "1", "--precision", "bf16", "--activation_checkpointing", "full"]
    command += ["--torch_compile", "False", "--auto_memory", "off"]  # neither changes what a save does
    command += ["--data_cache_dir", str(folder / "cache"), "--output_dir", str(output), "--auto_memory", "off", *ENGINES[engine]]
    log = folder / f"{engine}-{mode}.log"
    code = run_command(command, log, timeout_s, **{TIMES_FILE: str(times)})
    rows = [json.loads(line) for line in times.read_text().splitlines()] if times.exists() else []
    events = read_rows(output)
    steps = [row["step_time_s"] for row in events if row.get("kind") == "train"]
    size_bytes = sum(path.stat().st_size for path in output.glob("checkpoint-*/state/**/*") if path.is_file())
    result = {
        "engine": engine,
        "mode": mode,
        "code": code,
        "stood_still_s": [row["stood_still_s"] for row in rows],
        "complete_after_s": [row["duration_s"] for row in events if row.get("event") == "save"],
        "median_step_s": sorted(steps)[len(steps) // 2] if steps else None,
        "checkpoint_gib": round(size_bytes / 2**30, 2),
    }
    if code != 0:
        result["tail"] = log_end(log, 1500)
    return result


def main() -> int:
    if "--child" in sys.argv:
        place = sys.argv.index("--child")
        return child(sys.argv[place + 1], sys.argv[place + 2 :])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--num_gpus", type=int, default=2)
    parser.add_argument("--timeout_s", type=float, default=240)
    options = parser.parse_args()
    from benchmarks.launched import card_facts
    from benchmarks.main_job import SHAPE_1B

    wanted = set(filter(None, options.only.split(",")))
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-save-"))
    results: list[dict[str, Any]] = []
    for engine in ENGINES:
        for mode in MODES:
            if wanted and f"{engine}-{mode}" not in wanted:
                continue
            results.append(run(engine, mode, options.num_gpus, folder, 29700 + len(results), options.timeout_s))
            print(json.dumps(results[-1]), flush=True)
            facts = {**card_facts(options.num_gpus, sys.argv), "shape": SHAPE_1B}
            Path(options.output).write_text(json.dumps({"facts": facts, "results": results}, indent=1))
    print(f"{'engine':8s} {'mode':16s} {'code':>7s} {'GiB':>6s} {'step s':>7s}  stood still for each save, s | complete after, s")
    for row in results:
        print(
            f"{row['engine']:8s} {row['mode']:16s} {row['code']!s:>7s} {row['checkpoint_gib']:6.2f} {row['median_step_s'] or 0:7.3f}"
            f"  {row['stood_still_s']} | {row['complete_after_s']}"
        )
    return 0 if all(row["code"] == 0 for row in results) else 1


if __name__ == "__main__":
    sys.exit(main())
