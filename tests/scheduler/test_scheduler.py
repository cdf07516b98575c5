"""The scheduler and its KV blocks by their invariants, driven at random and by hand, without any executor."""

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from enginewright.plan import CacheGroup, PagedCache, RecurrentState, step_sizes
from enginewright.runtime.cache.paged import blocks_of
from enginewright.runtime.step.inputs import StepInputs
from enginewright.runtime.step.sequence import TokenSequence
from enginewright.runtime.step.step_plan import StepPlan
from tests.helpers.scheduler_watch import BLOCK, LONGEST, STOP, VOCAB, Watch, group, recurrent, sequence_of

WIDTH = -(-LONGEST // BLOCK)
AHEAD = [(0, 1), (1, 1), (1, 2), (2, 3)]  # steps planned ahead, and stages


def whole(
    num_blocks: int,
    *,
    tokens: int = 8,
    sequences: int = 4,
    prefix_caching: bool = False,
    chunk: int | None = None,
    ahead: int = 0,
) -> Watch:
    """One group without a window."""
    limits = step_sizes(tokens=tokens, sequences=sequences, logit_rows=4, kv_blocks=WIDTH, kv_splits=1)
    return Watch((group(0),), limits, (num_blocks,), prefix_caching=prefix_caching, chunk=chunk, ahead=ahead)


def step(watch: Watch, token: int = 3) -> StepPlan:
    watch.draw = lambda _: token
    plan = watch.step()
    assert plan is not None
    return plan


def run(watch: Watch, *sequences: TokenSequence) -> int:
    """Runs until all sequences have ended; gives the number of computed tokens."""
    before = watch.num_computed
    for sequence in sequences:
        watch.add(sequence)
    while watch.alive:
        step(watch)
    assert watch.all_back()
    return watch.num_computed - before


MIXTURES: tuple[tuple[CacheGroup, ...], ...] = (
    (group(0),),
    (group(0),),
    (group(3),),
    (group(0), group(5)),
    (group(1), group(9), group(0)),
    (group(4), group(8)),
    (group(3, kept_tokens=6), group(0)),
    (group(0), recurrent()),
    (recurrent(3 * BLOCK), group(0), group(5)),
    (recurrent(),),
)


class Traffic:
    """Random sequences: some that begin alike, siblings, texts to be scored, salts, NaN; some are aborted.

    Args:
        seed: chooses limits, caches and sequences.
        ahead: as in Watch, and so the next.
        stages: more than one if several steps are under way.
        defers: there are also beams, and sequences whose tokens are late.
    """

    def __init__(self, seed: int, ahead: int, stages: int = 1, *, defers: bool = False) -> None:
        self.random = random = np.random.default_rng(seed)
        groups = MIXTURES[random.integers(len(MIXTURES))]
        sequences = int(random.integers(1, 6))
        tokens = int(random.integers(sequences, 24))
        rows = int(random.integers(sequences, 12))
        spare = int(random.integers(0, [3, 10, 30][random.integers(3)]))
        blocks = tuple(
            (blocks_of(kv, LONGEST, tokens) if isinstance(kv, PagedCache) else int(random.integers(1, 9))) + spare
            for kv in groups
        )
        paged = {"kv_blocks": WIDTH} if any(isinstance(kv, PagedCache) for kv in groups) else {}
        limits = step_sizes(tokens=tokens, sequences=sequences, logit_rows=rows, **paged, kv_splits=1)
        chunk = int(random.integers(1, 12)) if random.integers(2) else None
        caching = bool(random.integers(4))
        self.watch = Watch(groups, limits, blocks, prefix_caching=caching, chunk=chunk, ahead=ahead, stages=stages)
        self.watch.draw = self.draw
        self.drafting = bool(random.integers(2))
        self.watch.defers = defers
        self.beginnings = random.integers(0, VOCAB - 1, (3, LONGEST)).tolist()

    def arrive(self) -> None:
        random = self.random
        length = 1 + int((LONGEST - 1) * random.random() ** 2)
        alike = int(random.integers(0, length + 1))
        prompt = self.beginnings[random.integers(3)][:alike] + random.integers(0, VOCAB - 1, length - alike).tolist()
        salt = "another tenant" if random.random() < 0.1 else ""
        kind = random.random()
        if kind < 0.2:
            self.watch.add(sequence_of(prompt, drawing=False, needs_prompt_logits=kind < 0.1))
            return
        if self.watch.defers and kind > 0.7:
            self.watch.add(sequence_of(prompt, int(random.integers(length, LONGEST + 1)), salt=salt, is_beam=True))
            return
        scored = bool(random.random() < 0.2)
        first = sequence_of(prompt, int(random.integers(length, LONGEST + 1)), needs_prompt_logits=scored, salt=salt)
        if kind < 0.3:
            self.watch.poisoned.add(first)
        self.watch.add(first)
        for _ in range(int(random.integers(1, 4)) if kind > 0.8 else 0):
            self.watch.add(sequence_of(prompt, int(random.integers(length, LONGEST + 1)), salt=salt, sibling_of=first))

    def draw(self, tokens: Sequence[int]) -> int:
        """Samples mostly the same token after the same tokens, so that completions are alike too."""
        if self.random.random() < 0.2:
            return int(self.random.integers(VOCAB))
        token = hash(tuple(tokens)) % (VOCAB + 10)
        return min(token, STOP - 1) if self.random.random() < 0.97 else STOP

    def propose(self) -> None:
        """Tokens that may come next, right ones mostly."""
        for sequence in self.watch.alive:
            decodes = sequence.is_running and sequence.state.num_computed_tokens == len(sequence.token_ids) - 1
            samples = sequence.request is not None and not sequence.is_beam
            ready = decodes and samples and not sequence.state.needs_prompt_logits
            if ready and not sequence.num_in_flight_tokens and self.random.random() < 0.3:
                tokens = list(sequence.token_ids)
                for _ in range(int(self.random.integers(1, 6))):
                    tokens.append(hash(tuple(tokens)) % (VOCAB + 10))
                    tokens[-1] = min(tokens[-1], STOP - 1)
                self.watch.scheduler.propose(sequence, tokens[len(sequence.token_ids) :])

    def abort(self) -> None:
        if self.watch.alive and self.random.random() < 0.05:
            alive = list(self.watch.alive)
            self.watch.finish(alive[self.random.integers(len(alive))])

    def resume(self, share: float, *, branches: bool = True) -> None:
        """Resumes this share of the deferred sequences; some beams branch before if `branches` is true."""
        for sequence in list(self.watch.deferred):
            if self.random.random() < share:
                parked = branches and sequence.is_beam and sequence.finish_reason is None
                if parked and len(self.watch.alive) < 20 and self.random.random() < 0.5:
                    self.watch.fork(sequence)
                self.watch.resume(sequence)

    def step(self) -> None:
        self.abort()
        self.resume(0.5)
        while len(self.watch.alive) < 20 and self.random.random() < 0.4:
            self.arrive()
        if self.drafting:
            self.propose()
        plan = self.watch.schedule()
        if plan is not None and self.watch.defers:
            self.watch.defer([one for one in plan.rows.sequences if self.random.random() < 0.3])
        late = 0 if plan is None or self.random.random() < 0.1 else self.watch.ahead
        while len(self.watch.under_way) > late:
            self.abort()  # while the step is computed
            self.watch.commit()

    def end(self) -> None:
        for _ in range(3_000):
            if self.watch.alive or self.watch.under_way:
                self.watch.step()
                self.resume(1, branches=False)
        assert not self.watch.alive, "some sequences never end"
        assert self.watch.all_back(), "a block leaked"


@pytest.mark.parametrize(("ahead", "stages"), AHEAD)
def test_thousands_of_steps(ahead: int, stages: int) -> None:
    """tests/long takes more of them."""
    check_traffic(5_000, ahead, stages)


def check_traffic(num_steps: int, ahead: int, stages: int = 1) -> None:
    """No leak, no starvation, no step beyond its budget, no block that is not its sequence's; and all of it happens."""
    steps = preemptions = shared = cached = wasted = drafted = right = again = states = seed = 0
    while steps < num_steps:
        traffic = Traffic(seed, ahead, stages)
        for _ in range(400):
            traffic.step()
        traffic.end()
        steps += traffic.watch.num_steps
        preemptions += traffic.watch.scheduler.num_preemptions
        cached += traffic.watch.scheduler.num_cached_prompt_tokens
        shared += traffic.watch.num_shared
        wasted += traffic.watch.num_wasted
        drafted += traffic.watch.num_verified
        right += traffic.watch.num_right
        again += traffic.watch.num_again
        if any(isinstance(kv, RecurrentState) for kv in traffic.watch.groups):
            states += traffic.watch.scheduler.num_cached_prompt_tokens
        seed += 1
    counts = (preemptions, cached, shared, 5 * wasted, drafted - right, right, 2 * again, states)
    assert min(counts) > 20, counts


@pytest.mark.parametrize(("ahead", "stages"), AHEAD)
def test_beams_and_late_tokens(ahead: int, stages: int) -> None:
    """tests/long takes more of them."""
    check_deferring_traffic(range(6), ahead, stages)


def check_deferring_traffic(seeds: Sequence[int], ahead: int, stages: int = 1) -> None:
    """Deferred sequences keep their blocks, are preempted and resumed, and branch, and everything else goes on."""
    preemptions = deferred = forked = 0
    for seed in seeds:
        traffic = Traffic(seed, ahead, stages, defers=True)
        for _ in range(300):
            traffic.step()
        traffic.end()
        preemptions += traffic.watch.scheduler.num_preemptions
        deferred += traffic.watch.num_deferred
        forked += traffic.watch.num_forked
    assert min(preemptions, deferred, forked) > 40, (preemptions, deferred, forked)


def test_decodes_are_in_every_step_and_prompts_take_the_rest() -> None:
    watch = whole(40)
    first, second = sequence_of([1, 2], 30), sequence_of(range(20), 30)
    watch.add(first)
    assert [part.num_tokens for part in step(watch).scheduled] == [2]
    watch.add(second)
    plans = [step(watch) for _ in range(4)]
    assert all(plan.scheduled[0].sequence is first for plan in plans)
    assert [[part.num_tokens for part in plan.scheduled] for plan in plans] == [[1, 7], [1, 7], [1, 6], [1, 1]]


def test_a_pace_is_kept_next_to_decodes_alone() -> None:
    """Nothing decodes: the whole budget; then chunks that cost as much wherever they are, one token at the least."""
    watch = whole(40, chunk=6)
    watch.add(sequence_of(range(12), 30))
    assert [part.num_tokens for part in step(watch).scheduled] == [8]
    assert [part.num_tokens for part in step(watch).scheduled] == [4]
    watch.add(sequence_of(range(12, 27), 30))
    chunks = [[part.num_tokens for part in step(watch).scheduled] for _ in range(6)]
    assert chunks == [[1, 6], [1, 3], [1, 2], [1, 2], [1, 2], [1, 1]]
    watch = whole(40, chunk=1)
    watch.add(sequence_of([1], 30))
    step(watch)
    watch.add(sequence_of(range(2, 20), 30))
    assert [[part.num_tokens for part in step(watch).scheduled] for _ in range(3)] == [[1, 1]] * 3


def test_what_a_chunk_leaves_goes_to_the_next_prompt() -> None:
    watch = whole(40, chunk=6)
    watch.add(sequence_of([1], 30))
    step(watch)
    watch.add(sequence_of(range(2, 6), 30))
    watch.add(sequence_of(range(6, 20), 30))
    assert [part.num_tokens for part in step(watch).scheduled] == [1, 4, 2]


def test_sequences_are_admitted_in_the_order_of_arrival() -> None:
    """One that does not fit yet is not overtaken by a shorter one."""
    watch = whole(10, tokens=40)
    long, longer, short = sequence_of(range(24), 40), sequence_of(range(20), 40), sequence_of([3, 4], 40)
    for sequence in (long, longer, short):
        watch.add(sequence)
    assert [part.sequence for part in step(watch).scheduled] == [long]
    watch.finish(long)
    assert [part.sequence for part in step(watch).scheduled] == [longer, short]


def test_the_latest_arrival_is_preempted_and_computed_again() -> None:
    """Two that do not fit together: the first goes on to its end, the second begins again with what it had sampled."""
    watch = whole(10, tokens=40)
    first, second = sequence_of(range(16), 36), sequence_of(range(30, 46), 36)
    watch.add(first)
    watch.add(second)
    while second.state.num_preemptions == 0:
        step(watch)
    had = list(second.token_ids)
    assert len(had) > 16 and second.state.num_computed_tokens == 0 and not second.is_running
    assert first.state.num_preemptions == 0 and watch.scheduler.num_preemptions == 1
    while second.state.num_computed_tokens == 0:
        step(watch)
    assert first.finish_reason == "length" and second.token_ids[: len(had)] == had
    while watch.alive:
        step(watch)
    assert watch.all_back() and len(second.token_ids) == 36


def test_a_shared_beginning_is_computed_once() -> None:
    alike = list(range(21))
    apart = [sequence_of([*alike, tail], 24) for tail in range(30, 34)]
    together = [sequence_of([*alike, tail], 24) for tail in range(30, 34)]
    without, shared = (
        run(whole(40, tokens=40), *apart),
        run(watch := whole(40, tokens=40, prefix_caching=True), *together),
    )
    assert without - shared == 3 * 20, "five full blocks of the second, third and fourth"
    assert [sequence.state.num_cached_tokens for sequence in together] == [0, 20, 20, 20]
    assert run(watch, again := sequence_of([*alike, 35], 24)) == 22 - 20 + 1
    assert again.state.num_cached_tokens == 20, "also when nobody holds them any more"


def test_answers_are_kept_for_the_next_turn() -> None:
    watch = whole(40, tokens=40, prefix_caching=True)
    run(watch, first := sequence_of(range(10), 30))
    run(watch, second := sequence_of([*first.token_ids, 1, 2, 3], 36))
    assert second.state.num_cached_tokens == 28, "of 30, all but the last was computed; 7 blocks are full"


def test_one_token_is_always_computed() -> None:
    """A prompt that is known to its end still has to give logits."""
    watch = whole(40, tokens=40, prefix_caching=True)
    run(watch, sequence_of(range(8), 9))
    run(watch, again := sequence_of(range(8), 9))
    assert again.state.num_cached_tokens == 4


def test_a_salt_shares_nothing_with_another() -> None:
    watch = whole(40, tokens=40, prefix_caching=True)
    run(watch, sequence_of(range(20), 24))
    run(watch, other := sequence_of(range(20), 24, salt="b"), same := sequence_of(range(20), 24, salt="b"))
    assert (other.state.num_cached_tokens, same.state.num_cached_tokens) == (0, 16)


def test_nan_is_not_shared() -> None:
    """Blocks with NaN are not shared with later sequences, nor with one that was waiting for them."""
    watch = whole(40, tokens=8, prefix_caching=True)
    bad, waiting = sequence_of(range(20), 24), sequence_of(range(20), 24)
    watch.poisoned.add(bad)
    run(watch, bad, waiting)
    assert bad.finish_reason == "error" and (waiting.state.num_cached_tokens, waiting.finish_reason) == (0, "length")


def test_the_least_recently_used_goes_first() -> None:
    watch = whole(12, tokens=40, prefix_caching=True)
    run(watch, sequence_of(range(16), 17))
    run(watch, sequence_of(range(20, 36), 37))
    run(watch, again := sequence_of(range(16), 17))
    assert again.state.num_cached_tokens == 12
    run(watch, sequence_of(range(20, 48), 29))  # takes what was used last, in part
    run(watch, kept := sequence_of(range(16), 17))
    assert kept.state.num_cached_tokens == 12


@pytest.mark.parametrize("length", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 15])
@pytest.mark.parametrize("windows", [(0,), (3,), (4, 0), (6, 0)])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_siblings_share_the_prompt(length: int, windows: tuple[int, ...], prefix_caching: bool) -> None:
    """Each computes one token of it, and they part from there."""
    groups = tuple(group(window) for window in windows)
    limits = step_sizes(tokens=16, sequences=4, logit_rows=4, kv_blocks=WIDTH, kv_splits=1)
    watch = Watch(groups, limits, (40,) * len(groups), prefix_caching=prefix_caching)
    first = sequence_of(range(length), length + 6)
    siblings = [sequence_of(range(length), length + 6, sibling_of=first) for _ in range(3)]
    for sequence in (first, *siblings):
        watch.add(sequence)
    draws = iter(range(1000))
    watch.draw = lambda _: next(draws) % (VOCAB - 1)
    while watch.alive:
        assert watch.step() is not None
    assert watch.all_back()
    assert watch.num_computed == length + 5 + 3 * 6
    assert watch.num_shared > 0 or length <= BLOCK or windows == (3,)


