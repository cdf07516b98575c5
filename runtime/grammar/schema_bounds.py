"""Adapts the bounds in JSON schemas to llguidance, and adds bounds where a schema has none.

llguidance computes with float64, so bounds are enforced only if they stay exact. Integers, times and addresses get
bounds where a schema has none, since a weak model may write digits or letters until it reaches its max_tokens. The mask
limits the digits of other numbers (number_digits.py).
"""

import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from math import ceil, copysign, floor, inf, nextafter
from typing import Any, NamedTuple

from enginewright.errors import UsageError, shorten
from enginewright.runtime.grammar.number_digits import MAX_DIGITS

# llguidance reads an integer as float64, and computes with it in 64 bits.
MAX_INTEGER = 2**63 - 1
MIN_INTEGER = -(2**63 - 1024)  # smallest integer that is exact in float64, and whose negation has 64 bits
MIN_ROUNDED_RANGE = 2**53  # minimum number of integers in a range whose ends may be moved inward by rounding
MIN_NUMBER = 10.0**-MAX_DIGITS  # smallest bound above zero; numbers with bounds are written without an exponent
MAX_POWER = 308  # largest power of ten that is a double
MAX_COUNT = 2**31 - 1  # maximum count of characters, entries or properties; llguidance reads no more than 64 bits

# Maximum characters of texts whose format has no limit. A date-time with nine decimals and a time zone has 35, an
# address has up to 254 by RFC 5321, and a host name up to 253 by RFC 1035.
MAX_FORMAT_CHARS: Mapping[str, int] = {
    "date-time": 40,
    "time": 28,
    "duration": 40,
    "email": 254,
    "hostname": 253,
    "uri": 2048,
}
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_COUNTS = ("minItems", "minLength", "minProperties", "maxItems", "maxLength", "maxProperties")
_WHY_INEXACT = "integers beyond 2^53 are held where they are a float64 and have 64 bits; a text can have any digits"
_WHY_MISREAD = "not all numbers of more than 15 digits, or of large exponents, are; a text can have any digits"
_PLAIN_NAME = re.compile(r"[\w$-]+", re.ASCII)


def join_path(where: str, key: str) -> str:
    """Path of a keyword of a schema, or of a property.

    Args:
        where: path of the schema; empty for the outermost one.
        key: the keyword, or the name of the property.
    """
    name = key if _PLAIN_NAME.fullmatch(key[:65]) else ascii(key[:64])
    return f"{where}.{name}" if where else name


def check_values(schema: Mapping[str, Any], where: str) -> None:
    """Checks the constants of a schema.

    Args:
        schema: the schema.
        where: its path.

    Raises:
        UsageError: llguidance would write a constant as another number.
    """
    for key in ("const", "enum"):
        for number in _numbers(schema.get(key)):
            why = None
            if not _is_exact(number) and number != MAX_INTEGER:
                why = _WHY_INEXACT
            elif isinstance(number, float) and _as_read(number) != number:
                why = _WHY_MISREAD
            if why is not None:
                raise UsageError(f"{join_path(where, key)}: {shorten(number)} cannot be held exactly", why)


def bounded(schema: dict[str, Any], where: str) -> dict[str, Any]:
    """Copies a schema with bounds that llguidance can enforce, also where it has none.

    Args:
        schema: the schema.
        where: its path.

    Raises:
        UsageError: it has bounds that cannot be enforced.
    """
    schema = _counted(schema)
    types = schema.get("type")
    types = [types] if isinstance(types, str) else types if isinstance(types, list | tuple) else []
    if "integer" in types and "number" not in types:
        return _bounded_integer(schema, where)
    for key in _BOUNDS:
        for number in _numbers(schema.get(key)):
            if not _is_exact(number):
                raise UsageError(f"{join_path(where, key)}: {shorten(number)} cannot be held exactly", _WHY_INEXACT)
    if ("number" in types or not types) and any(key in schema for key in (*_BOUNDS, "multipleOf")):
        schema = _bounded_number(schema, where)
    limit = MAX_FORMAT_CHARS.get(schema["format"]) if isinstance(schema.get("format"), str) else None
    return {**schema, "maxLength": limit} if limit is not None and "maxLength" not in schema else schema


def _counted(schema: dict[str, Any]) -> dict[str, Any]:
    """Copies a schema with counts that llguidance can read: 2.0 becomes 2, and no count is above MAX_COUNT.

    No answer reaches MAX_COUNT, so the smaller count changes nothing.
    """
    counts = {key: schema[key] for key in _COUNTS if key in schema}
    for key, value in counts.items():
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        counts[key] = min(value, MAX_COUNT) if isinstance(value, int) and not isinstance(value, bool) else value
    return {**schema, **counts}


def _numbers(value: Any) -> Iterator[int | float]:
    """Yields the numbers in a decoded JSON value."""
    rest = [value]
    while rest:
        one = rest.pop()
        if isinstance(one, str):  # the most frequent case; the check for a Mapping is slow
            continue
        if isinstance(one, int | float) and not isinstance(one, bool):
            yield one
        elif isinstance(one, Mapping):
            rest += one.values()
        elif isinstance(one, list | tuple):
            rest += one


def _is_exact(number: int | float) -> bool:
    """True if llguidance keeps this number exactly as a constant or a bound."""
    if isinstance(number, float) and not number.is_integer():
        return True
    return MIN_INTEGER <= number <= MAX_INTEGER and int(float(number)) == number


class _Range(NamedTuple):
    """The bounds of a schema's numbers, by their keys; None if the schema has none."""

    minimum: float | None
    maximum: float | None
    exclusive_minimum: float | None
    exclusive_maximum: float | None


