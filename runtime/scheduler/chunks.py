"""How much of the prompts a step reads beside its decodes."""

from collections.abc import Callable, Sequence

from enginewright.runtime.cache.cache import Cache
from enginewright.runtime.sequence import TokenSequence
from enginewright.runtime.step_plan import Part


class PromptChunks:
    """Prompts in the order of arrival, each as much as is left of a step's limits.

    Args:
        most_cost: of the prompts of a step that decodes as well (one token they may always have); None: no bound.
        cost: of a prompt's token at a position.
    """

    def __init__(self, cache: Cache, most_cost: int | None, cost: Callable[[int], float]) -> None:
        self._cache, self._most_cost, self._cost = cache, most_cost, cost

    def cut(self, prompts: Sequence[TokenSequence], tokens: int, rows: int, *, alone: bool) -> list[Part]:
        """Parts of these.

        Args:
            tokens, rows: of logits, that there may be.
            alone: nothing decodes in this step.
        """
        parts: list[Part] = []
        cost_left: float | None = None if alone else self._most_cost
        for sequence in prompts:
            first = sequence.num_computed_tokens
            uncomputed = sequence.num_tokens - first
            count = min(uncomputed, tokens, rows) if sequence.every_logit else min(uncomputed, tokens)
            if self._cache.has_snapshots:
                count = self._cache.chunk_end(sequence.held, first, first + count) - first
            if cost_left is not None:
                cost = self._cost(first)
                count = min(count, max(int(cost_left / cost), 0 if parts else 1))
                cost_left -= count * cost
            wanted = count if sequence.every_logit else int(count == uncomputed)
            if count == 0 or wanted > rows:
                continue
            parts.append(Part(sequence, first, count, wanted))
            tokens -= count
            rows -= wanted
        return parts