def test_siblings_of_one_that_is_gone_stand_alone() -> None:
    watch = whole(40)
    first = sequence_of(range(20), 30)
    sibling = sequence_of(range(20), 30, sibling_of=first)
    watch.add(first)
    watch.add(sibling)
    step(watch)
    watch.finish(first)
    while watch.alive:
        step(watch)
    assert len(sibling.token_ids) == 30 and watch.all_back()


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("length", [8, 9, 10])
def test_a_prompt_is_shared_with_its_first_token(length: int, ahead: int) -> None:
    """Also where one token of it is left for the last step: who begins like it waits no longer, nor who is next."""
    watch = whole(60, prefix_caching=True, ahead=ahead)
    first, alike, other = sequence_of(range(length), 38), sequence_of([*range(length), 20], 38), sequence_of([30, 31])
    for sequence in (first, alike, other):
        watch.add(sequence)
    for _ in range(4 + ahead):
        step(watch)
    assert alike.is_running and other.is_running and alike.state.num_cached_tokens == 8
    while watch.alive or watch.under_way:
        watch.step()
    assert watch.all_back()


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_sibling_of_one_without_numbers_computes_the_prompt_itself(ahead: int) -> None:
    watch = whole(40, ahead=ahead)
    first = sequence_of(range(20), 30)
    sibling = sequence_of(range(20), 30, sibling_of=first)
    watch.poisoned.add(first)
    for sequence in (first, sibling):
        watch.add(sequence)
    while watch.alive or watch.under_way:
        watch.step()
    assert (first.finish_reason, sibling.finish_reason) == ("error", "length") and watch.all_back()


