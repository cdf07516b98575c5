"""One step, as the scheduler plans it: the executor's inputs, and the use of each row of logits."""

from collections.abc import Collection, Mapping, Sequence
from enum import Enum, auto
from typing import Self

import msgspec

from enginewright.runtime.sampling.request import DroppedRow, RowAfterDraft, RowRequest
from enginewright.runtime.step.inputs import StepInputs
from enginewright.runtime.step.sequence import TokenSequence


class ScheduledTokens(msgspec.Struct, frozen=True, gc=False):  # no reference cycle goes through it
    """The tokens of one sequence that a step computes."""

    sequence: TokenSequence  # sequence that they belong to
    first: int  # position of the first token
    num_tokens: int  # number of tokens
    num_logit_rows: int  # number of tokens, the last ones, that give logits

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.first + self.num_tokens


class RowPurpose(Enum):
    """Use of a row of logits."""

    SAMPLE = auto()  # sample the next token of its sequence
    VERIFY = auto()  # sample the token after a draft token, which counts if the rows before confirm the draft token
    SEARCH = auto()  # list the likeliest next tokens of a beam, among which a beam search chooses
    SCORE_PROMPT = auto()  # compute the log-probability of a token of the prompt
    DROPPED = auto()  # none: the row is sampled with the others, and the result is ignored


class LogitRow(msgspec.Struct, frozen=True, gc=False):
    """One row of a step's logits, with its sequence and use."""

    sequence: TokenSequence  # sequence that it belongs to
    purpose: RowPurpose  # use of the row
    request: RowRequest  # sampler's request for it
    # For VERIFY, number of draft tokens before the sampled token. For SCORE_PROMPT, position of the scored token.
    # Otherwise 0.
    index: int = 0


class LogitRows(msgspec.Struct, frozen=True):
    """The rows of logits of a step, in the executor's order. Steps that decode the same sequences share one object."""

    requests: tuple[RowRequest, ...] = ()  # sampler's request of each row
    sequences: tuple[TokenSequence, ...] = ()  # sequences that get tokens, in the order of their rows
    other: Mapping[int, LogitRow] = {}  # rows by index, without those whose purpose is SAMPLE
    draft_tokens: tuple[
        tuple[int, ...], ...
    ] = ()  # draft tokens that the step verifies, for each of `sequences`; () if it verifies none
    has_grammar: bool = False  # true if at least one request has a grammar

    @classmethod
    def of(cls, rows: Sequence[LogitRow]) -> Self:
        """Makes the rows of a step from a description of each."""
        other = {index: row for index, row in enumerate(rows) if row.purpose is not RowPurpose.SAMPLE}
        sequences = [row.sequence for row in rows if row.purpose is RowPurpose.SAMPLE]
        return cls.with_other(sequences, [row.request for row in rows], other)

    @classmethod
    def with_other(
        cls, sequences: Sequence[TokenSequence], requests: Sequence[RowRequest], other: Mapping[int, LogitRow]
    ) -> Self:
        """Makes the rows of a step.

        Args:
            sequences: the sequences that get tokens.
            requests: the sampler's request of each row.
            other: rows by index, without those whose purpose is SAMPLE.
        """
        verified = {
            row.sequence: row.request.draft_tokens  # the last VERIFY row has all of them
            for row in other.values()
            if row.purpose is RowPurpose.VERIFY and isinstance(row.request, RowAfterDraft)
        }
        draft_tokens = tuple([verified.get(sequence, ()) for sequence in sequences]) if verified else ()
        grammars = [request.grammar for request in requests if request.grammar is not None]
        return cls(tuple(requests), tuple(sequences), other, draft_tokens, bool(grammars))

    @property
    def rows(self) -> list[LogitRow]:
        """Each row of logits."""
        sequences = iter(self.sequences)
        return [
            self.other.get(index) or LogitRow(next(sequences), RowPurpose.SAMPLE, request)
            for index, request in enumerate(self.requests)
        ]

    @property
    def has_rows_without_token(self) -> bool:
        """True if some rows give no token: they are beams' rows, score tokens of prompts, or are dropped."""
        return any(row.purpose is not RowPurpose.VERIFY for row in self.other.values())

    def of_sequence(self, sequence: TokenSequence) -> "tuple[slice, LogitRows]":
        """Finds the rows that a sequence is sampled from.

        Returns:
            Their slice of the step's rows, and the rows themselves.
        """
        rows, first = self.rows, sequence.state.logits_row
        end = first + 1
        while end < len(rows) and rows[end].sequence is sequence:
            end += 1
        return slice(first, end), LogitRows.of(rows[first:end])

    def without(self, sequences: Collection[TokenSequence], dropped: DroppedRow) -> "LogitRows":
        """Copies the rows with those that some sequences are sampled from replaced by `dropped`.

        No row is removed, since a GPU samples all of them and identifies each by its index.
        """
        return LogitRows.of(
            [
                LogitRow(row.sequence, RowPurpose.DROPPED, dropped)
                if row.sequence in sequences and row.purpose is not RowPurpose.SCORE_PROMPT
                else row
                for row in self.rows
            ]
        )


class StepPlan(msgspec.Struct, frozen=True):
    """One step. Consecutive steps that decode the same sequences share `first_scheduled` and `rows`."""

    inputs: StepInputs  # inputs of the executor
    first_scheduled: tuple[ScheduledTokens, ...]  # tokens of the first of the consecutive steps; see `scheduled`
    num_decodes: int  # number of its first entries that decode one token each; the others have prompts or draft tokens
    rows: LogitRows = LogitRows()  # rows of logits
    ending: tuple[TokenSequence, ...] = ()  # sequences that sample nothing, and end with this step
    num_repeats: int = 0  # number of steps since the first of those that decode the same sequences

    @property
    def scheduled(self) -> tuple[ScheduledTokens, ...]:
        """The tokens of each sequence that the step computes."""
        if not self.num_repeats:
            return self.first_scheduled
        return tuple(msgspec.structs.replace(one, first=one.first + self.num_repeats) for one in self.first_scheduled)
