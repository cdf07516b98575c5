"""The one thing pyproject.toml cannot say: how `enginewright._cpu` is compiled."""

import os
from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup

headers = sorted(glob("csrc/cpu/*.h"))


def is_stale(compiled: str, source: str) -> bool:
    """Whether an object file is older than what it may have been made of."""
    return os.path.getmtime(compiled) <= max(map(os.path.getmtime, (source, *headers, __file__)))


ParallelCompile("ENGINEWRIGHT_BUILD_JOBS", needs_recompile=is_stale).install()

# What `make sanitize` asks for: "address,undefined" or "thread".
sanitizers = os.environ.get("ENGINEWRIGHT_SANITIZE")
sanitize = [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"] if sanitizers else []
optimize = ["-O1", "-g1", "-fno-omit-frame-pointer", *sanitize] if sanitizers else ["-O3"]
# Where object files are kept from one build to the next, for a wheel's too, which is built in a folder of its own.
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
            # Without symbols, which are a tenth of the file, where no sanitizer wants them.
            extra_link_args=["-pthread", *(sanitize or ["-Wl,-s"])],
        )
    ],
)
