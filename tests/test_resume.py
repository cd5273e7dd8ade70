"""What continues a run and what does not; how a state is taken over; when a run stops early. No launch, no model of size."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness import run_folder
from harness.args import TrainArguments
from harness.engines import dcp
from harness.engines.base import load_schedule, place_schedule
from harness.findings import UserError
from harness.host_copies import HostCopies
from harness.parsing import parse_args
from harness.resume import _trainer_run, check, compare, config_facts, loads_directly, template_facts
from harness.stored_state import DcpState, TrainerState, engine_family, whole
from harness.trainer import Trainer, TrainState

RUN: dict[str, Any] = {
    "engine": "zero3",
    "num_processes": 4,
    "global_batch_size": 32,
    "steps_per_epoch": 100,
    "max_steps": 300,
    "data_fingerprint": "abc",
    "data_seed": 42,
    "data_order": "random",
    "precision": "bf16",
    "model_config": {"hidden_size": 64, "rope_parameters": {"rope_theta": 1e4}},
    "template": {"zero_optimization": {"stage": 3, "sub_group_size": 1000}, "gradient_clipping": 1.0},
    "packages": {"torch": "2.13.0", "transformers": "5.24.0"},
}


def changed(path: str, value: Any) -> dict[str, Any]:
    run = copy.deepcopy(RUN)
    *parents, name = path.split(".")
    place = run
    for parent in parents:
        place = place[parent]
    place[name] = value
    return run


FORCE = "; --force_resume goes on all the same"
DIFFERENCES = [
    ("global_batch_size", 16, "error", "the checkpoint had 32 samples per step, this run has 16"),
    ("data_fingerprint", "abd", "error", "the training data or its preparation has changed"),
    ("data_seed", 7, "error", "the order of samples has changed: seed 42 -> 7"),
    ("data_order", "sequential", "error", "the order of samples has changed: random -> sequential"),
    ("precision", "fp32", "error", "precision bf16 -> fp32"),
    (
        "model_config.rope_parameters.rope_theta",
        2.5,
        "error",
        "the model's config has changed: rope_parameters.rope_theta 10000.0 -> 2.5",
    ),
    ("template.gradient_clipping", 0.5, "error", "the template has changed: gradient_clipping 1.0 -> 0.5"),
    ("template.zero_optimization.sub_group_size", 10, "warning", "the template has changed: zero_optimization.sub_group_size 1000 -> 10"),
    ("packages.torch", "2.12.0", "warning", 'package versions have changed: torch "2.13.0" -> "2.12.0"'),
    ("max_steps", 400, "warning", "the run had 300 steps, now 400"),
]


def test_adapters_of_another_shape_are_refused_whatever_is_forced() -> None:
    """Else the run ends in torch's "Size mismatch between saved torch.Size([4, 32])" after it has loaded everything."""
    adapters = {"r": 4, "rank_pattern": {}, "modules": ["q_proj"], "modules_to_save": [], "use_dora": False}
    saved, now = {**RUN, "adapters": adapters}, {**RUN, "adapters": {**adapters, "r": 8}}
    (finding,) = compare(saved, now)
    assert (finding.severity, finding.message) == ("error", "the adapters have other shapes: r 4 -> 8")
    with pytest.raises(UserError, match="r 4 -> 8"):
        check(saved, now, force=True)
    check(saved, {**saved}, force=False)
    check(RUN, now, force=False)  # a checkpoint from before they were written down


@pytest.mark.parametrize(("path", "value", "severity", "message"), DIFFERENCES)
def test_each_difference_is_named_and_refused_where_the_result_would_differ(path: str, value: Any, severity: str, message: str) -> None:
    now = changed(path, value)
    (finding,) = compare(RUN, now)
    assert (finding.severity, finding.message) == (severity, message)
    assert finding.fix.endswith(FORCE) == (severity == "error")
    if severity == "error":
        with pytest.raises(UserError):
            check(RUN, now, force=False)
    else:
        check(RUN, now, force=False)
    check(RUN, now, force=True)


