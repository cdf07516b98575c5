"""Chunked prefill: chooses the prompt tokens that a step computes together with its decodes."""

from collections.abc import Callable, Sequence

from enginewright.runtime.cache.cache import Cache
from enginewright.runtime.step.sequence import TokenSequence
from enginewright.runtime.step.step_goal import StepGoal
from enginewright.runtime.step.step_plan import ScheduledTokens


class PromptChunks:
    """Cuts prompts into chunks, in the order of the running sequences, each as long as the step's limits allow.

    Args:
        cache: the KV cache, which may require that a chunk ends at a snapshot.
        max_cost: maximum cost of the prompt tokens of a step with a bound, though one token is always allowed; None:
            no bound.
        cost: gives the cost of a prompt token at a position.
        goal: maximum time of a step with a bound; it replaces `max_cost` once steps were measured.
        whole: true if a prompt has to be computed in a single step.
    """

    def __init__(
        self,
        cache: Cache,
        max_cost: float | None,
        cost: Callable[[int], float],
        *,
        goal: StepGoal | None = None,
        whole: bool = False,
    ) -> None:
        self._cache, self._max_cost, self._cost, self._goal, self._whole = cache, max_cost, cost, goal, whole

    def cut(
        self,
        prompts: Sequence[TokenSequence],
        tokens: int,
        rows: int,
        *,
        others: Sequence[ScheduledTokens],
        keeps_pace: bool,
    ) -> list[ScheduledTokens]:
        """Chooses the prompt tokens of a step.

        Args:
            prompts: sequences with prompt tokens to compute, the most urgent first.
            tokens: token budget of the prompts.
            rows: budget of rows of logits of the prompts.
            others: the other tokens of the step.
            keeps_pace: true if the cost or time of the step is bounded, since it decodes work other than best effort.

        Returns:
            The chunks, at most one for each prompt.
        """
        scheduled: list[ScheduledTokens] = []
        cost_left = self._bound(others) if prompts and keeps_pace else None
        for sequence in prompts:
            first = sequence.state.num_computed_tokens
            uncomputed = sequence.state.num_tokens - first
            count = min(uncomputed, tokens, rows) if sequence.state.needs_prompt_logits else min(uncomputed, tokens)
            if self._cache.has_snapshots:
                count = self._cache.chunk_end(sequence.cache.held, first, first + count) - first
            if cost_left is not None:
                cost = self._cost(first)
                count = min(count, max(int(cost_left / cost), 0 if scheduled else 1))
                cost_left -= count * cost
            wanted = count if sequence.state.needs_prompt_logits else int(count == uncomputed)
            if count == 0 or wanted > rows or (self._whole and count < uncomputed):
                continue
            scheduled.append(ScheduledTokens(sequence, first, count, wanted))
            tokens -= count
            rows -= wanted
        return scheduled

    def _bound(self, others: Sequence[ScheduledTokens]) -> float | None:
        if self._goal is None or not self._goal.is_measured:
            return self._max_cost
        return self._goal.left(sum(one.num_tokens * self._cost(one.first) for one in others))
