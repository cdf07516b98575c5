"""GPUs that compute one model together, as the executor of one of them sees them.

Each has a plan of its own, made in the build (builder/lower/ranks.py), and runs the same steps. In an exchange
(all_gather@1) a rank copies its part to a buffer, a carrier brings every rank's buffer to the others, and kernels copy
them to where they belong. The host knows the sizes of all buffers before a step, so nothing waits for the GPU.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from enginewright.plan import BufferOperand, KernelCall, Plan
from enginewright.rank_plan import PACKED
from enginewright.runtime.device.cuda.upload import range_bytes, weight_parts
from enginewright.runtime.device.memory_plan import MemoryPlan
from enginewright.runtime.engine import Engine


class Packed(NamedTuple):
    """A buffer with the part of a rank, at the same place of an exchange on each rank that has it."""

    address: int  # address in this GPU's memory
    row_bytes: int  # bytes of a row; rows follow each other


class Carrier(Protocol):
    """Brings the parts of an exchange from rank to rank, in the order of the device's stream."""

    def exchange(self, parts: Mapping[int, Packed], root: int) -> Callable[[int], None]:
        """Prepares an exchange; all ranks prepare the same ones in the same order.

        Args:
            parts: rank → its part; those that this rank neither sends nor receives may be missing.
            root: the rank that receives all parts, or EVERY.

        Returns:
            A function that queues it, for a number of rows.
        """
        ...


@dataclass(frozen=True)
class DeviceRanks:
    """The GPUs that compute the model together, from the view of one of them."""

    carrier: Carrier  # carrier of this rank
    rank: int  # this one
    size: int  # number of ranks
    memory_plan: MemoryPlan  # sizes of memory, the same for all ranks


def packed_parts(plan: Plan, call: KernelCall, addresses: list[int]) -> dict[int, Packed]:
    """Finds the buffers of an exchange.

    Args:
        plan: the plan of a rank.
        call: a call of ALL_GATHER.
        addresses: address of each buffer.

    Returns:
        Rank → the buffer of its part.
    """
    found = {}
    for role, operand in call.operands.items():
        if role.startswith(PACKED) and isinstance(operand, BufferOperand):
            buffer = plan.buffers[operand.index]
            rank = int(role.removeprefix(PACKED))
            found[rank] = Packed(addresses[operand.index], buffer.stride * buffer.element_bytes)
    return found


def rank_weight_bytes(engine: Engine) -> int:
    """Computes the bytes of the weights that a rank loads, with those of drafts, which rank 0 computes whole.

    Args:
        engine: the open engine, with the plan of the rank.
    """
    parts = weight_parts(engine)
    of_drafts = {name for role in engine.manifest.roles for name in engine.for_role(role).plan.weight_names()}
    whole = sum(engine.weight(name)[1].nbytes for name in of_drafts - parts.keys())
    return whole + sum(range_bytes(ranges) for _, ranges in parts.values())
