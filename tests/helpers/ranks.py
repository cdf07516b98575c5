"""All ranks of an engine in one process, each in a thread: what they compute, without the processes around it."""

import os
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from types import MappingProxyType
from typing import Any

import msgspec

from enginewright import _cpu
from enginewright.adapter_file import AdapterFile
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.adapters import model_plan
from enginewright.runtime.device.cpu.executor import CpuExecutor
from enginewright.runtime.device.memory_plan import plan_memory
from enginewright.runtime.device.ranks.adapters import AdapterReceiver, messages_of
from enginewright.runtime.device.ranks.carriers import channels_of
from enginewright.runtime.device.ranks.member import Ranks, weight_sizes
from enginewright.runtime.device.ranks.messages import Order, Ping, Step, UnloadAdapter, decode, encode
from enginewright.runtime.device.ranks.results import Results
from enginewright.runtime.engine import Engine
from enginewright.runtime.step.inputs import StepInputs, StepOutputs

TIMEOUT_S = 60.0


class RanksInThreads(CpuExecutor):
    """Rank 0 of an engine, and its other ranks in threads of this process.

    Args:
        engine: the open engine.
        config: limits; `rank_layout` says how many ranks there are.
        weights: as for CpuExecutor.
    """

    def __init__(
        self, engine: Engine, config: RuntimeConfig, weights: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        layout, whole = config.rank_layout, model_plan(engine, config)
        plan = plan_memory(whole, config)
        channels = layout.sized_channels(whole, plan.limits, weight_sizes(engine))
        exchanges: list[dict[str, _cpu.Ranks]] = [{} for _ in range(layout.size)]
        for channel in channels:
            for rank, exchange in zip(
                channel.ranks, self.exchanges(len(channel.ranks), channel.slot_bytes), strict=True
            ):
                exchanges[rank][channel.purpose_for(rank)] = exchange
        mine, *others = [
            Ranks(own, channels_of(channels, rank), plan, rank, layout) for rank, own in enumerate(exchanges)
        ]
        self.others = [CpuExecutor(engine, config, ranks=ranks) for ranks in others]
        self._receivers = [AdapterReceiver(other) for other in self.others]
        self._threads = ThreadPoolExecutor(max(len(others), 1))
        super().__init__(engine, config, weights, mine)
        self._results = Results(engine.plan, mine, self.isa) if layout.pipeline > 1 else None

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
        if self._results is not None:
            outputs = self._results.receive(inputs.sizes)
        for one in running:
            one.result()
        return outputs

    def load_adapter(self, slot: int, adapter: AdapterFile) -> None:
        """Loads an adapter on all ranks, which get it as messages."""
        for message in messages_of(slot, adapter):
            self._send(encode(message))
        super().load_adapter(slot, adapter)

    def unload_adapter(self, slot: int) -> None:
        """Empties a slot on all ranks."""
        self._send(encode(UnloadAdapter(slot)))
        super().unload_adapter(slot)

    def _send(self, message: bytes) -> None:
        for receiver in self._receivers:
            order = decode(message, msgspec.msgpack.Decoder(Order))
            assert not isinstance(order, Step | Ping)
            receiver.follow(order)

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
