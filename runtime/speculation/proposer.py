"""What guesses tokens: one interface for all ways of it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from enginewright.runtime.step.inputs import StepOutputs
from enginewright.runtime.step.sequence import TokenSequence
from enginewright.runtime.step.step_plan import StepPlan


class DraftToken(NamedTuple):
    """A token, and how sure the proposer is of it."""

    token: int
    confidence: int


class Proposer(ABC):
    """Guesses what comes behind the tokens of sequences that decode, none of which is in flight.

    It may keep what it likes of a sequence until that ends. A sequence's tokens only grow; what it has computed of
    guesses that were wrong, it has to take back itself. The tokens that are sampled depend on no guess.

    first_rates: of each level of confidence, how often a guess is right as long as nothing is known.
    """

    first_rates: Sequence[float]

    def observe(self, plan: StepPlan, outputs: StepOutputs) -> None:
        """A step is done, and what it sampled is known; its outputs last until the next one."""
        del plan, outputs  # most guess from tokens alone

    @abstractmethod
    def confidences(self, sequences: Sequence[TokenSequence]) -> Sequence[int | None]:
        """How sure it is of what it would guess for each: a level, or None where it would guess nothing."""

    @abstractmethod
    def begin(self, sequences: Sequence[TokenSequence]) -> None:
        """Guesses are wanted for these, of those that it has looked at last."""

    @abstractmethod
    def next_tokens(self, sequences: Sequence[TokenSequence]) -> Sequence[DraftToken | None]:
        """One guess more for some of those, behind the ones that they have; None where there is none."""

    def catch_up_s(self, sequence: TokenSequence) -> float:
        """Seconds that it takes before the first guess, to come to where the sequence is."""
        return 0.0

    @property
    def cost_s(self) -> tuple[float, float]:
        """What `guess` takes: for the first sequence and for each one, to be added up."""
        return 0.0, 0.0

    @abstractmethod
    def end(self, sequence: TokenSequence) -> None:
        """A sequence has ended: nothing of it is needed any more."""

    @abstractmethod
    def close(self) -> None:
        """Give back what it runs in."""
