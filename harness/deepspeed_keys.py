"""The keys of a DeepSpeed JSON, as DeepSpeed 0.19.8 reads them, as data: importing DeepSpeed to ask it takes seconds.

A test compares the blocks that DeepSpeed declares as pydantic models with the models themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

DEEPSPEED_VERSION = "0.19.8"
Kind = Literal["bool", "int", "float", "str", "block", "list", "any"]


class Key(NamedTuple):
    """Type of a key's value, and DeepSpeed's default where that is a plain value."""

    kind: Kind
    default: Any = None


def _keys(kind: Kind, *names: str) -> dict[str, Key]:
    return {name: Key(kind) for name in names}


TOP: dict[str, Key] = {
    **_keys("int", "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "vocabulary_size"),
    **_keys("int", "sequence_parallel_size", "data_parallel_size"),
    **_keys("float", "steps_per_print"),
    "gradient_clipping": Key("float", 1.0),
    "gradient_predivide_factor": Key("float", 1.0),
    "managed_gradient_accumulation": Key("bool", True),
    "zero_force_ds_cpu_optimizer": Key("bool", True),
    "zero_allow_untested_optimizer": Key("bool", False),
    "prescale_gradients": Key("bool", False),
    "wall_clock_breakdown": Key("bool", False),
    "memory_breakdown": Key("bool", False),
    **_keys("bool", "dump_state", "disable_python_gc", "disable_allgather", "dataloader_drop_last"),
    **_keys("bool", "use_data_before_expert_parallelism"),
    **_keys("str", "communication_data_type", "seq_parallel_communication_data_type", "gradient_allreduce_op", "log_level"),
    **_keys("block", "zero_optimization", "fp16", "bf16", "bfloat16", "torch_autocast", "optimizer", "scheduler", "aio"),
    **_keys("block", "activation_checkpointing", "comms_logger", "tensorboard", "wandb", "csv_monitor", "comet"),
    **_keys("block", "flops_profiler", "autotuning", "hybrid_engine", "pipeline", "data_efficiency", "checkpoint", "data_types"),
    **_keys("block", "weight_quantization", "compile", "timers", "tensor_parallel", "expert_parallel", "inference", "msamp"),
    "datastates_ckpt": Key("any"),
}

ZERO: dict[str, Key] = {
    "stage": Key("int", 0),
    "contiguous_gradients": Key("bool", True),
    "reduce_scatter": Key("bool", True),
    "reduce_bucket_size": Key("int", 500_000_000),
    "use_multi_rank_bucket_allreduce": Key("bool", True),
    "allgather_partitions": Key("bool", True),
    "allgather_bucket_size": Key("int", 500_000_000),
    "overlap_comm": Key("bool"),
    "compute_grad_norm": Key("bool", True),
    "load_from_fp32_weights": Key("bool", True),
    "elastic_checkpoint": Key("bool", False),
    "offload_param": Key("block"),
    "offload_optimizer": Key("block"),
    "zenflow": Key("block"),
    "sub_group_size": Key("int", 1_000_000_000),
    "cpu_offload_param": Key("bool"),
    "cpu_offload_use_pin_memory": Key("bool"),
    "cpu_offload": Key("bool"),
    "stage3_prefetch_bucket_size": Key("int", 50_000_000),
    "stage3_param_persistence_threshold": Key("int", 100_000),
    "stage3_model_persistence_threshold": Key("int"),
    "stage3_max_live_parameters": Key("int", 1_000_000_000),
    "stage3_max_reuse_distance": Key("int", 1_000_000_000),
    "stage3_gather_16bit_weights_on_model_save": Key("bool", False),
    "stage3_module_granularity_threshold": Key("int", 0),
    "stage3_use_all_reduce_for_fetch_params": Key("bool", False),
    "stage3_allgather_sequential": Key("bool", False),
    "stage3_gather_fp16_weights_on_model_save": Key("bool", False),
    "ignore_unused_parameters": Key("bool", True),
    "legacy_stage1": Key("bool", False),
    "round_robin_gradients": Key("bool", False),
    "parameter_alignment": Key("bool", False),
    "zero_hpz_partition_size": Key("int", 1),
    "zero_quantized_weights": Key("bool", False),
    "zero_quantized_nontrainable_weights": Key("bool", False),
    "zero_quantized_gradients": Key("bool", False),
    "memory_efficient_linear": Key("bool", True),
    "pipeline_loading_checkpoint": Key("bool", False),
    "override_module_apply": Key("bool", True),
    "log_trace_cache_warnings": Key("bool", False),
    "enable_sanity_checks": Key("bool", False),
    "save_muon_momentum_buffer_in_memory": Key("bool", False),
    "leaf_module": Key("block"),
}

OFFLOAD_PARAM: dict[str, Key] = {
    "device": Key("str", "none"),
    "nvme_path": Key("str"),
    "buffer_count": Key("int", 5),
    "buffer_size": Key("int", 100_000_000),
    "max_in_cpu": Key("int", 1_000_000_000),
    "pin_memory": Key("bool", True),
}

OFFLOAD_OPTIMIZER: dict[str, Key] = {
    "device": Key("str", "none"),
    "nvme_path": Key("str"),
    "buffer_count": Key("int", 4),
    "pin_memory": Key("bool", True),
    "pipeline_read": Key("bool", False),
    "pipeline_write": Key("bool", False),
    "fast_init": Key("bool", False),
    "ratio": Key("float", 1.0),
    "super_offload": Key("bool", False),
    "cpuadam_cores_perc": Key("float", 0.8),
}

BF16: dict[str, Key] = {
    "enabled": Key("bool", False),
    "immediate_grad_update": Key("bool", False),
    "check_grad_overflow": Key("bool", True),
    "bf16_master_weights_and_grads": Key("bool", False),
    "bf16_optimizer_states": Key("bool", False),
}

FP16: dict[str, Key] = {
    "enabled": Key("bool", False),
    "auto_cast": Key("bool", False),
    "loss_scale": Key("float", 0),
    "initial_scale_power": Key("int", 16),
    "loss_scale_window": Key("int", 1000),
    "hysteresis": Key("int", 2),
    "consecutive_hysteresis": Key("bool", False),
    "min_loss_scale": Key("int", 1),
    "fp16_master_weights_and_grads": Key("bool", False),
}

AIO: dict[str, Key] = {
    "block_size": Key("int", 1048576),
    "queue_depth": Key("int", 8),
    "intra_op_parallelism": Key("int", 1),
    "single_submit": Key("bool", False),
    "overlap_events": Key("bool", True),
    "use_gds": Key("bool", False),
}

BLOCKS: dict[str, dict[str, Key]] = {
    "": TOP,
    "zero_optimization": ZERO,
    "zero_optimization.offload_param": OFFLOAD_PARAM,
    "zero_optimization.offload_optimizer": OFFLOAD_OPTIMIZER,
    "bf16": BF16,
    "bfloat16": BF16,
    "fp16": FP16,
    "aio": AIO,
    "optimizer": {"type": Key("str"), "params": Key("block"), "legacy_fusion": Key("bool", False)},
    "scheduler": {"type": Key("str"), "params": Key("block")},
    "torch_autocast": {"enabled": Key("bool", False), "dtype": Key("str"), "lower_precision_safe_modules": Key("list")},
    "data_types": {**_keys("str", "grad_accum_dtype", "param_dtype", "buffer_dtype"), "keep_in_fp32_modules": Key("any", "auto")},
}

OPTIMIZERS = ("Adam", "AdamW", "Adagrad", "Lamb", "Lion", "Muon", "MuAdam", "MuAdamW", "MuSGD")
ADAM_PARAMS = (
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "bias_correction",
    "amsgrad",
    "torch_adam",
    "adam_w_mode",
    "fused",
    "foreach",
    "fp32_optimizer_states",
)
_WARMUP = ("warmup_num_steps", "warmup_type", "last_batch_iteration")
SCHEDULERS: dict[str, tuple[str, ...]] = {
    "WarmupLR": ("warmup_min_lr", "warmup_max_lr", *_WARMUP),
    "WarmupDecayLR": ("total_num_steps", "warmup_min_lr", "warmup_max_lr", *_WARMUP),
    "WarmupCosineLR": ("total_num_steps", "warmup_min_ratio", "cos_min_ratio", *_WARMUP),
    "LRRangeTest": (
        "lr_range_test_min_lr",
        "lr_range_test_step_size",
        "lr_range_test_step_rate",
        "lr_range_test_staircase",
        "last_batch_iteration",
    ),
    "OneCycle": (
        "cycle_min_lr",
        "cycle_max_lr",
        "decay_lr_rate",
        "cycle_first_step_size",
        "cycle_second_step_size",
        "cycle_first_stair_count",
        "cycle_second_stair_count",
        "decay_step_size",
        "cycle_momentum",
        "cycle_min_mom",
        "cycle_max_mom",
        "decay_mom_rate",
        "last_batch_iteration",
    ),
}

# Keys that DeepSpeed 0.19.8 refuses because the feature is gone, with what to do instead.
REMOVED = {
    "nebula": "remove it; checkpoints are written by the harness",
    "compression_training": "remove it",
    "amp": 'use "bf16" or "fp16"',
    "quantize_training": "remove it",
    "sparse_gradients": "remove it",
    "eigenvalue": "remove it",
    "sparse_attention": "remove it",
    "elasticity": "remove it; the global batch stays the same on any number of processes with --target_batch_size",
    "graph_harvesting": "remove it",
    "curriculum_learning": "remove it",
    "progressive_layer_drop": "remove it",
    "zero_optimization.mics_shard_size": "use zero_hpz_partition_size, or hybrid_shard of FSDP",
    "zero_optimization.mics_hierarchical_params_gather": "remove it",
    "zero_optimization.zeropp_loco_param": "remove it",
}
DEPRECATED = {
    "zero_optimization.cpu_offload": '"offload_optimizer": {"device": "cpu"}',
    "zero_optimization.cpu_offload_param": '"offload_param": {"device": "cpu"}',
    "zero_optimization.cpu_offload_use_pin_memory": '"pin_memory" in offload_param and offload_optimizer',
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
    "zero_optimization.elastic_checkpoint": "nothing; checkpoints load on another number of processes through the universal format",
    "zero_optimization.legacy_stage1": "nothing",
    "bfloat16": "bf16",
}
# Blocks that would change the training behind the harness's back, or that it has no part for.
UNSUPPORTED = {
    "tensor_parallel": "tensor parallelism",
    "expert_parallel": "expert parallelism",
    "sequence_parallel_size": "sequence parallelism",
    "pipeline": "DeepSpeed's pipeline engine",
    "hybrid_engine": "the RLHF engine",
    "data_efficiency": "DeepSpeed's own data sampler",
    "autotuning": "DeepSpeed's autotuner",
    "torch_autocast": "autocast inside DeepSpeed",
    "weight_quantization": "weight quantization",
}
# Where "auto" is filled by the harness, or is DeepSpeed's own word.
FILLED_AUTO = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "fp16.enabled",
    "bf16.enabled",
    "bfloat16.enabled",
    "optimizer.params.lr",
    "optimizer.params.betas",
    "optimizer.params.eps",
    "optimizer.params.weight_decay",
    "scheduler.params.warmup_min_lr",
    "scheduler.params.warmup_max_lr",
    "scheduler.params.warmup_min_ratio",
    "scheduler.params.cos_min_ratio",
    "scheduler.params.warmup_num_steps",
    "scheduler.params.warmup_type",
    "scheduler.params.total_num_steps",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
    "zero_optimization.offload_param.nvme_path",
    "zero_optimization.offload_param.buffer_size",
    "zero_optimization.offload_optimizer.nvme_path",
    "pipeline.stages",
    "data_types.keep_in_fp32_modules",
)


def zero_size(zero: Mapping[str, Any], key: str) -> int | None:
    """A size of a "zero_optimization" block in force, in elements: DeepSpeed's default where it is not there; None for "auto"."""
    value = zero.get(key, ZERO[key].default)
    return None if value == "auto" else int(value)
