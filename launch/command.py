"""Which command starts a training run: the launcher, its options, its environment, then the script. Standard library only."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import util
from pathlib import Path

from harness import cgroups
from harness.check_launch import read_hostfile
from harness.findings import UserError
from launch import machine

ROOT = Path(__file__).resolve().parent.parent
ENGINES = ("auto", "zero1", "zero2", "zero3", "fsdp", "ddp", "device_map")
ALIASES = {"config": "config_file", "num_gpus": "num_processes", "nproc": "num_processes", "nproc_per_node": "num_processes"}
DEFAULT_PORT = 29500
# Settings of libraries that a run has on all machines or on none.
_HANDED_ON = (
    "HF_",
    "GLOO_",
    "TORCH",
    "PYTORCH_",
    "TOKENIZERS_",
    "OMP_",
    "DS_",
    "TRITON_",
    "XDG_CACHE_",
    "XDG_STATE_",
    "HARNESS_STATE_",
    "CUBLAS_",
)


class LaunchError(ValueError):
    """A mistake in the launch command: printed as one message, exit code 2."""


@dataclasses.dataclass
class Options:
    """The launcher's part of the command line; None where the user said nothing."""

    engine: str = "auto"
    num_processes: int | None = None
    config_file: str | None = None
    template: str | None = None
    hostfile: str | None = None
    num_nodes: int = 1
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    script: str | None = None
    launcher_arg: list[str] = dataclasses.field(default_factory=list)
    grace_s: float = 35.0
    preempted_code: int = 75
    dry_run: bool = False
    target: str = "local"
    name: str = "harness"
    sbatch_arg: list[str] = dataclasses.field(default_factory=list)
    kind: str | None = None
    image: str | None = None
    cpus: int | None = None
    memory: str | None = None


@dataclasses.dataclass
class Plan:
    """What will be started.

    Attributes:
        command: the whole command line, launcher part first.
        environ: variables that are set for it, beyond the ones it inherits.
        unset: variables it must not inherit.
        notes: what the user should know, one line each.
        output_dir: where the run writes, if its arguments say so.
        must_report: the script writes exit.json, so a missing one means that it failed.
        files: files of its own that must be there while it runs, with their text.
    """

    command: list[str]
    environ: dict[str, str] = dataclasses.field(default_factory=dict)
    unset: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    output_dir: Path | None = None
    must_report: bool = False
    files: dict[Path, str] = dataclasses.field(default_factory=dict)


def script_value(script_args: Sequence[str], name: str) -> str | None:
    """The value of one of the script's flags; "" where it is there without a value, None where it is not there."""
    found: str | None = None
    for index, token in enumerate(script_args):
        flag, equals, value = token.partition("=")
        if not flag.startswith("--") or flag[2:].replace("-", "_") != name:
            continue
        following = script_args[index + 1] if index + 1 < len(script_args) else "--"
        found = value if equals else ("" if following.startswith("--") else following)
    return found


def output_dir_of(script_args: Sequence[str]) -> Path | None:
    """Where the run will write, from its flags or from its YAML file."""
    value = script_value(script_args, "output_dir")
    config = script_value(script_args, "config")
    if not value and config:
        value = yaml_scalars(Path(config)).get("output_dir")
    return Path(value) if value else None


