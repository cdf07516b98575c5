"""Beam search: finds the likeliest answers of a model, by the rules of transformers' generate(num_beams=…)."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from enginewright.runtime.sampling.sampler import SampledToken

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True)
class Beam:
    """An unfinished answer, or a complete one."""

    tokens: tuple[SampledToken, ...] = ()  # its tokens after the prompt
    logprob: float = 0.0  # log-probability of all its tokens together
    parent: int = 0  # index of the beam of the step before that it continues

    def score(self, num_tokens: int, length_penalty: float) -> float:
        """Score by which answers of different lengths are compared; higher is better.

        Args:
            num_tokens: the number of its tokens, or the number that it may reach.
            length_penalty: the log-probability is divided by the length to this power.
        """
        return self.logprob / math.pow(num_tokens, length_penalty)


class BeamScorer:
    """The beam search of one request.

    Args:
        width: number of beams, and of complete answers that are kept.
        max_tokens: maximum number of tokens of an answer.
        length_penalty: log-probabilities are divided by the length to this power; above 0, long answers are preferred.
        early_stopping: True ends the search when there are `width` complete answers. False ends it when the score of
            the best beam at its present length is not above the worst of these. "never" is like False, but with the
            best length that the beam can still reach.
        ends: token ids that end an answer.
    """

    def __init__(
        self, width: int, max_tokens: int, length_penalty: float, early_stopping: EarlyStopping, ends: Collection[int]
    ) -> None:
        self._width, self._max_tokens, self._length_penalty = width, max_tokens, length_penalty
        self._early_stopping, self._ends = early_stopping, frozenset(ends)
        self.beams: Sequence[Beam] = [Beam()]
        self._whole: list[Beam] = []

    @property
    def num_candidates(self) -> int:
        """Number of the likeliest tokens after each beam that `advance` needs.

        It is so large that enough beams continue even if all tokens that end an answer are among them.
        """
        return self._width + len(self._ends)

    def advance(self, sampled: Sequence[SampledToken]) -> bool:
        """Extends the beams by one token.

        Args:
            sampled: the tokens after each of the beams; only their likeliest tokens matter.

        Returns:
            True if the search continues, with new `beams`.
        """
        grown = sorted(self._grown(sampled), key=lambda beam: -beam.logprob)
        length = len(self.beams[0].tokens) + 1
        at_end = length >= self._max_tokens
        # Only the best `width` candidates may become answers; the candidates after them only replace those that end.
        ended = [beam for beam in grown[: self._width] if at_end or self._ends_with(beam)]
        self._whole = sorted([*self._whole, *ended], key=self._score, reverse=True)[: self._width]
        if at_end:
            return False
        self.beams = [beam for beam in grown if not self._ends_with(beam)][: self._width]
        return len(self.beams) > 0 and not self._is_over(length)

    def answers(self) -> list[tuple[Beam, str]]:
        """The best complete answers, best first, each with the reason for its end, "stop" or "length"."""
        return [(beam, "stop" if self._ends_with(beam) else "length") for beam in self._whole]

    def _grown(self, sampled: Sequence[SampledToken]) -> Iterator[Beam]:
        for parent, (beam, next_row) in enumerate(zip(self.beams, sampled, strict=True)):
            for token, logprob in next_row.top_logprobs:
                named = SampledToken(token, logprob, next_row.top_logprobs)
                yield Beam((*beam.tokens, named), beam.logprob + logprob, parent)

    def _ends_with(self, beam: Beam) -> bool:
        return beam.tokens[-1].token in self._ends

    def _score(self, beam: Beam) -> float:
        return beam.score(len(beam.tokens), self._length_penalty)

    def _is_over(self, length: int) -> bool:
        if len(self._whole) < self._width:
            return False
        if self._early_stopping is True:
            return True
        if self._early_stopping == "never" and self._length_penalty > 0:
            length = self._max_tokens
        return self.beams[0].score(length, self._length_penalty) <= self._score(self._whole[-1])
