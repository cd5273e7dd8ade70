"""Rules about an accelerate YAML, and the key tables against accelerate itself."""

from __future__ import annotations

import pytest

from harness import check_accelerate as accelerate_rules
from harness.check_accelerate import check_accelerate, environment_of, layer_classes
from harness.parsing import read_yaml
from tests.checking import AMPERE, CPU, GPU4, ROOT, Rule, check_both, deepspeed, fsdp, rule_id, sizes

WRAP = "fsdp_config.fsdp_transformer_layer_cls_to_wrap"
JSON_FILE = str(ROOT / "ds_configs" / "zero3.json")
ACCELERATE_RULES = [
    Rule("mixed_precison", "error", "did you mean mixed_precision?", GPU4 | {"mixed_precison": "bf16"}, GPU4 | {"mixed_precision": "bf16"}),
    Rule("use_fsdp", "error", "distributed_type: FSDP", fsdp({"use_fsdp": True}), fsdp()),
    Rule("fsdp_offload_params", "error", "move it into fsdp_config", fsdp({"fsdp_offload_params": True}), fsdp(offload_params=True)),
    Rule("zero_stage", "error", "move it into deepspeed_config", deepspeed({"zero_stage": 3}), deepspeed(zero_stage=3)),
    Rule("dp_shard_size", "error", "move it into parallelism_config", fsdp({"dp_shard_size": 4}), fsdp(sizes(1, 4))),
    Rule(
        "parallelism_config.dp_shard_size",
        "error",
        "without its prefix",
        fsdp({"parallelism_config": {"dp_shard_size": 4}}),
        fsdp(sizes(1, 4)),
    ),
    Rule(
        "fsdp_config.fsdp_offload_parms", "error", "did you mean fsdp_offload_params?", fsdp(offload_parms=True), fsdp(offload_params=True)
    ),
    Rule(
        "fsdp_config.fsdp_backward_prefetch_policy",
        "error",
        "did you mean fsdp_backward_prefetch?",
        fsdp(backward_prefetch_policy="BACKWARD_PRE"),
        fsdp(),
    ),
    Rule("deepspeed_config.zero_stages", "error", "did you mean zero_stage?", deepspeed(zero_stages=3), deepspeed(zero_stage=3)),
    Rule("fsdp_config", "error", "must be a block", GPU4 | {"fsdp_config": "full_shard"}, fsdp()),
    Rule("fp16", "warning", "before 0.20", GPU4 | {"fp16": True}, GPU4 | {"mixed_precision": "fp16"}),
    Rule(
        "dynamo_config",
        "warning",
        "has no effect",
        GPU4 | {"dynamo_config": {"dynamo_backend": "INDUCTOR"}},
        GPU4 | {"dynamo_config": {"dynamo_backend": "NO"}},
    ),
    Rule("fsdp_config", "warning", "is ignored with distributed_type MULTI_GPU", GPU4 | {"fsdp_config": {"fsdp_version": 2}}, fsdp()),
    Rule("deepspeed_config", "warning", "is ignored", GPU4 | {"deepspeed_config": {"zero_stage": 2}}, deepspeed(zero_stage=2)),
    Rule("parallelism_config", "error", "is refused with distributed_type MULTI_GPU", GPU4 | sizes(1, 4), fsdp(sizes(1, 4))),
    Rule("distributed_type", "error", "is missing", {"num_processes": 2}, GPU4),
    Rule(
        "distributed_type",
        "error",
        "write 'NO'",
        {"distributed_type": False, "num_processes": 1},
        {"distributed_type": "NO", "num_processes": 1},
    ),
    Rule("distributed_type", "error", "MEGATRON_LM is not supported", GPU4 | {"distributed_type": "MEGATRON_LM"}, GPU4),
    Rule("distributed_type", "error", "FSDP", GPU4 | {"distributed_type": "FSDP2"}, fsdp()),
    Rule(
        "compute_environment",
        "error",
        "is not supported",
        GPU4 | {"compute_environment": "AMAZON_SAGEMAKER"},
        GPU4 | {"compute_environment": "LOCAL_MACHINE"},
    ),
    Rule("num_processes", "error", "is missing", {"distributed_type": "MULTI_GPU"}, GPU4),
    Rule("num_processes", "error", "write 4 without quotes", GPU4 | {"num_processes": "4"}, GPU4),
    Rule("num_processes", "error", "positive whole number", GPU4 | {"num_processes": -1}, GPU4 | {"num_processes": "gpu"}),
    Rule("num_processes", "error", "which has 8 cards", GPU4 | {"num_processes": 16}, GPU4 | {"num_processes": 8}),
    Rule(
        "num_processes",
        "error",
        "split evenly over 3 machines",
        GPU4 | {"num_machines": 3, "main_process_ip": "a", "main_process_port": 29501},
        GPU4 | {"num_machines": 2, "main_process_ip": "a", "main_process_port": 29501},
    ),
    Rule(
        "num_processes",
        "error",
        "works on one machine only",
        GPU4 | {"num_processes": "gpu", "num_machines": 2, "main_process_ip": "a", "main_process_port": 29501},
        GPU4 | {"num_machines": 2, "main_process_ip": "a", "main_process_port": 29501},
    ),
    Rule(
        "main_process_ip",
        "error",
        "is missing for 2 machines",
        GPU4 | {"num_machines": 2, "main_process_port": 29501},
        GPU4 | {"num_machines": 2, "main_process_ip": "a", "main_process_port": 29501},
    ),
    Rule(
        "main_process_port",
        "error",
        "no port that 2 machines",
        GPU4 | {"num_machines": 2, "main_process_ip": "a", "main_process_port": 0},
        GPU4 | {"main_process_port": 0},
    ),
    Rule("num_machines", "error", "positive whole number", GPU4 | {"num_machines": "two"}, GPU4 | {"num_machines": 1}),
    Rule("machine_rank", "error", "is not below num_machines 1", GPU4 | {"machine_rank": 1}, GPU4 | {"machine_rank": 0}),
    Rule("gpu_ids", "error", "names a card twice", GPU4 | {"gpu_ids": "0,1,1,2"}, GPU4 | {"gpu_ids": "0,1,2,3"}),
    Rule("gpu_ids", "error", "2 cards for 4 processes", GPU4 | {"gpu_ids": "0,1"}, GPU4 | {"gpu_ids": "all"}),
    Rule("mixed_precision", "error", "bf16", GPU4 | {"mixed_precision": "bfloat16"}, GPU4 | {"mixed_precision": "bf16"}),
    Rule("mixed_precision", "error", "fp8 is not supported", GPU4 | {"mixed_precision": "fp8"}, GPU4 | {"mixed_precision": "no"}),
    Rule("fsdp_version", "info", "FSDP1 settings", fsdp(version=1), fsdp()),
    Rule("fsdp_sharding_strategy", "info", "runs as FSDP2 hybrid_shard", fsdp(sharding_strategy="HYBRID_SHARD"), fsdp()),
    Rule(
        "fsdp_sharding_strategy",
        "error",
        "that is DDP",
        fsdp(version=1, sharding_strategy="NO_SHARD"),
        fsdp(version=1, sharding_strategy="FULL_SHARD"),
    ),
    *[
        Rule(
            "fsdp_reshard_after_forward",
            "error",
            "maybe is not known -> true or false",
            fsdp(version=version, reshard_after_forward="maybe"),
            fsdp(version=version, reshard_after_forward=False),
        )
        for version in (1, 2)
    ],
    Rule(
        "fsdp_sharding_strategy",
        "error",
        "maybe is not known -> FULL_SHARD, SHARD_GRAD_OP or HYBRID_SHARD",
        fsdp(version=1, sharding_strategy="maybe"),
        fsdp(version=1, sharding_strategy=2),
    ),
    Rule("fsdp_version", "error", "3 does not exist", fsdp(version=3), fsdp(version=2)),
    Rule("fsdp_offload_params", "error", "neither true nor false", fsdp(offload_params="maybe"), fsdp(offload_params="true")),
    Rule(
        "fsdp_auto_wrap_policy", "error", "is not known", fsdp(auto_wrap_policy="BY_HAND"), fsdp(auto_wrap_policy="TRANSFORMER_BASED_WRAP")
    ),
    Rule("fsdp_config.fsdp_use_orig_params", "info", "has no effect in FSDP2", fsdp(use_orig_params=True), fsdp()),
    Rule(
        "fsdp_config.fsdp_forward_prefetch", "error", "does not exist in FSDP2", fsdp(forward_prefetch=True), fsdp(forward_prefetch=False)
    ),
    Rule(
        "fsdp_config.fsdp_sync_module_states",
        "error",
        "refused by accelerate",
        fsdp(sync_module_states=False, cpu_ram_efficient_loading=True),
        fsdp(sync_module_states=True, cpu_ram_efficient_loading=True),
    ),
    Rule("fsdp_config.fsdp_cpu_ram_efficient_loading", "info", "is switched off", fsdp(cpu_ram_efficient_loading=True), fsdp()),
    Rule(
        "fsdp_config.fsdp_activation_checkpointing_offload",
        "error",
        "needs fsdp_activation_checkpointing",
        fsdp(activation_checkpointing_offload=True),
        fsdp(activation_checkpointing_offload=True, activation_checkpointing=True),
    ),
    Rule("fsdp_config.fsdp_auto_wrap_policy", "warning", "the whole model at once", fsdp(auto_wrap_policy="NO_WRAP"), fsdp()),
    Rule(
        "fsdp_config.fsdp_min_num_params",
        "error",
        "SIZE_BASED_WRAP",
        fsdp(auto_wrap_policy="SIZE_BASED_WRAP"),
        fsdp(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=10**8),
    ),
    Rule("parallelism_config", "error", "needs fsdp_version: 2", fsdp(sizes(1, 4), version=1), fsdp(sizes(1, 4))),
    Rule("parallelism_config", "error", "2 x dp_shard_size 4 is not the 4 processes", fsdp(sizes(2, 4)), fsdp(sizes(2, 2))),
    Rule("parallelism_config_tp_size", "error", "tensor parallelism", fsdp(sizes(1, 2, tp_size=2)), fsdp(sizes(1, 4, tp_size=1))),
    Rule(
        WRAP,
        "error",
        "LlamaDecoderLayer (or leave it out",
        fsdp(transformer_layer_cls_to_wrap="LLaMADecoderLayer"),
        fsdp(transformer_layer_cls_to_wrap="LlamaDecoderLayer"),
    ),
    Rule(
        "deepspeed_config.deepspeed_config_file",
        "error",
        "does not exist",
        deepspeed(deepspeed_config_file="/no/such.json"),
        deepspeed(deepspeed_config_file=JSON_FILE),
    ),
    Rule(
        "deepspeed_config.gradient_clipping",
        "error",
        "refused beside deepspeed_config_file",
        deepspeed(deepspeed_config_file=JSON_FILE, gradient_clipping=1.0),
        deepspeed(gradient_clipping=1.0),
    ),
    Rule(
        "mixed_precision",
        "error",
        "refused beside deepspeed_config_file",
        deepspeed({"mixed_precision": "bf16"}, deepspeed_config_file=JSON_FILE),
        deepspeed({"mixed_precision": "bf16"}, zero_stage=3),
    ),
    Rule("deepspeed_config.zero_stage", "error", "there is no stage 5", deepspeed(zero_stage=5), deepspeed(zero_stage=2)),
    Rule(
        "deepspeed_config.offload_param_device",
        "error",
        "needs zero_stage 3",
        deepspeed(zero_stage=2, offload_param_device="cpu"),
        deepspeed(zero_stage=3, offload_param_device="cpu"),
    ),
    Rule(
        "deepspeed_config.offload_optimizer_device",
        "error",
        "'disk' is not known",
        deepspeed(offload_optimizer_device="disk"),
        deepspeed(offload_optimizer_device="nvme"),
    ),
    Rule(
        "deepspeed_config.zero3_init_flag",
        "info",
        "has no effect",
        deepspeed(zero_stage=2, zero3_init_flag=True),
        deepspeed(zero_stage=3, zero3_init_flag=True),
    ),
]


