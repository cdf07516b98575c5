"""How many connections a server takes, so that it never runs out of file descriptors.

A few connections beyond the limit are let in until it is known what they ask for. GET /health and /metrics are
answered, so that whoever watches the server sees that it is full and not dead; all else gets a 503.
"""

import logging
import os
import resource
import time
from collections.abc import Callable

from enginewright.errors import EngineError
from enginewright.runtime.server.errors import OVERLOAD_RETRY_S, ApiError, retry_after

logger = logging.getLogger(__name__)

DEFAULT_MAX_CONNECTIONS = 4096
ACCEPTS_AT_ONCE = 8  # in one turn of the event loop; a connection that is refused lives for a few turns
MAX_SURPLUS = 32  # connections beyond the limit that are asked what they want, or told that there is no place
SURPLUS_PATHS = (b"/health", b"/metrics")  # what is answered to them
SPARE_DESCRIPTORS = 96  # for those two, and for files that the server opens while it runs
LOG_INTERVAL_S = 60.0


class ConnectionLimit:
    """The number of connections that may be open at once, and those beyond it.

    num_surplus: connections beyond the limit that have not ended yet.

    Args:
        max_connections: None is as many as the limit of open files allows, DEFAULT_MAX_CONNECTIONS at most.
        reject: called with the status of each refusal.

    Raises:
        EngineError: the limit of open files does not allow so many.
    """

    def __init__(self, max_connections: int | None, reject: Callable[[int], None]) -> None:
        self._reject = reject
        self.num_surplus = 0
        self._last_log_s = -LOG_INTERVAL_S
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.count = max_connections or DEFAULT_MAX_CONNECTIONS
        if allowed == resource.RLIM_INFINITY:
            return
        left = allowed - len(os.listdir("/proc/self/fd")) - SPARE_DESCRIPTORS
        if left < (max_connections or 1):
            raise EngineError(
                f"the limit of open files is {allowed}",
                f"that is enough for {max(left, 0)} connections" + (f", not {max_connections}" if left > 0 else ""),
                f"Raise it (ulimit -n {max_connections or 1024} and some hundreds)"
                + (", or take fewer with --max-connections." if left > 0 else "."),
            )
        self.count = min(self.count, left)

    def refuse(self) -> ApiError:
        """Count a refused connection, and say so in the log once in a while; what its client hears."""
        error = ApiError(
            503,
            f"{self.count} connections are open, and no more are taken",
            code="too_many_connections",
            headers=retry_after(OVERLOAD_RETRY_S),
        )
        self._reject(error.status)
        now = time.monotonic()
        if now - self._last_log_s >= LOG_INTERVAL_S:
            self._last_log_s = now
            logger.warning("%s: new ones get a 503 (--max-connections)", error.message)
        return error
