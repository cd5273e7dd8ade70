"""The folder of a run: taken by one job at a time, never another run's, with what was asked for and how it ended."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import importlib.metadata
import json
import os
import platform
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import disk_room, guard_line
from harness.args import Arguments
from harness.findings import Finding, UserError, user_error
from harness.user_files import parse_json

FINISHED, FAILED, WRONG_INPUT, PREEMPTED = 0, 1, 2, 75

# Arguments that may change between two starts of the same run: they do not change what is computed.
FREE_ARGUMENTS = frozenset(
    [
        "output_dir",
        "overwrite_output_dir",
        "resume_from_checkpoint",
        "force_resume",
        "trust_checkpoint",
        "early_stopping_patience",
        "early_stopping_threshold",
        "debug",
        "disable_tqdm",
        "report_to",
        "run_name",
        "logging_steps",
        "gpu_monitor_interval_s",
        "logging_first_step",
        "save_steps",
        "save_strategy",
        "save_total_limit",
        "save_final",
        "eval_steps",
        "eval_strategy",
        "eval_on_start",
        "do_eval",
        "do_train",
        "per_device_eval_batch_size",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "target_batch_size",
        "local_rank",
        "ddp_timeout",
        "ddp_bucket_cap_mb",
        "deepspeed",
        "fsdp",
        "activation_checkpointing",
        "gradient_checkpointing",
        "activation_offload",
        "sequence_parallel_size",
        "loss_chunk_size",
        "preprocessing_num_workers",
        "overwrite_cache",
        "data_cache_dir",
        "cache_dir",
        "dataloader_num_workers",
        "dataloader_prefetch_factor",
        "nan_policy",
        "no_oom_recovery",
        "oom_ladder",
        "oom_snapshot",
        "oom_standby",
        "snapshot_steps",
        "profile_steps",
        "nvme_path",
        "offload_folder",
        "in_flight_micro_batches",
        "max_nan_steps",
        "no_custom_kernels",
        "use_liger_kernel",
        "attn_implementation",
        "load_best_model_at_end",
        "metric_for_best_model",
        "greater_is_better",
        "tf32",
        "use_cpu",
        "max_steps",
        "num_train_epochs",
    ]
)


# What is in the folder of a run that ended, or was killed, before config.json.
_OF_A_START = re.compile(
    r"\.lock|\.writable|train\.log|config\.json\.tmp|(exit|ladder|plan)\.json(\.tmp)?|(stacks|nccl)-rank-\d+(\.txt)?(\.tmp)?"
)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other jobs out of the folder while this one runs.

    Raises:
        UserError: another job has it.
    """
    with open(folder / ".lock", "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise user_error(
                "--output_dir",
                f"another run is writing to {folder} ({file.read().strip() or 'unknown process'})",
                "wait, or use another folder",
            ) from None
        file.truncate(0)
        # Milliseconds, because a job is told from the one before by this mark; the offset, because nodes may keep different time zones.
        now = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="milliseconds")
        file.write(f"pid {os.getpid()} on {platform.node()} since {now}")
        file.flush()
        yield


def mark_of(folder: Path) -> str:
    """What the job that has the folder has written into it: who it is."""
    return (folder / ".lock").read_text(encoding="utf-8")


def shows_mark(folder: Path, mark: str, limit_s: float) -> bool:
    """Whether this node sees the mark of the job, at the latest after the limit."""
    deadline = time.monotonic() + limit_s
    while True:
        with contextlib.suppress(OSError):
            if mark_of(folder) == mark:
                return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.5)


def has_ended(folder: Path) -> bool:
    """Whether a run in the folder has said how it ended."""
    return (folder / "exit.json").exists() and (folder / "config.json").exists()


