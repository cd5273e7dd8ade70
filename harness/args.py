"""Every argument of a training run, with its default and its help text; their names are transformers' where transformers has one.

harness.parsing reads them from a command line or a YAML file, harness.argument_rules says what is wrong with their values.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, Optional

from harness.findings import Finding

# HfArgumentParser resolves annotations with typing.get_type_hints, and on Python 3.10 it knows Optional[...] best.


def _field(default: Any, help_text: str, **metadata: Any) -> Any:
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata={"help": help_text, **metadata})
    return dataclasses.field(default=default, metadata={"help": help_text, **metadata})


def _choice(default: str, choices: Sequence[str], help_text: str) -> Any:
    return _field(default, help_text, choices=list(choices))


@dataclasses.dataclass
class ModelArguments:
    """Which model, from where, in which precision and with which kernels."""

    model_name_or_path: Optional[str] = _field(None, "Hub name or local folder of the model to train on.")
    config_name: Optional[str] = _field(None, "Folder or JSON file with a model config: train from scratch.")
    model_type: Optional[str] = _field(None, "Train from scratch with this architecture's default config (llama, gpt2, ...).")
    config_overrides: Optional[str] = _field(
        None, "Changes to the config when training from scratch: 'hidden_size=64,num_hidden_layers=2'."
    )
    tokenizer_name: Optional[str] = _field(None, "Tokenizer, if not the model's; 'bytes' is a built-in byte tokenizer.")
    model_revision: str = _field("main", "Branch, tag or commit of the model on the hub.")
    cache_dir: Optional[str] = _field(None, "Where models and tokenizers from the hub are kept.")
    trust_remote_code: bool = _field(False, "Run model code that comes with the model. Only for sources you trust.")
    attn_implementation: Optional[str] = _field(
        None, "sdpa, eager, flash_attention_2, flex_attention, varlen; default: varlen for packed documents on a GPU, else the model's."
    )
    torch_dtype: Optional[str] = _field(
        None, "dtype in which weights are read: float32, bfloat16, float16, auto. Default: what the engine and precision need."
    )
    resize_embeddings: bool = _field(True, "Grow the embedding when the tokenizer has more tokens than the model.")
    use_liger_kernel: Optional[bool] = _field(None, "Liger's fused layers; default: on CUDA where liger-kernel is installed.")
    torch_compile: Optional[bool] = _field(None, "Compile the model's layers, one by one; default: on CUDA where a compiler is there.")
    torch_compile_backend: Optional[str] = _field(None, "Backend of torch.compile; default: inductor.")
    fp8: str = _choice("no", ["no", "tensorwise", "rowwise"], "FSDP2: matrix products in float8, with one scale a tensor or one a row.")
    fp8_all_gather: Optional[bool] = _field(
        None, "Gather weights in float8: half the traffic. Default: with --fp8 tensorwise, where weights are shared out and on the card."
    )
    no_custom_kernels: bool = _field(False, "Turn off Liger, Apex, compile, varlen attention and float8 together.")


@dataclasses.dataclass
class DataArguments:
    """Which text, and how it becomes samples."""

    dataset_name: Optional[str] = _field(None, "Dataset on the hub.")
    dataset_config_name: Optional[str] = _field(None, "Configuration of that dataset.")
    dataset_mix: Optional[str] = _field(None, "YAML file with several sources and their weights.")
    streaming: bool = _field(False, "Read and tokenise training data while training, and keep only a part of it on disk.")
    streaming_buffer_size: int = _field(10000, "With streaming: rows that are tokenised, packed and shuffled together.")
    train_file: list[str] = _field([], "Training files (.txt .py .jsonl .json .csv .parquet), globs or folders.")
    validation_file: list[str] = _field([], "Evaluation files, like train_file.")
    validation_split_percentage: float = _field(5.0, "Percent of the training samples held out when there is no evaluation set.")
    block_size: Optional[int] = _field(None, "Tokens per sample. Default: the model's limit, at most 4096.")
    text_column: Optional[str] = _field(None, "Column of plain text. Default: text, or the only text column.")
    prompt_column: Optional[str] = _field(None, "Column of prompts, with --completion_column: only completions are trained on.")
    completion_column: Optional[str] = _field(None, "Column of completions.")
    messages_column: Optional[str] = _field(None, "Column of conversations. Default: messages or conversations, if there.")
    train_on_prompt: bool = _field(False, "Train on prompts, and on all turns of conversations, too.")
    chat_template: Optional[str] = _field(None, "Chat template, as a file or as text. Default: the tokenizer's.")
    bad_rows: str = _choice("error", ["error", "skip"], "A row that cannot be used ends the run, or is left out and counted.")
    text_mode: str = _choice("document", ["document", "line"], "A text file is one document, or each of its lines is one.")
    data_encoding: str = _field("utf-8", "Encoding of text, JSON and CSV files.")
    packing: str = _choice(
        "concat",
        ["concat", "best_fit", "none"],
        "concat: documents end to end, cut every block_size tokens; best_fit: documents kept whole where they fit; none: one per sample.",
    )
    overlong: str = _choice("split", ["split", "truncate", "drop"], "What happens to documents longer than block_size.")
    document_isolation: bool = _field(True, "Documents packed into one sample do not see each other.")
    train_sampling_strategy: str = _choice("random", ["random", "sequential", "group_by_length"], "Order of the training samples.")
    dataloader_num_workers: int = _field(0, "Processes that read samples ahead; 0: the training process reads them.")
    dataloader_drop_last: bool = _field(False, "Leave out an epoch's last, short step. Default: fill it with zero-weight samples.")
    add_bos: Optional[bool] = _field(None, "Begin documents with the bos token. Default: where the tokenizer does.")
    add_eos: Optional[bool] = _field(None, "End documents with the eos token. Default: where the tokenizer has one.")
    max_train_samples: Optional[int] = _field(None, "Use only the first N training samples.")
    max_eval_samples: Optional[int] = _field(None, "Use only the first N evaluation samples.")
    preprocessing_num_workers: Optional[int] = _field(None, "Processes for tokenising. Default: the cores of this machine.")
    overwrite_cache: bool = _field(False, "Tokenise again even if a cached result exists.")
    data_cache_dir: Optional[str] = _field(None, "Folder of tokenised data. Default: HF_DATASETS_CACHE/harness.")

    @property
    def keeps_documents_apart(self) -> bool:
        """Samples hold several documents, which do not see each other."""
        return self.document_isolation and self.packing != "none"


@dataclasses.dataclass
class TrainArguments:
    """The run: batch, optimizer, schedule, precision, engine, logging, saving. Names are TrainingArguments'."""

    output_dir: Optional[str] = _field(None, "Where everything of this run is written.")
    overwrite_output_dir: bool = _field(False, "Start anew in an output folder that holds another run (it is moved aside).")
    do_train: Optional[bool] = _field(None, "Train. Default: yes.")
    do_eval: Optional[bool] = _field(None, "Evaluate at the end. Default: yes where there is an evaluation set.")
    seed: int = _field(42, "Seed of initialisation, dropout and, unless data_seed is given, of the data order.")
    data_seed: Optional[int] = _field(None, "Seed of the data order.")
    full_determinism: bool = _field(False, "Deterministic kernels everywhere: slower, repeatable to the bit.")

    per_device_train_batch_size: int = _field(8, "Samples per micro-batch and process.")
    per_device_eval_batch_size: int = _field(8, "Samples per evaluation batch and process.")
    bf16_full_eval: bool = _field(False, "Evaluate in bf16, also during training.")
    fp16_full_eval: bool = _field(False, "Evaluate in fp16, also during training.")
    gradient_accumulation_steps: int = _field(1, "Micro-batches per optimizer step.")
    target_batch_size: Optional[int] = _field(None, "Samples per optimizer step over all processes; sets the accumulation.")
    num_train_epochs: float = _field(3.0, "Passes over the training data.")
    max_steps: int = _field(-1, "Optimizer steps in total; overrides num_train_epochs.")

    learning_rate: float = _field(5e-5, "Peak learning rate.")
    weight_decay: float = _field(0.0, "Weight decay; norms and biases have none.")
    adam_beta1: float = _field(0.9, "Adam's first beta.")
    adam_beta2: float = _field(0.999, "Adam's second beta.")
    adam_epsilon: float = _field(1e-8, "Adam's epsilon.")
    max_grad_norm: float = _field(1.0, "Gradients are clipped to this norm; 0 turns clipping off.")
    optim: str = _choice(
        "adamw_torch_fused",
        ["adamw_torch_fused", "adamw_torch", "adamw_apex_fused", "adamw_bf16", "adamw_8bit", "sgd", "adafactor"],
        "Optimizer; adamw_bf16 and adamw_8bit keep Adam's averages in 2 and in 1 byte.",
    )
    optim_in_backward: bool = _field(
        False, "Update each parameter in backward, when its gradient is there, and free it: no gradients of the whole model at any time."
    )
    lr_scheduler_type: str = _field("linear", "Schedule: linear, cosine, constant, constant_with_warmup, ... (transformers' names).")
    lr_scheduler_kwargs: Optional[str] = _field(None, "JSON with more arguments of the schedule.")
    warmup_steps: float = _field(0, "Steps of linear warm-up; below 1 a share of all steps.")
    warmup_ratio: Optional[float] = _field(None, "Share of all steps for warm-up (older name of a warmup_steps below 1).")

    precision: str = _choice("auto", ["auto", "bf16", "fp16", "fp32"], "auto: bf16 where the device has it, else fp16 on a GPU, else fp32.")
    bf16: Optional[bool] = _field(None, "Same as --precision bf16.")
    fp16: Optional[bool] = _field(None, "Same as --precision fp16.")
    tf32: Optional[bool] = _field(None, "Allow TF32 in fp32 matrix products.")
    reduce_dtype: str = _choice("fp32", ["fp32", "bf16"], "FSDP2: precision in which gradients are summed over processes.")
    activation_checkpointing: str = _choice("none", ["none", "selective", "full"], "Recompute activations in backward.")
    gradient_checkpointing: Optional[bool] = _field(None, "Same as --activation_checkpointing full.")
    activation_offload: bool = _field(False, "What activation checkpointing keeps waits in host memory for backward.")
    loss_chunk_size: int = _field(1024, "Tokens whose logits exist at once in the loss; 0: all at once.")
    nan_policy: str = _choice("skip", ["skip", "stop"], "An update with a NaN or infinite gradient: skip it, or stop the run.")
    auto_memory: str = _choice(
        "on",
        ["off", "suggest", "on"],
        "Start with the fastest settings that are predicted to fit every card, with the same samples in a step; suggest: only say which.",
    )
    gpu_memory: Optional[str] = _field(None, "What the run may use of a card: 80GB as on its label, or exactly: 20GiB. Default: all.")
    no_oom_recovery: bool = _field(False, "End the run at the first out-of-memory instead of going on under smaller settings.")
    oom_ladder: list[str] = _field(
        [], "Steps to take after out-of-memory, in order: micro_batch[=N], gradient_checkpointing, activation_checkpointing=selective, ..."
    )
    oom_snapshot: bool = _field(False, "Keep the history of GPU allocations and write it at an out-of-memory, for PyTorch's viewer.")
    oom_standby: str = _choice(
        "auto",
        ["auto", "on", "off"],
        "A process per rank that has imported everything and waits, for a shorter new start; auto: with GPUs and enough free memory.",
    )
    snapshot_steps: int = _field(
        50, "Optimizer steps between copies of the state in host memory, where a new start after an out-of-memory goes on; 0: none."
    )
    max_nan_steps: int = _field(20, "With nan_policy skip: stop after this many such steps in a row.")

    engine: str = _choice(
        "as_asked",
        ["as_asked", "auto"],
        "auto: where memory does not suffice, the job is spread further over its GPUs: DDP goes on as FSDP2, ZeRO-1 and 2 as ZeRO-3.",
    )
    deepspeed: Optional[str] = _field(None, "DeepSpeed JSON: the engine is ZeRO.")
    nvme_path: Optional[str] = _field(
        None, 'Folder on a local NVMe disk for offloading, where the DeepSpeed JSON says "nvme_path": "auto". Default: nvme/ in output_dir.'
    )
    fsdp: Optional[str] = _field(
        None, "full_shard, shard_grad_op or hybrid_shard, with 'offload' if wanted: the engine is FSDP2 without accelerate's YAML."
    )
    sequence_parallel_size: int = _field(
        1, "Processes that share each sample, a slice of its tokens each, for samples too long for one card; 1: each has its own."
    )
    local_rank: int = _field(-1, "Set by the deepspeed launcher; the environment is what counts.")
    use_cpu: bool = _field(False, "Do not use GPUs.")
    ddp_timeout: int = _field(1800, "Seconds after which a collective that does not finish ends the job.")
    ddp_find_unused_parameters: Optional[bool] = _field(None, "DDP: look for parameters that get no gradient.")
    ddp_bucket_cap_mb: Optional[int] = _field(None, "DDP: size of a gradient bucket.")

    logging_steps: float = _field(10, "Log every N steps; below 1 a share of all steps.")
    logging_first_step: bool = _field(False, "Log the first step too.")
    report_to: list[str] = _field(["none"], "tensorboard, wandb, mlflow, comet_ml, ... through accelerate's trackers; none.")
    run_name: Optional[str] = _field(None, "Name of the run in the trackers.")
    gpu_monitor_interval_s: float = _field(10.0, "Seconds between looks at the GPUs (use, memory, power, temperature); 0: none.")
    profile_steps: Optional[str] = _field(None, "Record these optimizer steps, like 10-12, into profile/: traces and one page on the time.")
    disable_tqdm: Optional[bool] = _field(None, "No progress bar. Default: a bar only on a terminal.")
    debug: bool = _field(False, "Show tracebacks for wrong input too, and log at debug level.")

    eval_strategy: str = _choice("no", ["no", "steps", "epoch"], "When to evaluate during training.")
    eval_steps: Optional[float] = _field(None, "With eval_strategy steps; below 1 a share of all steps. Default: logging_steps.")
    eval_on_start: bool = _field(False, "Evaluate once before the first step.")
    save_strategy: str = _choice("steps", ["no", "steps", "epoch"], "When to save checkpoints.")
    save_steps: float = _field(500, "With save_strategy steps; below 1 a share of all steps.")
    save_total_limit: Optional[int] = _field(None, "Keep at most N checkpoints.")
    save_final: bool = _field(True, "Write final/ (safetensors and tokenizer) at the end.")
    resume_from_checkpoint: Optional[str] = _field(None, "auto, latest, or a checkpoint folder (ours, or of transformers' Trainer).")
    trust_checkpoint: bool = _field(
        False, "Read a checkpoint that none of your own runs has written: its files can run code. Only for sources you trust."
    )
    force_resume: bool = _field(False, "Resume although data, model config, template or batch differ from the checkpoint's.")
    load_best_model_at_end: bool = _field(False, "final/ holds the checkpoint with the best metric.")
    metric_for_best_model: str = _field("eval_loss", "Which metric decides: eval_loss or eval_perplexity.")
    early_stopping_patience: Optional[int] = _field(
        None, "Stop after N evaluations in a row in which metric_for_best_model did not improve."
    )
    early_stopping_threshold: float = _field(0.0, "Less improvement than this counts as none, for early stopping.")
    greater_is_better: Optional[bool] = _field(None, "Direction of the metric. Default: smaller, unless the name says otherwise.")


