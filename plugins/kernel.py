"""The mapping of a node to a kernel call: roles of its inputs and outputs, and the launches on a GPU."""

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
    # Role of each input and output of the node, in order; "" for one that the kernel does not have (a cache as an
    # output is the cache that went in).
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]  # as `inputs`
    attributes: tuple[str, ...] = ()  # attributes of the node that the kernel has, too
    # role of an output → index of the input whose memory it may use
    in_place: Mapping[str, int] = field(default_factory=dict)
    # call → (role, rows, columns) of an f32 buffer that only this call uses; None: no buffer
    scratch: "Callable[[Call], tuple[str, Linear, int] | None] | None" = None
    # role → dtype of a weight whose numbers have a byte each in the graph alone
    packed: Mapping[str, str] = field(default_factory=dict)
    # role → layout (csrc/cpu/kernel.h) of a weight that is a matrix, where it is not "r16"; vectors are "plain"
    layouts: Mapping[str, str] = field(default_factory=dict)

    def on_cuda(self, launches: "Callable[[Call], tuple[Launch, ...]]", **sources: str) -> "CudaKernel":
        """Makes the GPU kernel of the same call.

        Args:
            launches: call → its launches.
            sources: function → the name of its header in csrc/cuda.
        """
        headers = {function: f"{stem}.cuh" for function, stem in sources.items()}
        return CudaKernel(**vars(self), launches=launches, sources=headers)


@dataclass(frozen=True)
class Matrix:
    """An operand, by the facts that kernels are specialized to."""

    dtype: str  # number type
    rows: Linear  # number of rows
    columns: int  # number of columns; for a cache's plane: elements of a head
    stride: int  # elements from one row to the next
    padded: int  # columns, including those after the matrix's own that hold zeros
    layout: str = "plain"  # layout of a weight
    block_stride: int = 0  # bytes from one block of a cache's plane to the next
    column: int = 0  # first column in its buffer, or first element in a slot


@dataclass(frozen=True)
class Call:
    """A kernel call that is being lowered."""

    operands: Mapping[str, Matrix]  # role → operand, without optional ones that are absent
    attributes: Mapping[str, int | float | str]  # constants of the kernel
    architectures: tuple[str, ...] = ()  # GPU architectures that it has to run on
    batch_invariant: bool = False  # True if a row of the result has the same bits, whatever the number of rows
    dims: Sequence[str] = COMMON_DIMS  # dimensions of the plan
    # The call of which this one is a rank's part; None: it is whole. It decides whatever the order of sums depends on,
    # so that a number has the same bits on any number of ranks.
    part_of: "Call | None" = None

    @property
    def whole(self) -> "Call":
        """The call itself, or that of which it is a part."""
        return self.part_of or self

    def rows(self, role: str) -> int:
        """Returns the position of the dimension that is an operand's number of rows."""
        position, copies = self.copies(role)
        assert copies == 1, f"{role} has {copies} rows for each of a dim, which the kernel does not support"
        return position

    def copies(self, role: str) -> tuple[int, int]:
        """Returns the position of the dimension that an operand's rows follow, and the number of rows for each."""
        rows = self.operands[role].rows
        for position, dim in enumerate(self.dims):
            for name, copies in rows.terms:
                if name == dim and rows == linear(**{dim: copies}):
                    return position, copies
        raise AssertionError(f"{role} has rows {rows}, which kernels do not support")


class Specialization(NamedTuple):
    """A kernel with its constants."""

    source: str  # header in csrc/cuda, or the file of a kernel in Triton there
    expression: str  # name in C++, with constants
    architectures: tuple[str, ...] = ()  # architectures that it is compiled for; (): all
    triton: TritonInstance | None = None  # specialization of a kernel in Triton


@dataclass(frozen=True)
class CudaKernel(KernelBinding):
    """A kernel for GPUs, with the launches of a call."""

    launches: Callable[[Call], tuple[Launch, ...]] = lambda _: ()  # call → its launches
    sources: Mapping[str, str] = field(default_factory=dict)  # function → its header in csrc/cuda
    # call → (operand, rows, columns) of an i32 buffer that only this call uses: zeros before the first step, and
    # afterwards the values that the step before has left
    counters: Callable[[Call], tuple[str, Linear, int]] | None = None
    # call → the kernels in Triton among its launches, which have their expressions
    triton: Callable[[Call], Sequence[TritonInstance]] = lambda _: ()


def cuda_type(dtype: str) -> str:
    """Names a number type in C++: csrc/cuda/dtype.cuh."""
    return f"Type::{dtype}"


def expression(function: str, struct: str, **fields: int | float | bool | str) -> str:
    """Writes a specialization in C++, `function<struct{.field = …}>`, in namespace enginewright.

    Args:
        function: name of the template.
        struct: type of its constants.
        fields: the constants; strings are enumerators.
    """
    written = ", ".join(f".{name} = {_literal(value)}" for name, value in fields.items())
    return f"{function}<{struct}{{{written}}}>"


def _literal(value: int | float | bool | str) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return float(np.float32(value)).hex() + "f" if isinstance(value, float) else str(value)


def ceil_div(a: int, b: int) -> int:
    """Returns a / b, rounded up.

    Args:
        a: dividend.
        b: divisor.
    """
    return -(-a // b)


def blocks(rows: Linear | int, per: int = 1) -> Extent:
    """Makes one dimension of a grid.

    Args:
        rows: rows that the blocks share.
        per: rows of a block.
    """
    return Extent(rows if isinstance(rows, Linear) else Linear(rows), per)


ONE = Extent()
