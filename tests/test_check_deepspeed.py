"""Rules about a DeepSpeed JSON, and the key table against DeepSpeed itself."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from harness import deepspeed_keys
from harness.check_deepspeed import check_deepspeed
from harness.deepspeed_json import read_deepspeed_config
from tests.checking import AMPERE, CPU, ROOT, VOLTA, Rule, check_both, optimizer, rule_id, zero


def scheduler(kind: str = "WarmupDecayLR", **params: Any) -> dict[str, Any]:
    return zero() | {"scheduler": {"type": kind, "params": params}}


def fp16(**values: Any) -> dict[str, Any]:
    return zero() | {"fp16": {"enabled": True, **values}}


Z = "zero_optimization."
DEEPSPEED_RULES = [
    # keys
    Rule(
        "gradient_acumulation_steps",
        "error",
        'did you mean "gradient_accumulation_steps"?',
        zero() | {"gradient_acumulation_steps": 2},
        zero() | {"gradient_accumulation_steps": 2},
    ),
    Rule(
        Z + "stage3_max_live_params",
        "error",
        'did you mean "stage3_max_live_parameters"?',
        zero(stage3_max_live_params=1),
        zero(stage3_max_live_parameters=1),
    ),
    Rule("fp16.loss_scal", "error", 'did you mean "loss_scale"?', fp16(loss_scal=0), fp16(loss_scale=0)),
    Rule("zero_optimization.stage", "error", 'write {"zero_optimization": {"stage": ...}}', {"zero_optimization.stage": 3}, zero()),
    Rule("gradient_checkpointing", "error", "type --gradient_checkpointing", zero() | {"gradient_checkpointing": True}, zero()),
    Rule("learning_rate", "error", '"optimizer": {"params": {"lr": ...}}', zero() | {"learning_rate": 1e-4}, optimizer(lr=1e-4)),
    Rule("max_grad_norm", "error", '"gradient_clipping"', zero() | {"max_grad_norm": 1.0}, zero() | {"gradient_clipping": 1.0}),
    Rule("stage", "error", 'move it into the block "zero_optimization"', {"stage": 3}, zero()),
    Rule(
        Z + "gradient_clipping", "error", "move it to the top of the file", zero(gradient_clipping=1.0), zero() | {"gradient_clipping": 1.0}
    ),
    Rule(
        "bf16.loss_scale",
        "error",
        'move it into the block "fp16"',
        zero() | {"bf16": {"enabled": True, "loss_scale": 0}},
        fp16(loss_scale=0),
    ),
    Rule("nebula", "error", "was removed", zero() | {"nebula": {"enabled": True}}, zero()),
    Rule("amp", "error", 'use "bf16" or "fp16"', zero() | {"amp": {"enabled": True}}, zero()),
    Rule(Z + "mics_shard_size", "error", "was removed", zero(mics_shard_size=2), zero(zero_hpz_partition_size=2)),
    Rule(
        Z + "cpu_offload",
        "warning",
        '"offload_optimizer": {"device": "cpu"}',
        zero(2, cpu_offload=True),
        zero(2, offload_optimizer={"device": "cpu"}),
    ),
    Rule("bfloat16", "warning", "write bf16", zero() | {"bfloat16": {"enabled": True}}, zero() | {"bf16": {"enabled": True}}),
    # types
    Rule(Z + "reduce_bucket_size", "error", "write 2e+08 without quotes", zero(reduce_bucket_size="2e8"), zero(reduce_bucket_size=2e8)),
    Rule("train_batch_size", "error", "write 8 without quotes", zero() | {"train_batch_size": "8"}, zero() | {"train_batch_size": 8}),
    Rule("train_batch_size", "error", "an integer of 401 digits", zero() | {"train_batch_size": 10**400}, zero() | {"train_batch_size": 8}),
    Rule("train_batch_size", "error", "must be a finite number, not nan", zero() | {"train_batch_size": math.nan}, zero()),
    Rule("gradient_clipping", "error", "must be a finite number, not inf", zero() | {"gradient_clipping": math.inf}, zero()),
    Rule("gradient_clipping", "error", "'nan' -> write a number", zero() | {"gradient_clipping": "nan"}, zero()),
    Rule("train_batch_size", "error", "must be a whole number", zero() | {"train_batch_size": 8.5}, zero() | {"train_batch_size": 8.0}),
    Rule(Z + "overlap_comm", "error", "write true without quotes", zero(overlap_comm="true"), zero(overlap_comm=True)),
    Rule(
        "fp16.enabled", "error", "write false without quotes", zero() | {"fp16": {"enabled": "no"}}, zero() | {"fp16": {"enabled": False}}
    ),
    Rule(
        "fp16.enabled", "error", "must be true or false, not 1", zero() | {"fp16": {"enabled": 1}}, zero() | {"fp16": {"enabled": "auto"}}
    ),
    Rule("fp16", "error", 'write "fp16": {"enabled": true}', zero() | {"fp16": True}, fp16()),
    Rule("gradient_clipping", "error", "is null", zero() | {"gradient_clipping": None}, zero() | {"gradient_clipping": "auto"}),
    Rule(
        "communication_data_type",
        "error",
        "must be text",
        zero() | {"communication_data_type": 16},
        zero() | {"communication_data_type": "fp32"},
    ),
    Rule(Z + "stage", "error", 'cannot be "auto"', zero("auto"), zero(2)),
    Rule("steps_per_print", "error", 'cannot be "auto"', zero() | {"steps_per_print": "auto"}, zero() | {"steps_per_print": 10}),
    # ZeRO
    Rule("zero_optimization", "warning", "nothing is sharded", {"train_batch_size": 8}, zero()),
    Rule(Z + "stage", "error", "there is no stage 4", zero(4), zero(3)),
    Rule(Z + "stage", "warning", "that is DDP", zero(0), zero(1)),
    Rule(
        Z + "stage3_max_live_parameters",
        "info",
        "has no effect in stage 2",
        zero(2, stage3_max_live_parameters=1e8),
        zero(3, stage3_max_live_parameters=1e8),
    ),
    Rule(
        Z + "zero_quantized_weights", "error", "needs stage 3", zero(2, zero_quantized_weights=True), zero(3, zero_quantized_weights=True)
    ),
    Rule(Z + "compute_grad_norm", "error", "is for stages 1 and 2", zero(3, compute_grad_norm=False), zero(2, compute_grad_norm=False)),
    Rule(
        Z + "zero_hpz_partition_size",
        "error",
        "does not divide the 8 processes",
        zero(zero_hpz_partition_size=3),
        zero(zero_hpz_partition_size=4),
    ),
    Rule(Z + "reduce_bucket_size", "info", "it frees nothing", zero(reduce_bucket_size=500000000), zero(reduce_bucket_size=50000000)),
    Rule(
        Z + "stage3_max_live_parameters",
        "info",
        "it frees nothing",
        zero(stage3_max_live_parameters=1e9),
        zero(stage3_max_live_parameters=1e8),
    ),
    Rule(Z + "reduce_bucket_size", "error", "must be positive", zero(reduce_bucket_size=0), zero(reduce_bucket_size="auto")),
    Rule(Z + "reduce_bucket_size", "warning", "not megabytes", zero(reduce_bucket_size=200), zero(reduce_bucket_size=2e8)),
    Rule(
        Z + "allgather_bucket_size",
        "warning",
        "37.3 GiB of a card with 80 GiB",
        zero(2, allgather_bucket_size=1e10, overlap_comm=True),
        zero(2, allgather_bucket_size=1e9),
    ),
    # offload
    Rule(
        Z + "offload_param",
        "error",
        "needs stage 3, not 2",
        zero(2, offload_param={"device": "cpu"}),
        zero(3, offload_param={"device": "cpu"}),
    ),
    Rule(
        Z + "offload_optimizer",
        "error",
        "needs stage 1, 2 or 3",
        zero(0, offload_optimizer={"device": "cpu"}),
        zero(1, offload_optimizer={"device": "cpu"}),
    ),
    Rule(
        Z + "offload_optimizer.device",
        "error",
        "'gpu' is not known",
        zero(offload_optimizer={"device": "gpu"}),
        zero(offload_optimizer={"device": "cpu"}),
    ),
    Rule(
        Z + "offload_param.nvme_path",
        "error",
        "is missing",
        zero(offload_param={"device": "nvme"}),
        zero(offload_param={"device": "nvme", "nvme_path": "auto"}),
    ),
    Rule(
        Z + "offload_param.nvme_path",
        "error",
        "does not exist",
        zero(offload_param={"device": "nvme", "nvme_path": "/no_such_disk/x"}),
        zero(offload_param={"device": "nvme", "nvme_path": "/var/tmp"}),
    ),
    Rule(
        Z + "offload_param.nvme_path",
        "warning",
        "/var/tmp/no-such/x does not exist: it is made in /var/tmp, on that disk",
        zero(offload_param={"device": "nvme", "nvme_path": "/var/tmp/no-such/x"}),
        zero(offload_param={"device": "nvme", "nvme_path": "/var/tmp"}),
    ),
    Rule(
        Z + "offload_param.nvme_path",
        "error",
        "cannot write to /proc",
        zero(offload_param={"device": "nvme", "nvme_path": "/proc/no-such"}),
        zero(offload_param={"device": "nvme", "nvme_path": "/var/tmp"}),
    ),
    Rule(
        Z + "offload_optimizer.nvme_path",
        "error",
        "zero3.json is a file",
        zero(offload_optimizer={"device": "nvme", "nvme_path": f"{ROOT}/ds_configs/zero3.json/x"}),
        zero(offload_optimizer={"device": "nvme", "nvme_path": "/var/tmp"}),
    ),
    Rule(
        Z + "offload_param.nvme_path",
        "warning",
        "is relative",
        zero(offload_param={"device": "nvme", "nvme_path": "swap"}),
        zero(offload_param={"device": "nvme", "nvme_path": "/var/tmp"}),
    ),
    Rule(
        Z + "offload_param.nvme_path",
        "info",
        "has no effect with device 'cpu'",
        zero(offload_param={"device": "cpu", "nvme_path": "/var/tmp"}),
        zero(offload_param={"device": "cpu"}),
    ),
    Rule(
        Z + "offload_optimizer.device",
        "error",
        "nvme needs stage 3",
        zero(2, offload_optimizer={"device": "nvme", "nvme_path": "auto"}),
        zero(3, offload_optimizer={"device": "nvme", "nvme_path": "auto"}),
    ),
    Rule(
        Z + "offload_optimizer.ratio",
        "error",
        "needs stage 3",
        zero(2, offload_optimizer={"device": "cpu", "ratio": 0.5}),
        zero(3, offload_optimizer={"device": "cpu", "ratio": 0.5}),
    ),
    Rule(
        Z + "offload_optimizer.ratio",
        "error",
        "between 0 and 1",
        zero(3, offload_optimizer={"device": "cpu", "ratio": 50}),
        zero(3, offload_optimizer={"device": "cpu", "ratio": 1.0}),
    ),
    Rule(
        "aio",
        "info",
        "nothing is offloaded to NVMe",
        zero() | {"aio": {"queue_depth": 8}},
        zero(offload_param={"device": "nvme", "nvme_path": "auto"}) | {"aio": {"queue_depth": 8}},
    ),
    Rule(
        "aio",
        "info",
        "default settings",
        zero(offload_param={"device": "nvme", "nvme_path": "auto"}),
        zero(offload_param={"device": "nvme", "nvme_path": "auto"}) | {"aio": {}},
    ),
    # precision
    Rule("fp16.enabled", "error", "exclude each other", fp16() | {"bf16": {"enabled": True}}, fp16() | {"bf16": {"enabled": False}}),
    Rule("fp16.loss_scale", "error", "must not be negative", fp16(loss_scale=-1), fp16(loss_scale=0)),
    Rule(
        "fp16.loss_scale",
        "warning",
        "fixed loss scale of 128",
        fp16(loss_scale=128, loss_scale_window=100),
        fp16(loss_scale=0, loss_scale_window=100),
    ),
    Rule("fp16.loss_scale_window", "error", "must be positive", fp16(loss_scale_window=0), fp16(loss_scale_window=500)),
    Rule("fp16.initial_scale_power", "warning", "about 16 skipped steps", fp16(initial_scale_power=32), fp16(initial_scale_power=16)),
    Rule(
        "bf16.bf16_optimizer_states",
        "error",
        "needs bf16_master_weights_and_grads",
        zero() | {"bf16": {"bf16_optimizer_states": True}},
        zero() | {"bf16": {"bf16_optimizer_states": True, "bf16_master_weights_and_grads": True}},
    ),
    Rule(
        "fp16.fp16_master_weights_and_grads",
        "error",
        "offloaded to the CPU",
        fp16(fp16_master_weights_and_grads=True),
        fp16(fp16_master_weights_and_grads=True) | zero(offload_optimizer={"device": "cpu"}),
    ),
    Rule(
        "communication_data_type",
        "error",
        "float32 is not known",
        zero() | {"communication_data_type": "float32"},
        zero() | {"communication_data_type": "fp32"},
    ),
    Rule(
        "data_types.grad_accum_dtype",
        "error",
        "is not known",
        zero() | {"data_types": {"grad_accum_dtype": "double"}},
        zero() | {"data_types": {"grad_accum_dtype": "fp32"}},
    ),
    # optimizer
    Rule("optimizer.type", "error", "is missing", zero() | {"optimizer": {"params": {"lr": 1e-4}}}, optimizer(lr=1e-4)),
    Rule(
        "optimizer.type",
        "error",
        'did you mean "AdamW"?',
        zero() | {"optimizer": {"type": "AdamWW"}},
        zero() | {"optimizer": {"type": "adamw"}},
    ),
    Rule("optimizer.params.learning_rate", "error", 'did you mean "lr"?', optimizer(learning_rate=1e-4), optimizer(lr=1e-4)),
    Rule("optimizer.params.amsgrad", "error", "no AMSGrad", optimizer(amsgrad=True), optimizer(amsgrad=False)),
    Rule("optimizer.params.max_grad_norm", "error", '"gradient_clipping"', optimizer(max_grad_norm=1.0), optimizer()),
    Rule("optimizer.params.lr", "error", "must be positive", optimizer(lr=0), optimizer(lr=1e-5)),
    Rule("optimizer.params.weight_decay", "error", "must be at least 0", optimizer(weight_decay=-0.1), optimizer(weight_decay=0)),
    Rule("optimizer.params.betas", "error", "two numbers", optimizer(betas=[0.9]), optimizer(betas=[0.9, 0.95])),
    Rule("optimizer.params.betas", "error", "below 1", optimizer(betas=[0.9, 1.0]), optimizer(betas="auto")),
    # schedule
    Rule("scheduler.type", "error", "is missing", zero() | {"scheduler": {"params": {}}}, scheduler()),
    Rule("scheduler.type", "error", 'did you mean "WarmupCosineLR"?', scheduler("cosine"), scheduler("WarmupCosineLR")),
    Rule(
        "scheduler.params.warmup_steps",
        "error",
        'did you mean "warmup_num_steps"?',
        scheduler(warmup_steps=10),
        scheduler(warmup_num_steps=10),
    ),
    Rule(
        "scheduler.params.warmup_max_lr",
        "error",
        "is no parameter of WarmupCosineLR",
        scheduler("WarmupCosineLR", warmup_max_lr=1e-4),
        scheduler("WarmupLR", warmup_max_lr=1e-4),
    ),
    Rule("scheduler.params.warmup_num_steps", "error", "at least 1", scheduler(warmup_num_steps=0), scheduler(warmup_num_steps=1)),
    Rule(
        "scheduler.params.total_num_steps",
        "warning",
        "not shorter than the schedule",
        scheduler(warmup_num_steps=100, total_num_steps=100),
        scheduler(warmup_num_steps=100, total_num_steps=101),
    ),
    Rule(
        "scheduler.params.warmup_min_lr",
        "error",
        "is over warmup_max_lr",
        scheduler(warmup_min_lr=1e-3, warmup_max_lr=1e-4),
        scheduler(warmup_min_lr=0, warmup_max_lr=1e-4),
    ),
    Rule(
        "scheduler.params.warmup_max_lr",
        "warning",
        "replaces the optimizer's lr 2e-05",
        optimizer(lr=2e-5) | scheduler(warmup_max_lr=1e-4),
        optimizer(lr=2e-5) | scheduler(warmup_max_lr=2e-5),
    ),
    Rule(
        "scheduler.params.warmup_type",
        "info",
        "logarithmic",
        scheduler(warmup_num_steps=100),
        scheduler(warmup_num_steps=100, warmup_type="linear"),
    ),
    Rule("scheduler.params.warmup_type", "error", "'cosine' is not known", scheduler(warmup_type="cosine"), scheduler(warmup_type="log")),
    # the rest
    Rule(
        "train_micro_batch_size_per_gpu",
        "error",
        "must be at least 1",
        zero() | {"train_micro_batch_size_per_gpu": 0},
        zero() | {"train_micro_batch_size_per_gpu": 1},
    ),
    Rule("gradient_clipping", "error", "must not be negative", zero() | {"gradient_clipping": -1.0}, zero() | {"gradient_clipping": 0}),
    Rule("steps_per_print", "error", "must be at least 1", zero() | {"steps_per_print": 0}, zero() | {"steps_per_print": 1}),
    Rule(
        "gradient_allreduce_op",
        "error",
        "multiply every gradient",
        zero() | {"gradient_allreduce_op": "sum"},
        zero() | {"gradient_allreduce_op": "mean"},
    ),
    Rule(
        "tensor_parallel",
        "error",
        "is not supported here",
        zero() | {"tensor_parallel": {"autotp_size": 2}},
        zero() | {"tensor_parallel": {"autotp_size": 1}},
    ),
    Rule(
        "sequence_parallel_size",
        "error",
        "by a flag of the run -> remove it, and give --sequence_parallel_size 2",
        zero() | {"sequence_parallel_size": 2},
        zero() | {"sequence_parallel_size": 1},
    ),
    Rule(
        "data_efficiency",
        "error",
        "own data sampler",
        zero() | {"data_efficiency": {"enabled": True}},
        zero() | {"data_efficiency": {"enabled": False}},
    ),
    Rule(
        "activation_checkpointing",
        "info",
        "--activation_checkpointing full",
        zero() | {"activation_checkpointing": {"partition_activations": True}},
        zero(),
    ),
    Rule("tensorboard", "info", "--report_to", zero() | {"tensorboard": {"enabled": True}}, zero() | {"tensorboard": {"enabled": False}}),
    Rule(
        "wall_clock_breakdown",
        "warning",
        "for debugging",
        zero() | {"wall_clock_breakdown": True},
        zero() | {"wall_clock_breakdown": False},
    ),
    Rule(
        Z + "stage3_gather_16bit_weights_on_model_save",
        "info",
        "tensor by tensor",
        zero(stage3_gather_16bit_weights_on_model_save=True),
        zero(),
    ),
    Rule("dataloader_drop_last", "info", "has no effect", zero() | {"dataloader_drop_last": True}, zero()),
]


@pytest.mark.parametrize("rule", DEEPSPEED_RULES, ids=rule_id)
def test_deepspeed_rules(rule: Rule) -> None:
    check_both(rule, lambda config: check_deepspeed(config, num_processes=8, machine=AMPERE))


def test_bf16_in_the_file_needs_a_card_that_has_it() -> None:
    config = zero() | {"bf16": {"enabled": True}}
    (finding,) = check_deepspeed(config, machine=VOLTA)
    assert finding.line() == 'error   bf16.enabled: V100 (compute capability 7.0) has no bf16 -> use fp16, or "auto"'
    assert check_deepspeed(config, machine=AMPERE) == [] == check_deepspeed(config, machine=CPU)


def test_nvme_folder_in_host_memory_or_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = zero(offload_param={"device": "nvme", "nvme_path": str(tmp_path)}) | {"aio": {}}
    monkeypatch.setattr("harness.check_deepspeed._filesystem_of", lambda path: "tmpfs")
    assert [finding.severity for finding in check_deepspeed(config)] == ["warning"]
    monkeypatch.setattr("harness.check_deepspeed._filesystem_of", lambda path: "ext4")
    assert check_deepspeed(config) == []
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert [(finding.severity, finding.message) for finding in check_deepspeed(config)] == [("error", f"cannot write to {tmp_path}")]


def test_blocks_that_are_no_blocks_end_the_check_early() -> None:
    findings = check_deepspeed({"zero_optimization": 3, "optimizer": "AdamW"})
    assert [finding.key for finding in findings] == ["zero_optimization", "optimizer"]


@pytest.mark.parametrize("block", ["scheduler.params", "optimizer.params", "zero_optimization", "fp16", "zero_optimization.offload_param"])
def test_a_block_that_is_null_is_one_that_is_not_there(block: str) -> None:
    config: dict[str, Any] = {
        "optimizer": {"type": "AdamW", "params": {}},
        "scheduler": {"type": "WarmupLR", "params": {}},
        "zero_optimization": {"stage": 3},
    }
    *parents, name = block.split(".")
    place, without = config, json.loads(json.dumps(config))
    without_place = without
    for parent in parents:
        place, without_place = place[parent], without_place[parent]
    place[name] = None
    without_place.pop(name, None)
    assert check_deepspeed(config, num_processes=2) == check_deepspeed(without, num_processes=2)
    assert read_deepspeed_config(json.dumps(config)) == without


def test_names_that_are_no_text_end_the_check_early() -> None:
    for config in ({"scheduler": {"type": ["x"]}}, {"optimizer": {"type": {"a": 1}}}):
        assert "must be text" in check_deepspeed(config, num_processes=2)[0].message


def test_key_table_is_deepspeeds_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime import lr_schedules
    from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS, _REMOVED_ZERO_CONFIG_KEYS, DEEPSPEED_OPTIMIZERS
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig

    for table, model in (
        (deepspeed_keys.ZERO, DeepSpeedZeroConfig),
        (deepspeed_keys.OFFLOAD_PARAM, DeepSpeedZeroOffloadParamConfig),
        (deepspeed_keys.OFFLOAD_OPTIMIZER, DeepSpeedZeroOffloadOptimizerConfig),
        (deepspeed_keys.BF16, DeepSpeedBF16Config),
        (deepspeed_keys.FP16, DeepSpeedFP16Config),
    ):
        fields = {(field.alias or name): field for name, field in model.model_fields.items()}
        assert set(table) == set(fields), model.__name__
        for name, key in table.items():
            if key.default is not None:
                assert fields[name].default == key.default, name
    assert {name: key.default for name, key in deepspeed_keys.AIO.items()} == AIO_DEFAULT_DICT
    assert {name.lower() for name in deepspeed_keys.OPTIMIZERS} == set(DEEPSPEED_OPTIMIZERS)
    removed = set(_REMOVED_TOP_LEVEL_CONFIG_KEYS) | {"zero_optimization." + key for key in _REMOVED_ZERO_CONFIG_KEYS}
    assert set(deepspeed_keys.REMOVED) == removed
    import inspect

    for name, params in deepspeed_keys.SCHEDULERS.items():
        assert set(inspect.signature(getattr(lr_schedules, name)).parameters) - {"optimizer"} == set(params), name