@pytest.mark.parametrize("rule", ACCELERATE_RULES, ids=rule_id)
def test_accelerate_rules(rule: Rule) -> None:
    check_both(rule, lambda config: check_accelerate(config, machine=AMPERE, model_type="llama"))


def test_one_process_per_card_needs_a_card() -> None:
    config = fsdp({"num_processes": "gpu"})
    assert [finding.key for finding in check_accelerate(config, machine=CPU)] == ["num_processes"]
    assert check_accelerate(config, machine=AMPERE) == [] == check_accelerate(config, machine=CPU, num_processes=2)


@pytest.mark.parametrize(
    ("name", "model_type", "hint"),
    [
        ("LLaMADecoderLayer", "llama", "LlamaDecoderLayer (or"),
        ("llamadecoderlayer", "llama", "LlamaDecoderLayer (or"),
        ("GPT2Block", "bert", "BertEmbeddings, BertLayer (or"),
        ("LlamaDecoderLayer", "qwen3", "Qwen3DecoderLayer (or"),
        ("LlamaDecoderLayer", "llama", None),
        ("LlamaMLP", "llama", None),  # another class of the same model
        ("Anything", "not_in_transformers", None),
        ("Anything", None, None),
    ],
)
def test_wrap_class_must_be_one_of_the_models(name: str, model_type: str | None, hint: str | None) -> None:
    findings = check_accelerate(fsdp(transformer_layer_cls_to_wrap=name), machine=AMPERE, model_type=model_type)
    assert [finding.key for finding in findings] == ([WRAP] if hint else [])
    assert all(finding.fix.startswith(hint or "") and name in finding.message for finding in findings)