def test_the_next_step_does_without_the_tokens_of_this_one() -> None:
    """One that has its length is left out; one that stops has computed a token for nothing."""
    watch = whole(40, ahead=1)
    stops, goes_on, ends = sequence_of([5, 6], 30), sequence_of([7, 8], 6), sequence_of([9, 1], 4)
    watch.draw = lambda tokens: STOP if tokens == [5, 6, 3] else 3
    for sequence in (stops, goes_on, ends):
        watch.add(sequence)
    plans = []
    while watch.alive or watch.under_way:
        plan = watch.step()
        plans.append([part.sequence for part in plan.scheduled] if plan else [])
    assert plans == [[stops, goes_on, ends], [stops, goes_on, ends], [stops, goes_on], [goes_on], []]
    assert stops.token_ids == [5, 6, 3, STOP] and ends.token_ids == [9, 1, 3, 3] and len(goes_on.token_ids) == 6
    assert watch.num_wasted == 1 and watch.all_back()


def test_right_draft_tokens_are_several_tokens_of_one_step() -> None:
    """A right one and a wrong one give two tokens; the wrong one's block is free again at once."""
    watch = whole(40)
    drafted, other = sequence_of(range(5), 30), sequence_of([8, 9], 30)
    for sequence in (drafted, other):
        watch.add(sequence)
    step(watch)
    assert [part.num_tokens for part in step(watch).scheduled] == [1, 1]
    watch.scheduler.propose(drafted, [3, 7])
    plan = step(watch)
    assert [(part.sequence, part.first, part.num_tokens, part.num_logit_rows) for part in plan.scheduled] == [
        (other, 3, 1, 1),
        (drafted, 6, 3, 3),
    ]
    assert plan.num_decodes == 1 and plan.rows.draft_tokens == ((), (3, 7))
    assert drafted.token_ids == [*range(5), 3, 3, 3, 3] and len(drafted.cache.held[0].blocks) == 2
    assert [part.num_tokens for part in step(watch).scheduled] == [1, 1], "and on as before"
    while watch.alive:
        step(watch)
    assert len(drafted.token_ids) == len(other.token_ids) == 30 and watch.all_back()


