"""The ingress: reads requests, calls a replica, and calls another one as long as no byte of the answer was sent."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from ray.exceptions import NodeDiedError, ObjectLostError, RayActorError, WorkerCrashedError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from enginewright.ray.known import Hints
from enginewright.ray.metrics import merged
from enginewright.ray.replica import Call, Head
from enginewright.ray.settings import Settings
from enginewright.route.paths import GETS, KEPT, MAX_ID_CHARS, POSTS
from enginewright.route.prefixes import read_body, tenant_of
from enginewright.route.reply import MAX_ANSWER_BYTES, MAX_LOST, EndlessEventError, Reply, in_form_of, lost
from enginewright.runtime.server.errors import OVERLOAD_RETRY_S, ApiError, Headers, internal, overloaded, retry_after
from enginewright.runtime.server.wire import BodyReader, ClientGone

# Ray's errors for a replica that ended under a request.
LOST_REPLICA = (RayActorError, NodeDiedError, ObjectLostError, WorkerCrashedError)
RETRIED = (429, 500, 502, 503, 529)  # statuses that another replica may make up for
ASK_S = 5.0  # seconds for replicas to answer what all are asked
OF_BODY = (b"content-encoding", b"content-length")  # headers of the body before it was read
PASSED = ("/health", *GETS, "/v1/models")


class Ingress:
    """The ASGI application before the replicas, as a deployment of Ray Serve.

    Args:
        replicas: the handle of the deployment of replicas.
        settings: the settings.
    """

    def __init__(self, replicas: DeploymentHandle[Any], settings: Settings) -> None:
        self._replicas = replicas.options(stream=True)
        self._bodies = BodyReader(settings.server.max_body_bytes)

    def __serve_build_asgi_app__(self) -> Starlette:
        """Builds the application, which Ray calls for each request."""
        app = Starlette(
            routes=[
                *(Route(path, _Passed(self, path), methods=["POST"]) for path in POSTS),
                *(Route(path, _Passed(self, path), methods=["GET"]) for path in PASSED),
                Route(KEPT, _Passed(self, KEPT), methods=["GET", "DELETE"]),
                Route(f"{KEPT}/input_items", _Passed(self, f"{KEPT}/input_items"), methods=["GET"]),
                Route("/metrics", self._metrics),
            ],
            exception_handlers={ApiError: _refuse, HTTPException: _no_route, Exception: _crash},
        )
        app.router.redirect_slashes = False  # it would go where the Host header says
        return app

    async def answer(self, route: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request.

        Args:
            route: the path of its route.
            scope: the ASGI scope.
            receive: the ASGI channel from the client.
            send: the ASGI channel to the client.

        Raises:
            ApiError: the body is refused.
        """
        try:
            body = await self._bodies.read(scope, receive) if scope["method"] == "POST" else b""
        except ClientGone:
            return
        call, parsed = _call(scope, body), read_body(body)
        kept_id = scope["path_params"].get("id") or parsed.kept_id
        keeper = None if kept_id is None else await self._keeper(call, kept_id)
        keys = parsed.keys(tenant_of(scope)) if body else ()
        await _Forward(self._replicas, route, call, Hints(keys, keeper)).run(send)

    async def _keeper(self, call: Call, id: str) -> str | None:
        """The replica that keeps a response; None if none says that it does, since any can say why.

        Args:
            call: the request.
            id: the id of the response.
        """
        if not 0 < len(id) <= MAX_ID_CHARS or "/" in id:
            return None
        path = KEPT.format(id=id)
        answers = await self._ask(Call("HEAD", path, path.encode(), b"", _without_body(call.headers)))
        return next((head.replica for head, _ in answers if head.status == 200), None)

    async def _metrics(self, request: Request) -> Response:
        call = _call(request.scope, b"")
        plain = [(name, value) for name, value in call.headers if name != b"accept"]
        answers = await self._ask(Call(call.method, call.path, call.raw_path, call.query, plain))
        pages = {head.replica: body.decode() for head, body in answers if head.status == 200}
        if not pages and answers:  # such as 401
            head, body = answers[0]
            refused = Response(body, head.status)
            refused.raw_headers.extend(head.headers)
            return refused
        return Response(merged(pages), headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _ask(self, call: Call) -> list[tuple[Head, bytes]]:
        """The answers of all replicas to a short request; those that do not answer are left out."""
        try:
            found = await self._replicas.broadcast("ask", call).results_async(timeout_s=ASK_S, return_exceptions=True)
        except (DeploymentUnavailableError, TimeoutError):
            return []
        for one in found:
            if isinstance(one, BaseException) and not isinstance(one, LOST_REPLICA):
                raise one
        return [one for one in found if not isinstance(one, BaseException)]


class _Passed:
    """A route that replicas answer."""

    def __init__(self, ingress: Ingress, path: str) -> None:
        self._ingress, self._path = ingress, path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._ingress.answer(self._path, scope, receive, send)


@dataclass(frozen=True)
class _Stream:
    """A stream of a replica, as Reply reads it."""

    status_code: int  # HTTP status
    pieces: DeploymentResponseGenerator[Any]  # pieces of the body

    async def aiter_raw(self) -> AsyncIterator[bytes]:
        async for piece in self.pieces:
            yield piece


class _Forward(Reply):
    """A request under way.

    Args:
        replicas: the handle of the replicas.
        route: the path of its route.
        call: the request.
        hints: for the router.
    """

    def __init__(self, replicas: DeploymentHandle[Any], route: str, call: Call, hints: Hints) -> None:
        super().__init__(route, call.method)
        self._replicas, self._call, self._hints = replicas, call, hints

    async def run(self, send: Send) -> None:
        """Calls replicas until one answers, or the last error is the answer."""
        avoid: list[str] = []
        error: ApiError | tuple[int, Headers, bytes] | None = None
        for _ in range(MAX_LOST):
            error = await self._attempt(avoid, send)
            if error is None:
                return
        if isinstance(error, ApiError):
            await self._fail(error, send)
        elif error is not None:
            await self._send_whole(error, send)

    async def _attempt(self, avoid: list[str], send: Send) -> ApiError | tuple[int, Headers, bytes] | None:
        """Calls a replica, and sends its answer to the client.

        Args:
            avoid: ids of replicas that could not answer; this one is added if it cannot.
            send: the ASGI channel to the client.

        Returns:
            None if the client has its answer; otherwise the error, which another replica may make up for.
        """
        hints = Hints(self._hints.keys, None if avoid else self._hints.replica, tuple(avoid))
        pieces, has_ended = self._replicas.remote(self._call, hints=hints), False
        try:
            head: Head = await anext(pieces)
            headers = [(name, value) for name, value in head.headers if name != b"x-request-id"]  # Ray adds it
            if (b"content-type", b"text/event-stream") in [(name, value.split(b";")[0]) for name, value in headers]:
                await self._stream(_Stream(head.status, pieces), headers, send)
                has_ended = True
                return None
            answer = head.status, _without_length(headers), await _whole(pieces)
            has_ended = True
        except (*LOST_REPLICA, EndlessEventError):
            if not self._has_started:
                return lost()
            await self._fail(lost(), send)
            return None
        except RequestCancelledError:
            return None  # Ray has cancelled the call, since the client has left
        except BackPressureError:
            return overloaded("all replicas are full")
        except DeploymentUnavailableError:
            why = "no replica takes requests now"
            return ApiError(503, why, code="no_replica", headers=retry_after(OVERLOAD_RETRY_S))
        finally:
            if not has_ended:  # such as when the client has left, for which Ray cancels this task
                pieces.cancel()
        if head.status in RETRIED:
            avoid.append(head.replica)
            return answer
        await self._send_whole(answer, send)
        return None


async def _whole(pieces: DeploymentResponseGenerator[Any]) -> bytes:
    """The complete body of an answer. Raises EndlessEventError if it is too long."""
    body = bytearray()
    async for piece in pieces:
        body += piece
        if len(body) > MAX_ANSWER_BYTES:
            raise EndlessEventError(f"an answer has more than {MAX_ANSWER_BYTES} bytes")
    return bytes(body)


def _call(scope: Scope, body: bytes) -> Call:
    """A request as replicas get it: without an encoding of its body, and without the prefix of the application."""
    prefix = scope.get("root_path", "")
    path = scope["path"].removeprefix(prefix)
    raw = scope.get("raw_path") or scope["path"].encode()
    headers = [(name, value) for name, value in scope["headers"] if name not in OF_BODY]
    return Call(scope["method"], path, raw.removeprefix(prefix.encode()), scope["query_string"], headers, body)


def _without_body(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if name != b"content-type"]


def _without_length(headers: Headers) -> Headers:
    return [(name, value) for name, value in headers if name != b"content-length"]


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    error = in_form_of(request.scope["path"], error)
    response = Response(error.body, error.status, media_type="application/json")
    response.raw_headers.extend(error.headers)
    return response


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = "no such route" if error.status_code == 404 else f"no {request.method} of this route"
    headers = [(name.lower().encode(), value.encode()) for name, value in (error.headers or {}).items()]
    return await _refuse(request, ApiError(error.status_code, f"there is {what}", headers=headers))


async def _crash(request: Request, error: Exception) -> Response:
    """Answers an unexpected exception; Ray logs the traceback."""
    return await _refuse(request, internal())
