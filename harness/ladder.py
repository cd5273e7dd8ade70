"""`MemorySettings`: everything that changes how much memory a step needs but not what it computes.

Pure code: imports neither torch nor transformers, so that it can be tested and used (by a planner on a laptop) without them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

ActivationCheckpointing = Literal["none", "selective", "full"]
Offload = Literal["none", "cpu", "nvme"]


@dataclasses.dataclass(frozen=True)
class MemorySettings:
    """Settings of one rank that change memory and speed but not the mathematics of an optimizer step.

    Attributes:
        micro_batch_size: samples of a step that go through the model at once, per rank.
        activation_checkpointing: "none", "selective" (attention and every second matmul are kept), or "full".
        loss_chunk_size: tokens whose logits are alive at once in the loss; 0 computes all logits of a micro-batch.
        activation_offload: saved activations live in host memory between forward and backward.
        reshard_after_forward: FSDP2 frees a layer's gathered weights after its forward.
        reduce_bucket_size: DeepSpeed's `reduce_bucket_size` in elements; None leaves the template's.
        prefetch_bucket_size: DeepSpeed's `stage3_prefetch_bucket_size` in elements; None leaves the template's.
        max_live_parameters: DeepSpeed's `stage3_max_live_parameters` in elements; None leaves the template's.
        optimizer_offload: share of the optimizer state kept in host memory, 0.0 to 1.0.
        param_offload: where sharded parameters live between uses.
        in_flight_micro_batches: device map: micro-batches between their forward and their backward; 0 means all of a step.
    """

    micro_batch_size: int
    activation_checkpointing: ActivationCheckpointing = "none"
    loss_chunk_size: int = 0
    activation_offload: bool = False
    reshard_after_forward: bool = True
    reduce_bucket_size: int | None = None
    prefetch_bucket_size: int | None = None
    max_live_parameters: int | None = None
    optimizer_offload: float = 0.0
    param_offload: Offload = "none"
    in_flight_micro_batches: int = 0

    def __post_init__(self) -> None:
        if self.micro_batch_size < 1:
            raise ValueError(f"micro_batch_size must be at least 1, not {self.micro_batch_size}")
        if not 0.0 <= self.optimizer_offload <= 1.0:
            raise ValueError(f"optimizer_offload is a share between 0 and 1, not {self.optimizer_offload}")

    def replace(self, **changes: Any) -> MemorySettings:
        """A copy with some values changed."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> MemorySettings:
        """Reads what `to_dict` wrote.

        Raises:
            TypeError: a key that is not a setting.
        """
        return cls(**values)
