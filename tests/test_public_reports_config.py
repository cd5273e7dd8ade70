"""What people reported about other tools, tried on this one: templates, arguments and how a run is started.

A test's name begins with the case's number, its docstring has the reports; values are those of the smallest input that shows the fault.
"""

from __future__ import annotations

import json
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.check_accelerate import check_accelerate, wrap_class_findings
from harness.check_config import main as check
from harness.check_launch import check_launch, parse_launch, read_hostfile
from harness.deepspeed_json import solve_batch
from harness.findings import UserError
from harness.host_checks import check_shm
from harness.parsing import parse_args
from harness.templates import resolve_deepspeed_config
from launch import cluster, machine, run
from launch.command import LaunchError, Plan, make_plan
from tests.checking import ROOT, fsdp, zero

RUN = ["--model_type", "llama", "--output_dir", "out"]
GPUS = ["GPU-aaaa0", "GPU-bbbb1", "GPU-cccc2", "GPU-dddd3"]


def checked(capsys: pytest.CaptureFixture[str], *tokens: str) -> tuple[int, str]:
    """`harness check`: its exit code and what it prints."""
    return check(list(tokens)), capsys.readouterr().out


def ds_json(folder: Path, **values: Any) -> str:
    path = folder / "ds.json"
    path.write_text(json.dumps(values))
    return str(path)


def planned(line: str, environ: dict[str, str] | None = None) -> Plan:
    """What launch/run.py would start on a machine of four cards."""
    options, script_args = run.read_options(shlex.split(line))
    return make_plan(options, script_args, environ or {}, GPUS)


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens on, where the reports have 29500."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


# ---- batch sizes


def test_b01_batch_keys_that_disagree_with_the_number_of_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/6914. A third way to mend it, a micro-batch of 8, is offered too."""
    keys = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
    file = ds_json(tmp_path, **keys, **zero(2))
    code, text = checked(capsys, "--deepspeed", file, "--num_processes", "4")
    assert code == 2 and "32 != 2 * 1 * 4" in text and all(key in text for key in keys)
    assert "set train_batch_size: 8 or gradient_accumulation_steps: 4 or train_micro_batch_size_per_gpu: 8" in text
    assert checked(capsys, "--deepspeed", file, "--num_processes", "16") == (0, "0 errors, 0 warnings, 0 infos\n")


@pytest.mark.parametrize("missing", ["gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu"])
def test_b01_a_missing_batch_key_follows_from_the_others(missing: str) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/6914"""
    sizes = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
    expected = {"gradient_accumulation_steps": 4, "train_batch_size": 8, "train_micro_batch_size_per_gpu": 8}[missing]
    del sizes[missing]
    config, findings = resolve_deepspeed_config({**sizes, **zero(2)}, parse_args(RUN), 4, total_steps=10, hidden_size=64, precision="bf16")
    assert findings == [] and config[missing] == expected
    assert config["train_batch_size"] == config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * 4