def test_draft_tokens_take_no_more_than_there_is() -> None:
    """Draft tokens stay within the step's tokens, rows and blocks and the completion's length, and preempt nobody."""
    watch = whole(3, tokens=8, sequences=2)
    first = sequence_of(range(6), 30)
    watch.add(first)
    step(watch)
    watch.scheduler.propose(first, [3] * 9)
    assert [part.num_tokens for part in step(watch).scheduled] == [4], "four rows of logits"
    assert len(first.token_ids) == 11
    watch.scheduler.propose(first, [3] * 3)
    assert [part.num_tokens for part in step(watch).scheduled] == [1], "there is no fourth block"
    watch = whole(40)
    watch.add(ending := sequence_of(range(6), 9))
    step(watch)
    watch.scheduler.propose(ending, [3] * 9)
    assert [part.num_tokens for part in step(watch).scheduled] == [2]
    assert ending.finish_reason == "length" and len(ending.token_ids) == 9 and watch.all_back()


def test_a_prompt_is_cut_where_a_snapshot_is_kept() -> None:
    """Prompts are cut at multiples of the snapshot interval and before the last token; equal prefixes resume there."""
    limits = step_sizes(tokens=40, sequences=4, logit_rows=4, kv_blocks=WIDTH, kv_splits=1)
    watch = Watch((group(0), recurrent(3 * BLOCK)), limits, (40, 8), prefix_caching=True)
    watch.add(first := sequence_of(range(30), 32))
    assert [[part.num_tokens for part in step(watch).scheduled] for _ in range(4)] == [[12], [12], [4], [2]]
    run(watch, again := sequence_of(range(30), 32), other := sequence_of([*range(20), 40], 22))
    assert first.finish_reason == "length" and (again.state.num_cached_tokens, other.state.num_cached_tokens) == (
        28,
        12,
    )
    watch = Watch((group(0), recurrent(3 * BLOCK)), limits, (40, 8))
    watch.add(sequence_of(range(30), 32))
    assert [part.num_tokens for part in step(watch).scheduled] == [30], "nobody will begin there"


