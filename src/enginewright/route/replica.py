"""One replica: its connections, its health, and what it is known to have computed."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import httpx2

from enginewright.route.prefixes import PrefixMemory
from enginewright.route.reply import MAX_ANSWER_BYTES, EndlessEventError

logger = logging.getLogger(__name__)

HEALTH_S = 0.5  # seconds between two health checks
HEALTH_TIMEOUT_S = 5.0  # seconds that a health check may take
MAX_FAILURES = 3  # health checks without an answer after which running requests are given up
KEEP_ALIVE_S = 30.0  # seconds; shorter than a replica's, so that no request is sent while it closes the connection
TIMEOUTS = {"connect": 5.0, "write": 60.0, "read": None, "pool": None}  # seconds; an answer may take as long as it does


class LyingReplicaError(httpx2.TransportError):
    """An answer that is longer than any replica sends."""


class Replica:
    """A server that the proxy sends requests to.

    Attributes:
        name: the URL, as it is shown.
        is_healthy: True if the last health check was passed and no connection has failed since.
        prefixes: the prompts that it has answered.
        running: the time limits of its running requests, which end them when they are given up.
        outcomes: number of requests that were sent to it, by what became of them.
        num_ejections: how often it was taken out of rotation.
        prompt_chunks: number of chunks of the prompts that it has answered.
        matched_chunks: number of these that it had answered before.

    Args:
        url: its origin.
    """

    def __init__(self, url: httpx2.URL) -> None:
        self.url, self.name = url, str(url).rstrip("/")
        # A transport has no cookies, follows no redirects and uses no proxy, unlike a client.
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEP_ALIVE_S)
        self._transport = httpx2.AsyncHTTPTransport(limits=limits, trust_env=False)
        self.is_healthy, self._num_failures = False, 0
        self.prefixes = PrefixMemory()
        self.running: set[asyncio.Timeout] = set()
        self.outcomes: Counter[str] = Counter()
        self.num_ejections = self.prompt_chunks = self.matched_chunks = 0

    @property
    def num_running(self) -> int:
        """Number of its running requests."""
        return len(self.running)

    @property
    def num_sent(self) -> int:
        """Number of requests that were sent to it, and have ended."""
        return self.outcomes.total()

    def request(
        self, method: str, target: bytes, headers: list[tuple[bytes, bytes]], body: bytes | None = None
    ) -> httpx2.Request:
        """A request to this replica, and to no other host, whatever its target is.

        Args:
            method: the HTTP method.
            target: path and query, as they were received.
            headers: the headers.
            body: the body.
        """
        url = self.url.copy_with(raw_path=target)
        return httpx2.Request(method, url, headers=headers, content=body, extensions={"timeout": TIMEOUTS})

    @asynccontextmanager
    async def attempt(self, request: httpx2.Request) -> AsyncIterator[httpx2.Response]:
        """Sends a request. The connection is closed at the end unless the answer was read, which aborts the request.

        Raises:
            httpx2.TransportError: there is no connection, or it is lost.
            TimeoutError: the replica has been given up.
        """
        async with asyncio.timeout(None) as limit:
            self.running.add(limit)
            try:
                response = await self._transport.handle_async_request(request)
                try:
                    yield response
                finally:
                    await response.aclose()
            finally:
                self.running.discard(limit)

    async def check(self) -> bool:
        """Checks the health, and returns True if the replica takes requests."""
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                response = await self._transport.handle_async_request(self.request("GET", b"/health", []))
                try:
                    await read_whole(response)
                finally:
                    await response.aclose()
        except (httpx2.TransportError, TimeoutError) as error:
            self._num_failures += 1
            if isinstance(error, httpx2.ConnectError) or self._num_failures >= MAX_FAILURES:
                self.eject("it does not answer")
            if self._num_failures >= MAX_FAILURES:
                self._give_up()
            return False
        self._num_failures = 0
        if response.status_code != 200:  # it drains, or its engine has failed; running requests may still end well
            self.eject(f"its health is {response.status_code}")
            return False
        if not self.is_healthy:
            logger.warning("replica %s takes requests", self.name)
            self.is_healthy = True
        return True

    def eject(self, why: str) -> None:
        """Sends no more requests until a health check is passed."""
        if self.is_healthy:
            logger.warning("replica %s takes no requests: %s", self.name, why)
            self.is_healthy = False
            self.num_ejections += 1

    def failed(self, error: httpx2.TransportError | httpx2.InvalidURL | TimeoutError | EndlessEventError) -> str:
        """Sends no more requests if a failed attempt is the replica's fault; the attempt's outcome."""
        match error:
            case httpx2.ConnectError() | httpx2.ConnectTimeout():
                self.eject("it refuses connections")
                return "refused"
            case httpx2.LocalProtocolError() | httpx2.InvalidURL():
                return "invalid"
            case LyingReplicaError() | EndlessEventError():
                return "lost"
        self.eject("it has closed a connection")
        return "lost"

    def answered(self, keys: Sequence[bytes], matched: int) -> None:
        """Remembers a prompt that was answered.

        Args:
            keys: the keys of the prompt.
            matched: the number of those that it had answered before.
        """
        self.prefixes.remember(keys)
        self.prompt_chunks += len(keys)
        self.matched_chunks += matched

    async def close(self) -> None:
        """Closes all connections."""
        await self._transport.aclose()

    def _give_up(self) -> None:
        """Ends the running requests with a TimeoutError."""
        now = asyncio.get_running_loop().time()
        for limit in self.running:
            limit.reschedule(now)
        self.running.clear()


async def read_whole(response: httpx2.Response, max_bytes: int = MAX_ANSWER_BYTES) -> bytes:
    """Reads the body of an answer.

    Args:
        response: the answer.
        max_bytes: the maximum size of the body, in bytes.

    Raises:
        httpx2.TransportError: the connection is lost, or the body is too long.
    """
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > max_bytes:
            raise LyingReplicaError(f"an answer has more than {max_bytes} bytes")
    return bytes(body)
