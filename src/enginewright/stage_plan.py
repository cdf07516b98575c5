"""Cuts a plan into the stages of a pipeline: calls in a row, each stage with the weights and caches of its own layers.

A stage receives what the stages before it have computed and it reads, mostly one hidden state for each token, and sends
on what later stages read. No number is computed otherwise than in one process, so answers have the same bits on any
number of stages. Several steps are under way at a time, each of other sequences, so that all stages have work
(https://arxiv.org/abs/1811.06965); the scheduler takes care of that.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise

from msgspec.structs import replace

from enginewright.adapter_plan import GROUP_KERNEL, HEAD_KERNEL, KERNEL, TABLE_KERNEL
from enginewright.errors import UsageError
from enginewright.plan import BufferOperand, CacheGroup, CacheOperand, KernelCall, Plan, StepSizes, WeightOperand
from enginewright.rank_plan import outputs

# Kernels that send a buffer to the next stage, or to rank 0 with the attribute `to`, or receive one from the stage
# before. No op of a graph has them.
SEND, RECEIVE = "send@1", "receive@1"
# Kernels that each stage runs which needs their results: these are computed from a step's inputs, at almost no cost.
_REPEATED = ("rope_table",)
_LOOKUPS = ("embed", "gather_rows")  # beginnings of kernels that read a few rows of their weights
# Cuts are where the fewest bytes cross them, unless the largest stage would be larger than necessary by this factor.
_BALANCE = 1.1

Columns = Mapping[int, tuple[int, int]]  # buffer → its first column, and the one after the last


def plan_of_stage(plan: Plan, stage: int, stages: int, weight_bytes: Callable[[str], int]) -> Plan:
    """Makes the plan of one stage of a pipeline.

    Args:
        plan: the plan of an engine for CPUs.
        stage: the stage; the last one computes the plan's outputs.
        stages: number of stages.
        weight_bytes: bytes of a weight, by its name.

    Returns:
        A plan with the caches in the same order. A cache group without layers in this stage keeps one that no kernel
        reads, since steps name groups by their place.

    Raises:
        UsageError: the plan has too few layers, or layers that cannot be apart.
    """
    if stages == 1:
        return plan
    cuts = _Cuts(plan, weight_bytes)
    begin, end = cuts.stage(stage, stages)
    calls = [
        *(call for call in plan.calls[:begin] if _is_repeated(call)),
        *(KernelCall(RECEIVE, {"out": operand}, {}) for operand in cuts.crossing(begin)),
        *plan.calls[begin:end],
        *(KernelCall(SEND, {"x": operand}, {}) for operand in cuts.crossing(end) if stage < stages - 1),
    ]
    touched = {one.layer for call in calls for one in call.operands.values() if isinstance(one, CacheOperand)}
    cut = replace(plan, calls=tuple(calls), caches=tuple(_with_layers(group, touched) for group in plan.caches))
    cut.check()
    return cut


def bytes_between_stages(plan: Plan, limits: StepSizes) -> int:
    """Computes the most bytes that a stage receives in one exchange of a step.

    Args:
        plan: the plan of the stage.
        limits: sizes of the largest step.
    """
    received = [call.operands["out"] for call in plan.calls if call.kernel == RECEIVE]
    return max((bytes_of(plan, operand, limits) for operand in received), default=0)


def bytes_of(plan: Plan, operand: object, sizes: StepSizes) -> int:
    """Computes the bytes of an operand in a buffer, without padding, in a step of these sizes."""
    assert isinstance(operand, BufferOperand), "only buffers are sent"
    buffer = plan.buffers[operand.index]
    return buffer.rows.at(sizes) * operand.columns * buffer.element_bytes


class _Cuts:
    """Places between two calls where a plan can be cut, by the number of calls before them."""

    def __init__(self, plan: Plan, weight_bytes: Callable[[str], int]) -> None:
        self.plan = plan
        self.read = _columns_read_after(plan)
        self.written = _buffers_written_before(plan)
        self.before = [0, *accumulate(_work(call, plan, weight_bytes) for call in plan.calls)]
        inside = _inside_caches(plan) | _inside_adapters(plan)
        self.places = [place for place in range(1, len(plan.calls)) if place not in inside]

    def crossing(self, place: int) -> list[BufferOperand]:
        """Buffers, or columns of them, that are computed before a place and read after it."""
        found = []
        for index, (begin, end) in sorted(self.read[place].items()):
            if index not in self.written[place]:
                continue
            buffer = self.plan.buffers[index]
            if buffer.dtype != "f32":  # kernels also read the padding, and the whole buffer has it
                begin, end = 0, buffer.columns
            found.append(BufferOperand(index, begin, end - begin))
        return found

    def bytes_of_token(self, place: int) -> int:
        """Bytes of a row that cross a place."""
        buffers = self.plan.buffers
        return sum(operand.columns * buffers[operand.index].element_bytes for operand in self.crossing(place))

    def stage(self, stage: int, stages: int) -> tuple[int, int]:
        """Finds the calls of a stage: the first one, and the end."""
        best = self._largest(self._divide(self.places, stages), stages)
        crossing = {place: self.bytes_of_token(place) for place in self.places}
        for limit in sorted(set(crossing.values())):
            chosen = self._divide([place for place in self.places if crossing[place] <= limit], stages)
            if len(chosen) == stages - 1 and self._largest(chosen, stages) <= _BALANCE * best:
                return ([0, *chosen][stage], [*chosen, len(self.plan.calls)][stage])
        raise AssertionError("all places together give the best division")

    def _divide(self, places: Sequence[int], stages: int) -> list[int]:
        """Chooses places so that the stage with the most work has as little as possible."""
        if len(places) < stages - 1:
            return []
        before = [self.before[place] for place in places]
        low, high = self.before[-1] // stages, self.before[-1]
        while low < high:
            middle = (low + high) // 2
            if self._fill(before, stages, middle) is None:
                low = middle + 1
            else:
                high = middle
        found = self._fill(before, stages, low)
        assert found is not None, "one stage may have all"
        return [places[index] for index in found]

    def _fill(self, before: Sequence[int], stages: int, most: int) -> list[int] | None:
        """Fills stages one after the other. Returns the index of the place after each but the last; None: too few.

        Args:
            before: work before each place, in order.
            stages: number of stages.
            most: maximum work of a stage.
        """
        chosen: list[int] = []
        for number in range(1, stages):
            begin = before[chosen[-1]] if chosen else 0
            first = chosen[-1] + 1 if chosen else 0
            last = len(before) - (stages - number)  # later stages need a place each
            index = min(bisect_right(before, begin + most) - 1, last)
            # Of places with the same work before them the first: nothing is computed twice or earlier than needed.
            index = max(bisect_left(before, before[index]), first) if index >= first else first
            if before[index] - begin > most:
                return None
            chosen.append(index)
        return chosen if self.before[-1] - before[chosen[-1]] <= most else None

    def _largest(self, chosen: Sequence[int], stages: int) -> int:
        if len(chosen) < stages - 1:
            raise UsageError(
                f"the model cannot be divided into {stages} stages",
                f"there are {len(self.places)} places between its kernels where it can be cut",
                "Use a smaller --pipeline-parallel-size.",
            )
        ends = [self.before[place] for place in (0, *chosen, len(self.plan.calls))]
        return max(end - begin for begin, end in pairwise(ends))


def _is_repeated(call: KernelCall) -> bool:
    return call.kernel.partition("@")[0] in _REPEATED


def _work(call: KernelCall, plan: Plan, weight_bytes: Callable[[str], int]) -> int:
    """Work of a call: bytes of the weights that it reads in a step that decodes.

    Those of the output head count half, since a prompt needs it for its last token alone.
    """
    if call.kernel.startswith(_LOOKUPS):
        return 0
    read = sum(weight_bytes(one.name) for one in call.operands.values() if isinstance(one, WeightOperand))
    rows = {
        dim for role, one in _buffers(call) if role in outputs(call) for dim, _ in plan.buffers[one.index].rows.terms
    }
    return read // 2 if rows == {"logit_rows"} else read


def _with_layers(group: CacheGroup, layers: Iterable[int]) -> CacheGroup:
    """Copies a cache group with those of its layers that are among some."""
    return replace(group, layers=tuple(one for one in group.layers if one in layers) or group.layers[:1])


def _inside_caches(plan: Plan) -> set[int]:
    """Places before which one call uses a layer's cache, and after which another one does."""
    used: dict[int, list[int]] = {}
    for index, call in enumerate(plan.calls):
        for operand in call.operands.values():
            if isinstance(operand, CacheOperand):
                used.setdefault(operand.layer, []).append(index)
    return {place for calls in used.values() for place in range(calls[0] + 1, calls[-1] + 1)}


