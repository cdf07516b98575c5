"""Parameters of a request: the rules by which its tokens are sampled and by which it ends."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal

from enginewright.runtime.checks import require, require_known, require_number, require_whole
from enginewright.runtime.sampling.structured_outputs import StructuredOutputsParams

MAX_INT32 = 2**31 - 1
MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOPS = 64
MAX_STOP_CHARS = 4096  # characters of all stop strings of a request together
MAX_BIASED_TOKENS = 1024
MAX_BEAMS = 16
MAX_LENGTH_PENALTY = 10.0
MAX_PENALTY = 2.0  # frequency and presence penalty, as in OpenAI's API
MAX_BIAS = 100.0  # bias of a token's logit, as in OpenAI's API


class RequestOutputKind(Enum):
    """Content of the outputs that AsyncLLM.generate yields. LLM ignores it and returns complete answers."""

    CUMULATIVE = 0  # each output has the answer so far
    DELTA = 1  # each output has what is new since the previous one
    FINAL_ONLY = 2  # one output has the complete answer


@dataclass(slots=True)
class SamplingParams:
    """Sampling parameters of a request, with names and defaults as in vLLM.

    The object may be changed at any time. A request copies it when it is submitted, and the copy is checked as a new
    object is, so a later change applies to later requests.

    Raises:
        UsageError: there is no parameter of a given name, or a value is of the wrong type or out of its range.
    """

    n: int = 1  # number of completions of one prompt
    temperature: float = 1.0  # divisor of the logits; 0 is greedy
    top_p: float = 1.0  # probability of the smallest set of the most likely tokens that are sampled from
    top_k: int = 0  # number of the most likely tokens that are sampled from; 0 (or -1) is all
    min_p: float = 0.0  # minimum probability of a token, relative to the most likely one
    presence_penalty: float = 0.0  # subtracted from the logits of tokens that are in the output
    frequency_penalty: float = 0.0  # subtracted from the logit of a token for each time that it is in the output
    repetition_penalty: float = 1.0  # factor against tokens that are in prompt or output; above 1 they are less likely
    seed: int | None = None  # seed of the random numbers; None: a new one for each request
    stop: Sequence[str] = ()  # texts that end it
    stop_token_ids: Sequence[int] = ()  # tokens that end it
    include_stop_str_in_output: bool = False  # true if the text includes the stop string that ended it
    ignore_eos: bool = False  # true if the model's end-of-text tokens do not end it
    max_tokens: int | None = 16  # maximum tokens of a completion; None: up to the model's length; 0: only the prompt
    min_tokens: int = 0  # number of tokens before which neither an end-of-text nor a stop token is sampled
    logprobs: int | None = None  # most likely tokens to report; 0: only the sampled one's log-probability; None: none
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # token id → number added to its logit
    # The only tokens that are sampled, so a completion ends early only if an ending token is among them. None: all.
    allowed_token_ids: Sequence[int] | None = None
    skip_special_tokens: bool = True  # true if the text leaves out special tokens
    prompt_logprobs: int | None = None  # as logprobs, for the tokens of the prompt
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE  # content of what AsyncLLM.generate yields
    structured_outputs: StructuredOutputsParams | None = None  # constraint on the text; a mapping is converted
    best_of: int | None = None  # completions computed, of which the n with the highest log-probability stay; None: n
    use_beam_search: bool = False  # true to search the most likely completions; the number of beams is best_of, or n
    length_penalty: float = 1.0  # parameter of beam search: above 0, long completions are preferred (beam_scorer.py)
    early_stopping: bool | Literal["never"] = False  # parameter of beam search: True, False or "never" (beam_scorer.py)

    def __new__(cls, *args: Any, **options: Any) -> "SamplingParams":
        """Raises UsageError for unknown names, for which `__init__` would raise a TypeError."""
        require_known(options, cls.__dataclass_fields__, "sampling parameter")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        # As in vLLM, a list may stand for a tuple, a string for one of them, and None for nothing.
        self.stop = _as_tuple((self.stop,) if isinstance(self.stop, str) else self.stop)
        self.stop_token_ids = _as_tuple(self.stop_token_ids)
        self.logit_bias = {} if self.logit_bias is None else self.logit_bias
        for name, bounds in _WHOLE.items():
            if getattr(self, name) is not None or name not in _MAY_BE_NONE:
                require_whole(name, getattr(self, name), *bounds)
        for name, (low, high) in _NUMBERS.items():
            require_number(name, getattr(self, name), low, high)
        for name in _FLAGS:
            require(isinstance(getattr(self, name), bool), name, "must be True or False")
        require(self.top_p > 0, "top_p", "must be above 0")
        require_whole("min_tokens", self.min_tokens, 0, MAX_INT32 if self.max_tokens is None else self.max_tokens)
        if self.best_of is not None:
            require_whole("best_of", self.best_of, self.n, MAX_CHOICES)
        require(isinstance(self.output_kind, RequestOutputKind), "output_kind", "must be a RequestOutputKind")
        self._check_stops()
        self._check_tokens()
        if self.structured_outputs is not None:
            self.structured_outputs = StructuredOutputsParams.of(self.structured_outputs)
            rule = "makes no sense with structured_outputs, which say when the answer ends"
            require(not self.ignore_eos, "ignore_eos", rule)
            require(not self.min_tokens, "min_tokens", rule)
        self._check_beam_search()

    def _check_stops(self) -> None:
        """Raises UsageError if what ends the answer is not valid."""
        texts = self.stop
        require(isinstance(texts, tuple), "stop", "must be strings")
        require(all(isinstance(text, str) and text for text in texts), "stop", "must hold strings that are not empty")
        require(len(texts) <= MAX_STOPS, "stop", f"must not hold more than {MAX_STOPS} strings")
        rule = f"must not hold more than {MAX_STOP_CHARS} characters together"
        require(sum(map(len, texts)) <= MAX_STOP_CHARS, "stop", rule)
        require(isinstance(self.stop_token_ids, tuple), "stop_token_ids", "must be token ids")
        require(len(self.stop_token_ids) <= MAX_STOPS, "stop_token_ids", f"must not hold more than {MAX_STOPS} ids")
        for token in self.stop_token_ids:
            require_whole("stop_token_ids", token, 0, MAX_INT32)

    def _check_tokens(self) -> None:
        """Raises UsageError if the limits on sampled tokens are not valid."""
        require(isinstance(self.logit_bias, Mapping), "logit_bias", "must map token ids to numbers")
        require(len(self.logit_bias) <= MAX_BIASED_TOKENS, "logit_bias", f"must not hold more than {MAX_BIASED_TOKENS}")
        self.logit_bias = dict(self.logit_bias)
        for token, bias in self.logit_bias.items():
            require_whole("logit_bias", token, 0, MAX_INT32)
            require_number("logit_bias", bias, -MAX_BIAS, MAX_BIAS)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = ids = _as_tuple(self.allowed_token_ids)
            whole = isinstance(ids, tuple) and len(ids) > 0 and all(type(token) is int for token in ids)
            require(whole and min(ids) >= 0, "allowed_token_ids", "must be token ids, one at least")

    def _check_beam_search(self) -> None:
        """Raises UsageError for options that would change the model's probabilities, by which beams are ranked."""
        is_known = isinstance(self.early_stopping, bool) or self.early_stopping == "never"
        require(is_known, "early_stopping", 'must be True, False or "never"')
        if not self.use_beam_search:
            require(self.length_penalty == 1.0, "length_penalty", "is for use_beam_search, and must be 1 without it")
            require(self.early_stopping is False, "early_stopping", "is for use_beam_search, and must be False without")
            return
        name = "n" if self.best_of is None else "best_of"
        require(self.num_candidates <= MAX_BEAMS, name, f"must be at most {MAX_BEAMS} with use_beam_search")
        require(self.temperature == 0, "temperature", "must be 0 with use_beam_search, which samples nothing")
        require(self.max_tokens != 0, "max_tokens", "must be at least 1 with use_beam_search")
        for one, nothing in _NOT_WITH_BEAMS.items():
            require(getattr(self, one) == nothing, one, "cannot be combined with use_beam_search")

    @property
    def num_candidates(self) -> int:
        """Number of completions that are computed to return n."""
        return self.n if self.best_of is None else self.best_of

    def clone(self) -> "SamplingParams":
        """Makes an independent copy, which is checked as a new object is.

        Raises:
            UsageError: a value was changed to an invalid one.
        """
        return replace(self)

    @property
    def penalized(self) -> bool:
        """True if any penalty is set, so that sampling depends on earlier tokens."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)


# Lowest and highest values of the parameters that are whole numbers, and of those that are any numbers.
_WHOLE: Mapping[str, tuple[int, int]] = {
    "n": (1, MAX_CHOICES),
    "top_k": (-1, MAX_INT32),
    "seed": (-(2**63), 2**64 - 1),
    "max_tokens": (0, MAX_INT32),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}
_MAY_BE_NONE = ("seed", "max_tokens", "logprobs", "prompt_logprobs")
_NUMBERS: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 1000),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "presence_penalty": (-MAX_PENALTY, MAX_PENALTY),
    "frequency_penalty": (-MAX_PENALTY, MAX_PENALTY),
    "repetition_penalty": (0.01, 100),
    "length_penalty": (-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY),
}
_FLAGS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "use_beam_search")

# Parameters that cannot be combined with beam search, with the values that leave them unset.
_NOT_WITH_BEAMS: Mapping[str, Any] = {
    "allowed_token_ids": None,
    "frequency_penalty": 0,
    "logit_bias": {},
    "min_tokens": 0,
    "presence_penalty": 0,
    "prompt_logprobs": None,
    "repetition_penalty": 1,
    "stop": (),
    "structured_outputs": None,
}


def _as_tuple(value: Any) -> Any:
    return () if value is None else tuple(value) if isinstance(value, list) else value
