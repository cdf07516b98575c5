"""Kernels that few families have, for every architecture."""

from enginewright.targets import PTX, SMS
from tests.cuda.kernels.test_experts import test_kernels_of_experts_are_compiled as check_experts
from tests.cuda.test_compile import test_kernels_of_few_families_are_compiled as check


def test_kernels_of_few_families_are_compiled_everywhere() -> None:
    check((*SMS, PTX))


def test_kernels_of_experts_are_compiled_everywhere() -> None:
    check_experts((*SMS, PTX))
