"""All ranks of an engine in one process, each in a thread: what they compute, without the processes around it."""

import os
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import combinations
from types import MappingProxyType
from typing import Any

from enginewright import _cpu
from enginewright.rank_plan import exchange_bytes
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.cpu.executor import CpuExecutor
from enginewright.runtime.device.memory_plan import plan_memory
from enginewright.runtime.device.ranks.member import Ranks, weight_columns
from enginewright.runtime.device.ranks.messages import Step
from enginewright.runtime.engine import Engine
from enginewright.runtime.step.inputs import StepInputs, StepOutputs

TIMEOUT_S = 60.0


class RanksInThreads(CpuExecutor):
    """Rank 0 of an engine, and its other ranks in threads of this process.

    Args:
        engine: the open engine.
        config: limits; `tensor_parallel_size` is the number of ranks.
        weights: as for CpuExecutor.
    """

    def __init__(
        self, engine: Engine, config: RuntimeConfig, weights: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        size = config.tensor_parallel_size
        plan = plan_memory(engine.plan, config)
        slot_bytes = exchange_bytes(engine.plan, plan.limits, size, partial(weight_columns, engine))
        exchanges = self.exchanges(size, slot_bytes)
        mine, *others = [Ranks(exchange, plan, rank, size) for rank, exchange in enumerate(exchanges)]
        self.others = [CpuExecutor(engine, config, ranks=ranks) for ranks in others]
        self._threads = ThreadPoolExecutor(max(len(others), 1))
        super().__init__(engine, config, weights, mine)

    @staticmethod
    def exchanges(size: int, slot_bytes: int) -> list[_cpu.Ranks]:
        """The exchange of each rank, over shared memory."""
        memory = os.memfd_create("ranks")
        os.ftruncate(memory, _cpu.SharedRanks.bytes_needed(size, slot_bytes))
        made: list[_cpu.Ranks] = [_cpu.SharedRanks(memory, rank, size, slot_bytes, TIMEOUT_S) for rank in range(size)]
        os.close(memory)
        return made

    def run(self, inputs: StepInputs) -> StepOutputs:
        """Runs a step on all ranks, which get it as a message."""
        received = Step.of(inputs, self._inputs).inputs(self.plan.dims, self._inputs)
        running = [self._threads.submit(other.run, received) for other in self.others]
        outputs = super().run(inputs)
        for one in running:
            one.result()
        return outputs

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown()


class RanksOverSockets(RanksInThreads):
    """The same over a pair of sockets for each two ranks."""

    @staticmethod
    def exchanges(size: int, slot_bytes: int) -> list[_cpu.Ranks]:
        """The exchange of each rank, over sockets."""
        descriptors = [[-1] * size for _ in range(size)]
        pairs = {two: socket.socketpair() for two in combinations(range(size), 2)}
        for (first, second), (one, other) in pairs.items():
            descriptors[first][second], descriptors[second][first] = one.fileno(), other.fileno()
        made: list[_cpu.Ranks] = [
            _cpu.SocketRanks(own, rank, slot_bytes, TIMEOUT_S) for rank, own in enumerate(descriptors)
        ]
        for one, other in pairs.values():
            one.close()
            other.close()
        return made
