"""Adam's state on its way between torch's Adam, DeepSpeed's, and both at once, where a part of it is offloaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness import zero_adam

OWN = {"lr": 3e-4, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.25}


class DeepSpeedCPUAdam(torch.optim.Optimizer):
    """Groups and counts as DeepSpeed 0.19's has them, without its kernels."""

    __module__ = "deepspeed.ops.adam.cpu_adam"

    def __init__(self, params: Any) -> None:
        options = {"lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0, "amsgrad": False}
        super().__init__(params, options)


def stepped(adam: torch.optim.Optimizer, num: int) -> dict[str, Any]:
    flat = adam.param_groups[0]["params"][0]
    adam.param_groups[0].update(OWN)
    averages = {"exp_avg": torch.full_like(flat, 2.0), "exp_avg_sq": torch.full_like(flat, 3.0)}
    adam.state[flat] = {"step": zero_adam.step_number(adam, num, flat), **averages}
    return adam.state_dict()


def flat() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(4))


@pytest.mark.parametrize("into", [DeepSpeedCPUAdam, torch.optim.AdamW])
@pytest.mark.parametrize("of", [DeepSpeedCPUAdam, torch.optim.AdamW])
def test_state_of_one_adam_goes_on_in_another(of: Any, into: Any) -> None:
    adam = into([flat()])
    before = dict(adam.defaults)
    adam.load_state_dict(stepped(of([flat()]), 7))
    zero_adam.fit(SimpleNamespace(optimizer=adam))
    (group,) = adam.param_groups
    assert {key: group[key] for key in OWN} == OWN
    assert {key: group[key] for key in before if key not in OWN} == {key: value for key, value in before.items() if key not in OWN}
    state = adam.state[group["params"][0]]
    assert (state["step"], type(state["step"])) == ((7, int) if into is DeepSpeedCPUAdam else (torch.tensor(7.0), torch.Tensor))
    assert torch.equal(state["exp_avg"], torch.full((4,), 2.0))
    if into is torch.optim.AdamW:
        group["params"][0].grad = torch.ones(4)
        adam.step()
        assert float(state["step"]) == 8


def partly() -> Any:
    """Two parts of the master weights, the first one on the card."""
    flats = [flat(), flat()]
    first = torch.optim.AdamW([flat()], lr=0.0)
    outer = SimpleNamespace(optimizer=DeepSpeedCPUAdam(flats), backup_optimizer=first, fp32_partitioned_groups_flat=flats)
    outer.subgroup_to_device = {0: "cuda", 1: "cpu"}
    return outer


def test_a_part_on_the_card_is_written_and_comes_back() -> None:
    outer = partly()
    card, host = outer.fp32_partitioned_groups_flat
    outer.optimizer.state[host] = {"step": 7, "exp_avg": torch.ones(4)}
    outer.backup_optimizer.state[card] = {"step": torch.tensor(7.0), "exp_avg": torch.full((4,), 2.0)}
    with zero_adam.united(outer):
        written = outer.optimizer.state_dict()
    assert set(written["state"]) == {0, 1} and card not in outer.optimizer.state
    again = partly()
    again.optimizer.load_state_dict(written)
    zero_adam.fit(again)
    zero_adam.divide(again)
    card, host = again.fp32_partitioned_groups_flat
    assert again.optimizer.state[host]["step"] == 7 and card not in again.optimizer.state
    state = again.backup_optimizer.state[card]
    assert torch.equal(state["step"], torch.tensor(7.0)) and torch.equal(state["exp_avg"], torch.full((4,), 2.0))


def test_a_part_on_the_card_follows_the_schedule() -> None:
    outer = partly()
    outer.optimizer.param_groups[0].update(OWN)
    zero_adam.follow(outer)
    assert {key: outer.backup_optimizer.param_groups[0][key] for key in OWN} == OWN


def test_other_optimizers_stay_as_they_are() -> None:
    sgd = torch.optim.SGD([flat()], lr=0.1)
    zero_adam.fit(SimpleNamespace(optimizer=sgd))
    zero_adam.divide(SimpleNamespace(optimizer=sgd))
    zero_adam.follow(SimpleNamespace(optimizer=sgd))
    assert sgd.param_groups[0]["lr"] == 0.1 and not sgd.state
