"""A request: a prompt, and the completions that are generated for it."""

from collections.abc import Callable
from dataclasses import dataclass, field

from enginewright.errors import EngineError
from enginewright.runtime.core.completion import Completion
from enginewright.runtime.core.outputs import Delta, RequestMetrics
from enginewright.runtime.sampling.parameters import SamplingParams
from enginewright.runtime.sampling.sampler import SampledToken

# Receives the deltas of a request. An error means that the engine has failed, and nothing follows it.
OutputSink = Callable[[Delta | EngineError], None]


@dataclass(eq=False, slots=True)
class Request:
    """A prompt and its n completions, or the candidates that these are chosen from.

    The reader of its outputs may keep it for any time, so it has no references to the engine.
    """

    params: SamplingParams  # sampling parameters
    sink: OutputSink  # receives the deltas of the answer
    num_prompt_tokens: int  # number of tokens of the prompt
    arrived_at: float  # time of arrival by time.perf_counter, in seconds
    completions: list[Completion] = field(default_factory=list)  # for a beam search, the completion of its first beam
    leases_prompt: bool = False  # true if its prompt is leased to another server when its only completion has ended
    kv_transfer_params: dict[str, object] | None = None  # parameters with which that server fetches it
    finished: bool = False  # true once no more deltas follow
    first_token_s: float | None = None  # seconds from its arrival to its first token; None: not yet
    total_s: float | None = None  # seconds from its arrival to its last token; None: not yet
    # Log-probabilities of the prompt's tokens by position, None for those not computed yet; empty if not requested.
    prompt_logprobs: list[SampledToken | None] = field(default_factory=list)

    @property
    def queue_s(self) -> float | None:
        """Seconds from its arrival until its first completion was first admitted; None: not yet."""
        admitted_at = self.completions[0].sequence.state.admitted_at
        return None if admitted_at is None else admitted_at - self.arrived_at

    @property
    def metrics(self) -> RequestMetrics:
        """Times of the request so far."""
        return RequestMetrics(self.queue_s or 0.0, self.first_token_s or 0.0, self.total_s or 0.0)

    @property
    def num_cached_tokens(self) -> int:
        """Number of prompt tokens that were in the prefix cache; 0 as long as that is not known."""
        return self.completions[0].sequence.state.num_cached_tokens or 0

    @property
    def num_draft_tokens(self) -> int:
        """Number of draft tokens of its completions that were verified."""
        return sum(completion.sequence.num_verified for completion in self.completions)

    @property
    def num_accepted_tokens(self) -> int:
        """Number of draft tokens of its completions that were accepted."""
        return sum(completion.sequence.num_accepted for completion in self.completions)
