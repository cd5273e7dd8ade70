"""A run's state in files, read tensor by tensor in one process: whole weights and Adam's averages by parameter name.

What one engine wrote another can take in this form, on any number of ranks, and an export needs no distributed job.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from harness.findings import user_error
from harness.user_files import parse_json, read_text

log = logging.getLogger("harness")

Kind = Literal["weight", "exp_avg", "exp_avg_sq"]
AVERAGES: tuple[Kind, Kind] = ("exp_avg", "exp_avg_sq")
ZERO_TAG = "zero"


class StoredState(Protocol):
    """What can be read.

    Attributes:
        names: parameters whose weights are there.
        num_updates: updates that Adam has made; None where its averages are not there.
    """

    names: list[str]
    num_updates: int | None

    def get(self, name: str, kind: Kind) -> Tensor:
        """One whole tensor, on the CPU."""


def whole(value: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor as read, in its parameter's shape: DeepSpeed's stage 3 stores it flat.

    Raises:
        RuntimeError: it is another parameter's.
    """
    if value.dim() != 1 and tuple(value.shape) != tuple(shape):
        raise RuntimeError(f"the checkpoint has shape {tuple(value.shape)} where the model has {tuple(shape)}")
    return value.reshape(tuple(shape))


class DcpState:
    """Of a torch.distributed.checkpoint folder, as the ddp, fsdp and device_map engines write it."""

    def __init__(self, folder: Path) -> None:
        from torch.distributed.checkpoint import FileSystemReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        class Reader(FileSystemReader):
            """Reads the metadata once, not once per tensor."""

            def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
                if not hasattr(self, "cached"):
                    self.cached = super().read_metadata(*args, **kwargs)
                return self.cached

        self.reader = Reader(str(folder))
        entries = self.reader.read_metadata().state_dict_metadata
        self.entries = {key: entry for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
        self.names = [key.removeprefix("model.") for key in self.entries if key.startswith("model.")]
        steps = [key for key in self.entries if key.startswith("optimizer.state.") and key.endswith(".step")]
        has_averages = any(key.endswith(".exp_avg") for key in self.entries)
        self.num_updates = int(self._read(steps[0])) if steps and has_averages else None

    def get(self, name: str, kind: Kind) -> Tensor:
        return self._read(f"model.{name}" if kind == "weight" else f"optimizer.state.{name}.{kind}")

    def _read(self, key: str) -> Tensor:
        import torch.distributed.checkpoint as checkpoint

        entry = self.entries[key]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        with warnings.catch_warnings():  # that it reads in one process is what is wanted
            warnings.simplefilter("ignore", UserWarning)
            checkpoint.load({key: tensor}, storage_reader=self.reader, no_dist=True)
        return tensor


def convert_zero(folder: Path, universal: Path) -> None:
    """Converts a checkpoint of DeepSpeed into its universal format, in this process.

    Args:
        folder: the engine's folder of a checkpoint.
        universal: where to; a folder that does not exist.
    """
    import argparse

    from deepspeed.checkpoint.ds_to_universal import main

    universal.parent.mkdir(parents=True, exist_ok=True)
    options = argparse.Namespace(
        input_folder=str(folder / ZERO_TAG),
        output_folder=str(universal),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):  # its progress bars
        main(options)


class UniversalState:
    """Of a folder in DeepSpeed's universal format: zero/<parameter>/{fp32,exp_avg,exp_avg_sq}.pt."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "zero"
        self.names = sorted(path.name for path in self.folder.iterdir() if (path / "fp32.pt").exists())
        trained = [name for name in self.names if (self.folder / name / "exp_avg.pt").exists()]
        self.num_updates = self._num_updates() if trained else None

    def _num_updates(self) -> int | None:
        for name in self.names:  # stages 1 and 2 keep it by parameter
            step = self.folder / name / "step.pt"
            if step.exists():
                return int(torch.load(step, map_location="cpu", weights_only=False))
        common = torch.load(self.folder / "optimizer_state.pt", map_location="cpu", weights_only=False, mmap=True)
        return _find_step(common)

    def get(self, name: str, kind: Kind) -> Tensor:
        file = self.folder / name / f"{'fp32' if kind == 'weight' else kind}.pt"
        stored = torch.load(file, map_location="cpu", weights_only=False)
        return stored["param"] if isinstance(stored, dict) else stored


def _find_step(value: Any) -> int | None:
    """The first `step` in an optimizer's state; in its param groups where it is kept there."""
    if isinstance(value, dict):
        if isinstance(value.get("step"), (int, float, Tensor)):
            return int(value["step"])
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return next((found for item in value if (found := _find_step(item)) is not None), None)
    return None


class ZeroWeights:
    """Weights alone of a checkpoint of DeepSpeed, read from the ranks' files without converting them."""

    num_updates: int | None = None

    def __init__(self, folder: Path) -> None:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            self.lazy = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag=ZERO_TAG, lazy_mode=True)
        self.names = list(self.lazy)

    def get(self, name: str, kind: Kind) -> Tensor:
        if kind != "weight":
            raise KeyError(f"{name}: {kind} is not read")
        return self.lazy[name].contiguous()


