"""The one result type of every checker: what is wrong, where, and how to mend it."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NoReturn

Severity = Literal["error", "warning", "info"]
_ORDER: dict[str, int] = {"error": 0, "warning": 1, "info": 2}


# Of ASCII and Latin-1, without tab and newline; and marks that turn the direction of writing.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Text of a user's or a program's with its control characters written out: a terminal would obey them."""
    return _CONTROLS.sub(lambda match: ascii(match[0])[1:-1], text)


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing a checker has to say.

    Attributes:
        severity: "error" ends the job with exit code 2, "warning" and "info" are only printed.
        key: the flag, file key or resource it is about, spelt as the user would type it.
        message: what is wrong, with the offending value.
        fix: what to type or change instead; empty where nothing needs doing.
    """

    severity: Severity
    key: str
    message: str
    fix: str = ""

    def line(self) -> str:
        """The finding as one line of text that a terminal can show."""
        tail = f" -> {self.fix}" if self.fix else ""
        return printable(f"{self.severity:<7} {self.key}: {self.message}{tail}")


def counted(number: int, what: str) -> str:
    """ "1 error", "2 errors"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


class UserError(ValueError):
    """A mistake of the user's: printed as its findings, without a traceback, exit code 2."""

    def __init__(self, findings: Finding | Iterable[Finding]) -> None:
        self.findings: list[Finding] = [findings] if isinstance(findings, Finding) else list(findings)
        super().__init__("\n".join(finding.line() for finding in self.findings))

    def __reduce__(self) -> tuple[type[UserError], tuple[list[Finding]]]:
        return UserError, (self.findings,)  # exceptions are pickled by their text otherwise; these also come from worker processes


def user_error(key: str, message: str, fix: str = "") -> UserError:
    """A `UserError` of one finding."""
    return UserError(Finding("error", key, message, fix))


_MISSING = "is required"
WITHOUT_FLAG = "a value without a flag before it"


def _most_values(action: argparse.Action) -> float:
    """How many values a flag can take."""
    if isinstance(action.nargs, int):
        return action.nargs
    return math.inf if action.nargs in ("*", "+") else 1


_NUMBER = re.compile(r"-\d+|-\d*\.\d+")


def is_number(token: str) -> bool:
    """Whether a token that begins with a hyphen is a value, as argparse sees it, and no flag."""
    return _NUMBER.fullmatch(token) is not None


