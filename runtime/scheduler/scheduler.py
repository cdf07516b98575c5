"""Plans each step: decodes first, then as many prompt tokens as the token budget allows.

plan = scheduler.schedule()
outputs = executor.run(plan.inputs)
scheduler.commit(plan, [(token,) for token in sampler.sample(outputs.logits, plan.rows.requests)])

One step may be planned ahead, before the step before it is committed. It computes the tokens that the step before
samples. Everything but the token ids is known when it is planned: the blocks that the tokens need, and whether a
sequence ends by its length. A sequence that ends for another reason has computed one token in vain. Blocks may be
reused at once, since steps execute in the order in which they are planned.

Where a model has stages, several steps are under way at a time. A step then has no sequence that waits for a token of
another one, and only its share of the work, so that the other steps have some, too.
"""

from bisect import insort
from collections.abc import Callable, Sequence
from time import perf_counter

from enginewright.plan import CacheGroup, StepSizes
from enginewright.runtime.cache.cache import Cache
from enginewright.runtime.cache.events import CacheEvent, CacheEvents
from enginewright.runtime.cache.kind import Copies
from enginewright.runtime.cache.store import Entry, PrefixStore
from enginewright.runtime.sampling.request import RowRequest, SamplingRequest
from enginewright.runtime.sampling.sampler import SampledToken
from enginewright.runtime.scheduler.adapters import AdapterSlots
from enginewright.runtime.scheduler.chunks import PromptChunks
from enginewright.runtime.scheduler.decodes import RepeatedDecodes
from enginewright.runtime.scheduler.prefixes import SharedPrefixes
from enginewright.runtime.scheduler.stored import PlaceMemory, PrefixWriter, StoredPrefixes
from enginewright.runtime.scheduler.waiting import WaitingSequences
from enginewright.runtime.step.inputs import StepInputs
from enginewright.runtime.step.packer import Packer
from enginewright.runtime.step.sequence import TokenSequence
from enginewright.runtime.step.step_goal import StepGoal
from enginewright.runtime.step.step_plan import LogitRow, LogitRows, RowPurpose, ScheduledTokens, StepPlan
from enginewright.runtime.step.work_class import BEST_EFFORT


