"""What is read of other people's commands, and how rungs are put into them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness import foreign_plan
from harness.findings import UserError
from harness.foreign_command import Script, flag_value, read_command, read_script, with_flag
from harness.foreign_settings import ForeignSettings
from harness.ladder import MemorySettings
from harness.machine import Gpu, Machine
from tests.launching import ROOT

TRAINER = str(ROOT / "examples/hf_trainer.py")
SFT = str(ROOT / "examples/trl_sft.py")
LOOP = str(ROOT / "examples/accelerate_loop.py")


def settings_of(line: str, **names: str) -> ForeignSettings:
    return ForeignSettings(read_command(shlex.split(line)), names, {"HF_HOME": "/nowhere"})


def words(line: list[str]) -> str:
    return shlex.join(line)


@pytest.mark.parametrize(
    ("line", "launcher", "word", "after"),
    [
        ("accelerate launch --config_file x.yaml train.py --arg 1", "accelerate", "train.py", "--arg 1"),
        ("deepspeed --num_gpus=2 train.py --deepspeed ds.json", "deepspeed", "train.py", "--deepspeed ds.json"),
        ("torchrun --nproc_per_node 2 -m pkg.train --lr 1", "torchrun", "pkg.train", "--lr 1"),
        ("python -u train.py -m x", "python", "train.py", "-m x"),
        ("/opt/bin/python3.11 -m torch.distributed.run --nproc_per_node 2 t.py --x", "torchrun", "t.py", "--x"),
        ("env A=1 nice -n 10 uv run accelerate launch t.py", "accelerate", "t.py", ""),
        ("python -m axolotl.cli.train c.yml", "python", "axolotl.cli.train", "c.yml"),
        ("trl sft --config a.yaml", "other", "sft", "--config a.yaml"),
        ("axolotl train a.yaml --x 1", "other", "train", "a.yaml --x 1"),
        ("bash train.sh", "other", "train.sh", ""),
    ],
)
def test_parts_of_a_command(line: str, launcher: str, word: str, after: str) -> None:
    command = read_command(shlex.split(line))
    assert (command.launcher, command.tokens[command.script_at], words(list(command.script_tokens))) == (launcher, word, after)
    assert words([*command.launcher_tokens, word, *command.script_tokens]) == line


@pytest.mark.parametrize("line", ["torchrun --nnodes 2 t.py", "accelerate launch --num_machines=4 t.py", "deepspeed --hostfile h t.py"])
def test_several_machines_are_refused(line: str) -> None:
    with pytest.raises(UserError, match="one machine"):
        read_command(shlex.split(line))
    read_command(shlex.split("torchrun --nnodes 1 t.py --num_machines 3"))  # the script's own flag


def test_flags() -> None:
    tokens = shlex.split("--a 1 --b-c=2 --on --a 3")
    assert [flag_value(tokens, name) for name in ("a", "b_c", "on", "no")] == ["3", "2", "", None]
    assert words(with_flag(tokens, "a", "4")) == "--a 1 --b-c=2 --on --a 4"
    assert words(with_flag(tokens, "b_c", "4")) == "--a 1 --b-c=4 --on --a 3"
    assert words(with_flag(tokens, "on", "True")) == "--a 1 --b-c=2 --on True --a 3"
    assert words(with_flag(tokens, "new", "5")) == words(tokens) + " --new 5"
    assert words(with_flag(["--a", "1"], "a", "")) == "--a"


def test_scripts() -> None:
    assert (read_script(Path(TRAINER)).parser, read_script(Path(SFT)).parser, read_script(Path(LOOP)).parser) == ("transformers", "trl", "")
    assert read_script(Path(LOOP)).flags["per_device_train_batch_size"].default == 8
    assert read_script(Path(LOOP)).flags["gradient_checkpointing"].is_switch
    assert read_script(Path(TRAINER)).resumes
    assert not read_script(Path(LOOP)).restores_count
    assert read_script(Path("/nowhere.py")) == Script()


def test_a_trainers_command() -> None:
    found = settings_of(f"torchrun --nproc_per_node 2 {TRAINER} --output_dir out")
    assert (found.start, found.accumulation, found.engine) == (MemorySettings(8), 1, "ddp")
    rungs = found.ladder(["micro_batch", "gradient_checkpointing", "micro_batch"])
    edited = found.edited(rungs[3], Path("unused"), Path("out/checkpoint-5"))
    assert edited.tokens[4:] == shlex.split(
        "--output_dir out --per_device_train_batch_size 2 --gradient_accumulation_steps 4 --gradient_checkpointing True"
        " --resume_from_checkpoint out/checkpoint-5"
    )
    assert edited.environ == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert edited.diff[0] == "+ --per_device_train_batch_size 2" and edited.diff[-1] == "+ PYTORCH_ALLOC_CONF=expandable_segments:True"
    assert found.edited(found.start, Path("unused")).tokens == list(found.command.tokens)
    assert found.edited(found.start, Path("unused")).diff == []


def test_trl_and_a_loop() -> None:
    assert settings_of(f"python {SFT} --output_dir out").start.activation_checkpointing == "full"  # TRL's default
    loop = settings_of(f"python {LOOP} --per_device_train_batch_size 6 --gradient_accumulation_steps 3")
    (rung,) = [rung for rung in loop.ladder(["micro_batch=2", "gradient_checkpointing"]) if rung.activation_checkpointing == "full"]
    line = words(loop.edited(rung, Path("unused")).tokens[2:])
    assert line == "--per_device_train_batch_size 2 --gradient_accumulation_steps 9 --gradient_checkpointing"
    assert loop.edited(rung, Path("unused")).diff[:4] == [
        "- --per_device_train_batch_size 6",
        "+ --per_device_train_batch_size 2",
        "- --gradient_accumulation_steps 3",
        "+ --gradient_accumulation_steps 9",
    ]


def test_the_global_batch_is_kept_by_every_rung() -> None:
    found = settings_of(f"python {LOOP} --per_device_train_batch_size 10 --gradient_accumulation_steps 3")
    sizes = [rung.micro_batch_size for rung in found.ladder()]
    assert sorted(set(sizes), reverse=True) == [10, 5, 2, 1]
    assert all(30 % size == 0 for size in sizes)
    with pytest.raises(UserError, match="30 samples cannot be cut into micro-batches of 4"):
        found.ladder(["micro_batch=4"])


def test_own_names_and_unknown_ones(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("p.add_argument('--bsz', type=int, default=16)\np.add_argument('--accum', type=int, default=1)\n")
    unnamed = settings_of(f"python {script}")
    assert [rung.micro_batch_size for rung in unnamed.ladder()] == [1]
    with pytest.raises(UserError, match="name it with --names"):
        settings_of(f"python {script} --bsz 8").ladder(["gradient_checkpointing", "micro_batch"])
    named = settings_of(f"python {script}", micro_batch="bsz", accumulation="accum")
    edited = named.edited(named.ladder(["micro_batch"])[1], tmp_path)
    assert words(edited.tokens[2:]) == "--bsz 8 --accum 2"


DEEPSPEED: dict[str, Any] = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 3, "reduce_bucket_size": 500000000},
}


def test_a_deepspeed_json_is_copied_and_changed(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(DEEPSPEED))
    flags = "--per_device_train_batch_size 8 --gradient_accumulation_steps 2"
    found = settings_of(f"deepspeed {TRAINER} {flags} --deepspeed {path}")
    assert (found.engine, found.start.reduce_bucket_size) == ("zero3", 500000000)
    rungs = found.ladder(["micro_batch", "reduce_bucket_size=1e8", "optimizer_offload", "param_offload"])
    edited = found.edited(rungs[-1], tmp_path / "copies")
    copied = tmp_path / "copies" / "ds.json"
    assert flag_value(edited.tokens, "deepspeed") == str(copied)
    changed = json.loads(copied.read_text())
    assert (changed["train_batch_size"], changed["train_micro_batch_size_per_gpu"], changed["gradient_accumulation_steps"]) == (32, 4, 4)
    assert changed["zero_optimization"]["offload_optimizer"]["device"] == changed["zero_optimization"]["offload_param"]["device"] == "cpu"
    assert changed["zero_optimization"]["reduce_bucket_size"] == 100000000
    assert json.loads(path.read_text()) == DEEPSPEED  # the user's own
    assert f"--- {path}" in edited.diff and '+  "train_micro_batch_size_per_gpu": 4,' in edited.diff


def test_a_script_that_takes_the_batch_from_the_json(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import deepspeed\n")
    (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED))
    found = settings_of(f"deepspeed {tmp_path}/train.py --deepspeed_config {tmp_path}/ds.json")
    assert (found.start.micro_batch_size, found.accumulation) == (8, 2)
    edited = found.edited(found.ladder(["micro_batch"])[1], tmp_path / "copies")
    assert words(edited.tokens[2:]) == f"--deepspeed_config {tmp_path}/copies/ds.json"


def test_accelerates_yaml_is_copied_and_changed(tmp_path: Path) -> None:
    path = tmp_path / "fsdp.yaml"
    fsdp = {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": False}}
    path.write_text(yaml.safe_dump(fsdp))
    found = settings_of(f"accelerate launch --config_file {path} {TRAINER}")
    assert (found.engine, found.start.reshard_after_forward) == ("fsdp", False)
    assert found.ladder()[-1] == MemorySettings(1, activation_checkpointing="full", param_offload="cpu")
    edited = found.edited(found.ladder()[-1], tmp_path / "copies")
    assert edited.tokens[:4] == ["accelerate", "launch", "--config_file", f"{tmp_path}/copies/fsdp.yaml"]
    changed = yaml.safe_load((tmp_path / "copies/fsdp.yaml").read_text())["fsdp_config"]
    assert (changed["fsdp_reshard_after_forward"], changed["fsdp_offload_params"]) == (True, True)

    zero = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2, "gradient_accumulation_steps": 1}}
    path.write_text(yaml.safe_dump(zero))
    found = settings_of(f"accelerate launch --config_file {path} {LOOP}")
    assert found.engine == "zero2"
    found.edited(found.ladder(["micro_batch", "optimizer_offload"])[-1], tmp_path / "copies")
    changed = yaml.safe_load((tmp_path / "copies/fsdp.yaml").read_text())["deepspeed_config"]
    assert changed == {"zero_stage": 2, "gradient_accumulation_steps": 2, "offload_optimizer_device": "cpu"}


def test_a_script_with_a_file_of_settings(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("micro_batch_size: 4\ngradient_accumulation_steps: 2\ngradient_checkpointing: false\noutput_dir: out\n")
    found = settings_of(f"axolotl train {path}")
    assert (found.start.micro_batch_size, found.accumulation, found.value("output_dir")) == (4, 2, "out")
    edited = found.edited(found.ladder(["micro_batch", "gradient_checkpointing"])[-1], tmp_path / "copies")
    assert edited.tokens == ["axolotl", "train", f"{tmp_path}/copies/run.yaml"]
    assert yaml.safe_load((tmp_path / "copies/run.yaml").read_text()) == {
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "gradient_checkpointing": True,
        "output_dir": "out",
    }
    # TRL's flags win over its file, and transformers' parser takes a file only alone.
    path.write_text("per_device_train_batch_size: 4\n")
    assert words(settings_of(f"python {SFT} --config {path}").edited(MemorySettings(2, "full"), tmp_path).tokens[4:]) == (
        "--per_device_train_batch_size 2 --gradient_accumulation_steps 2"
    )
    alone = tmp_path / "run.json"
    alone.write_text('{"per_device_train_batch_size": 4}')
    edited = settings_of(f"python {TRAINER} {alone}").edited(MemorySettings(2), tmp_path / "copies", Path("c"))
    assert json.loads(Path(edited.tokens[2]).read_text()) == {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "resume_from_checkpoint": "c",
    }


def test_what_cannot_be_put_into_a_command_is_refused() -> None:
    found = settings_of(f"python {TRAINER}")
    with pytest.raises(UserError) as caught:
        found.ladder(["activation_checkpointing=selective", "optimizer_offload", "loss_chunk_size=64"])
    assert [finding.key for finding in caught.value.findings] == ["--ladder"] * 3
    with pytest.raises(UserError, match="'half' is not a rung"):
        found.ladder(["half"])


def test_the_planner_is_asked_what_the_command_says(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED))
    found = settings_of(
        f"deepspeed --num_gpus 4 {TRAINER} --config_name m --block_size 512 --bf16 --per_device_train_batch_size 8"
        f" --gradient_accumulation_steps 2 --deepspeed {tmp_path}/ds.json"
    )
    machine = Machine((Gpu("card", 1, (9, 0)),) * 2, 2, 1)
    count = foreign_plan.num_ranks_of(found, machine)
    line = foreign_plan.planner_words(found, count, "80GB")
    assert line is not None
    assert words(line) == (
        "--json --engine zero3 --num_gpus 4 --model m --per_device_train_batch_size 8 --gradient_accumulation_steps 2"
        " --loss_chunk_size 0 --precision bf16 --block_size 512 --gpu_memory 80GB"
    )
    assert foreign_plan.num_ranks_of(settings_of(f"accelerate launch {TRAINER}"), machine) == 2
    assert foreign_plan.planner_words(settings_of(f"python {LOOP}"), 1, None) is None


def test_the_planners_ladder_is_taken_as_far_as_the_command_can() -> None:
    found = settings_of(f"python {TRAINER}")

    def entry(settings: MemorySettings, need: float) -> dict[str, Any]:
        return {"settings": settings.to_dict(), "estimate": {"expected_bytes": need}, "step_time_s": 1.0}

    given = MemorySettings(8, loss_chunk_size=0)
    ladder = [entry(given, 90.0), entry(MemorySettings(8, "selective"), 80.0), entry(MemorySettings(4, "full"), 40.0)]
    rungs = found.rungs({"plans": [{"given": entry(given, 90.0), "ladder": ladder}]})
    assert [(rung.settings.micro_batch_size, rung.settings.activation_checkpointing, rung.need_bytes) for rung in rungs] == [
        (8, "none", 90.0),
        (4, "full", 40.0),
    ]


@pytest.mark.parametrize("flag", ["per_device_train_batch_size", "gradient_accumulation_steps"])
def test_more_samples_than_a_step_has_are_refused(flag: str) -> None:
    assert settings_of(f"torchrun {TRAINER} --{flag} 1000000").ladder()
    with pytest.raises(UserError, match=f"--{flag}: must be at most 1,000,000"):
        settings_of(f"torchrun {TRAINER} --{flag} {10**40}")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            f"torchrun {TRAINER} --output_dir o",
            ["micro-batch 8 x accumulation 1 on each rank", "from the newest checkpoint in o, by --resume"],
        ),
        (
            f"torchrun {TRAINER} --per_device_train_batch_size abc",
            ["micro-batch ? x accumulation 1", "--per_device_train_batch_size is 'abc'"],
        ),
        ("torchrun /nowhere/t.py --batch_size 4", ["/nowhere/t.py does not exist", "micro-batch 4 x accumulation ?", "takes no --resume"]),
        ("bash train.sh", ["micro-batch ? x accumulation ?", "no flag for the micro-batch is known"]),
    ],
)
def test_a_dry_run_says_what_was_not_understood(line: str, said: list[str]) -> None:
    lines = settings_of(line).understood()
    assert all(any(text in each for each in lines) for text in said), lines
