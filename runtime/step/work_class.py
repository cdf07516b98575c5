"""Classes of work: the priority of a request, and the tenant that it belongs to."""

from dataclasses import dataclass

from enginewright.runtime.checks import require_whole

INTERACTIVE, BATCH, BEST_EFFORT = 0, 10, 100
MAX_PRIORITY = 1000
AGE_S = 10.0  # seconds of waiting that lower the priority value by 1, which makes work more urgent


@dataclass(frozen=True)
class WorkClass:
    """Priority and tenant of a request. The scheduler has one queue for each class.

    Raises:
        UsageError: the priority is out of range.
    """

    priority: int = INTERACTIVE  # lower is more urgent; from BEST_EFFORT on, work that lacks room preempts it
    tenant: str = ""  # name of the tenant; tenants of equal priority get equal shares of the computed tokens

    def __post_init__(self) -> None:
        require_whole("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)

    def effective_priority(self, waited_s: float, most_urgent: int) -> int:
        """Priority after a wait. It falls with time, so that nothing waits for ever.

        It never falls below `most_urgent`, so waiting gives no precedence over the most urgent work.

        Args:
            waited_s: seconds that the request has waited.
            most_urgent: lowest priority value of all waiting and running work.
        """
        return max(self.priority - int(waited_s / AGE_S), min(self.priority, most_urgent))


DEFAULT_WORK = WorkClass()
