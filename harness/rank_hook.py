"""Recognising out-of-memory; and what `harness run` puts into every rank of somebody else's command, to be told of it.

How it gets there: `install_into` writes a copy of this file and an entry point of the group `torch.backends` into a folder and puts that
folder on PYTHONPATH. torch calls the entry points of this group at the end of `import torch` (its plugin mechanism for devices, torch 2.5
and later, https://docs.pytorch.org/tutorials/unstable/python_extension_autoload.html). Why this way and no other:

- it reaches the ranks of accelerate launch, deepspeed and torchrun alike, and those behind a shell script, `python -m` or a console
  command, because all of them hand the environment on; no command line is touched;
- a `sitecustomize` would hide the one that the machine may have, a `.pth` file would change the user's environment, a wrapper as
  `sys.executable` would have to imitate all of python's command line, and a script of ours before theirs needs to know where in the
  command theirs stands and makes `__main__` another module;
- a process that never imports torch (a shell, a downloader) is left alone.

It does not get into `python -I` and `python -E`, nor where TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set; `harness run` notices and says so.

What it does there: an exception that ends the process and is a lack of memory is written to the folder `REPORTS_VARIABLE`, and the process
ends at once: its usual end may wait for the ranks that now wait for it. Every other exception is not touched.

Standard library only, and no import of ours: the copy runs in an environment that need not have this package.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

REPORTS_VARIABLE = "HARNESS_RUN_REPORTS"
_RANK_VARIABLE = "HARNESS_RUN_RANK_PID"
_MODULE = "harness_rank_hook"
PRESENT, OUT_OF_MEMORY = "present", "oom"

# Messages of allocators other than torch's own that mean out of memory (their exceptions have no type of their own).
MESSAGES = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "Cuda failure 'out of memory'",
    "Cuda failure 2 'out of memory'",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)
_GIB_OF = {"KiB": 2**-20, "MiB": 2**-10, "GiB": 1.0}


def is_out_of_memory(error: BaseException) -> bool:
    """True for a GPU, library or host allocation that failed; False for every other error, sticky CUDA errors included."""
    torch: Any = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in MESSAGES)


def out_of_memory_behind(error: BaseException | None) -> BaseException | None:
    """The lack of memory that an exception is, or came of: libraries wrap errors, and clean-up after one fails too."""
    for each in _chain(error):
        if is_out_of_memory(each):
            return each
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def size_in(text: str, pattern: str) -> float | None:
    """A size in torch's message, GiB."""
    match = re.search(pattern + r" (\d+(?:\.\d+)?) (KiB|MiB|GiB)", text)
    return round(float(match.group(1)) * _GIB_OF[match.group(2)], 3) if match else None


def first_line(error: BaseException) -> str:
    """An error in one line: its message's first, or its type."""
    return (str(error).splitlines() or [""])[0] or type(error).__name__


def report(error: BaseException, **more: Any) -> dict[str, Any]:
    """What this rank knows of its lack of memory, GiB; null where it cannot tell."""
    text = str(error)
    host = isinstance(error, MemoryError) or "CPUAllocator" in text
    allocated, limit = size_in(text, "Of the allocated memory"), None
    torch: Any = sys.modules.get("torch")
    if torch is not None and not host:
        with contextlib.suppress(Exception):  # the card may not answer any more
            if torch.cuda.is_initialized():
                device = torch.cuda.current_device()
                share = torch.cuda.get_per_process_memory_fraction(device)
                limit = round(share * torch.cuda.mem_get_info(device)[1] / 2**30, 3)
                allocated = allocated or round(torch.cuda.memory_allocated(device) / 2**30, 3)
    return {
        "rank": int(os.environ.get("RANK") or 0),
        "pid": os.getpid(),
        "at_s": time.time(),
        "failure": first_line(error),
        "requested_gib": size_in(text, "Tried to allocate"),
        "allocated_gib": allocated,
        "limit_gib": limit,
        "memory": "host" if host else "device",
        **more,
    }


def tell(kind: str, content: Mapping[str, Any]) -> bool:
    """Writes a message for `harness run`, whole or not at all; False where nobody listens."""
    folder = os.environ.get(REPORTS_VARIABLE)
    if not folder:
        return False
    path = os.path.join(folder, f"{kind}-{os.environ.get('RANK') or 0}-{os.getpid()}.json")
    try:
        with open(path + ".tmp", "w", encoding="utf-8") as file:
            json.dump(dict(content), file)
        os.replace(path + ".tmp", path)
    except OSError as error:
        print(f"harness run: cannot write {path}: {error}", file=sys.stderr, flush=True)
        return False
    return True


def told(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The messages of one kind, oldest first."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob(f"{kind}-*.json")]
    return sorted(found, key=lambda message: message["at_s"])


def end_process(error: BaseException, **more: Any) -> None:
    """Reports a lack of memory to `harness run`, where it listens, and then ends this process at once."""
    if tell(OUT_OF_MEMORY, report(error, **more)):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _is_helper() -> bool:
    """Whether a rank started this process, which may then do without it: only the ranks' own ends count."""
    if "RANK" not in os.environ:
        return False
    return os.environ.setdefault(_RANK_VARIABLE, str(os.getpid())) != str(os.getpid())


def install() -> None:
    """Called by torch in every process that imports it. Must not raise: torch would not be importable."""
    if not os.environ.get(REPORTS_VARIABLE) or getattr(sys, "_harness_rank_hook", False) or _is_helper():
        return
    sys._harness_rank_hook = True  # type: ignore[attr-defined]
    tell(PRESENT, {"at_s": time.time(), "rank": int(os.environ["RANK"]) if os.environ.get("RANK") else None})
    before, leave = sys.excepthook, sys.exit

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        cause = out_of_memory_behind(error)
        # torch.distributed's own hook calls this one with stderr kept back until later, which there will not be.
        with contextlib.redirect_stderr(sys.stderr if cause is None else sys.__stderr__):
            before(kind, error, trace)
        if cause is not None:
            end_process(cause)

    def exit_after(status: Any = None) -> None:
        # `except Exception: ...; sys.exit(1)` is how many scripts end.
        if status not in (None, 0) and (cause := out_of_memory_behind(sys.exc_info()[1])) is not None:
            end_process(cause)
        leave(status)

    def at_end() -> None:
        # Libraries that print nicer tracebacks put themselves in the hook's place.
        if (cause := out_of_memory_behind(getattr(sys, "last_value", None))) is not None:
            end_process(cause)

    import atexit

    sys.excepthook, sys.exit = uncaught, exit_after  # type: ignore[assignment]
    atexit.register(at_end)


def install_into(folder: Path) -> None:
    """Makes `folder` one that brings this hook into every process with torch that has it on PYTHONPATH."""
    metadata = folder / f"{_MODULE}-1.dist-info"
    metadata.mkdir(parents=True)
    (folder / f"{_MODULE}.py").write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {_MODULE}\nVersion: 1\n", encoding="utf-8")
    (metadata / "entry_points.txt").write_text(f"[torch.backends]\n{_MODULE} = {_MODULE}:install\n", encoding="utf-8")


def environment(folder: Path, reports: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """What to add to a command's environment; their own PYTHONPATH stays, behind the folder of `install_into`."""
    path = environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{folder}{os.pathsep}{path}" if path else str(folder), REPORTS_VARIABLE: str(reports)}
