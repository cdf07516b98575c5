"""What runs in the next step: decodes first, then as much of the prompts as the token budget takes.

plan = scheduler.schedule()
logits = executor.run(plan)
scheduler.commit(plan, sampler.sample(logits, plan.requests))

The next step may be planned before this one is committed, and no more than that. Its tokens are then those that this
one draws, and all but the tokens themselves is known: what their keys and values take, and whether a sequence ends by
its length. One that ends otherwise has computed a token for nothing. Steps are run in the order in which they are
planned, so blocks may go to others at once: whoever had one before has written into it before.
"""

from bisect import insort
from collections.abc import Callable, Sequence
from time import perf_counter

from enginewright.plan import PagedCache
from enginewright.runtime.envelope import Envelope
from enginewright.runtime.kv_cache import BlockKeys, KvCache
from enginewright.runtime.sampling import RowRequest, SampledToken
from enginewright.runtime.sequence import TokenSequence
from enginewright.runtime.step_plan import Packer, Part, StepPlan


class _Decodes:
    """A step that takes one token of each sequence that runs, and those after it that are the same, further on.

    step: how many have been planned. last: how many there may be; then a sequence, or several, end by their length.
    """

    def __init__(self, plan: StepPlan, stride: int) -> None:
        self.plan, self.stride, self.step = plan, stride, 0
        self.last = min(sequence.max_tokens - len(sequence.token_ids) for sequence in plan.drawing)
        self._growing: dict[int, list[int]] = {}  # rows whose token is the first of a block, by step modulo the stride
        for row, sequence in enumerate(plan.drawing):
            self._growing.setdefault((1 - sequence.num_computed_tokens) % stride, []).append(row)

    def growing_next(self) -> Sequence[int]:
        """Rows that begin a block in the next step."""
        return self._growing.get((self.step + 1) % self.stride, ())


