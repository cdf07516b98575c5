"""Engines that are closed, without what tests/server/test_engines.py has them keep."""

from tests.helpers.breadth import repeated
from tests.server import test_engines as short

folder = short.folder

test_a_closed_engine_is_freed_at_once = repeated(short.test_a_closed_engine_is_freed_at_once, "keeps", [False])
