"""One rank runs out of memory in mid-run: the Trainer, the Trainer with auto_find_batch_size, and this harness, on the same job.

    bash benchmarks/proof.sh [--output proof] [--timeout_s 120]

Two ranks train the same small Llama on the same text under FSDP2 (on GPUs; on CPU ranks accelerate has no FSDP, there it is DDP for the
Trainer). Before step 6 the last rank's memory is limited for good: on a GPU to less than a step needs, on the CPU by an allocation that
fails whenever a micro-batch has more than two samples. Reported: did it finish, after how long did it end, steps done, steps lost. Writes
proof.json and losses.png, prints a table last. A job that says nothing more is ended after --timeout_s and counts as hanging.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
import uuid
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
FAIL_AT, STEPS, MICRO_BATCH, MOST_SAMPLES = 6, 16, 8, 2
LIMIT_SHARE = 0.6  # of what a step needs on top of weights and optimizer state
SHAPES = {
    "cuda": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 8},
    "cpu": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
}
SYSTEMS = ("trainer", "trainer-auto-batch", "harness", "harness-clean")


class Limit:
    """Takes memory from the last rank from one step on, and in every life that follows."""

    def __init__(self, marker: Path) -> None:
        import torch

        self.marker, self.on_gpu, self.peak_bytes = marker, torch.cuda.is_available(), 0
        self.is_last = int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1
        if self.is_last and marker.exists():
            self.apply(float(marker.read_text()))

    def apply(self, num_bytes: float) -> None:
        import torch

        if self.on_gpu:
            device = torch.cuda.current_device()
            torch.cuda.set_per_process_memory_fraction(num_bytes / torch.cuda.get_device_properties(device).total_memory, device)

    def see_peak(self) -> None:
        """Called before anybody resets the allocator's peak."""
        import torch

        self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated() if self.on_gpu else 0)

    def before_step(self, step: int) -> None:
        """Called with the step that begins, from 1."""
        import torch

        if step != FAIL_AT or not self.is_last or self.marker.exists():
            return
        limit = 1.0
        if self.on_gpu:
            torch.cuda.empty_cache()
            self.see_peak()
            held, peak = torch.cuda.memory_allocated(), self.peak_bytes
            limit = held + LIMIT_SHARE * (peak - held)
        self.marker.write_text(str(limit))
        self.apply(limit)
        print("[proof] the last rank's memory is limited from here on", flush=True)

    def forward(self, num_samples: int) -> None:
        """On the CPU, called with the samples of a micro-batch: the allocation that fails."""
        import torch

        if not self.on_gpu and self.is_last and self.marker.exists() and num_samples > MOST_SAMPLES:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate 2.00 GiB ({num_samples} samples, {MOST_SAMPLES} fit)")


def hook(module: Any, limit: Limit) -> None:
    """The embedding sees every micro-batch first."""

    def before(_: Any, inputs: tuple[Any, ...]) -> None:
        if module.training:
            limit.forward(int(inputs[0].shape[0]))

    module.get_input_embeddings().register_forward_pre_hook(before)


def harness_worker(tokens: list[str]) -> int:
    from harness import guard, run_clm

    if guard.needs_guard():
        return guard.main()
    run_clm.stand_by(tokens)
    from harness import job, trainer

    limit = Limit(Path(os.environ["PROOF_MARKER"])) if os.environ.get("PROOF_MARKER") else None
    if limit is not None:
        counts, make, read = trainer.Trainer._global_counts, job._recovery, trainer.StepWatch.read

        def counted(self: Any, batch: Any) -> Any:
            limit.before_step(self.state.step + 1)
            return counts(self, batch)

        def made(start: Any, engine: Any, *rest: Any) -> Any:
            hook(engine.module, limit)
            return make(start, engine, *rest)

        def reading(self: Any) -> Any:  # the log resets the peak after each row
            limit.see_peak()
            return read(self)

        trainer.Trainer._global_counts, job._recovery = counted, made  # type: ignore[method-assign]
        trainer.StepWatch.read = reading  # type: ignore[method-assign]
    return run_clm.main(tokens)


