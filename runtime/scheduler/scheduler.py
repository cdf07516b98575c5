"""What runs in the next step: decodes first, then as much of the prompts as the token budget takes.

plan = scheduler.schedule()
outputs = executor.run(plan)
scheduler.commit(plan, [(token,) for token in sampler.sample(outputs.logits, plan.requests)])

The next step may be planned before this one is committed, and no more than that. Its tokens are then those that this
one samples, and all but the tokens themselves is known: what their keys and values take, and whether a sequence ends
by its length. One that ends otherwise has computed a token for nothing. Blocks may be reused at once: steps execute in
the order in which they are planned.
"""

from collections.abc import Callable, Sequence

from enginewright.plan import CacheGroup
from enginewright.runtime.cache.cache import Cache
from enginewright.runtime.cache.kind import Copies
from enginewright.runtime.memory_plan import MemoryPlan
from enginewright.runtime.sampling import RowRequest, SampledToken
from enginewright.runtime.scheduler.chunks import PromptChunks
from enginewright.runtime.scheduler.decodes import RepeatedDecodes
from enginewright.runtime.scheduler.prefixes import SharedPrefixes
from enginewright.runtime.scheduler.waiting import WaitingSequences
from enginewright.runtime.sequence import TokenSequence
from enginewright.runtime.step_plan import Packer, Part, StepPlan


