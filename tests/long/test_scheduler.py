"""The scheduler under more random traffic than `make test` has time for."""

import pytest

from tests.scheduler.test_scheduler import AHEAD, check_deferring_traffic, check_traffic


@pytest.mark.parametrize(("ahead", "stages"), AHEAD)
def test_a_hundred_thousand_steps(ahead: int, stages: int) -> None:
    check_traffic(50_000, ahead, stages)


@pytest.mark.parametrize(("ahead", "stages"), AHEAD)
def test_more_beams_and_late_tokens(ahead: int, stages: int) -> None:
    check_deferring_traffic(range(100, 140), ahead, stages)