def yaml_scalars(path: Path) -> dict[str, str]:
    """Top-level `name: value` lines of a YAML file; enough for what a launcher asks, without a YAML library."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return {}
    found: dict[str, str] = {}  # nulls are left out
    for name, value in re.findall(r"^([A-Za-z_]\w*):[ \t]+(.+?)[ \t]*$", text, flags=re.MULTILINE):
        if value[0] in "'\"" and (end := value.find(value[0], 1)) > 0:
            found[name] = value[1:end]
        elif (plain := re.sub(r"(^|\s+)#.*$", "", value)) not in ("", "~", "null"):
            found[name] = plain
    return found


def _count_in(config: Mapping[str, str], name: str, default: int) -> int:
    """A whole number of a YAML file; `default` where it is not there or not a number (the launcher itself will say so)."""
    value = config.get(name, "")
    return int(value) if value.isdigit() else default


# ---- what to start ----


def choose_engine(engine: str, script_args: Sequence[str], num_processes: int) -> str:
    """What "auto" means for these arguments; "python" is one plain process."""
    if engine != "auto":
        return engine
    deepspeed = script_value(script_args, "deepspeed")
    if deepspeed is not None:
        stage = re.search(r"zero([123])", Path(deepspeed).name)
        return f"zero{stage[1]}" if stage else "zero3"
    if script_value(script_args, "device_map") is not None:
        return "device_map"
    if script_value(script_args, "fsdp") is not None:
        return "fsdp"
    return "python" if num_processes == 1 else "fsdp"


def find_python() -> str:
    """The interpreter that has the packages: this one, else the clone's .venv."""
    venv = ROOT / ".venv/bin/python"
    return str(venv) if util.find_spec("torch") is None and venv.exists() else sys.executable


def _tool(python: str, name: str, module: str) -> list[str]:
    beside = Path(python).parent / name
    if os.access(beside, os.X_OK):
        return [str(beside)]
    return [python, "-m", module] if util.find_spec(module.split(".")[0]) else [shutil.which(name) or name]


