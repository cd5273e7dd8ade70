"""`harness run` from start to end, with scripts that need no torch: they call the hook as torch would."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from harness import runner
from harness.guard import parent_of
from tests.launching import ROOT

HEAD = """
import argparse, json, os, pathlib, sys, time
import harness_rank_hook
harness_rank_hook.install()
p = argparse.ArgumentParser()
p.add_argument("--micro_batch_size", type=int, default=8)
p.add_argument("--gradient_accumulation_steps", type=int, default=1)
p.add_argument("--resume_from_checkpoint")
p.add_argument("--output_dir", type=pathlib.Path)
a = p.parse_args()
with open("calls", "a") as calls:
    calls.write(f"{a.micro_batch_size} x {a.gradient_accumulation_steps} from {a.resume_from_checkpoint}\\n")
"""
CHECKPOINT = """
folder = a.output_dir / "step_3"
folder.mkdir(parents=True, exist_ok=True)
(folder / "optimizer.bin").write_bytes(b"x")
(folder / "random_states_0.pkl").write_bytes(b"x")
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """Runs a script's text under `harness run`: (exit code, record, calls, output)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "theirs"))

    def start(body: str, *options: str) -> tuple[int, dict[str, Any], list[str], str]:
        (tmp_path / "train.py").write_text(HEAD + body)
        (tmp_path / "calls").write_text("")
        code = runner.main([*options, "--", sys.executable, "train.py", "--output_dir", "out"])
        record = tmp_path / "out-harness_run" / "record.json"
        found = json.loads(record.read_text()) if record.exists() else {}
        return code, found, (tmp_path / "calls").read_text().splitlines(), "".join(capfd.readouterr())

    return start


def test_goes_down_until_it_fits_and_on_from_the_newest_checkpoint(run: Any) -> None:
    code, record, calls, output = run(
        CHECKPOINT + 'if a.micro_batch_size > 2: raise MemoryError("too much")\nassert os.environ["PYTHONPATH"]'
    )
    assert code == 0
    assert calls == ["8 x 1 from None", "4 x 2 from out/step_3", "2 x 4 from out/step_3"]
    assert record["result"] == "finished" and [attempt["exit_code"] for attempt in record["attempts"]] == [1, 1, 0]
    assert record["attempts"][0]["out_of_memory"][0]["failure"] == "too much"
    assert "attempt 2 of 10: micro_batch_size 8 -> 4" in output
    assert "  + --micro_batch_size 4\n" in output and "  + --resume_from_checkpoint out/step_3\n" in output
    assert "to start there next time: " in output


def test_the_record_of_an_attempt_is_there_while_the_next_one_runs(run: Any) -> None:
    """A runner that is killed by then has left it."""
    code, _, calls, _ = run(
        'if a.micro_batch_size > 4: raise MemoryError("x")\nimport json\n'
        'kept = json.loads(pathlib.Path("out-harness_run/record.json").read_text())\n'
        'assert [each["exit_code"] for each in kept["attempts"]] == [1] and "result" not in kept'
    )
    assert (code, len(calls)) == (0, 2)


def test_a_mistake_is_not_tried_again(run: Any) -> None:
    code, record, calls, output = run("sys.exit(3)")
    assert (code, len(calls), record["result"]) == (3, 1, "failed")
    assert "no lack of memory, so it is not tried again" in output
    code, record, calls, _ = run('raise ValueError("CUDA out of memory")')
    assert (code, len(calls)) == (1, 1)


def test_a_lack_of_memory_that_the_script_gets_over_is_none(run: Any) -> None:
    code, record, calls, _ = run('try:\n    raise MemoryError("x")\nexcept MemoryError:\n    pass')
    assert (code, len(calls), record["result"]) == (0, 1, "finished")


@pytest.mark.parametrize(
    "body",
    [
        'try:\n    raise MemoryError("x")\nexcept Exception:\n    sys.exit(1)',
        'try:\n    raise MemoryError("x")\nexcept Exception as error:\n    raise RuntimeError("wrapped") from error',
        'sys.excepthook = lambda *_: None\nraise RuntimeError("CUDA error: out of memory")',
    ],
    ids=["exit", "wrapped", "hook replaced"],
)
def test_ways_to_end_for_lack_of_memory(run: Any, body: str) -> None:
    body = "\n".join("    " + line for line in body.splitlines())
    code, record, calls, _ = run(f"if a.micro_batch_size > 4:\n{body}")
    assert (code, len(calls), record["result"]) == (0, 2, "finished")


def test_the_end_of_the_ladder(run: Any) -> None:
    code, record, calls, output = run('raise MemoryError("x")', "--ladder", "micro_batch,micro_batch=1")
    assert (code, record["result"]) == (1, "out of memory")
    assert [call.split(" from")[0] for call in calls] == ["8 x 1", "4 x 2", "1 x 8"]
    assert "no lower rung is left" in output
    code, record, calls, output = run('raise MemoryError("x")', "--max_attempts", "2")
    assert (code, len(calls)) == (1, 2) and "--max_attempts 2 is reached" in output


def test_checkpoints_of_another_run_are_not_gone_on_from(run: Any, tmp_path: Path) -> None:
    old = tmp_path / "out" / "step_9"
    old.mkdir(parents=True)
    for name in ("optimizer.bin", "random_states_0.pkl"):
        (old / name).write_bytes(b"x")
        os.utime(old / name, (1, 1))
    _, _, calls, output = run('if a.micro_batch_size > 4: raise MemoryError("x")')
    assert calls[1] == "4 x 2 from None"
    assert "step_9 is passed over: it is from before this run" in output


def test_a_count_of_micro_batches_that_no_longer_fits_is_not_restored(run: Any) -> None:
    theirs = CHECKPOINT + 'if a.micro_batch_size > 4: raise MemoryError("x")\n'
    loop = "def loop():\n    accelerator.load_state(a.resume_from_checkpoint)\n    with accelerator.accumulate(model): pass\n"
    _, _, calls, output = run(theirs + loop)
    assert calls[1] == "4 x 2 from None" and "out/step_3 is passed over" in output
    _, _, calls, _ = run(theirs + loop + "    accelerator.step = 0\n")
    assert calls[1] == "4 x 2 from out/step_3"


def test_all_processes_end_soon_when_one_ran_out_of_memory(run: Any, tmp_path: Path) -> None:
    body = """
