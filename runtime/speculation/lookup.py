"""Prompt lookup: draft tokens from what followed the last tokens earlier, in this sequence or in earlier answers.

A text is an array. A lookup compares the whole array with the last token, which takes some microseconds for 32,000
tokens. That is less time than keeping an index up to date would take, and needs only four bytes per token.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from enginewright.runtime.speculation.proposer import DraftToken, Proposer
from enginewright.runtime.step.sequence import TokenSequence

SHORTEST, LONGEST = 2, 8  # minimum length of a match, and the length at which the search stops, in tokens
LEVELS = (4, LONGEST)  # minimum lengths of a match for the levels of confidence 1 and 2, in tokens
MEMORY_TOKENS = 1 << 16  # tokens of earlier answers that are kept for each tenant
TENANTS = 64  # number of tenants whose answers are kept: those that had an answer most recently
BETWEEN = -1  # separator of two answers; it is no token id


class Text:
    """A searchable array of tokens. When it is full, it drops its older half.

    Args:
        max_tokens: maximum number of tokens; None: no maximum.
    """

    def __init__(self, max_tokens: int | None = None) -> None:
        self._tokens = np.empty(1024, np.int32)
        self._max_tokens = max_tokens
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens."""
        if self._max_tokens is not None:
            half = self._max_tokens // 2
            tokens = tokens[-half:]
            if self._length + len(tokens) > self._max_tokens:
                kept = self._tokens[self._length - half : self._length]
                self._tokens[: len(kept)] = kept.copy()
                self._length = len(kept)
        end = self._length + len(tokens)
        if end > len(self._tokens):
            self._tokens = np.resize(self._tokens, max(end, 2 * len(self._tokens)))
        self._tokens[self._length : end] = tokens
        self._length = end

    def find(self, suffix: Sequence[int]) -> tuple[int, NDArray[np.int32]]:
        """Finds the longest match of the end of a suffix; of matches of the same length, the latest.

        Args:
            suffix: the last tokens of a sequence, at least one.

        Returns:
            The length of the match in tokens, and the tokens after it; 0 and no tokens if there is no match.
        """
        tokens = self._tokens[: self._length]
        ends = np.flatnonzero(tokens[:-1] == suffix[-1])  # positions of the last token of matches
        matched = 0
        while len(ends) and matched < len(suffix):
            matched, found = matched + 1, ends
            if matched < len(suffix):
                ends = ends[ends >= matched]
                ends = ends[tokens[ends - matched] == suffix[-1 - matched]]
        return (matched, tokens[found[-1] + 1 :]) if matched else (0, tokens[:0])


@dataclass(eq=False, slots=True)
class _Lookup:
    """The text of one sequence, and the draft run that its last lookup has found."""

    text: Text = field(default_factory=Text)  # prompt and answer so far
    draft_tokens: Sequence[int] = ()  # draft tokens that were found
    confidence: int = 0  # their level of confidence
    num_proposed: int = 0  # number of them that were proposed

    def next_token(self) -> DraftToken | None:
        """The next draft token; None if all were proposed."""
        if self.num_proposed == len(self.draft_tokens):
            return None
        self.num_proposed += 1
        return DraftToken(self.draft_tokens[self.num_proposed - 1], self.confidence)


class PromptLookup(Proposer):
    """Proposes the tokens that followed the longest match, in the sequence itself or in earlier answers of its tenant.

    The tenant is the sequence's cache salt, so that no draft token tells one tenant about the answers of another.

    Args:
        max_draft_tokens: maximum number of draft tokens of a sequence in a step.
    """

    first_rates = (0.3, 0.5, 0.8)

    def __init__(self, max_draft_tokens: int) -> None:
        self._max_draft_tokens = max_draft_tokens
        self._lookups: dict[TokenSequence, _Lookup] = {}
        self._answers: OrderedDict[str, Text] = OrderedDict()  # by cache salt, the latest last

    def confidences(self, sequences: Sequence[TokenSequence]) -> Sequence[int | None]:
        return [self._look_up(sequence) for sequence in sequences]

    def begin(self, sequences: Sequence[TokenSequence]) -> None:
        for sequence in sequences:
            self._lookups[sequence].num_proposed = 0

    def next_tokens(self, sequences: Sequence[TokenSequence]) -> Sequence[DraftToken | None]:
        return [self._lookups[sequence].next_token() for sequence in sequences]

    def end(self, sequence: TokenSequence) -> None:
        self._lookups.pop(sequence, None)
        answer = sequence.token_ids[sequence.num_prompt_tokens :]
        if len(answer) <= SHORTEST:
            return
        answers = self._answers.setdefault(sequence.cache_salt, Text(MEMORY_TOKENS))
        answers.extend([*answer, BETWEEN])
        self._answers.move_to_end(sequence.cache_salt)
        if len(self._answers) > TENANTS:
            self._answers.popitem(last=False)

    def close(self) -> None:
        self._lookups.clear()
        self._answers.clear()

    def _look_up(self, sequence: TokenSequence) -> int | None:
        """Looks up draft tokens after the last tokens of a sequence; returns the level of confidence in them."""
        lookup = self._lookups.setdefault(sequence, _Lookup())
        lookup.text.extend(sequence.token_ids[len(lookup.text) :])
        suffix = sequence.token_ids[-LONGEST:]
        matched, following = lookup.text.find(suffix)
        if matched:
            following = np.resize(following, self._max_draft_tokens)  # a repeating text is continued as a loop
        answers = self._answers.get(sequence.cache_salt)
        if matched < LONGEST and answers is not None:
            matched_earlier, following_earlier = answers.find(suffix)
            if matched_earlier > matched:
                matched, following = matched_earlier, following_earlier[: self._max_draft_tokens]
                following = following[: int(np.argmax(following == BETWEEN)) if BETWEEN in following else None]
        lookup.draft_tokens = following.tolist()
        if matched < min(SHORTEST, len(suffix)) or not lookup.draft_tokens:
            return None
        lookup.confidence = sum(matched >= length for length in LEVELS)
        return lookup.confidence
