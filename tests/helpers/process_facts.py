"""Counts of what a process holds for its engines."""

import os
from pathlib import Path

from enginewright.runtime.server.engine_files import SUFFIX


def held(pid: int) -> dict[str, int]:
    """Counts of everything but memory."""
    process = Path(f"/proc/{pid}")
    with (process / "maps").open() as maps:
        mappings = sum(SUFFIX in line for line in maps)
    tasks = list((process / "task").iterdir())
    return {
        "files": len(os.listdir(process / "fd")),
        "mappings": mappings,
        "threads": len(tasks),
        "children": sum(len((task / "children").read_text().split()) for task in tasks),
    }


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
