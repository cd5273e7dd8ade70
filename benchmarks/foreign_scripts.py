"""Other people's scripts that run out of memory on one of two ranks, with `harness run` before their launch command and without.

    python benchmarks/foreign_scripts.py --output benchmarks/results/foreign_scripts_cpu.json [--scripts hf_trainer] [--launchers torchrun]

The scripts are those of examples/: transformers' Trainer, TRL's SFTTrainer (where trl is installed) and a loop on accelerate, under
torchrun, accelerate launch and DeepSpeed's ZeRO-2 and 3, on two gloo ranks. At step 7 of 12 one rank fails with the allocator's words for
a micro-batch of 8. Reported for each: how it ends without us and after how long; with us, how many starts it took, from which step it went
on, whether every step had the samples it has without the failure, and the largest relative difference of a step's loss. Seconds are those
of a machine of two cores, nearly all of them imports. Results are written after every row, so that a stopped benchmark keeps what it has.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.foreign import cells  # noqa: E402

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
        "steps_done": len(run.losses),
        "said": next((line.strip()[:200] for line in lines if "out of memory" in line), ""),
    }


def measure(script: str, launcher: str, clean: cells.Run, corpus: Path, folder: Path) -> dict[str, Any]:
    """One row of the results."""
    without = cells.run(script, launcher, corpus, folder / "without", fails=True, with_us=False, takes_turns=False)
    found = cells.run(script, launcher, corpus, folder / "with", fails=True, with_us=True, takes_turns=False)
    row: dict[str, Any] = {"script": script, "launcher": launcher, "without": ending(without)}
    if not (folder / "with" / "out-harness_run" / "record.json").exists():
        return {**row, "with": {"exit_code": found.code, "seconds": round(found.seconds, 1), "said": found.output[-500:]}}
    attempts = cells.record_of(folder / "with")["attempts"]
    with_us = {"exit_code": found.code, "seconds": round(found.seconds, 1), "seconds_of_attempts": [each["seconds"] for each in attempts]}
    with_us["all_ranks_ended_after_s"] = attempts[0]["ended_after_s"]
    return {**row, "with": with_us | (cells.compare(clean, found, folder / "with") if found.losses and found.code == 0 else {})}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--scripts", nargs="+", default=list(cells.SCRIPTS), choices=cells.SCRIPTS)
    parser.add_argument("--launchers", nargs="+", default=list(cells.LAUNCHERS), choices=cells.LAUNCHERS)
    options = parser.parse_args()
    results: dict[str, Any] = {"packages": versions(), "num_ranks": cells.NUM_RANKS, "backend": "gloo", "rows": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        corpus = cells.make_corpus(folder / "corpus.txt")
        for script in options.scripts:
            if script == "trl_sft" and importlib.util.find_spec("trl") is None:
                print("trl_sft: trl is not installed", flush=True)
                continue
            clean = cells.run(script, "torchrun", corpus, folder / f"{script}-clean", fails=False, with_us=False, takes_turns=False)
            assert clean.code == 0, clean.output
            for launcher in options.launchers:
                results["rows"].append(measure(script, launcher, clean, corpus, folder / f"{script}-{launcher}"))
                print(json.dumps(results["rows"][-1]), flush=True)
                options.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
