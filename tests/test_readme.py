"""README.md and docs/: every command parses or runs, every flag, file, default and table is what the code has."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness import cli, run_folder
from harness.args import Arguments
from tests.checking import AMPERE, ROOT
from tests.cluster.manifests import problems
from tests.launching import launch_environment

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Commands of container engines and clusters.
CLUSTER = {"docker", "sbatch", "scancel", "kubectl"}
EIGHT_GPUS = [f"GPU-{index}" for index in range(8)]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


# ---- reading the documents ----


def blocks(document: Path, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return [body for kind, body in _FENCE.findall(document.read_text(encoding="utf-8")) if kind == language]


def prose(document: Path) -> str:
    """A document without its fenced blocks."""
    return _FENCE.sub("", document.read_text(encoding="utf-8"))


def inline_code(document: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose(document))


def commands() -> list[list[str]]:
    """Every command of every bash block, in order, as its words; comments are gone."""
    lines = [line for document in DOCUMENTS for body in blocks(document, "bash") for line in body.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def table(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading of README.md, without its head."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def called_program(words: list[str]) -> str:
    return "python script" if words[0] == "python" else words[0]


# ---- a folder like the reader's ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone with the files that the commands name, in which README's Python example was run."""
    path = tmp_path_factory.mktemp("clone")
    for name in ("harness", "launch", "ds_configs", "fsdp_configs", "docker", "examples", "benchmarks"):
        (path / name).symlink_to(ROOT / name)
    lines = [json.dumps({"text": f"line {number} of a small corpus, long enough for a sample or two"}) for number in range(100)]
    (path / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128}
    config |= {
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 384,
        "max_position_embeddings": 2048,
    }
    (path / "config.json").write_text(json.dumps(config))
    (path / "run.yaml").write_text(
        "config_name: config.json\ntokenizer_name: bytes\ntrain_file: [corpus.jsonl]\nblock_size: 64\noutput_dir: other\n"
        "data_cache_dir: cache\npreprocessing_num_workers: 1\n"
    )
    (example,) = blocks(ROOT / "README.md", "python")
    environ = launch_environment({"PYTHONPATH": str(path), "HF_DATASETS_CACHE": str(path / "cache")})
    run = subprocess.run(
        [sys.executable, "-c", example + "\nraise SystemExit(code)\n"],
        cwd=path,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout
    (path / "out/checkpoint-500").symlink_to("checkpoint-4")
    return path


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The reader's folder as the current one, on a machine with eight cards as far as checks and launchers look."""
    from harness import check_config

    monkeypatch.chdir(folder)
    for name, value in launch_environment().items():
        if name in ("OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM", "HF_HUB_OFFLINE"):
            monkeypatch.setenv(name, value)
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(check_config, "detect_machine", lambda environ=None: AMPERE)
    yield folder


# ---- commands that start training ----


def script_of(words: list[str]) -> tuple[str, list[str]]:
    """Script and its arguments, as the launcher's own parser finds them; SystemExit where it refuses the command."""
    program = Path(words[0]).name
    if program == "deepspeed":
        from deepspeed.launcher.runner import parse_args

        options = parse_args(words[1:])
        return options.user_script, options.user_args
    if program == "accelerate":
        from accelerate.commands.launch import launch_command_parser

        assert words[1] == "launch"
        options = launch_command_parser().parse_args(words[2:])
        assert options.config_file is None or Path(options.config_file).is_file()
        return options.training_script, options.training_script_args
    if program == "torchrun":
        from torch.distributed.run import parse_args as parse_torchrun

        options = parse_torchrun(words[1:])
        return options.training_script, options.training_script_args
    assert program.startswith("python"), words
    return words[1], words[2:]


def check_start(words: list[str]) -> None:
    """A command that starts a script: parsed by its launcher, by our launcher and by the run's own rules, not executed."""
    from harness import check_config
    from harness.parsing import parse_args
    from launch import cluster, run
    from launch.command import make_plan

    if words[0].startswith("launch/"):
        (engine,) = re.findall(r"launch/run\.py\" --engine (\w+)", Path(words[0]).read_text())
        words = ["python", "launch/run.py", "--engine", engine, *words[1:]]
    script, arguments = script_of(words)
    assert Path(script).is_file(), script
    which = str(Path(script).resolve().relative_to(ROOT))
    if which == "launch/run.py":
        options, rest = run.read_options(arguments)
        if options.target != "local":
            check_pods(cluster.manifests(options, rest))
            return
        check_start(make_plan(options, rest, environ={}, physical=EIGHT_GPUS).command)
    elif which != "harness/run_clm.py":
        shown = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, timeout=60, check=True).stdout
        assert [word for word in arguments if word.startswith("--") and f"{word} " not in shown] == []
    elif arguments == ["--help"]:
        with contextlib.redirect_stdout(io.StringIO()) as shown_help, pytest.raises(SystemExit) as ended:
            parse_args(arguments)
        assert ended.value.code == 0 and "--output_dir" in shown_help.getvalue()
    else:
        with contextlib.redirect_stdout(io.StringIO()) as report:
            code = check_config.main(["--", *words])
        assert code == 0, report.getvalue()


