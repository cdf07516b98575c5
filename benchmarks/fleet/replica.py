"""A simulated replica: continuous batching with chunks of prompts, and a cache of the most recently used prefixes.

A step computes one token of each answer and a chunk of the prompts, first come, first served. Steps are one event as
long as each of them differs from the one before only by its positions: until an answer or a prompt ends. A prompt that
arrives while no other one is computed begins with the step after the one under way.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from fleet.costs import StepCosts
from fleet.gaps import Gaps

from enginewright.route.prefixes import PrefixMemory


@dataclass(eq=False)
class Request:
    """A request, and what became of it."""

    arrived_s: float  # arrival at the router, in seconds of the simulation
    keys: Sequence[bytes]  # keys of the prompt, as the router computes them
    prompt_tokens: int  # number of tokens of the prompt
    answer_tokens: int  # number of tokens of the answer
    kept_keys: Sequence[bytes] = ()  # keys of the prompt with its answer; empty if no prompt continues them
    first_token_s: float = math.nan  # time of the first token
    ended_s: float = math.nan  # time of the last token


@dataclass(eq=False)
class Work:
    """A request at a replica."""

    request: Request  # the request
    answer_tokens: int  # tokens to write here; 1 where only the prompt is computed
    computed: int = 0  # tokens of the prompt that are computed or cached
    cached: int = -1  # tokens that were cached when it began; -1 before
    written: int = 0  # tokens of the answer


@dataclass(frozen=True)
class Limits:
    """Limits of a replica."""

    max_sequences: int = 32  # answers in a step
    max_tokens: int = 512  # tokens in a step
    chunk_tokens: int = 96  # tokens of prompts in a step that also computes answers
    cache_keys: int = 2048  # keys of prompts in the KV cache
    key_tokens: int = 32  # tokens of the text of a key


@dataclass
class Counts:
    """Totals of a replica."""

    prompt_tokens: int = 0  # tokens of prompts
    computed_tokens: int = 0  # tokens of prompts that were not cached
    busy_s: float = 0.0  # seconds of steps


@dataclass(eq=False)
class Replica:
    """A replica, as the router and the simulation see it."""

    costs: StepCosts  # time of its steps
    limits: Limits  # what it has room for
    gaps: Gaps | None  # collects the gaps of answers; None where only prompts are computed
    prefixes: PrefixMemory = field(default_factory=PrefixMemory)  # what the router remembers of it
    num_running: int = 0  # requests that the router has sent, and that have not ended
    num_sent: int = 0  # requests that have ended
    counts: Counts = field(default_factory=Counts)  # totals
    is_healthy: bool = True  # for the router's choice

    def __post_init__(self) -> None:
        self.cache = PrefixMemory(self.limits.cache_keys)
        self.version = 0  # changes with each planned end, so that those planned before are void
        self._waiting: deque[Work] = deque()
        self._answers: list[Work] = []
        self._positions = 0  # sum of the positions of answers
        self._began_s, self._num_steps = 0.0, 0  # start of the planned steps, and their number; 0 is idle
        self._chunks: list[tuple[Work, int]] = []  # prompts of each planned step, with their tokens
        self._is_full = False  # True if no other prompt fits into the planned steps

    @property
    def is_busy(self) -> bool:
        """True if steps are under way."""
        return self._num_steps > 0

    def add(self, work: Work, now_s: float) -> float | None:
        """Takes a request.

        Args:
            work: the request.
            now_s: the time.

        Returns:
            The new end of the steps under way; None if it stays as it is.
        """
        self._waiting.append(work)
        if not self.is_busy:
            return self._plan(now_s)
        if self._chunks or self._num_steps == 1:
            return None
        done = self._steps_until(now_s)
        if done >= self._num_steps:
            return None
        self._num_steps = max(done, 1)
        self.version += 1
        return self._began_s + self._seconds(self._num_steps)

    def finish(self, now_s: float) -> tuple[list[Work], float | None]:
        """Ends the planned steps, and plans the next ones.

        Args:
            now_s: their end.

        Returns:
            The requests that have ended, and the end of the next steps; None if nothing is left to do.
        """
        steps, answers, ended = self._num_steps, self._answers, list[Work]()
        self.counts.busy_s += now_s - self._began_s
        if answers and self.gaps is not None:
            self._add_gaps(self.gaps)
        self._positions += steps * len(answers)
        for work in answers:
            work.written += steps
        for work, count in self._chunks:
            work.computed += steps * count
            if work.computed == work.request.prompt_tokens:
                self._waiting.remove(work)
                work.written, answers = 1, [*answers, work]
                self._positions += work.computed + 1
                self.cache.remember(work.request.keys)
                work.request.first_token_s = now_s
        self._answers = []
        for work in answers:
            if work.written < work.answer_tokens:
                self._answers.append(work)
            else:
                ended.append(work)
                self._positions -= work.computed + work.written
                if work.request.kept_keys:
                    self.cache.remember(work.request.kept_keys)
        self._chunks, self._num_steps = [], 0
        return ended, self._plan(now_s) if self._waiting or self._answers else None

    def _plan(self, now_s: float) -> float:
        """Plans the next steps; their end."""
        self._began_s = now_s
        self.version += 1
        self._chunks = self._cut()
        ends = [one.answer_tokens - one.written for one in self._answers]
        if self._chunks:  # while the first prompt takes all tokens of a step, nothing changes until it ends
            (work, count), *others = self._chunks
            left = -(-(work.request.prompt_tokens - work.computed) // count)
            ends.append(1 if others or not self._is_full else max(left - 1, 1))
        self._num_steps = min(ends)
        return now_s + self._seconds(self._num_steps)

    def _cut(self) -> list[tuple[Work, int]]:
        """The prompts of the next step, with their tokens."""
        left = self.limits.max_tokens - len(self._answers)
        if self._answers:
            left = min(left, self.limits.chunk_tokens)
        places, chunks = self.limits.max_sequences - len(self._answers), list[tuple[Work, int]]()
        for work in self._waiting:
            if left == 0 or places == 0:
                break
            if work.cached < 0:
                self._begin(work)
            count = min(left, work.request.prompt_tokens - work.computed)
            chunks.append((work, count))
            left -= count
            places -= 1
        self._is_full = left == 0
        return chunks

    def _begin(self, work: Work) -> None:
        """Finds the cached tokens of a prompt, of which the last one is always computed."""
        tokens = work.request.prompt_tokens
        work.cached = min(self.cache.match(work.request.keys) * self.limits.key_tokens, tokens - 1)
        work.computed = work.cached
        self.counts.prompt_tokens += tokens
        self.counts.computed_tokens += tokens - work.cached

    def _seconds(self, steps: int) -> float:
        """Seconds of a number of steps from the state before them."""
        answers, tokens, rows, positions = len(self._answers), 0, 0, 0.0
        for work, count in self._chunks:
            tokens += count
            rows += work.computed + count == work.request.prompt_tokens
            positions += count * (work.computed + (count - 1) / 2)
        first = self.costs.step(answers + tokens, answers + rows, self._positions + positions)
        return steps * first + self._growth() * steps * (steps - 1) / 2

    def _growth(self) -> float:
        """Seconds that each planned step takes longer than the one before."""
        return self.costs.position_s * (len(self._answers) + sum(count * count for _, count in self._chunks))

    def _add_gaps(self, gaps: Gaps) -> None:
        """Counts the gaps of answers in the planned steps; without prompts, all are about as long."""
        steps, answers = self._num_steps, len(self._answers)
        if not self._chunks:
            gaps.add(self._seconds(steps) / steps, steps * answers)
            return
        first, growth = self._seconds(1), self._growth()
        for number in range(steps):
            gaps.add(first + number * growth, answers)

    def _steps_until(self, now_s: float) -> int:
        """Number of planned steps until the end of the one under way."""
        growth, first, elapsed = self._growth() / 2, self._seconds(1), now_s - self._began_s
        if growth == 0:
            return math.ceil(elapsed / first)
        linear = first - growth
        return math.ceil((math.sqrt(linear * linear + 4 * growth * elapsed) - linear) / (2 * growth))
