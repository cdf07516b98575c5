"""Weights of the methods that tests/engine_file/test_weights.py leaves out, restored in numpy."""

from tests.engine_file import test_weights as short
from tests.helpers.breadth import others, repeated

test_a_reader_in_numpy_restores_every_weight = repeated(
    short.test_a_reader_in_numpy_restores_every_weight, "quant", others(short.QUANTS, short.SOME), ids=str
)
