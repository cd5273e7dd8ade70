"""Every check of `harness doctor` with a good and a bad machine; the whole command on this one."""

from __future__ import annotations

import dataclasses
import json
import struct
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from harness import host_checks, library_checks, model_files, readiness, readiness_probes
from harness.findings import Finding
from harness.monitor import GpuProcess, GpuSample
from harness.readiness import Links

GIB = 2**30


def brief(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.severity, finding.key) for finding in findings]


# ---- libraries


REQUIREMENTS = [Requirement(line) for line in ("torch>=2.11,<2.15", "peft>=0.18", "rich>=13")]


def test_supported_versions_pass() -> None:
    assert library_checks.check_requirements(REQUIREMENTS, {"torch": "2.13.0+cu130", "peft": "0.21.2", "rich": "13.0"}) == []


def test_versions_out_of_range() -> None:
    findings = library_checks.check_requirements(REQUIREMENTS, {"torch": "2.15.0", "peft": "0.17.1"})
    assert findings == [
        Finding(
            "warning",
            "torch",
            "2.15.0 is newer than the tested <2.15,>=2.11",
            'install a torch build for this machine\'s CUDA: pip install "torch<2.15,>=2.11"',
        ),
        Finding("error", "peft", "0.17.1 is below the supported >=0.18", 'pip install "peft>=0.18"'),
        Finding("error", "rich", "is not installed", 'pip install "rich>=13"'),
    ]


def test_requirements_are_the_projects_own() -> None:
    names = {requirement.name for requirement in library_checks.project_requirements()}
    assert {"torch", "transformers", "accelerate", "peft", "deepspeed", "datasets"} <= names


def test_unmet_wishes_of_installed_packages() -> None:
    versions = {"torch": "2.13.0+cpu", "torchvision": "0.27.0", "transformers": "5.24.0", "tokenizers": "0.24.1", "tqdm": "4.66"}
    requires = {
        "torchvision": ["torch==2.12.0", "numpy", "gdown>=4.7.3; extra == 'gdown'"],
        "transformers": ["tokenizers<0.24.0,>=0.23.1", "tqdm>=4.60"],
    }
    findings = library_checks.check_wishes(versions, requires.get)
    assert [finding.line() for finding in findings] == [
        "error   transformers: 5.24.0 wants tokenizers<0.24.0,>=0.23.1, installed is 0.24.1 -> "
        'pip install "tokenizers<0.24.0,>=0.23.1", or another transformers',
        'error   torchvision: 0.27.0 wants torch==2.12.0, installed is 2.13.0+cpu -> pip install "torch==2.12.0", or another torchvision',
    ]
    assert library_checks.check_wishes({"torch": "2.12.0+cpu", "torchvision": "0.27.0"}, requires.get) == []


def test_apex_of_nvidia_and_the_other_one(tmp_path: Path) -> None:
    spec = types.SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    assert library_checks.find_apex(lambda name: None).kind == "absent"
    other = library_checks.find_apex(lambda name: spec)
    assert brief(library_checks.check_lookalikes({}, other)) == [("warning", "apex")]
    for folder in ("optimizers", "normalization"):
        (tmp_path / folder).mkdir()
    nvidia = library_checks.find_apex(lambda name: spec)
    assert nvidia.kind == "nvidia" and library_checks.check_lookalikes({}, nvidia) == []


def test_two_packages_of_one_module() -> None:
    apex = library_checks.Apex("absent")
    assert brief(library_checks.check_lookalikes({"pynvml": "11", "nvidia-ml-py": "13"}, apex)) == [("warning", "pynvml")]
    assert library_checks.check_lookalikes({"nvidia-ml-py": "13"}, apex) == []


@pytest.mark.parametrize(
    ("torch_cuda", "nvcc", "tools", "expected"),
    [
        ("13.0", "13.2", {"g++", "ninja"}, []),
        (None, None, {"c++", "ninja"}, []),
        ("13.0", "12.4", {"g++", "ninja"}, [("warning", "nvcc")]),
        ("13.0", None, {"g++", "ninja"}, [("info", "nvcc")]),
        (None, None, set(), [("warning", "g++"), ("warning", "ninja")]),
    ],
)
def test_build_tools(torch_cuda: str | None, nvcc: str | None, tools: set[str], expected: list[tuple[str, str]]) -> None:
    assert brief(library_checks.check_build_tools(torch_cuda, nvcc, lambda name: name if name in tools else None)) == expected


