"""How long an optimizer step takes, well enough to rank settings against each other, and the bytes it sends.

Pure code. Compute: FLOPs as measured on the model's code (recompute included) and the memory traffic of everything that is not a product.
Collectives: bytes over the link's bandwidth, hidden behind compute where the engine overlaps them. Offload: bytes over PCIe and the
host's Adam. The constants are round figures of one H100 node; a ranking needs their ratios, not their last digit.
"""

from __future__ import annotations

import collections
import dataclasses
import math

from harness.engine_memory import offloaded_input_bytes, optimizer_bytes, width
from harness.ladder import MemorySettings
from harness.model_shape import Measured, RunShape, at

# Share of the data sheet's FLOP/s that large products reach, and of its bandwidth that elementwise kernels reach.
PRODUCT_EFFICIENCY = 0.68
BANDWIDTH_EFFICIENCY = 0.75
# Bytes read and written by elementwise kernels of forward and backward, per byte kept for backward (norms, rotary, activation, residual).
TRAFFIC_PER_KEPT_BYTE = 5.0
# Tokens of a micro-batch at which products reach half of their best speed.
HALF_SPEED_TOKENS = 256
# The host launches what a layer computes; below this a GPU waits for Python. Forward and backward of one layer, seconds.
LAUNCH_S = {"ddp": 1.6e-3, "device_map": 1.8e-3, "fsdp": 2.6e-3, "zero1": 2.0e-3, "zero2": 2.2e-3, "zero3": 5.0e-3}
# Share of a collective that stays visible although it runs beside compute.
NOT_HIDDEN = 0.12
# Of a forward, what is computed again in backward.
RECOMPUTED = {"none": 0.0, "selective": 0.8, "full": 1.0}
# Of the ideal speed-up of a pipeline, what all forwards before all backwards under a device map reached: 1.67 with 8 micro-batches on 4
# H200s, where k micro-batches on n cards could give n k / (n + k - 1).
PIPELINE_EFFICIENCY = 0.58


