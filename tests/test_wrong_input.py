"""What a user types wrong: one message that names key, value and fix, exit code 2, no traceback, nothing trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

TINY = "hidden_size=32,intermediate_size=64,num_hidden_layers=1,num_attention_heads=2,num_key_value_heads=1,max_position_embeddings=256"


pytestmark = pytest.mark.usefixtures("alone")


def text_file(folder: Path, name: str = "a.txt", text: str = "some text to train on, and then some more of it. " * 40) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def command(folder: Path, **changes: object) -> list[str]:
    values: dict[str, object] = {
        "model_type": "llama",
        "config_overrides": TINY,
        "tokenizer_name": "bytes",
        "train_file": str(folder / "a.txt"),
        "block_size": 32,
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "validation_split_percentage": 0,
        "data_cache_dir": str(folder / "cache"),
        "output_dir": str(folder / "out"),
        "save_strategy": "no",
        **changes,
    }
    return [token for name, value in values.items() if value is not None for token in (f"--{name}", str(value))]


def fails(tokens: list[str], capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Runs the job, expects exit code 2 and every word in the message, and no traceback."""
    from harness.run_clm import main

    assert main(tokens) == 2
    captured = capsys.readouterr()
    text = captured.out + captured.err
    for word in words:
        assert word in text, text
    assert "Traceback" not in text
    return text


CASES: list[tuple[str, dict[str, object], tuple[str, ...]]] = [
    ("unknown flag", {"learnig_rate": 1}, ("--learnig_rate", "--learning_rate")),
    ("missing file", {"train_file": "nowhere.txt"}, ("nowhere.txt",)),
    ("block over the model's limit", {"block_size": 512}, ("512", "256")),
    ("no such model", {"model_type": "lama"}, ("lama", "llama")),
    ("no such folder", {"model_type": None, "config_overrides": None, "model_name_or_path": "./nowhere"}, ("./nowhere",)),
    ("config without that name", {"config_overrides": "hiden_size=3"}, ("hiden_size",)),
    ("config value of the wrong kind", {"config_overrides": "hidden_size=big"}, ("hidden_size=big", "number")),
    ("attention that does not exist", {"attn_implementation": "flash"}, ("--attn_implementation", "flash")),
    ("flash attention in float32", {"attn_implementation": "flash_attention_2", "precision": "fp32"}, ("flash",)),
    ("batch that cannot be cut", {"target_batch_size": 3}, ("--target_batch_size", "3", "multiple")),
    ("unknown schedule", {"lr_scheduler_type": "linea"}, ("--lr_scheduler_type",)),
    ("a schedule's arguments that are not JSON", {"lr_scheduler_kwargs": "{"}, ("--lr_scheduler_kwargs", "JSON")),
    ("Apex that is not there", {"optim": "adamw_apex_fused"}, ("--optim", "adamw_apex_fused")),
    ("Liger without a GPU", {"use_liger_kernel": True}, ("--use_liger_kernel",)),
    ("dtype that does not exist", {"torch_dtype": "float31"}, ("--torch_dtype", "float31")),
    ("two engines", {"deepspeed": "x.json", "fsdp": "full_shard"}, ("--deepspeed", "--fsdp")),
    ("DeepSpeed file that is not there", {"deepspeed": "x.json"}, ("x.json",)),
    ("checkpoint that is not there", {"resume_from_checkpoint": "nowhere/checkpoint-5"}, ("nowhere/checkpoint-5",)),
    ("no checkpoint to go on from", {"resume_from_checkpoint": "latest"}, ("--resume_from_checkpoint",)),
]


@pytest.mark.parametrize(("changes", "words"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_wrong_input(changes: dict[str, object], words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text_file(tmp_path)
    fails(command(tmp_path, **changes), capsys, *words)
    assert not (tmp_path / "out" / "final").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ("a.txt", "empty")),
        (b"caf\xe9 noir\nplain\n", ("a.txt", "line 1", "3", "0xe9")),
        (b"short", ("--block_size",)),
    ],
    ids=["empty", "not UTF-8", "less than a block"],
)
def test_wrong_data(content: bytes, words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    fails(command(tmp_path), capsys, *words)


def test_jsonl_line_without_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"txt": "not"}\n')
    fails(command(tmp_path, train_file=tmp_path / "a.jsonl"), capsys, "a.jsonl", "2", "text")


