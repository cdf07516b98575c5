"""Sorts the keys of requests' bodies: read, harmless, refused by name, or unknown.

A body is walked once, with a table for each kind of object in it, before it is parsed. A key is read by a struct; or it
is not read, and harmless at some values (`Unread`, which is refused at all others); or it is unknown. Unknown keys, and
tools of kinds that this server does not have, are dropped and named in a warning, since clients add new ones every
month; with `--strict-keys` they are refused. `null` counts as a missing key.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any

import msgspec
from msgspec import inspect

from enginewright.runtime.server.errors import ApiError

MAX_NAMED = 8  # keys that a warning names; further ones are counted
MAX_NAME_CHARS = 64
NOTHING: Sequence[Any] = ([], {}, "", False)
_PLAIN = re.compile(r"[\w$.:/-]+", re.ASCII)


@dataclass(frozen=True)
class Unread:
    """A key that is accepted and not read.

    Args:
        why: the reason why it changes nothing, or why its other values are refused.
        harmless: values that change nothing, in addition to null; None means all values.
        off_by: a key and its value that make this one harmless.
    """

    why: str  # reason for the warning or the refusal
    harmless: Sequence[Any] | None = None  # values that change nothing; None means all
    off_by: tuple[str, Any] | None = None  # key and value that make this one harmless

    def is_harmless(self, value: Any, siblings: Mapping[str, Any]) -> bool:
        """True if a value of the key changes nothing.

        Args:
            value: the value.
            siblings: all keys of the object.
        """
        if value is None or self.harmless is None or is_one_of(value, self.harmless):
            return True
        return self.off_by is not None and siblings.get(self.off_by[0]) == self.off_by[1]


@dataclass(frozen=True)
class Known:
    """The known keys of one kind of object.

    Args:
        kind: the struct that the object is read into.
        read: the keys that are used, each with the table of the objects in it; None means keys that a client chooses.
        unread: the keys that are known, and not used.
    """

    kind: type[msgspec.Struct]  # struct that the object is read into
    read: Mapping[str, "Known | Kinds | None"]  # keys that are used, with the tables of the objects in them
    unread: Mapping[str, Unread]  # keys that are known, and not used


class Kinds:
    """Objects of several kinds, distinguished by their key `type`.

    Args:
        by_type: tables by type.
        default: the type of an object without one; None means that the type is required.
        may_skip: whether a list's entry of another type is dropped with a warning. Otherwise it is refused where it is
            read.
    """

    def __init__(self, by_type: Mapping[str, Known], *, default: str | None = None, may_skip: bool = False) -> None:
        self.by_type = {
            name: Known(known.kind, {"type": None, **known.read}, _without(known.unread, ("type",)))
            for name, known in by_type.items()
        }
        self._default, self._may_skip = default, may_skip

    def of(self, value: Mapping[str, Any]) -> Known | None:
        """Table of an object; None if it is of no known kind."""
        name = value.get("type") or self._default
        return self.by_type.get(name) if isinstance(name, str) else None

    def skips(self, value: Any) -> bool:
        """True if an entry of a list is dropped."""
        name = value.get("type") if self._may_skip and isinstance(value, dict) else None
        return isinstance(name, str) and name not in self.by_type


class UnusedKeys:
    """The keys and entries of one request that are not used.

    Args:
        is_strict: whether an unused key is an error.
    """

    def __init__(self, *, is_strict: bool) -> None:
        self._is_strict = is_strict
        self._named: list[str] = []
        self._count = 0
        self._places: dict[
            str, list[int]
        ] = {}  # original indices of the entries that remain of a list, by the list's path

    def add(self, error: Callable[[], ApiError]) -> None:
        """Records an unused key.

        Args:
            error: makes the error that names it, in printable ASCII. That may be slow, so it is called for the first
                few only.

        Raises:
            ApiError: keys are strict.
        """
        if self._is_strict:
            raise error()
        self._count += 1
        if len(self._named) < MAX_NAMED:
            self._named.append(error().message)

    def add_errors(self, errors: Sequence[ApiError], renames: Mapping[str, str]) -> None:
        """Records keys that a model has no use for.

        Args:
            errors: the errors that name them.
            renames: names of keys in this API, as of a Form.

        Raises:
            ApiError: keys are strict.
        """
        for error in errors:
            self.add(partial(error.renamed, renames))

    def remaining(self, path: str, places: list[int]) -> None:
        """Records which entries of a list remain."""
        self._places[path] = places

    @contextmanager
    def places_as_sent(self) -> Iterator[None]:
        """Makes ApiErrors raised within it name the indices that entries of lists had in the body."""
        try:
            yield
        except ApiError as error:
            found = re.match(r"(?P<path>[\w.]+)\[(?P<place>\d+)\]", error.param or "")
            if found is None or found["path"] not in self._places:
                raise
            place = self._places[found["path"]][int(found["place"])]
            raise error.renamed({re.escape(found[0]): f"{found['path']}[{place}]"}) from None

    @property
    def warning(self) -> str | None:
        """One line of printable ASCII, of bounded length; None if all keys are used."""
        if not self._count:
            return None
        remaining = self._count - len(self._named)
        return "; ".join([*self._named, f"and {remaining} more"] if remaining else self._named)


def known_keys(
    kind: type[msgspec.Struct],
    unread: Mapping[str, Unread] = {},
    *,
    also: Sequence[str] = (),
    **inner: Known | Kinds,
) -> Known:
    """Table of the keys of a struct.

    Args:
        kind: the struct.
        unread: further keys that are known, and not used.
        also: further keys that are read.
        inner: tables of nested objects that the struct does not describe, or that have more keys than a struct's. Those
            of
            nested structs are made from the structs.
    """
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    read: dict[str, Known | Kinds | None] = dict.fromkeys(also)
    read |= {field.encode_name: inner.get(field.encode_name) or _struct_in(field.type) for field in info.fields}
    assert inner.keys() <= read.keys()
    return Known(kind, read, _without(unread, read))


def _without(unread: Mapping[str, Unread], names: Collection[str]) -> Mapping[str, Unread]:
    return {name: one for name, one in unread.items() if name not in names}


def _struct_in(type: inspect.Type) -> Known | None:
    """Table of the struct in a type, which is that struct, an optional one, or a list of it."""
    if isinstance(type, inspect.UnionType):
        return next(filter(None, map(_struct_in, type.types)), None)
    if isinstance(type, inspect.ListType):
        return _struct_in(type.item_type)
    return known_keys(type.cls) if isinstance(type, inspect.StructType) else None


def ignored(why: str, *names: str) -> dict[str, Unread]:
    """Keys that change nothing, whatever their value."""
    return dict.fromkeys(names, Unread(why))


def refused(
    why: str, *names: str, harmless: Sequence[Any] = (), off_by: tuple[str, Any] | None = None
) -> dict[str, Unread]:
    """Keys that would change the answer, except at some values.

    Args:
        why: the reason, for the error.
        names: the keys.
        harmless: the values that change nothing.
        off_by: a key and its value that make these harmless.
    """
    return dict.fromkeys(names, Unread(why, harmless, off_by))


def used_keys(value: dict[str, Any], known: Known, unused: UnusedKeys, where: str = "") -> dict[str, Any]:
    """Copies an object with only the keys that are read, at all depths.

    Args:
        value: the object.
        known: the table of its keys.
        unused: collects the keys that are dropped.
        where: its path in the body, "messages[0]".

    Raises:
        ApiError: 400, a key would change the answer, and is not implemented; or one is unknown, and keys are strict.
    """
    used = {}
    for key, entry in value.items():
        if key in known.read:
            inner = known.read[key]
            used[key] = entry if inner is None else _used_values(entry, inner, unused, _path(where, key))
        elif key in known.unread:
            if not known.unread[key].is_harmless(entry, value):
                raise not_implemented(_path(where, key), known.unread[key].why)
        elif entry is not None:
            unused.add(partial(_unknown_key, where, key, known))
    return used


def _used_values(value: Any, known: Known | Kinds, unused: UnusedKeys, where: str) -> Any:
    """Copies an object, or a list of objects. Other values stay as they are; their reader checks them."""
    if isinstance(value, list):
        return _used_entries(value, known, unused, where)
    table = known.of(value) if isinstance(known, Kinds) and isinstance(value, dict) else known
    return used_keys(value, table, unused, where) if isinstance(value, dict) and isinstance(table, Known) else value


def _used_entries(values: list[Any], known: Known | Kinds, unused: UnusedKeys, where: str) -> list[Any]:
    used, places = [], []
    for place, value in enumerate(values):
        path = f"{where}[{place}]"
        if isinstance(known, Kinds) and known.skips(value):
            unused.add(partial(_unknown_kind, path, value["type"], known))
        else:
            used.append(_used_values(value, known, unused, path) if isinstance(value, dict) else value)
            places.append(place)
    if len(used) < len(values):
        unused.remaining(where, places)
    return used


def not_implemented(key: str, why: str = "") -> ApiError:
    """400, a key or its value is not implemented."""
    reason = f": {why}" if why else ""
    return ApiError(400, f"{key} is not implemented{reason}", param=key, code="unsupported_parameter")


def is_one_of(value: Any, values: Sequence[Any]) -> bool:
    """True if a value equals one of several; true does not equal 1."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values)


def shown(name: str) -> str:
    """A name from a client as printable ASCII of bounded length, so that it fits a header and a log line."""
    if not _PLAIN.fullmatch(name[: MAX_NAME_CHARS + 1]):
        name = json.dumps(name[:MAX_NAME_CHARS]).replace("\x7f", "\\u007f")
    return name if len(name) <= MAX_NAME_CHARS else name[:MAX_NAME_CHARS] + "..."


def _path(where: str, key: str) -> str:
    return f"{where}.{shown(key)}" if where else shown(key)


def _unknown_key(where: str, key: str, known: Known) -> ApiError:
    path = _path(where, key)
    near = get_close_matches(key[:MAX_NAME_CHARS], known.read, n=1)
    hint = f": did you mean {near[0]}?" if near else ""
    return ApiError(400, f"{path} is an unknown key{hint}", param=path, code="unknown_parameter")


def _unknown_kind(path: str, name: str, kinds: Kinds) -> ApiError:
    return not_implemented(path, f"its type is {shown(name)}, not {' or '.join(kinds.by_type)}")
