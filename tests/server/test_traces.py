"""Spans of requests, as a collector gets them by OTLP over HTTP."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from enginewright.errors import EngineError, UsageError
from enginewright.runtime.server.config import ServerConfig
from enginewright.runtime.server.traces import Traces
from tests.helpers.serving import CHAT, COMPLETIONS, HELLO, running

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """A collector's URL, and the spans that it gets, with the resource's attributes."""
    spans = list[Any]()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces" and self.headers["Content-Type"] == "application/x-protobuf"
            data = self.rfile.read(int(self.headers["Content-Length"]))
            for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
                for scope in resource.scope_spans:
                    spans.extend((span, attributes(resource.resource)) for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
        finally:
            server.shutdown()
            thread.join()


def attributes(of: Any) -> dict[str, Any]:
    def value(given: Any) -> Any:
        kind = given.WhichOneof("value")
        return [value(one) for one in given.array_value.values] if kind == "array_value" else getattr(given, kind)

    return {one.key: value(one.value) for one in of.attributes}


def test_spans_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    with collector() as (endpoint, spans):
        began = time.time_ns()
        with running(otlp_traces_endpoint=endpoint) as server:
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=b"}
            body = {
                "messages": HELLO,
                "max_tokens": 5,
                "ignore_eos": True,
                "temperature": 0.5,
                "seed": 3,
                "stop": "zzz",
            }
            chat = server.post(CHAT, body, headers).json
            server.complete("x", max_tokens=3, n=2, stream=True)
            server.post(COMPLETIONS, {"prompt": "x", "temperature": -1})
            server.post(CHAT, body, {"traceparent": f"00-{TRACE}-{PARENT}-00"})  # its trace is not recorded
            server.post("/tokenize", {"prompt": "x"})
            server.ask("GET", "/v1/models")
    assert all(began <= span.start_time_unix_nano < span.end_time_unix_nano <= time.time_ns() for span, _ in spans)
    (first, resource), (second, _), (third, _) = spans
    assert resource["service.name"] == "enginewright" and {"service.version", "telemetry.sdk.name"} <= resource.keys()
    assert (first.trace_id.hex(), first.parent_span_id.hex(), first.trace_state) == (TRACE, PARENT, "a=b")
    assert second.trace_id.hex() not in (TRACE, "") and second.parent_span_id == b""
    assert [span.name for span, _ in spans] == ["chat tiny", "text_completion tiny", "text_completion tiny"]
    found = attributes(first)
    times = {key: found.pop(key) for key in list(found) if key.startswith("gen_ai.latency.")}
    assert 0 <= times["gen_ai.latency.time_in_queue"] <= times["gen_ai.latency.time_to_first_token"]
    assert times["gen_ai.latency.time_to_first_token"] <= times["gen_ai.latency.e2e"]
    prompt_tokens = chat["usage"]["prompt_tokens"]
    assert found == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "enginewright",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.id": chat["id"],
        "gen_ai.request.id": chat["id"],
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": prompt_tokens,
        "gen_ai.usage.prompt_tokens": prompt_tokens,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.completion_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.n": 1,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": found["gen_ai.request.top_k"],
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.seed": 3,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.stop_sequences": ["zzz"],
        "http.request.method": "POST",
        "http.route": CHAT,
        "http.response.status_code": 200,
    }
    assert attributes(second)["gen_ai.usage.output_tokens"] == 6
    refused = attributes(third)
    assert (refused["http.response.status_code"], refused["error.type"]) == (400, "400")
    assert third.status.code == 0, "what a client has done wrong is no error of the server's"


def test_a_collector_that_is_not_there() -> None:
    """Answers come all the same, and the server ends."""
    with running(otlp_traces_endpoint="http://127.0.0.1:9/v1/traces") as server:
        server.complete("x", max_tokens=1)


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="must be a URL with its path"):
        ServerConfig(otlp_traces_endpoint="localhost:4317")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(EngineError, match=r"OpenTelemetry is not installed[\s\S]*enginewright\[otel\]"):
        Traces("http://127.0.0.1:4318/v1/traces")
