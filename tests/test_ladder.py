"""The ladder as pure code, and which errors count as out of memory."""

from __future__ import annotations

import itertools

import pytest

from harness.findings import UserError
from harness.ladder import (
    MemorySettings,
    Rung,
    SeenMemory,
    correction,
    default_ladder,
    describe_change,
    is_lower,
    next_settings,
    parse_ladder,
    unknown_rungs,
)


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

    from harness.oom_reports import is_out_of_memory

    assert is_out_of_memory(RuntimeError(text)) is counts
    assert is_out_of_memory(torch.OutOfMemoryError("anything"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(ValueError("CUDA out of memory"))


# ---- estimates ----

GIB = 2**30


def rung(need_gib: float, step_time_s: float, micro: int = 8, mode: str = "none") -> Rung:
    return Rung(MemorySettings(micro, activation_checkpointing=mode), need_gib * GIB, step_time_s)  # type: ignore[arg-type]


COMPUTED = [rung(100, 1.0), rung(70, 1.1, 4), rung(60, 1.2, 8, "selective"), rung(40, 1.3, 8, "full"), rung(20, 1.5, 2, "full")]


@pytest.mark.parametrize(
    ("current", "seen", "index"),
    [
        (1, SeenMemory(limit_bytes=80 * GIB), 2),  # 70 was really 80: 60 is 68.6
        (1, SeenMemory(limit_bytes=80 * GIB, requested_bytes=30 * GIB, allocated_bytes=70 * GIB), 3),  # really 100: 60 would be 85.7
        (2, SeenMemory(limit_bytes=30 * GIB), 4),  # predicted too much for this card anyway: 40 would not fit, 20 does
        (2, SeenMemory(limit_bytes=80 * GIB, requested_bytes=200 * GIB, allocated_bytes=60 * GIB), 4),  # nothing fits: the smallest
        (1, None, 2),  # nobody could tell what was missing: one step
        (4, SeenMemory(limit_bytes=80 * GIB), None),
    ],
)
def test_what_was_seen_corrects_the_estimates(current: int, seen: SeenMemory | None, index: int | None) -> None:
    following = next_settings(COMPUTED, COMPUTED[current].settings, seen)
    assert following == (None if index is None else COMPUTED[index].settings)


def test_correction_is_what_was_needed_over_what_was_predicted() -> None:
    assert correction(40.0, SeenMemory(limit_bytes=80.0)) == 2.0
    assert correction(40.0, SeenMemory(limit_bytes=80.0, requested_bytes=20.0, allocated_bytes=70.0)) == 2.25
    assert correction(100.0, SeenMemory(limit_bytes=80.0)) == 1.0
    assert correction(100.0, SeenMemory()) == 1.0


@pytest.mark.parametrize("limit_gib", [None, 5.0, 33.0, 80.0, 200.0])
def test_a_computed_ladder_ends_whatever_is_seen(limit_gib: float | None) -> None:
    """Each step needs less than the one before, so no settings come twice."""
    current: MemorySettings | None = COMPUTED[0].settings
    needs = {each.settings: each.need_bytes or 0.0 for each in COMPUTED}
    taken = []
    while current is not None:
        taken.append(needs[current])
        current = next_settings(COMPUTED, current, SeenMemory(limit_gib and limit_gib * GIB, 1 * GIB, 50 * GIB))
    assert taken == sorted(set(taken), reverse=True)
    assert taken[-1] == 20 * GIB


def test_a_small_step_is_better_than_none() -> None:
    close = [rung(100, 1.0), rung(99, 1.1, 4), rung(98.5, 1.2, 2)]
    assert next_settings(close, close[0].settings) == close[1].settings
    assert next_settings(close, close[1].settings) == close[2].settings
    assert next_settings([*close, rung(50, 1.3, 1)], close[0].settings).micro_batch_size == 1  # type: ignore[union-attr]
    assert next_settings(close, close[0].settings, SeenMemory(limit_bytes=80 * GIB)) == close[2].settings


@pytest.mark.parametrize(("limit_gib", "index"), [(60, 2), (53, 2), (52, 3), (36, 3), (17, 4)])
def test_what_costs_a_second_is_tried_where_it_is_predicted_to_fit_just_not(limit_gib: float, index: int) -> None:
    """60 GiB are tried in 53 (60 / 1.15 is 52.2); a new start is for what fits for certain."""
    seen = SeenMemory(limit_bytes=limit_gib * GIB)
    assert next_settings(COMPUTED, COMPUTED[1].settings, seen, in_process=lambda settings: True) == COMPUTED[index].settings


def test_a_slower_rung_in_process_comes_before_a_new_start_only_where_it_is_faster() -> None:
    offloaded = Rung(MemorySettings(8, param_offload="cpu"), 30 * GIB, 1.25)
    ladder = [*COMPUTED[:3], offloaded, *COMPUTED[3:]]

    def in_process(settings: MemorySettings) -> bool:
        return settings.param_offload == "none"

    seen = SeenMemory(limit_bytes=36 * GIB)
    assert next_settings(ladder, COMPUTED[1].settings, seen, in_process=in_process) == offloaded.settings  # 1.25 s against 1.3
    slow = [*COMPUTED, Rung(MemorySettings(8, param_offload="cpu"), 30 * GIB, 9.0)]
    assert next_settings(slow, COMPUTED[1].settings, seen, in_process=in_process) == COMPUTED[3].settings  # 40 predicted, tried in 36
    assert next_settings(slow, COMPUTED[1].settings, seen) == COMPUTED[4].settings


def test_only_what_is_allowed_is_taken() -> None:
    """An engine that cannot change checkpointing goes on to the next rung that leaves it alone."""
    following = next_settings(COMPUTED, COMPUTED[0].settings, None, lambda settings: settings.activation_checkpointing != "none")
    assert following == COMPUTED[2].settings


def test_settings_off_a_computed_ladder_go_by_their_names() -> None:
    assert next_settings(COMPUTED, MemorySettings(3, activation_checkpointing="full"), SeenMemory(80 * GIB)) == COMPUTED[4].settings


def test_rungs_are_written_with_their_estimates() -> None:
    written = rung(2, 1.5, 4).to_dict()
    assert (written["micro_batch_size"], written["need_bytes"], written["step_time_s"]) == (4, 2 * GIB, 1.5)
    assert "host_bytes" not in written


# ---- what a rank reports ----


def test_report_of_a_rank_is_read_from_torchs_message() -> None:
    import torch

    from harness.ladder import seen_memory, worst_report
    from harness.oom_reports import memory_report

    text = (
        "CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 79.11 GiB of which 301.25 MiB is free. Including"
        " non-PyTorch memory, this process has 78.80 GiB memory in use. Of the allocated memory 75.25 GiB is allocated by PyTorch, and"
        " 2.10 GiB is reserved by PyTorch but unallocated."
    )
    report = memory_report(torch.device("cpu"), text)
    assert (report["requested_gib"], report["allocated_gib"], report["limit_gib"]) == (0.5, 75.25, None)
    assert seen_memory(report) == SeenMemory(None, 0.5 * GIB, 75.25 * GIB)
    silent = memory_report(torch.device("cpu"), "")
    assert seen_memory(silent) == SeenMemory()
    more = {**report, "requested_gib": 3.0}
    assert worst_report([silent, report, more, silent]) == 2
    assert worst_report([silent, silent]) == 0


def test_words_that_are_no_rungs_are_known_before_anything_is_loaded() -> None:
    words = ["micro_batch", "micro_bach", "optimizer_offload=2", "reduce_bucket_size=5e7", "activation_checkpointing=some"]
    assert [finding.message for finding in unknown_rungs(words)] == [
        "'micro_bach' is not a rung",
        "'optimizer_offload=2' is not a rung (optimizer_offload is a share between 0 and 1, not 2.0)",
        "'activation_checkpointing=some' is not a rung (selective or full)",
    ]