ASYNC_IO = {"usable": False, "state": "async_io requires the dev libaio .so object and headers but these were not found."}


def test_operators() -> None:
    good = {"usable": True, "state": "compiled when first used"}
    assert readiness.check_operators({"operators": {"cpu_adam": good, "async_io": good}}, {"duration_s": 60.0, "right": True}) == []
    bad = {"usable": False, "state": "no AVX"}
    found = readiness.check_operators({"operators": {"cpu_adam": bad, "async_io": ASYNC_IO, "quantizer": bad}})
    assert [finding.line() for finding in found] == [
        "warning cpu_adam: cannot be built, so no optimizer states in host memory (ds_configs/*_offload.json): no AVX"
        " -> python -m deepspeed.env_report shows more",
        "info    async_io: cannot be built, so no weights and optimizer states on NVMe (ds_configs/zero3_nvme.json): "
        f"{ASYNC_IO['state']} -> apt-get install libaio-dev",
    ]
    assert brief(readiness.check_operators({"error": "it hangs"})) == [("warning", "deepspeed")]
    assert brief(readiness.check_operators({}, {"error": "g++ failed"})) == [("error", "cpu_adam")]
    assert brief(readiness.check_operators({}, {"duration_s": 1.0, "right": False})) == [("error", "cpu_adam")]


def test_reason_of_an_operator_that_cannot_be_built() -> None:
    class Builder:
        def __init__(self, *warnings: str, error: Exception | None = None) -> None:
            self.warnings, self.error = warnings, error

        def warning(self, text: str) -> None:
            raise AssertionError("prints")

        def is_compatible(self, verbose: bool) -> bool:
            if self.error is not None:
                raise self.error
            for text in self.warnings if verbose else ():
                self.warning(text)
            return False

    assert readiness_probes._why_not(Builder("needs libaio\nand more", "if it is there, set CFLAGS")) == "needs libaio"
    assert readiness_probes._why_not(Builder(error=OSError("no nvcc"))) == "no nvcc"
    assert readiness_probes._why_not(Builder()) == "DeepSpeed does not say why"


# ---- host


@pytest.mark.parametrize(("num_gpus", "severity"), [(0, "warning"), (1, "warning"), (2, "error")])
def test_shm_of_a_plain_container_is_too_small(num_gpus: int, severity: str) -> None:
    (finding,) = host_checks.check_shm(67108864, num_gpus)
    assert finding.severity == severity
    assert finding.message.startswith("has 64 MiB;") and "--ipc=host" in finding.fix and "emptyDir" in finding.fix


def test_shm_of_8_gib_passes() -> None:
    assert host_checks.check_shm(8 * GIB, 8) == []


def test_host_memory() -> None:
    assert host_checks.check_host_memory(128 * GIB, 100 * GIB, 80 * GIB) == []
    assert brief(host_checks.check_host_memory(64 * GIB, 2 * GIB, 640 * GIB)) == [("warning", "host memory"), ("info", "host memory")]


def test_limits() -> None:
    assert host_checks.check_limits(-1, -1, 8) == []
    assert host_checks.check_limits(65536, 65536, 0) == []
    assert brief(host_checks.check_limits(1024, 65536, 1)) == [("warning", "ulimit -n"), ("warning", "ulimit -l")]


def test_disk() -> None:
    assert host_checks.check_disk("/out", 500 * GIB, 10**7, 2e9) == []
    assert host_checks.check_disk("/out", 500 * GIB, -1, 2e9) == []
    assert brief(host_checks.check_disk("/out", 500 * GIB, 10**7, None)) == [("error", "/out")]
    findings = host_checks.check_disk("/out", GIB, 5, 50 * 2**20)
    assert [finding.message for finding in findings] == [
        "takes 50 MiB/s: a checkpoint of an 8B model (96 GB) would take 31 min",
        "has 1.0 GiB free; a checkpoint takes 12 to 16 bytes per parameter",
        "can hold only 5 more files (inodes)",
    ]


