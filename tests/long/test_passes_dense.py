"""Passes over dense graphs in the models and formats that tests/passes/test_dense.py leaves out."""

from tests.helpers.breadth import others, repeated
from tests.passes import test_dense as short

test_results_are_the_same_before_and_after = repeated(
    short.test_results_are_the_same_before_and_after,
    ("case", "name"),
    others(short.WITH_PASSES, short.SOME_WITH_PASSES),
)
QUANTS = others(short.WITH_QUANTS, short.SOME_WITH_QUANTS)
test_quantized_weights_are_numpys = repeated(
    short.test_quantized_weights_are_numpys, ("case", "quant"), QUANTS, ids=short.name_of
)
test_quantized_logits_are_near = repeated(
    short.test_quantized_logits_are_near, ("case", "quant"), QUANTS, ids=short.name_of
)
