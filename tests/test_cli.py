"""The `harness` command: dispatch, help, suggestions and exit codes."""

from __future__ import annotations

import errno
import json
import os
import shlex
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path

import pytest

from harness import cli
from harness.findings import FindingParser, UserError, user_error

ROOT = Path(__file__).resolve().parent.parent


def install(monkeypatch: pytest.MonkeyPatch, name: str, main: object) -> None:
    """Puts a module `harness.<name>` with this `main` in place."""
    module = types.ModuleType(f"harness.{name}")
    module.main = main  # type: ignore[attr-defined]
    module.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, f"harness.{name}", module)


def test_a_command_gets_the_rest_of_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Sequence[str]] = []

    def main(argv: Sequence[str]) -> int:
        seen.append(argv)
        return 75

    install(monkeypatch, "parse_log", main)
    assert cli.main(["logs", "out", "--csv", "a b.csv"]) == 75
    assert seen == [["out", "--csv", "a b.csv"]]


def test_no_code_is_success(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "parse_log", lambda argv: None)
    assert cli.main(["logs"]) == 0


def test_wrong_input_of_a_command_is_its_findings(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def main(argv: Sequence[str]) -> int:
        raise user_error("--csv", "a.csv exists", "give another name")

    install(monkeypatch, "parse_log", main)
    assert cli.main(["logs"]) == 2
    assert capsys.readouterr().err == "  error   --csv: a.csv exists -> give another name\n"


def test_only_what_is_there_is_offered(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli, "COMMANDS", {"here": ("findings", "is there"), "gone": ("no_such_module", "is not there")})
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "  here      is there" in shown and "gone" not in shown
    assert cli.main(["gone"]) == 2


def test_every_command_has_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[4:]] == list(cli.available())
    assert all(len(line) <= 80 for line in lines)


@pytest.mark.parametrize(("typed", "message"), [("log", "did you mean logs?"), ("xyzzy", "see harness --help")])
def test_unknown_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], typed: str, message: str) -> None:
    install(monkeypatch, "parse_log", lambda argv: 0)
    assert cli.main([typed]) == 2
    assert capsys.readouterr().err == f"harness: unknown command {typed}: {message}\n"


def test_nothing_typed_shows_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert capsys.readouterr().err.startswith("usage: harness COMMAND")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"harness {cli.version()}\n"


