"""What all tests share."""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist's own, which reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start ranks run one after the other, in one worker of pytest-xdist: several ranks fill the cores of a small machine."""
    for item in items:
        names = vars(getattr(item, "module", None) or object).values()
        starts_ranks = any(getattr(value, "__module__", None) == "tests.launching" for value in names)
        if starts_ranks or "distributed" in item.path.parts:
            item.add_marker(pytest.mark.xdist_group("ranks"))
