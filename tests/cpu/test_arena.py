"""Buffers that are alive together never overlap, at any sizes up to the limits."""

from hypothesis import given, settings
from hypothesis import strategies as st

from enginewright.builder.lower.arena import assign_slots
from enginewright.plan import COMMON_DIMS, Buffer, BufferOperand, KernelCall, Linear, Plan, StepSizes, linear

DIMS = (*COMMON_DIMS, "kv_splits")
ROWS = st.sampled_from([linear(tokens=1), linear(logit_rows=1), linear(1, sequences=1), linear(kv_splits=1)])
BUFFERS = st.lists(st.tuples(st.sampled_from(["f32", "bf16"]), ROWS, st.integers(1, 700)), min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(BUFFERS, st.data())
def test_live_buffers_do_not_overlap(buffers: list[tuple[str, Linear, int]], data: st.DataObject) -> None:
    touched = data.draw(st.lists(st.sets(st.integers(0, len(buffers) - 1), max_size=4), min_size=1, max_size=20))
    touched.append(set(range(len(buffers))) - set().union(*touched))  # every buffer is used at least once
    calls = [
        KernelCall("k@1", {f"o{index}": BufferOperand(index, 0, buffers[index][2]) for index in sorted(call)}, {})
        for call in touched
    ]
    results = data.draw(st.lists(st.integers(0, len(buffers) - 1), min_size=1, max_size=2))
    slots = assign_slots(buffers, calls, results, StepSizes(DIMS, (2048, 256, 256, 32)))
    plan = Plan(
        target="cpu",
        dims=DIMS,
        inputs=(),
        caches=(),
        buffers=tuple(Buffer(*buffer, slot) for buffer, slot in zip(buffers, slots, strict=True)),
        calls=tuple(calls),
        outputs={"logits": results[0], "hidden": results[-1]},
        vocab_size=buffers[results[0]][2],
        max_seq_len=1,
    )
    limits = StepSizes(DIMS, tuple(data.draw(st.integers(1, 900)) for _ in DIMS))
    offsets, arena_bytes = plan.arena_offsets(limits)
    alive: list[tuple[int, int, int]] = []  # first step, last step, buffer
    for index in range(len(buffers)):
        at = [step for step, names in enumerate(touched) if index in names]
        alive.append((at[0], len(calls) if index in results else at[-1], index))
    for first, last, index in alive:
        start, end = offsets[index], offsets[index] + plan.buffers[index].bytes_at(limits)
        assert end <= arena_bytes and start % 64 == 0
        for other_first, other_last, other in alive:
            if other < index and first <= other_last and other_first <= last:
                assert end <= offsets[other] or offsets[other] + plan.buffers[other].bytes_at(limits) <= start
