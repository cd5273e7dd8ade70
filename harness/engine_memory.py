"""What each engine keeps and borrows on a card beside the activations, in closed form: states, gather and reduce buffers, host memory.

Pure code. Formulas follow torch's FSDP2 (`torch/distributed/fsdp/_fully_shard`), torch's DDP, and DeepSpeed 0.19
(`runtime/zero/stage_1_and_2.py`, `stage3.py`, `partitioned_param_coordinator.py`); DeepSpeed cannot be traced under fake tensors.
P are parameters, N the ranks that share one copy.
"""

from __future__ import annotations

import dataclasses
import math

from harness.ladder import MemorySettings
from harness.model_shape import ModelShape, RunShape

GIB = 2**30

# Optimizer state per trainable parameter, bytes. torchao's 8-bit Adam: two bytes and a float32 scale per block of 256 for each.
OPTIMIZER_STATE_BYTES: dict[str, float] = {
    "adamw_torch_fused": 8.0,
    "adamw_torch": 8.0,
    "adamw_apex_fused": 8.0,
    "adamw_bf16": 4.0,
    "adamw_8bit": 2.0 + 2 * 4 / 256,
    "sgd": 0.0,
    "adafactor": 0.01,
}

# Elements whose averages `adamw_bf16` has in float32 at once.
BF16_UPDATE_PIECE = 2**24

# Inputs of blocks that are smaller are not worth a copy to the host.
LEAST_OFFLOADED_BYTES = 2**20

# Python, CUDA's libraries and the data loader of one training process.
PROCESS_HOST_BYTES = int(3.5 * GIB)


@dataclasses.dataclass(frozen=True)
class EngineMemory:
    """One rank's memory beside activations, in bytes.

    Attributes:
        parameters: resident weights, master copies excepted.
        gradients: resident from the first backward of a step to its end, or always.
        growing_gradients: per trainable parameter, gradients that appear as the first backward of a step goes along and are gone after
            the update; they only exist everywhere when its last layer is reached.
        optimizer: states and float32 master copies.
        buffers: communication buffers that stay.
        forward_gather: weights gathered while a layer runs forward; likewise `loss_gather`, `backward_gather`.
        held_per_parameter: gathered weights of a layer that stay from its forward to its backward, per parameter.
        head_gradient: gradient of the head, kept whole from the loss to the end of backward.
        root_grows: gradients outside the layers appear as they are computed; else only with the last reduction.
        reduce: gradients of a layer before they are reduced.
        pending: reduction of the layer above, still under way.
        last_reduce: the same for what is outside the layers, at the end of backward when activations are gone.
        step: what an update needs on top of everything resident.
        update_gradients: gradients that are there at the update besides those above.
        pooled: part of a phase that lies in memory of other streams than the computing one: "gradients", "gather", or "".
        pools: what the allocator keeps for those streams; memory of one stream is not given to another before there is none left.
        scattered: the first update finds the activations' memory in pieces and takes new memory.
        host: resident host memory of this rank.
        nvme: bytes of this rank on an NVMe disk.
    """

    parameters: float = 0.0
    gradients: float = 0.0
    growing_gradients: float = 0.0
    optimizer: float = 0.0
    buffers: float = 0.0
    forward_gather: float = 0.0
    loss_gather: float = 0.0
    backward_gather: float = 0.0
    held_per_parameter: float = 0.0
    head_gradient: float = 0.0
    root_grows: bool = True
    reduce: float = 0.0
    pending: float = 0.0
    last_reduce: float = 0.0
    step: float = 0.0
    update_gradients: float = 0.0
    pooled: str = ""
    pools: float = 0.0
    scattered: bool = False
    host: float = 0.0
    nvme: float = 0.0


def optimizer_bytes(run: RunShape) -> float:
    """State of the optimizer per trainable parameter.

    Raises:
        ValueError: an optimizer that is not known.
    """
    if run.optimizer not in OPTIMIZER_STATE_BYTES:
        raise ValueError(f"unknown optimizer {run.optimizer}; known are {', '.join(OPTIMIZER_STATE_BYTES)}")
    return OPTIMIZER_STATE_BYTES[run.optimizer]


