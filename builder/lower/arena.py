"""Assigns buffers to slots of the arena: buffers of one slot are never alive at the same time."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from enginewright.plan import Buffer, BufferOperand, CacheGroup, KernelCall, Linear, StepSizes
from enginewright.runtime.step.dims import StepCounter


@dataclass
class _Slot:
    """A slot."""

    nbytes: int  # bytes of its largest buffer
    free_after: int  # index of the last call that reads it


def nominal_sizes(dims: Sequence[str], caches: Sequence[CacheGroup]) -> StepSizes:
    """Returns the sizes that slots are balanced for. Any choice is correct; this one resembles a busy server.

    Args:
        dims: dimensions of the plan.
        caches: its cache groups.
    """
    return StepCounter(dims, caches).sizes(tokens=2048, sequences=256, logit_rows=256, longest=8192)


def assign_slots(
    buffers: Sequence[tuple[str, Linear, int]],
    calls: Sequence[KernelCall],
    results: Collection[int],
    nominal: StepSizes,
    lasting: Collection[int] = (),
    given: Collection[int] = (),
) -> list[int]:
    """Chooses the slot of each buffer, by best fit in order of first use.

    A buffer lives from the first call that names it to the last.

    Args:
        buffers: dtype, rows and columns of each buffer.
        calls: kernel calls, in order.
        results: buffers that live to the end.
        nominal: sizes to balance for.
        lasting: buffers that always live.
        given: buffers that live from the start.
    """
    first, last = [len(calls)] * len(buffers), [-1] * len(buffers)
    for index, call in enumerate(calls):
        for operand in call.operands.values():
            if isinstance(operand, BufferOperand):
                first[operand.index] = min(first[operand.index], index)
                last[operand.index] = index
    for buffer in results:
        last[buffer] = len(calls)
    for buffer in given:
        first[buffer] = -1
    for buffer in lasting:
        first[buffer], last[buffer] = -1, len(calls)

    slots: list[_Slot] = []
    chosen = [0] * len(buffers)
    for buffer in sorted(range(len(buffers)), key=lambda index: (first[index], index)):
        need = Buffer(*buffers[buffer], 0).bytes_at(nominal)
        free = [index for index, slot in enumerate(slots) if slot.free_after < first[buffer]]
        # The smallest slot that is large enough is chosen; if there is none, the largest, which grows the least.
        fits = [index for index in free if slots[index].nbytes >= need]
        if fits:
            slot = min(fits, key=lambda index: (slots[index].nbytes, index))
        elif free:
            slot = max(free, key=lambda index: (slots[index].nbytes, -index))
        else:
            slot = len(slots)
            slots.append(_Slot(0, -1))
        slots[slot].nbytes = max(slots[slot].nbytes, need)
        slots[slot].free_after = last[buffer]
        chosen[buffer] = slot
    return chosen