@dataclasses.dataclass
class LoraArguments:
    """LoRA adapters; none unless lora_r is given."""

    lora_r: Optional[int] = _field(None, "r of the adapters; turns LoRA on.")
    lora_alpha: Optional[int] = _field(None, "Adapters are scaled by alpha / r. Default: 2 r.")
    lora_dropout: float = _field(0.0, "Dropout before the adapters.")
    target_modules: list[str] = _field(["all-linear"], "Names of the layers that get an adapter, or all-linear (without the head).")
    target_layers: Optional[str] = _field(None, "Only these decoder layers: 0,1,2 or 10-20.")
    modules_to_save: list[str] = _field([], "Modules that are trained whole and saved with the adapters.")
    use_dora: bool = _field(False, "DoRA: the magnitudes of the weights are trained apart from their directions.")
    use_rslora: bool = _field(False, "Scale by alpha / sqrt(r) instead of alpha / r.")
    load_in_4bit: bool = _field(False, "QLoRA: frozen layers in 4 bits (NF4), by bitsandbytes; DDP, FSDP2 or one process.")
    rank_pattern: Optional[str] = _field(None, "JSON with other r for some modules: '{\"q_proj\": 16}'.")
    alpha_pattern: Optional[str] = _field(None, "JSON with other alpha for some modules.")
    check_r_consistency: bool = _field(True, "Compare r in the config with the adapters' shapes, and adapters across ranks.")
    strict_r_check: bool = _field(False, "A wrong r ends the run instead of being warned of.")


