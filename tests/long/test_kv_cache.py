"""Blocks of KV caches under more examples than `make test` has time for."""

from hypothesis import settings

from tests.cache.test_kv_cache import check_reserved


def test_what_is_reserved_is_there() -> None:
    settings(max_examples=1000, deadline=None)(check_reserved)()
