"""Processes that share samples: losses are those of one process, whatever engine and architecture, and whoever runs out of memory."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_main_job import DS, make_model_folder
from tests.faults.fork_ranks import ForkServer
from tests.launching import Result

STEPS, GLOBAL_BATCH = 6, 8


@pytest.fixture(scope="module")
def job(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process. Samples of 63 tokens, which two processes cannot share evenly, with cuts between documents in both slices."""
    folder = tmp_path_factory.mktemp("sequence")
    make_model_folder(folder / "model")
    (folder / "data.txt").write_text("".join(f"line {number} of a text\n" for number in range(600)))
    result = run(server, folder, "one", 1, 8)
    assert result.returncode == 0, result.stdout
    return {"folder": folder, "result": result}


def run(server: ForkServer, folder: Path, name: str, num_processes: int, micro: int, *more: str, injected: str = "") -> Result:
    size = int(more[more.index("--sequence_parallel_size") + 1]) if "--sequence_parallel_size" in more else 1
    values = {
        "model_name_or_path": folder / "model",
        "train_file": folder / "data.txt",
        "text_mode": "line",
        "block_size": 63,
        "validation_split_percentage": 10,
        "per_device_train_batch_size": micro,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": GLOBAL_BATCH * size // (num_processes * micro),
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "precision": "fp32",
        "save_steps": 3,
        "data_cache_dir": folder / "cache",
        "output_dir": folder / name,
    }
    tokens = [*(token for key, value in values.items() for token in (f"--{key}", str(value))), *more]
    lives = len(list(folder.glob(f"{name}-life-*")))
    environ = {"HARNESS_TEST_OOM": injected}
    return server.run(tokens, num_processes, folder / f"{name}-life-{lives}", environment=environ, timeout_s=240)


def figures(result: Result) -> list[list[float]]:
    """Of each step: loss, gradient norm, tokens; of the evaluation: loss, tokens."""
    names = {"train": ("loss", "grad_norm", "num_input_tokens", "num_label_tokens"), "eval": ("eval_loss", "eval_num_label_tokens")}
    return [[row[name] for name in names[row["kind"]]] for row in result.metrics() if row["kind"] in names]


def check(result: Result, job: dict[str, Any]) -> None:
    assert result.returncode == 0, result.stdout
    expected = figures(job["result"])
    assert len(expected) == STEPS + 1
    for ours, theirs in zip(figures(result), expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert "samples are shared by 2 processes each" in result.stdout


SHARED = ("--sequence_parallel_size", "2")


def test_ddp_has_the_losses_of_one_process(server: ForkServer, job: dict[str, Any]) -> None:
    check(run(server, job["folder"], "ddp", 2, 4, *SHARED, "--attn_implementation", "eager"), job)


def test_fsdp_has_the_losses_of_one_process_and_goes_on_from_its_checkpoint(server: ForkServer, job: dict[str, Any]) -> None:
    folder = job["folder"]
    more = (*SHARED, "--fsdp", "full_shard", "--gradient_checkpointing")
    check(run(server, folder, "fsdp", 2, 8, *more), job)
    shutil.rmtree(folder / "fsdp" / f"checkpoint-{STEPS}")
    shutil.rmtree(folder / "fsdp" / "final")
    again = run(server, folder, "fsdp", 2, 4, *SHARED)  # by another engine, and another cut
    assert again.returncode == 0, again.stdout
    rows = [row for row in again.rows if row["kind"] == "train"]
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1), *range(4, STEPS + 1)]
    assert [row["loss"] for row in rows[STEPS:]] == pytest.approx(job["result"].losses[3:STEPS], rel=1e-5)


PLACES = "forward:1:1 backward:0:6 recompute:all:9 exchange-buffer:1:60 exchange-buffer:0:130 evaluation:1:5"


