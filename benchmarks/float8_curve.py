"""Whether float8 trains as bf16 does: the loss of 200 steps under both, beside the noise that another initialisation makes.

    python benchmarks/float8_curve.py --output benchmarks/results/float8_curve.json [--steps 200] [--num_gpus 2]

A Llama of 107 million parameters under FSDP2 on the Python standard library's sources, byte by byte; all runs have the same batches in the
same order (`--data_seed`). Compared with bf16 at seed 42:

    noise                bf16 at seed 43: other weights to begin with. Rows meet row by row, for the batches are the same
    tensorwise           --fp8 tensorwise --fp8_all_gather False
    tensorwise-gathered  --fp8 tensorwise --fp8_all_gather True
    rowwise              --fp8 rowwise
    bf16-again           bf16 at seed 42 a second time: what kernels that add in any order change

A curve's distance is the mean absolute difference of losses, each averaged over 10 steps, from step 51 on (before it, all curves fall
steeply); it is within noise where that is no more than the noise's. The runs share the cards and go at the same time, so there are no
figures of speed here. Prints a table last.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks import launched  # noqa: E402

SHAPE = "hidden_size=1024,intermediate_size=2816,num_hidden_layers=9,num_attention_heads=16,num_key_value_heads=8,vocab_size=512"
SHAPE_CPU = "hidden_size=64,intermediate_size=192,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,vocab_size=512"
RUNS: dict[str, list[str]] = {
    "bf16": [],
    "noise": ["--seed", "43"],
    "tensorwise": ["--fp8", "tensorwise", "--fp8_all_gather", "False"],
    "tensorwise-gathered": ["--fp8", "tensorwise", "--fp8_all_gather", "True"],
    "rowwise": ["--fp8", "rowwise"],
    "bf16-again": [],
}
WINDOW = 10  # steps whose losses are averaged
BEGIN = 50  # steps that are not compared


def command(name: str, options: argparse.Namespace, folder: Path) -> list[str]:
    """The launch command of one run."""
    files = sorted(str(path) for path in Path(sysconfig.get_path("stdlib")).glob("*.py"))
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(options.num_gpus)]
    launch += ["--master_port", str(launched.free_port()), str(ROOT / "harness" / "run_clm.py")]
    launch += ["--model_type", "llama", "--tokenizer_name", "bytes", "--config_overrides", SHAPE if options.on_gpu else SHAPE_CPU]
    launch += ["--train_file", *files, "--block_size", str(options.sequence), "--data_cache_dir", str(folder / "data")]
    launch += ["--per_device_train_batch_size", str(options.samples), "--max_steps", str(options.steps), "--logging_steps", "1"]
    launch += ["--learning_rate", "1e-3", "--lr_scheduler_type", "cosine", "--warmup_steps", "20", "--data_seed", "1"]
    launch += ["--fsdp", "full_shard", "--precision", "bf16", "--auto_memory", "off", "--snapshot_steps", "0"]
    launch += ["--save_strategy", "no", "--save_final", "False", "--validation_split_percentage", "0", "--gpu_monitor_interval_s", "0"]
    return [*launch, "--output_dir", str(folder / name), *RUNS[name]]


def run(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One run: its "losses", of each step, or "failure" and the end of the log."""
    started, log = time.monotonic(), folder / f"{name}.log"
    # Runs that go at the same time need not have as many compilers each as there are cores.
    code = launched.run(command(name, options, folder), log, options.timeout_s, TORCHINDUCTOR_COMPILE_THREADS="4")
    losses = [row["loss"] for row in launched.read_rows(folder / name) if row.get("kind") == "train"]
    result: dict[str, Any] = {"run": name, "seconds": round(time.monotonic() - started, 1), "losses": [round(loss, 5) for loss in losses]}
    if code != 0 or len(losses) < options.steps:
        result |= {
            "failure": f"ended with {code} after {len(losses)} steps",
            "output": launched.failure_of(folder / name) or launched.log_end(log, 1500),
        }
    return result


def smooth(losses: Sequence[float]) -> list[float]:
    """Means of WINDOW steps, one after the other, of the steps that are compared."""
    kept = losses[BEGIN:] if len(losses) > BEGIN + WINDOW else losses
    return [sum(kept[at : at + WINDOW]) / len(kept[at : at + WINDOW]) for at in range(0, len(kept), WINDOW)]


def distance(losses: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """Of two curves of the same steps: mean and largest absolute difference of their smoothed losses, and that of the last means with its
    sign (positive: `losses` is the higher one).
    """
    apart = [here - there for here, there in zip(smooth(losses), smooth(others), strict=True)]
    sizes = [abs(each) for each in apart]
    return {"mean": round(sum(sizes) / len(sizes), 5), "largest": round(max(sizes), 5), "end": round(apart[-1], 5)}


def compare(results: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Run -> its distance from bf16, and whether it is within noise; empty without bf16's and the noise's own curve."""
    curves = {result["run"]: result["losses"] for result in results if "failure" not in result}
    if not {"bf16", "noise"} <= set(curves):
        return {}
    noise = distance(curves["noise"], curves["bf16"])
    found: dict[str, dict[str, Any]] = {}
    for name, losses in curves.items():
        if name != "bf16":
            apart = distance(losses, curves["bf16"])
            found[name] = apart | ({} if name == "noise" else {"within_noise": apart["mean"] <= noise["mean"]})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", default=",".join(RUNS))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--num_gpus", type=int, default=None)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=8, help="of each GPU in an optimizer step")
    parser.add_argument("--jobs", type=int, default=len(RUNS), help="runs at the same time")
    parser.add_argument("--timeout_s", type=float, default=130, help="of one run")
    options = parser.parse_args()
    import torch

    options.on_gpu = torch.cuda.is_available()
    options.num_gpus = options.num_gpus or torch.cuda.device_count() or 1
    about = {**launched.card_facts(options.num_gpus, sys.argv), "steps": options.steps, "sequence": options.sequence}
    about |= {"samples_per_step_and_gpu": options.samples, "shape": SHAPE if options.on_gpu else SHAPE_CPU}
    results: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory(prefix="float8-", ignore_cleanup_errors=True) as name,
        concurrent.futures.ThreadPoolExecutor(options.jobs) as pool,
    ):
        folder = Path(name)
        waiting = [pool.submit(run, each, options, folder) for each in options.only.split(",")]
        for future in concurrent.futures.as_completed(waiting):
            results.append(future.result())
            print(json.dumps({key: value for key, value in results[-1].items() if key != "losses"}), flush=True)
            if options.output:
                content = {"facts": about, "compared_with_bf16": compare(results), "results": results}
                options.output.write_text(json.dumps(content, indent=1) + "\n")
    found = compare(results)
    print("| run | last losses | mean difference from bf16 | largest | at the end | within noise |\n| --- | --- | --- | --- | --- | --- |")
    for result in sorted(results, key=lambda each: list(RUNS).index(each["run"])):
        end = smooth(result["losses"])[-1] if result["losses"] else float("nan")
        apart = found.get(result["run"], {})
        figures = " | ".join(str(apart.get(key, "")) for key in ("mean", "largest", "end", "within_noise"))
        print(f"| {result['run']} | {result.get('failure', f'{end:.4f}')} | {figures} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
