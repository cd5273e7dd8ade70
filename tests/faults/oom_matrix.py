"""Out-of-memory at every place of a job, under every engine, on the first, the last or all ranks, at three moments.

    python -m tests.faults.oom_matrix [--engines fsdp zero3] [--output benchmarks/results/oom_matrix.md]

Each run of an engine takes many failures, one after the other: those within a step and in evaluations are redone in process; those in an
update or a save start all ranks again. A cell counts as recovered when its failure was raised, the run went on and ended with 0, and all
losses, gradient norms, evaluations and samples are those of the run without failures (1e-4 relative). Failures within the late step come
in its second micro-batch. Prints a table and N/N recovered; exit code 1 where a cell is missing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.faults.fork_ranks import ForkServer
from tests.faults.jobs import DS, train_rows

NUM_RANKS, MICRO_BATCH, NUM_STEPS, LATE_STEP = 2, 64, 8, 7
RANKS = ("0", "1", "all")
MOMENTS = ("dry", "1", str(LATE_STEP))
VARIABLE = "HARNESS_TEST_OOM_CELLS"
TOLERANCE = 1e-4
# In the late step these come in the second micro-batch: the gradients of the first are there by then.
ACCUMULATING_PLACES = ("forward", "recompute", "backward", "gather-buffer", "reduce-buffer")
# Places within a step. ZeRO-2 and DDP gather nothing in a step; an update is never made in the dry run.
STEP_PLACES = {
    "ddp": ("forward", "recompute", "backward", "reduce-buffer"),
    "fsdp": ("forward", "recompute", "backward", "gather-buffer", "reduce-buffer"),
    "zero2": ("forward", "recompute", "backward", "reduce-buffer"),
    "zero3": ("forward", "recompute", "backward", "gather-buffer", "reduce-buffer"),
    "zero2_offload": ("forward", "recompute", "backward", "reduce-buffer"),
    "zero3_offload": ("forward", "recompute", "backward", "gather-buffer", "reduce-buffer"),
}
FLAGS = {
    "ddp": [],
    "fsdp": ["--fsdp", "full_shard"],
    "zero2": ["--deepspeed", str(DS / "zero2.json")],
    "zero3": ["--deepspeed", str(DS / "zero3.json")],
    "zero2_offload": ["--deepspeed", str(DS / "zero2_offload.json")],
    "zero3_offload": ["--deepspeed", str(DS / "zero3_offload.json")],
    # Nothing is left to lower but the sharding; each failure is a run of its own.
    "ddp to fsdp": ["--engine", "auto", "--per_device_train_batch_size", "1", "--gradient_accumulation_steps", str(MICRO_BATCH)],
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One failure.

    Attributes:
        place: "forward", "recompute", "backward", "gather-buffer", "reduce-buffer", "update", "evaluation" or "save".
        rank: "0", "1" or "all".
        moment: "dry" or the step.
        life: of the process in which it is raised.
    """

    place: str
    rank: str
    moment: str
    life: int = 0


# ---- in the ranks


class CellInjector:
    """Raises one cell per try of a step, in order, so that each is a failure of its own."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        from harness import guard_line

        self.rank = os.environ.get("RANK", "0")
        self.cells = [cell for cell in cells if cell.life == guard_line.attempt()]
        self.moment, self.num_tries, self.num_micro_batches, self.is_dry = "", 0, 0, False
        self.raised: set[Cell] = set()

    def watch(self, recovery: Any) -> None:
        """Learns from the job's own calls which try of which step runs."""
        engine, dry_run = recovery.engine, recovery.dry_run
        forward_backward = engine.forward_backward

        def step(*args: Any) -> Any:
            self._begin("dry" if self.is_dry else str(recovery.current_step() + 1))
            return forward_backward(*args)

        def dry(*args: Any) -> None:
            self.is_dry = True
            dry_run(*args)
            self.is_dry = False

        engine.forward_backward, recovery.dry_run = step, dry
        self.current_step = recovery.current_step
        self.recovery = recovery

    def watch_evaluations(self) -> None:
        from harness.evaluation import Evaluator

        run = Evaluator.run

        def counted(evaluator: Any, state: Any) -> Any:
            if evaluator.last_step != state.step:
                self._begin(f"evaluation {state.step}")
            return run(evaluator, state)

        Evaluator.run = counted  # type: ignore[method-assign]

    def _begin(self, moment: str) -> None:
        self.num_tries = self.num_tries + 1 if moment == self.moment else 0
        self.moment, self.num_micro_batches = moment, 0

    def at(self, place: str) -> None:
        self.num_micro_batches += place == "forward"
        if place in ACCUMULATING_PLACES and self.moment == str(LATE_STEP) and self.num_micro_batches < 2:
            return
        cell = self._cell(place)
        if cell is None or cell.place != place or cell.rank not in ("all", self.rank) or cell in self.raised:
            return
        import torch

        self.raised.add(cell)
        print(f"[cell] {json.dumps(dataclasses.asdict(cell))}", flush=True)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (injected)")

    def _cell(self, place: str) -> Cell | None:
        if place in ("update", "save"):
            step = str(self.recovery.current_step() + (place == "update"))
            return next((cell for cell in self.cells if cell.place == place and cell.moment == step), None)
        if self.moment.startswith("evaluation"):
            now = [cell for cell in self.cells if cell.place == "evaluation" and f"evaluation {cell.moment}" == self.moment]
        else:
            now = [cell for cell in self.cells if cell.place not in ("update", "save", "evaluation") and cell.moment == self.moment]
        return now[self.num_tries] if self.num_tries < len(now) else None


