"""The main job on this machine's GPUs, under every launcher and template: does each run, with what losses, speed and memory?

    python benchmarks/main_job.py --output benchmarks/results/main_job.json [--only fsdp-1b,zero3-1b] [--num_gpus 2]

A Llama of 1.2 billion parameters (Llama-3.2-1B's shape, untied) at sequence 2048 for 50 steps under zero3 and full_shard, a resume from
step 25 of each, the time training stands still for a save, and a small Llama for 12 steps under every other template and launcher.
Text: the Python standard library's sources, byte by byte. Prints a table last.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
SHAPE_1B = (
    "hidden_size=2048,intermediate_size=8192,num_hidden_layers=16,num_attention_heads=32,num_key_value_heads=8,head_dim=64,"
    "vocab_size=128256,max_position_embeddings=8192"
)
SHAPE_SMALL = "hidden_size=512,intermediate_size=1536,num_hidden_layers=4,num_attention_heads=8,num_key_value_heads=4"
PYTHON = sys.executable


def launcher(kind: str, template: str, num_gpus: int, port: int) -> list[str]:
    """The official launcher's command for this machine."""
    script = str(ROOT / "harness" / "run_clm.py")
    if kind == "deepspeed":
        return [PYTHON, "-m", "deepspeed.launcher.runner", f"--num_gpus={num_gpus}", "--master_port", str(port), script]
    if kind == "accelerate":
        config = ["--config_file", str(ROOT / "fsdp_configs" / f"{template}.yaml"), "--num_processes", str(num_gpus)]
        return [PYTHON, "-m", "accelerate.commands.launch", *config, "--main_process_port", str(port), script]
    if kind == "torchrun":
        return [PYTHON, "-m", "torch.distributed.run", "--nproc_per_node", str(num_gpus), "--master_port", str(port), script]
    return [PYTHON, script]


def arguments(shape: str, sequence: int, steps: int, micro: int, output: Path, cache: Path, more: list[str]) -> list[str]:
    stdlib = Path(sysconfig.get_path("stdlib"))
    files = sorted(str(path) for path in stdlib.glob("*.py"))[:120]
    return [
        *("--model_type", "llama", "--config_overrides", shape, "--tokenizer_name", "bytes", "--train_file", *files),
        *("--block_size", str(sequence), "--per_device_train_batch_size", str(micro), "--max_steps", str(steps)),
        *("--logging_steps", "5", "--learning_rate", "3e-4", "--lr_scheduler_type", "cosine", "--warmup_steps", "5"),
        *("--precision", "bf16", "--data_cache_dir", str(cache), "--output_dir", str(output), "--validation_split_percentage", "0"),
        *("--auto_memory", "off", *more),
    ]


def jobs(num_gpus: int) -> list[dict[str, Any]]:
    big = {"shape": SHAPE_1B, "sequence": 2048, "steps": 50, "micro": 4}
    save = ["--save_steps", "25", "--save_final", "False", "--activation_checkpointing", "none"]
    small = {"shape": SHAPE_SMALL, "sequence": 1024, "steps": 12, "micro": 4, "num_gpus": num_gpus}
    ds = lambda name: ["--deepspeed", str(ROOT / "ds_configs" / f"{name}.json")]  # noqa: E731
    result = [
        {"name": "fsdp-1b", "kind": "accelerate", "template": "full_shard", "more": save, **big},
        {"name": "fsdp-1b-resumed", "kind": "accelerate", "template": "full_shard", "more": save, "resume_of": "fsdp-1b", **big},
        {"name": "zero3-1b", "kind": "deepspeed", "template": "zero3", "more": [*save, *ds("zero3")], **big},
        {
            "name": "zero3-1b-resumed",
            "kind": "deepspeed",
            "template": "zero3",
            "more": [*save, *ds("zero3")],
            "resume_of": "zero3-1b",
            **big,
        },
    ]
    for name in ("shard_grad_op", "full_shard_offload"):
        result.append({"name": name, "kind": "accelerate", "template": name, "more": [], **small})
    for name in ("zero1", "zero2", "zero2_offload", "zero3_offload"):
        result.append({"name": name, "kind": "deepspeed", "template": name, "more": ds(name), **small})
    fp16 = ["--deepspeed", str(ROOT / "tests" / "cases" / "user_zero3_fp16_offload.json"), "--precision", "fp16"]
    # A user's own file decides learning rate, schedule and clipping: no flag of these may be typed.
    result.append({"name": "user-fp16-offload", "kind": "deepspeed", "template": "", "more": fp16, "untyped": True, **small})
    result.append({"name": "ddp", "kind": "torchrun", "template": "", "more": [], **small})
    result.append(
        {"name": "fsdp-fp16", "kind": "torchrun", "template": "", "more": ["--fsdp", "full_shard", "--precision", "fp16"], **small}
    )
    result.append({"name": "ddp-fp16", "kind": "torchrun", "template": "", "more": ["--precision", "fp16"], **small})
    result.append({"name": "one-gpu", "kind": "python", "template": "", "more": [], **{**small, "micro": 4 * num_gpus}})
    if num_gpus % 2 == 0 and num_gpus >= 4:
        result.append({"name": "hybrid_shard", "kind": "accelerate", "template": "hybrid_shard", "more": [], **small})
    return result


