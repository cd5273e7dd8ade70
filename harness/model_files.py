"""A model's folder: is everything there, whole and readable? Reads headers only; imports no torch."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.findings import Finding
from harness.user_files import json_problem, open_regular, parse_json, read_text

_MAX_HEADER_BYTES = 100 * 2**20  # safetensors' own limit
_POINTER = b"version https://git-lfs"


@dataclasses.dataclass(frozen=True)
class SafetensorsFile:
    """What a file's header says.

    Attributes:
        num_parameters: elements of all tensors.
        tensor_bytes: their size in the file.
        names: of its tensors.
        dtypes: of its tensors, as the format spells them ("BF16").
    """

    num_parameters: int
    tensor_bytes: int
    names: tuple[str, ...]
    dtypes: tuple[str, ...]


def read_safetensors_header(path: Path) -> SafetensorsFile:
    """Reads and checks the header: 8 bytes of length, JSON, and exactly as many bytes as it promises.

    Raises:
        ValueError: not such a file, or cut off; says how.
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        if len(start) < 8:
            raise ValueError(f"has only {size} bytes")
        (header_bytes,) = struct.unpack("<Q", start)
        if start + file.read(len(_POINTER) - 8) == _POINTER:
            raise ValueError("is a Git LFS pointer, not the weights")
        if header_bytes > min(_MAX_HEADER_BYTES, size):
            raise ValueError("is no safetensors file")
        file.seek(8)
        try:
            header = json.loads(file.read(header_bytes))
        except ValueError:
            raise ValueError("has a broken header") from None
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    promised = 8 + header_bytes + end
    if promised != size:
        raise ValueError(f"has {size} bytes, but its header promises {promised}: the download was cut off")
    return SafetensorsFile(
        num_parameters=sum(math.prod(entry["shape"]) for entry in tensors.values()),
        tensor_bytes=end,
        names=tuple(tensors),
        dtypes=tuple(sorted({entry["dtype"] for entry in tensors.values()})),
    )


def _read_json(path: Path) -> tuple[dict[str, Any] | None, Finding | None]:
    try:
        values = parse_json(read_text(path))
    except FileNotFoundError:
        return None, Finding("error", str(path), "is missing", "download the model again")
    except OSError as error:
        fix = "give a model that you may read" if error.errno == errno.EACCES else "download the model again"
        return None, Finding("error", str(path), f"cannot be read: {error.strerror or error}", fix)
    except ValueError as error:
        return None, Finding("error", str(path), f"cannot be read: {error}", "download the model again")
    if not isinstance(values, dict):
        return None, Finding("error", str(path), "holds no JSON object", "download the model again")
    return values, None


def config_problems(file: Path) -> Iterator[tuple[str, str]]:
    """(what is wrong, what to do) of a model's config that is no file of JSON with an object in it."""
    try:
        values = parse_json(read_text(file))
    except FileNotFoundError:
        yield f"{file.parent} has no {file.name}", "give the folder that save_pretrained wrote, or a config.json"
    except OSError as error:
        denied = error.errno == errno.EACCES
        yield f"cannot read {file}: {error.strerror or error}", "give a model that you may read" if denied else "copy the model again"
    except ValueError as error:
        yield f"{file} is not JSON: {json_problem(error)}", "copy the model again"
    else:
        if not isinstance(values, dict):
            yield f"{file} holds no JSON object", "copy the model again"


def is_inside(name: str) -> bool:
    """Whether a file's name in an index or manifest stays within the folder that holds it."""
    return bool(name) and not Path(name).is_absolute() and ".." not in Path(name).parts


def check_model_files(folder: Path) -> tuple[dict[str, Any], list[Finding]]:
    """Config, weights and tokenizer of a local model.

    Returns:
        Facts (architecture, parameters, bytes, dtypes), and one finding for each file that is missing, cut off or unreadable.
    """
    try:
        return _check_model_files(folder)
    except OSError as error:  # of a folder that may not be entered
        message = f"cannot be read: {error.strerror or error}"
        return {}, [Finding("error", str(error.filename or folder), message, "give a model that you may read")]


