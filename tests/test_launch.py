"""launch/run.py: which command it starts, that nothing is left of it, and which exit code it ends with."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import cgroups, processes
from launch import machine, run
from launch.command import LaunchError, Options, Plan, choose_engine, make_plan, output_dir_of, shell_line, yaml_scalars
from tests.launching import ROOT, Kind, launched, run_launcher

FOUR = ["GPU-aaaa0", "GPU-bbbb1", "GPU-cccc2", "GPU-dddd3"]
EIGHT = [f"GPU-{index}{index}" for index in range(8)]

# Reports each rank's view into rank<N>.json, then does what the test asks.
RANK_SCRIPT = """
import json, os, signal, sys, time
out, mode = sys.argv[sys.argv.index("--output_dir") + 1], sys.argv[-1]
rank = int(os.environ.get("RANK", "0"))
os.makedirs(out, exist_ok=True)
names = ("WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "ACCELERATE_USE_FSDP", "FSDP_VERSION")
with open(f"{out}/rank{rank}.json", "w") as file:
    json.dump({"argv": sys.argv[1:], **{name: os.environ.get(name) for name in names}}, file)

def report(code, reason):
    if rank == 0:
        with open(f"{out}/exit.json", "w") as file:
            json.dump({"code": code, "reason": reason, "rank": rank, "time": time.time()}, file)

def stop(signum, frame):
    time.sleep(0.5)
    open(f"{out}/saved{rank}", "w").close()
    report(75, "saved after " + signal.Signals(signum).name)
    os._exit(75)

if mode.startswith("exit"):
    code = int(mode[4:])
    report(code, "asked for")
    sys.exit(code)
if mode == "save":
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGUSR1, stop)
    signal.signal(signal.SIGINT, stop)
if mode == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
if mode in ("save", "deaf"):
    print(f"ready{rank}", flush=True)
    time.sleep(60)
if mode == "orphan":
    import subprocess
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "rank script.py"  # a blank in the path: nothing is joined into a shell string
    path.write_text(RANK_SCRIPT)
    return path


@pytest.fixture
def yaml_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\nmixed_precision: 'no'\nnum_machines: 1\nnum_processes: 8\n")
    return path


def plan_of(line: str, physical: list[str], script: Path, environ: dict[str, str] | None = None) -> Plan:
    options, script_args = run.read_options([*shlex.split(line.split("--", 1)[0]), *shlex.split("--" + line.split("--", 1)[1])])
    options.script = str(script)
    return make_plan(options, script_args, environ or {}, physical)


def launcher_part(plan: Plan, script: Path) -> list[str]:
    """The command up to the script, with the tool's name instead of its path and PORT for the free port."""
    tokens = plan.command[: next(index for index, token in enumerate(plan.command) if token.endswith(script.name))]
    tokens[0] = Path(tokens[0]).name
    for index, token in enumerate(tokens):
        if token in ("--master_port", "--main_process_port"):
            tokens[index + 1] = "PORT"
    return tokens


# ---- the command line is cut in two ----


