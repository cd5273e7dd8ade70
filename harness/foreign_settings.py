"""Memory settings of somebody else's command: read from what it is made of, and changed by editing copies of that.

`MemorySettings` are the ladder's language (harness.ladder). Here they are found in the flags, the DeepSpeed JSON, accelerate's YAML and the
script's own settings file of a command, and put back: flags are replaced, files are copied and the copy is named instead. The files of the
user are never written to. The global batch is kept: a micro-batch that is n times smaller has n times the accumulation.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.deepspeed_json import get_value, is_number, read_deepspeed_config
from harness.findings import Finding, UserError
from harness.foreign_command import NAMES, Command, ConfigFile, flag_value, read_config_file, script_config, with_flag
from harness.ladder import EFFICIENT_TOKENS, MemorySettings, Rung, is_lower, parse_ladder
from harness.machine import can_compile
from harness.templates import with_memory_settings

# Of a sample, where the command does not say it.
DEFAULT_TOKENS = 1024
_TRUE = ("", "true", "1", "yes", "on")
ALLOCATOR = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
# Settings that only a DeepSpeed JSON can say.
_DEEPSPEED_ONLY = ("reduce_bucket_size", "prefetch_bucket_size", "max_live_parameters")
MAX_COUNT = 1_000_000  # micro-batches of a step, and samples of one
_ZERO_KEYS = {
    "reduce_bucket_size": "reduce_bucket_size",
    "prefetch_bucket_size": "stage3_prefetch_bucket_size",
    "max_live_parameters": "stage3_max_live_parameters",
}


@dataclasses.dataclass(frozen=True)
class Edited:
    """A command with other settings.

    Attributes:
        tokens: what to start.
        environ: what to add to the environment.
        diff: how it differs from the user's own, line by line.
    """

    tokens: list[str]
    environ: dict[str, str]
    diff: list[str]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a value of the script stands.

    Attributes:
        kind: "flag", "file" (the script's settings file) or "deepspeed" (the JSON).
        name: of the flag or key.
        value: in force; None where nobody says.
        is_switch: a flag without a value.
    """

    kind: str
    name: str
    value: Any
    is_switch: bool = False


