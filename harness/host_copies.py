"""Copies of tensors in host memory that training cannot change any more, made fast.

A copy from a GPU to ordinary host memory goes through a small staging buffer of the driver, and first touches of new memory cost as much
again: about 1 GB/s together. Page-locked memory that is allocated once takes what the bus gives.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

log = logging.getLogger("harness")
_PAGE_BYTES = 4096


def register_memory(slab: np.ndarray) -> bool:
    """Page-locks a block of host memory for the GPU driver. False where that is not allowed (a limit on locked memory)."""
    portable = 1
    return int(torch.cuda.cudart().cudaHostRegister(slab.ctypes.data, slab.nbytes, portable)) == 0


def _unregister(slab: np.ndarray) -> None:
    torch.cuda.cudart().cudaHostUnregister(slab.ctypes.data)


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


class HostCopies:
    """Keeps one page-locked block of host memory per key and copies into it; tensors on the CPU alone are simply cloned.

    The copies of a key are overwritten by the key's next copy: whoever reads them must be done by then.
    """

    def __init__(self) -> None:
        self.slabs: dict[str, np.ndarray] = {}
        self.locked: set[str] = set()
        self.stream: torch.cuda.Stream | None = None

    def copy(self, key: str, tree: Any) -> Any:
        """A tree with every tensor in host memory, in a storage of its own; other leaves as they are.

        Tensors that are the same memory (tied weights) become one copy.
        """
        # A shape is a value: taken apart it would come back as a plain tuple, which readers of checkpoints do not take.
        leaves, structure = tree_flatten(tree, is_leaf=lambda item: isinstance(item, torch.Size))
        tensors = {_identity(leaf): leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)}
        if any(tensor.is_cuda for tensor in tensors.values()):
            copies = self._copy_fast(key, tensors)
        else:
            copies = {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
        return tree_unflatten([copies[_identity(leaf)] if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure)

    def _copy_fast(self, key: str, tensors: dict[Any, Tensor]) -> dict[Any, Tensor]:
        buffers = self._buffers(key, list(tensors.values()))
        if self.stream is None:
            self.stream = torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for buffer, tensor in zip(buffers, tensors.values(), strict=True):
                buffer.copy_(tensor, non_blocking=True)
        self.stream.synchronize()
        return dict(zip(tensors, buffers, strict=True))

    def _buffers(self, key: str, tensors: list[Tensor]) -> list[Tensor]:
        """A host tensor for each, cut from the key's block at page borders; each a storage of its own, since files hold whole storages."""
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        starts = np.cumsum([0, *(-(-size // _PAGE_BYTES) * _PAGE_BYTES for size in sizes)])
        slab = self._slab(key, int(starts[-1]))
        buffers = []
        for start, size, tensor in zip(starts, sizes, tensors, strict=False):
            if size == 0:
                buffers.append(torch.empty(tensor.shape, dtype=tensor.dtype))
            else:
                buffers.append(torch.from_numpy(slab[start : start + size]).view(tensor.dtype).view(tensor.shape))
        return buffers

    def _slab(self, key: str, num_bytes: int) -> np.ndarray:
        slab = self.slabs.get(key)
        if slab is None or slab.nbytes < num_bytes:
            self._drop(key)
            slab = self.slabs[key] = np.empty(max(num_bytes, 1), dtype=np.uint8)
            if register_memory(slab):
                self.locked.add(key)
            else:
                log.warning("%.2f GiB of host memory cannot be page-locked (see ulimit -l): saving stands still longer", num_bytes / 2**30)
        return slab

    def _drop(self, key: str) -> None:
        slab = self.slabs.pop(key, None)
        if slab is not None and key in self.locked:
            self.locked.discard(key)
            _unregister(slab)

    def close(self) -> None:
        """Gives the memory back."""
        for key in list(self.slabs):
            self._drop(key)
