"""Rules about the flags of a run, a model's folder and the machine."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from importlib.util import find_spec as importlib_find_spec
from pathlib import Path
from typing import Any

import pytest

from harness import check_arguments as argument_rules
from harness.cgroups import MemoryGroup
from harness.check_config import check_run
from harness.findings import Finding, UserError
from harness.machine import GIB, Gpu, Machine, detect_machine, visible
from harness.parsing import parse_args
from tests.checking import AMPERE, CPU, ROOT, VOLTA, Rule, check_both, rule_id, run_findings

WRAP = "fsdp_config.fsdp_transformer_layer_cls_to_wrap"


def parsed_findings(flags: str, **options: Any) -> list[Finding]:
    """`run_findings`, and what the parser already refuses."""
    try:
        return run_findings(flags, **options)
    except UserError as error:
        return error.findings


ARGUMENT_RULES = [
    Rule("--learning_rate", "warning", "is very large", "--learning_rate 2", "--learning_rate 2e-5"),
    Rule("--learning_rate", "warning", "trains nothing", "--learning_rate 0", "--learning_rate 1e-5"),
    Rule("--weight_decay", "warning", "shrinks weights", "--weight_decay 1", "--weight_decay 0.1"),
    Rule("--oom_ladder", "error", "keep one of the two", "--no_oom_recovery --oom_ladder micro_batch", "--oom_ladder micro_batch"),
    Rule("--adam_beta1", "info", "no effect with --optim sgd", "--optim sgd --adam_beta1 0.8", "--adam_beta1 0.8"),
    Rule("--lr_scheduler_type", "error", "did you mean cosine?", "--lr_scheduler_type cosin", "--lr_scheduler_type cosine"),
    Rule(
        "--lr_scheduler_kwargs",
        "error",
        "needs min_lr or min_lr_rate",
        "--lr_scheduler_type cosine_with_min_lr",
        "--lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs '{\"min_lr\": 1e-6}'",
    ),
    Rule("--warmup_steps", "warning", "never reaches its peak", "--max_steps 10 --warmup_steps 10", "--max_steps 10 --warmup_steps 9"),
    Rule(
        "--warmup_steps",
        "warning",
        "constant_with_warmup",
        "--lr_scheduler_type constant --warmup_steps 5",
        "--lr_scheduler_type constant_with_warmup --warmup_steps 5",
    ),
    Rule("--save_steps", "info", "only the last step is saved", "--max_steps 10 --save_steps 20", "--max_steps 10 --save_steps 5"),
    Rule(
        "--eval_steps",
        "warning",
        "nothing is evaluated",
        "--max_steps 10 --eval_strategy steps --eval_steps 20",
        "--max_steps 10 --eval_strategy steps --eval_steps 5",
    ),
    Rule("--eval_steps", "warning", "--eval_strategy no", "--eval_steps 20", "--eval_strategy steps --eval_steps 20"),
    Rule("--logging_steps", "info", "is over --max_steps", "--max_steps 10 --logging_steps 20", "--max_steps 10 --logging_steps 1"),
    Rule("--num_train_epochs", "info", "has no effect beside --max_steps", "--max_steps 10 --num_train_epochs 2", "--num_train_epochs 2"),
    Rule(
        "--save_steps",
        "error",
        "is no multiple of --eval_steps 4",
        "--load_best_model_at_end --eval_strategy steps --eval_steps 4 --save_steps 10",
        "--load_best_model_at_end --eval_strategy steps --eval_steps 4 --save_steps 8",
    ),
    Rule(
        "--load_best_model_at_end",
        "error",
        "needs one rhythm",
        "--load_best_model_at_end --eval_strategy epoch",
        "--load_best_model_at_end --eval_strategy epoch --save_strategy epoch",
    ),
    Rule(
        "--metric_for_best_model", "error", "is not computed", "--metric_for_best_model accuracy", "--metric_for_best_model eval_perplexity"
    ),
    Rule("--ddp_timeout", "warning", "shorter than a slow save", "--ddp_timeout 10", "--ddp_timeout 600"),
    Rule(
        "--target_batch_size",
        "error",
        "--target_batch_size 112 or --per_device_train_batch_size 6",
        "--target_batch_size 96 --per_device_train_batch_size 7",
        "--target_batch_size 96 --per_device_train_batch_size 6",
    ),
    Rule("--max_train_samples", "error", "4 samples for 8 processes", "--max_train_samples 4", "--max_train_samples 64"),
    Rule("--max_train_samples", "warning", "do not fill one optimizer step of 64", "--max_train_samples 63", "--max_train_samples 64"),
    Rule("--loss_chunk_size", "warning", "make the loss slow", "--loss_chunk_size 8", "--loss_chunk_size 0"),
    Rule("--train_file", "error", "does not exist", "--train_file /no/such.txt", f"--train_file {ROOT}/setup.cfg"),
    Rule("--validation_file", "error", "does not exist", "--validation_file /no/*.txt", f"--validation_file '{ROOT}/*.cfg'"),
    Rule(
        "--eval_strategy",
        "error",
        "nothing to evaluate on",
        "--eval_strategy epoch --validation_split_percentage 0",
        "--eval_strategy epoch",
    ),
    Rule("--preprocessing_num_workers", "info", "gains nothing", "--preprocessing_num_workers 65", "--preprocessing_num_workers 64"),
    Rule("--config_overrides", "error", "is not name=value", "--config_overrides hidden_size", "--config_overrides hidden_size=64"),
    Rule("--tokenizer_name", "error", "does not exist", "--tokenizer_name ./no_such", "--tokenizer_name bytes"),
    Rule("--model_name_or_path", "error", "does not exist", "--model_name_or_path ./no_such", "--model_name_or_path gpt2"),
    Rule("--config_name", "error", "does not exist", "--config_name no_such.json", "--config_name gpt2"),
    Rule("--torch_dtype", "error", "did you mean bfloat16?", "--torch_dtype bf16", "--torch_dtype bfloat16"),
    Rule(
        "--attn_implementation",
        "error",
        "has no fp32",
        "--attn_implementation flash_attention_2 --precision fp32",
        "--attn_implementation sdpa --precision fp32",
    ),
    Rule(
        "--attn_implementation",
        "error",
        "did you mean flash_attention_2?",
        "--attn_implementation flash_attention",
        "--attn_implementation eager",
    ),
    Rule("--torch_compile", "error", "contradict each other", "--torch_compile --no_custom_kernels", "--torch_compile"),
    Rule(
        "--torch_compile_backend",
        "error",
        "has no effect",
        "--torch_compile False --torch_compile_backend inductor",
        "--torch_compile_backend inductor",
    ),
    Rule("--use_liger_kernel", "error", "contradict each other", "--use_liger_kernel --no_custom_kernels", "--no_custom_kernels"),
    Rule("--report_to", "error", "keep one of the two", "--report_to none tensorboard", "--report_to tensorboard"),
    Rule("--resume_from_checkpoint", "error", "does not exist", "--resume_from_checkpoint /no/such", "--resume_from_checkpoint auto"),
    Rule("--resume_from_checkpoint", "error", "/ is no checkpoint", "--resume_from_checkpoint /", "--resume_from_checkpoint auto"),
    Rule("--resume_from_checkpoint", "error", "and there is no checkpoint in", "--resume_from_checkpoint latest", ""),
    Rule("--resume_from_checkpoint", "error", "/etc/passwd is a file", "--resume_from_checkpoint /etc/passwd", ""),
    Rule(
        "--resume_from_checkpoint",
        "error",
        "contradict each other",
        "--resume_from_checkpoint auto --overwrite_output_dir",
        "--overwrite_output_dir",
    ),
    Rule("--output_dir", "error", "is a file", f"--output_dir {ROOT}/setup.cfg/out", "--output_dir /var/tmp/harness-checks/out"),
    Rule(
        "--ddp_bucket_cap_mb",
        "info",
        "no effect with the fsdp engine",
        "--fsdp full_shard --ddp_bucket_cap_mb 50",
        "--ddp_bucket_cap_mb 50",
    ),
    Rule(
        "--gpu_memory",
        "warning",
        "has no effect on a device map",
        "--gpu_memory 20GiB --device_map dynamic",
        "--gpu_memory 20GiB",
    ),
    Rule("--max_memory", "info", "with the ddp engine: it is for device maps", "--max_memory 20GB", "--max_memory 20GB --device_map auto"),
    Rule("--min_memory_gb", "info", "with the fsdp engine", "--min_memory_gb 4 --fsdp full_shard", "--fsdp full_shard"),
    Rule(
        "--in_flight_micro_batches",
        "info",
        "with the zero engine",
        f"--in_flight_micro_batches 2 --deepspeed {ROOT}/ds_configs/zero1.json",
        f"--deepspeed {ROOT}/ds_configs/zero1.json",
    ),
    Rule(
        "--nvme_path",
        "warning",
        "has no effect with the ddp engine",
        "--nvme_path /x",
        f"--nvme_path /var/tmp --deepspeed {ROOT}/ds_configs/zero3_nvme.json",
    ),
    Rule(
        "--nvme_path",
        "warning",
        "offloads nothing to NVMe",
        f"--nvme_path /x --deepspeed {ROOT}/ds_configs/zero3.json",
        f"--nvme_path /var/tmp --deepspeed {ROOT}/ds_configs/zero3_nvme.json",
    ),
    Rule(
        "--nvme_path",
        "warning",
        "/var/tmp/no-such does not exist: it is made in /var/tmp",
        f"--nvme_path /var/tmp/no-such --deepspeed {ROOT}/ds_configs/zero3_nvme.json",
        f"--nvme_path /var/tmp --deepspeed {ROOT}/ds_configs/zero3_nvme.json",
    ),
    Rule("--deepspeed", "error", "cannot read", "--deepspeed /no/such.json", f"--deepspeed {ROOT}/ds_configs/zero1.json"),
    Rule("--fsdp", "error", "fullshard is not known", "--fsdp fullshard", "--fsdp full_shard"),
    Rule(
        "--optim",
        "warning",
        "in plain PyTorch",
        f"--optim sgd --deepspeed {ROOT}/ds_configs/zero2_offload.json",
        f"--deepspeed {ROOT}/ds_configs/zero2_offload.json",
    ),
    Rule(
        "optimizer.params.lr",
        "error",
        "--learning_rate is 0.0001",
        '--learning_rate 1e-4 --deepspeed \'{"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}\'',
        '--deepspeed \'{"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}\'',
    ),
    Rule(
        "train_batch_size",
        "error",
        "set train_batch_size: 8 or 16",
        '--deepspeed \'{"zero_optimization": {"stage": 2}, "train_batch_size": 12}\'',
        '--deepspeed \'{"zero_optimization": {"stage": 2}, "train_batch_size": 16}\'',
    ),
    Rule(
        "zero_allow_untested_optimizer",
        "error",
        "is not one that DeepSpeed has tested",
        '--optim sgd --deepspeed \'{"zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": false}\'',
        '--optim sgd --deepspeed \'{"zero_optimization": {"stage": 2}}\'',
    ),
]


def test_a_map_with_a_device_that_there_is_none_of() -> None:
    rule = Rule(
        "--device_map",
        "error",
        "model: 'cuda:zero' is not a device -> use a card's number, cuda:N, cpu or disk",
        '--device_map \'{"model": "cuda:zero", "lm_head": "cpu"}\'',
        '--device_map \'{"model": "cuda:0", "lm_head": "cpu", "a": 1, "b": "1", "c": "cuda", "d": "disk"}\'',
    )
    check_both(rule, lambda flags: parsed_findings(flags, num_processes=1))
    negative = parsed_findings('--device_map \'{"model": -1, "lm_head": "gpu0"}\'', num_processes=1)
    assert [each.message for each in negative] == ["model: -1 is not a device", "lm_head: 'gpu0' is not a device"]


def test_one_process_with_several_cards_has_a_map_without_asking() -> None:
    assert [each.key for each in run_findings("--max_memory 20GB", num_processes=1, machine=VOLTA) if each.key == "--max_memory"] == []
    one_card = dataclasses.replace(VOLTA, gpus=VOLTA.gpus[:1])
    (finding,) = (each for each in run_findings("--max_memory 20GB", num_processes=1, machine=one_card) if each.key == "--max_memory")
    assert finding.severity == "info"


@pytest.mark.parametrize("rule", ARGUMENT_RULES, ids=rule_id)
def test_argument_rules(rule: Rule) -> None:
    check_both(rule, parsed_findings)


MACHINE_RULES = [  # (flags, machine, processes) that break a rule and that do not
    Rule("num_processes", "error", "8 processes on this machine, which has 2 cards", ("", VOLTA, 8), ("--use_cpu", VOLTA, 8)),
    Rule("num_processes", "info", "1 of 2 cards are used", ("", VOLTA, 1), ("", VOLTA, 2)),
    Rule("num_processes", "info", "nothing to shard with", ("--fsdp full_shard", CPU, 1), ("--fsdp full_shard", CPU, 2)),
    Rule(
        "num_processes",
        "info",
        "nothing to shard with",
        (f"--deepspeed {ROOT}/ds_configs/zero3.json", CPU, 1),
        (f"--deepspeed {ROOT}/ds_configs/zero3_offload.json", CPU, 1),
    ),
    Rule("--use_cpu", "info", "leaves 2 cards idle", ("--use_cpu", VOLTA, 2), ("--use_cpu", CPU, 2)),
    Rule("--precision", "error", "has no bf16", ("--bf16", VOLTA, 2), ("--bf16", AMPERE, 8)),
    Rule("--precision", "warning", "fp16 on a CPU", ("--fp16", CPU, 2), ("--fp16", VOLTA, 2)),
    Rule(
        "--precision",
        "error",
        "DeepSpeed has no fp16 on this CPU",
        (f"--fp16 --deepspeed {ROOT}/ds_configs/zero3.json", CPU, 2),
        (f"--fp16 --deepspeed {ROOT}/ds_configs/zero3.json", VOLTA, 2),
    ),
    Rule("--tf32", "info", "has no effect without", ("--tf32", VOLTA, 2), ("--tf32", AMPERE, 8)),
    Rule(
        "--attn_implementation",
        "error",
        "needs a GPU",
        ("--attn_implementation flash_attention_2 --bf16", CPU, 1),
        ("--attn_implementation sdpa", CPU, 1),
    ),
    Rule("--optim", "error", "needs a GPU", ("--optim adamw_apex_fused", CPU, 1), ("--optim adamw_apex_fused", AMPERE, 8)),
]


@pytest.mark.parametrize("rule", MACHINE_RULES, ids=rule_id)
def test_machine_rules(rule: Rule) -> None:
    check_both(rule, lambda case: run_findings(case[0], machine=case[1], num_processes=case[2]))


def test_packages_that_are_missing_come_with_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*names: str) -> dict[str, str]:
        find = importlib_find_spec
        monkeypatch.setattr("harness.check_arguments.importlib.util.find_spec", lambda name: None if name in names else find(name))
        flags = "--report_to mlflow --optim adamw_8bit --use_liger_kernel --attn_implementation flash_attention_2 --bf16"
        return {finding.key: finding.fix for finding in run_findings(flags) if finding.severity == "error"}

    assert without("mlflow", "torchao", "liger_kernel", "flash_attn") == {
        "--report_to": "pip install mlflow",
        "--optim": "pip install torchao, or --optim adamw_torch_fused",
        "--use_liger_kernel": "pip install liger-kernel, or remove the flag",
        "--attn_implementation": "pip install flash-attn --no-build-isolation, or --attn_implementation sdpa",
    }
    monkeypatch.setattr("harness.check_arguments.importlib.util.find_spec", lambda name: importlib_find_spec("json"))
    flags = "--report_to mlflow --optim adamw_8bit --use_liger_kernel --attn_implementation flash_attention_2 --bf16"
    assert run_findings(flags) == []


def test_accelerates_word_and_the_flags(tmp_path: Path) -> None:
    environ = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "ACCELERATE_MIXED_PRECISION": "bf16"}
    assert [finding.key for finding in run_findings("--precision fp32", **environ)] == ["mixed_precision"]
    assert run_findings("", **environ) == []
    wrong = environ | {"FSDP_TRANSFORMER_CLS_TO_WRAP": "LLaMADecoderLayer"}
    assert [finding.key for finding in run_findings("", **wrong)] == [WRAP]
    hybrid = {
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "3",
        "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
    }
    assert [finding.key for finding in run_findings("", **environ, **hybrid)] == ["parallelism_config"]


def test_fp16_in_the_file_and_fp32_in_the_run() -> None:
    template = '{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true}}'
    (finding,) = run_findings(f"--precision fp32 --deepspeed '{template}'")
    assert "fp16.enabled=True" in finding.message and "fp32" in finding.message and '"auto"' in finding.fix


def test_checking_changes_nothing() -> None:
    args = parse_args(
        ["--model_type", "llama", "--output_dir", "out", "--deepspeed", '{"gradient_clipping": 0.3, "fp16": {"enabled": true}}']
    )
    before = args.to_dict()
    check_run(args, num_processes=2, environ={}, machine=CPU)
    assert args.to_dict() == before


# ---------------------------------------------------------------- a model's folder


def model_folder(path: Path, num_bytes: int = 4000, **config: Any) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 128, "dtype": "float32", **config}))
    with open(path / "model.safetensors", "wb") as file:
        file.truncate(num_bytes)  # sparse: no disk is used
    return path


def test_block_size_over_the_models_limit(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    (finding,) = run_findings(f"--model_name_or_path {folder} --block_size 256")
    assert finding.line() == "error   --block_size: 256 is over the model's limit of 128 -> --block_size 128"
    assert run_findings(f"--model_name_or_path {folder} --block_size 128") == []


def test_model_folders_that_cannot_be_used(tmp_path: Path) -> None:
    def message(folder: Path) -> str:
        (finding,) = run_findings(f"--model_name_or_path {folder}")
        assert finding.severity == "error"
        return finding.message

    empty = tmp_path / "empty"
    empty.mkdir()
    assert message(empty).endswith("has no config.json")
    (empty / "config.json").write_text("{}")
    assert message(empty).endswith("has a config but no weights")
    (empty / "config.json").write_text("{")
    assert "is not JSON" in message(empty)
    folder = model_folder(tmp_path / "sharded")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    assert "lacks 2 of 2 weight files: one.safetensors, two.safetensors" in message(folder)


def test_a_length_that_is_a_text_is_named_before_it_is_compared(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", num_bytes=40_000, dtype="bfloat16")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": "256"}))
    found = [finding for finding in run_findings(f"--model_name_or_path {folder} --block_size 512") if finding.severity == "error"]
    wanted = ("max_position_embeddings", "must be a positive whole number, not '256'")
    assert [(finding.key, finding.message) for finding in found] == [wanted]


def test_offload_must_fit_the_host(tmp_path: Path) -> None:
    # 8e9 parameters in 16 bits: optimizer 16 B and weights 2 B each, 134 GiB on one machine.
    folder = model_folder(tmp_path / "m", num_bytes=16 * 10**9, dtype="bfloat16")
    flags = f"--model_name_or_path {folder} --deepspeed {ROOT}/ds_configs/zero3_offload.json --save_strategy no"
    small = dataclasses.replace(AMPERE, host_memory_bytes=100 * GIB)
    findings = {finding.key: finding for finding in run_findings(flags, machine=small) if finding.severity == "error"}
    assert findings["zero_optimization.offload_optimizer"].message == "134 GiB of state for 8.0B parameters, but the host has 100 GiB"
    assert not [finding for finding in run_findings(flags, machine=AMPERE) if finding.severity == "error"]
    two_machines = run_findings(flags, machine=small, num_processes=16, LOCAL_WORLD_SIZE="8")
    assert not [finding for finding in two_machines if finding.severity == "error"]
    fsdp_flags = f"--model_name_or_path {folder} --fsdp 'full_shard offload'"
    assert "fsdp_offload_params" in [finding.key for finding in run_findings(fsdp_flags, machine=small)]


def test_disk_too_small_for_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # 1e9 parameters: 16 bytes each in a checkpoint with Adam's state and final/; a little besides for what is neither.
    flags = f"--model_name_or_path {model_folder(tmp_path / 'm', num_bytes=2 * 10**9, dtype='bfloat16')} --output_dir {tmp_path}/out"
    where = f"are free at {tmp_path}, and one checkpoint needs about 14.9 GiB"
    little = f"are free at {tmp_path}, and logs, metrics and the tokenizer's files need up to 16 MiB"
    tiny = f"--model_name_or_path {model_folder(tmp_path / 't', num_bytes=40_000, dtype='bfloat16')} --output_dir {tmp_path}/out"  # 0.3 MiB
    cases = [(flags, 14, [f"14.0 GiB {where}"]), (flags, 12 / 1024, [f"12 MiB {where}"]), (flags, 15, [])]
    for flags, free_gib, expected in [*cases, (tiny, 12 / 1024, [f"12 MiB {little}"]), (tiny, 20 / 1024, [])]:
        usage = shutil.disk_usage(tmp_path)._replace(free=int(free_gib * GIB))
        monkeypatch.setattr("harness.check_arguments.shutil.disk_usage", lambda path, usage=usage: usage)
        assert [finding.message for finding in run_findings(flags) if finding.key == "--output_dir"] == expected


def test_schedule_names_are_transformers_own() -> None:
    from transformers.trainer_utils import SchedulerType

    # "greedy" steers by the metric of every evaluation, which the loop here does not hand to a schedule.
    assert {kind.value for kind in SchedulerType} - {"greedy"} == set(argument_rules.SCHEDULE_NAMES)


# ---------------------------------------------------------------- the machine


def test_visible_cards_follow_cudas_rules() -> None:
    cards = [Gpu(str(index), GIB, (8, 0)) for index in range(4)]
    names = {text: "".join(card.name for card in visible(cards, text)) for text in ("2,0", "1, 3", "", "0,9,1", "-1", "GPU-a,GPU-b", "3")}
    assert names == {"2,0": "20", "1, 3": "13", "": "", "0,9,1": "0", "-1": "", "GPU-a,GPU-b": "01", "3": "3"}
    assert visible(cards, None) == cards


def test_this_machine_is_described(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limits = [MemoryGroup(1073741824, 1000)]
    monkeypatch.setattr("harness.cgroups.memory_groups", lambda: limits)
    machine = detect_machine({"CUDA_VISIBLE_DEVICES": ""})
    assert (machine.gpus, machine.num_cpus, machine.host_memory_bytes) == ((), len(os.sched_getaffinity(0)), 1073741824)
    flags = set(Path("/proc/cpuinfo").read_text().split())
    assert machine.cpu_has_fp16 == bool(flags & {"avx512_fp16", "avx_ne_convert"})
    limits.clear()
    assert detect_machine({"CUDA_VISIBLE_DEVICES": ""}).host_memory_bytes > 1073741824 or os.environ.get("CI")
    assert Machine().supports_bf16 and not VOLTA.supports_bf16 and VOLTA.min_gpu_memory_bytes == 16 * GIB


@pytest.mark.parametrize(
    ("flags", "engine", "expected"),
    [
        ("--fp8 tensorwise", "fsdp", []),
        ("--fp8 rowwise --bf16", "fsdp", []),
        ("--fp8 tensorwise", "zero", ["--fp8: is there under FSDP2, not with the engine zero"]),
        ("--fp8 tensorwise --no_custom_kernels", "fsdp", ["--fp8: and --no_custom_kernels contradict each other"]),
        ("--fp8 tensorwise --fp16", "fsdp", ["--fp8: goes with bf16, not fp16"]),
        ("--fp8 tensorwise --fp8_all_gather", "fsdp", []),
        ("--fp8 rowwise --fp8_all_gather False", "fsdp", []),
        ("--fp8 rowwise --fp8_all_gather", "fsdp", ["--fp8_all_gather: needs one scale a tensor"]),
        ("--fp8_all_gather", "fsdp", ["--fp8_all_gather: has no effect without --fp8"]),
        ("--fp8 tensorwise --lora_r 8", "fsdp", ["--fp8: and adapters do not go together"]),
        ("--reduce_dtype bf16", "fsdp", []),
        ("--reduce_dtype bf16", "ddp", ["--reduce_dtype: is there under FSDP2, not with the engine ddp"]),
        ("--torch_compile", "device_map", []),
        ("--torch_compile", "zero", []),
    ],
)
def test_fast_paths_that_an_engine_lacks_are_refused(flags: str, engine: str, expected: list[str]) -> None:
    from harness.check_arguments import kernel_findings
    from harness.parsing import parse_args

    args = parse_args(["--model_name_or_path", "gpt2", "--output_dir", "out", *flags.split()])
    assert [f"{finding.key}: {finding.message}" for finding in kernel_findings(args, engine)] == expected


def test_a_file_with_the_name_of_a_checkpoint_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-20").write_text("mine")
    (tmp_path / "checkpoint-notes.txt").write_text("no checkpoint's name")
    (line,) = [finding.line() for finding in run_findings(f"--model_type llama --output_dir {tmp_path}") if finding.key == "--output_dir"]
    assert f"{tmp_path}/checkpoint-20 is not a folder" in line and "move it away" in line
