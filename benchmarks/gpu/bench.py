"""The GPU that is measured: our device and torch on one stream, compiled kernels, and time by events."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Protocol

import torch

from enginewright.builder.cuda import Compiled, Instance, compile_each
from enginewright.code import CompiledKernel
from enginewright.runtime.device.cuda.device import CudaDevice, Device
from enginewright.targets import SMS, choose_code

ROUNDS = 7
CACHES = 3  # times the L2 cache: bytes that a round goes through before it comes back
Work = Callable[[], object]


@dataclass(frozen=True)
class Replay:
    """Begins some runs on the GPU at once: of works, which have the memory that is used."""

    begin: Work
    works: list[Work]


class Bench(Protocol):
    """at: torch's name of the device. l2_bytes: of its cache. rounds: of measurements. sm: whose code it runs."""

    at: str
    l2_bytes: int
    rounds: int

    @property
    def sm(self) -> str: ...
    @property
    def device(self) -> Device: ...
    def compile(self, kernels: Iterable[Instance]) -> None:
        """Kernels that are launched from now on, by their expressions."""
        ...

    def ours(self, works: list[Work]) -> Replay: ...
    def torch(self, works: list[Work]) -> Replay: ...
    def seconds(self, replay: Replay) -> float:
        """Seconds of one run."""
        ...


class GpuBench:
    def __init__(self) -> None:
        self.device = CudaDevice()
        self.at = "cuda"
        self.l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
        self.rounds = ROUNDS
        self._stream = torch.cuda.ExternalStream(self.device.stream)
        torch.cuda.set_stream(self._stream)
        self._compiled: dict[str, Compiled] = {}
        self.device.code = lambda name: (self._compiled[name].cubin, CompiledKernel(self._compiled[name].symbol))

    @cached_property
    def sm(self) -> str:
        return choose_code(self.device.capability, SMS)

    def compile(self, kernels: Iterable[Instance]) -> None:
        made = compile_each([(self.sm, kernel) for kernel in dict.fromkeys(kernels)])
        self._compiled |= {kernel.expression: compiled for (_, kernel), compiled in made.items()}

    def ours(self, works: list[Work]) -> Replay:
        all_of(works)()
        self.device.synchronize()
        return Replay(self.device.capture(all_of(works)), works)

    def torch(self, works: list[Work]) -> Replay:
        all_of(works[:2])()  # what has to be chosen or loaded first is, once
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            all_of(works)()
        return Replay(graph.replay, works)

    def seconds(self, replay: Replay) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(self._stream)
        replay.begin()
        end.record(self._stream)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000 / len(replay.works)


def all_of(works: list[Work]) -> Callable[[], None]:
    def begin() -> None:
        for work in works:
            work()

    return begin


def copies(bench: Bench, nbytes: int, min_copies: int = 1, max_copies: int = 256) -> int:
    """Number of sets of operands of this size that a round uses in turn, so that none is in the cache."""
    return min(max(-(-CACHES * bench.l2_bytes // nbytes), min_copies), max_copies)


def interleaved(bench: Bench, contestants: Mapping[str, Replay], rounds: int | None = None) -> dict[str, list[float]]:
    """Seconds of a run of each contestant, a round; every round goes through all of them."""
    for replay in contestants.values():
        bench.seconds(replay)
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds or bench.rounds):
        for name, replay in contestants.items():
            found[name].append(bench.seconds(replay))
    return found


def ratio(over: list[float], under: list[float]) -> float:
    """The median of ratios within a round."""
    return median(a / b for a, b in zip(over, under, strict=True))
