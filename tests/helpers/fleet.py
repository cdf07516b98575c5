"""The proxy of `engine route` in a thread of its own, and replicas that misbehave."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from enginewright.route.config import RouteConfig
from enginewright.route.fleet import Fleet
from enginewright.route.serve import host_fleet
from enginewright.runtime.server.hosting import Shutdown, bind
from tests.helpers.serving import Served, wait_until

EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Routing(Served):
    """The proxy. fleet: belongs to its thread; `call` goes there."""

    def __init__(self, config: RouteConfig) -> None:
        super().__init__()
        self.config = config

    async def _main(self) -> None:
        self._loop, self.shutdown, self.fleet = asyncio.get_running_loop(), Shutdown(), Fleet(self.config)
        with bind(self.config.host, 0) as listener:
            self.port = listener.getsockname()[1]
            await host_fleet(self.fleet, listener, self.shutdown, self._ready.set)

    def attempts(self) -> list[int]:
        """Number of requests that were sent to each replica, and have ended."""
        return [replica.outcomes.total() for replica in self.fleet.replicas]


@contextmanager
def routing(*ports: int, **config: object) -> Iterator[Routing]:
    """Runs the proxy before replicas at these ports; nothing may be under way at the end."""
    replicas = tuple(f"http://127.0.0.1:{port}" for port in ports)
    with Routing(RouteConfig(replicas, **config)) as proxy:  # type: ignore[arg-type]
        yield proxy
        wait_until(lambda: not proxy.fleet.live and not any(one.running for one in proxy.fleet.replicas))


class FakeReplica:
    """A replica that is healthy and answers each other request by `answer`, which gets the socket and the head.

    heads: those of all requests but health checks.
    """

    def __init__(self, answer: Callable[[socket.socket, bytes], None]) -> None:
        self._answer, self.heads = answer, list[bytes]()
        self.health: bytes | None = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"  # None is never answered
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]

    def __enter__(self) -> "FakeReplica":
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(30)
        for one in self._open:
            with suppress(OSError):  # it is closed
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(connection)
            self._threads.append(thread := threading.Thread(target=self._serve, args=(connection,)))
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                while head := self._read_head(connection):
                    if not head.startswith(b"GET /health "):
                        self.heads.append(head)
                        self._answer(connection, head)
                        return
                    if self.health is not None:
                        connection.sendall(self.health)
            except OSError:
                pass  # the proxy has closed the connection

    @staticmethod
    def _read_head(connection: socket.socket) -> bytes:
        """Reads a head and the start of its body."""
        data = b""
        while b"\r\n\r\n" not in data:
            if not (piece := connection.recv(1 << 16)):
                return b""
            data += piece
        return data


def chunk(data: bytes) -> bytes:
    """A chunk of an answer in chunked encoding."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def whole(status: int, body: bytes = b"{}", *headers: bytes) -> bytes:
    """A complete answer that closes its connection."""
    lines = [b"HTTP/1.1 %d X" % status, b"Content-Type: application/json", b"Content-Length: %d" % len(body)]
    return b"\r\n".join([*lines, b"Connection: close", *headers, b"", body])
