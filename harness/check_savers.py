"""What does not go together with the flags that save memory in the optimizer."""

from __future__ import annotations

from collections.abc import Iterator

from harness.args import Arguments
from harness.findings import Finding


def saver_findings(args: Arguments, engine: str) -> Iterator[Finding]:
    """Errors of `--optim adamw_bf16`.

    Args:
        engine: "ddp", "fsdp", "zero" or "device_map".
    """
    if args.train.optim == "adamw_bf16" and engine == "zero":
        message = "adamw_bf16 is not for DeepSpeed, which keeps optimizer states in files and copies of its own as float32"
        yield Finding("error", "--optim", message, "--fsdp full_shard, or --optim adamw_torch_fused")