def test_all_differences_come_together_and_equal_runs_have_none() -> None:
    now = changed("global_batch_size", 16) | {"data_seed": 1, "precision": "fp32"}
    with pytest.raises(UserError) as caught:
        check(RUN, now, force=False)
    assert [finding.message.split()[0] for finding in caught.value.findings] == ["the", "the", "precision"]
    assert compare(RUN, RUN) == []
    assert compare({"global_batch_size": 32}, RUN) == []  # an older checkpoint says less


def test_another_engine_or_number_of_processes_is_no_difference_and_needs_no_equal_template() -> None:
    assert compare(RUN, RUN | {"engine": "fsdp", "num_processes": 2, "template": {"cpu_offload": False}}) == []


LAYOUTS = [
    ({}, True),
    ({"num_processes": 2}, False),
    ({"engine": "zero2"}, False),
    ({"engine": "fsdp"}, False),
    ({"template": {"zero_optimization": {"stage": 3, "sub_group_size": 10}}}, False),
    ({"template": {"zero_optimization": {"stage": 3, "sub_group_size": 1000, "offload_optimizer": {"device": "cpu"}}}}, True),
]


@pytest.mark.parametrize(("difference", "direct"), LAYOUTS)
def test_deepspeed_reads_its_files_only_in_the_same_layout(difference: dict[str, Any], direct: bool) -> None:
    assert loads_directly(RUN, RUN | difference) is direct


def test_torchs_format_is_read_by_all_its_engines_on_any_number_of_ranks() -> None:
    for engine in ("ddp", "fsdp", "device_map"):
        assert loads_directly({"engine": "fsdp", "num_processes": 2}, {"engine": engine, "num_processes": 4})
    assert [engine_family(name) for name in ("ddp", "fsdp", "device_map", "zero1", "zero3")] == ["dcp"] * 3 + ["zero"] * 2


def test_facts_leave_out_what_does_not_change_a_result() -> None:
    from transformers import LlamaConfig

    one, other = LlamaConfig(hidden_size=32), LlamaConfig(hidden_size=32, use_cache=False, dtype="bfloat16")
    assert config_facts(one) == config_facts(other)
    assert config_facts(one) != config_facts(LlamaConfig(hidden_size=64))
    assert template_facts({"train_batch_size": 8, "bf16": {"enabled": True}, "path": Path("a")}) == {"bf16": {"enabled": True}, "path": "a"}


def test_the_trainers_steps_per_epoch_must_be_ours() -> None:
    assert _trainer_run({"global_step": 50, "epoch": 0.5, "max_steps": 200}, 100) == {"max_steps": 200}
    assert _trainer_run({"global_step": 50, "epoch": 0.5, "max_steps": 200}, 101) == {"max_steps": 200}  # a shorter last step
    with pytest.raises(UserError, match=r"the Trainer made 100\.0 steps per epoch, this run 50"):
        _trainer_run({"global_step": 50, "epoch": 0.5}, 50)


# ------------------------------------------------------------------------------------------------------------- taking over


def trained_model(steps: int) -> tuple[torch.nn.Linear, torch.optim.AdamW, Any]:
    torch.manual_seed(0)
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(steps):
        module(torch.full((1, 3), float(step + 1))).sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return module, optimizer, scheduler


class Memory:
    """A stored state in memory, flat as DeepSpeed's stage 3 stores it."""

    def __init__(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.parts = {
            name: {"weight": parameter.detach().clone().flatten()}
            | {kind: value.clone().flatten() for kind, value in optimizer.state[parameter].items() if kind != "step"}
            for name, parameter in module.named_parameters()
        }
        self.names, self.num_updates = list(self.parts), 3

    def get(self, name: str, kind: str) -> torch.Tensor:
        return self.parts[name][kind]


def test_weights_averages_and_schedule_taken_over_go_on_as_the_original() -> None:
    original, optimizer, scheduler = trained_model(3)
    copied, other, other_scheduler = trained_model(0)
    assert dcp.adopt(copied, other, Memory(original, optimizer)) == []  # type: ignore[arg-type]
    place_schedule(other_scheduler, 3)
    assert other_scheduler.get_last_lr() == scheduler.get_last_lr() == [0.025]
    for module, chosen in ((original, optimizer), (copied, other)):
        module(torch.ones(1, 3)).sum().backward()
        chosen.step()
    assert all(torch.equal(left, right) for left, right in zip(original.parameters(), copied.parameters(), strict=True))


def test_a_loaded_schedule_has_the_rates_of_this_runs_length() -> None:
    def schedule(total: int) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total)

    optimizer, saved = schedule(4)
    for _ in range(4):
        optimizer.step()
        saved.step()
    assert saved.get_last_lr() == [0.0]
    optimizer, longer = schedule(8)
    load_schedule(longer, saved.state_dict())
    assert longer.get_last_lr() == [0.5] and optimizer.param_groups[0]["lr"] == 0.5
    longer.step()
    assert longer.get_last_lr() == [0.375]


