"""One process, several devices, all of them busy: micro-batches pass through the devices of a map as through a pipeline.

Plain dispatch of a device map (accelerate's hooks) keeps one device busy at a time, because the next micro-batch starts when the
backward of the last one has ended. Here the model's own forward runs unchanged, but it pauses wherever it would enter another device.
A scheduler then decides which paused micro-batch goes on, so that every device receives its work in the order in which it should do
it: backward as soon as it can run, forward otherwise, at most `depth` micro-batches between the two (one forward, one backward, as in
PipeDream-Flush, arXiv:2006.09503; how much it can win: `partition.pipeline_speedup`).

How: each micro-batch's forward runs in a thread beside the others', of which only one runs at any time; at a device's boundary the thread
hands control back. There the autograd graph is cut: what crosses is copied as a new leaf, and its gradient is copied back and handed to
the stretch that made it, which is not always the one before: the encoder's output goes to every later device, and a map may come back
to a device. Which stretch made a tensor is told by autograd's own numbers, which grow in the thread of a forward. Copies run on streams
of their own, so that neither side's computation waits for the other's queue. Modules carry no per-call hooks besides one check of the
device at the blocks. Gradients are those of the plain model: every micro-batch's own backward, in the same order.

A run of many blocks on one device is cut as well, without copies. A card takes about a thousand launches ahead of its work and then
lets the host wait; a host that waits in the middle of a long task lets the other cards run dry.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from harness.model_units import device_of, find_units
from harness.partition import Device, num_tasks_bound

# Backward costs two products where forward costs one; with activation checkpointing the forward is repeated in it.
_BACKWARD_COST = 2.0
_RECOMPUTE_COST = 1.0


# Blocks of a device between two returns to the scheduler: eager forward and backward of four Llama blocks are about 500 launches.
_BLOCKS_AT_ONCE = 4


class _Cancelled(BaseException):
    """Raised inside a paused forward that is given up."""


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

_here = threading.local()  # .passage: the micro-batch whose forward runs in this thread


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
        passage = getattr(_here, "passage", None)
        if passage is not None:
            args, kwargs = passage.enter(self.__dict__[_PART], args, kwargs)
        return inner.__call__(self, *args, **kwargs)

    return call


def _following(inner: Any) -> Callable[..., Any]:
    """A part without weights (rotary tables) is asked where it is, without a pause: it has no work to schedule."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(_here, "passage", None) is not None:
            device = self.__dict__[_PART].device
            args, kwargs = tree_map(lambda value: _to_card(value, device) if isinstance(value, Tensor) else value, (args, kwargs))
        return inner.__call__(self, *args, **kwargs)

    return call


def _leaving(inner: Any) -> Callable[..., Any]:
    """What a module puts out first goes on to the part's device."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = inner.__call__(self, *args, **kwargs)
        passage = getattr(_here, "passage", None)
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


class _Passage:
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
        if not self.cut:
            return _to_card(value, device)
        if (known := self._moved.get((id(value), device))) is not None:
            return known[1]  # a leaf, which later stretches may use too: its gradient is complete when its own stretch goes backward
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


# ------------------------------------------------------------------------------------------------------------------ schedule


class Timeline:
    """The devices' clocks, in relative time: which task could start first if each device did its tasks in the order given."""

    def __init__(self) -> None:
        self.free: dict[Device, float] = {}

    def start(self, device: Device, ready: float) -> float:
        return max(ready, self.free.get(device, 0.0))

    def run(self, device: Device, ready: float, cost: float) -> float:
        """Books a task; returns when it ends."""
        self.free[device] = self.start(device, ready) + cost
        return self.free[device]


