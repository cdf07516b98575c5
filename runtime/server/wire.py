"""HTTP where uvicorn leaves it open: bodies within a limit, heads within limits, and clients that leave."""

import asyncio
import zlib
from collections.abc import Callable
from fcntl import ioctl
from math import inf
from sys import byteorder, maxsize
from termios import TIOCOUTQ
from typing import Any

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from enginewright.runtime.server.connections import MAX_SURPLUS, SURPLUS_PATHS, ConnectionLimit
from enginewright.runtime.server.errors import ApiError, Headers

MAX_HEAD_BYTES = 64 << 10
MAX_HEAD_S = 30.0  # from its first byte to its last
MAX_BODY_S = 120.0
SHORT_BODY_BYTES = 4096  # up to which a body is parsed and checked in less than a millisecond
KEEP_ALIVE_S = 75.0  # longer than clients', so that none sends a request into a connection that is just being closed
STALL_S = 60.0  # in which a client must read something of its answer
LINGER_S = 2.0  # for a client to read an error before the connection is closed under what it still sends

GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS  # by the header of what comes
READ_ENCODINGS = (b"gzip", b"x-gzip", b"deflate")  # deflate is zlib's format in HTTP
JSON = (b"content-type", b"application/json")
CLOSE = (b"connection", b"close")


class ClientGone(Exception):
    """The client has left, so there is nobody to respond to."""


class _PlainBody:
    """The bytes of a body, as they come."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._num_bytes, self._pieces = max_bytes, 0, list[bytes]()

    def push(self, data: bytes) -> None:
        """Raises ApiError, 413, as soon as there are too many."""
        self._num_bytes += len(data)
        if self._num_bytes > self._max_bytes:
            raise _too_long(self._max_bytes)
        self._pieces.append(data)

    def end(self) -> bytes:
        """All of it. Raises ApiError where it is not whole."""
        return b"".join(self._pieces)


class _CompressedBody(_PlainBody):
    """The bytes of a body that comes compressed. No more of it is ever decompressed than the limit allows."""

    def __init__(self, max_bytes: int, encoding: str) -> None:
        super().__init__(max_bytes)
        self._encoding, self._stream = encoding, zlib.decompressobj(GZIP_OR_ZLIB)
        self._num_compressed = 0

    def push(self, data: bytes) -> None:
        self._num_compressed += len(data)  # which may have no bytes in it, however many there are
        if self._num_compressed > self._max_bytes:
            raise _too_long(self._max_bytes)
        try:
            while data and not self._stream.eof:
                super().push(self._stream.decompress(data, self._max_bytes - self._num_bytes + 1))
                data = self._stream.unconsumed_tail
        except zlib.error:
            raise self._broken() from None
        if data or self._stream.unused_data:
            raise self._broken()

    def end(self) -> bytes:
        if not self._stream.eof:
            raise self._broken()
        return super().end()

    def _broken(self) -> ApiError:
        why = f"the body is not what its Content-Encoding says: {self._encoding}"
        return ApiError(400, why, code="invalid_encoding", headers=[CLOSE])


def _new_body(scope: Scope, max_bytes: int) -> _PlainBody:
    """Decoder of a body in the encoding that its head names. Raises ApiError, 415, for an unknown one."""
    named = b",".join(header(scope, b"content-encoding")).strip().lower()
    if named in (b"", b"identity"):
        return _PlainBody(max_bytes)
    if named in READ_ENCODINGS:
        return _CompressedBody(max_bytes, named.decode())
    why = f"the body's Content-Encoding is {named.decode('latin-1')[:40]!a}, and there are gzip and deflate"
    raise ApiError(415, why, code="unsupported_encoding", headers=[CLOSE, (b"accept-encoding", b"gzip, deflate")])


def _too_long(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is longer than {max_bytes} bytes", code="body_too_large", headers=[CLOSE])


class BodyReader:
    """Reads the bodies of requests.

    To parse a long body, and to check what it asks for, takes milliseconds in which no stream goes on. However many
    come at the same time, only one is given out in each turn of the event loop, so that streams are sent in between.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._turn = max_bytes, asyncio.Lock()

    async def read(self, scope: Scope, receive: Receive) -> bytes:
        """The body of a request.

        Raises:
            ApiError: 413 as soon as it is known to be too long (compressed, too), 415 if it is not JSON or in an
                encoding that is not read, 408 if it does not come, 400 if it is not in its encoding.
            ClientGone: the client has left before its end.
        """
        headers = dict(scope["headers"])
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"application/json":  # a web page can send anything else to this machine without being asked
            raise ApiError(415, "the body must be JSON: send Content-Type: application/json", headers=[CLOSE])
        body = _new_body(scope, self._max_bytes)
        declared = headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared[:20]) > self._max_bytes:
            raise _too_long(self._max_bytes)
        try:
            async with asyncio.timeout(MAX_BODY_S):
                data = await _all_of(body, receive)
        except TimeoutError:
            raise ApiError(408, f"the body has not come within {MAX_BODY_S:.0f} s", headers=[CLOSE]) from None
        if len(data) > SHORT_BODY_BYTES:
            async with self._turn:
                await asyncio.sleep(0)
        return data


