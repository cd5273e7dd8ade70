"""Copies of a rank's state in host memory that outlive its process: where a life goes on that was started again.

Each rank copies its shards every `--snapshot_steps` optimizer steps into memory that its guard keeps (a memfd: it is no file anywhere, and
is gone with the guard). Two buffers take turns, so that one is whole at any moment; the next life takes the newest step that all ranks have
whole. On a GPU the buffers are page-locked, so a copy runs at the speed of the bus.
"""

from __future__ import annotations

import io
import logging
import mmap
import os
import struct
import time
import zlib
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from harness import checkpoint_files, guard_line
from harness.coordination import Coordinator
from harness.host_copies import register_memory
from harness.machine import free_host_bytes

log = logging.getLogger("harness")

_HEAD = struct.Struct("<8sqqqI")  # magic, step, place and length of the description, its checksum
_MAGIC = b"harness1"
_PAGE = 4096
NUM_BUFFERS = 2
# Of the memory that is free on the host, what snapshots of all its ranks may take.
SHARE_OF_FREE = 0.6


class HasState(Protocol):
    """What a snapshot needs of an engine."""

    def snapshot_state(self) -> Any:
        """This rank's state as a tree of tensors and plain values; called on all ranks. Nothing is copied yet."""

    def load_snapshot(self, state: Any) -> None:
        """Takes over what an engine of the same layout gave; called on all ranks."""


