"""Classes of work in the scheduler: who is admitted first, who is preempted, and how much of prompts a step reads."""

from collections.abc import Sequence

import numpy as np
import pytest

from enginewright.errors import UsageError
from enginewright.plan import step_sizes
from enginewright.runtime.step.sequence import TokenSequence
from enginewright.runtime.step.step_cost import StepCost
from enginewright.runtime.step.step_goal import AIM, MIN_COST, StepGoal
from enginewright.runtime.step.work_class import AGE_S, BATCH, BEST_EFFORT, WorkClass
from tests.helpers.scheduler_watch import BLOCK, LONGEST, VOCAB, Watch, group, recurrent, sequence_of

WIDTH = -(-LONGEST // BLOCK)


def watch_of(*, sequences: int, num_blocks: int = 60, tokens: int = 40, chunk: int | None = None) -> Watch:
    limits = step_sizes(tokens=tokens, sequences=sequences, logit_rows=8, kv_blocks=WIDTH, kv_splits=1)
    return Watch((group(0),), limits, (num_blocks,), chunk=chunk)


def work(priority: int = 0, tenant: str = "", *, prompt: Sequence[int] = (1, 2, 3), length: int = 12) -> TokenSequence:
    return sequence_of(prompt, length, work=WorkClass(priority, tenant))


def add(watch: Watch, *sequences: TokenSequence) -> None:
    for sequence in sequences:
        watch.add(sequence)


def ends(watch: Watch) -> list[TokenSequence]:
    """All sequences, in the order in which they end."""
    ended: list[TokenSequence] = []
    while watch.alive:
        before = list(watch.alive)
        watch.step()
        ended += [sequence for sequence in before if sequence not in watch.alive]
    assert watch.all_back()
    return ended


def test_the_most_urgent_goes_first_and_nobody_who_runs_is_held_up() -> None:
    watch = watch_of(sequences=1)
    first, batch, urgent, usual, later = work(BATCH), work(BATCH), work(-5), work(), work()
    add(watch, first)
    watch.step()
    add(watch, batch, usual, later, urgent)
    assert ends(watch) == [first, urgent, usual, later, batch]
    assert watch.scheduler.num_preemptions == 0


def test_best_effort_work_gives_its_slot_to_waiting_work() -> None:
    watch = watch_of(sequences=2)
    kept, idle = work(BATCH), work(BEST_EFFORT)
    add(watch, kept, idle)
    for _ in range(3):
        watch.step()
    had = list(idle.token_ids)
    urgent = work()
    add(watch, urgent)
    watch.step()
    assert urgent.is_running and kept.is_running and not idle.is_running
    assert ends(watch) == [kept, urgent, idle]
    assert idle.state.num_preemptions == 1 and idle.token_ids[: len(had)] == had and len(idle.token_ids) == 12


def test_best_effort_work_gives_its_blocks_to_waiting_work() -> None:
    watch = watch_of(sequences=4, num_blocks=12)
    idle, more = (work(BEST_EFFORT, prompt=range(16), length=24) for _ in range(2))
    add(watch, idle, more)
    watch.step()
    assert idle.is_running and more.is_running
    urgent = work(prompt=range(16), length=24)
    add(watch, urgent)
    watch.step()
    assert urgent.is_running and idle.is_running and not more.is_running, (
        "the later one goes, and no more than it takes"
    )
    assert ends(watch)[-1] is more


def test_best_effort_work_is_displaced_by_other_work_alone() -> None:
    """One that has waited for long counts as more urgent, and still waits for the end of another one."""
    watch = watch_of(sequences=2)
    usual, first, second = work(length=20), work(BEST_EFFORT), work(BEST_EFFORT)
    add(watch, usual, first, second)
    watch.step()
    watch.now = 3 * AGE_S
    assert ends(watch) == [first, usual, second]
    assert watch.scheduler.num_preemptions == 0


def test_the_least_urgent_is_preempted_where_blocks_run_out() -> None:
    watch = watch_of(sequences=4, num_blocks=10)
    batch, usual = work(BATCH, prompt=range(16), length=36), work(prompt=range(16, 32), length=36)
    add(watch, batch)
    watch.step()
    add(watch, usual)
    assert ends(watch) == [usual, batch]
    assert batch.state.num_preemptions > 0 and usual.state.num_preemptions == 0


def test_waiting_work_becomes_more_urgent() -> None:
    """Work that has waited long enough goes before new interactive work: batch work, and later best-effort work."""
    watch = watch_of(sequences=1)
    running, batch, idle = work(), work(BATCH), work(BEST_EFFORT)
    add(watch, running, batch, idle)
    watch.step()
    watch.now = BATCH * AGE_S
    later = work()
    add(watch, later)
    assert ends(watch) == [running, batch, later, idle]

    watch = watch_of(sequences=1)
    running, idle = work(), work(BEST_EFFORT)
    add(watch, running, idle)
    watch.step()
    watch.now = BEST_EFFORT * AGE_S
    later = work()
    add(watch, later)
    assert (
        ends(watch) == [running, idle, later] and idle.state.num_preemptions == 0 and idle.state.effective_priority == 0
    )


def test_nothing_overtakes_by_waiting() -> None:
    assert WorkClass(0).effective_priority(1e6, 0) == 0 and WorkClass(-7).effective_priority(1e6, -7) == -7
    assert WorkClass(BATCH).effective_priority(1e6, 0) == 0 and WorkClass(BATCH).effective_priority(1e6, BATCH) == BATCH
    assert WorkClass(BATCH).effective_priority(3.5 * AGE_S, 0) == BATCH - 3
    for priority in (1001, -1001, 0.5, True, None):
        with pytest.raises(UsageError, match="priority must be"):
            WorkClass(priority)  # type: ignore[arg-type]


def test_tenants_get_as_many_tokens_each() -> None:
    """One has asked for ten answers before the other comes; from then on they take turns."""
    watch = watch_of(sequences=1)
    many, few = [work(tenant="a") for _ in range(10)], [work(tenant="b") for _ in range(3)]
    add(watch, *many)
    while not many[2].is_running:
        watch.step()
    add(watch, *few)
    order = "".join(sequence.work.tenant for sequence in ends(watch))
    assert order == "abababaaaaa"


def test_who_comes_back_has_saved_nothing_up() -> None:
    watch = watch_of(sequences=1)
    add(watch, *(work(tenant="a") for _ in range(5)))
    for _ in range(20):
        watch.step()
    add(watch, *(work(tenant="b") for _ in range(4)))
    order = "".join(sequence.work.tenant for sequence in ends(watch))
    assert order == "abababb"


def test_best_effort_answers_keep_no_pace() -> None:
    watch = watch_of(sequences=4, chunk=3)
    add(watch, work(BEST_EFFORT, length=30))
    watch.step()
    add(watch, work(BEST_EFFORT, prompt=range(20), length=30))
    plan = watch.step()
    assert plan is not None and [part.num_tokens for part in plan.scheduled] == [1, 20]
    add(watch, work(length=40))
    watch.step()
    add(watch, work(BATCH, prompt=range(20), length=30))
    plan = watch.step()
    assert plan is not None and plan.scheduled[-1].num_tokens == 3


@pytest.mark.parametrize("seed", range(4))
def test_any_mixture_comes_to_its_end(seed: int) -> None:
    """Classes, tenants, prompts that begin alike, a lack of blocks: what is computed is checked step by step."""
    random = np.random.default_rng(seed)
    groups = ((group(0),), (group(0), group(5)), (group(0), recurrent()))[seed % 3]
    limits = step_sizes(tokens=12, sequences=4, logit_rows=6, kv_blocks=WIDTH, kv_splits=1)
    watch = Watch(groups, limits, [14] * len(groups), prefix_caching=True, chunk=5, ahead=seed % 2)
    watch.draw = lambda tokens: hash(tuple(tokens)) % (VOCAB - 1)
    preempted, everybody = 0, list[TokenSequence]()
    for _ in range(800):
        watch.now += float(random.exponential(2.0))
        if len(watch.alive) < 10 and random.random() < 0.3:
            priority = int(random.choice([-3, 0, 0, BATCH, BEST_EFFORT, BEST_EFFORT + 7]))
            prompt = [*range(int(random.integers(1, 20))), *random.integers(0, VOCAB - 1, 3).tolist()]
            length = int(random.integers(len(prompt) + 1, LONGEST + 1))
            everybody.append(sequence_of(prompt, length, work=WorkClass(priority, "ab"[int(random.integers(2))])))
            watch.add(everybody[-1])
        if watch.alive and random.random() < 0.01:
            watch.finish(next(iter(watch.alive)))
        late = 0 if watch.schedule() is None else watch.ahead
        while len(watch.under_way) > late:
            watch.commit()
    while watch.alive or watch.under_way:
        watch.step()
    preempted = sum(sequence.state.num_preemptions for sequence in everybody)
    assert not watch.alive and watch.all_back() and preempted > 20 and len(everybody) > 90


def test_a_goal_is_kept_once_steps_were_measured() -> None:
    """Steps of 20 ms plus 0.4 ms a token: the goal of 60 ms admits the number of tokens that fit."""

    class Ratio(StepCost):
        def __init__(self) -> None:
            self._ratio = 0.001
            self._weight = self._tokens = self._squares = self._seconds = self._products = 0.0
            self.fixed, self.of_token = 1.0, self._ratio

    cost = Ratio()
    goal = StepGoal(0.060, cost)
    assert not goal.is_measured
    work = 16.0
    for _ in range(60):
        cost.learn(work, 0.020 + 0.0004 * work)
        work = 16 + goal.left(16)
    assert goal.is_measured and work == pytest.approx((AIM * 0.060 - 0.020) / 0.0004, rel=0.05)
    assert goal.left(1000) == MIN_COST