def test_what_cannot_be_taken_over_is_named() -> None:
    original, optimizer, _ = trained_model(3)
    source = Memory(original, optimizer)
    sgd = torch.optim.SGD(original.parameters(), lr=0.1)
    assert dcp.adopt(original, sgd, source) == ["the optimizer's state (SGD has another than Adam's)"]  # type: ignore[arg-type]
    source.num_updates = None  # type: ignore[assignment]
    assert dcp.adopt(original, optimizer, source) == ["the optimizer's state"]  # type: ignore[arg-type]
    source.names = ["bias"]
    with pytest.raises(RuntimeError, match=r"the checkpoint has no weights of weight"):
        dcp.adopt(original, optimizer, source)  # type: ignore[arg-type]


def test_another_models_tensor_is_refused() -> None:
    assert whole(torch.arange(6.0), (2, 3)).shape == (2, 3)
    with pytest.raises(RuntimeError, match=r"shape \(3, 2\) where the model has \(2, 3\)"):
        whole(torch.zeros(3, 2), (2, 3))
    with pytest.raises(RuntimeError):
        whole(torch.zeros(7), (2, 3))


def test_a_checkpoint_of_torch_is_read_tensor_by_tensor_without_a_job(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as checkpoint

    module, optimizer, _ = trained_model(3)
    checkpoint.save(dcp._state(module, optimizer), checkpoint_id=str(tmp_path), no_dist=True)
    state = DcpState(tmp_path)
    assert sorted(state.names) == ["bias", "weight"] and state.num_updates == 3
    assert torch.equal(state.get("weight", "weight"), module.weight)
    assert torch.equal(state.get("bias", "exp_avg_sq"), optimizer.state[module.bias]["exp_avg_sq"])


# ---------------------------------------------------------------------------------------------------------------- copies


def test_ranks_that_hold_the_same_tensors_share_the_writing() -> None:
    state = {
        "model": {"big": torch.zeros(100), "small": torch.zeros(40), "medium": torch.zeros(50)},
        "optimizer": {"big": torch.zeros(100), "lr": 0.1},
    }
    shares = [dcp.own_share(state, rank, 2) for rank in range(2)]
    assert [sorted(share["model"]) for share in shares] == [["big", "medium"], ["small"]]
    assert [sorted(share["optimizer"]) for share in shares] == [["lr"], ["big", "lr"]]
    assert dcp.own_share(state, 0, 1) == state


def test_host_copies_are_their_own_and_keep_shapes_and_ties() -> None:
    weight = torch.arange(6.0).view(2, 3)
    tree = {"a": weight, "tied": weight.detach(), "column": weight[:, 1], "shape": weight.shape, "n": 3, "empty": torch.zeros(0)}
    copies = HostCopies().copy("file", tree)
    weight.zero_()
    assert copies["a"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert copies["tied"].data_ptr() == copies["a"].data_ptr()
    assert copies["column"].tolist() == [1.0, 4.0] and copies["column"].untyped_storage().nbytes() == 8
    assert type(copies["shape"]) is torch.Size and copies["n"] == 3 and copies["empty"].numel() == 0


# ---------------------------------------------------------------------------------------------------- best and early stopping


def evaluations(train: TrainArguments, values: list[float]) -> tuple[TrainState, list[bool]]:
    """The state after evaluations with these losses at steps 1, 2, ..., and after each whether the run stops."""
    state = TrainState()
    trainer = SimpleNamespace(train_args=train, state=state, metrics=SimpleNamespace(log=lambda *args, **kwargs: None))
    stops = []
    for step, value in enumerate(values, start=1):
        state.step = step
        Trainer.note_evaluation(trainer, {"eval_loss": value, "eval_perplexity": -value}, state)  # type: ignore[arg-type]
        stops.append(Trainer.stops_early(trainer))  # type: ignore[arg-type]
    return state, stops


def test_early_stopping_counts_evaluations_without_enough_improvement() -> None:
    state, stops = evaluations(TrainArguments(early_stopping_patience=2), [3.0, 2.0, 2.5, 1.9, 1.95, 2.0])
    assert stops == [False, False, False, False, False, True]
    assert (state.best_step, state.best_metric) == (4, 1.9)
    state, stops = evaluations(TrainArguments(early_stopping_patience=2, early_stopping_threshold=0.5), [3.0, 2.0, 1.9, 1.8])
    assert stops == [False, False, False, True]
    assert (state.best_step, state.best_metric) == (4, 1.8)  # the best is the best, enough or not
    assert evaluations(TrainArguments(), [1.0, 2.0, 3.0, 4.0])[1] == [False] * 4


def test_a_loss_that_is_not_a_number_is_no_improvement() -> None:
    state, stops = evaluations(TrainArguments(early_stopping_patience=2), [2.0, float("nan"), float("nan")])
    assert stops == [False, False, True] and state.best_step == 1
    state, stops = evaluations(TrainArguments(early_stopping_patience=1), [float("nan"), 1.0])
    assert stops == [True, False] and state.best_step == 2


@pytest.mark.parametrize("name", ["eval_perplexity", "perplexity"])
def test_the_metric_decides_by_either_name(name: str) -> None:
    assert evaluations(TrainArguments(metric_for_best_model=name), [1.0, 3.0, 2.0])[0].best_step == 2
    assert evaluations(TrainArguments(metric_for_best_model=name, greater_is_better=True), [1.0, 3.0, 2.0])[0].best_step == 1


def test_early_stopping_needs_evaluations_and_sense() -> None:
    base = ["--model_type", "llama", "--train_file", "a.txt", "--output_dir", "out"]
    with pytest.raises(UserError) as caught:
        parse_args([*base, "--early_stopping_patience", "0", "--early_stopping_threshold", "-1"])
    assert [(finding.key, finding.message) for finding in caught.value.findings] == [
        ("--early_stopping_patience", "must be at least 1, not 0"),
        ("--early_stopping_threshold", "must not be negative, but is -1.0"),
        ("--early_stopping_patience", "needs evaluations during training"),
    ]
    with pytest.raises(UserError, match="has no effect alone"):
        parse_args([*base, "--early_stopping_threshold", "0.1"])
    assert parse_args([*base, "--early_stopping_patience", "3", "--eval_strategy", "steps"]).train.early_stopping_patience == 3


def test_a_folder_takes_the_same_run_cut_otherwise(tmp_path: Path) -> None:
    """What changes nothing of what is computed may change; other changes are named, with all ways to go on."""

    def start(*more: str) -> list[Any]:
        return run_folder.prepare(tmp_path, parse_args(["--model_type", "llama", "--output_dir", str(tmp_path), *more]))

    tmp_path.joinpath("config.json").write_text(json.dumps(parse_args(["--model_type", "llama", "--output_dir", "x"]).to_dict()))
    assert start("--sequence_parallel_size", "2", "--activation_checkpointing", "full") == []
    assert start("--oom_standby", "on", "--oom_snapshot", "--snapshot_steps", "3") == []
    with pytest.raises(UserError, match=r"holds another run \(learning_rate 5e-05 -> 0.1\)") as error:
        start("--learning_rate", "0.1")
    assert "--force_resume" in error.value.findings[0].fix and "--overwrite_output_dir" in error.value.findings[0].fix
    assert "learning_rate" in start("--learning_rate", "0.1", "--force_resume")[0].message


@pytest.mark.parametrize(
    ("names", "refused"),
    [
        (["ladder.json", "config.json.tmp", "stacks-rank-1.txt", "nccl-rank-0", ".writable", "exit.json"], ""),
        (["thesis.tex"], "thesis.tex"),
        (["config.json", "final"], "config.json, final"),
    ],
)
def test_a_folder_of_a_start_that_was_killed_is_taken_and_a_users_is_not(names: list[str], refused: str, tmp_path: Path) -> None:
    """Until config.json is there planning and loading pass. A config.json may be a model's, or anybody's: it has none of our names."""
    for name in names:
        tmp_path.joinpath(name).write_text(json.dumps({"model_type": "llama", "hidden_size": 8}))
    args = parse_args(["--model_type", "llama", "--output_dir", str(tmp_path)])
    if not refused:
        assert run_folder.prepare(tmp_path, args) == []
        return
    with pytest.raises(UserError, match=re.escape(f"is not empty and holds no run of this kind ({refused})")):
        run_folder.prepare(tmp_path, args)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


def trainer_folder(folder: Path, optimizer: Any) -> Path:
    """What transformers' Trainer leaves of a model of two weights; the optimizer's file holds bytes as they are, anything else by torch."""
    from safetensors.torch import save_file

    folder.mkdir()
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 3}))
    save_file({"first": torch.ones(2), "second": torch.ones(3)}, folder / "model.safetensors")
    if isinstance(optimizer, bytes):
        (folder / "optimizer.pt").write_bytes(optimizer)
    elif optimizer is not None:
        torch.save(optimizer, folder / "optimizer.pt")
    return folder