def test_b01_every_fix_that_is_offered_is_one() -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/6914, its neighbours: whatever disagrees, the number in the message mends it."""
    for total, micro, accumulation, processes in ((7, 2, 1, 4), (32, 3, None, 4), (32, None, 5, 4), (3, None, None, 4), (1, 2, 3, 4)):
        _, _, finding = solve_batch(total, micro, accumulation, processes, 8)
        assert finding is not None and str(total) in finding.message
        offered = int(finding.fix.split("train_batch_size: ")[1].split()[0])
        assert solve_batch(offered, micro, accumulation, processes, 8)[2] is None


def test_e03_micro_batches_never_come_from_a_loaders_batch_size() -> None:
    """https://github.com/huggingface/accelerate/issues/841, https://github.com/huggingface/accelerate/pull/2207

    Better than refusing "auto": the size of a micro-batch is the run's own here, also where the rows come out of a loader that has a
    batch sampler, so there is no `None` to compute with.
    """
    from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

    from harness.lora import rows_of

    rows = [{"input_ids": [token, token + 1]} for token in range(5)]
    loader = DataLoader(rows, batch_sampler=BatchSampler(SequentialSampler(rows), 3, drop_last=False), collate_fn=list)
    assert loader.batch_size is None
    assert [row["input_ids"] for row in rows_of(loader)] == [row["input_ids"] for row in rows]
    known: dict[str, Any] = {"total_steps": 10, "hidden_size": 64, "precision": "bf16"}
    template = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 1, "train_batch_size": "auto", **zero(2)}
    config, findings = resolve_deepspeed_config(template, parse_args([*RUN, "--per_device_train_batch_size", "3"]), 4, **known)
    assert findings == [] and (config["train_micro_batch_size_per_gpu"], config["train_batch_size"]) == (3, 12)
    template["train_micro_batch_size_per_gpu"] = 3
    config, findings = resolve_deepspeed_config(template, parse_args(RUN), 4, **known)
    assert findings == [] and (config["train_micro_batch_size_per_gpu"], config["train_batch_size"]) == (3, 12)


# ---- precision, numbers


def test_b05_fp16_in_the_file_and_not_in_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """https://github.com/shibing624/MedicalGPT/issues/191"""
    file = ds_json(tmp_path, fp16={"enabled": True}, **zero(2))
    flags = ["--deepspeed", file, "--model_type", "llama", "--output_dir", str(tmp_path / "out"), "--num_processes", "1"]
    code, text = checked(capsys, *flags, "--precision", "fp32")
    assert code == 2
    assert 'fp16.enabled=True, but the run\'s precision is fp32 -> make the two equal, or set "fp16.enabled" to "auto"' in text


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_b05_either_switch_in_the_file_against_each_precision(name: str, precision: str) -> None:
    """https://github.com/shibing624/MedicalGPT/issues/191, its neighbours: on in the file and not the run's, or off and the run's."""
    args = parse_args([*RUN, "--precision", precision])
    for enabled in (True, False):
        _, findings = resolve_deepspeed_config(
            {name: {"enabled": enabled}, **zero(2)}, args, 4, total_steps=10, hidden_size=64, precision=precision
        )
        wrong = enabled != (name == precision)
        assert [each.key for each in findings if each.severity == "error"] == ([f"{name}.enabled"] if wrong else [])
    auto = {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}, **zero(2)}
    config, findings = resolve_deepspeed_config(auto, args, 4, total_steps=10, hidden_size=64, precision=precision)
    assert findings == []
    assert (config["fp16"]["enabled"], config["bf16"]["enabled"]) == (precision == "fp16", precision == "bf16")


@pytest.mark.parametrize(("text", "value"), [("2e-5", 2e-05), ("2.0e-5", 2e-05), ("1e5", 100000.0), ("2E-5", 2e-05), ("'2e-5'", 2e-05)])
def test_e11_numbers_that_yaml_reads_as_text(text: str, value: float, tmp_path: Path) -> None:
    """https://github.com/hiyouga/LlamaFactory/issues/4014, https://github.com/salesforce/ALBEF/issues/128"""
    path = tmp_path / "run.yaml"
    path.write_text(f"model_type: llama\noutput_dir: out\nlearning_rate: {text}\n")
    rate = parse_args(["--config", str(path)]).train.learning_rate
    assert type(rate) is float and rate == value


@pytest.mark.parametrize(("text", "value"), [("1e5", 100000), ("1.0e+5", 100000), ("100000.0", 100000), ("'8'", 8), ("1_000", 1000)])
def test_e11_whole_numbers_that_yaml_reads_as_something_else(text: str, value: int, tmp_path: Path) -> None:
    """https://github.com/hiyouga/LlamaFactory/issues/4014, its neighbours: a count is a count however it is written."""
    path = tmp_path / "run.yaml"
    path.write_text(f"model_type: llama\noutput_dir: out\nmax_steps: {text}\n")
    steps = parse_args(["--config", str(path)]).train.max_steps
    assert type(steps) is int and steps == value


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("learning_rate: no", "--learning_rate: must be a number, not 'False'"),
        ("learning_rate: 'no'", "--learning_rate: must be a number, not 'no'"),
        ("learning_rate: 2,5", "--learning_rate: must be a number, not '2,5'"),
        ("max_steps: 1.5", "--max_steps: must be a whole number, not '1.5'"),
        ("max_steps: 1e400", "--max_steps: must be a whole number, not '1e400'"),
        ("max_steps: .inf", "--max_steps: must be a whole number, not 'inf'"),
        ("max_steps: .nan", "--max_steps: must be a whole number, not 'nan'"),
        ("max_steps: yes", "--max_steps: must be a whole number, not 'True'"),
    ],
)
def test_e11_what_is_no_number_is_said_before_anything_starts(line: str, message: str, tmp_path: Path) -> None:
    """https://github.com/hiyouga/LlamaFactory/issues/4014"""
    path = tmp_path / "run.yaml"
    path.write_text(f"model_type: llama\noutput_dir: out\n{line}\n")
    with pytest.raises(UserError) as caught:
        parse_args(["--config", str(path)])
    assert message in str(caught.value)