def install(text: str) -> None:
    """Called in each rank with the environment's cells."""
    from harness import job
    from tests.distributed import oom_worker

    injector = CellInjector([Cell(**values) for values in json.loads(text)])
    injector.watch_evaluations()
    oom_worker.install(injector)  # type: ignore[arg-type]
    make = job._recovery

    def make_and_watch(*args: Any, **kwargs: Any) -> Any:
        recovery = make(*args, **kwargs)
        injector.watch(recovery)
        return recovery

    job._recovery = make_and_watch


# ---- the parent


def cells_of(engine: str) -> dict[str, list[Cell]]:
    """The cells of an engine, by run."""
    if engine == "ddp to fsdp":
        alone = [Cell(place, rank, moment) for moment in MOMENTS for place in STEP_PLACES["ddp"] for rank in RANKS]
        alone += [Cell(place, rank, str(LATE_STEP)) for place in ("update", "save") for rank in RANKS]
        return {f"{cell.place} {cell.rank} {cell.moment}": [cell] for cell in alone}
    in_step = [Cell(place, rank, moment) for moment in MOMENTS for place in STEP_PLACES[engine] for rank in RANKS]
    evaluation = [Cell("evaluation", rank, moment) for moment in ("1", str(LATE_STEP)) for rank in RANKS]
    again = [(place, rank, moment) for moment in ("1", str(LATE_STEP)) for place in ("update", "save") for rank in RANKS]
    return {"in process": in_step + evaluation, "started again": [Cell(*what, life=life) for life, what in enumerate(again)]}


def make_inputs(folder: str) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from harness.modeling import byte_tokenizer

    root, source = Path(folder), random.Random(1)
    num_samples = NUM_STEPS * NUM_RANKS * MICRO_BATCH + 64
    texts = ["".join(source.choice("abcdefgh ") for _ in range(8 + number % 17)) for number in range(num_samples)]
    (root / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=259, max_position_embeddings=64
    )
    LlamaForCausalLM(config).save_pretrained(root / "model")
    byte_tokenizer().save_pretrained(root / "model")


def arguments(inputs: Path, output: Path, engine: str, *more: str) -> list[str]:
    values = {
        "model_name_or_path": inputs / "model",
        "train_file": inputs / "data.jsonl",
        "packing": "none",
        "block_size": 64,
        "validation_split_percentage": 5,
        "per_device_train_batch_size": MICRO_BATCH,
        "per_device_eval_batch_size": 64,
        "activation_checkpointing": "full",
        "max_steps": NUM_STEPS,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "precision": "fp32",
        "save_strategy": "no",
        "snapshot_steps": 1,
        "ddp_timeout": 60,
        "data_cache_dir": inputs / "cache",
        "output_dir": output,
    }
    ladder = ["--oom_ladder", *(f"micro_batch={size}" for size in range(MICRO_BATCH - 1, 0, -1))] if engine in STEP_PLACES else []
    return [
        *(token for name, value in values.items() for token in (f"--{name}", str(value))),
        *ladder,
        *FLAGS[engine],
        *more,
    ]


@dataclasses.dataclass
class Outcome:
    """What became of the cells of one run."""

    wanted: list[Cell]
    recovered: list[Cell]
    problems: list[str]
    longest_wait_s: float


def _evaluations(output: Path) -> list[tuple[int, float]]:
    from harness.metrics import read_metrics

    return [(row["step"], row["eval_loss"]) for row in read_metrics(output).of_kind("eval")]


def run_cells(server: ForkServer, inputs: Path, engine: str, name: str, cells: list[Cell], reference: Path, folder: Path) -> Outcome:
    """One run with its failures."""
    output = folder / "out"
    saves = any(cell.place == "save" for cell in cells)
    more = ["--save_strategy", "steps", "--save_steps", "1", "--save_total_limit", "1"] if saves else []
    text = json.dumps([dataclasses.asdict(cell) for cell in cells])
    life = server.start(arguments(inputs, output, engine, *more), NUM_RANKS, folder / "life", environment={VARIABLE: text})
    problems: list[str] = []
    try:
        codes = life.wait(120 + 60 * len(cells))
        if set(codes.values()) != {0}:
            problems.append(f"exit codes {codes}: {life.output()[-6000:]}")
    except AssertionError as error:
        problems.append(str(error)[-1500:])
    raised = {Cell(**json.loads(line[7:])) for line in life.output().splitlines() if line.startswith("[cell] ")}
    steps = json.loads((output / "ladder.json").read_text())["steps_down"] if (output / "ladder.json").exists() else []
    if not problems:
        problems += _differences(train_rows(output), train_rows(reference), _evaluations(output), _evaluations(reference))
        if len(steps) != len(cells):
            problems.append(f"{len(steps)} steps down for {len(cells)} failures")
    recovered = [] if problems else [cell for cell in cells if cell in raised]
    return Outcome(cells, recovered, problems, max((step.get("seconds", 0.0) for step in steps), default=0.0))