def test_nothing_to_do_is_no_step() -> None:
    watch = whole(10)
    assert watch.schedule() is None
    sequence = sequence_of([1], 4)
    watch.add(sequence)
    watch.finish(sequence)
    assert watch.schedule() is None and watch.all_back() and sequence.finish_reason == "abort"
    watch.scheduler.finish(sequence, "stop")
    assert sequence.finish_reason == "abort", "it ended once"


def test_inputs_of_a_step_can_be_sent_to_another_process() -> None:
    """Inputs of a step hold numbers and arrays, and no sequence: msgspec encodes and decodes them."""
    watch = whole(40)
    watch.add(sequence_of(range(5), 30))
    plan = watch.schedule()
    assert plan is not None

    def encode(array: object) -> object:
        assert isinstance(array, np.ndarray)
        return array.dtype.str, array.shape, array.tobytes()

    def decode(_: object, parts: tuple[str, list[int], bytes]) -> object:
        return np.frombuffer(parts[2], parts[0]).reshape(parts[1])

    sent = msgspec.msgpack.encode(plan.inputs, enc_hook=encode)
    got = msgspec.msgpack.decode(sent, type=StepInputs, dec_hook=decode)
    assert (got.sizes, got.copies, got.new_blocks) == (plan.inputs.sizes, plan.inputs.copies, plan.inputs.new_blocks)
    assert got.arrays.keys() == plan.inputs.arrays.keys() and got.hidden is None
    assert all(np.array_equal(got.arrays[name], array) for name, array in plan.inputs.arrays.items())
