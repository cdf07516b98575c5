"""Runs one kernel by itself: a plan of one step, from tensors, through `_cpu.Executor`.

runner = KernelRunner("avx512", threads=2, tokens=7)
x = runner.input_buffer(torch_tensor)            # an arena buffer, filled before the step
out = runner.output_buffer(7, 37, "bf16")        # one that is full of NaN
runner.call("gemm_bf16@1", {"x": x, "weight": runner.weight(w, "r16"), "out": out}, {"epilogue": "none"})
result = runner.read(out)                        # float32 tensor [7, 37]
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from enginewright import _cpu
from enginewright.builder.lower.pack import TORCH_DTYPES, PackedForm, pack

Linear = tuple[int, ...]  # constant, and the factors of tokens, sequences, logit_rows, kv_blocks, kv_splits

COLUMN_ALIGN = 64  # as plan.py has it
GAP_BYTES = 64  # between buffers: nobody's memory, which `make sanitize` watches
ITEM_BYTES = {"f32": 4, "bf16": 2, "i8": 1, "i32": 4}
NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items() if name != "e2m1"}
ONE_COLUMN = ONE_ROW = (1, 0, 0, 0, 0, 0)
TOKENS = (0, 1, 0, 0, 0, 0)


def aligned(data: bytes | memoryview) -> NDArray[np.uint8]:
    """A copy that starts at a multiple of 64 bytes, in memory that ends where it ends (`make sanitize` watches)."""
    memory: NDArray[np.uint8] = torch.empty(len(data), dtype=torch.uint8).numpy()
    assert memory.ctypes.data % 64 == 0, "torch aligns its memory to 64 bytes"
    memory[:] = np.frombuffer(data, np.uint8)
    return memory


def weight(value: torch.Tensor, layout: str = "plain", dtype: str | None = None) -> _cpu.OperandSpec:
    """A packed weight. Vectors become [1, columns]; several matrices are [matrices, rows, columns]. dtype: u4 for
    UINT8, if it is not given.
    """
    matrices, rows, columns = (1,) * (3 - value.ndim) + tuple(value.shape)
    form = PackedForm(dtype or NAMES[value.dtype], tuple(value.shape), layout)
    data = aligned(b"".join(pack(value, form)))
    return _cpu.OperandSpec.weight(data, form.dtype, layout, rows, columns, matrices)


@dataclass(frozen=True)
class Buffer:
    """An arena buffer, or a column view of one."""

    offset_bytes: int
    dtype: str
    rows: int
    linear: Linear
    columns: int
    stride: int
    column_offset: int = 0

    def spec(self) -> _cpu.OperandSpec:
        whole = self.column_offset == 0 and self.stride - self.columns < COLUMN_ALIGN
        pad = self.stride - self.columns if whole else 0
        return _cpu.OperandSpec.arena(
            self.offset_bytes, self.dtype, self.linear, self.columns, self.stride, self.column_offset, pad
        )

    def view(self, column: int, columns: int) -> "Buffer":
        return Buffer(
            self.offset_bytes, self.dtype, self.rows, self.linear, columns, self.stride, self.column_offset + column
        )


Operands = dict[str, Buffer | _cpu.OperandSpec]


class KernelRunner:
    """One executor with one arena; buffers lie one after the other, and are NaN (or -1) everywhere at first."""

    def __init__(
        self,
        isa: str,
        threads: int = 1,
        *,
        tokens: int = 1,
        sequences: int = 1,
        logit_rows: int = 1,
        kv_blocks: int = 0,
        kv_splits: int = 0,
        inputs: Mapping[str, tuple[NDArray[np.int32], Linear, Linear]] | None = None,
        arena_bytes: int = 1 << 22,
    ) -> None:
        """inputs: name → (array, rows, columns) of the step inputs, in order."""
        self.sizes = (tokens, sequences, logit_rows, kv_blocks, kv_splits)
        inputs = inputs or {}
        self.arrays = [np.ascontiguousarray(array, np.int32) for array, _, _ in inputs.values()]
        limits = (max(tokens, 1), max(sequences, 1), max(logit_rows, 1), kv_blocks, kv_splits)
        linears = [(name, rows, columns) for name, (_, rows, columns) in inputs.items()]
        self.executor = _cpu.Executor(isa, threads, limits, linears, arena_bytes)
        self._next_offset = 0
        self.executor.buffer(0, 1, arena_bytes, arena_bytes, "i8")[:] = -1  # NaN as f32 and as bf16

    def buffer(self, rows: int, columns: int, dtype: str, linear: Linear = TOKENS) -> Buffer:
        """A new buffer of NaN. `rows` is what `linear` comes to in this step."""
        stride = -(-columns // COLUMN_ALIGN) * COLUMN_ALIGN
        buffer = Buffer(self._next_offset, dtype, rows, linear, columns, stride)
        self._next_offset += -(-rows * stride * ITEM_BYTES[dtype] // 64) * 64 + GAP_BYTES
        return buffer

    def filled(self, value: torch.Tensor, linear: Linear = TOKENS) -> Buffer:
        """A new buffer with a tensor [rows, columns]; zeros in the pad columns, but NaN if it is float32."""
        rows, columns = value.shape
        buffer = self.buffer(rows, columns, NAMES[value.dtype], linear)
        whole = self._array(buffer, buffer.stride)
        if value.dtype != torch.float32:
            whole[:] = 0
        numbers = value.contiguous().view(torch.uint16) if value.dtype == torch.bfloat16 else value
        whole[:, : buffer.columns] = numbers.numpy()
        return buffer

    def call(
        self,
        kernel: str,
        operands: Mapping[str, Buffer | _cpu.OperandSpec],
        attributes: Mapping[str, int | float | str] | None = None,
    ) -> None:
        """Adds the kernel and runs the step (all kernels added so far)."""
        self.add(kernel, operands, attributes)
        self.run()

    def add(
        self,
        kernel: str,
        operands: Mapping[str, Buffer | _cpu.OperandSpec],
        attributes: Mapping[str, int | float | str] | None = None,
    ) -> None:
        """Adds the kernel."""
        specs = {name: entry.spec() if isinstance(entry, Buffer) else entry for name, entry in operands.items()}
        self.executor.add_kernel(kernel, specs, dict(attributes or {}))

    def run(self) -> None:
        self.executor.run(self.arrays, self.sizes)

    def work(self) -> dict[str, int]:
        """Sums the work of all kernels added so far in a step (struct Work of kernel.h)."""
        _, work = self.executor.profile(self.arrays, self.sizes)
        return {name: int(work[name].sum()) for name in work.dtype.names or ()}

    def read(self, buffer: Buffer) -> torch.Tensor:
        """A copy, float32 [rows, columns]."""
        return self._floats(self._array(buffer, buffer.columns))

    def read_pad(self, buffer: Buffer) -> torch.Tensor:
        """The columns after `columns`, up to the stride."""
        return self._floats(self._array(buffer, buffer.stride)[:, buffer.columns :])

    def _array(self, buffer: Buffer, columns: int) -> NDArray[np.float32 | np.uint16 | np.int8]:
        item = ITEM_BYTES[buffer.dtype]
        offset = buffer.offset_bytes + buffer.column_offset * item
        return self.executor.buffer(offset, buffer.rows, columns, buffer.stride, buffer.dtype)

    @staticmethod
    def _floats(array: NDArray[np.float32 | np.uint16 | np.int8]) -> torch.Tensor:
        values = torch.from_numpy(array.copy())
        return (values.view(torch.bfloat16) if values.dtype == torch.uint16 else values).float()