@dataclasses.dataclass
class DeviceMapArguments:
    """One process, several GPUs: which part of the model sits on which card."""

    device_map: Optional[str] = _field(
        None,
        "auto, balanced, balanced_low_0, sequential, dynamic, cuda:N, cpu, or a JSON object (file or text) of modules and devices. "
        "Default in one process with several GPUs: dynamic.",
    )
    device_map_strategy: Optional[str] = _field(None, "Same as --device_map (older name).")
    use_balanced_device_map: bool = _field(False, "Same as --device_map balanced (older name).")
    use_dynamic_device_map: bool = _field(False, "Same as --device_map dynamic (older name).")
    force_balance: bool = _field(False, "Use every card in equal shares, even one with less than min_memory_gb free.")
    exclude_cpu: bool = _field(True, "Never place weights in host memory or on disk.")
    min_memory_gb: float = _field(2.0, "Leave out cards with less free memory than this many GB.")
    balance_threshold: float = _field(0.3, "dynamic: keep the auto map while no card is further from its ideal share than this.")
    max_memory: Optional[str] = _field(None, "Memory to use: '40GB' on every card, or '0:60GB,1:40GB,cpu:200GB'.")
    offload_folder: str = _field("offload", "Folder for weights that a device map puts on disk.")
    in_flight_micro_batches: int = _field(
        0, "Device map: micro-batches between their forward and their backward, which keeps the cards busy together; 0: all of a step."
    )


