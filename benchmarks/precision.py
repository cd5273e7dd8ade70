"""The same small run in fp32, bf16 and fp16: losses, left-out updates, loss scale, memory and speed.

    python benchmarks/precision.py --output benchmarks/results/precision.json [--steps 40] [--config_overrides ...]

One process, on a card where there is one. Text: the Python standard library's sources, byte by byte. fp32 is what the others are to equal.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SHAPE = "hidden_size=128,intermediate_size=384,num_hidden_layers=4,num_attention_heads=4,num_key_value_heads=2"


def run(precision: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One run; what its metrics say."""
    output = folder / precision
    files = sorted(str(path) for path in Path(sysconfig.get_path("stdlib")).glob("*.py"))[:20]
    command = [sys.executable, str(ROOT / "harness/run_clm.py"), *(["--device_map", "cuda:0"] if options.cuda else [])]
    command += ["--model_type", "llama", "--config_overrides", options.config_overrides, "--tokenizer_name", "bytes"]
    command += ["--train_file", *files, "--data_cache_dir", str(folder / "cache")]
    command += ["--block_size", "128", "--per_device_train_batch_size", "4"]
    command += ["--max_steps", str(options.steps), "--logging_steps", "1", "--learning_rate", "1e-3", "--warmup_steps", "5"]
    command += ["--precision", precision, "--auto_memory", "off", "--max_eval_samples", "32", "--output_dir", str(output)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    train = [row for row in rows if row["kind"] == "train"]
    summary = next(row for row in rows if row["kind"] == "summary")
    names = ("final_loss", "last_eval_loss", "num_skipped_steps", "median_step_time_s", "peak_memory_gib")
    found = {name: summary.get(name) for name in names} | {"loss_scale": train[-1].get("loss_scale")}
    return {"precision": precision, **found, "losses": {str(row["step"]): row["loss"] for row in train}}


def main() -> int:
    """Runs all three, writes the file, prints the table."""
    import torch

    parser = argparse.ArgumentParser(description="One small run in three precisions.")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--config_overrides", default=SHAPE)
    options = parser.parse_args()
    options.cuda = torch.cuda.is_available()
    device = torch.cuda.get_device_name(0) if options.cuda else f"CPU ({platform.machine()})"
    with tempfile.TemporaryDirectory() as folder:
        results = [run(precision, options, Path(folder)) for precision in ("fp32", "bf16", "fp16")]
    for result in results:
        result["max_loss_difference"] = max(abs(result["losses"][step] - loss) for step, loss in results[0]["losses"].items())
    facts = {"device": device, "torch": torch.__version__, "steps": options.steps, "config_overrides": options.config_overrides}
    options.output.write_text(json.dumps({"facts": facts, "results": results}, indent=1) + "\n", encoding="utf-8")
    for result in results:
        print("  ".join(f"{name} {value}" for name, value in result.items() if name != "losses"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
