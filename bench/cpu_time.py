"""CPU time of a process and its children, from /proc."""

import os
from collections import defaultdict
from pathlib import Path

from enginewright.errors import UsageError

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
PROC = Path("/proc")


def cpu_seconds(pid: int, proc: Path = PROC) -> float:
    """Sums user and system time so far: of a process, its living descendants, and the children it has waited for.

    Args:
        pid: the process.
        proc: folder of the system's process files.

    Raises:
        UsageError: there is no such process.
    """
    ticks: dict[int, int] = {}
    children: dict[int, list[int]] = defaultdict(list)
    for path in proc.glob("[0-9]*/stat"):
        try:
            # the process's name before it may hold spaces and brackets
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):  # the process has just ended
            continue
        process = int(path.parent.name)
        children[int(fields[1])].append(process)
        ticks[process] = sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime
    if pid not in ticks:
        raise UsageError(f"--server-pid {pid} is not a process of this machine", fix="Name one, or leave it out.")
    total, pending = 0, [pid]
    while pending:
        process = pending.pop()
        total += ticks[process]
        pending += children.pop(process, [])
    return total / CLOCK_TICKS