@pytest.mark.parametrize(("text", "value"), [("no", False), ("'no'", False), ("yes", True), ("'yes'", True), ("off", False)])
def test_e11_yes_and_no(text: str, value: bool, tmp_path: Path) -> None:
    """https://github.com/salesforce/ALBEF/issues/128"""
    path = tmp_path / "run.yaml"
    path.write_text(f"model_type: llama\noutput_dir: out\nbf16: {text}\n")
    assert parse_args(["--config", str(path)]).train.bf16 is value


# ---- FSDP


@pytest.mark.parametrize(
    ("name", "model_type", "hint"),
    [
        ("LLaMADecoderLayer", "llama", "LlamaDecoderLayer (or"),
        ("llamadecoderlayer", "llama", "LlamaDecoderLayer (or"),
        ("LlamaDecoderLayer", "llama", None),
        ("GPT2Block", "bert", "BertEmbeddings, BertLayer (or"),
        ("GPT2Block", "gpt2", None),
        ("DecoderLayer", "falcon", "FalconDecoderLayer (or"),
        ("LlamaDecoderLayer", "qwen3", "Qwen3DecoderLayer (or"),
    ],
)
def test_b18_layers_to_wrap_that_the_model_does_not_have(name: str, model_type: str, hint: str | None) -> None:
    """https://github.com/tatsu-lab/stanford_alpaca/issues/224, https://github.com/huggingface/accelerate/issues/2872"""
    findings = wrap_class_findings([name], model_type)
    assert [(each.severity, each.message) for each in findings] == (
        [("error", f"{name} is no class of a {model_type} model")] if hint else []
    )
    if hint:
        assert next(iter(wrap_class_findings([name], model_type))).fix.startswith(hint)


def test_b18_the_wrong_name_is_found_before_launch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """https://github.com/tatsu-lab/stanford_alpaca/issues/224: in the whole command that a user would start."""
    path = tmp_path / "accelerate.yaml"
    path.write_text(yaml.safe_dump(fsdp(transformer_layer_cls_to_wrap="LLaMADecoderLayer", auto_wrap_policy="TRANSFORMER_BASED_WRAP")))
    command = shlex.split(
        f"accelerate launch --config_file {path} {ROOT}/harness/run_clm.py --model_type llama --output_dir {tmp_path}/out"
    )
    code, text = checked(capsys, "--", *command)
    assert code == 2 and "LLaMADecoderLayer is no class of a llama model -> LlamaDecoderLayer" in text


def test_b20_flat_parameters_are_not_made_at_all() -> None:
    """https://github.com/axolotl-ai-cloud/axolotl/issues/1494, https://github.com/huggingface/trl/issues/1723,
    https://github.com/huggingface/peft/issues/1702, https://github.com/mosaicml/llm-foundry/issues/414

    (b), better than a refusal: a file of FSDP version 1, with or without use_orig_params, runs as FSDP2, which shards each parameter by
    itself and so may mix frozen with trained ones; that is said. What is computed is tried by test_public_reports_models.
    """
    for more in ({"use_orig_params": False}, {"use_orig_params": True}, {}):
        config = fsdp(**more)
        config["fsdp_config"]["fsdp_version"] = 1
        (finding,) = check_accelerate(config, model_type="llama")
        assert finding.severity == "info" and finding.message == "FSDP1 settings (FULL_SHARD) run as FSDP2 full_shard"


# ---- how a run is started


