"""Command lines, YAML files and dictionaries: every mistake in one message, and nothing said twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.findings import UserError
from harness.parsing import from_config, parse_args

GOOD = ["--model_type", "llama", "--output_dir", "out"]


def lines(tokens: list[str]) -> list[str]:
    """What `parse_args` refuses a command line for."""
    with pytest.raises(UserError) as error:
        parse_args(tokens)
    return [finding.line() for finding in error.value.findings]


def test_all_wrong_values_are_reported_together() -> None:
    found = lines(
        [
            *("--max_steps", "ten", "--learning-rate=fast", "--save_final", "maybe", "--packing", "best_fitt"),
            *("--learnig_rate", "1", "--lora_r", "x", "--block_size", "1", "--model_type", "llama", "--fp16_opt_level", "O1"),
        ]
    )
    packing = "must be one of concat, best_fit, none, not 'best_fitt' -> --packing best_fit"
    assert sorted(found) == sorted(
        [
            "error   --max_steps: must be a whole number, not 'ten' -> see --help",
            "error   --learning_rate: must be a number, not 'fast' -> see --help",
            "error   --save_final: must be true or false, not 'maybe' -> see --help",
            f"error   --packing: {packing}",
            "error   --lora_r: must be a whole number, not 'x' -> see --help",
            "error   --learnig_rate: unknown argument -> did you mean --learning_rate?",
            "error   --block_size: must be at least 2, not 1",
            "error   --output_dir: is missing -> say where the run is written: --output_dir out",
        ]
    )


def test_flags_without_a_value_do_not_hide_the_rest() -> None:
    assert sorted(lines([*GOOD, "--max_steps", "--train_file", "--seed", "x", "--no_save_final=5"])) == [
        "error   --max_steps: expected one argument -> see --help",
        "error   --no_save_final: ignored explicit argument '5' -> see --help",
        "error   --seed: must be a whole number, not 'x' -> see --help",
        "error   --train_file: expected at least one argument -> see --help",
    ]


def test_a_flag_that_is_wrong_or_misspelt_is_not_missed_as_well() -> None:
    assert lines(["--model_type", "llama", "--output_dri", "out"]) == [
        "error   --output_dri: unknown argument -> did you mean --output_dir?"
    ]
    assert lines([*GOOD, "--lora_rr", "8", "--target_modules", "q_proj"]) == [
        "error   --lora_rr: unknown argument -> did you mean --lora_r?"
    ]
    assert lines([*GOOD, "--streaming", "--max_steps", "many"]) == ["error   --max_steps: must be a whole number, not 'many' -> see --help"]


def test_files_and_dictionaries_are_read_by_the_same_rules(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model_type: llama\noutput_dir: out\nmax_steps: ten\nbf16: perhaps\n")
    expected = [
        "error   --max_steps: must be a whole number, not 'ten' -> see --help",
        "error   --bf16: must be true or false, not 'perhaps' -> see --help",
    ]
    assert lines(["--config", str(path)]) == expected
    with pytest.raises(UserError) as error:
        from_config({"model_type": "llama", "output_dir": "out", "max_steps": "ten", "bf16": "perhaps"})
    assert [finding.line() for finding in error.value.findings] == expected


def test_right_values() -> None:
    args = parse_args([*GOOD, "--bf16", "--learning-rate", "1e-4", "--train_file", "a", "b", "--packing", "none", "--save_final", "no"])
    assert (args.train.precision, args.train.learning_rate, args.data.train_file) == ("bf16", 1e-4, ["a", "b"])
    assert (args.data.packing, args.train.save_final, args.train.max_steps) == ("none", False, -1)
    assert args.typed == {"model_type", "output_dir", "bf16", "learning_rate", "train_file", "packing", "save_final"}


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("seed", 10**40, "must be at most 4294967295, not 41 digits"),
        ("seed", -1, "must be at least 0, not -1"),
        ("data_seed", 2**32, "must be at most 4294967295, not 4294967296"),
        ("ddp_timeout", 0, "must be at least 1, not 0"),
        ("ddp_timeout", 10**18, "must be at most 1000000000, not 1000000000000000000"),
        ("per_device_train_batch_size", 10**18, "must be at most 1000000, not 1000000000000000000"),
        ("gradient_accumulation_steps", 10**18, "must be at most 1000000, not 1000000000000000000"),
        ("dataloader_num_workers", 10**6, "must be at most 1024, not 1000000"),
        ("block_size", 10**20, "must be at most 9007199254740992, not 21 digits"),
        ("learning_rate", "1e999", "must be a finite number, not inf"),
        ("weight_decay", "inf", "must be a finite number, not inf"),
        ("num_train_epochs", "nan", "must be a finite number, not nan"),
        ("max_grad_norm", "nan", "must be a finite number, not nan"),
        ("output_dir", "x" * 300, "is too long: a name in it has more than 255 bytes"),
        ("output_dir", "/long" * 1000, "is too long: more than 4095 bytes"),
        ("train_file", "\u00e4" * 128, "is too long: a name in it has more than 255 bytes"),
    ],
)
def test_values_that_no_machine_can_take(flag: str, value: object, message: str) -> None:
    given = {"model_type": "gpt2", "output_dir": "out", flag: value}
    with pytest.raises(UserError) as caught:
        parse_args([token for name, text in given.items() for token in (f"--{name}", str(text))])
    assert [(finding.key, finding.message) for finding in caught.value.findings] == [(f"--{flag}", message)]


def test_values_at_their_limits_are_taken() -> None:
    least = parse_args(["--model_type", "gpt2", "--output_dir", "x" * 255, "--seed", "0", "--ddp_timeout", "1", "--max_grad_norm", "inf"])
    assert (least.train.seed, least.train.ddp_timeout, least.train.max_grad_norm) == (0, 1, float("inf"))
    assert parse_args(["--model_type", "gpt2", "--output_dir", "out", "--seed", str(2**32 - 1)]).train.seed == 2**32 - 1


def test_control_characters_of_what_was_typed_are_written_out() -> None:
    with pytest.raises(UserError) as caught:
        parse_args(["--model_type", "gpt2", "--output_dir", "out", "--\x1b[31mred", "\u202e\x9b1m"])
    assert caught.value.findings[0].line() == "error   --\\x1b[31mred: unknown argument -> see --help for all names"
    assert not any(sign in str(caught.value) for sign in "\x1b\x9b\u202e")


def test_a_list_for_a_flag_of_one_value_names_the_flag(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model_type: llama\noutput_dir: out\nlearning_rate: [1, -2]\ntrain_file: [a.txt, b.txt]\n")
    several = "error   --learning_rate: takes one value, not 2: 1 -2 -> give one value; quote a value with blanks"
    assert lines(["--config", str(tmp_path / "run.yaml")]) == [several]
    assert lines([*GOOD, "--learning_rate", "1", "-2"]) == [several]
    with pytest.raises(UserError, match=r"--bf16: takes one value, not 2: True x"):
        from_config({"model_type": "llama", "output_dir": "out", "bf16": [True, "x"]})
