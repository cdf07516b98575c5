"""Memory and cores of a machine, read from the files of a Linux that we write here."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from enginewright.errors import UsageError
from enginewright.runtime import env
from enginewright.runtime.device.machine import free_memory, num_cores

GIB = 1 << 30
MEMINFO = f"MemTotal: {16 << 20} kB\nMemFree: {1 << 20} kB\nMemAvailable:   {8 << 20} kB\nHugePages_Total: 0\n"


def machine(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in ({"proc/meminfo": MEMINFO} | dict(files)).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_memory_without_control_groups(tmp_path: Path) -> None:
    assert free_memory(machine(tmp_path, {})) == 8 * GIB


def test_memory_where_nothing_can_be_read(tmp_path: Path) -> None:
    assert free_memory(tmp_path) == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


V2 = "sys/fs/cgroup/"


def version_2(path: str, limit: str, used: int, files: int) -> dict[str, str]:
    half = files // 2
    return {
        f"{V2}{path}memory.max": f"{limit}\n",
        f"{V2}{path}memory.current": f"{used}\n",
        f"{V2}{path}memory.stat": f"anon {used - files}\nactive_file {half}\ninactive_file {files - half}\n",
    }


def test_memory_of_a_control_group(tmp_path: Path) -> None:
    """Pages of files, such as an engine's weights, are given up when memory is short."""
    group = {"proc/self/cgroup": "0::/box\n"} | version_2("box/", str(4 * GIB), 3 * GIB, GIB)
    assert free_memory(machine(tmp_path, group)) == 2 * GIB


def test_the_tightest_of_the_groups_around_counts(tmp_path: Path) -> None:
    groups = {
        "proc/self/cgroup": "0::/outer/inner\n",
        **version_2("outer/", str(2 * GIB), GIB, 0),
        **version_2("outer/inner/", "max", GIB, 0),
    }
    assert free_memory(machine(tmp_path, groups)) == GIB


def test_a_group_seen_from_inside_its_container(tmp_path: Path) -> None:
    assert (
        free_memory(machine(tmp_path, {"proc/self/cgroup": "0::/\n"} | version_2("", str(GIB), GIB // 2, 0)))
        == GIB // 2
    )
    used_up = version_2("", str(GIB), 2 * GIB, 0)
    assert free_memory(machine(tmp_path, used_up)) == 0


def test_memory_of_a_version_1_group(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/memory/box/"
    files = {
        "proc/self/cgroup": "4:memory:/box\n1:cpu,cpuacct:/box\n",
        f"{folder}memory.limit_in_bytes": str(3 * GIB),
        f"{folder}memory.usage_in_bytes": str(2 * GIB),
        f"{folder}memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB // 2}\ntotal_active_file 0\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(GIB),
    }
    assert free_memory(machine(tmp_path, files)) == 3 * GIB // 2


@pytest.mark.parametrize("text", ["", "0::/../../..", "nonsense", "0::", "x:memory:/a:b"])
def test_odd_group_files_are_survived(text: str, tmp_path: Path) -> None:
    assert free_memory(machine(tmp_path, {"proc/self/cgroup": text})) == 8 * GIB
    assert num_cores(tmp_path) >= 1


def test_hyperthreads_are_no_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 5})
    topology = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    siblings = {topology.format(cpu): f"{cpu % 4},{cpu % 4 + 4}\n" for cpu in range(8)}
    assert num_cores(machine(tmp_path, siblings)) == 4  # 5 shares a core with 1
    assert num_cores(tmp_path / "nothing-to-read") == 5


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"proc/self/cgroup": "0::/b", f"{V2}b/cpu.max": "150000 100000"}, 2),
        ({"proc/self/cgroup": "0::/b", f"{V2}b/cpu.max": "max 100000"}, 6),
        ({"proc/self/cgroup": "0::/b", f"{V2}cpu.max": "10000 100000"}, 1),
        (
            {
                "proc/self/cgroup": "1:cpu,cpuacct:/",
                f"{V2}cpu/cpu.cfs_quota_us": "300000",
                f"{V2}cpu/cpu.cfs_period_us": "100000",
            },
            3,
        ),
        ({"proc/self/cgroup": "1:cpu:/", f"{V2}cpu/cpu.cfs_quota_us": "-1", f"{V2}cpu/cpu.cfs_period_us": "1"}, 6),
    ],
)
def test_a_share_of_processor_time(
    files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    assert num_cores(machine(tmp_path, files)) == cores


@pytest.mark.parametrize("value", ["0", "-2", "two", "1.5", "1025"])
def test_a_number_of_threads_that_is_none_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINEWRIGHT_NUM_THREADS", value)
    with pytest.raises(UsageError, match="ENGINEWRIGHT_NUM_THREADS"):
        env.num_threads()


def test_variables_that_are_not_set_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENGINEWRIGHT_NUM_THREADS", "ENGINEWRIGHT_CPU_ISA"):
        monkeypatch.setenv(name, "")
    assert env.num_threads() is None and env.cpu_isa() is None
    monkeypatch.setenv("ENGINEWRIGHT_NUM_THREADS", "7")
    assert env.num_threads() == 7
