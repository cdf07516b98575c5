"""The answer to a client: complete, or a stream of events that an error can follow."""

import logging
from collections.abc import AsyncIterator
from typing import Protocol

from starlette.types import Send

from enginewright.runtime.server.anthropic_form import AnthropicError
from enginewright.runtime.server.errors import ApiError, Headers
from enginewright.runtime.server.form import typed_event
from enginewright.runtime.server.log import log_event
from enginewright.runtime.server.wire import send_error

MAX_ANSWER_BYTES = 64 << 20  # size of an answer that is not streamed, and of one event
MAX_LOST = 2  # replicas that may fail under a request: it might be what makes them fail
LOST = "replica_lost"  # code of the error for a replica that failed under a request


class EndlessEventError(Exception):
    """An event that is longer than any replica sends."""


class StreamedAnswer(Protocol):
    """A stream from a replica."""

    @property
    def status_code(self) -> int:
        """The HTTP status."""

    def aiter_raw(self) -> AsyncIterator[bytes]:
        """The bytes of the body, as they come."""


class Reply:
    """The answer to a client, which gets whole events, so that an error can follow each of them.

    Attributes:
        status: the status that the client got, or CLIENT_GONE.

    Args:
        route: the path of the request's route, which decides the form of errors.
        method: the HTTP method.
    """

    def __init__(self, route: str, method: str) -> None:
        self.status = 0
        self._route, self._method = route, method
        self._num_events = 0  # events of a stream that were sent
        self._has_started = False  # True once the head of the answer was sent

    def _on_start(self) -> None:
        """Called when the first byte of the answer is sent."""

    async def _stream(self, response: StreamedAnswer, headers: Headers, send: Send) -> None:
        """Sends whole events, so that an error can follow each of them."""
        held = bytearray()
        async for chunk in response.aiter_raw():
            held += chunk
            first = max(len(held) - len(chunk) - 3, 0)
            ends = (held.rfind(end, first) + len(end) for end in (b"\n\n", b"\r\n\r\n") if end in held[first:])
            if (size := max(ends, default=0)) > 0:
                await self._start(response.status_code, headers, send)
                events = bytes(held[:size])
                self._num_events += events.count(b"\n\n")
                await send({"type": "http.response.body", "body": events, "more_body": True})
                del held[:size]
            if len(held) > MAX_ANSWER_BYTES:
                raise EndlessEventError("an event does not end")
        await self._start(response.status_code, headers, send)
        await send({"type": "http.response.body", "body": bytes(held), "more_body": False})

    async def _send_whole(self, answer: tuple[int, Headers, bytes], send: Send) -> None:
        status, headers, body = answer
        length = [] if self._method == "HEAD" else [(b"content-length", b"%d" % len(body))]
        await self._start(status, [*headers, *length], send)
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _start(self, status: int, headers: Headers, send: Send) -> None:
        if self._has_started:
            return
        self._has_started, self.status = True, status
        self._on_start()
        await send({"type": "http.response.start", "status": status, "headers": headers})

    async def _fail(self, error: ApiError, send: Send) -> None:
        """Sends an error: as the answer, or as the last event of a stream in the format of its API."""
        if not self._has_started:
            self.status = error.status
            await send_error(send, in_form_of(self._route, error))
            return
        if self._route == "/v1/responses":
            event = typed_event(
                "error", sequence_number=self._num_events, code=error.code, message=error.message, param=None
            )
        elif self._route == "/v1/messages":
            event = b"event: error\ndata: " + AnthropicError.of(error).body + b"\n\n"
        else:
            event = b"data: " + error.body + b"\n\n"
        log_event(logging.WARNING, "cut", {"path": self._route, "code": error.code}, limited="streams")
        await send({"type": "http.response.body", "body": event, "more_body": False})


def lost() -> ApiError:
    """502, the replica failed under the request."""
    return ApiError(502, "the replica that computed the answer was lost", code=LOST)


def in_form_of(route: str, error: ApiError) -> ApiError:
    """An error in the format of a route's API."""
    return AnthropicError.of(error) if route.startswith("/v1/messages") else error