def width(run: RunShape) -> int:
    """Bytes of a number in the products."""
    return 4 if run.precision == "fp32" else 2


def offloaded_input_bytes(settings: MemorySettings, run: RunShape, hidden_size: int) -> float:
    """Of each block, what waits in host memory for its backward: its input, in float32 under autocast. Small ones stay on the card."""
    if not settings.activation_offload or settings.activation_checkpointing == "none" or run.engine == "device_map":
        return 0.0
    size = settings.micro_batch_size * run.own_tokens * hidden_size * (2 if run.weights == "bf16" else 4)
    return float(size) if size >= LEAST_OFFLOADED_BYTES else 0.0


def engine_memory(shape: ModelShape, run: RunShape, settings: MemorySettings) -> EngineMemory:
    """The engine's share of one rank."""
    if settings.optimizer_bf16:
        run = dataclasses.replace(run, optimizer="adamw_bf16")
    functions = {"ddp": _ddp, "device_map": _device_map, "fsdp": _fsdp, "zero1": _zero12, "zero2": _zero12, "zero3": _zero3}
    memory = functions[run.engine](shape, run, settings)
    snapshots = 2 * (4 + optimizer_bytes(run)) * shape.num_trainable / run.num_shards if run.snapshots else 0.0
    return dataclasses.replace(memory, host=memory.host + PROCESS_HOST_BYTES + snapshots)


def _frozen_width(run: RunShape) -> int:
    """Frozen weights have no master copy: they stay in the dtype of the products."""
    return width(run)


def _update_copy(run: RunShape, num_updated: float) -> float:
    """Bytes that an update of so many parameters borrows: torch's multi-tensor Adam makes one more copy, fused Adam none.

    Adam with averages in bfloat16 has two of each piece in float32, and as many random numbers.
    """
    if run.optimizer == "adamw_bf16":
        return 16 * min(num_updated, BF16_UPDATE_PIECE)
    return 4 * num_updated if run.optimizer == "adamw_torch" else 0.0


def _ddp(shape: ModelShape, run: RunShape, settings: MemorySettings) -> EngineMemory:
    """float32 weights and gradients; the buckets of torch's reducer are the gradients themselves (`gradient_as_bucket_view`).

    With recovery there is no reducer: gradients appear in backward and are summed in place. Updated in backward, one at a time is there.
    """
    trained = shape.num_trainable
    many = run.num_processes > 1 and run.ddp_reducer
    if run.frees_gradients(settings):
        largest = min(shape.largest_layer.largest_tensor, trained)
        root = shape.num_embedding if shape.num_root_trainable else 0
        return EngineMemory(
            parameters=4 * trained + _frozen_width(run) * shape.num_frozen,
            optimizer=optimizer_bytes(run) * trained,
            # Of tied weights the head's part waits for the embedding's.
            head_gradient=4 * shape.num_head if shape.tied and shape.head_trainable else 0,
            reduce=4 * largest + _update_copy(run, largest),
            last_reduce=4 * root + _update_copy(run, root),
        )
    return EngineMemory(
        parameters=4 * trained + _frozen_width(run) * shape.num_frozen,
        gradients=4 * trained if many else 0,
        growing_gradients=0.0 if many else 4.0,
        optimizer=optimizer_bytes(run) * trained,
        step=_update_copy(run, trained),
    )


def _device_map(shape: ModelShape, run: RunShape, settings: MemorySettings) -> EngineMemory:
    """The same on one process, spread evenly over its cards."""
    alone = _ddp(shape, dataclasses.replace(run, num_processes=1), settings)
    count = run.num_processes
    return dataclasses.replace(
        alone,
        parameters=alone.parameters / count,
        growing_gradients=alone.growing_gradients / count,
        optimizer=alone.optimizer / count,
        step=_update_copy(run, shape.num_trainable / count),
    )


