"""Arranges the ranks that compute a model: in stages of layers, and in each stage ranks that divide its layers."""

from collections.abc import Callable
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from enginewright.plan import BufferOperand, KernelCall, Plan, StepSizes
from enginewright.rank_plan import ROOT, exchange_bytes, plan_of_rank
from enginewright.stage_plan import SEND, bytes_between_stages, bytes_of, plan_of_stage

# Channels of a rank, by their purposes: exchanges with the ranks of its stage, what it receives from the stage before,
# what it sends to the next stage, and results from the last stage to rank 0.
GATHER, PREVIOUS, NEXT, RESULTS = "gather", "previous", "next", "results"


class WeightSizes(NamedTuple):
    """Sizes of weights, by their names."""

    columns: Callable[[str], int]  # columns of a weight; of a vector, its numbers
    nbytes: Callable[[str], int]  # bytes of a weight


class Channel(msgspec.Struct, frozen=True):
    """A connection of some ranks."""

    purpose: str  # GATHER, NEXT (for its other end, PREVIOUS), or RESULTS
    ranks: tuple[int, ...]  # the ranks; of NEXT and RESULTS first the one that receives, then the one that sends
    slot_bytes: int = 0  # maximum number of bytes that one of them sends in an exchange

    def purpose_for(self, rank: int) -> str:
        """The use that one of the ranks makes of it."""
        return PREVIOUS if self.purpose == NEXT and rank == self.ranks[0] else self.purpose


class RankLayout(msgspec.Struct, frozen=True):
    """Numbers of stages and of ranks in each: rank r is part r % tensor of stage r // tensor."""

    tensor: int = 1  # number of ranks that compute the layers of a stage together
    pipeline: int = 1  # number of stages

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.tensor * self.pipeline

    def channels(self) -> list[Channel]:
        """Lists all connections, without the sizes of their slots."""
        found = []
        for stage in range(self.pipeline):
            first = stage * self.tensor
            if self.tensor > 1:
                found.append(Channel(GATHER, tuple(range(first, first + self.tensor))))
            if stage:
                found += [Channel(NEXT, (rank, rank - self.tensor)) for rank in range(first, first + self.tensor)]
        if self.pipeline > 1:
            found.append(Channel(RESULTS, (ROOT, self.size - self.tensor)))
        return found

    def plan(self, plan: Plan, rank: int, sizes: WeightSizes) -> Plan:
        """Makes the plan that one of the ranks runs.

        Args:
            plan: the plan of an engine for CPUs, perhaps with adapters.
            rank: the rank.
            sizes: sizes of the weights.

        Raises:
            UsageError: the plan cannot be divided into so many stages.
        """
        stage, part = divmod(rank, self.tensor)
        whole = plan_of_stage(plan, stage, self.pipeline, sizes.nbytes)
        cut = plan_of_rank(whole, part, self.tensor, sizes.columns)
        if self.pipeline > 1 and stage == self.pipeline - 1 and part == ROOT:
            cut = replace(cut, calls=(*cut.calls, *send_results(cut)))
        return cut

    def sized_channels(self, plan: Plan, limits: StepSizes, sizes: WeightSizes) -> tuple[Channel, ...]:
        """Lists all connections with the sizes of their slots.

        Args:
            plan: the plan of the engine.
            limits: sizes of the largest step.
            sizes: sizes of the weights.
        """
        stages = [plan_of_stage(plan, stage, self.pipeline, sizes.nbytes) for stage in range(self.pipeline)]
        most = {
            GATHER: max(exchange_bytes(stage, limits, self.tensor, sizes.columns) for stage in stages),
            NEXT: max(bytes_between_stages(stage, limits) for stage in stages),
            RESULTS: max(bytes_of(plan, call.operands["x"], limits) for call in send_results(plan)),
        }
        return tuple(replace(channel, slot_bytes=most[channel.purpose]) for channel in self.channels())


ONE_RANK = RankLayout()


def send_results(plan: Plan) -> list[KernelCall]:
    """Makes the calls that send the outputs of a plan to rank 0, which receives them in the same order."""
    columns = {index: plan.buffers[index].columns for index in plan.outputs.values()}
    return [KernelCall(SEND, {"x": BufferOperand(index, 0, columns[index])}, {"to": RESULTS}) for index in columns]
