"""The scheduler under more random traffic than `make test` has time for."""

import pytest

from tests.scheduler.test_scheduler import check_traffic


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_hundred_thousand_steps(ahead: int) -> None:
    check_traffic(50_000, ahead)
