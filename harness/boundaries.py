"""Where the parts of a placed model meet: what crosses to another device, and where the autograd graph of a micro-batch is cut.

A micro-batch's forward is a row of stretches, each on one device without a break. What crosses into a stretch is copied as a new leaf, and
its gradient is copied back and handed to the stretch that made it, which is not always the one before: the encoder's output goes to every
later device, and a map may come back to a device. Which stretch made a tensor is told by autograd's own numbers, which grow in the thread
of a forward. Modules carry no per-call hooks besides one check of the device at the parts of the map.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from harness.model_units import device_of, find_units
from harness.partition import Device

# ------------------------------------------------------------------------------------------------------------------- copies


class CpuCopies:
    """Copies between places of one host, for maps whose places are only labels."""

    def __init__(self) -> None:
        self.num_copies = 0

    def start(self, tensor: Tensor, device: Device) -> tuple[Tensor, Any]:
        self.num_copies += 1
        return tensor.detach().clone(), None

    def finish(self, tensor: Tensor, event: Any) -> None:
        return None

    def device_of(self, tensor: Tensor) -> Device | None:
        """Where a tensor is; labels of one host do not show."""
        return None


class CudaCopies:
    """Copies between cards, on a stream of their own for each card.

    PyTorch's copy waits for what the current streams of both sides have queued. On the computing streams the sender would wait for
    the receiver's whole queue, which is what a pipeline must not do.
    """

    def __init__(self) -> None:
        self.num_copies = 0
        self._streams: dict[int, torch.cuda.Stream] = {}

    def _stream(self, index: int) -> torch.cuda.Stream:
        if index not in self._streams:
            self._streams[index] = torch.cuda.Stream(index)
        return self._streams[index]

    def start(self, tensor: Tensor, device: Device) -> tuple[Tensor, Any]:
        """Begins a copy once what is queued before it on the sender's stream has run; the receiver does not wait yet."""
        self.num_copies += 1
        assert isinstance(device, int)
        tensor = tensor.detach()
        there = self._stream(device)
        if tensor.device.type == "cpu":
            with torch.cuda.stream(there):
                result = tensor.to(torch.device("cuda", device), non_blocking=True)
        else:
            here = self._stream(tensor.device.index)
            here.wait_stream(torch.cuda.current_stream(tensor.device))
            with torch.cuda.stream(here), torch.cuda.stream(there):
                result = torch.empty_like(tensor, device=torch.device("cuda", device))
                result.copy_(tensor, non_blocking=True)
            tensor.record_stream(here)
        event = torch.cuda.Event()
        event.record(there)
        return result, event

    def finish(self, tensor: Tensor, event: Any) -> None:
        """Lets the receiver's computation use the copy: from here on its stream waits for it, if there is an event."""
        if event is None:
            return
        stream = torch.cuda.current_stream(tensor.device)
        stream.wait_event(event)
        tensor.record_stream(stream)

    def device_of(self, tensor: Tensor) -> Device | None:
        return tensor.device.index if tensor.device.type == "cuda" else "cpu"


# ----------------------------------------------------------------------------------------------------------------- boundaries

here = threading.local()  # .passage: the micro-batch whose forward runs in this thread


