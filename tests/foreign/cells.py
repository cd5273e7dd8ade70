"""Scripts that know nothing of this project, under each launcher, with a lack of memory on one of two ranks at step 7."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.processes import processes_with, send
from launch.machine import free_port
from tests.foreign import inject
from tests.launching import ROOT, launch_environment, only_launch_of_this_machine

SCRIPTS = ("hf_trainer", "trl_sft", "accelerate_loop")
LAUNCHERS = ("torchrun", "accelerate", "zero2", "zero3")
NUM_RANKS, MICRO, STEPS, SAVE_STEPS, FAILS_AT = 2, 8, 12, 5, 7
FAILURE = {"rank": 1, "step": FAILS_AT, "share": MICRO, "rows": MICRO}
_MARK = "HARNESS_TEST_FOREIGN"
SIGKILL = 9


@dataclasses.dataclass(frozen=True)
class Run:
    """How a command ended.

    Attributes:
        code: its exit code; None where it was still running at the time limit.
        losses: by step, as the script logged them.
        steps: for each process that trained, by rank and oldest first, the samples of each step.
    """

    code: int | None
    seconds: float
    output: str
    losses: dict[int, float]
    steps: dict[int, list[list[list[int]]]]


def make_corpus(path: Path, num_words: int = 4000) -> Path:
    """Text with something to learn."""
    source = random.Random(0)
    words = ["".join(source.choice("abcdefghijklmnop") for _ in range(source.randint(2, 8))) for _ in range(200)]
    path.write_text(" ".join(source.choice(words) for _ in range(num_words)))
    return path


def script_words(script: str, corpus: Path, folder: Path, micro: int = MICRO) -> list[str]:
    """A script's flags, whatever starts it."""
    flags = {
        "train_file": corpus,
        "output_dir": folder / "out",
        "max_steps": STEPS,
        "save_steps": SAVE_STEPS,
        "per_device_train_batch_size": micro,
        "learning_rate": 1e-3,
    }
    if script != "accelerate_loop":
        flags |= {"logging_steps": 1, "report_to": "none", "disable_tqdm": True}
        flags["use_cpu"] = True  # without it transformers makes two jobs of one process
    if script == "trl_sft":
        flags["bf16"] = False
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def command(script: str, launcher: str, corpus: Path, folder: Path) -> list[str]:
    """What a user would type."""
    tools, path, port = Path(sys.executable).parent, str(ROOT / "examples" / f"{script}.py"), str(free_port())
    words = script_words(script, corpus, folder)
    if script != "accelerate_loop" and launcher.startswith("zero"):
        words += ["--deepspeed", str(ROOT / "ds_configs" / f"{launcher}.json")]
    if launcher == "torchrun":
        return [str(tools / "torchrun"), "--nproc_per_node", str(NUM_RANKS), "--master_port", port, path, *words]
    if launcher == "accelerate":
        # What makes it several processes is called --multi_gpu where there is no GPU either.
        start = [str(tools / "accelerate"), "launch", "--multi_gpu", "--num_processes", str(NUM_RANKS), "--num_machines", "1"]
        return [*start, "--main_process_ip", "127.0.0.1", "--main_process_port", port, path, *words]
    if script == "accelerate_loop":  # ZeRO comes to such a script from accelerate's YAML
        yaml = folder / f"{launcher}.yaml"
        yaml.write_text(
            f"distributed_type: DEEPSPEED\nnum_processes: {NUM_RANKS}\nnum_machines: 1\nmachine_rank: 0\nmixed_precision: 'no'\n"
            f"deepspeed_config:\n  zero_stage: {launcher[-1]}\n  gradient_accumulation_steps: 1\n"
        )
        return [str(tools / "accelerate"), "launch", "--config_file", str(yaml), "--main_process_port", port, path, *words]
    return [str(tools / "deepspeed"), f"--num_gpus={NUM_RANKS}", "--master_port", port, path, *words]


def reference_launcher(script: str, launcher: str) -> str:
    """The launcher under which a run without a lack of memory begins with the same weights.

    Under ZeRO-3 transformers draws them piece by piece, and they are others; the loop on accelerate builds its model before DeepSpeed.
    """
    return "zero3" if launcher == "zero3" and script != "accelerate_loop" else "torchrun"


