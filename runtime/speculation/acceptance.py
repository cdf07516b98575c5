"""How likely the guesses for a sequence are right, from those that were verified."""

from collections.abc import Sequence

BY_GUESS = 0.1  # how far a guess that was verified moves what is believed of its sequence
OF_ALL = 0.02  # and of all sequences, with which a new one begins
FIRST = 10  # guesses that the first rates weigh as much as


class Acceptance:
    """Rates by level of confidence, of one sequence or of all.

    Args:
        rates: at first.
        weight: of a guess, when many have been verified.
    """

    def __init__(self, rates: Sequence[float], weight: float) -> None:
        self._rates, self._weight = list(rates), weight
        self._counts = [FIRST] * len(rates)

    @staticmethod
    def of_all(rates: Sequence[float]) -> "Acceptance":
        return Acceptance(rates, OF_ALL)

    def of_sequence(self) -> "Acceptance":
        """What is believed of a new one."""
        return Acceptance(self._rates, BY_GUESS)

    def rate(self, level: int) -> float:
        return self._rates[level]

    def learn(self, level: int, right: float) -> None:
        """A guess was right (1) or wrong (0), or is right with this chance."""
        self._counts[level] += 1
        self._rates[level] += max(self._weight, 1 / self._counts[level]) * (right - self._rates[level])
