"""What activation checkpointing keeps of each block, its input, waits in host memory between forward and backward.

A copy to the host runs beside the next blocks' forward, the copy back beside the backward of the block above. Only tensors of the
shape of a block's input are moved: weights, masks and what selective checkpointing keeps inside a block stay where they are.

No tensor is given to another stream's keeping (`record_stream`): the host runs far ahead of the device, and memory that is free only when
the device says so would be allocated anew meanwhile. Instead the last inputs are held until the computing stream has been told to wait
for their copies.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Inputs held on the device at once: one is being copied while the next block computes.
_HELD = 2
# Smaller ones are not worth a copy.
_LEAST_BYTES = 2**20


class _Saved:
    """One block's input: on the device, on the host, or on its way."""

    def __init__(self, tensor: Tensor, before: _Saved | None) -> None:
        self.tensor: Tensor | None = tensor
        self.host: Tensor | None = None
        self.event: Any = None
        self.before = None if before is None else weakref.ref(before)  # the graph decides how long a step's inputs live


class HostActivations:
    """Saves the inputs of blocks in host memory.

    Args:
        device: of the blocks. On the CPU the copies are ordinary ones.
        least_bytes: inputs smaller than this stay; default 1 MiB.
    """

    def __init__(self, device: torch.device, least_bytes: int | None = None) -> None:
        self.least_bytes = _LEAST_BYTES if least_bytes is None else least_bytes
        self.on_card = device.type == "cuda"
        self.out = torch.cuda.Stream(device) if self.on_card else None
        self.back = torch.cuda.Stream(device) if self.on_card else None
        self.held: collections.deque[_Saved] = collections.deque()
        self.newest: weakref.ref[_Saved] | None = None
        self.num_saved = self.num_fetched = 0

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`function(*args, **kwargs)`, a block's forward; what it saves of its first tensor's shape goes to the host."""
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        hidden = next(tensors, None)
        if hidden is None or not torch.is_grad_enabled() or hidden.numel() * hidden.element_size() < self.least_bytes:
            return function(*args, **kwargs)
        shape, dtype = hidden.shape, hidden.dtype

        def pack(tensor: Tensor) -> Any:
            moves = tensor.shape == shape and tensor.dtype == dtype and not isinstance(tensor, torch.nn.Parameter)
            return self._save(tensor) if moves else tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
            return function(*args, **kwargs)

    def clear(self) -> None:
        """Lets go of what a step that was given up still holds."""
        self.held.clear()
        self.newest = None

    def _save(self, tensor: Tensor) -> _Saved:
        before = None if self.newest is None else self.newest()
        saved = _Saved(tensor.detach(), before)
        self.newest = weakref.ref(saved)
        self.num_saved += 1
        if self.on_card:
            assert self.out is not None
            current = torch.cuda.current_stream(tensor.device)
            self.out.wait_stream(current)
            with torch.cuda.stream(self.out):
                saved.host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                saved.host.copy_(tensor.detach(), non_blocking=True)
                saved.event = self.out.record_event()
        else:
            saved.host = tensor.detach().clone()
        self.held.append(saved)
        while len(self.held) > _HELD:
            self._let_go(self.held.popleft())
        return saved

    def _let_go(self, saved: _Saved) -> None:
        """The device's copy is free for what the computing stream does from here on."""
        if saved.tensor is not None and saved.event is not None:
            torch.cuda.current_stream(saved.tensor.device).wait_event(saved.event)
        saved.tensor = saved.event = None

    def _fetch(self, saved: _Saved) -> None:
        if saved.tensor is not None:
            return
        assert saved.host is not None
        self.num_fetched += 1
        if not self.on_card:
            saved.tensor = saved.host.clone()
            return
        assert self.back is not None
        saved.tensor = torch.empty(saved.host.shape, dtype=saved.host.dtype, device=self.back.device)
        self.back.wait_stream(torch.cuda.current_stream(self.back.device))  # whoever had that memory before is done with it
        with torch.cuda.stream(self.back):
            saved.tensor.copy_(saved.host, non_blocking=True)
            saved.event = self.back.record_event()

    def _unpack(self, saved: Any) -> Tensor:
        if not isinstance(saved, _Saved):
            return saved  # type: ignore[no-any-return]
        self._fetch(saved)
        tensor = saved.tensor
        assert tensor is not None
        if saved in self.held:  # still here: the last blocks of a forward
            self.held.remove(saved)
        elif saved.event is not None:
            torch.cuda.current_stream(tensor.device).wait_event(saved.event)
        saved.tensor = saved.event = None
        before = None if saved.before is None else saved.before()
        if before is not None and before not in self.held:
            self._fetch(before)
        return tensor
