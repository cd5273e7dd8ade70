"""Predicted against real peak memory: short real runs of harness/run_clm.py on this machine's GPUs.

    python benchmarks/memory_prediction.py --output benchmarks/results/memory_prediction.json [--num_gpus 2] [--only ddp] [--budget_s 560]

Every row trains a model from scratch for 3 steps; "allocated" is torch.cuda.max_memory_allocated of the worst rank (from metrics.jsonl),
"used" is the most memory of one card that NVML shows for the run's processes. Runs go side by side (--jobs) while their high figures fit
on the cards together. Rows whose high figure does not fit are not started; a started row that runs out of memory is an error of the
planner's. Rows that --output already holds are not run again, so one file can be filled by several calls. Prints a table last.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __package__ in (None, ""):
    sys.path.insert(0, str(ROOT))

from benchmarks.launched import command_line, failure_of, free_port, log_end, read_rows  # noqa: E402
from harness.candidates import evaluate  # noqa: E402
from harness.engine_memory import GIB  # noqa: E402
from harness.ladder import MemorySettings  # noqa: E402
from harness.machine import detect_machine  # noqa: E402
from harness.memory import lora_request, measure  # noqa: E402
from harness.model_shape import EngineName, Measured, RunShape  # noqa: E402
from harness.step_time import Hardware  # noqa: E402

_LLAMA = "num_key_value_heads=8,vocab_size=128256,max_position_embeddings=8192"
MODELS: dict[str, tuple[str, str]] = {
    "1b": (
        "llama",
        f"hidden_size=2048,intermediate_size=8192,num_hidden_layers=16,num_attention_heads=32,head_dim=64,tie_word_embeddings=true,{_LLAMA}",
    ),
    "3b": (
        "llama",
        f"hidden_size=3072,intermediate_size=8192,num_hidden_layers=28,num_attention_heads=24,head_dim=128,tie_word_embeddings=true,{_LLAMA}",
    ),
    "8b": ("llama", f"hidden_size=4096,intermediate_size=14336,num_hidden_layers=32,num_attention_heads=32,head_dim=128,{_LLAMA}"),
    "qwen": (
        "qwen3",
        "hidden_size=2048,intermediate_size=6144,num_hidden_layers=28,num_attention_heads=16,num_key_value_heads=8,head_dim=128,"
        "vocab_size=151936,tie_word_embeddings=true,max_position_embeddings=8192",
    ),
    "moe": (
        "mixtral",
        "hidden_size=1024,intermediate_size=3584,num_hidden_layers=12,num_attention_heads=16,num_key_value_heads=4,"
        "num_local_experts=8,num_experts_per_tok=2,vocab_size=32000,max_position_embeddings=8192",
    ),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One run. `engine` is the planner's; `template` is what the launcher gets ("" where it needs none)."""

    name: str
    model: str
    engine: EngineName
    micro: int
    mode: str = "none"
    chunk: int = 1024
    block: int = 2048
    accumulation: int = 1
    isolated: bool = False
    lora_r: int | None = None
    template: str = ""
    compiled: bool = False

    @property
    def settings(self) -> MemorySettings:
        offload = self.template.endswith("offload")
        return MemorySettings(
            self.micro,
            self.mode,  # type: ignore[arg-type]
            self.chunk,
            reshard_after_forward=self.template != "shard_grad_op",
            optimizer_offload=1.0 if offload and self.engine.startswith("zero") else 0.0,
            param_offload="cpu" if offload and self.engine in ("fsdp", "zero3") else "none",
        )

    def run_shape(self, num_gpus: int) -> RunShape:
        return RunShape(
            self.engine,
            num_gpus,
            self.block,
            samples_per_step=self.micro * self.accumulation,
            num_local_processes=num_gpus,
            lora=self.lora_r is not None,
            compiled_layers=self.compiled,
        )

    def request(self) -> dict[str, Any]:
        model_type, overrides = MODELS[self.model]
        return {
            "model_type": model_type,
            "config_overrides": overrides,
            "block_size": self.block,
            "weights": [self.run_shape(1).weights],
            "checkpointing": sorted({"none", self.mode}),
            "loss_chunks": [self.chunk],
            "documents": self.isolated,
            "lora": lora_request(self.lora_r or None),
        }