def _buffers(call: KernelCall) -> list[tuple[str, BufferOperand]]:
    return [(role, one) for role, one in call.operands.items() if isinstance(one, BufferOperand)]


def _inside_adapters(plan: Plan) -> set[int]:
    """Places between calls that compute what adapters change, and those whose results they change or that read theirs.

    What they leave is not all in buffers: the rows of a layer of experts, by their adapters, are known to the process.
    """
    found = set[int]()
    for index, call in enumerate(plan.calls):
        if call.kernel == TABLE_KERNEL:
            found.add(index)
        elif call.kernel in (KERNEL, HEAD_KERNEL):
            found.add(index + 1)
        elif call.kernel == GROUP_KERNEL:
            starts = call.operands["starts"]
            products = (place for place, one in enumerate(plan.calls) if one.operands.get("starts") == starts)
            found.update(range(index + 1, max(products) + 1))
    return found


def _columns_read_after(plan: Plan) -> list[Columns]:
    """Columns of buffers that are read after each place, before they are written again."""
    live = {index: [(0, plan.buffers[index].columns)] for index in plan.outputs.values()}
    found = [_spans(live)]
    for call in reversed(plan.calls):
        written = outputs(call)
        for role, one in _buffers(call):
            if role in written:
                live[one.index] = _without(live.get(one.index, []), one.column, one.column + one.columns)
        for role, one in _buffers(call):
            if role not in written:
                live.setdefault(one.index, []).append((one.column, one.column + one.columns))
        found.append(_spans(live))
    return found[::-1]


def _buffers_written_before(plan: Plan) -> list[frozenset[int]]:
    """Buffers that have been written before each place, but for those that each stage computes by itself."""
    written = frozenset(plan.given.values())
    found = [written]
    for call in plan.calls:
        if not _is_repeated(call):
            written |= {one.index for role, one in _buffers(call) if role in outputs(call)}
        found.append(written)
    return found


def _without(ranges: Sequence[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    """Removes columns from ranges of columns."""
    parts = [part for one in ranges for part in ((one[0], min(one[1], begin)), (max(one[0], end), one[1]))]
    return sorted({part for part in parts if part[0] < part[1]})


def _spans(ranges: Mapping[int, Sequence[tuple[int, int]]]) -> Columns:
    """The first and last columns of ranges, by buffer."""
    return {
        index: (min(begin for begin, _ in some), max(end for _, end in some)) for index, some in ranges.items() if some
    }
