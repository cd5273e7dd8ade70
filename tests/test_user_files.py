"""Files of a user's that are no ordinary files, too large, or nested too deeply: an answer at once, whoever reads them."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import user_files
from harness.findings import UserError


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """A named pipe that nobody writes to."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


@pytest.fixture(autouse=True)
def _time_limit() -> Iterator[None]:
    """A test that blocks fails instead of holding up the others."""
    import signal

    def stop(*_: object) -> None:
        raise TimeoutError("blocked for 20 s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def message(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    return str(caught.value)


def test_pipes_devices_and_folders_are_refused_before_they_are_opened(pipe: Path, tmp_path: Path) -> None:
    for path in (str(pipe), "/dev/zero"):
        expected = f"error   --config: cannot read {path}: is not a regular file -> give the path of a regular file"
        assert message(functools.partial(user_files.read_user_text, path, "--config")) == expected
        with pytest.raises(OSError, match="is not a regular file"):
            user_files.open_regular(path)
    assert "Is a directory" in message(lambda: user_files.read_user_text(tmp_path, "--config"))


@pytest.mark.parametrize(
    ("missing", "fix"),
    [("trian.txt", "train.txt"), ("b.bin", None), ("no/train.txt", None), ("\0", None)],
)
def test_a_file_of_a_similar_name_is_named(missing: str, fix: str | None, tmp_path: Path) -> None:
    (tmp_path / "train.txt").touch()
    assert user_files.instead_of(f"{tmp_path}/{missing}") == (fix and f"did you mean {tmp_path}/{fix}?")


def test_a_file_may_not_be_larger_than_its_limit(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"0123456789")
    assert user_files.read_bytes(file, max_bytes=10) == b"0123456789"
    with pytest.raises(OSError, match="has more than 9 bytes"):
        user_files.read_bytes(file, max_bytes=9)


def test_the_shells_own_pipes_are_read() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"learning_rate: 1e-4\r\n")
    os.close(writer)
    try:
        assert user_files.read_user_text(f"/dev/fd/{reader}", "--config") == "learning_rate: 1e-4\n"
    finally:
        os.close(reader)


@pytest.mark.parametrize("opening", ["[", '{"a":', '["[",', "{a: ", '# "\n['])
@pytest.mark.parametrize("parse", [user_files.parse_json, user_files.parse_yaml])
def test_depth_is_limited_before_anything_is_parsed(parse: Callable[[str], object], opening: str) -> None:
    began_s = time.process_time()
    with pytest.raises(ValueError):
        parse(opening * 100_000)
    assert time.process_time() - began_s < 2  # PyYAML's scanner took half a minute


def test_what_is_nested_as_files_are_is_read() -> None:
    deep = "[" * user_files.MAX_NESTING + "]" * user_files.MAX_NESTING
    assert json.dumps(user_files.parse_json(deep)) == deep
    assert json.dumps(user_files.parse_yaml(deep)) == deep
    with pytest.raises(ValueError, match="nested too deeply"):
        user_files.parse_json(f"[{deep}]")
    long = json.dumps([{"text": "[[[[{{{{"}] * 1000)  # brackets within texts and one after another are not within each other
    assert len(user_files.parse_json(long)) == 1000


def test_readers_of_a_users_files_refuse_pipes(pipe: Path, tmp_path: Path) -> None:
    from harness.check_launch import read_hostfile
    from harness.data_sources import expand
    from harness.deepspeed_json import read_deepspeed_config
    from harness.foreign_command import read_config_file
    from harness.model_files import read_safetensors_header
    from harness.parse_log import parse_run
    from harness.parsing import read_yaml

    readers: list[Callable[[Path], object]] = [read_yaml, read_deepspeed_config, read_hostfile, parse_run]
    readers.append(functools.partial(read_config_file, key="--config_file"))
    for read in readers:
        assert "is not a regular file" in message(functools.partial(read, pipe))
    with pytest.raises(OSError, match="is not a regular file"):
        read_safetensors_header(pipe)
    assert message(lambda: expand([str(pipe)], "--train_file")) == (
        f"error   --train_file: {pipe} is a pipe or a device -> give a regular file: write what comes out of it into one"
    )


def test_folders_with_pipes_in_them(tmp_path: Path) -> None:
    from harness.monitor import RunFollower
    from harness.parse_log import parse_run

    for name in ("metrics.jsonl", "exit.json"):
        os.mkfifo(tmp_path / name)
    follower = RunFollower(tmp_path)
    follower.poll()
    status = follower.status(0.0)
    assert status["state"] == "unknown"
    assert status["unreadable"] == [f"{tmp_path / name}: is not a regular file" for name in ("metrics.jsonl", "exit.json")]
    assert parse_run(tmp_path).unreadable == [f"{tmp_path / 'metrics.jsonl'}: is not a regular file"]


def test_a_run_refuses_pipes_in_its_model_and_output_folder(tmp_path: Path) -> None:
    from harness.args import ModelArguments
    from harness.check_arguments import check_arguments, model_facts
    from harness.machine import Machine
    from harness.modeling import load_config
    from harness.parsing import parse_args

    model, out = tmp_path / "model", tmp_path / "out"
    model.mkdir()
    out.mkdir()
    os.mkfifo(model / "config.json")
    os.mkfifo(out / "train.log")
    args = parse_args(["--model_name_or_path", str(model), "--output_dir", str(out), "--train_file", __file__])
    assert [finding.message for finding in model_facts(args).problems] == [f"{model}/config.json is not a regular file"]
    found = check_arguments(args, engine="ddp", num_processes=1, environ={}, machine=Machine())
    assert f"{out}/train.log is not a regular file" in [finding.message for finding in found if finding.key == "--output_dir"]
    for source in (model, model / "config.json"):  # what `harness plan` and `harness layers` read
        with pytest.raises(UserError, match=f"{model}/config.json is not a regular file"):
            load_config(ModelArguments(config_name=str(source)))
    (model / "config.json").unlink()
    (model / "config.json").write_text(json.dumps({"model_type": "llama"}))
    os.mkfifo(model / "model.safetensors")
    assert [finding.message for finding in model_facts(args).problems] == [f"{model}/model.safetensors is not a regular file"]


def test_an_output_takes_its_place_whole_or_not_at_all(tmp_path: Path) -> None:
    target, link = tmp_path / "a.csv", tmp_path / "link"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    with pytest.raises(OSError, match="No space"), user_files.replacing(link) as file:
        file.write_text("ne")
        raise OSError(28, "No space left on device")
    assert target.read_text() == "old" and sorted(path.name for path in tmp_path.iterdir()) == ["a.csv", "link"]
    with user_files.replacing(link) as file:
        file.write_text("new")
    assert target.read_text() == "new" and link.is_symlink() and target.stat().st_mode & 0o777 == 0o640
    with user_files.replacing("/dev/null") as file:
        assert file == Path("/dev/null")


def test_a_key_that_stands_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^line 3: a stands here and on line 1$"):
        user_files.parse_yaml("a: 1\nb: 2\na: 3\n")
    with pytest.raises(ValueError, match=r"^line 2: b stands here and on line 2$"):
        user_files.parse_yaml("a:\n  [{b: 1, b: 1}]\n")
    merged = "one: &one {x: 1, y: 2}\ntwo: {<<: *one, x: 3}\nthree: {<<: *one}\n"
    assert user_files.parse_yaml(merged)["two"] == {"x": 3, "y": 2}
    assert user_files.parse_yaml("1: a\n'1': b\n") == {1: "a", "1": "b"}