def rows() -> list[Row]:
    """The table: every engine with two models or more, every mode of checkpointing, loss and accumulation."""
    full, selective, none = "full", "selective", "none"
    return [
        Row("ddp-1b", "1b", "ddp", 4),
        Row("ddp-1b-full", "1b", "ddp", 8, full),
        Row("ddp-1b-selective", "1b", "ddp", 4, selective),
        Row("ddp-1b-whole-logits", "1b", "ddp", 2, none, 0),
        Row("ddp-1b-accumulation", "1b", "ddp", 2, accumulation=2),
        Row("ddp-1b-isolated", "1b", "ddp", 8, full, isolated=True),
        Row("ddp-qwen-full", "qwen", "ddp", 4, full),
        Row("ddp-moe", "moe", "ddp", 2),
        Row("ddp-3b-lora", "3b", "ddp", 2, full, lora_r=16),
        Row("fsdp-1b", "1b", "fsdp", 4, template="full_shard"),
        Row("fsdp-1b-isolated", "1b", "fsdp", 8, isolated=True, template="full_shard"),
        Row("fsdp-1b-no-reshard", "1b", "fsdp", 4, full, template="shard_grad_op"),
        Row("fsdp-1b-whole-logits", "1b", "fsdp", 2, none, 0, template="full_shard"),
        Row("fsdp-1b-offload", "1b", "fsdp", 4, full, template="full_shard_offload"),
        Row("fsdp-1b-long", "1b", "fsdp", 1, selective, block=8192, template="full_shard"),
        Row("fsdp-3b-full", "3b", "fsdp", 4, full, template="full_shard"),
        Row("fsdp-3b-accumulation", "3b", "fsdp", 1, selective, accumulation=3, template="full_shard"),
        Row("fsdp-qwen-selective", "qwen", "fsdp", 4, selective, template="full_shard"),
        Row("fsdp-moe-full", "moe", "fsdp", 4, full, template="full_shard"),
        Row("fsdp-1b-compiled", "1b", "fsdp", 4, template="full_shard", compiled=True),
        Row("fsdp-1b-full-compiled", "1b", "fsdp", 4, full, template="full_shard", compiled=True),
        Row("fsdp-8b-lora", "8b", "fsdp", 2, full, lora_r=16, template="full_shard"),
        Row("zero2-1b", "1b", "zero2", 4, template="zero2"),
        Row("zero2-1b-full", "1b", "zero2", 8, full, template="zero2"),
        Row("zero2-qwen-selective", "qwen", "zero2", 2, selective, template="zero2"),
        Row("zero2-3b-full", "3b", "zero2", 2, full, template="zero2"),
        Row("zero1-1b", "1b", "zero1", 4, template="zero1"),
        Row("zero3-1b", "1b", "zero3", 4, template="zero3"),
        Row("zero3-1b-accumulation", "1b", "zero3", 2, selective, accumulation=2, template="zero3"),
        Row("zero3-3b-full", "3b", "zero3", 4, full, template="zero3"),
        Row("zero3-qwen-full", "qwen", "zero3", 4, full, template="zero3"),
        Row("zero3-1b-offload", "1b", "zero3", 4, full, template="zero3_offload"),
        Row("zero2-1b-offload", "1b", "zero2", 4, full, template="zero2_offload"),
        Row("zero3-8b-lora", "8b", "zero3", 2, full, lora_r=16, template="zero3"),
        # No constant comes from these.
        Row("fsdp-moe-long", "moe", "fsdp", 1, selective, block=8192, accumulation=2, template="full_shard"),
        Row("fsdp-3b-lora", "3b", "fsdp", 4, selective, lora_r=16, template="full_shard"),
        Row("fsdp-qwen-offload", "qwen", "fsdp", 2, full, template="full_shard_offload"),
        Row("zero2-moe", "moe", "zero2", 2, selective, template="zero2"),
        Row("zero3-moe", "moe", "zero3", 4, template="zero3"),
        Row("zero3-3b-offload", "3b", "zero3", 2, full, template="zero3_offload"),
    ]


