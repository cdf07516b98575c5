"""The number of replicas follows the queues of the engines."""

from types import SimpleNamespace
from typing import Any

import pytest

from enginewright.ray.scaling import RUNNING, WAITING, replicas_needed, scale_by_queues


@pytest.mark.parametrize(
    ("running", "waiting", "num_replicas", "needed"),
    [
        (0, 0, 2, 0),
        (16, 0, 1, 1),
        (24, 0, 2, 1.5),
        (16, 16, 1, 2),
        (64, 0, 2, 4),
        (8, 24, 2, 8),  # only 4 fit into a replica
        (0, 8, 1, 0.5),  # nothing runs yet: the first prompts have just arrived
        (0, 8, 0, 0.5),
        (4, 0.5, 2, 4.5 / 16),
    ],
)
def test_replicas_for_a_load(running: float, waiting: float, num_replicas: int, needed: float) -> None:
    assert replicas_needed(running, waiting, 16, num_replicas) == needed


def test_the_policy_sums_replicas_and_what_waits_before_them() -> None:
    context: Any = SimpleNamespace(
        aggregated_metrics={RUNNING: {"a": 16.0, "b": 16.0, "new": None}, WAITING: {"a": 4.0}},
        total_queued_requests=12.0,
        current_num_replicas=2,
        config=SimpleNamespace(target_ongoing_requests=16.0),
    )
    assert scale_by_queues(context) == (3.0, {})
    context.aggregated_metrics = None
    assert scale_by_queues(context) == (0.75, {})
