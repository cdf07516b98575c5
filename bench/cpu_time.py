"""CPU time of a process and its children, from /proc."""

import os
from collections import defaultdict
from pathlib import Path

from enginewright.errors import UsageError

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
PROC = Path("/proc")


def cpu_seconds(pid: int, proc: Path = PROC) -> float:
    """User and system time so far of a process, of those below it that live, and of those it has waited for.

    Raises:
        UsageError: there is no such process.
    """
    ticks: dict[int, int] = {}
    children: dict[int, list[int]] = defaultdict(list)
    for path in proc.glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()  # the name before it may hold spaces and brackets
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
        process = int(path.parent.name)
        children[int(fields[1])].append(process)
        ticks[process] = sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime
    if pid not in ticks:
        raise UsageError(f"--server-pid {pid} is no process here", fix="Name one of this machine's, or leave it out.")
    total, open_ends = 0, [pid]
    while open_ends:
        process = open_ends.pop()
        total += ticks[process]
        open_ends += children.pop(process, [])
    return total / CLOCK_TICKS
