"""Tokenising a corpus: this harness against `datasets.map` with the same tokenizer alone.

    python benchmarks/data_preparation.py --megabytes 10 100 1000 --num_workers 2

The corpus is the Python standard library's sources, over and over, every document with a number of its own; the tokenizer is a
byte-level BPE of 16,384 tokens trained on them. Every contestant runs in a process of its own; its memory is what its processes hold
beyond shared and file-backed pages (USS), sampled every half second. Beside the wall time stands the
processor time of all its processes, which a busy machine changes less. The table goes to `results/data_preparation.md` and `.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NAMES = {"harness": "harness", "map": "datasets.map"}
sys.path[0] = str(ROOT)


def write_corpus(path: Path, num_bytes: int) -> int:
    """Writes JSON lines of about `num_bytes`; returns how many documents."""
    texts = [file.read_text(encoding="utf-8") for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))]
    written = number = 0
    with path.open("w", encoding="utf-8") as file:
        while written < num_bytes:
            line = json.dumps({"text": f"# copy {number}\n{texts[number % len(texts)]}"}, ensure_ascii=False)
            written += file.write(line + "\n")
            number += 1
    return number


def train_tokenizer(folder: Path) -> None:
    """Trains and saves a byte-level BPE."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=16384, special_tokens=["</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    inner.train([str(file) for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))], trainer)
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>").save_pretrained(folder)


def run_harness(work: Path, num_workers: int) -> int:
    """Everything up to samples. Returns tokens."""
    from transformers import AutoTokenizer

    from harness.args import DataArguments
    from harness.data import prepare_data

    args = DataArguments(
        train_file=[str(work / "corpus.jsonl")],
        data_cache_dir=str(work / "cache"),
        block_size=1024,
        preprocessing_num_workers=num_workers,
        validation_split_percentage=0,
    )
    tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer")
    data = prepare_data(args, tokenizer, max_positions=1024, seed=0, say=lambda line: None, is_local_main=True)
    return data.report["train"].num_tokens


def run_map(work: Path, num_workers: int) -> int:
    """Tokenising alone, with `datasets.map`. Returns tokens."""
    import datasets
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer")
    data = datasets.load_dataset("json", data_files=str(work / "corpus.jsonl"), split="train", cache_dir=str(work / "hf"))
    tokenized = data.map(
        lambda rows: {"input_ids": tokenizer([text + "</s>" for text in rows["text"]])["input_ids"]},
        batched=True,
        num_proc=num_workers,
        remove_columns=data.column_names,
    )
    return sum(len(chunk.values) for chunk in tokenized.data.column("input_ids").chunks)


def measure(command: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """Runs a process; wall and processor time, the tokens it prints, and the most memory its processes held."""
    import psutil

    begin, usage = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    peak, done = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.5):
            try:
                tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
                peak = max(peak, sum(one.memory_full_info().uss for one in tree))
            except psutil.Error:
                continue

    thread = threading.Thread(target=watch)
    thread.start()
    output, _ = process.communicate()
    done.set()
    thread.join()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - usage.ru_utime - usage.ru_stime
    return {"wall_s": time.monotonic() - begin, "cpu_s": cpu_s, "tokens": int(output.split()[-1]), "peak_uss_mib": peak / 2**20}


