"""Rank 0's view of the processes that compute an engine's model together with it, here and on other machines."""

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from enginewright import _cpu
from enginewright.errors import EngineError
from enginewright.rank_plan import exchange_bytes
from enginewright.runtime import env
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.cpu.executor import choose_isa
from enginewright.runtime.device.machine import cpus_of_ranks
from enginewright.runtime.device.memory_plan import MemoryPlan, plan_memory
from enginewright.runtime.device.ranks.member import TIMEOUT_S, RankLostError, Ranks, weight_columns
from enginewright.runtime.device.ranks.mesh import close_all, ranks_of_node
from enginewright.runtime.device.ranks.messages import Failed, Settings
from enginewright.runtime.device.ranks.nodes import Node, Nodes
from enginewright.runtime.device.ranks.processes import RankProcess, end_processes, start_processes, threads_of_rank
from enginewright.runtime.device.ranks.watch import Member, Watch, error_of
from enginewright.runtime.engine import Engine


class RankGroup:
    """The processes of ranks 1 to N - 1, which are started with the group and ended with it.

    Args:
        engine: the open engine.
        config: limits; `tensor_parallel_size` is the number of ranks, and `threads` the threads of each.

    Raises:
        EngineError: the processes cannot be started, or another machine does not come.
    """

    def __init__(self, engine: Engine, config: RuntimeConfig) -> None:
        self._own = ranks_of_node(0, config.nnodes, config.tensor_parallel_size)
        threads, isa = config.threads or env.num_threads(), choose_isa(config.isa or env.cpu_isa())
        self.config = replace(config, threads=threads or threads_of_rank(len(self._own)), isa=isa)
        memory_plan = plan_memory(engine.plan, self.config, engine.weight_bytes)
        self._settings = _settings(engine, config, memory_plan, isa, threads)
        self.cpus = cpus_of_ranks(len(self._own))[0]
        self._tell: Callable[[EngineError], None] | None = None  # what to call when the group fails
        self._nodes: Nodes | None = None
        if config.nnodes == 1:
            exchange, members = self._on_one_machine(str(engine.file.path))
        else:
            exchange, members = self._on_several_machines(engine, config)
        self.ranks = Ranks(exchange, memory_plan, 0, config.tensor_parallel_size)
        self._watch = Watch(members, self.ranks.check, self._fail)

    def wait_until_ready(self) -> None:
        """Waits until all ranks have opened the engine.

        Raises:
            RankLostError: one of them cannot; the message is its own.
        """
        self._watch.wait_until_ready()

    def send(self, message: msgspec.Struct) -> None:
        """Sends a step to all other ranks.

        Raises:
            RankLostError: one of them is lost.
        """
        self._watch.send(message)

    def reason(self, error: RankLostError) -> RankLostError:
        """Finds out why a step has failed; see `Watch.reason`."""
        return self._watch.reason(error)

    def on_failure(self, failed: Callable[[EngineError], None]) -> None:
        """Calls `failed` once the group fails, from another thread, or now if it has failed."""
        self._tell = failed
        failure = self._watch.failure
        if failure is not None:
            failed(failure)

    def close(self) -> None:
        """Ends the processes."""
        self._tell = None
        self.ranks.exchange.fail(0, "the engine is closed")  # a rank that waits for this one does not need to
        if self._nodes is not None:
            self._nodes.close()
        self._watch.close()
        self.ranks.exchange.close()

    def _on_one_machine(self, path: str) -> tuple[Any, Sequence[Member]]:
        settings = self._settings
        memory = os.memfd_create("enginewright-ranks", os.MFD_CLOEXEC)
        try:
            os.ftruncate(memory, _cpu.SharedRanks.bytes_needed(settings.size, settings.slot_bytes))
            exchange = _cpu.SharedRanks(memory, 0, settings.size, settings.slot_bytes, TIMEOUT_S)
            return exchange, start_processes(settings, path, self._own, memory=memory)
        finally:
            os.close(memory)

    def _on_several_machines(self, engine: Engine, config: RuntimeConfig) -> tuple[Any, Sequence[Member]]:
        nodes = self._nodes = Nodes(engine, config)
        joined: Sequence[Node] = ()
        sockets: Sequence[Sequence[socket.socket | None]] = ()
        processes: Sequence[RankProcess] = ()
        try:
            joined = nodes.gather()
            sockets = nodes.assemble(joined, self._settings)
            processes = start_processes(self._settings, str(engine.file.path), self._own, sockets=sockets)
            descriptors = [-1 if one is None else one.fileno() for one in sockets[0]]
            exchange = _cpu.SocketRanks(descriptors, 0, self._settings.slot_bytes, TIMEOUT_S)
        except BaseException:
            nodes.close()
            for node in joined:
                node.frames.shutdown()
                node.close()
            end_processes(processes)
            raise
        finally:
            close_all(sockets)
        return exchange, [*processes, *joined]

    def _fail(self, member: Member | None, failed: Failed) -> None:
        why = failed.what if not failed.why else f"{failed.what}: {failed.why}"
        self.ranks.exchange.fail(0 if member is None else member.rank, why)
        tell = self._tell
        if tell is not None:
            tell(error_of(failed))
        if self._nodes is not None:
            self._nodes.close()  # other machines wait then for the next group


def _settings(
    engine: Engine, config: RuntimeConfig, memory_plan: MemoryPlan, isa: str, threads: int | None
) -> Settings:
    size = config.tensor_parallel_size
    slot_bytes = exchange_bytes(engine.plan, memory_plan.limits, size, lambda name: weight_columns(engine, name))
    return Settings(engine.manifest.content_hash, size, memory_plan, slot_bytes, isa, threads, config.mmap)