class ForeignSettings:
    """Reads and changes the memory settings of a command.

    Args:
        names: what the script calls things, for scripts with names of their own: {"micro_batch": "bsz"}.
        environ: of the command.

    Attributes:
        start: the settings in force.
        accumulation: micro-batches per optimizer step in force.
        engine: "zero1", "zero2", "zero3", "fsdp" or "ddp", for the planner.

    Raises:
        UserError: a file that the command names cannot be read, or no step could have as many samples.
    """

    def __init__(self, command: Command, names: Mapping[str, str], environ: Mapping[str, str]) -> None:
        self.command, self.names, self.environ = command, names, environ
        self.config = script_config(command)
        self.yaml = self._accelerate_yaml()
        self.deepspeed = self._deepspeed_json()
        self.micro, self.accumulate = self._place("micro_batch"), self._place("accumulation")
        if (self.micro is None or self.accumulate is None) and self.deepspeed is not None:
            self.micro, self.accumulate = self._deepspeed_batch(self.deepspeed.content)
        self.checkpointing, self.resume = self._place("checkpointing"), self._place("resume")
        _refuse_huge(self.micro, self.accumulate)
        self.accumulation = _count(self.accumulate) or 1
        self.engine = self._engine()
        self.start = self._start()

    # ---- reading

    def _place(self, kind: str) -> Place | None:
        """Where the script takes this value; None where it does not."""
        words = self.command.script_tokens
        names = (self.names[kind],) if kind in self.names else NAMES[kind]
        for name in names:
            flag = self.command.script.flag(name)
            if (value := flag_value(words, name)) is not None:
                return Place("flag", name, value or "true", flag is not None and flag.is_switch)
        for name in names:
            if self.config is not None and name in self.config.content:
                overrides = self.command.script.parser == "trl" or self.command.script.flag(name) is not None
                is_file_only = not overrides or self.config.flag is None
                return Place("file" if is_file_only else "flag", name, self.config.content[name])
        for name in names:
            if (flag := self.command.script.flag(name)) is not None:
                # transformers' parser takes a JSON file only alone.
                alone = self.config is not None and self.config.flag is None and bool(self.command.script.parser)
                return Place("file" if alone else "flag", name, flag.default, flag.is_switch)
        return Place("flag", names[0], None) if kind in self.names else None

    def value(self, kind: str) -> Any:
        """A value of the script by what it means ("output_dir", "model"); None where nobody says."""
        place = self._place(kind)
        return None if place is None else place.value

    def _accelerate_yaml(self) -> ConfigFile | None:
        """accelerate's YAML: the one named, else the user's default one."""
        if self.command.launcher != "accelerate":
            return None
        named = flag_value(self.command.launcher_tokens, "config_file")
        if named:
            return ConfigFile(Path(named), read_config_file(Path(named), "--config_file"), flag="config_file")
        home = self.environ.get("HF_HOME") or Path(self.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
        default = Path(home) / "accelerate" / "default_config.yaml"
        return ConfigFile(default, read_config_file(default, str(default)), flag="config_file") if default.is_file() else None

    def _deepspeed_json(self) -> ConfigFile | None:
        """The DeepSpeed JSON: of the script's flag, of accelerate's flag, or of accelerate's YAML (flag None)."""
        words, of_launcher = self.command.script_tokens, self.command.launcher_tokens
        found = [(flag_value(words, name), name) for name in NAMES["deepspeed"]]
        found.append((flag_value(of_launcher, "deepspeed_config_file"), "deepspeed_config_file"))
        found.append((get_value(self.yaml.content, "deepspeed_config.deepspeed_config_file") if self.yaml else None, None))  # type: ignore[arg-type]
        for value, flag in found:
            if value and str(value).endswith(".json"):
                return ConfigFile(Path(value), read_deepspeed_config(value), flag=flag)
        return None

    @staticmethod
    def _deepspeed_batch(config: Mapping[str, Any]) -> tuple[Place | None, Place | None]:
        """Scripts without such flags take both from the JSON."""
        micro, accumulation = config.get("train_micro_batch_size_per_gpu"), config.get("gradient_accumulation_steps", 1)
        if not is_number(micro) or not is_number(accumulation):
            return None, None
        return Place("deepspeed", "train_micro_batch_size_per_gpu", micro), Place("deepspeed", "gradient_accumulation_steps", accumulation)

    def _zero_stage(self) -> int:
        if self.deepspeed is not None:
            return int(get_value(self.deepspeed.content, "zero_optimization.stage", 0) or 0)
        if self.yaml is not None and self.yaml.content.get("distributed_type") == "DEEPSPEED":
            return int(get_value(self.yaml.content, "deepspeed_config.zero_stage", 2) or 0)
        return 0

    def _engine(self) -> str:
        if stage := self._zero_stage():
            return f"zero{stage}"
        return "fsdp" if self.yaml is not None and self.yaml.content.get("distributed_type") == "FSDP" else "ddp"

    def _start(self) -> MemorySettings:
        changes: dict[str, Any] = {}
        checkpoints = self.checkpointing is not None and str(self.checkpointing.value or False).lower() in _TRUE
        fsdp: Mapping[str, Any] = self.yaml.content.get("fsdp_config") or {} if self.yaml is not None and self.engine == "fsdp" else {}
        if fsdp:
            checkpoints = checkpoints or _is_true(fsdp.get("fsdp_activation_checkpointing"))
            changes["param_offload"] = "cpu" if _is_true(fsdp.get("fsdp_offload_params")) else "none"
            changes["reshard_after_forward"] = str(fsdp.get("fsdp_reshard_after_forward", True)).lower() in ("true", "full_shard")
        zero = self.deepspeed.content.get("zero_optimization", {}) if self.deepspeed is not None else {}
        if self.deepspeed is None and self.engine.startswith("zero") and self.yaml is not None:
            inner = self.yaml.content.get("deepspeed_config") or {}
            zero = {f"offload_{what}": {"device": inner.get(f"offload_{what}_device", "none")} for what in ("optimizer", "param")}
        if get_value(zero, "offload_optimizer.device", "none") != "none":
            changes["optimizer_offload"] = float(get_value(zero, "offload_optimizer.ratio", 1.0))
        if (where := get_value(zero, "offload_param.device", "none")) != "none":
            changes["param_offload"] = where
        for name, key in _ZERO_KEYS.items():
            changes[name] = int(zero[key]) if is_number(zero.get(key)) else None
        changes["activation_checkpointing"] = "full" if checkpoints else "none"
        return MemorySettings(_count(self.micro) or 1, **changes)

    # ---- the ladder

    @property
    def global_share(self) -> int:
        """Samples of an optimizer step on one rank; no rung changes it."""
        return self.start.micro_batch_size * self.accumulation

    def obstacle(self, settings: MemorySettings) -> str:
        """Why a rung cannot be put into this command; "" where it can."""
        new, old = settings, self.start
        if new.micro_batch_size != old.micro_batch_size:
            if unknown := self._batch_obstacle():
                return unknown
            if self.global_share % new.micro_batch_size:
                return f"{self.global_share} samples cannot be cut into micro-batches of {new.micro_batch_size}"
        if new.activation_checkpointing != old.activation_checkpointing:
            if new.activation_checkpointing == "selective":
                return "transformers and accelerate have no selective checkpointing"
            if self.checkpointing is None:
                return "the script takes no flag for gradient checkpointing"
        has_zero = self.engine.startswith("zero")
        if new.optimizer_offload != old.optimizer_offload and not has_zero:
            return "there is no DeepSpeed configuration to change"
        if new.param_offload != old.param_offload and self.engine not in ("zero3", "fsdp"):
            return "only ZeRO-3 and FSDP move parameters to the host"
        if any(getattr(new, name) != getattr(old, name) for name in _DEEPSPEED_ONLY) and self.deepspeed is None:
            return "there is no DeepSpeed JSON to change"
        if new.reshard_after_forward != old.reshard_after_forward and self.engine != "fsdp":
            return "there is no FSDP configuration to change"
        for name in ("loss_chunk_size", "activation_offload", "optimizer_bf16", "in_flight_micro_batches", "engine"):
            if getattr(new, name) != getattr(old, name):
                return f"{name} is a setting of harness/run_clm.py alone"
        return ""

    def _batch_obstacle(self) -> str:
        """Why the batch cannot be cut."""
        if self.micro is None or self.accumulate is None:
            missing = "micro-batch" if self.micro is None else "gradient accumulation"
            return f"no flag for the {missing} is known, so the global batch could not be kept: name it with --names"
        unknown = next((place for place in (self.micro, self.accumulate) if _count(place) is None), None)
        if unknown is None:
            return ""
        if unknown.value is None:
            return f"the value of --{unknown.name} is not known: write it into the command"
        return f"--{unknown.name} is {str(unknown.value)!r}, no number of samples: the batch is left as it is"

    def understood(self) -> list[str]:
        """How the command was read, for a user who wants to know before it starts."""
        script = self.command.tokens[self.command.script_at]
        lines = [f"launcher {self.command.launcher}, script {script}, engine {self.engine}"]
        if script.endswith(".py") and not self.command.script.is_known:
            trouble = "cannot be read" if Path(script).exists() else "does not exist"
            lines.append(f"{script} {trouble}, so only the flags in the command are known")
        counts = [str(_count(place) or "?") for place in (self.micro, self.accumulate)]
        lines.append(f"micro-batch {counts[0]} x accumulation {counts[1]} on each rank")
        if why := self._batch_obstacle():
            lines.append(f"no smaller micro-batch: {why}")
        folder = self.value("output_dir")
        if self.resume is None:
            lines.append(
                "a new start is from the beginning: the script takes no --resume_from_checkpoint (--names resume=NAME if it has another)"
            )
        elif not folder:
            lines.append("a new start is from the beginning: no folder of checkpoints is known (--names output_dir=NAME)")
        elif not self.command.script.resumes and self.command.script.is_known:
            lines.append("a new start may be from the beginning: the script never mentions resume_from_checkpoint")
        else:
            lines.append(f"a new start goes on from the newest checkpoint in {folder}, by --{self.resume.name}")
        return lines

    def ladder(self, words: Sequence[str] = ()) -> list[MemorySettings]:
        """The rungs below the command as it is, fastest first; the first is the command's own.

        Args:
            words: the user's own order (`parse_ladder`).

        Raises:
            UserError: a word that is no rung, or cannot be put into this command.
        """
        return self._own_ladder(words) if words else self._default_ladder()

    def _own_ladder(self, words: Sequence[str]) -> list[MemorySettings]:
        if any(word.startswith("micro_batch") for word in words) and (why := self._batch_obstacle()):
            raise UserError(Finding("error", "--ladder", f"'micro_batch': {why}"))
        try:
            rungs = parse_ladder(words, self.start)
        except UserError as error:
            raise UserError([dataclasses.replace(finding, key="--ladder") for finding in error.findings]) from None
        problems = [(word, self.obstacle(rung)) for word, rung in zip(words, rungs[1:], strict=True)]
        if found := [Finding("error", "--ladder", f"'{word}': {why}", "leave it out") for word, why in problems if why]:
            raise UserError(found)
        return rungs

    def _default_ladder(self) -> list[MemorySettings]:
        rungs = [self.start]

        def lower(**changes: Any) -> bool:
            rung = rungs[-1].replace(**changes)
            if not is_lower(rung, rungs[-1]) or self.obstacle(rung):
                return False
            rungs.append(rung)
            return True

        def cut_down(least: int) -> None:
            while (smaller := self._smaller(rungs[-1].micro_batch_size)) >= least and lower(micro_batch_size=smaller):
                pass

        tokens = _count_of(self.value("block_size")) or DEFAULT_TOKENS
        lower(reshard_after_forward=True)
        cut_down(max(1, EFFICIENT_TOKENS // tokens))
        lower(activation_checkpointing="full")
        cut_down(1)
        if self.engine.startswith("zero") and can_compile():
            lower(optimizer_offload=1.0)
        if self.engine == "fsdp" or rungs[-1].optimizer_offload > 0:
            lower(param_offload="cpu")
        return rungs

    def _smaller(self, micro: int) -> int:
        """The largest micro-batch of at most half the size that divides the step's samples evenly; 0 below 1."""
        return next((size for size in range(micro // 2, 0, -1) if self.global_share % size == 0), 0)

    # ---- writing

    def edited(self, settings: MemorySettings, folder: Path, resume: Path | None = None) -> Edited:
        """The command with these settings.

        Args:
            folder: where copies of files go; made when there is one.
            resume: checkpoint to go on from.
        """
        launcher, script = list(self.command.launcher_tokens), list(self.command.script_tokens)
        own = copy.deepcopy(self.config.content) if self.config is not None else {}
        for place, value in self._values(settings, resume):
            if place.kind == "file":
                own[place.name] = value
            elif place.kind == "flag":
                text = ("" if place.is_switch else "True") if value is True else str(value)
                script = with_flag(script, place.name, text)
        diff: list[str] = []
        if self.config is not None and own != self.config.content:
            copied = self._copy(self.config, own, folder, diff)
            if self.config.flag is not None:
                script = with_flag(script, self.config.flag, str(copied))
            elif self.config.position is not None:
                script[self.config.position] = str(copied)
        launcher, script = self._write_templates(settings, folder, launcher, script, diff)
        tokens = list(self.command.replace(launcher_tokens=launcher, script_tokens=script).tokens)
        environ = self._environment(settings)
        flags = _token_diff(self.command.tokens, tokens)
        return Edited(tokens, environ, [*flags, *diff, *(f"+ {name}={value}" for name, value in environ.items())])

    def _values(self, settings: MemorySettings, resume: Path | None) -> list[tuple[Place, Any]]:
        """What the script is to be told, where it stands."""
        found: list[tuple[Place, Any]] = []
        if settings.micro_batch_size != self.start.micro_batch_size and self.micro is not None and self.accumulate is not None:
            found += [(self.micro, settings.micro_batch_size), (self.accumulate, self.global_share // settings.micro_batch_size)]
        if settings.activation_checkpointing != self.start.activation_checkpointing and self.checkpointing is not None:
            found.append((self.checkpointing, True))
        if resume is not None and self.resume is not None:
            found.append((self.resume, str(resume)))
        return found

    def _environment(self, settings: MemorySettings) -> dict[str, str]:
        """Fragments of free memory become usable; it costs nothing, but the first start is the user's command as it is."""
        has_own = any(name in self.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
        return {} if settings == self.start or has_own else dict(ALLOCATOR)

    def _write_templates(
        self, settings: MemorySettings, folder: Path, launcher: list[str], script: list[str], diff: list[str]
    ) -> tuple[list[str], list[str]]:
        """Copies of the DeepSpeed JSON and accelerate's YAML with what the settings change in them, and the words that name them."""
        accumulation = self.global_share // settings.micro_batch_size
        yaml = copy.deepcopy(self.yaml.content) if self.yaml is not None else {}
        if self.deepspeed is not None and settings != self.start:
            changed = self._deepspeed_with(self.deepspeed.content, settings, accumulation)
            if changed != self.deepspeed.content:
                copied = self._copy(self.deepspeed, changed, folder, diff)
                if self.deepspeed.flag is None:
                    yaml["deepspeed_config"]["deepspeed_config_file"] = str(copied)
                elif self.deepspeed.flag == "deepspeed_config_file":
                    launcher = with_flag(launcher, self.deepspeed.flag, str(copied))
                else:
                    script = with_flag(script, self.deepspeed.flag, str(copied))
        if self.yaml is not None:
            self._change_yaml(yaml, settings, accumulation)
            if yaml != self.yaml.content:
                launcher = with_flag(launcher, "config_file", str(self._copy(self.yaml, yaml, folder, diff)))
        if settings.micro_batch_size != self.start.micro_batch_size and flag_value(launcher, "gradient_accumulation_steps"):
            launcher = with_flag(launcher, "gradient_accumulation_steps", str(accumulation))
        return launcher, script

    def _deepspeed_with(self, config: Mapping[str, Any], settings: MemorySettings, accumulation: int) -> dict[str, Any]:
        new = {name: getattr(settings, name) for name in (*_DEEPSPEED_ONLY, "optimizer_offload", "param_offload")}
        only_new = {name: value for name, value in new.items() if value != getattr(self.start, name)}
        has_zero = "zero_optimization" in config
        changed = with_memory_settings(config, MemorySettings(1, **only_new)) if has_zero else copy.deepcopy(dict(config))
        if only_new.get("optimizer_offload") and "optimizer" not in changed:
            # accelerate would put DeepSpeed's Adam in the place of the script's, with its learning rate and weight decay but not its betas.
            changed.setdefault("zero_force_ds_cpu_optimizer", False)
        for key, value in (("train_micro_batch_size_per_gpu", settings.micro_batch_size), ("gradient_accumulation_steps", accumulation)):
            if is_number(changed.get(key)) and settings.micro_batch_size != self.start.micro_batch_size:
                changed[key] = value
        return changed

    def _change_yaml(self, yaml: dict[str, Any], settings: MemorySettings, accumulation: int) -> None:
        deepspeed, fsdp = yaml.get("deepspeed_config"), yaml.get("fsdp_config")
        if isinstance(deepspeed, dict) and self.deepspeed is None:
            if is_number(deepspeed.get("gradient_accumulation_steps")) and settings.micro_batch_size != self.start.micro_batch_size:
                deepspeed["gradient_accumulation_steps"] = accumulation
            if settings.optimizer_offload > self.start.optimizer_offload:
                deepspeed["offload_optimizer_device"] = "cpu"
            if settings.param_offload != self.start.param_offload:
                deepspeed["offload_param_device"] = "cpu"
        if isinstance(fsdp, dict) and self.engine == "fsdp":
            if settings.param_offload != self.start.param_offload:
                fsdp["fsdp_offload_params"] = True
            if settings.reshard_after_forward != self.start.reshard_after_forward:
                fsdp["fsdp_reshard_after_forward"] = True

    def _copy(self, file: ConfigFile, content: Mapping[str, Any], folder: Path, diff: list[str]) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / file.path.name
        target.write_text(file.text(content), encoding="utf-8")
        before, after = file.text().splitlines(), file.text(content).splitlines()
        lines = list(difflib.unified_diff(before, after, str(file.path), str(target), n=1, lineterm=""))
        diff += [line for line in lines if not line.startswith("@@")]
        return target

    # ---- the planner

    def rungs(self, plan: Mapping[str, Any]) -> list[Rung]:
        """The planner's ladder, as far as this command can take it, with the command's own settings first."""
        (found,) = plan["plans"]
        rungs: dict[MemorySettings, Rung] = {}
        for entry in (found["given"], *found["ladder"]):
            planned = MemorySettings.from_dict(entry["settings"])
            settings = self.start.replace(
                **{name: getattr(planned, name) for name in ("micro_batch_size", "activation_checkpointing", "param_offload")},
                optimizer_offload=planned.optimizer_offload,
            )
            if not self.obstacle(settings):
                estimate = entry["estimate"]
                rungs.setdefault(settings, Rung(settings, estimate["expected_bytes"], entry["step_time_s"]))
        return list(rungs.values()) if self.start in rungs else []


def _is_true(value: Any) -> bool:
    return value is not None and str(value).lower() in _TRUE


def _count_of(value: Any) -> int | None:
    try:
        return int(value) if int(value) > 0 else None
    except (TypeError, ValueError, OverflowError):
        return None


def _refuse_huge(*places: Place | None) -> None:
    """The divisors of a step's samples are looked for one by one.

    Raises:
        UserError: more samples or micro-batches than any step has.
    """
    huge = [place for place in places if place is not None and (_count(place) or 0) > MAX_COUNT]
    if huge:
        raise UserError(
            Finding(
                "error", f"--{place.name}" if place.kind == "flag" else place.name, f"must be at most {MAX_COUNT:,}", "a smaller number"
            )
            for place in huge
        )


def _count(place: Place | None) -> int | None:
    """A place's value as a number of samples or steps."""
    return None if place is None else _count_of(place.value)


def _token_diff(before: Sequence[str], after: Sequence[str]) -> list[str]:
    """Words that differ, a flag with its value on a line."""
    old, new = _lines(before), _lines(after)
    return [line for line in difflib.ndiff(old, new) if line.startswith(("- ", "+ "))]


def _lines(tokens: Sequence[str]) -> list[str]:
    lines: list[str] = []
    for token in tokens:
        if lines and not token.startswith("-") and lines[-1].startswith("--") and " " not in lines[-1] and "=" not in lines[-1]:
            lines[-1] += f" {token}"
        else:
            lines.append(token)
    return lines


def settings_json(settings: MemorySettings) -> dict[str, Any]:
    """Settings without what nobody set."""
    values = json.loads(json.dumps(settings.to_dict()))
    plain = MemorySettings(1).to_dict()
    return {name: value for name, value in values.items() if name == "micro_batch_size" or value != plain[name]}
