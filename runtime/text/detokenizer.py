"""Text that comes token by token: whole characters, and no further than the first stop string."""

from collections import deque
from collections.abc import Sequence

from enginewright.runtime.text.tokenizer import REPLACEMENT, Tokenizer

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

    @property
    def held(self) -> Sequence[int]:
        """The last tokens, whose text is held back since a character of it may go on."""
        return self._ids[self._done :] if self._holds else ()

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
        if self._skip and token in self._tokenizer.shown_marks:
            text = self.flush() + self._tokenizer.shown_marks[token]
            self._ids.append(token)
            return text
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


class StopMatcher:
    """Finds where the first of some stop strings ends, in one step for each character of a text on average.

    The automaton of Aho and Corasick (1975). A node stands for the beginning of a stop string; node 0 is the empty one.
    It is made once for all completions of a request.

    Args:
        stops: one at least, none of them empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]  # by node and character: the node for one character more
        self.depth = [0]  # characters that a node stands for
        self.stop_chars = [0]  # of the longest stop string that ends at a node; 0 if none does
        for stop in stops:
            node = 0
            for depth, char in enumerate(stop, start=1):
                if char not in self._next[node]:
                    self._next[node][char] = len(self._next)
                    self._next.append({})
                    self.depth.append(depth)
                    self.stop_chars.append(0)
                node = self._next[node][char]
            self.stop_chars[node] = len(stop)
        self._fallback = [0] * len(self._next)  # the longest other beginning that a node's characters end with
        queue = deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            self.stop_chars[node] = self.stop_chars[node] or self.stop_chars[self._fallback[node]]
            for char, child in self._next[node].items():
                self._fallback[child] = self.step(self._fallback[node], char)
                queue.append(child)

    def step(self, node: int, char: str) -> int:
        """The node after one more character of the text."""
        while (after := self._next[node].get(char)) is None and node:
            node = self._fallback[node]
        return after or 0


class StopStrings:
    """Ends a text at the stop string that is complete first, and holds back what may be the beginning of one.

    What comes out does not depend on the pieces in which the text comes in. found: the stop string, once it is there.

    Args:
        matcher: of the stop strings.
        include: the stop string is part of the text.
    """

    def __init__(self, matcher: StopMatcher, *, include: bool = False) -> None:
        self._matcher, self._include = matcher, include
        self._node, self._held = 0, ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """The part of the text so far that no stop string can take back."""
        matcher, node = self._matcher, self._node
        for end, char in enumerate(text, start=1):
            node = matcher.step(node, char)
            if matcher.stop_chars[node]:  # of those that end together, the longest
                whole, self._held = self._held + text[:end], ""
                start = len(whole) - matcher.stop_chars[node]
                self.found = whole[start:]
                return whole if self._include else whole[:start]
        whole, self._node = self._held + text, node
        given = len(whole) - matcher.depth[node]
        self._held = whole[given:]
        return whole[:given]

    def flush(self) -> str:
        given, self._held = self._held, ""
        return given
