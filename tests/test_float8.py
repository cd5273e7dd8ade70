"""Float8 layers keep names, shapes and dtypes of their weights, compute nearly the same, and are refused where they cannot run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness.findings import UserError
from harness.float8 import check_float8, convert_to_float8


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_converted_layers_compute_nearly_the_same(recipe: str) -> None:
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    block = torch.nn.Sequential(torch.nn.Linear(32, 64, bias=False), torch.nn.SiLU(), torch.nn.Linear(64, 32), torch.nn.Linear(32, 10))
    names = {name: (parameter.shape, parameter.dtype) for name, parameter in block.named_parameters()}
    inputs = torch.randn(16, 32)
    expected = block(inputs)
    assert convert_to_float8(block, recipe, emulate=True) == 2  # ten outputs are no multiple of 16
    assert {name: (parameter.shape, parameter.dtype) for name, parameter in block.named_parameters()} == names
    got = block(inputs)
    assert 1e-4 * expected.norm() < (got - expected).norm() < 0.1 * expected.norm()
    got.sum().backward()
    assert all(parameter.grad is not None and parameter.grad.dtype == torch.float32 for parameter in block.parameters())


@pytest.mark.parametrize(
    ("capability", "message"), [((8, 0), r"NVIDIA A100 \(compute capability 8.0\) has no float8"), ((8, 9), None), ((9, 0), None)]
)
def test_old_cards_are_refused_by_name(capability: tuple[int, int], message: str | None, monkeypatch: Any) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA A100")
    if message is None:
        check_float8(torch.device("cuda"))
        return
    with pytest.raises(UserError, match=message):
        check_float8(torch.device("cuda"))


def test_without_a_card_or_torchao_it_is_refused(monkeypatch: Any) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    with pytest.raises(UserError, match="no float8 arithmetic on cpu"):
        check_float8(torch.device("cpu"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="torchao is not installed -> pip install torchao"):
        check_float8(torch.device("cuda"))
