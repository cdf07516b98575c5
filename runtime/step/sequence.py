"""The state of one sequence of tokens: its text so far, its progress, and what it holds of the caches."""

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

from enginewright.adapter_file import AdapterFile
from enginewright.runtime.cache.eviction import NOT_RETAINED, Retention
from enginewright.runtime.cache.keys import PrefixKeys
from enginewright.runtime.cache.store import ReadEntries
from enginewright.runtime.sampling.request import SamplingRequest
from enginewright.runtime.sampling.token_mask import Grammar
from enginewright.runtime.step.work_class import DEFAULT_WORK, WorkClass

NEVER = 2**31 - 1  # a position that no sequence has


@dataclass(eq=False, slots=True)
class CacheHandle:
    """The holdings of a sequence in the caches: written when it is admitted, extended, published and released."""

    held: list[Any] = field(default_factory=list)  # BlockTable or StateSlot of each cache group; empty while it waits
    row: int = 0  # row of the block tables while it runs (Packer)
    keys: PrefixKeys | None = None  # keys of its full blocks; None: it shares none
    keys_in_flight: Sequence[bytes] = ()  # keys of blocks that it will write soon, for which other sequences may wait
    fetched: ReadEntries | None = None  # blocks of its prompt that another server has computed; None once they are used
    has_unpublished_blocks: bool = False  # true if some blocks will be shared once a token is sampled after them


@dataclass(eq=False, slots=True)
class ScheduleState:
    """The progress of a sequence and its time in the queue: written by what schedules it."""

    num_tokens: int  # number of tokens that are known or that planned steps sample
    # True if steps give logits for each position of the prompt, and not only for the last one; after a preemption they
    # do so again. Cleared when the whole prompt is scored.
    needs_prompt_logits: bool = False
    num_computed_tokens: int = 0  # number of tokens whose KV is in the cache once the planned steps are done
    draft_tokens: list[int] = field(default_factory=list)  # draft tokens to verify next (Scheduler.propose)
    logits_row: int = 0  # first row of its last planned step's logits that its tokens are sampled from
    adapter_slot: int = -1  # slot of its adapter while it runs; -1: it has none
    deferred: bool = False  # true while steps leave it out, until its next token is known (Scheduler.resume)
    recomputing: bool = False  # true if a recurrent state was rolled back so far that known tokens are computed again

    admitted_at: float | None = None  # time of its first admission by time.perf_counter, in seconds
    num_cached_tokens: int | None = None  # number of prompt tokens that were in the cache at its first admission
    num_charged_tokens: int = 0  # number of computed tokens that count in its tenant's share
    queued_at: float = 0.0  # time when it last began to wait, by the scheduler's clock, in seconds
    waited_s: float = 0.0  # seconds that it has waited in all, up to its last admission
    effective_priority: int = 0  # priority that it was last admitted with (WorkClass.effective_priority)
    num_preemptions: int = 0  # number of times that it was preempted


@dataclass(eq=False, slots=True)
class TokenSequence:
    """A prompt and the tokens that were sampled after it.

    Its own fields are set when it is created, but for the known tokens and the reason of its end, which a commit
    writes. `cache` and `state` are written by what schedules it: `runtime/scheduler/`, or the runner of a draft
    model for sequences of its own.
    """

    token_ids: list[int]  # known tokens, prompt and then output
    num_prompt_tokens: int  # number of tokens of the prompt
    max_tokens: int  # maximum number of tokens, prompt and output together
    stop_token_ids: frozenset[int] = frozenset()  # tokens that end it
    request: SamplingRequest | None = None  # rules of sampling; None: nothing is sampled, and it ends with its prompt
    scores_prompt: InitVar[bool] = False  # if each token of the prompt gets logits, and not only the last one
    cache_salt: str = ""  # KV blocks are shared only among sequences of the same salt
    sibling_of: "TokenSequence | None" = None  # an earlier completion of the same prompt, whose KV it shares
    second_from: int = NEVER  # first position of the second text, if two texts are embedded as a pair
    work: WorkClass = DEFAULT_WORK  # priority and tenant
    retention: Retention = NOT_RETAINED  # hint for what it leaves in the prefix cache
    is_beam: bool = False  # true of a beam: a beam search chooses its next token among the likeliest ones
    adapter: AdapterFile | None = None  # adapter that it is computed with; None: the engine's own weights
    adapter_from: int = 0  # first position that is computed with the adapter; those before it are the engine's own
    finish_reason: str | None = None  # "stop", "length", "error" or "abort"
    cache: CacheHandle = field(default_factory=CacheHandle)  # its holdings in the caches
    state: ScheduleState = field(init=False)  # its progress

    # Counts of speculative decoding, written by the speculator.
    num_verified: int = 0  # number of draft tokens that were verified
    num_accepted: int = 0  # number of draft tokens that were right

    def __post_init__(self, scores_prompt: bool) -> None:
        self.state = ScheduleState(len(self.token_ids), scores_prompt)

    @property
    def num_in_flight_tokens(self) -> int:
        """Number of tokens that planned steps sample and that are not committed yet.

        When the next step is planned, it is at most 1, or 1 more than the number of draft tokens.
        """
        return self.state.num_tokens - len(self.token_ids)

    @property
    def grammar(self) -> Grammar | None:
        """The grammar that its tokens have to follow; None if any may come."""
        return None if self.request is None else self.request.grammar

    @property
    def is_parked(self) -> bool:
        """True if it is deferred, and no planned step computes anything for it: a beam that waits for its token."""
        return self.state.deferred and not self.num_in_flight_tokens

    @property
    def is_running(self) -> bool:
        """True if it is admitted, and neither preempted nor finished."""
        return bool(self.cache.held)
