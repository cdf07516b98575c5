"""Mixtures by the calibrated methods that tests/checkpoint/test_experts.py leaves out."""

from tests.checkpoint import test_experts as short
from tests.helpers.breadth import repeated

checkpoint = short.checkpoint

test_calibrated_mixtures_stay_near = repeated(
    short.test_calibrated_mixtures_stay_near,
    "quant",
    short.CALIBRATED[2:],
    ids=[quant.name for quant in short.CALIBRATED[2:]],
)
