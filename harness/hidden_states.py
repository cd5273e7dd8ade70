"""`harness layers`: what every layer of a model puts out, also of a model far larger than any memory here.

    harness layers --model folder --prompts prompts.txt --output states
    harness layers --model folder --test-type multi --layers 0,5,10-20 --output states --compare states_of_another_machine
    harness layers --model folder --test-type single --layers 6 --inputs states --output one

Layers are numbered as in `output_hidden_states=True`: 0 is what the embedding gives to the first block, n is what block n-1 puts out, and
the last is taken behind the final norm. So a model of 3 blocks has 4 entries. Each is moved to host memory as soon as it exists and
written to safetensors files in pieces; weights may sit on several cards, in host memory and on disk.

Written to the output folder: states-00000.safetensors ..., with tensors named "<prompt>.<layer>" (an encoder-decoder has
"<prompt>.encoder.<layer>" and "<prompt>.decoder.<layer>"), and manifest.json.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harness import device_map_text, disk_room
from harness.args import DeviceMapArguments, ModelArguments
from harness.device_maps import load_model
from harness.file_modes import give_usual_mode
from harness.findings import Finding, FindingParser, UserError, format_findings, user_error
from harness.model_files import config_problems, is_inside
from harness.model_units import block_classes, find_units
from harness.modeling import load_config, load_tokenizer
from harness.partition import Device
from harness.placement import free_memory, get_model_input_device, meta_model, torch_device
from harness.user_files import parse_json, read_text, read_user_text

log = logging.getLogger("harness")

DTYPES = {"auto": "auto", "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DTYPES |= {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SHARD_BYTES = 10**9
DEFAULT_PROMPT = "The quick brown fox jumps over the lazy dog."
MANIFEST = "manifest.json"


class _Enough(Exception):
    """Raised by a hook when every wanted state is there: the rest of the forward would be for nothing."""


@dataclasses.dataclass(frozen=True)
class Stack:
    """A row of blocks with the module around them.

    Attributes:
        prefix: "" for a decoder-only model, else "encoder." or "decoder.".
        module: its output is the state behind the final norm.
        blocks: in order.
    """

    prefix: str
    module: nn.Module
    blocks: tuple[nn.Module, ...]


def find_stacks(model: nn.Module) -> list[Stack]:
    """The rows of blocks of a model, by the classes it says must not be split.

    Raises:
        UserError: the model does not name its blocks.
    """
    classes = block_classes(model)
    rows: dict[str, list[nn.Module]] = {}
    for name, module in model.named_modules():
        if type(module).__name__ in classes and name.rpartition(".")[2].isdigit():
            rows.setdefault(name.rpartition(".")[0], []).append(module)
    if not rows:
        raise user_error("--model", f"{type(model).__name__} does not name its blocks", "give a causal or sequence-to-sequence LM")
    stacks = []
    for container, blocks in rows.items():
        around = container.rpartition(".")[0]
        prefix = "" if len(rows) == 1 else f"{around.rpartition('.')[2]}."
        stacks.append(Stack(prefix, model.get_submodule(around), tuple(blocks)))
    return stacks


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return args[0] if args else kwargs["hidden_states"]


def _first(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


@contextlib.contextmanager
def collecting(stacks: Sequence[Stack], wanted: Sequence[int], keep: Callable[[str, Tensor], None], stop: bool) -> Iterator[None]:
    """Within, a forward hands every wanted state to `keep`, with its name, on the host.

    Args:
        wanted: numbers of layers, of every stack.
        stop: end the forward with `_Enough` once all are there.
    """
    numbers = {stack.prefix: [layer for layer in wanted if layer <= len(stack.blocks)] for stack in stacks}
    missing = sum(map(len, numbers.values()))

    def took(name: str, state: Tensor) -> None:
        nonlocal missing
        keep(name, state.detach().to("cpu"))
        missing -= 1
        if stop and not missing:
            raise _Enough

    def before(name: str) -> Callable[..., None]:
        return lambda _module, args, kwargs: took(name, _hidden(args, kwargs))

    def after(name: str) -> Callable[..., None]:
        return lambda _module, _args, output: took(name, _first(output))

    handles = []
    for stack in stacks:
        for layer in numbers[stack.prefix]:
            name = f"{stack.prefix}{layer}"
            if layer < len(stack.blocks):
                handles.append(stack.blocks[layer].register_forward_pre_hook(before(name), with_kwargs=True))
            else:
                handles.append(stack.module.register_forward_hook(after(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class StateWriter:
    """Writes tensors to safetensors files of about `shard_bytes`, holding no more than one file's worth in memory."""

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self.folder, self.shard_bytes = folder, shard_bytes
        self.entries: list[dict[str, Any]] = []
        self.problems: list[Finding] = []
        self._waiting: dict[str, Tensor] = {}
        self._waiting_bytes = self._num_files = 0
        folder.mkdir(parents=True, exist_ok=True)
        for old in (*folder.glob("states-*.safetensors"), *folder.glob(MANIFEST)):
            old.unlink()  # of an earlier run into the same folder

    def add(self, key: str, tensor: Tensor) -> None:
        """Takes a tensor; one of zeros, or with a NaN or an infinity, is remembered as a problem."""
        values = tensor.float()
        norm = float(torch.linalg.vector_norm(values))
        if not bool(torch.isfinite(values).all()):
            self.problems.append(Finding("error", key, "has values that are not finite", "try --dtype fp32"))
        elif norm == 0.0:
            self.problems.append(Finding("error", key, "is all zeros", "the weights or the device map of this layer are wrong"))
        file = f"states-{self._num_files:05d}.safetensors"
        entry = {"key": key, "file": file, "shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch."), "norm": norm}
        self.entries.append(entry)
        self._waiting[key] = tensor.contiguous()
        self._waiting_bytes += tensor.numel() * tensor.element_size()
        if self._waiting_bytes >= self.shard_bytes:
            self.flush()

    def flush(self) -> None:
        from safetensors.torch import save_file

        if self._waiting:
            path = self.folder / f"states-{self._num_files:05d}.safetensors"
            try:
                with disk_room.naming(path, self._waiting_bytes):
                    save_file(self._waiting, path)
            except Exception:
                path.unlink(missing_ok=True)  # a part of a file
                raise
            give_usual_mode(path)
            self._waiting, self._waiting_bytes = {}, 0
            self._num_files += 1

    def close(self, facts: dict[str, Any]) -> None:
        """Writes what waits and the manifest, which is the last file to appear."""
        self.flush()
        manifest = {**facts, "problems": [finding.line() for finding in self.problems], "states": self.entries}
        temporary = self.folder / (MANIFEST + ".part")
        with disk_room.naming(self.folder / MANIFEST):
            temporary.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        temporary.rename(self.folder / MANIFEST)


