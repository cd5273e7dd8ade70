"""TensorBoard, Weights & Biases and the others, through accelerate's trackers; loaded only where one was asked for."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.findings import Finding, UserError
from harness.metrics import Tracker, plain

# Name in --report_to -> packages, one of which it needs.
PACKAGES: dict[str, tuple[str, ...]] = {
    "aim": ("aim",),
    "clearml": ("clearml",),
    "comet_ml": ("comet_ml",),
    "dvclive": ("dvclive",),
    "mlflow": ("mlflow",),
    "swanlab": ("swanlab",),
    "tensorboard": ("tensorboard", "tensorboardX"),
    "trackio": ("trackio",),
    "wandb": ("wandb",),
}


def _is_installed(name: str) -> bool:
    return any(importlib.util.find_spec(package) is not None for package in PACKAGES[name])


def check_report_to(report_to: Sequence[str]) -> list[Finding]:
    """Errors for names that do not exist and for trackers that are not installed. Imports none of them."""
    findings = []
    names = [name for name in report_to if name]
    for name in names:
        if name in ("none", "all"):
            if len(names) > 1:
                findings.append(Finding("error", "--report_to", f"{name} was given together with other names", "keep one of the two"))
        elif name not in PACKAGES:
            choices = ", ".join([*PACKAGES, "all", "none"])
            findings.append(Finding("error", "--report_to", f"does not know {name}", f"choose from {choices}"))
        elif not _is_installed(name):
            findings.append(
                Finding("error", "--report_to", f"{name} is not installed", f"pip install {PACKAGES[name][0].replace('_', '-')}")
            )
    return list(dict.fromkeys(findings))


def tracker_names(report_to: Sequence[str]) -> list[str]:
    """The trackers that `--report_to` stands for, each once; "all" is every installed one.

    Raises:
        UserError: an unknown or missing one.
    """
    findings = check_report_to(report_to)
    if findings:
        raise UserError(findings)
    if "all" in report_to:
        return [name for name in PACKAGES if _is_installed(name)]
    return list(dict.fromkeys(name for name in report_to if name not in ("", "none")))


def flat_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as trackers take it: numbers and texts; lists and mappings as JSON; unset values left out."""
    values = {name: value for name, value in plain(config).items() if value is not None}
    return {name: value if isinstance(value, (bool, int, float, str)) else json.dumps(value) for name, value in values.items()}


def start_trackers(report_to: Sequence[str], run_name: str | None, output_dir: str | Path, config: Mapping[str, Any]) -> list[Tracker]:
    """Starts the trackers of a run. To be called on the main process only, after the process group exists.

    Args:
        report_to: names as `--report_to` takes them.
        run_name: the run's name in the trackers; default: the output folder's name.
        output_dir: trackers that write files do so in its `trackers` folder.
        config: stored with the run.

    Raises:
        UserError: an unknown or missing tracker.
    """
    names = tracker_names(report_to)
    if not names:
        return []
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    folder = Path(output_dir) / "trackers"
    trackers = []
    for name in names:
        kind = LOGGER_TYPE_TO_CLASS[name]
        arguments: list[Any] = [run_name or Path(output_dir).resolve().name]
        if kind.requires_logging_directory:
            folder.mkdir(parents=True, exist_ok=True)
            arguments.append(str(folder))
        tracker = kind(*arguments)
        tracker.start()
        tracker.store_init_configuration(flat_config(config))
        trackers.append(tracker)
    return trackers
