"""Compiled blocks compute what plain ones do, share their code, and give way where something cannot be compiled."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from harness import loss as loss_module
from harness.args import ModelArguments
from harness.blocks import Blocks, compile_backend
from harness.compiling import Compiled
from harness.findings import UserError
from harness.loss import chunked_cross_entropy_sum, cross_entropy_sum, install_loss

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
IDS = torch.randint(0, 200, (2, 16), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def model(model_type: str = "llama", **more: Any) -> Any:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**sizes, vocab_size=256, use_cache=False, **more)
    made = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    install_loss(made, 8)
    return made


def loss_and_gradients(made: Any, ids: torch.Tensor = IDS) -> tuple[torch.Tensor, list[torch.Tensor]]:
    made.zero_grad()
    loss = made(input_ids=ids, labels=ids)
    loss.backward()
    return loss.detach(), [parameter.grad.clone() for parameter in made.parameters()]


def equal(one: Any, two: Any) -> bool:
    return torch.equal(one[0], two[0]) and all(torch.equal(left, right) for left, right in zip(one[1], two[1], strict=True))


def num_graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


@pytest.mark.parametrize(("model_type", "graphs"), [("llama", 1), pytest.param("mistral", 1, marks=pytest.mark.slow)])
def test_compiled_blocks_compute_what_plain_ones_do_and_share_one_graph(model_type: str, graphs: int) -> None:
    more = {"sliding_window": 8} if model_type == "mistral" else {}
    expected = loss_and_gradients(model(model_type, **more))
    made = model(model_type, **more)
    blocks = Blocks(made, "aot_eager")
    for mode in ("none", "selective", "full"):
        before = num_graphs()
        blocks.set_checkpointing(mode)
        assert equal(loss_and_gradients(made), expected), mode
        assert equal(loss_and_gradients(made), expected), mode
        assert blocks.is_compiled and num_graphs() - before == graphs
    assert not any(getattr(module, "gradient_checkpointing", False) for module in made.modules())


def test_full_checkpointing_of_compiled_blocks_keeps_only_their_inputs() -> None:
    """Floats that a forward keeps for backward, weights and inputs left out."""

    def num_kept(mode: str) -> int:
        made = model()
        Blocks(made, "aot_eager").set_checkpointing(mode)
        weights = {parameter.untyped_storage().data_ptr() for parameter in made.parameters()}
        kept: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights and tensor.is_floating_point():
                kept[storage.data_ptr()] = storage.nbytes() // 4
            return tensor

        hidden = torch.randn(2, 16, 32, requires_grad=True)
        positions = made.model.rotary_emb(hidden, torch.arange(16)[None])
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = made.model.layers[0](hidden, position_embeddings=positions)  # held, or its graph would be freed
        assert out.shape == hidden.shape
        return sum(kept.values())

    none, selective, full = (num_kept(mode) for mode in ("none", "selective", "full"))
    assert full == 2 * 16 * 32 + 2 * 16 * 8  # the hidden states, and cos and sin
    assert full < selective < none


def test_other_sizes_of_micro_batches_are_compiled_too() -> None:
    made, plain = model(), model()
    blocks = Blocks(made, "aot_eager")
    blocks.set_checkpointing("none")
    for size, length in [(2, 16), (2, 9), (1, 5)]:
        assert equal(loss_and_gradients(made, IDS[:size, :length]), loss_and_gradients(plain, IDS[:size, :length]))
    assert blocks.is_compiled


@pytest.mark.parametrize("mode", ["none", "full"])
def test_a_graph_break_gives_the_whole_model_back_with_one_warning(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    expected = loss_and_gradients(model())
    made = model()
    made.model.layers[1].mlp.register_forward_hook(lambda *_: torch._dynamo.graph_break())
    blocks = Blocks(made, "aot_eager")
    blocks.set_checkpointing(mode)
    with caplog.at_level(logging.WARNING, "harness"):
        assert equal(loss_and_gradients(made), expected)
        assert equal(loss_and_gradients(made), expected)
    assert [record.getMessage().split(",")[0] for record in caplog.records] == ["LlamaDecoderLayer cannot be compiled"]
    assert not blocks.is_compiled
    assert made.model.layers[0].gradient_checkpointing is (mode == "full")
    blocks.set_checkpointing("full")
    assert equal(loss_and_gradients(made), expected)


def test_an_out_of_memory_while_compiling_is_one() -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    function = Compiled(lambda x: x + 1, "a function", backend=backend)  # type: ignore[arg-type]
    with pytest.raises(torch.OutOfMemoryError, match=r"2\.00 GiB"):
        function(torch.zeros(3))
    assert function.compiled is not None  # there may be memory later


@pytest.mark.parametrize(
    ("flags", "device", "expected"),
    [
        ({}, CPU, None),
        ({}, CUDA, "inductor"),
        ({"torch_compile": True}, CPU, "inductor"),
        ({"torch_compile": True, "torch_compile_backend": "aot_eager"}, CPU, "aot_eager"),
        ({"torch_compile": False}, CUDA, None),
        ({"no_custom_kernels": True}, CUDA, None),
    ],
)
def test_when_blocks_are_compiled(flags: dict[str, Any], device: torch.device, expected: str | None, monkeypatch: Any) -> None:
    monkeypatch.setattr("harness.blocks.missing_for_compile", lambda device_type: None)
    assert compile_backend(ModelArguments(**flags), device) == expected


def test_a_missing_compiler_is_an_error_only_where_compiling_was_asked_for(monkeypatch: Any, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(UserError, match="no C compiler"):
        compile_backend(ModelArguments(torch_compile=True), CPU)
    monkeypatch.setattr("harness.compiling.importlib.util.find_spec", lambda name: None)
    assert compile_backend(ModelArguments(), CUDA) is None
    assert caplog.messages == ["layers are not compiled: triton is not installed"]


# --------------------------------------------------------------------------------------------------------- the loss


@pytest.mark.parametrize("frozen_head", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_of_the_loss_are_autograds(dtype: torch.dtype, frozen_head: bool) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(24, 16).to(dtype).requires_grad_()
    weight = torch.randn(50, 16).to(dtype).requires_grad_(not frozen_head)
    bias = torch.randn(50).to(dtype).requires_grad_(not frozen_head)
    targets = torch.randint(0, 50, (24,))
    targets[::5] = -100
    inputs = [hidden] if frozen_head else [hidden, weight, bias]
    wanted = torch.autograd.grad(3.0 * cross_entropy_sum(torch.nn.functional.linear(hidden, weight, bias), targets), inputs)
    tokens = torch.empty(24)
    loss = chunked_cross_entropy_sum(hidden, weight, bias, targets, 7, token_losses=tokens)
    got = torch.autograd.grad(3.0 * loss, inputs)
    precision = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    for one, two in zip(got, wanted, strict=True):
        assert one.dtype == dtype
        assert (one - two).norm() <= precision * two.norm()
    assert tokens.sum().item() == pytest.approx(loss.item(), rel=1e-6)
    assert tokens[::5].tolist() == [0.0] * 5


def test_the_loss_under_autocast_has_float32_gradients_for_float32_weights() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(24, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)
    targets = torch.randint(0, 50, (24,))
    wanted = torch.autograd.grad(cross_entropy_sum(hidden @ weight.T, targets), (hidden, weight))
    with torch.autocast("cpu", torch.bfloat16):
        loss = chunked_cross_entropy_sum(hidden, weight, None, targets, 7)
    got = torch.autograd.grad(loss, (hidden, weight))
    for one, two in zip(got, wanted, strict=True):
        assert one.dtype == torch.float32
        assert (one - two).norm() <= 2e-2 * two.norm()


def test_the_compiled_loss_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        loss_module, "_compiled_loss_and_gradient", lambda: Compiled(loss_module.loss_and_gradient, "it", backend="aot_eager")
    )
    torch.manual_seed(0)
    hidden, weight = torch.randn(24, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)
    targets = torch.randint(0, 50, (24,))
    targets[::5] = -100
    results = []
    for compiled in (False, True):
        loss = chunked_cross_entropy_sum(hidden, weight, None, targets, 12, compiled=compiled)
        results.append((loss, *torch.autograd.grad(loss, (hidden, weight))))
    assert all(torch.allclose(one, two, atol=1e-5) for one, two in zip(*results, strict=True))
