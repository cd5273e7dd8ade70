"""A vote in shared memory does not wait for a rank whose process is gone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path
from typing import Any

import pytest

TIMEOUT_S = 60.0


class FakeCoordinator:
    """What a vote needs of the job: two ranks that meet through a file."""

    num_processes, timeout_s = 2, TIMEOUT_S

    def __init__(self, rank: int, folder: str, barrier: Barrier) -> None:
        self.process_index, self.is_main_process = rank, rank == 0
        self.barrier, self.path = barrier, Path(folder) / "path"
        self.waited_s = 0.0

    def broadcast(self, value: str | None) -> str:
        if value is not None:
            self.path.write_text(value)
        self.barrier.wait(30)
        return self.path.read_text()

    def wait_for_everyone(self, name: str) -> None:
        self.barrier.wait(30)


def vote_for_ever(rank: int, folder: str, barrier: Barrier, stands: Event, result: Connection) -> None:
    from harness.coordination import PeerFailedError
    from harness.votes import SharedMemoryVote

    coordinator: Any = FakeCoordinator(rank, folder, barrier)
    vote = SharedMemoryVote(coordinator)
    assert [vote(False), vote(rank == 1)] == [False, True]
    barrier.wait(30)  # after a True all ranks meet before they vote again
    assert vote(False) is False
    stands.set()
    if rank == 1:
        time.sleep(TIMEOUT_S)
    started = time.monotonic()
    try:
        vote(False)
    except PeerFailedError as error:
        result.send((str(error), time.monotonic() - started))


@pytest.mark.parametrize("waited_s", [0.0, 1.0])
def test_a_killed_rank_is_noticed_and_a_slow_one_is_waited_for(waited_s: float, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    ours, theirs = context.Pipe()
    stands = [context.Event(), context.Event()]
    arguments = [(rank, str(tmp_path), barrier, stands[rank], theirs) for rank in range(2)]
    ranks = [context.Process(target=vote_for_ever, args=each, daemon=True) for each in arguments]
    for rank in ranks:
        rank.start()
    try:
        assert all(event.wait(120) for event in stands)
        assert not ours.poll(waited_s)  # rank 0 waits for one that is slow
        assert ranks[1].pid is not None
        os.kill(ranks[1].pid, signal.SIGKILL)
        assert ours.poll(10)
        message, seconds = ours.recv()
        assert message == "rank 1 has ended without a vote"
        assert waited_s * 0.5 < seconds < TIMEOUT_S / 2
    finally:
        for rank in ranks:
            rank.kill()
