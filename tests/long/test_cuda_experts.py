"""Experts on CUDA, in emulation, in the formats that tests/cuda/kernels/test_experts.py leaves out."""

from tests.cuda.kernels import test_experts as short
from tests.helpers.breadth import others, repeated

test_each_row_meets_its_expert_in_tiles_of_all_sizes = repeated(
    short.test_each_row_meets_its_expert_in_tiles_of_all_sizes,
    "gemm",
    others(short.FORMS, short.SOME_FORMS),
    ids=short.name_of,
)
