"""Rules about how a job is started: the launcher's command, the hostfile, ports, and variables left in the environment."""

from __future__ import annotations

import dataclasses
import difflib
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from harness.build_locks import extensions_folder, is_abandoned, is_held, owner_of
from harness.findings import Finding, UserError, is_count, user_error
from harness.machine import Machine
from harness.user_files import read_user_text

# All options of each launcher, and the package and version whose own parser has exactly these.
_LISTED_FOR = {"deepspeed": ("deepspeed", "0.19."), "accelerate": ("accelerate", "1.15."), "torchrun": ("torch", "2.13.")}
_OPTIONS = {
    launcher: frozenset(text.split())
    for launcher, text in {
        "deepspeed": """
        --autotuning --bind_core_list --bind_cores_to_rank --enable_each_rank_log --exclude --force_multi --help --hostfile
        --include --launcher --launcher_args --log_level --master_addr --master_port --module --no_local_rank --no_python --no_ssh
        --no_ssh_check --node_rank --num_accelerators --num_gpus --num_nodes --quiet --save_pid --ssh_port --venv_script
        """,
        "accelerate": """
        --aws_access_key_id --aws_secret_access_key --config_file --cpu --debug --deepspeed_config_file
        --deepspeed_exclusion_filter --deepspeed_hostfile --deepspeed_inclusion_filter --deepspeed_moe_layer_cls_names
        --deepspeed_multinode_launcher --downcast_bf16 --dynamo_backend --dynamo_mode --dynamo_use_dynamic --dynamo_use_fullgraph
        --dynamo_use_regional_compilation --enable_cpu_affinity --env --fp8_amax_compute_algo --fp8_amax_history_len --fp8_backend
        --fp8_enable_fsdp_float8_all_gather --fp8_format --fp8_interval --fp8_margin --fp8_opt_level
        --fp8_override_linear_precision --fp8_pad_inner_dim --fp8_use_autocast_during_eval --fsdp_activation_checkpointing
        --fsdp_activation_checkpointing_offload --fsdp_auto_wrap_policy --fsdp_backward_prefetch --fsdp_cpu_ram_efficient_loading
        --fsdp_forward_prefetch --fsdp_min_num_params --fsdp_offload_params --fsdp_reshard_after_forward --fsdp_sharding_strategy
        --fsdp_state_dict_type --fsdp_sync_module_states --fsdp_transformer_layer_cls_to_wrap --fsdp_use_orig_params
        --fsdp_version --gpu_ids --gradient_accumulation_steps --gradient_clipping --help --log_dir --machine_rank
        --main_process_ip --main_process_port --main_training_function --max_restarts --megatron_lm_attention_backend
        --megatron_lm_attention_dropout --megatron_lm_attention_softmax_in_fp32 --megatron_lm_calculate_per_token_loss
        --megatron_lm_context_parallel_size --megatron_lm_decoder_last_pipeline_num_layers --megatron_lm_eod_mask_loss
        --megatron_lm_expert_model_parallel_size --megatron_lm_expert_tensor_parallel_size --megatron_lm_gradient_clipping
        --megatron_lm_hidden_dropout --megatron_lm_no_load_optim --megatron_lm_no_save_optim --megatron_lm_num_micro_batches
        --megatron_lm_optimizer_cpu_offload --megatron_lm_overlap_cpu_optimizer_d2h_h2d --megatron_lm_pp_degree
        --megatron_lm_recompute_activations --megatron_lm_recompute_granularity --megatron_lm_recompute_method
        --megatron_lm_recompute_num_layers --megatron_lm_sequence_parallelism --megatron_lm_tp_degree
        --megatron_lm_use_custom_fsdp --megatron_lm_use_distributed_optimizer --megatron_lm_use_precision_aware_optimizer
        --megatron_lm_use_rotary_position_embeddings --mixed_precision --module --monitor_interval --mpirun_hostfile --multi_gpu
        --no_python --no_tpu_cluster --num_cpu_threads_per_process --num_machines --num_processes --offload_optimizer_device
        --offload_optimizer_nvme_path --offload_param_device --offload_param_nvme_path --parallelism_config_cp_backend
        --parallelism_config_cp_comm_strategy --parallelism_config_cp_size --parallelism_config_dp_replicate_size
        --parallelism_config_dp_shard_size --parallelism_config_sp_attn_implementation --parallelism_config_sp_backend
        --parallelism_config_sp_seq_length --parallelism_config_sp_seq_length_is_variable --parallelism_config_sp_size
        --parallelism_config_tp_size --quiet --rdzv_backend --rdzv_conf --role --same_network --tee --tpu --tpu_cluster
        --tpu_use_sudo --use_deepspeed --use_fsdp --use_megatron_lm --use_parallelism_config --vm --zero3_init_flag
        --zero3_save_16bit_model --zero_stage
        """,
        "torchrun": """
        --duplicate_stderr_filters --duplicate_stdout_filters --event_log_handler --help --local_addr --local_ranks_filter
        --log_dir --logs_specs --master_addr --master_port --max_restarts --module --monitor_interval --nnodes --no_python
        --node_rank --nproc_per_node --numa_binding --rdzv_backend --rdzv_conf --rdzv_endpoint --rdzv_id --redirects --role
        --run_path --shutdown_timeout --signals_to_handle --standalone --start_method --tee --virtual_local_rank
        """,
    }.items()
}
# Those that take no value; every other one before the script takes one.
_SWITCHES = {
    launcher: frozenset(text.split())
    for launcher, text in {
        "deepspeed": """
        --bind_cores_to_rank --force_multi --help --module --no_local_rank --no_python --no_ssh --no_ssh_check --quiet --save_pid
        -h -q
        """,
        "accelerate": """
        --cpu --debug --downcast_bf16 --dynamo_use_dynamic --dynamo_use_fullgraph --dynamo_use_regional_compilation
        --enable_cpu_affinity --fp8_use_autocast_during_eval --help --module --multi_gpu --no_python --no_tpu_cluster --quiet
        --same_network --tpu --tpu_cluster --tpu_use_sudo --use_deepspeed --use_fsdp --use_megatron_lm --use_parallelism_config -h
        -m -q
        """,
        "torchrun": """
        --help --module --no_python --run_path --standalone --virtual_local_rank -h -m
        """,
    }.items()
}
_SHORT = {"-H": "--hostfile", "-i": "--include", "-e": "--exclude"}  # of deepspeed
_ABBREVIATING = ("deepspeed", "torchrun")  # take the beginning of an option's name for it
# Options that only a launcher has: after the script they reach the script instead.
_LAUNCHER_ONLY = {
    "deepspeed": {"--num_gpus", "--num_nodes", "--hostfile", "--include", "--exclude", "--master_port", "--master_addr"},
    "accelerate": {
        "--config_file",
        "--num_processes",
        "--num_machines",
        "--machine_rank",
        "--main_process_port",
        "--main_process_ip",
        "--gpu_ids",
    },
    "torchrun": {"--nproc_per_node", "--nnodes", "--node_rank", "--master_port", "--master_addr", "--rdzv_endpoint", "--standalone"},
}
# Options that count processes or machines.
_COUNTS = {
    "deepspeed": ("--num_gpus", "--num_accelerators", "--num_nodes"),
    "accelerate": ("--num_processes", "--num_machines"),
    "torchrun": ("--nproc_per_node", "--nnodes"),
}
# What else torchrun takes for the processes of a machine: itself, and the backends that have joined torch from outside.
_PROCESS_WORDS = ("auto", "cpu", "gpu", "xpu", "privateuseone", "npu", "mlu", "musa", "hpu", "gcu", "sdaa", "maca")
_WHOLE_NUMBERS = ("--node_rank", "--machine_rank", "--max_restarts")
_HOST_LINE = re.compile(r"(\S+)\s+slots=(\d{1,6})\s*(#.*)?")  # no host has a million


