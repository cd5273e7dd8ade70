"""Every file that a user can hand us, broken in many ways: a result or a user's mistake, never another exception, never a hang.

Right files are changed from a seed (tests/mutations.py), so that a failure comes again; the long form (`-m slow`) tries many more.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import json
import lzma
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.findings import UserError
from tests.checking import CPU, ROOT, deepspeed, fsdp
from tests.mutations import as_json_lines, as_yaml, limit, mutated_value, variants

SHORT, LONG = 25, 3000
SECONDS = 10.0
Reader = Callable[[Path], Any]


def quiet(function: Callable[..., Any], *values: Any) -> Any:
    """A command, whose output goes nowhere."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return function(*values)


def check(*tokens: str) -> None:
    from harness.check_config import main

    assert quiet(main, list(tokens)) in (0, 2)


@pytest.fixture(autouse=True)
def plain_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the checks would find out about this machine at every input; names without a folder are beside the file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("harness.check_config.detect_machine", lambda environ: CPU)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


# ---- what reads each kind of file


def read_deepspeed_json(path: Path) -> None:
    check("--deepspeed", str(path), "--num_processes", "4")
    check("--deepspeed", str(path), "--num_processes", "2", "--model_type", "llama", "--output_dir", str(path.parent / "out"))


def read_accelerate_yaml(path: Path) -> None:
    run = ["--model_type", "llama", "--output_dir", str(path.parent / "out")]
    check("--config_file", str(path), "--num_processes", "4", *run)
    check("--config_file", str(path))
    launch_with(["--engine", "fsdp", "--config_file", str(path), "--", "--output_dir", "o"])


def read_run_yaml(path: Path) -> None:
    check("--config", str(path), "--num_processes", "2")
    launch_with(["--engine", "ddp", "--num_processes", "2", "--", "--config", str(path)])


def launch_with(tokens: list[str]) -> None:
    from launch import run
    from launch.command import LaunchError, make_plan

    with contextlib.suppress(LaunchError):
        options, script_args = run.read_options(tokens)
        make_plan(options, script_args, {}, ["GPU-1", "GPU-2", "GPU-3", "GPU-4"])


def read_hostfile(path: Path) -> None:
    check("--hostfile", str(path))
    launch_with(["--engine", "zero2", "--hostfile", str(path), "--master_addr", "192.0.2.1", "--", "--output_dir", "o"])


def read_log(path: Path) -> None:
    from harness.parse_log import main

    assert quiet(main, [str(path), "--csv", str(path.parent / "out.csv"), "--json", str(path.parent / "out.json")]) in (0, 1, 2)


def read_metrics(path: Path) -> None:
    from harness.metrics import last_train_step, summarize
    from harness.metrics import read_metrics as read
    from harness.monitor import RunFollower, format_status

    folder = path.parent / "run"
    folder.mkdir(exist_ok=True)
    os.replace(path, folder / "metrics.jsonl")
    follower = RunFollower(folder)
    follower.poll()
    format_status(follower.status(1e9))
    last_train_step(folder / "metrics.jsonl")
    summarize(read(folder / "metrics.jsonl").rows)
    read_log(folder)


def read_exit_json(path: Path) -> None:
    from harness.monitor import RunFollower, format_status
    from harness.processes import Ended
    from launch import run
    from launch.command import Plan

    folder = path.parent / "ended"
    folder.mkdir(exist_ok=True)
    os.replace(path, folder / "exit.json")
    code, _ = run.final_code(Plan([], output_dir=folder), Ended(0), b"")
    assert isinstance(code, int)
    format_status(RunFollower(folder).status(1e9))


def read_data(path: Path) -> None:
    from harness.data_sources import FileReader, expand

    for options in ({}, {"line_mode": True, "encoding": "latin-1"}):
        reader = FileReader(**options)  # type: ignore[arg-type]
        for row in reader.rows(expand([str(path)], "--train_file")):
            assert isinstance(row.values, dict)