class Scheduler:
    """First come, first served; when KV blocks run out, the latest arrival is preempted and computed anew later.

    Whoever runs has arrived before whoever waits, so the oldest is never skipped nor preempted, and it moves on in
    every step: a sequence ends within as many steps as it and those before it have tokens, prompts and answers
    together.

    Args:
        prefix_caching: sequences that begin with the same tokens share KV blocks, also with those that have ended.
        chunk: what the prompts of a step may cost beside decodes (one token they may always have); None: no bound.
        cost: of a prompt's token at a position.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        memory_plan: MemoryPlan,
        *,
        prefix_caching: bool = False,
        chunk: int | None = None,
        cost: Callable[[int], float] = lambda position: 1.0,
    ) -> None:
        self._limits = memory_plan.limits
        self._cache = Cache(groups, memory_plan.num_blocks, memory_plan.limits.tokens, memory_plan.limits.sequences)
        self._prefixes = SharedPrefixes(self._cache, enabled=prefix_caching)
        self._waiting = WaitingSequences(self._cache, self._prefixes)
        self._running: list[TokenSequence] = []  # in the order of arrival
        self._chunks = PromptChunks(self._cache, chunk, cost)
        self._packer = Packer(groups, memory_plan.limits)
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

    def add(self, sequence: TokenSequence) -> None:
        self._waiting.add(sequence)

    def schedule(self) -> StepPlan | None:
        """The next step, or None if nothing waits or runs but what the step before ends."""
        self._admit()
        return self._same() or self._other()

    def propose(self, sequence: TokenSequence, guesses: Sequence[int]) -> None:
        """The next step computes these tokens behind the last one too, as many as there is room for.

        It has a row of logits for each, and one before them: `commit` says how many of them were right. A sequence has
        to run, with all of its prompt computed and none of its tokens in flight. Where a recurrent state could not be
        taken back, no guess is computed.
        """
        if self._cache.takes_back:
            sequence.guesses = list(guesses)
            self._last = None

    def commit(self, plan: StepPlan, accepted: Sequence[Sequence[SampledToken]]) -> list[TokenSequence]:
        """Take up what a step sampled.

        Args:
            accepted: the tokens of each sequence of `plan.sampling`: one, or as many as there were right guesses, and
                the one that was sampled behind them.

        Returns:
            The sequences that ended with it.
        """
        ended, stride, has_pending = [], self._cache.stride, plan.has_pending
        if plan.verifying:
            accepted = [self._take_guesses(*each) for each in zip(plan.sampling, accepted, strict=True)]
        for sequence, (sampled,) in zip(plan.sampling, accepted, strict=True):
            if sequence.finish_reason is not None:  # by finish(), or by the step before
                continue
            if sampled.is_nan:
                ended.append((sequence, "error"))
                continue
            token, token_ids = sampled.token, sequence.token_ids
            known = len(token_ids)
            if known % stride == 0 or (has_pending and sequence.has_pending):
                self._prefixes.publish(sequence)
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
        return [sequence for sequence, _ in ended]

    def _take_guesses(self, sequence: TokenSequence, tokens: Sequence[SampledToken]) -> Sequence[SampledToken]:
        """Take up all but the last token, which ends the sequence if one does; the last one."""
        if sequence.finish_reason is not None:
            return tokens[-1:]
        for place, sampled in enumerate(tokens[:-1]):
            ends = sampled.token in sequence.stop_token_ids or len(sequence.token_ids) + 1 >= sequence.max_tokens
            if sampled.is_nan or ends:
                return tokens[place : place + 1]
            if len(sequence.token_ids) % self._cache.stride == 0 or sequence.has_pending:
                self._prefixes.publish(sequence)
            sequence.token_ids.append(sampled.token)
        return tokens[-1:]

    def _take_back(self, sequence: TokenSequence) -> None:
        """Take back the guesses that were wrong."""
        if sequence.finish_reason is not None:
            return
        sequence.guesses, sequence.num_tokens = [], len(sequence.token_ids)
        if sequence.is_running:
            before, computed = sequence.num_computed_tokens, len(sequence.token_ids) - 1
            taken_back = self._cache.truncate(sequence.held, before, computed, (), self._copies)
            sequence.num_computed_tokens = computed
            assert taken_back, "nobody else has blocks of a step that is not committed"

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
        while len(self._running) < self._limits.sequences:
            sequence = self._waiting.admit(len(self._running), self._copies)
            if sequence is None:
                return
            self._running.append(sequence)
            self._packer.place(sequence)
            self._last = None

    def _has_room(self, sequence: TokenSequence) -> bool:
        """Whether a sequence that decodes can go on; the latest arrivals are preempted for it, itself perhaps."""
        while not self._cache.grow(sequence.held, sequence.num_tokens):
            latest = self._running[-1]
            self._preempt(latest)
            if latest is sequence:
                return False
        return True

    def _preempt(self, sequence: TokenSequence) -> None:
        """It waits again, and is computed anew."""
        self._leave(sequence)
        sequence.guesses = []
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.put_back(sequence)

    def _leave(self, sequence: TokenSequence) -> None:
        """It runs no longer."""
        self._running.remove(sequence)
        self._prefixes.end(sequence)
        self._cache.release(sequence.held)
        sequence.held = []
        self._packer.remove(sequence)
        self._waiting.try_again()
        self._last = None

    def _same(self) -> StepPlan | None:
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

    def _other(self) -> StepPlan | None:
        """A step of all that can be done; None if nothing can."""
        parts: list[Part] = []
        growing: list[Part] = []  # those whose block tables may have to
        verifying: list[Part] = []
        reading, stride = [], self._cache.stride
        spare = min(self._limits.tokens, self._limits.logit_rows) - len(self._running)  # for guesses: all may decode
        for sequence in self._running:
            first, length = sequence.num_computed_tokens, sequence.num_tokens
            if length - first > 1:
                reading.append(sequence)
            elif length > first and not (
                (length >= sequence.max_tokens or sequence.guesses) and length > len(sequence.token_ids)
            ):
                # A decode takes a block where its token is the first of one. Who is preempted for it comes behind it
                # in this list, or is itself the last.
                if first % stride == 0 and not self._has_room(sequence):
                    break
                if sequence.guesses and (count := self._fit_guesses(sequence, spare)):
                    verifying.append(Part(sequence, first, 1 + count, 1 + count))
                    spare -= count
                    continue
                part = Part(sequence, first, 1, 1)
                if first % stride == 0:
                    growing.append(part)
                parts.append(part)
        num_decodes = len(parts)
        parts += verifying
        taken = num_decodes + sum(part.num_tokens for part in verifying)  # a row of logits each, too
        tokens, rows = self._limits.tokens - taken, self._limits.logit_rows - taken
        parts += self._chunks.cut(reading, tokens, rows, alone=not parts)
        return self._plan(parts, num_decodes, growing + parts[num_decodes:]) if parts else None

    def _fit_guesses(self, sequence: TokenSequence, spare: int) -> int:
        """Leave as many guesses as there is room for; how many that is."""
        length = sequence.num_tokens
        count = min(len(sequence.guesses), spare, sequence.max_tokens - length - 1)
        if not self._cache.grow(sequence.held, length + count):
            count = 0
        del sequence.guesses[count:]
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
            if sequence.request is None:
                if end == sequence.num_tokens:
                    ending.append(sequence)
                continue
            if sequence.every_logit:  # a row scores the token after its own
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
                if sequence.guesses:
                    sequence.num_tokens += len(sequence.guesses)
                    requests += sequence.request.behind(sequence.guesses)
        verifying: list[TokenSequence] = []
        for part in parts[num_decodes:]:
            sequence = part.sequence
            if sequence.guesses:
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
            has_pending=any(sequence.has_pending for sequence in sampling),
            prompt_rows=tuple(prompt_rows),
            verifying=tuple(verifying),
        )
        self._last = plan if num_decodes == len(self._running) == len(sampling) else None
        return plan

    def _extend(self, parts: Sequence[Part]) -> tuple[tuple[list[int], ...], tuple[Copies, ...]]:
        """Room for these to write what they compute: what is to be zeroed, and copied before, a group."""
        new: tuple[list[int], ...] = tuple([] for _ in self._no_blocks)
        for part in parts:
            first = part.sequence.num_computed_tokens
            self._cache.extend(part.sequence.held, first, first + part.num_tokens, new, self._copies)
        copies, self._copies = self._copies, tuple([] for _ in self._no_copies)
        return new, copies
