"""Forecasts of the methods and families that tests/build/test_forecast.py leaves out."""

from tests.build import test_forecast as short
from tests.helpers.breadth import others, repeated

test_a_build_does_what_was_said = repeated(
    short.test_a_build_does_what_was_said, ("family", "quant"), others(short.CASES, short.SOME), ids=short.name_of
)
