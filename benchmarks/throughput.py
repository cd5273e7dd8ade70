"""Tokens per second of this harness beside what people would pick instead, on the same cards, in one run.

    python benchmarks/throughput.py --output benchmarks/results/throughput.json [--sizes 1B,3B] [--only base] [--num_gpus 2] [--profile]

Every system trains the same Llama (built from a config, untied, float32 masters, bf16 arithmetic) on the same random tokens, sequence
4096, with the same samples in an optimizer step, each at its best micro-batch out of a short list. `--only` takes systems and groups:

    base           fsdp, fsdp-fp8, zero3        harness/run_clm.py, as it is by default
                   trainer-fsdp, trainer-zero3  transformers' Trainer: FSDP2 by accelerate's YAML, ZeRO-3 by the same DeepSpeed JSON
                   torchtitan                   where it is installed: compiled, without activation checkpointing, as ours
    lora           lora-fsdp, trainer-lora-fsdp: r 16 on every linear layer but the head, a base in bf16; the Trainer's through peft
    lora-one-card  lora-ddp, trainer-lora-ddp: the same where the whole base is on every card
    isolation      packed, isolated-varlen, isolated-mask, isolated-flex, isolated-flash: rows packed of documents (seeded lengths, half
                   below 500 tokens), which see each other or not; the attention that ran is in the results
    offload        zero3-offload, trainer-zero3-offload: ds_configs/zero3_offload.json; -cores: the Trainer with OMP_NUM_THREADS set to
                   each process's part of the cores, where a launcher sets 1

    python benchmarks/throughput.py --output lora.json --only lora --sizes 8B --samples 4 --steps 6
    python benchmarks/throughput.py --output isolation.json --only isolation --sizes 1B --steps 10
    python benchmarks/throughput.py --output offload.json --only offload --sizes 1B --micro_batches 1 --samples 4 --steps 4

A figure is the mean of the last half of the steps. Each run has a time limit, and results are written as they come. How MFU is counted:
benchmarks/llama_shapes.py; where documents are isolated there is none. With `--profile` the two steps before the last half are recorded
(by harness.profiling, the Trainer's too), and the one-page summary lies beside the output: OUTPUT-SYSTEM-SIZE-MICRO_BATCH.profile.txt.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks import launched  # noqa: E402
from benchmarks.contenders import GROUPS, LORA_R, PROFILE_FILE, SYSTEMS, Trial  # noqa: E402
from benchmarks.llama_shapes import SHAPES, mfu  # noqa: E402
from harness.cgroups import usable_cores  # noqa: E402

# Tried in this order; after a failure the rest of a system's list is left out. More than this was never faster at these shapes.
MICRO_BATCHES = {"tiny": [2], "1B": [4], "3B": [2], "8B": [1, 2]}


def measure(trial: Trial, timeout_s: float, profile_file: Path | None = None) -> dict[str, Any]:
    """One run. The result has "tokens_per_second_per_gpu", or "failure" and the end of the output.

    Args:
        profile_file: where the profile's page goes; None: it is not kept.
    """
    system = SYSTEMS[trial.system]
    row: dict[str, Any] = {"system": trial.system, "size": trial.size, "micro_batch": trial.micro_batch}
    if system.needs and importlib.util.find_spec(system.needs) is None:
        return row | {"failure": f"{system.needs} is not installed"}
    log, started = Path(trial.work) / "log", time.monotonic()
    code = launched.run(trial.command(launched.free_port()), log, timeout_s, **trial.environment(usable_cores()))
    row["seconds"] = round(time.monotonic() - started, 1)
    page = trial.run_folder / PROFILE_FILE
    if page.exists():
        text = page.read_text(encoding="utf-8")
        row["profile"] = text.split("\n\n")[0].splitlines()  # the shares; the rest of the page is kernels
        if profile_file is not None:
            profile_file.write_text(text, encoding="utf-8")
    result = Path(trial.work) / "result.json"
    if not result.exists():
        text = log.read_text(errors="replace")
        out_of_memory = "OutOfMemoryError" in text or "out of memory" in text
        ended = f"no result within {timeout_s:.0f} s" if code == "timeout" else f"ended with {code}"
        return row | {"failure": "out of memory" if out_of_memory else ended, "output": first_error(text)}
    found = json.loads(result.read_text())
    speed = trial.samples * trial.sequence / found.pop("step_s")
    row |= {"tokens_per_second_per_gpu": round(speed, 1), "peak_gib": round(found.pop("peak_gib") or 0, 1)}
    utilisation = None if system.rows == "isolated" else mfu(trial.size, trial.sequence, speed, LORA_R if system.lora else 0)
    return row | {"mfu": utilisation} | found


def first_error(text: str) -> str:
    """The lines before the first exception's message, and it; the launcher's own traceback comes after."""
    lines = text.splitlines()
    at = next((index for index, line in enumerate(lines) if re.match(r"(\[rank\d+\]: )?[\w.]*(Error|Exception)\b", line)), len(lines))
    return "\n".join(lines[max(0, at - 12) : at + 3])[-3000:].replace(f"{ROOT}/", "")


def best(rows: list[dict[str, Any]], system: str, size: str) -> dict[str, Any] | None:
    """The fastest run of a system; where none has a figure, its last failure."""
    own = [row for row in rows if (row["system"], row["size"]) == (system, size)]
    good = [row for row in own if "failure" not in row]
    return max(good, key=lambda row: row["tokens_per_second_per_gpu"]) if good else (own[-1] if own else None)


def against(row: dict[str, Any], rival: dict[str, Any] | None) -> str:
    """How a figure compares, for the table; empty where there is nothing to compare it with."""
    if rival is None or "failure" in rival:
        return ""
    ratio = row["tokens_per_second_per_gpu"] / rival["tokens_per_second_per_gpu"]
    cost = f", costs {100 * (1 - ratio):.1f} %" if SYSTEMS[row["system"]].rows == "isolated" else ""
    return f"{ratio:.2f} x {rival['system']}{cost}"


def table(rows: list[dict[str, Any]]) -> str:
    """The best run of each system, in Markdown, and how much faster ours are than their rivals."""
    lines = [
        "| model | system | micro-batch | tokens/s per GPU | MFU | peak GiB | attention | against |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for size in dict.fromkeys(row["size"] for row in rows):
        for name, system in SYSTEMS.items():
            row = best(rows, name, size)
            if row is None:
                continue
            if "failure" in row:
                lines.append(f"| {size} | {name} | {row['micro_batch']} | {row['failure']} | | | | |")
                continue
            share = "" if row["mfu"] is None else f"{100 * row['mfu']:.1f} %"
            samples = (row.get("settings") or {}).get("micro_batch_size", row["micro_batch"])
            figures = f"{row['tokens_per_second_per_gpu']:,.0f} | {share} | {row['peak_gib']} | {row.get('attention', '')}"
            lines.append(f"| {size} | {name} | {samples} | {figures} | {against(row, best(rows, system.rival, size))} |")
    return "\n".join(lines)


def facts(options: argparse.Namespace) -> dict[str, Any]:
    """What a figure depends on beside the system."""
    packages = ("torch", "transformers", "accelerate", "deepspeed", "peft", "torchao", "liger-kernel", "torchtitan", "flash-attn")
    versions = {name: importlib.metadata.version(name) for name in packages if importlib.util.find_spec(name.replace("-", "_"))}
    about = {"sequence": options.sequence, "samples_per_step_and_gpu": options.samples, "steps": options.steps}
    return {**launched.card_facts(options.num_gpus, sys.argv), "cores": usable_cores(), **about, "versions": versions}


def _names(words: str) -> list[str]:
    """Systems out of a list of systems and groups.

    Raises:
        argparse.ArgumentTypeError: neither.
    """
    names = [name for word in words.split(",") for name in GROUPS.get(word, [word])]
    if unknown := [name for name in names if name not in SYSTEMS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose from {', '.join([*GROUPS, *SYSTEMS])}")
    return names


def _sizes(words: str) -> list[str]:
    if unknown := [word for word in words.split(",") if word not in SHAPES]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose from {', '.join(SHAPES)}")
    return words.split(",")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--sizes", type=_sizes, default="1B,3B")
    parser.add_argument("--only", type=_names, default="base", help="systems and groups")
    parser.add_argument("--micro_batches", default="", help="instead of the short list: 2,4")
    parser.add_argument("--num_gpus", type=int, default=None)
    parser.add_argument("--samples", type=int, default=8, help="of each GPU in an optimizer step")
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--profile", action="store_true", help="record two steps of each run, and keep the page")
    parser.add_argument("--timeout_s", type=float, default=150, help="of one run")
    parser.add_argument("--time_limit_s", type=float, default=1e9, help="no run is started after so many seconds")
    return parser


def trials(options: argparse.Namespace) -> Iterator[tuple[str, int, str]]:
    """(size, micro-batch, system): all systems at one micro-batch, then at the next, so that what a time limit leaves can be compared."""
    for size in options.sizes:
        for micro_batch in [int(word) for word in options.micro_batches.split(",") if word] or MICRO_BATCHES[size]:
            for system in options.only:
                yield size, micro_batch, system


def main() -> int:
    parser = _parser()
    options = parser.parse_args()
    if options.steps < 2:
        parser.error("--steps must be at least 2: the first half does not count")
    import torch

    options.num_gpus = options.num_gpus or torch.cuda.device_count() or 1
    started, about = time.monotonic(), facts(options)
    rows: list[dict[str, Any]] = []
    for size, micro_batch, system in trials(options):
        if time.monotonic() - started > options.time_limit_s:
            break
        if any("failure" in row and (row["system"], row["size"]) == (system, size) for row in rows):
            continue
        page = options.output and options.output.with_name(f"{options.output.stem}-{system}-{size}-{micro_batch}.profile.txt")
        with tempfile.TemporaryDirectory(prefix="throughput-", ignore_cleanup_errors=True) as work:
            sizes = (size, micro_batch, options.samples, options.sequence, options.steps, options.num_gpus)
            rows.append(measure(Trial(system, *sizes, options.profile, work), options.timeout_s, page))
        print(json.dumps({name: value for name, value in rows[-1].items() if name != "output"}), flush=True)
        if options.output:
            options.output.write_text(json.dumps({"facts": about, "results": rows}, indent=1) + "\n")
        if "failure" in rows[-1]:
            print(rows[-1].get("output", "")[-1500:], flush=True)
    print(json.dumps(about))
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
