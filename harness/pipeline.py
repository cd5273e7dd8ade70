"""One process, several devices, all of them busy: micro-batches pass through the devices of a map as through a pipeline.

Plain dispatch of a device map (accelerate's hooks) keeps one device busy at a time, because the next micro-batch starts when the
backward of the last one has ended. Here the model's own forward runs unchanged, but it pauses wherever it would enter another device.
A scheduler then decides which paused micro-batch goes on, so that every device receives its work in the order in which it should do
it: backward as soon as it can run, forward otherwise, at most `depth` micro-batches between the two (one forward, one backward, as in
PipeDream-Flush, arXiv:2006.09503; how much it can win: `partition.pipeline_speedup`).

How: each micro-batch's forward runs in a thread beside the others', of which only one runs at any time; at a device's boundary the thread
hands control back, and the autograd graph is cut (`harness.boundaries`). Copies run on streams of their own, so that neither side's
computation waits for the other's queue. Gradients are those of the plain model: every micro-batch's own backward, in the same order.

A run of many blocks on one device is cut as well, without copies. A card takes about a thousand launches ahead of its work and then
lets the host wait; a host that waits in the middle of a long task lets the other cards run dry.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from harness.boundaries import Boundaries, CpuCopies, CudaCopies, Passage, here
from harness.partition import Device, num_tasks_bound

# Backward costs two products where forward costs one; with activation checkpointing the forward is repeated in it.
_BACKWARD_COST = 2.0
_RECOMPUTE_COST = 1.0

# Blocks of a device between two returns to the scheduler: eager forward and backward of four Llama blocks are about 500 launches.
_BLOCKS_AT_ONCE = 4


class _Cancelled(BaseException):
    """Raised inside a paused forward that is given up."""


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
        """Begins a job, which must not raise, in an idle thread or a new one, under this one's settings (torch.compile's)."""
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
        self.passage = Passage(pipeline.boundaries, None if pipeline.whole else self._pause, cut=not pipeline.whole)
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
        here.passage = self.passage
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
            here.passage = None
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
            self.passage.end_forward()
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
        here.passage = Passage(self.boundaries, None, cut=False)
        try:
            yield
        finally:
            here.passage = None
            if current is not None:
                torch.cuda.set_device(current)

    def close(self) -> None:
        """Leaves the model as it was found, its parts where they are."""
        self.boundaries.remove()
