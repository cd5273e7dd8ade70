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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import hf_names
from harness.args import GROUPS, Arguments, argument_names
from harness.argument_rules import resolve
from harness.findings import Finding, UserError, is_number, user_error
from harness.user_files import parse_yaml, read_user_text, refuse_other_kind

# What a wrong value should have been, by the function that reads it.
_KINDS = {"int": "a whole number", "whole_number": "a whole number", "float": "a number", "string_to_bool": "true or false"}


def whole_number(text: str) -> int:
    """100000 from "100000", and from "1e5", which YAML 1.1 reads as text.

    Raises:
        ValueError: no number, or not a whole one.
    """
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if not number.is_integer():
            raise
        return int(number)


class ParsingError(UserError):
    """What is wrong with a command line itself.

    Attributes:
        parsed: all of it that can be read, defaults for the rest.
    """

    def __init__(self, findings: list[Finding], parsed: Arguments) -> None:
        super().__init__(findings)
        self.parsed = parsed


class _WrongUseError(Exception):
    """A flag that cannot be parsed at all, such as one without its value."""

    def __init__(self, flag: str, message: str) -> None:
        super().__init__(message)
        self.flag = flag


class _Parser:
    """HfArgumentParser with our rules: no abbreviations, and all wrong values at once instead of the first one."""

    def __init__(self) -> None:
        from transformers.hf_argparser import HfArgumentParser, string_to_bool

        class Raising(HfArgumentParser):
            def error(self, message: str) -> Any:  # type: ignore[override]
                key, _, rest = message.removeprefix("argument ").partition(": ")
                raise _WrongUseError(key.split("/")[0], rest or message)

        groups: Any = GROUPS
        self.problems: dict[str, Finding] = {}
        self.inner = Raising(groups, allow_abbrev=False, prog="run_clm.py")
        for action in self.inner._actions:
            if action.type is string_to_bool and action.nargs is None:  # Optional[bool]: bare means True, as for bool
                action.nargs, action.const = "?", True
            if callable(action.type):
                action.type = self._noting(action, whole_number if action.type is int else action.type)
        self.inner.add_argument("--config", default=None, help="YAML file with the same names; flags win over it.")

    def _noting(self, action: argparse.Action, read: Callable[[str], Any]) -> Callable[[str], Any]:
        """`read`, but a value that it refuses is noted, and the default stands for it."""
        flag = action.option_strings[0]

        def value_of(text: str) -> Any:
            try:
                value = read(text)
            except (TypeError, ValueError, argparse.ArgumentTypeError):
                kind = _KINDS.get(getattr(read, "__name__", ""), "of another kind")
                self.problems[flag] = Finding("error", flag, f"must be {kind}, not {text!r}", "see --help")
                return action.default
            if action.choices is not None and value not in action.choices:
                names = ", ".join(map(str, action.choices))
                close = difflib.get_close_matches(text, [str(choice) for choice in action.choices], n=1, cutoff=0.6)
                self.problems[flag] = Finding("error", flag, f"must be one of {names}, not {text!r}", f"{flag} {close[0]}" if close else "")
                return action.default
            return value

        return value_of

    def parse(self, tokens: Sequence[str]) -> tuple[argparse.Namespace, set[str], list[Finding]]:
        """Returns the values (a default for each wrong one), the names that were given, and everything that is wrong with them."""
        left = list(tokens)
        self.problems = {}
        while True:
            try:
                namespace, unknown = self.inner.parse_known_args(left)
                break
            except _WrongUseError as error:
                options = next((action.option_strings for action in self.inner._actions if error.flag in action.option_strings), [])
                rest = [token for token in left if token.split("=", 1)[0] not in options]
                if len(rest) == len(left):
                    raise user_error(error.flag, str(error), "see --help") from None
                self.problems[error.flag] = Finding("error", error.flag, str(error), "see --help")
                left = rest
        several = self._several(tokens)
        for flag, values in several.items():
            text = f"takes one value, not {len(values)}: {' '.join(values)}"
            self.problems[flag] = Finding("error", flag, text, "give one value; quote a value with blanks")
            unknown = [token for token in unknown if token not in values]
        return namespace, self._typed(tokens), [*self.problems.values(), *map(_unknown_argument, _flags_of(unknown))]

    def _several(self, tokens: Sequence[str]) -> dict[str, list[str]]:
        """Flags that take one value and have more, as from a list in a file, with these values."""
        single = {flag for action in self.inner._actions if action.nargs in (None, "?") for flag in action.option_strings}
        found: dict[str, list[str]] = {}
        flag = ""
        for token in tokens:
            if token.startswith("-") and not is_number(token):
                flag, equals, value = token.partition("=")
                found[flag] = [value] if equals else []
            elif flag:
                found[flag].append(token)
        return {flag: values for flag, values in found.items() if flag in single and len(values) > 1}

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
    text = read_user_text(path, key, "give the path of an existing YAML file")
    try:
        values = parse_yaml(text)
    except ValueError as error:
        raise user_error(key, f"{path} is not valid YAML: {error}") from None
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
        ParsingError: every unknown name, wrong value and contradiction found, together.
        UserError: a flag without a value of its own, or a file for `--config` that cannot be read.
    """
    tokens, config_path = _split_config(argv)
    from_file: dict[str, Any] = read_yaml(config_path) if config_path else {}
    if config_path:
        refuse_other_kind(from_file, "--config", config_path)
    translated, notes = hf_names.translate(tokens_of(from_file) + tokens, argument_names())
    namespace, typed, wrong = _Parser().parse(translated)
    problems = [note for note in notes if note.severity == "error"] + wrong
    parsed = vars(namespace)
    groups: list[Any] = [group(**{field.name: parsed[field.name] for field in dataclasses.fields(group)}) for group in GROUPS]
    args = Arguments(*groups)
    args.typed, args.notes = frozenset(typed), tuple(notes)
    # A flag that is wrong or misspelt is as good as missing: nothing more is said about it.
    meant = {finding.fix.removeprefix("did you mean ").rstrip("?") for finding in problems}
    settled = {finding.key for finding in problems} | meant
    problems += [finding for finding in resolve(args) if finding.key not in settled and not meant & set(finding.fix.split())]
    if problems:
        raise ParsingError(problems, args)
    return args


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
