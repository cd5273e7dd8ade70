"""What the memory planner knows about a model and a run, as plain numbers: sizes, measured activations, the shape of the job.

Pure code: no torch. `harness.activation_probe` fills `Measured`; `harness.memory` and `harness.step_time` read it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

from harness.ladder import ActivationCheckpointing, MemorySettings

EngineName = Literal["ddp", "zero1", "zero2", "zero3", "fsdp", "device_map"]
ENGINES: tuple[EngineName, ...] = ("ddp", "zero1", "zero2", "zero3", "fsdp", "device_map")

# Parameters in 16 bits without autocast, float32 parameters under 16-bit autocast, or float32 throughout.
Weights = Literal["bf16", "autocast", "fp32"]

Line = tuple[float, float]  # (constant bytes, bytes per sample of the micro-batch)


def at(line: Line, num_samples: float) -> float:
    """Value of a line."""
    return line[0] + line[1] * num_samples


def top(lines: Sequence[Line], num_samples: float) -> float:
    """Highest of several lines."""
    return max((at(line, num_samples) for line in lines), default=0.0)


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """Sizes of one kind of decoder layer, in parameters.

    Attributes:
        num_active: parameters that a token passes through (a share of a mixture's experts).
        num_small: in tensors of one dimension: norms and biases.
    """

    num_parameters: int
    num_trainable: int
    num_active: int
    num_small: int = 0
    largest_tensor: int = 0
    num_tensors: int = 9


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """Sizes of a causal LM. Counts are parameters, tied ones once.

    Attributes:
        kind_of_layer: for every layer, its index in `kinds`.
        num_root: everything outside the layers: embedding, final norm, head.
        num_head: of the output projection, also when it is the embedding itself.
        plain_head: the logits are exactly the head applied to the last hidden state, so the loss can be cut into chunks.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    kinds: tuple[LayerKind, ...]
    kind_of_layer: tuple[int, ...]
    num_root: int
    num_root_trainable: int
    num_embedding: int
    num_head: int
    tied: bool = False
    head_trainable: bool = True
    plain_head: bool = True
    model_type: str = ""
    max_positions: int | None = None

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelShape:
        values = dict(values)
        values["kinds"] = tuple(LayerKind(**kind) for kind in values["kinds"])
        values["kind_of_layer"] = tuple(values["kind_of_layer"])
        return cls(**values)

    @property
    def num_layers(self) -> int:
        return len(self.kind_of_layer)

    def _over_layers(self, name: str) -> int:
        return sum(int(getattr(self.kinds[kind], name)) for kind in self.kind_of_layer)

    @functools.cached_property
    def num_parameters(self) -> int:
        return self.num_root + self._over_layers("num_parameters")

    @functools.cached_property
    def num_trainable(self) -> int:
        return self.num_root_trainable + self._over_layers("num_trainable")

    @property
    def num_frozen(self) -> int:
        return self.num_parameters - self.num_trainable

    @functools.cached_property
    def num_active(self) -> int:
        """Parameters a token passes through, embedding lookup included."""
        return self.num_root + self._over_layers("num_active")

    @functools.cached_property
    def largest_layer(self) -> LayerKind:
        return max(self.kinds, key=lambda kind: kind.num_parameters)

    @functools.cached_property
    def num_small(self) -> int:
        return self._over_layers("num_small") + self.hidden_size


@dataclasses.dataclass(frozen=True)
class KindMemory:
    """What one layer of a kind adds, bytes as lines in the samples of a micro-batch.

    Attributes:
        forward_kept: alive after its forward that was not before.
        backward_kept: the same as seen in backward, when autocast's cached weight copies are gone.
        forward_peak: highest point in its forward, over what was alive before it.
        backward_peak: highest point in its backward (recompute included), over what was alive when its gradient arrived.
        forward_flops: per sample.
        backward_flops: per sample, recompute included.
    """

    forward_kept: Line
    backward_kept: Line
    forward_peak: tuple[Line, ...]
    backward_peak: tuple[Line, ...]
    forward_flops: float
    backward_flops: float

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> KindMemory:
        values = dict(values)
        for name in ("forward_kept", "backward_kept"):
            values[name] = tuple(values[name])
        for name in ("forward_peak", "backward_peak"):
            values[name] = tuple(tuple(line) for line in values[name])
        return cls(**values)


@dataclasses.dataclass(frozen=True)
class LayerMemory:
    """Activations of a decoder: the parts outside its layers, and one `KindMemory` per kind of layer."""

    forward_start: Line
    forward_base: Line
    backward_base: Line
    norm_forward_peak: tuple[Line, ...]
    norm_backward_peak: tuple[Line, ...]
    layers: tuple[KindMemory, ...]
    measured: bool = True

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LayerMemory:
        def lines(name: str) -> tuple[Line, ...]:
            return tuple((line[0], line[1]) for line in values[name])

        def line(name: str) -> Line:
            return values[name][0], values[name][1]

        return cls(
            forward_start=line("forward_start"),
            forward_base=line("forward_base"),
            backward_base=line("backward_base"),
            norm_forward_peak=lines("norm_forward_peak"),
            norm_backward_peak=lines("norm_backward_peak"),
            layers=tuple(KindMemory.from_dict(kind) for kind in values["layers"]),
        )


@dataclasses.dataclass(frozen=True)
class LossMemory:
    """Peak of the loss over its input, as a line in the TOKENS of a micro-batch, and FLOPs per token."""

    line: Line
    flops_per_token: float
    measured: bool = True


@dataclasses.dataclass(frozen=True)
class Measured:
    """A model's sizes with what was measured for one block size; what is missing comes from closed forms.

    Attributes:
        layers: by (weights, checkpointing).
        losses: by (weights, tokens per chunk).
        failures: why a mode could not be measured.
        unsupported: modes of activation checkpointing that the architecture does not have.
        sequence_parallel_size: processes that share each sample; all figures are of one of them.
    """

    shape: ModelShape
    block_size: int
    layers: dict[tuple[str, str], LayerMemory] = dataclasses.field(default_factory=dict)
    losses: dict[tuple[str, int], LossMemory] = dataclasses.field(default_factory=dict)
    failures: tuple[str, ...] = ()
    unsupported: frozenset[str] = frozenset()
    sequence_parallel_size: int = 1

    @classmethod
    def from_dict(cls, values: dict[str, Any], block_size: int, sequence_parallel_size: int = 1) -> Measured:
        """Reads the answer of `harness.activation_probe`."""
        layers = {(point["weights"], point["checkpointing"]): LayerMemory.from_dict(point) for point in values["layers"]}
        losses = {
            (loss["weights"], loss["chunk"]): LossMemory((loss["line"][0], loss["line"][1]), loss["flops_per_token"])
            for loss in values["losses"]
        }
        failures = tuple(f"{item['weights']}, checkpointing {item['checkpointing']}: {item['reason']}" for item in values["failures"])
        shape, unsupported = ModelShape.from_dict(values["shape"]), frozenset(values["unsupported"])
        return cls(shape, block_size, layers, losses, failures, unsupported, sequence_parallel_size)

    def merged(self, other: Measured) -> Measured:
        """With what another measurement of the same model and block size adds."""
        return dataclasses.replace(
            self,
            layers={**self.layers, **other.layers},
            losses={**self.losses, **other.losses},
            failures=tuple(dict.fromkeys(self.failures + other.failures)),
            unsupported=self.unsupported | other.unsupported,
        )

    def layer_memory(self, weights: Weights, mode: ActivationCheckpointing) -> LayerMemory:
        found = self.layers.get((weights, mode))
        return found if found is not None else closed_form_layers(self.shape, weights, mode, self.block_size, self.sequence_parallel_size)

    def loss_memory(self, weights: Weights, chunk: int) -> LossMemory:
        chunk = chunk if self.shape.plain_head else 0
        found = self.losses.get((weights, chunk))
        return found if found is not None else closed_form_loss(self.shape, weights, chunk)


def closed_form_layers(
    shape: ModelShape, weights: Weights, mode: ActivationCheckpointing, block_size: int, sequence_parallel_size: int = 1
) -> LayerMemory:
    """Activations of a Llama-like decoder by formula, where the model's own code could not be measured.

    Processes that share a sample have a part of its tokens, and in attention all tokens of a part of the heads.

    Bytes per token of a layer: 16h + 4q + 4kv + 8f + 4 heads in bf16 (two RMSNorms with a float32 copy each, the inputs of all
    products, attention's inputs and output and its log-sum-exp, four tensors of the feed-forward width). Other architectures were
    seen at 0.65 to 1.6 times that.
    """
    wide = 1.0 if weights == "bf16" else (1.2 if weights == "autocast" else 2.0)  # measured on Llama shapes
    whole_tokens, block_size = block_size, -(-block_size // sequence_parallel_size)
    hidden_bytes = (2 if weights == "bf16" else 4) * shape.hidden_size * block_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    feed_forward = 2.0 * shape.intermediate_size * block_size * (4 if weights == "fp32" else 2)
    per_token = 16 * shape.hidden_size + 4 * queries + 4 * keys + 8 * shape.intermediate_size + 4 * shape.num_heads
    whole = wide * per_token * block_size
    kept = {"none": whole, "selective": 0.32 * whole, "full": float(hidden_bytes)}[mode]
    recompute = {"none": 0.0, "selective": 1 / 3, "full": 1.0}[mode]
    kinds = []
    for kind in shape.kinds:
        copies = 2.0 * kind.num_parameters if weights == "autocast" else 0.0
        attention_flops = 2.0 * block_size * whole_tokens * queries
        flops = 2.0 * kind.num_active * block_size + attention_flops
        kinds.append(
            KindMemory(
                forward_kept=(copies, kept),
                backward_kept=(copies if mode == "none" else 0.0, kept),
                forward_peak=((copies, whole if mode == "none" else whole / 2),),
                backward_peak=((0.0, whole - kept + feed_forward),),
                forward_flops=flops,
                backward_flops=flops * (2 + recompute),
            )
        )
    base, norm = (0.0, 3.0 * hidden_bytes), ((0.0, 20.0 * shape.hidden_size * block_size),)
    return LayerMemory(base, base, base, norm, norm, tuple(kinds), measured=False)


def closed_form_loss(shape: ModelShape, weights: Weights, chunk: int) -> LossMemory:
    """Peak of the loss: 12 bytes x logits (log-softmax and two gradients in float32), and with chunks one head gradient beside them."""
    width, head = (2 if weights == "bf16" else 4), shape.vocab_size * shape.hidden_size
    copies = 2 * head if weights == "autocast" else 0
    flops = 6.0 * head
    if not chunk:
        extra = 0.0 if shape.plain_head else 4.0 * shape.vocab_size  # a soft cap keeps its own output and input
        return LossMemory((float(copies), 12.0 * shape.vocab_size + extra), flops, measured=False)
    gradient = 2 * head if shape.head_trainable else 0  # under autocast a float32 one follows it when the chunks are done
    peak = max(12.0 * chunk * shape.vocab_size + gradient + copies, gradient + (width * head if copies and gradient else 0))
    return LossMemory((peak, float(width * shape.hidden_size)), flops, measured=False)


@dataclasses.dataclass(frozen=True)
class ZeroOptions:
    """Sizes of DeepSpeed's buffers, elements; the defaults are what "auto" becomes (None) and DeepSpeed's own.

    Attributes:
        reduce_bucket_size, prefetch_bucket_size: None is the largest layer, at least hidden_size squared.
        persistence_threshold: None is 10 x hidden_size.
        overlap_comm: stages 1 and 2 then keep two reduce buckets.
        pin_memory: of offloaded states.
    """

    reduce_bucket_size: int | None = None
    prefetch_bucket_size: int | None = None
    persistence_threshold: int | None = None
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    sub_group_size: int = 1_000_000_000
    overlap_comm: bool = True
    pin_memory: bool = True

    def resolved(self, shape: ModelShape) -> ZeroOptions:
        layer = max(shape.largest_layer.num_parameters, shape.hidden_size**2)
        return dataclasses.replace(
            self,
            reduce_bucket_size=layer if self.reduce_bucket_size is None else self.reduce_bucket_size,
            prefetch_bucket_size=layer if self.prefetch_bucket_size is None else self.prefetch_bucket_size,
            persistence_threshold=10 * shape.hidden_size if self.persistence_threshold is None else self.persistence_threshold,
        )


@dataclasses.dataclass(frozen=True)
class RunShape:
    """A job, as far as memory and speed depend on it.

    Attributes:
        num_processes: ranks; for the device map, GPUs of its one process.
        num_local_processes: ranks on one node.
        samples_per_step: of one rank in one optimizer step; settings only cut them into micro-batches.
        precision: of the products.
        optimizer: `--optim`.
        lora: the base model is frozen and kept in 16 bits; only adapters train.
        fused_layers: Liger's norms and feed-forward, which keep less.
        compiled_layers: layers are compiled, and compute elementwise products again instead of keeping them.
        shard_group_size: FSDP ranks that share one copy; None is all of them (hybrid sharding gives fewer).
        reduce_in_float32: FSDP2 adds up gradients in float32.
        ddp_reducer: DDP sums gradients by torch's own reducer (`--no_oom_recovery`), whose buckets stay.
        in_backward: each parameter is updated in backward and its gradient freed, in the last micro-batch of a step.
        sequence_parallel_size: processes that share each sample, a slice of its tokens each.
        snapshots: each rank keeps two copies of its shard and optimizer state in host memory.
    """

    engine: EngineName
    num_processes: int
    block_size: int
    samples_per_step: int = 8
    num_local_processes: int = 8
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    optimizer: str = "adamw_torch_fused"
    lora: bool = False
    fused_layers: bool = False
    compiled_layers: bool = False
    shard_group_size: int | None = None
    reduce_in_float32: bool = True
    ddp_reducer: bool = False
    in_backward: bool = False
    sequence_parallel_size: int = 1
    snapshots: bool = False
    zero: ZeroOptions = dataclasses.field(default_factory=ZeroOptions)

    @property
    def own_tokens(self) -> int:
        """Of a sample, what one rank has."""
        return -(-self.block_size // self.sequence_parallel_size)

    @property
    def weights(self) -> Weights:
        """How parameters look inside the products."""
        if self.precision == "fp32":
            return "fp32"
        return "autocast" if self.engine in ("ddp", "device_map") else "bf16"

    def frees_gradients(self, settings: MemorySettings) -> bool:
        """Whether there are never gradients of the whole model: those of several micro-batches add up first."""
        return self.in_backward and settings.micro_batch_size >= self.samples_per_step

    def compiles(self, settings: MemorySettings) -> bool:
        """Whether layers are compiled with these settings: not where ZeRO-3 hands weights of the host on in small pieces."""
        return self.compiled_layers and not (self.engine == "zero3" and settings.param_offload != "none")

    @property
    def num_shards(self) -> int:
        return self.shard_group_size or self.num_processes

    @property
    def num_local(self) -> int:
        return min(self.num_local_processes, self.num_processes)

    @property
    def num_nodes(self) -> int:
        return -(-self.num_processes // self.num_local)
