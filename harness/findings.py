"""The one result type of every checker: what is wrong, where, and how to mend it."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Literal, NoReturn

Severity = Literal["error", "warning", "info"]
_ORDER: dict[str, int] = {"error": 0, "warning": 1, "info": 2}


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
        """The finding as one line of text."""
        tail = f" -> {self.fix}" if self.fix else ""
        return f"{self.severity:<7} {self.key}: {self.message}{tail}"


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


class FindingParser(argparse.ArgumentParser):
    """An argument parser whose errors are `UserError`s, so that a command says them like everything else that is wrong."""

    def error(self, message: str) -> NoReturn:
        """Raises a finding for each argument that is missing, or one for what else is wrong.

        Raises:
            UserError: always.
        """
        what, _, rest = message.removeprefix("argument ").partition(": ")
        fix = f"see {self.prog} --help"
        if what == "the following arguments are required":
            raise UserError([Finding("error", name.split("/")[0], "is required", fix) for name in rest.split(", ")])
        raise user_error(what.split("/")[0], rest, fix) if rest else user_error(self.prog, message, fix)


def sort_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Errors first, then warnings, then infos; the order within one severity is kept; duplicates go."""
    return sorted(dict.fromkeys(findings), key=lambda finding: _ORDER[finding.severity])


def has_errors(findings: Iterable[Finding]) -> bool:
    return any(finding.severity == "error" for finding in findings)


def format_findings(findings: Sequence[Finding], title: str = "") -> str:
    """All findings as a table of lines, worst first."""
    lines = [title] if title else []
    lines += ["  " + finding.line() for finding in sort_findings(findings)]
    return "\n".join(lines)