def command(row: Row, num_gpus: int, output: Path, cache: Path) -> list[str]:
    """The launcher's command line of a row."""
    script, port = str(ROOT / "harness" / "run_clm.py"), str(free_port())
    if row.engine == "fsdp":
        config = ["--config_file", str(ROOT / "fsdp_configs" / f"{row.template}.yaml"), "--num_processes", str(num_gpus)]
        head = [sys.executable, "-m", "accelerate.commands.launch", *config, "--main_process_port", port, script]
    elif row.engine.startswith("zero"):
        head = [sys.executable, "-m", "deepspeed.launcher.runner", f"--num_gpus={num_gpus}", "--master_port", port, script]
        head += ["--deepspeed", str(ROOT / "ds_configs" / f"{row.template}.json")]
    elif num_gpus > 1:
        head = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(num_gpus), "--master_port", port, script]
    else:
        head = [sys.executable, script]
    model_type, overrides = MODELS[row.model]
    files = sorted(str(path) for path in Path(sysconfig.get_path("stdlib")).glob("*.py"))[:120]
    return [
        *head,
        *("--model_type", model_type, "--config_overrides", overrides, "--tokenizer_name", "bytes", "--train_file", *files),
        *("--block_size", str(row.block), "--per_device_train_batch_size", str(row.micro), "--max_steps", "3", "--logging_steps", "1"),
        *("--gradient_accumulation_steps", str(row.accumulation), "--activation_checkpointing", row.mode),
        *("--loss_chunk_size", str(row.chunk), "--document_isolation", str(row.isolated), "--use_liger_kernel", "False"),
        *("--torch_compile", str(row.compiled), "--auto_memory", "off"),
        *("--precision", "bf16", "--attn_implementation", "sdpa", "--save_strategy", "no", "--save_final", "False"),
        *("--validation_split_percentage", "0", "--data_cache_dir", str(cache), "--output_dir", str(output), "--auto_memory", "off"),
        *(("--lora_r", str(row.lora_r)) if row.lora_r else ()),
    ]


class CardWatch(threading.Thread):
    """The most memory of one card that NVML shows for the descendants of a process, until it is stopped, bytes; 0 without NVML.

    `peak_bytes` is of its whole life, model loading and dry run included; `steady_bytes` from the first row of its log on.
    """

    def __init__(self, process_id: int, metrics: Path) -> None:
        super().__init__(daemon=True)
        self.process_id, self.metrics, self._over = process_id, metrics, threading.Event()
        self.peak_bytes = self.steady_bytes = 0

    def run(self) -> None:
        try:
            import psutil
            import pynvml

            pynvml.nvmlInit()
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            parent = psutil.Process(self.process_id)
            while not self._over.wait(0.1):
                trains = self.metrics.exists() and '"train"' in self.metrics.read_text(encoding="utf-8")
                own = {child.pid for child in parent.children(recursive=True)} | {self.process_id}
                for handle in handles:
                    shown = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
                    used = sum(int(process.usedGpuMemory or 0) for process in shown if process.pid in own)
                    self.peak_bytes = max(self.peak_bytes, used)
                    self.steady_bytes = max(self.steady_bytes, used if trains else 0)
        except Exception:  # no NVML, or the run has ended: the column keeps what was seen
            return

    def stop(self) -> None:
        self._over.set()
        self.join()


class Space:
    """Shares one card's memory among runs side by side: each waits until its high figure is free."""

    def __init__(self, free_bytes: int) -> None:
        self.free_bytes_at_start = self.free_bytes = free_bytes
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def taken(self, num_bytes: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self.free_bytes >= num_bytes)
            self.free_bytes -= num_bytes
        try:
            yield
        finally:
            with self._changed:
                self.free_bytes += num_bytes
                self._changed.notify_all()


def predictions(table: list[Row], num_gpus: int, workers: int) -> dict[str, Any]:
    """Candidate of every row by name; an exception where the model cannot be measured."""
    requests = {json.dumps(row.request(), sort_keys=True): row.request() for row in table}
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        futures = {key: pool.submit(measure, [request]) for key, request in requests.items()}
    result: dict[str, Any] = {}
    for row in table:
        try:
            measured: Measured = futures[json.dumps(row.request(), sort_keys=True)].result()
            result[row.name] = evaluate(row.settings, measured, row.run_shape(num_gpus), Hardware())
        except Exception as error:
            result[row.name] = error
    return result


