"""Somebody else's launch command as data: launcher, script, flags, and what the script's text says of the flags it takes.

Nothing is imported or run to find out: the command line is cut by the shapes all launchers share (launcher, its options, the script, its
flags), and the script is parsed, not executed. What cannot be read this way is not guessed.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from harness.findings import Finding, UserError, user_error
from harness.user_files import json_problem, parse_json, parse_yaml, read_text, read_user_text

Launcher = Literal["accelerate", "torchrun", "deepspeed", "python", "other"]
_PROGRAMS: dict[str, Launcher] = {
    "accelerate": "accelerate",
    "accelerate-launch": "accelerate",
    "torchrun": "torchrun",
    "deepspeed": "deepspeed",
}
_MODULES: dict[str, Launcher] = {
    "accelerate.commands.launch": "accelerate",
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "deepspeed.launcher.runner": "deepspeed",
    "deepspeed": "deepspeed",
}
# What we want to set -> the names that scripts give it, the usual one first.
NAMES: dict[str, tuple[str, ...]] = {
    "micro_batch": (
        "per_device_train_batch_size",
        "micro_batch_size",
        "per_gpu_train_batch_size",
        "per_device_batch_size",
        "train_micro_batch_size_per_gpu",
        "train_batch_size",
        "batch_size",
    ),
    "accumulation": ("gradient_accumulation_steps", "grad_accum_steps", "accumulation_steps", "gradient_accumulation"),
    "checkpointing": ("gradient_checkpointing", "activation_checkpointing", "use_gradient_checkpointing"),
    "resume": ("resume_from_checkpoint",),
    "output_dir": ("output_dir", "checkpointing_dir", "project_dir", "save_dir"),
    "model": ("model_name_or_path", "config_name", "base_model", "model_name", "model"),
    "block_size": ("block_size", "max_length", "max_seq_length", "sequence_len", "model_max_length"),
    "deepspeed": ("deepspeed", "deepspeed_config"),
}
# What transformers' TrainingArguments has where nothing is said.
_TRAINING_ARGUMENTS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "gradient_checkpointing": False,
    "resume_from_checkpoint": None,
    "output_dir": "trainer_output",
    "deepspeed": None,
}
_PARSERS = {"HfArgumentParser": "transformers", "TrlParser": "trl"}
_CONFIG_FLAGS = ("config", "config_file")


@dataclasses.dataclass(frozen=True)
class Flag:
    """A flag that a script takes: its default, and whether it stands alone (`action="store_true"`)."""

    default: Any = None
    is_switch: bool = False


@dataclasses.dataclass(frozen=True)
class Script:
    """What a script's text says.

    Attributes:
        flags: those that it defines itself.
        parser: "transformers" or "trl" where it takes all of TrainingArguments (of SFTConfig), else "".
        resumes: it mentions `resume_from_checkpoint`.
        restores_count: it lets accelerate's `load_state` restore the count of micro-batches by which `accumulate` finds a step's last one;
            with another number of micro-batches in a step, the first step after it would be cut short.
        is_known: there was a text to read.
    """

    flags: Mapping[str, Flag] = dataclasses.field(default_factory=dict)
    parser: str = ""
    resumes: bool = False
    restores_count: bool = False
    is_known: bool = False

    def flag(self, name: str) -> Flag | None:
        """The flag with this name, if the script takes it."""
        if name in self.flags:
            return self.flags[name]
        if not self.parser or name not in _TRAINING_ARGUMENTS:
            return None
        if self.parser == "trl" and name == "gradient_checkpointing":
            return Flag(True)  # TRL's configs turn it on
        return Flag(_TRAINING_ARGUMENTS[name])


def read_script(path: Path) -> Script:
    """What can be read of a script; an empty answer where there is none, or it is no Python."""
    try:
        text = read_text(path)
        tree = ast.parse(text)
    except (OSError, ValueError, SyntaxError):
        return Script()
    flags: dict[str, Flag] = {}
    parser = ""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        flags.update(_flag_of(node))
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        parser = _PARSERS.get(name, parser)
    if parser == "transformers" and re.search(r"\b(SFTConfig|DPOConfig)\b", text):
        parser = "trl"
    restores_count = ".load_state(" in text and ".accumulate(" in text and not re.search(r"\.step\s*=\s*0\b", text)
    return Script(flags, parser, "resume_from_checkpoint" in text, restores_count, True)


def _flag_of(call: ast.Call) -> dict[str, Flag]:
    """The flags that one call makes: `add_argument("--x", ...)`, under whatever name, or click's `option("--x", ...)`."""
    options = {keyword.arg: _constant(keyword.value) for keyword in call.keywords}
    names = [value for argument in call.args if isinstance(value := _constant(argument), str) and re.match("--[a-z]", value)]
    flag = Flag(options.get("default"), options.get("action") in ("store_true", "store_false"))
    return {name.lstrip("-").replace("-", "_"): flag for name in names}