def check_pods(documents: list[dict[str, Any]]) -> None:
    """Manifests: nothing that Kubernetes would refuse, and the launcher's command in the pods is accepted."""
    assert [problem for document in documents for problem in problems(document, "1.37")] == []
    for document in documents:
        if document["kind"] == "Job":
            (container,) = document["spec"]["template"]["spec"]["containers"]
            check_start(["python", "launch/run.py", *(word.replace("$(JOB_COMPLETION_INDEX)", "0") for word in container["args"])])


def check_cluster(words: list[str]) -> None:
    """A command of a container engine or a cluster: its files are there, and what it makes the harness do is accepted."""
    files = [words[index + 1] for index, word in enumerate(words) if word == "-f"]
    assert all(Path(file).is_file() for file in files), files
    if words[0] == "sbatch":
        place = words.index("launch/slurm.sbatch")
        check_start(["python", "launch/run.py", *words[place + 1 :]])
    elif words[:2] == ["docker", "run"]:
        place = words.index("harness:0.1.0")
        assert words[place + 1] == "train"
        check_start(["python", "harness/run_clm.py", *words[place + 2 :]])
    elif words[:2] == ["kubectl", "apply"]:
        check_pods([document for file in files for document in yaml.safe_load_all(Path(file).read_text())])
    elif words[0] == "scancel":
        assert words[1] == "--signal=USR1" and re.search(r"^trap .* USR1$", Path("launch/slurm.sbatch").read_text(), re.MULTILINE)
    else:
        assert words[:2] in (["docker", "build"], ["docker", "compose"], ["kubectl", "logs"]), words


def test_commands_of_clusters_are_accepted(here: Path) -> None:
    ran = [words for words in commands() if words[0] in CLUSTER]
    assert {words[0] for words in ran} == CLUSTER
    for words in ran:
        check_cluster(words)


def test_commands_that_start_training_are_accepted(here: Path) -> None:
    starts = [words for words in commands() if words[0] not in {"bash", "harness", *CLUSTER}]
    assert {called_program(words) for words in starts} >= {"deepspeed", "accelerate", "torchrun", "python script", "launch/fsdp.sh"}
    for words in starts:
        check_start(words)