def is_taken(folder: Path) -> bool:
    """Whether a job is running in the folder."""
    try:
        with open(folder / ".lock", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def prepare(folder: Path, args: Arguments) -> list[Finding]:
    """Makes the folder, or decides that it may be used; called by the main process.

    Returns:
        What there is to say (a run that was moved aside).

    Raises:
        UserError: it cannot be written, or holds another run.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        disk_room.fill_probe(folder / ".writable")
    except OSError as error:
        raise user_error("--output_dir", f"cannot write to {folder}: {error.strerror}", disk_room.write_fix(error)) from None
    if guard_line.attempt() > 0:  # this run's own, from the life before
        return []
    if args.train.overwrite_output_dir:
        return _move_aside(folder)
    earlier = folder / "config.json"
    if earlier.exists() and _is_of_a_run(earlier):
        differences = _differences(earlier, args)
        if differences and args.train.force_resume:
            return [Finding("warning", "--force_resume", f"going on although arguments have changed: {', '.join(differences)}")]
        if differences:
            shown = ", ".join(differences[:6]) + (", ..." if len(differences) > 6 else "")
            raise user_error(
                "--output_dir",
                f"{folder} holds another run ({shown})",
                "choose another folder, --force_resume to go on with what is changed, or --overwrite_output_dir to move that run aside",
            )
        return []
    foreign = [path.name for path in folder.iterdir() if not _OF_A_START.fullmatch(path.name)]
    if foreign:
        raise user_error(
            "--output_dir",
            f"{folder} is not empty and holds no run of this kind ({', '.join(sorted(foreign)[:4])})",
            "choose an empty folder, or --overwrite_output_dir to move its content aside",
        )
    return []


def is_a_runs(values: object) -> bool:
    """Whether a config.json holds what `write_facts` wrote: of any version, so by some names that it always had. A model's has none."""
    return isinstance(values, dict) and {"output_dir", "per_device_train_batch_size", "learning_rate"} <= set(values)


def _is_of_a_run(config: Path) -> bool:
    """Whether a config.json is a run's."""
    try:
        return is_a_runs(parse_json(config.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return True  # ours or not, it is not touched: the differences say that it cannot be read


def _move_aside(folder: Path) -> list[Finding]:
    content = [path for path in folder.iterdir() if path.name not in (".lock", "exit.json")]
    if not content:
        return []
    aside = folder.with_name(f"{folder.name}.old-{time.strftime('%Y%m%d-%H%M%S')}")
    while aside.exists():
        aside = aside.with_name(aside.name + "-1")
    aside.mkdir()
    for path in content:
        os.replace(path, aside / path.name)
    return [Finding("warning", "--overwrite_output_dir", f"the earlier content of {folder} is now in {aside}")]


def _differences(config: Path, args: Arguments) -> list[str]:
    try:
        earlier = parse_json(config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        earlier = None
    if not isinstance(earlier, dict):
        return [f"{config.name} cannot be read"]
    now = json.loads(json.dumps(args.to_dict()))
    return [
        f"{name} {earlier.get(name)!r} -> {value!r}"
        for name, value in now.items()
        if name not in FREE_ARGUMENTS and name in earlier and earlier[name] != value
    ]


def write_facts(folder: Path, args: Arguments, engine: str, template: dict[str, Any]) -> None:
    """Writes config.json, environment.json and the template as used."""
    _write(folder / "config.json", args.to_dict())
    _write(folder / "environment.json", environment())
    if engine.startswith("zero"):
        _write(folder / "ds_config.json", template)
    elif template:
        import yaml

        (folder / "fsdp_config.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(template, default=str))), encoding="utf-8")


def environment() -> dict[str, Any]:
    """Versions, devices and launch facts. An allow-list: nothing else of the environment is stored."""
    import torch

    packages = [
        "torch",
        "transformers",
        "accelerate",
        "peft",
        "deepspeed",
        "datasets",
        "safetensors",
        "tokenizers",
        "numpy",
        "liger-kernel",
        "torchao",
    ]
    versions = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    allowed = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF")
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions,
        "cuda": torch.version.cuda,
        "gpus": gpus,
        "environment": {name: os.environ[name] for name in allowed if name in os.environ},
        "argv": sys.argv[1:],
    }


def _write(path: Path, value: Any) -> None:
    temporary = path.with_name(path.name + ".tmp")
    try:
        with disk_room.naming(path):
            temporary.write_text(json.dumps(value, indent=1, default=str) + "\n", encoding="utf-8")
            os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def record_exit(
    folder: Path | None, code: int, reason: str, rank: int = 0, started_s: float = 0.0, *, is_consequence: bool = False
) -> None:
    """Writes exit.json, and the same to the file that HARNESS_EXIT_FILE names: launch/run.py gives it one outside the run's folder, so that
    it learns the code also of a run that never had a folder. Of several ranks that fail, the first one's reason stays: the others fail
    because of it.

    Args:
        is_consequence: the reason is that another rank has failed; what that one, or its guard, has to say comes in its place.
        started_s: wall-clock start of this job; an older exit.json is an earlier job's.
    """
    report = {"code": code, "reason": reason, "rank": rank, "time": time.time()}
    if is_consequence:
        report["is_consequence"] = True
    if launchers_file := os.environ.get("HARNESS_EXIT_FILE"):
        _write_first(Path(launchers_file), report, started_s)
    if folder is not None and folder.is_dir():
        _write_first(folder / "exit.json", report, started_s)


def _write_first(path: Path, report: dict[str, Any], started_s: float) -> None:
    """Writes the report unless another rank of this job already has; a file that cannot be written is left alone."""
    try:
        # Exclusive: one rank of this job wins. A file of an earlier job is removed by the main process at start.
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        with contextlib.suppress(OSError):
            try:
                earlier = json.loads(path.read_text(encoding="utf-8"))
                if isinstance(earlier, dict) and earlier.get("time", 0.0) >= started_s:
                    if "is_consequence" not in earlier or "is_consequence" in report or report["code"] != FAILED:
                        return
                    report = ({"ranks": earlier["ranks"]} if "ranks" in earlier else {}) | report
            except ValueError:  # another rank is just writing it
                return
        with contextlib.suppress(OSError):
            _write(path, report)
        return
    except OSError:
        return
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(json.dumps(report) + "\n")
    except OSError:  # a full disk: no report rather than an empty one
        with contextlib.suppress(OSError):
            path.unlink()


def add_ranks(folder: Path | None, ranks: dict[str, str], started_s: float) -> None:
    """Adds to this job's exit.json where each rank was, where that had to be found out."""
    if folder is None:
        return
    path = folder / "exit.json"
    with contextlib.suppress(OSError, ValueError):
        report = json.loads(path.read_text(encoding="utf-8"))
        if report["time"] >= started_s:
            _write(path, {**report, "ranks": ranks})


def explain(error: UserError) -> str:
    """The reason of a wrong input as one line, for exit.json."""
    return "; ".join(f"{finding.key}: {finding.message}" for finding in error.findings if finding.severity == "error")
