"""Attention on CPUs in the formats that tests/cpu/test_attention.py leaves out."""

from tests.cpu import test_attention as short
from tests.helpers.breadth import others, repeated

test_heads_of_all_shapes = repeated(
    short.test_heads_of_all_shapes, ("counts", "head_dim"), others(short.SHAPES, short.SOME_SHAPES), ids=str
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
