"""Limits the number of connections, so that a server never runs out of file descriptors.

A few connections beyond the limit are accepted until their request is known. GET /health and /metrics are answered, so
that monitoring sees a full server and not a dead one; every other request gets a 503.
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
ACCEPTS_AT_ONCE = 8  # accepted per iteration of the event loop; a refused connection lives for a few iterations
MAX_SURPLUS = 32  # connections beyond the limit that still get a response
SURPLUS_PATHS = (b"/health", b"/metrics")  # paths that are answered on them
SPARE_DESCRIPTORS = 96  # file descriptors for these connections, and for files that the server opens while it runs
LOG_INTERVAL_S = 60.0  # minimum seconds between two log lines about refused connections


class ConnectionLimit:
    """The maximum number of open connections, and the connections beyond it.

    Attributes:
        count: the maximum number of connections.
        num_surplus: open connections beyond the limit.

    Args:
        max_connections: None is as many as the limit of open files allows, at most DEFAULT_MAX_CONNECTIONS.
        reject: called with the HTTP status of each refusal.

    Raises:
        EngineError: the limit of open files is too low for max_connections.
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
        """Counts a refused connection, logs it at most once per LOG_INTERVAL_S, and returns the client's error."""
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
