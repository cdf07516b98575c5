"""Renders a model's chat template: Jinja from a file that somebody else wrote, so in a sandbox and with limits.

The names that a template may use are those of Hugging Face's chat templates: messages, add_generation_prompt,
bos_token, eos_token, raise_exception, strftime_now, the filter tojson, and the tag `generation`, which marks what the
model says and prints its content.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from types import FrameType
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from enginewright.errors import EngineError, UsageError

MAX_TEMPLATE_CHARS = 1 << 20
MAX_OUTPUT_CHARS = 16 << 20
MAX_CPU_SECONDS = 1.0  # of this thread, so that a busy machine refuses nobody; a long conversation takes a hundredth
MAX_EXPONENT = 64
FAILURES = (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError)


class _Refused(Exception):
    """A template said no, in its own words."""


class _TooLong(Exception):
    """A template does not come to an end."""


class ChatTemplate:
    """A compiled template; `now` is the time that it may print.

    Raises:
        EngineError: the template is too long, or no Jinja.
    """

    def __init__(self, source: str, now: Callable[[], datetime] = datetime.now) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise EngineError(
                "the chat template is too long", f"{len(source)} characters, the limit is {MAX_TEMPLATE_CHARS}"
            )
        environment = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        environment.globals["namespace"] = _PlainNamespace
        environment.globals["dict"] = lambda *args, **kwargs: dict(*args, **kwargs)
        try:
            with _time_limit():
                self._template = environment.from_string(source)
        except (*FAILURES, MemoryError, _TooLong) as error:
            raise EngineError("the chat template cannot be read", str(error) or type(error).__name__) from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], names: Mapping[str, Any], *, add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation.

        Raises:
            UsageError: the template refuses the messages, or they hold what JSON does not.
            EngineError: it fails, or takes too long.
        """
        pieces: list[str] = []
        length = 0
        try:
            given = [_plain(message) for message in messages]
            with _time_limit():
                for piece in self._template.generate(
                    messages=given, add_generation_prompt=add_generation_prompt, **names
                ):
                    pieces.append(piece)
                    length += len(piece)
                    if length > MAX_OUTPUT_CHARS:
                        raise _TooLong(f"it has printed {length} characters")
        except _Refused as error:
            raise UsageError("the model's chat template refuses these messages", str(error)) from error
        except (_TooLong, MemoryError) as error:
            why = str(error) or "it takes too much memory"
            raise EngineError("the chat template does not come to an end", why) from error
        except FAILURES as error:
            raise EngineError("the chat template failed", str(error) or type(error).__name__) from error
        return "".join(pieces)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Also keeps one multiplication from taking all memory; the time limit sees only what lasts many lines."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (isinstance(right, int | float) and abs(right) <= MAX_EXPONENT):
            raise SecurityError(f"an exponent above {MAX_EXPONENT}")
        for text, times in ((left, right), (right, left)):
            repeated = operator == "*" and isinstance(text, str | list | tuple) and isinstance(times, int)
            if repeated and len(text) * times > MAX_OUTPUT_CHARS:
                raise SecurityError(f"a product of more than {MAX_OUTPUT_CHARS} elements")
        return super().call_binop(context, operator, left, right)


class _PlainNamespace(Namespace):
    """Jinja's namespace stores attributes of any name, which the sandbox would not let a template read."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args  # by place, since a template may name an attribute `self`
        given = dict(*rest, **kwargs)
        for name in given:
            _check_name(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}")


class _GenerationTag(Extension):
    """{% generation %} … {% endgeneration %}: a mark for training. Here it is its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


@contextmanager
def _time_limit() -> Iterator[None]:
    """Raises _TooLong in this thread when it has computed for too long, between any two lines of Python."""
    end = time.thread_time() + MAX_CPU_SECONDS

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if time.thread_time() > end:
            raise _TooLong(f"it takes more than {MAX_CPU_SECONDS} s")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def _plain(value: Any) -> Any:
    """A copy in the types of JSON, whose methods the sandbox knows."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping) and all(type(key) is str for key in value):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    raise UsageError("a message holds what no JSON does", f"a {type(value).__name__}")


def _raise_exception(message: str) -> NoReturn:
    raise _Refused(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Not jinja2's own, which escapes for HTML."""
    separators, sort_keys = options.get("separators"), bool(options.get("sort_keys", False))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
