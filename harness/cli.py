"""The `harness` console command: sub-commands only, each also `python -m harness.<module>`."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence
from importlib import metadata, util

from harness.findings import UserError, format_findings, printable

# name -> (module, what it does). A module's `main(argv) -> int` is all that is needed.
COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("run_clm", "train a causal language model"),
    "tokenize": ("data", "tokenise a dataset before a run"),
    "plan": ("planner", "predict memory and speed of a run, without a GPU"),
    "check": ("check_config", "check templates, arguments and machine against each other"),
    "doctor": ("readiness", "check GPUs, driver, links, disk and memory of this machine"),
    "monitor": ("monitor", "watch the GPUs, tokens per second and MFU"),
    "logs": ("parse_log", "turn logs into tables, CSV and plots"),
    "layers": ("hidden_states", "write the outputs of every layer of a model"),
    "export": ("checkpoint", "turn a checkpoint into safetensors"),
    "run": ("runner", "run another training script under the memory ladder"),
}


def available() -> dict[str, tuple[str, str]]:
    """The commands whose module is there."""
    return {name: entry for name, entry in COMMANDS.items() if util.find_spec(f"harness.{entry[0]}") is not None}


def usage() -> str:
    """The text of `harness --help`."""
    lines = [f"  {name:<10}{text}" for name, (_, text) in available().items()]
    head = ["usage: harness COMMAND [arguments]", "       harness COMMAND --help", "       harness --version", ""]
    return "\n".join([*head, *lines])


def version() -> str:
    """The installed version, or that of a clone which is not installed."""
    try:
        return metadata.version("harness")
    except metadata.PackageNotFoundError:
        return "0 (not installed)"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one sub-command.

    Returns:
        Its exit code: 0 done, 1 failed or found errors, 2 wrong input.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv:
        print(usage(), file=sys.stderr)
        return 2
    name, rest = argv[0], argv[1:]
    if name in ("-h", "--help", "help"):
        print(usage())
        return 0
    if name in ("-V", "--version"):
        print(f"harness {version()}")
        return 0
    commands = available()
    if name not in commands:
        close = difflib.get_close_matches(name, commands, n=1)
        print(
            printable(f"harness: unknown command {name}: ") + (f"did you mean {close[0]}?" if close else "see harness --help"),
            file=sys.stderr,
        )
        return 2
    module = importlib.import_module(f"harness.{commands[name][0]}")
    try:
        return int(module.main(rest) or 0)
    except UserError as error:
        print(format_findings(error.findings), file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
