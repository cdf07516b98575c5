"""The time of parsers of messages, of texts as long as an answer can be."""

import time

import pytest

from enginewright.runtime.messages.calls import CallFormat
from enginewright.runtime.messages.formats import CALL_FORMATS
from tests.helpers.hostile_messages import feed, hostile_messages

SHORT, LONG = 64 << 10, 256 << 10  # characters
MOST_MORE = 9.0  # times the time of a text four times as long; of the square it would be 16


def seconds(calls: CallFormat, text: str, size: int) -> float:
    """The least CPU time of three runs, since others may use the caches meanwhile."""
    times = []
    for _ in range(3):
        start = time.process_time()
        feed(calls, text, size)
        times.append(time.process_time() - start)
    return min(times)


@pytest.mark.parametrize("size", [1, 4, LONG])
@pytest.mark.parametrize("calls", CALL_FORMATS, ids=lambda one: one.name)
def test_time_is_linear(calls: CallFormat, size: int) -> None:
    for (name, short), (_, long) in zip(hostile_messages(calls, SHORT), hostile_messages(calls, LONG), strict=True):
        least = 0.005  # seconds, below which the clock says little
        assert seconds(calls, long, size) < MOST_MORE * max(seconds(calls, short, size), least), name
