"""The systems of benchmarks/throughput.py, each trained in processes of its own: `python benchmarks/contenders.py TRIAL`, a Trial as JSON.

Rank 0 writes result.json into the trial's folder. A figure is the mean of the last half of the steps.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks.llama_shapes import shape_of  # noqa: E402

LORA_R = 16
PROFILE_FILE = "profile/summary.txt"  # in a trial's run folder


@dataclasses.dataclass(frozen=True)
class System:
    """How one contender is started and what it is compared with.

    Attributes:
        kind: whose loop.
        rival: the system that its speed is divided by.
        flags: of `run_clm.py`, beside those that all have.
        deepspeed: name of a file in ds_configs/, for ours and for the Trainer.
        yaml: started by `accelerate launch` on fsdp_configs/full_shard.yaml; otherwise by torchrun.
        lora: adapters of LORA_R on every linear layer but the head, on a base in bf16.
        rows: "random", or rows packed out of "documents", which are kept apart where they are "isolated".
        needs: a package that must be there.
        all_cores: OMP_NUM_THREADS is each process's part of the cores; launchers set 1.
    """

    kind: Literal["ours", "trainer", "torchtitan"]
    rival: str = ""
    flags: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    deepspeed: str = ""
    yaml: bool = False
    lora: bool = False
    rows: Literal["random", "documents", "isolated"] = "random"
    needs: str = ""
    all_cores: bool = False


_FSDP = {"fsdp": "full_shard"}
SYSTEMS: dict[str, System] = {
    "fsdp": System("ours", "trainer-fsdp", _FSDP),
    "trainer-fsdp": System("trainer", yaml=True),
    "zero3": System("ours", "trainer-zero3", deepspeed="zero3"),
    "trainer-zero3": System("trainer", deepspeed="zero3"),
    "torchtitan": System("torchtitan", needs="torchtitan"),
    "fsdp-fp8": System("ours", "fsdp", {**_FSDP, "fp8": "tensorwise"}, needs="torchao"),
    "lora-fsdp": System("ours", "trainer-lora-fsdp", _FSDP, lora=True),
    "trainer-lora-fsdp": System("trainer", yaml=True, lora=True),
    "lora-ddp": System("ours", "trainer-lora-ddp", lora=True),
    "trainer-lora-ddp": System("trainer", lora=True),
    "packed": System("ours", flags=_FSDP, rows="documents"),
    "isolated-mask": System("ours", "packed", {**_FSDP, "attn_implementation": "sdpa"}, rows="isolated"),
    "isolated-flex": System("ours", "packed", {**_FSDP, "attn_implementation": "flex_attention"}, rows="isolated"),
    "isolated-varlen": System("ours", "packed", {**_FSDP, "attn_implementation": "varlen"}, rows="isolated"),
    "isolated-flash": System("ours", "packed", {**_FSDP, "attn_implementation": "flash_attention_2"}, rows="isolated", needs="flash_attn"),
    "zero3-offload": System("ours", "trainer-zero3-offload", deepspeed="zero3_offload"),
    "trainer-zero3-offload": System("trainer", deepspeed="zero3_offload"),
    "trainer-zero3-offload-cores": System("trainer", deepspeed="zero3_offload", all_cores=True),
}
GROUPS: dict[str, list[str]] = {
    "base": ["fsdp", "trainer-fsdp", "zero3", "trainer-zero3", "torchtitan", "fsdp-fp8"],
    "lora": ["lora-fsdp", "trainer-lora-fsdp"],
    "lora-one-card": ["lora-ddp", "trainer-lora-ddp"],
    "isolation": ["packed", "isolated-varlen", "isolated-mask", "isolated-flex", "isolated-flash"],
    "offload": ["zero3-offload", "trainer-zero3-offload", "trainer-zero3-offload-cores"],
}


@dataclasses.dataclass(frozen=True)
class Trial:
    """One run of one system.

    Attributes:
        micro_batch: samples at once; the planner of ours may take another where that does not fit.
        samples: of each GPU in an optimizer step.
        sequence: tokens of a sample.
        profile: record the two steps before the half, which the figure leaves out.
        work: folder of its own.
    """

    system: str
    size: str
    micro_batch: int
    samples: int
    sequence: int
    steps: int
    num_gpus: int
    profile: bool
    work: str

    @property
    def half(self) -> int:
        """Steps that do not count."""
        return self.steps // 2

    @property
    def profile_steps(self) -> str | None:
        return f"{max(1, self.half - 1)}-{max(1, self.half)}" if self.profile else None

    @property
    def run_folder(self) -> Path:
        return Path(self.work) / "run"

    def command(self, port: int) -> list[str]:
        """Starts its processes on this machine."""
        if SYSTEMS[self.system].yaml:
            launch = ["-m", "accelerate.commands.launch", "--config_file", str(ROOT / "fsdp_configs" / "full_shard.yaml")]
            launch += ["--mixed_precision", "bf16", "--num_processes", str(self.num_gpus), "--main_process_port", str(port)]
        else:
            launch = ["-m", "torch.distributed.run", "--nproc_per_node", str(self.num_gpus), "--master_port", str(port)]
        return [sys.executable, *launch, str(Path(__file__).resolve()), json.dumps(dataclasses.asdict(self))]

    def environment(self, num_cores: int) -> dict[str, str]:
        """What its processes get beside this one's environment."""
        return {"OMP_NUM_THREADS": str(max(1, num_cores // self.num_gpus))} if SYSTEMS[self.system].all_cores else {}


# ------------------------------------------------------------------------------------------------------------------------ rows


def document_lengths(sequence: int, seed: int) -> list[int]:
    """Documents of one row, in tokens: as long as web pages are (log-normal, half of them below 500, mean 800), the last one cut off."""
    import numpy as np

    generator = np.random.default_rng(seed)
    lengths: list[int] = []
    while sum(lengths) < sequence:
        lengths.append(min(max(16, int(generator.lognormal(np.log(500), 1.0))), sequence - sum(lengths)))
    return lengths


def make_rows(trial: Trial) -> list[dict[str, Any]]:
    """The same random tokens for every system; steps repeat them. Rows of documents predict no document's first token, isolated or not."""
    import numpy as np

    kind, vocabulary = SYSTEMS[trial.system].rows, shape_of(trial.size)["vocab_size"]
    tokens = np.random.default_rng(0).integers(0, vocabulary, (trial.samples * trial.num_gpus, trial.sequence))
    rows: list[dict[str, Any]] = []
    for index, row in enumerate(tokens):
        labels, more = row.copy(), {}
        if kind != "random":
            lengths = document_lengths(trial.sequence, index)
            labels[np.cumsum([0, *lengths[:-1]])] = -100
            if kind == "isolated":
                more["document_ids"] = np.repeat(np.arange(len(lengths)), lengths)
                more["position_ids"] = np.concatenate([np.arange(length) for length in lengths])
        rows.append({name: values.tolist() for name, values in {"input_ids": row, "labels": labels, **more}.items()})
    return rows * trial.steps


# --------------------------------------------------------------------------------------------------------------------- contenders


def run_ours(trial: Trial) -> dict[str, Any]:
    """`run_clm.train` on the rows; figures from its metrics."""
    from harness import job, modeling
    from harness.run_clm import train

    system, configs = SYSTEMS[trial.system], []
    if system.lora:  # a base made from scratch is kept for its adapters' sake, which takes gigabytes of disk and no part of a step
        job._keep_base = lambda *_: None  # type: ignore[assignment]
    build_empty = modeling.build_empty

    def noted(*args: Any, **kwargs: Any) -> Any:
        empty = build_empty(*args, **kwargs)
        configs.append(empty.config)
        return empty

    modeling.build_empty = noted
    config: dict[str, Any] = {
        "model_type": "llama",
        "config_overrides": ",".join(f"{name}={str(value).lower()}" for name, value in shape_of(trial.size).items()),
        "tokenizer_name": "bytes",
        "block_size": trial.sequence,
        "per_device_train_batch_size": trial.micro_batch,
        "gradient_accumulation_steps": trial.samples // trial.micro_batch,
        "max_steps": trial.steps,
        "logging_steps": trial.half,
        "learning_rate": 1e-4,
        "precision": "bf16",
        "save_strategy": "no",
        "save_final": False,
        "validation_split_percentage": 0,
        "gpu_monitor_interval_s": 0,
        "overwrite_output_dir": True,
        "output_dir": str(trial.run_folder),
        **({"deepspeed": str(ROOT / "ds_configs" / f"{system.deepspeed}.json")} if system.deepspeed else {}),
        **({"lora_r": LORA_R} if system.lora else {}),
        **({"profile_steps": trial.profile_steps} if trial.profile else {}),
        **system.flags,
    }
    code = train(config, train_dataset=make_rows(trial))
    assert code == 0, f"the run ended with {code}"
    lines = (trial.run_folder / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["kind"] == "train"]
    downs = [row["change"] for row in map(json.loads, lines) if row.get("event") == "oom"]
    found = {"step_s": rows[-1]["step_time_s"], "peak_gib": rows[-1].get("peak_memory_gib"), "loss": rows[-1]["loss"]}
    return {**found, "note": "; ".join(downs), "attention": configs[0]._attn_implementation, "settings": settings_of(trial.run_folder)}


def settings_of(run_folder: Path) -> dict[str, Any]:
    """What a run of ours ended with, of the settings that trade speed for memory; empty where it writes none."""
    ladder = run_folder / "ladder.json"
    now = json.loads(ladder.read_text())["now"] if ladder.exists() else {}
    names = ("micro_batch_size", "activation_checkpointing", "optimizer_offload", "param_offload")
    return {name: now[name] for name in names if name in now}


def run_trainer(trial: Trial) -> dict[str, Any]:
    """transformers' Trainer with its defaults, timed from the end of half of the steps to the end of all."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainerCallback, TrainingArguments

    from harness.profiling import StepProfiler

    system, on_gpu = SYSTEMS[trial.system], torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    rank, folder = int(os.environ.get("RANK", "0")), trial.run_folder / "profile"
    profiler = StepProfiler(trial.profile_steps, folder, rank, device) if trial.profile_steps else None

    class Watch(TrainerCallback):
        at_half_s = seconds = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if profiler is not None:
                profiler.before(state.global_step + 1)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if profiler is not None:
                profiler.after(state.global_step)
            if state.global_step in (trial.half, trial.steps):
                if on_gpu:
                    torch.cuda.synchronize()
                now = time.perf_counter()
                self.seconds, self.at_half_s = now - self.at_half_s, now

    more: dict[str, Any] = {"deepspeed": str(ROOT / "ds_configs" / f"{system.deepspeed}.json")} if system.deepspeed else {}
    arguments = TrainingArguments(
        output_dir=str(trial.run_folder),
        per_device_train_batch_size=trial.micro_batch,
        gradient_accumulation_steps=trial.samples // trial.micro_batch,
        max_steps=trial.steps,
        learning_rate=1e-4,
        bf16=True,
        save_strategy="no",
        report_to="none",
        logging_steps=trial.steps,
        disable_tqdm=True,
        use_cpu=not on_gpu,
        **more,
    )
    if system.deepspeed and not on_gpu:
        import deepspeed

        deepspeed.init_distributed("gloo")  # on a GPU the Trainer does it
    torch.manual_seed(0)
    dtype = torch.bfloat16 if system.lora else torch.float32
    with device:
        model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**shape_of(trial.size), use_cache=False), dtype=dtype)
    if system.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=LORA_R, lora_alpha=2 * LORA_R, target_modules="all-linear", task_type="CAUSAL_LM"))
    watch = Watch()
    trainer = Trainer(model=model, args=arguments, train_dataset=make_rows(trial), callbacks=[watch])  # type: ignore[arg-type]
    trainer.train()
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    loss = next(row["loss"] for row in trainer.state.log_history if "loss" in row)
    attention = str(model.config._attn_implementation)
    return {"step_s": watch.seconds / (trial.steps - trial.half), "peak_gib": peak, "loss": loss, "note": "", "attention": attention}


def run_torchtitan(trial: Trial) -> dict[str, Any]:
    """torchtitan's own loop, on a text of its own, for it takes no rows: what tokens say does not change how fast they are."""
    import torch
    from torchtitan.models.llama3 import TransformerModelArgs, llama3_args
    from torchtitan.train import Trainer

    shape = shape_of(trial.size)
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
        *("--model.name", "llama3", "--model.flavor", "benchmark", "--model.hf_assets_path", _tokenizer_folder(trial)),
        *("--training.local_batch_size", str(trial.micro_batch), "--training.global_batch_size", str(trial.samples * trial.num_gpus)),
        *("--training.seq_len", str(trial.sequence), "--training.steps", str(trial.steps), "--training.dataset", "c4_test"),
        *("--training.dataset_path", str(Path(trial.work) / "text"), "--optimizer.lr", "1e-4", "--metrics.log_freq", "1"),
        *("--compile.enable", "--activation_checkpoint.mode", "none", "--job.dump_folder", trial.work),
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
    seconds = (times[-1] - times[trial.half - 1]) / (trial.steps - trial.half)
    note = f"torchtitan {importlib.metadata.version('torchtitan')}"
    return {"step_s": seconds, "peak_gib": torch.cuda.max_memory_allocated() / 2**30, "loss": None, "note": note}


def _tokenizer_folder(trial: Trial) -> str:
    """A small tokenizer and text where torchtitan looks for them; written by every rank alike, under its own name."""
    from harness.modeling import byte_tokenizer

    rank = os.environ.get("RANK", "0")
    folder = Path(trial.work) / f"tokenizer-{rank}"
    byte_tokenizer().save_pretrained(folder)
    if rank == "0":
        text = Path(trial.work) / "text"
        text.mkdir(exist_ok=True)
        lines = (json.dumps({"text": "the quick brown fox jumps over the lazy dog " * 200}) + "\n" for _ in range(500))
        (text / "data.json").write_text("".join(lines))
    while not (Path(trial.work) / "text" / "data.json").exists():
        time.sleep(0.1)
    return str(folder)


def main() -> int:
    import torch

    trial = Trial(**json.loads(sys.argv[1]))
    run = {"ours": run_ours, "trainer": run_trainer, "torchtitan": run_torchtitan}[SYSTEMS[trial.system].kind]
    result = run(trial)
    result["threads"] = {"torch": torch.get_num_threads(), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS")}
    if os.environ.get("RANK", "0") == "0":
        (Path(trial.work) / "result.json").write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # nothing is left to do, and some libraries' shutdown waits for others


if __name__ == "__main__":
    sys.exit(main())
