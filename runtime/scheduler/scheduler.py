"""What runs in the next step: decodes first, then as much of the prompts as the token budget takes.

plan = scheduler.schedule()
outputs = executor.run(plan.inputs)
scheduler.commit(plan, [(token,) for token in sampler.sample(outputs.logits, plan.rows.requests)])

The next step may be planned before this one is committed, and no more than that. Its tokens are then those that this
one samples, and all but the tokens themselves is known: what their keys and values take, and whether a sequence ends
by its length. One that ends otherwise has computed a token for nothing. Blocks may be reused at once: steps execute in
the order in which they are planned.
"""

from bisect import insort
from collections.abc import Callable, Sequence
from time import perf_counter

from enginewright.plan import CacheGroup, StepSizes
from enginewright.runtime.cache.cache import Cache
from enginewright.runtime.cache.disk import DiskStore
from enginewright.runtime.cache.events import CacheEvent, CacheEvents
from enginewright.runtime.cache.kind import Copies
from enginewright.runtime.sampling.sampler import SampledToken
from enginewright.runtime.scheduler.chunks import PromptChunks
from enginewright.runtime.scheduler.decodes import RepeatedDecodes
from enginewright.runtime.scheduler.prefixes import SharedPrefixes
from enginewright.runtime.scheduler.stored import PlaceMemory, StoredPrefixes
from enginewright.runtime.scheduler.waiting import WaitingSequences
from enginewright.runtime.step.inputs import StepInputs
from enginewright.runtime.step.packer import Packer
from enginewright.runtime.step.sequence import TokenSequence
from enginewright.runtime.step.step_goal import StepGoal
from enginewright.runtime.step.step_plan import LogitRow, LogitRows, RowPurpose, ScheduledTokens, StepPlan
from enginewright.runtime.step.work_class import BEST_EFFORT


