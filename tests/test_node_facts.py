"""What must be the same on all nodes: what counts as different, and that every rank hears the same."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import re
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from harness import coordination, node_facts
from harness.findings import Finding, UserError

FACTS: dict[str, Any] = {
    "node": "a",
    "num_processes": 4,
    "versions": {"python": "3.11", "torch": "2.13.0", "peft": "0.21"},
    "code": {"loss.py": "11", "engines/fsdp.py": "22"},
    "environment": {"NCCL_ALGO": "Ring"},
    "arguments": {"seed": 1, "output_dir": "out"},
    "files": {},
}


def changed(**parts: Any) -> dict[str, Any]:
    """The facts of node b, with parts replaced."""
    return copy.deepcopy(FACTS) | {"node": "b"} | parts


def lines(other: dict[str, Any]) -> list[str]:
    return [finding.line() for finding in node_facts.compare({0: FACTS, 4: other})]


def test_equal_nodes_have_nothing_to_say() -> None:
    assert lines(changed()) == []


@pytest.mark.parametrize(
    ("parts", "line"),
    [
        (
            {"num_processes": 2},
            "error   nodes: of unequal size: 4 on a (rank 0), 2 on b (rank 4) -> start as many processes on each node",
        ),
        (
            {"versions": {"python": "3.11", "torch": "2.12.0", "peft": "0.21"}},
            "error   torch: 2.13.0 on a (rank 0), 2.12.0 on b (rank 4) -> install the same version on all nodes",
        ),
        (
            {"versions": {"python": "3.11", "torch": "2.13.0"}},
            "error   peft: 0.21 on a (rank 0), missing on b (rank 4) -> install the same version on all nodes",
        ),
        (
            {"code": {"loss.py": "12", "engines/fsdp.py": "22", "new.py": "3"}},
            "error   harness: the code on b (rank 4) is not that on a (rank 0): loss.py, new.py -> the same commit on all nodes",
        ),
        (
            {"arguments": {"seed": 2, "output_dir": "out"}},
            "error   --seed: 1 on a (rank 0), 2 on b (rank 4) -> the same command everywhere",
        ),
        (
            {"environment": {}},
            "warning NCCL_ALGO: Ring on a (rank 0), not set on b (rank 4) -> pass it to all nodes, or to none",
        ),
    ],
)
def test_each_difference_is_named(parts: dict[str, Any], line: str) -> None:
    assert lines(changed(**parts)) == [line]


def test_many_files_are_counted() -> None:
    other = changed(code={f"m{number}.py": "1" for number in range(5)})
    assert lines(other)[0].endswith("loss.py, engines/fsdp.py, m0.py, m1.py and 3 more -> the same commit on all nodes")


def test_the_facts_of_this_node() -> None:
    environ = {"LOCAL_WORLD_SIZE": "2", "NCCL_ALGO": "Tree", "NCCL_SOCKET_IFNAME": "eth0", "NCCL_DEBUG": "INFO", "HOME": "/x"}
    facts = json.loads(json.dumps(node_facts.facts_of_this_node({"seed": 3, "local_rank": 1}, environ)))
    assert facts["num_processes"] == 2 and facts["arguments"] == {"seed": 3}
    assert facts["environment"] == {"NCCL_ALGO": "Tree"}
    assert facts["versions"]["python"].startswith("3.") and facts["versions"]["torch"] and "liger-kernel" not in facts["versions"]
    assert {"run_clm.py", "engines/fsdp.py", "node_facts.py"} <= set(facts["code"])


def test_a_changed_file_has_another_digest(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    before = node_facts.code_digests(tmp_path)
    (tmp_path / "a.py").write_text("x = 2\n")
    assert list(before) == ["a.py"] and node_facts.code_digests(tmp_path) != before


@pytest.mark.parametrize(
    ("environ", "several"),
    [
        ({}, False),
        ({"WORLD_SIZE": "4"}, False),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, True),
        ({"WORLD_SIZE": "4", "LOCAL_SIZE": "1"}, True),
    ],
)
def test_jobs_on_several_nodes(environ: dict[str, str], several: bool) -> None:
    assert node_facts.of_several_nodes(environ) == several


def test_ranks_of_one_node_are_compared_too(tmp_path: Path) -> None:
    """Another value of a flag, and another file under the same name, on one rank alone."""
    settings = tmp_path / "ds.json"

    def of_rank(text: str, rate: float) -> dict[str, Any]:
        settings.write_text(text)
        arguments = {"learning_rate": rate, "deepspeed": str(settings), "train_file": "a.json", "local_rank": rate}
        return json.loads(json.dumps(node_facts.facts_of_this_process(arguments)))

    same = {rank: of_rank("{}", 0.1) for rank in range(3)}
    assert node_facts.compare(same) == []
    found = [finding.line() for finding in node_facts.compare(same | {1: of_rank("{}", 0.2), 2: of_rank("[]", 0.1)})]
    assert found == [
        "error   --learning_rate: 0.1 on rank 0, 0.2 on rank 1 -> the same command everywhere",
        f"error   --deepspeed: {settings} on rank 2 is not the file that rank 0 has -> the same file everywhere",
    ]


class MemoryStore:
    """torch's store, in this process."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: all(key in self.values for key in keys), timeout.total_seconds()):
                raise RuntimeError(f"wait timeout: {keys}")


