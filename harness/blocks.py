"""How a model's blocks run: as they are or compiled, with their activations kept, kept in part, or computed again in backward.

Each block is compiled by itself (regional compilation): the blocks share their code, so one block is compiled for all, and the hooks
that engines put around a block (gathering and freeing its weights) stay outside.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from harness.activation_offload import HostActivations
from harness.args import ModelArguments
from harness.compiling import Compiled, missing_for_compile
from harness.findings import user_error
from harness.modeling import layer_units

log = logging.getLogger("harness")

_HF_WRAPPER = "forward_with_checkpointing"


@functools.cache
def _kept_operations() -> tuple[frozenset[Any], frozenset[Any]]:
    """(attention kernels, matrix products), as torch dispatches them."""
    aten = torch.ops.aten
    attention: list[Any] = [
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_attention_math.default,
    ]
    flex = getattr(torch.ops.higher_order, "flex_attention", None)
    if flex is not None:
        attention.append(flex)
    importlib.import_module("torch.nn.attention.varlen")  # makes its operator known
    attention.append(torch.ops.torch_attn._varlen_attn.default)
    return frozenset(attention), frozenset((aten.mm.default, aten.addmm.default, aten.bmm.default, aten._scaled_mm.default))


def selective_contexts() -> Any:
    """Keeps attention outputs and every second matrix product; everything else is computed again in backward."""
    attention, products = _kept_operations()
    count = {"forward": 0, "recompute": 0}

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation in attention:
            return CheckpointPolicy.MUST_SAVE
        if operation in products:
            phase = "recompute" if context.is_recompute else "forward"
            count[phase] += 1
            return CheckpointPolicy.MUST_SAVE if count[phase] % 2 else CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _options(mode: str) -> dict[str, Any]:
    return {"use_reentrant": False} | ({"context_fn": selective_contexts} if mode == "selective" else {})


def set_activation_checkpointing(model: Any, mode: str, host: HostActivations | None = None) -> None:
    """Turns activation checkpointing "none", "selective" or "full" on the model's blocks, by transformers' own switch.

    Args:
        host: what checkpointing keeps of a block's input waits there.

    Raises:
        UserError: the architecture does not support it.
    """
    function: Callable[..., Any] = functools.partial(checkpoint, **_options(mode))
    if host is not None:
        function = functools.partial(_checkpointed_on_host, host, function)
    try:
        model._set_gradient_checkpointing(enable=mode != "none", gradient_checkpointing_func=function)
    except ValueError:
        if mode != "none":
            raise user_error("--activation_checkpointing", f"{type(model).__name__} does not support it", "use none") from None


def _checkpointed_on_host(host: HostActivations, function: Callable[..., Any], block: Callable[..., Any], *args: Any) -> Any:
    return host.call(functools.partial(function, block), *args)


def compile_backend(args: ModelArguments, device: torch.device) -> str | None:
    """The backend that `--torch_compile` means here; None for no compiling.

    Raises:
        UserError: it was asked for and cannot run here.
    """
    if args.no_custom_kernels or args.torch_compile is False or (args.torch_compile is None and device.type != "cuda"):
        return None
    if args.use_liger_kernel and not args.torch_compile:
        # Liger's kernels write into their inputs, which the compiler does not see: measured, gradients were wrong, losses were not.
        return None
    backend = args.torch_compile_backend or "inductor"
    missing = missing_for_compile(device.type) if backend == "inductor" else None
    if missing is None:
        return backend
    if args.torch_compile:
        raise user_error("--torch_compile", missing, "install it, or leave --torch_compile out")
    log.warning("layers are not compiled: %s", missing)
    return None


class Blocks:
    """The blocks of a model that an engine has filled and wrapped.

    Args:
        backend: of torch.compile; None leaves the blocks as they are.
    """

    def __init__(self, model: Any, backend: str | None = None) -> None:
        self.model, self.backend = model, backend
        # A forward of the instance's own is somebody's wrapper, and stays.
        self.units = [unit for _, unit in layer_units(model) if "forward" not in vars(unit)]
        self.mode = "none"
        self.made: dict[tuple[Any, str], Compiled] = {}
        self.host: HostActivations | None = None

    @property
    def is_compiled(self) -> bool:
        return self.backend is not None and bool(self.units)

    def set_checkpointing(self, mode: str, offload: bool = False) -> None:
        """ "none", "selective" or "full", from the next forward on.

        Args:
            offload: the inputs of blocks, which checkpointing keeps, wait in host memory for their backward.

        Raises:
            UserError: the architecture does not support it.
        """
        self.mode = mode
        self.host = HostActivations(next(self.model.parameters()).device) if offload and mode != "none" else None
        if not self.is_compiled:
            set_activation_checkpointing(self.model, mode, self.host)
            return
        # Inside the compiled code, where the compiler sees what is kept; transformers' own switch would be outside.
        set_activation_checkpointing(self.model, "none")
        for unit in self.units:
            function = _own_forward(unit)
            if (function, mode) not in self.made:
                self.made[function, mode] = self._compiled(function, mode, type(unit).__name__)
            forward: Callable[..., Any] = self.made[function, mode]
            if self.host is not None:
                forward = functools.partial(self.host.call, forward)
            unit.forward = types.MethodType(forward, unit)

    def _compiled(self, function: Callable[..., Any], mode: str, name: str) -> Compiled:
        assert self.backend is not None
        options = _options(mode)

        def checkpointed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return checkpoint(functools.partial(function, module), *args, **options, **kwargs)

        return Compiled(function if mode == "none" else checkpointed, name, backend=self.backend, on_failure=self._run_as_they_are)

    @contextlib.contextmanager
    def uncompiled(self) -> Iterator[None]:
        """Inside, for forwards without gradients, the blocks run as they are: what runs once is not worth compiling."""
        forwards = {unit: unit.__dict__.pop("forward") for unit in self.units if "forward" in vars(unit)}
        try:
            yield
        finally:
            for unit, forward in forwards.items():
                unit.forward = forward

    def _run_as_they_are(self) -> None:
        """All blocks go back, also those that had compiled: half a model compiled would be neither fast nor simple to look into."""
        self.backend = None
        for unit in self.units:
            unit.__dict__.pop("forward", None)
        set_activation_checkpointing(self.model, self.mode, self.host)


def _own_forward(unit: nn.Module) -> Callable[..., Any]:
    """The block class's forward without transformers' checkpointing around it; blocks of one class share it."""
    function: Callable[..., Any] = type(unit).forward
    while getattr(getattr(function, "__code__", None), "co_name", "") == _HF_WRAPPER:
        function = function.__wrapped__  # type: ignore[attr-defined]
    return function
