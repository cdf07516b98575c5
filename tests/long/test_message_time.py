"""The time of parsers of messages, of texts as long as an answer can be."""

import time

import pytest

from enginewright.runtime.text.messages.calls import CallFormat
from enginewright.runtime.text.messages.formats import CALL_FORMATS
from tests.helpers.breadth import others, repeated
from tests.helpers.hostile_messages import feed, hostile_messages
from tests.text.test_message_time import PIECES, SOME_PIECES, name_of, work
from tests.text.test_message_time import test_work_is_linear as work_is_linear

MOST_MORE = 9.0  # times the CPU time of a text a quarter as long; of the square it would be 16
LEAST_S = 0.005  # below which the clock says little
TRIES = 4  # since others may use the caches meanwhile

__all__ = ["work"]  # a fixture

test_work_is_linear = repeated(work_is_linear, ("calls", "size"), others(PIECES, SOME_PIECES), ids=name_of)


def seconds(calls: CallFormat, text: str, size: int) -> float:
    start = time.process_time()
    feed(calls, text, size)
    return time.process_time() - start


@pytest.mark.parametrize(("num_chars", "size"), [(64 << 10, 1), (64 << 10, 4), (256 << 10, 256 << 10)])
@pytest.mark.parametrize("calls", CALL_FORMATS, ids=lambda one: one.name)
def test_time_is_linear(calls: CallFormat, num_chars: int, size: int) -> None:
    pairs = zip(hostile_messages(calls, num_chars // 4), hostile_messages(calls, num_chars), strict=True)
    for (name, short), (_, long) in pairs:
        ratios = (seconds(calls, long, size) / max(seconds(calls, short, size), LEAST_S) for _ in range(TRIES))
        assert any(ratio < MOST_MORE for ratio in ratios), name
