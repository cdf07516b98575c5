"""Recurrences on CUDA, in emulation, of the heads that tests/cuda/kernels/test_recurrence.py leaves out."""

from tests.cuda.kernels import test_recurrence as short
from tests.helpers.breadth import others, repeated

test_linear_recurrences = repeated(
    short.test_linear_recurrences,
    ("heads", "key_heads", "k", "v", "delta", "by_row"),
    others(short.LINEAR, short.SOME_LINEAR),
)
