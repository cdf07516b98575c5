"""How a node becomes a kernel call: which operand each of its inputs and outputs is, and what a GPU launches for it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from enginewright.plan import COMMON_DIMS, Extent, Launch, Linear, linear
from enginewright.triton_instance import TritonInstance


@dataclass(frozen=True)
class KernelBinding:
    """A kernel for one op on one target."""

    kernel: str  # versioned name, `gemm_bf16@1`
    # The role that each input and output of the node has, in order; "" for one that the kernel does not take (a cache
    # that comes out changed is the one that went in).
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: tuple[str, ...] = ()  # those of the node that the kernel is given
    # role of an output → index of the input whose memory it may take
    in_place: Mapping[str, int] = field(default_factory=dict)
    # call → (role, rows, columns) of an f32 buffer that only this call uses, if it wants one
    scratch: "Callable[[Call], tuple[str, Linear, int] | None] | None" = None
    # role → dtype of a weight that has a byte for each number in the graph alone
    packed: Mapping[str, str] = field(default_factory=dict)

    def on_cuda(self, launches: "Callable[[Call], tuple[Launch, ...]]", **sources: str) -> "CudaKernel":
        """The same call where GPUs launch `launches` for it. sources: function → its header in csrc/cuda."""
        headers = {function: f"{stem}.cuh" for function, stem in sources.items()}
        return CudaKernel(**vars(self), launches=launches, sources=headers)


@dataclass(frozen=True)
class Matrix:
    """An operand as kernels are specialized to it."""

    dtype: str
    rows: Linear
    columns: int  # of a cache's plane: elements of a head
    stride: int  # elements from one row to the next
    padded: int  # columns: the matrix's own, and those behind them that hold zeros
    layout: str = "plain"
    block_stride: int = 0  # of a cache's plane: bytes from one block to the next
    column: int = 0  # of its buffer, or element of a slot, where it begins


@dataclass(frozen=True)
class Call:
    """A kernel call that is being lowered."""

    operands: Mapping[str, Matrix]  # by role, without optional ones that are absent
    attributes: Mapping[str, int | float | str]
    architectures: tuple[str, ...] = ()  # of GPUs, those that it is to run on
    batch_invariant: bool = False  # a row of the result has the same bits, however many there are
    dims: Sequence[str] = COMMON_DIMS  # of the plan

    def rows(self, role: str) -> int:
        """The dim that an operand has as its number of rows, by its position."""
        position, copies = self.copies(role)
        assert copies == 1, f"{role} has {copies} rows for each of a dim, which the kernel does not count"
        return position

    def copies(self, role: str) -> tuple[int, int]:
        """The dim that an operand's rows follow, by its position, and how many rows it has for each."""
        rows = self.operands[role].rows
        for position, dim in enumerate(self.dims):
            for at, copies in rows.terms:
                if at == dim and rows == linear(**{dim: copies}):
                    return position, copies
        raise AssertionError(f"{role} has rows {rows}, which kernels do not count")


class Specialization(NamedTuple):
    """A kernel with its constants. source: its header in csrc/cuda, or its file of Triton there. expression: its C++
    name there. architectures: that it is compiled for; () is all. triton: what is compiled, of a kernel in Triton.
    """

    source: str
    expression: str
    architectures: tuple[str, ...] = ()
    triton: TritonInstance | None = None


@dataclass(frozen=True)
class CudaKernel(KernelBinding):
    """A kernel for GPUs: also what is launched for a call.

    sources: function → its header in csrc/cuda. counters: call → (operand, rows, columns) of an i32 buffer that only
    this call uses: zeros before the first step, and afterwards what the step before has left. triton: call → the
    kernels in Triton among its launches, which have their expressions.
    """

    launches: Callable[[Call], tuple[Launch, ...]] = lambda _: ()
    sources: Mapping[str, str] = field(default_factory=dict)
    counters: Callable[[Call], tuple[str, Linear, int]] | None = None
    triton: Callable[[Call], Sequence[TritonInstance]] = lambda _: ()


def cuda_type(dtype: str) -> str:
    """In C++: csrc/cuda/rows.cuh."""
    return f"Type::{dtype}"


def expression(function: str, struct: str, **fields: int | float | bool | str) -> str:
    """A specialization in C++, `function<struct{.field = …}>`, in namespace enginewright; strings are enumerators."""
    written = ", ".join(f".{name} = {_literal(value)}" for name, value in fields.items())
    return f"{function}<{struct}{{{written}}}>"


def _literal(value: int | float | bool | str) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return float(np.float32(value)).hex() + "f" if isinstance(value, float) else str(value)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def blocks(rows: Linear | int, per: int = 1) -> Extent:
    """Blocks in one dimension of a grid: one for each `per` rows."""
    return Extent(rows if isinstance(rows, Linear) else Linear(rows), per)


ONE = Extent()
