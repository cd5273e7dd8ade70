"""Draws docs/architecture.md's picture from the code: `python -m tests.architecture` prints the Mermaid text of it.

Modules are those of the import layers in setup.cfg, an arrow is an import statement, and an arrow that follows from others is left out.
"""

from __future__ import annotations

import ast
import configparser
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What is drawn, by part. What nearly everything imports (arguments, findings, coordination) and what is one module's own is left out.
SHOWN = {
    "a process starts": ["run_clm", "guard", "relaunch_hub", "standby"],
    "what is asked for": ["check_config", "templates"],
    "one run": ["job", "starting_settings", "resume"],
    "the loop": ["trainer", "recovery", "votes", "evaluation", "checkpoint", "snapshots"],
    "engines": ["engines.build", "engines.ddp", "engines.fsdp", "engines.zero", "engines.device_map"],
    "model": ["modeling", "lora", "loss", "blocks", "placement", "pipeline"],
    "memory": ["planner", "run_plan", "candidates", "memory", "step_time", "ladder"],
    "data": ["data", "mixtures", "streaming", "preparation", "encoders", "data_sources"],
}


def layers() -> list[list[str]]:
    """The import layers of setup.cfg, top first, as module names without the package's."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    lines = config["importlinter:contract:layers"]["layers"].split("\n")
    return [re.findall(r"harness\.([\w.]+)", line) for line in lines if line.strip()]


def imports_of(module: str) -> set[str]:
    """Modules of the package that a module imports anywhere in its text, without the package's name."""
    tree = ast.parse((ROOT / "harness" / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8"))
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in ("harness", "harness.engines"):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name.removeprefix("harness.") for name in found if name.startswith("harness.")}


def arrows() -> list[tuple[str, str]]:
    """Imports between the modules shown, without those that follow from others."""
    shown = [module for modules in SHOWN.values() for module in modules]
    direct = {module: imports_of(module) & set(shown) for module in shown}

    def reach(module: str) -> set[str]:
        return direct[module].union(*(reach(other) for other in direct[module]))

    return [
        (module, other)
        for module in shown
        for other in shown
        if other in direct[module] and not any(other in reach(third) for third in direct[module] - {other})
    ]


def height(module: str) -> int:
    """In which layer of setup.cfg a module is, the bottom one being 1."""
    rows = layers()
    return next(len(rows) - index for index, row in enumerate(rows) if module in row or module.split(".")[0] in row)


def diagram() -> str:
    """The picture, as Mermaid's text; in every part, what is in a higher layer comes first."""
    lines = ["flowchart TD"]
    for number, (part, modules) in enumerate(SHOWN.items()):
        lines.append(f'  subgraph part{number}["{part}"]')
        lines += [f'    {module.replace(".", "_")}["{module}"]' for module in sorted(modules, key=height, reverse=True)]
        lines.append("  end")
    lines += [f"  {module.replace('.', '_')} --> {other.replace('.', '_')}" for module, other in arrows()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(diagram(), end="")
