"""What runs in the next step: decodes first, then as much of the prompts as the token budget takes.

plan = scheduler.schedule()
logits = executor.run(plan)
scheduler.commit(plan, [(token,) for token in sampler.sample(logits, plan.requests)])

The next step may be planned before this one is committed, and no more than that. Its tokens are then those that this
one samples, and all but the tokens themselves is known: what their keys and values take, and whether a sequence ends
by its length. One that ends otherwise has computed a token for nothing. Blocks may be reused at once: steps execute in
the order in which they are planned.
"""

from bisect import insort
from collections.abc import Callable, Sequence
from time import perf_counter

from enginewright.plan import CacheGroup
from enginewright.runtime.cache.cache import Cache
from enginewright.runtime.cache.keys import PrefixKeys
from enginewright.runtime.cache.kind import Copies
from enginewright.runtime.envelope import Envelope
from enginewright.runtime.sampling import RowRequest, SampledToken
from enginewright.runtime.sequence import TokenSequence
from enginewright.runtime.step_plan import Packer, Part, StepPlan


class _Decodes:
    """A step that takes one token of each sequence that runs, and those after it that are the same, further on.

    step: how many have been planned. last: how many there may be; then a sequence, or several, end by their length.
    """

    def __init__(self, plan: StepPlan, stride: int) -> None:
        self.plan, self.stride, self.step = plan, stride, 0
        self.last = min(sequence.max_tokens - sequence.num_tokens for sequence in plan.sampling)
        self._growing: dict[int, list[int]] = {}  # rows whose token is the first of a block, by step modulo the stride
        for row, sequence in enumerate(plan.sampling):
            self._growing.setdefault((1 - sequence.num_computed_tokens) % stride, []).append(row)

    def growing_next(self) -> Sequence[int]:
        """Rows that begin a block in the next step."""
        return self._growing.get((self.step + 1) % self.stride, ())