def test_layer_names_are_read_from_transformers_source() -> None:
    names = {kind: layer_classes(kind)[0] for kind in ("llama", "gpt2", "bert", "qwen3", "gpt_neox", "no_such")}
    assert names == {
        "llama": ["LlamaDecoderLayer"],
        "gpt2": ["GPT2Block"],
        "bert": ["BertEmbeddings", "BertLayer"],
        "qwen3": ["Qwen3DecoderLayer"],
        "gpt_neox": ["GPTNeoXLayer"],
        "no_such": [],
    }


def test_environment_of_a_file_is_what_accelerate_exports() -> None:
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    for path in sorted((ROOT / "fsdp_configs").glob("*.yaml")):
        tokens = ["--config_file", str(path), "--num_processes", "4", "--main_process_port", "0", "script.py"]
        validated, _, _ = _validate_launch_command(launch_command_parser().parse_args(tokens))
        exported = prepare_multi_gpu_env(validated)
        ours = environment_of(read_yaml(path))
        assert {name: exported[name] for name in ours} == ours and len(ours) > 8


def test_key_tables_are_accelerates_own() -> None:
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser

    options = {
        text.removeprefix("--") for action in launch_command_parser()._actions for text in action.option_strings if "-" not in text[2:]
    }
    assert set(ClusterConfig.__dataclass_fields__) | {"fp16", "dynamo_backend"} == accelerate_rules.TOP_KEYS
    assert {f"fsdp_{key}" for key in accelerate_rules.FSDP_KEYS} - {"fsdp_ignored_modules"} == {
        key for key in options if key.startswith("fsdp_")
    }
    parallel = {f"parallelism_config_{key}" for key in accelerate_rules.PARALLEL_KEYS}
    assert parallel == {key for key in options if key.startswith("parallelism_config_")}
    assert options >= accelerate_rules.DEEPSPEED_KEYS
