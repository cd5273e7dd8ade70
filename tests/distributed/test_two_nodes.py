"""A job on two nodes: network namespaces with addresses of their own, a launcher in each."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from launch.machine import free_port
from tests import two_nodes
from tests.launching import ROOT, RUN_CLM, Launch, launch_environment, only_launch_of_this_machine


@pytest.fixture
def nodes() -> Iterator[tuple[two_nodes.Node, two_nodes.Node]]:
    if reason := two_nodes.problem():
        pytest.skip(reason)
    with two_nodes.two_nodes() as both:
        yield both


def arguments(folder: Path, *more: str) -> list[str]:
    data = folder / "data.txt"
    data.write_text("".join(f"line {number} of a text that is long enough to train on\n" for number in range(400)))
    sizes = "hidden_size=64,intermediate_size=128,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2"
    words = ["--model_type", "llama", "--config_overrides", sizes, "--tokenizer_name", "bytes", "--train_file", str(data)]
    words += ["--block_size", "64", "--validation_split_percentage", "0", "--logging_steps", "1", "--precision", "fp32", "--use_cpu"]
    return [*words, "--data_cache_dir", str(folder / "cache"), "--output_dir", str(folder / "out"), *more]


@contextlib.contextmanager
def started(nodes: Sequence[two_nodes.Node], folder: Path, engine: str, per_node: Sequence[dict[str, Any]]) -> Iterator[list[Launch]]:
    """launch/run.py on both nodes. `per_node`: script, num_processes, arguments and environ of each."""
    port = str(free_port())
    with only_launch_of_this_machine(), contextlib.ExitStack() as stack:
        launches = []
        for number, (node, mine) in enumerate(zip(nodes, per_node, strict=True)):
            command = [*node.enter, sys.executable, str(ROOT / "launch/run.py"), "--engine", engine]
            command += ["--num_processes", str(mine.get("num_processes", 1)), "--num_nodes", "2", "--node_rank", str(number)]
            command += ["--master_addr", nodes[0].address, "--master_port", port, "--script", str(mine.get("script", RUN_CLM)), "--"]
            environ = launch_environment({"GLOO_SOCKET_IFNAME": node.interface, **mine.get("environ", {})})
            launches.append(Launch([*command, *mine["arguments"]], environ, folder / "out", folder))
            stack.callback(launches[-1].kill)
        yield launches


@pytest.mark.slow
def test_nodes_that_differ_are_refused_at_the_start(nodes: tuple[two_nodes.Node, two_nodes.Node], tmp_path: Path) -> None:
    """Another commit, other arguments and fewer processes on the second node: all of it in one message, before anything is computed."""
    clones = [tmp_path / "clone0", tmp_path / "clone1"]
    for source, clone in zip([ROOT, clones[0]], clones, strict=True):
        shutil.copytree(source / "harness", clone / "harness", ignore=shutil.ignore_patterns("__pycache__"))
    with (clones[1] / "harness/loss.py").open("a") as file:
        file.write("# another commit\n")
    scripts = [clone / "harness/run_clm.py" for clone in clones]
    first = {
        "arguments": arguments(tmp_path, "--max_steps", "2"),
        "script": scripts[0],
        "num_processes": 2,
        "environ": {"NCCL_ALGO": "Ring"},
    }
    second = {"arguments": arguments(tmp_path, "--max_steps", "2", "--seed", "7"), "script": scripts[1]}
    with started(nodes, tmp_path, "ddp", [first, second]) as launches:
        results = [launch.finish(180) for launch in launches]
    assert [result.returncode for result in results] == [2, 2], results[0].stdout + results[1].stdout
    for words in ("nodes: of unequal size: 2 on", "is not that on", ": loss.py", "--seed: 42 on", "not set on"):
        assert words in results[0].stdout, words
    assert results[0].exit_json is not None and results[0].exit_json["code"] == 2
    assert "Traceback" not in results[0].stdout.split("launch: ")[0]


@pytest.mark.slow
def test_a_node_that_is_cut_off_ends_the_job_within_a_minute(nodes: tuple[two_nodes.Node, two_nodes.Node], tmp_path: Path) -> None:
    """As when it has lost its power: no process of it says goodbye, and no packet comes back."""
    each = {"arguments": arguments(tmp_path, "--max_steps", "100000", "--save_strategy", "no")}
    with started(nodes, tmp_path, "fsdp", [each, each]) as launches:
        deadline = time.monotonic() + 180
        while '"step": 5,' not in (tmp_path / "out/metrics.jsonl").read_text() if (tmp_path / "out/metrics.jsonl").exists() else True:
            assert time.monotonic() < deadline and launches[0].process.poll() is None, launches[0].output()
            time.sleep(0.1)
        subprocess.run([*nodes[1].enter, "ip", "link", "set", nodes[1].interface, "down"], check=True)
        cut = time.monotonic()
        first = launches[0].finish(300)
        seconds = time.monotonic() - cut
        # The node that was cut off sees the other one gone, and ends too.
        second = launches[1].finish(300)
    assert first.returncode == 1 and second.returncode != 0
    assert seconds < 60, f"{seconds:.0f} s\n{first.stdout}"
    report = json.loads((tmp_path / "out/exit.json").read_text())
    assert report["code"] == 1 and "the guard of rank " in report["reason"] and "its node is down or cut off" in report["reason"], report