@dataclasses.dataclass(frozen=True)
class Launch:
    """A launcher's command, taken apart.

    Attributes:
        launcher: "deepspeed", "accelerate", "torchrun" or "python".
        options: the launcher's own options by name, hyphens written as underscores; switches have an empty value.
        script: the script or module; None where the command ends before one.
        script_args: what the script gets.
        unknown: options, as they were typed, that the launcher does not have.
    """

    launcher: str
    options: dict[str, str]
    script: str | None
    script_args: tuple[str, ...]
    unknown: tuple[str, ...] = ()

    def integer(self, *names: str) -> int | None:
        """The value of the first of these options that was given, where it is a whole number."""
        for name in names:
            text = self.options.get(name, "")
            if is_count(text):
                return int(text)
        return None

    @property
    def num_processes(self) -> int | None:
        """Processes that the command itself asks for; None where it leaves them to the machine or a file."""
        if self.launcher == "python":
            return 1
        if self.launcher == "accelerate":
            return self.integer("--num_processes")
        if self.launcher == "deepspeed":
            count = self.integer("--num_gpus", "--num_accelerators")
            return None if count is None else count * (self.integer("--num_nodes") or 1)
        count = self.integer("--nproc_per_node")
        return None if count is None else count * (self.integer("--nnodes") or 1)


