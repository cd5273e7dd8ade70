"""Pages of docs/ that speak of the code: messages, the picture of the parts, and signatures are the code's own."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from tests import architecture

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def fenced(name: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page(name), re.MULTILINE | re.DOTALL)


# ---- messages ----


@functools.cache
def strings() -> list[str]:
    """Every string of the package and of the launcher; a line break stands for what an f-string fills in."""
    found = []
    for path in [*(ROOT / "harness").rglob("*.py"), *(ROOT / "launch").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "\n" for part in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def is_said(message: str) -> bool:
    """Whether some string of the code holds the message, "..." standing for anything."""
    pattern = re.compile(".*".join(re.escape(part.strip()) for part in message.split("...")), re.DOTALL)
    return any(pattern.search(text) for text in strings())


def symptoms() -> list[str]:
    """Messages in the first two columns of the tables of docs/troubleshooting.md."""
    rows = [line for line in page("troubleshooting.md").splitlines() if line.startswith("| ") and not line.startswith("| ---")]
    return [message for row in rows for cell in row.split(" | ")[:2] for message in re.findall(r'(?<!`)"([^"`]+)"', cell)]


def test_every_message_of_the_troubleshooting_page_is_one_of_the_code() -> None:
    assert len(symptoms()) > 60
    assert [message for message in symptoms() if not is_said(message)] == []


def test_a_message_that_nobody_says_would_be_noticed() -> None:
    assert is_said("the code on ... is not that on") and not is_said("the code on ... is not that of")


# ---- the picture ----


def test_the_picture_of_the_parts_is_the_codes() -> None:
    """Its modules are those of `python -m tests.architecture`, its arrows are imports, and they go down through the layers."""
    (drawn,) = fenced("architecture.md", "mermaid")
    names = dict(re.findall(r'^    (\w+)\["([\w.]+)"\]$', drawn, re.MULTILINE))
    shown = [module for modules in architecture.SHOWN.values() for module in modules]
    assert sorted(names.values()) == sorted(shown)
    arrows = [(names[start], names[end]) for start, end in re.findall(r"^  (\w+) --> (\w+)$", drawn, re.MULTILINE)]
    assert len(arrows) > 30
    assert [(start, end) for start, end in arrows if end not in architecture.imports_of(start)] == []
    assert all(architecture.height(start) > architecture.height(end) for start, end in arrows if "engines" not in (start[:7], end[:7]))


# ---- signatures ----


def signature(node: ast.FunctionDef) -> str:
    returns = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
    return f"{node.name}({ast.unparse(node.args)}){returns}"


def functions(text: str) -> dict[str, str]:
    """Name ("Class.method" for methods) -> signature, of a module's text."""
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = signature(node)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{item.name}": signature(item) for item in node.body if isinstance(item, ast.FunctionDef)}
    return found


@pytest.mark.parametrize("block", fenced("extending.md", "python"), ids=lambda block: block.splitlines()[0])
def test_signatures_on_the_page_on_extending_are_the_codes(block: str) -> None:
    path = block.splitlines()[0].removeprefix("# ")
    there, said = functions((ROOT / path).read_text(encoding="utf-8")), functions(block)
    assert said and {name: there.get(name) for name in said} == said
