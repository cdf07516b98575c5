"""Acceptance rates: estimates of how likely a draft token is accepted, learned from the verified ones."""

from collections.abc import Sequence

MIN_TOKEN_WEIGHT = 0.1  # minimum weight of a verified draft token in the rates of its sequence
OF_ALL = 0.02  # minimum weight of a verified draft token in the rates of all sequences, which a new one starts with
FIRST = 10  # number of draft tokens that the initial rates count as


class Acceptance:
    """Acceptance rates by level of confidence, of one sequence or of all sequences together.

    Args:
        rates: the initial rates, one for each level, from 0 to 1.
        weight: weight of a new draft token once many have been verified, from 0 to 1.
    """

    def __init__(self, rates: Sequence[float], weight: float) -> None:
        self._rates, self._weight = list(rates), weight
        self._counts = [FIRST] * len(rates)

    @staticmethod
    def of_all(rates: Sequence[float]) -> "Acceptance":
        """Creates the rates of all sequences together."""
        return Acceptance(rates, OF_ALL)

    def of_sequence(self) -> "Acceptance":
        """Creates the rates of a new sequence, which start as a copy of these."""
        return Acceptance(self._rates, MIN_TOKEN_WEIGHT)

    def rate(self, level: int) -> float:
        """Estimated probability that a draft token of this level is accepted."""
        return self._rates[level]

    def learn(self, level: int, right: float) -> None:
        """Updates the rate of a level with one draft token.

        Args:
            level: level of confidence of the draft token.
            right: 1 if it was accepted, 0 if it was rejected, or the probability that it will be accepted.
        """
        self._counts[level] += 1
        self._rates[level] += max(self._weight, 1 / self._counts[level]) * (right - self._rates[level])