def averages(size: int) -> dict[str, Any]:
    return {"step": torch.tensor(3.0), "exp_avg": torch.full((size,), 0.5), "exp_avg_sq": torch.ones(size)}


@pytest.mark.parametrize(
    ("optimizer", "problem"),
    [
        ({"state": {0: averages(2), 1: averages(3)}, "param_groups": [{"params": [0, 1]}]}, None),
        (None, "there is no optimizer.pt"),
        (b"cut off", "optimizer.pt cannot be read safely"),
        (b"", "optimizer.pt cannot be read safely"),
        ([1, 2], "optimizer.pt holds no optimizer's state (TypeError"),
        ({"state": {}}, "optimizer.pt holds no optimizer's state (KeyError"),
        ({"state": {0: averages(2), 1: averages(4)}, "param_groups": [{"params": [0, 1]}]}, "its state number 1 does not fit second"),
        ({"state": {0: averages(2), 1: None}, "param_groups": [{"params": [0, 1]}]}, "optimizer.pt holds no optimizer's state (TypeError"),
    ],
)
def test_an_optimizer_of_the_trainer_is_taken_whole_or_not_at_all(optimizer: Any, problem: str | None, tmp_path: Path) -> None:
    folder = trainer_folder(tmp_path / "checkpoint-3", optimizer)
    source = TrainerState(folder, {"first": (2,), "second": (3,)}, [["first", "second"]])
    assert source.num_updates == (3 if problem is None else None)
    assert sorted(source.averages) == (["first", "second"] if problem is None else [])
    assert source.problem is None if problem is None else str(source.problem).startswith(problem)