class StateFolder:
    """States that an earlier run wrote, read one at a time.

    Raises:
        UserError: no finished run there.
    """

    def __init__(self, folder: Path, flag: str) -> None:
        self.folder = folder
        self.flag = flag
        try:
            self.manifest = parse_json(read_text(folder / MANIFEST))
            self.files: dict[str, str] = {str(entry["key"]): str(entry["file"]) for entry in self.manifest["states"]}
        except (OSError, ValueError, TypeError, KeyError):
            raise user_error(flag, f"{folder} holds no {MANIFEST}", "give the output folder of a finished run") from None
        if outside := [name for name in self.files.values() if not is_inside(name)]:
            raise user_error(flag, f"{folder / MANIFEST} names {outside[0]}, outside the folder", "give the output of a finished run")

    def get(self, key: str) -> Tensor:
        from safetensors import safe_open

        path = self.folder / self.files[key]
        try:
            with safe_open(str(path), framework="pt") as handle:
                return handle.get_tensor(key)
        except Exception as error:  # safetensors' errors have no common kind
            raise user_error(self.flag, f"{path} cannot be read: {str(error).splitlines()[0]}", "make the states again") from None


def compare(one: StateFolder, other: StateFolder) -> list[dict[str, Any]]:
    """Differences of the states that both folders have: key, largest and mean absolute error, cosine; both read one state at a time.

    Raises:
        UserError: they have no state in common, or one of another shape.
    """
    rows: list[dict[str, Any]] = []
    problems: list[Finding] = []
    for key in one.files:
        if key not in other.files:
            continue
        a, b = one.get(key).float(), other.get(key).float()
        if a.shape != b.shape:
            shapes = f"{tuple(a.shape)} here, {tuple(b.shape)} in {other.folder}"
            problems.append(Finding("error", "--compare", f"{key}: {shapes}", "use the same model and prompts"))
            continue
        error = (a - b).abs()
        cosine = torch.nn.functional.cosine_similarity(a.flatten().double(), b.flatten().double(), dim=0)
        rows.append({"key": key, "max_error": float(error.max()), "mean_error": float(error.mean()), "cosine": float(cosine)})
    if not rows and not problems:
        problems.append(Finding("error", "--compare", f"{other.folder} has none of these states", "use the same layers and prompts"))
    if problems:
        raise UserError(problems)
    return rows


