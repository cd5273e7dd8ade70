"""`launch/run.py --engine auto`: the run's flags as the planner's, the planner's answer as an engine and a template."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from harness import planner
from harness.machine import Machine
from harness.model_shape import Measured
from launch import auto_engine, machine, run
from launch.auto_engine import Choice, planner_arguments, read_plan, template_of
from launch.command import Options
from tests.test_planner import SHAPE

ROOT = Path(__file__).resolve().parent.parent
MODEL = ["--model_name_or_path", "m", "--output_dir", "out"]


def test_flags_of_the_run_are_the_planners() -> None:
    words = [
        "--model-name-or-path=m",
        "--train_file",
        "a.txt",
        "--block_size",
        "2048",
        "--bf16",
        "--gradient_checkpointing",
        "--lora_r",
        "8",
    ]
    found = planner_arguments([*words, "--target_batch_size", "64", "--per_device_train_batch_size", "4"], 8)
    assert found is not None
    options = planner.parse(found)
    assert (options.model, options.engine, options.num_gpus, options.json, options.lora_r) == ("m", "auto", 8, True, 8)
    assert (options.block_size, options.precision, options.activation_checkpointing) == (2048, "bf16", "full")
    assert (options.per_device_train_batch_size, options.gradient_accumulation_steps) == (4, 2)
    assert planner_arguments(["--train_file", "a.txt"], 8) is None


def test_flags_in_a_yaml_file_count_and_typed_ones_win(tmp_path: Path) -> None:
    model = tmp_path / "config.json"
    model.write_text("{}")
    (tmp_path / "run.yaml").write_text(f"config_name: {model}\nblock_size: 512\noptim: sgd\ntrust_remote_code: false\n")
    found = planner_arguments(["--config", str(tmp_path / "run.yaml"), "--block_size", "1024"], 2)
    assert found is not None
    options = planner.parse(found)
    assert (options.model, options.block_size, options.optim, options.trust_remote_code) == (str(model), 1024, "sgd", False)


@pytest.mark.parametrize(
    ("engine", "settings", "template"),
    [
        ("ddp", {}, None),
        ("fsdp", {}, "full_shard"),
        ("fsdp", {"reshard_after_forward": False}, "shard_grad_op"),
        ("fsdp", {"param_offload": "cpu"}, "full_shard_offload"),
        ("zero1", {}, "zero1"),
        ("zero1", {"optimizer_offload": 1.0}, "zero2_offload"),
        ("zero2", {"optimizer_offload": 1.0}, "zero2_offload"),
        ("zero3", {"optimizer_offload": 1.0}, "zero3"),  # the run's own plan turns the offload on
        ("zero3", {"optimizer_offload": 0.5}, "zero3"),
        ("zero3", {"optimizer_offload": 1.0, "param_offload": "cpu"}, "zero3_offload"),
        ("zero3", {"optimizer_offload": 1.0, "param_offload": "nvme"}, "zero3_nvme"),
    ],
)
def test_templates_that_exist(engine: str, settings: dict[str, Any], template: str | None) -> None:
    found = template_of(engine, {"param_offload": "none", "optimizer_offload": 0.0, "reshard_after_forward": True, **settings})
    assert found == template
    if template is not None:
        folder, suffix = ("fsdp_configs", ".yaml") if engine == "fsdp" else ("ds_configs", ".json")
        assert (ROOT / folder / (template + suffix)).is_file()


@pytest.mark.parametrize("memory", ["80GB", "6GB"])
def test_a_real_plan_is_read(memory: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(planner, "measure", lambda requests: Measured(SHAPE, requests[0]["block_size"] or 0))
    monkeypatch.setattr(planner, "detect_machine", Machine)
    plans: list[dict[str, Any]] = []

    def in_process(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        code = planner.main(command[3:])
        text = capsys.readouterr().out
        plans.append(json.loads(text))
        return subprocess.CompletedProcess(command, code, text, "")

    choice = auto_engine.choose("python", [*MODEL, "--gpu_memory", memory, "--block_size", "4096"], 8, {}, in_process)
    assert choice is not None
    best = plans[0]["chosen"]
    assert (best is None) is (memory == "6GB")
    if best is None:
        assert (choice.engine, choice.template) == ("fsdp", "full_shard_offload")
        assert choice.note.startswith("auto: no engine is predicted to fit")
    else:
        fastest = max(plan["chosen"]["tokens_per_s"] for plan in plans[0]["plans"] if plan["chosen"])
        assert best["tokens_per_s"] == fastest
        assert choice.engine == best["engine"]
        assert f"{fastest:,.0f} tokens/s predicted" in choice.note
        assert "does not fit: ddp" in choice.note


@pytest.mark.parametrize(("engine", "spread"), [("ddp", True), ("zero1", True), ("zero2", True), ("zero3", False), ("fsdp", False)])
def test_what_can_be_spread_further_says_so(engine: str, spread: bool) -> None:
    settings = {"param_offload": "none", "optimizer_offload": 0.0, "reshard_after_forward": True}
    chosen = {"engine": engine, "settings": settings, "estimate": {"expected_bytes": 2**30}, "tokens_per_s": 1000.0}
    assert read_plan(json.dumps({"chosen": chosen, "plans": []})).spread is spread


@pytest.mark.parametrize("text", ["", "no JSON", "[]", json.dumps({"chosen": {}})])
def test_what_is_no_plan_is_no_choice(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a plan|Expecting value"):
        read_plan(text)

    def broken(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 2, text, "error")

    assert auto_engine.choose("python", MODEL, 8, {}, broken) is None


@pytest.mark.parametrize(
    ("options", "script_args", "planned"),
    [
        ({}, MODEL, True),
        ({"num_processes": 1}, MODEL, False),
        ({"engine": "fsdp"}, MODEL, False),
        ({"num_nodes": 2, "node_rank": 0}, MODEL, False),
        ({"script": "mine.py"}, MODEL, False),
        ({"config_file": "mine.yaml"}, MODEL, False),
        ({}, [*MODEL, "--deepspeed", "ds.json"], False),
        ({"num_processes": 2}, [*MODEL, "--use_cpu"], False),
        ({"num_processes": 2}, [*MODEL, "--use_cpu", "--gpu_memory", "24GB"], True),
    ],
)
def test_what_was_said_is_not_planned(
    options: dict[str, Any], script_args: list[str], planned: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "physical_gpus", lambda: ["GPU-0", "GPU-1", "GPU-2", "GPU-3"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(auto_engine, "choose", lambda *args: Choice("zero2", "zero2_offload", "auto: zero2", spread=True))
    chosen = Options(**options)
    found = run.plan_auto(chosen, list(script_args))
    assert (chosen.template == "zero2_offload") is planned
    assert (found == [*script_args, "--engine", "auto"]) is planned
    assert ("launch: auto: zero2" in capsys.readouterr().err) is planned
