"""Counts the operations that make the host wait for the device, in what runs inside; works on the CPU, where they cost nothing."""

from __future__ import annotations

import collections
import os
import traceback
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

# item(), bool(), float(), tolist() of a tensor; results whose size depends on values.
WAITING = ("aten._local_scalar_dense", "aten.nonzero", "aten.is_nonzero", "aten.masked_select", "aten.equal", "aten._unique2")


class SyncCounter(TorchDispatchMode):
    """Attributes: places: "operation at file:line" -> how often."""

    def __init__(self) -> None:
        super().__init__()
        self.places: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.replace("::", ".")
        if name in WAITING:
            stack = [frame for frame in traceback.extract_stack() if "/torch/" not in frame.filename and frame.filename != __file__]
            where = f"{os.path.basename(stack[-1].filename)}:{stack[-1].lineno}" if stack else "autograd"
            self.places[f"{name} at {where}"] += 1
        return function(*args, **(kwargs or {}))