def test_environment() -> None:
    interfaces = {"lo", "eth0"}
    assert host_checks.check_environment({"PATH": "/bin", "NCCL_SOCKET_IFNAME": "eth", "CUDA_LAUNCH_BLOCKING": "0"}, interfaces) == []
    environ = {
        "CUDA_LAUNCH_BLOCKING": "1",
        "MASTER_PORT": "29500",
        "NCCL_SOCKET_IFNAME": "ib0",
        "PYTORCH_ALLOC_CONF": "x",
        "PYTORCH_CUDA_ALLOC_CONF": "y",
    }
    assert brief(host_checks.check_environment(environ, interfaces)) == [
        ("warning", "CUDA_LAUNCH_BLOCKING=1"),
        ("warning", "MASTER_PORT=29500"),
        ("error", "NCCL_SOCKET_IFNAME=ib0"),
        ("warning", "PYTORCH_CUDA_ALLOC_CONF"),
    ]


@pytest.mark.parametrize(
    ("wanted", "exists"), [("eth", True), ("=eth", False), ("=eth0", True), ("^lo", True), ("^lo,eth", False), ("ib0,eth0", True)]
)
def test_interface_names_as_nccl_reads_them(wanted: str, exists: bool) -> None:
    assert host_checks._matches_interface(wanted, {"lo", "eth0"}) is exists


def test_host_name_that_does_not_resolve() -> None:
    def fail(name: str) -> None:
        raise OSError

    assert host_checks.check_host_name("node", lambda name: None) == []
    assert brief(host_checks.check_host_name("node", fail)) == [("warning", "hostname node")]


def test_write_speed_leaves_nothing(tmp_path: Path) -> None:
    speed = host_checks.write_speed(tmp_path, num_bytes=2**20)
    assert speed is not None and speed > 0
    assert list(tmp_path.iterdir()) == []
    assert host_checks.write_speed(tmp_path / "no") is None


def test_file_system_of_a_folder() -> None:
    mounts = "overlay / overlay rw 0 0\ns:/x /data nfs4 rw 0 0\n/dev/sda /data/my\\040disk ext4 rw 0 0\n/dev/sdb /database xfs rw 0 0\n"
    assert host_checks.file_system(Path("/data/run"), mounts) == "nfs4"
    assert host_checks.file_system(Path("/data/my disk/run"), mounts) == "ext4"
    assert host_checks.file_system(Path("/home"), mounts) == "overlay"
    assert host_checks.file_system(Path("/database"), mounts) == "xfs"


def test_existing_parent(tmp_path: Path) -> None:
    assert host_checks.existing_parent(tmp_path / "a" / "b") == tmp_path


# ---- model files


def write_safetensors(path: Path, tensors: dict[str, list[int]], cut: int = 0) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors.items():
        size = 2
        for length in shape:
            size *= length
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes((struct.pack("<Q", len(text)) + text + b"\0" * end)[: len(text) + 8 + end - cut])


def write_model(folder: Path) -> None:
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (folder / "tokenizer.json").write_text("{}")
    write_safetensors(folder / "a.safetensors", {"x": [4, 8]})
    write_safetensors(folder / "b.safetensors", {"y": [16], "z": []})
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors", "z": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_whole_model(tmp_path: Path) -> None:
    write_model(tmp_path)
    facts, findings = model_files.check_model_files(tmp_path)
    assert findings == []
    assert facts["num_parameters"] == 32 + 16 + 1 and facts["dtypes"] == ["BF16"] and facts["num_weight_files"] == 2


