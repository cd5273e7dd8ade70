"""Rules about a launcher's command, hostfiles, ports and the environment."""

from __future__ import annotations

import argparse
import re
import shlex
import socket
from pathlib import Path

import pytest

from harness import check_launch as launch_rules
from harness.build_locks import this_machine
from harness.check_launch import check_build_locks, check_environment, check_launch, parse_launch, read_hostfile
from harness.findings import UserError
from tests.checking import AMPERE, ROOT, Rule, check_both, rule_id

SCRIPT = f"{ROOT}/setup.cfg"  # any file that exists stands for the script
LAUNCH_RULES = [
    Rule(
        "--config",
        "error",
        "did you mean --config_file?",
        f"accelerate launch --config run.yaml {SCRIPT}",
        f"accelerate launch --config_file {ROOT}/fsdp_configs/full_shard.yaml {SCRIPT}",
    ),
    Rule(
        "--config_file",
        "error",
        "does not exist",
        f"accelerate launch --config_file /no.yaml {SCRIPT}",
        f"accelerate launch --config_file {ROOT}/fsdp_configs/full_shard.yaml {SCRIPT}",
    ),
    Rule(
        "--config_file",
        "warning",
        "stands after the script",
        f"accelerate launch {SCRIPT} --config_file run.yaml",
        f"accelerate launch {SCRIPT} --config run.yaml",
    ),
    Rule("--num_gpus", "warning", "stands after the script", f"deepspeed {SCRIPT} --num-gpus=4", f"deepspeed --num_gpus=4 {SCRIPT}"),
    Rule(
        "--include",
        "error",
        "exclude each other",
        f"deepspeed --num_gpus 2 --include localhost:0,1 {SCRIPT}",
        f"deepspeed --include localhost:0,1 {SCRIPT}",
    ),
    Rule(
        "--include",
        "error",
        "and --exclude",
        f"deepspeed --include localhost:0 --exclude localhost:1 {SCRIPT}",
        f"deepspeed --include localhost:0 {SCRIPT}",
    ),
    Rule(
        "--num_gpus", "error", "16, but this machine has 8 cards", f"deepspeed --num_gpus 16 {SCRIPT}", f"deepspeed --num_gpus 8 {SCRIPT}"
    ),
    Rule(
        "--nproc_per_node",
        "error",
        "this machine has 8 cards",
        f"torchrun --nproc-per-node 9 {SCRIPT}",
        f"torchrun --standalone --nproc-per-node 8 {SCRIPT}",
    ),
    Rule(
        "--num_processes",
        "error",
        "this machine has 8 cards",
        f"accelerate launch --num_processes 16 {SCRIPT}",
        f"accelerate launch --num_processes 16 --num_machines 2 {SCRIPT}",
    ),
    Rule(
        "--nproc_per_node",
        "error",
        "must be at least 1, not 0",
        f"torchrun --nproc_per_node 0 {SCRIPT}",
        f"torchrun --nproc_per_node gpu {SCRIPT}",
    ),
    Rule("--nnodes", "error", "must be at least 1, not 0", f"torchrun --nnodes=0 {SCRIPT}", f"torchrun --nnodes=1:4 {SCRIPT}"),
    Rule("--num_gpus", "error", "must be at least 1, not 0", f"deepspeed --num_gpus 0 {SCRIPT}", f"deepspeed --num_gpus -1 {SCRIPT}"),
    Rule("--num_nodes", "error", "must be at least 1, not -2", f"deepspeed --num_nodes -2 {SCRIPT}", f"deepspeed --num_nodes 1 {SCRIPT}"),
    Rule(
        "--num_processes",
        "error",
        "must be at least 1, not -3",
        f"accelerate launch --num_processes -3 {SCRIPT}",
        f"accelerate launch --num_processes 3 {SCRIPT}",
    ),
    Rule("command", "error", "names no script", "torchrun --nproc_per_node 2", f"torchrun --nproc_per_node 2 {SCRIPT}"),
    Rule(
        "command",
        "error",
        "there is no no_such.py",
        "torchrun --nproc_per_node 2 no_such.py",
        "torchrun --nproc_per_node 2 -m harness.run_clm",
    ),
    Rule("--hostfile", "error", "cannot read", f"deepspeed --hostfile /no/such {SCRIPT}", f"deepspeed {SCRIPT}"),
    Rule("--master_port", "error", "70000 is no port", f"deepspeed --master_port 70000 {SCRIPT}", f"deepspeed {SCRIPT}"),
    Rule(
        "--master_port",
        "error",
        "each of the 2 machines",
        f"torchrun --nnodes 2 --master_port 0 {SCRIPT}",
        f"torchrun --nnodes 2 {SCRIPT}",
    ),
    Rule("--master_port", "error", "the ranks never meet", f"deepspeed --master_port 0 {SCRIPT}", f"deepspeed {SCRIPT}"),
    Rule(
        "--main_process_port",
        "error",
        "each of the 2 machines",
        f"accelerate launch --num_machines 2 --main_process_port 0 {SCRIPT}",
        f"accelerate launch --main_process_port 0 {SCRIPT}",
    ),
]


