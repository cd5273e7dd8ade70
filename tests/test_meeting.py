"""Ranks that look for each other: all there, one missing, some that know another number of ranks."""

from __future__ import annotations

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from harness.coordination import PeerFailedError, meet
from harness.findings import UserError


def met(sizes: dict[int, int], timeout_s: float, monkeypatch: pytest.MonkeyPatch, ranks: dict[int, int] | None = None) -> dict[int, str]:
    """What each rank was told, by threads that stand for processes; "" where it was let in.

    Args:
        sizes: process -> number of ranks that it knows.
        ranks: process -> its rank, where that is another number.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(probe.getsockname()[1]))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    if ranks:  # on a launcher's store, as torchrun has it
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        launchers = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=True, wait_for_workers=False)
    stores = [launchers] if ranks else []  # rank 0's serves the others until all have been told

    def one(rank: int, size: int) -> str:
        try:
            stores.append(meet((ranks or {}).get(rank, rank), size, timeout_s))
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


@pytest.mark.parametrize("ranks", [{0: 0, 1: 0}, {0: 0, 1: 1, 2: 1}])
def test_two_of_one_rank_are_told_to_all_at_once(ranks: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    started = time.monotonic()
    told = met(dict.fromkeys(ranks, len(ranks)), 120, monkeypatch, ranks)
    assert time.monotonic() - started < 60
    assert all("RANK: is" in text and "on two processes" in text for text in told.values()), told


def test_one_beyond_those_that_rank_0_knows_does_not_join(monkeypatch: pytest.MonkeyPatch) -> None:
    told = met({0: 2, 1: 2, 2: 3}, 20, monkeypatch)
    assert told[0] == told[1] == "" and "WORLD_SIZE: is 3 on rank 2 and 2 on rank 0" in told[2]


def test_a_process_may_join_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that trains twice, on a launcher's store that keeps what it knows."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", str(port)), ("TORCHELASTIC_USE_AGENT_STORE", "True")):
        monkeypatch.setenv(name, value)
    launchers = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    assert [meet(0, 1, 20).get("missing") for _ in range(2)] == [b"", b""]
    del launchers