def run_row(row: Row, num_gpus: int, folder: Path, timeout_s: float) -> dict[str, Any]:
    """Runs one row; what its log and its metrics say."""
    output = folder / row.name
    log_path = folder / f"{row.name}.log"
    environment = dict(os.environ, OMP_NUM_THREADS="4")
    if num_gpus == 1:
        environment.setdefault("CUDA_VISIBLE_DEVICES", "0")
    started = time.monotonic()
    with open(log_path, "w", encoding="utf-8") as log:
        process = subprocess.Popen(
            command(row, num_gpus, output, folder / "cache"),
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            cwd=ROOT,
            start_new_session=True,
        )
        watch = CardWatch(process.pid, output / "metrics.jsonl")
        watch.start()
        try:
            code: int | str = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = "timeout"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    watch.stop()
    records = read_rows(output)
    train = [record for record in records if record.get("kind") == "train"]
    text = log_path.read_text(encoding="utf-8", errors="replace")
    result = {
        "name": row.name,
        "code": code,
        "seconds": round(time.monotonic() - started, 1),
        "allocated_gib": max((record.get("peak_memory_gib") or 0.0 for record in train), default=0.0),
        "reserved_gib": max((record.get("peak_reserved_gib") or 0.0 for record in train), default=0.0),
        "phases": [line.strip() for line in text.splitlines() if "; GPU memory" in line],
        "used_gib": round((watch.steady_bytes or watch.peak_bytes) / GIB, 3),
        "used_at_start_gib": round(watch.peak_bytes / GIB, 3),
        "tokens_per_second_per_gpu": train[-1].get("tokens_per_second_per_gpu") if train else None,
        "out_of_memory": next((line.strip()[:400] for line in text.splitlines() if "out of memory" in line.lower()), False),
    }
    if code != 0:
        result["tail"] = failure_of(output) or log_end(log_path, 1500)
    shutil.rmtree(output, ignore_errors=True)
    return result


def with_prediction(result: dict[str, Any], candidate: Any, num_gpus: int) -> dict[str, Any]:
    """A result with the planner's figures and errors beside it."""
    estimate = candidate.estimate
    result |= {
        "predicted_allocated_gib": round(estimate.allocated_bytes / GIB, 3),
        "predicted_used_gib": [round(value / GIB, 3) for value in (estimate.low_bytes, estimate.expected_bytes, estimate.high_bytes)],
        "predicted_phase": estimate.peak_phase,
        "predicted_parts_gib": {key: round(value / GIB, 3) for key, value in estimate.parts.items()},
        "predicted_tokens_per_second_per_gpu": round(candidate.tokens_per_s / num_gpus, 1),
    }
    if result["allocated_gib"]:
        result["error"] = round(result["predicted_allocated_gib"] / result["allocated_gib"] - 1, 4)
    if result["used_gib"] and result["allocated_gib"]:
        result["used_error"] = round(result["predicted_used_gib"][1] / result["used_gib"] - 1, 4)
        result["high_is_enough"] = result["predicted_used_gib"][2] >= result["used_gib"]
    return result