def test_every_broken_file_is_named(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "tokenizer.json").unlink()
    write_safetensors(tmp_path / "a.safetensors", {"x": [4, 8]}, cut=3)
    (tmp_path / "b.safetensors").unlink()
    _, findings = model_files.check_model_files(tmp_path)
    assert brief(findings) == [
        ("error", str(tmp_path / "config.json")),
        ("error", str(tmp_path / "a.safetensors")),
        ("error", str(tmp_path / "b.safetensors")),
        ("warning", str(tmp_path)),
    ]
    assert "the download was cut off" in findings[1].message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a Git LFS pointer, not the weights"),
        (b"abc", "has only 3 bytes"),
        (b"<html>" + b"x" * 100, "is no safetensors file"),
        (struct.pack("<Q", 4) + b"nope", "has a broken header"),
    ],
)
def test_files_that_are_no_weights(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        model_files.read_safetensors_header(tmp_path / "model.safetensors")


def test_index_that_lists_a_tensor_no_file_holds(tmp_path: Path) -> None:
    write_model(tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    index["weight_map"]["w"] = "a.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (finding,) = model_files.check_model_files(tmp_path)[1]
    assert finding.message == "lists 1 tensors that no file holds, such as w"


def test_fit() -> None:
    assert model_files.check_fit(8_000_000_000, [80 * GIB] * 2)[0].severity == "info"
    (finding,) = model_files.check_fit(8_000_000_000, [80 * GIB])
    assert finding.severity == "warning"
    assert finding.message == "119.2 GiB of training state over 1 GPUs is 119.2 GiB each, but the smallest has 80.0 GiB"
    assert model_files.check_fit(0, [80 * GIB]) == []


# ---- cards


CARD = GpuSample(0, "NVIDIA H100 80GB HBM3", "GPU-a", 0.5, 80.0, temperature_c=40, ecc_errors=0)


def test_healthy_cards() -> None:
    assert readiness.check_cards([CARD, dataclasses.replace(CARD, index=1, throttled=("power cap",))]) == []


def test_cards_in_use_or_in_a_bad_state() -> None:
    busy = dataclasses.replace(CARD, memory_used_gib=30.0, processes=(GpuProcess(77, 29.5, "ann", "python train.py"),))
    hidden = dataclasses.replace(CARD, index=1, memory_used_gib=30.0)
    broken = dataclasses.replace(CARD, index=2, ecc_errors=3, throttled=("thermal (hardware)",), temperature_c=91, name="NVIDIA A100")
    findings = readiness.check_cards([busy, hidden, broken])
    assert brief(findings) == [("warning", "GPU 0"), ("warning", "GPU 1"), ("error", "GPU 2"), ("warning", "GPU 2"), ("warning", "GPUs")]
    assert findings[0].message == "ann's process 77 (python train.py) holds 29.5 GiB"
    assert readiness.check_cards([busy], own_pids=frozenset({77}))[0].message.endswith("cannot be seen from here")


DEVICE = {
    "index": 0,
    "name": "H100",
    "compute_capability": "9.0",
    "total_bytes": 80 * GIB,
    "free_bytes": 79 * GIB,
    "bf16": True,
    "fp8": True,
    "matmul_error": None,
}
TORCH: dict[str, Any] = {"torch": "2.13.0", "torch_cuda": "13.0", "cuda_error": None, "devices": [DEVICE], "broken_imports": {}}
DRIVER = {"driver": "580.1", "driver_cuda": "13.0"}


def test_torch_that_fits_the_machine() -> None:
    assert readiness.check_torch(TORCH, 1, DRIVER, None) == []
    assert readiness.check_torch({**TORCH, "devices": [], "torch_cuda": None}, 0, {}, None) == []


@pytest.mark.parametrize(
    ("changes", "driver", "visible", "expected"),
    [
        ({"error": "the torch probe did not end in time"}, DRIVER, None, [("error", "torch")]),
        ({"torch_cuda": None, "devices": []}, DRIVER, None, [("error", "torch")]),
        ({"devices": [], "cuda_error": "driver too old"}, DRIVER, None, [("error", "torch")]),
        ({"devices": []}, DRIVER, "", [("warning", "CUDA_VISIBLE_DEVICES=")]),
        ({}, {"driver": "550.1", "driver_cuda": "12.4"}, None, [("error", "driver")]),
        ({"devices": [{**DEVICE, "matmul_error": "no kernel image"}]}, DRIVER, None, [("error", "cuda:0")]),
        ({"devices": [{**DEVICE, "bf16": False}]}, DRIVER, None, [("info", "cuda:0")]),
        ({"broken_imports": {"flash_attn": "undefined symbol"}}, DRIVER, None, [("warning", "flash_attn")]),
    ],
)
def test_torch_that_does_not(changes: Any, driver: Any, visible: str | None, expected: list[tuple[str, str]]) -> None:
    assert brief(readiness.check_torch({**TORCH, **changes}, 1, driver, visible)) == expected


def test_hidden_cards_are_said() -> None:
    (finding,) = readiness.check_torch(TORCH, 8, DRIVER, "3")
    assert finding == Finding("info", "GPUs", "1 of 8 are used (CUDA_VISIBLE_DEVICES=3)")


# ---- links


NVLINK = Links(num_nvlinks=18, nvlink_gb_per_s=450.0, pcie_generation=5, pcie_width=16, pcie_max_width=16, nvlink_peers=(1,))
PAIR = [NVLINK, dataclasses.replace(NVLINK, nvlink_peers=(0,))]
PLAIN = Links(pcie_generation=4, pcie_width=16, pcie_max_width=16)


def copy_result(peer: float, host: float = 50.0, arrived: bool = True) -> dict[str, Any]:
    peers = [{"from": 0, "to": 1, "gb_per_s": peer, "arrived": arrived}, {"from": 1, "to": 0, "gb_per_s": peer, "arrived": arrived}]
    return {"host_to_card_gb_per_s": host, "card_to_host_gb_per_s": host, "peers": peers}


def test_expected_bandwidth() -> None:
    assert readiness.expected_gb_per_s(PAIR, 0, 1) == (450.0, "NVLink")
    assert readiness.expected_gb_per_s([PLAIN, PLAIN], 0, 1) == (1.969 * 16, "PCIe")
    assert readiness.expected_gb_per_s([], 0, 1) == (0.0, "")


def test_good_bandwidth() -> None:
    allreduce = {"bus_gb_per_s": 330.0, "num_gpus": 2, "right": True}
    assert readiness.check_bandwidth(copy_result(390.0), allreduce, PAIR) == []
    assert readiness.check_bandwidth(copy_result(24.0, host=25.0), {**allreduce, "bus_gb_per_s": 20.0}, [PLAIN, PLAIN]) == []
    assert readiness.check_bandwidth(copy_result(1.0), allreduce, []) == []  # nothing is known of the links


def test_slow_links_and_wrong_data() -> None:
    allreduce = {"bus_gb_per_s": 12.0, "num_gpus": 2, "right": False}
    findings = readiness.check_bandwidth(copy_result(20.0, host=3.0, arrived=False), allreduce, PAIR)
    assert brief(findings) == [
        ("warning", "host to GPU 0"),
        ("error", "GPU 0 to 1"),
        ("warning", "GPU 0 to 1"),
        ("error", "GPU 1 to 0"),
        ("warning", "GPU 1 to 0"),
        ("error", "all-reduce"),
        ("warning", "all-reduce"),
    ]
    assert findings[2].message == "20.0 GB/s, NVLink should give about 450"


def test_probes_that_failed() -> None:
    findings = readiness.check_bandwidth({"error": "no answer"}, {"error": "hung"}, PAIR)
    assert brief(findings) == [("error", "copy"), ("error", "all-reduce")]


def test_links_that_are_missing() -> None:
    assert readiness.check_links(PAIR) == []
    narrow = [dataclasses.replace(PLAIN, pcie_width=4), NVLINK]
    assert brief(readiness.check_links(narrow)) == [("warning", "GPU 0"), ("warning", "NVLink")]


def test_peer_access() -> None:
    assert readiness.check_peer_access([[True, True], [True, True]], PAIR) == []
    (finding,) = readiness.check_peer_access([[True, False], [False, True]], PAIR)
    assert (finding.severity, finding.message) == ("warning", "not between cards 0-1")
    assert readiness.check_peer_access([[True, False], [False, True]], [PLAIN, PLAIN])[0].severity == "info"


def test_links_are_numbered_as_cuda_does() -> None:
    links = [Links(), dataclasses.replace(NVLINK, nvlink_peers=(2, 3)), dataclasses.replace(NVLINK, nvlink_peers=(1, 3)), Links()]
    assert [link.nvlink_peers for link in readiness.visible_links(links, [2, 1])] == [(1,), (0,)]


def test_links_from_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    library = types.ModuleType("pynvml")

    def state(handle: int, link: int) -> int:
        if link >= 4:
            raise RuntimeError("Invalid Argument")
        return int(link < 3)

    answers: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetNvLinkState": state,
        "nvmlDeviceGetNvLinkVersion": lambda handle, link: 5,
        "nvmlDeviceGetMaxPcieLinkGeneration": lambda handle: 4,
        "nvmlDeviceGetGpuMaxPcieLinkGeneration": lambda handle: 5,
        "nvmlDeviceGetCurrPcieLinkWidth": lambda handle: 8,
        "nvmlDeviceGetMaxPcieLinkWidth": lambda handle: 16,
        "nvmlDeviceGetP2PStatus": lambda handle, other, index: 0 if {handle, other} == {0, 1} else 5,
        "nvmlSystemGetDriverVersion": lambda: b"580.95.05",
        "nvmlSystemGetCudaDriverVersion": lambda: 13010,
    }
    for name, answer in answers.items():
        setattr(library, name, answer)
    monkeypatch.setitem(sys.modules, "pynvml", library)
    first, _, third = readiness.read_links(3)
    assert first == Links(3, 150.0, 4, 8, 16, (1,))
    assert first.pcie_gb_per_s == 1.969 * 8
    assert third.nvlink_peers == ()
    assert readiness.driver_facts() == {"driver": "580.95.05", "driver_cuda": "13.1"}


# ---- child processes and the command


def test_probe_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho started >&2\nsleep 60\n")
    fake.chmod(0o755)
    monkeypatch.setattr(readiness.sys, "executable", str(fake))
    assert readiness.run_probes("torch", [{}, {}], 0.5) == [{"error": "the torch probe did not end in time"}] * 2


@pytest.mark.parametrize(
    ("script", "answer"),
    [
        ("echo noise; echo '{\"a\": 1}'", {"a": 1}),
        ("echo no json", {"error": "the copy probe gave no answer"}),
        ("echo 'RuntimeError: boom' >&2; exit 3", {"error": "the copy probe ended with code 3: RuntimeError: boom"}),
    ],
)
def test_answers_of_probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, answer: dict[str, Any]) -> None:
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    monkeypatch.setattr(readiness.sys, "executable", str(fake))
    assert readiness.run_probes("copy", [{}], 10) == [answer]


