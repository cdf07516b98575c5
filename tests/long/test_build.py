"""Whole builds of the families and methods that tests/build/test_build.py leaves out."""

from tests.build import test_build as short
from tests.helpers.breadth import others, repeated
from tests.helpers.graphs import QUANTS

test_an_engine_computes_what_transformers_does = repeated(
    short.test_an_engine_computes_what_transformers_does,
    ("family", "overrides", "quant"),
    others(short.EACH, short.SOME),
    ids=short.name_of,
)
test_two_builds_in_two_folders_have_the_same_content = repeated(
    short.test_two_builds_in_two_folders_have_the_same_content, "quant", others(QUANTS, QUANTS[::3]), ids=short.name_of
)