@pytest.mark.parametrize(
    ("argv", "own", "rest"),
    [
        (["--engine", "ddp", "--", "--config", "y.yaml"], ["--engine", "ddp"], ["--config", "y.yaml"]),
        (["--config", "r.yaml", "--lr", "1", "--config", "y.yaml"], ["--config_file", "r.yaml"], ["--lr", "1", "--config", "y.yaml"]),
        (["--config-file=r.yaml", "--num-gpus", "2"], ["--config_file=r.yaml", "--num_processes", "2"], []),
        (["--nproc=2", "--dry-run", "--x"], ["--num_processes=2", "--dry_run"], ["--x"]),
        (["--nproc_per_node", "2", "a b.py"], ["--num_processes", "2"], ["a b.py"]),
        (["--engine", "--", "--x"], ["--engine"], ["--x"]),
        ([], [], []),
    ],
)
def test_launcher_options_come_first(argv: list[str], own: list[str], rest: list[str]) -> None:
    assert run.split_command_line(argv) == (own, rest)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--engine foo", "invalid choice: 'foo'"),
        ("--engine", "expected one argument"),
        ("--num_processes 0", "--num_processes must be at least 1, not 0"),
        ("--num_processes two", "invalid int value: 'two'"),
        ("--config_file a --template b", "--config_file and --template were both given"),
        ("--num_nodes 2 --master_addr a", "needs --node_rank"),
        ("--num_nodes 2 --node_rank 0", "needs --master_addr"),
        ("--num_nodes 2 --node_rank 2 --master_addr a", "from 0 to 1, not 2"),
    ],
)
def test_wrong_launcher_options(line: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert run.main(line.split()) == 2
    assert message in capsys.readouterr().err


# ---- which command ----


def test_accelerate_gets_full_names_first_then_the_script(script: Path, yaml_file: Path) -> None:
    """accelerate refuses `--config`; the script's own --config stays the script's."""
    plan = plan_of(f"--engine fsdp --config {yaml_file} --num_gpus 2 -- --config 'y z.yaml'", FOUR, script)
    assert launcher_part(plan, script) == shlex.split(
        f"accelerate launch --config_file {yaml_file} --num_processes 2 --num_machines 1 --machine_rank 0 "
        "--main_process_ip 127.0.0.1 --main_process_port PORT"
    )
    assert plan.command[-3:] == [str(script), "--config", "y z.yaml"]


def test_a_users_yaml_knows_its_number_of_processes(script: Path, yaml_file: Path) -> None:
    plan = plan_of(f"--engine fsdp --config {yaml_file}", EIGHT, script)
    assert "--num_processes" not in plan.command


def test_torchrun(script: Path) -> None:
    plan = plan_of("--engine ddp --output_dir o", FOUR, script)
    assert launcher_part(plan, script) == shlex.split("torchrun --nnodes 1 --nproc_per_node 4 --master_addr 127.0.0.1 --master_port PORT")
    assert plan.output_dir == Path("o")


def test_torchrun_on_two_machines(script: Path) -> None:
    port = machine.free_port()
    line = f"--engine ddp --num_nodes 2 --node_rank 1 --master_addr 192.0.2.1 --master_port {port}"
    plan = plan_of(line, FOUR, script)
    tail = f"--node_rank 1 --nproc_per_node 4 --master_addr 192.0.2.1 --master_port {port}"
    assert shlex.join(plan.command[1:-1]) == f"--nnodes 2 {tail}"


def test_fsdp_without_a_yaml_is_torchruns(script: Path) -> None:
    plan = plan_of("--engine auto --nproc 2 -- --fsdp full_shard", FOUR, script)
    assert Path(plan.command[0]).name == "torchrun"


def test_device_map_is_one_plain_process(script: Path) -> None:
    plan = plan_of("--engine device_map -- --device_map dynamic", FOUR, script)
    assert Path(plan.command[0]).name.startswith("python") and plan.command[1:] == [str(script), "--device_map", "dynamic"]
    assert "CUDA_VISIBLE_DEVICES" not in plan.environ


def test_one_process_asked_for_is_one_card(script: Path) -> None:
    plan = plan_of("--engine auto --num_processes 1", FOUR, script, {"CUDA_VISIBLE_DEVICES": "2,3"})
    assert plan.command[1:] == [str(script)] and plan.environ["CUDA_VISIBLE_DEVICES"] == "2"


@pytest.mark.parametrize(
    ("script_args", "num_processes", "engine"),
    [
        ([], 1, "python"),
        ([], 4, "fsdp"),
        (["--deepspeed", "ds_configs/zero2_offload.json"], 4, "zero2"),
        (["--deepspeed=mine.json"], 1, "zero3"),
        (["--device-map", "auto"], 1, "device_map"),
        (["--fsdp", "full_shard"], 4, "fsdp"),
    ],
)
def test_engine_auto(script_args: list[str], num_processes: int, engine: str) -> None:
    assert choose_engine("auto", script_args, num_processes) == engine


DS = "--deepspeed ds.json"


@pytest.mark.parametrize(
    ("visible", "asked", "part"),
    [
        (None, "", "--num_gpus 8"),
        (None, "--num_gpus 2", "--num_gpus 2"),
        ("4,5,6,7", "--num_gpus 4", "--include localhost:4,5,6,7"),
        ("4,5,6,7", "", "--include localhost:4,5,6,7"),
        ("4,5,6,7", "--num_gpus 2", "--include localhost:4,5"),
        ("GPU-77,GPU-00", "", "--include localhost:7,0"),
        ("3,99,4", "", "--include localhost:3"),  # CUDA stops at a card that does not exist
    ],
)
def test_deepspeed_takes_the_visible_cards(script: Path, visible: str | None, asked: str, part: str) -> None:
    """Given a number, the runner drops CUDA_VISIBLE_DEVICES and takes cards 0, 1, ..."""
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    plan = plan_of(f"--engine zero3 {asked} -- {DS}", EIGHT, script, environ)
    assert shlex.join(launcher_part(plan, script)) == f"deepspeed {part} --master_addr 127.0.0.1 --master_port PORT"
    assert plan.unset == ([] if visible is None else ["CUDA_VISIBLE_DEVICES"])
    assert "DS_ACCELERATOR" not in plan.environ


def test_deepspeed_without_gpus(script: Path) -> None:
    plan = plan_of(f"--engine zero3 --num_gpus 2 -- {DS}", [], script)
    assert plan.environ["DS_ACCELERATOR"] == "cpu" and "--num_gpus" in plan.command


def test_deepspeed_over_several_machines(script: Path, tmp_path: Path) -> None:
    hosts, port = tmp_path / "hosts", machine.free_port()
    hosts.write_text("a slots=4\nb slots=4\n")
    plan = plan_of(f"--engine zero2 --hostfile {hosts} --master_addr 192.0.2.1 --master_port {port} -- {DS}", FOUR, script)
    assert shlex.join(plan.command[1:-3]) == f"--hostfile {hosts} --master_addr 192.0.2.1 --master_port {port}"
    plan = plan_of(f"--engine zero2 --hostfile {hosts} --node_rank 1 --master_addr 192.0.2.1 --master_port {port} -- {DS}", FOUR, script)
    assert shlex.join(plan.command[3:6]) == "--no_ssh --node_rank 1"
    assert plan.files == {}


def test_deepspeed_on_machines_that_are_started_by_themselves(script: Path) -> None:
    line = f"--engine zero3 --num_nodes 3 --node_rank 2 --master_addr 192.0.2.1 --master_port 29511 -- {DS}"
    plan = plan_of(line, FOUR, script)
    ((path, text),) = plan.files.items()
    assert text == "node0 slots=4\nnode1 slots=4\nnode2 slots=4\n"
    part = f"--hostfile {path} --no_ssh --node_rank 2 --master_addr 192.0.2.1 --master_port 29511"
    assert shlex.join(launcher_part(plan, script)[1:]).replace("PORT", "29511") == part
    with pytest.raises(LaunchError, match="CUDA_VISIBLE_DEVICES=2,3: deepspeed on several machines takes the first cards"):
        plan_of(line, FOUR, script, {"CUDA_VISIBLE_DEVICES": "2,3"})


def test_over_ssh_the_environment_goes_along(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts, home = tmp_path / "hosts", tmp_path / "home"
    hosts.write_text("a slots=4\nb slots=4\n")
    home.mkdir()
    monkeypatch.setattr(Path, "home", lambda: home)
    monkeypatch.chdir(tmp_path)
    (home / ".deepspeed_env").write_text("HF_HOME=/mine\n\n")
    environ = {"HF_HOME": "/shell", "HF_TOKEN": "secret", "GLOO_SOCKET_IFNAME": "eth0", "PATH": "/bin", "OMP_NUM_THREADS": "3"}
    plan = plan_of(f"--engine zero2 --hostfile {hosts} --master_addr 192.0.2.1 --master_port 29511 -- {DS}", FOUR, script, environ)
    ((path, text),) = plan.files.items()
    assert plan.environ["DS_ENV_FILE"] == str(path)
    assert dict(line.split("=") for line in text.splitlines()) == {
        "HF_HOME": "/mine",
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "3",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }


def test_files_of_a_plan_are_there_while_it_runs(tmp_path: Path) -> None:
    plan = Plan(["cat", str(tmp_path / "file")], files={tmp_path / "file": "text"})
    assert run.start(plan, Options()) == 0
    assert not (tmp_path / "file").exists()
    plan.command[1] += "-that-is-not-there"
    assert run.start(plan, Options()) == 1


def test_deepspeeds_json_comes_from_the_launchers_config(script: Path, tmp_path: Path) -> None:
    (tmp_path / "my ds.json").write_text("{}")
    plan = plan_of(f"--engine zero1 --config '{tmp_path}/my ds.json' -- --output_dir o", FOUR, script)
    assert plan.command[-4:] == ["--output_dir", "o", "--deepspeed", f"{tmp_path}/my ds.json"]


@pytest.mark.parametrize("engine", ["zero1", "zero2", "zero3", "fsdp"])
def test_every_engine_has_its_template(script: Path, engine: str) -> None:
    plan = plan_of(f"--engine {engine} -- --output_dir o", FOUR, script)
    flag, folder, name = (
        ("--config_file", "fsdp_configs", "full_shard.yaml") if engine == "fsdp" else ("--deepspeed", "ds_configs", engine + ".json")
    )
    given = Path(plan.command[plan.command.index(flag) + 1])
    assert given.resolve() == ROOT / folder / name and given.is_file()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--engine zero3 --template nix", "--template nix: ds_configs/nix.json is not there; templates of this engine: zero1, zero2"),
        ("--engine fsdp --config_file nix.yaml", "--config_file nix.yaml: no such file"),
        ("--engine ddp --config_file a.yaml", "--engine ddp: its launcher has no config file"),
        ("--engine ddp --hostfile h", "--hostfile is deepspeed's"),
        ("--engine device_map --num_processes 2", "--engine device_map is one process, but --num_processes is 2"),
        ("--engine ddp --num_processes 5", "--num_processes 5: only 4 GPU(s) are visible here"),
        (f"--engine zero3 --template zero2 -- {DS}", "a DeepSpeed config was given twice"),
    ],
)
def test_what_cannot_be_started(script: Path, line: str, message: str) -> None:
    with pytest.raises(LaunchError) as caught:
        plan_of(line, FOUR, script)
    assert message in str(caught.value)


