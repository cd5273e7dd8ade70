"""LoRA in the main job, on gloo processes: every engine trains the same adapters, checkpoints hold them, the base stays as it was."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from launch.machine import free_port
from tests.distributed import sharded_four_bit
from tests.faults.fork_ranks import ForkServer
from tests.launching import ROOT, Result, run_launcher

NUM_STEPS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from harness.modeling import byte_tokenizer

    folder = tmp_path_factory.mktemp("lora")
    source = random.Random(0)
    words = ["alpha", "beta", "gamma", "delta", "epsilon"]
    (folder / "data.txt").write_text("\n".join(" ".join(source.choice(words) for _ in range(12)) for _ in range(120)))
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, vocab_size=259
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    return folder


def train(
    server: ForkServer, folder: Path, output: Path, num_processes: int, *more: str, life: str = "life", seen: Path | None = None
) -> Result:
    values = {
        "model_name_or_path": folder / "model",
        "train_file": folder / "data.txt",
        "data_cache_dir": folder / "cache",
        "output_dir": output,
        "block_size": 64,
        "validation_split_percentage": 0,
        "per_device_train_batch_size": 4 // num_processes,
        "max_steps": NUM_STEPS,
        "learning_rate": 1e-2,
        "precision": "fp32",
        "logging_steps": 1,
        "save_steps": 3,
        "lora_r": 4,
        "rank_pattern": '{"v_proj": 2}',
    }
    arguments = [token for name, value in values.items() for token in (f"--{name}", str(value))]
    environment = {"HARNESS_TEST_FROZEN": str(seen)} if seen else {}
    return server.run([*arguments, *more], num_processes, output.with_name(f"{output.name}-{life}"), environment=environment)


def adapter(output: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(output / "final" / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def reference(server: ForkServer, folder: Path) -> Result:
    result = train(server, folder, folder / "one", 1)
    assert result.returncode == 0, result.stdout
    assert "LoRA: r=4, 14 modules, consistent on all ranks" in result.stdout
    assert len(result.losses) == NUM_STEPS and result.losses[-1] < result.losses[0]
    return result


ENGINES = {
    "ddp": [],
    "fsdp": ["--fsdp", "full_shard", "--activation_checkpointing", "full"],
    "zero2": ["--deepspeed", str(ROOT / "ds_configs/zero2.json")],
    "zero3": ["--deepspeed", str(ROOT / "ds_configs/zero3.json")],
}
RESUMED = {"fsdp", "zero3"}  # DDP's checkpoints are made as FSDP's, ZeRO-2's as ZeRO-3's


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_trains_the_same_adapters(engine: str, server: ForkServer, folder: Path, reference: Result, tmp_path: Path) -> None:
    import torch

    result = train(server, folder, tmp_path / "out", 2, *ENGINES[engine], seen=tmp_path / "frozen.json")
    assert result.returncode == 0, result.stdout
    frozen = json.loads((tmp_path / "frozen.json").read_text())
    assert len(frozen["before"]) == 21 and frozen["after"] == frozen["before"]  # to the bit: 14 under adapters, 5 norms, embedding, head
    assert result.losses == pytest.approx(reference.losses, rel=1e-4)
    mine, theirs = adapter(tmp_path / "out"), adapter(folder / "one")
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, rtol=1e-3, atol=2e-4)
    if engine not in RESUMED:
        return
    # Stopped after step 3 and started again, on the same base: the same end.
    shutil.rmtree(tmp_path / "out" / "final")
    shutil.rmtree(tmp_path / "out" / f"checkpoint-{NUM_STEPS}")
    again = train(server, folder, tmp_path / "out", 2, *ENGINES[engine], life="again")
    assert again.returncode == 0 and "resuming at step 3 of 6" in again.stdout, again.stdout
    assert again.losses[-3:] == pytest.approx(reference.losses[-3:], rel=1e-4)
    for name, value in adapter(tmp_path / "out").items():
        torch.testing.assert_close(value, mine[name], rtol=1e-5, atol=1e-6)


def test_weights_of_4_bits_are_cut_and_gathered_to_the_bit(server: ForkServer, tmp_path: Path) -> None:
    server.call(sharded_four_bit.ranks, output=tmp_path / "output.txt")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_of_4_bits_train_the_same_under_fsdp2(precision: str, server: ForkServer, folder: Path, tmp_path: Path) -> None:
    import torch

    flags = ["--load_in_4bit", "--precision", precision]
    one = train(server, folder, tmp_path / "one", 1, *flags)
    assert one.returncode == 0, one.stdout
    assert len(one.losses) == NUM_STEPS and one.losses[-1] < one.losses[0]
    sharded = ["--fsdp", "full_shard", "--activation_checkpointing", "full"]
    two = train(server, folder, tmp_path / "two", 2, *flags, *sharded, seen=tmp_path / "frozen.json")
    assert two.returncode == 0, two.stdout
    frozen = json.loads((tmp_path / "frozen.json").read_text())
    assert len(frozen["before"]) == 21 and frozen["after"] == frozen["before"]
    tolerance = {"fp32": 1e-4, "bf16": 1e-2}[precision]
    assert two.losses == pytest.approx(one.losses, rel=tolerance)
    if precision == "fp32":
        for name, value in adapter(tmp_path / "one").items():
            torch.testing.assert_close(adapter(tmp_path / "two")[name], value, rtol=1e-3, atol=2e-4)
    shutil.rmtree(tmp_path / "two" / "final")
    shutil.rmtree(tmp_path / "two" / f"checkpoint-{NUM_STEPS}")
    again = train(server, folder, tmp_path / "two", 2, *flags, *sharded, life="again")
    assert again.returncode == 0 and "resuming at step 3 of 6" in again.stdout, again.stdout
    assert again.losses[-3:] == pytest.approx(two.losses[-3:], rel=1e-5)


def test_loss_of_the_adapter_on_the_untouched_base(folder: Path, reference: Result, tmp_path: Path) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from harness.lora import merge_adapter

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    ids = tokenizer("alpha beta gamma delta", return_tensors="pt").input_ids
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    with torch.no_grad():
        before = base(ids, labels=ids).loss
        trained = PeftModel.from_pretrained(base, str(folder / "one" / "final"))
        logits = trained(ids).logits
        assert trained(ids, labels=ids).loss < before
        merge_adapter(folder / "one" / "final", tmp_path / "merged")
        torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(ids).logits, logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--target_modules", "q_proj", "no_such"], "no_such is not in LlamaForCausalLM -> choose from q_proj, k_proj"),
        (["--target_layers", "0-2"], "layer 2 out of range 0-1"),
    ],
)
def test_wrong_names_end_every_rank_with_one_message(
    more: list[str], message: str, server: ForkServer, folder: Path, tmp_path: Path
) -> None:
    result = train(server, folder, tmp_path / "out", 2, *more)
    assert result.returncode == 2
    assert result.exit_json is not None and result.exit_json["code"] == 2, result.stdout
    assert result.stdout.count(message) == 1, result.stdout


def compare_two_ranks(case: str, port: int) -> None:
    """Forks two ranks whose adapters differ as `case` says; each prints what it found and whether that was anything."""
    ranks = {}
    for rank in (0, 1):
        pid = os.fork()
        if pid == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            compare_as_a_rank(case)
            sys.stdout.flush()
            os._exit(0)
        ranks[pid] = rank
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks] == [0, 0]


def compare_as_a_rank(case: str) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from harness.args import LoraArguments
    from harness.coordination import start
    from harness.lora import attach_lora, compare_ranks, fingerprint

    coordinator = start(use_cpu=True, timeout_s=60)
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    model, rank = LlamaForCausalLM(config), coordinator.process_index
    r = 4 if case == "r" and rank == 1 else 8
    if not (case == "none" and rank == 1):
        attach_lora(model, LoraArguments(lora_r=r, target_modules=["q_proj"]), seed=rank if case == "seed" else 0)
    found = compare_ranks(coordinator.gather(fingerprint(model)))
    print("\n".join([f"rank {rank} of 2 is done"] + [f"on rank {rank}: {finding.message}" for finding in found]), flush=True)
    coordinator.close()


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("same", ""),
        ("none", "rank 1: 0 LoRA tensors, rank 0: 4"),
        ("r", "model.layers.0.self_attn.q_proj.lora_A.default.weight has shape (4, 16) on rank 1, (8, 16) on rank 0"),
        ("seed", "model.layers.0.self_attn.q_proj.lora_A.default.weight: values differ between rank 1 and rank 0"),
    ],
)
def test_ranks_that_disagree_are_told_apart_on_both(case: str, message: str, server: ForkServer, tmp_path: Path) -> None:
    server.call(compare_two_ranks, case, free_port(), output=tmp_path / "ranks.txt")
    printed = (tmp_path / "ranks.txt").read_text()
    assert printed.count("rank 0 of 2 is done") == 1 and printed.count("rank 1 of 2 is done") == 1, printed
    for rank in (0, 1):
        lines = [line for line in printed.splitlines() if line.startswith(f"on rank {rank}: ")]
        assert len(lines) == bool(message), printed
        assert printed.count(f"on rank {rank}: {message}") == bool(message), printed


def test_the_example_runs(tmp_path: Path) -> None:
    script = ROOT / "launch/example_lora.py"
    result = run_launcher("python", 1, ["--output_dir", str(tmp_path / "out"), "--steps", "10"], script=script, timeout_s=300)
    assert result.returncode == 0, result.stdout
    assert "r check: expected 4, 28 adapters, consistent" in result.stdout
    assert "r check: expected 5, 28 adapters, 28 layers differ" in result.stdout
    assert "card 1: model.layers.2, model.layers.3, model.norm, lm_head" in result.stdout
    line = next(line for line in result.stdout.splitlines() if line.startswith("loss of a training sentence"))
    base, trained, merged = (float(part.rstrip(",").split()[-1]) for part in line.split(": ", 1)[1].split(", "))
    assert trained < base and merged == pytest.approx(trained, abs=1e-3)