def comparison_text(rows: Sequence[dict[str, Any]]) -> str:
    """The comparison as a table."""
    lines = [f"{'state':<16}{'max error':>12}{'mean error':>12}{'cosine':>12}"]
    lines += [f"{row['key']:<16}{row['max_error']:>12.3e}{row['mean_error']:>12.3e}{row['cosine']:>12.8f}" for row in rows]
    return "\n".join(lines)


def read_prompts(path: str | None) -> list[str]:
    """Prompts, one a line; blank lines do not count.

    Raises:
        UserError: no file, no text, not UTF-8.
    """
    if path is None:
        return [DEFAULT_PROMPT]
    text = read_user_text(path, "--prompts", "give a UTF-8 text file, one prompt a line")
    prompts = [line for line in text.splitlines() if line.strip()]
    if not prompts:
        raise user_error("--prompts", f"{path} has no text", "write one prompt a line")
    return prompts


def _token_ids(options: argparse.Namespace, vocab_size: int) -> list[Tensor]:
    """Token ids of each prompt, (1, tokens)."""
    prompts = read_prompts(options.prompts)
    tokenizer = load_tokenizer(
        ModelArguments(model_name_or_path=options.model, model_revision=options.revision, tokenizer_name=options.tokenizer_name)
    )
    encoded = [tokenizer(prompt, return_tensors="pt")["input_ids"][:, : options.max_length] for prompt in prompts]
    for prompt, ids in zip(prompts, encoded, strict=True):
        if ids.numel() == 0 or int(ids.max()) >= vocab_size:
            raise user_error("--prompts", f"{prompt[:40]!r} has no tokens, or tokens the model does not have", "use the model's tokenizer")
    return encoded


def _flags(options: argparse.Namespace) -> DeviceMapArguments:
    names = {field.name for field in dataclasses.fields(DeviceMapArguments)}
    flags = DeviceMapArguments(**{name: value for name, value in vars(options).items() if name in names})
    problems = device_map_text.resolve(flags, None, 1)
    if problems:
        raise UserError(problems)
    return flags


def _check(options: argparse.Namespace, problems: list[Finding]) -> None:
    """What can be said before the model is looked at, beside what is known to be wrong with the command line.

    Raises:
        UserError: everything that is wrong, together.
    """
    if options.quantization and importlib.util.find_spec("bitsandbytes") is None:
        problems.append(Finding("error", "--quantization", "needs the package bitsandbytes", "pip install bitsandbytes, or leave it out"))
    elif options.quantization and not torch.cuda.is_available():
        problems.append(Finding("error", "--quantization", "needs a GPU", "leave it out"))
    if options.quantization and options.dtype == "fp32":
        problems.append(Finding("error", "--quantization", "has no effect on weights in --dtype fp32", "keep one"))
    if options.model and Path(options.model).exists():
        path = Path(options.model)
        found = config_problems(path / "config.json" if path.is_dir() else path)
        problems += [Finding("error", "--model", message, fix) for message, fix in found]
    try:
        _flags(options)
    except UserError as error:
        problems += error.findings
    if problems:
        raise UserError(problems)


def _load_options(options: argparse.Namespace) -> dict[str, Any]:
    loading: dict[str, Any] = {"dtype": DTYPES[options.dtype]}
    if options.quantization:
        from transformers import BitsAndBytesConfig

        loading["quantization_config"] = BitsAndBytesConfig(
            load_in_8bit=options.quantization == "int8", load_in_4bit=options.quantization == "int4"
        )
    return loading


def _num_entries(model: nn.Module) -> int:
    return max(len(stack.blocks) for stack in find_stacks(model)) + 1


def _wanted(options: argparse.Namespace, empty: nn.Module) -> list[int]:
    """Numbers of the layers asked for; checked against the model before any weight is read."""
    num_entries = _num_entries(empty)
    if options.test_type == "full":
        return []
    if options.layers is None:
        if options.test_type in ("single", "multi"):
            raise user_error("--layers", f"--test-type {options.test_type} needs it", "write --layers 0,5,10-20")
        return list(range(num_entries))
    layers = device_map_text.parse_ranges(options.layers, num_entries, "--layers")
    if options.test_type == "single" and (len(layers) != 1 or layers[0] == 0):
        raise user_error("--layers", "--test-type single runs one layer, from 1 on (0 is the embedding's output)", "write --layers 1")
    return layers