class Scheduler:
    """Plans steps: the most urgent work first, and equally urgent work first come, first served.

    work_class.py defines what is urgent, and waiting.py the order of waiting sequences.

    When KV blocks run out, the latest arrival of the least urgent running work is preempted, and computed again later.
    Waiting sequences preempt only best-effort work. The first running sequence is never preempted for another running
    one, and advances in every step unless it is deferred. So if all work is equally urgent, a sequence ends within at
    most as many steps as it and the sequences before it have tokens, counting prompts and answers.

    Args:
        groups: cache groups of the plan.
        limits: maximum sizes of a step.
        num_blocks: number of blocks or slots of each cache group.
        prefix_caching: sequences that begin with the same tokens share KV blocks, also with sequences that have ended.
        chunk: maximum cost of the prompt tokens of a step that also decodes, though one token is always allowed; None:
            no bound. Decodes of best-effort work do not set this bound.
        cost: gives the cost of a prompt token at a position.
        goal: maximum time of a step in which `chunk` is a bound; None: no such time is given.
        adapters: slots for the adapters of sequences; None: no sequence has one.
        num_under_way: number of steps that stages of the model compute at a time.
        whole_texts: true if a prompt has to be computed in a single step (Plan.whole_texts).
        clock: gives the time in seconds, by which the priority of waiting sequences ages and hints expire.
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
        adapters: AdapterSlots | None = None,
        num_under_way: int = 1,
        whole_texts: bool = False,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._limits = limits
        self._num_under_way = num_under_way
        self._cache = Cache(groups, num_blocks, limits.tokens, limits.sequences, clock)
        self._prefixes = SharedPrefixes(self._cache, enabled=prefix_caching)
        self._events: CacheEvents | None = None
        self._adapters = adapters
        self._waiting = WaitingSequences(self._cache, self._prefixes, clock)
        self._waiting.adapters = adapters
        self._running: list[TokenSequence] = []  # the most urgent first, equally urgent ones by arrival
        self._chunks = PromptChunks(self._cache, chunk, cost, goal=goal, whole=whole_texts)
        self._packer = Packer(groups, limits)
        self._no_blocks: tuple[list[int], ...] = tuple([] for _ in groups)
        self._no_copies: tuple[Copies, ...] = tuple([] for _ in groups)
        self._copies: tuple[Copies, ...] = tuple([] for _ in groups)  # before the next step
        self._last: StepPlan | RepeatedDecodes | None = None  # if the next step may repeat it
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        """Number of waiting sequences."""
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Number of tokens of the waiting sequences, all of which are to be computed."""
        return self._waiting.num_tokens

    @property
    def num_running(self) -> int:
        """Number of running sequences."""
        return len(self._running)

    @property
    def num_unfinished(self) -> int:
        """Number of sequences that wait or run."""
        return len(self._waiting) + len(self._running)

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens of all admitted sequences, without siblings, since the start."""
        return self._waiting.num_prompt_tokens

    @property
    def num_cached_prompt_tokens(self) -> int:
        """Number of these prompt tokens that were in the prefix cache."""
        return self._waiting.num_cached_prompt_tokens

    @property
    def num_evictions(self) -> int:
        """Number of blocks and slots that were evicted from the prefix cache, since the start."""
        return self._cache.num_evictions

    @property
    def num_retained(self) -> int:
        """Number of blocks and slots of the prefix cache that a hint keeps."""
        return self._cache.num_retained

    @property
    def num_early_evictions(self) -> int:
        """Number of blocks and slots that were evicted before the time of their hint was over, since the start."""
        return self._cache.num_early_evictions

    @property
    def num_free_blocks(self) -> tuple[int, ...]:
        """Number of blocks or slots that no sequence holds, for each cache group."""
        return self._cache.num_free

    @property
    def shared_block_size(self) -> int | None:
        """Number of tokens of a block that sequences can share; None: they share no blocks."""
        return self._cache.block_size if self._prefixes.enabled else None

    def watch(self, put: Callable[[list[CacheEvent]], None]) -> None:
        """Starts to report changes of the prefix cache.

        Args:
            put: gets the events of each step: blocks that others may find from now on, and removed blocks.
        """
        self._events = self._prefixes.watch(put)

    def use_memory(self, memory: Sequence[PlaceMemory]) -> None:
        """Lets blocks be read from the prefix cache, and written into it.

        Args:
            memory: memory of each cache group.
        """
        self._waiting.writer = PrefixWriter(self._cache, self._prefixes, memory)

    def read_prompt(self, sequence: TokenSequence) -> dict[Entry, Callable[[], bytes]]:
        """Begins to read the shared blocks of a prompt, after the commit that has ended its sequence.

        Args:
            sequence: a sequence with one token after its prompt.

        Returns:
            For each block or snapshot, a function that waits for its content, to be called once in any thread.
        """
        writer, keys = self._waiting.writer, self._prefixes.keys_of(sequence)
        assert writer is not None, "use_memory is called first"
        entries = self._cache.entries(keys[: self._cache.num_shared(keys)])
        return {(group, key): writer.memory[group].read(place) for group, key, place in entries}

    def is_in_memory(self, entry: Entry) -> bool:
        """True if a block or snapshot is in the prefix cache now. It may be called in any thread."""
        return self._cache.has(*entry)

    def keep_in(self, stores: Sequence[PrefixStore], seconds: Callable[[int, int], float | None]) -> None:
        """Starts to keep the prefix cache in stores, and to read prefixes from there, after `use_memory`.

        Args:
            stores: the stores, the fastest first.
            seconds: gives the seconds to compute the tokens from one position up to another; None: not known yet.
        """
        writer = self._waiting.writer
        assert writer is not None, "use_memory is called first"
        self._waiting.stored = StoredPrefixes(self._cache, self._prefixes, stores, writer, seconds)

    @property
    def num_restored_tokens(self) -> int:
        """Number of tokens that were read from stores or another server instead of computed, since the start."""
        return 0 if self._waiting.writer is None else self._waiting.writer.num_tokens

    def wait_for_stores(self, seconds: float) -> None:
        """Waits for stores, at most this number of seconds. Called where there is nothing to compute meanwhile."""
        if self._waiting.stored is not None:
            self._waiting.stored.wait(seconds)

    def add(self, sequence: TokenSequence) -> None:
        """Queues a new sequence."""
        self._waiting.add(sequence)

    def schedule(self) -> StepPlan | None:
        """Plans the next step.

        Returns:
            The plan; None if there is nothing to compute now. Sequences may still wait for the commit of the step
            before, or for a read from a store.
        """
        self._admit()
        plan = self._repeat_last_step() or self._build_step()
        while plan is None and self._evict_parked():
            self._admit()
            plan = self._build_step()
        return plan

    def propose(self, sequence: TokenSequence, draft_tokens: Sequence[int]) -> None:
        """Lets the next step verify draft tokens after the last token of a sequence, as many as its limits allow.

        The step computes a row of logits for the last token and one for each draft token. Where there is no free slot
        for a checkpoint of a recurrent state, to which it could be rolled back, no draft token is verified.

        Args:
            sequence: a running sequence, whose prompt is computed, and none of whose tokens is in flight.
            draft_tokens: the draft tokens.
        """
        sequence.state.draft_tokens = list(draft_tokens)
        self._last = None

    def defer(self, sequence: TokenSequence) -> None:
        """Leaves a sequence out of all steps until `resume` is called for it; it keeps its blocks."""
        sequence.state.deferred, self._last = True, None

    def commit(self, plan: StepPlan, accepted: Sequence[Sequence[SampledToken]]) -> None:
        """Appends the sampled tokens of a step to its sequences, and ends those that are complete.

        Args:
            plan: the plan of the step.
            accepted: the tokens of each of `plan.rows.sequences`: the accepted draft tokens, if any, and the token
                sampled after them.
        """
        rows = plan.rows
        for row in rows.other.values():
            state = row.sequence.state
            if row.purpose is RowPurpose.SCORE_PROMPT:
                state.needs_prompt_logits = row.index + 1 < row.sequence.num_prompt_tokens
            elif row.purpose is RowPurpose.SEARCH:
                state.num_tokens = len(row.sequence.token_ids)
        if rows.draft_tokens:
            for sequence, tokens in zip(rows.sequences, accepted, strict=True):
                self._append([sequence] * len(tokens), list(zip(tokens, strict=True)))
        else:
            self._append(rows.sequences, accepted)
        for sequence in plan.ending:
            self.finish(sequence, "length")
        for sequence, draft_tokens in zip(rows.sequences, rows.draft_tokens, strict=False):
            if draft_tokens and sequence.finish_reason is None:
                self._roll_back(sequence)
        if self._events is not None:
            self._events.flush()

    def resume(self, sequence: TokenSequence, tokens: Sequence[SampledToken]) -> None:
        """Appends the next tokens of a deferred sequence, which further steps include again.

        Args:
            sequence: the sequence. If it was preempted meanwhile, it waits from now on, and is computed again.
            tokens: the accepted draft tokens, if any, and the token after them.
        """
        state = sequence.state
        state.deferred = False
        self._append([sequence] * len(tokens), list(zip(tokens, strict=True)))
        if sequence.finish_reason is None:
            if state.draft_tokens:
                self._roll_back(sequence)
            state.num_tokens = len(sequence.token_ids)
            if not sequence.is_running:
                self._waiting.put_back(sequence)
        if self._events is not None:
            self._events.flush()

    def _append(self, sequences: Sequence[TokenSequence], tokens: Sequence[Sequence[SampledToken]]) -> None:
        """Appends tokens to sequences, and ends those that are complete.

        Args:
            sequences: the sequence of each token. Tokens after the one that ends it are dropped.
            tokens: the tokens, each in a sequence of its own.
        """
        stride = self._cache.stride
        for sequence, (sampled,) in zip(sequences, tokens, strict=True):
            if sequence.finish_reason is not None:  # by a token before, by finish(), or by the step before
                continue
            if sampled.is_nan:
                self.finish(sequence, "error")
                continue
            token, token_ids = sampled.token, sequence.token_ids
            known = len(token_ids)
            if known % stride == 0 or sequence.cache.has_unpublished_blocks:
                self._prefixes.publish(sequence)
            token_ids.append(token)
            if token in sequence.stop_token_ids:
                self.finish(sequence, "stop")
            elif known + 1 >= sequence.max_tokens:
                self.finish(sequence, "length")

    def _roll_back(self, sequence: TokenSequence) -> None:
        """Rolls back the rejected draft tokens of a sequence."""
        state, known = sequence.state, len(sequence.token_ids) - 1
        state.draft_tokens, state.num_tokens = [], len(sequence.token_ids)
        if sequence.is_running and state.num_computed_tokens >= known:  # otherwise it was preempted meanwhile
            state.num_computed_tokens = self._cache.roll_back(
                sequence.cache.held, state.num_computed_tokens, known, self._copies
            )
            state.recomputing = state.num_computed_tokens < known

    def fork(self, sequence: TokenSequence, child: TokenSequence) -> None:
        """Adds a new deferred sequence that continues another one.

        The new sequence shares the blocks of the other one and runs at once. If this is not possible now, it waits once
        it is resumed, and is computed again.

        Args:
            sequence: the other sequence, which is deferred.
            child: the new sequence, with exactly the same tokens.
        """
        child.state.deferred = True
        self._waiting.arrive(child, sibling=sequence)
        if not sequence.is_running or len(self._running) == self._limits.sequences:
            return
        computed = sequence.state.num_computed_tokens
        held = self._cache.fork(sequence.cache.held, computed, computed, computed + 1, len(self._running), self._copies)
        if held is None:
            return
        child.cache.held = held
        child.state.effective_priority = sequence.state.effective_priority
        child.state.num_computed_tokens = child.state.num_charged_tokens = child.state.num_cached_tokens = computed
        self._prefixes.fork(sequence, child)
        self._run(child)

    def finish(self, sequence: TokenSequence, reason: str, *, replace: bool = False) -> None:
        """Ends a sequence that waits or runs, and frees its blocks. One that has ended before stays as it is.

        Args:
            sequence: the sequence.
            reason: "stop", "length", "error" or "abort".
            replace: replace the reason of a sequence that has ended before.
        """
        if sequence.finish_reason is not None:
            if replace:
                sequence.finish_reason = reason
            return
        sequence.finish_reason = reason
        sequence.state.num_tokens = len(sequence.token_ids)
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
        """Adds a sequence whose blocks are allocated to the running ones."""
        insort(self._running, sequence, key=self._waiting.order)
        if self._adapters is not None:
            sequence.state.adapter_slot = self._adapters.acquire(sequence.adapter)
        self._packer.place(sequence)
        self._last = None

    def _displace(self) -> bool:
        """Preempts one running best-effort sequence for more urgent work that cannot be admitted; True if it did."""
        if not self._running or self._running[-1].state.effective_priority < BEST_EFFORT:
            return False
        if len(self._running) < self._limits.sequences and not self._waiting.no_room:
            return False
        if not self._waiting.has_other_than_best_effort:  # else two would preempt each other in turns
            return False
        self._preempt(self._running[-1])
        return True

    def _evict_parked(self) -> bool:
        """Preempts a parked sequence for waiting ones where no sequence can advance otherwise; True if it did."""
        if not len(self._waiting) or any(sequence.num_in_flight_tokens for sequence in self._running):
            return False
        parked = next((sequence for sequence in reversed(self._running) if sequence.is_parked), None)
        if parked is None:
            return False
        self._preempt(parked)
        return True

    def _has_room(self, sequence: TokenSequence) -> bool:
        """Allocates blocks for all tokens of a decoding sequence, and preempts the last running sequences for them.

        Returns:
            False if the sequence itself had to be preempted.
        """
        while not self._cache.grow(sequence.cache.held, sequence.state.num_tokens):
            last = self._running[-1]
            self._preempt(last)
            if last is sequence:
                return False
        return True

    def _preempt(self, sequence: TokenSequence) -> None:
        """Frees the blocks of a running sequence, which waits and is computed again later.

        A deferred sequence is not queued before it is resumed.
        """
        self._leave(sequence)
        state = sequence.state
        state.draft_tokens, state.recomputing = [], False
        state.num_computed_tokens = 0
        state.num_preemptions += 1
        self.num_preemptions += 1
        if not state.deferred:
            self._waiting.put_back(sequence)

    def _leave(self, sequence: TokenSequence) -> None:
        """Removes a sequence from the running ones, and frees its blocks."""
        self._running.remove(sequence)
        self._waiting.charge(sequence)
        self._prefixes.end(sequence)
        self._cache.release(sequence.cache.held)
        sequence.cache.held = []
        self._packer.remove(sequence)
        if self._adapters is not None:
            self._adapters.release(sequence.adapter)
        self._waiting.no_room = False
        self._last = None

    def _repeat_last_step(self) -> StepPlan | None:
        """Plans the last step again, one position further; None if the next step is not such a repeat."""
        if isinstance(self._last, StepPlan):
            self._last = RepeatedDecodes(self._last, self._cache.stride)
        decodes = self._last
        if decodes is None or decodes.are_over:
            return None
        growing = decodes.growing_next()
        if not growing:
            return decodes.plan_next(self._packer, growing, self._no_blocks, self._no_copies)
        for row in growing:
            if not self._has_room(decodes.first.rows.sequences[row]) or self._last is None:  # a sequence was preempted
                return None
        new_blocks, copies = self._extend([decodes.first.first_scheduled[row] for row in growing])
        return decodes.plan_next(self._packer, growing, new_blocks, copies)

    def _build_step(self) -> StepPlan | None:
        """Plans a step of all running sequences that have tokens to compute; None if none has."""
        scheduled: list[ScheduledTokens] = []
        growing: list[ScheduledTokens] = []  # those whose block tables may have to grow
        verifying: list[ScheduledTokens] = []
        reading, stride = [], self._cache.stride
        # Each of the steps under way has its share of the sequences and of the limits.
        share, max_tokens, max_rows = (
            -(-whole // self._num_under_way)
            for whole in (len(self._running), self._limits.tokens, self._limits.logit_rows)
        )
        spare = min(max_tokens, max_rows) - share  # for draft tokens, since every sequence of the step may decode
        for sequence in self._running:
            state = sequence.state
            if state.deferred or (self._num_under_way > 1 and sequence.num_in_flight_tokens):
                continue
            first, length = state.num_computed_tokens, state.num_tokens
            again = length - first - 1 if state.recomputing else 0
            if length - first > 1 and not (0 < again <= spare):
                state.draft_tokens = []
                reading.append(sequence)
            elif (
                length > first
                and len(scheduled) + len(verifying) < share
                and not ((length >= sequence.max_tokens or state.draft_tokens) and length > len(sequence.token_ids))
            ):
                # A decode needs a block where its token is the first of one. The sequence that is preempted for it
                # comes later in this list, or it is the last one and is itself preempted.
                if (again or first % stride == 0) and not self._has_room(sequence):
                    break
                count = self._fit_draft_tokens(sequence, spare - again) if state.draft_tokens else 0
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
        taken = num_decodes + sum(one.num_tokens for one in verifying)  # each also has a row of logits
        # A prompt advances in every step. Without stages it always has a token, since it does not decode.
        tokens, rows = max(max_tokens - taken, 1), max(max_rows - taken, 1)
        keeps_pace = any(one.sequence.state.effective_priority < BEST_EFFORT for one in scheduled)
        scheduled += self._chunks.cut(reading, tokens, rows, others=scheduled, keeps_pace=keeps_pace)
        return self._plan(scheduled, num_decodes, growing + scheduled[num_decodes:]) if scheduled else None

    def _fit_draft_tokens(self, sequence: TokenSequence, spare: int) -> int:
        """Drops the draft tokens of a sequence that cannot be verified in this step.

        Args:
            sequence: the sequence, with draft tokens.
            spare: number of tokens, each with a row of logits, that the step has left for draft tokens.

        Returns:
            The number of draft tokens that remain.
        """
        length = sequence.state.num_tokens
        count = min(len(sequence.state.draft_tokens), spare, sequence.max_tokens - length - 1)
        if count > 0 and not (
            self._cache.grow(sequence.cache.held, length + count)
            and self._cache.checkpoint(sequence.cache.held, sequence.state.num_computed_tokens, self._copies)
        ):
            count = 0
        del sequence.state.draft_tokens[count:]
        return count

    def _plan(self, scheduled: list[ScheduledTokens], num_decodes: int, growing: list[ScheduledTokens]) -> StepPlan:
        """Plans a step of these tokens.

        Args:
            scheduled: the tokens of each sequence, decodes first.
            num_decodes: number of the first ones, which decode one token each without draft tokens.
            growing: those that may need new blocks.
        """
        new_blocks, copies = self._extend(growing)
        sizes, arrays = self._packer.pack(scheduled, num_decodes, growing)
        rows, ending = _advance(scheduled)
        for one in scheduled[num_decodes:]:
            # Later, its blocks may have left a sliding window.
            self._prefixes.tag(one.sequence, min(one.end, len(one.sequence.token_ids)))
        inputs = StepInputs(sizes, arrays, copies, new_blocks)
        plan = StepPlan(inputs, tuple(scheduled), num_decodes, rows, tuple(ending))
        repeats = self._num_under_way == 1 and num_decodes == len(self._running) == len(rows.sequences)
        self._last = plan if repeats else None
        return plan

    def _extend(self, scheduled: Sequence[ScheduledTokens]) -> tuple[tuple[list[int], ...], tuple[Copies, ...]]:
        """Gives sequences the blocks that they write in a step.

        Returns:
            By cache group, the blocks to zero before the step, and the copies to make before it.
        """
        new: tuple[list[int], ...] = tuple([] for _ in self._no_blocks)
        for one in scheduled:
            first = one.sequence.state.num_computed_tokens
            self._cache.extend(one.sequence.cache.held, first, first + one.num_tokens, new, self._copies)
        copies, self._copies = self._copies, tuple([] for _ in self._no_copies)
        return new, copies


def _advance(scheduled: Sequence[ScheduledTokens]) -> tuple[LogitRows, list[TokenSequence]]:
    """Advances the sequences of a step by its tokens.

    Args:
        scheduled: the tokens of each sequence, in the order of the step.

    Returns:
        The rows of logits that the step computes, and the sequences without a request whose last token is in it.
    """
    sampling: list[TokenSequence] = []
    requests: list[RowRequest] = []
    other: dict[int, LogitRow] = {}
    ending: list[TokenSequence] = []
    for one in scheduled:
        sequence, request, end = one.sequence, one.sequence.request, one.first + one.num_tokens
        state = sequence.state
        state.num_computed_tokens, state.recomputing = end, False
        if request is None:
            if end == state.num_tokens:
                ending.append(sequence)
            continue
        if state.needs_prompt_logits:
            for row in _rows_of_prompt(one, request):
                other[len(requests)] = row
                requests.append(row.request)
            if end < state.num_tokens:
                continue
        if one.num_logit_rows:
            state.logits_row, draft_tokens = len(requests), state.draft_tokens
            state.num_tokens += 1 + len(draft_tokens)
            if sequence.is_beam:
                state.deferred = True
                other[len(requests)] = LogitRow(sequence, RowPurpose.SEARCH, request)
            else:
                sampling.append(sequence)
            requests.append(request)
            if draft_tokens:
                for index, after in enumerate(request.rows_after(draft_tokens), start=1):
                    other[len(requests)] = LogitRow(sequence, RowPurpose.VERIFY, after, index)
                    requests.append(after)
    return LogitRows.with_other(sampling, requests, other), ending


def _rows_of_prompt(scheduled: ScheduledTokens, request: SamplingRequest) -> list[LogitRow]:
    """Makes the rows that score tokens of a prompt, each of which is the next one after the row's own token.

    Args:
        scheduled: the tokens of the prompt's sequence in the step.
        request: the sequence's request.
    """
    sequence, end = scheduled.sequence, scheduled.end
    positions = range(end + 1 - scheduled.num_logit_rows, min(end + 1, len(sequence.token_ids)))
    return [
        LogitRow(sequence, RowPurpose.SCORE_PROMPT, request.prompt_token(sequence.token_ids[position]), position)
        for position in positions
    ]