def test_a_launcher_option_after_the_script_is_warned_of(script: Path) -> None:
    plan = plan_of("--engine ddp -- --lr 1 --config_file run.yaml --config y.yaml", FOUR, script)
    assert [note for note in plan.notes if "after the script" in note] == [
        "--config_file comes after the script's arguments, so the script gets it; put it first for the launcher"
    ]
    assert plan.command[-4:] == ["--config_file", "run.yaml", "--config", "y.yaml"]


# ---- ports ----


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def test_no_port_given_takes_a_free_one_and_says_so(script: Path) -> None:
    plan = plan_of("--engine ddp", FOUR, script, {"MASTER_PORT": "29500"})
    port = plan.command[plan.command.index("--master_port") + 1]
    assert machine.port_is_free(int(port))
    assert plan.notes == ["MASTER_PORT=29500 of the environment is not used; --master_port sets the port", f"port {port} (free now)"]
    assert plan.unset == ["MASTER_PORT"]


def test_a_taken_port_is_refused_when_asked_for(script: Path, taken: int, yaml_file: Path) -> None:
    with pytest.raises(LaunchError, match=f"--master_port {taken}: the port is in use on this machine"):
        plan_of(f"--engine ddp --master_port {taken}", FOUR, script)
    with yaml_file.open("a") as file:
        file.write(f"main_process_port: {taken}\n")
    with pytest.raises(LaunchError, match=f"main_process_port {taken}: the port is in use"):
        plan_of(f"--engine fsdp --config_file {yaml_file}", FOUR, script)


