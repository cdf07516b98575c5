"""Matrix products of the GPU benchmark in emulation, in the formats that the short test leaves out."""

from tests.bench import test_benchmark_gpu as short
from tests.helpers.breadth import others, repeated

test_matrix_products_are_called_as_engines_call_them = repeated(
    short.test_matrix_products_are_called_as_engines_call_them,
    ("names", "counts"),
    others(short.PRODUCTS, short.SOME_PRODUCTS),
)
test_attention_is_called_as_engines_call_it = repeated(short.test_attention_is_called_as_engines_call_it, "tokens", [1])
