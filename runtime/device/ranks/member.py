"""The processes that compute a model together, as the executor of one of them sees them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from enginewright.errors import EngineError
from enginewright.rank_layout import Channel, RankLayout, WeightSizes
from enginewright.runtime.device.cpu.weight_parts import columns_of
from enginewright.runtime.device.memory_plan import MemoryPlan
from enginewright.runtime.engine import Engine

# Maximum seconds that ranks wait for each other in a step. A rank may take long, such as one that reads its weights
# from a cold disk; one that has stopped is found much earlier (watch.py).
TIMEOUT_S = 600.0


class RankLostError(EngineError):
    """One of the processes that compute a model together has ended, or does not answer."""

    is_shown_by_health = True


@dataclass(frozen=True)
class Ranks:
    """The processes that compute a model together, from the view of one of them."""

    exchanges: Mapping[str, Any]  # purpose of a channel → `_cpu.SharedRanks` or `_cpu.SocketRanks` of this rank
    channels: Mapping[str, Channel]  # purpose → the channel
    memory_plan: MemoryPlan  # sizes of memory, the same for all ranks
    rank: int  # this one
    layout: RankLayout  # arrangement of all ranks

    def check(self) -> None:
        """Checks that the exchanges of a step have ended well.

        Raises:
            RankLostError: a rank has ended, or does not answer; the message names it.
        """
        for purpose, exchange in self.exchanges.items():
            try:
                exchange.check()
            except RuntimeError as error:
                why = str(error)
                ranks = self.channels[purpose].ranks
                if ranks != tuple(range(len(ranks))):  # the C++ code counts from 0 in each channel
                    why = f"{why}, where 0 to {len(ranks) - 1} are ranks {', '.join(map(str, ranks))}"
                raise RankLostError("the ranks of the engine have stopped", why, "Start it again.") from error

    def fail(self, rank: int, why: str) -> None:
        """Fails all exchanges, so that no rank waits for another one any more.

        Args:
            rank: the rank that is the reason.
            why: the reason.
        """
        for purpose, exchange in self.exchanges.items():
            ranks = self.channels[purpose].ranks
            exchange.fail(ranks.index(rank if rank in ranks else self.rank), why)

    def close(self) -> None:
        """Leaves all exchanges, which fail for the other ranks."""
        for exchange in self.exchanges.values():
            exchange.close()


def weight_columns(engine: Engine, name: str) -> int:
    """Columns of a weight; of a vector, its numbers.

    Args:
        engine: the engine.
        name: name of the weight.
    """
    return columns_of(engine.weight(name)[1])


def weight_sizes(engine: Engine) -> WeightSizes:
    """Sizes of the weights of an engine."""
    return WeightSizes(lambda name: weight_columns(engine, name), lambda name: engine.weight(name)[1].nbytes)
