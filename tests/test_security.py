"""What comes from others cannot run code, leave its folder or take over a run; what is secret is not written down."""

from __future__ import annotations

import ast
import functools
import json
import os
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from harness import checkpoint_files, own_checkpoints
from harness.checkpoint_files import MANIFEST
from harness.findings import UserError
from launch import audit
from tests.launching import ROOT


class Payload:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of records."""
    monkeypatch.setenv(own_checkpoints.VARIABLE, str(tmp_path / "state"))
    return tmp_path / "state"


def make_checkpoint(output: Path, metadata: bytes = b"engine's file", *, remember: bool = True) -> Path:
    """A checkpoint as a run writes it, and as anybody can make one (`remember` False)."""
    folder = output / ".tmp-checkpoint-3"
    (folder / "state").mkdir(parents=True)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    run = {"engine": "ddp", "num_processes": 1}
    (folder / "trainer_state.json").write_text(json.dumps({"state": {"step": 3}, "run": run}))
    (folder / "state" / ".metadata").write_bytes(metadata)
    shares = [checkpoint_files.hash_share(folder, 0, 1)]
    checkpoint_files.complete(folder, output / "checkpoint-3", shares, *([own_checkpoints.record] if remember else []))
    return output / "checkpoint-3"


# ---- engine files, which their libraries unpickle


def test_ones_own_checkpoint_is_known_wherever_it_lies(home: Path, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "out")
    assert own_checkpoints.is_own(checkpoint)
    shutil.move(tmp_path / "out", tmp_path / "elsewhere")
    assert own_checkpoints.is_own(tmp_path / "elsewhere" / "checkpoint-3")
    (record,) = (home / "checkpoints").iterdir()
    assert record.name == checkpoint_files.sha256_of(tmp_path / "elsewhere" / "checkpoint-3" / MANIFEST)
    assert [path.stat().st_mode & 0o777 for path in (home, home / "checkpoints", record)] == [0o700, 0o700, 0o600]


def test_one_from_elsewhere_is_refused_unless_it_is_trusted(home: Path, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "own")
    foreign = make_checkpoint(tmp_path / "foreign", b"other bytes", remember=False)
    assert checkpoint_files.problem_of(foreign) is None  # its own manifest is as it should be
    error = own_checkpoints.refusal(foreign, trust=False)
    assert error is not None
    (finding,) = error.findings
    assert finding.key == "--trust_checkpoint"
    known = f"no run of yours that {home}/checkpoints knows of has written {foreign}"
    assert finding.message == f"{known}, and reading its files can run code that is in them"
    assert "--trust_checkpoint" in finding.fix and "HARNESS_STATE_DIR" in finding.fix
    assert own_checkpoints.refusal(foreign, trust=True) is None
    assert own_checkpoints.refusal(tmp_path / "own" / "checkpoint-3", trust=False) is None


@pytest.mark.parametrize("replaced", ["file", "file and manifest", "added"])
def test_code_put_into_ones_own_checkpoint_does_not_run(
    replaced: str, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from harness.export_cli import main

    checkpoint = make_checkpoint(tmp_path / "out")
    trap = tmp_path / "trap"
    name = "evil_optim_states.pt" if replaced == "added" else ".metadata"
    (checkpoint / "state" / name).write_bytes(pickle.dumps(Payload(trap)))
    if replaced == "file and manifest":
        (checkpoint / MANIFEST).write_text(json.dumps(checkpoint_files.hash_share(checkpoint, 0, 1)))
    assert main([str(checkpoint), str(tmp_path / "exported")]) == 2
    reason = {
        "file": "state/.metadata has ",
        "file and manifest": "no run of yours",
        "added": "its manifest does not have state/evil_optim_states.pt",
    }[replaced]
    assert reason in capsys.readouterr().err
    assert not trap.exists()


def test_the_trap_would_work(home: Path, tmp_path: Path) -> None:
    """torch's reader runs what is in the file, which is why it is not let near foreign ones; the flag says that one knows."""
    from harness.export_cli import main

    checkpoint = make_checkpoint(tmp_path / "out", pickle.dumps(Payload(tmp_path / "trap")), remember=False)
    assert main([str(checkpoint), str(tmp_path / "exported")]) == 2
    assert not (tmp_path / "trap").exists()
    with pytest.raises(Exception):  # noqa: B017 - whatever torch makes of it, afterwards
        main([str(checkpoint), str(tmp_path / "exported"), "--trust_checkpoint"])
    assert (tmp_path / "trap").exists()


