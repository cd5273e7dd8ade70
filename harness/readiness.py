"""`harness doctor`: is this machine ready to train? Cards, driver, links, libraries, host, disk and model files, all findings at once.

    harness doctor                                   # half a minute; measures the links where there are two cards or more
    harness doctor --output_dir out --model my/llama # also the disk that is written to, and the model's files
    harness doctor --json --no_bandwidth
    harness doctor --compile_ops                     # also compiles DeepSpeed's CPU Adam, and tries it

Works without a GPU. What loads torch or may hang runs in child processes with time limits. Exit code 1 if anything is an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.build_locks import extensions_folder
from harness.findings import Finding, FindingParser, Severity, counted, format_findings, has_errors, sort_findings
from harness.host_checks import GIB, check_host
from harness.library_checks import check_build_tools, check_libraries
from harness.machine import detect_machine
from harness.model_files import check_fit, check_model_files
from harness.monitor import GpuSample, nvml, sample_gpus, visible_indices

# GB/s in one direction: of one NVLink by version, and of one PCIe lane by generation (after its encoding).
_NVLINK_GB_PER_S: dict[int, float] = {1: 20.0, 2: 25.0, 3: 25.0, 4: 25.0, 5: 50.0}
_PCIE_LANE_GB_PER_S: dict[int, float] = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
# A healthy link reaches 75 to 90 % of its nominal speed in large copies; below half of it something is wrong.
_SLOW_SHARE = 0.5
_MAX_NVLINKS = 36


@dataclasses.dataclass
class Report:
    """Everything that was found out.

    Attributes:
        facts: section -> name -> value.
        findings: what there is to say, unsorted.
    """

    facts: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    findings: list[Finding] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Links:
    """How a card is connected.

    Attributes:
        num_nvlinks: active ones.
        nvlink_gb_per_s: all of them together, one direction.
        pcie_generation, pcie_width: the highest that card and slot can do, and the lanes in use; 0: unknown.
        pcie_max_width: lanes of the card.
        nvlink_peers: cards (numbers) that it reaches over NVLink.
    """

    num_nvlinks: int = 0
    nvlink_gb_per_s: float = 0.0
    pcie_generation: int = 0
    pcie_width: int = 0
    pcie_max_width: int = 0
    nvlink_peers: tuple[int, ...] = ()

    @property
    def pcie_gb_per_s(self) -> float:
        """Nominal, one direction; 0: unknown."""
        return _PCIE_LANE_GB_PER_S.get(self.pcie_generation, 0.0) * self.pcie_width


def run_probes(name: str, environments: Sequence[Mapping[str, str]], timeout_s: float) -> list[dict[str, Any]]:
    """Runs a probe of `harness.readiness_probes` in one child process per environment, all at once.

    Returns:
        What each printed; {"error": why} where one failed or did not end in time.
    """
    root = str(Path(__file__).resolve().parent.parent)
    children = []
    for extra in environments:
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
        children.append(
            subprocess.Popen(
                [sys.executable, "-m", "harness.readiness_probes", name],
                env={**os.environ, **extra, "PYTHONPATH": path},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
    deadline = time.monotonic() + timeout_s
    return [_answer(child, name, max(0.1, deadline - time.monotonic())) for child in children]


def _answer(child: subprocess.Popen[str], name: str, timeout_s: float) -> dict[str, Any]:
    try:
        output, errors = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a child stuck in the driver cannot even be killed
            child.communicate(timeout=5)
        return {"error": f"the {name} probe did not end in time"}
    if child.returncode == 0:
        try:
            return dict(json.loads(output.strip().splitlines()[-1]))
        except (ValueError, IndexError):
            return {"error": f"the {name} probe gave no answer"}
    last = [line for line in errors.strip().splitlines() if line.strip()]
    return {"error": f"the {name} probe ended with code {child.returncode}: {last[-1].strip() if last else 'no message'}"}


def read_links(num_cards: int) -> list[Links]:
    """NVLink and PCIe of each card, through NVML; empty without one."""
    with nvml() as library:
        if library is None:
            return []
        handles = [library.nvmlDeviceGetHandleByIndex(index) for index in range(num_cards)]
        return [_links(library, handles, index) for index in range(num_cards)]


def _links(library: Any, handles: Sequence[Any], index: int) -> Links:
    handle = handles[index]

    def ask(function: str, *arguments: Any) -> Any:
        try:
            return getattr(library, function)(handle, *arguments)
        except Exception:  # not supported by this card or this driver
            return None

    active = [link for link in range(_MAX_NVLINKS) if ask("nvmlDeviceGetNvLinkState", link)]
    speeds = [_NVLINK_GB_PER_S.get(ask("nvmlDeviceGetNvLinkVersion", link) or 0, 25.0) for link in active]
    generations = (ask("nvmlDeviceGetMaxPcieLinkGeneration"), ask("nvmlDeviceGetGpuMaxPcieLinkGeneration"))
    known = [generation for generation in generations if generation]
    status_ok = getattr(library, "NVML_P2P_STATUS_OK", 0)
    index_nvlink = getattr(library, "NVML_P2P_CAPS_INDEX_NVLINK", 2)
    peers = [
        other
        for other in range(len(handles))
        if other != index and ask("nvmlDeviceGetP2PStatus", handles[other], index_nvlink) == status_ok
    ]
    return Links(
        num_nvlinks=len(active),
        nvlink_gb_per_s=sum(speeds),
        pcie_generation=min(known, default=0),
        pcie_width=ask("nvmlDeviceGetCurrPcieLinkWidth") or 0,
        pcie_max_width=ask("nvmlDeviceGetMaxPcieLinkWidth") or 0,
        nvlink_peers=tuple(peers),
    )


def visible_links(links: Sequence[Links], used: Sequence[int]) -> list[Links]:
    """Links of the cards that CUDA sees, in its order and with its numbers.

    Args:
        links: of all cards, in NVML's order.
        used: NVML's numbers of the visible cards, in CUDA's order.
    """
    place = {index: position for position, index in enumerate(used)}
    return [
        dataclasses.replace(links[index], nvlink_peers=tuple(place[peer] for peer in links[index].nvlink_peers if peer in place))
        for index in used
    ]


def driver_facts() -> dict[str, Any]:
    """Driver's version and the CUDA version that it supports; empty without a driver."""
    with nvml() as library:
        if library is None:
            return {}
        driver = library.nvmlSystemGetDriverVersion()
        cuda = library.nvmlSystemGetCudaDriverVersion()
        return {
            "driver": driver.decode() if isinstance(driver, bytes) else driver,
            "driver_cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
        }


