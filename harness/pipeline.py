"""One process, several devices, all of them busy: micro-batches pass through the devices of a map as through a pipeline.

Plain dispatch of a device map (accelerate's hooks) keeps one device busy at a time, because the next micro-batch starts when the
backward of the last one has ended. Here the model's own forward runs unchanged, but it pauses wherever it would enter another device.
A scheduler then decides which paused micro-batch goes on, so that every device receives its work in the order in which it should do
it: backward as soon as it can run, forward otherwise, at most `depth` micro-batches between the two (one forward, one backward, as in
PipeDream-Flush, arXiv:2006.09503; how much it can win: `partition.pipeline_speedup`).

How: each micro-batch's forward runs in a thread beside the others', of which only one runs at any time; at a device's boundary the thread
hands control back. There the autograd graph is cut: what crosses is copied as a new leaf, and its gradient is copied back and handed to
the stretch before. Copies run on streams of their own, so that neither side's computation waits for the other's queue. Modules carry no
per-call hooks besides one check of the device at the blocks. Gradients are those of the plain model: every micro-batch's own backward, in
the same order.
"""

from __future__ import annotations

import contextlib
import dataclasses
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

    def is_on(self, tensor: Tensor, device: Device) -> bool:
        return True


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
        """Lets the receiver's computation use the copy: from here on its stream waits for it."""
        stream = torch.cuda.current_stream(tensor.device)
        stream.wait_event(event)
        tensor.record_stream(stream)

    def is_on(self, tensor: Tensor, device: Device) -> bool:
        return tensor.device.type == "cuda" and tensor.device.index == device


# ----------------------------------------------------------------------------------------------------------------- boundaries

_here = threading.local()  # .passage: the micro-batch whose forward runs in this thread


class Boundaries:
    """Makes a placed model ask its micro-batch before every part of the map: "am I on the right device?"

    The parts' classes are replaced by subclasses of the same name whose `__call__` asks first: outside of activation checkpointing, so that
    what is kept for backward is already on the part's own device. Parameters, their names and `isinstance` stay as they are.

    Args:
        model: placed, its parts on the devices of the map.
        device_map: device by module, complete.
    """

    def __init__(self, model: Any, device_map: Mapping[str, Device], copies: Any) -> None:
        self.copies = copies
        self._names = {id(module): name for name, module in model.named_modules()}
        self._map = dict(device_map)
        self._changed: list[nn.Module] = []
        units = find_units(model)
        for unit in units:
            device = device_of(device_map, unit.names[0])
            assert device is not None, f"{unit.names[0]} is not in the map"
            for name in unit.names:
                self._wrap(model.get_submodule(name), device, float(unit.weight_bytes) if unit.is_block else 0.0)
        self.input_device = self._device_of(model.get_input_embeddings())
        head = model.get_output_embeddings()
        self.head_device = self.input_device if head is None else self._device_of(head)
        # The loss may use the head's weight without calling the head: what the decoder puts out goes to the head's device.
        decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
        if decoder is not None and decoder is not model:
            cost = 0.0 if head is None else float(sum(tensor.numel() * tensor.element_size() for tensor in head.parameters()))
            self._wrap_output(decoder, self.head_device, cost)

    def _device_of(self, module: nn.Module) -> Device:
        device = device_of(self._map, self._names[id(module)])
        assert device is not None
        return device

    def _wrap(self, module: nn.Module, device: Device, cost: float) -> None:
        inner = type(module)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            passage = getattr(_here, "passage", None)
            if passage is not None:
                args, kwargs = passage.enter(device, cost, args, kwargs)
            return inner.__call__(self, *args, **kwargs)

        self._swap(module, call)

    def _wrap_output(self, module: nn.Module, device: Device, cost: float) -> None:
        inner = type(module)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            output = inner.__call__(self, *args, **kwargs)
            passage = getattr(_here, "passage", None)
            if passage is None:
                return output
            (hidden,), _ = passage.enter(device, cost, (output[0],), {})
            if isinstance(output, tuple):
                return (hidden, *output[1:])
            output[next(iter(output.keys()))] = hidden
            return output

        self._swap(module, call)

    def _swap(self, module: nn.Module, call: Callable[..., Any]) -> None:
        inner = type(module)
        names = {"__call__": call, "__module__": inner.__module__, "__qualname__": inner.__qualname__}
        module.__class__ = type(inner.__name__, (inner,), names)
        self._changed.append(module)

    def remove(self) -> None:
        """Gives the modules their own classes back."""
        for module in reversed(self._changed):
            module.__class__ = type(module).__mro__[1]
        self._changed.clear()


