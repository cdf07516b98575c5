"""The work of parsers of messages, counted in characters: it is linear, whatever the text and its pieces."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from enginewright.runtime.text.messages.calls import CallFormat
from enginewright.runtime.text.messages.formats import CALL_FORMATS
from enginewright.runtime.text.messages.source import Marks, MessageSource
from tests.helpers.breadth import every_third
from tests.helpers.hostile_messages import feed, hostile_messages

SHORT, LONG = 500, 2000  # characters
MAX_GROWTH = 6  # times the work for a text four times as long; of a square it would be 16


@dataclass
class Work:
    num_chars: int = 0  # that were searched, compared or copied

    def reset(self) -> int:
        count, self.num_chars = self.num_chars, 0
        return count


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Iterator[Work]:
    """Counts what a source, which reads all text, and JSON do."""
    counted, find, loads, dumps = Work(), Marks.find, json.loads, json.dumps
    methods = {name: getattr(MessageSource, name) for name in ("feed", "take_back", "keep", "starts_with")}

    def counting_find(marks: Marks, text: str, start: int, *, max_chars: int | None = None, **more: Any) -> Any:
        end, mark = find(marks, text, start, max_chars=max_chars, **more)
        # A search that finds nothing goes to the end.
        searched = end + len(mark) if mark or max_chars is not None else len(text)
        counted.num_chars += searched - start + marks._longest
        return end, mark

    def feed(source: MessageSource, text: str) -> None:
        methods["feed"](source, text)
        counted.num_chars += len(source._text)

    def take_back(source: MessageSource) -> str:
        text: str = methods["take_back"](source)
        counted.num_chars += len(text)
        return text

    def keep(source: MessageSource, text: str) -> None:
        counted.num_chars += len(text)
        methods["keep"](source, text)

    def starts_with(source: MessageSource, *marks: str) -> Any:
        counted.num_chars += sum(map(len, marks))
        return methods["starts_with"](source, *marks)

    def counting_loads(text: str, **options: Any) -> Any:
        counted.num_chars += len(text)
        return loads(text, **options)

    def counting_dumps(value: Any, **options: Any) -> str:
        text = dumps(value, **options)
        counted.num_chars += len(text)
        return text

    monkeypatch.setattr(Marks, "find", counting_find)
    for replacement in (feed, take_back, keep, starts_with):
        monkeypatch.setattr(MessageSource, replacement.__name__, replacement)
    monkeypatch.setattr(json, "loads", counting_loads)
    monkeypatch.setattr(json, "dumps", counting_dumps)
    yield counted


SIZES = (1, 4, LONG)
PIECES = [(calls, size) for calls in CALL_FORMATS for size in SIZES]
SOME_PIECES = every_third(CALL_FORMATS, SIZES)


def name_of(value: object) -> str:
    return str(getattr(value, "name", value))


@pytest.mark.parametrize(("calls", "size"), SOME_PIECES, ids=name_of)
def test_work_is_linear(calls: CallFormat, size: int, work: Work) -> None:
    check_work_is_linear(calls, SHORT, LONG, size, work)


def check_work_is_linear(calls: CallFormat, num_short: int, num_long: int, size: int, work: Work) -> None:
    """Compares the work for hostile messages of two lengths, in characters, given in pieces of `size` characters."""
    pairs = zip(hostile_messages(calls, num_short), hostile_messages(calls, num_long), strict=True)
    for (name, short), (_, long) in pairs:
        feed(calls, short, size)
        short_work = work.reset()
        feed(calls, long, size)
        assert short_work >= len(short), "the text itself is counted"
        assert work.reset() < MAX_GROWTH * short_work, name


def test_the_count_sees_a_square(work: Work) -> None:
    """A text that is searched again from its start with each character."""

    def search_again(count: int) -> int:
        for end in range(count):
            Marks("<tool_call>").find("x" * end, 0, is_end=False)
        return work.reset()

    assert search_again(LONG) > MAX_GROWTH * search_again(SHORT)
