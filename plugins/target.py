"""What a platform decides: an object for each, which passes, lowering and the gate ask.

`enginewright.targets` has their names, and what people may write. A third platform is a class here, an executor in
`runtime/device/devices.py`, and kernels by its name in the files of the ops that it runs.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import onnx_ir as ir

from enginewright.plan import Launch
from enginewright.plugins.kernel import Matrix
from enginewright.plugins.sampling_cuda import SAMPLING_SOURCES, sampling_launch
from enginewright.targets import CPU, CUDA, PTX, SMS, architectures, platforms_of


class Activations(NamedTuple):
    """How a GEMM reads its activations."""

    dtype: ir.DataType = ir.DataType.BFLOAT16
    group: int = 0  # columns that share a scale, where they are codes; 0 is all of a row


class Target(ABC):
    """A platform, as the compiler knows it: there is one graph and one plan for each."""

    name: ClassVar[str]  # as `enginewright.targets` has it, and the engine's section `plan/<name>`
    runs_in_builds: ClassVar[bool]  # whether builds run the engine to measure it, or compute what it would give
    static_scales: ClassVar[bool]  # whether kernels take scales of activations that calibration has fixed
    architectures: tuple[str, ...] = ()  # of GPUs, what kernels are compiled for

    @abstractmethod
    def beside_int8(self, group: int) -> Activations:
        """What multiplies weights of INT8, for a method that would have INT8 with a scale for `group` columns."""

    @abstractmethod
    def beside_four_bits(self, group: int) -> Activations:
        """The same for weights of 4 bits, and for the INT8 tables of models that have such."""

    @abstractmethod
    def beside_fp8(self, group: int) -> Activations:
        """What multiplies weights of FLOAT8E4M3FN that have a scale for `group` columns; 0 is all of a row."""

    @abstractmethod
    def queries(self, stored: ir.DataType) -> ir.DataType:
        """What attention rounds queries to, which are BFLOAT16, for keys that are stored so."""

    @abstractmethod
    def sampling(self, logits: Matrix) -> tuple[Launch, Mapping[str, str]] | None:
        """What draws tokens from a step's logits in the plan, and its function's header; None where that is no part
        of it.
        """


class CpuTarget(Target):
    name = CPU
    runs_in_builds = True
    static_scales = True

    def beside_int8(self, group: int) -> Activations:
        return Activations(ir.DataType.INT8, group)

    def beside_four_bits(self, group: int) -> Activations:
        return Activations(ir.DataType.INT8, group)

    def beside_fp8(self, group: int) -> Activations:
        """CPUs widen FP8 to BFLOAT16 to multiply it: rounding activations would lose and gain nothing."""
        return Activations()

    def queries(self, stored: ir.DataType) -> ir.DataType:
        return ir.DataType.INT8 if stored == ir.DataType.INT8 else ir.DataType.BFLOAT16

    def sampling(self, logits: Matrix) -> None:
        return None


@dataclass(frozen=True)
class CudaTarget(Target):
    name = CUDA
    runs_in_builds = False
    static_scales = False

    architectures: tuple[str, ...] = (*SMS, PTX)

    def beside_int8(self, group: int) -> Activations:
        """A scale a token: tensor cores would lose most of their speed to one for each run of columns."""
        return Activations(ir.DataType.INT8)

    def beside_four_bits(self, group: int) -> Activations:
        return Activations()

    def beside_fp8(self, group: int) -> Activations:
        return Activations(ir.DataType.FLOAT8E4M3FN, group)

    def queries(self, stored: ir.DataType) -> ir.DataType:
        return ir.DataType.BFLOAT16

    def sampling(self, logits: Matrix) -> tuple[Launch, Mapping[str, str]]:
        return sampling_launch(logits), SAMPLING_SOURCES


CPU_TARGET = CpuTarget()


def targets_of(names: Iterable[str]) -> list[Target]:
    """Of names such as `cuda:sm_90a`: an object for each platform, in the order of their first names."""
    given = tuple(names)
    platforms: dict[str, Target] = {CPU: CPU_TARGET, CUDA: CudaTarget(tuple(architectures(given)))}
    return [platforms[platform] for platform in platforms_of(given)]
