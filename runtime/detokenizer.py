"""Text that comes token by token: whole characters, and no further than the first stop string."""

from collections.abc import Sequence

from enginewright.runtime.tokenizer import REPLACEMENT, Tokenizer

CONTEXT_TOKENS = 6  # of the prompt, so that the first token of the answer decodes as it would in the middle of a text
MAX_CUT_BYTES = 3  # a character has at most four bytes, so as many may wait for the rest of one


class Detokenizer:
    """Text of an answer, as its tokens come; a character comes whole.

    What a token adds is the difference of two decodings that begin at the same place, since decoders treat the
    beginning of a text specially. Between them lie whole tokens: a decoder may turn all of a row of byte tokens into
    replacements where one of its characters is cut, so characters of such a text cannot be counted.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], *, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._whole_texts = tokenizer.whole_texts[skip_special_tokens]
        self._ids = _context(tokenizer, prompt, skip_special_tokens)
        # ids[:done] are of the prompt, or have been given as text; if nothing is held back, so have those from there
        # on, each of them a whole text.
        self._start, self._done = 0, len(self._ids)
        self._holds = False

    def push(self, token: int) -> str:
        """The text that is complete with this token; empty in the middle of a character."""
        text = self._whole_texts[token]
        if text and not self._holds:
            self._ids.append(token)
            return text
        return "" if text == "" else self._push(token)

    def flush(self) -> str:
        """What was held back, although it is no whole character."""
        text = self._take(len(self._ids), whole=False) if self._holds else ""
        self._holds = False
        return text

    def _push(self, token: int) -> str:
        if not self._holds and self._done < len(self._ids):
            self._start, self._done = len(self._ids) - 1, len(self._ids)
        self._ids.append(token)
        piece = self._take(len(self._ids))
        if len(self._ids) - self._done > MAX_CUT_BYTES:  # so the first of them is of no character, or of U+FFFD itself
            piece += self._take(self._first_seam(), whole=False)
        self._holds = self._done < len(self._ids)
        return piece

    def _take(self, end: int, *, whole: bool = True) -> str:
        before, after = self._decode(self._start, self._done), self._decode(self._start, end)
        if whole and after.endswith(REPLACEMENT):
            return ""
        self._start, self._done = self._done, end
        while not after.startswith(before):  # it ends in the middle of a character, as a prompt may
            before = before[:-1]
        return after[len(before) :]

    def _first_seam(self) -> int:
        """Where the tokens that are held back can be divided without a change of their text."""
        all_of_it, last = self._decode(self._start, len(self._ids)), len(self._ids)
        for end in range(self._done + 1, last):
            if self._decode(self._start, end) + self._decode(end, last) == all_of_it:
                return end
        return self._done + 1

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._ids[start:end], skip_special_tokens=self._skip)


def _context(tokenizer: Tokenizer, prompt: Sequence[int], skip_special_tokens: bool) -> list[int]:
    """The prompt's last tokens, from where a character begins; none if that is far away."""
    for count in range(CONTEXT_TOKENS, CONTEXT_TOKENS + MAX_CUT_BYTES + 1):
        ids = list(prompt[-count:])
        if not tokenizer.decode(ids, skip_special_tokens=skip_special_tokens).startswith(REPLACEMENT):
            return ids
    return []


class StopStrings:
    """Ends a text at the stop string that is complete first, and holds back what may be the beginning of one.

    What comes out does not depend on the pieces in which the text comes in. found: the stop string, once it is there.

    Args:
        stops: one at least.
        include: it is part of the text.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops, self._include = tuple(stops), include
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """The part of the text so far that no stop string can take back."""
        self._held += text
        ends = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if ends:
            end, start = min(ends)  # of those that end together, the longest
            self.found = self._held[start:end]
            given, self._held = self._held[: end if self._include else start], ""
            return given
        keep = max(self._overlap(stop) for stop in self._stops)
        given, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return given

    def flush(self) -> str:
        given, self._held = self._held, ""
        return given

    def _overlap(self, stop: str) -> int:
        """Characters at the end of the held text that begin a stop string."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)
