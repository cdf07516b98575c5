"""The one thing pyproject.toml cannot say: how `enginewright._cpu` is compiled."""

import os
from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup

ParallelCompile("ENGINEWRIGHT_BUILD_JOBS").install()

# What `make sanitize` asks for: "address,undefined" or "thread".
sanitizers = os.environ.get("ENGINEWRIGHT_SANITIZE")
sanitize = [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"] if sanitizers else []
optimize = ["-O1", "-g1", "-fno-omit-frame-pointer", *sanitize] if sanitizers else ["-O3"]

setup(
    ext_modules=[
        Pybind11Extension(
            "enginewright._cpu",
            sorted(glob("csrc/cpu/*.cpp")),
            include_dirs=["csrc/cpu"],
            depends=sorted(glob("csrc/cpu/*.h")),
            cxx_std=17,
            extra_compile_args=[*optimize, "-Wall", "-Wextra", "-ffp-contract=off", "-fvisibility=hidden", "-pthread"],
            extra_link_args=["-pthread", *sanitize],
        )
    ]
)