def test_a_taken_port_on_the_main_machine_of_several(script: Path, taken: int) -> None:
    line = f"--engine ddp --num_nodes 2 --master_port {taken}"
    with pytest.raises(LaunchError, match=f"--master_port {taken}: the port is in use"):
        plan_of(line + " --node_rank 0 --master_addr 127.0.0.1", FOUR, script)
    plan_of(line + " --node_rank 1 --master_addr 192.0.2.1", FOUR, script)  # not this machine's port: no business of ours


def test_several_machines_need_one_known_port(script: Path) -> None:
    with pytest.raises(LaunchError, match="--master_port 0: several machines need one port"):
        plan_of("--engine ddp --num_nodes 2 --node_rank 1 --master_addr 192.0.2.1 --master_port 0", FOUR, script)


# ---- the environment ----


def test_environment_defaults_give_way_to_the_users(script: Path) -> None:
    cores = cgroups.usable_cores()
    plan = plan_of("--engine ddp --nproc 1", [], script)
    assert plan.environ == {
        "OMP_NUM_THREADS": str(cores),
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        assert "PYTORCH_ALLOC_CONF" not in plan_of("--engine ddp --nproc 1", [], script, {name: "backend:native"}).environ
    assert plan_of(f"--engine ddp --nproc {4 * cores}", [], script).environ["OMP_NUM_THREADS"] == "1"


def test_shown_command_can_be_typed(script: Path) -> None:
    plan = Plan(["torchrun", "a b.py", "--x", "it's"], environ={"B": "2 3", "A": "1"}, unset=["MASTER_PORT"])
    assert shell_line(plan) == "env -u MASTER_PORT A=1 'B=2 3' torchrun 'a b.py' --x 'it'\"'\"'s'"
    assert shlex.split(shell_line(plan))[3:] == ["A=1", "B=2 3", "torchrun", "a b.py", "--x", "it's"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, ["0", "1", "2", "3"]), ("", []), ("-1", []), ("2, 1", ["2", "1"]), ("NoDevFiles", []), ("1,7,2", ["1"])],
)
def test_visible_gpus(value: str | None, expected: list[str]) -> None:
    assert machine.visible_gpus({} if value is None else {"CUDA_VISIBLE_DEVICES": value}, FOUR) == expected


