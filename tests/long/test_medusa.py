"""Medusa heads that tests/test_medusa.py leaves out."""

from tests import test_medusa as short
from tests.helpers.breadth import others, repeated
from tests.helpers.medusa import MEDUSA

test_engines_guess_what_heads_would = repeated(
    short.test_engines_guess_what_heads_would, "case", others(MEDUSA, short.SOME)
)
