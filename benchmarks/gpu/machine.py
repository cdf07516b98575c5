"""The machine: missing Python packages, the C++ extension, and facts about its GPU."""

import os
import subprocess
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from benchmarks.gpu.parts import ROOT, environment

# Module → the package that brings it: what the parts import, tests of kernels among them.
NEEDED = {
    "click": "click",
    "cuda.bindings": "cuda-bindings",
    "gguf": "gguf",
    "huggingface_hub": "huggingface_hub",
    "jinja2": "jinja2",
    "ml_dtypes": "ml-dtypes",
    "msgspec": "msgspec",
    "numpy": "numpy",
    "onnx": "onnx",
    "onnx_ir": "onnx-ir",
    "onnxruntime": "onnxruntime",
    "pybind11": "pybind11",
    "pytest": "pytest",
    "safetensors": "safetensors",
    "setuptools": "setuptools",
    "tokenizers": "tokenizers",
    "torch": "torch",
    "transformers": "transformers",
    "triton": "triton",
    "xdist": "pytest-xdist",
}
NVRTC = ("nvidia-cuda-nvrtc", "13.0.")
NAMED = ("torch", "triton", "transformers", "flashinfer-python", "cuda-bindings", NVRTC[0])


def missing(needed: dict[str, str] = NEEDED) -> list[str]:
    """Packages, to be brought along."""
    found = [package for module, package in needed.items() if not _there(module)]
    return found if _version(NVRTC[0]).startswith(NVRTC[1]) else [*found, f"{NVRTC[0]}=={NVRTC[1]}*"]


def _there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of a package around it
        return False


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def compile_extension() -> str:
    """`enginewright._cpu` for this Python, unless it is there. Why it does not compile, or nothing."""
    if _there("enginewright._cpu"):
        return ""
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    jobs = {"ENGINEWRIGHT_BUILD_JOBS": str(os.cpu_count() or 2)}
    done = subprocess.run(command, cwd=ROOT, env={**environment(), **jobs}, capture_output=True, text=True)
    return "" if done.returncode == 0 else (done.stderr or done.stdout).strip()[-2000:]


def facts() -> dict[str, Any]:
    """For the page. There is a GPU."""
    device = import_module("enginewright.runtime.device.cuda.device").CudaDevice()
    versions = ", ".join(f"{package} {number}" for package in NAMED if (number := _version(package)))
    gpu = f"{device.name}, {device.multiprocessors} multiprocessors"
    return {"GPU": gpu, "driver": _driver(), "CPU cores": os.cpu_count() or 0, "with": versions}


def _driver() -> str:
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.split("\n")[0].strip()
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
