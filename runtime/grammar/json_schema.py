"""JSON schemas as llguidance can hold a model to them.

Keywords that it does not have are left out and named. It computes with float64, so a schema's integers beyond 2^53 are
held only where they stay exact. Integers and times get bounds where a schema sets none, since a weak model may write
digits until its tokens end.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil, floor, inf, nextafter
from typing import Any

from enginewright.errors import UsageError, shorten

# llguidance reads an integer as float64, and computes with it in 64 bits.
MAX_INTEGER = 2**63 - 1
MIN_INTEGER = -(2**63 - 1024)  # the least one that float64 and the negation of it in 64 bits have
MIN_ROUNDED_RANGE = 2**53  # integers in a range whose ends may be moved inward by rounding
MAX_COMPILED = 200  # parts of a schema that are compiled to find the one that is wrong

FORMATS = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"]
)
# Characters of texts with a fraction of any number of digits: nine digits and a time zone take 35 of a date-time.
MAX_FORMAT_CHARS: Mapping[str, int] = {"date-time": 40, "time": 28, "duration": 40}
# Keywords that say what is valid, and that llguidance does not have.
UNHELD = frozenset(
    (
        "$dynamicRef",
        "$recursiveRef",
        "contains",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "if",
        "maxContains",
        "minContains",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    )
)
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_ONE = ("additionalItems", "additionalProperties", "items")  # keywords of a schema
_LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")  # of a list of them
_MAPS = ("$defs", "definitions", "patternProperties", "properties")  # of schemas by name
# Parts of an expression that are no regular language's, or that the regex crate does not have.
_ESCAPE = re.compile(r"\\(?P<escaped>.)|\[(?:\\.|[^\\\]])+\]|(?P<around>\(\?<?[=!])", re.DOTALL)
_PLAIN_NAME = re.compile(r"[\w$-]+", re.ASCII)


@dataclass(frozen=True)
class Unheld:
    """A keyword of a schema that no answer is held to."""

    path: str  # in the schema, "properties.price.pattern"
    why: str

    def __str__(self) -> str:
        return f"{self.path} cannot be held: {self.why}"


def held(schema: Mapping[str, Any]) -> tuple[dict[str, Any], list[Unheld]]:
    """A copy of a schema without the keywords that cannot be held, and those.

    Raises:
        UsageError: it is about integers that cannot be held exactly, or nested too deeply.
    """
    left_out = list[Unheld]()
    try:
        return _held(schema, "", left_out), left_out
    except RecursionError as error:
        raise UsageError("a JSON schema is nested too deeply") from error


def held_whole(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a schema for llguidance. Raises UsageError where a keyword of it cannot be held."""
    copy, left_out = held(schema)
    if left_out:
        raise UsageError(str(left_out[0]))
    return copy


def fault(schema: Mapping[str, Any], reason: str, find_error: Callable[[dict[str, Any]], str]) -> str:
    """The path of the innermost part of a schema that cannot be compiled.

    Args:
        reason: the reason why the schema cannot be compiled.
        find_error: takes a schema; the reason why it cannot be compiled, or an empty text.
    """
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    path, inner, num_left = "", schema, MAX_COMPILED
    while True:
        for where, part in list(_parts(inner, path))[:num_left]:
            num_left -= 1
            if find_error({**shared, **part}) == reason:
                path, inner = where, part
                break
        else:
            return path