def prepare(path: Path, **values: Any) -> None:
    from harness.args import DataArguments
    from harness.data import prepare_data
    from tests.data_tokenizers import byte_tokenizer

    args = DataArguments(data_cache_dir=str(path.parent / "cache"), block_size=32, **values)
    args.overwrite_cache = True
    data = prepare_data(args, byte_tokenizer(), max_positions=64, seed=0, say=lambda line: None, is_local_main=True)
    if data.train is not None:
        data.train[0]


def prepare_rows(path: Path) -> None:
    prepare(path, train_file=[str(path)], bad_rows="skip")


def prepare_conversations(path: Path) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    prepare(path, train_file=[str(path)], bad_rows="skip", chat_template=template)


def prepare_mixture(path: Path) -> None:
    from harness.args import DataArguments
    from harness.mixtures import read_mix

    (path.parent / "a.txt").write_text("some text\n" * 20)
    read_mix(DataArguments(dataset_mix=str(path)))
    prepare(path, dataset_mix=str(path))


def read_model_config(path: Path) -> None:
    from harness.args import ModelArguments
    from harness.modeling import load_config

    check("--config_name", str(path), "--output_dir", str(path.parent / "out"))
    load_config(ModelArguments(config_name=str(path)))


def read_model_folder(path: Path) -> None:
    """The file is a model's config.json, an index, or weights; the rest of the folder is right."""
    from harness.model_files import check_model_files
    from harness.stored_weights import SafetensorsFolder

    folder = path.parent / "model"
    folder.mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors", "model.safetensors.index.json"):
        (folder / name).unlink(missing_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "model.safetensors").write_bytes(safetensors_file())
    os.replace(path, folder / path.name)
    check_model_files(folder)
    check("--model_name_or_path", str(folder), "--output_dir", str(path.parent / "out"))
    SafetensorsFolder(folder)


def read_device_map(path: Path) -> None:
    from harness.device_map_text import check_device_map_text
    from harness.device_map_text import read_device_map as read
    from harness.model_units import check_device_map
    from tests.test_device_maps import model_of

    check_device_map_text(str(path))
    check("--device_map", str(path), "--model_type", "llama", "--output_dir", str(path.parent / "out"))
    check_device_map(model_of("llama"), read(str(path)), 2)


def read_prompts(path: Path) -> None:
    from harness.hidden_states import read_prompts as read

    assert all(prompt.strip() for prompt in read(str(path)))


def read_states(path: Path) -> None:
    from harness.hidden_states import StateFolder

    folder = StateFolder(path.parent, "--compare")
    for key in folder.files:
        folder.get(key)


def read_template(path: Path) -> None:
    from harness.preparation import read_chat_template

    read_chat_template(str(path))


def read_ladder(path: Path) -> None:
    from harness.oom_reports import computed_ladder, host_relief_so_far, last_good_settings, last_settings, steps_down_so_far

    folder = path.parent
    for read in (last_good_settings, last_settings):
        settings = read(folder, 2)
        assert settings is None or settings.micro_batch_size >= 1
    assert all(rung.need_bytes > 0 for rung in computed_ladder(folder, 2))  # type: ignore[operator]
    assert all(isinstance(step, dict) for step in steps_down_so_far(folder, 2))
    assert host_relief_so_far(folder, 2) >= 0


def read_checkpoint(path: Path) -> None:
    """The file is a checkpoint's manifest or state; either it is refused, or all of it can be used."""
    from harness import checkpoint_files

    folder = path.parent / "checkpoint-3"
    write_checkpoint(folder)
    os.replace(path, folder / path.name)
    problem = checkpoint_files.problem_of(folder)
    assert problem is None or isinstance(problem, str)


def resume_trainer_checkpoint(path: Path) -> None:
    """The file is trainer_state.json of a checkpoint of transformers' Trainer."""
    from harness import resume
    from harness.stored_state import is_trainer_checkpoint, trainer_facts

    if is_trainer_checkpoint(path.parent):
        facts = trainer_facts(path.parent)
        resume._trainer_run(facts, 20)
        resume._trainer_state(facts)