class Boundaries:
    """Makes a placed model ask its micro-batch before every part of the map: "am I on the right device?"

    The parts' classes are replaced by subclasses of the same name whose `__call__` asks first: outside of activation checkpointing, so that
    what is kept for backward is already on the part's own device. Parameters, their names and `isinstance` stay as they are.

    Args:
        model: placed, its parts on the devices of the map.
        device_map: device by module, complete.
        blocks_at_once: blocks of one device between two pauses; 0 for all.
    """

    def __init__(self, model: Any, device_map: Mapping[str, Device], copies: Any, blocks_at_once: int) -> None:
        self.copies = copies
        self._names = {id(module): name for name, module in model.named_modules()}
        self._map = dict(device_map)
        self._changed: list[nn.Module] = []
        self._classes: dict[tuple[type, Any], type] = {}
        self.input_device = self._device_of(model.get_input_embeddings())
        head = model.get_output_embeddings()
        self.head_device = self.input_device if head is None else self._device_of(head)
        head_work = 0.0
        run: tuple[Device, int] = ("", 0)  # the last block's device, and how many blocks it had by then
        for unit in find_units(model):
            device = device_of(device_map, unit.names[0])
            assert device is not None, f"{unit.names[0]} is not in the map"
            parts = [model.get_submodule(name) for name in unit.names]
            if unit.is_block:
                run = (device, run[1] + 1 if run[0] == device else 1)
            elif any(part is head for part in parts):
                head_work = unit.work
            begins = unit.is_block and blocks_at_once > 0 and run[1] > 1 and (run[1] - 1) % blocks_at_once == 0
            has_weights = any(True for part in parts for _ in part.parameters())
            for part in parts:
                self._wrap(part, _entering if has_weights else _following, _Part(device, unit.work if unit.is_block else 0.0, begins))
        # The loss may use the head's weight without calling the head: what the decoder puts out goes to the head's device.
        decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
        if decoder is not None and decoder is not model:
            self._wrap(decoder, _leaving, _Part(self.head_device, head_work))

    def _device_of(self, module: nn.Module) -> Device:
        device = device_of(self._map, self._names[id(module)])
        assert device is not None
        return device

    def _wrap(self, module: nn.Module, make: Callable[[Any], Callable[..., Any]], part: _Part) -> None:
        """Gives a module a class whose `__call__` is made of its own class's; modules of one class share it, and so their compiled code."""
        inner = type(module)
        if (inner, make) not in self._classes:
            names = {"__call__": make(inner), "__module__": inner.__module__, "__qualname__": inner.__qualname__}
            self._classes[inner, make] = type(inner.__name__, (inner,), names)
        module.__dict__[_PART] = part
        module.__class__ = self._classes[inner, make]
        self._changed.append(module)

    def remove(self) -> None:
        """Gives the modules their own classes back."""
        for module in reversed(self._changed):
            module.__class__ = type(module).__mro__[1]
            del module.__dict__[_PART]
        self._changed.clear()


@dataclasses.dataclass(frozen=True)
class _Part:
    """Where a part is, the relative time of its forward, and whether a new stretch begins with it on the same device too."""

    device: Device
    cost: float = 0.0
    begins: bool = False


_PART = "_pipeline_part"


def _entering(inner: Any) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        passage = getattr(here, "passage", None)
        if passage is not None:
            args, kwargs = passage.enter(self.__dict__[_PART], args, kwargs)
        return inner.__call__(self, *args, **kwargs)

    return call


def _following(inner: Any) -> Callable[..., Any]:
    """A part without weights (rotary tables) is asked where it is, without a pause: it has no work to schedule."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(here, "passage", None) is not None:
            device = self.__dict__[_PART].device
            args, kwargs = tree_map(lambda value: _to_card(value, device) if isinstance(value, Tensor) else value, (args, kwargs))
        return inner.__call__(self, *args, **kwargs)

    return call


def _leaving(inner: Any) -> Callable[..., Any]:
    """What a module puts out first goes on to the part's device."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = inner.__call__(self, *args, **kwargs)
        passage = getattr(here, "passage", None)
        if passage is None:
            return output
        (hidden,), _ = passage.enter(self.__dict__[_PART], (output[0],), {})
        if isinstance(output, tuple):
            return (hidden, *output[1:])
        output[next(iter(output.keys()))] = hidden
        return output

    return call


def _to_card(tensor: Tensor, device: Device) -> Tensor:
    """A tensor on a card, within the autograd graph; labels of one host are no cards."""
    return tensor.to(torch.device("cuda", device), non_blocking=True) if isinstance(device, int) else tensor


@dataclasses.dataclass
class _Stretch:
    """What one micro-batch does on one device without a break.

    Attributes:
        first_node: autograd's number of the first operation in it; those of a thread grow by one from each to the next.
        crossings: (number of the stretch that made it, tensor there, its leaf here), of what needs gradients.
        cost: relative time of its forward.
        returned: (tensor made here, its gradient from a later stretch, event of the copy).
    """

    device: Device
    first_node: int
    crossings: list[tuple[int, Tensor, Tensor]] = dataclasses.field(default_factory=list)
    cost: float = 0.0
    returned: list[tuple[Tensor, Tensor, Any]] = dataclasses.field(default_factory=list)


