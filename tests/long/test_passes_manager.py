"""Passes over large graphs with the methods that tests/passes/test_manager.py leaves out."""

from tests.helpers.breadth import others, repeated
from tests.helpers.graphs import QUANTS
from tests.passes import test_manager as short

test_passes_over_80_layers_read_no_weight = repeated(
    short.test_passes_over_80_layers_read_no_weight,
    "quant",
    others(QUANTS, QUANTS[::3]),
    ids=[quant.name for quant in others(QUANTS, QUANTS[::3])],
)
