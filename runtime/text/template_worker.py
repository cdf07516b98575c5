"""The process that renders a model's chat template, which is untrusted Jinja.

The template runs in jinja2's sandbox, in a process of its own, so that the kernel can stop it anywhere, even within a
single call: timers end the process after some seconds of CPU time or of the clock, and its address space has a limit.
`ChatTemplate` starts it, sends it conversations, and starts another one if it was ended.

Templates may use the names of Hugging Face's chat templates: messages, add_generation_prompt, bos_token, eos_token,
raise_exception, strftime_now, the filter tojson, and the tag `generation`, which marks text of the model and prints it.

The first frame on stdin is the template, and each later one is a conversation; see worker_protocol.py.
"""

import json
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from enginewright.runtime.text.worker_protocol import serve

MAX_OUTPUT_CHARS = 16 << 20  # maximum number of characters that a template may print
FAILURES = (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError)


class Refused(Exception):
    """The template refuses the messages, with a reason of its own."""


class TooLong(Exception):
    """The template prints more than MAX_OUTPUT_CHARS."""


class PlainNamespace(Namespace):
    """Namespace without private attributes; Jinja's own stores names that the sandbox would not let it read."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args  # by position, since a template may name an attribute `self`
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


class GenerationTag(Extension):
    """{% generation %} … {% endgeneration %}: a mark for training, which prints its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        """Parses the tag as its content."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def compile_template(source: str) -> Template:
    """Compiles a template. Raises one of FAILURES if it is not valid Jinja."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["namespace"] = PlainNamespace
    environment.globals["dict"] = lambda *args, **kwargs: dict(*args, **kwargs)
    return environment.from_string(source)


def render(template: Template, conversation: dict[str, Any]) -> str:
    """Renders a conversation.

    Args:
        template: the compiled template.
        conversation: "variables" by name, and "now", the time that the template may print, in ISO format.

    Raises:
        Refused, TooLong: as their descriptions say.
    """
    now = datetime.fromisoformat(conversation["now"])
    pieces: list[str] = []
    length = 0
    for piece in template.generate(**conversation["variables"], strftime_now=now.strftime):
        pieces.append(piece)
        length += len(piece)
        if length > MAX_OUTPUT_CHARS:
            raise TooLong
    return "".join(pieces)


def _raise_exception(message: str) -> NoReturn:
    raise Refused(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """The filter tojson, without jinja2's escapes for HTML."""
    separators, sort_keys = options.get("separators"), bool(options.get("sort_keys", False))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class Answers:
    """Replies to frames: first the template, then conversations."""

    template: Template | None = None  # compiled template; None until the first frame

    def __call__(self, frame: Any) -> dict[str, str]:
        try:
            if self.template is None:
                self.template = compile_template(frame)
                return {}
            return {"text": render(self.template, frame)}
        except Refused as error:
            return {"refused": str(error)}
        except TooLong:
            return {"too_long": f"it prints more than {MAX_OUTPUT_CHARS} characters"}
        except FAILURES as error:
            return {"failed": str(error) or type(error).__name__}


if __name__ == "__main__":
    serve(Answers())