def _differences(rows: Any, expected: Any, evaluations: Any, expected_evaluations: Any) -> list[str]:
    found = []
    if [row["step"] for row in rows] != [row["step"] for row in expected]:
        return [f"steps are {[row['step'] for row in rows]}"]
    for row, other in zip(rows, expected, strict=True):
        if row["num_label_tokens"] != other["num_label_tokens"]:
            found.append(f"step {row['step']}: other samples")
        for name in ("loss", "grad_norm"):
            if abs(row[name] - other[name]) > TOLERANCE * abs(other[name]):
                found.append(f"step {row['step']}: {name} {row[name]}, without failures {other[name]}")
    ours = dict(evaluations)
    found += [
        f"evaluation at step {step}: {ours.get(step)}, without failures {loss}"
        for step, loss in expected_evaluations
        if step not in ours or abs(ours[step] - loss) > TOLERANCE * loss
    ]
    return found


def run_engine(server: ForkServer, inputs: Path, engine: str, folder: Path, runs: dict[str, list[Cell]]) -> dict[str, Outcome]:
    """All runs of an engine against the one without failures."""
    reference = folder / "reference" / "out"
    life = server.start(arguments(inputs, reference, engine), NUM_RANKS, folder / "reference" / "life")
    assert set(life.wait(300).values()) == {0}, life.output()
    return {
        name: run_cells(server, inputs, engine, name, cells, reference, folder / name.replace(" ", "-")) for name, cells in runs.items()
    }


def table(results: dict[str, dict[str, Outcome]]) -> str:
    lines = ["| engine | place | recovered | moments | longest step down, s |", "|---|---|---|---|---|"]
    for engine, runs in results.items():
        for outcome in runs.values():
            for place in dict.fromkeys(cell.place for cell in outcome.wanted):
                wanted = [cell for cell in outcome.wanted if cell.place == place]
                recovered = [cell for cell in outcome.recovered if cell.place == place]
                moments = ", ".join(dict.fromkeys("dry run" if cell.moment == "dry" else f"step {cell.moment}" for cell in wanted))
                lines.append(f"| {engine} | {place} | {len(recovered)}/{len(wanted)} | {moments} | {outcome.longest_wait_s:.1f} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=list(FLAGS), choices=list(FLAGS))
    parser.add_argument("--runs", nargs="+", help='only these, such as "in process" or "started again"')
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    from tests.faults import oom_matrix  # by its name: the ranks import it

    results: dict[str, dict[str, Outcome]] = {}
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="harness-oom-matrix-") as temporary, ForkServer() as server:
        inputs = Path(temporary) / "inputs"
        inputs.mkdir()
        server.call(oom_matrix.make_inputs, str(inputs), output=inputs / "inputs.txt")
        for engine in options.engines:
            runs = {name: cells for name, cells in cells_of(engine).items() if options.runs is None or name in options.runs}
            results[engine] = run_engine(server, inputs, engine, Path(temporary) / engine, runs)
            for name, outcome in results[engine].items():
                print(f"{engine}, {name}: {len(outcome.recovered)}/{len(outcome.wanted)}", *outcome.problems, sep="\n  ", flush=True)
    outcomes = [outcome for runs in results.values() for outcome in runs.values()]
    num_wanted, num_recovered = (sum(len(getattr(outcome, name)) for outcome in outcomes) for name in ("wanted", "recovered"))
    summary = f"{num_recovered}/{num_wanted} recovered in {(time.monotonic() - started) / 60:.0f} minutes"
    print(table(results), summary, sep="\n\n")
    if options.output is not None:
        text = (
            f"# Out-of-memory at every place\n\n`python -m tests.faults.oom_matrix`: {NUM_RANKS} CPU ranks (gloo); the first, the last"
            " or all fail. DDP and ZeRO-2 gather nothing within a step; there is no update in the dry run. Losses, gradient norms,"
            f" evaluations and samples of every run equal those of the run without failures ({TOLERANCE:g} relative)."
            f" Failures within step {LATE_STEP} come in its second micro-batch.\n\n{table(results)}\n\n{summary}\n"
        )
        options.output.write_text(text)
    return 0 if num_recovered == num_wanted else 1


if __name__ == "__main__":
    sys.exit(main())