def injected(folder: Path, failure: dict[str, Any]) -> dict[str, str]:
    """What brings tests.foreign.inject into each rank, with `folder`/trace for its records."""
    trace, hook = folder / "trace", folder / "hook"
    trace.mkdir(parents=True)
    inject.install_into(hook)
    path = os.pathsep.join([str(hook), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, "TRACE": str(trace), "OOM": json.dumps(failure)}


def run(
    script: str,
    launcher: str,
    corpus: Path,
    folder: Path,
    *,
    fails: bool,
    with_us: bool,
    failure: dict[str, Any] | None = None,
    timeout_s: float = 400.0,
    takes_turns: bool = True,
    more: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Run:
    """Runs a script under a launcher, with or without `harness run` before it, and leaves no process behind.

    Args:
        takes_turns: with the launches of other tests on this machine.
        more: flags of the script.
        environment: variables of the command.
    """
    folder.mkdir(parents=True)
    trace = folder / "trace"
    environ = launch_environment({**injected(folder, (failure or FAILURE) if fails else {}), **(environment or {})})
    if launcher == "zero3":
        environ["START_DEEPSPEED"] = "1"
    if script == "accelerate_loop":  # the same for accelerate
        environ["ACCELERATE_USE_CPU"] = "true"
    tokens = [*command(script, launcher, corpus, folder), *more]
    if with_us:
        tokens = [sys.executable, "-m", "harness.runner", "--no_plan", "--ladder", "micro_batch", "--", *tokens]
    turn = only_launch_of_this_machine() if takes_turns else contextlib.nullcontext()
    with turn:
        code, seconds, text = run_tokens(tokens, environ, folder, timeout_s)
    return Run(code, seconds, text, losses_of(script, folder / "out"), steps_of(trace))


def run_tokens(
    tokens: list[str], environ: dict[str, str], folder: Path, timeout_s: float, is_over: Callable[[Path], bool] = lambda output: False
) -> tuple[int | None, float, str]:
    """Runs a command to its end, with its output in `folder`/output.txt, and leaves no process behind.

    Args:
        is_over: asked every half second, with the file of the output: whether it is to be ended before the limit.

    Returns:
        Its exit code, None where it had to be ended; seconds; output.
    """
    mark, path = uuid.uuid4().hex, folder / "output.txt"
    with open(path, "w", encoding="utf-8") as output:
        started = time.monotonic()
        streams: dict[str, Any] = {"stdout": output, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        process = subprocess.Popen(tokens, cwd=ROOT, env={**environ, _MARK: mark}, start_new_session=True, **streams)
        code: int | None = None
        try:
            while (code := process.poll()) is None and time.monotonic() - started < timeout_s and not is_over(path):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.5)
        finally:
            seconds = time.monotonic() - started
            time.sleep(1.0)
            left = processes_with(_MARK, mark)
            send(left, SIGKILL)
            process.wait()
    text = path.read_text(encoding="utf-8", errors="replace")
    assert code is None or not left, f"{len(left)} processes were left behind\n{text}"
    return code, seconds, text


def losses_of(script: str, folder: Path) -> dict[int, float]:
    """Loss by step, from what the script wrote last."""
    if script == "accelerate_loop":
        log = folder / "log.jsonl"
        return {row["step"]: row["loss"] for row in map(json.loads, log.read_text().splitlines())} if log.exists() else {}
    state = folder / "trainer_state.json"
    history = json.loads(state.read_text())["log_history"] if state.exists() else []
    return {row["step"]: row["loss"] for row in history if "loss" in row}


def steps_of(trace: Path, share: int = MICRO) -> dict[int, list[list[list[int]]]]:
    """The samples of each whole step of each process, by rank; processes oldest first.

    Args:
        share: samples of a step on each rank.
    """
    found: dict[int, list[list[list[int]]]] = {rank: [] for rank in range(NUM_RANKS)}
    for path in sorted(trace.glob("rank*.jsonl"), key=lambda path: path.stat().st_mtime):
        samples = [sample for line in path.read_text().splitlines() for sample in json.loads(line)]
        steps = [samples[start : start + share] for start in range(0, len(samples) - share + 1, share)]
        found[int(path.name[len("rank")])].append(steps)
    return found


def global_batches(run: Run, life: int) -> list[list[int]]:
    """The samples of each step of one life over all ranks, in an order of their own."""
    lives = [run.steps[rank][life] for rank in range(NUM_RANKS)]
    return [sorted(sample for rank in ranks for sample in rank) for ranks in zip(*lives, strict=False)]


def record_of(folder: Path) -> dict[str, Any]:
    """What `harness run` wrote."""
    return json.loads((folder / "out-harness_run" / "record.json").read_text())


def compare(clean: Run, found: Run, folder: Path) -> dict[str, Any]:
    """What must be true of a run that went down the ladder, beside the run without a lack of memory."""
    record = record_of(folder)
    resumed = record["attempts"][-1]["resume_from_checkpoint"]
    done = int(Path(resumed).name.replace("_", "-").rpartition("-")[2]) if resumed else 0
    whole = global_batches(clean, 0)
    batches = [global_batches(found, life) for life in range(min(map(len, found.steps.values())))]
    difference = max(abs(found.losses[step] - clean.losses[step]) / clean.losses[step] for step in clean.losses)
    return {
        "finished": found.code == 0 and record["result"] == "finished",
        "attempts": len(record["attempts"]),
        "resumed_at_step": done,
        "steps": len(found.losses),
        "same_global_batches": len(batches) == len(record["attempts"])
        and batches[0][: FAILS_AT - 1] == whole[: FAILS_AT - 1]
        and batches[-1] == whole[done:STEPS],
        "largest_relative_loss_difference": difference,
    }
