"""Engines that are closed, without what tests/test_server_engines.py has them keep."""

from tests import test_server_engines as short
from tests.helpers.breadth import repeated

folder = short.folder

test_a_closed_engine_is_freed_at_once = repeated(short.test_a_closed_engine_is_freed_at_once, "keeps", [False])