def test_cards_without_a_number() -> None:
    assert machine.device_indices(["GPU-cccc", "0"], FOUR) == [2, 0]
    assert machine.device_indices(["MIG-1"], FOUR) is None


@pytest.mark.parametrize(("text", "cores"), [("150000 100000", 2), ("50000 100000", 1), ("max 100000", None)])
def test_cores_of_a_container(tmp_path: Path, text: str, cores: int | None) -> None:
    (tmp_path / "cpu.max").write_text(text)
    mine = len(os.sched_getaffinity(0))
    assert cgroups.usable_cores(tmp_path) == min(mine, cores or mine)


def test_yaml_scalars(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("a: 1  # one\nb: 'x # y'\nc:\n  d: 2\ne: null\nf: ~\noutput_dir: \"my out\"\n")
    assert yaml_scalars(path) == {"a": "1", "b": "x # y", "output_dir": "my out"}
    assert output_dir_of(["--config", str(path)]) == Path("my out")
    assert output_dir_of(["--config", str(path), "--output-dir=x"]) == Path("x")
    assert yaml_scalars(tmp_path / "nix.yaml") == {}


# ---- the exit code ----


@pytest.mark.parametrize(
    ("written", "ended", "must_report", "code", "line"),
    [
        ('{"code": 0, "reason": "done"}', processes.Ended(0), True, 0, ""),
        ('{"code": 2, "reason": "no file"}', processes.Ended(1), True, 2, "exit code 2: no file (the launcher ended with 1)"),
        (
            '{"code": 75, "reason": "saved"}',
            processes.Ended(1, signal.SIGTERM),
            True,
            75,
            "exit code 75: saved (the launcher ended with 1)",
        ),
        ('{"code": 0, "reason": ""}', processes.Ended(134), True, 0, "exit code 0 (the launcher ended with 134)"),
        ("", processes.Ended(3), True, 3, "the launcher ended with 3"),
        ("", processes.Ended(1, signal.SIGINT), True, 130, "stopped by SIGINT; the run left no exit.json"),
        ("", processes.Ended(0), False, 0, ""),
        ("{", processes.Ended(0), True, 1, "the run's exit.json cannot be read; the launcher ended with 0"),
        ('{"code": "x"}', processes.Ended(4), True, 4, "the run's exit.json cannot be read; the launcher ended with 4"),
    ],
)
def test_final_code(tmp_path: Path, written: str, ended: processes.Ended, must_report: bool, code: int, line: str) -> None:
    if written:
        (tmp_path / "exit.json").write_text(written)
    plan = Plan(["x"], output_dir=tmp_path, must_report=must_report)
    assert run.final_code(plan, ended, b"") == (code, line)


def test_an_older_runs_exit_file_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "exit.json").write_text('{"code": 75, "reason": "old", "time": 1.0}')
    before = run.read_exit_file(tmp_path)
    assert run.final_code(Plan(["x"], output_dir=tmp_path), processes.Ended(9), before)[0] == 9