def test_records_that_others_could_have_written_count_for_nothing(home: Path, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "out")
    (home / "checkpoints").chmod(0o770)
    assert not own_checkpoints.is_own(checkpoint)
    assert own_checkpoints.record(checkpoint / MANIFEST) == f"others can write to {home}/checkpoints"
    (home / "checkpoints").chmod(0o700)
    (record,) = (home / "checkpoints").iterdir()
    record.chmod(0o620)
    assert not own_checkpoints.is_own(checkpoint)
    record.unlink()
    record.symlink_to(tmp_path / "out/checkpoint-3/COMPLETE")  # O_NOFOLLOW: nothing is written through it
    assert own_checkpoints.record(checkpoint / MANIFEST) is not None
    assert (checkpoint / "COMPLETE").read_text() == ""


def test_without_a_home_a_run_goes_on_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import logging

    from tests.test_checkpoint import make

    (tmp_path / "file").write_text("")
    monkeypatch.setenv(own_checkpoints.VARIABLE, str(tmp_path / "file" / "state"))
    monkeypatch.setattr(logging.getLogger("harness"), "propagate", True)
    checkpointer, _, _ = make(tmp_path)
    assert all(checkpointer.save(step, {}, wait=True) for step in (1, 2))
    (warning,) = [message for message in caplog.messages if "--trust_checkpoint" in message]
    assert "HARNESS_STATE_DIR=FOLDER says where to remember them" in warning
    with pytest.raises(UserError, match="no run of yours"):
        checkpointer.find("auto")
    checkpointer.trust = True
    assert checkpointer.find("auto") == tmp_path / "checkpoint-2"


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"HARNESS_STATE_DIR": "/a", "XDG_STATE_HOME": "/b"}, "/a"),
        ({"XDG_STATE_HOME": "/b"}, "/b/harness"),
        ({}, f"{Path.home()}/.local/state/harness"),
    ],
)
def test_where_records_are(environ: dict[str, str], folder: str) -> None:
    assert str(own_checkpoints.state_folder(environ)) == folder


def test_a_run_refuses_before_it_loads_anything(home: Path, tmp_path: Path) -> None:
    from harness.parsing import parse_args
    from harness.resume import refuse_foreign

    output = tmp_path / "out"
    foreign = make_checkpoint(output, remember=False)
    for flags in ([], ["--resume_from_checkpoint", "latest"], ["--resume_from_checkpoint", str(foreign)]):
        args = parse_args(["--model_type", "llama", "--output_dir", str(output), *flags])
        with pytest.raises(UserError, match="no run of yours"):
            refuse_foreign(args, output)
        args.train.trust_checkpoint = True
        refuse_foreign(args, output)
    refuse_foreign(parse_args(["--model_type", "llama", "--output_dir", "x"]), tmp_path / "empty")


@pytest.mark.parametrize("content", ["", "[]", '{"state.json": {"size_bytes": 1, "sha256": "0"}}', None])
def test_a_damaged_checkpoint_of_ones_own_asks_for_no_trust(content: str | None, home: Path, tmp_path: Path) -> None:
    """It is passed over, as everything damaged is; what is behind it still has to be of this user."""
    from harness.parsing import parse_args
    from harness.resume import refuse_foreign

    output = tmp_path / "out"
    older = make_checkpoint(output)
    newer = output / "checkpoint-9"
    shutil.copytree(older, newer)
    manifest = newer / MANIFEST
    if content is None:  # a flipped bit that leaves it JSON
        text = manifest.read_text()
        at = text.index('"sha256": "') + len('"sha256": "')
        content = text[:at] + ("0" if text[at] != "0" else "1") + text[at + 1 :]
    manifest.write_text(content)
    args = parse_args(["--model_type", "llama", "--output_dir", str(output)])
    refuse_foreign(args, output)
    (next((home / "checkpoints").iterdir())).unlink()
    with pytest.raises(UserError, match=f"no run of yours.* has written {older}"):
        refuse_foreign(args, output)


