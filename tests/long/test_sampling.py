"""Sampling with the parameters that tests/sampling/test_sampling.py leaves out, and with more samples."""

from tests.helpers.breadth import others, repeated
from tests.sampling import test_sampling as short

test_draws_are_those_of_the_reference = repeated(
    short.test_draws_are_those_of_the_reference, ("filters", "vocab"), others(short.EACH, short.SOME), ids=str
)
test_rows_draw_the_same_token_as_often_as_gumbel_noise_makes_them = repeated(
    short.test_rows_draw_the_same_token_as_often_as_gumbel_noise_makes_them,
    ("distance", "draws"),
    [(0.3, 40000), (1.0, 40000), (3.0, 40000)],
)
