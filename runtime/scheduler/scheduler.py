"""What runs in the next step: decodes first, then as much of the prompts as the token budget takes.

plan = scheduler.schedule()
outputs = executor.run(plan)
scheduler.commit(plan, [(token,) for token in sampler.sample(outputs.logits, plan.requests)])

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
from enginewright.runtime.sampling.sampling import RowRequest, SampledToken
from enginewright.runtime.scheduler.chunks import PromptChunks
from enginewright.runtime.scheduler.decodes import RepeatedDecodes
from enginewright.runtime.scheduler.prefixes import SharedPrefixes
from enginewright.runtime.scheduler.stored import PlaceMemory, StoredPrefixes
from enginewright.runtime.scheduler.waiting import WaitingSequences
from enginewright.runtime.step.sequence import TokenSequence
from enginewright.runtime.step.step_goal import StepGoal
from enginewright.runtime.step.step_plan import Packer, Part, StepPlan
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
        """Take up what a step sampled.

        Args:
            accepted: the tokens of each sequence of `plan.sampling`: one, or as many as there were right guesses, and
                the one that was sampled behind them.

        Returns:
            The sequences that ended with it.
        """
        ended, stride, has_unpublished_blocks = [], self._cache.stride, plan.has_unpublished_blocks
        if plan.verifying:
            accepted = [self._commit_draft_tokens(*each) for each in zip(plan.sampling, accepted, strict=True)]
        for sequence, (sampled,) in zip(plan.sampling, accepted, strict=True):
            sequence.deferred = False
            if sequence.finish_reason is not None:  # by finish(), or by the step before
                continue
            if sampled.is_nan:
                ended.append((sequence, "error"))
                continue
            token, token_ids = sampled.token, sequence.token_ids
            known = len(token_ids)
            if known % stride == 0 or (has_unpublished_blocks and sequence.has_unpublished_blocks):
                self._prefixes.publish(sequence)
            if sequence.is_beam:
                sequence.num_tokens = known
                continue
            token_ids.append(token)
            if token in sequence.stop_token_ids:
                ended.append((sequence, "stop"))
            elif known + 1 >= sequence.max_tokens:
                ended.append((sequence, "length"))
        ended += [(sequence, "length") for sequence in plan.ending if sequence.finish_reason is None]
        for sequence, reason in ended:
            self.finish(sequence, reason)
        for sequence in plan.verifying:
            self._take_back(sequence)
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

    def _take_back(self, sequence: TokenSequence) -> None:
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

    def finish(self, sequence: TokenSequence, reason: str) -> None:
        """End a sequence now, wherever it is; its blocks are free again. One that has ended stays as it is."""
        if sequence.finish_reason is not None:
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
            if not self._has_room(decodes.first.sampling[row]) or self._last is None:  # somebody was preempted
                return None
        new_blocks, copies = self._extend([decodes.first.first_parts[row] for row in growing])
        return decodes.plan_next(self._packer, growing, new_blocks, copies)

    def _build_step(self) -> StepPlan | None:
        """A step of all that can be done; None if nothing can."""
        parts: list[Part] = []
        growing: list[Part] = []  # those whose block tables may have to
        verifying: list[Part] = []
        reading, stride = [], self._cache.stride
        spare = min(self._limits.tokens, self._limits.logit_rows) - len(self._running)  # for guesses: all may decode
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
                # A decode takes a block where its token is the first of one. Who is preempted for it comes behind it
                # in this list, or is itself the last.
                if (again or first % stride == 0) and not self._has_room(sequence):
                    break
                count = self._fit_draft_tokens(sequence, spare - again) if sequence.draft_tokens else 0
                if again or count:
                    verifying.append(Part(sequence, first, again + 1 + count, 1 + count))
                    spare -= again + count
                    continue
                part = Part(sequence, first, 1, 1)
                if first % stride == 0:
                    growing.append(part)
                parts.append(part)
        num_decodes = len(parts)
        parts += verifying
        taken = num_decodes + sum(part.num_tokens for part in verifying)  # a row of logits each, too
        tokens, rows = self._limits.tokens - taken, self._limits.logit_rows - taken
        keeps_pace = any(part.sequence.effective_priority < BEST_EFFORT for part in parts)
        parts += self._chunks.cut(reading, tokens, rows, beside=parts, keeps_pace=keeps_pace)
        return self._plan(parts, num_decodes, growing + parts[num_decodes:]) if parts else None

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

    def _plan(self, parts: list[Part], num_decodes: int, growing: list[Part]) -> StepPlan:
        """A step of these.

        Args:
            num_decodes: the first parts, of one token, behind which nothing is known.
            growing: parts that may take blocks.
        """
        new_blocks, copies = self._extend(growing)
        sizes, inputs = self._packer.pack(parts, num_decodes, growing)
        sampling: list[TokenSequence] = []
        requests: list[RowRequest] = []
        prompt_rows: list[tuple[int, TokenSequence, int]] = []
        ending: list[TokenSequence] = []
        for part in parts:
            sequence = part.sequence
            sequence.num_computed_tokens = end = part.first + part.num_tokens
            sequence.recomputing = False
            if sequence.request is None:
                if end == sequence.num_tokens:
                    ending.append(sequence)
                continue
            if sequence.needs_prompt_logits:  # a row scores the token after its own
                for position in range(end + 1 - part.num_logit_rows, min(end + 1, len(sequence.token_ids))):
                    prompt_rows.append((len(requests), sequence, position))
                    requests.append(sequence.request.prompt_token(sequence.token_ids[position]))
                if end < sequence.num_tokens:
                    continue
            if part.num_logit_rows:
                sequence.logits_row = len(requests)
                sequence.num_tokens += 1
                sampling.append(sequence)
                requests.append(sequence.request)
                if sequence.draft_tokens:
                    sequence.num_tokens += len(sequence.draft_tokens)
                    requests += sequence.request.rows_after(sequence.draft_tokens)
        verifying: list[TokenSequence] = []
        for part in parts[num_decodes:]:
            sequence = part.sequence
            if sequence.draft_tokens:
                verifying.append(sequence)
            # Later, its blocks may have fallen out of a window.
            self._prefixes.tag(sequence, min(part.end, len(sequence.token_ids)))
        plan = StepPlan(
            tuple(parts),
            num_decodes,
            sizes,
            inputs,
            copies,
            new_blocks,
            tuple(sampling),
            tuple(requests),
            has_grammar=any(request.grammar is not None for request in requests),
            ending=tuple(ending),
            # Also of a decode: it may be a prompt's last token.
            has_unpublished_blocks=any(sequence.has_unpublished_blocks for sequence in sampling),
            prompt_rows=tuple(prompt_rows),
            verifying=tuple(verifying),
        )
        repeats = num_decodes == len(self._running) == len(sampling) and not any(one.is_beam for one in sampling)
        self._last = plan if repeats else None
        return plan

    def _extend(self, parts: Sequence[Part]) -> tuple[tuple[list[int], ...], tuple[Copies, ...]]:
        """Room for these to write what they compute: what is to be zeroed, and copied before, a group."""
        new: tuple[list[int], ...] = tuple([] for _ in self._no_blocks)
        for part in parts:
            first = part.sequence.num_computed_tokens
            self._cache.extend(part.sequence.held, first, first + part.num_tokens, new, self._copies)
        copies, self._copies = self._copies, tuple([] for _ in self._no_copies)
        return new, copies