# ---- models


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    from harness.args import ModelArguments
    from harness.lora import merge_adapter
    from harness.model_files import check_model_files
    from harness.stored_weights import weights_folder

    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(tmp_path / "trap")))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match=r"holds no \.safetensors files"):
        weights_folder(ModelArguments(model_name_or_path=str(tmp_path)))
    errors = [finding.message for finding in check_model_files(tmp_path)[1] if finding.severity == "error"]
    assert errors == ["has no safetensors, only pytorch_model.bin: pickled weights can run code and are not read"]
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.bin").write_bytes(pickle.dumps(Payload(tmp_path / "trap")))
    with pytest.raises(UserError, match=r"holds no adapter_model\.safetensors"):
        merge_adapter(tmp_path, tmp_path / "merged", "base")
    assert not (tmp_path / "trap").exists()


@pytest.mark.parametrize("name", ["../outside.safetensors", "/outside.safetensors", "a/../../outside.safetensors"])
def test_an_index_cannot_name_files_outside_its_folder(name: str, tmp_path: Path) -> None:
    from harness.hidden_states import MANIFEST as STATES
    from harness.hidden_states import StateFolder
    from harness.model_files import check_model_files
    from harness.stored_weights import SafetensorsFolder

    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "outside.safetensors").write_bytes(b"")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(UserError, match="outside the folder"):
        SafetensorsFolder(folder)
    assert f"names {name}, outside the folder" in [finding.message for finding in check_model_files(folder)[1]]
    (folder / STATES).write_text(json.dumps({"states": [{"key": "p.0", "file": name}]}))
    with pytest.raises(UserError, match="outside the folder"):
        StateFolder(folder, "--reference")


def test_a_models_own_code_does_not_run_unasked(tmp_path: Path) -> None:
    from harness.args import ModelArguments
    from harness.modeling import load_config

    trap = tmp_path / "trap"
    code = f"import os\nos.mkdir({str(trap)!r})\nfrom transformers import PretrainedConfig\nclass C(PretrainedConfig): pass\n"
    (tmp_path / "configuration_mine.py").write_text(code)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": {"AutoConfig": "configuration_mine.C"}}))
    with pytest.raises(UserError, match="unknown architecture"):
        load_config(ModelArguments(model_name_or_path=str(tmp_path)))
    assert not trap.exists()
    assert ModelArguments().trust_remote_code is False


@pytest.mark.parametrize("flag", ["--config", "--fsdp", "--dataset_mix"])
def test_yaml_makes_no_objects(flag: str, tmp_path: Path) -> None:
    from harness.fsdp_templates import fsdp_from_flag
    from harness.parsing import parse_args, read_yaml

    trap = tmp_path / "trap"
    file = tmp_path / "a.yaml"
    file.write_text(f"output_dir: !!python/object/apply:os.mkdir [{trap}]\n")
    with pytest.raises(UserError):
        if flag == "--config":
            parse_args(["--config", str(file)])
        elif flag == "--fsdp":
            fsdp_from_flag(str(file))
        else:
            read_yaml(file, flag)
    assert not trap.exists()


# ---- secrets, files


SECRET = "s3cr3t-value"


def test_secrets_of_the_environment_are_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.run_folder import environment

    for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "MY_RANK", "PYTORCH_ALLOC_CONF_2"):
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(sys, "argv", ["run_clm.py", "--output_dir", "out"])
    stored = environment()
    assert SECRET not in json.dumps(stored)
    assert stored["environment"]["OMP_NUM_THREADS"] == "3"
    allowed = {"RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF"}
    assert set(stored["environment"]) <= allowed


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o002, 0o664)])
def test_files_have_the_mode_that_the_user_asks_for(umask: int, mode: int, home: Path, tmp_path: Path) -> None:
    import torch

    from harness.export import _Shards
    from harness.hidden_states import StateWriter
    from harness.run_folder import record_exit
    from tests.test_checkpoint import make

    old = os.umask(umask)
    try:
        for writer in (_Shards(tmp_path, 10), StateWriter(tmp_path / "states", 10)):
            for name in ("a", "b"):
                writer.add(name, torch.ones(8))
            writer.flush()
        checkpointer, _, _ = make(tmp_path)
        assert checkpointer.save(1, {"step": 1}, wait=True)
        record_exit(tmp_path, 0, "finished")
    finally:
        os.umask(old)
    files = [path for path in tmp_path.rglob("*") if path.is_file() and home not in path.parents]
    assert len(files) == 10
    assert {path.stat().st_mode & 0o777 for path in files} == {mode}
    (record,) = (home / "checkpoints").iterdir()
    assert record.stat().st_mode & 0o777 == 0o600  # whatever the umask


