"""HTTP details that uvicorn leaves open: limits of bodies and heads, and clients that disconnect."""

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
MAX_HEAD_S = 30.0  # seconds from the first byte of a head to its last
MAX_BODY_S = 120.0  # seconds until a body is complete
SHORT_BODY_BYTES = 4096  # bodies up to this size are parsed and checked in less than a millisecond
KEEP_ALIVE_S = 75.0  # seconds; longer than clients', so that none sends a request while its connection closes
STALL_S = 60.0  # seconds in which a client must read something of its response
LINGER_S = 2.0  # seconds for a client to read an error before its connection is closed while it still sends

GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS  # detected from the header of the data
READ_ENCODINGS = (b"gzip", b"x-gzip", b"deflate")  # deflate is zlib's format in HTTP
JSON = (b"content-type", b"application/json")
CLOSE = (b"connection", b"close")


class ClientGone(Exception):
    """The client has disconnected, so that nobody reads a response."""


class _PlainBody:
    """Collects the bytes of a body."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._num_bytes, self._pieces = max_bytes, 0, list[bytes]()

    def push(self, data: bytes) -> None:
        """Adds bytes. Raises ApiError, 413, as soon as there are too many."""
        self._num_bytes += len(data)
        if self._num_bytes > self._max_bytes:
            raise _too_long(self._max_bytes)
        self._pieces.append(data)

    def end(self) -> bytes:
        """The complete body. Raises ApiError if it is not complete."""
        return b"".join(self._pieces)


class _CompressedBody(_PlainBody):
    """Decompresses the bytes of a body, never more of them than the limit allows."""

    def __init__(self, max_bytes: int, encoding: str) -> None:
        super().__init__(max_bytes)
        self._encoding, self._stream = encoding, zlib.decompressobj(GZIP_OR_ZLIB)
        self._num_compressed = 0

    def push(self, data: bytes) -> None:
        self._num_compressed += len(data)  # limited, too, since it may decompress to nothing
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
    """Decoder of a body in the encoding of its head. Raises ApiError, 415, for an unknown one."""
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

    Parsing and checking a long body takes milliseconds in which no stream continues. If several arrive at once, only
    one is given out per iteration of the event loop, so that streams are sent in between.

    Args:
        max_bytes: the maximum size of a body, in bytes.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._long_body_lock = max_bytes, asyncio.Lock()

    async def read(self, scope: Scope, receive: Receive) -> bytes:
        """Reads the body of a request.

        Args:
            scope: the ASGI scope.
            receive: the ASGI channel from the client.

        Raises:
            ApiError: 413 as soon as it is known to be too long (compressed, too), 415 if it is not JSON or its encoding
                is
                not supported, 408 if it is not received in time, 400 if it does not have its declared encoding.
            ClientGone: the client has disconnected before the end.
        """
        headers = dict(scope["headers"])
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"application/json":  # browsers let any web page send other types to this machine
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
            async with self._long_body_lock:
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
    """Returns when the client has disconnected. uvicorn silently drops all that is sent after that."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_json(send: Send, status: int, body: bytes, headers: Headers = ()) -> None:
    """Sends a JSON response.

    Args:
        send: the ASGI channel to the client.
        status: the HTTP status.
        body: the body, JSON.
        headers: further headers.
    """
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": status, "headers": [JSON, length, *headers]})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: ApiError) -> None:
    """Sends an error as a response."""
    await send_json(send, error.status, error.body, error.headers)