class FindingParser(argparse.ArgumentParser):
    """An argument parser whose errors are findings: all of them together, with the nearest flag for one that is not known.

    Flags are never abbreviated, and hyphens and underscores in them are the same.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **settings})

    def error(self, message: str) -> NoReturn:
        """What argparse calls for the first mistake.

        Raises:
            UserError: always.
        """
        raise UserError(self._findings_of(message))

    def _print_message(self, message: str, file: Any = None) -> None:
        """What --help writes with; argparse's own lets an error of writing pass without a word."""
        if message:
            print(message, end="", file=file or sys.stderr)

    def read_known(self, tokens: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str], list[Finding]]:
        """Reads a command line.

        Returns:
            The values, a default for each wrong or missing one; what is not known, in order; and a finding for each wrong or missing one.
        """
        left = [self._as_defined(token) for token in (sys.argv[1:] if tokens is None else tokens)]
        found: list[Finding] = []
        required = [action for action in self._actions if action.required]
        try:
            while True:
                try:
                    namespace, unknown = super().parse_known_args(left)
                    return namespace, unknown, found
                except UserError as error:
                    found += error.findings
                    rest = self._without(left, found[-1].key)
                    if rest == left and not any(action.required for action in required):
                        raise UserError(dict.fromkeys(found)) from None  # nothing can be left out so that the rest could be read
                    if rest == left:  # what is missing was said
                        for action in required:
                            action.required = False
                    left = rest
        finally:
            for action in required:
                action.required = True

    def read(self, tokens: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[Finding]]:
        """As `read_known`, with a finding for each argument that is not known, for commands that have more to check."""
        flags = self._flags()
        left = [self._as_defined(token) for token in (sys.argv[1:] if tokens is None else tokens)]
        end = left.index("--") if "--" in left else len(left)
        known: list[str] = []
        odd: list[Finding] = []
        meant: list[argparse.Action] = []  # by flags that are misspelt
        skips = False  # a value of a misspelt flag is no argument of its own
        for token in left[:end]:
            is_flag = token.startswith("-") and len(token) > 1 and not is_number(token)
            if is_flag and token.split("=", 1)[0] not in flags:
                odd.append(self._unknown(token.split("=", 1)[0]))
                action = flags.get(odd[-1].fix.removeprefix("did you mean ").rstrip("?"))
                meant += [action] if action is not None else []
                skips = "=" not in token and action is not None and action.nargs != 0
            elif is_flag or not skips:
                known.append(token)
                skips = False
        namespace, unknown, found = self.read_known([*known, *left[end:]])
        found = [finding for finding in found if finding.message != _MISSING or flags.get(finding.key) not in meant]
        return namespace, [*odd, *found, *map(self._unknown, unknown)]

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Reads a command line.

        Raises:
            UserError: everything that is wrong with it.
        """
        values, found = self.read(args)
        if found:
            raise UserError(found)
        return values

    def _flags(self) -> dict[str, argparse.Action]:
        return {flag: action for action in self._actions for flag in action.option_strings}

    def _as_defined(self, token: str) -> str:
        """The token with its flag spelt as it was defined, whichever of hyphens and underscores were typed."""
        flag, equals, value = token.partition("=")
        if not token.startswith("--") or flag in self._flags():
            return token
        name = flag[2:].replace("-", "_")
        same = next((known for known in self._flags() if known.startswith("--") and known[2:].replace("-", "_") == name), flag)
        return same + equals + value

    def _without(self, tokens: list[str], flag: str) -> list[str]:
        """The tokens without a flag and its values."""
        action = self._flags().get(flag)
        rest: list[str] = []
        num_values: float = 0  # of the flag that are still to come
        for token in tokens:
            if action is not None and token.split("=", 1)[0] in action.option_strings:
                num_values = 0 if "=" in token else _most_values(action)
            elif num_values and (not token.startswith("-") or is_number(token)):
                num_values -= 1
            else:
                num_values = 0
                rest.append(token)
        return rest

    def _findings_of(self, message: str) -> list[Finding]:
        what, _, rest = message.removeprefix("argument ").partition(": ")
        key, fix = what.split("/")[0], f"see {self.prog} --help"
        if what == "the following arguments are required":
            return [Finding("error", name.split("/")[0], _MISSING, fix) for name in rest.split(", ")]
        if not rest:
            return [Finding("error", self.prog, message, fix)]
        action = self._flags().get(key)
        wrong = re.match(r"invalid choice: '([^']*)'", rest)
        close = difflib.get_close_matches(wrong[1], [str(one) for one in action.choices or ()], n=1) if wrong and action else []
        return [Finding("error", key, rest, f"{key} {close[0]}" if close else fix)]

    def _unknown(self, token: str) -> Finding:
        if not token.startswith("-"):
            return Finding("error", token, WITHOUT_FLAG, f"see {self.prog} --help")
        names = {flag.lstrip("-").replace("-", "_"): flag for flag in reversed(self._flags())}  # of two spellings the first
        close = difflib.get_close_matches(token.lstrip("-").replace("-", "_"), names, n=1, cutoff=0.6)
        fix = f"did you mean {names[close[0]]}?" if close else f"see {self.prog} --help"
        return Finding("error", token, "unknown argument", fix)


def sort_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Errors first, then warnings, then infos; the order within one severity is kept; what was said before goes, whatever its fix."""
    said: dict[tuple[str, str, str], Finding] = {}
    for finding in findings:
        said.setdefault((finding.severity, finding.key, finding.message), finding)
    return sorted(said.values(), key=lambda finding: _ORDER[finding.severity])


def has_errors(findings: Iterable[Finding]) -> bool:
    return any(finding.severity == "error" for finding in findings)


def format_findings(findings: Sequence[Finding], title: str = "") -> str:
    """All findings as a table of lines, worst first."""
    lines = [title] if title else []
    lines += ["  " + finding.line() for finding in sort_findings(findings)]
    return "\n".join(lines)


def is_count(text: str) -> bool:
    """Whether a text is a whole number such as processes, cards and ports have; `isdigit` knows "²" too, `int` at most 4,300 digits."""
    return text.isascii() and text.isdigit() and len(text) < 10