def read_run_config(path: Path) -> None:
    """The file is the config.json of a run that the output folder holds."""
    from harness import run_folder
    from harness.parsing import parse_args

    folder = path.parent / "out"
    folder.mkdir(exist_ok=True)
    os.replace(path, folder / "config.json")
    run_folder.prepare(folder, parse_args(["--model_type", "llama", "--output_dir", str(folder)]))


# ---- right files


RUN_CONFIG = {"output_dir": "out", "seed": 42, "max_steps": -1, "learning_rate": 5e-5, "per_device_train_batch_size": 8}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
METRICS = [
    {
        "kind": "train",
        "step": 1,
        "loss": 2.5,
        "time_s": 10.0,
        "step_time_s": 0.5,
        "max_steps": 9,
        "learning_rate": 1e-3,
        "num_label_tokens": 8,
    },
    {"kind": "event", "event": "oom", "time_s": 11.0, "phase": "step", "rank": 0, "failure": "x", "change": "y", "way": "redo"},
    {
        "kind": "gpu",
        "time_s": 12.0,
        "node": 0,
        "gpus": [{"gpu": 0, "utilization_percent": 50, "memory_used_gib": 1.5, "memory_total_gib": 80.0, "throttled": ["power"]}],
    },
    {"kind": "eval", "step": 1, "eval_loss": 2.4, "time_s": 13.0},
    {"kind": "train", "step": 2, "loss": None, "nonfinite": {"loss": "nan"}, "time_s": 14.0, "step_time_s": 0.5, "max_steps": 9},
    {"kind": "summary", "status": "finished", "time_s": 15.0, "wall_time_s": 5.0, "num_steps": 2},
]
LOG = (
    b"\r 10%|#         | 10/100 [00:20<03:00,  2.00s/it][2031-02-03 04:05:06,007] [INFO] [loss_scaler.py:190:update_scale] [deepspeed] "
    b"OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768\n"
    b"\r   \r{'loss': 2.5, 'learning_rate': 2e-06, 'epoch': 0.1}\n"
    b"[INFO] [Rank 0] step=20, skipped=6, lr=[0.0001], mom=[(0.9, 0.999)]\n"
    b"train | step: 3/9 | loss: 2.5 | lr: 0.001 | mfu: 41.2%\n"
    b'Traceback (most recent call last):\n  File "a.py", line 3, in <module>\nRuntimeError: CUDA out of memory\n'
    b'{"loss": 1.5, "step": 7}\nevent: save | step: 4\n'
)
CHAT = [
    {"messages": [{"role": "user", "content": f"question {number}"}, {"role": "assistant", "content": "an answer"}], "tools": []}
    for number in range(6)
]
ROWS = [{"text": f"row number {number}, with some text", "id": number, "tags": ["a"]} for number in range(8)]
SETTINGS = {
    "micro_batch_size": 2,
    "activation_checkpointing": "full",
    "loss_chunk_size": 0,
    "optimizer_offload": 0.0,
    "param_offload": "none",
}
LADDER = {
    "num_processes": 2,
    "host_relief": 1,
    "ladder": [{**SETTINGS, "need_bytes": 1e9, "step_time_s": 1.0}, {**SETTINGS, "micro_batch_size": 1, "need_bytes": 5e8}],
    "steps_down": [{"phase": "step", "rank": 1, "failure": "CUDA out of memory", "change": "micro_batch_size 4 -> 2", "way": "redo"}],
    "now": SETTINGS,
}
DEEPSPEED: dict[str, Any] = {
    **json.loads((ROOT / "tests/cases/user_zero3_fp16_offload.json").read_text()),
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": "auto", "warmup_num_steps": 10}},
    "bf16": {"enabled": "auto"},
    "activation_checkpointing": {"partition_activations": False},
    "aio": {"block_size": 1048576, "queue_depth": 8},
}
FSDP = fsdp(
    {
        "mixed_precision": "bf16",
        "num_machines": 1,
        "main_process_port": 29511,
        "parallelism_config": {"parallelism_config_dp_shard_size": 4},
    },
    auto_wrap_policy="TRANSFORMER_BASED_WRAP",
    transformer_layer_cls_to_wrap="LlamaDecoderLayer",
    reshard_after_forward=True,
    offload_params=False,
    state_dict_type="SHARDED_STATE_DICT",
    activation_checkpointing=True,
)
ACCELERATE_ZERO = deepspeed({"mixed_precision": "no"}, zero_stage=3, offload_optimizer_device="cpu", gradient_accumulation_steps=2)
RUN: dict[str, Any] = {
    "model_type": "llama",
    "config_overrides": "hidden_size=32,num_hidden_layers=2",
    "output_dir": "out",
    "train_file": ["a.txt", "b.jsonl"],
    "learning_rate": "2e-5",
    "max_steps": 100,
    "bf16": True,
    "lr_scheduler_kwargs": {"num_cycles": 2},
    "oom_ladder": ["micro_batch", "optimizer_offload"],
    "lora_r": 8,
    "rank_pattern": {"q_proj": 4},
    "target_modules": ["q_proj"],
    "max_memory": "0:10GB,cpu:20GB",
}
MIXTURE = {
    "samples_per_epoch": 8,
    "sources": [{"name": "one", "weight": 2, "train_file": "a.txt"}, {"weight": 1.5, "train_file": ["a.txt"]}],
}
TRAINER_STATE = {
    "global_step": 12,
    "epoch": 0.6,
    "max_steps": 40,
    "num_input_tokens_seen": 100,
    "best_metric": 1.5,
    "log_history": [{"loss": 2.5, "step": 10, "epoch": 0.5, "learning_rate": 1e-3, "grad_norm": 1.0}, {"eval_loss": 2.4, "step": 12}],
}


