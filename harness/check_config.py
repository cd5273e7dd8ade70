"""`harness check`: templates, arguments, launcher and machine against each other, everything at once, before anything is loaded.

    harness check --config run.yaml --deepspeed ds_configs/zero3.json --num_processes 4
    harness check --config_file accelerate.yaml --num_processes 8
    harness check --hostfile hosts -- deepspeed --num_gpus 4 harness/run_clm.py --deepspeed ds_configs/zero3.json ...
    harness check --write_template run.yaml

`run_clm.py` runs the same rules (`check_run`, `check_names`) before it loads data or weights. Files alone are checked in about a second;
for the arguments of a run the model is built empty from its config too, which loads torch.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import disk_room
from harness.args import GROUPS, Arguments, argument_names
from harness.argument_rules import names_modules
from harness.check_accelerate import check_accelerate, environment_of, wrap_class_findings
from harness.check_arguments import check_arguments, model_facts, offload_findings, path_findings
from harness.check_deepspeed import check_deepspeed, nvme_folder_findings
from harness.check_launch import (
    Launch,
    check_build_locks,
    check_environment,
    check_launch,
    count_finding,
    is_our_script,
    parse_launch,
    read_hostfile,
)
from harness.deepspeed_json import get_value
from harness.device_map_text import refuse_in_launch
from harness.findings import Finding, FindingParser, UserError, counted, format_findings, has_errors, is_count, sort_findings, user_error
from harness.machine import Machine, detect_machine
from harness.node_facts import num_local_processes
from harness.parsing import ParsingError, parse_args, read_yaml, tokens_of
from harness.templates import (
    TESTED_OPTIMIZERS,
    apply_launch_to_args,
    choose_engine,
    fsdp_template_of,
    load_deepspeed_template,
    resolve_deepspeed_config,
)
from harness.user_files import refuse_other_kind

# Host bytes of each parameter that is offloaded: fp32 master, fp32 gradient and Adam's two moments; 16-bit weights.
_OPTIMIZER_BYTES, _WEIGHT_BYTES = 16, 2
_MODEL_FLAGS = ("--model_name_or_path", "--config_name", "--model_type", "--config_overrides")
# Keys of accelerate's file that its command has options for.
MACHINE_KEYS = ("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port")


def check_run(args: Arguments, *, num_processes: int, environ: Mapping[str, str], machine: Machine | None = None) -> list[Finding]:
    """Every rule that applies to one run; `args` is not changed.

    Args:
        args: as parsed; it makes no difference whether a template was already applied to them.
        num_processes: processes of the job.
        environ: what the launcher exported.
        machine: where it runs; None: this machine.

    Returns:
        All findings, errors first.
    """
    machine = detect_machine(environ) if machine is None else machine
    run = copy.deepcopy(args)
    engine, findings = apply_launch_to_args(run, environ, num_processes)
    num_machines = max(1, num_processes // max(1, num_local_processes(environ, num_processes)))
    try:
        if engine == "zero":
            findings += [*_zero_findings(run, environ, num_processes, machine, num_machines), *check_build_locks(environ)]
        elif engine == "fsdp":
            findings += _fsdp_findings(run, environ, num_processes, machine, num_machines)
    except UserError as error:
        findings += error.findings
    findings += refuse_in_launch(run.maps.device_map, num_processes)
    findings += check_arguments(run, engine=engine, num_processes=num_processes, environ=environ, machine=machine)
    findings += check_environment(environ)
    return sort_findings(findings)


def with_paths(error: ParsingError) -> UserError:
    """The mistakes of a command line, and what is wrong with the files that it names."""
    said = {finding.key for finding in error.findings}
    more = [finding for finding in path_findings(error.parsed) if finding.severity == "error" and finding.key not in said]
    return UserError([*error.findings, *more])


def parse_run(tokens: Sequence[str]) -> Arguments:
    """`parse_args`.

    Raises:
        UserError: all that is wrong with the command line and the files that it names, together.
    """
    try:
        return parse_args(tokens)
    except ParsingError as error:
        raise with_paths(error) from None


def check_names(args: Arguments, known: Sequence[Finding], machine: Machine | None = None, *, always: bool = False) -> list[Finding]:
    """The rules that need the model, empty: only where flags name its modules, because they take seconds, and load torch.

    Args:
        known: what was found before; nothing is said twice of a model that cannot be used.
        machine: where it runs; None: this machine.
        always: also where no modules are named, if the model is on this machine or made from scratch.

    Returns:
        Further findings.
    """
    wrong = {finding.key.removeprefix("--") for finding in known if finding.severity == "error"}
    if wrong & {"lora_r", "lora_alpha", "rank_pattern", "alpha_pattern"} or model_facts(args).problems:
        return []
    source = args.model.config_name or args.model.model_name_or_path
    always = always and (source is None or Path(source).expanduser().exists())
    if not (always or names_modules(args)):
        return []
    from harness.check_model import model_findings

    machine = detect_machine() if machine is None else machine
    said = {finding.key for finding in known if finding.severity == "error"} & set(_MODEL_FLAGS)
    return [finding for finding in model_findings(args, len(machine.gpus), with_tokenizer=always) if finding.key not in said]


def _zero_findings(
    run: Arguments, environ: Mapping[str, str], num_processes: int, machine: Machine, num_machines: int
) -> Iterator[Finding]:
    template = load_deepspeed_template(run, environ)
    if template is None:
        return
    own = check_deepspeed(template, num_processes=num_processes, machine=None if run.train.use_cpu else machine)
    yield from own
    if not any(finding.severity == "error" for finding in own):
        total_steps = run.train.max_steps if run.train.max_steps > 0 else None
        _, resolved = resolve_deepspeed_config(
            template, run, num_processes, total_steps=total_steps, hidden_size=None, precision=run.train.precision
        )
        yield from resolved
    on_cpu = run.train.use_cpu or not machine.gpus
    if run.train.precision == "fp16" and on_cpu and not machine.cpu_has_fp16:
        message = "DeepSpeed has no fp16 on this CPU, and there is no card"
        yield Finding("error", "--precision", message, '--precision bf16 or fp32, and "fp16": {"enabled": "auto"} in the file')
    zero = get_value(template, "zero_optimization", {})
    zero = zero if isinstance(zero, Mapping) else {}
    if run.lora.use_dora and run.lora.lora_r is not None and zero.get("stage") == 3:
        message = "reads base weights that ZeRO-3 has not gathered"
        yield Finding("error", "--use_dora", message, "use FSDP or ZeRO-2, or leave it out")
    devices = {part: get_value(zero, f"{part}.device", "none") for part in ("offload_optimizer", "offload_param")}
    in_host = _OPTIMIZER_BYTES * (devices["offload_optimizer"] == "cpu") + _WEIGHT_BYTES * (devices["offload_param"] == "cpu")
    if in_host:
        part = "offload_optimizer" if devices["offload_optimizer"] == "cpu" else "offload_param"
        yield from offload_findings(run, machine, num_machines, in_host, f"zero_optimization.{part}")
    untested = "optimizer" not in template and run.train.optim not in TESTED_OPTIMIZERS
    if untested and template.get("zero_allow_untested_optimizer") is False:
        message = f"false, and --optim {run.train.optim} is not one that DeepSpeed has tested with ZeRO"
        yield Finding("error", "zero_allow_untested_optimizer", message, "true, or --optim adamw_torch_fused")
    if untested and devices["offload_optimizer"] != "none":
        message = f"{run.train.optim} has no CPU version in DeepSpeed: the offloaded update runs in plain PyTorch"
        yield Finding("warning", "--optim", message, "--optim adamw_torch_fused")
    open_nvme = [part for part, device in devices.items() if device == "nvme" and get_value(zero, f"{part}.nvme_path") == "auto"]
    if run.train.nvme_path and open_nvme:
        yield from nvme_folder_findings(run.train.nvme_path, "--nvme_path")
    if "nvme_path" in run.typed and "nvme" not in devices.values():
        yield Finding("warning", "--nvme_path", "has no effect: the DeepSpeed file offloads nothing to NVMe", "ds_configs/zero3_nvme.json")
    if num_processes == 1 and not in_host and "nvme" not in devices.values():
        yield Finding("info", "num_processes", "one process has nothing to shard with", "start one process for each card")


def _fsdp_findings(
    run: Arguments, environ: Mapping[str, str], num_processes: int, machine: Machine, num_machines: int
) -> Iterator[Finding]:
    template = fsdp_template_of(run, environ)
    if template is None:
        return
    template.group_sizes(num_processes, num_processes // num_machines)
    yield from wrap_class_findings(list(template.wrap_class_names), model_facts(run).model_type)
    if template.cpu_offload:
        yield from offload_findings(run, machine, num_machines, _OPTIMIZER_BYTES, "fsdp_offload_params")
        if run.train.optim == "adamw_8bit":
            yield Finding("error", "--optim", "adamw_8bit does not run on offloaded shards", "--optim adamw_torch_fused")


# ---------------------------------------------------------------- one dictionary


@dataclasses.dataclass(frozen=True)
class Consistency:
    """Result of `check_config_consistency`.

    Attributes:
        is_valid: there is no error.
        issues: every finding, errors first.
        defaults: keys that the configuration leaves out, with the value that is then used.
    """

    is_valid: bool
    issues: tuple[Finding, ...]
    defaults: dict[str, Any]


def check_config_consistency(config: Mapping[str, Any], *, num_processes: int = 1, machine: Machine | None = None) -> Consistency:
    """Checks one dictionary: a DeepSpeed JSON, an accelerate YAML, or the arguments of a run, whichever its keys say.

    The "deepspeed" of a run may be a path or the JSON's content as a dictionary.
    """
    machine = detect_machine() if machine is None else machine
    defaults: dict[str, Any] = {}
    if "distributed_type" in config or "fsdp_config" in config or "use_fsdp" in config:
        findings = check_accelerate(config, machine=machine)
    elif {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"} & set(config):
        findings = _file_alone(config, num_processes, machine)
    else:
        values = dict(config)
        if isinstance(values.get("deepspeed"), Mapping):
            values["deepspeed"] = json.dumps(values["deepspeed"])
        try:
            args = parse_run(tokens_of(values))
            defaults = {name: value for name, value in args.to_dict().items() if name not in args.typed}
            findings = [*args.notes, *check_run(args, num_processes=num_processes, environ={}, machine=machine)]
            findings += check_names(args, findings, machine)
        except UserError as error:
            findings = error.findings
    findings = sort_findings(findings)
    return Consistency(not has_errors(findings), tuple(findings), defaults)


def _file_alone(config: Mapping[str, Any], num_processes: int, machine: Machine) -> list[Finding]:
    """A DeepSpeed JSON without a run: its own rules, and its batch sizes against the number of processes."""
    findings = check_deepspeed(config, num_processes=num_processes, machine=machine)
    if not has_errors(findings):
        _, resolved = resolve_deepspeed_config(config, Arguments(), num_processes, total_steps=None, hidden_size=None, precision="auto")
        findings += resolved
    return findings


# ---------------------------------------------------------------- the command


def _parser() -> FindingParser:
    parser = FindingParser(
        prog="harness check",
        description="Checks templates, arguments, launcher and machine against each other. Exit code 2 if there is an error.",
        epilog="Any flag of run_clm.py may be given too; a launcher's whole command may follow after --.",
    )
    parser.add_argument("--config", help="YAML file with the run's arguments.")
    parser.add_argument("--deepspeed", help="DeepSpeed JSON.")
    parser.add_argument("--config_file", "--config-file", help="accelerate YAML.")
    parser.add_argument("--hostfile", help="Hostfile of the deepspeed launcher.")
    parser.add_argument(
        "--num_processes", "--num-processes", type=int, help="Processes of the job. Default: as the files say, else the cards."
    )
    parser.add_argument("--json", action="store_true", help="Print the findings as JSON.")
    parser.add_argument("--write_template", "--write-template", metavar="YAML", help="Write a complete, commented file for --config.")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The command `harness check`. Returns 0, or 2 where there is an error."""
    tokens = list(sys.argv[1:] if argv is None else argv)
    command: list[str] = []
    if "--" in tokens:
        command = tokens[tokens.index("--") + 1 :]
        tokens = tokens[: tokens.index("--")]
    options, run_tokens, wrong = _parser().read_known(tokens)
    try:
        findings, differences = _check_all(options, run_tokens, command)
        findings = sort_findings([*wrong, *findings])
        if options.write_template:
            values = _values_of(run_tokens, options)
            write_template(options.write_template, values)
    except UserError as error:
        findings, differences = sort_findings([*wrong, *error.findings]), {}
    if options.json:
        rows = [dataclasses.asdict(finding) for finding in findings]
        print(
            json.dumps({"is_valid": not has_errors(findings), "issues": rows, "differs_from_default": differences}, indent=2, default=str)
        )
    else:
        _print(findings, differences)
        if options.write_template and not has_errors(findings):
            print(f"written: {options.write_template}")
    return 2 if has_errors(findings) else 0


