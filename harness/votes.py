"""Votes of all ranks on the host: "did anybody run out of memory?", cheap enough to ask before every collective.

Ranks of one node vote through a few bytes of shared memory, some microseconds a vote; ranks of several nodes over gloo. Nothing here
touches a GPU: it works when there is no memory left, and a rank never waits for its own GPU to take part.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

from harness.coordination import Coordinator, PeerFailedError


class PeerOutOfMemoryError(RuntimeError):
    """Another rank ran out of memory: this one stops at the same place."""


class Vote(Protocol):
    def __call__(self, out_of_memory: bool) -> bool:
        """Casts this rank's vote and waits for the others'. Returns True when any rank said True."""


class SharedMemoryVote:
    """Ranks of one node.

    Each rank owns one 64-bit word: 2 x (number of its votes) + its flag, written at once, so number and flag belong together. A rank
    whose number is ahead of mine saw my vote's round come out False (it would have stopped otherwise), so its flag in my round was False.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self.rank, self.num_ranks = coordinator.process_index, coordinator.num_processes
        self.timeout_s = coordinator.timeout_s
        self.num_votes = 0
        size = 64 * self.num_ranks  # a cache line each
        path = None
        if coordinator.is_main_process:
            folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
            handle, path = tempfile.mkstemp(prefix="harness-votes-", dir=folder)
            os.ftruncate(handle, size)
            os.close(handle)
        path = coordinator.broadcast(path)
        assert path is not None
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), size)
        self._words = np.frombuffer(self._memory, dtype=np.int64)[:: 64 // 8]
        coordinator.wait_for_everyone("votes in shared memory")
        if coordinator.is_main_process:
            os.unlink(path)  # every rank has it mapped; nothing stays behind, however the job ends

    def __call__(self, out_of_memory: bool) -> bool:
        self.num_votes += 1
        number = self.num_votes
        self._words[self.rank] = 2 * number + int(out_of_memory)
        spins, deadline = 0, 0.0
        while True:
            words = self._words.copy()
            if (words >> 1).min() >= number:
                return bool((((words >> 1) == number) & (words & 1 == 1)).any())
            spins += 1
            if spins < 200:
                continue
            now = time.monotonic()
            deadline = deadline or now + self.timeout_s
            if now > deadline:
                late = np.flatnonzero((words >> 1) < number).tolist()
                raise PeerFailedError(f"ranks {late} did not vote within {self.timeout_s:.0f} s")
            time.sleep(0.00002 if spins < 20_000 else 0.001)


class GlooVote:
    """Ranks of several nodes."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator

    def __call__(self, out_of_memory: bool) -> bool:
        return bool(self.coordinator.max([float(out_of_memory)], "vote")[0])


def make_vote(coordinator: Coordinator) -> Vote:
    """The cheapest vote for this job; called on all ranks."""
    if coordinator.num_processes == 1:
        return lambda out_of_memory: out_of_memory
    if coordinator.num_local_processes == coordinator.num_processes:
        return SharedMemoryVote(coordinator)
    return GlooVote(coordinator)


def checker(vote: Vote) -> Callable[[], None]:
    """What an engine calls before each collective: votes "fine", and stops where another rank is not."""

    def check() -> None:
        if vote(False):
            raise PeerOutOfMemoryError("another rank ran out of memory")

    return check