async def _all_of(body: _PlainBody, receive: Receive) -> bytes:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body.push(message["body"])
        if not message["more_body"]:
            return body.end()


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
    """uvicorn's, but a connection has an end: heads, bodies, readers and pauses have limits, and errors are JSON.

    deadline: when the connection is given up, by the event loop's clock. Whoever runs the server calls `expire` then;
    a timer for each connection would cost more.

    A request is answered alone. What arrives behind it before its answer is complete is dropped, and the connection is
    closed after the answer: so the client's end is always seen, and nothing runs on after it. An answer that begins
    before its request has come whole ends the connection, too.

    httptools hands a header on when it is complete and holds it until then, whatever its size.
    """

    deadline = inf
    _head_bytes = 0  # of the headers of a request, its trailers too
    _held_bytes = 0  # that have come since the parser last had something to say
    _unsent_bytes = maxsize  # when the deadline passed last
    _keep_alive = False  # what the client wants
    _deaf = False  # what comes is dropped
    _is_surplus = False  # beyond the limit of connections: only SURPLUS_PATHS are answered

    def __init__(
        self, *arguments: Any, limit: ConnectionLimit, on_refusal: Callable[[ApiError], None], **named: Any
    ) -> None:
        """
        Args:
            on_refusal: called with what a client hears whose bytes are no request.
        """
        super().__init__(*arguments, **named)
        self._limit, self._on_refusal = limit, on_refusal

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._wait(MAX_HEAD_S)
        if len(self.connections) - self._limit.num_surplus > self._limit.count:
            self._is_surplus = True
            self._limit.num_surplus += 1
            self._wait(LINGER_S)
            if self._limit.num_surplus > MAX_SURPLUS:
                self._limit.refuse()
                self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._limit.num_surplus -= self._is_surplus
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        self._held_bytes += len(data)
        super().data_received(data)
        if self._held_bytes > MAX_HEAD_BYTES and not self._deaf:
            self.send_400_response("")

    def on_message_begin(self) -> None:
        if self._is_answering:
            raise ValueError("a second request before the first is answered")  # comes back to send_400_response
        self._head_bytes = self._held_bytes = 0
        if not self._is_surplus:
            self._wait(MAX_HEAD_S)
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._held_bytes = 0
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES:
            raise ValueError("too many headers")  # httptools takes it for an error of the request
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_surplus and (
            self.parser.get_method() != b"GET" or self.url.partition(b"?")[0] not in SURPLUS_PATHS
        ):
            raise ValueError("one connection too many")  # comes back to send_400_response
        self._held_bytes = 0
        self._wait(MAX_BODY_S + LINGER_S)  # who reads bodies says so first
        super().on_headers_complete()
        cycle = self.cycle
        self._keep_alive, cycle.keep_alive = cycle.keep_alive and not self._is_surplus, False
        cycle.transport = _CycleTransport(self.transport, self.close)  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        self._held_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if not self.cycle.response_started:
            self.cycle.keep_alive = self._keep_alive
            self.deadline = inf

    def on_response_complete(self) -> None:
        if not self._deaf and not self.transport.is_closing():
            self.flow.resume_reading()
            self._wait(KEEP_ALIVE_S)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait(STALL_S)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._is_answering and not self.cycle.disconnected:
            self.deadline = inf

    def close(self) -> None:
        """End the connection once its answer is sent."""
        if self._deaf or self.cycle.more_body:
            self._close_after_reading()
        else:
            self.transport.close()
            self._wait(STALL_S)

    def expire(self) -> None:
        """The deadline has passed: end the connection, unless its client reads, however slowly."""
        if self._is_surplus and self.cycle is None and not self._deaf:
            self._refuse_surplus()
            return
        unsent = self.transport.get_write_buffer_size() + _queued_bytes(self.transport)
        if 0 < unsent < self._unsent_bytes:
            self.deadline = self.loop.time() + STALL_S
            self._unsent_bytes = unsent
        elif unsent or self._deaf:
            self.transport.abort()
        else:
            self.transport.close()

    def shutdown(self) -> None:
        self._keep_alive = False
        super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """End a connection whose client does not speak HTTP, or speaks out of turn, or is one too many."""
        if self._is_surplus and self.cycle is None:
            self._refuse_surplus()
            return
        if self._is_answering and not self.cycle.more_body:
            self._deaf, self.cycle.keep_alive = True, False
            return
        if not self._is_answering or not self.cycle.response_started:
            error = ApiError(400, "this is no HTTP request")
            if max(self._head_bytes, self._held_bytes) > MAX_HEAD_BYTES:
                error = ApiError(431, f"the headers are longer than {MAX_HEAD_BYTES} bytes")
            self._on_refusal(error)
            self._send_error(error)
        if self._is_answering:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._close_after_reading()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait(self, seconds: float) -> None:
        self.deadline = self.loop.time() + seconds
        self._unsent_bytes = maxsize

    def _refuse_surplus(self) -> None:
        self._send_error(self._limit.refuse())
        self._close_after_reading()

    def _send_error(self, error: ApiError) -> None:
        length = (b"content-length", b"%d" % len(error.body))
        head = [STATUS_LINE[error.status][:-2], *map(b": ".join, (JSON, length, CLOSE, *error.headers))]
        self.transport.write(b"\r\n".join([*head, b"", error.body]))

    def _close_after_reading(self) -> None:
        """Wait a moment for the client's end: what it still sends would otherwise take the answer from it."""
        self._deaf = True
        self._wait(LINGER_S)
        self.flow.resume_reading()
        try:
            if self.transport.can_write_eof():  # not over TLS: the client reads the answer's length instead
                self.transport.write_eof()
        except OSError:  # the client has gone
            self.transport.abort()


def _queued_bytes(transport: asyncio.Transport) -> int:
    """What the system has taken, and the client has not."""
    fd = transport.get_extra_info("socket").fileno()
    return 0 if fd < 0 else int.from_bytes(ioctl(fd, TIOCOUTQ, bytes(4)), byteorder)


class _CycleTransport:
    """What uvicorn's cycle of a request and its answer uses of a transport, but that it is closed our way."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write, self.is_closing, self.close = transport.write, transport.is_closing, close


def header(scope: Scope, name: bytes) -> list[bytes]:
    """All values of a header."""
    values: list[Any] = [value for key, value in scope["headers"] if key == name]
    return values
