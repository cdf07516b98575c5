"""Ahead-of-time compilation of GPU kernels, on a machine that needs no GPU."""

from enginewright.builder.cuda.compile import compile_each
from enginewright.builder.cuda.kernel import Compiled, Instance
from enginewright.triton_instance import TritonInstance

__all__ = ["Compiled", "Instance", "TritonInstance", "compile_each"]