def table_text(results: list[dict[str, Any]]) -> str:
    """All rows, then the summary."""
    columns = ("alloc", "pred", "err %", "used", "exp", "high")
    head = f"{'row':24s} {'code':>7s} " + " ".join(f"{column:>{6 if '%' in column else 7}s}" for column in columns)
    lines = [f"{head} {'tok/s':>8s} {'pred':>8s}  phase"]
    for row in results:
        used = row.get("predicted_used_gib") or [0.0] * 3
        lines.append(
            f"{row['name']:24s} {row['code']!s:>7s} {row.get('allocated_gib', 0):7.2f} {row.get('predicted_allocated_gib', 0):7.2f} "
            f"{100 * row.get('error', float('nan')):6.1f} {row.get('used_gib', 0):7.2f} {used[1]:7.2f} {used[2]:7.2f} "
            f"{row.get('tokens_per_second_per_gpu') or 0:8.0f} {row.get('predicted_tokens_per_second_per_gpu', 0):8.0f}  "
            f"{row.get('predicted_phase', row.get('reason', ''))}"
        )
    errors = [abs(row["error"]) for row in results if "error" in row]
    if errors:
        middle, worst = 100 * statistics.median(errors), 100 * max(errors)
        inside = sum(error <= 0.1 for error in errors)
        lines.append(f"{len(errors)} rows measured; error of allocated: median {middle:.1f} %, worst {worst:.1f} %; {inside} within 10 %")
    failed = ", ".join(row["name"] for row in results if row.get("out_of_memory")) or "none"
    low = ", ".join(row["name"] for row in results if row.get("high_is_enough") is False) or "none"
    lines.append(f"started because they fit, but out of memory: {failed}; above the high figure: {low}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--num_gpus", type=int, help="default: all of this machine")
    parser.add_argument("--only", default="", help="names, or beginnings of names, separated by commas")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--timeout_s", type=float, default=180, help="for one run")
    parser.add_argument("--memory_share", type=float, default=1.0, help="of a card, for the runs side by side")
    parser.add_argument("--budget_s", type=float, default=1e9, help="no run is started after this many seconds")
    parser.add_argument("--again", action="store_true", help="predict anew what --output holds, and start nothing")
    parser.add_argument("--predict_only", action="store_true", help="print the predictions and start nothing")
    options = parser.parse_args()
    started = time.monotonic()
    import torch

    machine = detect_machine()
    num_gpus = options.num_gpus or len(machine.gpus) or 1
    if not machine.gpus and not options.predict_only and not options.again:
        print("this machine has no GPU; --predict_only needs none", file=sys.stderr)
        return 2
    wanted = tuple(filter(None, options.only.split(",")))
    table = [row for row in rows() if not wanted or row.name.startswith(wanted)]
    kept = json.loads(options.output.read_text(encoding="utf-8")) if options.output.exists() else {"results": []}
    results: list[dict[str, Any]] = [row for row in kept["results"] if row.get("num_gpus") == num_gpus]
    others = [row for row in kept["results"] if row.get("num_gpus") != num_gpus]
    done = {row["name"] for row in results}
    todo = [row for row in table if row.name not in done]
    if options.again:
        todo, again = [], [row for row in table if row.name in done]
        predicted = predictions(again, num_gpus, max(1, machine.num_cpus // 2))
        for known in results:
            with_prediction(known, predicted[known["name"]], num_gpus)
        kept["results"] = [*others, *results]
        options.output.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    else:
        predicted = predictions(todo, num_gpus, max(1, machine.num_cpus // 2))
    facts = {"cards": [gpu.name for gpu in machine.gpus], "torch": torch.__version__, "command": command_line(sys.argv)}
    folder = Path(tempfile.mkdtemp(prefix="memory-prediction-"))
    space = Space(int(machine.min_gpu_memory_bytes * options.memory_share))

    def one(row: Row) -> dict[str, Any] | None:
        candidate = predicted[row.name]
        if isinstance(candidate, Exception):
            return {"name": row.name, "code": "no plan", "reason": str(candidate)[:300]}
        result: dict[str, Any] = {"name": row.name, "code": "-", "allocated_gib": 0.0, "used_gib": 0.0}
        high_bytes = int(candidate.estimate.high_bytes)
        if not options.predict_only and (
            high_bytes > space.free_bytes_at_start or candidate.estimate.host_bytes > machine.host_memory_bytes
        ):
            result["code"] = "too big"
        elif not options.predict_only:
            with space.taken(high_bytes):
                if time.monotonic() - started > options.budget_s:
                    return None
                result = run_row(row, num_gpus, folder, options.timeout_s)
        return with_prediction(result, candidate, num_gpus)

    try:
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            for done_row in concurrent.futures.as_completed([pool.submit(one, row) for row in todo]):
                if (result := done_row.result()) is None:
                    continue
                results.append({**result, "num_gpus": num_gpus})
                print(json.dumps({key: value for key, value in result.items() if key != "tail"}), flush=True)
                if not options.predict_only:
                    options.output.parent.mkdir(parents=True, exist_ok=True)
                    options.output.write_text(json.dumps({"facts": facts, "results": [*others, *results]}, indent=1), encoding="utf-8")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(table_text(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