class Scheduler:
    """First come, first served; when KV blocks run out, the latest arrival steps back and is computed anew later.

    A sequence is admitted when there is room for what it has so far, and for a block more of each that runs. Whoever
    runs has arrived before whoever waits, so the oldest is never stepped over nor preempted, and it moves on in every
    step: a sequence ends within as many steps as it and those before it have tokens, prompts and answers together.

    Args:
        prefix_caching: sequences that begin with the same tokens share KV blocks, also with those that have ended.
        chunk: what the prompts of a step may cost beside decodes (one token they may always have); None: no bound.
        cost: of a prompt's token at a position.
    """

    def __init__(
        self,
        groups: Sequence[PagedCache],
        envelope: Envelope,
        *,
        prefix_caching: bool = False,
        chunk: int | None = None,
        cost: Callable[[int], float] = lambda position: 1.0,
    ) -> None:
        self._limits = envelope.limits
        self._cache = KvCache(groups, envelope.num_blocks, envelope.limits.tokens)
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
        self._no_copies: tuple[list[tuple[int, int]], ...] = tuple([] for _ in groups)
        self._copies = self._no_copies  # for the next step
        self._last: StepPlan | _Decodes | None = None  # if the next step may be the same, a position further
        self.num_preemptions = 0
        self.num_prompt_tokens = 0  # of the sequences that were admitted, twins left out
        self.num_cached_prompt_tokens = 0  # of these, what others had computed

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of those that wait, all to be computed."""
        return sum(len(sequence.token_ids) for sequence in self._waiting)

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
            sequence.keys = BlockKeys(self._cache.block_size or 0, sequence.cache_salt)
        self._waiting.append(sequence)

    def schedule(self) -> StepPlan | None:
        """The next step, or None if nothing waits or runs but what the step before ends."""
        self._admit()
        return self._same() or self._other()

    def commit(self, plan: StepPlan, sampled: Sequence[SampledToken]) -> list[TokenSequence]:
        """Take up what a step drew, one token for each of `plan.drawing`; the sequences that ended with it."""
        ended, stride = [], self._cache.stride
        for sequence, drawn in zip(plan.drawing, sampled, strict=True):
            if sequence.finish_reason is not None:  # by finish(), or by the step before
                continue
            if drawn.is_nan:
                ended.append((sequence, "error"))
                continue
            token, known = drawn.token, sequence.num_known_tokens
            if known % stride == 0 or (plan.has_unproven and (tables := sequence.tables) and tables[0].unproven):
                self._share(sequence)
            sequence.token_ids[known] = token
            sequence.num_known_tokens = known = known + 1
            if token in sequence.stop_token_ids:
                ended.append((sequence, "stop"))
            elif known >= sequence.max_tokens:
                ended.append((sequence, "length"))
        ended += [(sequence, "length") for sequence in plan.ending if sequence.finish_reason is None]
        for sequence, reason in ended:
            self.finish(sequence, reason)
        return [sequence for sequence, _ in ended]

    def finish(self, sequence: TokenSequence, reason: str) -> None:
        """End a sequence now, wherever it is; its blocks are free again. One that has ended stays as it is."""
        if sequence.finish_reason is not None:
            return
        sequence.finish_reason = reason
        del sequence.token_ids[sequence.num_known_tokens :], self._arrivals[sequence]
        if sequence.is_running:
            self._running.remove(sequence)
            self._leave(sequence)
        else:
            self._waiting.remove(sequence)
            self._no_room = False

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._limits.sequences and not self._no_room:
            sequence = self._waiting[0]
            twin = sequence.twin_of
            if twin is not None and twin.is_running and not self._has_begun(twin):
                return  # in a few steps, it takes nothing but the answer
            keys = self._keys(sequence, len(sequence.token_ids) - 1)  # one token is left to give logits
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
                if twin is None:
                    self.num_prompt_tokens += sequence.num_prompt_tokens
                    self.num_cached_prompt_tokens += sequence.num_cached_tokens
            sequence.announced = self._keys(sequence, len(sequence.token_ids))[shared:]
            for key in sequence.announced:
                self._being_written.setdefault(key, sequence)

    def _open(self, sequence: TokenSequence, keys: Sequence[bytes]) -> bool:
        tables = self._cache.admit(len(sequence.token_ids), keys, spare=len(self._running))
        if tables is None:
            return False
        sequence.tables = tables
        sequence.num_computed_tokens = len(keys) * (self._cache.block_size or 0)
        return True

    def _fork(self, sequence: TokenSequence) -> bool:
        """Begin where the prompt of a twin ends: its last token alone is computed again, and gives the logits."""
        twin = sequence.twin_of
        if twin is None or not twin.is_running or len(sequence.token_ids) > sequence.num_prompt_tokens:
            return False
        computed = sequence.num_prompt_tokens - 1
        forked = self._cache.fork(twin.tables, computed, sequence.num_prompt_tokens, spare=len(self._running))
        if forked is None:
            return False
        sequence.tables, copies = forked
        self._copies = tuple([*waiting, *more] for waiting, more in zip(self._copies, copies, strict=True))
        sequence.num_computed_tokens = computed
        return True

    @staticmethod
    def _has_begun(sequence: TokenSequence) -> bool:
        """Whether its prompt is computed, and numbers came out of it."""
        return min(sequence.num_computed_tokens, sequence.num_known_tokens - 1) >= sequence.num_prompt_tokens

    def _has_room(self, sequence: TokenSequence) -> bool:
        """Whether a sequence that decodes can go on; the latest arrivals step back for it, itself perhaps."""
        while not self._cache.grow(sequence.tables, len(sequence.token_ids)):
            latest = self._running.pop()
            self._leave(latest)
            latest.num_computed_tokens = 0
            latest.num_preemptions += 1
            self.num_preemptions += 1
            insort(self._waiting, latest, key=self._arrivals.__getitem__)
            if latest is sequence:
                return False
        return True

    def _leave(self, sequence: TokenSequence) -> None:
        self._is_written(sequence)
        self._cache.release(sequence.tables)
        sequence.tables = []
        self._no_room = False
        self._packer.remove(sequence)
        self._last = None

    def _keys(self, sequence: TokenSequence, num_tokens: int) -> Sequence[bytes]:
        """Of the full blocks within a sequence's first tokens; none if it does not share."""
        if sequence.keys is None or self._cache.block_size is None:
            return ()
        return sequence.keys.of(sequence.token_ids, num_tokens // self._cache.block_size)

    def _is_written(self, sequence: TokenSequence) -> None:
        """What it has announced is there, or never comes."""
        for key in sequence.announced:
            if self._being_written.get(key) is sequence:
                del self._being_written[key]
        sequence.announced = ()

    def _share(self, sequence: TokenSequence) -> None:
        """Let others find the blocks that are full before the token that it gets. No later step has tagged any."""
        if sequence.keys is None or self._cache.block_size is None or not sequence.is_running:
            return
        keys = self._keys(sequence, sequence.num_known_tokens)
        self._cache.tag(sequence.tables, keys)
        self._cache.publish(sequence.tables)
        self._is_written(sequence)

    def _same(self) -> StepPlan | None:
        """The last step once more, a position further; None if there is more to it."""
        if isinstance(self._last, StepPlan):
            self._last = _Decodes(self._last, self._cache.stride)
        decodes = self._last
        if decodes is None or decodes.step == decodes.last:
            return None
        growing = decodes.growing_next()
        parts, drawing = decodes.plan.parts, decodes.plan.drawing
        for row in growing:
            if not self._has_room(drawing[row]) or self._last is None:  # somebody has stepped back
                return None
        new_blocks = self._extend([parts[row] for row in growing]) if growing else self._no_blocks
        sizes, inputs = self._packer.advance(drawing, growing)
        for sequence, token in zip(drawing, range(-1, -1 - len(drawing), -1), strict=True):
            sequence.num_computed_tokens += 1
            sequence.token_ids.append(token)
        decodes.step += 1
        rest = drawing, decodes.plan.requests, decodes.plan.has_grammar
        return StepPlan(parts, len(parts), sizes, inputs, self._no_copies, new_blocks, *rest)

    def _other(self) -> StepPlan | None:
        """A step of all that can be done; None if nothing can."""
        parts: list[Part] = []
        growing: list[Part] = []  # those whose block tables may have to
        reading, stride = [], self._cache.stride
        for sequence in self._running:
            first, length = sequence.num_computed_tokens, len(sequence.token_ids)
            if length - first > 1:
                reading.append(sequence)
            elif length > first and not (length >= sequence.max_tokens and sequence.is_drawing_its_last):
                part = Part(sequence, 1, 1)
                # A decode takes a block where its token is the first of one. Who steps back for it comes behind it in
                # this list, or is itself the last.
                if first % stride == 0:
                    if not self._has_room(sequence):
                        break
                    growing.append(part)
                parts.append(part)
        num_decodes = len(parts)
        budget, rows = self._limits.tokens - num_decodes, self._limits.logit_rows - num_decodes
        chunk: float | None = self._chunk if parts else None
        for sequence in reading:
            pending = sequence.num_pending_tokens
            count = min(pending, budget, rows) if sequence.every_logit else min(pending, budget)
            if chunk is not None:
                cost = self._cost(sequence.num_computed_tokens)
                least = 1 if len(parts) == num_decodes else 0
                count = min(count, max(int(chunk / cost), least))
                chunk -= count * cost
            wanted = count if sequence.every_logit else int(count == pending)
            if count == 0 or wanted > rows:
                continue
            parts.append(Part(sequence, count, wanted))
            budget -= count
            rows -= wanted
        return self._plan(parts, num_decodes, growing + parts[num_decodes:]) if parts else None

    def _plan(self, parts: list[Part], num_decodes: int, growing: list[Part]) -> StepPlan:
        new_blocks = self._extend(growing)
        sizes, inputs = self._packer.pack(parts, num_decodes, growing)
        copies, self._copies = self._copies, self._no_copies
        drawing: list[TokenSequence] = []
        requests: list[RowRequest] = []
        prompt_rows: list[tuple[int, TokenSequence, int]] = []
        ending: list[TokenSequence] = []
        for part in parts:
            sequence = part.sequence
            sequence.num_computed_tokens += part.num_tokens
            if sequence.request is None:
                if sequence.num_pending_tokens == 0:
                    ending.append(sequence)
                continue
            if sequence.every_logit:  # a row scores the token after its own
                end = min(sequence.num_computed_tokens + 1, len(sequence.token_ids))
                for position in range(sequence.num_computed_tokens + 1 - part.num_logit_rows, end):
                    prompt_rows.append((len(requests), sequence, position))
                    requests.append(sequence.request.prompt_token(sequence.token_ids[position]))
                if sequence.num_pending_tokens:
                    continue
            if part.num_logit_rows:
                sequence.token_ids.append(-1 - len(requests))
                drawing.append(sequence)
                requests.append(sequence.request)
        for part in parts[num_decodes:]:  # later, they may have fallen out of a window
            sequence = part.sequence
            self._cache.tag(sequence.tables, self._keys(sequence, sequence.num_computed_tokens))
        has_grammar = any(request.grammar is not None for request in requests)
        has_unproven = any(sequence.tables[0].unproven for sequence in drawing)  # a prompt's last token may be a decode
        rest = tuple(drawing), tuple(requests), has_grammar, tuple(ending), has_unproven, tuple(prompt_rows)
        plan = StepPlan(tuple(parts), num_decodes, sizes, inputs, copies, new_blocks, *rest)
        self._last = plan if num_decodes == len(self._running) == len(drawing) else None
        return plan

    def _extend(self, parts: Sequence[Part]) -> tuple[list[int], ...]:
        """Blocks, a group, that these take to write what they compute."""
        new_blocks: tuple[list[int], ...] = tuple([] for _ in self._no_blocks)
        for part in parts:
            first = part.sequence.num_computed_tokens
            self._cache.extend(part.sequence.tables, first, first + part.num_tokens, new_blocks)
        return new_blocks