def _constant(node: ast.expr) -> Any:
    return node.value if isinstance(node, ast.Constant) else None


# ---- tokens ----


def _name_of(token: str) -> str:
    return token.partition("=")[0].lstrip("-").replace("-", "_") if token.startswith("--") else ""


def _find(tokens: Sequence[str], name: str) -> int | None:
    """Index of the last flag of this name; hyphens and underscores are the same."""
    return next((index for index in range(len(tokens) - 1, -1, -1) if _name_of(tokens[index]) == name), None)


def flag_value(tokens: Sequence[str], name: str) -> str | None:
    """The value of a flag, "" for one that stands alone, None where it is not there."""
    index = _find(tokens, name)
    if index is None:
        return None
    _, equals, value = tokens[index].partition("=")
    if equals:
        return value
    following = tokens[index + 1 : index + 2]
    return following[0] if following and not following[0].startswith("--") else ""


def with_flag(tokens: Sequence[str], name: str, value: str) -> list[str]:
    """The tokens with a flag set, where it stands or else at the end; an empty value stands for a flag alone."""
    result = list(tokens)
    index = _find(result, name)
    if index is None:
        return [*result, f"--{name}", *([value] if value else [])]
    flag, equals, _ = result[index].partition("=")
    if equals:
        result[index] = f"{flag}={value}" if value else flag
    elif flag_value(result, name):
        result[index + 1 : index + 2] = [value] if value else []
    elif value:
        result.insert(index + 1, value)
    return result


# ---- the command ----


@dataclasses.dataclass(frozen=True)
class Command:
    """A launch command.

    Attributes:
        tokens: all of it.
        launcher: what starts the ranks.
        script_at: index of the script or module, or, where there is none (a console command), of the last word before its flags.
        script: what the script's text says.
    """

    tokens: tuple[str, ...]
    launcher: Launcher
    script_at: int
    script: Script

    @property
    def launcher_tokens(self) -> tuple[str, ...]:
        """The launcher's own options."""
        return self.tokens[: self.script_at]

    @property
    def script_tokens(self) -> tuple[str, ...]:
        """What the script gets."""
        return self.tokens[self.script_at + 1 :]

    def replace(self, *, launcher_tokens: Sequence[str] | None = None, script_tokens: Sequence[str] | None = None) -> Command:
        """With other options."""
        before = tuple(self.launcher_tokens if launcher_tokens is None else launcher_tokens)
        after = tuple(self.script_tokens if script_tokens is None else script_tokens)
        return dataclasses.replace(self, tokens=(*before, self.tokens[self.script_at], *after), script_at=len(before))


def read_command(tokens: Sequence[str]) -> Command:
    """Cuts a launch command into its parts.

    Raises:
        UserError: it is empty, or asks for more than one machine.
    """
    if not tokens:
        raise user_error("harness run", "no command was given", "write it after --: harness run -- torchrun --nproc_per_node 2 train.py")
    launcher, after = _launcher_of(tokens)
    script_at = _script_of(tokens, launcher, after)
    word = tokens[script_at]
    console = Path(tokens[after - 1]).name if after else ""
    script = read_script(Path(word)) if word.endswith(".py") else Script(parser="trl" if console == "trl" or word == "trl" else "")
    command = Command(tuple(tokens), launcher, script_at, script)
    _check_one_machine(command)
    return command