@pytest.mark.parametrize(
    ("name", "more"),
    [
        pytest.param("ddp", (), marks=pytest.mark.slow),
        ("fsdp", ("--fsdp", "full_shard")),
        pytest.param("zero3", ("--deepspeed", str(DS / "zero3.json")), marks=pytest.mark.slow),
    ],
)
def test_nobody_is_left_in_an_exchange(name: str, more: tuple[str, ...], server: ForkServer, job: dict[str, Any]) -> None:
    """In the dry run and in steps, in forward, backward and recompute, and where the buffer of an exchange does not fit."""
    result = run(server, job["folder"], f"{name}-oom", 2, 8, *SHARED, *more, injected=PLACES)
    check(result, job)
    down = [(row["phase"], row["way"]) for row in result.metrics() if row["kind"] == "event" and row["event"] == "oom"]
    assert down == [*[("step", "redo")] * 5, ("evaluate", "redo")], result.stdout
    assert result.stdout.count("[test] rank 1 out of memory in exchange-buffer") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_processes", "micro", "more"),
    [
        ("fsdp-4", 4, 2, ("--fsdp", "full_shard")),
        ("ddp-4", 4, 4, ("--no_oom_recovery",)),
        ("zero2", 2, 8, ("--deepspeed", str(DS / "zero2.json"))),
        ("zero3", 2, 4, ("--deepspeed", str(DS / "zero3.json"))),
        ("compiled", 2, 8, ("--torch_compile", "--torch_compile_backend", "aot_eager", "--activation_checkpointing", "selective")),
    ],
)
def test_other_ways_have_the_losses_of_one_process(
    name: str, num_processes: int, micro: int, more: tuple[str, ...], server: ForkServer, job: dict[str, Any]
) -> None:
    check(run(server, job["folder"], name, num_processes, micro, *SHARED, *more), job)


# ---- architectures ----

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64, "head_dim": 8, "num_attention_heads": 4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, a key for two queries": ("llama", {"num_key_value_heads": 2}),
    "llama, one key for all": ("llama", {"num_key_value_heads": 1}),
    "mistral, window": ("mistral", {"num_key_value_heads": 2, "sliding_window": 5}),
    "gemma2, caps and every second layer a window": ("gemma2", {"num_key_value_heads": 2, "sliding_window": 5, "query_pre_attn_scalar": 8}),
    "gemma3, a window in most layers": ("gemma3_text", {"num_key_value_heads": 2, "sliding_window": 5, "query_pre_attn_scalar": 8}),
    "qwen3_moe": ("qwen3_moe", {"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    "gpt2, learnt positions": ("gpt2", {"n_embd": 32, "n_head": 4, "n_layer": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
}


def on_two_ranks(name: str, port: int, *arguments: Any) -> None:
    """Calls a function of this module on two ranks, in forks of this process."""
    pids = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            from harness import coordination
            from tests.faults.fork_ranks import leave_with

            def body() -> int:
                coordinator = coordination.start(use_cpu=True, timeout_s=60)
                coordinator.sequence_parallel_size = 2
                globals()[name](coordinator, *arguments)
                coordinator.close()
                return 0

            leave_with(body)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert codes == [0, 0], codes


def shared_model(coordinator: Any, kind: str, values: dict[str, Any], attention: str) -> tuple[Any, Any]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from harness.isolation import isolate_packed_documents
    from harness.loss import install_loss
    from harness.sequence_parallel import SequenceParallel

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SIZES | values))
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.removeprefix("flash "))
    model.config._attn_implementation = attention
    for parameter in model.parameters():  # as drawn, attention would hardly matter
        parameter.data.normal_(0.0, 0.3)
    isolate_packed_documents()
    shared = SequenceParallel.join(coordinator)
    shared.install(model)
    install_loss(model, 8, share=shared.sharing)
    return model, shared