def test_the_package_is_the_command() -> None:
    result = subprocess.run([sys.executable, "-m", "harness", "chekc"], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (result.returncode, result.stderr) == (2, "harness: unknown command chekc: did you mean check?\n")


def test_help_loads_nothing_heavy() -> None:
    code = "import sys; from harness import cli; cli.main(['--help']); sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0


# What is typed, and the findings' keys with the end of their lines; every command that reads a command line of its own.
WRONG = {
    "monitor": ("--intervall 5 --jsn", {"--intervall": "did you mean --interval?", "--jsn": "did you mean --json?"}),
    "logs": (
        "--cvs a.csv --rows many",
        {"--cvs": "did you mean --csv?", "file|folder": "see harness logs --help", "--rows": "see harness logs --help"},
    ),
    "doctor": (
        "--time_out 3 --timeout=-1 --no-bandwith",
        {
            "--time_out": "did you mean --timeout?",
            "--no-bandwith": "did you mean --no_bandwidth?",
            "--timeout": "must be positive, not -1.0",
        },
    ),
    "export": (
        "a b --dtype bf17 --mergee --xyzzy=3",
        {"--mergee": "did you mean --merge?", "--xyzzy": "see harness export --help", "--dtype": "--dtype bf16"},
    ),
    "plan": (
        "--model a --gpu_mem 80GB --num-gpus four --block-size 1",
        {"--gpu_mem": "did you mean --gpu_memory?", "--num_gpus": "see harness plan --help", "--block_size": "must be at least 2, not 1"},
    ),
    "layers": (
        "--mdel a --test_type sngle",
        {"--mdel": "did you mean --model?", "--test_type": "--test_type single", "--output": "see harness layers --help"},
    ),
    "run": (
        "--laddr a --max-attempts 0 -- python train.py --unknown_is_yours 1",
        {"--laddr": "did you mean --ladder?", "--max_attempts": "must be at least 1, not 0"},
    ),
    "check": (
        "--num-processes two --model_type gpt2 --learnig_rate 3",
        {
            "--num_processes": "see harness check --help",
            "--learnig_rate": "did you mean --learning_rate?",
            "--output_dir": "--output_dir out",
        },
    ),
    "train": ("--learnig_rate 3 --seed one", {"--learnig_rate": "did you mean --learning_rate?", "--seed": "see --help"}),
    "tokenize": ("--block_sze 3 --seed one", {"--block_sze": "did you mean --block_size?", "--seed": "see --help"}),
}


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_says_all_that_is_wrong_with_its_flags(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    typed, expected = WRONG[command]
    assert cli.main([command, *typed.split()]) == 2
    shown = capfd.readouterr()
    lines = [line.strip() for line in (shown.out + shown.err).splitlines() if line.strip().startswith("error ")]
    found = {line.split()[1].rstrip(":"): line for line in lines}
    assert {key: found.get(key, "")[-len(end) :] for key, end in expected.items()} == expected
    assert "usage:" not in shown.err  # argparse's own message


def test_a_flag_with_several_wrong_values_is_one_finding_and_the_rest_is_read() -> None:
    parser = FindingParser(prog="tool")
    parser.add_argument("path")
    parser.add_argument("--numbers", nargs="+", type=int, default=[7])
    parser.add_argument("--both_spellings", type=float)
    values, found = parser.read(["--numbers", "1", "x", "-2", "--both-spellings=-.5", "--", "-a"])
    assert (values.numbers, values.both_spellings, values.path) == ([7], -0.5, "-a")
    assert [finding.line() for finding in found] == ["error   --numbers: invalid int value: 'x' -> see tool --help"]
    with pytest.raises(UserError) as caught:
        parser.parse_args(["a", "b", "--numbers"])
    assert [(finding.key, finding.message) for finding in caught.value.findings] == [
        ("--numbers", "expected at least one argument"),
        ("b", "a value without a flag before it"),
    ]
    assert parser.parse_args(["a"]).path == "a"  # what is required still is
    with pytest.raises(UserError, match="path: is required"):
        parser.parse_args([])


def test_an_export_onto_a_file_or_where_nothing_can_be_written_is_wrong_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from harness.export_cli import main

    file = tmp_path / "file"
    file.write_text("mine")
    for output in (str(file), "/dev/full"):
        assert main([str(tmp_path), output]) == 2
        assert capsys.readouterr().err.strip() == f"error   {output}: is no folder -> choose a new folder"
    long = str(tmp_path / ("x" * 300))
    assert main([str(tmp_path), long]) == 2
    assert capsys.readouterr().err.strip() == f"error   {long}: File name too long -> choose a folder you may write to"
    assert file.read_text() == "mine"


def shell(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A line of bash in which $H is the command."""
    harness = f"H={shlex.quote(f'{sys.executable} -m harness')}; {line}"
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    environ.pop("PYTHONUNBUFFERED", None)
    return subprocess.run(["bash", "-c", harness], capture_output=True, text=True, timeout=120, cwd=folder, env=environ)


@pytest.fixture
def a_run(tmp_path: Path) -> Path:
    rows = [{"kind": "train", "step": step, "loss": 2.0, "learning_rate": 1e-4} for step in range(5000)]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.mark.parametrize("words", ["logs out --rows 0", "logs out --csv", "monitor out --once", "--help", "plan --help"])
def test_a_reader_that_has_gone_and_a_full_disk_at_the_output(a_run: Path, words: str) -> None:
    gone = shell(f"{{ sleep 0.3; $H {words}; echo $? >&2; }} | true", a_run)
    assert gone.stderr == "141\n"
    full = shell(f"$H {words} > /dev/full", a_run)
    said = "  error   standard output: cannot be written: No space left on device -> free some space there, or write to another place\n"
    assert (full.returncode, full.stderr) == (1, said)


def test_errors_that_nobody_reads_change_no_exit_code(tmp_path: Path) -> None:
    assert shell("$H chekc 2>/dev/full", tmp_path).returncode in (1, 2)
    code = "import time, sys; time.sleep(0.5); sys.exit(7)"
    run = shell(f"{{ $H run --no_plan -- python -c {shlex.quote(code)}; echo $?; }} 2>/dev/full", tmp_path)
    assert run.stdout == "7\n"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (
            FileNotFoundError(errno.ENOENT, "No such file or directory", "/a/mine/x"),
            2,
            "/a/mine/x: No such file or directory -> give another path",
        ),
        (
            FileNotFoundError(errno.ENOENT, "No such file or directory", "/a/mine2/x"),
            1,
            "/a/mine2/x: No such file or directory -> give another path",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "/a/mine"),
            2,
            "/a/mine: Permission denied -> see ls -ld /a/mine: give a path that you may use",
        ),
        (OSError(errno.EIO, "Input/output error", "/a/mine"), 1, "/a/mine: Input/output error"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "harness logs: No space left on device -> free some space"),
        (
            RuntimeError("Error while serializing: No space left on device (os error 28)"),
            1,
            "harness logs: Error while serializing: No space left on device (os error 28) -> free some space",
        ),
    ],
)
def test_errors_of_files_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, code: int, line: str
) -> None:
    def main(argv: Sequence[str]) -> int:
        raise error

    install(monkeypatch, "parse_log", main)
    assert cli.main(["logs", "--model=/a/mine"]) == code
    assert capsys.readouterr().err == f"  error   {line}\n"
    install(monkeypatch, "run_clm", main)
    with pytest.raises(type(error)):
        cli.main(["train"])


WITHOUT_RIGHTS = "setpriv --bounding-set=-dac_override,-dac_read_search --inh-caps=-all" if os.geteuid() == 0 else ""
AS_A_USER = f"{WITHOUT_RIGHTS} $H"
needs_user = pytest.mark.skipif(
    bool(WITHOUT_RIGHTS) and subprocess.run([*WITHOUT_RIGHTS.split(), "true"], capture_output=True).returncode != 0,
    reason="root may read everything here, and cannot give that up",
)


@needs_user
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "plan --gpu_memory 80GB --model shut",
            "--model: cannot read shut/config.json: Permission denied -> give a model that you may read",
        ),
        ("layers --output o --model shut", "--model: cannot read shut/config.json: Permission denied -> give a model that you may read"),
        pytest.param(
            "tokenize --model_type gpt2 --tokenizer_name bytes --block_size 8 --train_file shut",
            "--train_file: cannot read shut/dataset_dict.json: Permission denied -> give what you may read",
            marks=pytest.mark.slow,
        ),
        (
            "tokenize --model_type gpt2 --tokenizer_name bytes --block_size 8 --train_file f.txt",
            "--train_file: cannot read f.txt: Permission denied -> give what you may read",
        ),
        pytest.param(
            "tokenize --model_type gpt2 --tokenizer_name bytes --block_size 8 --train_file above",
            "--train_file: cannot read above/shut: Permission denied -> give what you may read",
            marks=pytest.mark.slow,
        ),
        ("export shut new", "shut/trainer_state.json: Permission denied -> give a checkpoint that you may read"),
        ("monitor shut --once", "shut: cannot be read: Permission denied -> give a folder that you may read"),
    ],
)
def test_what_may_not_be_read_is_wrong_input(tmp_path: Path, words: str, line: str) -> None:
    for folder in ("shut", "above/shut"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder).chmod(0)
    (tmp_path / "above" / "a.txt").write_text("some text")
    (tmp_path / "f.txt").touch(mode=0)
    result = shell(f"{AS_A_USER} {words}", tmp_path)
    assert (result.returncode, result.stderr.strip().splitlines()[-1].strip()) == (2, f"error   {line}"), result.stderr


@needs_user
def test_a_model_that_may_not_be_read_is_said_by_the_doctors_check(tmp_path: Path) -> None:
    (tmp_path / "shut").mkdir(mode=0)
    code = "from harness.model_files import check_model_files as c; from pathlib import Path; print(c(Path('shut'))[1][0].line())"
    result = shell(AS_A_USER.replace("$H", f"{sys.executable} -c {shlex.quote(code)}"), tmp_path)
    assert result.stdout.startswith("error   shut/") and "Permission denied -> give a model that you may read" in result.stdout


@pytest.mark.parametrize("words", ["monitor", "logs", "export x", "run --run_dir"])
def test_an_empty_name_is_no_folder(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*words.split(), ""]) == 2
    assert "the name is empty" in capsys.readouterr().err
