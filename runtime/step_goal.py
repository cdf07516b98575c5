"""How much a step may do and still end within a goal."""

from enginewright.runtime.step_cost import StepCost

AIM = 0.9  # of the goal: no prediction is exact
LEAST_S = 1e-9  # of a token: below, it is noise
LEAST_COST = 8.0  # of a step's prompts, in tokens: they come to an end, even where the goal cannot be kept


class StepGoal:
    """Learns from the steps that were what a step takes by its work: tokens, each by its cost (prompt_cost.py).

    Args:
        seconds: that a step may take.
        cost: nothing has been learned yet.
    """

    def __init__(self, seconds: float, cost: StepCost) -> None:
        self._seconds, self._cost = seconds, cost
        self.is_measured = False

    def left(self, work: float) -> float:
        """What prompts may cost beside work of so many tokens."""
        most = (AIM * self._seconds - self._cost.fixed) / max(self._cost.of_token, LEAST_S)
        return max(most - work, LEAST_COST)

    def took(self, work: float, seconds: float) -> None:
        """A step of so much work took so long."""
        self._cost.learn(work, seconds)
        self.is_measured = True
