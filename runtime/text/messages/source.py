"""The text of a message that arrives in pieces, for readers that are generators and yield while they wait for more.

Nothing is read twice. A waiting reader has read all of the text except for the prefix of a mark at its end, so the time
for a message is linear in its length, and the result does not depend on where the text is cut.
"""

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]  # a reader that returns a T
Give = Callable[[str], None]  # receives a part of a text as soon as it is read

_NOTHING = "(?!)"
_SPACE = re.compile(r"\s*+")


class Marks:
    """Texts to search for. The first one in a text is found, and the longest one of several at the same position.

    Args:
        texts: the texts.
    """

    def __init__(self, *texts: str) -> None:
        longest_first = sorted({*texts}, key=len, reverse=True)
        self._whole = re.compile("|".join(map(re.escape, longest_first)) or _NOTHING)
        self._begun = re.compile(f"(?:{'|'.join(map(_prefixes, longest_first))})\\Z" if texts else _NOTHING)
        self._longest = max(map(len, texts), default=1)

    def find(self, text: str, start: int, *, is_end: bool, max_chars: int | None = None) -> tuple[int, str]:
        """Searches a text.

        Args:
            text: the text.
            start: the index to start at.
            is_end: whether nothing follows the text.
            max_chars: the maximum number of characters before a mark that matters; others are not searched for.

        Returns:
            The end of the part that cannot belong to a mark, and the mark there; "" if none is complete.
        """
        stop = len(text) if max_chars is None else min(len(text), start + max_chars + self._longest)
        found = self._whole.search(text, start, stop)
        end = stop if found is None else found.start()
        tail = max(start, stop - self._longest + 1)
        if end < tail or (found is not None and is_end):
            return end, "" if found is None else found[0]
        begun = self._begun.search(text, tail, stop)  # the prefix of a mark that would begin earlier or be longer
        if begun is not None and begun.start() <= end:
            return begun.start(), ""
        return end, "" if found is None else found[0]


def _prefixes(text: str) -> str:
    """Regular expression of a text without at least its last character."""
    expression = ""
    for char in reversed(text[:-1]):
        expression = f"{re.escape(char)}(?:{expression})?" if expression else re.escape(char)
    return expression or _NOTHING


marks_of = lru_cache(maxsize=256)(Marks)


class MessageSource:
    """The text so far, and how much of it was read.

    Text that was read is kept until it is dropped, or returned as text.

    Attributes:
        is_ended: True if nothing follows.
        is_cut: True if the message was cut off at its end.
        met_end: True once a reader has needed more text than there is.
        stops: marks at which a call ends or cannot continue, outside of quotes.
    """

    def __init__(self) -> None:
        self._text, self._place = "", 0  # latest text, and the index of its unread part
        self._kept: list[str] = []
        self._num_kept = 0
        self.stops: tuple[str, ...] = ()
        self.is_ended = self.is_cut = self.met_end = False

    @property
    def num_held(self) -> int:
        """Number of characters that were neither dropped nor returned as text."""
        return self._num_kept + len(self._text) - self._place

    def feed(self, text: str) -> None:
        """Adds text."""
        self._text, self._place = self._text[self._place :] + text, 0

    def drop(self) -> None:
        """Drops the text that was read."""
        self._kept, self._num_kept = [], 0

    def take_back(self) -> str:
        """Returns the text that was read and not dropped, and no longer keeps it."""
        text = "".join(self._kept)
        self.drop()
        return text

    def keep(self, text: str) -> None:
        """Keeps a text after the text that was read."""
        self._kept.append(text)
        self._num_kept += len(text)

    def take_rest(self) -> str:
        """Reads all text so far."""
        return self._read_to(len(self._text))

    def at_end(self) -> Reading[bool]:
        """Returns True if the text ends here, and was not cut off."""
        while self._place == len(self._text):
            if self.is_ended:
                self.met_end = True
                return not self.is_cut
            yield
        return False

    def starts_with(self, *marks: str) -> Reading[bool]:
        """Returns True if one of some texts comes next."""
        while not self._text.startswith(marks, self._place):
            rest = self._text[self._place : self._place + max(map(len, marks), default=0)]
            if not any(mark.startswith(rest) for mark in marks):
                return False
            if self.is_ended:
                self.met_end = True
                return False
            yield
        return True

    def has(self, mark: str) -> Reading[bool]:
        """Reads a text if it comes next, and returns True if it did."""
        found = yield from self.starts_with(mark)
        if found:
            self._read_to(self._place + len(mark))
        return found

    def expect(self, mark: str) -> Reading[None]:
        """Reads a text that must come next. Raises ValueError if it does not."""
        if not (yield from self.has(mark)):
            raise ValueError(f"no {mark}")

    def take(self, count: int) -> Reading[str]:
        """Reads this number of characters, or fewer at the end of the text."""
        while len(self._text) - self._place < count:
            if self.is_ended:
                self.met_end = True
                return self.take_rest()
            yield
        return self._read_to(self._place + count)

    def space(self) -> Reading[None]:
        """Reads white space."""
        yield from self.all_of(_SPACE)

    def all_of(self, chars: re.Pattern[str]) -> Reading[str]:
        """Reads the longest text that an expression for any number of characters matches."""
        parts: list[str] = []
        while True:
            found = chars.match(self._text, self._place)
            if found is not None and found[0]:
                parts.append(self._read_to(found.end()))
            if self._place < len(self._text) or self.is_ended:
                return "".join(parts)
            yield

    def pass_on_until(self, give: Give, *marks: str, max_chars: int | None = None) -> Reading[str]:
        """Reads a text up to the first of some marks, and gives it out.

        Args:
            give: receives the parts of the text.
            marks: the marks.
            max_chars: the maximum number of characters.

        Returns:
            The mark, which is not read yet; "" if there was none before the end or within max_chars.
        """
        wanted, left = marks_of(*marks), max_chars
        while True:
            end, mark = wanted.find(self._text, self._place, is_end=self.is_ended, max_chars=left)
            is_too_long = left is not None and end - self._place > left
            if left is not None:
                end = min(end, self._place + left)
                left -= end - self._place
            if end > self._place:
                give(self._read_to(end))
            if is_too_long:
                return ""
            if mark:
                return mark
            if self.is_ended:
                self.met_end = True
                return ""
            yield

    def up_to(self, *marks: str) -> Reading[str]:
        """Reads the text up to the first of some marks, which is not read. Raises ValueError if a stop is first."""
        parts: list[str] = []
        if (yield from self.pass_on_until(parts.append, *marks, *self.stops)) not in marks:
            raise ValueError(f"no {marks[0]}")
        return "".join(parts)

    def _read_to(self, end: int) -> str:
        text, self._place = self._text[self._place : end], end
        if text:
            self.keep(text)
        return text
