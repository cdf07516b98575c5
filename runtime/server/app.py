"""The routes of the server, and the check of API keys."""

import hmac
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from enginewright import __version__
from enginewright.runtime.api.async_llm import AsyncLLM, Structure
from enginewright.runtime.cache.eviction import Retention
from enginewright.runtime.core.engine_kind import refuse_answers
from enginewright.runtime.core.params import default_params
from enginewright.runtime.core.prompts import Conversation, Prompt, check_prompt
from enginewright.runtime.sampling.parameters import SamplingParams
from enginewright.runtime.server.adapter_routes import AdapterRoutes
from enginewright.runtime.server.anthropic_body import read_messages
from enginewright.runtime.server.anthropic_form import AnthropicError, MessagesForm
from enginewright.runtime.server.chat import CHAT_KEYS, ChatForm
from enginewright.runtime.server.completions import COMPLETION_KEYS, CompletionForm
from enginewright.runtime.server.config import tenant_of
from enginewright.runtime.server.cors import Cors
from enginewright.runtime.server.embeddings import EmbeddingBody, RerankBody, ScoreBody, TextsRoute
from enginewright.runtime.server.engines import Engines
from enginewright.runtime.server.errors import ApiError, error_context, internal
from enginewright.runtime.server.form import Form, encode
from enginewright.runtime.server.generation import Generation, template_errors
from enginewright.runtime.server.hosts import HostCheck
from enginewright.runtime.server.keys import Known, UnusedKeys
from enginewright.runtime.server.log import RequestLog
from enginewright.runtime.server.openapi import document
from enginewright.runtime.server.page.routes import Page
from enginewright.runtime.server.protocol import Body, decode
from enginewright.runtime.server.responses_body import read_responses
from enginewright.runtime.server.responses_form import ResponsesForm
from enginewright.runtime.server.responses_store import StoredRoutes
from enginewright.runtime.server.retention import retention_of, session_of
from enginewright.runtime.server.server_info import InfoRoutes
from enginewright.runtime.server.service import Service
from enginewright.runtime.server.tokenization import DETOKENIZE_KEYS, TOKENIZE_KEYS
from enginewright.runtime.server.traces import Traces
from enginewright.runtime.server.wire import ClientGone, header, send_error
from enginewright.runtime.server.work import check_timeout, work_of
from enginewright.runtime.step.work_class import WorkClass
from enginewright.runtime.text.tokenizer import Tokenizer

# Open to everybody, as the page is, so that a supervisor needs no key. Metrics show what clients do, and require one.
HEALTH_PATH = b"/health"


