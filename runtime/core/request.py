"""A prompt with the choices that are written for it."""

from collections.abc import Callable
from dataclasses import dataclass, field

from enginewright.errors import EngineError
from enginewright.runtime.core.completion import Completion
from enginewright.runtime.core.outputs import Delta, RequestMetrics
from enginewright.runtime.sampling.parameters import SamplingParams
from enginewright.runtime.sampling.sampler import SampledToken

# Where a request's deltas go. An error is the last thing that comes: the engine is dead.
OutputSink = Callable[[Delta | EngineError], None]


@dataclass(eq=False, slots=True)
class Request:
    """A prompt and its n completions, or those that these are chosen from.

    Readers keep it as long as they like, so it refers to nothing of the engine.
    """

    params: SamplingParams
    sink: OutputSink
    num_prompt_tokens: int
    arrived_at: float  # time of arrival by time.perf_counter, in seconds
    completions: list[Completion] = field(default_factory=list)  # of a beam search: of its first beam
    finished: bool = False  # no delta comes after those that it has got
    first_token_s: float | None = None  # seconds from its arrival to its first token; None: not yet
    total_s: float | None = None  # seconds from its arrival to its last token; None: not yet
    # Log-probabilities of the prompt's tokens by position, None for those that are not there yet; empty if none are
    # wanted.
    prompt_logprobs: list[SampledToken | None] = field(default_factory=list)

    @property
    def queue_s(self) -> float | None:
        """Seconds until its first completion left the queue for the first time; None: not yet."""
        admitted_at = self.completions[0].sequence.admitted_at
        return None if admitted_at is None else admitted_at - self.arrived_at

    @property
    def metrics(self) -> RequestMetrics:
        """Its times so far."""
        return RequestMetrics(self.queue_s or 0.0, self.first_token_s or 0.0, self.total_s or 0.0)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache had; 0 as long as that is not known."""
        return self.completions[0].sequence.num_cached_tokens or 0

    @property
    def num_guessed_tokens(self) -> int:
        """Draft tokens of its completions that were verified."""
        return sum(completion.sequence.num_guessed for completion in self.completions)

    @property
    def num_accepted_tokens(self) -> int:
        """Draft tokens of its completions that were right."""
        return sum(completion.sequence.num_accepted for completion in self.completions)
