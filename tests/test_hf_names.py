"""The table of HF's names: none missing, none stale, and users' older commands parse."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from harness import hf_names
from harness.args import argument_names
from harness.findings import Finding, UserError
from harness.hf_names import NAMES, Name, translate
from harness.parsing import parse_args

# Fields of TrainingArguments that can be set, in the first and last minor release of transformers that has them (of 4.40 to 5.24).
TRAINING_ARGUMENTS = {
    "4.40 - 5.24": """
        output_dir do_train do_eval do_predict prediction_loss_only per_device_train_batch_size per_device_eval_batch_size
        gradient_accumulation_steps eval_accumulation_steps eval_delay learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon
        max_grad_norm num_train_epochs max_steps lr_scheduler_type lr_scheduler_kwargs warmup_steps log_level log_level_replica
        log_on_each_node logging_strategy logging_first_step logging_steps logging_nan_inf_filter save_strategy save_steps
        save_total_limit save_on_each_node save_only_model use_cpu seed data_seed bf16 fp16 bf16_full_eval fp16_full_eval tf32
        local_rank ddp_backend debug dataloader_drop_last eval_steps dataloader_num_workers dataloader_prefetch_factor run_name
        disable_tqdm remove_unused_columns label_names load_best_model_at_end metric_for_best_model greater_is_better
        ignore_data_skip fsdp fsdp_config accelerator_config deepspeed label_smoothing_factor optim optim_args length_column_name
        report_to ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers dataloader_pin_memory
        dataloader_persistent_workers skip_memory_metrics push_to_hub resume_from_checkpoint hub_model_id hub_strategy hub_token
        hub_private_repo hub_always_push gradient_checkpointing gradient_checkpointing_kwargs eval_do_concat_batches
        auto_find_batch_size full_determinism ddp_timeout torch_compile torch_compile_backend torch_compile_mode
        include_num_input_tokens_seen neftune_noise_alpha optim_target_modules""",
    "4.40 - 4.50": "evaluation_strategy dispatch_batches split_batches",
    "4.40 - 4.56": "use_ipex",
    "4.40 - 4.57": """
        overwrite_output_dir per_gpu_train_batch_size per_gpu_eval_batch_size save_safetensors no_cuda use_mps_device jit_mode_eval
        fp16_opt_level half_precision_backend tpu_num_cores tpu_metrics_debug past_index fsdp_min_num_params
        fsdp_transformer_layer_cls_to_wrap adafactor use_legacy_prediction_loop include_inputs_for_metrics fp16_backend
        push_to_hub_model_id push_to_hub_organization push_to_hub_token mp_parameters torchdynamo ray_scope
        include_tokens_per_second""",
    "4.40 - 5.1": "group_by_length",
    "4.40 - 5.14": "warmup_ratio logging_dir",
    "4.41 - 5.24": "eval_strategy restore_callback_states_from_checkpoint batch_eval_metrics",
    "4.42 - 5.24": "eval_on_start",
    "4.43 - 5.24": "torch_empty_cache_steps eval_use_gather_object",
    "4.45 - 5.24": "use_liger_kernel",
    "4.46 - 5.24": "include_for_metrics",
    "4.47 - 5.24": "average_tokens_across_devices",
    "4.50 - 4.51": "tp_size",
    "4.53 - 5.24": "hub_revision liger_kernel_config",
    "4.56 - 5.24": "parallelism_config",
    "4.57 - 5.24": "project trackio_space_id",
    "5.0 - 5.24": "enable_jit_checkpoint use_cache",
    "5.2 - 5.24": "train_sampling_strategy",
    "5.8 - 5.24": "trackio_bucket_id trackio_static_space_id ddp_static_graph",
    "5.16 - 5.24": "dataloader_multiprocessing_context dataloader_in_order",
    "5.24 - 5.24": "activation_checkpointing activation_checkpointing_kwargs",
}
RUN_CLM = """
    model_name_or_path model_type config_overrides config_name tokenizer_name cache_dir use_fast_tokenizer model_revision token
    use_auth_token trust_remote_code torch_dtype dtype low_cpu_mem_usage dataset_name dataset_config_name train_file validation_file
    max_train_samples max_eval_samples streaming block_size overwrite_cache validation_split_percentage preprocessing_num_workers
    keep_linebreaks"""


def every_name() -> list[str]:
    return [name for text in (*TRAINING_ARGUMENTS.values(), RUN_CLM) for name in text.split()]


def test_the_list_is_whole() -> None:
    assert sum(len(text.split()) for text in TRAINING_ARGUMENTS.values()) == 147
    assert len(set(every_name())) == len(every_name()) == 173


def test_no_name_is_missing() -> None:
    assert [name for name in every_name() if name not in NAMES and name not in argument_names()] == []


def test_the_installed_release_has_no_new_name() -> None:
    import dataclasses

    from transformers import TrainingArguments

    names = [field.name for field in dataclasses.fields(TrainingArguments) if field.init]
    assert [name for name in names if name not in every_name()] == []


def test_no_line_of_the_table_is_stale() -> None:
    """A name that has become a real flag, or that HF never had, does not belong in the table."""
    assert [name for name in NAMES if name in argument_names()] == []
    assert [name for name in NAMES if name not in every_name()] == []


def test_every_line_says_what_to_do() -> None:
    for name, rule in NAMES.items():
        assert (rule.reason and rule.reason[0].islower()) or rule.reason[:4] in ("NCCL", "DDP ", "TPUs", "FSDP", "Sage"), name
        assert (rule.fate == "refused") == bool(rule.fix), name
        assert (rule.fate == "renamed") == bool(rule.to), name
        assert not rule.to or rule.to in argument_names(), name
    assert all(flag in argument_names() for flag in hf_names.VALUES)


# ---- how a command line is rewritten, with a table of its own ----

TABLE = {
    "old": Name("renamed", "older name", to="new"),
    "switch": Name("renamed", "older switch", to="kind", value="special"),
    "idle": Name("no_effect", "nothing depends on it"),
    "gone": Name("refused", "there is none", fix="leave it out", neutral=("0", "0.0")),
}
OLD = Finding("info", "--old", "is --new here: older name")
SWITCH = Finding("info", "--switch", "is --kind special here: older switch")
IDLE = Finding("info", "--idle", "has no effect here: nothing depends on it")
GONE = Finding("error", "--gone", "is not supported: there is none", "leave it out")


@pytest.mark.parametrize(
    ("line", "expected", "findings"),
    [
        ("--old 1 --x 2", "--new=1 --x 2", [OLD]),
        ("--old=1 --x", "--new=1 --x", [OLD]),
        ("--old --x", "--new --x", [OLD]),
        ("--old False", "--new=False", [OLD]),
        ("--old -1", "--new=-1", [OLD]),
        ("--switch --x", "--kind=special --x", [SWITCH]),
        ("--switch True", "--kind=special", [SWITCH]),
        ("--switch False --x 1", "--x 1", []),
        ("--idle --x 1", "--x 1", [IDLE]),
        ("--idle a b c --x 1", "--x 1", [IDLE]),
        ("--idle=a --x 1", "--x 1", [IDLE]),
        ("--idle -1 --x 1", "--x 1", [IDLE]),
        ("--idle 1 --idle 2", "", [IDLE]),
        ("--no_idle --x 1", "--x 1", [IDLE]),
        ("--no-idle --x", "--x", [IDLE]),
        ("--gone --x", "--x", [GONE]),
        ("--gone 1 --x", "--x", [GONE]),
        ("--gone=secret", "", [GONE]),
        ("--gone False --x 1", "--x 1", []),
        ("--gone 0.0", "", []),
        ("--gone=", "", []),
        ("--no_gone", "", []),
        ("--gone 1 --idle --old 2", "--new=2", [GONE, IDLE, OLD]),
        ("--x-y 1 2 -3 --no_x", "--x-y 1 2 -3 --no_x", []),
        ("file.json --x", "file.json --x", []),
        ("--kind=Plain", "--kind=ours", []),
        ("--kind plain --x", "--kind=ours --x", []),
        ("--kind --x", "--kind=bare --x", []),
        ("--kind other", "--kind other", []),
        ("--kind=", "--kind=bare", []),
    ],
)
def test_translate(line: str, expected: str, findings: list[Finding]) -> None:
    values = {"kind": {"plain": "ours", "": "bare"}}
    assert translate(shlex.split(line), ["new", "x", "x_y", "kind"], TABLE, values) == (shlex.split(expected), findings)


def test_a_name_we_take_is_left_alone() -> None:
    assert translate(["--old", "1", "--no_idle"], ["old", "idle"], TABLE, {}) == (["--old", "1", "--no_idle"], [])


# ---- whole commands ----


def test_a_command_of_transformers_4() -> None:
    args = parse_args(
        shlex.split(
            "--model_name_or_path gpt2 --train_file a.txt --do_train --do_eval --per_gpu_train_batch_size 4 --evaluation_strategy steps "
            "--eval_steps 50 --no_cuda --fp16_opt_level O1 --adafactor --overwrite_output_dir --logging_dir logs --save_safetensors False "
            "--warmup_ratio 0.1 --report_to none --push_to_hub False --label_smoothing_factor 0.0 --past_index -1 --use_fast_tokenizer "
            "--tpu_metrics_debug False --no_dataloader_pin_memory --torch_dtype auto --low_cpu_mem_usage --group_by_length False "
            "--output_dir out"
        )
    )
    train = args.train
    assert (train.per_device_train_batch_size, train.eval_strategy, train.eval_steps, train.use_cpu) == (4, "steps", 50.0, True)
    assert (train.optim, train.overwrite_output_dir, train.warmup_ratio, train.output_dir) == ("adafactor", True, 0.1, "out")
    assert {"eval_strategy", "per_device_train_batch_size", "use_cpu", "optim"} <= args.typed
    assert all(note.severity == "info" for note in args.notes)


def test_a_command_of_transformers_5() -> None:
    args = parse_args(
        shlex.split(
            "--model_name_or_path gpt2 --dataset_name a --output_dir out --dtype bfloat16 --activation_checkpointing True --bf16 True "
            "--average_tokens_across_devices True --optim adamw_torch_8bit --hub_private_repo --project mine --torch_compile False"
        )
    )
    assert (args.model.torch_dtype, args.train.activation_checkpointing) == ("bfloat16", "full")
    assert (args.train.precision, args.train.optim) == ("bf16", "adamw_8bit")


def test_refused_names_come_together_and_without_their_values() -> None:
    with pytest.raises(UserError) as caught:
        parse_args(shlex.split("--token hf_secret --tp_size 4 --learnig_rate 1 --model_name_or_path gpt2 --output_dir out"))
    text = str(caught.value)
    assert [finding.key for finding in caught.value.findings] == ["--token", "--tp_size", "--learnig_rate"]
    assert "hf_secret" not in text and "HF_TOKEN" in text and "did you mean --learning_rate?" in text


def test_a_file_may_hold_older_names(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("no_cuda: true\nevaluation_strategy: epoch\ninclude_for_metrics: [loss, inputs]\nfsdp_config: {}\nadafactor: false\n")
    args = parse_args(["--config", str(path), "--model_name_or_path", "gpt2", "--output_dir", "out"])
    assert (args.train.use_cpu, args.train.eval_strategy, args.train.optim) == (True, "epoch", "adamw_torch_fused")


def test_one_file_and_nothing_else(tmp_path: Path) -> None:
    """HF's scripts take a JSON file alone; the deepspeed launcher puts its --local_rank before it."""
    path = tmp_path / "args.json"
    path.write_text('{"model_name_or_path": "gpt2", "output_dir": "out", "learning_rate": 1e-05, "no_cuda": true, "logging_dir": null}')
    for extra in ([], ["--local_rank=1"]):
        args = parse_args([*extra, str(path)])
        assert (args.train.learning_rate, args.train.use_cpu, args.train.local_rank) == (1e-5, True, 1 if extra else -1)
    with pytest.raises(UserError, match="a value without a flag before it"):
        parse_args([str(path), "--seed", "1"])
