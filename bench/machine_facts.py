"""Facts about the machine that a benchmark runs on."""

import os
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from enginewright import __version__
from enginewright.runtime.device.machine import num_cores


def machine_facts(*packages: str) -> Mapping[str, Any]:
    """Returns CPU, load, and versions of Python, enginewright and `packages`; no names of hosts, users or folders."""
    return {
        "cpu": _cpu_model(),
        "cores": num_cores(),
        "logical_cpus": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "versions": {
            "enginewright": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in ("numpy", *packages)},
        },
    }


def _cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return fields.get("model name") or platform.processor() or "unknown"
