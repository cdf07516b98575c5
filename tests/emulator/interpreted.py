"""Kernels in Triton, in Triton's interpreter: in processes that were started with TRITON_INTERPRET=1 in their
environment.
"""

import ctypes
import importlib
from collections.abc import Sequence

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from enginewright.triton_instance import TritonInstance

DTYPES = {"*i32": torch.int32, "*fp32": torch.float32}
TF32_BITS = np.uint32(0xFFFFE000)  # of an fp32's, those that tensor cores read of it


def launch(instance: TritonInstance, grid: Sequence[int], addresses: Sequence[int]) -> None:
    """Runs a kernel to its end. addresses: of its arguments; 0 for an argument that it does not read."""
    kernel = getattr(importlib.import_module(instance.module), instance.function)
    nothing = (ctypes.c_uint8 * 4)()
    pointers = [
        torch.frombuffer((ctypes.c_uint8 * 4).from_address(address) if address else nothing, dtype=DTYPES[type])
        for (_, type), address in zip(instance.signature, addresses, strict=True)
    ]
    for (name, _), address in zip(instance.signature, addresses, strict=True):
        assert name in instance.unaligned or address % 16 == 0, f"{name} of {instance.function} is not aligned"
    kernel[tuple(grid)](*pointers, **dict(instance.constants))


def round_products() -> None:
    """Makes the interpreter round products as tensor cores do in "tf32x3"; its own are exact."""

    def create_dot(builder, a, b, onto, precision, *_):  # type: ignore[no-untyped-def]
        assert a.dtype == b.dtype == tl.float32 and "TF32x3" in str(precision)
        (x, x_rest), (y, y_rest) = (_in_two(each.data) for each in (a, b))
        return TensorHandle(x @ y + (x @ y_rest + x_rest @ y) + onto.data, onto.dtype.scalar)

    InterpreterBuilder.create_dot = create_dot


def _in_two(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Splits fp32 numbers into their TF32 part and the TF32 part of the rest."""
    first = (x.view(np.uint32) & TF32_BITS).view(np.float32)
    return first, ((x - first).view(np.uint32) & TF32_BITS).view(np.float32)