@pytest.mark.parametrize(
    "line",
    [
        "deepspeed --num_gpuz=4 harness/run_clm.py --config run.yaml",
        "accelerate launch --config fsdp_configs/full_shard.yaml harness/run_clm.py --config run.yaml",
        "accelerate launch --config_file fsdp_configs/gone.yaml harness/run_clm.py --config run.yaml",
        "python harness/run_clm.py --config run.yaml --learnig_rate 1e-4",
        "python harness/run.py --config run.yaml",
        "launch/ddp.sh --num_gpus 9 --config run.yaml",
        "launch/fsdp.sh --num_gpus 4 --output_dir out --learnig_rate 1e-4",
        "python launch/example_lora.py --output_dir out --lora_rank 3",
        "python launch/run.py --target k8s --node_rank 1 -- --config run.yaml",
        "python launch/run.py --target k8s --engine fsdp -- --learnig_rate 1",
    ],
)
def test_a_wrong_command_would_be_noticed(here: Path, line: str) -> None:
    from launch.command import LaunchError

    with pytest.raises((AssertionError, SystemExit, LaunchError, ValueError)):
        check_start(shlex.split(line))


def test_scripts_are_there_and_parse() -> None:
    scripts = [words for words in commands() if words[0] == "bash"]
    assert [words[1] for words in scripts] == ["launch/demo.sh", "launch/test.sh"]
    for words in scripts:
        assert subprocess.run(["bash", "-n", str(ROOT / words[1])], timeout=30).returncode == 0


# ---- commands that are run ----


def test_harness_commands_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the documents' order, on what the run of the Python example has left."""
    ran = [words for words in commands() if words[0] == "harness"]
    assert {words[1] for words in ran} == set(cli.available()) - {"train"}
    for words in ran:
        code = cli.main(words[1:])
        shown = capsys.readouterr()
        if "--merge" in words:  # the example's checkpoint has no adapters, and says so
            assert code == 2 and "holds a whole model, no adapters" in shown.err
        else:
            # The doctor may find something on the machine that runs this.
            assert code in ({0, 1} if words[1] == "doctor" else {0}), (words, shown)
    assert (here / "out/metrics.csv").read_text().count("\n") > 1
    assert (here / "exported/model.safetensors").is_file() and (here / "states").is_dir()


# ---- flags, defaults, files ----


def known_flags() -> set[str]:
    """Every flag of the script, of launch/run.py, of accelerate's launcher and of the harness commands."""
    from accelerate.commands.launch import launch_command_parser

    from harness.parsing import _Parser
    from launch.run import _parser

    parsers = [_Parser().inner, _parser(), launch_command_parser()]
    flags = {option for parser in parsers for action in parser._actions for option in action.option_strings}
    flags |= {"--signal", "--time"}  # scancel's and sbatch's
    for name in set(cli.available()) - {"train", "tokenize"}:
        for extra in [[], ["--gpus", "1GB"]] if name == "plan" else [[]]:
            with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
                cli.main([name, *extra, "--help"])
            flags |= set(re.findall(r"--\w[\w-]*", shown.getvalue()))
    return flags


def test_every_flag_exists() -> None:
    named = {flag for document in DOCUMENTS for code in inline_code(document) for flag in re.findall(r"(?<![\w-])--\w[\w-]*", code)}
    assert len(named) > 50
    assert named - known_flags() == set()


def test_defaults_are_right() -> None:
    """A number in brackets after a flag is its default."""
    defaults = Arguments().to_dict()
    said = {name: float(value) for document in DOCUMENTS for name, value in re.findall(r"`--(\w+)` \(([\d.]+)\)", prose(document))}
    assert len(said) >= 4
    assert said == {name: defaults[name] for name in said}


def test_every_file_exists() -> None:
    for document in [*DOCUMENTS, ROOT / "COMPARISON.md"]:
        words = [word for code in inline_code(document) for word in code.split()]
        paths = [word for word in words if re.match(r"(harness|launch|ds_configs|fsdp_configs|docs|benchmarks|tests)/", word)]
        assert [path for path in paths if not (ROOT / path).exists()] == []
        for target in re.findall(r"\]\(([^)]+)\)", prose(document)):
            name, _, heading = target.partition("#")
            meant = document.parent / name if name else document
            assert name.startswith("http") or (meant.exists() and (not heading or heading in headings_of(meant))), target


