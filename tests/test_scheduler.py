"""The scheduler and its KV blocks by their invariants, driven at random and without any executor."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginewright.plan import KvGroup, Sizes
from enginewright.runtime.envelope import SPLIT_TOKENS, Envelope, blocks_of
from enginewright.runtime.sampling import SampledToken, SamplingParams, SamplingRequest
from enginewright.runtime.scheduler import Scheduler, StepPlan, Text

BLOCK, LONGEST, VOCAB, STOP = 4, 40, 50, 49


def group(window: int, block_size: int = BLOCK) -> KvGroup:
    return KvGroup((0,), 1, 8, window, "bf16", block_size, 32)


def text_of(
    prompt: list[int], length: int, *, drawing: bool = True, every_logit: bool = False, stop: int = STOP
) -> Text:
    """A prompt that grows to `length` tokens at most; one that draws none has the length of its prompt."""
    request = SamplingRequest(SamplingParams(temperature=0), prompt, VOCAB) if drawing else None
    longest = max(length, len(prompt) + 1) if drawing else len(prompt)
    return Text(list(prompt), len(prompt), longest, frozenset({stop}), request, every_logit)


@dataclass
class Watch:
    """Drives a scheduler and holds each of its steps against what was promised."""

    groups: tuple[KvGroup, ...]
    limits: Sizes
    num_blocks: tuple[int, ...]
    seen: dict[int, list[int]] = field(default_factory=dict)  # by text: the tokens scheduled so far
    rows: Counter[int] = field(default_factory=Counter)
    owners: dict[tuple[int, int], int] = field(default_factory=dict)  # by group and block: the text that had it last
    texts: list[Text] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.groups, Envelope(LONGEST, self.limits, self.num_blocks, 0, 0))
        # What each slot holds: whose key, and of which position.
        sizes = [count * kv.block_size for count, kv in zip(self.num_blocks, self.groups, strict=True)]
        self.pools = [np.full((size, 2), -1) for size in sizes]

    def add(self, text: Text) -> None:
        self.texts.append(text)
        self.scheduler.add(text)

    def check(self, plan: StepPlan) -> None:
        sizes, inputs = plan.sizes, plan.inputs
        for name in ("tokens", "sequences", "logit_rows", "kv_blocks", "kv_splits"):
            assert 0 <= getattr(sizes, name) <= getattr(self.limits, name), name
        assert sizes.tokens == sum(part.num_tokens for part in plan.parts) == len(inputs["tokens"])
        assert sizes.sequences == len(plan.parts) == len({id(part.text) for part in plan.parts})
        assert all(part.num_tokens > 0 for part in plan.parts)
        decoding = [part.text.num_pending_tokens == 1 for part in plan.parts]
        assert decoding == sorted(decoding, reverse=True), "decodes go first"
        starts = inputs["query_start"].tolist()
        assert starts[0] == 0 and np.diff(starts).tolist() == [part.num_tokens for part in plan.parts]
        assert all(array.dtype == np.int32 and array.flags.c_contiguous for array in inputs.values())
        self._check_tokens(plan, starts)
        for index in range(len(self.groups)):
            self._check_blocks(plan, starts, index)

    def _check_tokens(self, plan: StepPlan, starts: list[int]) -> None:
        rows: list[int] = []
        for part, start, end in zip(plan.parts, starts, starts[1:], strict=False):
            text, seen = part.text, self.seen.setdefault(id(part.text), [])
            assert text.finish_reason is None
            positions = plan.inputs["positions"][start:end].tolist()
            assert positions == list(range(len(seen), len(seen) + part.num_tokens)), "each once, and in order"
            seen.extend(plan.inputs["tokens"][start:end].tolist())
            assert seen == text.token_ids[: len(seen)]
            whole = len(seen) == len(text.token_ids)
            wanted = part.num_tokens if text.every_logit else int(whole)
            assert part.num_logit_rows == wanted
            rows += range(end - wanted, end)
            self.rows[id(text)] += wanted
        assert plan.inputs["logit_rows"].tolist() == rows
        assert plan.sizes.logit_rows == len(rows)
        assert plan.inputs["kv_len"].tolist() == [len(self.seen[id(part.text)]) for part in plan.parts]
        longest = int(plan.inputs["kv_len"].max())
        assert plan.sizes.kv_splits == -(-longest // SPLIT_TOKENS)

    def _check_blocks(self, plan: StepPlan, starts: list[int], index: int) -> None:
        kv, pool, count = self.groups[index], self.pools[index], self.num_blocks[index]
        slots, table = plan.inputs[f"slots.{index}"], plan.inputs[f"block_table.{index}"]
        assert len(set(slots.tolist())) == len(slots) and slots.min() >= 0 and slots.max() < count * kv.block_size
        assert table.shape == (len(plan.parts), plan.sizes.kv_blocks)
        new = set[int]()
        for part in plan.parts:
            for place, block in enumerate(part.text.tables[index].blocks):
                if place >= part.text.tables[index].dropped and self.owners.get((index, block)) != id(part.text):
                    self.owners[index, block] = id(part.text)
                    new.add(block)
        assert new <= set(plan.new_blocks[index]), "a block of another text would not be zeroed"
        for block in plan.new_blocks[index]:
            pool[block * kv.block_size : (block + 1) * kv.block_size] = -1
        for row, part in enumerate(plan.parts):
            held = part.text.tables[index].blocks
            assert {slot // kv.block_size for slot in slots[starts[row] : starts[row + 1]].tolist()} <= set(held)
            for slot, position in zip(
                slots[starts[row] : starts[row + 1]],
                plan.inputs["positions"][starts[row] : starts[row + 1]],
                strict=True,
            ):
                pool[slot] = id(part.text), position
        for row, part in enumerate(plan.parts):
            first, length = part.text.num_computed_tokens, int(plan.inputs["kv_len"][row])
            lowest = max(0, first - kv.window + 1) if kv.window else 0
            for position in range(lowest, length):
                slot = table[row, position // kv.block_size] * kv.block_size + position % kv.block_size
                assert tuple(pool[slot]) == (id(part.text), position), "a position that is seen was lost"
        self._check_owners(index)

    def _check_owners(self, index: int) -> None:
        kv = self.groups[index]
        held = [table.blocks[table.dropped :] for text in self.texts for table in text.tables[index : index + 1]]
        owned = [block for blocks in held for block in blocks]
        assert len(owned) == len(set(owned)), "two texts share a block"
        assert len(owned) + self.scheduler.num_free_blocks[index] == self.num_blocks[index], "a block was lost"
        for text in self.texts:
            for table in text.tables[index : index + 1]:
                most = blocks_of(kv, text.max_tokens, self.limits.tokens)
                assert len(table.blocks) - table.dropped <= most

    def all_back(self) -> bool:
        return self.scheduler.num_free_blocks == self.num_blocks and self.scheduler.num_unfinished == 0


@st.composite
def watches(draw: st.DrawFn) -> Watch:
    windows = draw(st.sampled_from([(0,), (3,), (0, 5), (1, 9, 0), (4, 8)]))
    groups = tuple(group(window) for window in windows)
    sequences = draw(st.integers(1, 5))
    tokens = draw(st.integers(sequences, 24))
    rows = draw(st.integers(sequences, 12))
    spare = draw(st.integers(0, 30))
    num_blocks = tuple(blocks_of(g, LONGEST, tokens) + spare for g in groups)
    limits = Sizes(tokens, sequences, rows, -(-LONGEST // BLOCK), 1)
    return Watch(groups, limits, num_blocks)


@st.composite
def texts(draw: st.DrawFn) -> Text:
    prompt = draw(st.lists(st.integers(0, VOCAB - 2), min_size=1, max_size=LONGEST - 1))
    kind = draw(st.sampled_from(["drawing", "drawing", "scored", "every"]))
    length = draw(st.integers(len(prompt) + 1, LONGEST))
    return text_of(prompt, length, drawing=kind == "drawing", every_logit=kind == "every")


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_invariants(data: st.DataObject) -> None:
    """Texts come at any time, end by themselves, with NaN, or are taken away before, between and after steps."""
    watch = data.draw(watches())
    coming = data.draw(st.lists(texts(), min_size=1, max_size=8))
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    work = sum(text.max_tokens for text in coming)
    for steps in range(work + len(coming) + 1):
        while coming and (steps == 0 or random.random() < 0.3):
            watch.add(coming.pop())
        alive = [text for text in watch.texts if text.finish_reason is None]
        if alive and random.random() < 0.1:
            watch.scheduler.finish(alive[random.integers(len(alive))], "abort")
        plan = watch.scheduler.schedule()
        if plan is None:
            assert not [text for text in watch.texts if text.finish_reason is None], "a text was left behind"
            if not coming:
                break
            continue
        watch.check(plan)
        aborted = None
        if random.random() < 0.1:  # while the step is computed
            aborted = plan.parts[random.integers(len(plan.parts))].text
            watch.scheduler.finish(aborted, "abort")
        before = {id(part.text): len(part.text.token_ids) for part in plan.parts}
        drawn = [SampledToken(int(random.integers(VOCAB)), is_nan=random.random() < 0.03) for _ in plan.requests]
        ended = watch.scheduler.commit(plan, drawn)
        for part, token in zip(plan.drawing, drawn, strict=True):
            if part.text is aborted:
                assert part.text.finish_reason == "abort" and len(part.text.token_ids) == before[id(part.text)]
            elif token.is_nan:
                assert part.text.finish_reason == "error" and part.text in ended
            else:
                assert part.text.token_ids[before[id(part.text)] :] == [token.token]
                stopped, full = token.token == STOP, len(part.text.token_ids) == part.text.max_tokens
                assert part.text.finish_reason == ("stop" if stopped else "length" if full else None)
                assert (part.text in ended) == (stopped or full)
        for index in range(len(watch.groups)):
            watch._check_owners(index)
    else:
        pytest.fail("more steps than tokens")
    assert watch.all_back()
    for text in watch.texts:
        if text.request is None and text.finish_reason == "length":
            assert watch.rows[id(text)] == (len(text.token_ids) if text.every_logit else 1)


def test_decodes_are_in_every_step_and_prompts_take_the_rest() -> None:
    watch = Watch((group(0),), Sizes(8, 4, 4, 10, 1), (40,))
    first, second = text_of([1, 2], 30), text_of(list(range(20)), 30)
    watch.add(first)
    watch.scheduler.commit(first_plan := watch.scheduler.schedule() or pytest.fail(), [SampledToken(3)])
    assert [part.num_tokens for part in first_plan.parts] == [2]
    watch.add(second)
    shares = []
    for _ in range(4):
        plan = watch.scheduler.schedule()
        assert plan is not None and plan.parts[0].text is first
        shares.append([part.num_tokens for part in plan.parts])
        watch.scheduler.commit(plan, [SampledToken(3)] * len(plan.requests))
    assert shares == [[1, 7], [1, 7], [1, 6], [1, 1]]


def test_texts_are_admitted_in_the_order_of_arrival() -> None:
    """One that does not fit yet is not overtaken by a shorter one."""
    watch = Watch((group(0),), Sizes(8, 4, 4, 10, 1), (10,))
    long, longer, short = text_of([1], 24), text_of([2], 24), text_of([3], 4)
    for text in (long, longer, short):
        watch.add(text)
    plan = watch.scheduler.schedule()
    assert plan is not None and [part.text for part in plan.parts] == [long]
    watch.scheduler.finish(long, "abort")
    plan = watch.scheduler.schedule()
    assert plan is not None and [part.text for part in plan.parts] == [longer, short]


def test_nothing_to_do_is_no_step() -> None:
    watch = Watch((group(0),), Sizes(8, 4, 4, 10, 1), (10,))
    assert watch.scheduler.schedule() is None
    text = text_of([1], 4)
    watch.add(text)
    watch.scheduler.finish(text, "abort")
    assert watch.scheduler.schedule() is None and watch.all_back() and text.finish_reason == "abort"
    watch.scheduler.finish(text, "stop")
    assert text.finish_reason == "abort", "it ended once"
