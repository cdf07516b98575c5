"""The scheduler under more random traffic than `make test` has time for."""

import pytest

from tests.scheduler.test_scheduler import check_deferring_traffic, check_traffic


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_hundred_thousand_steps(ahead: int) -> None:
    check_traffic(50_000, ahead)


@pytest.mark.parametrize("ahead", [0, 1])
def test_more_beams_and_late_tokens(ahead: int) -> None:
    check_deferring_traffic(range(100, 140), ahead)
