"""Memory and cores of the machine that this process may use, within the limits of its control groups."""

import ctypes
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path("/")


def free_memory(root: Path = ROOT) -> int:
    """Bytes that the process may still allocate. Cached pages of files count as free: the system can drop them."""
    available = _fields(root / "proc/meminfo").get("MemAvailable")
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if available is None else available * 1024
    for limit, used, files in memory_limits(root):
        free = min(free, limit - used + files)
    return max(free, 0)


def num_cores(root: Path = ROOT) -> int:
    """Number of physical cores that the process may use, within its affinity and its quota of processor time."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = _text(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings or str(cpu))
    return max(1, min([len(cores), *processor_limits(root)]))


def memory_nodes(root: Path = ROOT) -> list[tuple[int, ...]]:
    """CPUs of each memory node (NUMA) that the process may run on, in the order of the nodes."""
    allowed, nodes = os.sched_getaffinity(0), []
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    for folder in sorted(folders, key=lambda one: int(one.name.removeprefix("node"))):
        cpus = tuple(sorted(allowed.intersection(_ranges(_text(folder / "cpulist")))))
        if cpus:
            nodes.append(cpus)
    return nodes


def cpus_of_ranks(size: int, root: Path = ROOT) -> list[tuple[int, ...]]:
    """Divides the machine's memory nodes among ranks, so that the memory of each is near its CPUs.

    Args:
        size: number of ranks.
        root: root of the file system.

    Returns:
        CPUs of each rank; () is any, for all of them if there is one node, or if ranks and nodes do not divide.
    """
    nodes = memory_nodes(root)
    if len(nodes) < 2 or (len(nodes) % size and size % len(nodes)):
        return [()] * size
    each = max(len(nodes) // size, 1)  # nodes of a rank
    firsts = [rank * len(nodes) // size for rank in range(size)]
    return [tuple(cpu for cpus in nodes[first : first + each] for cpu in cpus) for first in firsts]


@contextmanager
def on_cpus(cpus: Sequence[int]) -> Iterator[None]:
    """Runs this thread, and those that it makes meanwhile, on some CPUs; () changes nothing."""
    before = os.sched_getaffinity(0)
    if cpus:
        os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        if cpus:
            os.sched_setaffinity(0, before)


def total_memory(root: Path = ROOT) -> int:
    """Bytes of the machine's memory."""
    total = _fields(root / "proc/meminfo").get("MemTotal")
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if total is None else total * 1024


def processor_name(root: Path = ROOT) -> str | None:
    """Model name of the processor; None if the system does not give it."""
    for line in _text(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return None


def caches(root: Path = ROOT) -> dict[str, int]:
    """Cache sizes of the first CPU that the process may run on: level and kind, such as L1d or L2, → bytes."""
    folder = root / f"sys/devices/system/cpu/cpu{min(os.sched_getaffinity(0))}/cache"
    found = {}
    for index in sorted(folder.glob("index*")):
        size = _text(index / "size").removesuffix("K")
        kind = {"Data": "d", "Instruction": "i"}.get(_text(index / "type"), "")
        if size.isdecimal():
            found[f"L{_text(index / 'level')}{kind}"] = int(size) * 1024
    return found


def transparent_huge_pages(root: Path = ROOT) -> str | None:
    """The system's setting for transparent huge pages: always, madvise or never; None if it is unknown."""
    found = re.search(r"\[(\w+)\]", _text(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    return found[1] if found else None


def memory_limits(root: Path) -> Iterator[tuple[int, int, int]]:
    """Yields bytes of each control group of the process: its limit, its use, and the cached pages of files in that."""
    for folder in _groups(root, "memory"):
        stat = _fields(folder / "memory.stat")
        # Version 2 of control groups, or version 1.
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes")
        prefix = "total_" if "total_inactive_file" in stat else ""
        if limit is not None and used is not None:
            yield limit, used, stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)


def processor_limits(root: Path) -> Iterator[int]:
    """Yields the quota of processor time of each control group of the process, in cores, rounded up."""
    for folder in _groups(root, "cpu"):
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        if not quota:
            quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal() and int(period) > 0:
            yield -(-int(quota) // int(period))


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yields the folders of the process's control groups, from the innermost to the root; some may not exist here."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if number == "0" and not controllers:
            mount = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controller
        else:
            continue
        names = [name for name in path.split("/") if name and name != ".."]
        for depth in range(len(names), -1, -1):
            yield mount.joinpath(*names[:depth])


def _text(path: Path) -> str:
    """Content of a file; "" if it does not exist or cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _ranges(text: str) -> Iterator[int]:
    """Yields the numbers of a list such as 0-3,8."""
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        yield from range(int(first), int(last or first) + 1)


def _number(path: Path) -> int | None:
    """The number in a file; None if it does not exist or says `max`."""
    text = _text(path)
    return int(text) if text.isdecimal() else None


def _fields(path: Path) -> Mapping[str, int]:
    """Reads a file with a name and a number in each line, such as /proc/meminfo and memory.stat."""
    fields = {}
    for line in _text(path).splitlines():
        name, number = (*line.replace(":", " ").split(), "", "")[:2]
        if number.isdecimal():
            fields[name] = int(number)
    return fields


def trim_memory() -> None:
    """Returns memory that malloc keeps after free to the system, for all threads. Does nothing without glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
