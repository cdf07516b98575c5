"""The number of replicas that the load needs, from the queues of the engines."""

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

RUNNING, WAITING = "running_completions", "waiting_completions"  # metrics of a replica


def replicas_needed(running: float, waiting: float, target: float, num_replicas: int) -> float:
    """The number of replicas for a load.

    If completions wait while fewer than the target run in each replica, replicas are full (long sequences leave no
    blocks of the KV cache), and what they run is taken for their capacity.

    Args:
        running: completions in the batches of all replicas.
        waiting: completions that wait, in replicas and before them.
        target: completions that one replica should have.
        num_replicas: the number of replicas now.
    """
    capacity = target
    if waiting >= 1 and running >= num_replicas > 0:
        capacity = min(target, running / num_replicas)
    return (running + waiting) / capacity


def scale_by_queues(context: "AutoscalingContext") -> tuple[float, dict[str, Any]]:
    """Autoscaling policy for Ray Serve, which applies its own delays, factors and bounds to the result.

    Args:
        context: the metrics of the replicas, and the requests that no replica has taken yet.

    Returns:
        The number of replicas, and no state.
    """
    metrics = context.aggregated_metrics or {}
    running, waiting = (_sum(metrics.get(name, {}).values()) for name in (RUNNING, WAITING))
    waiting += context.total_queued_requests or 0
    assert context.config is not None
    target = context.config.target_ongoing_requests
    return replicas_needed(running, waiting, target, context.current_num_replicas), {}


def _sum(values: Collection[float | None]) -> float:
    """The sum over replicas; one that has just started has no metrics yet."""
    return sum(value for value in values if value is not None)
