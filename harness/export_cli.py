"""`harness export`: a checkpoint as an ordinary model folder, in one process without a GPU."""

from __future__ import annotations

import itertools
import json
import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from harness import checkpoint_files, disk_room, own_checkpoints
from harness.export import BUFFERS_FILE, export_model, model_card
from harness.findings import Finding, FindingParser, UserError, format_findings, user_error
from harness.lora import BASE_FOLDER, AttachedLora, export_adapter, merge_adapter
from harness.modeling import persistent_buffers
from harness.stored_state import DcpState, StoredState, ZeroWeights, engine_family, weights_of
from harness.user_files import named_path

log = logging.getLogger("harness")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def open_checkpoint(folder: Path, *, trust: bool = False) -> tuple[dict[str, Any], StoredState]:
    """A checkpoint's facts, and its weights to be read one by one.

    Args:
        trust: read it although no run of this user has written it.

    Raises:
        UserError: not a checkpoint, not complete or damaged, without the files of its model, or another user's.
    """
    if not (folder / checkpoint_files.STATE_FILE).is_file():
        newest = next((str(path) for path in checkpoint_files.list_checkpoints(folder)), None)
        raise user_error(
            str(folder), "is not a checkpoint of this harness", f"did you mean {newest}?" if newest else "give out/checkpoint-N"
        )
    problem = checkpoint_files.problem_of(folder)
    if problem:
        raise user_error(str(folder), problem, "export another checkpoint")
    if error := own_checkpoints.refusal(folder, trust):
        raise error
    if not (folder / checkpoint_files.MODEL_FOLDER / "config.json").is_file():
        raise user_error(str(folder), "holds no model config", "copy the model's config.json and tokenizer into its folder model/")
    facts = json.loads((folder / checkpoint_files.STATE_FILE).read_text(encoding="utf-8"))
    state = folder / checkpoint_files.ENGINE_FOLDER
    return facts, DcpState(state) if engine_family(facts["run"]["engine"]) == "dcp" else ZeroWeights(state)


def export_checkpoint(
    folder: Path,
    output: Path,
    dtype: str | None = None,
    *,
    merge: bool = False,
    base_model: str | None = None,
    max_shard_bytes: int = 4 * 2**30,
    trust: bool = False,
) -> None:
    """Writes the model of a checkpoint; host memory is bounded by one shard file.

    Args:
        dtype: "bf16", "fp16" or "fp32" of the weights; None: the dtype the run computed in.
        merge: with LoRA, the adapters are added to the base model instead of being written alone.
        base_model: where that is, if not where the run took it from.
        trust: see `open_checkpoint`.

    Raises:
        UserError: see `open_checkpoint`; `merge` without adapters or without their base model; an output that exists.
    """
    if base_model is not None and not merge:
        raise user_error("--base_model", "has no effect alone", "add --merge")
    if output.exists() and not output.is_dir():
        raise user_error(str(output), "is no folder", "choose a new folder")
    if output.exists() and any(output.iterdir()):
        raise user_error(str(output), "exists and is not empty", "choose another folder")
    facts, state = open_checkpoint(folder, trust=trust)
    model_folder = folder / checkpoint_files.MODEL_FOLDER
    wanted = DTYPES[dtype or facts["run"].get("precision") or "fp32"]
    card = model_card(_class_name(model_folder), facts["state"], facts["run"])
    if not (model_folder / "adapter_config.json").is_file():
        if merge:
            raise user_error("--merge", f"{folder} holds a whole model, no adapters", "leave it out")
        _export_whole(state, model_folder, output, wanted, card, max_shard_bytes)
    elif merge:
        base = base_model or find_base(folder)
        with tempfile.TemporaryDirectory(dir=output.resolve().parent, prefix=".tmp-adapter-") as scratch:
            _export_adapter(state, model_folder, Path(scratch) / "adapter", torch.float32, card)
            merge_adapter(Path(scratch) / "adapter", output, base, dtype=wanted)
        (output / "README.md").write_text(card, encoding="utf-8")
    else:
        _export_adapter(state, model_folder, output, torch.float32 if dtype is None else wanted, card)


