"""From a command line, a YAML file or a dictionary to `Arguments`.

What a user types and sees:

    python harness/run_clm.py --model_name_or_path gpt2 --train_file a.txt --output_dir out
    python harness/run_clm.py --config run.yaml --learning-rate 1e-4       # flags win over the file
    python harness/run_clm.py --learnig_rate 1e-4
    error   --learnig_rate: unknown argument -> did you mean --learning_rate?

Imports no torch: wrong input is reported in a second, before anything heavy is loaded.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from harness import hf_names
from harness.args import GROUPS, Arguments, argument_names
from harness.argument_rules import resolve
from harness.findings import Finding, UserError, has_errors, user_error


class _Parser:
    """HfArgumentParser with our rules: no abbreviations, errors raised instead of printed."""

    def __init__(self) -> None:
        from transformers.hf_argparser import HfArgumentParser, string_to_bool

        class Raising(HfArgumentParser):
            def error(self, message: str) -> Any:  # type: ignore[override]
                key, _, rest = message.removeprefix("argument ").partition(": ")
                raise user_error(key.split("/")[0], rest or message, "see --help")

        groups: Any = GROUPS
        self.inner = Raising(groups, allow_abbrev=False, prog="run_clm.py")
        for action in self.inner._actions:
            if action.type is string_to_bool and action.nargs is None:  # Optional[bool]: bare means True, as for bool
                action.nargs, action.const = "?", True
        self.inner.add_argument("--config", default=None, help="YAML file with the same names; flags win over it.")

    def parse(self, tokens: Sequence[str]) -> tuple[argparse.Namespace, set[str]]:
        namespace, unknown = self.inner.parse_known_args(list(tokens))
        if unknown:
            raise UserError(_unknown_argument(token) for token in _flags_of(unknown))
        return namespace, self._typed(tokens)

    def _typed(self, tokens: Sequence[str]) -> set[str]:
        known = {option: action.dest for action in self.inner._actions for option in action.option_strings}
        return {known[flag] for flag in (token.split("=", 1)[0] for token in tokens) if flag in known}


def _flags_of(unknown: Sequence[str]) -> list[str]:
    flags = [token.split("=", 1)[0] for token in unknown if token.startswith("-")]
    return flags or list(unknown)


def _unknown_argument(token: str) -> Finding:
    name = token.lstrip("-").replace("-", "_")
    if not token.startswith("-"):
        return Finding("error", token, "a value without a flag before it", "put a --flag before it, or quote values with blanks")
    close = difflib.get_close_matches(name, argument_names(), n=1, cutoff=0.6)
    fix = f"did you mean --{close[0]}?" if close else "see --help for all names"
    return Finding("error", token, "unknown argument", fix)


def read_yaml(path: str | Path, key: str = "--config") -> dict[str, Any]:
    """A YAML mapping, safely loaded.

    Raises:
        UserError: not there, not readable, not YAML, or not a mapping.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise user_error(key, f"cannot read {path}: {error.strerror}", "give the path of an existing YAML file") from None
    except UnicodeDecodeError as error:
        raise user_error(key, f"{path} is not UTF-8 (byte {error.start})", "save it as UTF-8") from None
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        raise user_error(key, f"{path}{where} is not valid YAML: {getattr(error, 'problem', error)}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise user_error(key, f"{path} holds a {type(values).__name__}, not names with values", "write lines like 'learning_rate: 1e-4'")
    return {str(name): value for name, value in values.items()}


def tokens_of(values: Mapping[str, Any]) -> list[str]:
    """A mapping as command-line tokens, so that a file's values go through the same conversions as flags do."""
    tokens: list[str] = []
    for name, value in values.items():
        flag = "--" + name.replace("-", "_")
        if value is None:
            continue
        if isinstance(value, bool):
            tokens.append(f"{flag}={value}")
        elif isinstance(value, (list, tuple)):
            tokens += [flag, *(str(item) for item in value)] if value else []
        elif isinstance(value, dict):
            tokens.append(f"{flag}={json.dumps(value)}")
        else:
            tokens.append(f"{flag}={value}")
    return tokens


def parse_args(argv: Sequence[str]) -> Arguments:
    """Parses a command line (without the program's name) into `Arguments`.

    Raises:
        UserError: every unknown name, wrong value and contradiction found, together.
    """
    tokens, config_path = _split_config(argv)
    from_file: dict[str, Any] = read_yaml(config_path) if config_path else {}
    findings: list[Finding] = []
    translated, notes = hf_names.translate(tokens_of(from_file) + tokens, argument_names())
    findings += notes
    if has_errors(findings):
        # Report the flags nobody knows together with the refused ones.
        try:
            _Parser().parse(translated)
        except UserError as error:
            findings += error.findings
        raise UserError(finding for finding in findings if finding.severity == "error")
    namespace, typed = _Parser().parse(translated)
    parsed = vars(namespace)
    groups: list[Any] = [group(**{field.name: parsed[field.name] for field in dataclasses.fields(group)}) for group in GROUPS]
    args = Arguments(*groups)
    args.typed, args.notes = frozenset(typed), tuple(findings)
    return resolve(args)


def _split_config(argv: Sequence[str]) -> tuple[list[str], str | None]:
    tokens, path = [], None
    items = iter(argv)
    for token in items:
        if token == "--config":
            path = next(items, None)
            if path is None or path.startswith("--"):
                raise user_error("--config", "needs the path of a YAML file")
        elif token.startswith("--config="):
            path = token.split("=", 1)[1]
        else:
            tokens.append(token)
    alone = [token for token in tokens if not token.startswith("--local_rank=")]
    if path is None and len(alone) == 1 and alone[0].endswith((".json", ".yaml", ".yml")):
        tokens.remove(alone[0])  # one file and nothing else, as HF's scripts take it; JSON is YAML
        path = alone[0]
    return tokens, path


def from_config(config: Mapping[str, Any]) -> Arguments:
    """`Arguments` from a dictionary of the same names, for one's own scripts."""
    return parse_args(tokens_of(config))
