"""Kernel calls outside a model: one op, launched from the same plan objects as an engine's, at sizes of one's own."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from enginewright.builder.cuda import Instance
from enginewright.builder.lower.pack import TORCH_DTYPES
from enginewright.plan import COLUMN_ALIGN, COMMON_DIMS, Buffer, Launch, Linear, StepSizes, linear
from enginewright.plugins import PLUGINS
from enginewright.plugins.kernel import Call, CudaKernel, Matrix
from enginewright.runtime.device.cuda.device import Device

Tensors = Mapping[str, torch.Tensor]
TOKENS = linear(tokens=1)


@dataclass(frozen=True)
class OpCall:
    """matrices: operands by role, those that only the kernel uses among them. sources: function → its header."""

    matrices: Mapping[str, Matrix]
    launches: tuple[Launch, ...]
    sources: Mapping[str, str]

    def instances(self, sizes: StepSizes) -> list[Instance]:
        """The kernels of a step of these sizes."""
        kernels = [launch.kernel for launch in self.launches if launch.runs(sizes)]
        return [Instance(self.sources[kernel.partition("<")[0]], kernel) for kernel in kernels]

    def scratch(self, sizes: StepSizes, at: str) -> dict[str, torch.Tensor]:
        """Memory of the operands that only the kernel uses, on a device of torch's: zeros, which counters begin as."""
        own = {role: self.matrices[role] for role in ("partial", "partials", "counters") if role in self.matrices}
        return {role: empty(matrix, sizes, at).zero_() for role, matrix in own.items()}

    def bind(self, device: Device, operands: Tensors, sizes: StepSizes) -> Callable[[], None]:
        """Returns the launches with operands in these tensors."""
        tensors = {"": torch.tensor(sizes.counts, dtype=torch.int32, device=operands["out"].device), **operands}
        runs = []
        for launch in self.launches:
            if launch.runs(sizes):
                addresses = [tensors[role].data_ptr() if role in tensors else 0 for role in ("", *launch.arguments)]
                run = device.launcher(launch.kernel, launch.threads, launch.shared_bytes, addresses)
                x, y, z = (extent.at(sizes, device.multiprocessors) for extent in launch.grid)
                runs.append((run, (x, y, z)))

        def work(_: Tensors = tensors) -> None:  # which it keeps alive
            for run, grid in runs:
                run(grid)

        return work


def kernel_of(op: str) -> CudaKernel:
    binding = PLUGINS[op].kernels["cuda"]
    assert isinstance(binding, CudaKernel)
    return binding


def call_of(
    op: str,
    matrices: Mapping[str, Matrix],
    kernel: CudaKernel | None = None,
    sm: str = "sm_90a",
    dims: Sequence[str] = COMMON_DIMS,
    **attributes: int | float | str,
) -> OpCall:
    """An op of the domain `enginewright`, as lowering has it.

    Args:
        matrices: of inputs and outputs, by role.
        kernel: in place of the op's own.
        sm: the architecture that launches are chosen for.
        dims: of a step.
        attributes: all of the op's.
    """
    binding = kernel or kernel_of(op)
    given = {name: attributes[name] for name in binding.attributes if name in attributes}
    whole = dict(matrices)
    for dtype, extra in (("f32", binding.scratch), ("i32", binding.counters)):
        if extra is not None:
            role, rows, columns = extra(Call(whole, given, (sm,)))
            whole[role] = buffer(dtype, columns, rows)
    return OpCall(whole, binding.launches(Call(whole, given, (sm,), dims=dims)), binding.sources)


def buffer(dtype: str, columns: int, rows: Linear = TOKENS) -> Matrix:
    """Allocates a matrix with the layout of the arena."""
    padded = -(-columns // COLUMN_ALIGN) * COLUMN_ALIGN
    return Matrix(dtype, rows, columns, Buffer(dtype, rows, columns, 0).stride, padded)


def vector(rows: Linear, columns: int = 1) -> Matrix:
    """A step's input."""
    return Matrix("i32", rows, columns, columns, columns)


def empty(matrix: Matrix, sizes: StepSizes, at: str) -> torch.Tensor:
    """Memory of a buffer, [rows, stride]."""
    return torch.empty((max(matrix.rows.at(sizes), 1), matrix.stride), dtype=TORCH_DTYPES[matrix.dtype], device=at)


def random_rows(matrix: Matrix, sizes: StepSizes, at: str) -> torch.Tensor:
    """Allocates such a matrix with random numbers in its columns, and zeros after them."""
    rows = empty(matrix, sizes, at).zero_()
    shape = (len(rows), matrix.columns)
    if matrix.dtype == "i8":
        rows[:, : matrix.columns] = torch.randint(-127, 128, shape, dtype=torch.int8, device=at)
    else:
        rows[:, : matrix.columns] = torch.randn(shape, device=at)
    return rows


def random_bytes(dtype: str, nbytes: int, at: str) -> torch.Tensor:
    """Numbers of a dtype that are everywhere finite, as UINT8 [nbytes]."""
    match dtype:
        case "bf16":
            return torch.randn(nbytes // 2, dtype=torch.bfloat16, device=at).view(torch.uint8)
        case "f32":
            return torch.rand(nbytes // 4, device=at).mul_(0.01).add_(0.001).view(torch.uint8)
        case "e4m3":
            codes = torch.randint(0, 127, (nbytes,), dtype=torch.uint8, device=at)  # 127 is NaN
            return codes.bitwise_or_(torch.randint(0, 2, (nbytes,), dtype=torch.uint8, device=at).mul_(128))
        case "i8":
            return torch.randint(-127, 128, (nbytes,), dtype=torch.int8, device=at).view(torch.uint8)
        case _:
            return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=at)