def run(job: dict[str, Any], num_gpus: int, folder: Path, port: int, timeout_s: float) -> dict[str, Any]:
    from benchmarks.launched import log_end, read_rows
    from benchmarks.launched import run as run_command

    output = folder / job["name"]
    if job.get("resume_of"):
        output = folder / job["resume_of"]
        shutil.rmtree(output / "checkpoint-50", ignore_errors=True)
    command = launcher(job["kind"], job["template"], num_gpus, port) + arguments(
        job["shape"], job["sequence"], job["steps"], job["micro"], output, folder / "cache", job["more"]
    )
    if job.get("untyped"):
        for flag in ("--learning_rate", "--lr_scheduler_type", "--warmup_steps", "--precision"):
            place = command.index(flag)
            del command[place : place + 2]
    environment = {"CUDA_VISIBLE_DEVICES": "0"} if job["kind"] == "python" else {}
    started, log = time.monotonic(), folder / f"{job['name']}.log"
    code = run_command(command, log, timeout_s, **environment)
    result: dict[str, Any] = {"name": job["name"], "code": code, "seconds": round(time.monotonic() - started, 1)}
    rows = read_rows(output)
    last_resume = max((index for index, row in enumerate(rows) if row.get("event") == "resume"), default=-1)
    if job.get("resume_of"):
        result["resumed_at_step"] = rows[last_resume]["step"] if last_resume >= 0 else None
        rows = rows[last_resume + 1 :]
    train = [row for row in rows if row.get("kind") == "train"]
    result["losses"] = {row["step"]: row["loss"] for row in train}
    if train:
        steady = train[len(train) // 2 :]
        result["tokens_per_second_per_gpu"] = round(sum(row["tokens_per_second_per_gpu"] for row in steady) / len(steady), 1)
        result["mfu"] = train[-1].get("mfu")
        result["peak_memory_gib"] = max(row.get("peak_memory_gib") or 0 for row in train)
    result["saves_stood_still_s"] = [row["stood_still_s"] for row in rows if row.get("event") == "save_started"]
    result["saves_complete_after_s"] = [row["duration_s"] for row in rows if row.get("event") == "save"]
    text = log.read_text(errors="replace")
    result["engine_line"] = next((line.strip() for line in text.splitlines() if "engine=" in line and "num_processes=" in line), "")
    if code != 0:
        result["tail"] = log_end(log, 1500)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--num_gpus", type=int, default=None)
    parser.add_argument("--timeout_s", type=float, default=240)
    options = parser.parse_args()
    import torch
    import transformers

    num_gpus = options.num_gpus or torch.cuda.device_count()
    wanted = set(filter(None, options.only.split(",")))
    folder = Path(tempfile.mkdtemp(prefix="main-job-"))
    facts = {
        "card": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none",
        "num_gpus": num_gpus,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "command": " ".join(sys.argv),
    }
    results: list[dict[str, Any]] = []
    for index, job in enumerate(jobs(num_gpus)):
        if wanted and job["name"] not in wanted:
            continue
        results.append(run(job, num_gpus, folder, 29600 + index, options.timeout_s))
        print(json.dumps({key: value for key, value in results[-1].items() if key != "losses"}), flush=True)
        Path(options.output).write_text(json.dumps({"facts": facts, "results": results}, indent=1))
    print(facts)
    print(f"{'job':20s} {'code':>7s} {'s':>6s} {'tok/s/gpu':>10s} {'mfu':>7s} {'GiB':>7s}  first loss -> last loss; {'engine'}")
    for row in results:
        losses = list(row["losses"].values())
        span = f"{losses[0]:.4f} -> {losses[-1]:.4f}" if losses else "-"
        print(
            f"{row['name']:20s} {row['code']!s:>7s} {row['seconds']:6.1f} {row.get('tokens_per_second_per_gpu', 0):10.1f} "
            f"{row.get('mfu') or 0:7.3f} {row.get('peak_memory_gib', 0):7.2f}  {span}; {row['engine_line'][-70:]}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