class App:
    """The ASGI application: checks Host header and API key of every request, and passes it to its route."""

    def __init__(self, engines: Engines, hosts: HostCheck) -> None:
        self._engines, self._hosts = engines, hosts
        self._cors = Cors(engines.config.allowed_origins)
        self._keys = [tenant_of(key) for key in engines.config.api_keys]
        endpoint = engines.config.otlp_traces_endpoint
        self._traces = None if endpoint is None else Traces(endpoint)
        page = Page() if engines.config.page else None
        adapters = AdapterRoutes(engines)
        # The routes of adapters check admin keys instead.
        self._open_paths = {HEALTH_PATH, *adapters.paths} | (page.paths if page else set())
        self._starlette = Starlette(
            routes=[
                *ChoicesRoute(engines, ChatForm, CHAT_KEYS).with_render("/v1/chat/completions"),
                *ChoicesRoute(engines, CompletionForm, COMPLETION_KEYS).with_render("/v1/completions"),
                *ResponsesRoute(engines, ResponsesForm).with_render("/v1/responses"),
                *StoredRoutes(engines.responses).routes,
                Route("/v1/messages", MessagesRoute(engines, MessagesForm), methods=["POST"]),
                Route("/v1/messages/count_tokens", self._count_tokens, methods=["POST"]),
                Route("/v1/embeddings", TextsRoute(engines, EmbeddingBody, "embd", "input"), methods=["POST"]),
                *(
                    Route(path, TextsRoute(engines, body, path.rpartition("/")[2], key), methods=["POST"])
                    for body, key, *paths in (
                        (RerankBody, "documents", "/v1/rerank", "/v2/rerank", "/rerank"),
                        (ScoreBody, "text_2", "/v1/score", "/score"),
                    )
                    for path in paths
                ),
                Route("/v1/models", self._list_models),
                Route("/v1/models/{name:path}", self._one_model),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/detokenize", self._detokenize, methods=["POST"]),
                Route("/version", self._version),
                *InfoRoutes(engines).routes,
                *adapters.routes,
                Route("/openapi.json", self._openapi),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                *(page.routes if page else ()),
            ],
            middleware=[Middleware(NotedDepartures)],
            exception_handlers={ApiError: self._refuse, HTTPException: self._no_route, Exception: self._crash},
        )
        self._starlette.router.redirect_slashes = False  # it would go where the Host header says

    def close(self) -> None:
        """Sends the traces that are left, which may take seconds."""
        if self._traces is not None:
            self._traces.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["log"] = log = RequestLog(scope)
        began_ns = time.time_ns()
        try:
            await self._answer(scope, receive, self._cors.with_headers_in(scope, log.with_headers_in(send)))
        finally:
            log.write()
            if self._traces is not None:
                self._traces.add(scope, log, began_ns)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._hosts.check(scope)
            if (permission := self._cors.permission(scope)) is not None:
                await send({"type": "http.response.start", "status": 204, "headers": permission})
                await send({"type": "http.response.body", "body": b""})
                return
            scope["tenant"] = self._tenant(scope)
        except ApiError as error:
            await send_error(send, self._noted(error, scope))
            return
        await self._starlette(scope, receive, send)

    def _tenant(self, scope: Scope) -> str:
        """Tenant of a request, the hash of its API key; without keys all requests belong to one tenant.

        Every key is compared, in a time that depends on none of them. The path is compared as it was sent: neither a
        router nor a Host header can change it.
        """
        if not self._keys or scope["raw_path"] in self._open_paths:
            return ""
        values = header(scope, b"authorization") or [b"bearer " + key for key in header(scope, b"x-api-key")]
        scheme, _, key = (values[0] if len(values) == 1 else b"").partition(b" ")
        given = tenant_of(key.strip())
        known = [hmac.compare_digest(given, one) for one in self._keys]
        if scheme.lower() != b"bearer" or not any(known):
            raise ApiError(
                401,
                "Incorrect API key provided: send one of this server's keys as Authorization: Bearer … or X-Api-Key",
                code="invalid_api_key",
                headers=[(b"www-authenticate", b"Bearer")],
            )
        return given

    async def _list_models(self, request: Request) -> Response:
        return _json(self._engines.cards())

    async def _one_model(self, request: Request) -> Response:
        return _json(self._engines.card(self._engines.find(request.path_params["name"]).name))

    async def _tokenize(self, request: Request) -> Response:
        body = await self._read(request, TOKENIZE_KEYS)
        async with self._use(request, body.model) as llm:
            ids = await _encode(llm, body.text(), add_special_tokens=body.add_special_tokens is not False)
            texts = await llm.decode_each(ids) if body.return_token_strs else None
        return _json({"count": len(ids), "max_model_len": llm.max_model_len, "tokens": ids, "token_strs": texts})

    async def _detokenize(self, request: Request) -> Response:
        body = await self._read(request, DETOKENIZE_KEYS)
        async with self._use(request, body.model) as llm:
            body.check(llm.engine.plan.vocab_size, llm.max_model_len)
            return _json({"prompt": await llm.decode(body.tokens)})

    async def _count_tokens(self, request: Request) -> Response:
        """Number of tokens that POST /v1/messages would show to the model."""
        data = await self._engines.bodies.read(request.scope, request.receive)
        unused = _unused(self._engines, request.scope)
        with unused.places_as_sent():
            messages = read_messages(data, self._engines.max_vocab_size, unused, counted=True)
        with unused.places_as_sent(), error_context(MessagesForm.prompt_key, MessagesForm.renames):
            check_timeout(messages.chat.timeout)
            async with self._use(request, messages.chat.model, messages.chat.timeout) as llm:
                messages.check(llm.engine.tokenizer)
                unused.add_errors(messages.chat.unused(llm.engine.tokenizer), MessagesForm.renames)
                messages.chat.params_for(llm.engine.tokenizer)
                (prompt,) = messages.chat.prompts()
                return _json({"input_tokens": len(await _encode(llm, prompt))})

    async def _read(self, request: Request, known: Known) -> Any:
        """Reads the body of a request that generates no answer."""
        data = await self._engines.bodies.read(request.scope, request.receive)
        return decode(data, known, self._engines.max_vocab_size, _unused(self._engines, request.scope))

    @asynccontextmanager
    async def _use(
        self, request: Request, model: str | None, timeout_s: float | None = None
    ) -> AsyncIterator[AsyncLLM]:
        """The engine that such a request names."""
        async with self._engines.use(model, request.receive, timeout_s) as used:
            request.scope["log"].model = used.name
            yield used.service.llm

    async def _version(self, request: Request) -> Response:
        return _json({"version": __version__})

    async def _openapi(self, request: Request) -> Response:
        return _json(document())

    async def _health(self, request: Request) -> Response:
        closed = self._engines.why_unhealthy()
        if closed is None:
            return _json({"status": "ok"})
        return _json({"status": closed.code, "reason": closed.message}, closed.status)

    async def _metrics(self, request: Request) -> Response:
        content, kind = self._engines.metrics.render(request.headers.get("accept", ""))
        return Response(content, headers={"content-type": kind})

    async def _refuse(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        error = self._noted(error, request.scope)
        response = Response(error.body, error.status, media_type="application/json")
        response.raw_headers.extend(error.headers)
        return response

    def _noted(self, error: ApiError, scope: Scope) -> ApiError:
        """Counts and logs an error, and converts it to the format of the requested API."""
        if scope["path"].startswith("/v1/messages"):
            error = AnthropicError.of(error)
        self._engines.reject(error.status, scope["log"].model)
        scope["log"].failed(error)
        return error

    async def _no_route(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        what = "no such route" if error.status_code == 404 else f"no {request.method} of this route"
        headers = [(name.lower().encode(), value.encode()) for name, value in (error.headers or {}).items()]
        return await self._refuse(request, ApiError(error.status_code, f"there is {what}", headers=headers))

    async def _crash(self, request: Request, error: Exception) -> Response:
        """Answers an unexpected exception; uvicorn logs the traceback."""
        return await self._refuse(request, internal())


class NotedDepartures:
    """Ends the requests of clients that have disconnected, on all routes; their log lines say so.

    Args:
        app: the routes.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except ClientGone:
            scope["log"].is_gone = True


@dataclass(frozen=True)
class ParsedRequest:
    """A request that generates, read and checked."""

    body: Body  # sampling parameters and prompts
    form: Callable[..., Form]  # constructor of the response, called with the arguments of a Form
    check: Callable[[Tokenizer], None] = lambda _: None  # raises ApiError for features that the engine does not have


@dataclass(frozen=True)
class ReadyRequest:
    """A request that generates, and what its open engine makes of it."""

    body: Body  # sampling parameters and prompts
    form: Callable[..., Form]  # constructor of the response, called with the arguments of a Form
    service: Service  # the engine
    prompts: Sequence[Prompt]  # prompts, not yet tokenized
    params: SamplingParams  # sampling parameters, with the model's defaults
    work: WorkClass  # priority and tenant
    retention: Retention  # hint for the KV blocks of prompts and completions
    adapter: Path | None  # file of the adapter; None: the engine's own weights


class CompletionRoute(ABC):
    """POST of one of the APIs that generate.

    Args:
        engines: the engines of the server.
        form: the class of the response.
    """

    def __init__(self, engines: Engines, form: type[Form]) -> None:
        self._engines, self._form = engines, form

    def with_render(self, path: str) -> list[Route]:
        """This route, and the one that shows what the model would read."""
        return [Route(path, self, methods=["POST"]), Route(f"{path}/render", self._render, methods=["POST"])]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived, log = time.perf_counter(), scope["log"]
        async with self._ready(scope, receive) as ready:
            body, service = ready.body, ready.service
            tokenizer = service.llm.engine.tokenizer
            id = f"{self._form.id_prefix}{token_hex(12)}"
            form = ready.form(id, log.model, service.fingerprint, tokenizer, body.include())
            log.request_id = id
            salt = f"{scope['tenant']}{body.cache_salt or ''}"
            parsers, params = partial(body.parsers, tokenizer), ready.params
            structure: Structure | None = partial(body.structure, tokenizer)
            if body.leases_prompt:  # the other server writes the answer
                params = replace(params, max_tokens=1, min_tokens=0, structured_outputs=None)
                structure = None
            generation = Generation(
                service,
                form,
                params,
                arrived,
                log,
                parsers,
                structure,
                ready.work,
                ready.retention,
                body.timeout,
                body.kv_transfer_params,
                ready.adapter,
            )
            await generation.run(ready.prompts, salt, bool(body.stream), receive, send)

    async def _render(self, request: Request) -> Response:
        """Token ids of the prompts that a request would show to the model, in vLLM's form; nothing is computed.

        Routers ask for them to learn which replica has computed a prefix of a prompt.
        """
        async with self._ready(request.scope, request.receive) as ready:
            model, llm = request.scope["log"].model, ready.service.llm
            rendered: list[dict[str, Any]] = []
            for prompt in ready.prompts:
                ids = await _encode(llm, prompt)
                check_prompt(ids, llm.engine.plan.vocab_size, llm.max_model_len)
                id = f"{self._form.id_prefix}{token_hex(12)}"
                rendered.append({"request_id": id, "model": model, "token_ids": ids, "features": None})
        return _json(rendered if self._form is CompletionForm else rendered[0])

    @asynccontextmanager
    async def _ready(self, scope: Scope, receive: Receive) -> AsyncIterator[ReadyRequest]:
        """Reads and checks a request, and keeps its engine open. Raises ApiError if it is not valid."""
        data = await self._engines.bodies.read(scope, receive)
        unused, prompt_key, renames = _unused(self._engines, scope), self._form.prompt_key, self._form.renames
        with unused.places_as_sent():
            request = self._read(data, scope["tenant"], unused)
        body = request.body
        structures = {"structured_outputs": body.structure_key}
        with unused.places_as_sent(), error_context(prompt_key, renames), error_context(prompt_key, structures):
            work, session = work_of(scope, body.priority), session_of(scope, body.session_id)
            retention = retention_of(body.ttl_s, session, work)
            scope["log"].named_session(session)
            check_timeout(body.timeout)
            async with self._engines.use(body.model, receive, body.timeout) as (model, service, adapter):
                scope["log"].model, engine = model, service.llm.engine
                refuse_answers(engine)
                request.check(engine.tokenizer)
                unused.add_errors(body.unused(engine.tokenizer), renames)
                prompts = body.prompts()
                params = default_params(engine, **body.params_for(engine.tokenizer))
                yield ReadyRequest(body, request.form, service, prompts, params, work, retention, adapter)

    @abstractmethod
    def _read(self, data: bytes, tenant: str, unused: UnusedKeys) -> ParsedRequest:
        """Parses a request. Raises ApiError if it is not valid in this API."""


class ChoicesRoute(CompletionRoute):
    """POST of an API whose bodies are read directly.

    Args:
        engines: the engines of the server.
        form: the class of the response.
        known: the table of the body's keys.
    """

    def __init__(self, engines: Engines, form: type[Form], known: Known) -> None:
        super().__init__(engines, form)
        self._known = known

    def _read(self, data: bytes, tenant: str, unused: UnusedKeys) -> ParsedRequest:
        return ParsedRequest(decode(data, self._known, self._engines.max_vocab_size, unused), self._form)


class MessagesRoute(CompletionRoute):
    """POST of Anthropic's API."""

    def _read(self, data: bytes, tenant: str, unused: UnusedKeys) -> ParsedRequest:
        messages = read_messages(data, self._engines.max_vocab_size, unused)
        return ParsedRequest(messages.chat, self._form, messages.check)


class ResponsesRoute(CompletionRoute):
    """POST of the Responses API."""

    def _read(self, data: bytes, tenant: str, unused: UnusedKeys) -> ParsedRequest:
        store, vocab_size = self._engines.responses, self._engines.max_vocab_size
        conversation = partial(store.conversation, tenant)
        request = read_responses(data, vocab_size, unused, conversation, may_store=store.max_count > 0)
        return ParsedRequest(request.chat, partial(ResponsesForm, request, partial(store.put, tenant)))


def _unused(engines: Engines, scope: Scope) -> UnusedKeys:
    """The unused keys of a request, which its response and its log line name."""
    unused = scope["log"].unused = UnusedKeys(is_strict=engines.config.strict_keys)
    return unused


async def _encode(llm: AsyncLLM, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
    key = "messages" if isinstance(prompt, Conversation) else "prompt"
    with error_context(key, {}), template_errors(prompt):
        return await llm.encode(prompt, add_special_tokens=add_special_tokens)


def _json(content: dict[str, Any] | list[dict[str, Any]], status: int = 200) -> Response:
    return Response(encode(content), status, media_type="application/json")
