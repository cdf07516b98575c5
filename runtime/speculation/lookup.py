"""Prompt lookup: what came behind the last tokens when they came before, in this text or in earlier answers.

A text is an array, and looking something up compares all of it with the last token: 32,000 tokens in some microseconds,
which is less than any index would take to keep up, and four bytes a token.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from enginewright.runtime.speculation.proposer import DraftToken, Proposer
from enginewright.runtime.step.sequence import TokenSequence

SHORTEST, LONGEST = 2, 8  # tokens that have to be the same, and those that are looked at
LEVELS = (4, LONGEST)  # lengths of a match from which on it is of the next level
MEMORY_TOKENS = 1 << 16  # of earlier answers of a tenant
TENANTS = 64  # whose answers are remembered: those that have asked last
BETWEEN = -1  # no token: it stands between two answers


class Text:
    """Tokens that can be looked up; a text that is full forgets its older half.

    Args:
        most: tokens that it keeps; None: all.
    """

    def __init__(self, most: int | None = None) -> None:
        self._tokens = np.empty(1024, np.int32)
        self._most = most
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def extend(self, tokens: Sequence[int]) -> None:
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
        """How many of the last tokens of `suffix` came before together, and what follows their latest place."""
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
    """A sequence's prompt and answer."""

    text: Text = field(default_factory=Text)
    found: Sequence[int] = ()  # what may come next
    confidence: int = 0
    given: int = 0  # how many of them


class PromptLookup(Proposer):
    """Guesses what followed the longest match, in the sequence itself or in earlier answers of its tenant.

    Args:
        most: guesses of a sequence.
    """

    first_rates = (0.3, 0.5, 0.8)

    def __init__(self, most: int) -> None:
        self._most = most
        self._own: dict[TokenSequence, _OwnText] = {}
        self._answers: OrderedDict[str, Text] = OrderedDict()  # by tenant, the latest last

    def confidences(self, sequences: Sequence[TokenSequence]) -> Sequence[int | None]:
        return [self._look(sequence) for sequence in sequences]

    def begin(self, sequences: Sequence[TokenSequence]) -> None:
        for sequence in sequences:
            self._own[sequence].given = 0

    def next_tokens(self, sequences: Sequence[TokenSequence]) -> Sequence[DraftToken | None]:
        return [self._guess(self._own[sequence]) for sequence in sequences]

    @staticmethod
    def _guess(own: _OwnText) -> DraftToken | None:
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
            following = np.resize(following, self._most)  # what repeats itself goes on so
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
