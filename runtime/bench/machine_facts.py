"""What a benchmark has to know beforehand: the machine it runs on, and that it can end as it was asked to."""

import os
import platform
from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from enginewright import __version__
from enginewright.errors import UsageError
from enginewright.runtime.machine import num_cores


def machine_facts(*packages: str) -> Mapping[str, Any]:
    """CPU, load, and versions, of Python, ours and some packages. No names of hosts, users or folders."""
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


def require_extra(package: str) -> None:
    """Raises UsageError if a package of the extra [bench] is missing."""
    if find_spec(package) is None:
        raise UsageError(
            f"engine bench needs {package}", "it is not installed", "Install it with: pip install 'enginewright[bench]'"
        )


def require_writable(path: Path) -> None:
    """Raises UsageError if a file cannot be written, so that no run ends in finding out."""
    trial = path.with_name(f".{path.name}.part")
    try:
        if path.is_dir():
            raise UsageError(f"{path} cannot be written", "it is a folder")
        if not path.absolute().parent.is_dir():
            raise UsageError(f"{path} cannot be written", f"there is no folder {path.parent}")
        trial.touch()
        trial.unlink()
    except OSError as error:
        raise UsageError(f"{path} cannot be written", error.strerror or str(error)) from error
