"""Beam search: the likeliest answers of a model, as transformers' generate(num_beams=…) looks for them."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from enginewright.runtime.sampling.sampler import SampledToken

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True)
class Beam:
    """The beginning of an answer, or a whole one."""

    tokens: tuple[SampledToken, ...] = ()
    logprob: float = 0.0  # of all its tokens together
    parent: int = 0  # which of the beams of the step before it goes on from

    def score(self, num_tokens: int, length_penalty: float) -> float:
        """By which answers of different lengths are compared.

        Args:
            num_tokens: that it has, or may have one day.
        """
        return self.logprob / math.pow(num_tokens, length_penalty)


class BeamScorer:
    """The search of one request.

    Args:
        width: beams, and whole answers that are kept.
        max_tokens: of an answer.
        length_penalty: log-probabilities are divided by a length to this power: above 0 long answers are preferred.
        early_stopping: True: it is over when there are `width` whole answers. False: when the best beam, by the length
            that it has now, is no better than the worst of these. "never": as False, by the best length that it can
            still get to.
        ends: tokens that end an answer.
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
        """How many of the likeliest tokens behind each beam `advance` needs: enough to go on where all ends are."""
        return self._width + len(self._ends)

    def advance(self, sampled: Sequence[SampledToken]) -> bool:
        """Go on by one token.

        Args:
            sampled: behind each of the beams; only the likeliest tokens matter.

        Returns:
            Whether it goes on, with other beams.
        """
        grown = sorted(self._grown(sampled), key=lambda beam: -beam.logprob)
        length = len(self.beams[0].tokens) + 1
        at_end = length >= self._max_tokens
        # Only what is among the best of all may be an answer: what is behind these keeps the search going.
        ended = [beam for beam in grown[: self._width] if at_end or self._ends_with(beam)]
        self._whole = sorted([*self._whole, *ended], key=self._score, reverse=True)[: self._width]
        if at_end:
            return False
        self.beams = [beam for beam in grown if not self._ends_with(beam)][: self._width]
        return len(self.beams) > 0 and not self._is_over(length)

    def answers(self) -> list[tuple[Beam, str]]:
        """The best answers, best first, and why each has ended: "stop" or "length"."""
        return [(beam, "stop" if self._ends_with(beam) else "length") for beam in self._whole]

    def _grown(self, sampled: Sequence[SampledToken]) -> Iterator[Beam]:
        for parent, (beam, behind) in enumerate(zip(self.beams, sampled, strict=True)):
            for token, logprob in behind.top_logprobs:
                named = SampledToken(token, logprob, behind.top_logprobs)
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
