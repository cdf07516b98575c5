"""Results of a pipeline's last stage, as rank 0 receives them."""

from enginewright import _cpu
from enginewright.plan import HIDDEN, Plan, StepSizes
from enginewright.rank_layout import RESULTS
from enginewright.rank_plan import ROOT
from enginewright.runtime.device.ranks.member import Ranks
from enginewright.runtime.step.inputs import StepOutputs


class Results:
    """Memory for the outputs of a step, apart from that of the first stage, which computes later steps meanwhile.

    Args:
        plan: the plan of the engine.
        ranks: rank 0's view of the group.
        isa: instruction set.
    """

    def __init__(self, plan: Plan, ranks: Ranks, isa: str) -> None:
        limits, outputs = ranks.memory_plan.limits, plan.outputs
        offsets, arena_bytes = dict[int, int](), 0
        for index in outputs.values():
            offsets[index] = arena_bytes
            arena_bytes += plan.buffers[index].bytes_at(limits)
        self._ranks = ranks
        self._executor = _cpu.Executor(isa, 1, limits.counts, [], arena_bytes)
        for index, offset in offsets.items():  # in the order of send_results
            buffer = plan.buffers[index]
            operand = _cpu.OperandSpec.arena(
                offset, buffer.dtype, buffer.rows.by_position(plan.dims), buffer.columns, buffer.stride, 0, 0
            )
            self._executor.add_all_gather(operand, buffer.columns, ROOT, ranks.exchanges[RESULTS])
        self._views = {}
        for name, index in outputs.items():
            buffer = plan.buffers[index]
            rows = buffer.rows.at(limits)
            self._views[name] = self._executor.buffer(offsets[index], rows, buffer.columns, buffer.stride, buffer.dtype)
        self._result = plan.result_name

    def receive(self, sizes: StepSizes) -> StepOutputs:
        """Waits for the results of the oldest step under way.

        Args:
            sizes: the sizes of this step.

        Returns:
            Views of memory that the next call overwrites.

        Raises:
            RankLostError: a rank has ended, or does not answer.
        """
        self._executor.run([], sizes.counts)
        self._ranks.check()
        hidden = self._views.get(HIDDEN)
        result = self._views[self._result][: sizes.logit_rows]
        return StepOutputs(result, None if hidden is None else hidden[: sizes.tokens])
