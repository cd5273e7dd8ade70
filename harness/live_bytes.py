"""A meter of living tensors: what a step keeps at every moment, followed operation by operation under fake tensors."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

_ROUNDING_BYTES = 512  # what CUDA's caching allocator rounds every block to
_aten = torch.ops.aten


class LiveBytes(TorchDispatchMode):
    """Records the bytes of all living storages after every allocation, and counts FLOPs.

    torch's own trackers (`torch.distributed._tools`) report peaks per module; here the whole trace is wanted, and every allocation as a
    constant or a share per sample. With a number of samples that is a large prime, one step tells them apart: what the prime divides is
    there once for each sample.

    Args:
        num_experts: of the model; torch's grouped product does not show it in the shapes of a weight gradient.
        in_place_shape: gradients of this shape are added up as autograd does it with real tensors: the first two into a new one (the
            first is a view of a transposed product), all others into that one. With fake ones it would make a new one each time.
        samples: of the step, if it is to be told apart what is there for each of them; a large prime. 0 takes everything as it is.

    Attributes:
        live, live_per_sample: bytes alive now; with n samples `live + n * live_per_sample`.
        flops, flops_per_sample: so far.
        trace, trace_per_sample: bytes alive after each allocation.
        marks: name -> (live bytes, allocations so far, FLOPs so far); marks_per_sample: name -> (live bytes, FLOPs so far) a sample.
        is_mixed: an allocation may be neither: larger than a sample's share could be by rounding, no multiple of the samples, and not
            of the size of a parameter. What was found with this number of samples does not hold for another.
    """

    def __init__(self, num_experts: int = 1, in_place_shape: torch.Size | None = None, samples: int = 0) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.in_place_shape = in_place_shape
        self.samples = samples
        self.live = self.live_per_sample = 0
        self.flops = self.flops_per_sample = 0
        self.trace: list[int] = []
        self.trace_per_sample: list[int] = []
        self.marks: dict[str, tuple[int, int, int]] = {}
        self.marks_per_sample: dict[str, tuple[int, int]] = {}
        self.is_mixed = False
        self._sizes_of_parameters: set[int] = set()
        self._num_gradient_sums = 0
        self._seen: dict[int, Any] = {}
        self._ignored: list[Any] = []

    def ignore(self, tensor: torch.Tensor) -> None:
        """Leaves a tensor out (parameters: the engines account for them)."""
        storage = tensor.untyped_storage()
        self._ignored.append(storage)
        self._seen[id(storage)] = None
        self._sizes_of_parameters |= {tensor.numel() * size for size in (1, 2, 4, 8)}

    def mark(self, name: str) -> None:
        self.marks[name] = (self.live, len(self.trace), self.flops)
        self.marks_per_sample[name] = (self.live_per_sample, self.flops_per_sample)

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._seen:
            return
        fixed, share = self._parts(storage.nbytes())

        def gone(_: Any) -> None:
            self.live -= fixed
            self.live_per_sample -= share
            del self._seen[key]

        self._seen[key] = weakref.ref(storage, gone)
        self.live += fixed
        self.live_per_sample += share
        self.trace.append(self.live)
        self.trace_per_sample.append(self.live_per_sample)

    def _parts(self, num_bytes: int) -> tuple[int, int]:
        """(constant, share per sample) of an allocation; exact for one sample, and for more where the share needs no rounding."""
        share, rest = divmod(num_bytes, self.samples) if self.samples else (0, num_bytes)
        if rest:
            self.is_mixed |= 0 < self.samples * _ROUNDING_BYTES < num_bytes and num_bytes not in self._sizes_of_parameters
            share = 0
        one = share or num_bytes
        return -(-one // _ROUNDING_BYTES) * _ROUNDING_BYTES - share, share

    def _count(self, flops: int) -> None:
        share, rest = divmod(flops, self.samples) if self.samples else (0, flops)
        if rest:
            self.flops += flops
        else:
            self.flops_per_sample += share

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten._grouped_mm.default:
            out = self._grouped_mm(args[0], args[1])
            self._count(2 * args[0].shape[-2] * args[0].shape[-1] * args[1].shape[-1])
        elif func is _aten.add.Tensor and self._adds_in_place(args):
            out = args[0].add_(args[1])
        else:
            out = func(*args, **kwargs)
            self._count(_flops(func, args, kwargs, out))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf)
        return out

    def _adds_in_place(self, args: Any) -> bool:
        shape = self.in_place_shape
        if shape is None or not isinstance(args[1], torch.Tensor) or not args[0].shape == args[1].shape == shape:
            return False
        self._num_gradient_sums += 1
        return self._num_gradient_sums > 1

    def _grouped_mm(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Shape of torch's grouped product: its own shape function refuses float32, which the CUDA kernel takes."""
        if a.dim() == 2 and b.dim() == 2:
            return a.new_empty((self.num_experts, a.shape[0], b.shape[1]))
        return a.new_empty((*a.shape[:-1], b.shape[-1]) if b.dim() == 3 else (a.shape[1], b.shape[-1]))


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    name = func._schema.name
    if "_scaled_dot_product_flash_attention_for_cpu" in name:  # not in torch's own table
        backward = name.endswith("backward")
        query, key = args[1:3] if backward else args[:2]
        causal = args[7] if backward else (args[4] if len(args) > 4 else kwargs.get("is_causal", False))
        batch, heads, length, head_dim = query.shape
        product = 2 * batch * heads * length * key.shape[2] * head_dim
        return (5 if backward else 2) * product // (2 if causal else 1)
    counter = flop_registry.get(func._overloadpacket)
    return int(counter(*args, **kwargs, out_val=out)) if counter else 0