@dataclasses.dataclass
class Arguments:
    """All arguments of a run.

    Attributes:
        typed: names the user gave, on the command line or in the YAML file (a default is not "typed").
        notes: what the parser has to say: renamed flags, names without effect.
    """

    model: ModelArguments = dataclasses.field(default_factory=ModelArguments)
    data: DataArguments = dataclasses.field(default_factory=DataArguments)
    train: TrainArguments = dataclasses.field(default_factory=TrainArguments)
    lora: LoraArguments = dataclasses.field(default_factory=LoraArguments)
    maps: DeviceMapArguments = dataclasses.field(default_factory=DeviceMapArguments)
    typed: frozenset[str] = frozenset()
    notes: tuple[Finding, ...] = ()

    def groups(self) -> tuple[Any, ...]:
        return (self.model, self.data, self.train, self.lora, self.maps)

    def to_dict(self) -> dict[str, Any]:
        """Every resolved argument by name."""
        flat: dict[str, Any] = {}
        for group in self.groups():
            flat.update(dataclasses.asdict(group))
        return flat

    def non_defaults(self) -> dict[str, Any]:
        """The arguments that differ from their defaults."""
        default = Arguments().to_dict()
        return {name: value for name, value in self.to_dict().items() if value != default[name]}


GROUPS: tuple[type, ...] = (ModelArguments, DataArguments, TrainArguments, LoraArguments, DeviceMapArguments)


def argument_names() -> list[str]:
    """All names that run_clm.py takes."""
    return [field.name for group in GROUPS for field in dataclasses.fields(group)]


def world_size_from_environment() -> int:
    """Number of processes of this launch, from what torchrun, deepspeed and accelerate set."""
    return int(os.environ.get("WORLD_SIZE", "1"))