class Scheduler:
    """First come, first served; when KV blocks run out, the latest arrival is preempted and computed anew later.

    A sequence is admitted when there is room for what it has so far, and for a block more of each that runs. Whoever
    runs has arrived before whoever waits, so the oldest is never skipped nor preempted, and it moves on in every
    step: a sequence ends within as many steps as it and those before it have tokens, prompts and answers together.

    Args:
        prefix_caching: sequences that begin with the same tokens share KV blocks, also with those that have ended.
        chunk: what the prompts of a step may cost beside decodes (one token they may always have); None: no bound.
        cost: of a prompt's token at a position.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        envelope: Envelope,
        *,
        prefix_caching: bool = False,
        chunk: int | None = None,
        cost: Callable[[int], float] = lambda position: 1.0,
    ) -> None:
        self._limits = envelope.limits
        self._cache = Cache(groups, envelope.num_blocks, envelope.limits.tokens, envelope.limits.sequences)
        self._chunk, self._cost = chunk, cost
        self._prefix_caching = prefix_caching and self._cache.block_size is not None
        self._packer = Packer(groups, envelope.limits)
        self._waiting: list[TokenSequence] = []  # both in the order of arrival
        self._running: list[TokenSequence] = []
        self._arrivals: dict[TokenSequence, int] = {}
        self._num_arrivals = 0
        self._being_written: dict[bytes, TokenSequence] = {}  # blocks by key that will be there soon, and from whom
        self._no_room = False  # for the first that waits, until a sequence leaves
        self._no_blocks: tuple[list[int], ...] = tuple([] for _ in groups)
        self._no_copies: tuple[Copies, ...] = tuple([] for _ in groups)
        self._copies: tuple[Copies, ...] = tuple([] for _ in groups)  # for the next step
        self._last: StepPlan | _Decodes | None = None  # if the next step may be the same, a position further
        self.num_preemptions = 0
        self.num_prompt_tokens = 0  # of the sequences that were admitted, siblings left out
        self.num_cached_prompt_tokens = 0  # of these, what others had computed

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of those that wait, all to be computed."""
        return sum(sequence.num_tokens for sequence in self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_unfinished(self) -> int:
        return len(self._waiting) + len(self._running)

    @property
    def num_free_blocks(self) -> tuple[int, ...]:
        """Blocks that no sequence holds, a group."""
        return self._cache.num_free

    def add(self, sequence: TokenSequence) -> None:
        self._arrivals[sequence] = self._num_arrivals
        self._num_arrivals += 1
        if self._prefix_caching and sequence.request is not None and not sequence.every_logit:
            sequence.keys = PrefixKeys(self._cache.block_size or 0, sequence.cache_salt)
        self._waiting.append(sequence)

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
        ended, stride = [], self._cache.stride
        for sequence, tokens in zip(plan.sampling, accepted, strict=True):
            if sequence.finish_reason is not None:  # by finish(), or by the step before
                continue
            for sampled in tokens:
                if sampled.is_nan:
                    ended.append((sequence, "error"))
                    break
                token, token_ids = sampled.token, sequence.token_ids
                known = len(token_ids)
                if known % stride == 0 or (plan.has_pending and self._cache.is_pending(sequence.held)):
                    self._share(sequence)
                token_ids.append(token)
                sequence.num_in_flight_tokens -= 1
                if token in sequence.stop_token_ids:
                    ended.append((sequence, "stop"))
                    break
                if known + 1 >= sequence.max_tokens:
                    ended.append((sequence, "length"))
                    break
        ended += [(sequence, "length") for sequence in plan.ending if sequence.finish_reason is None]
        for sequence, reason in ended:
            self.finish(sequence, reason)
        for sequence in plan.verifying:
            self._take_back(sequence)
        return [sequence for sequence, _ in ended]

    def _take_back(self, sequence: TokenSequence) -> None:
        """Take back the guesses that were wrong."""
        if sequence.finish_reason is not None:
            return
        sequence.guesses, sequence.num_in_flight_tokens = [], 0
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
        sequence.num_in_flight_tokens = 0
        del self._arrivals[sequence]
        if sequence.is_running:
            self._running.remove(sequence)
            self._leave(sequence)
        else:
            self._waiting.remove(sequence)
            self._no_room = False

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._limits.sequences and not self._no_room:
            sequence = self._waiting[0]
            sibling = sequence.sibling_of
            if sibling is not None and sibling.is_running and not self._has_begun(sibling):
                return  # in a few steps, it takes nothing but the answer
            keys = self._keys(sequence, sequence.num_tokens - 1)  # one token is left to give logits
            shared = self._cache.num_shared(keys)
            if shared < len(keys) and keys[shared] in self._being_written:
                return  # likewise
            if not (self._fork(sequence) or self._open(sequence, keys[:shared])):
                self._no_room = True
                return
            self._running.append(self._waiting.pop(0))
            self._packer.place(sequence)
            self._last = None
            if sequence.num_cached_tokens is None:
                sequence.num_cached_tokens = sequence.num_computed_tokens
                sequence.admitted_at = perf_counter()
                if sibling is None:
                    self.num_prompt_tokens += sequence.num_prompt_tokens
                    self.num_cached_prompt_tokens += sequence.num_cached_tokens
            sequence.keys_in_flight = self._keys(sequence, len(sequence.token_ids))[shared:]
            for key in sequence.keys_in_flight:
                self._being_written.setdefault(key, sequence)

    def _open(self, sequence: TokenSequence, keys: Sequence[bytes]) -> bool:
        length, shares = sequence.num_tokens, sequence.keys is not None
        held = self._cache.admit(length, keys, len(self._running), self._copies, shares=shares)
        if held is None:
            return False
        sequence.held = held
        sequence.num_computed_tokens = len(keys) * (self._cache.block_size or 0)
        return True

    def _fork(self, sequence: TokenSequence) -> bool:
        """Begin where the prompt of a sibling ends: its last token alone is computed again, and gives the logits."""
        sibling = sequence.sibling_of
        if sibling is None or not sibling.is_running or sequence.num_tokens > sequence.num_prompt_tokens:
            return False
        length, spare = sequence.num_prompt_tokens, len(self._running)
        held = self._cache.fork(sibling.held, sibling.num_computed_tokens, length - 1, length, spare, self._copies)
        if held is None:
            return False
        sequence.held = held
        sequence.num_computed_tokens = length - 1
        return True

    @staticmethod
    def _has_begun(sequence: TokenSequence) -> bool:
        """Whether its prompt is computed, and numbers came out of it."""
        return min(sequence.num_computed_tokens, len(sequence.token_ids) - 1) >= sequence.num_prompt_tokens

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
        self._running.remove(sequence)
        self._leave(sequence)
        sequence.guesses = []
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        insort(self._waiting, sequence, key=self._arrivals.__getitem__)

    def _leave(self, sequence: TokenSequence) -> None:
        self._is_written(sequence)
        self._cache.release(sequence.held)
        sequence.held = []
        self._no_room = False
        self._packer.remove(sequence)
        self._last = None

    def _keys(self, sequence: TokenSequence, num_tokens: int) -> Sequence[bytes]:
        """Of the full blocks within a sequence's first tokens; none if it does not share."""
        if sequence.keys is None or self._cache.block_size is None:
            return ()
        return sequence.keys.of(sequence.token_ids, num_tokens // self._cache.block_size)

    def _is_written(self, sequence: TokenSequence) -> None:
        """What it was to write is there, or never comes."""
        for key in sequence.keys_in_flight:
            if self._being_written.get(key) is sequence:
                del self._being_written[key]
        sequence.keys_in_flight = ()

    def _share(self, sequence: TokenSequence) -> None:
        """Let others find the blocks that are full before the token that it gets. No later step has tagged any."""
        if sequence.keys is None or self._cache.block_size is None or not sequence.is_running:
            return
        keys = self._keys(sequence, len(sequence.token_ids))
        self._cache.tag(sequence.held, keys)
        self._cache.publish(sequence.held)
        self._is_written(sequence)

    def _same(self) -> StepPlan | None:
        """The last step once more, a position further; None if there is more to it."""
        if isinstance(self._last, StepPlan):
            self._last = _Decodes(self._last, self._cache.stride)
        decodes = self._last
        if decodes is None or decodes.step == decodes.last:
            return None
        growing = decodes.growing_next()
        first, sampling = decodes.plan, decodes.plan.sampling
        for row in growing:
            if not self._has_room(sampling[row]) or self._last is None:  # somebody was preempted
                return None
        new_blocks, copies = self._no_blocks, self._no_copies
        if growing:
            new_blocks, copies = self._extend([first.first_parts[row] for row in growing])
        sizes, inputs = self._packer.advance(sampling, growing)
        for sequence in sampling:
            sequence.num_computed_tokens += 1
            sequence.num_in_flight_tokens += 1
        decodes.step += 1
        return StepPlan(
            first.first_parts,
            first.num_decodes,
            sizes,
            inputs,
            copies,
            new_blocks,
            sampling,
            first.requests,
            first.has_grammar,
            num_steps_since=decodes.step,
        )

    def _other(self) -> StepPlan | None:
        """A step of all that can be done; None if nothing can."""
        parts: list[Part] = []
        growing: list[Part] = []  # those whose block tables may have to
        verifying: list[Part] = []
        reading, stride = [], self._cache.stride
        spare = min(self._limits.tokens, self._limits.logit_rows) - len(self._running)  # for guesses: all may decode
        for sequence in self._running:
            first, in_flight = sequence.num_computed_tokens, sequence.num_in_flight_tokens
            length = len(sequence.token_ids) + in_flight
            if length - first > 1:
                reading.append(sequence)
            elif length > first and not (in_flight and (length >= sequence.max_tokens or sequence.guesses)):
                # A decode takes a block where its token is the first of one. Who is preempted for it comes behind it
                # in this list, or is itself the last.
                if first % stride == 0 and not self._has_room(sequence):
                    break
                if sequence.guesses:
                    spare -= self._fit_guesses(sequence, spare)
                part = Part(sequence, first, 1 + len(sequence.guesses), 1 + len(sequence.guesses))
                if sequence.guesses:
                    verifying.append(part)
                    continue
                if first % stride == 0:
                    growing.append(part)
                parts.append(part)
        num_decodes = len(parts)
        parts += verifying
        budget = self._limits.tokens - sum(part.num_tokens for part in parts)
        rows = self._limits.logit_rows - sum(part.num_logit_rows for part in parts)
        chunk: float | None = self._chunk if parts else None
        least = 1
        for sequence in reading:
            first = sequence.num_computed_tokens
            uncomputed = sequence.num_tokens - first
            count = min(uncomputed, budget, rows) if sequence.every_logit else min(uncomputed, budget)
            if self._cache.has_snapshots:
                count = self._cache.chunk_end(sequence.held, first, first + count) - first
            if chunk is not None:
                cost = self._cost(first)
                count = min(count, max(int(chunk / cost), least))
                chunk -= count * cost
            wanted = count if sequence.every_logit else int(count == uncomputed)
            if count == 0 or wanted > rows:
                continue
            parts.append(Part(sequence, first, count, wanted))
            budget -= count
            rows -= wanted
            least = 0
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
        new_blocks, copies = self._extend(growing)
        sizes, inputs = self._packer.pack(parts, num_decodes, growing)
        sampling: list[TokenSequence] = []
        requests: list[RowRequest] = []
        prompt_rows: list[tuple[int, TokenSequence, int]] = []
        ending: list[TokenSequence] = []
        for part in parts:
            sequence = part.sequence
            sequence.num_computed_tokens = end = part.end
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
                count = 1 + len(sequence.guesses)
                sequence.logits_row = len(requests)
                sequence.num_in_flight_tokens += count
                sampling.append(sequence)
                requests += [sequence.request] * count
        for part in parts[num_decodes:]:  # later, they may have fallen out of a window
            sequence = part.sequence
            known = min(part.end, len(sequence.token_ids))
            self._cache.tag(sequence.held, self._keys(sequence, known))
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
            has_pending=any(self._cache.is_pending(sequence.held) for sequence in sampling),
            prompt_rows=tuple(prompt_rows),
            verifying=tuple(sequence for sequence in sampling if sequence.guesses),
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
