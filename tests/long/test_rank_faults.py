"""Faults of ranks that take long to be found, or to be no faults."""

from typing import Any

import pytest

from enginewright.runtime.device.ranks.watch import PING_S
from tests.helpers.machines import WorkerNode
from tests.ranks import test_faults
from tests.ranks.test_faults import check_rank_0_that_stands_still, check_stopped_while_idle

group = test_faults.group


@pytest.mark.parametrize("group", ["two machines"], indirect=True)
def test_rank_0_that_stands_still(group: tuple[dict[str, Any], list[WorkerNode]]) -> None:
    check_rank_0_that_stands_still(group[0], PING_S)


@pytest.mark.parametrize("group", ["one machine", "two machines"], indirect=True)
def test_a_rank_that_is_stopped_while_the_engine_is_idle(group: tuple[dict[str, Any], list[WorkerNode]]) -> None:
    check_stopped_while_idle(group, silent_s=6)