NAMES: list[tuple[dict[str, object], list[str]]] = [
    (
        {
            "lora_r": 4,
            "target_modules": "q_prj",
            "target_layers": "0,9",
            "rank_pattern": '{"k_prj": 8}',
            "modules_to_save": "lm_haed",
            "block_size": 512,
        },
        [
            "--block_size: 512 is over the model's limit of 256",
            "--target_modules: q_prj is not in LlamaForCausalLM -> choose from q_proj, k_proj, v_proj,",
            "--target_layers: layer 9 out of range 0-0 -> the model has 1 layers",
            "--rank_pattern: k_prj matches no module that gets an adapter -> choose from q_proj, k_proj,",
            "--modules_to_save: lm_haed is not in LlamaForCausalLM -> choose from q_proj,",
        ],
    ),
    ({"lora_r": 4, "target_layers": "one"}, ["--target_layers: cannot read 'one' -> write 0,1,2 or 10-20"]),
    (
        {"device_map": '{"model.layers": "cpu", "modle.norm": "cpu", "lm_head": 7}', "lr_scheduler_type": "linea"},
        [
            "--lr_scheduler_type: linea is not known -> did you mean linear?",
            "--device_map: LlamaForCausalLM has no module modle.norm -> its top modules are model, lm_head",
            "--device_map: names card 7, but there are 0 -> use cpu",
            "--device_map: leaves 3 modules without a device: model.embed_tokens, model.norm, model.rotary_emb",
        ],
    ),
    ({"device_map": "cuda:1"}, ["--device_map: names card 1, but there are 0 -> use cpu"]),
]


