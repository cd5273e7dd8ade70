"""The checker as a whole: every template passes, one dictionary, and the command."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from harness.check_accelerate import check_accelerate, environment_of
from harness.check_config import check_config_consistency, main, write_template
from harness.check_deepspeed import check_deepspeed
from harness.deepspeed_json import read_deepspeed_config
from harness.findings import UserError
from harness.parsing import parse_args, read_yaml
from tests.checking import AMPERE, CPU, ROOT, fsdp, optimizer, run_findings, zero

JSON_FILE = str(ROOT / "ds_configs" / "zero3.json")
FSDP_FILE = str(ROOT / "fsdp_configs" / "full_shard.yaml")


@pytest.mark.parametrize("num_processes", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "path", [*sorted((ROOT / "ds_configs").glob("*.json")), *sorted((ROOT / "fsdp_configs").glob("*.yaml"))], ids=lambda path: path.stem
)
def test_every_template_passes(path: Path, num_processes: int) -> None:
    machine = dataclasses.replace(AMPERE, gpus=AMPERE.gpus[:num_processes])
    expected = [("info", "num_processes")] if num_processes == 1 and "offload" not in path.stem and "nvme" not in path.stem else []
    if path.suffix == ".json":
        assert check_deepspeed(read_deepspeed_config(path), num_processes=num_processes, machine=machine) == []
        findings = run_findings(f"--deepspeed {path}", machine=machine, num_processes=num_processes)
    else:
        config = read_yaml(path)
        assert check_accelerate(config, num_processes=num_processes, machine=machine) == []
        findings = run_findings("", machine=machine, num_processes=num_processes, **environment_of(config))
        expected = [("info", "num_processes")] if num_processes == 1 else []
    assert [(finding.severity, finding.key) for finding in findings] == expected


@pytest.mark.parametrize("variable", ["LOCAL_WORLD_SIZE", "LOCAL_SIZE"])  # torchrun's and accelerate's, deepspeed's
@pytest.mark.parametrize("flags", [f"--deepspeed {JSON_FILE}", "--fsdp full_shard", ""])
def test_two_machines_of_eight_cards_run_sixteen_processes(flags: str, variable: str) -> None:
    assert [each for each in run_findings(flags, num_processes=16, **{variable: "8"}) if each.severity == "error"] == []
    keys = [each.key for each in run_findings(flags, num_processes=32, **{variable: "16"}) if each.severity == "error"]
    assert keys == ["num_processes"]


TWO_NODES = [
    "accelerate launch --config_file fsdp_configs/full_shard.yaml --num_machines 2 --machine_rank 0 --main_process_ip 192.0.2.1"
    " --main_process_port 29511 --num_processes {}",
    "torchrun --nnodes 2 --node_rank 0 --master_addr 192.0.2.1 --master_port 29511 --nproc_per_node {}",
]


@pytest.mark.parametrize(("launch", "right", "wrong"), [(TWO_NODES[0], 16, 18), (TWO_NODES[1], 8, 9)], ids=["accelerate", "torchrun"])
def test_a_command_for_two_machines(
    launch: str, right: int, wrong: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("harness.check_config.detect_machine", lambda environ=None: AMPERE)
    run = ["harness/run_clm.py", "--model_type", "llama", "--tokenizer_name", "bytes", "--train_file", "README.md", "--output_dir", "out"]
    assert main(["--", *launch.format(right).split(), *run]) == 0, capsys.readouterr().out
    assert main(["--", *launch.format(wrong).split(), *run]) == 2
    assert "9 processes on this machine, which has 8 cards" in capsys.readouterr().out


def test_a_wrong_value_is_said_once_and_nothing_is_said_of_what_would_stand_in_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"gradient_clipping": "none", "zero_optimization": {"stage": "two"}}')
    run = ["--model_type", "llama", "--tokenizer_name", "bytes", "--train_file", str(path), "--output_dir", str(tmp_path / "out")]
    assert main(["--num_processes", "2", "--deepspeed", str(path), *run]) == 2
    printed = capsys.readouterr().out
    assert printed.count("gradient_clipping") == 1 and printed.count("zero_optimization.stage") == 1, printed


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--config_overrides vocab_size=100 --tokenizer_name bytes", "vocab_size 100 is less than the tokenizer's 259 tokens"),
        ("--attn_implementation sdp --tokenizer_name bytes", "sdp is not known -> did you mean sdpa?"),
        ("--tokenizer_name byte", "there is no byte -> did you mean bytes?"),
        ("--tokenizer_name org/of-the-hub", None),
        ("", None),
    ],
)
def test_a_model_is_checked_with_its_tokenizer_where_that_is_here(
    more: str, message: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["--model_type", "llama", "--output_dir", str(tmp_path / "out"), *more.split()])
    printed = capsys.readouterr().out
    assert (code, printed.count(" error ")) == ((2, 1) if message else (0, 0)), printed
    assert (message or "") in printed


def test_the_checks_import_no_torch() -> None:
    code = (
        "import sys; from harness.check_config import main; code = main(['--deepspeed', 'ds_configs/zero3.json',"
        " '--num_processes', '2']) or main(['--config_file', 'fsdp_configs/full_shard.yaml', '--num_processes', '2']);"
        " assert 'torch' not in sys.modules, 'torch'; sys.exit(code)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "0 errors, 0 warnings, 0 infos\n" * 2


# ---------------------------------------------------------------- one dictionary


def test_a_dictionary_of_arguments_lists_the_defaults() -> None:
    result = check_config_consistency({"model_type": "llama", "output_dir": "out", "learning_rate": "2e-5"}, machine=CPU)
    assert result.is_valid and result.issues == ()
    assert result.defaults["per_device_train_batch_size"] == 8 and result.defaults["lr_scheduler_type"] == "linear"
    assert not {"model_type", "output_dir", "learning_rate"} & set(result.defaults)


def test_dictionaries_of_all_kinds() -> None:
    wrong_flag = check_config_consistency({"model_type": "llama", "output_dir": "out", "learnig_rate": 1}, machine=CPU)
    assert not wrong_flag.is_valid and [finding.fix for finding in wrong_flag.issues] == ["did you mean --learning_rate?"]
    missing = check_config_consistency({}, machine=CPU)
    assert [finding.key for finding in missing.issues] == ["--output_dir", "--model_name_or_path"]
    batch = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1} | zero(2)
    (finding,) = check_config_consistency(batch, num_processes=4, machine=CPU).issues
    assert "32 != 2 * 1 * 4" in finding.message and all(key in finding.message for key in batch if key != "zero_optimization")
    assert check_config_consistency(batch, num_processes=16, machine=CPU).is_valid
    assert not check_config_consistency({"distributed_type": "FSDP2", "num_processes": 2}, machine=CPU).is_valid
    assert check_config_consistency(fsdp(), machine=AMPERE).is_valid
    nested = {"model_type": "llama", "output_dir": "out", "deepspeed": {"zero_optimization": {"stage": 7}}}
    assert [finding.key for finding in check_config_consistency(nested, num_processes=2, machine=CPU).issues] == ["zero_optimization.stage"]


def test_numbers_that_yaml_reads_as_text_are_numbers_here(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model_type: llama\noutput_dir: out\nlearning_rate: 2e-5\nmax_steps: 1e5\nbf16: no\nper_device_train_batch_size: '8'\n")
    assert yaml.safe_load(path.read_text())["learning_rate"] == "2e-5"  # YAML 1.1 wants a dot
    train = parse_args(["--config", str(path)]).train
    assert (train.learning_rate, train.max_steps, train.bf16, train.per_device_train_batch_size) == (2e-5, 100000, False, 8)


# ---------------------------------------------------------------- the command


def command(capsys: pytest.CaptureFixture[str], *tokens: str) -> tuple[int, str]:
    code = main(list(tokens))
    return code, capsys.readouterr().out


def test_command_on_files_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert command(capsys, "--deepspeed", JSON_FILE, "--num_processes", "4") == (0, "0 errors, 0 warnings, 0 infos\n")
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 30} | zero(2, stage3_max_live_parameters=1)))
    code, text = command(capsys, "--deepspeed", str(path), "--num_processes", "4")
    assert code == 2
    assert text.splitlines() == [
        "  error   train_batch_size: 30 samples cannot be split evenly over 4 processes -> set train_batch_size: 28 or 32",
        "  info    zero_optimization.stage3_max_live_parameters: has no effect in stage 2 -> remove it, or use stage 3",
        "1 error, 0 warnings, 1 info",
    ]
    assert command(capsys, "--deepspeed", "/no/such.json")[0] == 2
    assert command(capsys, "--config_file", "/no/such.yaml")[0] == 2
    hosts = tmp_path / "hosts"
    hosts.write_text("node-a slots=2\n")
    assert command(capsys, "--hostfile", str(hosts), "--deepspeed", JSON_FILE)[0] == 0
    assert command(capsys, "--hostfile", str(tmp_path / "none"))[0] == 2


@pytest.mark.parametrize("count", ["0", "-3"])
def test_a_number_of_processes_below_one(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = f"  error   --num_processes: must be at least 1, not {count} -> --num_processes 1, or leave it out"
    for tokens in (("--deepspeed", JSON_FILE), ("--config_file", FSDP_FILE), ("--model_type", "llama", "--output_dir", "out")):
        code, text = command(capsys, *tokens, "--num_processes", count)
        assert code == 2 and [line for line in text.splitlines() if line.startswith("  error")] == [wrong]
    script = str(ROOT / "harness" / "check_config.py")
    for launch in (f"accelerate launch --config_file {FSDP_FILE} --num_processes", "torchrun --nproc_per_node"):
        code, text = command(capsys, "--", *launch.split(), count, script, "--model_type", "llama", "--output_dir", "out")
        assert code == 2 and [line.split(":")[1] for line in text.splitlines() if line.startswith("  error")] == [
            f" must be at least 1, not {count} -> {launch.split()[-1]} 1, or leave it out"
        ]


def test_two_files_for_two_engines(capsys: pytest.CaptureFixture[str]) -> None:
    two = "  error   --deepspeed: asks for ZeRO and accelerate's YAML (distributed_type: FSDP) for FSDP -> keep one of the two"
    files = ("--deepspeed", JSON_FILE, "--config_file", FSDP_FILE, "--num_processes", "2")
    assert command(capsys, *files) == (2, f"{two}\n1 error, 0 warnings, 0 infos\n")
    script = str(ROOT / "harness" / "check_config.py")
    code, text = command(
        capsys, "--", "accelerate", "launch", "--config_file", FSDP_FILE, "--num_processes", "2", script, "--deepspeed", JSON_FILE
    )
    assert code == 2 and two not in text and "--model_name_or_path: no model was given" in text  # the command starts a run without a model
    code, text = command(capsys, *files, "--model_type", "llama", "--output_dir", "out")
    assert code == 2 and two in text.splitlines()


def test_a_file_of_another_kind_is_one_finding(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text("model_type: llama\noutput_dir: out\n")
    as_json = tmp_path / "accelerate.json"
    as_json.write_text(json.dumps(fsdp()))
    kinds = {"--deepspeed": "a DeepSpeed JSON", "--config_file": "an accelerate YAML", "--config": "a file with a run's arguments"}
    files = {"--deepspeed": [JSON_FILE], "--config_file": [FSDP_FILE, str(as_json)], "--config": [str(run)]}
    for flag in kinds:
        for right, paths in files.items():
            for path in paths:
                code, text = command(capsys, flag, path, "--num_processes", "2")
                wrong = [f"  error   {flag}: {path} is {kinds[right]}, not {kinds[flag]} -> {right} {path}"] if flag != right else []
                assert ([line for line in text.splitlines() if line.startswith("  error")], code) == (wrong, 2 if wrong else 0)


def test_a_wrong_layer_is_named_beside_another_mistake(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    right = "LlamaDecoderLayer (or leave it out: the harness asks the model)"
    line = f"{'  error   '}fsdp_config.fsdp_transformer_layer_cls_to_wrap: LlamaLayer is no class of a llama model -> {right}"
    for name, expected in (("LlamaLayer", [line]), ("LlamaDecoderLayer", [])):
        path.write_text(yaml.safe_dump(fsdp(transformer_layer_cls_to_wrap=name)))
        code, text = command(capsys, "--config_file", str(path), "--model_type", "llama")  # and no --output_dir
        assert code == 2 and [each for each in text.splitlines() if "cls_to_wrap" in each] == expected


def test_command_on_a_run_and_its_template(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(f"model_type: llama\noutput_dir: {tmp_path}/out\nlearning_rate: 1e-4\n")
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(optimizer(lr=2e-5)))
    code, text = command(capsys, "--config", str(run), "--deepspeed", str(path), "--num_processes", "2", "--json")
    answer = json.loads(text)
    assert code == 2 and answer["is_valid"] is False
    assert answer["differs_from_default"]["learning_rate"] == 1e-4
    (issue,) = [issue for issue in answer["issues"] if issue["severity"] == "error"]
    assert issue["key"] == "optimizer.params.lr"
    assert issue["message"] == "the template says optimizer.params.lr=2e-05, but --learning_rate is 0.0001"
    code, text = command(capsys, "--config", str(run), "--learnig_rate", "1")
    assert code == 2 and "did you mean --learning_rate?" in text


def test_command_on_a_launchers_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = str(ROOT / "harness" / "check_config.py")
    run = ["--model_type", "llama", "--output_dir", str(tmp_path / "out"), "--precision", "fp32"]
    code, text = command(capsys, "--", "torchrun", "--nproc_per_node", "2", script, *run, "--fsdp", "full_shard")
    assert (code, text.splitlines()[-1]) == (0, "0 errors, 0 warnings, 0 infos")
    yaml_path = tmp_path / "a.yaml"
    yaml_path.write_text(yaml.safe_dump(fsdp({"mixed_precision": "bf16"})))
    code, text = command(capsys, "--", "accelerate", "launch", "--config_file", str(yaml_path), script, *run)
    assert code == 2 and "the template says mixed_precision=bf16, but the run's precision is fp32" in text
    code, text = command(capsys, "--", "accelerate", "launch", "--config", str(yaml_path), script, *run)
    assert code == 2 and "did you mean --config_file?" in text
    assert command(capsys, "--", "make")[0] == 2


def test_written_template_is_complete_and_reads_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "new.yaml"
    code, text = command(
        capsys, "--model_type", "llama", "--output_dir", "out: here", "--learning_rate", "3e-4", "--write_template", str(path)
    )
    assert code == 0 and text.endswith(f"written: {path}\n")
    args = parse_args(["--config", str(path)])
    assert args.typed == {"model_type", "output_dir", "learning_rate"}
    assert (args.train.output_dir, args.train.learning_rate) == ("out: here", 3e-4)
    written = path.read_text()
    for name, value in parse_args(["--model_type", "llama", "--output_dir", "o"]).to_dict().items():
        assert f"\n{name}:" in written or f"\n# {name}:" in written, (name, value)
    uncommented = "\n".join(
        line.removeprefix("# ") for line in written.splitlines() if line.startswith("# ") and line[2:].split(":")[0] in args.to_dict()
    )
    defaults = yaml.safe_load(uncommented)
    assert defaults["max_steps"] == -1 and defaults["report_to"] == ["none"] and defaults["precision"] == "auto"
    with pytest.raises(UserError, match="exists already"):
        write_template(path)
    assert command(capsys, "--write_template", str(tmp_path / "no" / "x.yaml"))[0] == 2


def test_values_of_other_kinds_in_names_are_findings() -> None:
    """A list where a name belongs, and numbers that no library reads."""
    written = json.loads(Path(JSON_FILE).read_text()) | {"scheduler": {"type": [["WarmupLR"]], "params": {}}}
    assert [finding.key for finding in check_deepspeed(written, num_processes=2, machine=AMPERE)] == ["scheduler.type"]
    config = fsdp(transformer_layer_cls_to_wrap=[["LlamaDecoderLayer"], 3])
    check_accelerate(config, num_processes=2, machine=AMPERE, model_type="llama")
    huge = "9" * 30
    for pattern in (f'{{"q_proj": {huge}}}', f'{{"q_proj": {"9" * 5000}}}', "[" * 100_000):
        with pytest.raises(UserError, match="--rank_pattern"):
            parse_args(["--model_type", "llama", "--train_file", "a", "--output_dir", "b", "--lora_r", "8", "--rank_pattern", pattern])


def test_a_launch_of_run_clm_without_arguments_is_what_the_run_would_say(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (f"deepspeed --num_gpus=2 {ROOT}/harness/run_clm.py", "torchrun --nproc_per_node 2 -m harness train"):
        code, text = command(capsys, "--", *words.split())
        assert code == 2 and "--output_dir: is missing" in text and "--model_name_or_path: no model was given" in text
        assert "without a flag" not in text


def test_a_template_on_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    def full(path: Path, *args: object, **settings: object) -> Full:
        Path(path).touch()
        return Full()

    monkeypatch.setattr("builtins.open", full)
    with pytest.raises(OSError, match=f"cannot write {tmp_path / 'x.yaml'}: No space left on device"):
        write_template(tmp_path / "x.yaml")
    assert not list(tmp_path.iterdir())
