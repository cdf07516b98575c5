"""Limits the prompt tokens of a step, so that it ends within a goal for its duration."""

from enginewright.runtime.step.step_cost import StepCost

AIM = 0.9  # share of the goal that a step is planned for, since no prediction is exact
MIN_TOKEN_S = 1e-9  # minimum of the seconds of a token, against division by zero
MIN_COST = 8.0  # tokens of prompts that a step always computes, so that prompts end even if the goal cannot be kept


class StepGoal:
    """Divides a step's time between decodes and prompts.

    Args:
        seconds: maximum duration of a step.
        cost: predicts a step's duration from its work, in tokens weighted by their cost (prompt_cost.py).
    """

    def __init__(self, seconds: float, cost: StepCost) -> None:
        self._seconds, self._cost = seconds, cost

    @property
    def is_measured(self) -> bool:
        """True once a step has been measured; before that, nothing can be predicted."""
        return self._cost.is_measured

    def left(self, work: float) -> float:
        """Maximum cost of a step's prompts, given the cost of its other work. The unit is that of PromptCost."""
        max_cost = (AIM * self._seconds - self._cost.fixed) / max(self._cost.of_token, MIN_TOKEN_S)
        return max(max_cost - work, MIN_COST)