def test_a_launcher_that_says_zero_for_a_run_that_did_not_finish(tmp_path: Path) -> None:
    """deepspeed's runner ends with 0 when its launch process was killed by a signal."""
    assert run.final_code(Plan(["x"], output_dir=tmp_path, must_report=True), processes.Ended(0), b"")[0] == 1
    assert run.final_code(Plan(["x", "--help"], output_dir=tmp_path, must_report=True), processes.Ended(0), b"")[0] == 0


def test_what_the_run_told_the_launcher_counts_first(tmp_path: Path) -> None:
    (tmp_path / "exit.json").write_text('{"code": 1, "reason": "folder"}')
    plan = Plan(["x"], output_dir=tmp_path)
    assert run.final_code(plan, processes.Ended(1), b"", b'{"code": 2, "reason": "told"}')[0] == 2
    assert run.final_code(Plan(["x"]), processes.Ended(1), b"", b'{"code": 2, "reason": "told"}')[0] == 2


# ---- the real launchers ----


def view(out: Path, rank: int) -> dict[str, str]:
    return json.loads((out / f"rank{rank}.json").read_text())


@pytest.mark.slow  # test_main_job starts each of them in the same way
@pytest.mark.parametrize("kind", ["torchrun", "deepspeed", "accelerate"])
def test_helper_starts_each_launcher(tmp_path: Path, script: Path, yaml_file: Path, kind: Kind) -> None:
    out = tmp_path / "out"
    result = run_launcher(
        kind, 2, ["--output_dir", str(out), "exit0"], script=script, config_file=yaml_file if kind == "accelerate" else None, timeout_s=60
    )
    assert result.returncode == 0, result.stdout
    assert result.exit_json is not None and result.exit_json["code"] == 0 and result.rows == []
    assert [view(out, rank)["WORLD_SIZE"] for rank in (0, 1)] == ["2", "2"]
    assert view(out, 0)["OMP_NUM_THREADS"] == "1"
    assert view(out, 1)["FSDP_VERSION"] == ("2" if kind == "accelerate" else None)


