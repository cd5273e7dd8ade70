"""What `harness doctor` measures in child processes: anything that loads torch, touches a GPU or may hang.

    python -m harness.readiness_probes torch | deepspeed | compile | copy | allreduce

Each prints one JSON object as the last line of its output. The parent sets a time limit and kills what does not answer.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from harness.build_locks import is_compiled

# Optional packages that break at import when they were built for another torch or CUDA.
_COMPILED = ("flash_attn", "bitsandbytes", "liger_kernel", "torchao", "xformers")
_COPY_BYTES = 256 * 2**20
_NUM_REPEATS = 10


def torch_facts() -> dict[str, Any]:
    """torch's build, what it sees of the cards, and optional packages that cannot be imported."""
    import torch

    facts: dict[str, Any] = {
        "torch": str(torch.__version__),
        "torch_cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": None,
        "arch_list": torch.cuda.get_arch_list(),
        "cuda_available": torch.cuda.is_available(),
        "cuda_error": None,
        "devices": [],
        "peer_access": [],
        "broken_imports": {},
        "nvcc": None,
    }
    if torch.version.cuda is not None:
        from torch.utils.cpp_extension import CUDA_HOME

        facts["nvcc"] = _nvcc_version(CUDA_HOME)
        try:
            facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        except Exception as error:  # built without NCCL
            facts["nccl"] = f"absent ({error})"
        try:
            torch.cuda.init()
        except Exception as error:  # says why: driver too old, no device, ...
            facts["cuda_error"] = str(error).splitlines()[0]
    if facts["cuda_available"] and facts["cuda_error"] is None:
        facts["devices"], facts["peer_access"] = _devices()
    for name in _COMPILED:
        if importlib.util.find_spec(name) is not None:
            try:
                importlib.import_module(name)
            except Exception as error:  # a wrong build fails with almost any type
                facts["broken_imports"][name] = (str(error).splitlines() or [type(error).__name__])[0]
    return facts


def _devices() -> tuple[list[dict[str, Any]], list[list[bool]]]:
    import torch

    devices = []
    count = torch.cuda.device_count()
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        major, minor = properties.major, properties.minor
        free, total = torch.cuda.mem_get_info(index)
        device: dict[str, Any] = {
            "index": index,
            "name": properties.name,
            "compute_capability": f"{major}.{minor}",
            "total_bytes": total,
            "free_bytes": free,
            "bf16": (major, minor) >= (8, 0),
            "fp8": (major, minor) >= (8, 9),
            "matmul_error": None,
        }
        try:  # the first kernel shows a build without code for this card, or a card in a bad state
            product = torch.ones(64, 64, device=f"cuda:{index}") @ torch.ones(64, 64, device=f"cuda:{index}")
            if float(product.sum()) != 64.0**3:
                device["matmul_error"] = f"a matrix product came out as {float(product.sum())}, not {64.0**3}"
        except RuntimeError as error:
            device["matmul_error"] = str(error).splitlines()[0]
        devices.append(device)
    peers = [[a == b or torch.cuda.can_device_access_peer(a, b) for b in range(count)] for a in range(count)]
    return devices, peers


def deepspeed_ops() -> dict[str, Any]:
    """Each of DeepSpeed's operators for this machine: in its package, compiled before, to be compiled, or why it cannot be."""
    from pathlib import Path

    import deepspeed
    import torch
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    sources = [Path(torch.__file__), Path(deepspeed.__file__)]
    operators: dict[str, Any] = {}
    for name, builder in sorted(ALL_OPS.items()):
        if name == "deepspeed_not_implemented":  # stands for those that this kind of machine does not have
            continue
        reason = _why_not(builder)
        if reason is not None:
            operators[name] = {"usable": False, "state": reason}
        elif installed_ops.get(name):
            operators[name] = {"usable": True, "state": "in the package"}
        else:
            state = "compiled" if is_compiled(name, sources) else "compiled when first used"
            operators[name] = {"usable": True, "state": state}
    return {"operators": operators}


def _why_not(builder: Any) -> str | None:
    """Why DeepSpeed believes that it cannot build an operator; None where it can."""
    reasons: list[str] = []
    builder.warning = reasons.append  # instead of printing; the first one is the reason, others are advice
    try:
        if builder.is_compatible(verbose=True):
            return None
    except Exception as error:  # a builder may raise instead of saying no
        reasons = [str(error) or type(error).__name__]
    return (reasons or ["DeepSpeed does not say why"])[0].strip().splitlines()[0]