def _parts(schema: Mapping[str, Any], where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The schemas in a schema, and their paths."""
    for key, value in schema.items():
        path = _path(where, key)
        found: Iterable[tuple[str, Any]] = ()
        if key in _MAPS and isinstance(value, Mapping):
            found = ((_path(path, name), one) for name, one in value.items())
        elif key in _LISTS and isinstance(value, list | tuple):
            found = ((f"{path}[{place}]", one) for place, one in enumerate(value))
        elif key in _ONE:
            found = [(path, value)]
        yield from ((path, one) for path, one in found if isinstance(one, Mapping))


def _held(schema: Any, where: str, left_out: list[Unheld]) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    copy = dict[str, Any]()
    for key, value in schema.items():
        path = _path(where, key)
        why = _why_unheld(key, value, schema)
        if why is not None:
            left_out.append(Unheld(path, why))
        elif key in _MAPS and isinstance(value, Mapping):
            copy[key] = {name: _held(one, _path(path, name), left_out) for name, one in value.items()}
        elif key in _LISTS and isinstance(value, list | tuple):
            copy[key] = [_held(one, f"{path}[{place}]", left_out) for place, one in enumerate(value)]
        elif key in _ONE:
            copy[key] = _held(value, path, left_out)
        elif key not in UNHELD:  # one that is left says nothing, such as uniqueItems: false
            copy[key] = value
    for key in ("const", "enum"):
        for number in _numbers(copy.get(key)):
            if not _is_exact(number) and number != MAX_INTEGER:
                raise UsageError(f"{_path(where, key)}: {shorten(number)} cannot be held exactly", _WHY_INEXACT)
    return _bounded(copy, where)


_WHY_INEXACT = "integers beyond 2^53 are held where they are a float64 and have 64 bits; a text can have any digits"


def _why_unheld(key: str, value: Any, schema: Mapping[str, Any]) -> str | None:
    """The reason why a keyword cannot be held; None: it can, or changes nothing."""
    if key == "uniqueItems" and value is False:
        return None
    if key in UNHELD:
        return f"no grammar is made of {key}"
    if key == "format" and isinstance(value, str) and value not in FORMATS and _may_be(schema, "string"):
        return f"the format {value[:40]!a} is not known; there are {', '.join(sorted(FORMATS - {'unknown'}))}"
    return _why_no_pattern(value) if key == "pattern" and isinstance(value, str) else None


def _why_no_pattern(pattern: str) -> str | None:
    """The reason why no automaton matches a pattern; None: none is known."""
    for found in _ESCAPE.finditer(pattern):
        if found["around"]:
            return "it has a look-around"
        if found["escaped"] in set("bB"):
            return "it has a word boundary"
        if found["escaped"] in set("123456789k"):
            return "it has a backreference"
    return None


def _may_be(schema: Mapping[str, Any], type: str) -> bool:
    types = schema.get("type", type)
    return type in types if isinstance(types, str | list | tuple) else True


def _numbers(value: Any) -> Iterator[int | float]:
    """The numbers in a decoded value."""
    rest = [value]
    while rest:
        one = rest.pop()
        if isinstance(one, str):  # most often, and to ask about Mapping takes long
            continue
        if isinstance(one, int | float) and not isinstance(one, bool):
            yield one
        elif isinstance(one, Mapping):
            rest += one.values()
        elif isinstance(one, list | tuple):
            rest += one


def _is_exact(number: int | float) -> bool:
    """True if llguidance writes this number where it is a constant or a bound."""
    if isinstance(number, float) and not number.is_integer():
        return True
    return MIN_INTEGER <= number <= MAX_INTEGER and int(float(number)) == number


def _bounded(schema: dict[str, Any], where: str) -> dict[str, Any]:
    """A schema with bounds where it sets none. Raises UsageError for bounds that cannot be held."""
    types = schema.get("type")
    types = [types] if isinstance(types, str) else types if isinstance(types, list | tuple) else []
    if "integer" in types and "number" not in types:
        return _bounded_integer(schema, where)
    for key in _BOUNDS:
        for number in _numbers(schema.get(key)):
            if not _is_exact(number):
                raise UsageError(f"{_path(where, key)}: {shorten(number)} cannot be held exactly", _WHY_INEXACT)
    limit = MAX_FORMAT_CHARS.get(schema["format"]) if isinstance(schema.get("format"), str) else None
    return {**schema, "maxLength": limit} if limit is not None and "maxLength" not in schema else schema


def _bounded_integer(schema: dict[str, Any], where: str) -> dict[str, Any]:
    given = {key: schema.get(key) for key in _BOUNDS}
    if not all(value is None or isinstance(value, int | float) for value in given.values()):
        return schema  # llguidance says what is wrong
    # In draft 4, exclusiveMinimum is true or false, and says how minimum is meant.
    lows = [MIN_INTEGER] if given["minimum"] is None else [ceil(given["minimum"])]
    highs = [MAX_INTEGER] if given["maximum"] is None else [floor(given["maximum"])]
    below, above = given["exclusiveMinimum"], given["exclusiveMaximum"]
    if below is True and given["minimum"] is not None:
        lows.append(floor(given["minimum"]) + 1)
    elif below is not None and not isinstance(below, bool):
        lows.append(floor(below) + 1)
    if above is True and given["maximum"] is not None:
        highs.append(ceil(given["maximum"]) - 1)
    elif above is not None and not isinstance(above, bool):
        highs.append(ceil(above) - 1)
    low, high = max(lows), min(highs)
    is_beyond = low > MAX_INTEGER or high < MIN_INTEGER
    if low > high and not is_beyond:
        return schema  # llguidance says that no integer is in it
    least, most = _up(low), _down(high)
    if is_beyond or ((least, most) != (low, high) and most - least < MIN_ROUNDED_RANGE):
        path = _path(where, next(key for key in _BOUNDS if given[key] is not None))
        raise UsageError(f"{path}: this range of integers cannot be held exactly", _WHY_INEXACT)
    bounds = {"minimum": least, "maximum": most}
    return {key: value for key, value in schema.items() if key not in _BOUNDS} | bounds


def _up(bound: int) -> int:
    """The least integer that is exact and not below a bound; MAX_INTEGER if there is none."""
    if not MIN_INTEGER < bound < MAX_INTEGER:
        return min(max(bound, MIN_INTEGER), MAX_INTEGER)
    near = float(bound)
    return min(int(near if near >= bound else nextafter(near, inf)), MAX_INTEGER)


def _down(bound: int) -> int:
    """The largest integer that is exact and not above a bound; MIN_INTEGER if there is none."""
    if not MIN_INTEGER < bound < MAX_INTEGER:
        return min(max(bound, MIN_INTEGER), MAX_INTEGER)
    near = float(bound)
    return int(near if near <= bound else nextafter(near, -inf))


def _path(where: str, key: str) -> str:
    name = key if _PLAIN_NAME.fullmatch(key[:65]) else ascii(key[:64])
    return f"{where}.{name}" if where else name
