"""Tokens per second of this harness beside what people would pick instead, on the same cards, in one run.

    python benchmarks/throughput.py --output benchmarks/results/throughput.json [--sizes 1B,3B] [--only fsdp,trainer-fsdp] [--num_gpus 2]

Every system trains the same Llama (built from a config, untied, float32 masters, bf16 arithmetic) on the same random tokens, sequence
4096, with the same samples in an optimizer step, each at its best micro-batch out of a short list:

    fsdp, fsdp-fp8, zero3        harness/run_clm.py, as it is by default
    trainer-fsdp, trainer-zero3  transformers' Trainer: FSDP2 through accelerate's YAML, ZeRO-3 through the same DeepSpeed JSON
    torchtitan                   where it is installed: compiled, without activation checkpointing, as ours

A figure is the mean of the last half of the steps. Each run is a process group of its own with a time limit, and results are written as
they come. MFU = tokens/s x (6 x parameters that multiply, the head among them + 6 x layers x heads x head_dim x sequence) / peak FLOP/s:
causal attention counts once, recomputation does not.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16},
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "head_dim": 64},
    "3B": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24, "head_dim": 128},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "head_dim": 128},
}
SYSTEMS = ("fsdp", "trainer-fsdp", "zero3", "trainer-zero3", "torchtitan", "fsdp-fp8")
# Tried in this order; after an out-of-memory the rest of a system's list is left out. More than this was never faster at these shapes.
MICRO_BATCHES = {"tiny": [2], "1B": [4], "3B": [2], "8B": [1, 2]}


def shape_of(size: str) -> dict[str, Any]:
    small = size == "tiny"
    return {
        **SHAPES[size],
        "num_key_value_heads": 2 if small else 8,
        "vocab_size": 512 if small else 128256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    }


# ------------------------------------------------------------------------------------------------ one system, in its own processes


def random_rows(options: argparse.Namespace) -> list[dict[str, list[int]]]:
    import numpy as np

    vocabulary = shape_of(options.size)["vocab_size"]
    rows = np.random.default_rng(0).integers(0, vocabulary, (options.samples * options.num_gpus, options.sequence))
    return [{"input_ids": row.tolist(), "labels": row.tolist()} for row in rows] * options.steps


def run_ours(options: argparse.Namespace, system: str) -> dict[str, Any]:
    """`run_clm.train` on the rows; figures from its metrics."""
    from harness.run_clm import train

    output = Path(options.work) / "run"
    engine = {"deepspeed": str(ROOT / "ds_configs" / "zero3.json")} if system.startswith("zero3") else {"fsdp": "full_shard"}
    config: dict[str, Any] = {
        "model_type": "llama",
        "config_overrides": ",".join(f"{name}={str(value).lower()}" for name, value in shape_of(options.size).items()),
        "tokenizer_name": "bytes",
        "block_size": options.sequence,
        "per_device_train_batch_size": options.micro_batch,
        "gradient_accumulation_steps": options.samples // options.micro_batch,
        "max_steps": options.steps,
        "logging_steps": options.steps // 2,
        "learning_rate": 1e-4,
        "precision": "bf16",
        "save_strategy": "no",
        "save_final": False,
        "validation_split_percentage": 0,
        "gpu_monitor_interval_s": 0,
        "overwrite_output_dir": True,
        "output_dir": str(output),
        **engine,
        **({"fp8": "tensorwise"} if system.endswith("fp8") else {}),
    }
    code = train(config, train_dataset=random_rows(options))
    assert code == 0, f"the run ended with {code}"
    lines = (output / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["kind"] == "train"]
    downs = [row["change"] for row in map(json.loads, lines) if row.get("event") == "oom"]
    note = "; ".join(downs)
    return {"step_s": rows[-1]["step_time_s"], "peak_gib": rows[-1].get("peak_memory_gib"), "loss": rows[-1]["loss"], "note": note}


def run_trainer(options: argparse.Namespace, system: str) -> dict[str, Any]:
    """transformers' Trainer with its defaults, timed from the end of half of the steps to the end of all."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainerCallback, TrainingArguments

    on_gpu = torch.cuda.is_available()

    class Clock(TrainerCallback):
        at_half_s = seconds = 0.0

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step in (options.steps // 2, options.steps):
                if on_gpu:
                    torch.cuda.synchronize()
                now = time.perf_counter()
                self.seconds, self.at_half_s = now - self.at_half_s, now

    more: dict[str, Any] = {"deepspeed": str(ROOT / "ds_configs" / "zero3.json")} if system == "trainer-zero3" else {}
    arguments = TrainingArguments(
        output_dir=str(Path(options.work) / "run"),
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=options.samples // options.micro_batch,
        max_steps=options.steps,
        learning_rate=1e-4,
        bf16=True,
        save_strategy="no",
        report_to="none",
        logging_steps=options.steps,
        disable_tqdm=True,
        use_cpu=not on_gpu,
        **more,
    )
    if system == "trainer-zero3" and not on_gpu:
        import deepspeed

        deepspeed.init_distributed("gloo")  # on a GPU the Trainer does it
    torch.manual_seed(0)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    with device:
        model = AutoModelForCausalLM.from_config(LlamaConfig(**shape_of(options.size), use_cache=False), dtype=torch.float32)
    clock = Clock()
    trainer = Trainer(model=model, args=arguments, train_dataset=random_rows(options), callbacks=[clock])  # type: ignore[arg-type]
    trainer.train()
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    loss = next(row["loss"] for row in trainer.state.log_history if "loss" in row)
    return {"step_s": clock.seconds / (options.steps - options.steps // 2), "peak_gib": peak, "loss": loss, "note": ""}


def run_torchtitan(options: argparse.Namespace, system: str) -> dict[str, Any]:
    """torchtitan's own loop, its text loader replaced by the rows."""
    import torch
    from torchtitan.models.llama3 import TransformerModelArgs, llama3_args
    from torchtitan.train import Trainer

    shape = shape_of(options.size)
    plain_size = int(2 * 4 * shape["hidden_size"] / 3)  # torchtitan's feed-forward before its factor, then rounded up
    llama3_args["benchmark"] = TransformerModelArgs(
        dim=shape["hidden_size"],
        n_layers=shape["num_hidden_layers"],
        n_heads=shape["num_attention_heads"],
        n_kv_heads=shape["num_key_value_heads"],
        vocab_size=shape["vocab_size"],
        ffn_dim_multiplier=(shape["intermediate_size"] - 8) / plain_size,
        multiple_of=min(1024, shape["intermediate_size"]),
        rope_theta=500000,
    )
    words = [
        *("--model.name", "llama3", "--model.flavor", "benchmark", "--model.hf_assets_path", _tokenizer_folder(options)),
        *("--training.local_batch_size", str(options.micro_batch), "--training.global_batch_size", str(options.samples * options.num_gpus)),
        *("--training.seq_len", str(options.sequence), "--training.steps", str(options.steps), "--training.dataset", "c4_test"),
        *("--training.dataset_path", str(Path(options.work) / "text"), "--optimizer.lr", "1e-4", "--metrics.log_freq", "1"),
        *("--compile.enable", "--activation_checkpoint.mode", "none", "--job.dump_folder", options.work),
    ]
    from torchtitan.config import ConfigManager

    trainer = Trainer(ConfigManager().parse_args(words))
    times: list[float] = []
    inner = trainer.train_step

    def train_step(*args: Any, **kwargs: Any) -> Any:
        inner(*args, **kwargs)
        torch.cuda.synchronize()
        times.append(time.perf_counter())

    trainer.train_step = train_step  # type: ignore[method-assign]
    trainer.train()
    half = options.steps // 2
    seconds = (times[-1] - times[half - 1]) / (options.steps - half)
    return {"step_s": seconds, "peak_gib": torch.cuda.max_memory_allocated() / 2**30, "loss": None, "note": torchtitan_note()}


def torchtitan_note() -> str:
    return f"torchtitan {importlib.metadata.version('torchtitan')}"


def _tokenizer_folder(options: argparse.Namespace) -> str:
    """A small tokenizer and text where torchtitan looks for them; written by every rank alike, under its own name."""
    from harness.modeling import byte_tokenizer

    rank = os.environ.get("RANK", "0")
    folder = Path(options.work) / f"tokenizer-{rank}"
    byte_tokenizer().save_pretrained(folder)
    if rank == "0":
        text = Path(options.work) / "text"
        text.mkdir(exist_ok=True)
        lines = (json.dumps({"text": "the quick brown fox jumps over the lazy dog " * 200}) + "\n" for _ in range(500))
        (text / "data.json").write_text("".join(lines))
    while not (Path(options.work) / "text" / "data.json").exists():
        time.sleep(0.1)
    return str(folder)


def child(options: argparse.Namespace) -> int:
    run = {"trainer-fsdp": run_trainer, "trainer-zero3": run_trainer, "torchtitan": run_torchtitan}.get(options.child, run_ours)
    result = run(options, options.child)
    if os.environ.get("RANK", "0") == "0":
        (Path(options.work) / "result.json").write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # nothing is left to do, and some libraries' shutdown waits for others


# ---------------------------------------------------------------------------------------------------------------- all of them


def command(system: str, options: argparse.Namespace, size: str, micro_batch: int, work: Path, port: int) -> list[str]:
    values = {"work": work, "size": size, "micro_batch": micro_batch, "samples": options.samples, "sequence": options.sequence}
    values |= {"steps": options.steps, "num_gpus": options.num_gpus}
    script = [
        str(Path(__file__).resolve()),
        "--child",
        system,
        *(word for name, value in values.items() for word in (f"--{name}", str(value))),
    ]
    if system == "trainer-fsdp":
        launch = ["-m", "accelerate.commands.launch", "--config_file", str(ROOT / "fsdp_configs" / "full_shard.yaml")]
        launch += ["--mixed_precision", "bf16", "--num_processes", str(options.num_gpus), "--main_process_port", str(port)]
    else:
        launch = ["-m", "torch.distributed.run", "--nproc_per_node", str(options.num_gpus), "--master_port", str(port)]
    return [sys.executable, *launch, *script]


def measure(system: str, options: argparse.Namespace, size: str, micro_batch: int, port: int) -> dict[str, Any]:
    """One run. The result has "tokens_per_second_per_gpu", or "failure" and the end of the output."""
    work = Path(tempfile.mkdtemp(prefix="throughput-"))
    row: dict[str, Any] = {"system": system, "size": size, "micro_batch": micro_batch}
    if system == "torchtitan" and importlib.util.find_spec("torchtitan") is None:
        return row | {"failure": "not installed"}
    if system == "fsdp-fp8" and importlib.util.find_spec("torchao") is None:
        return row | {"failure": "torchao is not installed"}
    started = time.monotonic()
    with open(work / "log", "w", encoding="utf-8") as log:
        process = subprocess.Popen(
            command(system, options, size, micro_batch, work, port), stdout=log, stderr=subprocess.STDOUT, start_new_session=True, cwd=work
        )
        try:
            code: int | str = process.wait(options.timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = f"no result within {options.timeout_s:.0f} s"
    row["seconds"] = round(time.monotonic() - started, 1)
    result = work / "result.json"
    if not result.exists():
        text = (work / "log").read_text(errors="replace")
        out_of_memory = "OutOfMemoryError" in text or "out of memory" in text
        return row | {"failure": "out of memory" if out_of_memory else f"ended with {code}", "output": first_error(text)}
    found = json.loads(result.read_text())
    speed = options.samples * options.sequence / found["step_s"]
    row |= {"tokens_per_second_per_gpu": round(speed, 1), "peak_gib": round(found["peak_gib"] or 0, 1)}
    return row | {"loss": found["loss"], "note": found["note"], "mfu": mfu(size, options.sequence, speed)}


def first_error(text: str) -> str:
    """The lines before the first exception's message, and it; the launcher's own traceback comes after."""
    lines = text.splitlines()
    at = next((index for index, line in enumerate(lines) if re.match(r"(\[rank\d+\]: )?[\w.]*(Error|Exception)\b", line)), len(lines))
    return "\n".join(lines[max(0, at - 12) : at + 3])[-3000:]


def mfu(size: str, sequence: int, tokens_per_second: float) -> float | None:
    import torch
    from transformers import LlamaConfig

    from harness.monitor import model_flops_per_token, peak_flops

    peak = peak_flops(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else None
    if peak is None:
        return None
    shape = shape_of(size)
    hidden, kv = shape["hidden_size"], shape["num_key_value_heads"] * shape["head_dim"]
    queries = shape["num_attention_heads"] * shape["head_dim"]
    layer = hidden * (2 * queries + 2 * kv + 3 * shape["intermediate_size"])
    parameters = shape["num_hidden_layers"] * layer + 2 * shape["vocab_size"] * hidden
    return round(tokens_per_second * model_flops_per_token(LlamaConfig(**shape), sequence, parameters) / peak, 4)


def best(rows: list[dict[str, Any]], system: str, size: str) -> dict[str, Any] | None:
    """The fastest run of a system; where none has a figure, its last failure."""
    own = [row for row in rows if (row["system"], row["size"]) == (system, size)]
    good = [row for row in own if "failure" not in row]
    return max(good, key=lambda row: row["tokens_per_second_per_gpu"]) if good else (own[-1] if own else None)


RIVALS = {"fsdp": "trainer-fsdp", "zero3": "trainer-zero3", "fsdp-fp8": "fsdp", "trainer-fsdp": "", "trainer-zero3": "", "torchtitan": ""}


def table(rows: list[dict[str, Any]]) -> str:
    """The best run of each system, in Markdown, and how much faster ours are than their rivals."""
    lines = [
        "| model | system | micro-batch | tokens/s per GPU | MFU | peak GiB | against |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for size in dict.fromkeys(row["size"] for row in rows):
        for system in SYSTEMS:
            row = best(rows, system, size)
            if row is None:
                continue
            if "failure" in row:
                lines.append(f"| {size} | {system} | {row['micro_batch']} | {row['failure']} | | | |")
                continue
            rival = best(rows, RIVALS[system], size) if RIVALS[system] else None
            speed = row["tokens_per_second_per_gpu"]
            against = f"{speed / rival['tokens_per_second_per_gpu']:.2f} x {rival['system']}" if rival and "failure" not in rival else ""
            share = "" if row["mfu"] is None else f"{100 * row['mfu']:.1f} %"
            lines.append(f"| {size} | {system} | {row['micro_batch']} | {speed:,.0f} | {share} | {row['peak_gib']} | {against} |")
    return "\n".join(lines)


def facts(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    packages = ("torch", "transformers", "accelerate", "deepspeed", "torchao", "liger-kernel", "torchtitan")
    versions = {name: importlib.metadata.version(name) for name in packages if importlib.util.find_spec(name.replace("-", "_"))}
    return {
        "card": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none",
        "num_gpus": options.num_gpus,
        "sequence": options.sequence,
        "samples_per_step_and_gpu": options.samples,
        "steps": options.steps,
        "versions": versions,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output")
    parser.add_argument("--sizes", default="1B,3B")
    parser.add_argument("--only", default=",".join(SYSTEMS))
    parser.add_argument("--micro_batches", default="", help="instead of the short list: 2,4")
    parser.add_argument("--num_gpus", type=int, default=None)
    parser.add_argument("--samples", type=int, default=8, help="of each GPU in an optimizer step")
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--timeout_s", type=float, default=150, help="of one run")
    parser.add_argument("--time_limit_s", type=float, default=1e9, help="no run is started after so many seconds")
    for name in ("child", "work", "size", "micro_batch"):
        parser.add_argument(f"--{name}", type=int if name == "micro_batch" else str, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(options)
    import torch

    options.num_gpus = options.num_gpus or torch.cuda.device_count()
    started, about = time.monotonic(), facts(options)
    rows: list[dict[str, Any]] = []
    for size in options.sizes.split(","):
        sizes = [int(word) for word in options.micro_batches.split(",") if word] or MICRO_BATCHES[size]
        for system in options.only.split(","):
            for micro_batch in sizes:
                if time.monotonic() - started > options.time_limit_s:
                    break
                rows.append(measure(system, options, size, micro_batch, 29400 + len(rows)))
                print(json.dumps({name: value for name, value in rows[-1].items() if name != "output"}), flush=True)
                if options.output:
                    Path(options.output).write_text(json.dumps({"facts": about, "results": rows}, indent=1) + "\n")
                if "failure" in rows[-1]:
                    print(rows[-1].get("output", "")[-1500:], flush=True)
                    break
    print(json.dumps(about))
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