def _fsdp(shape: ModelShape, run: RunShape, settings: MemorySettings) -> EngineMemory:
    """float32 shards; layers gathered one by one, the next one already on its way; everything else is one group, gathered throughout.

    While a layer runs backward there are its weights, those of the layer before it (prefetched), and the reduce-scatter input of the
    layer after it. Gradients stay unsharded until their group's backward ends: the head's therefore until the very end.

    torch gathers into memory of one stream, which keeps room for what is outside the layers and two layers, and reduces into memory of
    another: the sharded gradients lie there, and while they are added to, or go to the host, those of one more group (36 runs on one and
    two H200s: reserved within 3 %).
    """
    shards, trained, w = run.num_shards, shape.num_trainable, width(run)
    reduced = 4 if run.reduce_in_float32 else w
    layer = shape.largest_layer
    root = w * shape.num_root
    one = w * layer.num_parameters
    all_layers = w * (shape.num_parameters - shape.num_root)
    reshards = settings.reshard_after_forward
    offload = settings.param_offload != "none"
    resident = (4 * trained + _frozen_width(run) * shape.num_frozen) / shards
    states = optimizer_bytes(run) * trained / shards
    gradients = 4 * trained / shards
    frees = run.frees_gradients(settings)
    # Of one group at a time: its reduced gradients, and what its update borrows.
    reduced_one, reduced_root = (
        4 * each / shards + _update_copy(run, each / shards) if frees else 0.0 for each in (layer.num_trainable, shape.num_root_trainable)
    )
    more = max(shape.num_root_trainable, layer.num_trainable) if offload or frees or run.samples_per_step > settings.micro_batch_size else 0
    gathers = root + 2 * one + ((4 + w) * shape.num_root / shards if offload else 0) if shards > 1 else 0
    return EngineMemory(
        pooled="gradients",
        pools=gathers + (0 if offload or frees else gradients) + reduced * more / shards,
        parameters=0 if offload else resident,
        growing_gradients=0.0 if offload or frees else 4.0 / shards,
        optimizer=0 if offload else states,
        forward_gather=root + (2 * one if reshards else all_layers),
        loss_gather=root + (one if reshards else all_layers),
        backward_gather=root + (2 * one if reshards else 0),
        held_per_parameter=0 if reshards else w,
        head_gradient=w * shape.num_head if shape.head_trainable else 0,
        root_grows=False,
        reduce=w * min(layer.largest_tensor, layer.num_trainable),
        pending=reduced * layer.num_trainable + reduced_one,
        last_reduce=(w + reduced) * shape.num_root_trainable + reduced_root,
        step=0 if offload or frees else _update_copy(run, trained / shards),
        host=(resident + states + gradients) if offload else 0,
    )


def _zero12(shape: ModelShape, run: RunShape, settings: MemorySettings) -> EngineMemory:
    """Whole 16-bit weights; float32 master copies and states are sharded; stage 2 shards the reduced gradients too.

    Both stages keep the reduced gradients of a rank's part from the last backward on, and collect those of the next in float32, in memory
    of the stream that reduces. The update makes a float32 copy of them and another in 16 bits (3.2B Llama and 1.7B Qwen3 on two H200s:
    within 1 %). Offloaded, all of that lives on the host, and one tensor of the largest size waits on the card for its copy.
    """
    shards, trained, w = run.num_processes, shape.num_trainable, width(run)
    zero = run.zero.resolved(shape)
    bucket = settings.reduce_bucket_size or zero.reduce_bucket_size or 0
    states = (4 + optimizer_bytes(run)) * trained / shards
    offload = settings.optimizer_offload > 0
    partitioned = run.engine == "zero2"
    largest = max(shape.largest_layer.largest_tensor, shape.num_embedding if shape.num_root_trainable else 0)
    return EngineMemory(
        pooled="gradients",
        pools=(2 * w + 4) * largest if offload else 4 * trained / shards + w * bucket,
        parameters=w * shape.num_parameters,
        gradients=0 if offload else w * trained / shards,
        growing_gradients=0.0 if partitioned else float(w),
        optimizer=0 if offload else states,
        buffers=w * bucket * (2 if run.zero.overlap_comm else 1) + (w * largest if offload else 0),
        reduce=w * largest,
        last_reduce=w * largest,
        step=0 if offload else (w + 4) * trained / shards,
        update_gradients=0 if offload else w * trained / shards,
        host=(states + 4 * trained / shards) if offload else 0,
    )


