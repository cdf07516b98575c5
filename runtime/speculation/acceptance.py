"""How likely the guesses for a sequence are right, from those that were verified."""

from collections.abc import Sequence

BY_GUESS = 0.1  # how far a guess that was verified moves what is believed of its sequence
OF_ALL = 0.02  # and of all sequences, with which a new one begins
# How far a step without a guess moves it back: after some tens of steps one guess shows whether the text has changed.
# Where it has not, that costs a hundredth of the time.
FORGETTING = 0.001


class Acceptance:
    """Rates by level of confidence, of one sequence or of all.

    Args:
        rates: at first.
        weight: of a guess.
    """

    def __init__(self, rates: Sequence[float], weight: float) -> None:
        self._first, self._rates, self._weight = tuple(rates), list(rates), weight

    @staticmethod
    def of_all(rates: Sequence[float]) -> "Acceptance":
        return Acceptance(rates, OF_ALL)

    def of_sequence(self) -> "Acceptance":
        """What is believed of a new one."""
        new = Acceptance(self._first, BY_GUESS)
        new._rates[:] = self._rates
        return new

    def rate(self, level: int) -> float:
        return self._rates[level]

    def learn(self, level: int, right: float) -> None:
        """A guess was right (1) or wrong (0), or is right with this chance."""
        self._rates[level] += self._weight * (right - self._rates[level])

    def forget(self, level: int) -> None:
        """A step went by without a guess."""
        self._rates[level] += FORGETTING * (max(self._first) - self._rates[level])
