"""Weights of a model folder: its safetensors files, read tensor by tensor, and what of the model is not in them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.args import ModelArguments
from harness.findings import user_error
from harness.model_files import is_inside
from harness.user_files import parse_json

# As the safetensors format spells them.
_WEIGHT_KINDS = frozenset(["F64", "F32", "F16", "BF16"])
_NUM_NAMED = 3


def weights_folder(args: ModelArguments) -> Path:
    """Local folder of the model's safetensors files, fetched from the hub where it is not one already.

    Raises:
        UserError: no safetensors there.
    """
    name = args.model_name_or_path
    assert name is not None
    folder = Path(name)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            folder = Path(
                snapshot_download(name, revision=args.model_revision, cache_dir=args.cache_dir, allow_patterns=["*.safetensors", "*.json"])
            )
        except Exception as error:
            raise user_error("--model_name_or_path", f"cannot get {name}: {str(error).splitlines()[0]}") from None
    if not list(folder.glob("*.safetensors")):
        raise user_error("--model_name_or_path", f"{folder} holds no .safetensors files", "convert the model's weights to safetensors")
    return folder


class SafetensorsFolder:
    """Tensors of a model folder by name, read lazily from its safetensors files."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self.where: dict[str, Any] = {}
        index = folder / "model.safetensors.index.json"
        if index.exists():
            try:
                files = sorted({str(name) for name in parse_json(index.read_text(encoding="utf-8"))["weight_map"].values()})
            except (OSError, ValueError, TypeError, KeyError, AttributeError):
                raise user_error("--model_name_or_path", f"{index} is damaged", "download the model again") from None
        else:
            files = sorted(path.name for path in folder.glob("*.safetensors"))
        for name in files:
            if not is_inside(name):
                raise user_error("--model_name_or_path", f"{index} names {name}, outside the folder", "download the model again")
            if not os.path.exists(folder / name):
                raise user_error("--model_name_or_path", f"{folder} lacks {name}, which its index names", "download the model again")
            try:
                handle = safe_open(str(folder / name), framework="pt", device="cpu")
            except Exception as error:
                raise user_error("--model_name_or_path", f"{folder / name} is damaged: {error}", "download the model again") from None
            self.where.update(dict.fromkeys(handle.keys(), handle))

    def names_for(self, model: Any, stored_name: Callable[[str], str | None] = str) -> dict[str, str] | None:
        """Model parameter name -> name in the files; None when they do not match one to one (another version's layout).

        Args:
            stored_name: parameter's name -> its name in the files of a model without adapters; None for one that is not there.

        Raises:
            UserError: tensors that are no floating-point weights.
        """
        wanted = {name: stored for name, _ in model.named_parameters() if (stored := stored_name(name)) is not None}
        for prefix in ("", f"{model.base_model_prefix}."):
            found = {prefix + name: name for name in self.where}
            if set(wanted.values()) <= set(found):
                self._refuse_other_kinds({found[stored] for stored in wanted.values()})
                return {name: found[stored] for name, stored in wanted.items()}
        return None

    def _refuse_other_kinds(self, names: set[str]) -> None:
        """Integers and scaled 8-bit numbers would be copied as if they were the weights themselves."""
        wrong = {name: kind for name in sorted(names) if (kind := str(self.where[name].get_slice(name).get_dtype())) not in _WEIGHT_KINDS}
        if wrong:
            name = next(iter(wrong))
            message = f"{len(wrong)} weights are stored as no plain numbers of 16 to 64 bits, such as {name} ({wrong[name]})"
            raise user_error("--model_name_or_path", message, "give the model before quantisation; --load_in_4bit quantises it for LoRA")

    def find(self, stored: str, base_model_prefix: str) -> Tensor | None:
        """A tensor by its name with or without the base model's prefix; None where there is none."""
        names = (stored, stored.removeprefix(f"{base_model_prefix}."))
        return next((self.get(name) for name in names if name in self.where), None)

    def get(self, name: str) -> Tensor:
        return self.where[name].get_tensor(name)


def load_whole(model_class: Any, folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """All weights as transformers reads them: it knows other versions' layouts, and which weights are tied to others.

    Raises:
        UserError: it cannot read them, or some of the model's are not there, which it would draw at random.
    """
    try:
        loaded, info = model_class.from_pretrained(folder, dtype=dtype, use_safetensors=True, output_loading_info=True)
    except (OSError, ValueError, RuntimeError, ImportError, TypeError, KeyError) as error:
        message = f"transformers cannot read the weights in {folder}: {(str(error) or type(error).__name__).splitlines()[0]}"
        raise user_error("--model_name_or_path", message, "the folder's config.json must be that of its weights") from None
    weights = dict(loaded.state_dict())
    names = {name for name, _ in loaded.named_parameters()}
    missing = sorted(name for name in info["missing_keys"] if name in names)
    if missing:
        shown = ", ".join(missing[:_NUM_NAMED]) + (", ..." if len(missing) > _NUM_NAMED else "")
        raise user_error(
            "--model_name_or_path",
            f"{len(missing)} of the {len(names)} weights of {model_class.__name__} are not in {folder}: {shown}",
            "download the model again, or give the config.json that belongs to these weights; from scratch: --config_name instead",
        )
    return weights