def test_e15_a_device_map_in_a_launch_of_several_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """https://github.com/huggingface/transformers/issues/31557, https://github.com/QwenLM/Qwen/pull/833"""
    expected = "balanced is for one process, but num_processes is 2"
    code, text = checked(
        capsys, "--num_processes", "2", "--device_map", "balanced", "--model_type", "llama", "--output_dir", str(tmp_path / "out")
    )
    assert code == 2 and f"--device_map: {expected}" in text
    (tmp_path / "run.yaml").write_text("device_map: balanced\n")
    for script_args in ("--device_map balanced", "--device-map=balanced", f"--config {tmp_path}/run.yaml"):
        for engine in ("ddp", "fsdp", "zero2"):
            with pytest.raises(LaunchError) as caught:
                planned(f"--engine {engine} --num_processes 2 -- {script_args}")
            assert f"--device_map {expected}" in str(caught.value)
    assert "--device_map" in planned("--engine auto -- --device_map balanced").command


def hostfile(folder: Path, *lines: str) -> str:
    path = folder / "hosts"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


HOSTFILES: list[tuple[tuple[str, ...], str]] = [
    (("node-a slots=4", "node-b lots=4"), "line 2: node-b lots=4"),
    (("node-a slots=4", "node-a slots=2"), "line 2: node-a stands twice"),
    (("# only a comment",), "is empty: it names no host"),
    (("node-a slots = 4",), "line 1: node-a slots = 4"),
]


def test_b50_a_hostfile_with_blank_lines_and_comments(tmp_path: Path) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/3669, https://github.com/deepspeedai/DeepSpeed/issues/5221"""
    hosts = read_hostfile(hostfile(tmp_path, "# cluster", "", "node-a slots=4  ", "  node-b slots=2 # spare"))
    assert hosts == {"node-a": 4, "node-b": 2} and sum(hosts.values()) == 6