# ---- the code itself; ruff's rules S find shells, eval and unsafe YAML


FORBIDDEN = ("os.system", "os.popen", "eval", "exec", "yaml.load", "yaml.unsafe_load", "tarfile.open")


@functools.cache
def calls(path: Path) -> list[tuple[str, ast.Call]]:
    """(dotted name, call) of a file."""
    return [(ast.unparse(node.func), node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]


def test_only_trusted_files_are_unpickled_and_no_shell_is_asked() -> None:
    unpickling: list[str] = []
    for path in [*(ROOT / "harness").rglob("*.py"), *(ROOT / "launch").rglob("*.py")]:
        for name, call in calls(path):
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            assert options.get("shell", "False") == "False", f"{path}:{call.lineno}"
            assert name not in ("os.system", "os.popen", "eval", "exec", "yaml.load", "yaml.unsafe_load", "tarfile.open"), (
                f"{path}:{call.lineno}"
            )
            assert "allow_pickle" not in options or options["allow_pickle"] == "False", f"{path}:{call.lineno}"
            if name in ("pickle.load", "pickle.loads") or (name == "torch.load" and options.get("weights_only") != "True"):
                unpickling.append(str(path.relative_to(ROOT)))
    # What `refusal` has let through, and memory that only the life before could write.
    assert sorted(set(unpickling)) == ["harness/snapshots.py", "harness/stored_state.py"]


def test_every_reader_of_engine_files_asks_whose_they_are() -> None:
    """`DcpState`, `ZeroWeights`, `UniversalState` and the engines' `load` are reached through these two alone."""
    users = {
        path.name
        for path in (ROOT / "harness").rglob("*.py")
        for name, _ in calls(path)
        if name in ("DcpState", "ZeroWeights", "UniversalState", "convert_zero", "self.engine.load", "checkpointer.load")
    }
    assert users == {"export_cli.py", "resume.py", "checkpoint.py"}
    assert "own_checkpoints.refusal" in {name for name, _ in calls(ROOT / "harness/export_cli.py")}
    assert "own_checkpoints.refusal" in {name for name, _ in calls(ROOT / "harness/checkpoint.py")}


# ---- what is installed


def fake_pip_audit(folder: Path, report: str) -> str:
    """A command that writes a report as pip-audit does."""
    script = folder / "fake.py"
    script.write_text(f"import sys\nopen(sys.argv[sys.argv.index('--output') + 1], 'w').write({report!r})\nsys.exit(1)\n")
    return f"{sys.executable} {script}"


def vulnerable(fixes: list[str]) -> str:
    found = {"id": "PYSEC-2026-1", "fix_versions": fixes, "description": "x"}
    fine, skipped = {"name": "b", "version": "2", "vulns": []}, {"name": "c", "skip_reason": "not on the index"}
    return json.dumps({"dependencies": [{"name": "a", "version": "1", "vulns": [found]}, fine, skipped], "fixes": []})


@pytest.mark.parametrize(
    ("report", "code", "line"),
    [
        (vulnerable(["1.1", "2.0"]), 1, "a 1: PYSEC-2026-1, mended in 1.1, 2.0"),
        (vulnerable([]), 0, "a 1: PYSEC-2026-1, no version mends it yet"),
        ('{"dependencies": []}', 0, "0 known vulnerabilities, 0 of them with a version that mends them"),
    ],
)
def test_vulnerabilities_that_can_be_mended_fail(
    report: str, code: int, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit.main(["--pip_audit", fake_pip_audit(tmp_path, report)]) == code
    assert line in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("command", ["/no/such/program", f"{sys.executable} -c 1"])
def test_without_its_database_versions_must_be_those_that_are_pinned(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    pins = tmp_path / "pins.txt"
    pins.write_text(f"# a comment\ntorch=={torch.__version__.partition('+')[0]}\nno-such-package==1\n")
    assert audit.main(["--pip_audit", command, "--constraints", str(pins)]) == 0
    assert "all installed packages are as pinned" in capsys.readouterr().out
    pins.write_text("torch==0.1\n")
    assert audit.main(["--pip_audit", command, "--constraints", str(pins)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == f"torch is {torch.__version__}, pinned is 0.1"