@torch.inference_mode()
def extract(model: Any, prompts: Sequence[Tensor], wanted: Sequence[int], writer: StateWriter, logits: bool) -> None:
    """Runs the model on each prompt and writes the wanted states, and with `logits` the logits.

    Args:
        prompts: token ids, each (1, tokens).
    """
    stacks = find_stacks(model)
    device = torch_device(get_model_input_device(model))
    for number, ids in enumerate(prompts):
        inputs: dict[str, Any] = {"input_ids": ids.to(device), "use_cache": False}
        if getattr(model.config, "is_encoder_decoder", False):
            inputs["decoder_input_ids"] = inputs["input_ids"]

        def keep(name: str, state: Tensor, number: int = number) -> None:
            writer.add(f"{number}.{name}", state)

        with collecting(stacks, wanted, keep, stop=not logits), contextlib.suppress(_Enough):
            output = model(**inputs)
            if logits:
                writer.add(f"{number}.logits", output.logits.to("cpu"))


class _Call(Exception):
    """Carries the arguments with which a model calls a block out of its forward."""

    def __init__(self, kwargs: dict[str, Any]) -> None:
        super().__init__("call of a block")
        self.kwargs = kwargs


@contextlib.contextmanager
def _only_the_call(blocks: Sequence[nn.Module], index: int, as_tuple: bool) -> Iterator[None]:
    """Within, the blocks before `index` hand on what they get, and the one at `index` raises `_Call` with its keyword arguments."""

    def hand_on(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return (hidden_states,) if as_tuple else hidden_states

    def report(*args: Any, **kwargs: Any) -> Any:
        raise _Call({name: value for name, value in kwargs.items() if name != "hidden_states"})

    before = [(block, block.forward) for block in blocks[: index + 1]]
    for position, (block, _) in enumerate(before):
        block.forward = report if position == index else hand_on  # type: ignore[method-assign]
    try:
        yield
    finally:
        for block, forward in before:
            block.forward = forward  # type: ignore[method-assign]


def _block_arguments(stack: Stack, index: int, states: Tensor) -> dict[str, Any]:
    """What the model passes to a block besides the states: mask, positions, rotary tables, made by the model's own code."""
    for as_tuple in (False, True):  # what a block returns is the model's own affair
        try:
            with _only_the_call(stack.blocks, index, as_tuple):
                stack.module(inputs_embeds=states, use_cache=False)
        except _Call as call:
            return call.kwargs
        except (TypeError, ValueError, IndexError, RuntimeError) as error:
            log.debug("calling with as_tuple=%s: %s", as_tuple, error)
    raise user_error("--test-type", f"{type(stack.module).__name__} does not run on given states", "use --test-type multi")


@torch.inference_mode()
def run_single(options: argparse.Namespace, empty: Any, layer: int, writer: StateWriter) -> dict[str, Any]:
    """One block on saved or random states, with only its own weights (and the small ones outside the blocks) in memory."""
    if len(find_stacks(empty)) > 1:
        raise user_error("--test-type", "single is for decoder-only models", "use --test-type multi")
    units = find_units(empty)
    head, embedding = empty.get_output_embeddings(), empty.get_input_embeddings()
    block = find_stacks(empty)[0].blocks[layer - 1]
    here: Device = 0 if free_memory() and options.device_map != "cpu" else "cpu"
    device_map: dict[str, Device] = {}
    after_blocks: list[str] = []
    for unit in units:
        modules = [empty.get_submodule(name) for name in unit.names]
        needed = block in modules if unit.is_block else not any(module in (head, embedding) for module in modules)
        device_map.update(dict.fromkeys(unit.names, here if needed else "disk"))
        if needed and not unit.is_block and any(other.is_block for other in units[: units.index(unit)]):
            after_blocks += unit.names
    flags = dataclasses.replace(_flags(options), device_map=json.dumps(device_map))
    model, _ = load_model(options.model, flags, options.revision, **_load_options(options))
    stack = find_stacks(model)[0]
    dtype = next(stack.blocks[layer - 1].parameters()).dtype
    device = torch_device(here)
    for number, states in enumerate(_input_states(options, model.config, layer, dtype)):
        states = states.to(device, dtype)
        output = _first(stack.blocks[layer - 1](states, **_block_arguments(stack, layer - 1, states)))
        if layer == len(stack.blocks):  # the last entry is the one behind the final norm
            for name in after_blocks:
                output = model.get_submodule(name)(output)
        writer.add(f"{number}.{layer}", output.to("cpu"))
    return {"device_map": {name: str(device) for name, device in device_map.items()}}


def _input_states(options: argparse.Namespace, config: Any, layer: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """States that go into a layer: those of the layer before from --inputs, else random ones, (1, tokens, hidden)."""
    if options.inputs:
        saved = StateFolder(Path(options.inputs), "--inputs")
        keys = [key for key in saved.files if key.partition(".")[2] == str(layer - 1)]
        if not keys:
            raise user_error("--inputs", f"{options.inputs} has no states of layer {layer - 1}", "extract that layer first")
        yield from (saved.get(key) for key in keys)
        return
    generator = torch.Generator().manual_seed(0)
    width = int(config.get_text_config().hidden_size)
    yield torch.randn(1, min(options.max_length, 64), width, generator=generator).to(dtype)


def _parser() -> FindingParser:
    parser = FindingParser(prog="harness layers", description="Hidden states of every layer of a model.")

    def flag(name: str, **settings: Any) -> None:
        parser.add_argument(*dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"]), **settings)

    def true_or_false(text: str) -> bool:
        if text.lower() not in ("true", "false", "1", "0", "yes", "no"):
            raise argparse.ArgumentTypeError(f"{text!r} is neither True nor False")
        return text.lower() in ("true", "1", "yes")

    flag("model", required=True, help="folder or hub name")
    flag("revision", default="main", help="branch, tag or commit on the hub")
    flag("output", required=True, help="folder for the states")
    flag("test_type", choices=["single", "multi", "full", "extract-all"], default="extract-all", help="one layer alone, some, logits, all")
    flag("layers", default=None, help="0,5,10-20; 0 is the embedding's output, n what block n-1 puts out")
    flag("tokenizer_name", default=None, help="tokenizer, if not the model's; 'bytes' is a built-in byte tokenizer")
    flag("prompts", default=None, help="text file, one prompt a line")
    flag("max_length", type=int, default=2048, help="tokens of a prompt that are used")
    flag("inputs", default=None, help="single: folder with the states of the layer before")
    flag("dtype", choices=list(DTYPES), default="auto", help="dtype of the weights; auto: the model's")
    flag("quantization", choices=["int8", "int4"], default=None, help="load the weights quantised (needs bitsandbytes and a GPU)")
    flag("compare", default=None, help="folder of an earlier run: report the differences")
    flag("device_map", default=None, help="as in training; default dynamic")
    flag("max_memory", default=None, help="'40GB' a card, or '0:60GB,cpu:200GB'")
    flag("min_memory_gb", type=float, default=2.0, help="leave out cards with less free memory")
    flag("balance_threshold", type=float, default=0.3, help="imbalance that dynamic accepts")
    flag("force_balance", type=true_or_false, nargs="?", const=True, default=False, help="equal shares on every card")
    flag("exclude_cpu", type=true_or_false, nargs="?", const=True, default=False, help="no weights in host memory or on disk")
    flag("offload_folder", default="offload", help="folder for weights that do not fit in memory")
    return parser


def run(options: argparse.Namespace, problems: list[Finding]) -> int:
    """Extracts, writes, compares. Returns 1 when a state is all zeros or not finite.

    Args:
        problems: what is wrong with the command line.

    Raises:
        UserError: wrong input, found before weights are read.
    """
    _check(options, problems)
    other = StateFolder(Path(options.compare), "--compare") if options.compare else None
    config = load_config(ModelArguments(model_name_or_path=options.model, model_revision=options.revision))
    empty = meta_model(config)
    wanted = _wanted(options, empty)
    facts: dict[str, Any] = {
        "model": options.model,
        "revision": getattr(config, "_commit_hash", None) or options.revision,
        "test_type": options.test_type,
        "num_layers": _num_entries(empty) - 1,
        "layers": wanted,
    }
    if options.test_type == "single":
        writer = StateWriter(Path(options.output))
        facts |= run_single(options, empty, wanted[0], writer)
    else:
        prompts = _token_ids(options, int(config.get_text_config().vocab_size))
        model, choice = load_model(options.model, _flags(options), options.revision, **_load_options(options))
        writer = StateWriter(Path(options.output))
        extract(model, prompts, wanted, writer, logits=options.test_type == "full")
        facts["token_ids"] = [ids[0].tolist() for ids in prompts]
        facts["device_map"] = {name: str(device) for name, device in choice.device_map.items()}
    writer.close(facts)
    print(f"{len(writer.entries)} states of {options.model} in {options.output}")
    if writer.problems:
        print(format_findings(writer.problems), file=sys.stderr)
        return 1
    if other is not None:
        rows = compare(StateFolder(Path(options.output), "--output"), other)
        file = Path(options.output) / "compare.json"
        with disk_room.naming(file):
            file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        print(comparison_text(rows))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, 1 for a state that cannot be right, 2 for wrong input."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        return run(*_parser().read(argv))
    except UserError as error:
        print(format_findings(error.findings), file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
