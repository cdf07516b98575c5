"""Parameters and outputs of `LLM.beam_search`, under vLLM's names."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from enginewright.runtime.checks import require_known
from enginewright.runtime.core.beam_scorer import EarlyStopping
from enginewright.runtime.core.outputs import Logprob, RequestOutput
from enginewright.runtime.sampling.parameters import SamplingParams


@dataclass(slots=True)
class BeamSearchParams:
    """Parameters of a beam search, which are checked when they are used (SamplingParams).

    Raises:
        UsageError: a name is unknown.
    """

    beam_width: int  # number of beams, and of answers
    max_tokens: int  # maximum number of tokens of an answer
    ignore_eos: bool = False  # True goes on after the model's end-of-text tokens
    temperature: float = 0.0  # must be 0, since nothing is sampled
    length_penalty: float = 1.0  # exponent of the length in an answer's score; above 0 it favours long answers
    early_stopping: EarlyStopping = False  # condition that ends the search: True, False or "never" (beam_scorer.py)

    def __new__(cls, *args: Any, **options: Any) -> "BeamSearchParams":
        """Refuses unknown names with a UsageError; `__init__` would raise a TypeError."""
        require_known(options, cls.__dataclass_fields__, "beam search parameter")
        return object.__new__(cls)

    def sampling(self) -> SamplingParams:
        """Equivalent SamplingParams. Raises UsageError for a value that is not valid."""
        return SamplingParams(
            n=self.beam_width,
            use_beam_search=True,
            logprobs=0,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
        )


@dataclass
class BeamSearchSequence:
    """An answer, with the prompt before it."""

    tokens: list[int]  # token ids of prompt and answer
    logprobs: list[dict[int, Logprob]]  # log-probabilities of the answer's tokens, by token id
    cum_logprob: float  # sum of the log-probabilities of the answer's tokens
    text: str  # text of prompt and answer, without special tokens
    finish_reason: str | None  # "stop" or "length"
    stop_reason: int | str | None = None  # stop text or stop token that ended the answer


@dataclass
class BeamSearchOutput:
    """The answers to one prompt."""

    sequences: list[BeamSearchSequence]  # answers, best first


def beam_output(output: RequestOutput, texts: Sequence[str]) -> BeamSearchOutput:
    """Converts an output of the engine.

    Args:
        output: the output.
        texts: texts of prompt and answer, by choice.
    """
    return BeamSearchOutput(
        [
            BeamSearchSequence(
                [*output.prompt_token_ids, *one.token_ids],
                one.logprobs or [],
                one.cumulative_logprob or 0.0,
                text,
                one.finish_reason,
                one.stop_reason,
            )
            for one, text in zip(output.outputs, texts, strict=True)
        ]
    )