def fake_machine(monkeypatch: pytest.MonkeyPatch, cards: list[GpuSample], devices: list[dict[str, Any]]) -> None:
    def probes(name: str, environments: Any, timeout_s: float) -> list[dict[str, Any]]:
        if name == "torch":
            return [
                {
                    **TORCH,
                    "devices": devices,
                    "peer_access": [[True] * len(devices)] * len(devices),
                    "nccl": "2.28",
                    "cudnn": 9,
                    "nvcc": "13.0",
                }
            ]
        if name == "deepspeed":
            return [{"operators": {"cpu_adam": {"usable": True, "state": "compiled"}}}]
        if name == "copy":
            return [copy_result(390.0)]
        return [{"bus_gb_per_s": 300.0 + index, "num_gpus": 2, "right": True} for index, _ in enumerate(environments)]

    monkeypatch.setattr(readiness, "run_probes", probes)
    monkeypatch.setattr(readiness, "sample_gpus", lambda **_: cards)
    monkeypatch.setattr(readiness, "read_links", lambda count: PAIR[:count])
    monkeypatch.setattr(readiness, "driver_facts", lambda: DRIVER if cards else {})
    monkeypatch.setattr(readiness, "check_libraries", lambda: ({"torch": "2.13.0"}, []))
    monkeypatch.setattr(readiness, "check_build_tools", lambda *_: [])
    monkeypatch.setattr(readiness, "check_host", lambda *_: ({"shm_gib": 8.0}, []))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_command_on_two_cards(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    cards = [CARD, dataclasses.replace(CARD, index=1)]
    fake_machine(monkeypatch, cards, [DEVICE, {**DEVICE, "index": 1}])
    assert readiness.main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ready"] is True and report["findings"] == []
    assert report["facts"]["bandwidth"] == {
        "host_to_card_gb_per_s": 50.0,
        "card_to_host_gb_per_s": 50.0,
        "GPU 0 to 1 GB/s": 390.0,
        "GPU 1 to 0 GB/s": 390.0,
        "all-reduce over 2 GPUs, bus GB/s": 300.0,
    }


def test_command_reports_errors_with_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    fake_machine(monkeypatch, [dataclasses.replace(CARD, ecc_errors=1)], [DEVICE])
    assert readiness.main(["--no-bandwidth"]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert shown[-2].startswith("  error   GPU 0: 1 uncorrected memory errors")
    assert shown[-1] == "not ready: 1 error, 0 warnings"
    assert not any(line.startswith("bandwidth") for line in shown)


def test_command_without_cards_and_with_a_broken_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    fake_machine(monkeypatch, [], [])
    assert readiness.main([]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "ready (0 warnings)"
    assert readiness.main(["--model", str(tmp_path), "--json"]) == 1
    keys = [finding["key"] for finding in json.loads(capsys.readouterr().out)["findings"] if finding["severity"] == "error"]
    assert keys == [str(tmp_path / "config.json"), str(tmp_path)]
    assert readiness.main(["--timeout", "0"]) == 2


def test_real_probe_of_torch() -> None:
    (facts,) = readiness.run_probes("torch", [{}], 120)
    assert facts["torch"].startswith("2.") and facts["cuda_available"] == bool(facts["devices"])
    assert facts["broken_imports"] == {}