class Scheduler:
    """The most urgent work first, and of that first come, first served (work_class.py, waiting.py).

    When KV blocks run out, the latest arrival of the least urgent work is preempted and computed anew later. For those
    who wait, best-effort work alone is preempted. The first of those that run is never skipped nor preempted, and it
    moves on in every step. So where all work is as urgent, a sequence ends within as many steps as it and those before
    it have tokens, prompts and answers together.

    Args:
        prefix_caching: sequences that begin with the same tokens share KV blocks, also with those that have ended.
        chunk: what the prompts of a step may cost beside decodes (one token they may always have); None: no bound.
            Decodes of best-effort work keep no pace, and do not count.
        cost: of a prompt's token at a position.
        goal: how long a step with such decodes may take.
        whole_texts: as the plan has it.
        clock: seconds, for ageing.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        limits: StepSizes,
        num_blocks: Sequence[int],
        *,
        prefix_caching: bool = False,
        chunk: int | None = None,
        cost: Callable[[int], float] = lambda position: 1.0,
        goal: StepGoal | None = None,
        whole_texts: bool = False,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._limits = limits
        self._cache = Cache(groups, num_blocks, limits.tokens, limits.sequences)
        self._prefixes = SharedPrefixes(self._cache, enabled=prefix_caching)
        self._events: CacheEvents | None = None
        self._waiting = WaitingSequences(self._cache, self._prefixes, clock)
        self._running: list[TokenSequence] = []  # the most urgent first, and of these the first that has arrived
        self._chunks = PromptChunks(self._cache, chunk, cost, goal=goal, whole=whole_texts)
        self._packer = Packer(groups, limits)
        self._no_blocks: tuple[list[int], ...] = tuple([] for _ in groups)
        self._no_copies: tuple[Copies, ...] = tuple([] for _ in groups)
        self._copies: tuple[Copies, ...] = tuple([] for _ in groups)  # for the next step
        self._last: StepPlan | RepeatedDecodes | None = None  # if the next step may be the same, a position further
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of those that wait, all to be computed."""
        return self._waiting.num_tokens

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_unfinished(self) -> int:
        return len(self._waiting) + len(self._running)

    @property
    def num_prompt_tokens(self) -> int:
        """Of the sequences that were admitted, siblings left out."""
        return self._waiting.num_prompt_tokens

    @property
    def num_cached_prompt_tokens(self) -> int:
        """Of these, what others had computed."""
        return self._waiting.num_cached_prompt_tokens

    @property
    def num_free_blocks(self) -> tuple[int, ...]:
        """Blocks that no sequence holds, a group."""
        return self._cache.num_free

    @property
    def shared_block_size(self) -> int | None:
        """Tokens of a block that sequences share; None: they share nothing."""
        return self._cache.block_size if self._prefixes.enabled else None

    def watch(self, put: Callable[[list[CacheEvent]], None]) -> None:
        """Let `put` have what others may find in the cache, a step: new blocks, and those that are gone."""
        self._events = self._prefixes.watch(put)

    def keep_on_disk(
        self, store: DiskStore, memory: Sequence[PlaceMemory], seconds: Callable[[int, int], float | None]
    ) -> None:
        """Keep in `store`, from now on, what others may find, and look for it there.

        Args:
            memory, seconds: as StoredPrefixes has them.
        """
        self._waiting.stored = StoredPrefixes(self._cache, self._prefixes, store, memory, seconds)

    @property
    def num_restored_tokens(self) -> int:
        """Tokens of sequences that were admitted with them, from disk."""
        return 0 if self._waiting.stored is None else self._waiting.stored.num_tokens

    def wait_for_disk(self, seconds: float) -> None:
        """Where nothing can be computed before something has been read, wait for that, but not for longer."""
        if self._waiting.stored is not None:
            self._waiting.stored.wait(seconds)

    def add(self, sequence: TokenSequence) -> None:
        self._waiting.add(sequence)

    def schedule(self) -> StepPlan | None:
        """The next step, or None if nothing waits or runs but what the step before ends, or what is read from disk."""
        self._admit()
        plan = self._repeat_last_step() or self._build_step()
        while plan is None and self._evict_parked():
            self._admit()
            plan = self._build_step()
        return plan

    def propose(self, sequence: TokenSequence, guesses: Sequence[int]) -> None:
        """The next step computes these tokens behind the last one too, as many as there is room for.

        It has a row of logits for each, and one before them: `commit` says how many of them were right. A sequence has
        to run, with all of its prompt computed and none of its tokens in flight. Where there is no room to keep a
        recurrent state, which could not be taken back, no guess is computed.
        """
        sequence.draft_tokens = list(guesses)
        self._last = None

    def defer(self, sequence: TokenSequence) -> None:
        """No step takes it until `commit` has the token that its last one was to sample; it keeps what it holds."""
        sequence.deferred, self._last = True, None

    def commit(self, plan: StepPlan, accepted: Sequence[Sequence[SampledToken]]) -> list[TokenSequence]:
        """Takes over what a step sampled.

        Args:
            accepted: the tokens of each of `plan.rows.sequences`: one, or as many as there were right draft tokens, and
                the one that was sampled after them.

        Returns:
            The sequences that ended with it.
        """
        return self._commit(plan.rows, accepted, plan.ending)

    def commit_deferred(self, rows: LogitRows, accepted: Sequence[Sequence[SampledToken]]) -> list[TokenSequence]:
        """Takes over what deferred sequences were sampled later, as `commit` does; steps take them again."""
        for sequence in rows.sequences:
            sequence.deferred = False
        return self._commit(rows, accepted, ())

    def _commit(
        self, rows: LogitRows, accepted: Sequence[Sequence[SampledToken]], ending: Sequence[TokenSequence]
    ) -> list[TokenSequence]:
        if rows.has_other_rows:
            for row in rows.rows:
                if row.purpose is RowPurpose.SCORE_PROMPT:
                    row.sequence.needs_prompt_logits = row.index + 1 < row.sequence.num_prompt_tokens
        ended, stride = [], self._cache.stride
        if rows.draft_tokens:
            accepted = [self._commit_draft_tokens(*each) for each in zip(rows.sequences, accepted, strict=True)]
        for sequence, (sampled,) in zip(rows.sequences, accepted, strict=True):
            if sequence.finish_reason is not None:  # by finish(), or by the step before
                continue
            if sampled.is_nan:
                ended.append((sequence, "error"))
                continue
            token, token_ids = sampled.token, sequence.token_ids
            known = len(token_ids)
            if sequence.has_unpublished_blocks or known % stride == 0:
                self._prefixes.publish(sequence)
            if sequence.is_beam:
                sequence.num_tokens = known
                continue
            token_ids.append(token)
            if token in sequence.stop_token_ids:
                ended.append((sequence, "stop"))
            elif known + 1 >= sequence.max_tokens:
                ended.append((sequence, "length"))
        ended += [(sequence, "length") for sequence in ending if sequence.finish_reason is None]
        for sequence, reason in ended:
            self.finish(sequence, reason)
        for sequence, draft_tokens in zip(rows.sequences, rows.draft_tokens, strict=False):
            if draft_tokens:
                self._roll_back(sequence)
        if self._events is not None:
            self._events.flush()
        return [sequence for sequence, _ in ended]

    def _commit_draft_tokens(self, sequence: TokenSequence, tokens: Sequence[SampledToken]) -> Sequence[SampledToken]:
        """Take up all but the last token, which ends the sequence if one does; the last one."""
        if sequence.finish_reason is not None:
            return tokens[-1:]
        for place, sampled in enumerate(tokens[:-1]):
            ends = sampled.token in sequence.stop_token_ids or len(sequence.token_ids) + 1 >= sequence.max_tokens
            if sampled.is_nan or ends:
                return tokens[place : place + 1]
            if len(sequence.token_ids) % self._cache.stride == 0 or sequence.has_unpublished_blocks:
                self._prefixes.publish(sequence)
            sequence.token_ids.append(sampled.token)
        return tokens[-1:]

    def _roll_back(self, sequence: TokenSequence) -> None:
        """Take back the guesses that were wrong."""
        if sequence.finish_reason is not None:
            return
        sequence.draft_tokens, sequence.num_tokens = [], len(sequence.token_ids)
        before, known = sequence.num_computed_tokens, len(sequence.token_ids) - 1
        if sequence.is_running and before >= known:  # else it was preempted meanwhile
            sequence.num_computed_tokens = self._cache.roll_back(sequence.held, before, known, self._copies)
            sequence.recomputing = sequence.num_computed_tokens < known

    def fork(self, sequence: TokenSequence, child: TokenSequence) -> None:
        """A new beam that goes on from a parked one. It shares what is computed, or computes it anew if it cannot.

        Args:
            child: has the same tokens, and none behind them.
        """
        self._waiting.arrive(child, beside=sequence)
        if not sequence.is_running or len(self._running) == self._limits.sequences:
            return
        computed = sequence.num_computed_tokens
        held = self._cache.fork(sequence.held, computed, computed, computed + 1, len(self._running), self._copies)
        if held is None:
            return
        child.held, child.effective_priority = held, sequence.effective_priority
        child.num_computed_tokens = child.num_charged_tokens = child.num_cached_tokens = computed
        self._prefixes.fork(sequence, child)
        self._run(child)

    def choose(self, sequence: TokenSequence, token: int) -> None:
        """The next token of a parked beam, which goes on with it; one that has lost its room waits for it again."""
        sequence.token_ids.append(token)
        sequence.num_tokens += 1
        if not sequence.is_running:
            self._waiting.put_back(sequence)

    def finish(self, sequence: TokenSequence, reason: str, *, replace: bool = False) -> None:
        """Ends a sequence now, wherever it is; its blocks are free again. One that has ended stays as it is.

        Args:
            replace: one that has ended has this reason from now on.
        """
        if sequence.finish_reason is not None:
            if replace:
                sequence.finish_reason = reason
            return
        sequence.finish_reason = reason
        sequence.num_tokens = len(sequence.token_ids)
        self._waiting.forget(sequence)
        if sequence.is_running:
            self._leave(sequence)

    def _admit(self) -> None:
        while True:
            sequence = None
            if len(self._running) < self._limits.sequences:
                sequence = self._waiting.admit(self._running, self._copies)
            if sequence is not None:
                self._run(sequence)
            elif not self._displace():
                return

    def _run(self, sequence: TokenSequence) -> None:
        """It has what it takes, and runs from now on."""
        insort(self._running, sequence, key=self._waiting.order)
        self._packer.place(sequence)
        self._last = None

    def _displace(self) -> bool:
        """Preempt best-effort work for more urgent work that has no room."""
        if not self._running or self._running[-1].effective_priority < BEST_EFFORT:
            return False
        if len(self._running) < self._limits.sequences and not self._waiting.no_room:
            return False
        if not self._waiting.has_other_than_best_effort:  # however long it has waited: it would go to and fro
            return False
        self._preempt(self._running[-1])
        return True

    def _evict_parked(self) -> bool:
        """Take the room of a beam for those that wait, where nothing else can go on; nothing of it was to compute."""
        if not len(self._waiting) or any(sequence.num_in_flight_tokens for sequence in self._running):
            return False
        parked = next((sequence for sequence in reversed(self._running) if sequence.is_parked), None)
        if parked is None:
            return False
        self._preempt(parked)
        return True

    def _has_room(self, sequence: TokenSequence) -> bool:
        """Whether a sequence that decodes can go on; the last of those that run are preempted, itself perhaps."""
        while not self._cache.grow(sequence.held, sequence.num_tokens):
            last = self._running[-1]
            self._preempt(last)
            if last is sequence:
                return False
        return True

    def _preempt(self, sequence: TokenSequence) -> None:
        """It waits again, and is computed anew; a beam that is parked not before its next token is chosen."""
        is_parked = sequence.is_parked
        self._leave(sequence)
        sequence.draft_tokens, sequence.recomputing = [], False
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        if not is_parked:
            self._waiting.put_back(sequence)

    def _leave(self, sequence: TokenSequence) -> None:
        """It runs no longer."""
        self._running.remove(sequence)
        self._waiting.charge(sequence)
        self._prefixes.end(sequence)
        self._cache.release(sequence.held)
        sequence.held = []
        self._packer.remove(sequence)
        self._waiting.no_room = False
        self._last = None

    def _repeat_last_step(self) -> StepPlan | None:
        """The last step once more, a position further; None if there is more to it."""
        if isinstance(self._last, StepPlan):
            self._last = RepeatedDecodes(self._last, self._cache.stride)
        decodes = self._last
        if decodes is None or decodes.are_over:
            return None
        growing = decodes.growing_next()
        if not growing:
            return decodes.plan_next(self._packer, growing, self._no_blocks, self._no_copies)
        for row in growing:
            if not self._has_room(decodes.first.rows.sequences[row]) or self._last is None:  # somebody was preempted
                return None
        new_blocks, copies = self._extend([decodes.first.first_scheduled[row] for row in growing])
        return decodes.plan_next(self._packer, growing, new_blocks, copies)

    def _build_step(self) -> StepPlan | None:
        """A step of all that can be done; None if nothing can."""
        scheduled: list[ScheduledTokens] = []
        growing: list[ScheduledTokens] = []  # those whose block tables may have to
        verifying: list[ScheduledTokens] = []
        reading, stride = [], self._cache.stride
        spare = min(self._limits.tokens, self._limits.logit_rows) - len(
            self._running
        )  # for draft tokens: all may decode
        for sequence in self._running:
            if sequence.deferred:
                continue
            first, length = sequence.num_computed_tokens, sequence.num_tokens
            again = length - first - 1 if sequence.recomputing else 0
            if length - first > 1 and not (0 < again <= spare):
                sequence.draft_tokens = []
                reading.append(sequence)
            elif length > first and not (
                (length >= sequence.max_tokens or sequence.draft_tokens or sequence.is_beam)
                and length > len(sequence.token_ids)
            ):
                # A decode takes a block where its token is the first of one. Who is preempted for it comes after it
                # in this list, or is itself the last.
                if (again or first % stride == 0) and not self._has_room(sequence):
                    break
                count = self._fit_draft_tokens(sequence, spare - again) if sequence.draft_tokens else 0
                if again or count:
                    verifying.append(ScheduledTokens(sequence, first, again + 1 + count, 1 + count))
                    spare -= again + count
                    continue
                one = ScheduledTokens(sequence, first, 1, 1)
                if first % stride == 0:
                    growing.append(one)
                scheduled.append(one)
        num_decodes = len(scheduled)
        scheduled += verifying
        taken = num_decodes + sum(one.num_tokens for one in verifying)  # a row of logits each, too
        tokens, rows = self._limits.tokens - taken, self._limits.logit_rows - taken
        keeps_pace = any(one.sequence.effective_priority < BEST_EFFORT for one in scheduled)
        scheduled += self._chunks.cut(reading, tokens, rows, beside=scheduled, keeps_pace=keeps_pace)
        return self._plan(scheduled, num_decodes, growing + scheduled[num_decodes:]) if scheduled else None

    def _fit_draft_tokens(self, sequence: TokenSequence, spare: int) -> int:
        """Leave as many guesses as there is room for; how many that is."""
        length = sequence.num_tokens
        count = min(len(sequence.draft_tokens), spare, sequence.max_tokens - length - 1)
        if count > 0 and not (
            self._cache.grow(sequence.held, length + count)
            and self._cache.checkpoint(sequence.held, sequence.num_computed_tokens, self._copies)
        ):
            count = 0
        del sequence.draft_tokens[count:]
        return count

    def _plan(self, scheduled: list[ScheduledTokens], num_decodes: int, growing: list[ScheduledTokens]) -> StepPlan:
        """Makes a step of these tokens.

        Args:
            num_decodes: the first of them, of one token each, after which no draft token is verified.
            growing: those that may take blocks.
        """
        new_blocks, copies = self._extend(growing)
        sizes, arrays = self._packer.pack(scheduled, num_decodes, growing)
        rows: list[LogitRow] = []
        ending: list[TokenSequence] = []
        for one in scheduled:
            sequence = one.sequence
            sequence.num_computed_tokens = one.end
            sequence.recomputing = False
            if sequence.request is not None:
                self._add_rows(rows, one)
            elif one.end == sequence.num_tokens:
                ending.append(sequence)
        for one in scheduled[num_decodes:]:
            # Later, its blocks may have fallen out of a window.
            self._prefixes.tag(one.sequence, min(one.end, len(one.sequence.token_ids)))
        plan = StepPlan(
            StepInputs(sizes, arrays, copies, new_blocks),
            tuple(scheduled),
            num_decodes,
            LogitRows.of(rows),
            tuple(ending),
        )
        sequences = plan.rows.sequences
        repeats = num_decodes == len(self._running) == len(sequences) and not any(one.is_beam for one in sequences)
        self._last = plan if repeats else None
        return plan

    @staticmethod
    def _add_rows(rows: list[LogitRow], scheduled: ScheduledTokens) -> None:
        """Append what the rows of logits of a sequence are for, and count the tokens that they are to give it."""
        sequence, end = scheduled.sequence, scheduled.end
        request = sequence.request
        assert request is not None
        if sequence.needs_prompt_logits:  # a row scores the token after its own
            for position in range(end + 1 - scheduled.num_logit_rows, min(end + 1, len(sequence.token_ids))):
                scored = request.prompt_token(sequence.token_ids[position])
                rows.append(LogitRow(sequence, RowPurpose.SCORE_PROMPT, scored, position))
            if end < sequence.num_tokens:
                return
        if not scheduled.num_logit_rows:
            return
        sequence.logits_row = len(rows)
        sequence.num_tokens += 1
        rows.append(LogitRow(sequence, RowPurpose.SAMPLE, request))
        if sequence.draft_tokens:
            sequence.num_tokens += len(sequence.draft_tokens)
            for index, after in enumerate(request.rows_after(sequence.draft_tokens), start=1):
                rows.append(LogitRow(sequence, RowPurpose.VERIFY, after, index))

    def _extend(self, scheduled: Sequence[ScheduledTokens]) -> tuple[tuple[list[int], ...], tuple[Copies, ...]]:
        """Room for these to write what they compute: what is to be zeroed, and copied before, a group."""
        new: tuple[list[int], ...] = tuple([] for _ in self._no_blocks)
        for one in scheduled:
            first = one.sequence.num_computed_tokens
            self._cache.extend(one.sequence.held, first, first + one.num_tokens, new, self._copies)
        copies, self._copies = self._copies, tuple([] for _ in self._no_copies)
        return new, copies
