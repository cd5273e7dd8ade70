"""Votes of all ranks on the host: "did anybody run out of memory?", cheap enough to ask before every collective.

Ranks of one node vote through a few bytes of shared memory, some microseconds a vote; ranks of several nodes over gloo. Nothing here
touches a GPU: it works when there is no memory left, and a rank never waits for its own GPU to take part.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

from harness import whereabouts
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

    Each rank also holds a lock on one byte of the file. The kernel lets go of it when the process ends, however it ends: that is how the
    others learn, within LOOK_S, that there is nobody to wait for.
    """

    LOOK_S = 0.25

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
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
        self._file = open(path, "r+b", buffering=0)  # noqa: SIM115 - closing it would let go of the lock
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, self.rank)
        self._memory = mmap.mmap(self._file.fileno(), size)
        self._words = np.frombuffer(self._memory, dtype=np.int64)[:: 64 // 8]
        coordinator.wait_for_everyone("votes in shared memory")
        if coordinator.is_main_process:
            os.unlink(path)  # every rank has it mapped; nothing stays behind, however the job ends

    def __call__(self, out_of_memory: bool) -> bool:
        self.num_votes += 1
        number = self.num_votes
        self._words[self.rank] = 2 * number + int(out_of_memory)
        for _ in range(200):
            words = self._words.copy()
            if (words >> 1).min() >= number:
                return self._result(words, number)
        with whereabouts.waiting(f"vote {number}", counted=False):
            started = time.monotonic()
            words = self._wait(number, started)
            self.coordinator.waited_s += time.monotonic() - started
        return self._result(words, number)

    @staticmethod
    def _result(words: np.ndarray, number: int) -> bool:
        return bool((((words >> 1) == number) & (words & 1 == 1)).any())

    def _wait(self, number: int, started: float) -> np.ndarray:
        """Everybody's words once all have voted.

        Raises:
            PeerFailedError: a rank has ended, or the limit has passed.
        """
        spins, deadline, next_look = 200, started + self.timeout_s, started + self.LOOK_S
        while True:
            words = self._words.copy()
            if (words >> 1).min() >= number:
                return words
            spins += 1
            now = time.monotonic()
            if now > next_look:
                next_look = now + self.LOOK_S
                if gone := self._gone(number):
                    raise PeerFailedError(f"rank {', '.join(map(str, gone))} has ended without a vote")
            if now > deadline:
                late = np.flatnonzero((words >> 1) < number).tolist()
                raise PeerFailedError(f"ranks {late} did not vote within {self.timeout_s:.0f} s")
            time.sleep(0.00002 if spins < 20_000 else 0.001)

    def _gone(self, number: int) -> list[int]:
        """Ranks whose process has ended before this vote."""
        ended: list[int] = []
        for rank in np.flatnonzero((self._words >> 1) < number).tolist():
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
            except OSError:  # its owner is there
                continue
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
            ended.append(rank)
        # One that ended after its vote is no loss here.
        return [rank for rank in ended if self._words[rank] >> 1 < number]


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