def compile_cpu_adam() -> dict[str, Any]:
    """Compiles CPU Adam, where it is not, and makes one update with it, which must be that of torch's AdamW."""
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    started = time.monotonic()
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, 1000))
    other = torch.nn.Parameter(parameter.detach().clone())
    optimizers = DeepSpeedCPUAdam([parameter], lr=0.1, weight_decay=0.01), torch.optim.AdamW([other], lr=0.1, weight_decay=0.01)
    duration_s = time.monotonic() - started
    for tensor, optimizer in zip((parameter, other), optimizers, strict=True):
        tensor.grad = torch.linspace(1, -2, 1000)
        optimizer.step()
    return {"duration_s": round(duration_s, 1), "right": bool(torch.allclose(parameter, other, atol=1e-5))}


def _nvcc_version(cuda_home: str | None) -> str | None:
    import re
    import subprocess

    nvcc = os.path.join(cuda_home, "bin", "nvcc") if cuda_home else "nvcc"
    try:
        output = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"release (\d+\.\d+)", output)
    return match[1] if match else None


def _timed(copy: Callable[[], Any], synchronize: Callable[[], Any]) -> float:
    """Seconds of one call, over a number of them after two for warming up."""
    for _ in range(2):
        copy()
    synchronize()
    started = time.monotonic()
    for _ in range(_NUM_REPEATS):
        copy()
    synchronize()
    return (time.monotonic() - started) / _NUM_REPEATS


def copy_bandwidth() -> dict[str, Any]:
    """GB/s of copies host to card 0, card 0 to host (pinned memory), and from each card to the next; and whether the data arrived."""
    import torch

    count = torch.cuda.device_count()

    def synchronize() -> None:
        for index in range(count):
            torch.cuda.synchronize(index)

    host = torch.empty(_COPY_BYTES, dtype=torch.uint8).pin_memory()
    card = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda:0")
    result: dict[str, Any] = {
        "host_to_card_gb_per_s": _COPY_BYTES / 1e9 / _timed(lambda: card.copy_(host, non_blocking=True), synchronize),
        "card_to_host_gb_per_s": _COPY_BYTES / 1e9 / _timed(lambda: host.copy_(card, non_blocking=True), synchronize),
        "peers": [],
    }
    for source in range(count if count > 1 else 0):
        target = (source + 1) % count
        sent = torch.randint(0, 256, (_COPY_BYTES,), dtype=torch.uint8, device=f"cuda:{source}")
        received = torch.empty_like(sent, device=f"cuda:{target}")
        seconds = _timed(lambda received=received, sent=sent: received.copy_(sent, non_blocking=True), synchronize)  # type: ignore[misc]
        arrived = bool(torch.equal(received.cpu(), sent.cpu()))
        result["peers"].append({"from": source, "to": target, "gb_per_s": _COPY_BYTES / 1e9 / seconds, "arrived": arrived})
        del sent, received
    return result


def allreduce_bandwidth() -> dict[str, Any]:
    """Bus bandwidth (as nccl-tests define it) of an all-reduce over the processes that the environment names; whether its sum is right."""
    import torch
    import torch.distributed as dist

    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    data = torch.full((_COPY_BYTES // 2,), float(rank + 1), dtype=torch.bfloat16, device="cuda")
    dist.all_reduce(data)
    expected = count * (count + 1) / 2
    right = bool((data == expected).all())
    seconds = _timed(lambda: dist.all_reduce(data, op=dist.ReduceOp.MAX), torch.cuda.synchronize)
    dist.destroy_process_group()
    # Every card sends and receives 2 (n-1)/n of the data: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    return {"bus_gb_per_s": 2 * (count - 1) / count * _COPY_BYTES / 1e9 / seconds, "num_gpus": count, "right": right}


PROBES: dict[str, Callable[[], dict[str, Any]]] = {
    "torch": torch_facts,
    "deepspeed": deepspeed_ops,
    "compile": compile_cpu_adam,
    "copy": copy_bandwidth,
    "allreduce": allreduce_bandwidth,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one probe and prints what it found."""
    (name,) = sys.argv[1:] if argv is None else argv
    found = PROBES[name]()
    print("\n" + json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
