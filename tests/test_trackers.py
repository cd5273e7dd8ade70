"""`--report_to`: names, packages, and that numbers arrive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness import trackers
from harness.findings import UserError
from harness.metrics import MetricsLog, StepMetrics


@pytest.fixture
def only_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: object() if name == "tensorboard" else None)


def test_names(only_tensorboard: None) -> None:
    assert trackers.tracker_names(["none"]) == []
    assert trackers.tracker_names([]) == []
    assert trackers.tracker_names(["all"]) == ["tensorboard"]
    assert trackers.tracker_names(["tensorboard", "tensorboard"]) == ["tensorboard"]


@pytest.mark.parametrize(
    ("names", "messages"),
    [
        (["wanbd"], ["does not know wanbd"]),
        (["wandb", "comet_ml"], ["wandb is not installed", "comet_ml is not installed"]),
        (["none", "tensorboard"], ["none was given together with other names"]),
    ],
)
def test_wrong_names_are_reported_together(names: list[str], messages: list[str], only_tensorboard: None) -> None:
    with pytest.raises(UserError) as error:
        trackers.tracker_names(names)
    assert [finding.message for finding in error.value.findings] == messages


def test_missing_package_comes_with_the_pip_line(only_tensorboard: None) -> None:
    assert [finding.fix for finding in trackers.check_report_to(["comet_ml"])] == ["pip install comet-ml"]


def test_flat_config() -> None:
    assert trackers.flat_config({"lr": 1e-4, "files": ["a", "b"], "bf16": None, "name": "x", "on": True}) == {
        "lr": 1e-4,
        "files": '["a", "b"]',
        "name": "x",
        "on": True,
    }


def test_every_name_exists_in_accelerate() -> None:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    assert sorted(trackers.PACKAGES) == sorted(map(str, LOGGER_TYPE_TO_CLASS))


def test_tensorboard_gets_the_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    started: Any = trackers.start_trackers(["tensorboard"], None, tmp_path / "out", {"lr": 0.5, "files": ["a"]})
    log = MetricsLog(None, console=False, trackers=started)
    log.log(StepMetrics(step=1, loss=2.5))
    log.log(StepMetrics(step=2, loss=2.0))
    log.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "out" / "trackers" / "out"))
    events.Reload()
    assert [(point.step, point.value) for point in events.Scalars("train/loss")] == [(1, 2.5), (2, 2.0)]
