"""Converts tokens to text one by one: complete characters, up to the first stop string."""

from collections import deque
from collections.abc import Sequence

from enginewright.runtime.text.tokenizer import REPLACEMENT, Tokenizer

CONTEXT_TOKENS = 6  # tokens of the prompt decoded before the answer, which is no start of a text
MAX_CUT_BYTES = 3  # a character has at most four bytes, so at most three can wait for the rest


class Detokenizer:
    """Text of an answer, token by token, in complete characters.

    The text of a token is the difference of two decodings with the same start, since decoders treat the start of a text
    specially. Both end at token borders: a decoder may replace a whole sequence of byte tokens by U+FFFD if one
    character in it is incomplete, so characters of such a text cannot be counted.

    Args:
        tokenizer: the engine's tokenizer.
        prompt: the token ids of the prompt.
        skip_special_tokens: whether special tokens have no text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], *, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._whole_texts = tokenizer.whole_texts[skip_special_tokens]
        self._ids = _context(tokenizer, prompt, skip_special_tokens)
        # ids[:done] are of the prompt, or have been given out as text. If nothing is held back, later ones have been
        # given out, too, each as a text of its own.
        self._start, self._done = 0, len(self._ids)
        self._holds = False

    @property
    def held(self) -> Sequence[int]:
        """The last tokens, whose text is held back since their last character may be incomplete."""
        return self._ids[self._done :] if self._holds else ()

    def push(self, token: int) -> str:
        """Text that is complete with this token; empty in the middle of a character."""
        text = self._whole_texts[token]
        if text and not self._holds:
            self._ids.append(token)
            return text
        return "" if text == "" else self._push(token)

    def flush(self) -> str:
        """Text that was held back, although its last character is incomplete."""
        text = self._decode_to(len(self._ids), whole=False) if self._holds else ""
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
        piece = self._decode_to(len(self._ids))
        if (
            len(self._ids) - self._done > MAX_CUT_BYTES
        ):  # so the first of them is no part of a character, or is U+FFFD itself
            piece += self._decode_to(self._first_split(), whole=False)
        self._holds = self._done < len(self._ids)
        return piece

    def _decode_to(self, end: int, *, whole: bool = True) -> str:
        before, after = self._decode(self._start, self._done), self._decode(self._start, end)
        if whole and after.endswith(REPLACEMENT):
            return ""
        self._start, self._done = self._done, end
        while not after.startswith(before):  # it ends in the middle of a character, as prompts may
            before = before[:-1]
        return after[len(before) :]

    def _first_split(self) -> int:
        """First index at which the tokens that are held back can be split without a change of their text."""
        all_of_it, last = self._decode(self._start, len(self._ids)), len(self._ids)
        for end in range(self._done + 1, last):
            if self._decode(self._start, end) + self._decode(end, last) == all_of_it:
                return end
        return self._done + 1

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._ids[start:end], skip_special_tokens=self._skip)


def _context(tokenizer: Tokenizer, prompt: Sequence[int], skip_special_tokens: bool) -> list[int]:
    """The prompt's last tokens, from the start of a character; none if that is too far back."""
    for count in range(CONTEXT_TOKENS, CONTEXT_TOKENS + MAX_CUT_BYTES + 1):
        ids = list(prompt[-count:])
        if not tokenizer.decode(ids, skip_special_tokens=skip_special_tokens).startswith(REPLACEMENT):
            return ids
    return []


class StopMatcher:
    """Finds the end of the first stop string in a text, with one step per character on average.

    It is the automaton of Aho and Corasick (1975). A node stands for a prefix of a stop string, node 0 for the empty
    one. It is built once for all completions of a request.

    Args:
        stops: the stop strings, at least one, none of them empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]  # by node and character: the node with one character more
        self.depth = [0]  # length of each node's prefix in characters
        self.stop_chars = [0]  # length of the longest stop string that ends at a node; 0 if none does
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
        self._fallback = [0] * len(self._next)  # node of the longest other prefix that is a suffix of a node's prefix
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
    """Ends a text at the stop string that is complete first, and holds back text that may be the start of one.

    The result does not depend on the pieces in which the text arrives.

    Attributes:
        found: the stop string, once it was found.

    Args:
        matcher: the automaton of the stop strings.
        include: whether the stop string is part of the text.
    """

    def __init__(self, matcher: StopMatcher, *, include: bool = False) -> None:
        self._matcher, self._include = matcher, include
        self._node, self._held = 0, ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Text that is certainly before any stop string."""
        matcher, node = self._matcher, self._node
        for end, char in enumerate(text, start=1):
            node = matcher.step(node, char)
            if matcher.stop_chars[node]:  # the longest one that ends here
                whole, self._held = self._held + text[:end], ""
                start = len(whole) - matcher.stop_chars[node]
                self.found = whole[start:]
                return whole if self._include else whole[:start]
        whole, self._node = self._held + text, node
        given = len(whole) - matcher.depth[node]
        self._held = whole[given:]
        return whole[:given]

    def flush(self) -> str:
        """Text that was held back."""
        given, self._held = self._held, ""
        return given