def _shown(path: Path) -> str:
    """A path as short as it can be from here."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _template(options: Options, folder: str, suffix: str, default: str) -> str:
    """The launcher's config file: the user's, else a template of ours by name."""
    if options.config_file:
        if not Path(options.config_file).is_file():
            raise LaunchError(f"--config_file {options.config_file}: no such file")
        return options.config_file
    name = options.template or default
    path = ROOT / folder / (name if name.endswith(suffix) else name + suffix)
    if not path.is_file():
        there = ", ".join(sorted(file.stem for file in path.parent.glob("*" + suffix))) or "none"
        raise LaunchError(f"--template {name}: {_shown(path)} is not there; templates of this engine: {there}")
    return _shown(path)


class _Builder:
    """Puts one `Plan` together."""

    def __init__(self, options: Options, script_args: Sequence[str], environ: Mapping[str, str], physical: list[str]) -> None:
        self.options, self.script_args, self.environ = options, list(script_args), environ
        self.physical = physical
        self.devices = machine.visible_gpus(environ, physical)
        if script_value(script_args, "use_cpu") in ("", "true", "True", "1"):
            self.devices = []
        self.python = find_python()
        script = Path(options.script) if options.script else ROOT / "harness/run_clm.py"
        if not script.is_file():
            raise LaunchError(f"--script {script}: no such file")
        self.script = _shown(script)
        self.plan = Plan([], output_dir=output_dir_of(script_args), must_report=options.script is None)

    def build(self) -> Plan:
        options, devices = self.options, self.devices
        engine = choose_engine(options.engine, self.script_args, options.num_processes or max(1, len(devices)))
        one_process = engine in ("python", "device_map")
        num_processes = options.num_processes or (1 if one_process else max(1, len(devices)))
        if devices and num_processes > len(devices):
            raise LaunchError(f"--num_processes {num_processes}: only {len(devices)} GPU(s) are visible here")
        self._check_options(engine, num_processes)
        if engine.startswith("zero"):
            command = self._deepspeed(engine, num_processes)
        elif engine == "fsdp" and (options.config_file or script_value(self.script_args, "fsdp") is None):
            command = self._accelerate(num_processes)
        elif engine in ("fsdp", "ddp"):
            command = self._torchrun(num_processes)
        else:
            command = [self.python, *options.launcher_arg]
            if engine == "python" and options.num_processes == 1 and len(devices) > 1:
                self.plan.environ["CUDA_VISIBLE_DEVICES"] = devices[0]
        self.plan.command = [*command, self.script, *self.script_args]
        self._environment(self._processes_per_machine or num_processes)
        if self._over_ssh:
            self._hand_on_environment()
        self._warn_of_misplaced_options()
        return self.plan

    _processes_per_machine = 0
    _over_ssh = False

    def _check_options(self, engine: str, num_processes: int) -> None:
        options = self.options
        problems: list[str] = []
        if engine in ("python", "device_map") and num_processes != 1:
            problems.append(f"--engine {engine} is one process, but --num_processes is {num_processes}")
        if engine in ("python", "device_map") and options.num_nodes > 1:
            problems.append(f"--engine {engine} is one process, but --num_nodes is {options.num_nodes}")
        if options.hostfile and not engine.startswith("zero"):
            problems.append(f"--hostfile is deepspeed's; with --engine {engine} run this on each machine with --num_nodes and --node_rank")
        device_map = self._device_map()
        if device_map and num_processes * options.num_nodes > 1 and engine not in ("python", "device_map"):
            problems.append(f"--device_map {device_map} is for one process, but num_processes is {num_processes * options.num_nodes}")
        if (options.config_file or options.template) and engine in ("python", "device_map", "ddp"):
            problems.append(f"--engine {engine}: its launcher has no config file; the script's own --config comes after --")
        if problems:
            raise LaunchError("\n".join(problems))

    def _device_map(self) -> str | None:
        """What the script is told to spread over cards, by a flag or in its YAML file."""
        config = script_value(self.script_args, "config")
        return script_value(self.script_args, "device_map") or (yaml_scalars(Path(config)).get("device_map") if config else None)

    def _master(self, config: Mapping[str, str]) -> tuple[str | None, int | None]:
        """Address and port where the processes meet; None leaves them to the launcher's own config file."""
        options = self.options
        num_nodes = max(options.num_nodes, _count_in(config, "num_machines", 1))
        in_config = _count_in(config, "main_process_port", 0)
        if num_nodes == 1 and not options.hostfile:
            if (stale := self.environ.get("MASTER_PORT")) is not None:
                self.plan.notes.append(f"MASTER_PORT={stale} of the environment is not used; --master_port sets the port")
                self.plan.unset.append("MASTER_PORT")
            if port := options.master_port or in_config:
                key = "--master_port" if options.master_port else "main_process_port"
                if not 0 < port < 65536:
                    raise LaunchError(f"{key} {port}: is no port; leave it out to get a free one")
                if not machine.port_is_free(port):
                    raise LaunchError(f"{key} {port}: the port is in use on this machine; leave it out to get a free one")
                return options.master_addr or "127.0.0.1", port
            port = machine.free_port()
            self.plan.notes.append(f"port {port} (free now)")
            return options.master_addr or "127.0.0.1", port
        return self._master_of_several(config.get("main_process_port"), config.get("main_process_ip"))

    def _master_of_several(self, port_in_config: str | None, address_in_config: str | None) -> tuple[str | None, int | None]:
        options = self.options
        address = options.master_addr or address_in_config or self.environ.get("MASTER_ADDR")
        key, text = next(
            (key, value)
            for key, value in (
                ("--master_port", options.master_port),
                ("main_process_port", port_in_config),
                ("MASTER_PORT", self.environ.get("MASTER_PORT")),
                ("default port", DEFAULT_PORT),
            )
            if value is not None
        )
        if not str(text).isdigit() or not 0 < int(text) < 65536:
            raise LaunchError(f"{key} {text}: several machines need one port from 1 to 65535 that all know (0 works on one machine only)")
        port = int(text)
        if key == "MASTER_PORT":
            self.plan.notes.append(f"MASTER_PORT={port} of the environment is used")
        of_address = address is not None and machine.is_this_machine(address)
        main_is_here = of_address if options.node_rank is None else options.node_rank == 0
        if main_is_here and not machine.port_is_free(port):
            raise LaunchError(f"{key} {port}: the port is in use on this machine; give another one on all machines with --master_port")
        return address, port

    def _deepspeed(self, engine: str, num_processes: int) -> list[str]:
        options = self.options
        typed = script_value(self.script_args, "deepspeed")
        if typed is None:
            self.script_args += ["--deepspeed", _template(options, "ds_configs", ".json", engine)]
        elif options.config_file or options.template:
            raise LaunchError(f"a DeepSpeed config was given twice: to the launcher, and as the script's --deepspeed {typed}: keep one")
        elif options.engine != "auto":
            self.plan.notes.append(f"the script's --deepspeed {typed} is used, no template")
        command = _tool(self.python, "deepspeed", "deepspeed.launcher.runner")
        if options.hostfile:
            self._check_hosts(options.hostfile)
            command += ["--hostfile", options.hostfile]
            if options.node_rank is not None:  # started on each machine by itself
                command += ["--no_ssh", "--node_rank", str(options.node_rank)]
            else:
                self._over_ssh = True
            if options.num_nodes > 1:
                command += ["--num_nodes", str(options.num_nodes)]
            if options.num_processes:
                command += ["--num_gpus", str(num_processes)]
        elif options.num_nodes > 1:
            command += ["--hostfile", str(self._equal_hosts(num_processes)), "--no_ssh", "--node_rank", str(options.node_rank)]
        elif self.devices and self.environ.get("CUDA_VISIBLE_DEVICES") is not None:
            # The runner drops CUDA_VISIBLE_DEVICES when told a number of GPUs, and would take cards 0, 1, ... instead.
            indices = machine.device_indices(self.devices[:num_processes], self.physical)
            if indices is None:
                asked = self.environ["CUDA_VISIBLE_DEVICES"]
                raise LaunchError(f"CUDA_VISIBLE_DEVICES={asked}: deepspeed takes whole cards by their number; give numbers")
            command += ["--include", "localhost:" + ",".join(map(str, indices))]
            self.plan.unset.append("CUDA_VISIBLE_DEVICES")
        else:
            command += ["--num_gpus", str(num_processes)]
        if not self.devices and (not options.hostfile or options.node_rank is not None):
            self.plan.environ["DS_ACCELERATOR"] = "cpu"
        address, port = self._master({})
        command += ["--master_addr", address] if address else []
        return [*command, "--master_port", str(port), *options.launcher_arg]

    @staticmethod
    def _check_hosts(hostfile: str) -> None:
        """The launcher itself takes a missing file for one machine, and tells a typing mistake by a traceback."""
        try:
            read_hostfile(hostfile)
        except UserError as error:
            raise LaunchError("\n".join(f"{each.key}: {each.message} -> {each.fix}" for each in error.findings)) from None

    def _equal_hosts(self, num_processes: int) -> Path:
        """A host file for machines that are all started by themselves: deepspeed wants one, and takes only counts and order from it."""
        indices = machine.device_indices(self.devices[:num_processes], self.physical)
        if self.devices and indices != list(range(num_processes)):
            asked = self.environ.get("CUDA_VISIBLE_DEVICES")
            raise LaunchError(f"CUDA_VISIBLE_DEVICES={asked}: deepspeed on several machines takes the first cards of each")
        text = "".join(f"node{number} slots={num_processes}\n" for number in range(self.options.num_nodes))
        path = Path(tempfile.gettempdir()) / f"harness-hosts-{os.getpid()}"
        self.plan.files[path] = text
        return path

    def _hand_on_environment(self) -> None:
        """Over ssh, deepspeed hands on variables of Python and NCCL, and those of one file: the rest of a run's settings go there.

        Not what a name says is secret: the values show in the process lists of all machines.
        """
        given = Path(self.environ.get("DS_ENV_FILE", ".deepspeed_env"))
        files = [folder / given for folder in (Path.home(), Path.cwd()) if (folder / given).is_file()]
        lines = [line for file in dict.fromkeys(files) for line in file.read_text(encoding="utf-8").splitlines()]
        named = {line.partition("=")[0].strip() for line in lines}
        for name, value in sorted({**self.environ, **self.plan.environ}.items()):
            secret = re.search(r"TOKEN$|KEY|SECRET|PASSWORD|CREDENTIAL", name)
            if name.startswith(_HANDED_ON) and name not in named and name != "DS_ENV_FILE" and not secret and "\n" not in value:
                lines.append(f"{name}={value}")
        path = Path(tempfile.gettempdir()) / f"harness-environment-{os.getpid()}"
        self.plan.files[path] = "".join(f"{line}\n" for line in lines if "=" in line)
        self.plan.environ["DS_ENV_FILE"] = str(path)

    def _accelerate(self, num_processes: int) -> list[str]:
        options = self.options
        path = _template(options, "fsdp_configs", ".yaml", "full_shard")
        config = yaml_scalars(Path(path)) if options.config_file else {}
        command = [*_tool(self.python, "accelerate", "accelerate.commands.accelerate_cli"), "launch", "--config_file", path]
        machines = max(options.num_nodes, _count_in(config, "num_machines", 1))
        if options.num_processes is None and (in_config := _count_in(config, "num_processes", 0)):
            self._processes_per_machine = max(1, in_config // machines)  # the user's own file knows
        else:
            command += ["--num_processes", str(num_processes * machines)]
        address, port = self._master(config)
        if options.num_nodes > 1 or machines == 1:
            command += ["--num_machines", str(options.num_nodes), "--machine_rank", str(options.node_rank or 0)]
        command += ["--main_process_ip", address] if address else []
        return [*command, "--main_process_port", str(port), *options.launcher_arg]

    def _torchrun(self, num_processes: int) -> list[str]:
        options = self.options
        address, port = self._master({})
        command = [*_tool(self.python, "torchrun", "torch.distributed.run"), "--nnodes", str(options.num_nodes)]
        if options.num_nodes > 1:
            command += ["--node_rank", str(options.node_rank)]
        command += ["--nproc_per_node", str(num_processes), "--master_addr", str(address), "--master_port", str(port)]
        return [*command, *options.launcher_arg]

    def _environment(self, num_processes: int) -> None:
        """Settings that are right for every run, each only where the user has not set it."""
        defaults = {
            "OMP_NUM_THREADS": str(max(1, cgroups.usable_cores() // num_processes)),
            "TOKENIZERS_PARALLELISM": "false",  # its threads do not survive the forks of data loading
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",  # a hung or failed collective ends the rank: what torchrun sets
        }
        if "PYTORCH_CUDA_ALLOC_CONF" not in self.environ:
            defaults["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        self.plan.environ |= {name: value for name, value in defaults.items() if name not in self.environ}

    def _warn_of_misplaced_options(self) -> None:
        """A launcher option after the script's first argument goes to the script: say so."""
        launchers_own = (set(Options.__dataclass_fields__) | set(ALIASES)) - {"config"}
        for token in self.script_args:
            name = token.partition("=")[0].removeprefix("--").replace("-", "_")
            if token.startswith("--") and name in launchers_own:
                self.plan.notes.append(f"--{name} comes after the script's arguments, so the script gets it; put it first for the launcher")


def make_plan(
    options: Options, script_args: Sequence[str], environ: Mapping[str, str] | None = None, physical: list[str] | None = None
) -> Plan:
    """Turns options into the command to run.

    Args:
        environ: stands for the process's environment.
        physical: UUIDs of the machine's GPUs; found out when not given.

    Raises:
        LaunchError: what was asked for cannot be started here.
    """
    return _Builder(
        options, script_args, os.environ if environ is None else environ, machine.physical_gpus() if physical is None else physical
    ).build()


def shell_line(plan: Plan) -> str:
    """The command as one could type it, with the variables it is run with."""
    unset = [token for name in plan.unset for token in ("-u", name)]
    settings = [f"{name}={value}" for name, value in sorted(plan.environ.items())]
    return shlex.join([*(["env"] if unset or settings else []), *unset, *settings, *plan.command])
