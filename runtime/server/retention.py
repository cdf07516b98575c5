"""Reads hints of clients about how soon they continue a prompt, within which its KV blocks should stay cached.

The forms are Anthropic's and OpenRouter's `cache_control`, OpenAI's `prompt_cache_options` and
`prompt_cache_retention`, and the `retention_directives` that llm-d adds. A hint is about the whole prompt and its
answer, and of several the longest counts. It changes no answer, and runtime/cache/eviction.py bounds what it does.
"""

import re
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
from starlette.types import Scope

from enginewright.errors import shorten
from enginewright.runtime.cache.eviction import MAX_TTL_S, NOT_RETAINED, Retention
from enginewright.runtime.server.errors import ApiError
from enginewright.runtime.server.wire import header
from enginewright.runtime.step.work_class import BEST_EFFORT, WorkClass

SESSION_HEADER = b"x-session-id"
DEFAULT_TTL_S = 300.0  # Anthropic's default; also that of a request whose only hint is its session
_TTL = re.compile(r"(\d{1,9})([smh])")
_UNIT_S = {"s": 1.0, "m": 60.0, "h": 3600.0}
_BLOCK_DEPTH = 2  # lists of blocks in each other: a message's, and a tool result's


class CacheControl(msgspec.Struct):
    """Anthropic's mark of a prefix that is used again."""

    type: Literal["ephemeral"] = "ephemeral"  # kind of the mark
    ttl: str | float | None = None  # time to live, "5m" or "1h"; a number is in seconds


class PromptCacheOptions(msgspec.Struct):
    """OpenAI's options of prompt caching."""

    ttl: str | None = None  # time to live, "30m"
    mode: str | None = None  # choice of breakpoints, not used: prefixes of all lengths are cached


class RetentionDirective(msgspec.Struct):
    """Retention of a range of the prompt's tokens, in the form of vLLM's issue 37003 and of TensorRT-LLM."""

    start: int | None = None  # first position, not used
    end: int | None = None  # position after the last one, not used
    priority: int | None = None  # priority from 0 to 100, not used
    duration: float | None = None  # time to live in seconds; None: no limit


def seconds_of(ttl: str | float, where: str) -> float:
    """Seconds of a time to live.

    Args:
        ttl: the time, a number of seconds, or a text such as "5m".
        where: its path in the body.

    Raises:
        ApiError: it is no time.
    """
    if isinstance(ttl, str):
        found = _TTL.fullmatch(ttl)
        seconds = float(found[1]) * _UNIT_S[found[2]] if found is not None else -1.0
    else:
        seconds = ttl
    if not seconds >= 0:
        rule = 'it must be a time such as "5m" or "1h"; a number is in seconds'
        raise ApiError(400, f"{where} is {shorten(ttl)}: {rule}", param=where, code="invalid_value")
    return min(seconds, MAX_TTL_S)


def cache_controls(body: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The values of `cache_control` in a decoded body, with their paths: its own, and those of tools and messages."""
    yield from _controls(body, "", 0)
    for name in ("tools", "system", "messages", "input"):
        yield from _controls(body.get(name), name, _BLOCK_DEPTH)


def _controls(value: Any, where: str, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list):
        for place, entry in enumerate(value):
            if isinstance(entry, dict):
                yield from _controls(entry, f"{where}[{place}]", depth)
    elif isinstance(value, dict):
        if value.get("cache_control") is not None:
            yield f"{where}.cache_control".removeprefix("."), value["cache_control"]
        if depth:
            yield from _controls(value.get("content"), f"{where}.content", depth - 1)


def session_of(scope: Scope, given: str | None) -> str | None:
    """The session of a request, whose prompts continue each other; None: it names none.

    Args:
        scope: the ASGI scope. Its header overrides the body, as in vLLM.
        given: the body's session.
    """
    values = header(scope, SESSION_HEADER)
    return (values[0].decode("latin-1") if values else given) or None


def retention_of(ttl_s: float, session: str | None, work: WorkClass) -> Retention:
    """The hint for the blocks of a request. Best-effort work has none.

    Args:
        ttl_s: seconds that its body asks for; 0: none.
        session: its session.
        work: its priority and tenant.
    """
    if work.priority >= BEST_EFFORT:
        return NOT_RETAINED
    return Retention.of(ttl_s or (DEFAULT_TTL_S if session is not None else 0.0), work.tenant)