@pytest.mark.parametrize("rule", LAUNCH_RULES, ids=rule_id)
def test_launch_rules(rule: Rule) -> None:
    check_both(rule, lambda command: check_launch(parse_launch(shlex.split(command)), {}, AMPERE))


@pytest.mark.parametrize("digits", ["9" * 5000, "²"])
def test_numbers_that_python_does_not_read(digits: str) -> None:
    for command in (f"--num_processes {digits}", f"--num_machines {digits}", f"--main_process_port {digits}", f"--machine_rank {digits}"):
        check_launch(parse_launch(shlex.split(f"accelerate launch {command} {SCRIPT}")), {}, AMPERE)
    check_launch(parse_launch(["python", SCRIPT]), {"WORLD_SIZE": digits, "RANK": digits}, AMPERE)
    (finding,) = check_launch(parse_launch(["torchrun", "--master_port", digits, SCRIPT]), {}, AMPERE)
    assert finding.message == f"{digits[:40]} is no port"


def test_visible_devices_that_the_deepspeed_launcher_drops() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    (finding,) = check_launch(parse_launch(["deepspeed", "--num_gpus=4", SCRIPT]), environ, AMPERE)
    assert (finding.severity, finding.key) == ("warning", "CUDA_VISIBLE_DEVICES")
    assert finding.fix == "--include localhost:4,5,6,7 instead of --num_gpus"
    assert check_launch(parse_launch(["deepspeed", SCRIPT]), environ, AMPERE) == []  # the launcher then turns it into --include itself
    assert check_launch(parse_launch(["torchrun", "--nproc_per_node=4", SCRIPT]), environ, AMPERE) == []


def test_port_in_use_is_an_error_only_where_it_was_asked_for() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        (finding,) = check_launch(parse_launch(["torchrun", "--master_port", str(port), SCRIPT]), {})
        assert finding.key == "--master_port" and str(port) in finding.message
        assert check_launch(parse_launch(["torchrun", SCRIPT]), {}) == []
        assert check_launch(parse_launch(["torchrun", "--nnodes", "2", "--node_rank", "1", "--master_port", str(port), SCRIPT]), {}) == []
    assert check_launch(parse_launch(["torchrun", "--master_port", str(port), SCRIPT]), {}) == []


def test_a_port_left_in_the_environment_is_reported() -> None:
    (finding,) = check_launch(parse_launch(["torchrun", SCRIPT]), {"MASTER_PORT": "29500"})
    assert (finding.severity, finding.key) == ("info", "MASTER_PORT") and "29500" in finding.message


