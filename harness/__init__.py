"""`from harness import oom_safe` is for training loops of one's own; all else is imported from its module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.safe_loop import oom_safe as oom_safe


def __getattr__(name: str) -> Any:
    # Only when it is asked for: guards and launchers import this package and must not import torch.
    if name == "oom_safe":
        from harness.safe_loop import oom_safe

        return oom_safe
    raise AttributeError(f"module 'harness' has no attribute '{name}'")
