"""Attention on CPUs in the formats that tests/cpu/test_attention.py leaves out."""

from collections.abc import Sequence
from typing import Any

from tests.cpu import test_attention as short
from tests.helpers.breadth import others, repeated


def rest_of(cases: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return others(short.with_each_isa(cases), short.some_of(cases))


test_heads_of_all_shapes = repeated(
    short.test_heads_of_all_shapes,
    ("counts", "head_dim", "kv", "isa"),
    others(short.with_each_isa(short.SHAPES), short.SOME_SHAPES),
    ids=str,
)
test_lengths = repeated(short.test_lengths, ("length", "kv", "isa"), rest_of(short.EACH_LENGTH))
test_windows_and_soft_caps = repeated(
    short.test_windows_and_soft_caps, ("window", "softcap", "kv", "isa"), rest_of(short.CAPS)
)
test_exactly_the_visible_positions_count = repeated(
    short.test_exactly_the_visible_positions_count, ("window", "kv", "isa"), rest_of(short.VISIBLE)
)
test_positions_after_a_query = repeated(
    short.test_positions_after_a_query, ("window", "lookahead", "kv", "isa"), rest_of(short.LOOKAHEADS)
)
test_shared_splits_have_the_same_bits = repeated(
    short.test_shared_splits_have_the_same_bits,
    ("window", "kv", "isa"),
    others(short.SPLIT_CASES, short.SOME_SPLIT_CASES),
)
test_bits_do_not_depend_on_cuts_company_or_threads = repeated(
    short.test_bits_do_not_depend_on_cuts_company_or_threads,
    ("heads", "window", "kv", "isa"),
    others(short.CUT, short.SOME_CUT),
    ids=str,
)