def _launcher_of(tokens: Sequence[str]) -> tuple[Launcher, int]:
    """(launcher, index of what follows it); words before it (env, nice, uv run) are left alone."""
    for index, token in enumerate(tokens):
        name = Path(token).name
        if name in _PROGRAMS:
            after = index + 2 if tokens[index + 1 : index + 2] == ["launch"] or tokens[index + 1 : index + 2] == ("launch",) else index + 1
            return _PROGRAMS[name], after
        if re.fullmatch(r"python(\d(\.\d+)?)?", name):
            rest = list(tokens[index + 1 :])
            module = rest[rest.index("-m") + 1] if "-m" in rest[:-1] else ""
            if module in _MODULES and not any(word.endswith(".py") for word in rest[: rest.index("-m")]):
                return _MODULES[module], index + 1 + rest.index("-m") + 2
            return "python", index + 1
    return "other", 1


def _script_of(tokens: Sequence[str], launcher: Launcher, after: int) -> int:
    """Index of the script, of the module that is run, or of the last word before a console command's flags."""
    if launcher != "other":
        for index in range(after, len(tokens)):
            if tokens[index].endswith(".py"):
                return index
            if tokens[index - 1] in ("-m", "--module") and not tokens[index].startswith("-"):
                return index
        return len(tokens) - 1
    words = next(
        (index for index, token in enumerate(tokens) if token.startswith("-") or token.endswith((".yaml", ".yml", ".json"))), len(tokens)
    )
    return max(0, words - 1)


def _check_one_machine(command: Command) -> None:
    found = []
    for name in ("nnodes", "num_machines", "num_nodes", "hostfile"):
        value = flag_value(command.launcher_tokens, name)
        if value is not None and value not in ("1", "1:1") and command.launcher != "other":
            message = f"{value or 'is given'}: harness run sees to the ranks of one machine"
            found.append(
                Finding("error", f"--{name}", message, "use harness/run_clm.py for several machines: its guards agree across them")
            )
    if found:
        raise UserError(found)


# ---- files of settings ----


@dataclasses.dataclass(frozen=True)
class ConfigFile:
    """A JSON or YAML file that the command names.

    Attributes:
        token: where in which part of the command its path stands; None where no word names it.
        content: as read.
    """

    path: Path
    content: dict[str, Any]
    flag: str | None = None
    position: int | None = None

    @property
    def is_json(self) -> bool:
        return self.path.suffix == ".json"

    def text(self, content: Mapping[str, Any] | None = None) -> str:
        """Content as it would be written to a file of this kind."""
        shown = dict(self.content if content is None else content)
        return json.dumps(shown, indent=2) + "\n" if self.is_json else yaml.safe_dump(shown, sort_keys=False, width=140)


def read_config_file(path: Path, key: str) -> dict[str, Any]:
    """A JSON or YAML file as plain data.

    Args:
        key: how the user named it, for the message.

    Raises:
        UserError: not there, not readable, or no mapping.
    """
    text = read_user_text(path, key)
    try:
        content = parse_json(text) if path.suffix == ".json" else parse_yaml(text)
    except ValueError as error:
        raise user_error(key, f"cannot read {path}: {json_problem(error)}", "mend the file") from None
    if not isinstance(content, dict):
        raise user_error(key, f"{path} holds a {type(content).__name__}, not names with values", "see the launcher's documentation")
    return content


def script_config(command: Command) -> ConfigFile | None:
    """The file with the script's own settings: `--config FILE`, or a JSON or YAML file among its words."""
    tokens = command.script_tokens
    for name in _CONFIG_FLAGS:
        value = flag_value(tokens, name)
        if value and Path(value).is_file():
            return ConfigFile(Path(value), read_config_file(Path(value), f"--{name}"), flag=name)
    for position, token in enumerate(tokens):
        follows_flag = position > 0 and tokens[position - 1].startswith("-")
        if not follows_flag and token.endswith((".json", ".yaml", ".yml")) and Path(token).is_file():
            return ConfigFile(Path(token), read_config_file(Path(token), token), position=position)
    return None