def safetensors_file() -> bytes:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}, "__metadata__": {"format": "pt"}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(16)


def parquet_file() -> bytes:
    import pyarrow
    import pyarrow.parquet

    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), stream, row_group_size=3)
    return stream.getvalue()


def arrow_file() -> bytes:
    import pyarrow

    table, stream = pyarrow.Table.from_pylist(ROWS), io.BytesIO()
    with pyarrow.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    return stream.getvalue()


def csv_file(delimiter: str) -> bytes:
    return "\n".join(delimiter.join(fields) for fields in [["text", "b"], ["one", "1"], ['"two, and\nmore"', "2"], ["three", "3"]]).encode()


def write_checkpoint(folder: Path) -> None:
    from harness import checkpoint_files

    (folder / "state").mkdir(parents=True, exist_ok=True)
    (folder / "state/shard-0.bin").write_bytes(b"weights")
    (folder / "trainer_state.json").write_text(json.dumps(CHECKPOINT))
    manifest = checkpoint_files.hash_share(folder, 0, 1)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "COMPLETE").write_text("")


CHECKPOINT = {
    "state": {"step": 3, "epoch": 0.5},
    "run": {"engine": "ddp", "num_processes": 1, "global_batch_size": 8, "max_steps": 6, "data_fingerprint": "x", "template": {}},
    "data": {},
}


def manifest() -> Any:
    import hashlib

    state = json.dumps(CHECKPOINT).encode()
    files = {"state/shard-0.bin": b"weights", "trainer_state.json": state}
    return {name: {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()} for name, content in files.items()}