@pytest.mark.parametrize(("changes", "lines"), NAMES, ids=["adapters", "layers", "map", "card"])
def test_names_are_refused_before_the_data_by_the_check_and_by_the_run(
    changes: dict[str, object],
    lines: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from harness import check_config, check_model

    monkeypatch.setattr(check_model.torch.cuda, "device_count", lambda: 0)
    text_file(tmp_path)
    config = {"model_type": "llama", **dict(pair.split("=") for pair in TINY.split(","))}
    config = {name: int(value) if value.isdigit() else value for name, value in config.items()}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    tokens = command(tmp_path, model_type=None, config_overrides=None, config_name=str(tmp_path / "model"), **changes)
    assert check_config.main(["--num_processes", "1", *tokens]) == 2
    checked = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  error")]
    text = fails(tokens, capsys)
    assert [line for line in text.splitlines() if line.startswith("  error")] == checked
    assert len(checked) == len(lines)
    assert [line for line in lines if not any(line in found for found in checked)] == []
    assert not (tmp_path / "cache").exists()


def test_names_of_a_model_that_is_not_to_be_had_are_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    from harness import check_model
    from harness.args import Arguments
    from harness.check_config import check_names
    from harness.findings import user_error

    def load_config(args: object) -> object:
        raise user_error("--model_name_or_path", "some/model is neither a folder nor in the cache", "give a folder")

    monkeypatch.setattr(check_model, "load_config", load_config)
    args = Arguments()
    args.model.model_name_or_path, args.lora.lora_r = "some/model", 4
    assert check_names(args, []) == []  # all linear layers: nothing is named
    args.lora.target_modules = ["q_proj"]
    assert [finding.line() for finding in check_names(args, [])] == [
        "info    --model_name_or_path: the model was not looked at: some/model is neither a folder nor in the cache"
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "lama"}, "unknown architecture lama -> did you mean llama?"),
        ({"model_type": "t5"}, "t5 is no causal language model"),
        ({"model_type": "bert"}, "is an encoder by its config"),
        ({"hidden_act": "sillu"}, "unknown activation sillu -> did you mean silu?"),
        ({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 4}, "4 experts for each token are more than the 2 of"),
    ],
)
def test_a_config_that_cannot_be_trained_is_refused_by_the_check_as_by_the_run(
    changes: dict[str, object], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from harness import check_config

    config = {"model_type": "llama", "vocab_size": 320, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_attention_heads": 4, **changes}))
    text_file(tmp_path)
    tokens = command(tmp_path, model_type=None, config_overrides=None, config_name=tmp_path / "config.json")
    if changes.get("model_type") != "bert":  # transformers logs to an earlier test's closed file
        fails(tokens, capsys, words)
    assert check_config.main(["--num_processes", "1", *tokens]) == 2
    assert words in capsys.readouterr().out


def test_several_mistakes_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text_file(tmp_path)
    fails(command(tmp_path, learning_rate=-1, max_steps=0, block_size=1), capsys, "--learning_rate", "--max_steps", "--block_size")


def test_files_that_are_not_there_are_said_with_what_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from harness import check_config

    wrong = command(tmp_path, learnig_rate=1, seed="x", train_file="/no/such", model_name_or_path="./none", resume_from_checkpoint="./no")
    flags = (
        "--learnig_rate",
        "--seed",
        "--train_file: /no/such does not exist",
        "--model_name_or_path: ./none",
        "--resume_from_checkpoint",
    )
    fails(wrong, capsys, *flags)
    assert check_config.main(wrong) == 2
    printed = capsys.readouterr().out
    assert all(flag in printed for flag in flags) and printed.count("/no/such") == 1


def test_output_folder_of_another_run_and_of_somebody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from harness.run_clm import main

    text_file(tmp_path)
    assert main(command(tmp_path)) == 0
    before = (tmp_path / "out" / "metrics.jsonl").read_text()
    fails(command(tmp_path, learning_rate=0.5), capsys, "--output_dir", "learning_rate", "--overwrite_output_dir")
    assert (tmp_path / "out" / "metrics.jsonl").read_text() == before
    assert main(command(tmp_path, learning_rate=0.5, overwrite_output_dir=True)) == 0
    aside = list(tmp_path.glob("out.old-*"))
    assert len(aside) == 1 and (aside[0] / "metrics.jsonl").read_text() == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    fails(command(tmp_path, output_dir=tmp_path / "mine"), capsys, "--output_dir", "thesis.tex")
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "years of work"


def test_output_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text_file(tmp_path)
    (tmp_path / "file").write_text("")
    fails(command(tmp_path, output_dir=tmp_path / "file" / "out"), capsys, "--output_dir", "file")


def test_exit_json_tells_code_and_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text_file(tmp_path)
    fails(command(tmp_path, block_size=1), capsys, "--block_size")
    written = json.loads((tmp_path / "out" / "exit.json").read_text())
    assert written["code"] == 2 and "--block_size" in written["reason"]


def test_train_from_a_script_with_own_rows(tmp_path: Path) -> None:
    from harness.run_clm import train

    config = {
        "model_type": "llama",
        "config_overrides": TINY,
        "tokenizer_name": "bytes",
        "max_steps": 3,
        "learning_rate": "1e-3",
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "output_dir": str(tmp_path / "out"),
    }
    rows = [{"input_ids": list(range(20 + index)), "labels": list(range(20 + index))} for index in range(8)]
    assert train(config, train_dataset=rows) == 0
    losses = [row["loss"] for row in map(json.loads, (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) if "loss" in row]
    assert len(losses) == 3 and losses[2] < losses[0]


def test_yaml_file_and_flags_of_both_spellings(tmp_path: Path) -> None:
    from harness.run_clm import main

    text_file(tmp_path)
    tokens = command(tmp_path, learning_rate=None)
    (tmp_path / "run.yaml").write_text("learning_rate: 2e-5\nmax_steps: 1\nlogging_steps: 1\n")
    assert main(["--config", str(tmp_path / "run.yaml"), *tokens, "--logging-first-step"]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["learning_rate"] == 2e-5 and config["max_steps"] == 2 and config["logging_first_step"] is True


def test_nan_loss_is_skipped_or_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 2 (the third forward, after the dry run's) has an infinite loss: weights stay, the count is shown; "stop" ends the run."""
    from harness.engines import ddp
    from harness.run_clm import main

    text_file(tmp_path)
    original, calls = ddp.micro_batch_loss, {"n": 0}

    def poisoned(*args: object) -> object:
        calls["n"] += 1
        loss = original(*args)  # type: ignore[arg-type]
        return loss * float("inf") if calls["n"] == 3 else loss

    monkeypatch.setattr(ddp, "micro_batch_loss", poisoned)
    assert main(command(tmp_path, max_steps=4, logging_steps=1)) == 0
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    train = [row for row in rows if row["kind"] == "train"]
    assert [row["num_skipped_steps"] for row in train] == [0, 1, 1, 1]
    assert all(row["loss"] > 0 for row in train if row["step"] != 2)  # no NaN weights afterwards
    calls["n"] = 0
    with pytest.raises(AssertionError, match=r"os._exit\(1\)"):
        main(command(tmp_path, max_steps=4, logging_steps=1, nan_policy="stop", output_dir=tmp_path / "out2"))
    assert json.loads((tmp_path / "out2" / "exit.json").read_text())["code"] == 1


def test_the_launcher_of_each_node_learns_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a second node too, where the run's folder may be another one."""
    from harness import run_clm

    monkeypatch.setenv("HARNESS_EXIT_FILE", str(tmp_path / "told.json"))
    monkeypatch.setenv("RANK", "3")
    assert run_clm.main(["--output_dir", str(tmp_path / "out"), "--learnig_rate", "1"]) == 2
    told = json.loads((tmp_path / "told.json").read_text())
    assert (told["code"], told["rank"]) == (2, 3) and "--learnig_rate" in told["reason"]
    assert not (tmp_path / "out").exists()


def test_a_mistyped_command_leaves_the_report_of_a_run_that_has_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from harness.run_clm import main

    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "exit.json").write_text('{"code": 0}')
    assert main(["--learnig_rate", "1", "--output_dir", str(tmp_path)]) == 2
    assert "did you mean --learning_rate?" in capsys.readouterr().err
    assert (tmp_path / "exit.json").read_text() == '{"code": 0}'
    (tmp_path / "config.json").unlink()  # of a command that was wrong before, too
    assert main(["--learnig_rate", "1", "--output_dir", str(tmp_path)]) == 2
    assert json.loads((tmp_path / "exit.json").read_text())["code"] == 2