def is_trainer_checkpoint(folder: Path) -> bool:
    """True for a checkpoint folder of transformers' Trainer."""
    try:
        content = parse_json(read_text(folder / "trainer_state.json"))
        return isinstance(content, dict) and "global_step" in content
    except (OSError, ValueError):
        return False


def trainer_facts(folder: Path) -> dict[str, Any]:
    """The trainer_state.json of a checkpoint of transformers' Trainer, as far as it is read here, with its numbers checked.

    Raises:
        UserError: it cannot be read, or holds other things than numbers.
    """
    path = folder / "trainer_state.json"
    try:
        facts = parse_json(read_text(path))
    except (OSError, ValueError) as error:
        raise user_error("--resume_from_checkpoint", f"{path} cannot be read: {error}", "give another checkpoint") from None
    names = ("global_step", "epoch", "max_steps", "num_input_tokens_seen")
    for name in names:
        value = facts.get(name)
        wanted = (int, float) if name == "epoch" else int
        if value is None and name != "global_step":
            continue
        if isinstance(value, bool) or not isinstance(value, wanted) or not -1 <= value < 2**62:
            raise user_error("--resume_from_checkpoint", f"{path}: {name} is {value!r}, no such number", "give another checkpoint")
    return {**{name: facts.get(name) for name in names}, "best_metric": facts.get("best_metric")}


class TrainerState:
    """Of a checkpoint folder of transformers' Trainer: model.safetensors and, where it can be mapped, optimizer.pt.

    Attributes:
        facts: its trainer_state.json.
        problem: why the optimizer is not read; None when it is.
    """

    def __init__(self, folder: Path, parameters: dict[str, tuple[int, ...]], groups: list[list[str]]) -> None:
        """
        Args:
            parameters: name -> shape of the model's trained parameters.
            groups: names in the order of the optimizer's parameter groups.
        """
        from safetensors import safe_open

        self.facts = trainer_facts(folder)
        self.where: dict[str, Any] = {}
        for path in sorted(folder.glob("model*.safetensors")):
            try:
                handle = safe_open(str(path), framework="pt", device="cpu")
            except Exception as error:  # safetensors' own, or the file system's
                reason = f"{path} cannot be read: {str(error).splitlines()[0]}"
                raise user_error("--resume_from_checkpoint", reason, "give another checkpoint, or copy this one again") from None
            self.where.update(dict.fromkeys(handle.keys(), handle))
        self.names = list(self.where)
        self.averages: dict[str, dict[str, Tensor]] = {}
        self.num_updates: int | None = None
        self.problem = self._read_optimizer(folder / "optimizer.pt", parameters, groups)
        if self.problem is not None:  # half of it is of no use
            self.averages.clear()
            self.num_updates = None

    def _read_optimizer(self, path: Path, parameters: dict[str, tuple[int, ...]], groups: list[list[str]]) -> str | None:
        if not path.exists():
            return "there is no optimizer.pt"
        try:
            stored = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:
            return f"optimizer.pt cannot be read safely ({(str(error) or type(error).__name__).splitlines()[0]})"
        try:
            return self._take_averages(stored, parameters, groups)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:
            return f"optimizer.pt holds no optimizer's state ({type(error).__name__}: {error})"

    def _take_averages(self, stored: Any, parameters: dict[str, tuple[int, ...]], groups: list[list[str]]) -> str | None:
        numbers = [group["params"] for group in stored["param_groups"]]
        numbers = [group for group in numbers if group]
        if [len(group) for group in numbers] != [len(group) for group in groups]:
            return (
                f"its parameter groups hold {[len(group) for group in numbers]} parameters, this run's {[len(group) for group in groups]}"
            )
        for name, number in zip(chain(*groups), chain(*numbers), strict=True):
            state = stored["state"].get(number, {})
            if not all(kind in state and tuple(state[kind].shape) == parameters[name] for kind in AVERAGES):
                return f"its state number {number} does not fit {name}"
            self.averages[name] = state
            self.num_updates = int(state["step"])
        return None

    def get(self, name: str, kind: Kind) -> Tensor:
        return self.where[name].get_tensor(name) if kind == "weight" else self.averages[name][kind]


def engine_family(engine: str) -> str:
    """ "zero" or "dcp": which of the two formats an engine writes."""
    return "zero" if re.fullmatch(r"zero[123]", engine) else "dcp"


def weights_of(state: StoredState, names: list[str]) -> Iterator[tuple[str, Tensor]]:
    """(name, whole weight) one at a time, of the wanted names."""
    for name in names:
        yield name, state.get(name, "weight")
