"""Checks of values that users give by name."""

from collections.abc import Collection
from difflib import get_close_matches
from typing import Any

from enginewright.errors import UsageError, shorten


def require_known(names: Collection[str], known: Collection[str], what: str) -> None:
    """Raises UsageError for the first name that is not known, with the one that is meant if it can be guessed."""
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            why = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise UsageError(f"there is no {what} called {name}", why)


def require(holds: bool, name: str, rule: str) -> None:
    """Raises UsageError."""
    if not holds:
        raise UsageError(f"{name} {rule}")


def require_whole(name: str, value: Any, low: int, high: int) -> None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    require(is_whole, name, f"must be a whole number, not {shorten(value)}")
    require(low <= value <= high, name, f"must be between {low} and {high}, not {shorten(value)}")


def require_number(name: str, value: Any, low: float, high: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    require(is_number, name, f"must be a number, not {shorten(value)}")
    require(low <= value <= high, name, f"must be between {low} and {high}, not {shorten(value)}")  # NaN is neither
