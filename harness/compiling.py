"""torch.compile for the pieces of a model that repeat, with a way back: what cannot be compiled runs as it is, and is said once.

Compiled code is kept on disk by torch between runs (TORCHINDUCTOR_CACHE_DIR), so a second start of the same run compiles next to nothing.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import shutil
from collections.abc import Callable
from typing import Any

import torch

log = logging.getLogger("harness")

# Kinds of one layer: sizes of micro-batches and evaluation batches, with and without gradients, masks, sliding windows.
_NUM_VARIANTS = 64


def missing_for_compile(device_type: str) -> str | None:
    """What the compiler lacks on this machine; None where it can run."""
    if device_type == "cuda" and importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    compilers = ("g++", "c++", "clang++") if device_type == "cpu" else ("gcc", "cc", "clang")
    if not any(shutil.which(name) for name in compilers):
        return "there is no C compiler"
    return None


@functools.cache
def _configure() -> None:
    import torch._dynamo as dynamo
    import torch._functorch.config as functorch

    for name in ("recompile_limit", "cache_size_limit"):  # the second is its older name
        if hasattr(dynamo.config, name):
            setattr(dynamo.config, name, max(getattr(dynamo.config, name), _NUM_VARIANTS))
    # DDP's graph splitter cuts graphs at buckets, and cannot cut checkpointed ones. A layer is small enough.
    dynamo.config.optimize_ddp = False  # type: ignore[assignment]
    # A hook on one layer only must not be lost because another layer's code is taken for it.
    dynamo.config.skip_nnmodule_hook_guards = False
    # A backward that does not compile shows in forward, where the way back is.
    if hasattr(functorch, "force_non_lazy_backward_lowering"):
        functorch.force_non_lazy_backward_lowering = True
    # It warns of in-place operations wherever activations are kept selectively; transformers' layers have none.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)


def _failures() -> tuple[type[BaseException], ...]:
    from torch._dynamo import exc

    return (exc.TorchDynamoException, exc.FailOnRecompileLimitHit)


def _cause(error: BaseException) -> BaseException:
    while (inner := getattr(error, "inner_exception", None) or error.__cause__) is not None:
        error = inner
    return error


class Compiled:
    """A function that is compiled as one graph when first called, or runs as it is where that fails.

    An out-of-memory while compiling (kernels are tried out) is raised as what it is.

    Args:
        function: called with what the compiled one is called with.
        what: for the warning.
        backend: of torch.compile.
        on_failure: called once when the function falls back.
    """

    def __init__(
        self, function: Callable[..., Any], what: str, *, backend: str = "inductor", on_failure: Callable[[], None] | None = None
    ) -> None:
        _configure()
        self.function, self.what, self.on_failure = function, what, on_failure
        self.compiled: Callable[..., Any] | None = torch.compile(function, fullgraph=True, backend=backend)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.compiled is not None:
            try:
                return self.compiled(*args, **kwargs)
            except _failures() as error:
                cause = _cause(error)
                if isinstance(cause, torch.OutOfMemoryError):
                    raise cause from None
                self._fall_back(cause)
        return self.function(*args, **kwargs)

    def _fall_back(self, cause: BaseException) -> None:
        self.compiled = None
        reason = next((line.strip() for line in str(cause).splitlines() if line.strip()), type(cause).__name__)
        log.warning("%s cannot be compiled, and runs as it is (--torch_compile False says no more): %s", self.what, reason)
        if self.on_failure is not None:
            self.on_failure()
