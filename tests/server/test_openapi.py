"""GET /openapi.json: all routes, and bodies as they are read. tests/long/test_openapi.py sends what it describes."""

import re
from typing import Any

from jsonschema import Draft202012Validator
from starlette.routing import Route

from enginewright.runtime.server.app import App
from enginewright.runtime.server.hosts import HostCheck
from tests.helpers.serving import CHAT, HELLO, running


def test_it_has_every_route_and_no_other() -> None:
    with running(page=False) as server:
        described = server.ask("GET", "/openapi.json").json
        for path, methods in described["paths"].items():
            for method in methods:
                status = server.ask(
                    method.upper(), re.sub(r"{\w+}", "none", path), b"{" if method == "post" else None
                ).status
                assert status in ({400} if method == "post" else {200, 404}), path
                assert str(status) in methods[method]["responses"], path
    routes = {
        (re.sub(r":\w+}", "}", route.path), method.lower())
        for route in App(server.engines, HostCheck("127.0.0.1", "127.0.0.1", ()))._starlette.routes
        if isinstance(route, Route)
        for method in route.methods or ("GET", "POST")
        if method != "HEAD"
    }
    ours = {(path, method) for path, methods in described["paths"].items() for method in methods}
    assert routes == ours


def test_every_key_of_a_body_is_described() -> None:
    """Keys that a body shares with a chat are described too."""
    with running() as server:
        schemas = server.ask("GET", "/openapi.json").json["components"]["schemas"]
    responses, messages = (schemas[name]["properties"] for name in ("ResponsesBody", "MessagesBody"))
    assert {"input", "include", "top_logprobs", "temperature", "timeout"} <= responses.keys()
    assert {"messages", "stop_sequences", "max_tokens", "temperature", "timeout"} <= messages.keys()
    assert responses["top_logprobs"]["anyOf"][0] == {"type": "integer"}


def test_bodies_are_described_as_they_are_read() -> None:
    with running() as server:
        described = server.ask("GET", "/openapi.json").json
        schema = described["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
        validator: Any = Draft202012Validator({**schema, "components": described["components"]})
        for body, holds in (
            ({"messages": HELLO, "max_tokens": 1}, True),
            ({"messages": [{"role": "user", "content": 5}]}, False),
            ({"messages": HELLO, "temperature": "hot"}, False),
            ({"max_tokens": 1}, False),
        ):
            assert validator.is_valid(body) is holds
            assert server.post(CHAT, body).status == (200 if holds else 400)
