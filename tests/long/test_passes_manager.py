"""Passes over large graphs with the methods that tests/passes/test_manager.py leaves out."""

from tests.golden.rewrites import EACH
from tests.helpers.breadth import others, repeated
from tests.helpers.graphs import QUANTS
from tests.passes import test_manager as short

test_passes_over_80_layers_read_no_weight = repeated(
    short.test_passes_over_80_layers_read_no_weight,
    "quant",
    others(QUANTS, short.SOME_QUANTS),
    ids=[quant.name for quant in others(QUANTS, short.SOME_QUANTS)],
)


def test_rewrites_are_those_of_the_whole_golden_table() -> None:
    short.check_rewrites(EACH)
