"""Compilation of the extension `enginewright._cpu`, which pyproject.toml cannot describe."""

import os
from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup

headers = sorted(glob("csrc/cpu/*.h"))


def is_stale(compiled: str, source: str) -> bool:
    """Returns True if an object file is older than its source, a header or this file."""
    return os.path.getmtime(compiled) <= max(map(os.path.getmtime, (source, *headers, __file__)))


ParallelCompile("ENGINEWRIGHT_BUILD_JOBS", needs_recompile=is_stale).install()

# Set by `make sanitize`: "address,undefined" or "thread".
sanitizers = os.environ.get("ENGINEWRIGHT_SANITIZE")
sanitize = [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"] if sanitizers else []
optimize = ["-O1", "-g1", "-fno-omit-frame-pointer", *sanitize] if sanitizers else ["-O3"]
# Folder that keeps object files between builds. A wheel is built in a temporary folder, and reuses them from here.
objects = os.environ.get("ENGINEWRIGHT_OBJECTS")

setup(
    options={"build_ext": {"build_temp": objects}} if objects else {},
    ext_modules=[
        Pybind11Extension(
            "enginewright._cpu",
            sorted(glob("csrc/cpu/*.cpp")),
            include_dirs=["csrc/cpu"],
            depends=headers,
            cxx_std=17,
            extra_compile_args=[*optimize, "-Wall", "-Wextra", "-ffp-contract=off", "-fvisibility=hidden", "-pthread"],
            # Symbols are a tenth of the file, and only sanitizers need them.
            extra_link_args=["-pthread", *(sanitize or ["-Wl,-s"])],
        )
    ],
)
