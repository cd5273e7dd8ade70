"""The `harness` command: dispatch, help, suggestions and exit codes."""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence

import pytest

from harness import cli
from harness.findings import user_error


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


def test_help_loads_nothing_heavy() -> None:
    import subprocess

    code = "import sys; from harness import cli; cli.main(['--help']); sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0
