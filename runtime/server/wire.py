"""HTTP where uvicorn leaves it open: bodies within a limit, heads within limits, and clients that leave."""

import asyncio
from asyncio import TimerHandle
from typing import Any

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from enginewright.runtime.server.errors import ApiError, Headers

MAX_HEAD_BYTES = 64 << 10
MAX_HEAD_S = 30.0  # from its first byte to its last
MAX_BODY_S = 120.0

JSON = (b"content-type", b"application/json")
CLOSE = (b"connection", b"close")


class ClientGone(Exception):
    """Nobody is there to be answered."""


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """The body of a request.

    Raises:
        ApiError: 413 as soon as it is known to be too long, 415 if it is not JSON, 408 if it does not come.
        ClientGone: the client has left before its end.
    """
    headers = dict(scope["headers"])
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind != b"application/json":  # a web page can send anything else to this machine without being asked
        raise ApiError(415, "the body must be JSON: send Content-Type: application/json", headers=[CLOSE])
    too_long = ApiError(413, f"the body is longer than {max_bytes} bytes", code="body_too_large", headers=[CLOSE])
    declared = headers.get(b"content-length", b"")
    if declared.isdigit() and int(declared[:20]) > max_bytes:
        raise too_long
    pieces: list[bytes] = []
    num_bytes = 0
    try:
        async with asyncio.timeout(MAX_BODY_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                pieces.append(message["body"])
                num_bytes += len(pieces[-1])
                if num_bytes > max_bytes:
                    raise too_long
                if not message["more_body"]:
                    return b"".join(pieces)
    except TimeoutError:
        raise ApiError(408, f"the body has not come within {MAX_BODY_S:.0f} s", headers=[CLOSE]) from None


async def until_gone(receive: Receive) -> None:
    """Returns when the client has left. What uvicorn is given to send after that goes nowhere, without a word."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_json(send: Send, status: int, body: bytes, headers: Headers = ()) -> None:
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": status, "headers": [JSON, length, *headers]})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: ApiError) -> None:
    await send_json(send, error.status, error.body, error.headers)


class LimitedHttp(HttpToolsProtocol):
    """uvicorn's, but the head of a request has an end, within so many bytes and seconds; and errors are JSON.

    httptools hands a header on when it is complete and holds it until then, whatever its size.
    """

    _head_bytes = 0  # of the headers of a request, its trailers too
    _held_bytes = 0  # that have come since the parser last had something to say
    _timer: TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._timer = self.loop.call_later(MAX_HEAD_S, transport.close)

    def data_received(self, data: bytes) -> None:
        self._held_bytes += len(data)
        super().data_received(data)
        if self._held_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("")

    def on_message_begin(self) -> None:
        self._head_bytes = self._held_bytes = 0
        self._timer = self._timer or self.loop.call_later(MAX_HEAD_S, self.transport.close)
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._held_bytes = 0
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES:
            raise ValueError("too many headers")  # httptools takes it for an error of the request
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._held_bytes = 0
        self._stop_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._held_bytes = 0
        super().on_body(body)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        error = ApiError(400, "this is no HTTP request", headers=[CLOSE])
        if max(self._head_bytes, self._held_bytes) > MAX_HEAD_BYTES:
            error = ApiError(431, f"the headers are longer than {MAX_HEAD_BYTES} bytes", headers=[CLOSE])
        body = error.body
        head = [b"HTTP/1.1 %d Bad Request" % error.status, *(b": ".join(one) for one in (JSON, CLOSE))]
        head.append(b"content-length: %d" % len(body))
        self.transport.write(b"\r\n".join([*head, b"", body]))
        self.transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def header(scope: Scope, name: bytes) -> list[bytes]:
    """All values of a header."""
    values: list[Any] = [value for key, value in scope["headers"] if key == name]
    return values
