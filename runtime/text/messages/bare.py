"""Arguments in bare form: texts without quotes, and other values as JSON."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from enginewright.errors import UsageError
from enginewright.runtime.text.messages.calls import FoundCalls
from enginewright.runtime.text.messages.json_text import check, dump, escaped
from enginewright.runtime.text.messages.lark import ANY, Lark, parts
from enginewright.runtime.text.messages.schemas import kinds, type_of
from enginewright.runtime.text.messages.source import MessageSource, Reading

_OF_TEXTS = ("enum", "maxLength", "minLength", "pattern")  # keywords that restrict texts; `format` is an annotation
_SCALARS = {
    "boolean": "/true|false/",
    "integer": "/-?[0-9]{1,18}/",
    "null": '"null"',
    "number": r"/-?[0-9]{1,18}(\.[0-9]{1,18})?/",
}


def read_bare(
    source: MessageSource, found: FoundCalls, schema: Mapping[str, Any], argument: str, *ends: str
) -> Reading[None]:
    """Reads the value of an argument up to its end, and adds it to the call.

    Args:
        source: the text.
        found: collects the calls.
        schema: the schema of the tool's arguments.
        argument: the name of the argument.
        ends: texts that end the value.

    Raises:
        ValueError: none of them follows.
    """
    if _kinds(schema, argument) != {"string"}:
        found.add(typed((yield from source.up_to(*ends)), schema, argument))
        return
    found.add('"')
    if (yield from source.pass_on_until(lambda part: found.add(escaped(part)), *ends, *source.stops)) not in ends:
        raise ValueError(f"no {ends[0]}")
    found.add('"')


def typed(text: str, schema: Mapping[str, Any], argument: str) -> str:
    """Converts a bare argument to JSON: it is a text if its schema says so, or if it is not valid JSON.

    Args:
        text: the argument.
        schema: the schema of the tool's arguments.
        argument: the name of the argument.
    """
    possible = _kinds(schema, argument)
    try:
        kind = type_of(check(text))
    except ValueError:
        return dump(text)
    return text.strip() if kind in possible or "string" not in possible else dump(text)


def _kinds(schema: Mapping[str, Any], argument: str) -> frozenset[str]:
    properties = schema.get("properties")
    return kinds(properties.get(argument) if isinstance(properties, Mapping) else None, schema)


def bare_value(without: Sequence[str]) -> Callable[[Lark, Any, Mapping[str, Any], str], str]:
    """The grammar rule of such values, for ListedArguments.

    Args:
        without: texts that no value may contain.
    """

    def value(lark: Lark, schema: Any, root: Mapping[str, Any], after: str) -> str:
        found = parts(schema, root)
        if all(one.get("type", "string") != "string" for one in found):
            return f"{lark.json(schema, root)} {lark.text(after)}"
        stops = (*without, after.strip())
        if any(one.get("type", "string") == "string" and not any(key in one for key in _OF_TEXTS) for one in found):
            return lark.free(after, ANY, stops)
        if any(one["type"] in ("array", "object") and "enum" not in one for one in found):
            why = "restricted texts cannot be alternatives of lists and objects"
            raise UsageError("a schema cannot be enforced in the format of this model's calls", why)
        return lark.free(after, " | ".join(f"({texts(one)})" for one in found), stops)

    return value


def texts(one: Mapping[str, Any]) -> str:
    """The expression of the texts that are a valid value.

    Args:
        one: a schema of one type, as `branches` returns it, which is no list and no object.
    """
    if "enum" in one:
        written = (value if isinstance(value, str) else json.dumps(value) for value in one["enum"])
        return " | ".join(json.dumps(value, ensure_ascii=False) for value in written)
    if one.get("type", "string") != "string":
        return _SCALARS[one["type"]]
    expressions = []
    if "minLength" in one or "maxLength" in one:
        expressions.append(f"/(?s:.{{{one.get('minLength', 0)},{one.get('maxLength', '')}}})/")
    if "pattern" in one:
        expressions.append(f"/{_anchored(str(one['pattern']))}/")
    return " & ".join(expressions or [ANY])


def _anchored(pattern: str) -> str:
    """Converts a pattern that is searched in a text to one that matches the whole text."""
    begin = "" if pattern.startswith("^") else "(?s:.*)"
    end = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(?s:.*)"
    inner = pattern.removeprefix("^")
    inner = inner if end else inner[:-1]
    escaped = re.sub(r"\\.|/|\n", lambda found: _ESCAPED.get(found[0], found[0]), inner, flags=re.DOTALL)
    return f"{begin}({escaped}){end}"


_ESCAPED = {"/": r"\/", "\n": r"\n"}
