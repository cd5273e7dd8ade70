"""One process of a node makes what all of them want; the others wait on files, and hear when it fails."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import time

import pytest

from harness import node_cache
from harness.findings import UserError, user_error
from harness.node_cache import PreparationError, make_once

FORK = multiprocessing.get_context("fork")


def run_together(functions):
    """Runs functions in processes of their own; [(what each returned or raised, seconds)]."""
    queue = FORK.Queue()

    def body(number, function):
        begin = time.monotonic()
        try:
            result = function()
        except Exception as error:
            result = error
        queue.put((number, result, time.monotonic() - begin))

    processes = [FORK.Process(target=body, args=(number, function)) for number, function in enumerate(functions)]
    for process in processes:
        process.start()
    results = sorted((queue.get(timeout=60) for _ in processes), key=lambda item: item[0])
    for process in processes:
        process.join(10)
    return [(result, seconds) for _, result, seconds in results]


def builder(log, delay=0.0, error=None):
    """A build that notes its process in a file, takes its time, and fails if told to."""

    def build(folder):
        with open(log, "a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(delay)
        (folder / "part").write_text("half")
        if error is not None:
            raise error
        (folder / "part").write_text("whole")

    return build


def test_one_makes_it_and_all_have_it(tmp_path):
    log = tmp_path / "log"
    cache = tmp_path / "cache"
    functions = [lambda first=first: make_once(cache, "x", builder(log, 1.0), first=first) for first in (True, False, False, False)]
    results = run_together(functions)
    assert [result for result, _ in results] == [cache / "x"] * 4
    assert len(log.read_text().split()) == 1
    assert (cache / "x" / "part").read_text() == "whole"
    assert sorted(os.listdir(cache)) == ["x"]


def test_two_first_processes_also_make_it_once(tmp_path):
    """Two nodes on one disk."""
    log = tmp_path / "log"
    results = run_together([lambda: make_once(tmp_path / "cache", "x", builder(log, 0.7))] * 4)
    assert [result for result, _ in results] == [tmp_path / "cache" / "x"] * 4
    assert len(log.read_text().split()) == 1


@pytest.mark.parametrize(
    ("error", "kind", "reason"),
    [
        (user_error("--train_file", "a.txt, line 3: broken", "mend it"), UserError, "a.txt, line 3: broken"),
        (RuntimeError("tokenizer broke"), PreparationError, "tokenizer broke"),
        (OSError(errno.ENOSPC, "No space left on device"), UserError, "No space left on device"),
    ],
)
def test_all_stop_with_the_reason_when_the_one_fails(tmp_path, error, kind, reason):
    cache = tmp_path / "cache"
    build = builder(tmp_path / "log", 1.0, error)
    results = run_together([lambda first=first: make_once(cache, "x", build, first=first) for first in (True, False, False)])
    assert reason in str(results[0][0])
    for result, seconds in results[1:]:
        assert isinstance(result, kind)
        assert reason in str(result)
        assert seconds < 10
    assert len((tmp_path / "log").read_text().split()) == 1
    assert not (cache / "x").exists()
    assert [name for name in os.listdir(cache) if name.endswith((".tmp", ".lock"))] == []


def test_an_earlier_runs_failure_is_forgotten(tmp_path):
    with pytest.raises(RuntimeError):
        make_once(tmp_path, "x", builder(tmp_path / "log", error=RuntimeError("earlier")))
    results = run_together(
        [lambda first=first: make_once(tmp_path, "x", builder(tmp_path / "log", 0.5), first=first) for first in (True, False)]
    )
    assert [result for result, _ in results] == [tmp_path / "x"] * 2


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path):
    cache, log = tmp_path / "cache", tmp_path / "log"
    victim = FORK.Process(target=lambda: make_once(cache, "x", builder(log, 60)))
    victim.start()
    while not log.exists() or not log.read_text():
        time.sleep(0.05)
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    begin = time.monotonic()
    assert make_once(cache, "x", builder(log), first=False) == cache / "x"
    assert time.monotonic() - begin < node_cache.HEAD_START_S + 2
    assert (cache / "x" / "part").read_text() == "whole"


def test_the_lock_of_another_host_is_taken_over_only_when_nobody_touches_it(tmp_path, monkeypatch):
    monkeypatch.setattr(node_cache, "STALE_S", 1.0)
    lock = tmp_path / ".x.lock"
    lock.write_text('{"host": "elsewhere", "pid": 1}')
    begin = time.monotonic()
    assert make_once(tmp_path, "x", builder(tmp_path / "log")) == tmp_path / "x"
    assert 1.0 <= time.monotonic() - begin < 4
    lock.write_text('{"host": "elsewhere", "pid": 1}')
    watch = node_cache._LockWatch(lock)
    for _ in range(4):
        assert not watch.try_acquire()
        time.sleep(0.4)
        os.utime(lock)


def test_a_result_that_another_node_published_first_stays(tmp_path):
    def build(folder):
        (folder / "part").write_text("mine")
        (tmp_path / "x").mkdir()
        (tmp_path / "x" / "part").write_text("theirs")

    assert make_once(tmp_path, "x", build) == tmp_path / "x"
    assert (tmp_path / "x" / "part").read_text() == "theirs"
    assert sorted(os.listdir(tmp_path)) == ["x"]


def test_making_it_anew(tmp_path):
    log = tmp_path / "log"
    for rebuild, times in ((False, 1), (False, 1), (True, 2)):
        make_once(tmp_path / "cache", "x", builder(log), rebuild=rebuild)
        assert len(log.read_text().split()) == times


def test_a_cache_that_cannot_be_written_is_the_users_to_mend(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--data_cache_dir: cannot write tokenised data"):
        make_once(tmp_path / "file" / "cache", "x", builder(tmp_path / "log"))


def test_ranks_that_all_ask_for_it_anew_end_with_the_same_data(tmp_path):
    from harness.args import DataArguments
    from harness.data import prepare_data
    from tests.data_tokenizers import byte_tokenizer

    (tmp_path / "a.txt").write_text("some text\n" * 200)
    args = DataArguments(train_file=[str(tmp_path / "a.txt")], data_cache_dir=str(tmp_path / "cache"), block_size=64, overwrite_cache=True)
    tokenizer = byte_tokenizer()

    def prepare(first):
        data = prepare_data(args, tokenizer, max_positions=64, seed=0, say=lambda line: None, is_local_main=first)
        return data.train.fingerprint, [data.train[i]["input_ids"].sum().item() for i in range(len(data.train))]

    expected = prepare(True)
    for _ in range(3):
        results = run_together([lambda first=first: prepare(first) for first in (True, False, False)])
        assert [result for result, _ in results] == [expected] * 3
