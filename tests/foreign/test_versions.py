"""The Trainer script and TRL's with other versions than those that are installed: with `harness run`, and redone in place by the mixin.

Current versions are tested by every other file here. These are fetched by pip into a folder of their own.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.foreign import cells
from tests.foreign.test_launchers import TOLERANCE, check

# It wants a hub before 2.0, which wants httpx.
OLDEST_TRANSFORMERS = ["transformers==5.17.0", "huggingface_hub<2", "httpx", "httpcore", "h11", "anyio", "certifi", "idna"]
OLDER_TRL = ["trl==1.0.0"]
VERSIONS = {"transformers": OLDEST_TRANSFORMERS, "trl": OLDER_TRL, "both": [*OLDEST_TRANSFORMERS, *OLDER_TRL]}


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("packages", VERSIONS.values(), ids=VERSIONS)
def test_scripts_recover_with_older_versions(packages: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl")
    site = tmp_path / "site"
    fetched = subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), *packages])
    if fetched.returncode:
        pytest.skip("pip cannot get " + ", ".join(packages))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])]))
    # accelerate calls the device of a rank cpu:0, and transformers 5.17 cannot resume there: torch.load takes no such location.
    device = {"ACCELERATE_TORCH_DEVICE": "cpu"}
    corpus = cells.make_corpus(tmp_path / "corpus.txt")
    for script in ("hf_trainer", "trl_sft"):
        start = functools.partial(cells.run, script, "torchrun", corpus, environment=device)
        clean = start(tmp_path / f"{script}-clean", fails=False, with_us=False)
        assert clean.code == 0, clean.output
        check(script, "torchrun", clean, tmp_path / f"{script}-run", corpus, device)
        redone = start(tmp_path / f"{script}-mixin", fails=True, with_us=False, more=["--oom_recovery", "True"])
        assert redone.code == 0 and f"samples at once {cells.MICRO} -> {cells.MICRO // 2}" in redone.output, redone.output
        assert redone.losses.keys() == clean.losses.keys()
        for step, loss in clean.losses.items():
            assert redone.losses[step] == pytest.approx(loss, rel=TOLERANCE)
