"""Kernels that few families have, for every architecture."""

from enginewright.targets import PTX, SMS
from tests.cuda import test_compile as short
from tests.cuda.kernels.test_experts import test_kernels_of_experts_are_compiled as check_experts
from tests.cuda.test_compile import test_kernels_of_few_families_are_compiled as check
from tests.helpers.breadth import others, repeated

test_products_of_warpgroups_stay_in_flight = repeated(
    short.test_products_of_warpgroups_stay_in_flight,
    ("header", "expression", "waits"),
    others(short.IN_FLIGHT, short.SOME_IN_FLIGHT),
)


def test_kernels_of_few_families_are_compiled_everywhere() -> None:
    check((*SMS, PTX))


def test_kernels_of_experts_are_compiled_everywhere() -> None:
    check_experts((*SMS, PTX))