def parse_launch(tokens: Sequence[str]) -> Launch:
    """Takes a launcher's command apart.

    Raises:
        UserError: it starts with no launcher that is known here.
    """
    words = list(tokens)
    name = Path(words[0]).name if words else ""
    if name.startswith("python"):
        name = "python"
        words = [words[0], *[word for word in words[1:] if word != "-u"]]
        if words[1:3] == ["-m", "torch.distributed.run"]:
            name, words = "torchrun", words[2:]
    if name not in ("deepspeed", "accelerate", "torchrun", "python"):
        raise user_error("command", f"{name or 'nothing'} is no launcher", "deepspeed, accelerate launch, torchrun or python")
    rest = words[1:]
    if name == "accelerate":
        if not rest or rest[0] != "launch":
            raise user_error("command", f"accelerate {rest[0] if rest else ''} starts no job", "accelerate launch ...")
        rest = rest[1:]
    options: dict[str, str] = {}
    unknown: list[str] = []
    while rest and rest[0].startswith("-"):
        flag, equals, value = rest.pop(0).partition("=")
        key = _full_name(name, flag)
        if name != "python" and _is_unknown(name, flag, key):
            unknown.append(flag)
        meant = key if flag not in unknown else _nearest(name, flag) or key  # what is misspelt takes a value where the right one does
        if not equals and meant not in _SWITCHES.get(name, {"-m"}) and rest:
            value = rest.pop(0)
        options[key] = value
    return Launch(name, options, rest[0] if rest else None, tuple(rest[1:]), tuple(unknown))


def _full_name(launcher: str, flag: str) -> str:
    """An option's whole name with underscores, where the launcher knows it by what was typed; else what was typed, with underscores."""
    if not flag.startswith("--"):
        return _SHORT.get(flag, flag) if launcher == "deepspeed" else flag
    name = "--" + flag[2:].replace("-", "_")
    known = _OPTIONS.get(launcher, frozenset())
    whole = [option for option in known if option.startswith(name)] if launcher in _ABBREVIATING and name not in known else []
    return whole[0] if len(whole) == 1 else name


def _is_unknown(launcher: str, flag: str, key: str) -> bool:
    if not flag.startswith("--"):  # -nproc_per_node; a short option may have its value right behind it: -r3
        return f"-{flag}".replace("-", "_").replace("__", "--", 1) in _OPTIONS[launcher]
    return key not in _OPTIONS[launcher] or (launcher == "deepspeed" and "-" in flag[2:])  # which alone takes no hyphens for underscores