def everybody(facts: list[dict[str, Any]], num_local: int, silent: int = -1) -> dict[int, Any]:
    """What each rank of a job hears: findings, or the error."""
    store, heard = MemoryStore(), {}

    def own(rank: int) -> dict[str, Any]:
        node = facts[rank // num_local]
        return node if rank % num_local == 0 else {name: node[name] for name in ("node", "arguments", "files")}

    def rank_of(rank: int) -> None:
        try:
            heard[rank] = coordination.compare_ranks(store, rank, size, own(rank), 0.3)  # type: ignore[arg-type]
        except (UserError, coordination.PeerFailedError) as error:
            heard[rank] = error

    size = num_local * len(facts)
    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(size) if rank != silent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return heard


def test_every_rank_hears_the_same() -> None:
    assert everybody([FACTS, changed()], 2) == {rank: [] for rank in range(4)}
    warning = Finding("warning", "NCCL_ALGO", "Ring on a (rank 0), not set on b (rank 2)", "pass it to all nodes, or to none")
    assert everybody([FACTS, changed(environment={})], 2) == {rank: [warning] for rank in range(4)}
    heard = everybody([FACTS, changed(arguments={"seed": 2, "output_dir": "out"}), changed(num_processes=3)], 1)
    assert sorted(heard) == [0, 1, 2] and {type(each) for each in heard.values()} == {UserError}
    assert [finding.key for finding in heard[2].findings] == ["--seed", "nodes"]


def test_a_rank_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_facts, "VERDICT_MARGIN_S", 0.2)
    heard = everybody([FACTS, changed()], 1, silent=1)
    assert isinstance(heard[0], coordination.PeerFailedError)
    assert "comparing the ranks failed on rank 0: wait timeout: ['node_facts/0', 'node_facts/1']" in str(heard[0])


# ---- the run's folder


@dataclasses.dataclass
class OneOfTwo:
    """A rank of a job on two nodes, whose coordinator has heard the other ranks already."""

    process_index: int
    is_local_main_process: bool
    mark: str
    others: list[Any]

    @property
    def is_main_process(self) -> bool:
        return self.process_index == 0

    def broadcast(self, value: str) -> str:
        return value if self.is_main_process else self.mark

    def gather(self, value: Any) -> list[Any]:
        return [value, *self.others]


def test_a_folder_that_is_not_shared_is_refused_on_every_rank(tmp_path: Path) -> None:
    from harness import job, run_folder

    shared, own = tmp_path / "shared", tmp_path / "own"
    for folder in (shared, own):
        folder.mkdir()
    with run_folder.locked(shared):
        mark = run_folder.mark_of(shared)
        assert re.fullmatch(rf"pid {os.getpid()} on .+ since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{{3}}[+-]\d\d:\d\d", mark)
        with pytest.raises(UserError, match=re.escape(f"another run is writing to {shared} ({mark})")), run_folder.locked(shared):
            pass
        job.check_shared(shared, OneOfTwo(0, True, "", [None]), 0.1)  # type: ignore[arg-type]
        job.check_shared(shared, OneOfTwo(1, True, mark, [None]), 0.1)  # type: ignore[arg-type]
        (own / ".lock").write_text("pid 1 on another")
        for coordinator in (OneOfTwo(1, True, mark, [None]), OneOfTwo(0, True, mark, [("b", "/own")])):
            folder = own if coordinator.process_index else shared
            with pytest.raises(UserError, match=r"--output_dir.*is another folder than rank 0's on rank [01] \(.+: /.+\)"):
                job.check_shared(folder, coordinator, 0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize("what", ["", "model", "tokenizer", "data"])
def test_what_ranks_have_found_must_be_the_same(what: str) -> None:
    """The same names of files, and another copy of one of them on the second node."""
    from types import SimpleNamespace

    from harness import job

    def found(part: str) -> tuple[Any, Any, Any]:
        config = SimpleNamespace(to_dict=lambda: {"rms_norm_eps": 1e-5 if part == "model" else 1e-6, "id2label": {0: "a"}})
        tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 0, "b" if part == "tokenizer" else "c": 1})
        return config, tokenizer, SimpleNamespace(fingerprint="1" if part == "data" else "2")

    heard: list[Any] = []
    teller = SimpleNamespace(gather=lambda value: heard.append(value) or [value])
    job.check_same(teller, *found(""))  # type: ignore[arg-type]
    for other in ("", what):
        listener = SimpleNamespace(gather=lambda value: [*heard, value])
        if not other:
            job.check_same(listener, *found(other))  # type: ignore[arg-type]
            continue
        with pytest.raises(UserError) as error:
            job.check_same(listener, *found(other))  # type: ignore[arg-type]
        (finding,) = error.value.findings
        key = {"model": "--model_name_or_path", "tokenizer": "--tokenizer_name", "data": "--train_file"}[other]
        assert finding.key == key and "on rank 1 (" in finding.message and "is not what rank 0 has" in finding.message


def test_a_slow_network_disk_is_waited_for(tmp_path: Path) -> None:
    from harness import run_folder

    late = threading.Timer(0.3, lambda: (tmp_path / ".lock").write_text("pid 5 on a"))
    late.start()
    assert run_folder.shows_mark(tmp_path, "pid 5 on a", 10.0)
    assert not run_folder.shows_mark(tmp_path, "pid 6 on a", 0.0)
    late.join()
