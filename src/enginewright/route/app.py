"""The routes of the proxy: those of replicas, and its own /health and /metrics."""

import asyncio
import logging
from collections.abc import Awaitable
from hashlib import sha256
from secrets import token_hex
from typing import Any
from urllib.parse import quote

import httpx2
import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from enginewright.route.fleet import Fleet
from enginewright.route.forward import Forward, no_replica
from enginewright.route.metrics import RouteMetrics
from enginewright.route.paths import GETS, KEPT, MAX_ID_CHARS, POSTS
from enginewright.route.prefixes import UNREADABLE, read_body, tenant_of
from enginewright.route.replica import Replica, read_whole
from enginewright.route.reply import in_form_of
from enginewright.route.request import Answer, RoutedRequest, passed_headers
from enginewright.runtime.server.errors import ApiError, internal, shutting_down
from enginewright.runtime.server.form import encode
from enginewright.runtime.server.hosts import HostCheck
from enginewright.runtime.server.log import CLIENT_GONE, MAX_PATH_CHARS, REQUEST_ID, log_event
from enginewright.runtime.server.retention import session_of
from enginewright.runtime.server.wire import BodyReader, ClientGone, header, send_error

ID_HEADER = b"x-request-id"
MAX_MODELS_BYTES = 1 << 20  # size of a replica's list of models
ASK_S = 5.0  # seconds for each replica to answer what all are asked


