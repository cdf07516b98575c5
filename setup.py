"""The one thing pyproject.toml cannot say: how `enginewright._cpu` is compiled."""

from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup

ParallelCompile("ENGINEWRIGHT_BUILD_JOBS").install()

setup(
    ext_modules=[
        Pybind11Extension(
            "enginewright._cpu",
            sorted(glob("csrc/cpu/*.cpp")),
            include_dirs=["csrc/cpu"],
            depends=sorted(glob("csrc/cpu/*.h")),
            cxx_std=17,
            extra_compile_args=["-O3", "-Wall", "-Wextra", "-ffp-contract=off", "-fvisibility=hidden", "-pthread"],
            extra_link_args=["-pthread"],
        )
    ]
)
