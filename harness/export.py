"""A model as `from_pretrained` reads it: safetensors shards, config, tokenizer, written tensor by tensor."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness import disk_room
from harness.file_modes import give_usual_mode
from harness.modeling import persistent_buffers

MAX_SHARD_BYTES = 4 * 2**30


class _Shards:
    """Collects tensors and writes a file whenever enough have come."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self.held: dict[str, Tensor] = {}
        self.held_bytes = 0
        self.files: list[list[str]] = []
        self.total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self.held and self.held_bytes + size > self.max_bytes:
            self.flush()
        self.held[name] = tensor
        self.held_bytes += size
        self.total_bytes += size

    def flush(self) -> None:
        from safetensors.torch import save_file

        if self.held:
            part = self.folder / f"part-{len(self.files)}"
            save_file(self.held, str(part), metadata={"format": "pt"})
            give_usual_mode(part)
            self.files.append(list(self.held))
            self.held, self.held_bytes = {}, 0

    def finish(self) -> None:
        """Gives the files their final names and writes the index."""
        self.flush()
        count = len(self.files)
        if count == 1:
            os.replace(self.folder / "part-0", self.folder / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for index, names in enumerate(self.files):
            file_name = f"model-{index + 1:05d}-of-{count:05d}.safetensors"
            os.replace(self.folder / f"part-{index}", self.folder / file_name)
            weight_map.update(dict.fromkeys(names, file_name))
        index_json = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index_json, indent=1), encoding="utf-8")


BUFFERS_FILE = "buffers.safetensors"  # beside a checkpoint's parameters: what else a stored model has


def write_model_files(folder: Path, model: Any, tokenizer: Any, adapter_config: Any = None) -> None:
    """Writes what a model folder holds besides parameters: configs, tokenizer, buffers, and the adapters' config; whole or not at all."""
    from safetensors.torch import save_file

    temporary = folder.with_name(f".tmp-{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with disk_room.naming(folder):
            temporary.mkdir(parents=True)
            _write_config(temporary, model.config, None)
            generation_config = getattr(model, "generation_config", None)
            if generation_config is not None:
                generation_config.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
            if adapter_config is not None:
                adapter_config.save_pretrained(str(temporary))
            elif buffers := {name: buffer.detach().cpu().clone() for name, buffer in persistent_buffers(model)}:
                save_file(buffers, temporary / BUFFERS_FILE)
    except Exception:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(temporary, folder)


def _write_config(folder: Path, config: Any, dtype: torch.dtype | None) -> None:
    saved = type(config).from_dict(config.to_dict())
    if dtype is not None:
        saved.dtype = dtype
    saved.use_cache = True
    saved.save_pretrained(folder)


def model_card(name: str, state: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    """README.md of an exported model: what it was trained on and how, from a checkpoint's facts.

    Args:
        name: of the model's class.
        state, run: of trainer_state.json.
    """
    lines = [
        f"# {name}",
        "",
        f"Trained for {state['step']} optimizer steps on {state['num_label_tokens']:,} label tokens"
        f" with engine {run['engine']} in {run.get('precision', 'unknown precision')}.",
        "",
        f"- samples per step: {run.get('global_batch_size', 'unknown')} on {run.get('num_processes', 'unknown')} processes",
        f"- epochs: {state['epoch']:.4g}",
        f"- training data: {run.get('data') or 'unknown'} (prepared as {run.get('data_fingerprint') or 'unknown'})",
    ]
    if state.get("last_evaluation"):
        lines.append(f"- evaluation loss: {state['last_evaluation']['eval_loss']:.6f}")
    packages = run.get("packages") or {}
    if packages:
        lines.append("- " + ", ".join(f"{package} {version}" for package, version in packages.items()))
    return "\n".join(lines) + "\n"


def export_model(
    folder: Path,
    weights: Iterator[tuple[str, Tensor]],
    shapes: dict[str, tuple[int, ...]],
    config: Any,
    tokenizer: Any,
    *,
    dtype: torch.dtype,
    is_main_process: bool,
    generation_config: Any = None,
    card: str = "",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    kept: Collection[str] = (),
) -> None:
    """Writes a model folder; called on every rank, because each weight is gathered by all; only the main process writes.

    Host memory is bounded by one shard file, device memory by one tensor.

    Args:
        weights: (name, whole tensor) one at a time; tied ones once.
        shapes: expected shape of each, from a model built from the config.
        card: text of README.md.
        kept: names of those that keep their dtype.

    Raises:
        RuntimeError: a tensor has another shape than the config-built model's, or one is missing.
        OSError: the disk is full; names folder, size and fix. Nothing is left behind in either case.
    """
    temporary = folder.with_name(f".tmp-{folder.name}")
    if is_main_process:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    num_bytes = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
    with disk_room.unfinished(temporary, folder, num_bytes):
        wrong = _write_weights(temporary, weights, shapes, dtype, max_shard_bytes, is_main_process, kept)
        if not is_main_process:
            return
        if wrong:
            raise RuntimeError("the export would not load: " + "; ".join(wrong))
        _write_config(temporary, config, dtype)
        tokenizer.save_pretrained(temporary)
        if generation_config is not None:
            generation_config.save_pretrained(temporary)
        if card:
            (temporary / "README.md").write_text(card, encoding="utf-8")
    if folder.exists():
        old = folder.with_name(f".old-{folder.name}")
        shutil.rmtree(old, ignore_errors=True)
        os.replace(folder, old)
        os.replace(temporary, folder)
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.replace(temporary, folder)


def _write_weights(
    folder: Path,
    weights: Iterator[tuple[str, Tensor]],
    shapes: dict[str, tuple[int, ...]],
    dtype: torch.dtype,
    max_shard_bytes: int,
    is_main_process: bool,
    kept: Collection[str],
) -> list[str]:
    """The weights' part of `export_model`. Returns what of them would not load."""
    shards = _Shards(folder, max_shard_bytes)
    missing = set(shapes)
    wrong: list[str] = []
    for name, tensor in weights:
        if not is_main_process:
            continue
        missing.discard(name)
        if shapes.get(name) != tuple(tensor.shape):
            wrong.append(f"{name} has shape {tuple(tensor.shape)}, not {shapes.get(name)}")
            continue
        # .to copies; a view into a bigger buffer would write the buffer.
        # What is no parameter keeps its dtype: nothing else computes in it.
        same = not tensor.is_floating_point() or name in kept
        shards.add(name, tensor.detach().to("cpu", tensor.dtype if same else dtype, copy=True).contiguous())
    wrong += [f"{name} is missing" for name in sorted(missing)]
    if is_main_process and not wrong:
        shards.finish()
    return wrong
