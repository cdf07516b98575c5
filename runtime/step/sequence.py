"""One sequence of tokens in the making."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from enginewright.runtime.cache.keys import PrefixKeys
from enginewright.runtime.sampling.request import SamplingRequest
from enginewright.runtime.sampling.token_mask import Grammar
from enginewright.runtime.step.work_class import DEFAULT_WORK, WorkClass

NEVER = 2**31 - 1  # a position that no sequence has


@dataclass(eq=False, slots=True)
class TokenSequence:
    """A prompt and the tokens that were sampled after it."""

    token_ids: list[int]  # prompt, then output: all that are known
    num_prompt_tokens: int
    max_tokens: int  # of the whole
    stop_token_ids: frozenset[int] = frozenset()  # tokens that end it
    request: SamplingRequest | None = None  # how its tokens are sampled; None: none are, and it ends with its prompt
    needs_prompt_logits: bool = (
        False  # a step gives logits for each position (once more after a preemption), not for the last
    )
    cache_salt: str = ""  # it shares KV blocks with sequences of the same salt only
    sibling_of: "TokenSequence | None" = None  # another answer to the same prompt, added before; they share its KV
    second_from: int = NEVER  # the first position of the second text, of two that are embedded as one
    work: WorkClass = DEFAULT_WORK
    is_beam: bool = False  # its next token is not the sampled one, but the one that Scheduler.choose is given
    draft_tokens: list[int] = field(default_factory=list)  # tokens that may come next (Scheduler.propose)
    deferred: bool = False  # what may come next is not known yet: no step takes it (Scheduler.defer)
    recomputing: bool = False  # a state went back before a wrong guess: some tokens are computed once more

    num_tokens: int = field(init=False)  # those that are known, and those that planned steps sample
    logits_row: int = 0  # of the step that was planned last for it: the row that its token in flight is sampled from
    num_computed_tokens: int = 0  # those whose KV is in the cache once the steps planned so far are done
    num_cached_tokens: int | None = None  # prompt tokens that were there when it was first admitted
    admitted_at: float | None = None  # by time.perf_counter
    num_charged_tokens: int = 0  # computed ones that count in its tenant's share
    queued_at: float = 0.0  # when it last began to wait, by the scheduler's clock
    waited_s: float = 0.0  # before it was last admitted, all times together
    effective_priority: int = 0  # that it was last admitted with (WorkClass.effective_priority)
    num_preemptions: int = 0
    num_guessed: int = 0  # guesses that were verified
    num_accepted: int = 0  # of these, those that were right
    held: list[Any] = field(default_factory=list)  # of each cache group: a BlockTable or a StateSlot
    row: int = 0  # its place among those that run
    keys: PrefixKeys | None = None  # of its full blocks, if it shares them
    keys_in_flight: Sequence[bytes] = ()  # of blocks that others wait for, since this one writes them soon
    has_unpublished_blocks: bool = (
        False  # blocks with a key that nobody else may use before a token is sampled behind them
    )
    finish_reason: str | None = None  # "stop", "length", "error" or "abort"

    def __post_init__(self) -> None:
        self.num_tokens = len(self.token_ids)

    @property
    def num_in_flight_tokens(self) -> int:
        """Tokens that planned steps sample, and that are not committed.

        When another step is planned, that is at most one, or one more than there are guesses.
        """
        return self.num_tokens - len(self.token_ids)

    @property
    def grammar(self) -> Grammar | None:
        """The grammar that its tokens have to follow."""
        return None if self.request is None else self.request.grammar

    @property
    def last_token_is_in_flight(self) -> bool:
        """Whatever token it is, the sequence ends with it."""
        return self.num_tokens >= self.max_tokens and self.num_tokens > len(self.token_ids)

    @property
    def is_parked(self) -> bool:
        """A beam that waits for its next token to be chosen: there is nothing to compute of it."""
        return self.is_beam and self.num_computed_tokens == self.num_tokens == len(self.token_ids)

    @property
    def is_running(self) -> bool:
        """Admitted, and neither preempted nor ended."""
        return bool(self.held)
