"""Jobs that benchmarks start: ended by a time limit, with all their processes, and read from the run's folder."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.processes import processes_with, send

ROOT = Path(__file__).resolve().parent.parent
_MARK = "HARNESS_BENCHMARK_RUN"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run(command: Sequence[str], log: Path, timeout_s: float, **environment: str) -> int | str:
    """Runs a command with its output in `log`; its exit code, or "timeout".

    However it ends, this process included by SystemExit, nothing of it goes on: ranks have sessions of their own, so they carry a mark.
    """
    mark = uuid.uuid4().hex
    environ = {**os.environ, **environment, _MARK: mark}
    with open(log, "w", encoding="utf-8") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environ, cwd=ROOT, start_new_session=True)
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return "timeout"
        finally:
            send(processes_with(_MARK, mark), signal.SIGKILL)
            process.wait()


def read_rows(output: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl; none where it did not come that far."""
    metrics = output / "metrics.jsonl"
    return [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()] if metrics.exists() else []


def log_end(log: Path, num_characters: int) -> str:
    """The end of a log without this machine's paths, which would go into results."""
    return log.read_text(encoding="utf-8", errors="replace")[-num_characters:].replace(f"{ROOT}/", "")


def failure_of(output: Path, num_characters: int = 2000) -> str:
    """Why a run of `run_clm.py` failed, from its folder: exit.json's reason and the end of train.log, without this machine's paths."""
    texts = []
    with contextlib.suppress(OSError, ValueError):
        texts.append(str(json.loads((output / "exit.json").read_text(encoding="utf-8")).get("reason", "")))
    with contextlib.suppress(OSError):
        texts.append(log_end(output / "train.log", num_characters))
    return "\n".join(texts)


def command_line(arguments: Sequence[str]) -> str:
    """How a script was called, without this machine's paths."""
    return " ".join(arguments).replace(f"{ROOT}/", "")


def card_facts(num_gpus: int, arguments: Sequence[str]) -> Mapping[str, Any]:
    """Card, number of cards, torch and command, for the head of a results file."""
    import torch

    card = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"
    return {"card": card, "num_gpus": num_gpus, "torch": torch.__version__, "command": command_line(arguments)}