class RouteApp:
    """The ASGI application of the proxy.

    Args:
        fleet: the replicas.
        hosts: the check of the Host header.
    """

    def __init__(self, fleet: Fleet, hosts: HostCheck) -> None:
        self._fleet, self._hosts = fleet, hosts
        self._bodies = BodyReader(fleet.config.max_body_bytes)
        self._metrics = RouteMetrics(fleet)
        self._starlette = Starlette(
            routes=[
                *(Route(path, _Proxied(self, path), methods=["POST"]) for path in POSTS),
                *(Route(path, _Proxied(self, path), methods=["GET"]) for path in GETS),
                Route(KEPT, _Proxied(self, KEPT), methods=["GET", "DELETE"]),
                Route(f"{KEPT}/input_items", _Proxied(self, f"{KEPT}/input_items"), methods=["GET"]),
                Route("/v1/models", self._models),
                Route("/health", self._health),
                Route("/metrics", self._show_metrics),
            ],
            exception_handlers={ApiError: self._refuse, HTTPException: self._no_route, Exception: self._crash},
        )
        self._starlette.router.redirect_slashes = False  # it would go where the Host header says

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = header(scope, ID_HEADER)
        is_given = len(given) == 1 and REQUEST_ID.fullmatch(given[0]) is not None
        scope["request_id"] = id = given[0] if is_given else token_hex(16).encode()

        def with_id(message: Message) -> Awaitable[None]:  # a plain function saves a coroutine per message
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (ID_HEADER, id)]}
            return send(message)

        try:
            self._hosts.check(scope)
            if {".", ".."} & set(scope["path"].split("/")):  # a server between us and a replica might go up by them
                raise ApiError(404, "there is no such route")
        except ApiError as error:
            self._fleet.reject(error.status, None)
            await send_error(with_id, in_form_of(scope["path"], error))
            return
        await self._starlette(scope, receive, with_id)

    async def forward(self, route: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, and logs it.

        Args:
            route: the path of its route.
            scope: the ASGI scope.
            receive: the ASGI channel from the client.
            send: the ASGI channel to the client.

        Raises:
            ApiError: the body is refused, or the proxy ends.
        """
        if self._fleet.draining:
            raise shutting_down(self._fleet.config.drain_seconds)
        status = CLIENT_GONE
        try:
            body = await self._bodies.read(scope, receive) if scope["method"] == "POST" else None
            request, kept_id = _routed(route, scope, body)
            among = self._fleet.replicas
            if kept_id is not None:
                among = await self._keepers(request, kept_id)
            forward = Forward(self._fleet, request, among)
            await forward.run(receive, send)
            status = forward.status
        except ClientGone:
            pass
        except ApiError as error:
            status = error.status
            raise
        finally:
            self._fleet.answers[route, str(status)] += 1
            fields = {"client_request_id": scope["request_id"].decode(), "status": status, "path": route}
            log_event(logging.INFO, "routed", fields, limited=str(status))

    async def _keepers(self, request: RoutedRequest, id: str) -> list[Replica]:
        """The replica that keeps a response; all replicas if none says that it does, since they say why.

        Args:
            request: the request.
            id: the id of the response.
        """
        target = b"/v1/responses/" + quote(id, safe="").encode()
        asked = RoutedRequest(request.route, "HEAD", target, _without_body(request.headers))
        healthy = self._fleet.healthy
        if len(healthy) > 1 and 0 < len(id) <= MAX_ID_CHARS:
            answers = await asyncio.gather(*(_ask(replica, asked) for replica in healthy))
            found = [replica for replica, one in zip(healthy, answers, strict=True) if one and one.status == 200]
            if found:
                return found
        return self._fleet.replicas

    async def _models(self, request: Request) -> Response:
        """The models of all replicas, each once."""
        if self._fleet.draining:
            raise shutting_down(self._fleet.config.drain_seconds)
        asked, _ = _routed("/v1/models", request.scope, None)
        found = await asyncio.gather(*(_ask(replica, asked) for replica in self._fleet.healthy))
        answers = [one for one in found if one is not None]
        models: dict[str, Any] = {}
        for one in answers:
            for card in _cards(one) if one.status == 200 else ():
                models.setdefault(card["id"], card)
        if not models and answers:  # such as 401
            refused = Response(answers[0].body, answers[0].status)
            refused.raw_headers.extend(answers[0].headers)
            return refused
        if not models:
            raise no_replica()
        names = list(models)
        ends = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return Response(encode({"object": "list", "data": [*models.values()], **ends}), media_type="application/json")

    async def _health(self, request: Request) -> Response:
        num_healthy = len(self._fleet.healthy)
        is_ok = num_healthy > 0 and not self._fleet.draining
        status = "ok" if is_ok else "server_shutdown" if self._fleet.draining else "no_replica"
        body = encode({"status": status, "replicas": num_healthy})
        return Response(body, 200 if is_ok else 503, media_type="application/json")

    async def _show_metrics(self, request: Request) -> Response:
        content, kind = self._metrics.render(request.headers.get("accept", ""))
        return Response(content, headers={"content-type": kind})

    async def _refuse(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        error = in_form_of(request.scope["path"], error)
        response = Response(error.body, error.status, media_type="application/json")
        response.raw_headers.extend(error.headers)
        return response

    async def _no_route(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        self._fleet.reject(error.status_code, None)
        path = request.scope["path"][:MAX_PATH_CHARS]
        what = "no such route" if error.status_code == 404 else f"no {request.method} of this route"
        log_event(logging.INFO, "refused", {"status": error.status_code, "path": path}, limited=str(error.status_code))
        headers = [(name.lower().encode(), value.encode()) for name, value in (error.headers or {}).items()]
        return await self._refuse(request, ApiError(error.status_code, f"there is {what}", headers=headers))

    async def _crash(self, request: Request, error: Exception) -> Response:
        """Answers an unexpected exception; uvicorn logs the traceback."""
        return await self._refuse(request, internal())


class _Proxied:
    """A route that is passed on; its answer is sent as it comes."""

    def __init__(self, app: RouteApp, path: str) -> None:
        self._app, self._path = app, path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app.forward(self._path, scope, receive, send)


def _routed(route: str, scope: Scope, body: bytes | None) -> tuple[RoutedRequest, str | None]:
    """A request as replicas get it, and the id of the kept response that it is about, if any."""
    query = scope["query_string"]
    target = scope["raw_path"] + (b"?" + query if query else b"")
    headers = [*passed_headers(scope["headers"]), (ID_HEADER, scope["request_id"])]
    if body is None:
        return RoutedRequest(route, scope["method"], target, _without_body(headers)), scope["path_params"].get("id")
    keys = read_body(body)
    tenant = tenant_of(scope)
    named = session_of(scope, keys.session)
    session = None if named is None else sha256(tenant + named.encode()).digest()
    return RoutedRequest(route, scope["method"], target, headers, body, keys.keys(tenant), session), keys.kept_id


def _without_body(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if name != b"content-type"]


async def _ask(replica: Replica, request: RoutedRequest) -> Answer | None:
    """A short answer of one replica; None if it has none now."""
    try:
        async with asyncio.timeout(ASK_S), replica.attempt(request.to(replica)) as response:
            body = await read_whole(response, MAX_MODELS_BYTES)
            return Answer(response.status_code, passed_headers(response.headers.raw), body)
    except (httpx2.TransportError, TimeoutError):
        return None


def _cards(answer: Answer) -> list[dict[str, Any]]:
    """The models of a replica."""
    try:
        cards = msgspec.json.decode(answer.body, type=dict[str, Any]).get("data")
    except UNREADABLE:
        return []
    good = cards if isinstance(cards, list) else []
    return [card for card in good if isinstance(card, dict) and isinstance(card.get("id"), str)]
