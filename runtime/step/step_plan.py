"""One step, as the scheduler plans it: what the executor is given, and what becomes of the rows of logits."""

from collections.abc import Collection, Sequence
from enum import Enum, auto
from typing import Self

import msgspec

from enginewright.runtime.sampling.request import DroppedRow, RowAfterDraft, RowRequest
from enginewright.runtime.step.inputs import StepInputs
from enginewright.runtime.step.sequence import TokenSequence


class ScheduledTokens(msgspec.Struct, frozen=True, gc=False):  # nothing that it leads to leads back to it
    """The tokens of one sequence that a step computes."""

    sequence: TokenSequence
    first: int  # position
    num_tokens: int
    num_logit_rows: int  # how many of them, from the end, give logits

    @property
    def end(self) -> int:
        """The position after the last one."""
        return self.first + self.num_tokens


class RowPurpose(Enum):
    """Reason for which a row of logits is computed."""

    SAMPLE = auto()  # the next token of its sequence
    VERIFY = auto()  # the token after a draft token, which tells with the row before whether that one was right
    SCORE_PROMPT = auto()  # the log-probability of a token of the prompt
    DROPPED = auto()  # none: the row is sampled with the others, and what comes of it is not used


class LogitRow(msgspec.Struct, frozen=True, gc=False):
    """One row of a step's logits: whose it is, and what for."""

    sequence: TokenSequence
    purpose: RowPurpose
    request: RowRequest  # what the sampler is given for it
    # VERIFY: the number of draft tokens before the token that is sampled. SCORE_PROMPT: the position of the token that
    # is scored. Otherwise 0.
    index: int = 0


class LogitRows(msgspec.Struct, frozen=True):
    """The rows of logits of a step, in the executor's order. Steps that decode the same sequences share one object."""

    rows: tuple[LogitRow, ...] = ()
    requests: tuple[RowRequest, ...] = ()  # of the rows
    sequences: tuple[TokenSequence, ...] = ()  # those that get tokens, in the order of their rows
    draft_tokens: tuple[
        tuple[int, ...], ...
    ] = ()  # of each of `sequences`: those that the step verifies; () if it does none
    has_grammar: bool = False  # true of one of the requests at least
    has_other_rows: bool = False  # some give no tokens: they score tokens of prompts, or are dropped

    @classmethod
    def of(cls, rows: Sequence[LogitRow]) -> Self:
        """Makes the rows of a step, with all that follows from them."""
        sequences: list[TokenSequence] = []
        draft_tokens: list[tuple[int, ...]] = []
        has_draft_tokens = has_other_rows = has_grammar = False
        for row in rows:
            has_grammar |= row.request.grammar is not None
            match row.purpose:
                case RowPurpose.SAMPLE:
                    sequences.append(row.sequence)
                    draft_tokens.append(())
                case RowPurpose.VERIFY:
                    assert isinstance(row.request, RowAfterDraft)
                    draft_tokens[-1] = row.request.draft_tokens  # those of the last row are all
                    has_draft_tokens = True
                case RowPurpose.SCORE_PROMPT | RowPurpose.DROPPED:
                    has_other_rows = True
        requests = tuple([row.request for row in rows])
        verified = tuple(draft_tokens) if has_draft_tokens else ()
        return cls(tuple(rows), requests, tuple(sequences), verified, has_grammar, has_other_rows)

    def of_sequence(self, sequence: TokenSequence) -> "tuple[slice, LogitRows]":
        """Returns where the rows are that a sequence is sampled from, and these rows alone."""
        first = sequence.logits_row
        end = first + 1
        while end < len(self.rows) and self.rows[end].sequence is sequence:
            end += 1
        return slice(first, end), LogitRows.of(self.rows[first:end])

    def without(self, sequences: Collection[TokenSequence], dropped: DroppedRow) -> "LogitRows":
        """Drops the rows that some sequences are sampled from.

        Rows stay where they are: a GPU samples all of them, and knows each by its number.
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
    """One step. Steps that decode the same sequences share `first_scheduled` and `rows`."""

    inputs: StepInputs
    first_scheduled: tuple[ScheduledTokens, ...]  # of the first of such steps; see `scheduled`
    num_decodes: int  # the first of them, which go on by one token; the others are read in
    rows: LogitRows = LogitRows()
    ending: tuple[TokenSequence, ...] = ()  # sequences that sample nothing, and end with this step
    num_repeats: int = 0  # steps since the first of those that decode the same sequences

    @property
    def scheduled(self) -> tuple[ScheduledTokens, ...]:
        """What it computes of each sequence."""
        if not self.num_repeats:
            return self.first_scheduled
        return tuple(msgspec.structs.replace(one, first=one.first + self.num_repeats) for one in self.first_scheduled)
