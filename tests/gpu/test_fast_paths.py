"""On a GPU: a step does not wait for the device under CUDA's own check, and compiled layers, loss and float8 train like plain ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

OVERRIDES = "hidden_size=256,intermediate_size=512,num_hidden_layers=4,num_attention_heads=8,num_key_value_heads=4"


@pytest.fixture(scope="module")
def alone() -> Iterator[Any]:
    from harness import coordination

    coordinator = coordination.start(timeout_s=120)
    yield coordinator
    coordinator.close()


def build(alone: Any, engine: str, *flags: str, kernels: bool = False) -> Any:
    from harness import modeling
    from harness.engines.build import build_engine, initial_settings, master_dtype
    from harness.parsing import parse_args

    base = f"--model_type llama --config_overrides {OVERRIDES} --tokenizer_name bytes --train_file none --output_dir none --precision bf16"
    args = parse_args([*base.split(), "--per_device_train_batch_size", "2", "--learning_rate", "1e-3", *flags])
    config = modeling.load_config(args.model)
    empty = modeling.build_empty(args.model, config, modeling.load_tokenizer(args.model), dtype=master_dtype(engine, "bf16"), seed=0)
    if kernels:
        assert modeling.apply_kernels(empty.model, args.model, alone.device)
    return build_engine(engine, args, alone, empty, initial_settings(args, engine), "bf16", 100)[0]


def batch(number: int = 0, num_tokens: int = 256) -> Any:
    from harness.batches import make_sample, make_step_batch

    ids = np.random.default_rng(number).integers(0, 259, (4, num_tokens))
    return make_step_batch([make_sample(row) for row in ids], 0.0, pin_memory=True)


def losses(engine: Any, steps: int = 8) -> list[float]:
    found = []
    for _ in range(steps):
        found.append(float(engine.forward_backward(batch(), 1020)) / 1020)
        engine.step()
    return found


def step_without_waiting(engine: Any) -> None:
    """One step in which it is an error that the host waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.forward_backward(batch(1), 1020)
        engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("engine", "flags"), [("ddp", []), ("fsdp", ["--fsdp", "full_shard"])])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_a_step_never_waits(alone: Any, engine: str, flags: list[str], checkpointing: str) -> None:
    made = build(alone, engine, "--activation_checkpointing", checkpointing, *flags)
    for _ in range(3):
        made.forward_backward(batch(), 1020)
        made.step()
    step_without_waiting(made)


def gradients(alone: Any, mode: str, *flags: str, kernels: bool = False) -> list[torch.Tensor]:
    made = build(alone, "ddp", *flags, "--activation_checkpointing", mode, kernels=kernels)
    made.forward_backward(batch(), 1020)
    return [parameter.grad.clone() for parameter in made.module.parameters()]


def check_modes(alone: Any, *flags: str, kernels: bool = False) -> None:
    """A kernel that writes into its input changes what selective checkpointing has kept: the loss stays right, gradients do not."""
    plain = gradients(alone, "none", "--torch_compile", "False")
    for mode in ("none", "selective", "full"):
        for gradient, expected in zip(gradients(alone, mode, *flags, kernels=kernels), plain, strict=True):
            assert float((gradient - expected).norm() / expected.norm()) < 0.03


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_do_not_depend_on_checkpointing(alone: Any, compiled: bool) -> None:
    check_modes(alone, "--torch_compile", str(compiled))


@pytest.mark.parametrize("compiled", [False, True])
def test_inputs_of_blocks_wait_on_the_host(alone: Any, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from harness import activation_offload

    monkeypatch.setattr(activation_offload, "_LEAST_BYTES", 0)
    flags = ["--activation_checkpointing", "full", "--torch_compile", str(compiled)]
    stays = gradients(alone, "full", *flags[2:])
    made = build(alone, "ddp", *flags, "--activation_offload")
    for _ in range(3):  # the host's memory is used again
        made.module.zero_grad(set_to_none=True)
        made.forward_backward(batch(), 1020)
    assert made.blocks.host.num_saved == 3 * 4 * 2 and made.blocks.host.num_fetched == 3 * 2 * 2
    for parameter, expected in zip(made.module.parameters(), stays, strict=True):
        assert float((parameter.grad - expected).norm() / expected.norm()) < 1e-3


def test_offloaded_inputs_take_less_of_the_card(alone: Any) -> None:
    from harness.activation_offload import HostActivations

    layers = [torch.nn.Linear(2048, 2048, device="cuda") for _ in range(12)]
    host = HostActivations(torch.device("cuda"))
    peaks = []
    for offload in (False, True):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        start, hidden = torch.cuda.memory_allocated(), torch.randn(8192, 2048, device="cuda", requires_grad=True)
        for layer in layers:
            block = lambda value, layer=layer: torch.utils.checkpoint.checkpoint(lambda x: layer(x).sin(), value, use_reentrant=False)  # noqa: E731
            hidden = host.call(block, hidden) if offload else block(hidden)
        hidden.sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - start)
    assert peaks[1] < 0.7 * peaks[0], peaks


