"""Attention on CPUs in the formats that tests/cpu/test_attention.py leaves out."""

from tests.cpu import test_attention as short
from tests.helpers.breadth import others, repeated

test_bits_do_not_depend_on_cuts_company_or_threads = repeated(
    short.test_bits_do_not_depend_on_cuts_company_or_threads,
    ("heads", "window", "kv", "isa"),
    others(short.CUT, short.SOME_CUT),
    ids=str,
)
