"""Reads the priority and the timeout of a request."""

from starlette.types import Scope

from enginewright.errors import shorten
from enginewright.runtime.server.errors import ApiError
from enginewright.runtime.server.wire import header
from enginewright.runtime.step.work_class import BATCH, BEST_EFFORT, INTERACTIVE, MAX_PRIORITY, WorkClass

HEADER = b"x-priority"
CLASSES = {"interactive": INTERACTIVE, "batch": BATCH, "best-effort": BEST_EFFORT}  # values of the header, rising
MAX_TIMEOUT_S = 86_400.0


def work_of(scope: Scope, priority: int | None) -> WorkClass:
    """Priority and tenant of a request. The header overrides the body, since a proxy may set it for its clients.

    Args:
        scope: the ASGI scope.
        priority: the body's priority; None means interactive.

    Raises:
        ApiError, UsageError: the priority is not valid.
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


def class_name(priority: int) -> str:
    """The name in CLASSES that a priority belongs to; one that is more urgent than interactive is interactive, too."""
    return next((name for name, minimum in reversed(CLASSES.items()) if priority >= minimum), "interactive")


def check_timeout(seconds: float | None) -> None:
    """Raises ApiError if a timeout is not valid."""
    if seconds is not None and not 0 < seconds <= MAX_TIMEOUT_S:
        rule = f"must be above 0, and at most {MAX_TIMEOUT_S:.0f} seconds"
        raise ApiError(400, f"timeout {rule}", param="timeout", code="invalid_value")


def timed_out(seconds: float) -> ApiError:
    """Error of a request that was not answered in time; it asks clients not to retry automatically."""
    why = f"the request has not been answered within its timeout of {seconds:g} s"
    return ApiError(504, why, code="timeout", headers=[(b"x-should-retry", b"false")])