def trainer_worker(options: dict[str, Any]) -> int:
    """The same job with transformers' Trainer, as its users write it."""
    import torch
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

    set_seed(42)
    text = b"".join(Path(name).read_bytes() for name in options["files"])
    length = options["block_size"]
    rows = [list(text[start : start + length]) for start in range(0, len(text) - length, length)][: options["num_samples"]]
    data = Dataset.from_dict({"input_ids": rows, "labels": rows})
    model = LlamaForCausalLM(LlamaConfig(vocab_size=259, max_position_embeddings=4096, **options["shape"]))
    limit = Limit(Path(os.environ["PROOF_MARKER"]))
    hook(model, limit)

    class Watch(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            limit.before_step(state.global_step + 1)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if state.is_world_process_zero and logs and "loss" in logs:
                with open(Path(args.output_dir) / "metrics.jsonl", "a") as file:
                    file.write(json.dumps({"kind": "train", "step": state.global_step, "loss": logs["loss"]}) + "\n")

    use_cuda = torch.cuda.is_available()
    arguments = TrainingArguments(
        output_dir=options["output_dir"],
        per_device_train_batch_size=MICRO_BATCH,
        max_steps=STEPS,
        learning_rate=1e-4,
        logging_steps=1,
        logging_first_step=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        bf16=use_cuda,
        use_cpu=not use_cuda,
        ddp_timeout=600,
        auto_find_batch_size=options["auto"],
    )
    Path(options["output_dir"]).mkdir(parents=True, exist_ok=True)
    Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Watch()]).train()
    return 0


def command(system: str, folder: Path, device: str, port: int, num_ranks: int) -> list[str]:
    stdlib = Path(sysconfig.get_path("stdlib"))
    files = sorted(str(path) for path in stdlib.glob("*.py"))[:60]
    block = 1024 if device == "cuda" else 64
    output = folder / system / "out"
    common = ["--num_processes", str(num_ranks), "--main_process_port", str(port)]
    if system.startswith("harness"):
        shape = ",".join(f"{name}={value}" for name, value in SHAPES[device].items())
        start = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(num_ranks), "--master_port", str(port), __file__]
        tokens = ["--model_type", "llama", "--tokenizer_name", "bytes", "--config_overrides", shape, "--train_file", *files]
        tokens += ["--block_size", str(block), "--per_device_train_batch_size", str(MICRO_BATCH), "--max_steps", str(STEPS)]
        tokens += [
            "--learning_rate",
            "1e-4",
            "--logging_steps",
            "1",
            "--save_strategy",
            "no",
            "--save_final",
            "False",
            "--fsdp",
            "full_shard",
        ]
        tokens += ["--data_cache_dir", str(folder / "cache"), "--output_dir", str(output), "--validation_split_percentage", "0"]
        return [*start, *tokens]
    options = {
        "files": files,
        "block_size": block,
        "num_samples": STEPS * MICRO_BATCH * num_ranks * 2,
        "shape": SHAPES[device],
        "output_dir": str(output),
        "auto": system == "trainer-auto-batch",
    }
    yaml = ["--config_file", str(ROOT / "fsdp_configs" / "full_shard.yaml")]
    start = [sys.executable, "-m", "accelerate.commands.launch", *yaml, *common]
    if device == "cpu":
        start = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(num_ranks), "--master_port", str(port)]
    return [*start, __file__, "--trainer", json.dumps(options)]