# name of the file, right content (or what makes it), how a tree is written, what reads it
KINDS: dict[str, tuple[str, Any, Callable[[Any], str] | None, Reader]] = {
    "deepspeed json": ("ds.json", DEEPSPEED, json.dumps, read_deepspeed_json),
    "accelerate yaml": ("acc.yaml", FSDP, as_yaml, read_accelerate_yaml),
    "accelerate zero yaml": ("acc.yaml", ACCELERATE_ZERO, as_yaml, read_accelerate_yaml),
    "run yaml": ("run.yaml", RUN, as_yaml, read_run_yaml),
    "hostfile": ("hosts", b"# cluster\nnode-a slots=4\n\n  node-b slots=2 # spare\n", None, read_hostfile),
    "txt": ("a.txt", b"first\n\nsecond \xc3\xa9\r\nlast", None, read_data),
    "py": ("a.py", b"# -*- coding: latin-1 -*-\nname = 'x'\n", None, read_data),
    "jsonl": ("a.jsonl", ROWS, as_json_lines, read_data),
    "json": ("a.json", {"version": 1, "data": ROWS[:3]}, json.dumps, read_data),
    "json array": ("a.json", ROWS[:3], json.dumps, read_data),
    "csv": ("a.csv", csv_file(","), None, read_data),
    "tsv": ("a.tsv", csv_file("\t"), None, read_data),
    "parquet": ("a.parquet", parquet_file, None, read_data),
    "arrow": ("a.arrow", arrow_file, None, read_data),
    "gz": ("a.jsonl.gz", lambda: gzip.compress(as_json_lines(ROWS).encode(), mtime=0), None, read_data),
    "bz2": ("a.jsonl.bz2", lambda: bz2.compress(as_json_lines(ROWS).encode()), None, read_data),
    "xz": ("a.txt.xz", lambda: lzma.compress(b"some text\n" * 9), None, read_data),
    "rows": ("a.jsonl", ROWS, as_json_lines, prepare_rows),
    "conversations": ("a.jsonl", CHAT, as_json_lines, prepare_conversations),
    "mixture": ("mix.yaml", MIXTURE, as_yaml, prepare_mixture),
    "log": ("train.log", LOG, None, read_log),
    "json log": ("a.jsonl", METRICS, as_json_lines, read_log),
    "csv log": ("metrics.csv", b"step,train_loss,epoch\n1,2.5,0\n2,2.25,0\n", None, read_log),
    "trainer state log": ("trainer_state.json", TRAINER_STATE, json.dumps, read_log),
    "metrics": ("metrics.jsonl", METRICS, as_json_lines, read_metrics),
    "exit json": ("exit.json", {"code": 1, "reason": "x", "rank": 0, "time": 10.0}, json.dumps, read_exit_json),
    "model config": ("config.json", LLAMA, json.dumps, read_model_config),
    "config in a model": ("config.json", LLAMA, json.dumps, read_model_folder),
    "index": ("model.safetensors.index.json", {"metadata": {}, "weight_map": {"a": "model.safetensors"}}, json.dumps, read_model_folder),
    "weights": ("model.safetensors", safetensors_file, None, read_model_folder),
    "device map": (
        "map.json",
        {"model.embed_tokens": 0, "model.layers": "cuda:1", "model.norm": 1, "lm_head": 1},
        json.dumps,
        read_device_map,
    ),
    "prompts": ("prompts.txt", b"one prompt\n\nanother\n", None, read_prompts),
    "hidden states": (
        "manifest.json",
        {"states": [{"key": "a", "file": "a.safetensors", "shape": [2]}], "num_layers": 1},
        json.dumps,
        read_states,
    ),
    "chat template": ("chat.jinja", b"{% for m in messages %}{{ m.content }}{% endfor %}", None, read_template),
    "ladder": ("ladder.json", LADDER, json.dumps, read_ladder),
    "manifest": ("manifest.json", manifest, json.dumps, read_checkpoint),
    "state of a checkpoint": ("trainer_state.json", CHECKPOINT, json.dumps, read_checkpoint),
    "state of the Trainer": ("trainer_state.json", TRAINER_STATE, json.dumps, resume_trainer_checkpoint),
    "config of a run": ("config.json", RUN_CONFIG, json.dumps, read_run_config),
}


def attempt(kind: str, number: int, folder: Path) -> None:
    """Reads so many wrong files; the failure names the input that showed it."""
    name, value, dump, read = KINDS[kind]
    value = value() if callable(value) else value
    path = folder / name
    path.write_bytes(value if isinstance(value, bytes) else (dump or json.dumps)(value).encode())
    with contextlib.suppress(UserError, ValueError):
        read(path)  # what it imports takes longer than any input may
    for index, content in enumerate(variants(value, number, seed=1, dump=dump)):
        path.write_bytes(content)
        try:
            with limit(SECONDS):
                read(path)
        except UserError as error:
            assert error.findings and all(finding.message for finding in error.findings)
        except BaseException as error:
            raise AssertionError(f"{kind}, input {index}: {type(error).__name__}: {error}\n{content[:600]!r}") from error