def find_base(folder: Path) -> str:
    """The base model of a checkpoint's adapters: where the run took it from, or what the run kept of one that it had made itself.

    Raises:
        UserError: it is in neither place.
    """
    config = json.loads((folder / checkpoint_files.MODEL_FOLDER / "adapter_config.json").read_text(encoding="utf-8"))
    name = config.get("base_model_name_or_path")
    is_path = name is not None and (name.startswith(("/", ".", "~")) or name.count("/") > 1)  # else maybe of the hub
    if name is not None and (not is_path or Path(name).is_dir()):
        return str(name)
    kept = folder.resolve().parent / BASE_FOLDER
    if kept.is_dir():
        return str(kept)
    message = f"the base model of its adapters, {name}, is not there" if name else "the base model was made from scratch and not kept"
    raise user_error(str(folder), message, "say where it is: --base_model; without --merge the adapters alone are written")


def _class_name(model_folder: Path) -> str:
    config = json.loads((model_folder / "config.json").read_text(encoding="utf-8"))
    return (config.get("architectures") or [config["model_type"]])[0]


def _export_whole(state: StoredState, model_folder: Path, output: Path, dtype: torch.dtype, card: str, max_shard_bytes: int) -> None:
    from accelerate import init_empty_weights
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    config = AutoConfig.from_pretrained(model_folder)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}  # a tied weight once
    buffers = dict(persistent_buffers(model))
    if (model_folder / BUFFERS_FILE).is_file():
        buffers |= load_file(model_folder / BUFFERS_FILE)
    weights = weights_of(state, [name for name in shapes if name in set(state.names)])
    shapes |= {name: tuple(buffer.shape) for name, buffer in buffers.items()}
    generation = GenerationConfig.from_pretrained(model_folder) if (model_folder / "generation_config.json").is_file() else None
    export_model(
        output,
        itertools.chain(weights, buffers.items()),
        shapes,
        model.config,
        AutoTokenizer.from_pretrained(model_folder),
        dtype=dtype,
        is_main_process=True,
        generation_config=generation,
        card=card,
        max_shard_bytes=max_shard_bytes,
        kept=buffers,
    )


def _export_adapter(state: StoredState, model_folder: Path, output: Path, dtype: torch.dtype, card: str) -> None:
    """The adapters alone, as peft reads them; they fit into host memory by nature."""
    from peft import PeftConfig
    from transformers import AutoTokenizer

    attached = AttachedLora(PeftConfig.from_pretrained(str(model_folder)), [], 0)
    weights = ((name, tensor.to(dtype)) for name, tensor in weights_of(state, state.names))
    export_adapter(output, weights, attached, AutoTokenizer.from_pretrained(model_folder), is_main_process=True, card=card)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns 0 done, 1 the disk is full, 2 wrong input."""
    parser = FindingParser(prog="harness export", description="Turns a checkpoint into a folder that from_pretrained loads.")
    parser.add_argument("checkpoint", type=named_path, help="out/checkpoint-N")
    parser.add_argument("output", type=named_path, help="new folder")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default=None, help="of the weights; default: what the run computed in")
    parser.add_argument("--merge", action="store_true", help="LoRA: add the adapters to the base model")
    parser.add_argument("--base_model", "--base-model", help="with --merge: the base model, if it is not where the run took it from")
    parser.add_argument(
        "--trust_checkpoint",
        "--trust-checkpoint",
        action="store_true",
        help="read a checkpoint that none of your own runs has written: its files can run code",
    )
    try:
        options = parser.parse_args(argv)
        more = {"merge": options.merge, "base_model": options.base_model, "trust": options.trust_checkpoint}
        export_checkpoint(options.checkpoint, options.output, options.dtype, **more)
    except UserError as error:
        print(format_findings(error.findings), file=sys.stderr)
        return 2
    except OSError as error:
        is_full = disk_room.is_full(error)  # then the message names path and fix already
        key, fix = str(error.filename or options.output), "" if is_full else disk_room.write_fix(error)
        at = Path(key).absolute()
        if at.is_relative_to(options.checkpoint.absolute()) and not at.is_relative_to(options.output.absolute()):
            fix = fix and "give a checkpoint that you may read"
        print(format_findings([Finding("error", key, error.strerror or str(error), fix)]), file=sys.stderr)
        return 1 if is_full else 2
    print(f"written: {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
