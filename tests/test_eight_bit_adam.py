"""torchao's 8-bit AdamW: what files and snapshots hold of it, and that it goes on from them as if it had never stopped."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.test_bf16_adam import engine_with, train

WIDE = ("--config_overrides", "hidden_size=64,intermediate_size=128,num_hidden_layers=1,num_attention_heads=4,num_key_value_heads=4")


@pytest.fixture
def torchao(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its update as it is, not compiled, which would take a minute here."""
    found = pytest.importorskip("torchao.optim")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    return found


def averages(engine: Any) -> list[Any]:
    return [state[name] for state in engine.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]


def test_codes_are_found_again_from_their_values(torchao: Any) -> None:
    from torchao.optim.subclass_8bit import OptimState8bit

    from harness.eight_bit_adam import as_float32, is_eight_bit, write_codes

    generator = torch.Generator().manual_seed(0)
    for signed in (True, False):
        values = torch.randn(64, 4096, generator=generator) * 10.0 ** torch.randint(-9, 0, (64, 1), generator=generator)
        made, again = (OptimState8bit.zeros((64, 4096), signed, 256, "cpu") for _ in range(2))
        made.copy_(values if signed else values.square())
        made.codes[0], made.scale[:16] = 127 if signed else 0, 1e-12  # blocks of zeros alone
        assert is_eight_bit(made) and not is_eight_bit(values)
        write_codes(again, as_float32(made))
        assert torch.equal(again.codes, made.codes)
        torch.testing.assert_close(again.scale[16:], made.scale[16:], rtol=3e-7, atol=0)


def test_files_and_snapshots_hold_plain_numbers_and_it_goes_on(torchao: Any, alone: None, tmp_path: Path) -> None:
    from harness import coordination

    coordinator = coordination.start(timeout_s=60)
    straight = engine_with("adamw_8bit", coordinator, *WIDE)
    train(straight, 0, 3)
    kinds = [type(average).__name__ for average in averages(straight)]
    assert kinds.count("OptimState8bit") == 2 * 7  # of the block; 259 tokens do not make whole blocks of 256, and norms are too small
    straight.save(tmp_path / "eight").result()
    snapshot = copy.deepcopy(straight.snapshot_state())
    assert {type(value) for value in snapshot["optimizer"].values() if isinstance(value, torch.Tensor)} == {torch.Tensor}
    codes = [average.codes.clone() for average in averages(straight) if hasattr(average, "codes")]
    for way in ("file", "snapshot"):
        resumed = engine_with("adamw_8bit", coordinator, *WIDE)
        resumed.load(tmp_path / "eight") if way == "file" else resumed.load_snapshot(snapshot)
        assert [type(average).__name__ for average in averages(resumed)] == kinds
        assert all(map(torch.equal, codes, [average.codes for average in averages(resumed) if hasattr(average, "codes")]))
        assert resumed.learning_rate() == straight.learning_rate()
    train(straight, 3, 5)
    train(resumed, 3, 5)
    for one, two in zip(straight.module.parameters(), resumed.module.parameters(), strict=True):
        assert (one - two).norm() < 1e-5 * one.norm()
    coordinator.close()