def test_compiled_layers_train_like_plain_ones(alone: Any) -> None:
    plain = losses(build(alone, "fsdp", "--fsdp", "full_shard", "--no_custom_kernels"))
    compiled = build(alone, "fsdp", "--fsdp", "full_shard")
    assert losses(compiled) == pytest.approx(plain, rel=5e-3)
    assert compiled.blocks.is_compiled
    assert plain[-1] < plain[0] - 0.1


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("model", ["", "model_type=mistral"])
def test_documents_without_a_mask_train_like_with_one(alone: Any, checkpointing: str, model: str) -> None:
    """Compiled layers under FSDP2; mistral has a window smaller than a row."""
    from harness.batches import make_sample, make_step_batch

    flags = ["--fsdp", "full_shard", "--activation_checkpointing", checkpointing]
    if model:
        flags += ["--model_type", "mistral", "--config_overrides", f"{OVERRIDES},sliding_window=32,head_dim=32"]
    masked, plain = build(alone, "fsdp", *flags), build(alone, "fsdp", *flags, "--attn_implementation", "varlen")

    def packed(number: int) -> Any:
        samples = []
        for row in np.random.default_rng(number).integers(0, 259, (4, 256)):
            sample = make_sample(row)
            sample["document_ids"] = np.repeat(np.arange(3, dtype=np.int32), [100, 26 + number, 130 - number])
            sample["position_ids"] = np.concatenate([np.arange(n) for n in (100, 26 + number, 130 - number)])
            samples.append(sample)
        return make_step_batch(samples, 0.0, pin_memory=True)

    found = []
    for made in (masked, plain):
        rows = []
        for number in range(6):
            rows.append(float(made.forward_backward(packed(number), 1020)) / 1020)
            made.step()
        found.append(rows)
    assert found[1] == pytest.approx(found[0], rel=2e-3)
    assert plain.blocks.is_compiled
    other = packed(7)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        plain.forward_backward(other, 1020)
        plain.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_float8_trains_like_bf16(alone: Any) -> None:
    pytest.importorskip("torchao")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("the card has no float8")
    plain = losses(build(alone, "fsdp", "--fsdp", "full_shard"))
    assert losses(build(alone, "fsdp", "--fsdp", "full_shard", "--fp8", "tensorwise")) == pytest.approx(plain, rel=3e-2)


def test_gradients_with_fused_kernels_do_not_depend_on_checkpointing(alone: Any) -> None:
    pytest.importorskip("liger_kernel")
    check_modes(alone, "--use_liger_kernel", kernels=True)


def test_fused_kernels_are_of_the_model_they_were_put_into() -> None:
    """Liger also changes transformers' module: a later model without weights, looked at for its order, ran Triton at address 0."""
    pytest.importorskip("liger_kernel")
    from transformers import LlamaConfig
    from transformers.models.llama import modeling_llama

    from harness.model_units import execution_order
    from harness.modeling import apply_kernels
    from harness.parsing import parse_args
    from harness.placement import meta_model

    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    before = modeling_llama.LlamaRMSNorm
    arguments = parse_args(["--output_dir", "x", "--model_type", "llama", "--train_file", "x", "--use_liger_kernel"]).model
    model = meta_model(config)
    assert apply_kernels(model, arguments, torch.device("cuda"))
    assert modeling_llama.LlamaRMSNorm is before
    for looked_at in (meta_model(config), model):  # the second one's kernels are Triton's
        execution_order(looked_at, dict(looked_at.named_modules()))
        torch.cuda.synchronize()
