"""Renders a model's chat template: Jinja from a file that somebody else wrote, so in a sandbox and with limits.

The names that a template may use are those of Hugging Face's chat templates: messages, add_generation_prompt,
bos_token, eos_token, raise_exception, strftime_now, and the filter tojson.
"""

import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from enginewright.errors import EngineError, UsageError

MAX_TEMPLATE_CHARS = 1 << 20
MAX_OUTPUT_CHARS = 16 << 20
MAX_SECONDS = 5.0


class _Refused(Exception):
    """A template said no, in its own words."""


class ChatTemplate:
    """A compiled template.

    Raises:
        EngineError: the template is too long, or no Jinja.
    """

    def __init__(self, source: str) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise EngineError(
                "the chat template is too long", f"{len(source)} characters, the limit is {MAX_TEMPLATE_CHARS}"
            )
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except (TemplateError, RecursionError) as error:
            raise EngineError("the chat template cannot be read", str(error)) from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], names: Mapping[str, Any], *, add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation.

        Raises:
            UsageError: the template refuses the messages.
            EngineError: it fails, or takes too long.
        """
        pieces: list[str] = []
        length, end = 0, time.monotonic() + MAX_SECONDS
        try:
            for piece in self._template.generate(
                messages=[dict(message) for message in messages], add_generation_prompt=add_generation_prompt, **names
            ):
                pieces.append(piece)
                length += len(piece)
                if length > MAX_OUTPUT_CHARS or time.monotonic() > end:
                    raise EngineError("the chat template does not come to an end", f"{length} characters so far")
        except _Refused as error:
            raise UsageError("the model's chat template refuses these messages", str(error)) from error
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise EngineError("the chat template failed", str(error) or type(error).__name__) from error
        return "".join(pieces)


def _raise_exception(message: str) -> NoReturn:
    raise _Refused(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Not jinja2's own, which escapes for HTML."""
    separators, sort_keys = options.get("separators"), bool(options.get("sort_keys", False))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
