"""Models and tokenizers: any causal LM of transformers, built empty and filled one block at a time.

No rank ever holds a whole model that it shards: the model is created on the meta device, then each block (decoder layer) is
materialised, filled from the checkpoint's safetensors files or initialised, handed to the engine to shard, and the next one follows.
Host memory is bounded by one block; weights are the same under every engine and on every number of ranks.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import difflib
import errno
import importlib.util
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harness import isolation, varlen_attention
from harness.args import ModelArguments
from harness.findings import Finding, UserError, user_error
from harness.hub import stay_offline_without_hub
from harness.initialisation import initialise, owners_of, seeded
from harness.model_files import (
    MODEL_CODE_ERRORS,
    damaged_tokenizer_file,
    impossible_sizes,
    impossible_values,
    names_a_path,
    what_failed,
)
from harness.run_folder import is_a_runs
from harness.stored_weights import SafetensorsFolder, load_whole, weights_folder
from harness.user_files import instead_of, open_regular, parse_json

log = logging.getLogger("harness")

BYTES_TOKENIZER = "bytes"


# ---------------------------------------------------------------------------------------------------------------- tokenizer


def byte_tokenizer() -> Any:
    """A tokenizer whose tokens are the 256 bytes, plus <|bos|>, <|eos|> and <|pad|>; saved and loaded like any other.

    Text of any kind goes in and comes out unchanged.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        pad_token="<|pad|>",
        clean_up_tokenization_spaces=False,
        model_max_length=10**9,
    )


def tokenizer_name(args: ModelArguments) -> str | None:
    """`--tokenizer_name`, or the folder or hub name of the model; None where there is neither."""
    own = args.config_name if args.config_name and Path(args.config_name).is_dir() else None
    return args.tokenizer_name or args.model_name_or_path or own


def load_tokenizer(args: ModelArguments) -> Any:
    """The tokenizer of `--tokenizer_name`, or the model's own.

    Raises:
        UserError: there is none.
    """
    from transformers import AutoTokenizer

    if args.tokenizer_name == BYTES_TOKENIZER:
        return byte_tokenizer()
    name = tokenizer_name(args)
    if name is None:
        raise user_error("--tokenizer_name", "training from scratch needs a tokenizer", "give one, or --tokenizer_name bytes")
    try:
        return AutoTokenizer.from_pretrained(
            name, revision=args.model_revision, cache_dir=args.cache_dir, trust_remote_code=args.trust_remote_code
        )
    except Exception as error:  # the tokenizers library raises plain `Exception`; on values it never meant transformers raises anything
        fix = "check the path or name, or give --tokenizer_name bytes"
        if problem := damaged_tokenizer_file(Path(name)):
            raise user_error("--tokenizer_name", problem, "copy the tokenizer again, or give --tokenizer_name bytes") from None
        reason = (str(error) or type(error).__name__).splitlines()[0]
        reason = reason if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {reason}"
        raise user_error("--tokenizer_name", f"no tokenizer in {name}: {reason}", fix) from None


# ------------------------------------------------------------------------------------------------------------------- config


