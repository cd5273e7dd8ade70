"""From the start of the process to the end of the first optimizer step: this harness and transformers' Trainer, from local safetensors.

    python benchmarks/startup.py --output benchmarks/results/startup.json [--size 8B] [--num_gpus 2] [--only harness,trainer]

First random weights in bf16 are written into a temporary folder, in the shards that `save_pretrained` makes (16 GB for 8B; they are then in
the page cache for all). Then each system trains one step of one sample a card on them, under FSDP2 by `accelerate launch` on
fsdp_configs/full_shard.yaml, on the same text:

    harness        harness/run_clm.py, its caches (compiled layers, tokenised text, the planner's) empty
    harness-again  the same command a second time: the caches are filled
    trainer        transformers' Trainer on a model of `from_pretrained`: every rank reads all weights
    trainer-rank0  the same with accelerate's fsdp_cpu_ram_efficient_loading: rank 0 reads, the others get theirs from it

For the harness the seconds are told apart as its log does. Prints a table last.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks import launched  # noqa: E402
from benchmarks.llama_shapes import SHAPES, shape_of  # noqa: E402

SYSTEMS = ("harness", "harness-again", "trainer", "trainer-rank0")
_PHASE = re.compile(r"^[\d-]+ [\d:]+ ([a-z ]+): done in ([\d.]+) s", re.MULTILINE)


def write_weights(folder: Path, size: str) -> None:
    """A Llama with random weights in bf16, and a tokenizer, as `save_pretrained` writes them."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from harness.modeling import byte_tokenizer

    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**shape_of(size)), dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="5GB")
    byte_tokenizer().save_pretrained(folder)


