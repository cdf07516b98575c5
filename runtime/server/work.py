"""How urgent a request is, and until when it is wanted."""

from starlette.types import Scope

from enginewright.errors import shorten
from enginewright.runtime.server.errors import ApiError
from enginewright.runtime.server.wire import header
from enginewright.runtime.step.work_class import BATCH, BEST_EFFORT, INTERACTIVE, MAX_PRIORITY, WorkClass

HEADER = b"x-priority"
CLASSES = {"interactive": INTERACTIVE, "batch": BATCH, "best-effort": BEST_EFFORT}  # that the header may name
MAX_TIMEOUT_S = 86_400.0


def work_of(scope: Scope, priority: int | None) -> WorkClass:
    """The class of a request's work. The header comes before the body: a proxy may say it for its clients.

    Args:
        priority: that the body says.

    Raises:
        ApiError, UsageError: there is no such priority.
    """
    values = header(scope, HEADER)
    if values:
        priority = _priority(values)
    return WorkClass(INTERACTIVE if priority is None else priority, scope["tenant"])


def _priority(values: list[bytes]) -> int:
    text = values[0].decode("latin-1").strip().lower() if len(values) == 1 else ""
    if text in CLASSES:
        return CLASSES[text]
    try:
        priority = int(text)
    except ValueError:
        priority = MAX_PRIORITY + 1
    if abs(priority) > MAX_PRIORITY:
        rule = f"it must be {', '.join(CLASSES)}, or a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}"
        raise ApiError(400, f"X-Priority is {shorten(text)}: {rule}", param="X-Priority", code="invalid_value")
    return priority


def check_timeout(seconds: float | None) -> None:
    """Raises ApiError for what is no time to wait."""
    if seconds is not None and not 0 < seconds <= MAX_TIMEOUT_S:
        rule = f"must be above 0, and at most {MAX_TIMEOUT_S:.0f} seconds"
        raise ApiError(400, f"timeout {rule}", param="timeout", code="invalid_value")


def timed_out(seconds: float) -> ApiError:
    """What ends a request that was not answered in time; clients that try again by themselves are told not to."""
    why = f"the request has not been answered within its timeout of {seconds:g} s"
    return ApiError(504, why, code="timeout", headers=[(b"x-should-retry", b"false")])
