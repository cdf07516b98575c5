"""The routes, and who may use them."""

import hmac
import time
from functools import partial
from hashlib import sha256
from secrets import token_hex
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from enginewright import __version__
from enginewright.errors import UsageError
from enginewright.runtime.params import default_params
from enginewright.runtime.server.chat import ChatBody, ChatForm
from enginewright.runtime.server.completions import CompletionBody, CompletionForm
from enginewright.runtime.server.errors import ApiError, from_engine, internal
from enginewright.runtime.server.form import Form, encode
from enginewright.runtime.server.generation import Generation
from enginewright.runtime.server.hosts import HostCheck
from enginewright.runtime.server.log import RequestLog
from enginewright.runtime.server.protocol import Body, decode
from enginewright.runtime.server.service import Service
from enginewright.runtime.server.tokenization import DetokenizeBody, TokenizeBody
from enginewright.runtime.server.wire import ClientGone, header, read_body, send_error

B = TypeVar("B", TokenizeBody, DetokenizeBody)

OPEN_PATH = b"/health"  # to anybody: who restarts servers needs no key. Metrics tell what clients do, and want one.


class App:
    """The ASGI application. Every request passes here first, where the Host header and the key are looked at."""

    def __init__(self, service: Service, hosts: HostCheck) -> None:
        self._service, self._hosts = service, hosts
        self._keys = [sha256(key.encode()).hexdigest() for key in service.config.api_keys]
        self._starlette = Starlette(
            routes=[
                Route("/v1/chat/completions", CompletionRoute(service, ChatBody, ChatForm), methods=["POST"]),
                Route("/v1/completions", CompletionRoute(service, CompletionBody, CompletionForm), methods=["POST"]),
                Route("/v1/models", self._list_models),
                Route("/v1/models/{name:path}", self._one_model),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/detokenize", self._detokenize, methods=["POST"]),
                Route("/version", self._version),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
            ],
            exception_handlers={ApiError: self._refuse, HTTPException: self._no_route, Exception: self._crash},
        )
        self._starlette.router.redirect_slashes = False  # it would go where the Host header says

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["log"] = log = RequestLog(scope)
        try:
            await self._answer(scope, receive, log.returning(send))
        finally:
            log.write()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._hosts.check(scope)
            scope["tenant"] = self._tenant(scope)
        except ApiError as error:
            self._service.metrics.rejected[error.status] += 1
            scope["log"].error = error
            await send_error(send, error)
            return
        await self._starlette(scope, receive, send)

    def _tenant(self, scope: Scope) -> str:
        """Whose request it is: each key is one, and without keys all are one.

        Every key is compared, in a time that depends on none of them. The path is the one that came over the wire:
        nothing that a router or a Host header makes of it plays a part.
        """
        if not self._keys or scope["raw_path"] == OPEN_PATH:
            return ""
        values = header(scope, b"authorization")
        scheme, _, key = (values[0] if len(values) == 1 else b"").partition(b" ")
        given = sha256(key.strip()).hexdigest()
        known = [hmac.compare_digest(given, one) for one in self._keys]
        if scheme.lower() != b"bearer" or not any(known):
            raise ApiError(
                401,
                "Incorrect API key provided: send one of this server's keys as Authorization: Bearer …",
                code="invalid_api_key",
                headers=[(b"www-authenticate", b"Bearer")],
            )
        return given

    async def _list_models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._model(name) for name in self._service.models]})

    async def _one_model(self, request: Request) -> Response:
        return _json(self._model(self._service.check_model(request.path_params["name"])))

    def _model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._service.started,
            "owned_by": "enginewright",
            "root": self._service.models[0],
            "max_model_len": self._service.llm.max_model_len,
        }

    async def _tokenize(self, request: Request) -> Response:
        body, llm = await self._read(request, TokenizeBody), self._service.llm
        try:
            ids = await llm.encode(body.text(), add_special_tokens=body.add_special_tokens is not False)
        except UsageError as error:
            raise from_engine(error, "prompt" if body.messages is None else "messages") from None
        texts = await llm.decode_each(ids) if body.return_token_strs else None
        return _json({"count": len(ids), "max_model_len": llm.max_model_len, "tokens": ids, "token_strs": texts})

    async def _detokenize(self, request: Request) -> Response:
        body, llm = await self._read(request, DetokenizeBody), self._service.llm
        body.check(llm.engine.plan.vocab_size, llm.max_model_len)
        return _json({"prompt": await llm.decode(body.tokens)})

    async def _read(self, request: Request, kind: type[B]) -> B:
        """The body of a request that no answer is generated for."""
        data = await read_body(request.scope, request.receive, self._service.config.max_body_bytes)
        body = decode(data, kind, self._service.llm.engine.plan.vocab_size)
        if closed := self._service.why_closed():
            raise closed
        self._service.check_model(body.model)
        return body

    async def _version(self, request: Request) -> Response:
        return _json({"version": __version__})

    async def _health(self, request: Request) -> Response:
        closed = self._service.why_unhealthy()
        if closed is None:
            return _json({"status": "ok"})
        return _json({"status": closed.code, "reason": closed.message}, closed.status)

    async def _metrics(self, request: Request) -> Response:
        content, kind = self._service.metrics.render(request.headers.get("accept", ""))
        return Response(content, headers={"content-type": kind})

    async def _refuse(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        self._service.metrics.rejected[error.status] += 1
        request.scope["log"].error = error
        response = Response(error.body, error.status, media_type="application/json")
        response.raw_headers.extend(error.headers)
        return response

    async def _no_route(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        what = "no such route" if error.status_code == 404 else f"no {request.method} of this route"
        headers = [(name.lower().encode(), value.encode()) for name, value in (error.headers or {}).items()]
        return await self._refuse(request, ApiError(error.status_code, f"there is {what}", headers=headers))

    async def _crash(self, request: Request, error: Exception) -> Response:
        """uvicorn logs the traceback."""
        return await self._refuse(request, internal())


class CompletionRoute:
    """POST of one of the two completion APIs.

    Args:
        body: the type of the request's body.
        form: the type of the response's JSON.
    """

    def __init__(self, service: Service, body: type[Body], form: type[Form]) -> None:
        self._service, self._body, self._form = service, body, form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived, service, log = time.perf_counter(), self._service, scope["log"]
        try:
            data = await read_body(scope, receive, service.config.max_body_bytes)
            body = decode(data, self._body, service.llm.engine.plan.vocab_size)
            closed = service.why_closed()
            if closed is not None:
                raise closed
            model, prompts = service.check_model(body.model), body.prompts()
            tokenizer = service.llm.engine.tokenizer
            params = default_params(service.llm.engine, **body.params_for(tokenizer))
            form = self._form(
                f"{self._form.id_prefix}{token_hex(12)}",
                model,
                service.fingerprint,
                tokenizer,
                body.include(),
            )
            log.request_id, log.model = form.id, model
            salt = f"{scope['tenant']}{body.cache_salt or ''}"
            generation = Generation(service, form, params, arrived, log, partial(body.parsers, tokenizer))
            await generation.run(prompts, salt, bool(body.stream), receive, send)
        except UsageError as error:
            raise from_engine(error, self._form.prompt_key) from None
        except ClientGone:
            log.is_gone = True


def _json(content: dict[str, Any], status: int = 200) -> Response:
    return Response(encode(content), status, media_type="application/json")
