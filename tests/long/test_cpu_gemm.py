"""Matrix products on CPUs with the epilogues that tests/cpu/test_gemm.py leaves out."""

from tests.cpu import test_gemm as short
from tests.helpers.breadth import others, repeated

test_bits_depend_neither_on_company_nor_on_threads = repeated(
    short.test_bits_depend_neither_on_company_nor_on_threads,
    ("kernel", "isa", "epilogue"),
    others(short.CUT, short.SOME_CUT),
)