@pytest.mark.parametrize(("lines", "message"), HOSTFILES)
def test_b50_a_hostfile_with_a_mistake(lines: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/3669, https://github.com/deepspeedai/DeepSpeed/pull/669

    By the check and by the launcher. Blanks around = are refused, with the line as it should be: the launcher would not take them.
    """
    path = hostfile(tmp_path, *lines)
    code, text = checked(capsys, "--hostfile", path)
    assert code == 2 and message in text
    with pytest.raises(LaunchError) as caught:
        planned(f"--engine zero2 --hostfile {path} -- --output_dir o")
    assert message in str(caught.value)


def test_b50_a_hostfile_that_was_asked_for_must_exist(capsys: pytest.CaptureFixture[str]) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/5221: DeepSpeed warns and goes on with one machine."""
    code, text = checked(capsys, "--hostfile", "/no/such")
    assert code == 2 and "cannot read /no/such: No such file or directory -> a file that was asked for must exist" in text
    with pytest.raises(LaunchError, match="cannot read /no/such"):
        planned("--engine zero2 --hostfile /no/such -- --output_dir o")


def test_b52_a_port_that_is_in_use(taken: int) -> None:
    """https://github.com/huggingface/accelerate/issues/2955, https://github.com/huggingface/accelerate/pull/1656"""
    for engine, option in (("ddp", "--master_port"), ("fsdp", "--main_process_port"), ("zero2", "--master_port")):
        plan = planned(f"--engine {engine} -- --output_dir o", {"MASTER_PORT": str(taken)})
        port = plan.command[plan.command.index(option) + 1]
        assert int(port) != taken and machine.port_is_free(int(port))
        assert f"port {port} (free now)" in plan.notes
        assert f"MASTER_PORT={taken} of the environment is not used; --master_port sets the port" in plan.notes
        with pytest.raises(LaunchError, match=f"--master_port {taken}: the port is in use on this machine"):
            planned(f"--engine {engine} --master_port {taken} -- --output_dir o")
    two = "--engine ddp --num_nodes 2 --node_rank 0 --master_addr 127.0.0.1 --master_port"
    with pytest.raises(LaunchError, match=f"--master_port {taken}: the port is in use on this machine"):
        planned(f"{two} {taken} -- --output_dir o")
    with pytest.raises(LaunchError, match="--master_port 0: several machines need one port from 1 to 65535 that all know"):
        planned(f"{two} 0 -- --output_dir o")
    stale = check_launch(parse_launch(["torchrun", f"{ROOT}/harness/run_clm.py"]), {"MASTER_PORT": "29500"})
    assert [(each.key, each.message[:5]) for each in stale] == [("MASTER_PORT", "29500")]


def test_b54_full_names_and_the_launchers_part_first(tmp_path: Path) -> None:
    """https://github.com/huggingface/accelerate/issues/1703, https://github.com/huggingface/accelerate/issues/53

    Nothing is joined into a shell string, so blanks in paths survive. Between the names of the report stand the options that the launcher
    always writes: counts, address and port.
    """
    file = tmp_path / "my run.yaml"
    file.write_text("distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\nnum_processes: 4\n")
    script = tmp_path / "my train.py"
    script.write_text("")
    command = planned(f"--engine fsdp --config '{file}' --script '{script}' -- --config 'my y.yaml'").command
    assert Path(command[0]).name == "accelerate" and command[1:4] == ["launch", "--config_file", str(file)]
    assert command[-3:] == [str(script), "--config", "my y.yaml"] and command.count("--config") == 1


def test_b54_abbreviated_and_misplaced_options(capsys: pytest.CaptureFixture[str]) -> None:
    """https://github.com/huggingface/accelerate/issues/1703, https://github.com/huggingface/open-r1/issues/362"""
    script = f"{ROOT}/harness/run_clm.py"
    found = check_launch(parse_launch(["accelerate", "launch", "--config", "run.yaml", script]), {})
    assert [(each.severity, each.key, each.fix) for each in found] == [("error", "--config", "did you mean --config_file?")]
    found = check_launch(parse_launch(["accelerate", "launch", script, "--config_file", "run.yaml"]), {})
    assert [(each.severity, each.key) for each in found] == [("warning", "--config_file")] and "after the script" in found[0].message
    assert checked(capsys, "--", "accelerate", "launch", "--config", "run.yaml", script, *RUN)[0] == 2
    notes = planned("--engine ddp -- --learning_rate 1 --num_gpus 2").notes
    assert "--num_gpus comes after the script's arguments, so the script gets it; put it first for the launcher" in notes


# ---- shared memory of containers


def test_b56_containers_have_shared_memory_enough() -> None:
    """https://github.com/NVIDIA/nccl/issues/342, https://github.com/fal-ai-community/video-diffusion-speedrun/issues/2,
    https://github.com/pangeo-data/pangeo-docker-images/issues/258"""
    service = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]["harness"]
    assert service["ipc"] == "host"
    docker_runs = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("docker run")]
    assert docker_runs and all("--ipc host" in line for line in docker_runs)
    for kind in cluster.KINDS:
        options, script_args = run.read_options(["--target", "k8s", "--kind", kind, "--num_nodes", "2", "--", "--output_dir", "/output/a"])
        texts = list(pod_specs(cluster.manifests(options, script_args)))
        assert texts
        for spec in texts:
            memory = [volume["name"] for volume in spec["volumes"] if volume.get("emptyDir", {}).get("medium") == "Memory"]
            mounted = [mount["name"] for each in spec["containers"] for mount in each["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
            assert memory == mounted and len(mounted) == 1


def pod_specs(node: Any) -> Iterator[dict[str, Any]]:
    """Every pod's specification anywhere in manifests."""
    if isinstance(node, dict):
        if "containers" in node and "volumes" in node:
            yield node
        node = list(node.values())
    for child in node if isinstance(node, list) else ():
        yield from pod_specs(child)


def test_b56_too_little_shared_memory_is_said_with_the_fix() -> None:
    """https://github.com/NVIDIA/nccl/issues/342: what a plain container has, the sizes around the limit, and 8 GiB."""
    (finding,) = check_shm(67108864, 1)
    assert "64 MiB" in finding.message and "--ipc=host or --shm-size=8g" in finding.fix and "medium Memory" in finding.fix
    assert check_shm(8 * 2**30, 8) == []
    sizes = [bool(check_shm(2**power, 8)) for power in range(20, 40)]
    assert sizes == sorted(sizes, reverse=True)  # no larger one is worse
