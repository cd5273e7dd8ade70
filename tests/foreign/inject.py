"""A lack of memory on one rank, and a record of what each rank computes, put into scripts that know nothing of it.

Gets into the ranks as harness.rank_hook does, by an entry point that torch calls. `OOM` in the environment is JSON: on `rank`, from `step`
on (counted in samples of this life), a forward over at least `rows` samples fails with the allocator's words; or, with "kind": "limit", its
card loses memory for good before that step. `TRACE` is a folder: every rank writes there, for each forward, a number for each sample.
"""

from __future__ import annotations

import json
import os
import time
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
    limit = CardLimit(Path(str(trace)) / "limit.json", settings, torch.cuda) if settings.get("kind") == "limit" else None

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
        if limit is not None:
            if rank == settings["rank"]:
                limit.before_step(num_seen[0] // settings["share"] + 1)
        elif is_due(len(ids)):
            if settings.get("place") != "backward":
                fail()
            output.register_hook(fail)  # after all layers have their gradients
        num_seen[0] += len(ids)
        if trace:
            with open(Path(trace) / f"rank{rank}-{os.getpid()}.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps([zlib.crc32(row.numpy().tobytes()) for row in ids.cpu()]) + "\n")

    torch.nn.modules.module.register_module_forward_hook(embedded)
    if os.environ.get("START_DEEPSPEED"):
        start_deepspeed_with_torch(torch.distributed)


class CardLimit:
    """Takes memory of a card away for good, as another program on it would: the next allocation beyond what is left fails by itself.

    Args:
        path: where the limit is kept for later processes of the job.
        settings: "step" before which it is set; "spare": how much of what a step needed on top of what was held before is left to it.
        cuda: torch.cuda, or what stands in for it.
    """

    def __init__(self, path: Path, settings: dict[str, Any], cuda: Any) -> None:
        self.path, self.settings, self.cuda = path, settings, cuda
        self.is_set = False

    def before_step(self, step: int) -> None:
        """To be called before the first forward of each step of this process, counted from 1; more often does no harm."""
        if self.is_set:
            return
        if self.path.exists():
            self._set(json.loads(self.path.read_text(encoding="utf-8"))["limit_bytes"])
        elif step == 2:
            self.cuda.reset_peak_memory_stats()
        elif step == self.settings["step"]:
            held, peak = self.cuda.memory_allocated(), self.cuda.max_memory_allocated()
            limit = int(held + self.settings["spare"] * (peak - held))
            facts = {"held_bytes": held, "peak_bytes": peak, "limit_bytes": limit, "at_s": time.time()}
            self.path.write_text(json.dumps(facts), encoding="utf-8")
            self._set(limit)

    def _set(self, num_bytes: int) -> None:
        self.is_set = True
        self.cuda.empty_cache()  # what the allocator keeps for later would not count
        self.cuda.set_per_process_memory_fraction(num_bytes / self.cuda.mem_get_info()[1])


def start_deepspeed_with_torch(dist: Any) -> None:
    """Starts DeepSpeed's communication with torch's, as accelerate does on GPUs.

    With transformers' --use_cpu it starts torch's alone, and ZeRO-3 takes a model that is built then for one of a single process.
    """
    start = dist.init_process_group

    def start_both(*args: Any, **settings: Any) -> None:
        start(*args, **settings)
        import deepspeed

        dist.init_process_group = start
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)

    dist.init_process_group = start_both


def install_into(folder: Path) -> None:
    """Makes `folder` one that brings this into every process with torch that has it on PYTHONPATH."""
    metadata = folder / f"{MODULE}-1.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (folder / f"{MODULE}.py").write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {MODULE}\nVersion: 1\n", encoding="utf-8")
    (metadata / "entry_points.txt").write_text(f"[torch.backends]\n{MODULE} = {MODULE}:install\n", encoding="utf-8")