def _nearest(launcher: str, flag: str) -> str | None:
    name = "--" + flag.lstrip("-").replace("-", "_")
    return next(iter(difflib.get_close_matches(name, sorted(_OPTIONS[launcher]), n=1, cutoff=0.7)), None)


def check_launch(launch: Launch, environ: Mapping[str, str], machine: Machine | None = None) -> list[Finding]:
    """Everything wrong or odd in a launcher's command.

    Args:
        launch: the command.
        environ: the environment it would be started in.
        machine: for the number of cards; None where not known.
    """
    findings = list(_option_findings(launch, environ))
    if launch.script is None:
        findings.append(Finding("error", "command", "names no script", "end it with harness/run_clm.py and its arguments"))
    elif not {"--module", "-m", "--no_python", "--no-python"} & set(launch.options) and not Path(launch.script).exists():
        findings.append(Finding("error", "command", f"there is no {launch.script}", "the path of the script"))
    hosts: dict[str, int] = {}
    if "--hostfile" in launch.options:
        try:
            hosts = read_hostfile(launch.options["--hostfile"])
        except UserError as error:
            findings += error.findings
    findings += [*_count_findings(launch), *_host_findings(launch, hosts)]
    per_node = launch.integer("--num_gpus", "--nproc_per_node")
    if per_node is None and launch.launcher == "accelerate" and launch.num_processes is not None:
        per_node = launch.num_processes // (launch.integer("--num_machines") or 1)
    if machine and machine.gpus and per_node and per_node > len(machine.gpus) and not hosts:
        option = {"deepspeed": "--num_gpus", "accelerate": "--num_processes"}.get(launch.launcher, "--nproc_per_node")
        findings.append(
            Finding("error", option, f"{per_node}, but this machine has {len(machine.gpus)} cards", f"{option} {len(machine.gpus)}")
        )
    findings += _port_findings(launch, environ)
    return findings


_COMMANDS = {"accelerate": "accelerate launch"}


def _has_listed_version(launcher: str) -> bool:
    """Whether the launcher here has the options that are written down, so that every other one is a mistake."""
    package, version = _LISTED_FOR[launcher]
    try:
        return metadata.version(package).startswith(version)
    except metadata.PackageNotFoundError:
        return False


def _option_findings(launch: Launch, environ: Mapping[str, str]) -> Iterator[Finding]:
    options = launch.options
    if launch.launcher == "accelerate" and "--config" in options:
        yield Finding("error", "--config", "is no option of accelerate launch, which takes no abbreviations", "did you mean --config_file?")
    for flag in launch.unknown:
        if (launch.launcher, flag) == ("accelerate", "--config"):
            continue
        near = _nearest(launch.launcher, flag)
        message = f"is no option of {_COMMANDS.get(launch.launcher, launch.launcher)}"
        fix = f"did you mean {near}?" if near else "an option of the script stands behind the script"
        if _has_listed_version(launch.launcher):
            yield Finding("error", flag, message, fix)
        else:
            yield Finding("warning", flag, f"{message} {_LISTED_FOR[launch.launcher][1]}x", fix)
    file = options.get("--config_file")
    if file is not None and not Path(file).is_file():
        yield Finding("error", "--config_file", f"{file} does not exist", "the path of an accelerate YAML")
    for token in launch.script_args:
        flag = token.split("=", 1)[0].replace("-", "_").replace("__", "--", 1)
        if flag in _LAUNCHER_ONLY.get(launch.launcher, ()):
            message = f"stands after the script: {launch.launcher} does not see it, the script gets it"
            yield Finding("warning", flag, message, f"write it before {launch.script}")
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    limits = [name for name in ("--num_gpus", "--num_accelerators", "--num_nodes", "--include", "--exclude") if name in options]
    if launch.launcher == "deepspeed" and visible and limits:
        message = f"{visible} is dropped by the deepspeed launcher because of {limits[0]}: cards are counted from 0"
        yield Finding("warning", "CUDA_VISIBLE_DEVICES", message, f"--include localhost:{visible} instead of {limits[0]}")
    if {"--num_gpus", "--num_nodes"} & set(options) and {"--include", "--exclude"} & set(options):
        yield Finding("error", "--include", "and --num_gpus/--num_nodes exclude each other in the deepspeed launcher", "keep one")
    if "--include" in options and "--exclude" in options:
        yield Finding("error", "--include", "and --exclude exclude each other", "keep one")


