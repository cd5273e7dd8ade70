"""A memory plan as text for people: one rank's memory by part, the ladder, a comparison of engines, the line that starts the job."""

from __future__ import annotations

from collections.abc import Sequence

from harness.candidates import Candidate, EnginePlan, Limits
from harness.engine_memory import GIB
from harness.memory import MemoryEstimate
from harness.model_shape import Measured, RunShape

# What each part is, and where its figure comes from.
PARTS: dict[str, tuple[str, str]] = {
    "parameters": ("parameters", "counted"),
    "gradients": ("gradients", "counted"),
    "optimizer": ("optimizer states, master weights", "counted"),
    "activations": ("activations", "measured"),
    "loss": ("logits and loss", "measured"),
    "gather": ("gathered weights", "closed form"),
    "reduce": ("gradients being reduced", "closed form"),
    "buffers": ("communication buffers", "closed form"),
    "update": ("copies of the update", "closed form"),
    "workspace": ("cuBLAS workspaces", "closed form"),
}


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of text; numbers to the right."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = [cell.ljust(size) if column == 0 else cell.rjust(size) for column, (cell, size) in enumerate(zip(row, widths, strict=True))]
        return "  " + "  ".join(cells).rstrip()

    return "\n".join([line(header), *(line(row) for row in rows)])


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f}"


def format_estimate(estimate: MemoryEstimate, title: str) -> str:
    """Memory of one rank, part by part, in every phase; the highest phase is marked."""
    phases = list(estimate.phases)
    peak = estimate.peak_phase
    header = ["GiB", *(phase.name + ("*" if phase.name == peak else "") for phase in phases), ""]
    rows = []
    for key, (name, source) in PARTS.items():
        if any(phase.parts.get(key) for phase in phases):
            if key in ("activations", "loss") and any(text.startswith(key) for text in estimate.closed_forms):
                source = "closed form"
            rows.append([name, *(gib(phase.parts.get(key, 0.0)) for phase in phases), source])
    rows.append(["allocated", *(gib(phase.total_bytes) for phase in phases), ""])
    low, expected, high = gib(estimate.low_bytes), gib(estimate.expected_bytes), gib(estimate.high_bytes)
    lines = [
        title,
        table(header, rows),
        f"  * the peak. With allocator, CUDA context and NCCL: {low} / {expected} / {high} GiB (low / expected / high)",
    ]
    host = f"  host memory {estimate.host_bytes / GIB:.0f} GiB a node, a checkpoint {estimate.checkpoint_bytes / GIB:.1f} GiB on disk"
    if estimate.nvme_bytes:
        host += f", {estimate.nvme_bytes / GIB:.0f} GiB on NVMe a node"
    return "\n".join([*lines, host])


def settings_text(candidate: Candidate) -> str:
    """Settings in a few words."""
    s = candidate.settings
    words = [f"{s.micro_batch_size} x {candidate.accumulation}", f"checkpointing {s.activation_checkpointing}"]
    words += ["inputs of blocks on host"] if s.activation_offload else []
    if s.loss_chunk_size == 0:
        words.append("whole logits")
    if candidate.engine == "fsdp" and not s.reshard_after_forward:
        words.append("no reshard")
    if candidate.engine == "device_map" and s.in_flight_micro_batches:
        words.append(f"{s.in_flight_micro_batches} in flight")
    if s.max_live_parameters is not None:
        words.append("small buffers")
    if s.optimizer_offload:
        words.append("optimizer on host" if s.optimizer_offload == 1 else f"{100 * s.optimizer_offload:.0f} % of optimizer on host")
    if s.param_offload != "none":
        place = {"cpu": "host", "nvme": "NVMe"}[s.param_offload]
        words.append(f"everything on {place}" if candidate.engine == "fsdp" else f"parameters on {place}")
    return ", ".join(words)


def number(value: float) -> str:
    return f"{value:,.0f}"


def format_ladder(plan: EnginePlan) -> str:
    """The ladder, fastest first; what fits is marked."""
    rows = []
    too_big = [candidate for candidate in plan.ladder if candidate.misfit(plan.limits, plan.figure)]
    # Of those that are too big only the smallest is of interest, unless there is nothing else.
    hidden = set(map(id, too_big[:-1])) if len(too_big) < len(plan.ladder) else set()
    for index, candidate in enumerate(plan.ladder, start=1):
        if id(candidate) in hidden:
            continue
        misfit = candidate.misfit(plan.limits, plan.figure)
        mark = "start here" if candidate is plan.chosen else ("" if not misfit else "too big")
        estimate = candidate.estimate
        rows.append(
            [
                f"{index}. {settings_text(candidate)}",
                gib(estimate.expected_bytes),
                gib(estimate.high_bytes),
                estimate.peak_phase,
                f"{estimate.host_bytes / GIB:.0f}",
                f"{candidate.time.total_s:.2f}",
                number(candidate.tokens_per_s),
                mark,
            ]
        )
    header = ["micro-batch x accumulation", "expected GiB", "high GiB", "peak in", "host GiB", "s/step", "tokens/s", ""]
    return "ladder\n" + table(header, rows)


