"""Completions that are computed beside those that a request gets: only the best are given away, once all are whole."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from enginewright.runtime.core.beam_search import BeamSearch
from enginewright.runtime.core.outputs import Delta, merge
from enginewright.runtime.sampling.sampling import SampledToken
from enginewright.runtime.step.sequence import TokenSequence


def failed(count: int, reason: str, stop_reason: str | None = None) -> list[Delta]:
    """The deltas of as many choices that come to nothing.

    Args:
        reason: "error" or "abort".
    """
    return [Delta(index, "", (), reason, stop_reason) for index in range(count)]


class BestOf:
    """The `count` completions of the highest cumulative log-probability, of `num_candidates`."""

    def __init__(self, count: int, num_candidates: int) -> None:
        self._count, self._left = count, num_candidates
        self._deltas: list[Delta] = []

    def add(self, delta: Delta) -> list[Delta]:
        """What came to a candidate; the deltas of the best, best first, once all are whole or one has failed."""
        if delta.finish_reason == "error":
            assert delta.stop_reason is None or isinstance(delta.stop_reason, str)
            return failed(self._count, "error", delta.stop_reason)
        self._deltas.append(delta)
        self._left -= delta.finish_reason is not None
        if self._left:
            return []
        best = sorted(merge(self._deltas), key=lambda one: -_logprob(one.tokens))[: self._count]
        return [
            Delta(index, one.text, one.tokens, one.finish_reason, one.stop_reason) for index, one in enumerate(best)
        ]


@dataclass(eq=False, slots=True)
class BeamGroup:
    """The beams of one request. A search goes on when there is a token behind each of them."""

    search: BeamSearch
    sequences: list[TokenSequence]  # by beam
    sampled: dict[TokenSequence, SampledToken] = field(default_factory=dict)  # of this step of the search
    is_over: bool = False

    def advance(self) -> bool:
        """As BeamSearch does."""
        goes_on = self.search.advance([self.sampled[sequence] for sequence in self.sequences])
        self.sampled.clear()
        return goes_on


def _logprob(tokens: Sequence[SampledToken]) -> float:
    return sum(token.logprob or 0.0 for token in tokens)