def _range(schema: Mapping[str, Any]) -> _Range | None:
    """Reads the bounds of a schema; None if one is not a number, which llguidance reports as an error."""
    minimum, maximum, exclusive_minimum, exclusive_maximum = (schema.get(key) for key in _BOUNDS)
    is_bound = all(
        value is None or isinstance(value, int | float)
        for value in (minimum, maximum, exclusive_minimum, exclusive_maximum)
    )
    if not is_bound or isinstance(minimum, bool) or isinstance(maximum, bool):
        return None
    # In draft 4, exclusiveMinimum is true or false, and says if minimum itself is excluded.
    if isinstance(exclusive_minimum, bool):
        exclusive_minimum = minimum if exclusive_minimum else None
    if isinstance(exclusive_maximum, bool):
        exclusive_maximum = maximum if exclusive_maximum else None
    return _Range(minimum, maximum, exclusive_minimum, exclusive_maximum)


def _with_range(schema: Mapping[str, Any], minimum: float, maximum: float) -> dict[str, Any]:
    bounds = {"minimum": minimum, "maximum": maximum}
    others = {key: value for key, value in schema.items() if key not in _BOUNDS}
    return others | {key: value for key, value in bounds.items() if abs(value) < inf}


def _bounded_number(schema: dict[str, Any], where: str) -> dict[str, Any]:
    """Copies a schema of numbers with bounds that limit the number of digits.

    After an excluded bound, a number could have any number of zeros, as in 3.000…1, so the bound becomes the next
    double, included. A multiple could have any number of digits before those that make it a multiple, so a schema with
    multipleOf gets a minimum and a maximum.
    """
    given = _range(schema)
    if given is None:
        return schema
    if "multipleOf" in schema:
        has_low = given.minimum is not None or given.exclusive_minimum is not None
        has_high = given.maximum is not None or given.exclusive_maximum is not None
        return schema | ({} if has_low else {"minimum": MIN_INTEGER}) | ({} if has_high else {"maximum": -MIN_INTEGER})
    lows = [given.minimum, None if given.exclusive_minimum is None else nextafter(given.exclusive_minimum, inf)]
    highs = [given.maximum, None if given.exclusive_maximum is None else nextafter(given.exclusive_maximum, -inf)]
    low = max((bound for bound in lows if bound is not None), default=-inf)
    high = min((bound for bound in highs if bound is not None), default=inf)
    minimum, maximum = _inward(low, inf), _inward(high, -inf)
    if low <= high and minimum > maximum:
        path = join_path(where, next(key for key in _BOUNDS if schema.get(key) is not None))
        raise UsageError(f"{path}: this range of numbers cannot be held exactly", _WHY_MISREAD)
    return _with_range(schema, minimum, maximum)


def _inward(bound: float, toward: float) -> float:
    """First double, from a bound inward, that can be written without an exponent and is not read as one outside.

    Args:
        bound: the bound.
        toward: inf for a minimum, -inf for a maximum.
    """
    if 0 < abs(bound) < MIN_NUMBER:
        return copysign(MIN_NUMBER, toward) if (bound > 0) == (toward > 0) else 0.0
    near = bound
    while abs(near) < inf and _as_read(near) != bound and (_as_read(near) < bound) == (toward > bound):
        near = nextafter(near, toward)
    return near


def _as_read(number: float) -> float:
    """Number that llguidance reads from the digits of this one; like serde_json, it computes with doubles."""
    sign, digits, exponent = Decimal(repr(number)).as_tuple()
    assert isinstance(exponent, int), "JSON has no infinite numbers"
    found = float("".join(map(str, digits)))
    while exponent < -MAX_POWER:
        found, exponent = found / float(f"1e{MAX_POWER}"), exponent + MAX_POWER
    power = float(f"1e{abs(exponent)}")
    return copysign(found * power if exponent > 0 else found / power, -1 if sign else 1)


def _bounded_integer(schema: dict[str, Any], where: str) -> dict[str, Any]:
    given = _range(schema)
    if given is None:
        return schema
    lows = [MIN_INTEGER if given.minimum is None else ceil(given.minimum)]
    highs = [MAX_INTEGER if given.maximum is None else floor(given.maximum)]
    if given.exclusive_minimum is not None:
        lows.append(floor(given.exclusive_minimum) + 1)
    if given.exclusive_maximum is not None:
        highs.append(ceil(given.exclusive_maximum) - 1)
    low, high = max(lows), min(highs)
    is_beyond = low > MAX_INTEGER or high < MIN_INTEGER
    if low > high and not is_beyond:
        return schema  # llguidance reports that the range has no integer
    minimum, maximum = _up(low), _down(high)
    if is_beyond or ((minimum, maximum) != (low, high) and maximum - minimum < MIN_ROUNDED_RANGE):
        path = join_path(where, next(key for key in _BOUNDS if schema.get(key) is not None))
        raise UsageError(f"{path}: this range of integers cannot be held exactly", _WHY_INEXACT)
    return _with_range(schema, minimum, maximum)


def _up(bound: int) -> int:
    """Smallest integer that is exact in float64 and not below a bound, or MAX_INTEGER."""
    if not MIN_INTEGER < bound < MAX_INTEGER:
        return min(max(bound, MIN_INTEGER), MAX_INTEGER)
    near = float(bound)
    return min(int(near if near >= bound else nextafter(near, inf)), MAX_INTEGER)


def _down(bound: int) -> int:
    """Largest integer that is exact in float64 and not above a bound, or MIN_INTEGER."""
    if not MIN_INTEGER < bound < MAX_INTEGER:
        return min(max(bound, MIN_INTEGER), MAX_INTEGER)
    near = float(bound)
    return int(near if near <= bound else nextafter(near, -inf))