class Buffer:
    """One snapshot in a memory file: a page with where things are, the tensors, and a description of the tree."""

    def __init__(self, name: str, descriptor: int | None = None) -> None:
        self.name, self.descriptor = name, descriptor
        self.memory: mmap.mmap | None = None
        if descriptor is not None:
            self._map(os.fstat(descriptor).st_size)

    def _map(self, size: int) -> None:
        assert self.descriptor is not None
        self.memory = mmap.mmap(self.descriptor, size)
        self.bytes = np.frombuffer(self.memory, dtype=np.uint8)

    def _make(self, size: int) -> None:
        """New memory of at least `size` bytes, kept by the guard from now on; the old is given back."""
        old, self.descriptor = self.descriptor, os.memfd_create(self.name)
        os.ftruncate(self.descriptor, size)
        if old is not None:
            os.close(old)
        self._map(size)
        guard_line.hold(self.name, self.descriptor)
        if torch.cuda.is_available():
            register_memory(self.bytes)

    def step(self) -> int | None:
        """The step it holds whole; None for none."""
        if self.memory is None:
            return None
        magic, step, place, length, checksum = _HEAD.unpack_from(self.memory, 0)
        if magic != _MAGIC or place + length > len(self.memory):
            return None
        return int(step) if zlib.crc32(self.memory[place : place + length]) == checksum else None

    def write(self, step: int, state: Any, content: Any) -> int:
        """Copies a state here. Returns its size in bytes.

        Args:
            content: plain values beside it.
        """
        leaves, structure = tree_flatten(state, is_leaf=lambda item: isinstance(item, torch.Size))
        tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)]
        starts, end = [], _PAGE
        for tensor in tensors:
            starts.append(end)
            end += -(-tensor.numel() * tensor.element_size() // _PAGE) * _PAGE
        places = iter(zip(starts, tensors, strict=True))
        described = [_Place(next(places)[0], leaf.dtype, tuple(leaf.shape)) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        text = io.BytesIO()
        torch.save({"state": tree_unflatten(described, structure), "content": content}, text)
        description = text.getvalue()
        if self.memory is None or len(self.memory) < end + len(description):
            self._make(end + 2 * len(description) + _PAGE)
        assert self.memory is not None
        self.memory[: _HEAD.size] = bytes(_HEAD.size)  # from here until the end it holds nothing whole
        for start, tensor in zip(starts, tensors, strict=True):
            if tensor.numel():
                self._at(start, tensor.dtype, tuple(tensor.shape)).copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors):
            torch.cuda.synchronize()
        self.memory[end : end + len(description)] = description
        _HEAD.pack_into(self.memory, 0, _MAGIC, step, end, len(description), zlib.crc32(description))
        return end + len(description)

    def read(self) -> tuple[Any, Any]:
        """(state, content); the tensors are this memory, not copies of it."""
        assert self.memory is not None
        _, _, place, length, _ = _HEAD.unpack_from(self.memory, 0)
        # Written by the life before, into memory that only its guard and its children can reach.
        stored = torch.load(io.BytesIO(self.memory[place : place + length]), map_location="cpu", weights_only=False)
        leaves, structure = tree_flatten(stored["state"], is_leaf=lambda item: isinstance(item, (torch.Size, _Place)))
        filled = [self._at(leaf.start, leaf.dtype, leaf.shape) if isinstance(leaf, _Place) else leaf for leaf in leaves]
        return tree_unflatten(filled, structure), stored["content"]

    def _at(self, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if size == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.from_numpy(self.bytes[start : start + size]).view(dtype).view(shape)


class _Place:
    """Where a tensor lies in a buffer."""

    def __init__(self, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.start, self.dtype, self.shape = start, dtype, shape


def state_bytes(state: Any) -> int:
    """Memory of all tensors of a tree."""
    leaves, _ = tree_flatten(state)
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, Tensor))


class Snapshots:
    """The snapshots of one rank.

    Args:
        every_steps: between two; 0 takes none.
        layout: what must be equal in the next life for it to take them over (engine, number of processes).
    """

    def __init__(self, engine: HasState, coordinator: Coordinator, every_steps: int, layout: str) -> None:
        self.engine, self.coordinator, self.layout = engine, coordinator, layout
        self.every_steps = every_steps if guard_line.can_relaunch() else 0
        held = guard_line.held()
        names = [f"harness-snapshot-{number}" for number in range(NUM_BUFFERS)]
        self.buffers = [Buffer(name, held.get(name)) for name in names]
        self.next_buffer = 0
        self.is_checked = False

    def maybe_take(self, step: int, content: Callable[[], dict[str, Any]]) -> None:
        """Takes one when it is due; called on all ranks after an update."""
        if self.every_steps and step % self.every_steps == 0:
            self.take(step, content())

    def take(self, step: int, content: dict[str, Any]) -> bool:
        """Copies this rank's state; called on all ranks at the same step. False where the host has no room for it."""
        started = time.monotonic()
        state = self.engine.snapshot_state()
        if not self._fits(state):
            self.every_steps = 0
            return False
        buffer = self.buffers[self.next_buffer]
        self.next_buffer = (self.next_buffer + 1) % NUM_BUFFERS
        size = buffer.write(step, state, {"layout": self.layout, "trainer": content, "random": checkpoint_files.random_state()})
        log.debug("snapshot of step %d: %.3f GiB in %.2f s", step, size / 2**30, time.monotonic() - started)
        return True

    def _fits(self, state: Any) -> bool:
        if self.is_checked:
            return True
        self.is_checked = True
        node_bytes = NUM_BUFFERS * state_bytes(state) * self.coordinator.num_local_processes
        free = free_host_bytes() + sum(len(buffer.memory) for buffer in self.buffers if buffer.memory is not None)
        lacks = self.coordinator.max([float(node_bytes > SHARE_OF_FREE * free)], "room for snapshots")[0]
        text = (
            f"snapshots in host memory every {self.every_steps} steps: {node_bytes / 2**30:.2f} GiB a node of {free / 2**30:.2f} GiB free"
        )
        log.info("%s%s", text, "; that is too much, so there are none: a new start goes on from the last checkpoint" if lacks else "")
        return not lacks

    def newest(self) -> int | None:
        """The newest step that all ranks hold whole, of a life with this layout; called on all ranks."""
        own = [buffer.step() for buffer in self.buffers]
        everybody = self.coordinator.gather([step for step in own if step is not None])
        common = set(everybody[0]).intersection(*everybody[1:])
        if not common:
            return None
        step = max(common)
        same = self._buffer_of(step).read()[1]["layout"] == self.layout
        return step if all(self.coordinator.gather(same)) else None

    def _buffer_of(self, step: int) -> Buffer:
        return next(buffer for buffer in self.buffers if buffer.step() == step)

    def load(self, step: int) -> dict[str, Any]:
        """Restores engine and random states; called on all ranks. Returns what was beside them."""
        buffer = self._buffer_of(step)
        state, content = buffer.read()
        self.engine.load_snapshot(state)
        checkpoint_files.restore_random_state(content["random"])
        # The next one goes into the other buffer.
        self.next_buffer = (self.buffers.index(buffer) + 1) % NUM_BUFFERS
        return dict(content["trainer"])