class Passage:
    """One micro-batch on its way.

    Args:
        pause: called with the next device wherever the forward would enter it.
        cut: cut the autograd graph there; otherwise it is one graph over all devices.
    """

    def __init__(self, boundaries: Boundaries, pause: Callable[[Device], None] | None, cut: bool) -> None:
        self.copies = boundaries.copies
        self.pause, self.cut = pause, cut
        self.stretches = [_Stretch(boundaries.input_device, 0)]
        self._current: Device | None = None  # in the thread of the forward
        self._moved: dict[tuple[int, Device], tuple[Tensor, Tensor]] = {}  # the first of each pair is kept: its id must stay its own
        self._made_in: dict[int, int] = {}  # stretch by id of a leaf that was made at its beginning

    def enter(self, part: _Part, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of a part, on its device; on another device than before, or where a new stretch begins, a pause comes first."""
        device, before = part.device, self.stretches[-1].device
        opens = self.cut and (part.begins or device != before)
        if opens:
            self.stretches.append(_Stretch(device, torch.autograd._get_sequence_nr()))
        started: list[tuple[Tensor, Any]] = []

        def place(value: Any) -> Any:
            return self._place(value, device, before, started) if isinstance(value, Tensor) else value

        args, kwargs = tree_map(place, args), tree_map(place, kwargs)
        if opens and self.pause is not None:
            self.pause(device)
        for copy, event in started:
            self.copies.finish(copy, event)
        self.stretches[-1].cost += part.cost
        if device != self._current and isinstance(self.copies, CudaCopies):
            torch.cuda.set_device(device)  # kernels written in Triton run on the current device, not on their tensors'
        self._current = device
        return args, kwargs

    def _place(self, value: Tensor, device: Device, before: Device, started: list[tuple[Tensor, Any]]) -> Tensor:
        """An argument where the part can use it, cut off from the stretch that made it."""
        if (known := self._moved.get((id(value), device))) is not None:
            return known[1]  # a leaf, which later stretches may use too: its gradient is complete when its own stretch goes backward
        if not self.cut:
            if (moved := _to_card(value, device)) is not value:
                self._moved[id(value), device] = (value, moved)
            return moved
        maker = self._maker(value)
        where = self.copies.device_of(value)
        if where is None:  # a label: of the stretch that made it, and what needs no gradient has come along with the rest
            where = before if maker is None else self.stretches[maker].device
        now = len(self.stretches) - 1
        if where == device and (maker is None or maker == now or value.grad_fn is None):
            return value
        if maker == now:
            return _to_card(value, device)
        if where == device:
            copy = value.detach()
        else:
            copy, event = self.copies.start(value, device)
            started.append((copy, event))
        if maker is not None:
            copy.requires_grad_(True)
            self.stretches[now].crossings.append((maker, value, copy))
            self._made_in[id(copy)] = now
        self._moved[(id(value), device)] = (value, copy)
        return copy

    def _maker(self, value: Tensor) -> int | None:
        """The stretch in whose part of the autograd graph a tensor hangs; None where it needs no gradient."""
        if not value.requires_grad or not torch.is_grad_enabled():
            return None
        if value.grad_fn is None:  # a leaf of an earlier boundary; else a weight, which takes gradients at any time
            return self._made_in.get(id(value), 0)
        number = value.grad_fn._sequence_nr()
        return next((index for index in range(len(self.stretches) - 1, 0, -1) if self.stretches[index].first_node <= number), 0)

    def end_forward(self) -> None:
        """Lets go of what only the forward asks for; what backward needs is in the crossings and the graph, and goes stretch by stretch."""
        self._moved.clear()
        self._made_in.clear()

    def close(self) -> None:
        """Lets go of every tensor, and of the micro-batch, which would otherwise wait for the garbage collector together."""
        self.pause = None
        self.stretches.clear()
        self._moved.clear()

    def backward(self, index: int, loss: Tensor | None) -> None:
        """Backward of one stretch; the gradients of its leaves start on their way to the stretches that made what they are copies of."""
        stretch = self.stretches[index]
        roots: list[Tensor] = [] if loss is None else [loss]
        gradients: list[Tensor | None] = [None] * len(roots)
        for source, gradient, event in stretch.returned:
            self.copies.finish(gradient, event)
            roots.append(source)
            gradients.append(gradient)
        stretch.returned = []
        if roots:  # none where everything before the boundary is frozen
            torch.autograd.backward(roots, gradients)
        for maker, source, copy in stretch.crossings:
            if copy.grad is None:
                continue
            place = self.copies.device_of(source)
            place = self.stretches[maker].device if place is None else place
            back, event = (copy.grad, None) if place == stretch.device else self.copies.start(copy.grad, place)
            self.stretches[maker].returned.append((source, back, event))
            copy.grad = None
        stretch.crossings = []