def headings_of(document: Path) -> set[str]:
    """How links name the second-level headings of a page."""
    lines = prose(document).splitlines()
    return {re.sub(r"[^\w-]", "", line[3:].lower().replace(" ", "-")) for line in lines if line[:3] == "## "}


def test_every_source_of_the_comparison_is_listed_and_used() -> None:
    tables, sources = (ROOT / "COMPARISON.md").read_text(encoding="utf-8").split("\n## Sources\n")
    code = re.compile(r"\[([A-Z]\d+)\]")
    assert set(code.findall(tables)) == set(code.findall(sources))
    assert {row.count("|") for row in tables.splitlines() if row.startswith("|")} == {9}


def test_the_template_table_is_complete() -> None:
    there = {str(path.relative_to(ROOT)) for name in ("ds_configs", "fsdp_configs") for path in (ROOT / name).iterdir()}
    assert {row[0].strip("`") for row in table("Templates")} == there


def test_the_command_table_is_complete() -> None:
    named = [row[0].strip("`").removeprefix("harness ") for row in table("Commands")]
    assert sorted(named) == sorted(cli.available())


def test_the_exit_codes_are_those_of_the_run() -> None:
    codes = (run_folder.FINISHED, run_folder.FAILED, run_folder.WRONG_INPUT, run_folder.PREEMPTED)
    assert tuple(int(row[0]) for row in table("Exit codes")) == codes


# ---- what the examples leave ----


@pytest.mark.parametrize("document", [ROOT / "README.md", ROOT / "docs/checkpoints.md"], ids=lambda path: path.name)
def test_the_trees_are_what_a_run_writes(folder: Path, document: Path) -> None:
    (tree,) = blocks(document, "text")
    first, *lines = tree.splitlines()
    root = folder / "out" if first == "out/" else folder / "out" / first
    for line in lines:
        name, comment = line.split(maxsplit=1)
        is_there = (root / name).exists()
        if comment.startswith("only where matplotlib"):
            assert is_there == (importlib.util.find_spec("matplotlib") is not None)
        else:
            assert is_there != comment.startswith("only "), name
    if first == "out/":
        named = {line.split()[0].split("/")[0] for line in lines}
        written = {path.name for path in root.iterdir() if path.name[0] != "." and path.suffix != ".csv"}
        assert {re.sub(r"-\d+$", "-500", name) for name in written} <= named


def test_the_rows_that_the_example_logs(folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if row["kind"] == "train"][-1]
    assert last["step"] == 4 and last["micro_batch_size"] == 8
    assert {"loss", "grad_norm", "learning_rate", "num_input_tokens", "num_label_tokens", "tokens_per_second_per_gpu"} <= set(last)
    assert json.loads((folder / "out/exit.json").read_text())["code"] == 0


def test_the_lora_example_has_names_that_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    from harness import lora
    from harness.parsing import from_config

    (example,) = blocks(ROOT / "docs/lora.md", "python")
    seen: list[Arguments] = []
    monkeypatch.setattr(lora, "train_lora", lambda config, dataloader: seen.append(from_config(lora.run_config(config))))
    exec(compile(ast.parse(example), "docs/lora.md", "exec"), {"dataloader": []})
    assert [(args.lora.lora_r, args.lora.lora_alpha, args.model.model_name_or_path) for args in seen] == [(8, 16, "Qwen/Qwen3-0.6B")]


def test_the_mixture_example_is_read(tmp_path: Path) -> None:
    from harness.mixtures import read_mix

    (example,) = blocks(ROOT / "docs/data.md", "yaml")
    path = tmp_path / "mix.yaml"
    path.write_text(example)
    args = Arguments()
    args.data.dataset_mix = str(path)
    sources, samples_per_epoch = read_mix(args.data)
    assert [(source.name, source.weight) for source in sources] == [("code", 3.0), ("chat", 1.0)]
    assert samples_per_epoch == 100000
