"""Calibration by the methods that tests/build/test_calibration.py leaves out."""

from tests.build import test_calibration as short
from tests.helpers.breadth import repeated

checkpoint = short.checkpoint

test_the_bytes_do_not_depend_on_threads = repeated(
    short.test_the_bytes_do_not_depend_on_threads, "quant", short.CHOOSING[1:]
)
