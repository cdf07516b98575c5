"""How much a step may do and still end within a goal."""

from enginewright.runtime.step.step_cost import StepCost

AIM = 0.9  # of the goal: no prediction is exact
LEAST_S = 1e-9  # of a token: below, it is noise
LEAST_COST = 8.0  # of a step's prompts, in tokens: they come to an end, even where the goal cannot be kept


class StepGoal:
    """What is left of a step's time for prompts.

    Args:
        seconds: that a step may take.
        cost: learns what steps take by their work: tokens, each by its cost (prompt_cost.py).
    """

    def __init__(self, seconds: float, cost: StepCost) -> None:
        self._seconds, self._cost = seconds, cost

    @property
    def is_measured(self) -> bool:
        return self._cost.is_measured

    def left(self, work: float) -> float:
        """What prompts may cost beside work of so many tokens."""
        most = (AIM * self._seconds - self._cost.fixed) / max(self._cost.of_token, LEAST_S)
        return max(most - work, LEAST_COST)
