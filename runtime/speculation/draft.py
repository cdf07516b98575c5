"""Draft tokens by a draft model: a smaller model in the same engine, or the first layers of the model itself."""

from abc import abstractmethod
from collections.abc import Sequence

from enginewright.runtime.speculation.proposer import DraftToken, Proposer
from enginewright.runtime.speculation.runner import FIRST_RATES, UNKNOWN, CatchUp, DraftRunner
from enginewright.runtime.step.sequence import TokenSequence


class ModelProposer(Proposer):
    """Proposes draft tokens by a draft model, whose runner it gives what each draft sequence lacks.

    Args:
        runner: runs the draft model.
    """

    first_rates = FIRST_RATES

    def __init__(self, runner: DraftRunner) -> None:
        self.runner = runner

    def begin(self, sequences: Sequence[TokenSequence]) -> None:
        self.runner.begin([self._catch_up(sequence) for sequence in sequences])

    def next_tokens(self, sequences: Sequence[TokenSequence]) -> Sequence[DraftToken | None]:
        return self.runner.next_tokens(sequences)

    @property
    def cost_s(self) -> tuple[float, float]:
        return self.runner.cost.fixed, self.runner.cost.of_token

    def end(self, sequence: TokenSequence) -> None:
        self.runner.end(sequence)

    def close(self) -> None:
        self.runner.close()

    @abstractmethod
    def _catch_up(self, sequence: TokenSequence) -> CatchUp:
        """Lists what the draft model has to read before the next draft run of a sequence."""


class DraftModel(ModelProposer):
    """Proposes draft tokens by a second plan of the engine, which reads the same tokens as the model."""

    def confidences(self, sequences: Sequence[TokenSequence]) -> Sequence[int | None]:
        return [UNKNOWN if len(one.token_ids) < self.runner.max_model_len else None for one in sequences]

    def catch_up_s(self, sequence: TokenSequence) -> float:
        return self.runner.catch_up_s(sequence, len(sequence.token_ids))

    def _catch_up(self, sequence: TokenSequence) -> CatchUp:
        """Verified tokens after the draft tokens that were accepted, which the draft model has computed."""
        draft, first = self.runner.drafts.get(sequence), 0
        if draft is not None:
            first = draft.num_verified
            for draft_token, token in zip(draft.draft_tokens, sequence.token_ids[first:], strict=False):
                if draft_token != token:
                    break
                first += 1
        return CatchUp(sequence, first, sequence.token_ids[first:])