def run(system: str, folder: Path, device: str, port: int, num_ranks: int, timeout_s: float) -> dict[str, Any]:
    """One system; ended when it has said nothing for `timeout_s`."""
    from harness.processes import processes_with, send

    output, log = folder / system / "out", folder / system / "log.txt"
    output.parent.mkdir(parents=True)
    environment = dict(os.environ, OMP_NUM_THREADS="1" if device == "cpu" else "8", TOKENIZERS_PARALLELISM="false", PROOF_WORKER="1")
    mark = environment["PROOF_RUN"] = uuid.uuid4().hex  # the launcher's ranks have sessions of their own
    if system != "harness-clean":
        environment["PROOF_MARKER"] = str(output.parent / "limited")
    with open(log, "w") as file:
        started = time.monotonic()
        job = command(system, folder, device, port, num_ranks)
        process = subprocess.Popen(job, stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, start_new_session=True)
        failed_at, said, said_at, code = None, 0, started, None
        while code is None:
            time.sleep(0.2)
            now, size = time.monotonic(), log.stat().st_size
            if size != said:
                said, said_at = size, now
            if failed_at is None and "[proof] the last rank" in log.read_text(errors="replace"):
                failed_at = now
            code = process.poll()
            if code is None and now - said_at > timeout_s:
                send(processes_with("PROOF_RUN", mark), signal.SIGKILL)
                process.wait()
                code = "hangs"
    metrics = output / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    ladder = json.loads((output / "ladder.json").read_text()) if (output / "ladder.json").exists() else {"steps_down": []}
    ended_s = time.monotonic() - (failed_at or started)
    return {
        "system": system,
        "end": "finished" if code == 0 else "hangs" if code == "hangs" else f"dies (code {code})",
        "seconds_from_the_limit_to_the_end": round(ended_s, 1) if failed_at else None,
        "losses": {row["step"]: row["loss"] for row in rows if row.get("kind") == "train"},
        "steps_down": [step["change"] for step in ladder["steps_down"]],
        "step_down_seconds": round(sum(step.get("seconds", 0.0) for step in ladder["steps_down"]), 2),
        "lost_steps": sum(row.get("lost_steps") or 0 for row in rows if row.get("event") == "resume"),
        "tail": "" if code == 0 else log.read_text(errors="replace")[-1500:],
    }


def draw(results: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5))
    for result in results:
        steps = sorted(int(step) for step in result["losses"])
        style = "--" if result["system"] == "harness-clean" else "-"
        axes.plot(steps, [result["losses"][step] for step in steps], style, marker=".", label=f"{result['system']}: {result['end']}")
    axes.axvline(FAIL_AT, color="grey", linewidth=0.8)
    axes.set(xlabel="optimizer step", ylabel="loss", title=f"The last rank's memory is limited before step {FAIL_AT}")
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> int:
    if os.environ.get("PROOF_WORKER"):
        return trainer_worker(json.loads(sys.argv[2])) if sys.argv[1] == "--trainer" else harness_worker(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("proof"))
    parser.add_argument("--timeout_s", type=float, default=120)
    parser.add_argument("--num_ranks", type=int, default=2)
    parser.add_argument("--only", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    options = parser.parse_args()
    import torch

    device = "cuda" if torch.cuda.device_count() >= options.num_ranks else "cpu"
    folder = options.output.resolve()
    if folder.exists():
        print(f"{folder} exists already: choose another --output", file=sys.stderr)
        return 2
    folder.mkdir(parents=True)
    results: list[dict[str, Any]] = []
    for number, system in enumerate(options.only):
        results.append(run(system, folder, device, 29870 + number, options.num_ranks, options.timeout_s))
        print(f"{system}: {results[-1]['end']}", flush=True)
        card = torch.cuda.get_device_name(0) if device == "cuda" else "CPU ranks (gloo)"
        facts = {"device": card, "ranks": options.num_ranks, "torch": torch.__version__, "limit_before_step": FAIL_AT}
        (folder / "proof.json").write_text(json.dumps({"facts": facts, "results": results}, indent=1))
    with contextlib.suppress(ImportError):
        draw(results, folder / "losses.png")
    clean = next((result["losses"] for result in results if result["system"] == "harness-clean"), {})
    print(f"{'system':20s} {'end':16s} {'after s':>8s} {'steps':>6s} {'lost':>5s} {'down s':>7s} {'loss diff':>10s}  ladder")
    for result in results:
        pairs = [(loss, clean[step]) for step, loss in result["losses"].items() if step in clean and result["system"] == "harness"]
        difference = max((abs(ours - theirs) / theirs for ours, theirs in pairs), default=float("nan"))
        print(
            f"{result['system']:20s} {result['end']:16s} {result['seconds_from_the_limit_to_the_end'] or 0:8.1f} {len(result['losses']):6d}"
            f" {result['lost_steps']:5d} {result['step_down_seconds']:7.2f} {difference:10.2e}  {'; '.join(result['steps_down'])}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
