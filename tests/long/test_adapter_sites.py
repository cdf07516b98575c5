"""Sites of adapters in the families that tests/adapters/test_sites.py leaves out, smoothed."""

from tests.adapters import test_sites as short
from tests.helpers.breadth import others, repeated
from tests.helpers.tiny import FAMILIES, HYBRIDS

REST = others((*FAMILIES, *HYBRIDS), [family for family, _, _ in short.CASES])

test_sites_make_weights_of_the_checkpoints_tensors = repeated(
    short.test_sites_make_weights_of_the_checkpoints_tensors,
    ("family", "overrides", "quant"),
    [(family, {}, "int8-sq") for family in REST],
    ids=REST,
)
