"""How much of the prompts a step reads beside its decodes."""

from collections.abc import Callable, Sequence

from enginewright.runtime.cache.cache import Cache
from enginewright.runtime.step.sequence import TokenSequence
from enginewright.runtime.step.step_goal import StepGoal
from enginewright.runtime.step.step_plan import ScheduledTokens


class PromptChunks:
    """Prompts in the order in which their sequences run, each as much as is left of a step's limits.

    Args:
        most_cost: of the prompts of a step that keeps a pace (one token they may always have); None: no bound.
        cost: of a prompt's token at a position.
        goal: how long such a step may take, which says more than `most_cost` once steps were measured.
        whole: a prompt is read in one step, and not cut.
    """

    def __init__(
        self,
        cache: Cache,
        most_cost: float | None,
        cost: Callable[[int], float],
        *,
        goal: StepGoal | None = None,
        whole: bool = False,
    ) -> None:
        self._cache, self._most_cost, self._cost, self._goal, self._whole = cache, most_cost, cost, goal, whole

    def cut(
        self,
        prompts: Sequence[TokenSequence],
        tokens: int,
        rows: int,
        *,
        beside: Sequence[ScheduledTokens],
        keeps_pace: bool,
    ) -> list[ScheduledTokens]:
        """Tokens of these prompts that the step reads.

        Args:
            tokens, rows: of logits, that there may be.
            beside: what else the step computes.
            keeps_pace: somebody waits for the tokens of this step.
        """
        scheduled: list[ScheduledTokens] = []
        cost_left = self._bound(beside) if prompts and keeps_pace else None
        for sequence in prompts:
            first = sequence.num_computed_tokens
            uncomputed = sequence.num_tokens - first
            count = min(uncomputed, tokens, rows) if sequence.needs_prompt_logits else min(uncomputed, tokens)
            if self._cache.has_snapshots:
                count = self._cache.chunk_end(sequence.held, first, first + count) - first
            if cost_left is not None:
                cost = self._cost(first)
                count = min(count, max(int(cost_left / cost), 0 if scheduled else 1))
                cost_left -= count * cost
            wanted = count if sequence.needs_prompt_logits else int(count == uncomputed)
            if count == 0 or wanted > rows or (self._whole and count < uncomputed):
                continue
            scheduled.append(ScheduledTokens(sequence, first, count, wanted))
            tokens -= count
            rows -= wanted
        return scheduled

    def _bound(self, beside: Sequence[ScheduledTokens]) -> float | None:
        if self._goal is None or not self._goal.is_measured:
            return self._most_cost
        return self._goal.left(sum(one.num_tokens * self._cost(one.first) for one in beside))
