"""Rank 0's view of the processes that compute an engine's model together with it, here and on other machines."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from enginewright.errors import EngineError
from enginewright.runtime import env
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.adapters import model_plan, num_slots
from enginewright.runtime.device.cpu.executor import choose_isa
from enginewright.runtime.device.machine import cpus_of_ranks
from enginewright.runtime.device.memory_plan import MemoryPlan, plan_memory
from enginewright.runtime.device.ranks.carriers import Carriers, channels_of, open_exchanges
from enginewright.runtime.device.ranks.member import RankLostError, Ranks, weight_sizes
from enginewright.runtime.device.ranks.mesh import ranks_of_node
from enginewright.runtime.device.ranks.messages import Failed, Settings
from enginewright.runtime.device.ranks.nodes import Node, Nodes
from enginewright.runtime.device.ranks.processes import start_processes, threads_of_rank
from enginewright.runtime.device.ranks.watch import Member, Watch, error_of
from enginewright.runtime.engine import Engine


class RankGroup:
    """The processes of ranks 1 to N - 1, which are started with the group and ended with it.

    Args:
        engine: the open engine.
        config: limits; `rank_layout` says how many ranks there are, and `threads` are the threads of each.

    Raises:
        EngineError: the processes cannot be started, or another machine does not come.
    """

    def __init__(self, engine: Engine, config: RuntimeConfig) -> None:
        self._own = ranks_of_node(0, config.nnodes, config.num_ranks)
        threads, isa = config.threads or env.num_threads(), choose_isa(config.isa or env.cpu_isa())
        self.config = replace(config, threads=threads or threads_of_rank(len(self._own)), isa=isa)
        memory_plan = plan_memory(model_plan(engine, config), self.config, engine.weight_bytes)
        self._settings = _settings(engine, config, memory_plan, isa, threads)
        self.cpus = cpus_of_ranks(len(self._own))[0]
        self._tell: Callable[[EngineError], None] | None = None  # what to call when the group fails
        self._nodes: Nodes | None = None
        exchanges, members = self._start(engine, config)
        channels = channels_of(self._settings.channels, 0)
        self.ranks = Ranks(exchanges, channels, memory_plan, 0, self._settings.layout)
        self._watch = Watch(members, self.ranks.check, self._fail)

    def wait_until_ready(self) -> None:
        """Waits until all ranks have opened the engine.

        Raises:
            RankLostError: one of them cannot; the message is its own.
        """
        self._watch.wait_until_ready()

    def send(self, message: msgspec.Struct) -> None:
        """Sends a step, or something about adapters, to all other ranks.

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
        self.ranks.fail(0, "the engine is closed")  # a rank that waits for this one does not need to
        if self._nodes is not None:
            self._nodes.close()
        self._watch.close()
        if self._nodes is not None:
            self._nodes.end_actors()
        self.ranks.close()

    def _start(self, engine: Engine, config: RuntimeConfig) -> tuple[dict[str, Any], Sequence[Member]]:
        """Waits for other machines, and starts the processes here. Returns rank 0's exchanges, and the members."""
        settings = self._settings
        carriers, joined = Carriers(settings.channels), list[Node]()
        try:
            if config.nnodes == 1:
                carriers.share_memory(self._own)
            else:
                self._nodes = Nodes(engine, config)
                joined += self._nodes.gather()
                carriers = self._nodes.assemble(joined, settings)
            exchanges = open_exchanges(settings.channels, 0, carriers.of_rank(0))
            return exchanges, [*start_processes(settings, str(engine.file.path), self._own, carriers), *joined]
        except BaseException:
            if self._nodes is not None:
                self._nodes.close()
                self._nodes.end_actors()
            for node in joined:
                node.frames.shutdown()
                node.close()
            raise
        finally:
            carriers.close()

    def _fail(self, member: Member | None, failed: Failed) -> None:
        why = failed.what if not failed.why else f"{failed.what}: {failed.why}"
        self.ranks.fail(0 if member is None else member.rank, why)
        tell = self._tell
        if tell is not None:
            tell(error_of(failed))
        if self._nodes is not None:
            self._nodes.close()  # other machines wait then for the next group


def _settings(
    engine: Engine, config: RuntimeConfig, memory_plan: MemoryPlan, isa: str, threads: int | None
) -> Settings:
    layout, limits, content_hash = config.rank_layout, memory_plan.limits, engine.manifest.content_hash
    channels = layout.sized_channels(model_plan(engine, config), limits, weight_sizes(engine))
    of_adapters = num_slots(engine, config) if config.enable_lora else 0, config.max_lora_rank
    return Settings(content_hash, layout, channels, memory_plan, isa, threads, config.mmap, *of_adapters)