def _check_model_files(folder: Path) -> tuple[dict[str, Any], list[Finding]]:
    if not folder.is_dir():
        message = "is no folder on this machine; models from the hub are checked when they are loaded"
        return {}, [Finding("warning", str(folder), message, "give a local folder")]
    findings: list[Finding] = []
    config, problem = _read_json(folder / "config.json")
    findings += [problem] if problem else []
    names, index_findings, indexed = _weight_files(folder)
    findings += index_findings
    headers: dict[str, SafetensorsFile] = {}
    for name in names:
        try:
            headers[name] = read_safetensors_header(folder / name)
        except FileNotFoundError:
            findings.append(Finding("error", str(folder / name), "is missing", "download the model again"))
        except PermissionError as error:
            message = f"cannot be read: {error.strerror}"
            findings.append(Finding("error", str(folder / name), message, "give a model that you may read"))
        except (OSError, ValueError, KeyError, TypeError) as error:
            findings.append(Finding("error", str(folder / name), str(error), "download the model again"))
    if indexed and len(headers) == len(names):
        present = {tensor for header in headers.values() for tensor in header.names}
        absent = sorted(set(indexed) - present)
        if absent:
            message = f"lists {len(absent)} tensors that no file holds, such as {absent[0]}"
            findings.append(Finding("error", str(folder / "model.safetensors.index.json"), message, "download the model again"))
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")):
        findings.append(Finding("warning", str(folder), "has no tokenizer", "give --tokenizer_name"))
    facts = {
        "architectures": (config or {}).get("architectures"),
        "num_parameters": sum(header.num_parameters for header in headers.values()),
        "weights_gib": round(sum(header.tensor_bytes for header in headers.values()) / 2**30, 3),
        "dtypes": sorted({dtype for header in headers.values() for dtype in header.dtypes}),
        "num_weight_files": len(names),
    }
    return facts, findings


def _weight_files(folder: Path) -> tuple[list[str], list[Finding], list[str]]:
    """(names of weight files, findings, names of tensors that an index lists)."""
    index_path = folder / "model.safetensors.index.json"
    if index_path.exists():
        index, problem = _read_json(index_path)
        if index is None or not isinstance(index.get("weight_map"), dict):
            return [], [problem or Finding("error", str(index_path), "has no weight_map", "download the model again")], []
        names = sorted({str(name) for name in index["weight_map"].values()})
        if outside := [name for name in names if not is_inside(name)]:
            return [], [Finding("error", str(index_path), f"names {outside[0]}, outside the folder", "download the model again")], []
        return names, [], list(index["weight_map"])
    if (folder / "model.safetensors").exists():
        return ["model.safetensors"], [], []
    others = sorted(path.name for path in folder.glob("*.bin"))
    if others:
        message = f"has no safetensors, only {others[0]}: pickled weights can run code and are not read"
        return [], [Finding("error", str(folder), message, "convert it where you trust it: save_pretrained writes safetensors")], []
    return [], [Finding("error", str(folder), "has no weights", "download the model again")], []


def check_fit(num_parameters: int, gpu_memory_bytes: list[int]) -> list[Finding]:
    """A first estimate of full training: 16 bytes per parameter (bf16 weights and gradients, fp32 weights and Adam), spread over all cards.

    Activations come on top; the memory planner has the exact figure.
    """
    if not num_parameters or not gpu_memory_bytes:
        return []
    state, smallest = 16 * num_parameters, min(gpu_memory_bytes)
    share = state / len(gpu_memory_bytes)
    needed = f"{state / 2**30:.1f} GiB of training state over {len(gpu_memory_bytes)} GPUs is {share / 2**30:.1f} GiB each"
    if share > 0.9 * smallest:
        message = f"{needed}, but the smallest has {smallest / 2**30:.1f} GiB"
        return [Finding("warning", "estimated fit", message, "use more GPUs, offload, or LoRA; harness plan has the details")]
    return [Finding("info", "estimated fit", f"{needed} of {smallest / 2**30:.1f} GiB, before activations", "harness plan has the details")]


# What a model's code raises for values that it was never meant for.
MODEL_CODE_ERRORS = (ValueError, ImportError, TypeError, AttributeError, LookupError, RuntimeError, ArithmeticError, AssertionError)


def what_failed(error: BaseException) -> str:
    """What a model's code says is wrong: for one who did not write it, so a KeyError is named."""
    message = (str(error) or type(error).__name__).splitlines()[0]
    return f"{type(error).__name__}: {message}" if isinstance(error, LookupError) else message


# Sizes in a config (also under GPT-2's names) with a limit that no model comes near: building one of 10^9 layers takes all the memory.
_SIZES = {
    **{"hidden_size": 2**24, "intermediate_size": 2**28, "vocab_size": 2**31, "num_attention_heads": 2**20, "num_key_value_heads": 2**20},
    **{"num_hidden_layers": 10_000, "n_embd": 2**24, "n_inner": 2**28, "n_head": 2**20, "n_layer": 10_000, "head_dim": 2**20},
}


def names_a_path(source: str) -> bool:
    """Whether a model's name can only be a file or folder; names on the hub have at most one slash ("org/name")."""
    return source.startswith(("/", "./", "../", "~")) or source.endswith(".json") or source.count("/") > 1


