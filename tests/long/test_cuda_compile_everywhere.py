"""Kernels that few families have, for every architecture, and those that tests/cuda/test_compile.py leaves out."""

from pathlib import Path

import pytest

from enginewright.builder.cuda import Compiled, Instance
from enginewright.targets import PTX, SMS
from tests.cuda import conftest
from tests.cuda import test_compile as short
from tests.cuda.kernels.test_experts import FORMS, check_compiled
from tests.cuda.test_compile import test_kernels_of_few_families_are_compiled as check
from tests.helpers.breadth import others, repeated
from tests.helpers.compiled import compile_kernels

OTHER_SMS = others(SMS, short.SOME_SMS)
cache, sources = conftest.cache, short.sources


@pytest.fixture(scope="module")
def made(sources: Path, cache: Path) -> dict[str, dict[Instance, Compiled]]:
    return compile_kernels([short.ADD, short.LOCAL, short.SPILL], OTHER_SMS, sources=sources, cache=cache)


test_resources_are_what_the_assembler_reports = repeated(
    short.test_resources_are_what_the_assembler_reports, "sm", OTHER_SMS
)
test_products_of_warpgroups_stay_in_flight = repeated(
    short.test_products_of_warpgroups_stay_in_flight,
    ("header", "expression", "waits"),
    others(short.IN_FLIGHT, short.SOME_IN_FLIGHT),
)


def test_kernels_of_few_families_are_compiled_everywhere() -> None:
    check((*SMS, PTX))


def test_kernels_of_experts_are_compiled_everywhere() -> None:
    check_compiled(FORMS, (*SMS, PTX))
