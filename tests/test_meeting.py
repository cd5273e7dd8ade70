"""Ranks that look for each other: all there, one missing, some that know another number of ranks."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from harness.coordination import PeerFailedError, meet
from harness.findings import UserError


def met(sizes: dict[int, int], timeout_s: float, monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """What each rank was told, by threads that stand for processes; "" where it was let in."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(probe.getsockname()[1]))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    stores = []  # rank 0's serves the others until all have been told

    def one(rank: int, size: int) -> str:
        try:
            stores.append(meet(rank, size, timeout_s))
        except UserError as error:
            return error.findings[0].line()
        except PeerFailedError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(sizes)) as pool:
        told = {rank: pool.submit(one, rank, size) for rank, size in sizes.items()}
        return {rank: future.result() for rank, future in told.items()}


def test_all_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert met({0: 3, 1: 3, 2: 3}, 20, monkeypatch) == {0: "", 1: "", 2: ""}


def test_a_missing_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    told = met({0: 3, 2: 3}, 1, monkeypatch)
    assert all(text.startswith("rank 1 of 3 did not arrive within 1 s") for text in told.values())


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({0: 2, 1: 3}, "WORLD_SIZE: is 3 on rank 1 and 2 on rank 0"),
        ({0: 3, 1: 2}, "WORLD_SIZE: is 2 on rank 1 and 3 on rank 0"),
        ({0: 4, 1: 4, 2: 8}, "WORLD_SIZE: is 8 on rank 2 and 4 on rank 0"),
    ],
)
def test_other_numbers_of_ranks_are_told_to_all_at_once(sizes: dict[int, int], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started = time.monotonic()
    told = met(sizes, 120, monkeypatch)
    assert time.monotonic() - started < 60  # whatever the limit for those that do not come
    assert all(message in text for text in told.values()), told


def test_one_beyond_those_that_rank_0_knows_does_not_join(monkeypatch: pytest.MonkeyPatch) -> None:
    told = met({0: 2, 1: 2, 2: 3}, 20, monkeypatch)
    assert told[0] == told[1] == "" and "WORLD_SIZE: is 3 on rank 2 and 2 on rank 0" in told[2]