def format_comparison(plans: Sequence[tuple[str, EnginePlan]]) -> str:
    """One row per engine, with and without offload: its fastest fitting settings, else its smallest."""
    rows = []
    for name, plan in plans:
        shown = plan.chosen or plan.smallest
        misfit = shown.misfit(plan.limits, plan.figure)
        largest = plan.largest_micro_batch
        rows.append(
            [
                name,
                gib(shown.estimate.high_bytes),
                "yes" if not misfit else "no",
                str(largest) if largest else "-",
                f"{shown.time.communicated_bytes / GIB:.1f}",
                number(shown.tokens_per_s) if not misfit else "-",
                misfit or settings_text(shown),
            ]
        )
    widest = max(len(row[-1]) for row in rows)
    rows = [[*row[:-1], row[-1].ljust(widest)] for row in rows]
    header = ["engine", "GiB (high)", "fits", "largest micro-batch", "GiB sent a step", "tokens/s", "with".ljust(widest)]
    return "engines\n" + table(header, rows)


def start_line(candidate: Candidate, model_flags: Sequence[str]) -> tuple[str, str]:
    """The command that starts the job with these settings, and what must be changed in its template ("" if nothing).

    Args:
        model_flags: --model_name_or_path or what else names the model.
    """
    run, s = candidate.run, candidate.settings
    script = ["harness/run_clm.py", *model_flags]
    tail = [f"--block_size {run.block_size}", f"--per_device_train_batch_size {s.micro_batch_size}"]
    tail.append(f"--gradient_accumulation_steps {candidate.accumulation}")
    if s.activation_checkpointing != "none":
        tail.append(f"--activation_checkpointing {s.activation_checkpointing}")
        tail += ["--activation_offload"] if s.activation_offload else []
    tail += [f"--sequence_parallel_size {run.sequence_parallel_size}"] if run.sequence_parallel_size > 1 else []
    tail += [f"--loss_chunk_size {s.loss_chunk_size}", "--train_file ...", "--output_dir out"]
    change = ""
    local = run.num_local
    if run.engine == "ddp":
        head = f"torchrun --nproc_per_node {local}" if run.num_processes > 1 else "python"
    elif run.engine == "device_map":
        head, script = "python", [*script, "--device_map dynamic"]
        script += [f"--in_flight_micro_batches {s.in_flight_micro_batches}"] if s.in_flight_micro_batches else []
    elif run.engine == "fsdp":
        name = "full_shard_offload" if s.param_offload != "none" else ("full_shard" if s.reshard_after_forward else "shard_grad_op")
        head = f"accelerate launch --config_file fsdp_configs/{name}.yaml --num_processes {run.num_processes}"
    else:
        head = f"deepspeed --num_gpus {local}"
        template, change = _zero_template(candidate)
        script.append(f"--deepspeed ds_configs/{template}.json")
    return " ".join([head, *script, *tail]), change


def _zero_template(candidate: Candidate) -> tuple[str, str]:
    """The JSON of `ds_configs/` that comes closest, and what to change in it."""
    s, engine = candidate.settings, candidate.engine
    changes = []
    if s.param_offload == "nvme":
        name = "zero3_nvme"
    elif s.param_offload == "cpu":
        name = "zero3_offload"
    elif s.optimizer_offload:
        name = {"zero1": "zero2_offload", "zero2": "zero2_offload", "zero3": "zero3_offload"}[engine]
        if engine == "zero1":
            changes.append('set "stage" to 1')
        if engine == "zero3":
            changes.append('remove "offload_param"')
    else:
        name = engine
    keys = {
        "reduce_bucket_size": "reduce_bucket_size",
        "prefetch_bucket_size": "stage3_prefetch_bucket_size",
        "max_live_parameters": "stage3_max_live_parameters",
    }
    changes += [f'set "{key}" to {getattr(s, field)}' for field, key in keys.items() if getattr(s, field) is not None]
    return name, ", ".join(changes)


def format_job(measured: Measured, run: RunShape, limits: Limits, card: str) -> str:
    """What is being planned, in two lines."""
    shape = measured.shape
    size = f"{shape.num_parameters / 1e9:.2f} billion parameters"
    if shape.num_active < 0.98 * shape.num_parameters:
        size += f" ({shape.num_active / 1e9:.2f} active)"
    if shape.num_trainable < shape.num_parameters:
        size += f", {shape.num_trainable / 1e6:.1f} million of them trained"
    ranks = 1 if run.engine == "device_map" else run.num_processes // run.sequence_parallel_size
    shared = f", each shared by {run.sequence_parallel_size} cards" if run.sequence_parallel_size > 1 else ""
    step = ranks * run.samples_per_step
    host = "unknown" if limits.host_bytes is None else f"{limits.host_bytes / GIB:.0f} GiB"
    return "\n".join(
        [
            f"{shape.model_type}: {size}, {shape.num_layers} layers, hidden {shape.hidden_size}, vocabulary {shape.vocab_size}",
            f"{run.num_processes} x {card} with {limits.gpu_bytes / GIB:.1f} GiB, host memory {host}; {run.precision}, {run.optimizer}; "
            f"{step} samples x {run.block_size} tokens an optimizer step{shared}",
        ]
    )
