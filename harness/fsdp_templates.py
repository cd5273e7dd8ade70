"""What `accelerate launch` says about FSDP through the environment, or `--fsdp` on the command line, as one plain dataclass.

The names are those accelerate 1.15 exports from its YAML (`fsdp_version: 2`); FSDP1's spellings are mapped to FSDP2. The environment is
parsed here and not with accelerate's plugin, because that imports torch, takes seconds, and silently ignores HYBRID_SHARD under
`fsdp_version: 2` (https://huggingface.co/docs/accelerate/concept_guides/fsdp1_vs_fsdp2).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from harness.findings import Finding, UserError, user_error

ShardingStrategy = Literal["full_shard", "shard_grad_op", "hybrid_shard"]
WrapPolicy = Literal["transformer", "size", "none"]

# FSDP1 names in the order of torch's enum, which accelerate also takes as the numbers 1 to 5.
_FSDP1_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_STRATEGIES: dict[str, tuple[ShardingStrategy, bool]] = {  # name -> (strategy, reshard_after_forward)
    "FULL_SHARD": ("full_shard", True),
    "SHARD_GRAD_OP": ("shard_grad_op", False),
    "HYBRID_SHARD": ("hybrid_shard", True),
    "HYBRID_SHARD_ZERO2": ("hybrid_shard", False),
}
_WRAP_POLICIES: dict[str, WrapPolicy] = {"TRANSFORMER_BASED_WRAP": "transformer", "SIZE_BASED_WRAP": "size", "NO_WRAP": "none"}
_TRUE, _FALSE = {"1", "true", "yes", "on", "y", "t"}, {"0", "false", "no", "off", "n", "f", ""}
# Keys of an accelerate `fsdp_config` that FSDP2 has no use for; accelerate accepts and ignores them.
FSDP1_ONLY_KEYS = (
    "fsdp_sharding_strategy",
    "fsdp_backward_prefetch",
    "fsdp_forward_prefetch",
    "fsdp_use_orig_params",
    "fsdp_sync_module_states",
)


@dataclasses.dataclass(frozen=True)
class FsdpTemplate:
    """How FSDP2 spreads the model, whatever the user wrote it in.

    Attributes:
        sharding_strategy: "full_shard"; "shard_grad_op" keeps gathered parameters until backward; "hybrid_shard" shards inside a group
            of processes and replicates between groups.
        reshard_after_forward: a layer's gathered parameters are freed after its forward.
        cpu_offload: shards, gradients and optimizer state live in host memory.
        wrap_policy: "transformer" wraps the layers in `wrap_class_names`, or the model's own `_no_split_modules` where that is empty;
            "size" every module of `min_num_params` parameters and more; "none" the whole model as one unit.
        wrap_class_names: class names of the layers to wrap; empty leaves them to the model.
        min_num_params: for wrap_policy "size".
        replicate_size: number of replicas; None: see `group_sizes`.
        shard_size: number of processes that share one replica; None: see `group_sizes`.
        mixed_precision: "bf16", "fp16" or None where the launcher's file leaves it to the run.
        activation_checkpointing: recompute every layer in backward.
        activation_offload: the checkpointed inputs of layers wait in host memory for backward.
        state_dict_type: "sharded" or "full": what checkpoints hold.
        notes: what was mapped from older spellings; never errors.
    """

    sharding_strategy: ShardingStrategy = "full_shard"
    reshard_after_forward: bool = True
    cpu_offload: bool = False
    wrap_policy: WrapPolicy = "transformer"
    wrap_class_names: tuple[str, ...] = ()
    min_num_params: int = 100_000_000
    replicate_size: int | None = None
    shard_size: int | None = None
    mixed_precision: str | None = None
    activation_checkpointing: bool = False
    activation_offload: bool = False
    state_dict_type: Literal["sharded", "full"] = "sharded"
    notes: tuple[Finding, ...] = ()

    def group_sizes(self, num_processes: int, num_local_processes: int | None = None) -> tuple[int, int]:
        """(replicas, processes per replica) for a number of processes.

        A size that was left open is computed from the other one. With both open, hybrid sharding has one replica per machine, and two
        on a single machine whose number of processes is even and at least 4; everything else has one replica.

        Args:
            num_processes: all processes of the job.
            num_local_processes: processes on this machine; None: all of them.

        Raises:
            UserError: the sizes do not multiply to `num_processes`.
        """
        replicas, shards = self.replicate_size, self.shard_size
        if self.sharding_strategy != "hybrid_shard":
            replicas, shards = 1, shards or num_processes
        elif replicas is None and shards is None:
            num_local = num_local_processes or num_processes
            if num_local < num_processes and num_processes % num_local == 0:
                replicas = num_processes // num_local
            else:
                replicas = 2 if num_processes >= 4 and num_processes % 2 == 0 else 1
            shards = num_processes // replicas
        elif replicas is None and shards is not None:
            replicas = num_processes // shards
        elif shards is None and replicas is not None:
            shards = num_processes // replicas
        assert replicas is not None and shards is not None
        if replicas * shards != num_processes or replicas < 1 or shards < 1:
            raise user_error(
                "parallelism_config",
                f"dp_replicate_size {replicas} x dp_shard_size {shards} is not the {num_processes} processes of this run",
                f"set dp_replicate_size and dp_shard_size so that their product is {num_processes}, or both to -1",
            )
        return replicas, shards


def fsdp_from_environment(environ: Mapping[str, str]) -> FsdpTemplate | None:
    """The FSDP settings that `accelerate launch` exported, or None where it did not ask for FSDP.

    Raises:
        UserError: every value that is not understood or not supported, together.
    """
    if not _flag(environ, "ACCELERATE_USE_FSDP", False, []):
        return None
    problems: list[Finding] = []
    strategy, reshard, notes = _strategy_of(environ, problems)
    replicas, shards = _parallel_sizes(environ, problems)
    if _asks_for_parallelism(environ) and replicas != 1:
        strategy = "hybrid_shard"  # one replica would be plain full sharding
    policy = _choice(environ, "FSDP_AUTO_WRAP_POLICY", _WRAP_POLICIES, "transformer", problems)
    state_types: dict[str, Any] = {"SHARDED_STATE_DICT": "sharded", "FULL_STATE_DICT": "full", "3": "sharded", "1": "full"}
    if environ.get("FSDP_STATE_DICT_TYPE", "").upper() in ("LOCAL_STATE_DICT", "2"):
        notes.append(Finding("info", "fsdp_state_dict_type", "LOCAL_STATE_DICT does not exist in FSDP2; SHARDED_STATE_DICT is used"))
        state_type: Any = "sharded"
    else:
        state_type = _choice(environ, "FSDP_STATE_DICT_TYPE", state_types, "sharded", problems)
    template = FsdpTemplate(
        sharding_strategy=strategy,
        reshard_after_forward=reshard,
        cpu_offload=_flag(environ, "FSDP_OFFLOAD_PARAMS", False, problems),
        wrap_policy=policy,
        wrap_class_names=_class_names(environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP")),
        min_num_params=_integer(environ, "FSDP_MIN_NUM_PARAMS", 100_000_000, problems),
        replicate_size=replicas,
        shard_size=shards,
        mixed_precision=mixed_precision_of(environ, problems),
        activation_checkpointing=_flag(environ, "FSDP_ACTIVATION_CHECKPOINTING", False, problems),
        activation_offload=_flag(environ, "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", False, problems),
        state_dict_type=state_type,
        notes=tuple(notes),
    )
    if problems:
        raise UserError(problems)
    return template


def fsdp_from_flag(text: str) -> FsdpTemplate:
    """The settings of `--fsdp "full_shard offload"`, spelt as transformers' TrainingArguments spells them.

    Raises:
        UserError: a word that is not known, or more than one strategy.
    """
    words = text.replace(",", " ").lower().split()
    strategies = [word for word in words if word.upper() in _FSDP1_STRATEGIES]
    unknown = [word for word in words if word not in strategies and word not in ("offload", "auto_wrap")]
    if unknown or not words:
        raise user_error(
            "--fsdp", f"{' '.join(unknown) or 'nothing'} is not known", "full_shard, shard_grad_op or hybrid_shard, and offload"
        )
    if len(strategies) > 1:
        raise user_error("--fsdp", f"{' and '.join(strategies)} were both asked for", "keep one")
    name = strategies[0].upper() if strategies else "FULL_SHARD"
    if name == "NO_SHARD":
        raise user_error("--fsdp", "no_shard keeps the whole model on every card: that is DDP", "leave --fsdp out")
    strategy, reshard = _STRATEGIES[name]
    return FsdpTemplate(sharding_strategy=strategy, reshard_after_forward=reshard, cpu_offload="offload" in words)


def mixed_precision_of(environ: Mapping[str, str], problems: list[Finding]) -> str | None:
    """ "bf16" or "fp16" as `accelerate launch` exported it; None for "no", which is also what it exports where its file says nothing."""
    text = environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if text in ("no", "", "none", "fp32"):
        return None
    if text not in ("bf16", "fp16"):
        problems.append(Finding("error", "mixed_precision", f"{text} is not supported here", "bf16, fp16, or leave it to --precision"))
        return None
    return text


def to_fsdp2(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[Finding]]:
    """An accelerate YAML's values with FSDP1's spellings rewritten to what `accelerate launch` 1.15 takes for FSDP2.

    Handles `fsdp_version: 1` and a missing version, `fsdp_sharding_strategy` by name or number, the keys FSDP2 dropped, and flat files
    with `use_fsdp: true` and `fsdp_*` at the top, which accelerate refuses. Returns the new values and one finding if anything changed.

    Raises:
        UserError: NO_SHARD, or a strategy that does not exist.
    """
    result = {key: value for key, value in config.items() if key != "use_fsdp" and not key.startswith("fsdp_")}
    flat = {key: value for key, value in config.items() if key.startswith("fsdp_") and key != "fsdp_config"}
    nested = config.get("fsdp_config")
    fsdp = {**flat, **(nested if isinstance(nested, dict) else {})}
    fsdp = {key if key.startswith("fsdp_") else f"fsdp_{key}": value for key, value in fsdp.items()}
    if not fsdp and not config.get("use_fsdp"):
        return dict(config), []
    changed = [key for key in ("use_fsdp", *flat) if key in config]
    result.setdefault("compute_environment", "LOCAL_MACHINE")
    if str(result.get("distributed_type", "")).upper() != "FSDP":
        result["distributed_type"] = "FSDP"
    version = str(fsdp.get("fsdp_version", 1))
    if version != "2":
        changed.append("fsdp_version")
        reshard_text = fsdp.get("fsdp_reshard_after_forward")
        named = fsdp.get("fsdp_sharding_strategy", reshard_text if not isinstance(reshard_text, bool) else None)
        key = "fsdp_sharding_strategy" if "fsdp_sharding_strategy" in fsdp else "fsdp_reshard_after_forward"
        strategy, reshard = _from_fsdp1(str(named if named is not None else "FULL_SHARD"), key)
        fsdp["fsdp_version"], fsdp["fsdp_reshard_after_forward"] = 2, reshard
        if strategy == "hybrid_shard" and "parallelism_config" not in result:
            result["parallelism_config"] = {"parallelism_config_dp_replicate_size": -1, "parallelism_config_dp_shard_size": -1}
        if str(fsdp.get("fsdp_state_dict_type", "")).upper() == "LOCAL_STATE_DICT":
            fsdp["fsdp_state_dict_type"] = "SHARDED_STATE_DICT"
    dropped = [key for key in FSDP1_ONLY_KEYS if key in fsdp]
    for key in dropped:
        del fsdp[key]
    fsdp["fsdp_cpu_ram_efficient_loading"] = False
    result["fsdp_config"] = fsdp
    changed += [key for key in dropped if key not in changed]
    if not changed:
        return result, []
    reshard_after = str(fsdp.get("fsdp_reshard_after_forward", True)).lower()
    what = f"FSDP1 spelling ({', '.join(changed)}) was mapped to FSDP2: fsdp_reshard_after_forward {reshard_after}"
    return result, [Finding("info", "fsdp_version", what, "write fsdp_version: 2 to be rid of this line")]


def _from_fsdp1(text: str, key: str = "fsdp_sharding_strategy") -> tuple[ShardingStrategy, bool]:
    """Strategy and resharding of a name or number of FSDP1, which older files have in `fsdp_reshard_after_forward` too."""
    name = text.upper()
    if name.isdigit() and 1 <= int(name) <= len(_FSDP1_STRATEGIES):
        name = _FSDP1_STRATEGIES[int(name) - 1]
    if name in ("TRUE", "FALSE"):
        return ("full_shard", True) if name == "TRUE" else ("shard_grad_op", False)
    if name == "NO_SHARD":
        raise user_error(key, "NO_SHARD keeps the whole model on every card: that is DDP", "use distributed_type: MULTI_GPU")
    if name not in _STRATEGIES:
        fix = "true or false" if key == "fsdp_reshard_after_forward" else "FULL_SHARD, SHARD_GRAD_OP or HYBRID_SHARD"
        raise user_error(key, f"{text} is not known", fix)
    return _STRATEGIES[name]


def _strategy_of(environ: Mapping[str, str], problems: list[Finding]) -> tuple[ShardingStrategy, bool, list[Finding]]:
    """Strategy and resharding; the names of FSDP1 count in both versions, where accelerate drops them silently under version 2."""
    notes: list[Finding] = []
    named = environ.get("FSDP_SHARDING_STRATEGY", "FULL_SHARD")  # accelerate exports FULL_SHARD where the file says nothing
    reshard_text = environ.get("FSDP_RESHARD_AFTER_FORWARD", "true")
    version = environ.get("FSDP_VERSION", "1")
    strategy: ShardingStrategy = "full_shard"
    reshard = True
    try:
        if version not in ("1", "2"):
            problems.append(Finding("error", "fsdp_version", f"{version} does not exist", "write fsdp_version: 2"))
        if named.upper() not in ("FULL_SHARD", "1", "NONE"):
            strategy, reshard = _from_fsdp1(named)
        elif reshard_text.lower() in _TRUE | _FALSE:
            reshard = reshard_text.lower() in _TRUE
            strategy = "full_shard" if reshard else "shard_grad_op"
        else:
            strategy, reshard = _from_fsdp1(reshard_text, "fsdp_reshard_after_forward")
    except UserError as error:
        problems += error.findings
    if version == "1":
        notes.append(
            Finding(
                "info",
                "fsdp_version",
                f"FSDP1 settings ({named.upper()}) run as FSDP2 {strategy}",
                "write fsdp_version: 2 to be rid of this line",
            )
        )
    elif named.upper() not in ("FULL_SHARD", "1", "NONE"):
        notes.append(Finding("info", "fsdp_sharding_strategy", f"{named} is FSDP1's spelling; it runs as FSDP2 {strategy}"))
    return strategy, reshard, notes


def _asks_for_parallelism(environ: Mapping[str, str]) -> bool:
    return environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() in _TRUE


def _parallel_sizes(environ: Mapping[str, str], problems: list[Finding]) -> tuple[int | None, int | None]:
    """Replicas and shards of `parallelism_config`; None where left open (-1) or not given."""
    if not _asks_for_parallelism(environ):
        return None, None
    for kind, name in (("TP", "tensor"), ("CP", "context"), ("SP", "sequence")):
        size = _integer(environ, f"PARALLELISM_CONFIG_{kind}_SIZE", 1, problems)
        if size > 1:
            key = f"parallelism_config_{kind.lower()}_size"
            fix = f"remove {key}" + (", or set it to 1" if kind == "TP" else f", and give --sequence_parallel_size {size}")
            problems.append(Finding("error", key, f"{name} parallelism ({size}) is not supported here by the file", fix))
    sizes: list[int | None] = []
    for kind in ("REPLICATE", "SHARD"):
        size = _integer(environ, f"PARALLELISM_CONFIG_DP_{kind}_SIZE", 1, problems)
        if size == 0 or size < -1:
            problems.append(
                Finding("error", f"parallelism_config_dp_{kind.lower()}_size", f"{size} is not a size", "a positive number, or -1")
            )
        sizes.append(size if size > 0 else None)
    return sizes[0], sizes[1]


def _key_of(variable: str) -> str:
    """The YAML key that accelerate exports as an environment variable."""
    return {"FSDP_TRANSFORMER_CLS_TO_WRAP": "fsdp_transformer_layer_cls_to_wrap"}.get(variable, variable.lower())


def _flag(environ: Mapping[str, str], variable: str, default: bool, problems: list[Finding]) -> bool:
    text = environ.get(variable)
    if text is None or text.lower() == "none":
        return default
    if text.lower() in _TRUE:
        return True
    if text.lower() not in _FALSE:
        problems.append(Finding("error", _key_of(variable), f"{text} is neither true nor false", "write true or false"))
    return False


def _integer(environ: Mapping[str, str], variable: str, default: int, problems: list[Finding]) -> int:
    text = environ.get(variable, str(default))
    try:
        return int(text)
    except ValueError:
        problems.append(Finding("error", _key_of(variable), f"{text} is not a whole number"))
        return default


def _choice(environ: Mapping[str, str], variable: str, choices: Mapping[str, Any], default: Any, problems: list[Finding]) -> Any:
    text = environ.get(variable)
    if text is None or text == "None":
        return default
    if text.upper() not in choices:
        problems.append(
            Finding("error", _key_of(variable), f"{text} is not known", "one of " + ", ".join(key for key in choices if not key.isdigit()))
        )
        return default
    return choices[text.upper()]


def _class_names(text: str | None) -> tuple[str, ...]:
    if not text or text == "None":
        return ()
    return tuple(name for name in (part.strip(" []'\"") for part in text.split(",")) if name)