if a.micro_batch_size > 4:
    import signal
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)   # stuck, as in a collective
        open("stuck", "w").write(str(os.getpid()))
        time.sleep(100)
    while not os.path.exists("stuck"): time.sleep(0.01)
    raise MemoryError("x")
"""
    started = time.monotonic()
    code, record, _, _ = run(body)
    assert code == 0 and record["attempts"][0]["num_killed"] == 1
    assert time.monotonic() - started < 20
    assert parent_of(int((tmp_path / "stuck").read_text())) is None


@pytest.mark.parametrize("takes_signals", [False, True])
def test_an_interrupt_goes_to_the_command_and_ends_all(tmp_path: Path, takes_signals: bool) -> None:
    """The exit code says so, too where the command has one of its own for all that is not success, as launchers do."""
    handler = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(1))\n" if takes_signals else ""
    (tmp_path / "train.py").write_text(f"{handler}import time\nopen('started', 'w').close()\ntime.sleep(100)\n")
    command = [sys.executable, "-m", "harness.runner", "--no_plan", "--run_dir", "record", "--", sys.executable, "train.py"]
    process = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "started").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 143
    assert json.loads((tmp_path / "record/record.json").read_text())["result"] == "stopped" and "stopped with exit code 143" in errors


def test_wrong_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert runner.main([]) == 2
    assert runner.main(["--no_such", "--", "python", "x.py"]) == 2
    assert runner.main(["--names", "bsz", "--", "python", "x.py"]) == 2
    assert runner.main(["--max_attempts", "0", "--", "python", "x.py"]) == 2
    assert runner.main(["--", "no-such-program"]) == 2
    assert "cannot start no-such-program" in capsys.readouterr().err
    assert runner.main(["--max-attempts", "3", "python", "x.py", "--epochs", "2"]) == 2
    fix = "harness run --max-attempts 3 -- python x.py --epochs 2"
    assert capsys.readouterr().err == f"  error   harness run: has no -- before the command python -> {fix}\n"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--grace_s -1", "--grace_s: must be a number of seconds, 0 or more, not -1.0 -> --grace_s 35"),
        ("--grace_s nan", "--grace_s: must be a number of seconds, 0 or more, not nan -> --grace_s 35"),
        ("--gpu_memory foo", "--gpu_memory: 'foo' is not a size -> write for example 80GB or 79.1GiB"),
        ("--run_dir /proc/x", "--run_dir: cannot write to /proc/x: No such file or directory -> choose a folder you may write to"),
        ("--run_dir file", "--run_dir: file is a file -> give a folder"),
        ("--run_dir file/x", "--run_dir: cannot write to file/x: Not a directory -> choose a folder you may write to"),
        ("-- --output_dir file", "--output_dir: file is a file -> give a folder"),
        ("-- --output_dir /proc/x", "--output_dir: cannot write to /proc/x: No such file or directory -> choose a folder you may write to"),
    ],
)
@pytest.mark.parametrize("dry", [["--dry_run"], []])
def test_wrong_values_and_folders_start_nothing(
    words: str, line: str, dry: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "train.py").write_text("open('started', 'w')")
    options, _, flags = words.partition("-- ")
    command = ["python", "train.py", *flags.split()]
    assert runner.main([*dry, "--no_plan", *options.split(), "--", *command]) == 2
    assert capsys.readouterr().err == f"  error   {line}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "train.py"]


def test_a_full_disk_is_one_line_and_costs_no_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.chdir(tmp_path)
    words = ["--no_plan", "--run_dir", "a/b", "--", "python", "-c", "raise SystemExit(7)"]
    with monkeypatch.context() as patched:
        patched.setattr(runner, "write_json", full)
        assert runner.main(words) == 7
    said = capsys.readouterr().err
    assert "harness run: no record: cannot write a/b/record.json: No space left on device\n" in said and "record: a/b" not in said
    (tmp_path / "a" / "b").rmdir()
    (tmp_path / "a").rmdir()
    monkeypatch.setattr(runner.disk_room, "fill_probe", full)
    assert runner.main(words) == 1
    said = capsys.readouterr().err
    assert said.startswith("  error   harness run: cannot write a/b: No space left on device (") and said.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words",
    [
        "torchrun --nproc_per_node 2 OURS --output_dir out",
        "python -m harness.run_clm",
        "harness train --output_dir out",
        "python -m harness train",
    ],
)
def test_the_harness_own_script_steps_down_by_itself(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = words.replace("OURS", str(ROOT / "harness" / "run_clm.py"))
    for dry in (["--dry_run"], []):
        assert runner.main([*dry, "--", *words.split()]) == 2
        said = capsys.readouterr().err
        assert "steps down by itself when memory runs out: harness run is for other people's scripts" in said
        assert said.endswith(f"-> start it without harness run: {words}\n") and said.count("\n") == 1


def test_dry_run_starts_nothing(run: Any) -> None:
    code, record, calls, output = run("", "--dry_run", "--ladder", "micro_batch")
    assert (code, record, calls) == (0, {}, [])
    assert "micro-batch 8 x accumulation 1 on each rank" in output and "rung micro_batch_size 8 -> 4\n" in output


def test_nodes_that_try_the_same_folder_at_once_do_not_refuse_it(tmp_path: Path) -> None:
    from harness.runner import _try_folder

    def try_often(_: int) -> None:
        for _ in range(10):
            _try_folder(tmp_path / "on" / "a" / "shared" / "disk", "--run_dir")

    with ThreadPoolExecutor(3) as nodes:
        list(nodes.map(try_often, range(3)))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]  # of folders the last one may find another in its way
