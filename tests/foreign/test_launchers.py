"""Scripts that know nothing of this project finish under their own launchers although a rank runs out of memory at step 7.

The short form has one script under torchrun; the long one all of them under each launcher, and what they do without `harness run`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.faults.fork_ranks import ForkServer
from tests.foreign import cells, jobs

TOLERANCE = 2e-5


def check(script: str, launcher: str, clean: cells.Run, folder: Path, corpus: Path, environment: Mapping[str, str] | None = None) -> None:
    found = cells.run(script, launcher, corpus, folder, fails=True, with_us=True, environment=environment)
    assert found.code == 0, found.output
    result = cells.compare(clean, found, folder)
    difference = result.pop("largest_relative_loss_difference")
    assert result == {"finished": True, "attempts": 2, "resumed_at_step": 5, "steps": cells.STEPS, "same_global_batches": True}
    assert difference < TOLERANCE
    first = cells.record_of(folder)["attempts"][0]
    assert [report["rank"] for report in first["out_of_memory"]] == [1]
    assert first["ended_after_s"] < 30  # a few on a machine that does nothing else


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cells.make_corpus(tmp_path_factory.mktemp("foreign") / "corpus.txt")


def clean_run(server: ForkServer, script: str, corpus: Path, folder: Path) -> cells.Run:
    """The same training without a lack of memory, by one process with twice the micro-batch: samples and losses of a step are the same."""
    folder.mkdir()
    words = cells.script_words(script, corpus, folder, 2 * cells.MICRO)
    server.call(jobs.ranks, script, str(folder), 1, {}, words, output=folder / "log.txt")
    (halves,) = cells.steps_of(folder)[0]
    return cells.Run(0, 0.0, "", cells.losses_of(script, folder / "out"), {0: [halves[0::2]], 1: [halves[1::2]]})


@pytest.mark.parametrize(
    ("script", "launcher"), [("accelerate_loop", "torchrun"), pytest.param("hf_trainer", "zero2", marks=pytest.mark.slow)]
)
def test_a_script_finishes(server: ForkServer, corpus: Path, tmp_path: Path, script: str, launcher: str) -> None:
    check(script, launcher, clean_run(server, script, corpus, tmp_path / "clean"), tmp_path / "with", corpus)


@pytest.mark.slow
def test_a_mistake_ends_with_its_own_code_and_is_not_tried_again(corpus: Path, tmp_path: Path) -> None:
    mistake = {**cells.FAILURE, "step": 2, "kind": "bug"}
    found = cells.run("accelerate_loop", "torchrun", corpus, tmp_path / "bug", fails=True, with_us=True, failure=mistake)
    assert found.code == 1 and "a mistake in the script" in found.output
    assert [len(cells.record_of(tmp_path / "bug")["attempts"]), cells.record_of(tmp_path / "bug")["result"]] == [1, "failed"]


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("script", cells.SCRIPTS)
def test_every_script_under_every_launcher(corpus: Path, tmp_path: Path, script: str) -> None:
    if script == "trl_sft":
        pytest.importorskip("trl")
    clean: dict[str, cells.Run] = {}
    for launcher in cells.LAUNCHERS:
        same = cells.reference_launcher(script, launcher)
        if same not in clean:
            clean[same] = cells.run(script, same, corpus, tmp_path / f"clean-{same}", fails=False, with_us=False)
            assert clean[same].code == 0, clean[same].output
        check(script, launcher, clean[same], tmp_path / launcher, corpus)
        without = cells.run(script, launcher, corpus, tmp_path / f"{launcher}-without", fails=True, with_us=False)
        assert without.code not in (0, None)
