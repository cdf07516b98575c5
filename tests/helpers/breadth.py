"""Tests over more cases than `make test` has time for: some of the cases there, the others in tests/long.

The short suite keeps each kind of check, on one case of each kind at least. A file of tests/long with the name of a
short one repeats its tests over the cases that it leaves out.
"""

from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case")


def others(cases: Iterable[Case], some: Sequence[Case]) -> list[Case]:
    """Cases that are not among some of them."""
    return [case for case in cases if case not in some]


def every_third(first: Iterable[Any], second: Sequence[Any]) -> list[tuple[Any, Any]]:
    """A third of all pairs, so that each of the first is in one and, of three or more, each of the second."""
    return [(one, other) for n, one in enumerate(first) for m, other in enumerate(second) if (n + m) % 3 == 0]


def repeated(
    test: Callable[..., None],
    names: str | tuple[str, ...],
    cases: Sequence[Any],
    ids: Sequence[str] | Callable[[Any], Any] | None = None,
) -> Callable[..., None]:
    """A test of another module over other cases.

    Args:
        names: parameters that these cases are of. Each `parametrize` of the test has to be over some of them or over
            none. Its other marks and parameters stay.
    """
    assert isinstance(test, FunctionType)
    copied = FunctionType(test.__code__, test.__globals__, test.__name__, test.__defaults__, test.__closure__)
    copied.__annotations__, copied.__doc__ = test.__annotations__, test.__doc__
    given = {names} if isinstance(names, str) else set(names)
    marks: list[pytest.Mark] = []
    for mark in vars(test).get("pytestmark", []):
        own = mark.args[0] if mark.name == "parametrize" else ()
        own = {own} if isinstance(own, str) else set(own)
        assert own <= given or not own & given, f"{sorted(own)} of {test.__name__} are partly given: {sorted(given)}"
        if not own & given:
            marks.append(mark)
    vars(copied)["pytestmark"] = marks
    marked: Callable[..., None] = pytest.mark.parametrize(names, cases, ids=ids)(copied)
    return marked