def check_cards(cards: Sequence[GpuSample], own_pids: frozenset[int] = frozenset()) -> list[Finding]:
    """State of the cards: other processes, memory in use, memory errors, clocks held down, unlike cards."""
    findings = []
    for card in cards:
        key = f"GPU {card.index}"
        others = [process for process in card.processes if process.pid not in own_pids]
        for process in others:
            memory = "some memory" if process.memory_gib is None else f"{process.memory_gib:.1f} GiB"
            message = f"{process.user or 'somebody'}'s process {process.pid} ({process.command or 'unknown'}) holds {memory}"
            findings.append(Finding("warning", key, message, "wait for it, or leave this card out with CUDA_VISIBLE_DEVICES"))
        if not others and card.memory_used_gib > max(1.0, 0.05 * card.memory_total_gib):
            message = f"{card.memory_used_gib:.1f} of {card.memory_total_gib:.1f} GiB are in use by processes that cannot be seen from here"
            findings.append(Finding("warning", key, message, "look on the host: nvidia-smi"))
        if card.ecc_errors:
            message = f"{card.ecc_errors} uncorrected memory errors since the driver was loaded"
            findings.append(Finding("error", key, message, "do not use this card before it was reset and tested"))
        hot = [reason for reason in card.throttled if reason != "power cap"]
        if hot:
            temperature = "" if card.temperature_c is None else f" at {card.temperature_c} C"
            findings.append(Finding("warning", key, f"clock held down{temperature}: {', '.join(hot)}", "check cooling and power supply"))
    names = sorted({card.name for card in cards})
    if len(names) > 1:
        findings.append(
            Finding("warning", "GPUs", f"are not alike: {', '.join(names)}", "the slowest and smallest one decides; leave it out")
        )
    return findings


