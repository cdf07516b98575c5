"""Sends spans of requests to an OpenTelemetry collector, by OTLP over HTTP."""

import time
from collections.abc import Mapping
from typing import Any

from starlette.types import Scope

from enginewright import __version__
from enginewright.errors import EngineError
from enginewright.runtime.server.log import RequestLog
from enginewright.runtime.server.wire import header

EXPORT_TIMEOUT_S = 5.0  # seconds to send a batch, including the last one when the server ends
OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion", "/v1/responses": "chat"}
OPERATIONS |= {"/v1/messages": "chat", "/v1/embeddings": "embeddings", "/v1/score": "score", "/score": "score"}
OPERATIONS |= {"/v1/rerank": "rerank", "/v2/rerank": "rerank", "/rerank": "rerank"}
# Attributes by the fields of the request's log line.
FIGURES = {
    "prompt_tokens": ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens"),
    "output_tokens": ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens"),
    "cached_tokens": ("gen_ai.usage.cache_read.input_tokens",),
    "n": ("gen_ai.request.choice.count", "gen_ai.request.n"),
    "queue_s": ("gen_ai.latency.time_in_queue",),
    "first_token_s": ("gen_ai.latency.time_to_first_token",),
    "total_s": ("gen_ai.latency.e2e",),
}
PARAMS = ("temperature", "top_p", "top_k", "max_tokens", "seed", "frequency_penalty", "presence_penalty")


class Traces:
    """Sends a span for each request for an engine, including refused ones; nothing waits for it.

    Args:
        endpoint: the URL of a collector, with its path: http://127.0.0.1:4318/v1/traces.

    Raises:
        EngineError: OpenTelemetry is not installed.
    """

    def __init__(self, endpoint: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind, Status, StatusCode
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            why = f"OpenTelemetry is not installed ({error})"
            raise EngineError("traces cannot be sent", why, "pip install 'enginewright[otel]'") from error
        ours = Resource.create({"service.name": "enginewright", "service.version": __version__})
        self._provider = TracerProvider(resource=ours.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("enginewright", __version__)
        self._context_of = TraceContextTextMapPropagator().extract
        self._kind, self._failed = SpanKind.SERVER, Status(StatusCode.ERROR)

    def close(self) -> None:
        """Sends what is left, for at most EXPORT_TIMEOUT_S."""
        self._provider.shutdown()

    def add(self, scope: Scope, log: RequestLog, began_ns: int) -> None:
        """Queues the span of a request that has ended.

        Args:
            scope: the ASGI scope.
            log: the log line of the request.
            began_ns: arrival of the request, in nanoseconds since 1970.
        """
        operation = OPERATIONS.get(scope["path"])
        if operation is None or scope["method"] != "POST":
            return
        name = operation if log.model is None else f"{operation} {log.model}"
        context = self._context_of(_parent(scope))
        span = self._tracer.start_span(
            name, context, self._kind, _attributes(scope, log, operation), start_time=began_ns
        )
        if log.status >= 500:
            span.set_status(self._failed)
        span.end(time.time_ns())


def _parent(scope: Scope) -> Mapping[str, str]:
    """Headers that name the parent span of a request."""
    given = {name: header(scope, name.encode()) for name in ("traceparent", "tracestate")}
    return {name: ",".join(value.decode("latin-1") for value in values) for name, values in given.items() if values}


def _attributes(scope: Scope, log: RequestLog, operation: str) -> dict[str, Any]:
    """Attributes of a span that are known."""
    figures = log.figures or {}
    found: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "enginewright",
        "gen_ai.request.model": log.model,
        "gen_ai.response.model": log.model,
        "gen_ai.response.id": log.request_id,
        "gen_ai.request.id": log.request_id,
        "gen_ai.response.finish_reasons": list(figures.get("finish_reasons", ())) or None,
        "http.request.method": scope["method"],
        "http.route": scope["path"],
        "http.response.status_code": log.status,
        "error.type": None if log.status < 400 else log.code or str(log.status),
    }
    for key, names in FIGURES.items():
        found |= dict.fromkeys(names, figures.get(key))
    if log.params is not None:
        found |= {f"gen_ai.request.{name}": getattr(log.params, name) for name in PARAMS}
        stops = log.params.stop
        found["gen_ai.request.stop_sequences"] = [stops] if isinstance(stops, str) else stops or None
    return {name: value for name, value in found.items() if value is not None}
