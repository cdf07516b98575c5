"""One kernel call on the emulated GPU, launched as a plan would."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from enginewright.plan import Launch, Linear, StepSizes, linear
from enginewright.plugins import PLUGINS
from enginewright.plugins.kernel import Call, CudaKernel, Matrix
from enginewright.plugins.registry import STANDARD_OPS
from enginewright.triton_instance import TritonInstance
from tests.emulator.kernels import SCHEDULES, Instance, Kernels

MULTIPROCESSORS = 3
NUMPY = {"f32": np.float32, "bf16": np.uint16, "i8": np.int8, "e4m3": np.uint8, "i32": np.int32}
POISON = {"f32": np.nan, "bf16": 0x7FFF, "i8": 99, "e4m3": 99, "i32": -1}


@dataclass(frozen=True)
class Operand:
    """A matrix and its description for kernels. values: its numbers, or their bits if it is bf16 or e4m3."""

    values: np.ndarray
    matrix: Matrix


def strided(dtype: str, rows: Linear, values: np.ndarray, stride: int, padded: int | None = None) -> Operand:
    """An operand [rows, columns] in rows of `stride` elements: zeros up to `padded`, then poison."""
    count, columns = values.shape
    whole = np.full((count, stride), POISON[dtype], NUMPY[dtype])
    whole[:, : padded or columns] = 0
    whole[:, :columns] = values
    return Operand(whole, Matrix(dtype, rows, columns, stride, padded or columns))


def empty(dtype: str, rows: Linear, count: int, columns: int, stride: int, padded: int | None = None) -> Operand:
    """An operand for a result: poison everywhere, and two rows more than the step has."""
    whole = np.full((count + 2, stride), POISON[dtype], NUMPY[dtype])
    return Operand(whole, Matrix(dtype, rows, columns, stride, padded or columns))


def vector(dtype: str, values: np.ndarray) -> Operand:
    rows = linear(tokens=1) if dtype == "i32" else Linear(1)
    width = 1 if dtype == "i32" else values.size
    return Operand(np.ascontiguousarray(values, NUMPY[dtype]), Matrix(dtype, rows, width, width, width))


def as_bf16(values: np.ndarray) -> np.ndarray:
    """Bits of the nearest bfloat16, halfway to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def kernel_of(op: str) -> CudaKernel:
    """The kernel of a plugin, or of a standard op, for GPUs."""
    kernel = (STANDARD_OPS.get(op) or PLUGINS[op]).kernels["cuda"]
    assert isinstance(kernel, CudaKernel)
    return kernel


def instances(binding: CudaKernel, launches: Sequence[Launch]) -> list[Instance]:
    """The kernels to compile for the launches, without those in Triton."""
    names = dict.fromkeys((one.kernel.partition("<")[0], one.kernel) for one in launches)
    return [(binding.sources[function], kernel) for function, kernel in names if function in binding.sources]


class CudaCall:
    """A call of a kernel with some operands, compiled once."""

    def __init__(
        self,
        binding: CudaKernel,
        operands: Mapping[str, Matrix],
        *,
        batch_invariant: bool = False,
        **attributes: int | float | str,
    ) -> None:
        call = Call(operands, attributes, ("sm_90a",), batch_invariant)
        self.launches = binding.launches(call)
        self.kernels = Kernels(instances(binding, self.launches))
        self.triton = {one.expression: one for one in binding.triton(call)}

    def run(self, operands: Mapping[str, Operand], sizes: StepSizes, schedule: str = SCHEDULES[0]) -> None:
        """Results are in the operands afterwards."""
        run(self.kernels, self.launches, operands, sizes, schedule, triton=self.triton)


def run(
    kernels: Kernels,
    launches: Sequence[Launch],
    operands: Mapping[str, Operand],
    sizes: StepSizes,
    schedule: str,
    seed: int = 0,
    triton: Mapping[str, TritonInstance] = MappingProxyType({}),
) -> None:
    """triton: kernels in Triton by their expressions, which run in its interpreter."""
    of_step = np.array(sizes.counts, np.int32)
    for launch in launches:
        if not launch.runs(sizes):
            continue
        grid = [extent.at(sizes, MULTIPROCESSORS) for extent in launch.grid]
        arguments = [operands[role].values if role in operands else None for role in launch.arguments]
        if launch.kernel in triton:
            from tests.emulator.interpreted import launch as interpret

            addresses = [0 if one is None else one.ctypes.data for one in (of_step, *arguments)]
            interpret(triton[launch.kernel], grid, addresses)
            continue
        kernels.launch(
            launch.kernel, grid, launch.threads, launch.shared_bytes, of_step, *arguments, schedule=schedule, seed=seed
        )