@pytest.mark.parametrize(("engine", "mode", "code"), [("fsdp", "exit75", 75), ("ddp", "exit2", 2), ("auto", "exit1", 1)])
def test_run_ends_with_the_runs_code(tmp_path: Path, script: Path, yaml_file: Path, engine: str, mode: str, code: int) -> None:
    """torchrun and accelerate end with 1 whatever a rank returned."""
    out = tmp_path / "out"
    result = run_launcher(
        "run",
        1 if engine == "auto" else 2,
        ["--output_dir", str(out), mode],
        script=script,
        config_file=yaml_file if engine == "fsdp" else None,
        launcher_args=["--engine", engine],
        output_dir=out,
        timeout_s=60,
    )
    assert result.returncode == code, result.stdout
    assert "launch: env " in result.stdout
    assert view(out, 0)["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert view(out, 0)["ACCELERATE_USE_FSDP"] == ("true" if engine == "fsdp" else None)
    if engine != "auto":
        assert view(out, 1)["LOCAL_RANK"] == "1"


@pytest.mark.parametrize(
    ("engine", "signum"),
    [
        pytest.param("ddp", signal.SIGTERM, marks=pytest.mark.slow),  # the next two have its launcher and its signal
        ("ddp", signal.SIGUSR1),
        pytest.param("zero3", signal.SIGTERM, marks=pytest.mark.slow),  # deepspeed's launcher and this signal: tests/faults/test_signals.py
        ("auto", signal.SIGINT),
    ],
)
def test_a_stop_lets_every_rank_save(tmp_path: Path, script: Path, engine: str, signum: int) -> None:
    out, num_processes = tmp_path / "out", 1 if engine == "auto" else 2
    args = [*(["--deepspeed", "x.json"] if engine == "zero3" else []), "--output_dir", str(out), "save"]
    with launched("run", num_processes, args, script=script, launcher_args=["--engine", engine], output_dir=out) as launch:
        for rank in range(num_processes):
            launch.wait_for(f"ready{rank}", 30)
        launch.signal(signum)
        result = launch.finish(30, orphans_s=0)
    assert result.returncode == 75, result.stdout
    assert result.exit_json is not None and result.exit_json["code"] == 75
    assert [(out / f"saved{rank}").exists() for rank in range(num_processes)] == [True] * num_processes


@pytest.mark.parametrize("engine", ["ddp", pytest.param("zero3", marks=pytest.mark.slow)])
def test_ranks_that_will_not_stop_are_killed(tmp_path: Path, script: Path, engine: str) -> None:
    """Every rank of torchrun has a session of its own, and a stopped deepspeed runner leaves its ranks: both are found."""
    out = tmp_path / "out"
    args = [*(["--deepspeed", "x.json"] if engine == "zero3" else []), "--output_dir", str(out), "deaf"]
    with launched("run", 2, args, script=script, launcher_args=["--engine", engine, "--grace_s", "1"], output_dir=out) as launch:
        for rank in (0, 1):
            launch.wait_for(f"ready{rank}", 30)
        started = time.monotonic()
        launch.signal(signal.SIGTERM)
        result = launch.finish(30, orphans_s=0)
    assert result.returncode == 128 + signal.SIGTERM, result.stdout
    assert time.monotonic() - started < 10


def test_a_second_interrupt_kills_at_once(tmp_path: Path, script: Path) -> None:
    out = tmp_path / "out"
    with launched("run", 2, ["--output_dir", str(out), "deaf"], script=script, launcher_args=["--engine", "ddp"]) as launch:
        launch.wait_for("ready0", 30)
        launch.wait_for("ready1", 30)
        launch.signal(signal.SIGINT)
        launch.wait_for("SIGINT: stopping", 5)
        launch.signal(signal.SIGINT)
        result = launch.finish(20, orphans_s=0)
    assert result.returncode == 128 + signal.SIGINT


def test_what_a_run_leaves_behind_is_ended(tmp_path: Path, script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = processes.Job([sys.executable, str(script), "--output_dir", str(tmp_path), "orphan"], os.environ, grace_s=5)
    ended = job.run()
    assert ended.code == 0 and ended.num_killed == 0  # SIGTERM was enough
    assert processes.processes_with(processes.MARK, job.mark) == []


def test_helper_finds_what_is_left(tmp_path: Path, script: Path) -> None:
    with (
        launched("python", 1, ["--output_dir", str(tmp_path), "orphan"], script=script) as launch,
        pytest.raises(AssertionError, match=r"1 process.* left 0 s after the launcher ended"),
    ):
        launch.finish(20, orphans_s=0)
    assert launch.processes() == []


def test_helper_ends_at_its_time_limit(tmp_path: Path, script: Path) -> None:
    with launched("python", 1, ["--output_dir", str(tmp_path), "deaf"], script=script) as launch:
        started = time.monotonic()  # not before: another launch of the tests may have been waited for
        with pytest.raises(AssertionError, match="not done in 2 s"):
            launch.finish(2)
        assert time.monotonic() - started < 10


def test_dry_run_starts_nothing(script: Path, tmp_path: Path) -> None:
    result = run_launcher(
        "run",
        2,
        ["--output_dir", str(tmp_path / "out"), "exit0"],
        script=script,
        launcher_args=["--engine", "ddp", "--dry_run"],
        timeout_s=20,
    )
    assert result.returncode == 0 and "torchrun --nnodes 1 --nproc_per_node 2" in result.stdout
    assert not (tmp_path / "out").exists()


def test_defaults_are_options(script: Path) -> None:
    options, script_args = run.read_options([])
    assert options == Options() and script_args == []


def test_wrong_input_is_2_also_without_a_folder() -> None:
    """torchrun ends with 1, and a run without --output_dir has no folder for its exit.json."""
    result = run_launcher("run", 2, ["--learnig_rate", "1"], launcher_args=["--engine", "ddp"], timeout_s=60)
    assert result.returncode == 2, result.stdout
    assert "did you mean --learning_rate?" in result.stdout
    assert "Traceback" not in result.stdout.split("launch: exit code 2")[1]


@pytest.mark.parametrize("engine", ["ddp", pytest.param("zero2", marks=pytest.mark.slow)])
def test_the_message_of_wrong_input_outlives_a_faster_rank(engine: str, tmp_path: Path) -> None:
    """The first rank to leave makes the launcher end the others, also rank 0 before it has said anything."""
    slow = tmp_path / "slow_rank_0.py"
    slow.write_text(
        "import os, sys, time\nfrom harness import run_clm\ntime.sleep(3 if os.environ['RANK'] == '0' else 0)\nsys.exit(run_clm.main())\n"
    )
    result = run_launcher("run", 2, ["--learnig_rate", "1"], launcher_args=["--engine", engine], script=slow, timeout_s=60)
    assert result.returncode == 2, result.stdout
    assert result.stdout.count("did you mean --learning_rate?") == 1, result.stdout
    assert "rank 1: wrong input" not in result.stdout


def test_wrong_input_of_another_rank_alone_is_said(tmp_path: Path) -> None:
    """A file that only one node lacks: rank 0 has nothing to say, and waits for the others."""
    script = tmp_path / "wrong_rank_1.py"
    script.write_text(
        "import os, sys, time\nfrom harness import run_clm\nrun_clm.RANK_0_TELLS_S = 1\n"
        "if os.environ['RANK'] == '0':\n    time.sleep(50)\nsys.exit(run_clm.main())\n"
    )
    result = run_launcher("run", 2, ["--learnig_rate", "1"], launcher_args=["--engine", "ddp"], script=script, timeout_s=60)
    assert result.returncode == 2, result.stdout
    assert "rank 1: wrong input: --learnig_rate: unknown argument" in result.stdout, result.stdout


# ---- the shell scripts ----


@pytest.mark.parametrize(
    ("name", "tool"), [("deepspeed", "deepspeed"), ("fsdp", "accelerate"), ("ddp", "torchrun"), ("device_map", "python")]
)
def test_shell_scripts_start_their_launcher(tmp_path: Path, script: Path, name: str, tool: str) -> None:
    """From any folder; `--config` is the launcher's, and goes on under its full name."""
    (tmp_path / "my.yaml").write_text("num_processes: 2\n")
    tool = {"deepspeed": "deepspeed", "fsdp": "accelerate", "ddp": "torchrun", "device_map": "python"}[name]
    config = ["--config", "my.yaml"] if name in ("deepspeed", "fsdp") else []
    command = [str(ROOT / f"launch/{name}.sh"), *config, "--dry_run", "--script", str(script), "--output_dir", "o"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    tokens = shlex.split(done.stdout)
    assert any(Path(token).name.startswith(tool) for token in tokens)
    tail = {"deepspeed": ["--deepspeed", "my.yaml"]}.get(name, [])
    assert tokens[tokens.index(script.name) :] == [script.name, "--output_dir", "o", *tail]
    if name == "fsdp":
        assert tokens[tokens.index("--config_file") + 1] == "my.yaml"