def count_finding(option: str, text: str) -> Finding | None:
    """The error of a number of processes or machines that is below 1; None where it is possible, or a word such as gpu."""
    if re.fullmatch(r"[+-]?\d+", text) is None or (text.strip("+-0") and not text.startswith("-")):
        return None
    return Finding("error", option, f"must be at least 1, not {text}", f"{option} 1, or leave it out")


def _count_findings(launch: Launch) -> Iterator[Finding]:
    for option in _COUNTS.get(launch.launcher, ()):
        text = launch.options.get(option, "")
        unset = launch.launcher == "deepspeed" and text == "-1"  # the launcher's own default: all there are
        finding = None if unset else count_finding(option, text)
        if finding is not None:
            yield finding
        elif option in launch.options and not _is_possible_count(launch.launcher, option, text):
            torchrun = {"--nproc_per_node": ", or gpu, cpu, auto", "--nnodes": ", or a range like 1:2"}
            words = torchrun.get(option, "") if launch.launcher == "torchrun" else ""
            yield Finding("error", option, f"must be a whole number{words}, not {text[:40]!r}", f"{option} 1")
    for option in _WHOLE_NUMBERS:
        if option in launch.options and re.fullmatch(r"[+-]?\d{1,9}", launch.options[option]) is None:
            yield Finding("error", option, f"must be a whole number, not {launch.options[option][:40]!r}", f"{option} 0")


def _is_possible_count(launcher: str, option: str, text: str) -> bool:
    if launcher == "torchrun" and option == "--nproc_per_node" and text in _PROCESS_WORDS:
        return True
    is_range = launcher == "torchrun" and option == "--nnodes" and text.count(":") == 1
    return all(re.fullmatch(r"[+-]?\d{1,9}", part) for part in (text.split(":") if is_range else [text]))


def is_our_script(script: str, following: Sequence[str]) -> bool:
    """Whether a script or module is this harness's own training script, by its path or as `harness train`.

    Args:
        following: the words behind it.
    """
    path = Path(script)
    if path.name == "harness":
        return list(following[:1]) == ["train"]
    ours = Path(__file__).with_name("run_clm.py")
    is_file = path.parts[-2:] == ours.parts[-2:] or (path.name == ours.name and path.resolve() == ours.resolve())
    return is_file or script == "harness.run_clm"


# ---------------------------------------------------------------- hostfile


