"""The GPU benchmark's bench in emulation."""

from collections.abc import Iterable

from benchmarks.gpu.bench import Replay, Work, all_of
from benchmarks.gpu.roofline import Roofline
from enginewright.builder.cuda import Instance
from enginewright.plugins.kernel import Specialization
from tests.emulator.device import EmulatedDevice


class EmulatedBench:
    """A GpuBench on the emulated GPU; its seconds mean nothing."""

    at, l2_bytes, rounds, sm = "cpu", 1000, 1, "sm_90a"

    def __init__(self) -> None:
        self.kernels: dict[str, Specialization] = {}
        self.device = EmulatedDevice(self.kernels)

    def compile(self, kernels: Iterable[Instance]) -> None:
        self.kernels |= {kernel.expression: Specialization(kernel.source, kernel.expression) for kernel in kernels}

    def ours(self, works: list[Work]) -> Replay:
        all_of(works)()
        self.device.synchronize()
        return Replay(self.device.capture(all_of(works)), works)

    def torch(self, works: list[Work]) -> Replay:
        works[0]()
        return Replay(all_of(works), works)

    def seconds(self, replay: Replay) -> float:
        replay.begin()
        self.device.synchronize()
        return 1e-3


ROOFLINE = Roofline(4e12, 3e12, 8e14)