def impossible_sizes(value_of: Callable[[str], Any]) -> list[Finding]:
    """Sizes in a model's config that no model can have.

    Args:
        value_of: name -> value in the config; None where it is not there.
    """
    findings: list[Finding] = []

    def bad(key: str, message: str) -> None:
        findings.append(Finding("error", key, message, "correct the model's config.json"))

    for key, most in _SIZES.items():
        value = value_of(key)
        if isinstance(value, str) or (isinstance(value, (int, float)) and not (1 <= value < 2**63 and value == int(value))):
            bad(key, f"must be a positive whole number, not {value!r}")
        elif isinstance(value, (int, float)) and value > most:
            bad(key, f"{value} is beyond all models; at most {most:,}")
    hidden, heads, groups = (value_of(key) for key in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    if findings or not isinstance(heads, int):
        return findings
    if isinstance(hidden, int) and heads > hidden:
        bad("num_attention_heads", f"{heads} heads are more than the hidden size {hidden}")
    if isinstance(groups, int) and heads % groups:
        bad("num_key_value_heads", f"{heads} heads cannot share {groups} key-value heads evenly")
    for key, message in _too_few_experts(value_of):
        bad(key, message)
    return findings


# Under the names of the model families: how many experts each token goes to, and how many there are.
_EXPERTS_OF_A_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")


def _too_few_experts(value_of: Callable[[str], Any]) -> Iterator[tuple[str, str]]:
    """(key, message) where a token goes to more experts than there are; the model would find out in its first step."""
    counts = [(key, value) for key in _EXPERTS if type(value := value_of(key)) is int and value > 0]  # True is no count
    for key in _EXPERTS_OF_A_TOKEN:
        wanted = value_of(key)
        if counts and type(wanted) is int and wanted > max(count for _, count in counts):
            yield key, f"{wanted} experts for each token are more than the {counts[0][1]} of {counts[0][0]}"


_POSITIONS = ("max_position_embeddings", "n_positions")
_SMALL = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
_SHARES = ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout", "hidden_dropout_prob")


def impossible_values(value_of: Callable[[str], Any]) -> list[Finding]:
    """Other values than sizes in a model's config that its code takes and trips over later.

    Args:
        value_of: as for `impossible_sizes`.
    """
    fix = "correct the model's config.json"
    found: list[Finding] = []
    for key in _POSITIONS:
        value = value_of(key)
        is_count = isinstance(value, int) and not isinstance(value, bool) and value != 0 and value >= -1  # XLNet's and T5's -1: no limit
        if value is not None and value != () and not is_count:
            found.append(Finding("error", key, f"must be a positive whole number, not {value!r}", fix))
    for key in _SHARES:
        value = value_of(key)
        if isinstance(value, (str, bool)) or (isinstance(value, (int, float)) and not 0 <= value <= 1):
            found.append(Finding("error", key, f"must be a number from 0 to 1, not {value!r}", fix))
    for key in _SMALL:
        value = value_of(key)
        if isinstance(value, (str, bool)) or (isinstance(value, (int, float)) and not 0 <= value < 1):
            found.append(Finding("error", key, f"must be a small number that is not negative, not {value!r}", fix))
    for key, value in _thetas(value_of):
        if isinstance(value, (str, bool)) or (isinstance(value, (int, float)) and not (0 < value < math.inf)):
            found.append(Finding("error", key, f"must be a positive number, not {value!r}", fix))
    return found


def _thetas(value_of: Callable[[str], Any]) -> Iterator[tuple[str, Any]]:
    """The bases of rotary positions, at the top or among `rope_parameters`, which may be given for each kind of layer."""
    yield "rope_theta", value_of("rope_theta")
    parameters = value_of("rope_parameters")
    if isinstance(parameters, Mapping):
        inner = [each for each in parameters.values() if isinstance(each, Mapping)]
        for each in inner or [parameters]:
            yield "rope_theta", each.get("rope_theta")


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def damaged_tokenizer_file(folder: Path) -> str | None:
    """Which of a tokenizer's files cannot be what its name says, and why; None where all can, or it is no local folder."""
    from tokenizers import Tokenizer

    for file in (folder / name for name in _TOKENIZER_FILES):
        if not file.exists():
            continue
        try:
            content = parse_json(read_text(file))
        except (OSError, ValueError) as error:
            return f"{file} cannot be read: {error}"
        if not isinstance(content, dict):
            return f"{file} holds no JSON object"
        if file.name == "tokenizer.json":
            try:
                Tokenizer.from_file(str(file))
            except Exception as error:  # its only class
                return f"{file} is no tokenizer: {str(error).splitlines()[0]}"
        elif file.name == "tokenizer_config.json":
            for key, kind, called in (("tokenizer_class", str, "a text"), ("added_tokens_decoder", dict, "an object")):
                if content.get(key) is not None and not isinstance(content[key], kind):
                    return f"{file}: {key} is {content[key]!r}, not {called}"
    return None