class _Worker:
    """A thread that runs one job after the other and is kept: libraries keep plans and handles per thread.

    cuDNN's attention, which PyTorch prefers on Hopper cards, builds its plans anew in every thread that calls it: 0.1 s and more.
    """

    idle: ClassVar[list[_Worker]] = []  # of the whole process; as many as micro-batches were ever between forward and backward

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._done = threading.Semaphore(0)
        threading.Thread(target=self._loop, name="micro-batch", daemon=True).start()

    @classmethod
    def start(cls, job: Callable[[], None]) -> _Worker:
        """Begins a job, which must not raise, in an idle thread or a new one, under the settings of this one (torch.compile has its own)."""
        worker = cls.idle.pop() if cls.idle else cls()
        worker._jobs.put(functools.partial(contextvars.copy_context().run, job))
        return worker

    def _loop(self) -> None:
        while True:
            job = self._jobs.get()
            job()
            del job  # it holds the micro-batch
            self._done.release()

    def join(self) -> None:
        """Waits for the job's end; the thread then holds nothing of it, and takes other jobs."""
        self._done.acquire()
        _Worker.idle.append(self)


os.register_at_fork(after_in_child=_Worker.idle.clear)  # a child has the list, but not the threads


class _MicroBatch:
    """A forward in a thread beside this one that runs only while `resume` is waiting for it."""

    def __init__(self, pipeline: Pipeline, call: Callable[[], Tensor], index: int) -> None:
        self.index, self.ready = index, 0.0
        self.passage = _Passage(pipeline.boundaries, None if pipeline.whole else self._pause, cut=not pipeline.whole)
        self.loss: Tensor | None = None
        self.next_device: Device = pipeline.boundaries.input_device
        self.position = -1  # of the next stretch to go backward; below 0 while still in forward
        self.forward_done = False
        self._call, self._cancelled = call, False
        self._error: BaseException | None = None
        self._go, self._back = threading.Lock(), threading.Lock()  # released by one thread, taken by the other, in turn
        self._go.acquire()
        self._back.acquire()
        self._worker: _Worker | None = _Worker.start(self._run)

    def _run(self) -> None:
        self._go.acquire()
        _here.passage = self.passage
        try:
            if isinstance(self.passage.copies, CudaCopies) and isinstance(self.next_device, int):
                torch.cuda.set_device(self.next_device)  # the thread's last micro-batch ended on another
            if not self._cancelled:
                self.loss = self._call()
        except _Cancelled:
            pass
        except BaseException as error:
            self._error = error
        finally:
            _here.passage = None
            self.forward_done = True
            self._back.release()

    def _pause(self, device: Device) -> None:
        self.next_device = device
        self._back.release()
        self._go.acquire()
        if self._cancelled:
            raise _Cancelled

    def resume(self) -> float:
        """Runs the forward up to the next boundary or its end; returns the stretch's cost."""
        stretch = self.passage.stretches[-1]
        self._go.release()
        self._back.acquire()
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # its traceback holds this frame, and this frame must not hold it: both would keep the failed tensors
        if self.forward_done:
            self._join()
            self.position = len(self.passage.stretches) - 1
            self.next_device = self.passage.stretches[-1].device
        return stretch.cost

    def _join(self) -> None:
        if self._worker is not None:
            self._worker.join()
            self._worker = None

    def cancel(self) -> None:
        self._cancelled = True
        if not self.forward_done:
            self._go.release()
            self._back.acquire()
        self._join()
        self._error = None
        self.close()

    def close(self) -> None:
        self.loss = None
        del self._call
        self.passage.close()

    def backward(self) -> float:
        """Backward of the last stretch that has not had it; returns the stretch's cost."""
        index = self.position
        cost = self.passage.stretches[index].cost
        last = index == len(self.passage.stretches) - 1
        self.passage.backward(index, self.loss if last else None)
        self.loss = None
        self.position -= 1
        if self.position >= 0:
            self.next_device = self.passage.stretches[self.position].device
        return cost