@pytest.mark.parametrize("kind", KINDS)
def test_the_right_file_is_read(kind: str, tmp_path: Path) -> None:
    """Else the wrong ones would all be refused for one reason."""
    name, value, dump, read = KINDS[kind]
    value = value() if callable(value) else value
    (tmp_path / name).write_bytes(value if isinstance(value, bytes) else (dump or json.dumps)(value).encode())
    try:
        read(tmp_path / name)
    except UserError as error:
        assert kind in ("hidden states",), error  # its weights are not there


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_files(kind: str, tmp_path: Path) -> None:
    attempt(kind, SHORT, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_wrong_files(kind: str, tmp_path: Path) -> None:
    attempt(kind, LONG, tmp_path)


def found_before() -> Iterator[tuple[str, bytes]]:
    """What the long form has found, by kind."""
    huge, name = "9" * 8200, "9" * 3000

    def text(value: Any) -> bytes:
        return json.dumps(value).encode()

    yield "deepspeed json", text({**DEEPSPEED, "scheduler": {"type": [[]], "params": {}}})
    yield "accelerate yaml", text(fsdp(transformer_layer_cls_to_wrap=[["LlamaDecoderLayer"]], auto_wrap_policy="TRANSFORMER_BASED_WRAP"))
    yield "run yaml", text({**RUN, "rank_pattern": {"q_proj": 10**30}})
    yield "hostfile", f"node-a slots={huge}\n".encode()
    yield "mixture", text({"sources": [{"name": "one", "train_file": name}]})
    yield "mixture", text({"samples_per_epoch": 10**30, "sources": [{"train_file": "a.txt"}]})
    yield "log", b"[INFO] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 3../../x\n"
    for kind in ("json log", "metrics"):
        yield kind, b"\n".join(text(row) for row in ({**METRICS[0], "time_s": None}, *METRICS))
    yield "model config", text({**LLAMA, "dtype": [[]]})
    yield "model config", text(LLAMA)[:-1] + b', "x": ' + b"[" * 5000 + b"]" * 5000 + b"}"
    yield "index", text({"metadata": {}, "weight_map": {"a": name}})
    yield "manifest", text({name: {"size_bytes": 7, "sha256": "0"}})


@pytest.mark.parametrize(("kind", "content"), list(found_before()))
def test_wrong_files_that_were_found(kind: str, content: bytes, tmp_path: Path) -> None:
    name, value, dump, read = KINDS[kind]
    value = value() if callable(value) else value
    (tmp_path / name).write_bytes(value if isinstance(value, bytes) else (dump or json.dumps)(value).encode())
    with contextlib.suppress(UserError, ValueError):
        read(tmp_path / name)
    (tmp_path / name).write_bytes(content)
    with contextlib.suppress(UserError):
        read(tmp_path / name)


# ---- that these tests can fail


def test_a_reader_that_crashes_or_hangs_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "crash", ("a.json", {"a": 1}, json.dumps, lambda path: json.loads(path.read_text())))
    with pytest.raises(AssertionError, match=r"crash, input \d+: \w+Error"):
        attempt("crash", 20, tmp_path)
    with pytest.raises(AssertionError, match="still reading"), limit(0.1):
        while True:
            pass


def test_changes_are_the_same_each_time_and_many() -> None:
    first, second = (list(variants(DEEPSPEED, 200, seed=1, dump=json.dumps)) for _ in range(2))
    assert first == second and len(set(first)) > 190
    parsed: Iterator[Any] = (mutated_value(FSDP, random.Random(number)) for number in range(50))
    assert sum(isinstance(yaml.safe_load(as_yaml(value)), dict) for value in parsed) > 40
