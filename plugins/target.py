"""Platforms: an object for each makes the decisions that passes, lowering and the gate need.

`enginewright.targets` has their names, and what users may write. A third platform is a class here, an executor in
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
    """The form in which a GEMM reads its activations."""

    dtype: ir.DataType = ir.DataType.BFLOAT16  # number type
    group: int = 0  # columns that share a scale, if they are codes; 0 is a whole row


class Target(ABC):
    """A platform of the compiler, which makes one graph and one plan for each."""

    name: ClassVar[str]  # name in `enginewright.targets`, and of the engine's section `plan/<name>`
    runs_in_builds: ClassVar[bool]  # True if builds run the engine to measure it, False if they simulate its results
    static_scales: ClassVar[bool]  # True if kernels take scales of activations that calibration has fixed
    architectures: tuple[str, ...] = ()  # GPU architectures that kernels are compiled for

    @abstractmethod
    def activations_for_int8(self, group: int) -> Activations:
        """Returns the activations for INT8 weights, if the method prefers INT8 with a scale for `group` columns."""

    @abstractmethod
    def activations_for_four_bits(self, group: int) -> Activations:
        """Returns the activations for 4-bit weights, and for the INT8 tables of models with these."""

    @abstractmethod
    def activations_for_fp8(self, group: int) -> Activations:
        """Returns the activations for FLOAT8E4M3FN weights with a scale for `group` columns; 0 is a whole row."""

    @abstractmethod
    def queries(self, stored: ir.DataType) -> ir.DataType:
        """Returns the type that attention rounds BFLOAT16 queries to, for keys that are stored as `stored`."""

    @abstractmethod
    def sampling(self, logits: Matrix) -> tuple[Launch, Mapping[str, str]] | None:
        """Makes the launch that samples from a step's logits.

        Returns:
            The launch, and function → header; None if the plan has no such launch.
        """


class CpuTarget(Target):
    """CPUs, on which builds run the engine to measure it."""

    name = CPU
    runs_in_builds = True
    static_scales = True

    def activations_for_int8(self, group: int) -> Activations:
        """Returns INT8 with a scale for `group` columns."""
        return Activations(ir.DataType.INT8, group)

    def activations_for_four_bits(self, group: int) -> Activations:
        """Returns INT8 with a scale for `group` columns."""
        return Activations(ir.DataType.INT8, group)

    def activations_for_fp8(self, group: int) -> Activations:
        """Returns BFLOAT16: CPUs widen FP8 to multiply it, so rounding activations would lose and gain nothing."""
        return Activations()

    def queries(self, stored: ir.DataType) -> ir.DataType:
        """Returns INT8 for INT8 keys, otherwise BFLOAT16."""
        return ir.DataType.INT8 if stored == ir.DataType.INT8 else ir.DataType.BFLOAT16

    def sampling(self, logits: Matrix) -> None:
        """Returns None: the runtime samples on CPUs."""
        return None


@dataclass(frozen=True)
class CudaTarget(Target):
    """GPUs, for which builds compile code."""

    name = CUDA
    runs_in_builds = False
    static_scales = False

    architectures: tuple[str, ...] = (*SMS, PTX)  # GPU architectures that kernels are compiled for

    def activations_for_int8(self, group: int) -> Activations:
        """Returns INT8 with a scale for each token: more scales would cost most of the tensor cores' speed."""
        return Activations(ir.DataType.INT8)

    def activations_for_four_bits(self, group: int) -> Activations:
        """Returns BFLOAT16."""
        return Activations()

    def activations_for_fp8(self, group: int) -> Activations:
        """Returns FLOAT8E4M3FN with a scale for `group` columns."""
        return Activations(ir.DataType.FLOAT8E4M3FN, group)

    def queries(self, stored: ir.DataType) -> ir.DataType:
        """Returns BFLOAT16."""
        return ir.DataType.BFLOAT16

    def sampling(self, logits: Matrix) -> tuple[Launch, Mapping[str, str]]:
        """Makes the launch of plugins/sampling_cuda.py."""
        return sampling_launch(logits), SAMPLING_SOURCES


CPU_TARGET = CpuTarget()


def targets_of(names: Iterable[str]) -> list[Target]:
    """Makes a target for each platform among names such as `cuda:sm_90a`, in the order of their first names."""
    given = tuple(names)
    platforms: dict[str, Target] = {CPU: CPU_TARGET, CUDA: CudaTarget(tuple(architectures(given)))}
    return [platforms[platform] for platform in platforms_of(given)]
