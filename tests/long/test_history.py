"""Answers of each ending, streamed where tests/server/test_history.py has them whole, and the other way round."""

from tests.helpers.breadth import others, repeated
from tests.server import test_history as short
from tests.server.conftest import claude, client

SERVER, shown = short.SERVER, short.shown
__all__ = ["claude", "client", "shown"]  # fixtures

OTHERS = others(short.CASES, short.SOME_CASES)

test_chats = repeated(short.test_chats, ("ending", "stream"), OTHERS, ids=str)
test_responses = repeated(
    short.test_responses, ("ending", "stream"), others(short.RESPONSES, short.SOME_RESPONSES), ids=str
)
test_anthropics = repeated(short.test_anthropics, ("ending", "stream"), OTHERS, ids=str)
