"""Compiles DeepSpeed's CPU Adam beside training: `python -m harness.compile_ahead <process id of the guard> [builders]`.

Operators of the builders that are named instead are compiled without standing back for others: somebody waits for them.

It outlives the training process that started it, because the one that comes in its place is the one that needs the operator; it ends with
the guard. However it is ended, it gives torch's lock back, so that whoever waits for the operator compiles it instead.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

from harness.build_locks import clear_abandoned_locks, find_ninja, limit_waits

_LIMIT_S = 900.0


def end_with(process_id: int) -> None:
    """From here on SIGTERM, also the end of another process, ends this one by SystemExit, which gives locks back."""

    def ended(*_: object) -> None:
        for children in Path("/proc/self/task").glob("*/children"):  # ninja, which ends its compilers when it is asked to
            for child in children.read_text().split():
                with contextlib.suppress(OSError):
                    os.kill(int(child), signal.SIGTERM)
        raise SystemExit(143)

    def watch() -> None:
        while os.path.exists(f"/proc/{process_id}"):
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, ended)
    threading.Thread(target=watch, daemon=True).start()


def main() -> int:
    end_with(int(sys.argv[1]))
    named = sys.argv[2:]
    if not named:
        with contextlib.suppress(OSError):
            os.nice(15)
    find_ninja()
    clear_abandoned_locks()
    limit_waits(_LIMIT_S)
    from deepspeed.accelerator import get_accelerator

    for name in named or ["CPUAdamBuilder"]:
        if (builder := get_accelerator().create_op_builder(name)) is not None:  # else this accelerator has no such operator
            builder.load(verbose=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
