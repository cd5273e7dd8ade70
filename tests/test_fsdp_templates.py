"""FSDP settings: what `accelerate launch` exports and `--fsdp` says, in every spelling, and the repository's YAMLs read by accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.findings import UserError
from harness.fsdp_templates import FsdpTemplate, fsdp_from_environment, fsdp_from_flag, to_fsdp2

ROOT = Path(__file__).resolve().parent.parent
FSDP_TEMPLATES = sorted((ROOT / "fsdp_configs").glob("*.yaml"))


def accelerate_environment(path: Path, *flags: str) -> dict[str, str]:
    """What `accelerate launch --config_file path` exports to the script: its own code, without starting anything."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    parsed = launch_command_parser().parse_args(["--config_file", str(path), "--main_process_port", "0", *flags, "script.py"])
    validated, _, _ = _validate_launch_command(parsed)
    environ = prepare_multi_gpu_env(validated)
    environ["NPROC"] = str(validated.nproc_per_node)
    return environ


def test_the_repository_has_these_templates() -> None:
    assert [path.stem for path in FSDP_TEMPLATES] == ["full_shard", "full_shard_offload", "hybrid_shard", "shard_grad_op"]


@pytest.mark.parametrize("path", FSDP_TEMPLATES, ids=lambda path: path.stem)
def test_accelerates_own_loader_reads_every_fsdp_template(path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    assert config.distributed_type == "FSDP" and config.fsdp_config["fsdp_version"] == 2
    environ = accelerate_environment(path, "--num_processes", "4")
    assert environ["NPROC"] == "4"
    template = fsdp_from_environment(environ)
    assert template is not None and template.notes == ()
    expected = {
        "full_shard": ("full_shard", True, False),
        "full_shard_offload": ("full_shard", True, True),
        "shard_grad_op": ("shard_grad_op", False, False),
        "hybrid_shard": ("hybrid_shard", True, False),
    }[path.stem]
    assert (template.sharding_strategy, template.reshard_after_forward, template.cpu_offload) == expected
    assert (template.wrap_policy, template.wrap_class_names) == ("transformer", ())
    assert (template.mixed_precision, template.state_dict_type, template.activation_checkpointing) == (None, "sharded", False)
    # Without this, from_pretrained would leave every rank but the first without weights.
    assert environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "false"


def test_without_num_processes_the_launcher_takes_every_card() -> None:
    # "gpu" is torchrun's word for one process per visible card; accelerate hands it on.
    assert accelerate_environment(ROOT / "fsdp_configs" / "full_shard.yaml")["NPROC"] == "gpu"


@pytest.mark.parametrize(
    ("num_processes", "num_local", "sizes"),
    [(1, 1, (1, 1)), (2, 2, (1, 2)), (4, 4, (2, 2)), (8, 8, (2, 4)), (16, 8, (2, 8)), (32, 8, (4, 8))],
)
def test_hybrid_template_fits_every_number_of_processes(num_processes: int, num_local: int, sizes: tuple[int, int]) -> None:
    template = fsdp_from_environment(accelerate_environment(ROOT / "fsdp_configs" / "hybrid_shard.yaml", "--num_processes", "4"))
    assert template is not None
    assert template.group_sizes(num_processes, num_local) == sizes


def fsdp_env(**values: str) -> dict[str, str]:
    return {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"} | values


def test_no_fsdp_without_the_launchers_word() -> None:
    assert fsdp_from_environment({}) is None
    assert fsdp_from_environment({"ACCELERATE_USE_FSDP": "false", "FSDP_VERSION": "2"}) is None


@pytest.mark.parametrize(
    ("values", "strategy", "reshard", "noted"),
    [
        ({}, "full_shard", True, False),
        ({"FSDP_RESHARD_AFTER_FORWARD": "false"}, "shard_grad_op", False, False),
        ({"FSDP_SHARDING_STRATEGY": "HYBRID_SHARD"}, "hybrid_shard", True, True),
        ({"FSDP_VERSION": "1"}, "full_shard", True, True),
        ({"FSDP_VERSION": "1", "FSDP_SHARDING_STRATEGY": "1"}, "full_shard", True, True),
        ({"FSDP_VERSION": "1", "FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP"}, "shard_grad_op", False, True),
        ({"FSDP_VERSION": "1", "FSDP_SHARDING_STRATEGY": "4"}, "hybrid_shard", True, True),
        ({"FSDP_VERSION": "1", "FSDP_SHARDING_STRATEGY": "HYBRID_SHARD_ZERO2"}, "hybrid_shard", False, True),
        ({"FSDP_VERSION": "1", "FSDP_RESHARD_AFTER_FORWARD": "SHARD_GRAD_OP"}, "shard_grad_op", False, True),
    ],
)
def test_sharding_strategy_in_every_spelling(values: dict[str, str], strategy: str, reshard: bool, noted: bool) -> None:
    template = fsdp_from_environment(fsdp_env(**values))
    assert template is not None
    assert (template.sharding_strategy, template.reshard_after_forward) == (strategy, reshard)
    assert [finding.severity for finding in template.notes] == (["info"] if noted else [])


def test_everything_that_is_exported_is_read() -> None:
    template = fsdp_from_environment(
        fsdp_env(
            FSDP_OFFLOAD_PARAMS="true",
            FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP",
            FSDP_TRANSFORMER_CLS_TO_WRAP="LlamaDecoderLayer, LlamaMLP",
            FSDP_STATE_DICT_TYPE="FULL_STATE_DICT",
            FSDP_ACTIVATION_CHECKPOINTING="true",
            FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD="true",
            FSDP_MIN_NUM_PARAMS="2000",
            ACCELERATE_MIXED_PRECISION="bf16",
            ACCELERATE_USE_PARALLELISM_CONFIG="true",
            PARALLELISM_CONFIG_DP_REPLICATE_SIZE="2",
            PARALLELISM_CONFIG_DP_SHARD_SIZE="4",
            PARALLELISM_CONFIG_TP_SIZE="1",
        )
    )
    assert template == FsdpTemplate(
        sharding_strategy="hybrid_shard",
        reshard_after_forward=True,
        cpu_offload=True,
        wrap_policy="transformer",
        wrap_class_names=("LlamaDecoderLayer", "LlamaMLP"),
        min_num_params=2000,
        replicate_size=2,
        shard_size=4,
        mixed_precision="bf16",
        activation_checkpointing=True,
        activation_offload=True,
        state_dict_type="full",
    )
    assert template.group_sizes(8) == (2, 4)
    with pytest.raises(UserError, match="2 x dp_shard_size 4 is not the 6 processes"):
        template.group_sizes(6)


def test_one_replica_is_plain_full_sharding() -> None:
    sizes = {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "1", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "4"}
    template = fsdp_from_environment(fsdp_env(ACCELERATE_USE_PARALLELISM_CONFIG="true", **sizes))
    assert template is not None and template.sharding_strategy == "full_shard" and template.group_sizes(4) == (1, 4)
    with pytest.raises(UserError, match="not the 8 processes"):
        template.group_sizes(8)


def test_open_sizes_are_computed_from_the_other() -> None:
    assert FsdpTemplate("hybrid_shard", replicate_size=4).group_sizes(8) == (4, 2)
    assert FsdpTemplate("hybrid_shard", shard_size=4).group_sizes(8) == (2, 4)
    with pytest.raises(UserError):
        FsdpTemplate("hybrid_shard", shard_size=3).group_sizes(8)
    with pytest.raises(UserError):
        FsdpTemplate("hybrid_shard", replicate_size=16).group_sizes(8)


def test_all_wrong_values_are_reported_together() -> None:
    environ = fsdp_env(
        FSDP_VERSION="3",
        FSDP_OFFLOAD_PARAMS="maybe",
        FSDP_AUTO_WRAP_POLICY="BY_HAND",
        ACCELERATE_MIXED_PRECISION="fp8",
        ACCELERATE_USE_PARALLELISM_CONFIG="true",
        PARALLELISM_CONFIG_TP_SIZE="2",
        PARALLELISM_CONFIG_DP_SHARD_SIZE="many",
    )
    with pytest.raises(UserError) as caught:
        fsdp_from_environment(environ)
    assert sorted(finding.key for finding in caught.value.findings) == [
        "fsdp_auto_wrap_policy",
        "fsdp_offload_params",
        "fsdp_version",
        "mixed_precision",
        "parallelism_config_dp_shard_size",
        "parallelism_config_tp_size",
    ]


def test_no_shard_is_refused() -> None:
    for text in ("NO_SHARD", "3"):
        with pytest.raises(UserError, match="that is DDP"):
            fsdp_from_environment(fsdp_env(FSDP_VERSION="1", FSDP_SHARDING_STRATEGY=text))
    with pytest.raises(UserError, match="that is DDP"):
        fsdp_from_flag("no_shard")


@pytest.mark.parametrize(
    ("text", "strategy", "reshard", "offload"),
    [
        ("full_shard", "full_shard", True, False),
        ("full_shard offload", "full_shard", True, True),
        ("shard_grad_op,auto_wrap", "shard_grad_op", False, False),
        ("hybrid_shard auto_wrap offload", "hybrid_shard", True, True),
        ("hybrid_shard_zero2", "hybrid_shard", False, False),
        ("offload", "full_shard", True, True),
    ],
)
def test_the_fsdp_flag(text: str, strategy: str, reshard: bool, offload: bool) -> None:
    template = fsdp_from_flag(text)
    assert (template.sharding_strategy, template.reshard_after_forward, template.cpu_offload) == (strategy, reshard, offload)


def test_wrong_fsdp_flags() -> None:
    with pytest.raises(UserError, match="fullshard is not known"):
        fsdp_from_flag("fullshard")
    with pytest.raises(UserError, match="were both asked for"):
        fsdp_from_flag("full_shard shard_grad_op")


@pytest.mark.parametrize(
    "old",
    [
        {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_use_orig_params": True}},
        {
            "distributed_type": "FSDP",
            "fsdp_config": {"fsdp_version": 1, "fsdp_sharding_strategy": 2, "fsdp_backward_prefetch": "BACKWARD_PRE"},
        },
        {"use_fsdp": True, "fsdp_sharding_strategy": "SHARD_GRAD_OP"},
        {"distributed_type": "FSDP", "fsdp_config": {"fsdp_reshard_after_forward": "SHARD_GRAD_OP", "fsdp_forward_prefetch": False}},
    ],
)
def test_fsdp1_files_become_files_accelerate_takes(old: dict[str, Any], tmp_path: Path) -> None:
    import yaml
    from accelerate.commands.config.config_args import load_config_from_file

    new, findings = to_fsdp2(old)
    assert [finding.severity for finding in findings] == ["info"]
    assert new["fsdp_config"] == {"fsdp_version": 2, "fsdp_reshard_after_forward": False, "fsdp_cpu_ram_efficient_loading": False}
    path = tmp_path / "new.yaml"
    path.write_text(yaml.safe_dump(new | {"num_processes": 2}))
    assert load_config_from_file(str(path)).distributed_type == "FSDP"
    template = fsdp_from_environment(accelerate_environment(path))
    assert template is not None and template.sharding_strategy == "shard_grad_op" and template.notes == ()


def test_hybrid_sharding_of_fsdp1_becomes_a_parallelism_config() -> None:
    new, _ = to_fsdp2({"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"}})
    assert new["parallelism_config"] == {"parallelism_config_dp_replicate_size": -1, "parallelism_config_dp_shard_size": -1}


def test_files_of_today_and_without_fsdp_are_left_alone() -> None:
    import yaml

    for path in FSDP_TEMPLATES:
        values = yaml.safe_load(path.read_text())
        assert to_fsdp2(values) == (values, [])
    assert to_fsdp2({"distributed_type": "MULTI_GPU"}) == ({"distributed_type": "MULTI_GPU"}, [])
