"""Limits and kills of both kinds of cgroup, in the group of a process and in those above it."""

from __future__ import annotations

from pathlib import Path

from harness.cgroups import MemoryGroup, memory_folders, memory_groups, num_kernel_kills

GIB = 2**30


def own(folder: Path, text: str) -> Path:
    file = folder / "own"
    file.write_text(text)
    return file


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".", 1)).write_text(f"{value}\n")


def test_a_job_below_the_root_has_its_own_limit_and_those_above(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    write(root, memory__max="max", memory__current=5 * GIB, memory__stat="inactive_file 0")
    write(root / "slurm", memory__max=64 * GIB, memory__current=40 * GIB, memory__stat="anon 7\ninactive_file 1073741824")
    write(root / "slurm/job", memory__max=8 * GIB, memory__current=6 * GIB, memory__stat="anon 7\ninactive_file 0")
    write(root / "slurm/job", memory__events="low 0\noom 3\noom_kill 2")
    line = own(tmp_path, "0::/slurm/job\n")
    assert memory_groups(root, line) == [MemoryGroup(8 * GIB, 2 * GIB), MemoryGroup(64 * GIB, 25 * GIB)]
    assert num_kernel_kills(root, line) == 2


def test_the_older_kind_has_a_tree_for_memory_alone(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    for folder, limit in (("memory", 2**63 - 4096), ("memory/docker/abc", 3 * GIB)):
        write(root / folder, memory__limit_in_bytes=limit, memory__usage_in_bytes=GIB, memory__stat="cache 1\ninactive_file 0")
    write(root / "memory/docker/abc", memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 5")
    line = own(tmp_path, "5:cpu,cpuacct:/elsewhere\n4:memory:/docker/abc\n0::/\n")
    groups = memory_groups(root, line)
    assert groups[0] == MemoryGroup(3 * GIB, 2 * GIB) and len(groups) == 2
    assert num_kernel_kills(root, line) == 5


def test_a_container_that_sees_only_its_own_root(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    write(root, memory__max=2 * GIB, memory__current=3 * GIB, memory__stat="inactive_file 0", memory__events="oom_kill 1")
    line = own(tmp_path, "0::/kubepods/pod1/abc\n")
    assert memory_groups(root, line) == [MemoryGroup(2 * GIB, 0)]
    assert num_kernel_kills(root, line) == 1


def test_a_machine_that_says_nothing(tmp_path: Path) -> None:
    assert list(memory_folders(tmp_path, tmp_path / "none")) == []
    assert memory_groups(tmp_path, own(tmp_path, "0::/\n")) == []
    assert num_kernel_kills(tmp_path, own(tmp_path, "0::/../..\n")) == 0
