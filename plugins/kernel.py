"""How a node becomes a kernel call: which operand each of its inputs and outputs is, and what a GPU launches for it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from enginewright.plan import Extent, Launch, Linear


@dataclass(frozen=True)
class KernelBinding:
    """A kernel for one op on one target.

    kernel: versioned name, `gemm_bf16@1`. inputs, outputs: the operand that each input and output of the
    node is, in order; "" for one that the kernel does not take (the value pool, where the key pool's operand
    stands for both). attributes: those of the node that the kernel is given. in_place: output operand → index
    of the input whose memory it may take over. scratch: call → (operand, rows, columns) of an f32 buffer that
    only this call uses. packed: operand → dtype of a weight whose numbers have a byte each in the graph alone.
    """

    kernel: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: tuple[str, ...] = ()
    in_place: Mapping[str, int] = field(default_factory=dict)
    scratch: "Callable[[Call], tuple[str, Linear, int]] | None" = None
    packed: Mapping[str, str] = field(default_factory=dict)

    def on_cuda(self, launches: "Callable[[Call], tuple[Launch, ...]]", **sources: str) -> "CudaKernel":
        """The same call where GPUs launch `launches` for it. sources: function → its header in csrc/cuda."""
        headers = {function: f"{stem}.cuh" for function, stem in sources.items()}
        return CudaKernel(**vars(self), launches=launches, sources=headers)


@dataclass(frozen=True)
class Matrix:
    """An operand as kernels are specialized to it.

    stride: elements from one row to the next. padded: columns that hold zeros behind the matrix's own, and its own. KV
    pools are no matrices: `kv_dtype` and `block_stride` (bytes from one block to the next) belong to them alone.
    """

    dtype: str
    rows: Linear
    columns: int
    stride: int
    padded: int
    layout: str = "plain"
    block_stride: int = 0


@dataclass(frozen=True)
class Call:
    """A kernel call that is being lowered."""

    operands: Mapping[str, Matrix]  # by role, without optional ones that are absent
    attributes: Mapping[str, int | float | str]
    architectures: tuple[str, ...] = ()  # of GPUs, those that it is to run on
    batch_invariant: bool = False  # a row of the result has the same bits, however many there are

    def rows(self, role: str) -> str:
        """Which size of the step an operand has as its number of rows, in C++."""
        linear = self.operands[role].rows
        for name in ("tokens", "sequences", "logit_rows"):
            if linear == Linear(**{name: 1}):
                return f"Rows::{name}"
        raise AssertionError(f"{role} has rows {linear}, which kernels do not count")


class Specialization(NamedTuple):
    """A kernel with its constants. source: its header in csrc/cuda. expression: its C++ name there. architectures: that
    it is compiled for; () is all.
    """

    source: str
    expression: str
    architectures: tuple[str, ...] = ()


@dataclass(frozen=True)
class CudaKernel(KernelBinding):
    """A kernel for GPUs: also what is launched for a call.

    sources: function → its header in csrc/cuda. counters: call → (operand, rows, columns) of an i32 buffer that only
    this call uses: zeros before the first step, and afterwards what the step before has left.
    """

    launches: Callable[[Call], tuple[Launch, ...]] = lambda _: ()
    sources: Mapping[str, str] = field(default_factory=dict)
    counters: Callable[[Call], tuple[str, Linear, int]] | None = None


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
    return Extent(rows if isinstance(rows, Linear) else Linear(constant=rows), per)


ONE = Extent()
