"""The losses of a mixture's sources: right by hand, the same for any number of ranks, and no waiting for the device."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from harness.batches import IGNORE, make_sample, make_step_batch
from harness.engines.base import micro_batch_loss
from harness.loss import install_loss
from harness.source_losses import SourceLosses


def adding(add: Callable[[list[float]], list[float]], size: int = 1) -> Any:
    """A coordinator that adds up the ranks' values like this; so many ranks share a sample."""
    return types.SimpleNamespace(sum=lambda values, what: add(values), sequence_parallel_size=size)


ALONE = adding(lambda values: values)


def batch_of(samples: list[tuple[int, list[int]]], num_fillers: int = 0) -> Any:
    """A step of (source, tokens); the second token of a row has no label."""
    rows = [make_sample(np.array(tokens)) for _, tokens in samples]
    for row in rows:
        row["labels"][1] = IGNORE
    return make_step_batch(rows, 0.0, num_fillers=num_fillers, source_ids=[source for source, _ in samples])


def tiny_model(chunk_size: int = 8, family: str = "llama") -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = AutoConfig.for_model(family, **sizes, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    install_loss(model, chunk_size)
    return model


def step(model: Any, sources: SourceLosses, batch: Any, micro_batch_size: int) -> float:
    batch.report = sources.begin()
    total = 0.0
    for micro in batch.micro_batches(micro_batch_size):
        loss = micro_batch_loss(model, micro, torch.device("cpu"))
        loss.backward()
        total += loss.item()
    return total


SAMPLES = [(index % 3 % 2, [(7 * index + place) % 30 for place in range(4 + index % 5)]) for index in range(12)]


def test_sums_by_hand_and_an_attempt_that_failed_is_forgotten():
    sources = SourceLosses(["code", "chat", "never"])
    batch = batch_of([(1, [1, 2, 3, 4]), (0, [5, 6, 7]), (1, [8, 9, 10])], num_fillers=1)
    first, second = batch.micro_batches(2)
    sources.begin()(first, torch.tensor([100.0, 100.0]))
    report = sources.begin()  # the same step again
    report(first, torch.tensor([6.0, 2.0]))
    report(second, torch.tensor([1.5, 0.0]))
    sources.commit()
    # labels: 2 of row 0, 1 of row 1, 1 of row 2, none of the filler (which counts as source 0)
    assert sources.read(ALONE) == {"code": 2.0, "chat": 2.5}
    assert sources.read(ALONE) == {}


@pytest.mark.parametrize(("family", "chunk_size"), [("llama", 0), ("llama", 5), ("gemma2", 0)])
def test_each_sources_loss_is_that_of_its_samples_alone(family: str, chunk_size: int) -> None:
    """Gemma-2's logits have a cap, so its loss takes another way."""
    model, sources = tiny_model(chunk_size, family), SourceLosses(["a", "b"])
    total = step(model, sources, batch_of(SAMPLES), 4)
    sources.commit()
    found = sources.read(ALONE)
    sums = {}
    for number, name in enumerate("ab"):
        alone = batch_of([sample for sample in SAMPLES if sample[0] == number])
        sums[name] = sum(micro_batch_loss(model, micro, torch.device("cpu")).item() for micro in alone.micro_batches(1))
        assert found[name] == pytest.approx(sums[name] / alone.num_label_tokens, rel=1e-5)
    assert total == pytest.approx(sum(sums.values()), rel=1e-5)


def test_reporting_changes_neither_loss_nor_gradients() -> None:
    for chunk_size in (0, 5):
        model = tiny_model(chunk_size)
        results = []
        for report in (None, SourceLosses(["a", "b"]).begin()):
            batch = batch_of(SAMPLES)
            batch.report = report
            (micro,) = batch.micro_batches(12)
            model.zero_grad()
            loss = micro_batch_loss(model, micro, torch.device("cpu"))
            loss.backward()
            results.append([loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
        for plain, reported in zip(*results, strict=True):
            torch.testing.assert_close(reported, plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_losses_are_the_same_for_any_number_of_ranks(num_ranks: int) -> None:
    model = tiny_model()
    whole = SourceLosses(["a", "b"])
    step(model, whole, batch_of(SAMPLES), 5)
    whole.commit()
    expected = whole.read(ALONE)
    share = len(SAMPLES) // num_ranks
    ranks = [SourceLosses(["a", "b"]) for _ in range(num_ranks)]
    for rank, sources in enumerate(ranks):
        step(model, sources, batch_of(SAMPLES[rank * share : (rank + 1) * share]), 1 + rank)
        sources.commit()
    told: list[list[float]] = []
    for sources in ranks[1:]:
        sources.read(adding(lambda values: (told.append(values), values)[1]))  # type: ignore[func-returns-value]
    together = adding(lambda values: np.sum([values, *told], axis=0).tolist())
    assert ranks[0].read(together) == pytest.approx(expected, rel=1e-5)


def test_nothing_is_read_before_a_row_of_the_log_is_due() -> None:
    class Reads(TorchDispatchMode):
        names: list[str] = []

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(str(function))
            return function(*args, **(kwargs or {}))

    sources = SourceLosses(["a", "b"])
    batch = batch_of(SAMPLES)
    (micro,) = batch.micro_batches(12)
    with Reads() as reads:
        sources.begin()(micro, torch.ones(12))
        sources.commit()
    assert reads.names and not [name for name in reads.names if "_local_scalar_dense" in name or "nonzero" in name or "copy" in name]


def test_ranks_that_share_samples_count_them_once() -> None:
    """Each has the losses of its slice, and the labels of whole rows."""
    (micro,) = batch_of([(0, [5, 6, 7, 8]), (1, [5, 6, 7])]).micro_batches(2)  # 2 labels and 1
    ranks = [SourceLosses(["code", "chat"]) for _ in range(2)]
    for sources, losses in zip(ranks, ([3.0, 0.5], [1.0, 2.0]), strict=True):
        sources.begin()(micro, torch.tensor(losses))
        sources.commit()
    told: list[list[float]] = []
    ranks[1].read(adding(lambda values: (told.append(values), values)[1], 2))  # type: ignore[func-returns-value]
    together = adding(lambda values: np.sum([values, *told], axis=0).tolist(), 2)
    assert ranks[0].read(together) == {"code": 4.0 / 2, "chat": 2.5 / 1}