def run_size(megabytes: int, contestants: list[str], num_workers: int) -> list[dict[str, Any]]:
    """One corpus, all contestants one after another. Returns a row for each."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        num_documents = write_corpus(work / "corpus.jsonl", megabytes * 10**6)
        train_tokenizer(work / "tokenizer")
        num_bytes = (work / "corpus.jsonl").stat().st_size
        for name in contestants:
            command = [sys.executable, __file__, "--only", name, "--work", str(work), "--num_workers", str(num_workers)]
            load = os.getloadavg()[0]
            result = measure(command, os.environ | {"PYTHONPATH": str(ROOT)})
            rows.append({"contestant": name, "num_bytes": num_bytes, "num_documents": num_documents, "load_before": load, **result})
            print(table(rows[-1:])[-1], flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Lines of Markdown."""
    lines = [
        "| contestant | MB | documents | tokens | wall s | M tokens/s | processor s | M tokens per processor second | peak memory MiB |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        tokens, wall_s, cpu_s = row["tokens"], row["wall_s"], row["cpu_s"]
        lines.append(
            f"| {NAMES[row['contestant']]} | {row['num_bytes'] / 1e6:,.0f} | {row['num_documents']:,} | {tokens:,} | {wall_s:,.1f} "
            f"| {tokens / wall_s / 1e6:.2f} | {cpu_s:,.1f} | {tokens / cpu_s / 1e6:.3f} | {row['peak_uss_mib']:,.0f} |"
        )
    return lines


def comparison(rows: list[dict[str, Any]]) -> list[str]:
    """Two lines on what the table shows: speed side by side at the largest corpus that both did, and how memory grows."""

    def last(name: str, num_bytes: int | None = None) -> dict[str, Any] | None:
        return next((row for row in rows[::-1] if row["contestant"] == name and num_bytes in (None, row["num_bytes"])), None)

    ours, lines = [row for row in rows if row["contestant"] == "harness"], []
    other = last("map")
    same = last("harness", other["num_bytes"]) if other else None
    if other and same:
        ratio = same["tokens"] / same["cpu_s"] / (other["tokens"] / other["cpu_s"])
        lines.append(f"- {other['num_bytes'] / 1e6:,.0f} MB: {ratio:.2f} times the tokens of `datasets.map` per second of processor time.")
    if other and ours and ours[-1]["num_bytes"] > other["num_bytes"]:
        lines.append(f"- `datasets.map` was not run to its end beyond {other['num_bytes'] / 1e6:,.0f} MB.")
    peaks = ", ".join(f"{row['peak_uss_mib']:,.0f} MiB at {row['num_bytes'] / 1e6:,.0f} MB" for row in ours)
    return [*lines, f"- Peak memory of the harness: {peaks}.", ""]


def write_results(folder: Path, rows: list[dict[str, Any]], num_workers: int) -> None:
    """The rows as JSON and as a page."""
    from importlib.metadata import version

    facts = {
        "num_cores": len(os.sched_getaffinity(0)),
        "num_workers": num_workers,
        "packages": {name: version(name) for name in ("datasets", "tokenizers", "transformers")},
        "rows": rows,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "data_preparation.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    loads = ", ".join("not noted" if row["load_before"] is None else f"{row['load_before']:.1f}" for row in rows)
    packages = ", ".join(f"{name} {number}" for name, number in facts["packages"].items())
    page = [
        "# Preparation of data",
        "",
        f"`python benchmarks/data_preparation.py`, {num_workers} workers on {facts['num_cores']} cores, {packages}. The harness reads, "
        "tokenises, stores and packs (block_size 1024); `datasets.map` reads and tokenises alone. Load of the machine before each row: "
        f"{loads}; where others were at work the processor time is what can be compared. Memory: unshared pages of all processes.",
        "",
        *table(rows),
        "",
        *comparison(rows),
    ]
    (folder / "data_preparation.md").write_text("\n".join(page), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--num_workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--contestants", nargs="+", default=["harness", "map"], choices=["harness", "map"])
    parser.add_argument("--map_at_most", type=int, help="largest corpus for datasets.map, MB; default: all")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the table")
    parser.add_argument("--only", choices=["harness", "map"], help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        print({"harness": run_harness, "map": run_map}[args.only](args.work, args.num_workers))
        return
    rows: list[dict[str, Any]] = []
    for megabytes in args.megabytes:
        too_large = args.map_at_most is not None and megabytes > args.map_at_most
        rows += run_size(megabytes, [name for name in args.contestants if name != "map" or not too_large], args.num_workers)
        write_results(args.results, rows, args.num_workers)


if __name__ == "__main__":
    main()
