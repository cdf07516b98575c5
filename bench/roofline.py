"""The roofline: what this machine does at best, measured now. A figure means something beside it, and moves with it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from enginewright import _cpu
from enginewright.runtime.device.machine import free_memory

READ_BYTES = 1 << 30  # larger than caches; of a machine with less memory, a part of what is free
FREE_SHARE = 0.25
SECONDS = 0.2  # for each of the loops


@dataclass(frozen=True)
class Rate:
    """Of one instruction (or the few that make a dot product) on registers alone; operations/s of all threads."""

    instruction: str
    ops_per_s: float


@dataclass(frozen=True)
class Roofline:
    """The best of several passes: an interruption lowers a mean, and says nothing of the machine.

    dots: of products of "int8", "bf16" and "fp32", as far as the instruction set has an instruction of its own for
    them. read_bytes: how much was read in order, again and again.
    """

    isa: str
    threads: int
    dots: Mapping[str, Rate]
    read_bytes: int
    read_bytes_per_s: float

    def ops_per_s(self, operands: str) -> float:
        """Of dot products of `operands`; what has no instruction of its own is computed in fp32."""
        return self.dots.get(operands, self.dots["fp32"]).ops_per_s

    def seconds(self, read_bytes: float, ops: Mapping[str, float]) -> float:
        """The least that reading so many bytes and so many operations, by operands, take: whichever takes longer."""
        computing = sum(count / self.ops_per_s(operands) for operands, count in ops.items())
        return max(read_bytes / self.read_bytes_per_s, computing)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_roofline(
    isa: str, threads: int, memory: Sequence[Any] | None = None, *, dots: Mapping[str, Rate] | None = None
) -> Roofline:
    """Measure the roofline, in about a second.

    Args:
        isa: "amx", "avx512", "avx512-vnni", "avx2-vnni", "avx2" or "portable", as far as this machine has it.
        memory: buffers to read, such as the weights of an engine where they are mapped; fresh memory of READ_BYTES
            otherwise (make it once with `read_buffer`, to measure often).
        dots: rates that are known already; nothing but the reading is measured then.

    Raises:
        ValueError: this machine has no such instruction set.
    """
    memory = [read_buffer()] if memory is None else memory
    return Roofline(
        isa=isa,
        threads=threads,
        dots=measure_dots(isa, threads) if dots is None else dots,
        read_bytes=sum(memoryview(piece).nbytes for piece in memory),
        read_bytes_per_s=_cpu.read_rate(memory, threads, SECONDS),
    )


def measure_dots(isa: str, threads: int) -> dict[str, Rate]:
    """Dot products alone: operands → their rate."""
    return {operands: Rate(*rate) for operands, rate in _cpu.dot_rates(isa, threads, SECONDS).items()}


def read_buffer(nbytes: int = READ_BYTES) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Memory to read, written once so that it is there; less than `nbytes` where little is free."""
    return np.ones(max(min(nbytes, int(free_memory() * FREE_SHARE)), 1), np.uint8)
