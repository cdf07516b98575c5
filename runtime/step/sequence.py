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
    """A prompt and the tokens that were sampled after it.

    What it is, is given when it is made and stays. What is computed of it and what it holds is written by those who
    schedule it: `runtime/scheduler/`, or a draft for the sequences of its own.
    """

    # What it is.
    token_ids: list[int]  # prompt, then output: all that are known; the scheduler appends what is committed
    num_prompt_tokens: int
    max_tokens: int  # of prompt and output together
    stop_token_ids: frozenset[int] = frozenset()  # tokens that end it
    request: SamplingRequest | None = None  # rules of sampling; None: nothing is sampled, and it ends with its prompt
    # A step gives logits for each position, once more after a preemption, instead of for the last one. The scheduler
    # clears it when all of a prompt is scored.
    needs_prompt_logits: bool = False
    cache_salt: str = ""  # it shares KV blocks with sequences of the same salt only
    sibling_of: "TokenSequence | None" = None  # an earlier answer to the same prompt, whose KV it shares
    second_from: int = NEVER  # first position of the second text, of two that are embedded as one
    work: WorkClass = DEFAULT_WORK  # how urgent it is, and whose
    is_beam: bool = False  # its next token is not the sampled one, but the one that Scheduler.choose is given

    # How far it is.
    draft_tokens: list[int] = field(default_factory=list)  # tokens that may come next (Scheduler.propose)
    deferred: bool = False  # no step takes it, since its grammar has not said what may come next (Scheduler.defer)
    recomputing: bool = False  # a state went back before a wrong draft token: some tokens are computed once more
    num_tokens: int = field(init=False)  # tokens that are known, and those that planned steps sample
    logits_row: int = 0  # row of the step that was planned last for it, which its token in flight is sampled from
    num_computed_tokens: int = 0  # tokens whose KV is in the cache once the steps planned so far are done
    finish_reason: str | None = None  # "stop", "length", "error" or "abort"

    # How it waits and runs.
    admitted_at: float | None = None  # time of its first admission by time.perf_counter, in seconds
    num_cached_tokens: int | None = None  # prompt tokens that were in the cache when it was first admitted
    num_charged_tokens: int = 0  # computed tokens that count in its tenant's share
    queued_at: float = 0.0  # time when it last began to wait by the scheduler's clock, in seconds
    waited_s: float = 0.0  # seconds that it waited before it was last admitted, all times together
    effective_priority: int = 0  # priority that it was last admitted with (WorkClass.effective_priority)
    num_preemptions: int = 0

    # What it holds of the cache.
    held: list[Any] = field(default_factory=list)  # a BlockTable or a StateSlot of each cache group; none: it waits
    row: int = 0  # row of the block tables while it runs (Packer)
    keys: PrefixKeys | None = None  # keys of its full blocks, if it shares them
    keys_in_flight: Sequence[bytes] = ()  # keys of blocks that others wait for, since this one writes them soon
    has_unpublished_blocks: bool = False  # others may use some of its blocks once a token is sampled after them

    # Figures of speculation, by the speculator.
    num_guessed: int = 0  # draft tokens that were verified
    num_accepted: int = 0  # draft tokens that were right

    def __post_init__(self) -> None:
        self.num_tokens = len(self.token_ids)

    @property
    def num_in_flight_tokens(self) -> int:
        """Number of tokens that planned steps sample, and that are not committed.

        When another step is planned, that is at most one, or one more than there are draft tokens.
        """
        return self.num_tokens - len(self.token_ids)

    @property
    def grammar(self) -> Grammar | None:
        """The grammar that its tokens have to follow."""
        return None if self.request is None else self.request.grammar

    @property
    def is_parked(self) -> bool:
        """A beam that waits for its next token to be chosen: there is nothing to compute of it."""
        return self.is_beam and self.num_computed_tokens == self.num_tokens == len(self.token_ids)

    @property
    def is_running(self) -> bool:
        """Admitted, and neither preempted nor ended."""
        return bool(self.held)