def check_torch(facts: Mapping[str, Any], num_cards: int, driver: Mapping[str, Any], visible: str | None) -> list[Finding]:
    """torch's build against the driver and the cards.

    Args:
        facts: of the torch probe.
        num_cards: that NVML sees.
        visible: CUDA_VISIBLE_DEVICES.
    """
    if "error" in facts:
        return [Finding("error", "torch", str(facts["error"]), "python -c 'import torch; torch.cuda.init()' shows more")]
    findings = [
        Finding(
            "error" if name == "liger_kernel" else "warning", name, f"is installed but cannot be imported: {why}", f"pip uninstall {name}"
        )
        for name, why in facts["broken_imports"].items()
    ]
    devices = facts["devices"]
    if num_cards and not devices:
        if facts["torch_cuda"] is None:
            findings.append(Finding("error", "torch", f"{facts['torch']} is a build without CUDA", "install a torch build for CUDA"))
        elif visible is not None and not visible.strip(" -1,"):
            findings.append(Finding("warning", f"CUDA_VISIBLE_DEVICES={visible}", "hides all cards", "unset CUDA_VISIBLE_DEVICES"))
        else:
            why = facts["cuda_error"] or "torch.cuda.is_available() is False"
            findings.append(
                Finding("error", "torch", f"sees none of {num_cards} cards: {why}", "update the driver, or install an older build")
            )
    driver_cuda, torch_cuda = driver.get("driver_cuda"), facts["torch_cuda"]
    if driver_cuda and torch_cuda and int(torch_cuda.split(".")[0]) > int(driver_cuda.split(".")[0]):
        message = f"{driver['driver']} supports CUDA {driver_cuda}, torch was built for {torch_cuda}"
        findings.append(Finding("error", "driver", message, "update the driver, or install a torch build for the driver's CUDA"))
    for device in devices:
        key = f"cuda:{device['index']}"
        if device["matmul_error"]:
            findings.append(Finding("error", key, f"{device['name']} does not compute: {device['matmul_error']}"))
        if not device["bf16"]:
            message = f"{device['name']} (compute capability {device['compute_capability']}) has no bf16"
            findings.append(Finding("info", key, message, "--precision auto takes fp16"))
    if 0 < len(devices) < num_cards:
        why = f"CUDA_VISIBLE_DEVICES={visible}" if visible is not None else "torch sees fewer than the driver"
        findings.append(Finding("info", "GPUs", f"{len(devices)} of {num_cards} are used ({why})"))
    return findings


def check_links(links: Sequence[Links]) -> list[Finding]:
    """Links that are narrower than they could be, or missing on some cards only."""
    findings = []
    for index, link in enumerate(links):
        if 0 < link.pcie_width < link.pcie_max_width:
            message = f"uses {link.pcie_width} of {link.pcie_max_width} PCIe lanes"
            findings.append(Finding("warning", f"GPU {index}", message, "reseat the card, or use another slot"))
    counts = sorted({link.num_nvlinks for link in links})
    if len(counts) > 1:
        text = ", ".join(f"GPU {index}: {link.num_nvlinks}" for index, link in enumerate(links))
        findings.append(Finding("warning", "NVLink", f"cards have unlike numbers of active links ({text})", "nvidia-smi nvlink --status"))
    return findings


def check_peer_access(peer_access: Sequence[Sequence[bool]], links: Sequence[Links]) -> list[Finding]:
    """Pairs of cards that cannot reach each other's memory: traffic then goes through the host."""
    pairs = [(a, b) for a, row in enumerate(peer_access) for b, reaches in enumerate(row) if a < b and not reaches]
    if not pairs:
        return []
    text = ", ".join(f"{a}-{b}" for a, b in pairs[:6]) + (", ..." if len(pairs) > 6 else "")
    linked = any(link.num_nvlinks for link in links)
    fix = (
        "check the fabric manager: systemctl status nvidia-fabricmanager" if linked else "expected on consumer cards; sharding will be slow"
    )
    return [Finding("warning" if linked else "info", "peer access", f"not between cards {text}", fix)]


