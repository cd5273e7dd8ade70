"""The main job under every launcher and template, on gloo processes, against transformers' Trainer on the same data.

Every run trains the same tiny float32 Llama on the same 160 documents of unequal length for 20 steps of 8 samples. Whatever the launcher,
the engine, the number of processes and the cut into micro-batches, each step's loss is the Trainer's within 1e-4.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.faults import forked_script
from tests.faults.fork_ranks import ForkServer
from tests.launching import ROOT, Kind, Result, run_launcher

NUM_STEPS, GLOBAL_BATCH = 20, 8
TOLERANCE = 1e-4


def documents() -> list[str]:
    """160 short texts of 3 to 60 characters, always the same."""
    source = random.Random(0)
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]
    return [" ".join(source.choice(words) for _ in range(source.randint(1, 10)))[: source.randint(3, 60)] for _ in range(160)]


def make_model_folder(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.trainer_utils import set_seed

    from harness.modeling import byte_tokenizer

    set_seed(7)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=259,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def trainer_losses(model_folder: Path, texts: list[str], output: Path, **more: Any) -> list[float]:
    """Losses of transformers' own Trainer: one process, accumulation 2, documents in order; `more` are further TrainingArguments."""
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    from harness.modeling import byte_tokenizer

    tokenizer = byte_tokenizer()
    rows = [{"input_ids": [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]} for text in texts]

    def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
        import torch

        longest = max(len(sample["input_ids"]) for sample in samples)
        ids = torch.full((len(samples), longest), tokenizer.pad_token_id)
        labels = torch.full((len(samples), longest), -100)
        mask = torch.zeros(len(samples), longest, dtype=torch.long)
        for row, sample in enumerate(samples):
            size = len(sample["input_ids"])
            ids[row, :size] = labels[row, :size] = torch.tensor(sample["input_ids"])
            mask[row, :size] = 1
        return {"input_ids": ids, "labels": labels, "attention_mask": mask}

    values: dict[str, Any] = {
        "output_dir": str(output),
        "per_device_train_batch_size": GLOBAL_BATCH // 2,
        "gradient_accumulation_steps": 2,
        "max_steps": NUM_STEPS,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "linear",
        "warmup_steps": 3,
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "train_sampling_strategy": "sequential",
        "remove_unused_columns": False,
        "disable_tqdm": True,
        "seed": 1,
    }
    arguments = TrainingArguments(**(values | more))
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(model_folder, dtype="float32"), args=arguments, train_dataset=rows, data_collator=collate
    )
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("reference")
    texts = documents()
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    make_model_folder(folder / "model")
    losses = trainer_losses(folder / "model", texts, folder / "trainer")
    assert len(losses) == NUM_STEPS
    return {"folder": folder, "losses": losses}


def arguments(reference: dict[str, Any], output: Path, num_processes: int, micro: int, *more: str) -> list[str]:
    folder = reference["folder"]
    accumulation = GLOBAL_BATCH // (num_processes * micro)
    values = {
        "model_name_or_path": folder / "model",
        "train_file": folder / "data.jsonl",
        "packing": "none",
        "train_sampling_strategy": "sequential",
        "validation_split_percentage": 0,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": accumulation,
        "max_steps": NUM_STEPS,
        "learning_rate": 1e-3,
        "warmup_steps": 3,
        "weight_decay": 0.01,
        "logging_steps": 1,
        "precision": "fp32",
        "save_steps": 1000,
        "data_cache_dir": folder / "cache",
        "output_dir": output,
    }
    return [*(token for name, value in values.items() for token in (f"--{name}", str(value))), *more]


def check_run(result: Result, reference: dict[str, Any], engine: str, num_processes: int) -> None:
    assert result.returncode == 0, result.stdout
    assert result.stdout.count(f"engine={engine} num_processes={num_processes} backend=gloo precision=fp32") == 1, result.stdout
    assert result.exit_json is not None and result.exit_json["code"] == 0
    expected = reference["losses"]
    # The Trainer rounds what it logs to 4 digits or more, by version; its own rounding is allowed for.
    wrong = [
        (step + 1, ours, theirs)
        for step, (ours, theirs) in enumerate(zip(result.losses, expected, strict=True))
        if abs(ours - theirs) > TOLERANCE * theirs + 5e-5
    ]
    assert not wrong, wrong
    row = result.rows[-1]
    needed = "step epoch loss grad_norm learning_rate num_input_tokens num_label_tokens tokens_per_second_per_gpu step_time_s"
    assert set(needed.split()) | {"micro_batch_size", "gradient_accumulation_steps"} <= set(row)