def load_config(args: ModelArguments) -> Any:
    """The model's config, with `--config_overrides` applied when training from scratch.

    Raises:
        UserError: no such folder, file, model type or config attribute.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoConfig

    if args.model_type and not args.config_name:
        if args.model_type not in CONFIG_MAPPING:
            raise _unknown_architecture("--model_type", args.model_type)
        config = CONFIG_MAPPING[args.model_type]()
    else:
        source = args.config_name or args.model_name_or_path
        key = "--config_name" if args.config_name else "--model_name_or_path"
        assert source is not None
        if names_a_path(source) and not Path(source).expanduser().exists():
            raise user_error(key, f"{source} does not exist", instead_of(source) or "give an existing folder, or a hub name like gpt2")
        offline = None if Path(source).exists() else stay_offline_without_hub()
        unreadable = _unreadable_config(source)
        if unreadable is not None:
            raise user_error(key, unreadable, "give a model's folder, or its config.json")
        try:
            config = AutoConfig.from_pretrained(
                source, revision=args.model_revision, cache_dir=args.cache_dir, trust_remote_code=args.trust_remote_code
            )
        except (OSError, ValueError) as error:
            named = _model_type_in(source)
            if named is not None and named not in CONFIG_MAPPING:
                raise _unknown_architecture(key, named) from None
            if offline is not None and isinstance(error, OSError):
                raise user_error(
                    key, f"{source} is neither a folder nor in the cache, and {offline}", "give a folder, or download it before"
                ) from None
            raise user_error(key, f"no model config in {source}: {str(error).splitlines()[0]}", "check the path or name") from None
        except StrictDataclassError as error:  # transformers' own checks of a config's values; no ValueError
            reason = str(error.__cause__ or error).splitlines()[0]
            raise user_error(key, f"impossible values in {source}: {reason}", "correct the model's config.json") from None
        except (
            TypeError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:  # what a config's code does with values it never meant
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise user_error(key, f"impossible values in {source}: {reason}", "correct the model's config.json") from None
    if args.config_overrides:
        config = _overridden(config, args)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config

    def value_of(name: str) -> Any:
        try:
            return getattr(text, name, None)
        except Exception:  # transformers refuses to name one value where layers differ
            return ()

    if impossible := _impossible(value_of, args, own_code=not type(config).__module__.startswith("transformers.")):
        raise UserError(impossible)
    config.use_cache = False
    return config


def _impossible(value_of: Callable[[str], Any], args: ModelArguments, *, own_code: bool = False) -> list[Finding]:
    """What no model's config can say; a model's own code has activations and the like of its own.

    Said of `--config_overrides`, where that set a value, or there is no file that does.
    """
    unknown = [] if own_code else _unknown_names(value_of)
    changed = {part.partition("=")[0].strip() for part in (args.config_overrides or "").split(",")}
    has_file = args.config_name is not None or args.model_name_or_path is not None

    def of_flag(finding: Finding) -> Finding:
        if has_file and finding.key not in changed:
            return finding
        fix = finding.fix if finding.fix.startswith("did you mean") else f"give another {finding.key}"
        return Finding(finding.severity, "--config_overrides", f"{finding.key}: {finding.message}", fix)

    return [of_flag(finding) for finding in (*impossible_sizes(value_of), *impossible_values(value_of), *unknown)]


def not_causal(config: Any) -> Finding | None:
    """Why transformers has no causal language model for a config; None where it has, or the config brings its own code."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or getattr(config, "auto_map", None):
        return None
    message = f"{config.model_type} is no causal language model in this transformers"
    return Finding("error", "model_type", message, "a model that writes text from left to right, such as llama, qwen3 or gpt2")


def _unknown_names(value_of: Callable[[str], Any]) -> list[Finding]:
    """Activations and rotary embeddings that this transformers does not have."""
    from transformers.activations import ACT2FN
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    named = [(key, value_of(key), "activation", list(ACT2FN)) for key in ("hidden_act", "activation_function", "hidden_activation")]
    rotary = value_of("rope_parameters")
    ropes = [each for each in (rotary, *rotary.values()) if isinstance(each, dict)] if isinstance(rotary, dict) else []
    known = ["default", *ROPE_INIT_FUNCTIONS]
    named += [("rope_parameters", each["rope_type"], "rope_type", known) for each in ropes if each.get("rope_type") is not None]
    found: list[Finding] = []
    for key, value, kind, choices in named:
        if isinstance(value, str) and value not in choices:
            close = difflib.get_close_matches(value, choices, n=1)
            fix = f"did you mean {close[0]}?" if close else "correct the model's config.json"
            found.append(Finding("error", key, f"unknown {kind} {value}", fix))
    return found


def _unreadable_config(source: str) -> str | None:
    """Why a local config cannot be opened as a file; None where it can, or is not there. A pipe would be waited for without end."""
    path = Path(source).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if not path.exists():
        return None
    try:
        open_regular(path).close()
        values = parse_json(path.read_text(encoding="utf-8")) if path.is_file() else None  # a pipe can be read once
    except OSError as error:
        return f"{path} {error.strerror if error.errno == errno.EINVAL else f'cannot be read: {error.strerror}'}"
    except ValueError:
        return None  # said where it is loaded
    if is_a_runs(values):
        # Its `model_type` alone would be taken for that architecture's defaults.
        return f"{path} holds a run's arguments; its model's config is {path.parent / 'model' / 'config.json'}"
    return None