class Pipeline:
    """Runs the micro-batches of a step through a placed model.

    Args:
        model: placed, its parts on the devices of the map.
        device_map: device by module, complete.
        recompute: activation checkpointing is on, so that backward includes a forward; only the schedule asks for it.
        whole: one micro-batch after the other, each as one autograd graph. For losses that are made of more than what the last part
            puts out (a router's loss over all layers), whose graph cannot be cut at the boundaries.
    """

    def __init__(
        self,
        model: Any,
        device_map: Mapping[str, Device],
        *,
        recompute: bool = False,
        whole: bool = False,
        copies: Any = None,
        blocks_at_once: int = _BLOCKS_AT_ONCE,
    ) -> None:
        if copies is None:
            copies = CudaCopies() if any(isinstance(device, int) for device in device_map.values()) else CpuCopies()
        self.boundaries = Boundaries(model, device_map, copies, blocks_at_once)
        self.recompute, self.whole = recompute, whole
        self.order: list[tuple[str, int, Device]] = []

    @property
    def input_device(self) -> Device:
        return self.boundaries.input_device

    @property
    def head_device(self) -> Device:
        return self.boundaries.head_device

    def run(self, losses: Sequence[Callable[[], Tensor]], depth: int = 0) -> list[Tensor]:
        """Forward and backward of every micro-batch; gradients add up in the parameters' `.grad`.

        Args:
            losses: one function a micro-batch, which calls the model and returns the scalar whose gradient is wanted. They run in
                other threads: what is set per thread (autocast, grad mode) they set themselves.
            depth: micro-batches between their forward and their backward at most; 0 for all.

        Returns:
            The detached losses, on the head's device.

        Raises:
            Whatever a forward or backward raised; by then no thread runs any more, and only the gradients are unfinished.
        """
        bound = 1 if self.whole else num_tasks_bound(len(losses), depth)
        timeline = Timeline()
        self.order = []
        results: list[Tensor | None] = [None] * len(losses)
        active: list[_MicroBatch] = []
        waiting = list(enumerate(losses))[::-1]
        current = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        try:
            while active or waiting:
                if waiting and len(active) < bound and self._should_start(timeline, active):
                    index, call = waiting.pop()
                    active.append(_MicroBatch(self, call, index))
                    task = active[-1]
                else:
                    task = min(active, key=lambda one: (timeline.start(one.next_device, one.ready), one.position < 0, one.index))
                self._advance(timeline, task, results)
                if task.forward_done and task.position < 0:
                    active.remove(task)
                    task.close()
        finally:
            for task in active:
                task.cancel()
            active.clear()
            if current is not None:
                torch.cuda.set_device(current)
        return [loss for loss in results if loss is not None]

    def _should_start(self, timeline: Timeline, active: Sequence[_MicroBatch]) -> bool:
        """A new micro-batch begins when nothing that is under way could start as early."""
        new = timeline.start(self.input_device, 0.0)
        return all(timeline.start(one.next_device, one.ready) > new for one in active)

    def _advance(self, timeline: Timeline, task: _MicroBatch, results: list[Tensor | None]) -> None:
        device = task.next_device
        if task.position < 0:
            self.order.append(("forward", task.index, device))
            cost = task.resume()
            if task.forward_done:
                assert task.loss is not None
                results[task.index] = task.loss.detach()
        else:
            self.order.append(("backward", task.index, device))
            cost = task.backward() * (_BACKWARD_COST + (_RECOMPUTE_COST if self.recompute else 0.0))
        task.ready = timeline.run(device, task.ready, cost)

    @contextlib.contextmanager
    def whole_forward(self) -> Iterator[None]:
        """Within, calls of the model in this thread pass through the devices without pauses or cuts: evaluation."""
        current = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        _here.passage = _Passage(self.boundaries, None, cut=False)
        try:
            yield
        finally:
            _here.passage = None
            if current is not None:
                torch.cuda.set_device(current)

    def close(self) -> None:
        """Leaves the model as it was found, its parts where they are."""
        self.boundaries.remove()
