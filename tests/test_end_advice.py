"""What a run says at the end of its ladder: where a card's memory goes, and what would help, by the planner's estimates."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness import end_advice
from harness.end_advice import advice
from harness.ladder import MemorySettings
from harness.parsing import parse_args
from harness.run_plan import JobFacts

SIZES = "hidden_size=64,intermediate_size=128,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,vocab_size=300"
LOWEST = MemorySettings(1, "full", 64)


def facts(engine: str = "fsdp", num_processes: int = 2, gpu_bytes: int = 2**30) -> JobFacts:
    return JobFacts(engine, num_processes, num_processes, "", gpu_bytes, 512, 1, "fp32")


def arguments(folder: Path, *more: str) -> object:
    text = folder / "text.txt"
    text.write_text("some text\n" * 100)
    return parse_args(
        ["--model_type", "llama", "--config_overrides", SIZES, "--train_file", str(text), "--output_dir", str(folder / "out"), *more]
    )


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one test has measured of the models, the next one knows."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def cached(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.delenv("HARNESS_CACHE", raising=False)
    monkeypatch.setattr("harness.end_advice.TIMEOUT_S", 300.0)  # three models are measured at once, on a machine that may be busy
    return tmp_path


def needs(text: str) -> dict[str, float]:
    return {name: float(size) for size, name in re.findall(r"([\d.]+) with ([^;(.]+?)(?: \(fits\))?[;.]", text)}


def test_the_parts_of_the_peak_and_what_would_help(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = end_advice._changes
    few = ("4 GPUs instead of 2", "--lora_r 16")  # each is a model that is measured
    monkeypatch.setattr(end_advice, "_changes", lambda *job: {name: change for name, change in changes(*job).items() if name in few})
    text = advice(arguments(cached, "--fsdp", "full_shard"), facts(), LOWEST)  # type: ignore[arg-type]
    peak = re.search(r"Expected at the peak with these settings \((\w+), ([\d.]+) GiB\): (.+?)\. By", text)
    assert peak is not None and peak.group(1) in {"forward", "loss", "backward", "reduction", "update"}
    found = needs(text)
    assert set(few) <= set(found), text
    whole = re.search(r"instead of ([\d.]+) GiB", text)
    assert whole is not None and all(size <= float(whole.group(1)) for size in found.values())


def test_what_fits_is_marked(cached: Path) -> None:
    large = advice(arguments(cached, "--fsdp", "full_shard"), facts(gpu_bytes=64 * 2**30), LOWEST)  # type: ignore[arg-type]
    small = advice(arguments(cached, "--fsdp", "full_shard"), facts(gpu_bytes=2**20), LOWEST)  # type: ignore[arg-type]
    assert "(fits)" in large and "(fits)" not in small


def test_ddp_is_told_of_fsdp(cached: Path) -> None:
    text = advice(arguments(cached), facts("ddp"), LOWEST)  # type: ignore[arg-type]
    assert "with --engine fsdp" not in text or needs(text)["--engine fsdp"] > 0
    assert "GPUs instead of" not in text


def test_nothing_is_said_of_what_the_planner_does_not_know(cached: Path) -> None:
    assert advice(arguments(cached), facts("device_map"), LOWEST) == ""  # type: ignore[arg-type]
