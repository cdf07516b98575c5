"""The interface of everything that proposes draft tokens."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from enginewright.runtime.step.inputs import StepOutputs
from enginewright.runtime.step.sequence import TokenSequence
from enginewright.runtime.step.step_plan import StepPlan


class DraftToken(NamedTuple):
    """A draft token, and the proposer's confidence in it."""

    token: int  # token id
    confidence: int  # level of confidence, an index of Proposer.first_rates


class Proposer(ABC):
    """Proposes draft tokens for decoding sequences, none of whose tokens is in flight.

    It may keep state for a sequence until the sequence ends. The tokens of a sequence are only ever appended to. The
    proposer rolls back its own state after draft tokens that were rejected. The sampled tokens never depend on the
    draft tokens.

    first_rates: the initial acceptance rate of each level of confidence, before any draft token was verified.
    """

    first_rates: Sequence[float]

    def observe(self, plan: StepPlan, outputs: StepOutputs) -> None:
        """Receives a finished step, whose sampled tokens are known.

        Args:
            plan: the plan of the step.
            outputs: its outputs, valid until the next step runs.
        """
        del plan, outputs  # Most proposers need the tokens alone.

    @abstractmethod
    def confidences(self, sequences: Sequence[TokenSequence]) -> Sequence[int | None]:
        """Returns the level of confidence in the first draft token of each sequence.

        The level is None for a sequence that the proposer has no draft token for.
        """

    @abstractmethod
    def begin(self, sequences: Sequence[TokenSequence]) -> None:
        """Starts the draft runs of these sequences, some of those that `confidences` was last called with."""

    @abstractmethod
    def next_tokens(self, sequences: Sequence[TokenSequence]) -> Sequence[DraftToken | None]:
        """Proposes the next draft token of each of these sequences, some of those that `begin` was called with.

        Returns:
            A draft token for each sequence, which follows its earlier ones; None where the draft run ends.
        """

    def catch_up_s(self, sequence: TokenSequence) -> float:
        """Estimated seconds to read the unread tokens of a sequence before its first draft token."""
        return 0.0

    @property
    def cost_s(self) -> tuple[float, float]:
        """Estimated seconds of one call of `next_tokens`: a fixed part, and a part for each sequence."""
        return 0.0, 0.0

    @abstractmethod
    def end(self, sequence: TokenSequence) -> None:
        """Drops what is kept for a sequence that has ended."""

    @abstractmethod
    def close(self) -> None:
        """Releases memory and processes."""