def compare_architectures(coordinator: Any, attention: str, output: str) -> None:
    """Writes the largest difference of loss and of gradient, relative to the largest gradient, for each model."""
    import contextlib

    import torch
    import torch.distributed as dist

    from harness.engines.base import micro_batch_loss
    from harness.sequence_parallel import _small_batch

    found = {}
    for name, (kind, values) in MODELS.items():
        if kind == "gemma2" and attention == "sdpa":  # which has no caps
            continue
        model, shared = shared_model(coordinator, kind, values, attention)
        worst = [0.0, 0.0]
        for packed in (False, True):
            micro, results = _small_batch(2, 64, packed), []
            for context in (contextlib.nullcontext(), shared.paused()):
                model.zero_grad()
                with context:
                    loss = micro_batch_loss(model, micro, torch.device("cpu"))
                    loss.backward()
                flat = torch.cat([loss.detach().view(1), *(each.grad.flatten() for each in model.parameters() if each.grad is not None)])
                results.append(flat)
            dist.all_reduce(results[0])  # parts, where the other is whole
            apart = (results[0] - results[1]).abs()
            worst = [max(worst[0], float(apart[0])), max(worst[1], float(apart[1:].max() / results[1][1:].abs().max()))]
        found[name] = worst
    if coordinator.is_main_process:
        Path(output).write_text(json.dumps(found))


def refuse_what_is_more_than_attention(coordinator: Any, output: str) -> None:
    """A model whose tokens also meet outside of attention is found out by its loss."""
    import torch

    from harness.engines.base import micro_batch_loss
    from harness.findings import UserError
    from harness.sequence_parallel import check_losses

    model, shared = shared_model(coordinator, "llama", {"num_key_value_heads": 2}, "sdpa")

    @torch.no_grad()
    def loss(micro: Any) -> Any:
        return micro_batch_loss(model, micro, torch.device("cpu"))

    found: dict[str, Any] = {"as it is": check_losses(shared, loss, coordinator, 64, isolate=True, tolerance=1e-3)}
    model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: output + output.cumsum(1))
    try:
        check_losses(shared, loss, coordinator, 64, isolate=True, tolerance=1e-3)
    except UserError as error:
        found["with a sum over tokens"] = error.findings[0].line()
    if coordinator.is_main_process:
        Path(output).write_text(json.dumps(found))


def look_at_positions(coordinator: Any, output: str) -> None:
    """What an attention function that finds documents by their positions gets, in forward and computed again in backward."""
    import torch
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    from harness.blocks import set_activation_checkpointing
    from harness.engines.base import micro_batch_loss
    from harness.sequence_parallel import _small_batch

    seen: list[list[list[int]]] = []

    def attention(module: Any, *states: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["position_ids"].tolist())
        return sdpa_attention_forward(module, *states, **kwargs)

    AttentionInterface.register("flash sdpa", attention)  # no kernel of that name is looked for
    AttentionMaskInterface.register("flash sdpa", sdpa_mask)
    model, _ = shared_model(coordinator, "llama", {"num_key_value_heads": 2}, "flash sdpa")
    set_activation_checkpointing(model, "full")
    model.train()
    micro = _small_batch(2, 64, True)
    micro_batch_loss(model, micro, torch.device("cpu")).backward()
    if coordinator.is_main_process:
        Path(output).write_text(json.dumps([each == micro.position_ids.tolist() for each in seen]))


def call(server: ForkServer, tmp_path: Path, name: str, *arguments: Any) -> Any:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    server.call(on_two_ranks, name, port, *arguments, str(tmp_path / "found.json"), output=tmp_path / "printed.txt")
    return json.loads((tmp_path / "found.json").read_text())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_losses_and_gradients_are_those_of_whole_samples(attention: str, server: ForkServer, tmp_path: Path) -> None:
    found = call(server, tmp_path, "compare_architectures", attention)
    assert len(found) == len(MODELS) - (attention == "sdpa")
    assert {name: worst for name, worst in found.items() if worst[0] > 1e-3 or worst[1] > 1e-5} == {}


def test_a_model_whose_tokens_meet_elsewhere_is_refused_by_its_loss(server: ForkServer, tmp_path: Path) -> None:
    found = call(server, tmp_path, "refuse_what_is_more_than_attention")
    assert found["as it is"] < 1e-4
    assert found["with a sum over tokens"].startswith("error   --sequence_parallel_size: shared samples have another loss than whole ones")


def test_positions_are_of_whole_rows_also_in_a_recompute(server: ForkServer, tmp_path: Path) -> None:
    assert call(server, tmp_path, "look_at_positions") == [True] * 4  # two layers, twice