def _model_type_in(source: str) -> str | None:
    """The architecture that a local config names; None where it names none."""
    path = Path(source)
    try:
        values = json.loads((path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8"))
        return str(values["model_type"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _unknown_architecture(key: str, name: str) -> UserError:
    from transformers import CONFIG_MAPPING

    close = difflib.get_close_matches(name, list(CONFIG_MAPPING.keys()), n=1)
    fix = f"did you mean {close[0]}?" if close else "an architecture of this transformers, or --trust_remote_code for a model's own code"
    return user_error(key, f"unknown architecture {name}", fix)


def _overridden(config: Any, args: ModelArguments) -> Any:
    """A config with `--config_overrides` applied, 'name=value,name=value'; values take the type of what they replace."""
    problems: list[Finding] = []
    changes: dict[str, Any] = {}
    for part in filter(None, (piece.strip() for piece in (args.config_overrides or "").split(","))):
        name, equals, value = part.partition("=")
        if not equals or not hasattr(config, name):
            message = f"'{part}' is not name=value" if not equals else f"{type(config).__name__} has no '{name}'"
            close = difflib.get_close_matches(name, list(config.to_dict()), n=1) if equals else []
            fix = f"did you mean {close[0]}?" if close else "use the names of the model's config.json"
            problems.append(Finding("error", "--config_overrides", message, fix))
            continue
        old = getattr(config, name)
        try:
            parsed = json.loads(value.lower() if value.lower() in ("true", "false", "none", "null") else value)
        except json.JSONDecodeError:
            parsed = None if value.lower() == "none" else value
        number = isinstance(old, (int, float)) and not isinstance(old, bool)
        if number and (isinstance(parsed, bool) or not isinstance(parsed, (int, float))):
            problems.append(Finding("error", "--config_overrides", f"{name}={value} is not a number", f"it is {old} now"))
            continue
        real_name = getattr(config, "attribute_map", {}).get(name, name)
        changes[real_name] = type(old)(parsed) if isinstance(old, float) and number else parsed
    values = config.to_dict()
    if len(values.get("layer_types") or []) != changes.get("num_hidden_layers", config.num_hidden_layers) and "layer_types" not in changes:
        values.pop("layer_types", None)  # one entry a layer; the config makes them anew
    if problems:  # with what is impossible among the others; only what makes sense may be built
        raise UserError([*problems, *_impossible({**values, **changes}.get, args)])
    try:
        return type(config).from_dict({**values, **changes})
    except Exception as error:
        if impossible := _impossible({**values, **changes}.get, args):  # transformers names the first one
            raise UserError(impossible) from None
        raise user_error("--config_overrides", f"{type(config).__name__} refuses them: {str(error).splitlines()[-1].strip()}") from None


def max_positions(config: Any) -> int | None:
    """Longest sequence the model takes, tokens; None where the config sets no limit."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length"):
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def fit_vocabulary(config: Any, tokenizer: Any, args: ModelArguments) -> None:
    """From scratch: the vocabulary is the tokenizer's, and special ids are its too, unless the user set the vocabulary."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if "vocab_size=" not in (args.config_overrides or "") and not args.config_name:
        text.vocab_size = len(tokenizer)
    if text.vocab_size < len(tokenizer):
        raise user_error(
            "--config_overrides", f"vocab_size {text.vocab_size} is less than the tokenizer's {len(tokenizer)} tokens", "raise it"
        )
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, getattr(tokenizer, name))


# ------------------------------------------------------------------------------------------------------- building and filling


@dataclasses.dataclass
class EmptyModel:
    """A model on the meta device, with what is needed to fill it.

    Attributes:
        source: folder with safetensors to load, or None to initialise from scratch.
        dtype: dtype of its parameters when materialised.
        frozen_dtype: dtype of those that do not train; None: the same.
        stored_name: parameter's name -> its name in `source`; None for one that is not there and gets its values from `init_block`.
        num_rows_grown_to: rows of the embedding and the head where the vocabulary was made larger than the stored one; None where not.
        init_block: called with a block's modules, its place and the device when the block's stored weights are in place.
    """

    model: Any
    config: Any
    source: Path | None
    dtype: torch.dtype
    seed: int
    frozen_dtype: torch.dtype | None = None
    stored_name: Callable[[str], str | None] = str
    num_rows_grown_to: int | None = None
    init_block: Callable[[list[nn.Module], int, torch.device], None] | None = None


def layer_units(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The blocks that are never split: decoder layers by the model's `_no_split_modules`, else the longest list of equal modules."""
    names = set(getattr(model, "_no_split_modules", None) or [])
    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        if type(module).__name__ in names and not any(name.startswith(outer + ".") for outer, _ in found):
            found.append((name, module))
    if found:
        return found
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module)]
    lists = [(name, module) for name, module in lists if len({type(item) for item in module}) == 1]
    if not lists:
        return []
    name, longest = max(lists, key=lambda item: len(item[1]))
    return [(f"{name}.{index}", module) for index, module in enumerate(longest)]


def unknown_attention(name: str) -> Finding | None:
    """A finding where transformers has no attention of this name, and it is none from the hub ("kernels-community/...")."""
    from transformers import AttentionInterface

    names = ["eager", *AttentionInterface().valid_keys()]
    if name in names or any(mark in name for mark in "/|"):
        return None
    close = difflib.get_close_matches(name, names, n=1)
    own = [each for each in names if "|" not in each]
    return Finding("error", "--attn_implementation", f"{name} is not known", f"did you mean {close[0]}?" if close else ", ".join(own))


def build_empty(args: ModelArguments, config: Any, tokenizer: Any, *, dtype: torch.dtype, seed: int) -> EmptyModel:
    """Builds the model on the meta device, its non-persistent buffers (rotary frequencies) for real.

    Args:
        dtype: dtype of the parameters, e.g. float32 for full shards of master weights.
        seed: of the initialisation when training from scratch.

    Raises:
        UserError: not a causal LM, unknown attention implementation, weights not found.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    if refusal := not_causal(config):
        raise UserError(refusal)
    scratch = args.model_name_or_path is None
    if scratch:
        fit_vocabulary(config, tokenizer, args)
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": args.trust_remote_code}
    isolation.isolate_packed_documents()
    if args.attn_implementation:
        options["attn_implementation"] = args.attn_implementation
        if unknown := unknown_attention(args.attn_implementation):
            raise UserError(unknown)
        if args.attn_implementation == varlen_attention.NAME:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            if refused := list(varlen_attention.findings(config.get_text_config(), device)):
                raise UserError(refused)
    try:
        with init_empty_weights(include_buffers=False), no_init_weights():
            model = AutoModelForCausalLM.from_config(config, **options)
    except MODEL_CODE_ERRORS as error:
        message = what_failed(error)
        key = "--attn_implementation" if args.attn_implementation and "attn" in message.lower() else "model"
        raise user_error(key, message) from None
    model.tie_weights()  # building under init_empty_weights makes two parameters of a tied one
    grown_to: int | None = None
    if (has := model.get_input_embeddings().weight.shape[0]) < len(tokenizer):
        if not args.resize_embeddings:
            raise user_error("--resize_embeddings", f"the tokenizer has {len(tokenizer)} tokens, the model {has}", "turn it on")
        with torch.device("meta"):
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        grown_to = len(tokenizer)
    source = None if scratch else weights_folder(args)
    return EmptyModel(model, model.config, source, dtype, seed, num_rows_grown_to=grown_to)


Shard = Callable[[str, nn.Module], None]


@torch.no_grad()
def fill(empty: EmptyModel, device: torch.device, shard: Shard | None = None, *, broadcast: Callable[[Tensor], None] | None = None) -> Any:
    """Materialises the model block by block on `device`, loading or initialising each, and hands each to `shard`.

    Args:
        device: where a block is materialised.
        shard: called with ("", model) last and before that with every block's name and module, in order; it may replace parameters.
        broadcast: sends a tensor of the main process to all; needed only for checkpoints whose layout differs from the model's.

    Returns:
        The filled model.

    Raises:
        UserError: weights are missing, of another shape, or of a dtype that is no weight's. On all ranks.
    """
    model = empty.model
    source = SafetensorsFolder(empty.source) if empty.source else None
    names = source.names_for(model, empty.stored_name) if source else None
    whole = None
    if source is not None and names is None:
        assert empty.source is not None
        whole = _whole_weights(model, empty.source, empty.dtype, broadcast, device)
    units = layer_units(model)
    inside = {id(module) for _, unit in units for module in unit.modules()}
    uses = collections.Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    memo: dict[int, tuple[Tensor, nn.Parameter | None]] = {}
    parameter_names = {id(parameter): name for name, parameter in model.named_parameters()}
    rest = [(name, module) for name, module in model.named_modules() if id(module) not in inside]
    owners = owners_of(model)
    module_names = {id(module): name for name, module in model.named_modules()}

    def make(members: list[nn.Module], index: int) -> None:
        fresh = _materialise(members, device, empty, memo, uses)
        named = {module_names[id(module)]: module for module in members}
        _fill_buffers(empty, named, source if names is not None else None, whole, broadcast)
        stored = [(parameter_names[old], parameter) for old, parameter in fresh if empty.stored_name(parameter_names[old]) is not None]
        if source is not None and names is not None:
            for name, parameter in stored:
                _copy_rows(parameter, source.get(names[name]), empty, index)
        elif source is not None:
            for name, parameter in stored:
                if whole is not None:
                    _copy_rows(parameter, whole[str(empty.stored_name(name))], empty, index)
                if broadcast is not None:
                    broadcast(parameter)
        else:
            initialise(owners, members, [parameter for _, parameter in stored], empty.seed, index, device)
        if empty.init_block is not None:
            empty.init_block(members, index, device)

    for index, (unit_name, unit) in enumerate([*units, ("", model)]):
        # Nothing here may hold on to a parameter: whoever shards a block keeps a part of it, and the whole must be gone before the next.
        make([module for _, module in rest] if unit is model else list(unit.modules()), index)
        if shard is not None:
            shard(unit_name, unit)
    return model


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """By name, what is part of a stored model without being a parameter, such as the bias that balances a mixture's experts."""
    for prefix, module in model.named_modules():
        yield from _own_persistent_buffers(prefix, module)


def _own_persistent_buffers(prefix: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield f"{prefix}.{name}" if prefix else name, buffer


def _fill_buffers(
    empty: EmptyModel,
    members: dict[str, nn.Module],
    source: SafetensorsFolder | None,
    whole: dict[str, Tensor] | None,
    broadcast: Callable[[Tensor], None] | None,
) -> None:
    """Persistent buffers of some modules take their stored values; without any they keep what their constructors gave them.

    Args:
        members: by name.
        source: where each is read by its name; None where they were read in one piece.
        whole: stored tensors that were, on the main process, which `broadcast` sends them from.
    """
    if empty.source is None:
        return
    for name, buffer in (each for prefix, module in members.items() for each in _own_persistent_buffers(prefix, module)):
        stored = empty.stored_name(name)
        if stored is None:
            continue
        value = (whole or {}).get(stored) if source is None else source.find(stored, empty.model.base_model_prefix)
        if value is not None and value.shape != buffer.shape:
            message = f"{name} has shape {tuple(value.shape)} where it is stored, the model's {tuple(buffer.shape)}"
            raise user_error("--model_name_or_path", message, "the folder's config.json must be that of its weights")
        if value is not None:
            buffer.copy_(value)
        if source is None and broadcast is not None:
            broadcast(buffer)


def _whole_weights(
    model: Any, folder: Path, dtype: torch.dtype, broadcast: Callable[[Tensor], None] | None, device: torch.device
) -> dict[str, Tensor] | None:
    """`stored_weights.load_whole` on the main process, whose finding ends all ranks; None on the others."""
    whole: dict[str, Tensor] | None = None
    problem: UserError | None = None
    if int(os.environ.get("RANK", "0")) == 0:
        try:
            whole = load_whole(type(model), folder, dtype)
        except UserError as error:
            problem = error
    if broadcast is not None:
        verdict = torch.tensor([problem is not None], dtype=torch.int32, device=device)
        broadcast(verdict)
        if problem is None and verdict.item():
            problem = user_error("--model_name_or_path", f"the weights in {folder} cannot be used", "rank 0 says why")
    if problem is not None:
        raise problem
    return whole


def _materialise(
    modules: list[nn.Module],
    device: torch.device,
    empty: EmptyModel,
    memo: dict[int, tuple[Tensor, nn.Parameter | None]],
    uses: collections.Counter[int],
) -> list[tuple[int, nn.Parameter]]:
    """Replaces meta parameters by empty ones, tied ones (`uses` says which) by the same; buffers move.

    Returns (id of the old one, new one).
    """
    fresh = []
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            new = memo[id(parameter)][1] if id(parameter) in memo else None
            if new is None:
                wanted = empty.dtype if parameter.requires_grad else empty.frozen_dtype or empty.dtype
                dtype_here = wanted if parameter.is_floating_point() else parameter.dtype
                new = nn.Parameter(torch.empty_like(parameter, device=device, dtype=dtype_here), requires_grad=parameter.requires_grad)
                # The old one is kept so that its id is not used again; the new one only for those who share it.
                memo[id(parameter)] = (parameter, new if uses[id(parameter)] > 1 else None)
                fresh.append((id(parameter), new))
            module._parameters[name] = new
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    return fresh


def _copy_rows(parameter: nn.Parameter, value: Tensor, empty: EmptyModel, index: int) -> None:
    """Copies a stored tensor; where the vocabulary has grown for new tokens, their rows are drawn as the model initialises them."""
    if parameter.shape == value.shape:
        parameter.copy_(value)
        return
    grown = parameter.shape[0] == empty.num_rows_grown_to and parameter.shape[1:] == value.shape[1:] and parameter.shape[0] > value.shape[0]
    if not grown:
        fix = "the folder's config.json must be that of its weights" if empty.num_rows_grown_to is None else "leave --resize_embeddings out"
        message = f"a stored tensor has shape {tuple(value.shape)}, the model's {tuple(parameter.shape)}"
        raise user_error("--model_name_or_path", message, fix)
    std = float(getattr(empty.config, "initializer_range", 0.02) or 0.02)
    with seeded(empty.seed, index, parameter.device):
        parameter.normal_(0.0, std)
    parameter[: value.shape[0]].copy_(value)


# -------------------------------------------------------------------------------------------------------------------- kernels


def apply_kernels(model: Any, args: ModelArguments, device: torch.device) -> bool:
    """Liger's fused norms and feed-forward, where they can run and were not turned off. Returns True where applied.

    The loss is ours: Liger's fused one reads the GPU in its forward. Its rotary embedding is left out: it turns queries and keys where they
    lie, behind torch's back, and selective checkpointing keeps exactly those products: recomputed from them, they were turned twice.

    Raises:
        UserError: they were asked for and cannot run here.
    """
    if args.no_custom_kernels or args.use_liger_kernel is False:
        return False
    installed = importlib.util.find_spec("liger_kernel") is not None
    if device.type != "cuda" or not installed:
        if args.use_liger_kernel:
            reason = "liger-kernel is not installed" if device.type == "cuda" else "Liger's kernels need a GPU"
            raise user_error("--use_liger_kernel", reason, "pip install liger-kernel" if device.type == "cuda" else "leave it out")
        return False
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN, _apply_liger_kernel_to_instance

    if model.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        return False
    try:
        with _modules_as_before(model):
            _apply_liger_kernel_to_instance(model=model, rope=False, fused_linear_cross_entropy=False, cross_entropy=False)
    except Exception as error:
        if args.use_liger_kernel:
            raise
        log.warning("Liger's kernels do not fit this model (%s): training without them", str(error).splitlines()[0])
        return False
    return True


@contextlib.contextmanager
def _modules_as_before(model: nn.Module) -> Iterator[None]:
    """The Python modules that define a model's classes come out as they went in.

    Liger puts its classes in the place of transformers' there too, so every later model of the process would be made of them, also one
    without weights that is only looked at; Triton runs its kernels on that one all the same, at address 0.
    """
    names = {type(module).__module__ for module in model.modules()}
    before = [(vars(sys.modules[name]), dict(vars(sys.modules[name]))) for name in names if name in sys.modules]
    try:
        yield
    finally:
        for now, then in before:
            now.update(then)


def num_parameters(model: nn.Module, trainable_only: bool = False) -> int:
    """Parameters of the model (or those that train), tied ones once, sharded ones whole."""
    counted = (parameter for parameter in model.parameters() if parameter.requires_grad or not trainable_only)
    return sum(_num_elements(parameter) for parameter in counted)


def _num_elements(parameter: Any) -> int:
    packed = getattr(parameter, "quant_state", None)  # several in a byte, by bitsandbytes
    return math.prod(packed.shape) if packed is not None else int(getattr(parameter, "ds_numel", parameter.numel()))
