"""The processes that compute a model together, as the executor of one of them sees them."""

from dataclasses import dataclass
from typing import Any

from enginewright.errors import EngineError
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

    exchange: Any  # `_cpu.SharedRanks` or `_cpu.SocketRanks`, over which activations move
    memory_plan: MemoryPlan  # sizes of memory, the same for all ranks
    rank: int  # this one
    size: int  # number of ranks

    def check(self) -> None:
        """Checks that the exchanges of a step have ended well.

        Raises:
            RankLostError: a rank has ended, or does not answer; the message names it.
        """
        try:
            self.exchange.check()
        except RuntimeError as error:
            raise RankLostError("the ranks of the engine have stopped", str(error), "Start it again.") from error


def weight_columns(engine: Engine, name: str) -> int:
    """Columns of a weight; of a vector, its numbers.

    Args:
        engine: the engine.
        name: name of the weight.
    """
    return columns_of(engine.weight(name)[1])
