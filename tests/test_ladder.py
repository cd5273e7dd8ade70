"""The ladder as pure code, and which errors count as out of memory."""

from __future__ import annotations

import itertools

import pytest

from harness.findings import UserError
from harness.ladder import MemorySettings, default_ladder, describe_change, is_lower, next_settings, parse_ladder


def micro_sizes(ladder: list[MemorySettings]) -> list[int]:
    return [rung.micro_batch_size for rung in ladder]


def test_small_micro_batches_of_long_samples_recompute_before_they_are_halved() -> None:
    ladder = default_ladder(MemorySettings(4), block_size=4096)
    assert [(rung.micro_batch_size, rung.activation_checkpointing) for rung in ladder] == [
        (4, "none"),
        (2, "none"),  # 8192 tokens still fill the card
        (2, "selective"),
        (2, "full"),
        (1, "full"),
    ]


def test_short_samples_recompute_first() -> None:
    ladder = default_ladder(MemorySettings(8), block_size=128)
    assert [(rung.micro_batch_size, rung.activation_checkpointing) for rung in ladder[:4]] == [
        (8, "none"),
        (8, "selective"),
        (8, "full"),
        (4, "full"),
    ]
    assert micro_sizes(ladder[3:]) == [4, 2, 1]


@pytest.mark.parametrize("micro", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("block", [16, 2048, 65536])
@pytest.mark.parametrize("reshard", [True, False])
def test_every_rung_is_lower_and_the_ladder_ends(micro: int, mode: str, block: int, reshard: bool) -> None:
    start = MemorySettings(micro, activation_checkpointing=mode, reshard_after_forward=reshard)  # type: ignore[arg-type]
    ladder = default_ladder(start, block_size=block)
    assert ladder[0] == start
    assert all(is_lower(below, above) for above, below in itertools.pairwise(ladder))
    current, taken = start, 0
    while (following := next_settings(ladder, current)) is not None:
        assert is_lower(following, current)
        current, taken = following, taken + 1
    assert taken == len(ladder) - 1
    assert (current.micro_batch_size, current.activation_checkpointing, current.reshard_after_forward) == (1, "full", True)


def test_the_next_rung_is_below_what_is_in_force_even_off_the_ladder() -> None:
    ladder = default_ladder(MemorySettings(8), block_size=128)
    assert next_settings(ladder, MemorySettings(3, activation_checkpointing="full")) == MemorySettings(2, activation_checkpointing="full")


def test_explicit_ladder() -> None:
    words = ["micro_batch=4", "gradient_checkpointing", "micro_batch"]
    ladder = parse_ladder(words, MemorySettings(8))
    assert [(rung.micro_batch_size, rung.activation_checkpointing) for rung in ladder] == [
        (8, "none"),
        (4, "none"),
        (4, "full"),
        (2, "full"),
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["micro_batch=8"], "'micro_batch=8' would free nothing: micro_batch_size is 8 at that place"),
        (["micro_batch=16"], "would free nothing: micro_batch_size is 8"),
        (["gradient_checkpointing", "activation_checkpointing=selective"], "activation_checkpointing is full"),
        (["micro_batch=0"], "not a rung"),
        (["micro_batch=x"], "not a rung"),
        (["sleep_longer"], "'sleep_longer' is not a rung"),
        (["activation_checkpointing=none"], "selective or full"),
    ],
)
def test_rungs_that_free_nothing_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_ladder(words, MemorySettings(8))


def test_settings_survive_json_and_refuse_nonsense() -> None:
    settings = MemorySettings(4, activation_checkpointing="full", optimizer_offload=0.5)
    assert MemorySettings.from_dict(settings.to_dict()) == settings
    assert describe_change(settings, settings.replace(micro_batch_size=2)) == "micro_batch_size 4 -> 2"
    with pytest.raises(ValueError, match="micro_batch_size"):
        MemorySettings(0)
    with pytest.raises(ValueError, match="optimizer_offload"):
        MemorySettings(1, optimizer_offload=1.5)


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB", True),
        ("CUDA error: out of memory", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("NCCL error: unhandled cuda error", False),
        ("CUDA error: an illegal memory access was encountered", False),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes", True),
        ("mat1 and mat2 shapes cannot be multiplied", False),
    ],
)
def test_which_errors_are_out_of_memory(text: str, counts: bool) -> None:
    import torch

    from harness.recovery import is_out_of_memory

    assert is_out_of_memory(RuntimeError(text)) is counts
    assert is_out_of_memory(torch.OutOfMemoryError("anything"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(ValueError("CUDA out of memory"))