@pytest.mark.parametrize(
    ("command", "launcher", "script", "processes", "args"),
    [
        ("deepspeed --num_gpus=4 a.py --num_gpus 2", "deepspeed", "a.py", 4, ("--num_gpus", "2")),
        ("deepspeed --num_gpus 4 --num_nodes 2 --module harness.run_clm --x 1", "deepspeed", "harness.run_clm", 8, ("--x", "1")),
        ("accelerate launch --config_file x.yaml a.py", "accelerate", "a.py", None, ()),
        ("accelerate launch --multi_gpu --num-processes 2 a.py", "accelerate", "a.py", 2, ()),
        ("python -m torch.distributed.run --nproc_per_node 2 a.py b", "torchrun", "a.py", 2, ("b",)),
        ("/usr/bin/python3 -u a.py --y", "python", "a.py", 1, ("--y",)),
        ("python -m harness.run_clm --z", "python", "harness.run_clm", 1, ("--z",)),
    ],
)
def test_commands_are_taken_apart(command: str, launcher: str, script: str, processes: int | None, args: tuple[str, ...]) -> None:
    launch = parse_launch(shlex.split(command))
    assert (launch.launcher, launch.script, launch.num_processes, launch.script_args) == (launcher, script, processes, args)


def test_commands_that_are_no_launchers() -> None:
    for command in ([], ["make", "train"], ["accelerate", "config"]):
        with pytest.raises(UserError):
            parse_launch(command)


def hostfile(folder: Path, *lines: str) -> Path:
    path = folder / "hosts"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_hostfile_with_blanks_and_comments(tmp_path: Path) -> None:
    path = hostfile(tmp_path, "# cluster", "", "node-a slots=4  ", "  node-b slots=2 # spare")
    assert read_hostfile(path) == {"node-a": 4, "node-b": 2}


@pytest.mark.parametrize(
    ("lines", "message", "fix"),
    [
        (("node-a slots=4", "node-b lots=4"), "line 2: node-b lots=4", "write: host slots=N"),
        (("node-a slots=4", "node-a slots=2"), "line 2: node-a stands twice", "one line for each host"),
        (("# only a comment",), "is empty: it names no host", "write lines like: node-a slots=4"),
        (("node-a slots = 4",), "line 1: node-a slots = 4", "write it without blanks around =: node-a slots=4"),
        (("node-a",), "line 1: node-a", "write: host slots=N"),
        (("node-a slots=0",), "line 1: node-a has no slots", "remove the line"),
        (("node-a slots=4 extra",), "line 1: node-a slots=4 extra", "write: host slots=N"),
        ((f"node-a slots={'9' * 5000}",), "9" * 5000, "write: host slots=N"),
    ],
)
def test_hostfiles_with_mistakes(tmp_path: Path, lines: tuple[str, ...], message: str, fix: str) -> None:
    with pytest.raises(UserError) as caught:
        read_hostfile(hostfile(tmp_path, *lines))
    assert [(finding.message.endswith(message), finding.fix) for finding in caught.value.findings] == [(True, fix)]


def test_a_hostfile_that_was_asked_for_must_exist() -> None:
    with pytest.raises(UserError, match="cannot read /no/such: No such file"):
        read_hostfile("/no/such")


@pytest.mark.parametrize(
    ("options", "key", "text"),
    [
        ("--num_gpus 4", "--num_gpus", "node-b has 2 slots"),
        ("--num_nodes 3", "--num_nodes", "the hostfile names 2"),
        ("--include node-c", "--include", "node-c is not in the hostfile"),
        ("--include node-b:0,2", "--include", "node-b has slots 0 to 1, not 0,2"),
        ("--exclude node-a:7", "--exclude", "node-a has slots 0 to 3, not 7"),
        ("", "--hostfile", "hosts of unequal size: node-a 4, node-b 2 slots"),
        ("--num_nodes 1", None, None),
        ("--num_gpus 2 --num_nodes 2", None, None),
        ("--include node-a:0,3@node-b", None, None),
    ],
)
def test_options_must_fit_the_hostfile(tmp_path: Path, options: str, key: str | None, text: str | None) -> None:
    path = hostfile(tmp_path, "node-a slots=4", "node-b slots=2")
    findings = check_launch(parse_launch(shlex.split(f"deepspeed --hostfile {path} {options} {SCRIPT}")), {})
    assert [finding.key for finding in findings] == ([key] if key else [])
    assert all(text in finding.message for finding in findings if text)