def read_hostfile(path: str | Path) -> dict[str, int]:
    """Hosts and their slots, from lines like `node-a slots=4`; blank lines and `# comments` are skipped.

    Raises:
        UserError: not there (DeepSpeed would go on with this machine alone), a line that is not understood, a host twice, no host.
    """
    lines = read_user_text(path, "--hostfile", "a file that was asked for must exist; leave --hostfile out for one machine").splitlines()
    problems: list[Finding] = []
    hosts: dict[str, int] = {}
    for number, raw in enumerate(lines, start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        match = _HOST_LINE.fullmatch(line)
        if match is None:
            fix = (
                "write it without blanks around =: " + re.sub(r"\s*=\s*", "=", line)
                if re.search(r"\s=|=\s", line)
                else "write: host slots=N"
            )
            problems.append(Finding("error", "--hostfile", f"{path} line {number}: {line}", fix))
        elif match[1] in hosts:
            problems.append(Finding("error", "--hostfile", f"{path} line {number}: {match[1]} stands twice", "one line for each host"))
        elif int(match[2]) == 0:
            problems.append(Finding("error", "--hostfile", f"{path} line {number}: {match[1]} has no slots", "remove the line"))
        else:
            hosts[match[1]] = int(match[2])
    if not hosts and not problems:
        problems.append(Finding("error", "--hostfile", f"{path} is empty: it names no host", "write lines like: node-a slots=4"))
    if problems:
        raise UserError(problems)
    return hosts


def _host_findings(launch: Launch, hosts: Mapping[str, int]) -> Iterator[Finding]:
    if not hosts:
        return
    wanted = launch.integer("--num_gpus")
    short = [host for host, slots in hosts.items() if wanted and slots < wanted]
    if short:
        message = f"{wanted}, but {', '.join(f'{host} has {hosts[host]} slots' for host in short)}"
        yield Finding("error", "--num_gpus", message, f"--num_gpus {min(hosts.values())}")
    num_nodes = launch.integer("--num_nodes")
    used = list(hosts.items())[: num_nodes or None]
    if num_nodes and num_nodes > len(hosts):
        yield Finding("error", "--num_nodes", f"{num_nodes}, but the hostfile names {len(hosts)}", f"--num_nodes {len(hosts)}")
    elif len({slots for _, slots in used}) > 1 and not {"--num_gpus", "--include", "--exclude"} & set(launch.options):
        message = f"hosts of unequal size: {', '.join(f'{host} {slots}' for host, slots in used)} slots"
        yield Finding("error", "--hostfile", message, f"--num_gpus {min(slots for _, slots in used)} takes as many of each")
    for option in ("--include", "--exclude"):
        for part in filter(None, launch.options.get(option, "").split("@")):
            host, _, slots = part.partition(":")
            if host not in hosts:
                yield Finding("error", option, f"{host} is not in the hostfile", "one of " + ", ".join(hosts))
            elif any(not is_count(slot) or int(slot) >= hosts[host] for slot in filter(None, slots.split(","))):
                yield Finding("error", option, f"{host} has slots 0 to {hosts[host] - 1}, not {slots}", f"{host}:0")


# ---------------------------------------------------------------- ports


def _port_findings(launch: Launch, environ: Mapping[str, str]) -> Iterator[Finding]:
    option = next((name for name in ("--master_port", "--main_process_port") if name in launch.options), None)
    num_nodes = launch.integer("--num_nodes", "--nnodes", "--num_machines") or 1
    if option is None:
        if launch.launcher != "python" and "MASTER_PORT" in environ and "RANK" not in environ:
            message = f"{environ['MASTER_PORT']} is left in the environment, from another job or a shell profile"
            yield Finding("info", "MASTER_PORT", message, "unset it; launch/*.sh choose a free port")
        return
    text = launch.options[option]
    if not is_count(text) or int(text) > 65535:
        yield Finding("error", option, f"{text[:40]} is no port", "a number from 1024 to 65535")
    elif text == "0" and num_nodes > 1:
        yield Finding(
            "error", option, f"0 lets each of the {num_nodes} machines choose its own port", "one port, the same on every machine"
        )
    elif text == "0" and launch.launcher != "accelerate":
        # Both hand MASTER_PORT=0 to the ranks, which then wait for each other for ever; only accelerate looks for a free port.
        yield Finding("error", option, f"0 is taken as it is by {launch.launcher}: the ranks never meet", "a free port, or leave it out")
    elif text != "0" and launch.options.get("--machine_rank", launch.options.get("--node_rank", "0")) == "0" and port_in_use(int(text)):
        yield Finding("error", option, f"port {text} is in use on this machine", "another port, or leave it out")


def port_in_use(port: int, host: str = "127.0.0.1") -> bool:
    """Whether something listens on this port of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((host, port)) == 0


# ---------------------------------------------------------------- the environment of a rank


def check_environment(environ: Mapping[str, str]) -> list[Finding]:
    """Variables that slow a job down, contradict each other or are spelt wrongly."""
    findings: list[Finding] = []
    new, old = environ.get("PYTORCH_ALLOC_CONF"), environ.get("PYTORCH_CUDA_ALLOC_CONF")
    if new and old and new != old:
        message = f"{new} and PYTORCH_CUDA_ALLOC_CONF {old} differ"
        findings.append(Finding("warning", "PYTORCH_ALLOC_CONF", message, "unset PYTORCH_CUDA_ALLOC_CONF, the older name"))
    for name, text in (("PYTORCH_ALLOC_CONF", new), ("PYTORCH_CUDA_ALLOC_CONF", old)):
        parts = re.sub(r"\[[^\]]*\]", "list", text or "").split(",")
        if text and not all(re.fullmatch(r"\s*\w+:[\w.]+\s*", part) for part in parts):
            findings.append(Finding("error", name, f"{text} is not name:value,name:value", "expandable_segments:True"))
        elif "expandable_segments:false" in (text or "").lower():
            message = "expandable_segments is off: more memory is lost to fragmentation"
            findings.append(Finding("warning", name, message, "expandable_segments:True"))
    slow = {
        "CUDA_LAUNCH_BLOCKING": ("1", "waits for the GPU after every kernel"),
        "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "checks every collective, which costs much time"),
        "NCCL_P2P_DISABLE": ("1", "sends everything between cards through host memory"),
        "NCCL_IB_DISABLE": ("1", "sends everything between machines over TCP"),
        "NCCL_DEBUG": ("TRACE", "writes a line for every call"),
    }
    for name, (value, what) in slow.items():
        if environ.get(name, "").upper() == value:
            findings.append(Finding("warning", name, f"{value}: {what}", f"unset {name} for real runs"))
    if environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "").lower() in ("1", "true") and "ACCELERATE_USE_FSDP" not in environ:
        message = "true: from_pretrained would leave all ranks but the first without weights; it is switched off"
        findings.append(Finding("info", "FSDP_CPU_RAM_EFFICIENT_LOADING", message, "unset it"))
    findings += _rank_findings(environ)
    return findings


def _rank_findings(environ: Mapping[str, str]) -> Iterator[Finding]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    if "WORLD_SIZE" not in environ:
        return
    for name in ("RANK", "WORLD_SIZE"):
        if not is_count(environ.get(name, "0")):
            yield Finding("error", name, f"{environ[name][:40]!r} is not a whole number", "start the job with a launcher")
            return
    world, rank = int(environ["WORLD_SIZE"]), int(environ.get("RANK", "0"))
    missing = [name for name in names if name not in environ]
    if world > 1 and missing:
        message = f"{', '.join(missing)} not set, but WORLD_SIZE is {world}"
        yield Finding("error", missing[0], message, "start the job with torchrun, deepspeed or accelerate launch")
    if world < 1:
        yield Finding("error", "WORLD_SIZE", f"must be at least 1, not {world}", "start the job with a launcher")
    elif rank >= world:
        yield Finding("error", "RANK", f"{rank} is not below WORLD_SIZE {world}", "start the job with a launcher")


def check_build_locks(environ: Mapping[str, str]) -> list[Finding]:
    """Locks that a killed build of a C++ extension left behind, or that another machine holds (see harness.build_locks)."""
    root = extensions_folder(environ)
    locks = [path.resolve() for pattern in ("*/lock", "*/*/lock") for path in root.glob(pattern)]
    findings: list[Finding] = []
    for lock in (lock for lock in locks if not is_held(lock)):
        name = lock.parent.name
        if is_abandoned(lock, patience_s=0.0):
            message, fix = f"{lock} was left by a build that was killed: other programs that need {name} wait for it for ever", f"rm {lock}"
        else:
            where = owner_of(lock) or "a machine that shares the folder"
            message = f"{lock}: {name} is being compiled on {where}, or a build there was killed"
            fix = f"where none runs any more: rm {lock}"
        findings.append(Finding("warning", "TORCH_EXTENSIONS_DIR", message, fix))
    return findings