@dataclasses.dataclass
class _Stretch:
    """What one micro-batch does on one device without a break.

    Attributes:
        crossings: (tensor before the boundary, its copy here), of what needs gradients.
        cost: relative time of its forward.
    """

    device: Device
    crossings: list[tuple[Tensor, Tensor]] = dataclasses.field(default_factory=list)
    cost: float = 0.0
    returned: list[tuple[Tensor, Tensor, Any]] = dataclasses.field(default_factory=list)


class _Passage:
    """One micro-batch on its way. `pause` is called with the next device wherever the forward would enter it."""

    def __init__(self, boundaries: Boundaries, pause: Callable[[Device], None] | None, cut: bool) -> None:
        self.copies = boundaries.copies
        self.pause, self.cut = pause, cut
        self.stretches = [_Stretch(boundaries.input_device)]
        self._current: Device | None = None  # in the thread of the forward
        self._moved: dict[tuple[int, Device], tuple[Tensor, Tensor]] = {}  # the first of each pair is kept: its id must stay its own

    def enter(self, device: Device, cost: float, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of a part, on its device; on another device than before, a pause comes first."""
        crosses = device != self.stretches[-1].device
        if crosses:
            self.stretches.append(_Stretch(device))
        started: list[tuple[Tensor, Any]] = []

        def place(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            known = self._moved.get((id(value), device))
            if known is not None:
                return known[1]
            # What needs gradients is cut off even where a ring comes back to its device; labels of one host cannot tell what is where.
            stays = not crosses or (isinstance(self.copies, CudaCopies) and not value.requires_grad)
            if stays and self.copies.is_on(value, device):
                return value
            return self._move(value, device, started)

        args, kwargs = tree_map(place, args), tree_map(place, kwargs)
        if crosses and self.pause is not None:
            self.pause(device)
        for copy, event in started:
            self.copies.finish(copy, event)
        self.stretches[-1].cost += cost
        if device != self._current and isinstance(self.copies, CudaCopies):
            torch.cuda.set_device(device)  # kernels written in Triton run on the current device, not on their tensors'
        self._current = device
        return args, kwargs

    def _move(self, value: Tensor, device: Device, started: list[tuple[Tensor, Any]]) -> Tensor:
        if self.cut:
            copy, event = self.copies.start(value, device)
            started.append((copy, event))
            if value.requires_grad and torch.is_grad_enabled():
                copy.requires_grad_(True)
                self.stretches[-1].crossings.append((value, copy))
        else:
            copy = value if not isinstance(device, int) else value.to(torch.device("cuda", device), non_blocking=True)
        self._moved[(id(value), device)] = (value, copy)
        return copy

    def close(self) -> None:
        """Lets go of every tensor, and of the micro-batch, which would otherwise wait for the garbage collector together."""
        self.pause = None
        self.stretches.clear()
        self._moved.clear()

    def backward(self, index: int, loss: Tensor | None) -> None:
        """Backward of one stretch; its copies' gradients start on their way to the stretch before."""
        if loss is not None:
            torch.autograd.backward([loss])
        else:
            roots = self.stretches[index + 1].returned
            for _, gradient, event in roots:
                self.copies.finish(gradient, event)
            if roots:  # none where everything before the boundary is frozen
                torch.autograd.backward([source for source, _, _ in roots], [gradient for _, gradient, _ in roots])
            self.stretches[index + 1].returned = []
        stretch = self.stretches[index]
        for source, copy in stretch.crossings:
            if copy.grad is None:
                continue
            back = self.stretches[index - 1].device
            gradient, event = self.copies.start(copy.grad, back)
            stretch.returned.append((source, gradient, event))
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
        """Begins a job, which must not raise, in an idle thread or a new one."""
        worker = cls.idle.pop() if cls.idle else cls()
        worker._jobs.put(job)
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
        self.passage = _Passage(pipeline.boundaries, self._pause, cut=True)
        self.loss: Tensor | None = None
        self.next_device: Device = pipeline.boundaries.input_device
        self.position = -1  # of the next stretch to go backward; below 0 while still in forward
        self.forward_done = False
        self._call, self._cancelled = call, False
        self._error: BaseException | None = None
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
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
    """

    def __init__(self, model: Any, device_map: Mapping[str, Device], *, recompute: bool = False, copies: Any = None) -> None:
        if copies is None:
            copies = CudaCopies() if any(isinstance(device, int) for device in device_map.values()) else CpuCopies()
        self.boundaries = Boundaries(model, device_map, copies)
        self.recompute = recompute
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
        bound = num_tasks_bound(len(losses), depth)
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
