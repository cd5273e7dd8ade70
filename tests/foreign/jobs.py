"""Small trainings with transformers' Trainer, TRL's and an accelerate loop, on forked ranks, whose memory runs out where a test says."""

from __future__ import annotations

import functools
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

from tests.faults.fork_ranks import leave_with
from tests.launching import ROOT


def ranks(name: str, folder: str, num_ranks: int, failure: dict[str, Any], more: list[str]) -> None:
    """Runs a script of examples/ on forked ranks, in this process's forks.

    Args:
        name: of the script.
        folder: for what it writes; `log-<rank>.json` has the losses that a rank saw and what was lowered.
        failure: for tests.foreign.inject; empty for none.
        more: flags.
    """
    import importlib

    for module in (
        "accelerate",
        "transformers.trainer",
        "harness.callbacks",
        "harness.safe_loop",
        "transformers.models.llama.modeling_llama",
    ):
        importlib.import_module(module)
    if name == "trl_sft":
        importlib.import_module("trl.trainer.sft_trainer")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(num_ranks):
        pid = os.fork()
        if pid == 0:
            leave_with(functools.partial(_rank, name, Path(folder), rank, num_ranks, port, failure, more))
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert codes == [0] * num_ranks, codes


def _rank(name: str, folder: Path, rank: int, num_ranks: int, port: int, failure: dict[str, Any], more: list[str]) -> int:
    import importlib.util

    from tests.foreign import inject

    if num_ranks > 1:
        size = str(num_ranks)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"ACCELERATE_USE_CPU": "true", "OOM": json.dumps(failure), "TRACE": str(folder)}
    inject.install()
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules[name] = script  # dataclasses look their module up
    sys.argv = [f"{name}.py", *more]
    spec.loader.exec_module(script)
    found = watch(folder / f"log-{rank}.json")
    script.main()
    found()
    return 0


def watch(path: Path) -> Any:
    """Remembers every StepRedo that is made; the function that is returned writes what it lowered."""
    from harness import step_redo

    made: list[Any] = []
    original = step_redo.StepRedo.__init__

    def remember(self: Any, *args: Any) -> None:
        original(self, *args)
        made.append(self)

    step_redo.StepRedo.__init__ = remember  # type: ignore[method-assign]
    return lambda: path.write_text(json.dumps([step for each in made for step in each.steps_down]))
