"""A lack of memory on one rank, and a record of what each rank computes, put into scripts that know nothing of it.

Gets into the ranks as harness.rank_hook does, by an entry point that torch calls. `OOM` in the environment is JSON: on `rank`, from `step`
on (counted in samples of this life), a forward over at least `rows` samples fails with the allocator's words. `TRACE` is a folder: every
rank writes there, for each forward, a number for each sample.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

MODULE = "harness_test_inject"


def install() -> None:
    import torch

    settings = json.loads(os.environ.get("OOM", "{}"))
    trace = os.environ.get("TRACE")
    rank = int(os.environ.get("RANK") or 0)
    num_seen = [0]

    def is_due(num_rows: int) -> bool:
        step = num_seen[0] // settings.get("share", 1) + 1
        return bool(settings) and rank == settings["rank"] and step >= settings["step"] and num_rows >= settings["rows"]

    def fail(*_: Any) -> None:
        if settings.get("kind") == "bug":
            raise ValueError("a mistake in the script")
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.25 GiB")

    def embedded(module: Any, args: Any, output: Any) -> None:
        if not isinstance(module, torch.nn.Embedding) or not module.training or not torch.is_grad_enabled():
            return
        ids = args[0]  # (batch, seq)
        if is_due(len(ids)):
            if settings.get("place") != "backward":
                fail()
            output.register_hook(fail)  # after all layers have their gradients
        num_seen[0] += len(ids)
        if trace:
            with open(Path(trace) / f"rank{rank}-{os.getpid()}.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps([zlib.crc32(row.numpy().tobytes()) for row in ids.cpu()]) + "\n")

    torch.nn.modules.module.register_module_forward_hook(embedded)


def install_into(folder: Path) -> None:
    """Makes `folder` one that brings this into every process with torch that has it on PYTHONPATH."""
    metadata = folder / f"{MODULE}-1.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (folder / f"{MODULE}.py").write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {MODULE}\nVersion: 1\n", encoding="utf-8")
    (metadata / "entry_points.txt").write_text(f"[torch.backends]\n{MODULE} = {MODULE}:install\n", encoding="utf-8")
