"""The work of parsers of messages, of texts as long as an answer can be."""

import pytest

from enginewright.runtime.text.messages.calls import CallFormat
from enginewright.runtime.text.messages.formats import CALL_FORMATS
from tests.helpers.breadth import others, repeated
from tests.text.test_message_time import PIECES, SOME_PIECES, Work, check_work_is_linear, name_of, work
from tests.text.test_message_time import test_work_is_linear as work_is_linear

__all__ = ["work"]  # a fixture

test_work_is_linear = repeated(work_is_linear, ("calls", "size"), others(PIECES, SOME_PIECES), ids=name_of)


@pytest.mark.parametrize(("num_chars", "size"), [(64 << 10, 1), (64 << 10, 4), (256 << 10, 256 << 10)])
@pytest.mark.parametrize("calls", CALL_FORMATS, ids=lambda one: one.name)
def test_work_of_long_texts_is_linear(calls: CallFormat, num_chars: int, size: int, work: Work) -> None:
    check_work_is_linear(calls, num_chars // 4, num_chars, size, work)
