"""Sends one request to a replica and its answer to the client, and to another replica as long as no byte was sent."""

import asyncio
import logging
from collections.abc import Sequence

import httpx2
from starlette.types import Receive, Send

from enginewright.route.fleet import Fleet
from enginewright.route.prefill import prefilled
from enginewright.route.replica import Replica, read_whole
from enginewright.route.reply import LOST, MAX_LOST, EndlessEventError, Reply, lost
from enginewright.route.request import Answer, RoutedRequest, passed_headers
from enginewright.runtime.server.errors import OVERLOAD_RETRY_S, ApiError, retry_after, shutting_down
from enginewright.runtime.server.log import CLIENT_GONE
from enginewright.runtime.server.wire import until_gone

logger = logging.getLogger(__name__)

MAX_ERROR_BYTES = 1 << 20  # size of an error that another replica may make up for
MAX_ROUNDS = 3  # times that all replicas are tried
RETURN_S = 10.0  # seconds to wait for a replica to return
# Statuses that another replica may make up for; if none does, the client gets the one with the highest rank.
RETRIED = {404: 0, 500: 1, 502: 2, 503: 2, 529: 2, 429: 3}


class Forward(Reply):
    """A request under way.

    Args:
        fleet: the replicas.
        request: the request.
        among: the replicas that may answer.
    """

    def __init__(self, fleet: Fleet, request: RoutedRequest, among: Sequence[Replica]) -> None:
        super().__init__(request.route, request.method)
        self._fleet, self._request, self._among = fleet, request, among
        self._is_gone = False  # True once the client has left
        self._arrived = asyncio.get_running_loop().time()
        self._limit: asyncio.Timeout | None = None  # None before the request runs, and once it was stopped

    def stop(self) -> None:
        """Ends the request, with an error if its client is still there."""
        if self._limit is not None:
            self._limit.reschedule(asyncio.get_running_loop().time())
            self._limit = None

    async def run(self, receive: Receive, send: Send) -> None:
        """Answers the request.

        Args:
            receive: ASGI channel from the client, after the body.
            send: ASGI channel to the client.
        """
        watch = asyncio.create_task(self._watch(receive))
        self._fleet.live.add(self)
        try:
            async with asyncio.timeout(None) as self._limit:
                await self._forward(send)
                self._limit = None
        except TimeoutError:
            if self._is_gone:
                self.status = CLIENT_GONE
            else:
                await self._fail(shutting_down(self._fleet.config.drain_seconds), send)
        finally:
            self._limit = None
            self._fleet.live.discard(self)
            watch.cancel()

    def _on_start(self) -> None:
        self._fleet.first_byte.observe(asyncio.get_running_loop().time() - self._arrived)

    async def _watch(self, receive: Receive) -> None:
        await until_gone(receive)
        self._is_gone = True
        self.stop()

    async def _forward(self, send: Send) -> None:
        """Tries replicas until one answers, or the last error is the answer."""
        loop, num_lost, worst = asyncio.get_running_loop(), 0, -1
        error: Answer | ApiError = no_replica()
        request = await prefilled(self._fleet, self._request, self._among)
        for _ in range(MAX_ROUNDS):
            left = list(self._among)
            while (replica := self._fleet.choose(self._request.keys, left, self._request.session)) is not None:
                left.remove(replica)
                answer = await self._attempt(replica, request, send)
                if answer is None:
                    return
                num_lost += answer.status == 500 or (isinstance(answer, ApiError) and answer.code == LOST)
                if RETRIED[answer.status] >= worst:
                    error, worst = answer, RETRIED[answer.status]
                if num_lost == MAX_LOST:
                    break
            seconds = self._arrived + RETURN_S - loop.time()
            if num_lost == MAX_LOST or worst in (RETRIED[404], RETRIED[500], RETRIED[429]):
                break
            if not await self._fleet.until_passed(seconds):
                break
        if isinstance(error, ApiError):
            await self._fail(error, send)
        else:
            await self._send_whole(error, send)

    async def _attempt(self, replica: Replica, request: RoutedRequest, send: Send) -> Answer | ApiError | None:
        """Sends the request to a replica, and its answer to the client.

        Args:
            replica: the replica.
            request: the request.
            send: ASGI channel to the client.

        Returns:
            None if the client has its answer; otherwise the error, which another replica may make up for.
        """
        outcome = "gone"
        matched = replica.prefixes.match(request.keys)
        try:
            async with replica.attempt(request.to(replica)) as response:
                headers = passed_headers(response.headers.raw)
                outcome = str(response.status_code)
                if response.status_code in RETRIED:
                    return Answer(response.status_code, headers, await read_whole(response, MAX_ERROR_BYTES))
                if response.headers.get("content-type", "").startswith("text/event-stream"):
                    await self._stream(response, headers, send)
                    answer = None
                else:
                    answer = Answer(response.status_code, headers, await read_whole(response))
        except (httpx2.TransportError, httpx2.InvalidURL, TimeoutError, EndlessEventError) as error:
            outcome = replica.failed(error)
            if outcome == "refused":
                return no_replica()
            if outcome == "invalid":
                why = "the request cannot be passed on: its path or a header is not valid"
                await self._fail(ApiError(400, why), send)
                return None
            if not self._has_started:
                return lost()
            await self._fail(lost(), send)
            return None
        finally:
            replica.outcomes[outcome] += 1
        if answer is not None and answer.status == 400 and request.original is not None:
            logger.warning("replica %s has refused a prompt that another one has computed", replica.name)
            return await self._attempt(replica, request.original, send)
        if response.status_code < 400:
            replica.answered(request.keys, matched)
            self._fleet.sessions.remember(request.session, replica)
        if answer is not None:
            await self._send_whole(answer, send)
        return None


def no_replica() -> ApiError:
    """503, no replica can be reached, or none is healthy."""
    headers = retry_after(OVERLOAD_RETRY_S)
    return ApiError(503, "no replica takes requests now", code="no_replica", headers=headers)