def test_damaged_weights_of_the_trainer_are_wrong_input(tmp_path: Path) -> None:
    folder = trainer_folder(tmp_path / "checkpoint-3", None)
    (folder / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(UserError, match=f"--resume_from_checkpoint: {folder}/model.safetensors cannot be read: "):
        TrainerState(folder, {}, [])


def test_a_folder_that_is_no_checkpoint_is_told_from_an_unfinished_one(tmp_path: Path) -> None:
    from harness.checkpoint_files import no_checkpoint

    run = tmp_path / "out"
    for step in (5, 40, 300):
        (run / f"checkpoint-{step}").mkdir(parents=True)
    (run / "checkpoint-5/COMPLETE").touch()
    (run / "checkpoint-40/COMPLETE").touch()
    assert no_checkpoint(run) == (f"{run} is no checkpoint, it holds 2", f"the newest one: {run}/checkpoint-40")
    assert no_checkpoint(run / "checkpoint-300") is None  # still being written: said with its own words
    (run / "final").mkdir()
    (run / "final/config.json").write_text("{}")
    nothing = "a folder like out/checkpoint-500, or 'latest' for the newest usable one"
    assert no_checkpoint(run / "final") == (f"{run}/final is no checkpoint and holds none", nothing)
    assert no_checkpoint(Path("/")) == ("/ is no checkpoint and holds none", nothing)
    assert no_checkpoint(trainer_folder(tmp_path / "renamed", None)) is None
