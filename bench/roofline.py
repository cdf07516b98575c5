"""The roofline: the best rates of this machine, measured now, so that figures can be compared with them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from enginewright import _cpu
from enginewright.runtime.device.machine import free_memory

READ_BYTES = 1 << 30  # more than caches hold; a machine with less memory uses a part of what is free
FREE_SHARE = 0.25  # share of the free memory
SECONDS = 0.2  # for each of the loops


@dataclass(frozen=True)
class Rate:
    """Rate of one instruction (or the few that make a dot product) on registers alone."""

    instruction: str  # name of the instruction
    ops_per_s: float  # operations of all threads in a second


@dataclass(frozen=True)
class Roofline:
    """The best of several passes: an interruption lowers a mean, and says nothing about the machine."""

    isa: str  # instruction set
    threads: int  # number of threads
    # "int8", "bf16" or "fp32" → rate of dot products, if the instruction set has an instruction of its own for them
    dots: Mapping[str, Rate]
    read_bytes: int  # bytes that were read in order, repeatedly
    read_bytes_per_s: float  # bytes of all threads in a second

    def ops_per_s(self, operands: str) -> float:
        """Returns the rate of dot products; operands without an instruction of their own are computed in fp32."""
        return self.dots.get(operands, self.dots["fp32"]).ops_per_s

    def seconds(self, read_bytes: float, ops: Mapping[str, float]) -> float:
        """Computes the minimum of seconds for reads and operations, whichever takes longer.

        Args:
            read_bytes: bytes to read.
            ops: operands → operations.
        """
        computing = sum(count / self.ops_per_s(operands) for operands, count in ops.items())
        return max(read_bytes / self.read_bytes_per_s, computing)

    def to_dict(self) -> dict[str, Any]:
        """Converts the roofline for a JSON report."""
        return asdict(self)


def measure_roofline(
    isa: str, threads: int, memory: Sequence[Any] | None = None, *, dots: Mapping[str, Rate] | None = None
) -> Roofline:
    """Measures the roofline, in about a second.

    Args:
        isa: "amx", "avx512", "avx512-vnni", "avx2-vnni", "avx2" or "portable", as far as this machine has it.
        threads: number of threads.
        memory: buffers to read, such as the weights of an engine where they are mapped; None is fresh memory of
            READ_BYTES (make it once with `read_buffer`, to measure often).
        dots: known rates; only the reading is measured then.

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
    """Measures dot products alone.

    Args:
        isa: instruction set.
        threads: number of threads.

    Returns:
        Operands → rate.
    """
    return {operands: Rate(*rate) for operands, rate in _cpu.dot_rates(isa, threads, SECONDS).items()}


def read_buffer(nbytes: int = READ_BYTES) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Allocates memory to read, and writes it once; less than `nbytes` if little is free."""
    return np.ones(max(min(nbytes, int(free_memory() * FREE_SHARE)), 1), np.uint8)
