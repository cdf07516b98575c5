"""Medusa heads that tests/speculation/test_medusa.py leaves out."""

from tests.helpers.breadth import others, repeated
from tests.helpers.medusa import MEDUSA
from tests.speculation import test_medusa as short

test_engines_draft_what_heads_would = repeated(
    short.test_engines_draft_what_heads_would, "case", others(MEDUSA, short.SOME)
)