def expected_gb_per_s(links: Sequence[Links], source: int, target: int) -> tuple[float, str]:
    """What the link between two cards should give, nominal, one direction; (0, "") where that is unknown."""
    if source >= len(links) or target >= len(links):
        return 0.0, ""
    if target in links[source].nvlink_peers and links[source].nvlink_gb_per_s:
        return min(links[source].nvlink_gb_per_s, links[target].nvlink_gb_per_s), "NVLink"
    return min(links[source].pcie_gb_per_s, links[target].pcie_gb_per_s), "PCIe"


def check_bandwidth(copy: Mapping[str, Any], allreduce: Mapping[str, Any] | None, links: Sequence[Links]) -> list[Finding]:
    """Measured speeds against what the links should give; data that did not arrive is an error.

    Args:
        copy: of the copy probe.
        allreduce: of the all-reduce probe; None: not run.
        links: of the visible cards, in CUDA's order.
    """
    findings = []
    if "error" in copy:
        findings.append(Finding("error", "copy", str(copy["error"])))
    else:
        nominal = links[0].pcie_gb_per_s if links else 0.0
        slowest = min(copy["host_to_card_gb_per_s"], copy["card_to_host_gb_per_s"])
        if nominal and slowest < _SLOW_SHARE * nominal:
            message = f"{slowest:.1f} GB/s, the slot should give about {nominal:.0f}: offload will be slow"
            findings.append(Finding("warning", "host to GPU 0", message, "check the slot's lanes and which socket the process runs on"))
        for peer in copy["peers"]:
            key = f"GPU {peer['from']} to {peer['to']}"
            if not peer["arrived"]:
                fix = "turn off the IOMMU / PCIe ACS on the host, or set NCCL_P2P_DISABLE=1"
                findings.append(Finding("error", key, "copied data arrived changed", fix))
            nominal, kind = expected_gb_per_s(links, peer["from"], peer["to"])
            if nominal and peer["gb_per_s"] < _SLOW_SHARE * nominal:
                message = f"{peer['gb_per_s']:.1f} GB/s, {kind} should give about {nominal:.0f}"
                findings.append(Finding("warning", key, message, "nvidia-smi topo -m; nvidia-smi nvlink --status"))
    if allreduce is None:
        return findings
    if "error" in allreduce:
        findings.append(Finding("error", "all-reduce", str(allreduce["error"]), "NCCL_DEBUG=INFO shows more"))
        return findings
    if not allreduce["right"]:
        findings.append(Finding("error", "all-reduce", "gives a wrong sum", "NCCL_DEBUG=INFO; try NCCL_P2P_DISABLE=1"))
    pairs = [expected_gb_per_s(links, index, (index + 1) % len(links)) for index in range(len(links))] if len(links) > 1 else []
    nominal, kind = min(pairs, default=(0.0, ""))
    if nominal and allreduce["bus_gb_per_s"] < _SLOW_SHARE * nominal:
        message = f"{allreduce['bus_gb_per_s']:.1f} GB/s bus bandwidth, {kind} should allow about {nominal:.0f}"
        findings.append(Finding("warning", "all-reduce", message, "NCCL_DEBUG=INFO shows which transport is used"))
    return findings


