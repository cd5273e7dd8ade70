"""Other people's scripts that run out of memory on one of two ranks, with `harness run` before their launch command and without.

    python benchmarks/foreign_scripts.py --output benchmarks/results/foreign_scripts_cpu.json [--scripts hf_trainer] [--launchers torchrun]

The scripts are those of examples/: transformers' Trainer, TRL's SFTTrainer (where trl is installed) and a loop on accelerate, under
torchrun, accelerate launch and DeepSpeed's ZeRO-2 and 3, on two gloo ranks. At step 7 of 12 one rank fails with the allocator's words for
a micro-batch of 8. Reported for each: how it ends without us and after how long; with us, how many starts it took, from which step it went
on, whether every step had the samples it has without the failure, and the largest relative difference of a step's loss. Seconds are those
of a machine of two cores, nearly all of them imports. Results are written after every row, into what an earlier call has left there.

    python benchmarks/foreign_scripts.py --device cuda --output benchmarks/results/foreign_scripts_gpu.json [--launchers fsdp zero3]

On two GPUs: the Trainer script with a model of 0.5 billion parameters, under accelerate's FSDP2 and DeepSpeed's ZeRO-3. Before step 7
the card of rank 1 loses memory for good (all but what was held and 60 % of what a step needed on top), so its allocator fails by itself.
Without us the job is ended where it is silent for 90 s. About five minutes.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.launched import card_facts  # noqa: E402
from tests.foreign import cells, cuda_cells  # noqa: E402

LIMIT_S = 900.0
PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "trl")


def versions() -> dict[str, str | None]:
    """Of what the scripts are built on; null where it is not installed."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def ending(run: cells.Run) -> dict[str, Any]:
    """How a run without us ended."""
    lines = [line for line in run.output.splitlines() if "Error" in line]
    return {
        "exit_code": run.code,
        "still_running_at_limit": run.code is None,
        "seconds": round(run.seconds, 1),
        "said": next((line.strip()[:200] for line in lines if "out of memory" in line), ""),
    }


def earlier_rows(output: Path) -> list[dict[str, Any]]:
    """Rows of an earlier call with the same packages; none where there was none, or where other packages were measured."""
    if not output.exists():
        return []
    earlier = json.loads(output.read_text(encoding="utf-8"))
    return earlier["rows"] if earlier["packages"] == versions() else []


def with_row(rows: list[dict[str, Any]], row: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows with a new one, which takes the place of the one of the same script and launcher."""
    cell = (row["script"], row["launcher"])
    order = [(script, launcher) for script in cells.SCRIPTS for launcher in dict.fromkeys((*cells.LAUNCHERS, *cuda_cells.LAUNCHERS))]
    others = [each for each in rows if (each["script"], each["launcher"]) != cell]
    return sorted([*others, row], key=lambda each: order.index((each["script"], each["launcher"])))


def measure(script: str, launcher: str, clean: cells.Run, corpus: Path, folder: Path) -> dict[str, Any]:
    """One row of the results."""
    shared: dict[str, Any] = {"fails": True, "takes_turns": False, "timeout_s": LIMIT_S}
    without = cells.run(script, launcher, corpus, folder / "without", with_us=False, **shared)
    found = cells.run(script, launcher, corpus, folder / "with", with_us=True, **shared)
    row: dict[str, Any] = {"script": script, "launcher": launcher, "without": ending(without)}
    if not (folder / "with" / "out-harness_run" / "record.json").exists():
        return {**row, "with": {"exit_code": found.code, "seconds": round(found.seconds, 1), "said": found.output[-500:]}}
    attempts = cells.record_of(folder / "with")["attempts"]
    with_us = {"exit_code": found.code, "seconds": round(found.seconds, 1), "seconds_of_attempts": [each["seconds"] for each in attempts]}
    with_us["all_ranks_ended_after_s"] = attempts[0]["ended_after_s"]
    return {**row, "with": with_us | (cells.compare(clean, found, folder / "with") if found.losses and found.code == 0 else {})}


def measure_on_cpu(options: argparse.Namespace, folder: Path, keep: Callable[[dict[str, Any]], None]) -> None:
    corpus = cells.make_corpus(folder / "corpus.txt")
    for script in options.scripts:
        if script == "trl_sft" and importlib.util.find_spec("trl") is None:
            print("trl_sft: trl is not installed", flush=True)
            continue
        references: dict[str, cells.Run] = {}
        for launcher in options.launchers or cells.LAUNCHERS:
            same = cells.reference_launcher(script, launcher)
            if same not in references:
                plain: dict[str, Any] = {"fails": False, "with_us": False, "takes_turns": False, "timeout_s": LIMIT_S}
                references[same] = cells.run(script, same, corpus, folder / f"{script}-clean-{same}", **plain)
                assert references[same].code == 0, references[same].output
            keep(measure(script, launcher, references[same], corpus, folder / f"{script}-{launcher}"))


def measure_on_gpus(options: argparse.Namespace, folder: Path, keep: Callable[[dict[str, Any]], None]) -> None:
    corpus = cells.make_corpus(folder / "corpus.txt", 300_000)
    model = cuda_cells.write_model(folder / "model")
    for launcher in options.launchers or cuda_cells.LAUNCHERS:
        keep(cuda_cells.measure(launcher, corpus, model, folder / launcher, options.logs))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--scripts", nargs="+", default=list(cells.SCRIPTS), choices=cells.SCRIPTS, help="on GPUs only hf_trainer")
    parser.add_argument("--launchers", nargs="+", help=f"on CPU {', '.join(cells.LAUNCHERS)}; on GPUs {', '.join(cuda_cells.LAUNCHERS)}")
    parser.add_argument("--logs", type=Path, help="on GPUs: folder for what the commands print")
    options = parser.parse_args()
    known = cells.LAUNCHERS if options.device == "cpu" else cuda_cells.LAUNCHERS
    if wrong := sorted(set(options.launchers or ()) - set(known)):
        parser.error(f"--launchers: {', '.join(wrong)} not among {', '.join(known)}")
    facts: dict[str, Any] = {"num_ranks": cells.NUM_RANKS, "backend": "gloo"}
    if options.device == "cuda":
        facts = {"backend": "nccl", **card_facts(cells.NUM_RANKS, sys.argv)}
    results: dict[str, Any] = {"packages": versions(), **facts, "rows": earlier_rows(options.output)}

    def keep(row: dict[str, Any]) -> None:
        print(json.dumps(row), flush=True)
        results["rows"] = with_row(results["rows"], row)
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

    with tempfile.TemporaryDirectory() as temporary:
        (measure_on_cpu if options.device == "cpu" else measure_on_gpus)(options, Path(temporary), keep)
    return 0


if __name__ == "__main__":
    sys.exit(main())
