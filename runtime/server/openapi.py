"""GET /openapi.json: describes the routes in OpenAPI's format, from the structs that bodies are read into."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from enginewright import __version__
from enginewright.runtime.server import anthropic_body, chat, responses_body
from enginewright.runtime.server.anthropic_body import MessagesBody
from enginewright.runtime.server.chat import ChatBody
from enginewright.runtime.server.completions import CompletionBody
from enginewright.runtime.server.embeddings import EmbeddingBody, RerankBody, ScoreBody
from enginewright.runtime.server.responses_body import ResponsesBody
from enginewright.runtime.server.tokenization import DetokenizeBody, TokenizeBody

Schema = dict[str, Any]

REFS = "#/components/schemas/{name}"
JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"
OPEN_METRICS = "application/openmetrics-text"
# Errors that any request may get: for its Host header, its key, or its path.
COMMON_ERRORS = (400, 401, 403)
BODY_ERRORS = (404, 408, 413, 415, 429, 500, 503, 504)
REASONS = {
    400: "The request is wrong: param says where.",
    401: "The API key is unknown.",
    403: "The Host header is none of the server's names.",
    404: "There is no such thing.",
    408: "The body was not received in time.",
    413: "The body is too long.",
    415: "The body is not JSON, or its encoding is not supported.",
    429: "The server is busy: Retry-After says when to come back.",
    500: "The server, or the engine, has failed.",
    503: "The engine cannot be used now.",
    504: "The timeout of the request is over.",
    529: "The engine cannot be used now.",
}
ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
ANTHROPIC_ERROR: Schema = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}


class Operation(NamedTuple):
    """A method of a route."""

    path: str  # path of the route
    summary: str  # description for people
    answer: Sequence[str]  # keys that a response always has
    body: type[msgspec.Struct] | None = None  # struct of the request's body; None for a GET
    is_list: bool = False  # True if a response is a list of such objects
    streams: bool = False  # True if the response may be a stream of events
    method: str = "post"  # HTTP method in lower case
    query: Mapping[str, Schema] = {}  # schemas of the query's parameters, by name
    errors: Sequence[int] = ()  # HTTP statuses in addition to those that all such operations may give


CHAT_KEYS = ("id", "object", "created", "model", "choices", "usage")
LIST_KEYS = ("object", "data")
PAGE_QUERY: Mapping[str, Schema] = {
    "after": {"type": "string"},
    "limit": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20},
    "order": {"enum": ["asc", "desc"], "default": "desc"},
}
OPERATIONS = (
    Operation("/v1/chat/completions", "Chat completion", CHAT_KEYS, ChatBody, streams=True),
    Operation("/v1/completions", "Text completion", CHAT_KEYS, CompletionBody, streams=True),
    Operation("/v1/responses", "Response", ("id", "object", "output"), ResponsesBody, streams=True),
    *(Operation(f"{path}/render", "Token ids that such a request shows to the model", ("request_id", "token_ids"), body,
                is_list=body is CompletionBody)
      for path, body in (("/v1/chat/completions", ChatBody), ("/v1/completions", CompletionBody),
                         ("/v1/responses", ResponsesBody))),
    Operation("/v1/responses/{id}", "A kept response", ("id", "output"), method="get", errors=(404,)),
    Operation("/v1/responses/{id}", "Forget a response", ("id", "deleted"), method="delete", errors=(404,)),
    Operation("/v1/responses/{id}/input_items", "What a kept response answers", LIST_KEYS, None, method="get",
              query=PAGE_QUERY, errors=(404,)),
    Operation("/v1/messages", "Message, in Anthropic's form", ("id", "type", "content"), MessagesBody, streams=True),
    Operation("/v1/messages/count_tokens", "Tokens of a message's input", ("input_tokens",), MessagesBody),
    Operation("/v1/embeddings", "Vectors of texts", (*LIST_KEYS, "model", "usage"), EmbeddingBody),
    *(Operation(path, "Documents by how well they fit a query", ("results",), RerankBody)
      for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
    *(Operation(path, "How well texts go together", (*LIST_KEYS, "usage"), ScoreBody)
      for path in ("/v1/score", "/score")),
    Operation("/v1/models", "Models", (*LIST_KEYS, "has_more"), method="get"),
    Operation("/v1/models/{name}", "A model", ("id", "state"), method="get", errors=(404,)),
    Operation("/tokenize", "Token ids of a text or of messages", ("count", "tokens"), TokenizeBody),
    Operation("/detokenize", "Text of token ids", ("prompt",), DetokenizeBody),
    Operation("/version", "Version of the server", ("version",), method="get"),
    *(Operation(path, "Facts of an engine for routers", ("model_path", "vllm_config"), method="get",
                query={"model": {"type": "string"}}, errors=(404,))
      for path in ("/server_info", "/get_server_info")),
    Operation("/v1/loads", "Load of the open engines for routers", ("timestamp", "loads"), method="get"),
    Operation("/get_load", "Number of running and waiting completions", ("load",), method="get"),
    Operation("/health", "Whether requests are taken", ("status",), method="get", errors=(503,)),
    Operation("/openapi.json", "This document", ("openapi", "paths"), method="get"),
)  # fmt: skip
METRICS: Schema = {
    "description": "Metrics.",
    "content": {kind: {"schema": {"type": "string"}} for kind in (TEXT, OPEN_METRICS)},
}


def document() -> Schema:
    """The complete OpenAPI document."""
    bodies = {operation.body: None for operation in OPERATIONS if operation.body is not None}
    messages = {
        ChatBody: chat.Message,
        MessagesBody: anthropic_body.AnthropicMessage,
    }  # bodies keep them undecoded at first
    items, schemas = msgspec.json.schema_components([*messages.values(), *bodies], ref_template=REFS)
    for body, item in zip(messages, items, strict=False):
        schemas[body.__name__]["properties"]["messages"]["items"] = item
    for kind, same in ((MessagesBody, anthropic_body.SHARED_KEYS), (ResponsesBody, responses_body.SHARED_KEYS)):
        of_chat = schemas["ChatBody"]["properties"]
        schemas[kind.__name__]["properties"] |= {name: of_chat[name] for name in same}
    schemas |= {"Error": ERROR, "AnthropicError": ANTHROPIC_ERROR}
    paths: dict[str, Schema] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    responses = {"200": METRICS} | _errors("/metrics", COMMON_ERRORS)
    paths["/metrics"] = {"get": {"summary": "Metrics, in Prometheus' form", "responses": responses}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "enginewright", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _operation(operation: Operation) -> Schema:
    answer: Schema = {"type": "object", "required": list(operation.answer)}
    if operation.is_list:
        answer = {"type": "array", "items": answer}
    content: Schema = {JSON: {"schema": answer}}
    if operation.streams:
        content[EVENTS] = {"schema": {"description": "Events, whose data are JSON."}}
    errors = (*COMMON_ERRORS, *operation.errors, *(BODY_ERRORS if operation.body is not None else ()))
    responses = {"200": {"description": "Done.", "content": content}} | _errors(operation.path, errors)
    described: Schema = {"summary": operation.summary, "responses": responses}
    parameters = [
        {"name": part[1:-1], "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for part in operation.path.split("/")
        if part.startswith("{")
    ]
    parameters += [
        {"name": name, "in": "query", "required": False, "schema": schema} for name, schema in operation.query.items()
    ]
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None:
        schema = {"$ref": REFS.format(name=operation.body.__name__)}
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    return described


def _errors(path: str, statuses: Sequence[int]) -> Schema:
    if path == "/health":  # its errors have a format of their own, and it needs no key
        return {
            str(status): {"description": REASONS[status], "content": {JSON: {"schema": {"type": "object"}}}}
            for status in statuses
            if status != 401
        }
    is_anthropic = path.startswith("/v1/messages")
    schema = {"$ref": REFS.format(name="AnthropicError" if is_anthropic else "Error")}
    statuses = [529 if is_anthropic and status == 503 else status for status in statuses]
    return {str(status): {"description": REASONS[status], "content": {JSON: {"schema": schema}}} for status in statuses}