def zero3_sub_groups(shape: ModelShape, run: RunShape) -> tuple[int, int]:
    """(sub-groups of a rank's matrices, all its sub-groups): ZeRO-3 offloads whole ones; norms and biases have one of their own."""
    matrices = math.ceil(shape.num_trainable / run.num_shards / run.zero.sub_group_size)
    return matrices, matrices + (1 if shape.num_small else 0)


def offload_ratios(shape: ModelShape, run: RunShape) -> list[float]:
    """Values of DeepSpeed's `offload_optimizer.ratio` that leave about a quarter, a half and three quarters of a rank's states on its card.

    DeepSpeed keeps the first int((1 - ratio) x sub-groups) whole ones there, so a shard of few sub-groups has no such values: its
    matrices lie in one of them, and stay or go as a whole.
    """
    matrices, groups = zero3_sub_groups(shape, run)
    if matrices < 4:
        return []
    return [round(1 - (matrices * quarters // 4 + 0.5) / groups, 4) for quarters in (3, 2, 1)]


def offloaded_share(shape: ModelShape, run: RunShape, ratio: float) -> float:
    """Share of a rank's optimizer states that a ratio really moves to the host."""
    matrices, groups = zero3_sub_groups(shape, run)
    on_card = min(int((1 - ratio) * groups), matrices)
    return 1.0 - on_card / matrices


def _zero3(shape: ModelShape, run: RunShape, settings: MemorySettings) -> EngineMemory:
    """Everything sharded. How much stays gathered is DeepSpeed's choice within its limits.

    A parameter is released after use unless it is used again within `max_reuse_distance` parameters: at the turn from forward to
    backward so many stay, and `max_live_parameters` limits gathering ahead. The loss reaches the head through the model, not through the
    head's own forward; what is outside the layers was then seen to stay gathered, but for a frozen embedding (Llamas of 1.2, 3.2 and 8B on
    two H200s, by the allocator's history). With weights on the host no more than `max_live_parameters` were there. All that lies in memory
    of the gathering stream; reductions have a stream of their own, through which the embedding's gradient goes in the copies that
    `pools` counts where weights come from the host.
    """
    shards, trained, w = run.num_processes, shape.num_trainable, width(run)
    zero = run.zero.resolved(shape)
    bucket = settings.reduce_bucket_size or zero.reduce_bucket_size or 0
    prefetch = settings.prefetch_bucket_size or zero.prefetch_bucket_size or 0
    live_limit = settings.max_live_parameters or zero.max_live_parameters
    reuse = min(zero.max_reuse_distance, live_limit)
    layer = shape.largest_layer
    offload_parameters = settings.param_offload != "none"
    used_again = shape.num_root if shape.num_root_trainable else shape.num_head
    turn = min(shape.num_parameters, max(reuse, used_again) if offload_parameters else reuse + used_again + prefetch)
    running = min(shape.num_parameters, layer.num_parameters + prefetch)
    states = (4 + optimizer_bytes(run)) * trained / shards
    share = offloaded_share(shape, run, settings.optimizer_offload) if settings.optimizer_offload else 0.0
    persistent = w * shape.num_small if (zero.persistence_threshold or 0) >= shape.hidden_size else 0
    weights = w * shape.num_parameters / shards
    group = min(run.zero.sub_group_size, trained / shards)
    on_disk = settings.param_offload == "nvme"
    host = share * states + (6 * trained / shards if share else 0)
    embedding = shape.num_embedding if shape.num_root_trainable else 0
    return EngineMemory(
        pooled="gather",
        pools=w * (turn + layer.num_parameters) + ((w + (w + 4) / shards) * embedding if offload_parameters else w * bucket),
        scattered=not share,
        parameters=(0 if offload_parameters else weights) + persistent,
        gradients=0 if share else w * trained / shards,
        optimizer=(1 - share) * states,
        buffers=w * bucket,
        forward_gather=w * running,
        loss_gather=w * turn,
        backward_gather=w * turn,
        head_gradient=0,
        reduce=w * (bucket + min(layer.largest_tensor, layer.num_trainable)),
        last_reduce=w * (bucket + embedding),
        step=(w + 4) * group * (1 - share),
        host=(5 * w * max(100_000_000, shape.num_embedding) if on_disk else host + (weights if offload_parameters else 0)),
        nvme=(states + weights) if on_disk else 0,
    )
