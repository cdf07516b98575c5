"""Ahead-of-time compilation of GPU kernels, on a machine that needs no GPU."""

from enginewright.builder.cuda.compile import compile_kernels
from enginewright.builder.cuda.kernel import Compiled, Instance

__all__ = ["Compiled", "Instance", "compile_kernels"]
