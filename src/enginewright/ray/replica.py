"""A replica: the server's application, called by Ray instead of a connection."""

import asyncio
import gc
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from ray import serve
from starlette.types import ASGIApp, Message, Scope

from enginewright.errors import EngineError
from enginewright.ray.known import Hints
from enginewright.ray.scaling import RUNNING, WAITING
from enginewright.ray.settings import Settings
from enginewright.runtime.server.app import App
from enginewright.runtime.server.errors import Headers
from enginewright.runtime.server.hosts import HostCheck
from enginewright.runtime.server.serve import SWITCH_INTERVAL_S, open_engines

WATCH_S = 0.1  # seconds between two checks of the engines
ANYWHERE = "0.0.0.0"  # replicas do not know the addresses of Ray's proxies


@dataclass(frozen=True)
class Call:
    """A request as it is sent to a replica. It is pickled by Ray, as all arguments are."""

    method: str  # HTTP method
    path: str  # path, decoded
    raw_path: bytes  # path as it was sent
    query: bytes  # query
    headers: list[tuple[bytes, bytes]]  # headers
    body: bytes = b""  # complete body

    @property
    def scope(self) -> Scope:
        """The ASGI scope."""
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.raw_path,
            "query_string": self.query,
            "root_path": "",
            "headers": self.headers,
            "client": None,
            "server": None,
        }


@dataclass(frozen=True)
class Head:
    """The start of an answer."""

    replica: str  # id of the replica, as Hints names it
    status: int  # HTTP status
    headers: Headers  # headers


class Replica:
    """The server, as a deployment of Ray Serve. An answer is a Head, and then pieces of its body.

    Args:
        settings: the settings of the deployment.
    """

    async def __init__(self, settings: Settings) -> None:  # type: ignore[misc]  # Ray awaits it
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        engines = [settings.engines[0]] if len(settings.engines) == 1 else list(settings.engines)
        self._engines = await open_engines(engines, settings.server, dict(settings.limits))
        self._app = App(self._engines, HostCheck(ANYWHERE, ANYWHERE, settings.server.allowed_hosts))
        self._id = serve.get_replica_context().replica_id.unique_id
        self._watching = asyncio.create_task(self._watch())
        self._running: set[asyncio.Task[None]] = set()  # a task that nothing else refers to might be collected
        gc.collect()
        gc.freeze()

    async def __call__(self, call: Call, hints: Hints) -> AsyncIterator[Head | bytes]:
        """Answers a request. If the caller leaves, the computation ends.

        Args:
            call: the request.
            hints: for the router, which has used them.
        """
        exchange = _Exchange(call)
        task = asyncio.create_task(exchange.run(self._app))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            async for message in exchange.messages():
                if message["type"] == "http.response.start":
                    yield Head(self._id, message["status"], list(message["headers"]))
                else:
                    yield message["body"]
        finally:
            exchange.leave()

    async def ask(self, call: Call) -> tuple[Head, bytes]:
        """The complete answer to a short request."""
        pieces = [piece async for piece in self(call, Hints())]
        head, *body = pieces
        assert isinstance(head, Head)
        return head, b"".join(piece for piece in body if isinstance(piece, bytes))

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Metrics for `scale_by_queues`; Ray calls it at intervals."""
        stats = [service.llm.stats() for service in self._engines.services]
        opening = sum(len(engine.waiting) for engine in self._engines.all)
        return {
            RUNNING: float(sum(one.num_running for one in stats)),
            WAITING: float(sum(one.num_waiting for one in stats) + opening),
        }

    def check_health(self) -> None:
        """Raises EngineError if Ray should replace the replica."""
        if (closed := self._engines.why_unhealthy()) is not None:
            raise EngineError("the replica is not healthy", closed.message)

    async def __del__(self) -> None:
        """Ends the replica; Ray calls it once running requests have ended, or have taken too long."""
        if not hasattr(self, "_running"):
            return  # it was never opened
        self._watching.cancel()
        self._engines.end_all()
        await self._engines.close()
        await asyncio.to_thread(self._app.close)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            self._engines.watch()


class _Exchange:
    """A request and its answer, between the application and a generator.

    Args:
        call: the request.
    """

    def __init__(self, call: Call) -> None:
        self._call, self._has_body = call, True
        self._sent: asyncio.Queue[Message | None] = asyncio.Queue()
        self._left = asyncio.Event()

    async def run(self, app: ASGIApp) -> None:
        """Runs the application."""
        try:
            await app(self._call.scope, self._receive, self._send)
        finally:
            self._sent.put_nowait(None)

    async def messages(self) -> AsyncIterator[Message]:
        """The messages of the answer. The application logs its own failure, and answers with status 500."""
        while (message := await self._sent.get()) is not None:
            yield message

    def leave(self) -> None:
        """Tells the application that the client has left, if it still runs."""
        self._left.set()

    async def _receive(self) -> Message:
        if self._has_body:
            self._has_body = False
            return {"type": "http.request", "body": self._call.body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self._sent.put_nowait(message)