class LimitedHttp(HttpToolsProtocol):
    """uvicorn's protocol with limits: heads, bodies, readers and pauses have time limits, and errors are JSON.

    A connection handles one request at a time. Data that arrive after a request and before its response is complete are
    dropped, and the connection is closed after the response: so the client's disconnection is always noticed, and no
    computation continues after it. A response that starts before its request is complete ends the connection, too.

    httptools passes a header on when it is complete, and buffers it until then, whatever its size.

    Attributes:
        deadline: when the connection is given up, by the event loop's clock. The server calls `expire` then; a timer
            for
            each connection would cost more.
    """

    deadline = inf
    _head_bytes = 0  # size of a request's headers, trailers included
    _unparsed_bytes = 0  # bytes since the parser last called back
    _unsent_bytes = maxsize  # bytes that were unsent at the last deadline
    _keep_alive = False  # True if the client keeps the connection open
    _drops_input = False  # True once further data from the client are dropped
    _is_surplus = False  # True beyond the limit of connections: only SURPLUS_PATHS are answered

    def __init__(
        self, *arguments: Any, limit: ConnectionLimit, on_refusal: Callable[[ApiError], None], **named: Any
    ) -> None:
        """Sets up a connection.

        Args:
            arguments: uvicorn's.
            limit: the limit of connections.
            on_refusal: called with the error of a client whose bytes are no HTTP request.
            named: uvicorn's.
        """
        super().__init__(*arguments, **named)
        self._limit, self._on_refusal = limit, on_refusal

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Starts a connection, and aborts it if there are far too many."""
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
        """Ends a connection."""
        self._limit.num_surplus -= self._is_surplus
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parses data, and refuses a head that is too long."""
        if self._drops_input:
            return
        self._unparsed_bytes += len(data)
        super().data_received(data)
        if self._unparsed_bytes > MAX_HEAD_BYTES and not self._drops_input:
            self.send_400_response("")

    def on_message_begin(self) -> None:
        """Starts the time limit of a head. Raises ValueError during a response."""
        if self._is_answering:
            raise ValueError(
                "a second request before the first is answered"
            )  # httptools reports it to send_400_response
        self._head_bytes = self._unparsed_bytes = 0
        if not self._is_surplus:
            self._wait(MAX_HEAD_S)
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Adds a header. Raises ValueError if the headers are too long."""
        self._unparsed_bytes = 0
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES:
            raise ValueError("too many headers")  # httptools reports it as an error of the request
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Starts the time limit of a body. Raises ValueError if the connection is one too many."""
        if self._is_surplus and (
            self.parser.get_method() != b"GET" or self.url.partition(b"?")[0] not in SURPLUS_PATHS
        ):
            raise ValueError("one connection too many")  # httptools reports it to send_400_response
        self._unparsed_bytes = 0
        self._wait(MAX_BODY_S + LINGER_S)  # longer than the time limit of BodyReader, which sends an error
        super().on_headers_complete()
        cycle = self.cycle
        self._keep_alive, cycle.keep_alive = cycle.keep_alive and not self._is_surplus, False
        cycle.transport = _CycleTransport(self.transport, self.close)  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        """Adds bytes of a body."""
        self._unparsed_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Ends the time limit of a request."""
        super().on_message_complete()
        if not self.cycle.response_started:
            self.cycle.keep_alive = self._keep_alive
            self.deadline = inf

    def on_response_complete(self) -> None:
        """Starts the time limit of a connection without a request."""
        if not self._drops_input and not self.transport.is_closing():
            self.flow.resume_reading()
            self._wait(KEEP_ALIVE_S)

    def pause_writing(self) -> None:
        """Starts the time limit of a client that does not read."""
        super().pause_writing()
        self._wait(STALL_S)

    def resume_writing(self) -> None:
        """Ends the time limit of a client that does not read."""
        super().resume_writing()
        if self._is_answering and not self.cycle.disconnected:
            self.deadline = inf

    def close(self) -> None:
        """Closes the connection once its response is sent."""
        if self._drops_input or self.cycle.more_body:
            self._close_after_reading()
        else:
            self.transport.close()
            self._wait(STALL_S)

    def expire(self) -> None:
        """Handles a passed deadline: ends the connection, unless its client reads, however slowly."""
        if self._is_surplus and self.cycle is None and not self._drops_input:
            self._refuse_surplus()
            return
        unsent = self.transport.get_write_buffer_size() + _queued_bytes(self.transport)
        if 0 < unsent < self._unsent_bytes:
            self.deadline = self.loop.time() + STALL_S
            self._unsent_bytes = unsent
        elif unsent or self._drops_input:
            self.transport.abort()
        else:
            self.transport.close()

    def shutdown(self) -> None:
        """Closes the connection after the current response."""
        self._keep_alive = False
        super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """Ends a connection with bytes that are no HTTP request or arrive during a response, or one too many."""
        if self._is_surplus and self.cycle is None:
            self._refuse_surplus()
            return
        if self._is_answering and not self.cycle.more_body:
            self._drops_input, self.cycle.keep_alive = True, False
            return
        if not self._is_answering or not self.cycle.response_started:
            error = ApiError(400, "this is no HTTP request")
            if max(self._head_bytes, self._unparsed_bytes) > MAX_HEAD_BYTES:
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
        """Waits a moment for the client to disconnect.

        Closing at once would reset the connection because of unread data, and the client would lose the response.
        """
        self._drops_input = True
        self._wait(LINGER_S)
        self.flow.resume_reading()
        try:
            if self.transport.can_write_eof():  # not over TLS: the client reads the answer's length instead
                self.transport.write_eof()
        except OSError:  # the client has gone
            self.transport.abort()


def _queued_bytes(transport: asyncio.Transport) -> int:
    """Bytes in the system's send buffer that the client has not acknowledged."""
    fd = transport.get_extra_info("socket").fileno()
    return 0 if fd < 0 else int.from_bytes(ioctl(fd, TIOCOUTQ, bytes(4)), byteorder)


class _CycleTransport:
    """The methods of a transport that uvicorn's request cycle uses, with our way of closing it."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write, self.is_closing, self.close = transport.write, transport.is_closing, close


def header(scope: Scope, name: bytes) -> list[bytes]:
    """All values of a header."""
    values: list[Any] = [value for key, value in scope["headers"] if key == name]
    return values
