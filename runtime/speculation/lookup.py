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
        most: maximum number of tokens; None: no maximum.
    """

    def __init__(self, most: int | None = None) -> None:
        self._tokens = np.empty(1024, np.int32)
        self._most = most
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens."""
        if self._most is not None:
            tokens = tokens[-(self._most // 2) :]
            if self._length + len(tokens) > self._most:
                kept = self._tokens[self._length - self._most // 2 : self._length]
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
        places = np.flatnonzero(tokens[:-1] == suffix[-1])
        matched = 0
        while len(places) and matched < len(suffix):
            matched, found = matched + 1, places
            if matched < len(suffix):
                places = places[places >= matched]
                places = places[tokens[places - matched] == suffix[-1 - matched]]
        return (matched, tokens[found[-1] + 1 :]) if matched else (0, tokens[:0])


@dataclass(eq=False, slots=True)
class _OwnText:
    """The tokens of one sequence, and its draft run."""

    text: Text = field(default_factory=Text)  # prompt and answer so far
    found: Sequence[int] = ()  # draft tokens that the last lookup has found
    confidence: int = 0  # their level of confidence
    given: int = 0  # number of them that were proposed


class PromptLookup(Proposer):
    """Proposes the tokens that followed the longest match, in the sequence itself or in earlier answers of its tenant.

    The tenant is the sequence's cache salt, so that no draft token tells one tenant about the answers of another.

    Args:
        most: maximum number of draft tokens of a sequence in a step.
    """

    first_rates = (0.3, 0.5, 0.8)

    def __init__(self, most: int) -> None:
        self._most = most
        self._own: dict[TokenSequence, _OwnText] = {}
        self._answers: OrderedDict[str, Text] = OrderedDict()  # by cache salt, the latest last

    def confidences(self, sequences: Sequence[TokenSequence]) -> Sequence[int | None]:
        return [self._look(sequence) for sequence in sequences]

    def begin(self, sequences: Sequence[TokenSequence]) -> None:
        for sequence in sequences:
            self._own[sequence].given = 0

    def next_tokens(self, sequences: Sequence[TokenSequence]) -> Sequence[DraftToken | None]:
        return [self._draft(self._own[sequence]) for sequence in sequences]

    @staticmethod
    def _draft(own: _OwnText) -> DraftToken | None:
        if own.given == len(own.found):
            return None
        own.given += 1
        return DraftToken(own.found[own.given - 1], own.confidence)

    def end(self, sequence: TokenSequence) -> None:
        self._own.pop(sequence, None)
        answer = sequence.token_ids[sequence.num_prompt_tokens :]
        if len(answer) <= SHORTEST:
            return
        answers = self._answers.setdefault(sequence.cache_salt, Text(MEMORY_TOKENS))
        answers.extend([*answer, BETWEEN])
        self._answers.move_to_end(sequence.cache_salt)
        if len(self._answers) > TENANTS:
            self._answers.popitem(last=False)

    def close(self) -> None:
        self._own.clear()
        self._answers.clear()

    def _look(self, sequence: TokenSequence) -> int | None:
        own = self._own.setdefault(sequence, _OwnText())
        own.text.extend(sequence.token_ids[len(own.text) :])
        suffix = sequence.token_ids[-LONGEST:]
        matched, following = own.text.find(suffix)
        if matched:
            following = np.resize(following, self._most)  # a repeating text is continued as a loop
        answers = self._answers.get(sequence.cache_salt)
        if matched < LONGEST and answers is not None:
            earlier, its = answers.find(suffix)
            if earlier > matched:
                matched, following = earlier, its[: self._most]
                following = following[: int(np.argmax(following == BETWEEN)) if BETWEEN in following else None]
        own.found = following.tolist()
        if matched < min(SHORTEST, len(suffix)) or not own.found:
            return None
        own.confidence = sum(matched >= length for length in LEVELS)
        return own.confidence
