"""Templates: what the files say becomes arguments, what they leave open is filled, and the launchers' own parsers read them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from harness.args import Arguments
from harness.deepspeed_json import get_value, read_deepspeed_config, set_value, unresolved
from harness.findings import Finding, UserError, has_errors
from harness.parsing import parse_args
from harness.templates import (
    apply_launch_to_args,
    apply_template_to_args,
    choose_engine,
    load_deepspeed_template,
    num_warmup_steps,
    resolve_deepspeed_config,
    template_precision,
)

ROOT = Path(__file__).resolve().parent.parent
DEEPSPEED_TEMPLATES = sorted((ROOT / "ds_configs").glob("*.json"))

# A user's own file, as it comes: own optimizer and schedule, no micro-batch key, no total_num_steps.
USER_JSON: dict[str, Any] = {
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "weight_decay": 0.0}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 2e-5, "warmup_num_steps": 1000}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "contiguous_gradients": True,
        "overlap_comm": True,
    },
    "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
    "bf16": {"enabled": False},
    "gradient_clipping": 1.0,
    "steps_per_print": 50,
}


def arguments(*flags: str) -> Arguments:
    return parse_args(["--model_type", "llama", "--output_dir", "out", *flags])


def resolve(template: dict[str, Any], *flags: str, num_processes: int = 4, **known: Any) -> tuple[dict[str, Any], list[Finding]]:
    values = {"total_steps": 100, "hidden_size": 64, "precision": "bf16"} | known
    return resolve_deepspeed_config(template, arguments(*flags), num_processes, **values)


def keys(findings: list[Finding], severity: str = "error") -> list[str]:
    return [finding.key for finding in findings if finding.severity == severity]


# ---------------------------------------------------------------- the files in the repository


def test_the_repository_has_these_templates() -> None:
    assert [path.stem for path in DEEPSPEED_TEMPLATES] == ["zero1", "zero2", "zero2_offload", "zero3", "zero3_nvme", "zero3_offload"]


@pytest.mark.parametrize("path", DEEPSPEED_TEMPLATES, ids=lambda path: path.stem)
@pytest.mark.parametrize("num_processes", [1, 2, 4, 8])
def test_every_deepspeed_template_resolves_completely(path: Path, num_processes: int) -> None:
    config, findings = resolve(read_deepspeed_config(path), num_processes=num_processes)
    assert findings == [] and unresolved(config) == []
    assert config["train_batch_size"] == 8 * num_processes
    assert config["zero_optimization"]["stage"] == int(path.stem[4])
    assert "optimizer" not in config and "scheduler" not in config


@pytest.mark.parametrize("path", DEEPSPEED_TEMPLATES, ids=lambda path: path.stem)
def test_deepspeeds_own_parser_reads_every_template_raw_and_resolved(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from accelerate.utils.deepspeed import HfDeepSpeedConfig
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    template = read_deepspeed_config(path)
    assert int(DeepSpeedZeroConfig(**template["zero_optimization"]).stage) == int(path.stem[4])
    assert HfDeepSpeedConfig(str(path)).is_offload() == (path.stem in ("zero2_offload", "zero3_offload", "zero3_nvme"))
    resolved, _ = resolve(template, "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "3", num_processes=1)
    parsed = DeepSpeedConfig(copy.deepcopy(resolved))
    assert (parsed.train_batch_size, parsed.train_micro_batch_size_per_gpu, parsed.gradient_accumulation_steps) == (6, 2, 3)
    assert parsed.bfloat16_config.enabled and not parsed.float16_config.enabled
    assert parsed.gradient_clipping == 1.0
    assert parsed.zero_config.reduce_bucket_size == 64 * 64
    if path.stem == "zero3_nvme":
        assert str(parsed.zero_config.offload_param.nvme_path) == "out/nvme"


def test_deepspeeds_own_parser_reads_the_users_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.config import DeepSpeedConfig

    config, _ = resolve(USER_JSON, num_processes=1, precision="fp16", total_steps=2000)
    parsed = DeepSpeedConfig(config)
    assert parsed.optimizer_params == {"lr": 2e-5, "weight_decay": 0.0, "betas": [0.9, 0.999], "eps": 1e-8}
    assert parsed.scheduler_params["total_num_steps"] == 2000


# ---------------------------------------------------------------- the user's file


def test_user_json_works_as_it_is() -> None:
    args = arguments()
    assert apply_template_to_args(USER_JSON, args, 4) == []
    train = args.train
    assert (train.learning_rate, train.precision, train.lr_scheduler_type) == (2e-5, "fp16", "linear")
    assert (train.warmup_steps, train.logging_steps, train.max_grad_norm) == (1000.0, 50.0, 1.0)
    config, findings = resolve_deepspeed_config(USER_JSON, args, 4, total_steps=5000, hidden_size=64, precision="fp16")
    assert findings == [] and unresolved(config) == []
    assert [config[key] for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")] == [32, 8, 1]
    assert config["scheduler"]["params"]["total_num_steps"] == 5000
    assert config["optimizer"]["params"] == {"lr": 2e-5, "weight_decay": 0.0, "betas": [0.9, 0.999], "eps": 1e-8}
    assert config["zero_optimization"] == USER_JSON["zero_optimization"]  # DeepSpeed's defaults, where the user wrote nothing


def test_resolving_changes_neither_template_nor_arguments() -> None:
    template, args = copy.deepcopy(USER_JSON), arguments()
    before = args.to_dict()
    resolve_deepspeed_config(template, args, 4, total_steps=None, hidden_size=None, precision="auto")
    assert template == USER_JSON and args.to_dict() == before


def test_typed_flags_that_differ_are_named_with_both_values() -> None:
    flags = ("--learning_rate", "1e-4", "--bf16", "--max_grad_norm", "0.5", "--warmup_steps", "10", "--weight_decay", "0.1")
    args = arguments(*flags, "--lr_scheduler_type", "cosine", "--optim", "sgd", "--logging_steps", "7")
    findings = apply_template_to_args(USER_JSON, args, 4)
    assert sorted(keys(findings)) == [
        "fp16.enabled",
        "gradient_clipping",
        "optimizer.params.lr",
        "optimizer.params.weight_decay",
        "optimizer.type",
        "scheduler.params.warmup_num_steps",
        "scheduler.type",
    ]
    text = {finding.key: finding.message for finding in findings}
    assert text["optimizer.params.lr"] == "the template says optimizer.params.lr=2e-05, but --learning_rate is 0.0001"
    assert text["gradient_clipping"] == "the template says gradient_clipping=1.0, but --max_grad_norm is 0.5"
    assert text["fp16.enabled"] == "the template says fp16.enabled=True, but the run's precision is bf16"
    assert text["scheduler.type"] == "the template says scheduler.type=WarmupDecayLR, but --lr_scheduler_type is cosine"
    assert keys(findings, "info") == ["steps_per_print"] and args.train.logging_steps == 7.0
    assert args.train.learning_rate == 1e-4  # what the user typed is left alone


def test_typed_flags_that_agree_are_no_conflict() -> None:
    flags = ("--learning_rate", "2e-5", "--fp16", "--max_grad_norm", "1", "--lr_scheduler_type", "linear", "--warmup_steps", "1000")
    assert apply_template_to_args(USER_JSON, arguments(*flags, "--optim", "adamw_torch", "--logging_steps", "50"), 4) == []


def test_warmup_longer_than_the_run_is_a_warning() -> None:
    _, findings = resolve(USER_JSON, precision="fp16", total_steps=20)
    assert keys(findings, "warning") == ["scheduler.params.warmup_num_steps"] and not has_errors(findings)


# ---------------------------------------------------------------- batch arithmetic


@pytest.mark.parametrize(
    ("template", "flags", "num_processes", "expected"),
    [
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}, (), 16, (32, 2, 1)),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2}, (), 4, (32, 2, 4)),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}, (), 4, (8, 2, 1)),
        ({"train_batch_size": 32, "gradient_accumulation_steps": 1}, (), 4, (32, 8, 1)),
        ({"train_batch_size": 32}, (), 4, (32, 8, 1)),
        ({"train_batch_size": 36}, (), 2, (36, 6, 3)),  # the largest divisor of 18 that is not over 8
        ({"train_batch_size": 64}, ("--per_device_train_batch_size", "2"), 4, (64, 2, 8)),
        ({"train_batch_size": 64}, ("--gradient_accumulation_steps", "4"), 4, (64, 4, 4)),
        ({"train_micro_batch_size_per_gpu": 3}, (), 4, (12, 3, 1)),
        ({"gradient_accumulation_steps": 2}, ("--per_device_train_batch_size", "3"), 4, (24, 3, 2)),
        ({}, ("--per_device_train_batch_size", "3", "--gradient_accumulation_steps", "2"), 4, (24, 3, 2)),
        ({"train_batch_size": "auto"}, ("--target_batch_size", "64", "--per_device_train_batch_size", "4"), 2, (64, 4, 8)),
    ],
)
def test_batch_keys_are_solved(
    template: dict[str, Any], flags: tuple[str, ...], num_processes: int, expected: tuple[int, int, int]
) -> None:
    config, findings = resolve(template, *flags, num_processes=num_processes)
    assert findings == []
    assert tuple(config[key] for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")) == expected
    args = arguments(*flags)
    apply_template_to_args(template, args, num_processes)
    assert (args.train.per_device_train_batch_size, args.train.gradient_accumulation_steps) == expected[1:]


def test_three_batch_keys_that_disagree() -> None:
    template = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
    (finding,) = apply_template_to_args(template, arguments(), 4)
    assert "32 != 2 * 1 * 4" in finding.message
    assert all(key in finding.message for key in template)
    assert finding.fix == "set train_batch_size: 8 or gradient_accumulation_steps: 4 or train_micro_batch_size_per_gpu: 8"


@pytest.mark.parametrize(
    ("template", "flags", "fix"),
    [
        ({"train_batch_size": 30}, (), "set train_batch_size: 28 or 32"),
        ({"train_batch_size": 3}, (), "set train_batch_size: 4"),
        ({"train_batch_size": 30, "train_micro_batch_size_per_gpu": 2}, (), "set train_batch_size: 24 or 32"),
        ({"train_batch_size": 8.5}, (), 'write a number, or "auto"'),
        ({"train_batch_size": "32"}, (), 'write a number, or "auto"'),
        ({"train_micro_batch_size_per_gpu": 0}, (), 'write a number, or "auto"'),
        (
            {"train_micro_batch_size_per_gpu": 4},
            ("--per_device_train_batch_size", "2"),
            'make the two equal, or set "train_micro_batch_size_per_gpu" to "auto"',
        ),
        ({"train_batch_size": 32}, ("--target_batch_size", "64"), 'make the two equal, or set "train_batch_size" to "auto"'),
    ],
)
def test_impossible_batches_say_how_to_mend_them(template: dict[str, Any], flags: tuple[str, ...], fix: str) -> None:
    (finding,) = apply_template_to_args(template, arguments(*flags), 4)
    assert finding.severity == "error" and finding.fix == fix


# ---------------------------------------------------------------- precision


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_auto_precision_is_the_runs(precision: str) -> None:
    template = {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}
    config, findings = resolve(template, precision=precision)
    assert findings == [] and (config["fp16"]["enabled"], config["bf16"]["enabled"]) == (precision == "fp16", precision == "bf16")
    config, findings = resolve({}, precision=precision)  # no block at all
    assert findings == [] and (config["fp16"]["enabled"], config["bf16"]["enabled"]) == (precision == "fp16", precision == "bf16")


def test_precision_not_known_yet_stays_open() -> None:
    config, findings = resolve({"bf16": {"enabled": "auto"}}, precision="auto")
    assert findings == [] and unresolved(config) == ["bf16.enabled"]


@pytest.mark.parametrize(
    ("template", "decided"),
    [
        ({"fp16": {"enabled": True}}, "fp16"),
        ({"bf16": {"enabled": True}}, "bf16"),
        ({"bfloat16": {"enabled": True}}, "bf16"),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": False}}, "fp32"),
        ({"fp16": {"enabled": False}}, None),
        ({"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}, None),
        ({}, None),
    ],
)
def test_what_a_template_says_about_precision(template: dict[str, Any], decided: str | None) -> None:
    assert template_precision(template) == decided
    args = arguments()
    assert apply_template_to_args(template, args, 1) == []
    assert args.train.precision == (decided or "auto")


def test_fp16_in_the_file_and_fp32_in_the_run() -> None:
    _, findings = resolve({"fp16": {"enabled": True}}, "--precision", "fp32", precision="fp32")
    (finding,) = findings
    assert finding.severity == "error" and "fp16.enabled=True" in finding.message and "fp32" in finding.message and '"auto"' in finding.fix


def test_one_precision_switched_off_in_the_file_and_asked_for() -> None:
    _, findings = resolve({"bf16": {"enabled": False}}, "--bf16")
    assert keys(findings) == ["bf16.enabled"]
    assert keys(apply_template_to_args({"fp16": {"enabled": True}}, arguments("--fp16", "False"), 1)) == ["fp16.enabled"]


# ---------------------------------------------------------------- learning rate, schedule, buckets


def test_auto_optimizer_and_schedule_are_filled_from_the_arguments() -> None:
    template = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
    }
    flags = ("--learning_rate", "3e-4", "--adam_beta2", "0.95", "--weight_decay", "0.1", "--warmup_ratio", "0.03")
    config, findings = resolve(template, *flags, total_steps=101)
    assert findings == []
    assert config["optimizer"]["params"] == {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    assert config["scheduler"]["params"] == {"warmup_min_lr": 0.0, "warmup_max_lr": 3e-4, "warmup_num_steps": 4}  # ceil(3.03)
    config, _ = resolve(template, *flags, total_steps=None)
    assert unresolved(config) == ["scheduler.params.warmup_num_steps"]


def test_no_warmup_becomes_one_step_because_deepspeed_refuses_zero() -> None:
    config, _ = resolve({"scheduler": {"type": "WarmupDecayLR", "params": {}}})
    assert config["scheduler"]["params"] == {"warmup_max_lr": 5e-5, "warmup_num_steps": 1, "total_num_steps": 100}


def test_cosine_schedule_gets_no_warmup_max_lr() -> None:
    config, findings = resolve({"scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 5, "cos_min_ratio": "auto"}}})
    assert findings == [] and config["scheduler"]["params"] == {"warmup_num_steps": 5, "cos_min_ratio": 0.0, "total_num_steps": 100}


def test_an_optimizer_that_is_not_adam_gets_no_adam_parameters() -> None:
    config, _ = resolve({"optimizer": {"type": "Muon", "params": {"momentum": 0.95}}})
    assert config["optimizer"]["params"] == {"momentum": 0.95, "lr": 5e-5, "weight_decay": 0.0}


def test_numbers_written_as_text_are_errors() -> None:
    template = {"optimizer": {"type": "AdamW", "params": {"lr": "2e-5", "betas": [0.9, "0.95"]}}, "gradient_clipping": "1.0"}
    assert keys(apply_template_to_args(template, arguments(), 1)) == ["gradient_clipping", "optimizer.params.lr", "optimizer.params.betas"]


def test_optimizers_deepspeed_has_not_tested_are_allowed() -> None:
    for optim, expected in (("adamw_torch_fused", None), ("sgd", True), ("adafactor", True)):
        config, _ = resolve({"zero_optimization": {"stage": 2}}, "--optim", optim)
        assert config.get("zero_allow_untested_optimizer") is expected


def test_buckets_follow_the_hidden_size() -> None:
    zero = {"reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}
    config, _ = resolve({"zero_optimization": {"stage": 3, **zero}}, hidden_size=4096)
    assert config["zero_optimization"] == {
        "stage": 3,
        "reduce_bucket_size": 16777216,
        "stage3_prefetch_bucket_size": 16777216,
        "stage3_param_persistence_threshold": 40960,
    }
    config, _ = resolve({"zero_optimization": {"stage": 3, **zero}}, hidden_size=4096, largest_layer=218_112_000)
    assert config["zero_optimization"]["reduce_bucket_size"] == config["zero_optimization"]["stage3_prefetch_bucket_size"] == 218_112_000
    config, findings = resolve({"zero_optimization": {"stage": 3, **zero}}, hidden_size=None)
    assert findings == [] and unresolved(config) == [f"zero_optimization.{key}" for key in zero]


def test_nvme_folder_is_the_flags_or_the_runs() -> None:
    template = read_deepspeed_config(ROOT / "ds_configs" / "zero3_nvme.json")
    config, _ = resolve(template, "--nvme_path", "/scratch/swap", largest_parameter=525_336_576)
    zero = config["zero_optimization"]
    assert (zero["offload_param"]["nvme_path"], zero["offload_optimizer"]["nvme_path"]) == ("/scratch/swap", "/scratch/swap")
    assert zero["offload_param"]["buffer_size"] == 525_336_576
    config, _ = resolve(template)
    assert (
        get_value(config, "zero_optimization.offload_param.nvme_path"),
        get_value(config, "zero_optimization.offload_param.buffer_size"),
    ) == (
        "out/nvme",
        100_000_000,
    )


@pytest.mark.parametrize(
    ("flags", "total", "expected"),
    [((), None, 0), (("--warmup_steps", "10"), None, 10), (("--warmup_steps", "0.1"), 95, 10), (("--warmup_ratio", "0.1"), None, None)],
)
def test_warmup_steps(flags: tuple[str, ...], total: int | None, expected: int | None) -> None:
    assert num_warmup_steps(arguments(*flags).train, total) == expected


# ---------------------------------------------------------------- reading


def test_reading_names_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{\n  "a": 1,\n  "b": 2,\n}\n')
    with pytest.raises(UserError, match=r"ds.json line 4 column 1") as caught:
        read_deepspeed_config(path)
    assert caught.value.findings[0].fix == "JSON has no comments, no trailing commas and double quotes only"


def test_reading_names_both_lines_of_a_key_that_stands_twice(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{\n  "z": {\n    "stage": 2,\n    "device": "cpu",\n    "stage": 3},\n  "y": {"device": "cpu"}\n}\n')
    with pytest.raises(UserError) as caught:
        read_deepspeed_config(path)
    (finding,) = caught.value.findings
    assert finding.key == "stage" and finding.message.endswith("lines 3 and 5")


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"[1]", "holds a list"), (b"\xff{}", "is not UTF-8 (byte 0)"), (b"", "line 1 column 1"), (None, "No such file")],
)
def test_files_that_are_no_json_object(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "ds.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_deepspeed_config(path)
    assert message in caught.value.findings[0].message


def test_reading_takes_a_byte_order_mark_and_the_text_itself(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_deepspeed_config(path) == {"a": 1} == read_deepspeed_config('{"a": 1}')


def test_dotted_paths() -> None:
    config: dict[str, Any] = {"a": {"b": 1}, "c": None}
    assert (get_value(config, "a.b"), get_value(config, "a.x", 5), get_value(config, "a.b.c"), get_value(config, "c.d", 6)) == (
        1,
        5,
        None,
        6,
    )
    set_value(config, "x.y.z", 3)
    assert config["x"] == {"y": {"z": 3}}
    assert unresolved({"a": "auto", "b": {"c": "auto"}, "pipeline": {"stages": "auto"}}) == ["a", "b.c"]


# ---------------------------------------------------------------- which engine


def fsdp_env(**values: str) -> dict[str, str]:
    return {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"} | values


@pytest.mark.parametrize(
    ("flags", "environ", "engine"),
    [
        ((), {}, "ddp"),
        (("--deepspeed", "x.json"), {}, "zero"),
        (("--fsdp", "full_shard"), {}, "fsdp"),
        ((), {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, "fsdp"),
        ((), {"ACCELERATE_USE_DEEPSPEED": "true"}, "zero"),
        (("--fsdp", "full_shard"), {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, "fsdp"),
        (("--deepspeed", "x.json"), {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "x.json"}, "zero"),
    ],
)
def test_engine_without_contradiction(flags: tuple[str, ...], environ: dict[str, str], engine: str) -> None:
    assert choose_engine(arguments(*flags), environ) == (engine, [])


@pytest.mark.parametrize(
    ("flags", "environ", "key"),
    [
        (("--deepspeed", "x.json"), {"ACCELERATE_USE_FSDP": "true"}, "--deepspeed"),
        (("--fsdp", "full_shard"), {"ACCELERATE_USE_DEEPSPEED": "true"}, "--fsdp"),
        (("--deepspeed", "x.json"), {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "y.json"}, "--deepspeed"),
        (("--fsdp", "shard_grad_op"), {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, "--fsdp"),
        (("--fsdp", "fullshard"), {}, "--fsdp"),
        ((), {"ACCELERATE_USE_MEGATRON_LM": "true"}, "distributed_type"),
    ],
)
def test_contradictions_between_flags_and_launcher(flags: tuple[str, ...], environ: dict[str, str], key: str) -> None:
    _, findings = choose_engine(arguments(*flags), environ)
    assert keys(findings) == [key]


def test_deepspeed_launcher_without_a_deepspeed_file_is_a_warning() -> None:
    environ = {"CROSS_SIZE": "1", "WORLD_SIZE": "2"}
    engine, findings = choose_engine(arguments(), environ)
    assert engine == "ddp" and keys(findings, "warning") == ["--deepspeed"]


def test_accelerates_deepspeed_section_with_a_file(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": "auto"}))
    environ = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path)}
    assert load_deepspeed_template(arguments(), environ) == {"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": "auto"}
    environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = "4"
    template = load_deepspeed_template(arguments(), environ)
    assert template is not None and template["gradient_accumulation_steps"] == 4


def test_accelerates_deepspeed_section_without_a_file() -> None:
    environ = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "nvme",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
        "ACCELERATE_GRADIENT_CLIPPING": "0.7",
        "ACCELERATE_MIXED_PRECISION": "fp16",
    }
    args = arguments()
    assert apply_launch_to_args(args, environ, 2) == ("zero", [])
    assert (args.train.max_grad_norm, args.train.precision) == (0.7, "fp16")
    template = load_deepspeed_template(args, environ)
    assert template is not None
    assert template["zero_optimization"] == {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "nvme", "nvme_path": "auto"},
    }
    assert load_deepspeed_template(arguments(), {}) is None
    with pytest.raises(UserError, match="many is not a number"):
        load_deepspeed_template(arguments(), environ | {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "many"})


def test_launcher_decides_precision_and_recomputation() -> None:
    environ = fsdp_env(ACCELERATE_MIXED_PRECISION="bf16", FSDP_ACTIVATION_CHECKPOINTING="true")
    args = arguments()
    assert apply_launch_to_args(args, environ, 2) == ("fsdp", [])
    assert (args.train.precision, args.train.activation_checkpointing) == ("bf16", "full")
    args = arguments("--precision", "fp32", "--activation_checkpointing", "none")
    _, findings = apply_launch_to_args(args, environ, 2)
    assert sorted(keys(findings)) == ["fsdp_activation_checkpointing", "mixed_precision"]
    args = arguments("--activation_checkpointing", "selective")
    assert apply_launch_to_args(args, environ, 2)[1] == [] and args.train.activation_checkpointing == "selective"


def test_ddp_takes_precision_from_accelerate_too() -> None:
    args = arguments()
    assert apply_launch_to_args(args, {"ACCELERATE_MIXED_PRECISION": "bf16"}, 2) == ("ddp", [])
    assert args.train.precision == "bf16"
    args = arguments("--bf16")
    assert apply_launch_to_args(args, {"ACCELERATE_MIXED_PRECISION": "no"}, 2) == ("ddp", []) and args.train.precision == "bf16"


def test_launch_reports_a_file_that_is_not_there() -> None:
    engine, findings = apply_launch_to_args(arguments("--deepspeed", "/no/such.json"), {}, 2)
    assert engine == "zero" and keys(findings) == ["--deepspeed"]