def _print(findings: Sequence[Finding], differences: Mapping[str, Any]) -> None:
    if differences:
        print("differs from the defaults: " + ", ".join(f"{name}={value}" for name, value in differences.items()))
    if findings:
        print(format_findings(findings))
    counts = {severity: sum(finding.severity == severity for finding in findings) for severity in ("error", "warning", "info")}
    print(", ".join(counted(number, severity) for severity, number in counts.items()))


def _check_all(options: argparse.Namespace, run_tokens: list[str], command: list[str]) -> tuple[list[Finding], dict[str, Any]]:
    """Findings about everything that was named, and the arguments that differ from their defaults."""
    environ = dict(os.environ)
    machine = detect_machine(environ)
    findings: list[Finding] = []
    launch = parse_launch(command) if command else None
    num_processes = options.num_processes
    wrong_count = None if num_processes is None else count_finding("--num_processes", str(num_processes))
    if wrong_count is not None:  # the rest is checked for as many as there would be without it
        findings.append(wrong_count)
        num_processes = None
    if launch is not None:
        findings += check_launch(launch, environ, machine)
        options.config_file = options.config_file or launch.options.get("--config_file")
        num_processes = num_processes or launch.num_processes or None
        run_tokens = [*run_tokens, *launch.script_args[launch.script == "harness" and launch.script_args[:1] == ("train",) :]]
    num_machines = (launch.integer("--num_machines", "--nnodes", "--num_nodes") if launch else None) or 1
    if options.hostfile:
        hosts = _collect(findings, read_hostfile, options.hostfile)
        num_processes = num_processes or (sum(hosts.values()) if hosts else None)
    run_tokens = _run_tokens(run_tokens, options)
    asks_for_run = bool(launch and (launch.script_args or _is_our_script(launch))) or any(
        token.startswith("--") for token in run_tokens if not token.startswith("--deepspeed")
    )
    args = _collect(findings, parse_run, run_tokens) if asks_for_run else None
    if options.config_file and Path(options.config_file).is_file():
        yaml_config = _collect(findings, _read_accelerate, options.config_file)
        if yaml_config is not None:
            model_type = model_facts(args or _only_model(run_tokens)).model_type
            yaml_config |= _machine_options(launch)
            count = yaml_config.get("num_machines")
            num_machines = count if isinstance(count, int) and count > 0 else num_machines
            findings += check_accelerate(yaml_config, num_processes=num_processes, machine=machine, model_type=model_type)
            environ |= environment_of(yaml_config)
            count = yaml_config.get("num_processes")
            num_processes = num_processes or (count if isinstance(count, int) else None)
    elif options.config_file:
        findings.append(Finding("error", "--config_file", f"{options.config_file} does not exist", "the path of an accelerate YAML"))
    num_processes = num_processes or _default_processes(launch, machine)
    if args is not None:
        findings += [*args.notes, *_of_run(args, num_processes, num_machines, environ, machine)]
    elif options.deepspeed:
        findings += choose_engine(_only_deepspeed(options.deepspeed), environ)[1]
        template = _collect(findings, load_deepspeed_template, _only_deepspeed(options.deepspeed), {})
        findings += _file_alone(template, num_processes, machine) if template is not None else []
    return sort_findings(findings), args.non_defaults() if args else {}


