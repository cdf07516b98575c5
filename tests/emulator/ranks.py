"""Emulated GPUs that compute one model together, all in one thread: a device runs until it waits for another one."""

import ctypes
from collections.abc import Callable, Mapping
from typing import NamedTuple

from enginewright.plugins.kernel import Specialization
from enginewright.rank_plan import EVERY
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.cuda.executor import CudaExecutor, plan_memory_of_ranks
from enginewright.runtime.device.cuda.ranks import DeviceRanks, Packed
from enginewright.runtime.device.ranks.messages import Step
from enginewright.runtime.engine import Engine
from enginewright.runtime.step.inputs import StepInputs, StepOutputs
from tests.emulator.device import EmulatedDevice


class _Exchange(NamedTuple):
    index: int  # which exchange of the plan
    rows: int
    root: int
    parts: Mapping[int, Packed]


class EmulatedGroup:
    """The devices of all ranks, and the exchanges that each has come to."""

    def __init__(self, devices: list[EmulatedDevice]) -> None:
        self.devices = devices
        self._came: list[list[_Exchange]] = [[] for _ in devices]
        self.done = 0  # exchanges
        self.moved_bytes = 0

    def come(self, rank: int, exchange: _Exchange) -> None:
        """Is called as work of a device: lets all others come to the same exchange, and then moves the bytes."""
        self._came[rank].append(exchange)
        number = len(self._came[rank])
        for other, device in enumerate(self.devices):
            while len(self._came[other]) < number:
                device.do_next()
        if self.done < number:
            self.done = number
            self._move([came[number - 1] for came in self._came])

    def _move(self, exchanges: list[_Exchange]) -> None:
        assert len({one[:3] for one in exchanges}) == 1, f"ranks are at different exchanges: {exchanges}"
        for source, one in enumerate(exchanges):
            if source not in one.parts:
                continue
            for rank, other in enumerate(exchanges):
                if rank != source and one.root in (EVERY, rank):
                    assert other.parts[source].row_bytes == one.parts[source].row_bytes
                    nbytes = one.rows * one.parts[source].row_bytes
                    ctypes.memmove(other.parts[source].address, one.parts[source].address, nbytes)
                    self.moved_bytes += nbytes


class EmulatedCarrier:
    """The carrier of one rank."""

    def __init__(self, group: EmulatedGroup, rank: int) -> None:
        self._group, self._rank = group, rank
        self._prepared = 0

    def exchange(self, parts: Mapping[int, Packed], root: int) -> Callable[[int], None]:
        index, self._prepared = self._prepared, self._prepared + 1
        device = self._group.devices[self._rank]

        def run(rows: int) -> None:
            device.ask(lambda: self._group.come(self._rank, _Exchange(index, rows, root, parts)))

        return run


class RanksOnDevices(CudaExecutor):
    """Rank 0 of an engine on an emulated GPU, and its other ranks on others."""

    def __init__(self, engine: Engine, kernels: Mapping[str, Specialization], config: RuntimeConfig, size: int) -> None:
        self.group = EmulatedGroup([EmulatedDevice(kernels) for _ in range(size)])
        carriers = [EmulatedCarrier(self.group, rank) for rank in range(size)]
        first, *devices = self.group.devices
        memory_plan = plan_memory_of_ranks(engine, first, config, size)
        super().__init__(engine.for_rank(0, size), first, config, ranks=DeviceRanks(carriers[0], 0, size, memory_plan))
        self.others = []
        for rank, device in enumerate(devices, 1):
            ranks = DeviceRanks(carriers[rank], rank, size, memory_plan)
            self.others.append(CudaExecutor(engine.for_rank(rank, size), device, config, ranks=ranks))

    def run(self, inputs: StepInputs) -> StepOutputs:
        """Queues a step on all ranks, which get it as a message."""
        names = [entry.name for entry in self.plan.inputs]
        for other in self.others:
            other.run(Step.of(inputs, names).inputs(self.plan.dims, names))
        return super().run(inputs)

    def warm_up(self) -> None:
        for executor in (*self.others, super()):
            executor.warm_up()