RANK = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
ENVIRONMENT_RULES = [
    Rule("WORLD_SIZE", "error", "must be at least 1, not 0", RANK | {"WORLD_SIZE": "0"}, RANK),
    Rule(
        "PYTORCH_ALLOC_CONF",
        "warning",
        "differ",
        {"PYTORCH_ALLOC_CONF": "a:1", "PYTORCH_CUDA_ALLOC_CONF": "b:2"},
        {"PYTORCH_ALLOC_CONF": "a:1", "PYTORCH_CUDA_ALLOC_CONF": "a:1"},
    ),
    Rule(
        "PYTORCH_ALLOC_CONF",
        "error",
        "is not name:value",
        {"PYTORCH_ALLOC_CONF": "expandable_segments=True"},
        {"PYTORCH_ALLOC_CONF": "expandable_segments:True,roundup_power2_divisions:[256:1,512:2]"},
    ),
    Rule(
        "PYTORCH_CUDA_ALLOC_CONF",
        "warning",
        "fragmentation",
        {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"},
        {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    ),
    Rule("CUDA_LAUNCH_BLOCKING", "warning", "after every kernel", {"CUDA_LAUNCH_BLOCKING": "1"}, {"CUDA_LAUNCH_BLOCKING": "0"}),
    Rule(
        "TORCH_DISTRIBUTED_DEBUG", "warning", "every collective", {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, {"TORCH_DISTRIBUTED_DEBUG": "OFF"}
    ),
    Rule("NCCL_P2P_DISABLE", "warning", "host memory", {"NCCL_P2P_DISABLE": "1"}, {}),
    Rule("NCCL_IB_DISABLE", "warning", "TCP", {"NCCL_IB_DISABLE": "1"}, {}),
    Rule(
        "FSDP_CPU_RAM_EFFICIENT_LOADING",
        "info",
        "switched off",
        {"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"},
        {"FSDP_CPU_RAM_EFFICIENT_LOADING": "false"},
    ),
    Rule("WORLD_SIZE", "error", "whole number", RANK | {"WORLD_SIZE": "two"}, RANK),
    Rule("MASTER_PORT", "error", "not set, but WORLD_SIZE is 2", {k: v for k, v in RANK.items() if k != "MASTER_PORT"}, RANK),
    Rule("RANK", "error", "is not below WORLD_SIZE 2", RANK | {"RANK": "2"}, RANK | {"RANK": "1"}),
]


@pytest.mark.parametrize("rule", ENVIRONMENT_RULES, ids=rule_id)
def test_environment_rules(rule: Rule) -> None:
    check_both(rule, check_environment)


def test_lock_of_a_killed_build_is_found_and_one_in_use_is_not(tmp_path: Path) -> None:
    environ = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    assert check_build_locks(environ) == []
    lock = tmp_path / "py311_cpu" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    with open(lock, "w"):
        assert check_build_locks(environ) == []  # the build goes on
    lock.write_text(this_machine())
    (finding,) = check_build_locks(environ)
    assert finding.severity == "warning" and "cpu_adam" in finding.message and finding.fix == f"rm {lock}"
    lock.write_text("boot pid:[1] node7")
    (finding,) = check_build_locks(environ)
    assert finding.message == f"{lock}: cpu_adam is being compiled on node7, or a build there was killed"
    assert finding.fix == f"where none runs any more: rm {lock}"


def said(command: str) -> list[str]:
    """Errors and warnings of a command."""
    return [finding.line() for finding in check_launch(parse_launch(shlex.split(command)), {}) if finding.severity != "info"]


@pytest.mark.parametrize(
    ("command", "lines"),
    [
        ("torchrun --nproc_pr_node 2 S", ["error   --nproc_pr_node: is no option of torchrun -> did you mean --nproc_per_node?"]),
        ("torchrun -nproc_per_node 2 S", ["error   -nproc_per_node: is no option of torchrun -> did you mean --nproc_per_node?"]),
        ("deepspeed --num-gpus=2 S", ["error   --num-gpus: is no option of deepspeed -> did you mean --num_gpus?"]),
        (
            "accelerate launch --num_proceses 2 S",
            ["error   --num_proceses: is no option of accelerate launch -> did you mean --num_processes?"],
        ),
        ("accelerate launch --use_fdsp S", ["error   --use_fdsp: is no option of accelerate launch -> did you mean --use_fsdp?"]),
        ("torchrun --xyzzy=1 S", ["error   --xyzzy: is no option of torchrun -> an option of the script stands behind the script"]),
        (
            "torchrun --nproc_per_node x S",
            ["error   --nproc_per_node: must be a whole number, or gpu, cpu, auto, not 'x' -> --nproc_per_node 1"],
        ),
        ("torchrun --nnodes 1:two S", ["error   --nnodes: must be a whole number, or a range like 1:2, not '1:two' -> --nnodes 1"]),
        ("deepspeed --num_gpus two S", ["error   --num_gpus: must be a whole number, not 'two' -> --num_gpus 1"]),
        ("accelerate launch --num_processes 1:2 S", ["error   --num_processes: must be a whole number, not '1:2' -> --num_processes 1"]),
        ("torchrun --nproc 2 --nnodes 1:2 --standalone -r3 --max-restarts=0 S", []),
        *((f"torchrun --nproc-per-node {word} S", []) for word in ("gpu", "cpu", "auto", "xpu")),
        ("deepspeed --num_gpus -1 --num_n 1 --save_pid S", []),
        ("accelerate launch --same_network -q --dynamo-use-dynamic --mixed-precision no S", []),
        ("python -u -X dev S", []),
    ],
)
def test_options_that_a_launcher_does_not_have(command: str, lines: list[str]) -> None:
    assert said(command.replace("S", SCRIPT)) == lines


def test_an_unknown_option_of_another_version_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(launch_rules._LISTED_FOR, "torchrun", ("torch", "2.0."))
    line = "warning --nproc_pr_node: is no option of torchrun 2.0.x -> did you mean --nproc_per_node?"
    assert said(f"torchrun --nproc_pr_node 2 {SCRIPT}") == [line]


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate", "deepspeed"])
def test_the_lists_are_those_of_the_launchers_own_parsers(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not launch_rules._has_listed_version(launcher):
        pytest.skip("another version is installed")
    seen: list[argparse.ArgumentParser] = []

    def grab(parser: argparse.ArgumentParser, *args: object, **settings: object) -> None:
        seen.append(parser)
        raise SystemExit

    if launcher == "torchrun":
        from torch.distributed.run import get_args_parser

        seen.append(get_args_parser())
    elif launcher == "accelerate":
        from accelerate.commands.launch import launch_command_parser

        seen.append(launch_command_parser())
    else:
        from deepspeed.launcher import runner

        monkeypatch.setattr(argparse.ArgumentParser, "parse_args", grab)
        with pytest.raises(SystemExit):
            runner.parse_args([])

    def names(actions: list[argparse.Action]) -> set[str]:
        return {re.sub("(?<=[a-z0-9])-", "_", flag) for action in actions for flag in action.option_strings}

    own = seen[0]._actions
    assert {name for name in names(own) if name.startswith("--")} == launch_rules._OPTIONS[launcher]
    assert names([action for action in own if action.nargs == 0]) == launch_rules._SWITCHES[launcher]


def test_our_own_script_is_known_by_path_and_name() -> None:
    for script, following in (
        (f"{ROOT}/harness/run_clm.py", ""),
        ("harness/run_clm.py", "--x"),
        ("harness.run_clm", ""),
        ("bin/harness", "train"),
    ):
        assert launch_rules.is_our_script(script, following.split())
    for script, following in (("examples/run_clm.py", ""), ("harness", "plan"), ("train.py", "train")):
        assert not launch_rules.is_our_script(script, following.split())