def _is_our_script(launch: Launch) -> bool:
    """Whether it starts run_clm.py, which has something to say of no arguments too."""
    return launch.script is not None and is_our_script(launch.script, launch.script_args)


def _machine_options(launch: Launch | None) -> dict[str, Any]:
    """What a command of accelerate says of processes and machines, which wins over its file."""
    words = {key: launch.options.get(f"--{key}") for key in MACHINE_KEYS} if launch is not None and launch.launcher == "accelerate" else {}
    counts = ("num_processes", "num_machines")
    given = {key: text for key, text in words.items() if text is not None and not (key in counts and count_finding(key, text))}
    return {key: int(text) if is_count(text) else text for key, text in given.items()}


def _of_run(args: Arguments, num_processes: int, num_machines: int, environ: Mapping[str, str], machine: Machine) -> list[Finding]:
    """`check_run` and `check_names`, in an environment that speaks of this shell and not of a rank."""
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
    outside = {name: value for name, value in environ.items() if name not in ranks}
    outside["LOCAL_WORLD_SIZE"] = str(max(1, num_processes // num_machines))
    findings = check_run(args, num_processes=num_processes, environ=outside, machine=machine)
    return findings + check_names(args, findings, machine, always=True)


def _collect(findings: list[Finding], function: Any, *values: Any) -> Any:
    """The function's result, or None with its findings added to the list."""
    try:
        return function(*values)
    except UserError as error:
        findings += error.findings
        return None


def _read_accelerate(path: str) -> dict[str, Any]:
    values = read_yaml(path, "--config_file")
    refuse_other_kind(values, "--config_file", path)
    return values


def _only_model(run_tokens: Sequence[str]) -> Arguments:
    """Which model is meant, where the command as a whole is refused: the names of its layers are checked all the same."""
    args = Arguments()
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("model_type", "model_name_or_path", "config_name"):
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", nargs="?")
    named, _ = parser.parse_known_args(list(run_tokens), namespace=argparse.Namespace())
    for name, value in vars(named).items():
        setattr(args.model, name, value)
    return args


def _only_deepspeed(path: str) -> Arguments:
    args = Arguments()
    args.train.deepspeed = path
    return args


def _run_tokens(run_tokens: Sequence[str], options: argparse.Namespace) -> list[str]:
    tokens = list(run_tokens)
    if options.config:
        tokens += ["--config", options.config]
    if options.deepspeed:
        tokens += ["--deepspeed", options.deepspeed]
    return tokens


def _default_processes(launch: Launch | None, machine: Machine) -> int:
    return 1 if launch is not None and launch.launcher == "python" else max(1, len(machine.gpus))


# ---------------------------------------------------------------- the commented template


def _values_of(run_tokens: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    tokens = _run_tokens(run_tokens, options)
    if not tokens:
        return {}
    args = parse_args(tokens)
    return {name: value for name, value in args.to_dict().items() if name in args.typed}


def write_template(path: str | Path, values: Mapping[str, Any] | None = None) -> None:
    """Writes a run YAML with every argument, its meaning, its choices and its default; those in `values` are set, the others commented out.

    Raises:
        UserError: the file exists, or cannot be written.
        OSError: the disk is full.
    """
    values = values or {}
    assert set(values) <= set(argument_names())
    lines = ["# Arguments of run_clm.py: harness/run_clm.py --config THIS_FILE. Flags on the command line win over this file.", ""]
    for group in GROUPS:
        lines += ["# " + "-" * 20 + " " + (group.__doc__ or group.__name__).strip().splitlines()[0]]
        for field in dataclasses.fields(group):
            lines += _template_lines(field, values)
        lines.append("")
    try:
        file = open(path, "x", encoding="utf-8")  # noqa: SIM115 - closed below, before a part of a file is removed
    except FileExistsError:
        raise user_error("--write_template", f"{path} exists already", "another name, or remove it first") from None
    except OSError as error:
        raise user_error("--write_template", f"cannot write {path}: {error.strerror}", "a folder you may write to") from None
    try:
        with disk_room.naming(Path(path)), file:
            file.write("\n".join(lines))
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise


def _template_lines(field: dataclasses.Field[Any], values: Mapping[str, Any]) -> list[str]:
    default = field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore[misc,operator]
    comment = "# " + field.metadata["help"]
    choices = field.metadata.get("choices")
    if choices:
        comment += f" One of: {', '.join(map(str, choices))}."
    value = values.get(field.name, default)
    line = f"{field.name}:" if value is None else f"{field.name}: {json.dumps(value)}"  # JSON is YAML, and quotes what needs quotes
    return [comment, line if field.name in values else "# " + line]


if __name__ == "__main__":
    sys.exit(main())