def write_text(path: Path, num_bytes: int) -> None:
    """So much of the Python standard library's sources."""
    text = b"".join(file.read_bytes() for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    path.write_bytes((text * (num_bytes // len(text) + 1))[:num_bytes])


def train_with_trainer(task: dict[str, Any]) -> None:
    """One step with the Trainer; on rank 0 the time of its end is written to the task's "result"."""
    import torch
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    on_gpu = torch.cuda.is_available()

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if on_gpu:
                torch.cuda.synchronize()
            if state.is_world_process_zero:
                peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None
                Path(task["result"]).write_text(json.dumps({"time_s": time.time(), "peak_memory_gib": peak}))

    block = task["sequence"]
    data = torch.frombuffer(bytearray(Path(task["text"]).read_bytes()), dtype=torch.uint8).long()
    rows = data[: len(data) // block * block].view(-1, block)
    model = AutoModelForCausalLM.from_pretrained(task["weights"])
    model.config.use_cache = False
    arguments = TrainingArguments(
        output_dir=task["output"],
        per_device_train_batch_size=1,
        max_steps=1,
        bf16=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not on_gpu,
    )
    samples = [{"input_ids": row, "labels": row} for row in rows]
    Trainer(model=model, args=arguments, train_dataset=samples, callbacks=[Watch()]).train()  # type: ignore[arg-type]
    os._exit(0)


def command(system: str, options: argparse.Namespace, folder: Path, output: Path) -> list[str]:
    """The launch command of a system."""
    yaml = str(ROOT / "fsdp_configs" / "full_shard.yaml")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", yaml, "--mixed_precision", "bf16"]
    launch += ["--num_processes", str(options.num_gpus), "--main_process_port", str(launched.free_port())]
    launch += ["--fsdp_cpu_ram_efficient_loading", "true"] if system == "trainer-rank0" else []
    if system.startswith("trainer"):
        task = {"weights": str(folder / "weights"), "text": str(folder / "text.txt"), "sequence": options.sequence}
        task |= {"output": str(output), "result": str(output / "first_step.json")}
        return [*launch, str(Path(__file__).resolve()), "--task", json.dumps(task)]
    launch += [str(ROOT / "harness" / "run_clm.py"), "--model_name_or_path", str(folder / "weights")]
    launch += ["--train_file", str(folder / "text.txt"), "--block_size", str(options.sequence), "--per_device_train_batch_size", "1"]
    launch += ["--max_steps", "1", "--logging_steps", "1", "--precision", "bf16", "--save_strategy", "no", "--save_final", "False"]
    launch += ["--validation_split_percentage", "0", "--gpu_monitor_interval_s", "0", "--data_cache_dir", str(folder / "data")]
    return [*launch, "--output_dir", str(output)]


def parts(log: str, row: dict[str, Any], started_s: float) -> dict[str, float]:
    """Where the harness's seconds went, so that they add up: until its log begins (launcher, imports, processes find each other), until the
    data (transformers' imports, the empty model), the phases of its log, the first step, and the rest.

    Args:
        log: train.log; its times are whole seconds.
        row: the train row of step 1.
        started_s: wall clock when the launcher was started.
    """

    def time_s(line: str) -> float:
        return datetime.datetime.strptime(line[:19], "%Y-%m-%d %H:%M:%S").timestamp()

    began_s = time_s(log)
    data_s = next((time_s(line) for line in log.splitlines() if line.endswith(" data: start")), began_s)
    found = {"before the log": max(0.0, began_s - started_s), "before the data": data_s - began_s}
    found |= {name: float(seconds) for name, seconds in _PHASE.findall(log) if name not in ("training", "export")}
    found["first step"] = float(row["step_time_s"])
    found["rest"] = row["time_s"] - started_s - sum(found.values())
    return {name: round(seconds, 2) for name, seconds in found.items()}


def measure(system: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One start of a system: "first_step_s", or "failure" and the end of the output."""
    output, log = folder / system, folder / f"{system}.log"
    output.mkdir()
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"), "HARNESS_CACHE": str(folder / "planner")}
    started_s = time.time()
    code = launched.run(
        command(system, options, folder, output), log, options.timeout_s, **(caches if system.startswith("harness") else {})
    )
    result: dict[str, Any] = {"system": system, "seconds_to_the_end": round(time.time() - started_s, 1)}
    if system.startswith("trainer"):
        first = output / "first_step.json"
        row = json.loads(first.read_text()) if first.exists() else None
    else:
        row = next((row for row in launched.read_rows(output) if row.get("kind") == "train"), None)
    if row is None:
        return result | {"failure": f"ended with {code}", "output": launched.log_end(log, 2000)}
    result |= {"first_step_s": round(row["time_s"] - started_s, 1), "peak_gib": row.get("peak_memory_gib")}
    if system.startswith("harness"):
        result["parts_s"] = parts((output / "train.log").read_text(encoding="utf-8"), row, started_s)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--size", default="8B", choices=SHAPES)
    parser.add_argument("--num_gpus", type=int, default=None)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--only", default=",".join(SYSTEMS))
    parser.add_argument("--timeout_s", type=float, default=120, help="of one start")
    parser.add_argument("--time_limit_s", type=float, default=1e9, help="no start is begun after so many seconds")
    for name in ("task", "weights"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        train_with_trainer(json.loads(options.task))
    if options.weights:
        write_weights(Path(options.weights), options.size)
        return 0
    import torch

    options.num_gpus = options.num_gpus or torch.cuda.device_count() or 1
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="startup-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        writer = [sys.executable, str(Path(__file__).resolve()), "--size", options.size, "--weights", str(folder / "weights")]
        if launched.run(writer, folder / "weights.log", options.timeout_s) != 0:
            print(launched.log_end(folder / "weights.log", 2000), file=sys.stderr)
            return 1
        write_text(folder / "text.txt", 4 * options.num_gpus * options.sequence)
        files = list((folder / "weights").glob("*.safetensors"))
        about = {**launched.card_facts(options.num_gpus, sys.argv), "size": options.size, "sequence": options.sequence}
        about |= {"num_files": len(files), "weights_gb": round(sum(file.stat().st_size for file in files) / 1e9, 2)}
        about["weights_written_s"] = round(time.monotonic() - begun, 1)
        print(json.dumps(about), flush=True)
        results: list[dict[str, Any]] = []
        for system in options.only.split(","):
            if time.monotonic() - begun > options.time_limit_s:
                break
            results.append(measure(system, options, folder))
            print(json.dumps(results[-1]), flush=True)
            if options.output:
                options.output.write_text(json.dumps({"facts": about, "results": results}, indent=1) + "\n")
    print("| system | seconds to the end of the first step | peak GiB | of these |\n| --- | --- | --- | --- |")
    for row in results:
        of_these = ", ".join(f"{part} {seconds:.1f}" for part, seconds in row.get("parts_s", {}).items())
        print(f"| {row['system']} | {row.get('first_step_s', row.get('failure'))} | {row.get('peak_gib')} | {of_these} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