def measure_links(num_devices: int, timeout_s: float) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Runs the copy probe and, with two cards or more, the all-reduce probe."""
    (copy,) = run_probes("copy", [{}], timeout_s)
    if num_devices < 2:
        return copy, None
    with socket.socket() as listener:  # a port that was free a moment ago
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    common = {"WORLD_SIZE": str(num_devices), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    answers = run_probes("allreduce", [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_devices)], timeout_s)
    failed = [answer for answer in answers if "error" in answer]
    if failed:
        return copy, failed[0]
    slowest = min(answers, key=lambda answer: answer["bus_gb_per_s"])
    return copy, {**slowest, "right": all(answer["right"] for answer in answers)}


# What does not run without an operator of DeepSpeed's.
_OPERATOR_USES = {
    "cpu_adam": "optimizer states in host memory (ds_configs/*_offload.json)",
    "async_io": "weights and optimizer states on NVMe (ds_configs/zero3_nvme.json)",
}
COMPILE_LIMIT_S = 900.0  # a minute on an idle machine; compilers of a busy one take ten times as long


def check_operators(answer: Mapping[str, Any], compiled: Mapping[str, Any] | None = None) -> list[Finding]:
    """DeepSpeed's operators that a template needs and this machine cannot build.

    Args:
        answer: of the deepspeed probe.
        compiled: of the compile probe; None: not run.
    """
    findings = []
    if "error" in answer:
        findings.append(Finding("warning", "deepspeed", str(answer["error"]), "python -m deepspeed.env_report shows more"))
    operators = answer.get("operators", {})
    for name, use in _OPERATOR_USES.items():
        if name in operators and not operators[name]["usable"]:
            fix = "apt-get install libaio-dev" if "libaio" in operators[name]["state"] else "python -m deepspeed.env_report shows more"
            severity: Severity = "warning" if name == "cpu_adam" else "info"
            findings.append(Finding(severity, name, f"cannot be built, so no {use}: {operators[name]['state']}", fix))
    if compiled is not None and "error" in compiled:
        findings.append(Finding("error", "cpu_adam", str(compiled["error"]), "check the compiler: g++ --version, ninja --version"))
    elif compiled is not None and not compiled["right"]:
        findings.append(Finding("error", "cpu_adam", "its update is not that of torch's AdamW", f"remove {extensions_folder()}"))
    return findings


def examine(
    output_dir: Path, model: Path | None = None, bandwidth: bool = True, timeout_s: float = 120.0, compile_ops: bool = False
) -> Report:
    """Looks at everything.

    Args:
        output_dir: where a run would be written.
        model: a local model's folder, to be checked too.
        bandwidth: measure copies and an all-reduce where there are cards.
        timeout_s: limit of each child process.
        compile_ops: compile DeepSpeed's CPU Adam, which takes about a minute the first time, and try it.
    """
    report = Report()
    cards = sample_gpus(with_processes=True)
    links = read_links(len(cards))
    driver = driver_facts()
    (torch_facts,) = run_probes("torch", [{}], timeout_s)
    devices = torch_facts.get("devices", [])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    used = visible_indices(os.environ, [card.uuid for card in cards])

    libraries, findings = check_libraries()
    has_deepspeed = libraries.get("deepspeed") != "absent"
    operators = run_probes("deepspeed", [{}], timeout_s)[0] if has_deepspeed else {}
    compiled = run_probes("compile", [{}], max(timeout_s, COMPILE_LIMIT_S))[0] if has_deepspeed and compile_ops else None
    findings += check_build_tools(torch_facts.get("torch_cuda"), torch_facts.get("nvcc")) + check_operators(operators, compiled)
    machine = detect_machine()
    gpu_memory = [device["total_bytes"] for device in devices]
    host, host_findings = check_host(output_dir, len(devices), sum(gpu_memory), machine.host_memory_bytes)

    findings += check_cards([card for card in cards if card.index in used])
    findings += check_torch(torch_facts, len(cards), driver, visible)
    findings += check_links(links) + check_peer_access(torch_facts.get("peer_access", []), visible_links(links, used)) + host_findings
    if not cards:
        findings.append(Finding("info", "GPUs", "none found: training runs on the CPU, for tests only"))

    report.facts["GPUs"] = {**driver, **_card_facts(cards, devices, links)}
    report.facts["software"] = {"python": sys.version.split()[0], **_torch_summary(torch_facts), **libraries}
    report.facts["DeepSpeed operators"] = {name: found["state"] for name, found in operators.get("operators", {}).items()}
    if compiled is not None and "duration_s" in compiled:
        report.facts["DeepSpeed operators"]["cpu_adam"] = f"compiled and loaded in {compiled['duration_s']} s"
    report.facts["host"] = host
    if bandwidth and devices:
        copy, allreduce = measure_links(len(devices), timeout_s)
        findings += check_bandwidth(copy, allreduce, visible_links(links, used))
        report.facts["bandwidth"] = _bandwidth_facts(copy, allreduce)
    if model is not None:
        model_facts, model_findings = check_model_files(model)
        report.facts["model"] = model_facts
        findings += model_findings + check_fit(model_facts.get("num_parameters", 0), gpu_memory)
    report.findings = sort_findings(findings)
    return report


def _card_facts(cards: Sequence[GpuSample], devices: Sequence[Mapping[str, Any]], links: Sequence[Links]) -> dict[str, Any]:
    facts: dict[str, Any] = {"count": len(cards)}
    for card, link in zip(cards, links, strict=True):
        facts[f"GPU {card.index}"] = {
            "name": card.name,
            "memory_gib": card.memory_total_gib,
            "memory_used_gib": card.memory_used_gib,
            "temperature_c": card.temperature_c,
            "power_limit_w": card.power_limit_w,
            "nvlinks": link.num_nvlinks,
            "nvlink_gb_per_s": link.nvlink_gb_per_s,
            "pcie": f"gen {link.pcie_generation} x{link.pcie_width}",
        }
    for device in devices:
        facts[f"cuda:{device['index']}"] = {
            "name": device["name"],
            "compute_capability": device["compute_capability"],
            "free_gib": round(device["free_bytes"] / GIB, 2),
            "bf16": device["bf16"],
            "fp8": device["fp8"],
        }
    return facts


def _torch_summary(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: facts.get(name) for name in ("torch_cuda", "cudnn", "nccl")}


def _bandwidth_facts(copy: Mapping[str, Any], allreduce: Mapping[str, Any] | None) -> dict[str, Any]:
    facts = {name: round(value, 1) for name, value in copy.items() if isinstance(value, float)}
    for peer in copy.get("peers", []):
        facts[f"GPU {peer['from']} to {peer['to']} GB/s"] = round(peer["gb_per_s"], 1)
    if allreduce is not None and "bus_gb_per_s" in allreduce:
        facts[f"all-reduce over {allreduce['num_gpus']} GPUs, bus GB/s"] = round(allreduce["bus_gb_per_s"], 1)
    return facts


def format_report(report: Report) -> str:
    """The report as text: facts by section, then findings, worst first, then the verdict."""
    lines = []
    for section, facts in report.facts.items():
        lines.append(section)
        for name, value in facts.items():
            text = ", ".join(f"{key} {item}" for key, item in value.items()) if isinstance(value, dict) else str(value)
            lines.append(f"  {name}: {text}")
    if report.findings:
        lines.append(format_findings(report.findings, "findings"))
    errors = sum(finding.severity == "error" for finding in report.findings)
    warnings = sum(finding.severity == "warning" for finding in report.findings)
    warned = counted(warnings, "warning")
    lines.append(f"not ready: {counted(errors, 'error')}, {warned}" if errors else f"ready ({warned})")
    return "\n".join(lines)


def _parser() -> FindingParser:
    parser = FindingParser(prog="harness doctor", description="Checks whether this machine is ready to train.")
    parser.add_argument("--output_dir", "--output-dir", default=".", metavar="DIR", help="where runs will be written (default: here)")
    parser.add_argument("--model", metavar="DIR", help="folder of a model, whose files are checked")
    parser.add_argument("--no_bandwidth", "--no-bandwidth", action="store_true", help="do not measure the links")
    compile_help = "compile DeepSpeed's CPU Adam (about a minute the first time) and try it"
    parser.add_argument("--compile_ops", "--compile-ops", action="store_true", help=compile_help)
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="limit of each child process (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The `harness doctor` command.

    Returns:
        0 ready, 1 errors were found, 2 wrong input.
    """
    options, problems = _parser().read(argv)
    if not options.timeout > 0:
        problems.append(Finding("error", "--timeout", f"must be positive, not {options.timeout}"))
    if problems:
        print(format_findings(problems), file=sys.stderr)
        return 2
    model = Path(options.model) if options.model else None
    report = examine(Path(options.output_dir), model, not options.no_bandwidth, options.timeout, options.compile_ops)
    if options.json:
        findings = [dataclasses.asdict(finding) for finding in report.findings]
        print(json.dumps({"ready": not has_errors(report.findings), "facts": report.facts, "findings": findings}, indent=1))
    else:
        print(format_report(report))
    return 1 if has_errors(report.findings) else 0


if __name__ == "__main__":
    sys.exit(main())