@dataclasses.dataclass(frozen=True)
class Hardware:
    """What one rank has, per second.

    Attributes:
        name: of the card.
        peak_flops: dense, in the precision of the products.
        memory_bandwidth: of the card, bytes/s.
        link_bandwidth: what a ring over all ranks moves per rank inside a node, bytes/s.
        network_bandwidth: the same between nodes.
        pcie_bandwidth: host to card, bytes/s, with all cards of the node at it.
        host_adam_rate: parameters a second that a node's CPUs update.
        nvme_bandwidth: of a node, bytes/s.
    """

    name: str = "H100"
    peak_flops: float = 989e12
    memory_bandwidth: float = 3.35e12
    link_bandwidth: float = 300e9
    network_bandwidth: float = 40e9
    pcie_bandwidth: float = 20e9
    host_adam_rate: float = 1.5e9
    nvme_bandwidth: float = 5e9


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step of one rank, and what it sends.

    Attributes:
        compute_s: products and elementwise kernels, recompute included.
        exposed_communication_s: collectives that compute does not hide.
        offload_s: PCIe and NVMe traffic that is not hidden, and the update on the host.
        update_s: the update on the card.
        communicated_bytes: sent by this rank.
    """

    compute_s: float
    exposed_communication_s: float
    offload_s: float
    update_s: float
    communicated_bytes: float

    @property
    def total_s(self) -> float:
        return self.compute_s + self.exposed_communication_s + self.offload_s + self.update_s


def _sent_bytes(measured: Measured, run: RunShape, settings: MemorySettings, num_micro: int) -> tuple[float, float]:
    """Bytes a rank sends: (per micro-batch, once a step)."""
    shape, w = measured.shape, width(run)
    if run.num_processes == 1 or run.engine == "device_map":
        return 0.0, 0.0
    ring = (run.num_shards - 1) / run.num_shards
    everyone = (run.num_processes - 1) / run.num_processes
    weights, trained = w * shape.num_parameters, shape.num_trainable
    if run.engine == "ddp":
        return 0.0, 2 * everyone * 4 * trained
    if run.engine == "zero1":
        return 0.0, 2 * everyone * w * trained + everyone * w * trained
    if run.engine == "zero2":
        return everyone * w * trained, everyone * w * trained
    if run.engine == "zero3":
        return everyone * (2 * weights + w * trained), 0.0
    gathers = 2 if settings.reshard_after_forward else 1
    reduce = (4 if run.reduce_in_float32 else w) * trained
    replicas = run.num_processes // run.num_shards
    across = 2 * (replicas - 1) / replicas * reduce / run.num_shards
    return ring * (gathers * weights + reduce) + across, 0.0


def _exchanged_bytes(measured: Measured, run: RunShape, settings: MemorySettings) -> float:
    """Bytes that a rank sends around attention, per micro-batch: queries, keys, values, outputs; gradients; again where recomputed."""
    size, shape = run.sequence_parallel_size, measured.shape
    keys = math.lcm(shape.num_key_value_heads, size)
    there = 2 * (shape.num_heads + keys) * shape.head_dim * settings.micro_batch_size * run.own_tokens * width(run) * (size - 1) / size
    times = 2 + (settings.activation_checkpointing != "none")
    return there * times * len(shape.kind_of_layer)


def _compute(measured: Measured, run: RunShape, settings: MemorySettings, hardware: Hardware) -> float:
    """Seconds of one micro-batch on one card."""
    shape, batch = measured.shape, settings.micro_batch_size
    layers = measured.layer_memory(run.weights, settings.activation_checkpointing)
    everything = measured.layer_memory(run.weights, "none")
    loss = measured.loss_memory(run.weights, settings.loss_chunk_size)
    tokens = batch * run.own_tokens
    flops_rate = hardware.peak_flops * PRODUCT_EFFICIENCY * (0.5 if run.precision == "fp32" else 1.0)
    flops_rate *= tokens / (tokens + HALF_SPEED_TOKENS)
    bandwidth = hardware.memory_bandwidth * BANDWIDTH_EFFICIENCY
    frozen = 1.0 - shape.num_trainable / shape.num_parameters
    repeat = RECOMPUTED[settings.activation_checkpointing]
    seconds = 0.0
    for kind, count in collections.Counter(shape.kind_of_layer).items():
        flops = batch * (layers.layers[kind].forward_flops + layers.layers[kind].backward_flops)
        traffic = at(everything.layers[kind].forward_kept, batch) * TRAFFIC_PER_KEPT_BYTE * (1 + 0.4 * repeat) * (1 - 0.3 * frozen)
        if run.fused_layers or run.compiles(settings):
            traffic *= 0.6
        seconds += count * max(flops / flops_rate + traffic / bandwidth, LAUNCH_S[run.engine] * (1 + 0.35 * repeat))
    logits = 16.0 * shape.vocab_size * tokens  # the loss reads and writes each logit a few times
    return seconds + loss.flops_per_token * tokens / flops_rate + logits / bandwidth


def step_time(settings: MemorySettings, measured: Measured, run: RunShape, hardware: Hardware) -> StepTime:
    """Predicts one optimizer step of `run.samples_per_step` samples a rank."""
    shape, w = measured.shape, width(run)
    num_micro = -(-run.samples_per_step // settings.micro_batch_size)
    # The last micro-batch may be smaller: count samples, not micro-batches, but pay the launches of each.
    compute = _compute(measured, run, settings, hardware)
    whole, rest = divmod(run.samples_per_step, settings.micro_batch_size)
    total = compute * whole + (_compute(measured, run, settings.replace(micro_batch_size=rest), hardware) if rest else 0.0)
    if run.engine == "device_map":
        depth = min(settings.in_flight_micro_batches or num_micro, num_micro)
        ideal = run.num_processes * depth / (run.num_processes + depth - 1)
        total /= max(1.0, PIPELINE_EFFICIENCY * ideal)
    per_micro, per_step = _sent_bytes(measured, run, settings, num_micro)
    bandwidth = hardware.network_bandwidth if run.num_nodes > 1 else hardware.link_bandwidth
    micro_s, step_s = per_micro / bandwidth, per_step / bandwidth
    # With less gathered ahead, collectives are shorter and wait for each other.
    not_hidden = NOT_HIDDEN * (1.5 if settings.prefetch_bucket_size is not None else 1.0)
    backward = 0.66 * compute
    exposed = num_micro * (max(0.0, micro_s - compute) + not_hidden * min(micro_s, compute))
    if run.engine == "ddp":
        exposed += max(0.0, step_s - backward) + NOT_HIDDEN * min(step_s, backward)
    else:
        exposed += step_s  # ZeRO gathers updated weights with nothing to hide behind
    exchanged = _exchanged_bytes(measured, run, settings)
    exposed += num_micro * exchanged / bandwidth  # attention waits for it
    shard = shape.num_trainable / run.num_shards
    offload = _offload(settings, measured, run, hardware, num_micro, compute)
    on_card = 1.0 - _optimizer_share_on_host(settings, run)
    update = on_card * shard * (2 * (4 + optimizer_bytes(run)) + 4 + w) / (hardware.memory_bandwidth * BANDWIDTH_EFFICIENCY)
    return StepTime(total, exposed, offload, update, num_micro * (per_micro + exchanged) + per_step)


def _optimizer_share_on_host(settings: MemorySettings, run: RunShape) -> float:
    if run.engine == "fsdp":
        return 1.0 if settings.param_offload != "none" else 0.0
    return settings.optimizer_offload if run.engine in ("zero1", "zero2", "zero3") else 0.0


def _offload(settings: MemorySettings, measured: Measured, run: RunShape, hardware: Hardware, num_micro: int, compute: float) -> float:
    """Seconds that host memory and disk add to a step."""
    shape, w = measured.shape, width(run)
    shards = run.num_shards
    share = _optimizer_share_on_host(settings, run)
    seconds = 0.0
    if share:
        trained = shape.num_trainable / shards
        seconds += share * trained * run.num_local / hardware.host_adam_rate
        seconds += share * trained * (4 + w) / hardware.pcie_bandwidth
        if num_micro > 1 and run.engine != "fsdp":
            seconds += (num_micro - 1) * share * trained * w / hardware.pcie_bandwidth
    if settings.param_offload != "none" and run.engine in ("fsdp", "zero3"):
        weights = (4 if run.engine == "fsdp" else w) * shape.num_parameters / shards
        gradients = (4 if run.engine == "fsdp" else 0) * shape.num_trainable / shards
        rate = hardware.pcie_bandwidth
        if settings.param_offload == "nvme":
            rate = min(rate, hardware.nvme_bandwidth / run.num_local)
        moved = (2 * weights + gradients) / rate
        seconds += num_micro * (max(0.0, moved - compute) + NOT_HIDDEN * min(moved, compute))
        if settings.param_offload == "nvme":
            states = 2 * (4 + optimizer_bytes(run)) * shape.num_trainable / shards
            seconds += states * run.num_local / hardware.nvme_bandwidth
    return seconds + num_micro * _activation_copies(settings, measured, run, hardware, compute)


def _activation_copies(settings: MemorySettings, measured: Measured, run: RunShape, hardware: Hardware, compute: float) -> float:
    """Seconds that copies of the blocks' inputs add to a micro-batch: to the host beside forward, back beside backward."""
    moved = len(measured.shape.kind_of_layer) * offloaded_input_bytes(settings, run, measured.shape.hidden_size)
    one_way, seconds = moved / hardware.pcie_bandwidth, 0.0
    forward = 1.0 / (3.0 + RECOMPUTED[settings.activation_checkpointing])
    for beside in (forward * compute, (1.0 - forward) * compute):
        seconds += max(0.0, one_way - beside) + NOT_HIDDEN * min(one_way, beside)
    return seconds
