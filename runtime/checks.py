"""Checks of values that users give by name."""

from collections.abc import Collection
from difflib import get_close_matches
from typing import Any

from enginewright.errors import UsageError, shorten


def require_known(names: Collection[str], known: Collection[str], what: str) -> None:
    """Checks that all names are known, and suggests the nearest known name.

    Args:
        names: the names to check.
        known: all valid names.
        what: what a name stands for, in the error's text.

    Raises:
        UsageError: for the first name that is not known.
    """
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            why = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise UsageError(f"there is no {what} called {name}", why)


def require(holds: bool, name: str, rule: str) -> None:
    """Checks a condition on a value.

    Args:
        holds: the condition.
        name: the name of the value.
        rule: the rule that the value breaks, which follows the name in the error's text.

    Raises:
        UsageError: the condition does not hold.
    """
    if not holds:
        raise UsageError(f"{name} {rule}")


def require_whole(name: str, value: Any, low: int, high: int) -> None:
    """Checks that a value is a whole number between two limits; True and False are not.

    Args:
        name: the name of the value, for the error's text.
        value: the value.
        low: the smallest valid number.
        high: the largest valid number.

    Raises:
        UsageError: it is not.
    """
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    require(is_whole, name, f"must be a whole number, not {shorten(value)}")
    require(low <= value <= high, name, f"must be between {low} and {high}, not {shorten(value)}")


def require_number(name: str, value: Any, low: float, high: float) -> None:
    """Checks that a value is a number between two limits; True, False and NaN are not.

    Args:
        name: the name of the value, for the error's text.
        value: the value.
        low: the smallest valid number.
        high: the largest valid number.

    Raises:
        UsageError: it is not.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    require(is_number, name, f"must be a number, not {shorten(value)}")
    require(low <= value <= high, name, f"must be between {low} and {high}, not {shorten(value)}")  # NaN fails both
