"""Calls that are cut, after the texts that tests/text/test_messages.py leaves out."""

from tests.helpers.breadth import others, repeated
from tests.text import test_messages as short

test_nothing_of_a_call_is_text_wherever_it_is_cut = repeated(
    short.test_nothing_of_a_call_is_text_wherever_it_is_cut,
    ("name", "lead"),
    others(short.CUT_AFTER, short.SOME_CUT_AFTER),
)
