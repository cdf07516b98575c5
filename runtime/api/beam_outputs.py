"""What `LLM.beam_search` takes and gives, under vLLM's names."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from enginewright.runtime.checks import require_known
from enginewright.runtime.core.beam_search import EarlyStopping
from enginewright.runtime.core.outputs import Logprob, RequestOutput
from enginewright.runtime.sampling.sampling import SamplingParams


@dataclass(slots=True)
class BeamSearchParams:
    """How a search is done; it is checked when it is used (SamplingParams).

    Raises:
        UsageError: a name is none.
    """

    beam_width: int  # beams, and answers
    max_tokens: int
    ignore_eos: bool = False  # the model's end-of-text tokens do not end an answer
    temperature: float = 0.0  # nothing is sampled: it must be 0
    length_penalty: float = 1.0  # above 0 long answers are preferred (beam_search.py)
    early_stopping: EarlyStopping = False  # True, False or "never" (beam_search.py)

    def __new__(cls, *args: Any, **options: Any) -> "BeamSearchParams":
        """Refuses names that are none; `__init__` would raise a TypeError."""
        require_known(options, cls.__dataclass_fields__, "beam search parameter")
        return object.__new__(cls)

    def sampling(self) -> SamplingParams:
        """Raises UsageError for a value that makes no sense."""
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

    tokens: list[int]  # of prompt and answer
    logprobs: list[dict[int, Logprob]]  # of the answer's tokens
    cum_logprob: float  # of all of them
    text: str  # of prompt and answer, special tokens left out
    finish_reason: str | None  # "stop" or "length"
    stop_reason: int | str | None = None


@dataclass
class BeamSearchOutput:
    """What came of one prompt."""

    sequences: list[BeamSearchSequence]  # best first


def beam_output(output: RequestOutput, texts: Sequence[str]) -> BeamSearchOutput:
    """texts: of prompt and answer, by choice."""
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
