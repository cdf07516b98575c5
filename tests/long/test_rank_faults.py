"""Faults of ranks that take long to be found, or to be no faults."""

from typing import Any

import pytest

from tests.helpers.machines import WorkerNode
from tests.ranks import test_faults
from tests.ranks.test_faults import check_rank_0_that_stands_still

group = test_faults.group


@pytest.mark.parametrize("group", ["two machines"], indirect=True)
def test_rank_0_that_stands_still(group: tuple[dict[str, Any], list[WorkerNode]]) -> None:
    check_rank_0_that_stands_still(group[0])