def loads_and_generates(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight  # tied weights stay tied
    ids = tokenizer("alpha", return_tensors="pt").input_ids
    with torch.no_grad():
        out = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert out.shape[1] > ids.shape[1]


DS, FSDP = ROOT / "ds_configs", ROOT / "fsdp_configs"
CASES: dict[str, tuple[Kind | Literal["fork"], int, int, str, list[str], dict[str, Any]]] = {
    # name: launcher, processes, micro-batch, engine printed, arguments, options of the launch
    # "fork" is none, where a flag of the training is tried under an engine that has its launcher above.
    "python": ("python", 1, 4, "ddp", [], {}),
    "torchrun-ddp": ("torchrun", 2, 2, "ddp", [], {}),
    "torchrun-fsdp": ("torchrun", 2, 4, "fsdp", ["--fsdp", "full_shard"], {}),
    "torchrun-zero2": ("torchrun", 2, 2, "zero2", ["--deepspeed", str(DS / "zero2.json")], {}),
    "accelerate-full_shard": ("accelerate", 2, 2, "fsdp", [], {"config_file": FSDP / "full_shard.yaml"}),
    "accelerate-full_shard_offload": ("accelerate", 2, 2, "fsdp", [], {"config_file": FSDP / "full_shard_offload.yaml"}),
    "accelerate-shard_grad_op": ("accelerate", 2, 2, "fsdp", [], {"config_file": FSDP / "shard_grad_op.yaml"}),
    "accelerate-hybrid_shard": ("accelerate", 4, 1, "fsdp", [], {"config_file": FSDP / "hybrid_shard.yaml"}),
    "deepspeed-zero1": ("deepspeed", 2, 2, "zero1", ["--deepspeed", str(DS / "zero1.json")], {}),
    "deepspeed-zero2": ("deepspeed", 2, 4, "zero2", ["--deepspeed", str(DS / "zero2.json")], {}),
    "deepspeed-zero2_offload": ("deepspeed", 2, 2, "zero2", ["--deepspeed", str(DS / "zero2_offload.json")], {}),
    "deepspeed-zero3": ("deepspeed", 2, 2, "zero3", ["--deepspeed", str(DS / "zero3.json")], {}),
    "deepspeed-zero3_offload": ("deepspeed", 2, 4, "zero3", ["--deepspeed", str(DS / "zero3_offload.json")], {}),
    "deepspeed-module": (
        "deepspeed",
        2,
        2,
        "zero3",
        ["--deepspeed", str(DS / "zero3.json")],
        {"script": Path("harness.run_clm"), "launcher_args": ["--module"]},
    ),
    "checkpointing-selective": ("fork", 2, 2, "fsdp", ["--fsdp", "full_shard", "--activation_checkpointing", "selective"], {}),
    "checkpointing-full-zero3": (
        "fork",
        2,
        2,
        "zero3",
        ["--deepspeed", str(DS / "zero3.json"), "--gradient_checkpointing"],
        {},
    ),
}


# What other cases cover too is left to the long form.
LONG = ("torchrun-fsdp", "torchrun-zero2", "deepspeed-zero2", "deepspeed-zero2_offload", "deepspeed-module")
# Each launcher starts the script itself once; with its other templates, in the short form, one whose training processes are forked.
WHOLE = ("python", "torchrun-ddp", "accelerate-full_shard", "deepspeed-zero3")
FORMS = [
    *((name, CASES[name][0] != "fork" and name not in WHOLE) for name in CASES if name not in LONG),
    *(pytest.param(name, False, marks=pytest.mark.slow) for name in CASES if CASES[name][0] != "fork" and name not in WHOLE),
]


@pytest.mark.parametrize(("name", "forked"), FORMS)
def test_every_launcher_and_template_trains_like_the_trainer(
    name: str, forked: bool, server: ForkServer, reference: dict[str, Any], tmp_path: Path
) -> None:
    kind, num_processes, micro, engine, more, options = CASES[name]
    output = tmp_path / "out"
    command = arguments(reference, output, num_processes, micro, *more)
    if forked:
        options = options | {"script": Path(forked_script.__file__), "extra_env": {forked_script.SERVER_VARIABLE: server.address}}
    if kind == "fork":
        result = server.run(command, num_processes, tmp_path / "life")
    else:
        result = run_launcher(kind, num_processes, command, timeout_s=400, **options)
    check_run(result, reference, engine, num_processes)
    loads_and_generates(output / "final")


def test_zero3_nvme_where_async_io_builds(reference: dict[str, Any], tmp_path: Path) -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False) or shutil.which("ninja") is None:
        pytest.skip("DeepSpeed's async_io op cannot be built here (libaio headers are missing)")
    template = json.loads((DS / "zero3_nvme.json").read_text())
    for part in ("offload_optimizer", "offload_param"):
        template["zero_optimization"][part]["nvme_path"] = str(tmp_path / "nvme")
    (tmp_path / "ds.json").write_text(json.dumps(template))
    output = tmp_path / "out"
    more = ["--deepspeed", str(tmp_path / "ds.json")]
    result = run_launcher("deepspeed", 2, arguments(reference, output, 2, 2, *more), timeout_s=400)
    check_run(result, reference, "zero3", 2)


def test_a_tokenizer_with_more_tokens_grows_the_embedding_the_same_under_every_engine(
    server: ForkServer, reference: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
    from transformers.trainer_utils import set_seed

    from harness.modeling import byte_tokenizer

    set_seed(3)
    small = AutoConfig.from_pretrained(reference["folder"] / "model").to_dict() | {"vocab_size": 250}
    LlamaForCausalLM(LlamaConfig.from_dict(small)).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    losses = {}
    for name in ("python", "torchrun-fsdp", "deepspeed-zero3"):
        _, num_processes, micro, _, more, _ = CASES[name]
        output = tmp_path / name
        changes = ["--model_name_or_path", str(tmp_path / "model"), "--max_steps", "4"]
        command = [*arguments(reference, output, num_processes, micro, *more), *changes]
        result = server.run(command, num_processes, tmp_path / f"{name}-life")
        assert result.returncode == 0, result.stdout
        losses[name] = result.losses
        assert AutoModelForCausalLM.from_pretrained(output / "final").get_input_embeddings().weight.shape[0] == 259
    for name in ("torchrun-fsdp", "deepspeed-zero3"):
        assert losses[name] == pytest.approx(losses["python"], rel=1e-5)
