"""Classes of work: how urgent a request is, and whose it is."""

from dataclasses import dataclass

from enginewright.runtime.checks import require_whole

INTERACTIVE, BATCH, BEST_EFFORT = 0, 10, 100
MAX_PRIORITY = 1000
AGE_S = 10.0  # of waiting, for which work counts as more urgent by one


@dataclass(frozen=True)
class WorkClass:
    """What requests that are scheduled alike have in common.

    Raises:
        UsageError: there is no such priority.
    """

    priority: int = INTERACTIVE  # the lower, the more urgent; from BEST_EFFORT on it only runs where others leave room
    tenant: str = ""  # tenants whose work is as urgent get as many tokens each

    def __post_init__(self) -> None:
        require_whole("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)

    def effective_priority(self, waited_s: float, most_urgent: int) -> int:
        """The priority that it has after having waited: nothing waits for ever, and nothing overtakes by waiting.

        Args:
            most_urgent: the lowest priority that there is.
        """
        return max(self.priority - int(waited_s / AGE_S), min(self.priority, most_urgent))


DEFAULT_WORK = WorkClass()
