"""Reads config.json by key and type, and records which keys were read.

A key with the value null counts as absent, as it does for transformers.
"""

import math
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar, overload

from enginewright.builder.harmless_keys import HARMLESS, Harmless
from enginewright.builder.pooling import Pooling
from enginewright.errors import EngineError, UnsupportedModelError

T = TypeVar("T")
D = TypeVar("D")

_REQUIRED: Any = object()
NEAR = 0.85  # similarity of two keys, up to 1, above which one may be a misspelling of the other
MAX_COUNT = 2**31 - 1  # limit of counts: positions and token ids have 32 bits

# Limits far above any known model: a larger number is an error, which must be noticed before anything is allocated.
MAX_TOKENS = 2**24
MAX_LAYERS = 2**12
MAX_HEADS = 2**14
MAX_HEAD_DIM = 2**13
MAX_COLUMNS = 2**22
MAX_TAPS = 8  # taps of a convolution: csrc/cpu/causal_conv.h


class ConfigReader:
    """One JSON object of a checkpoint's config."""

    def __init__(
        self,
        values: Mapping[str, Any],
        where: str = "config.json",
        max_seq_len: int | None = None,
        pooling: Pooling | None = None,
    ) -> None:
        """Wraps an object.

        Args:
            values: key → value.
            where: name of the object, for errors.
            max_seq_len: positions of the longest sequence that the build needs; None is the model's own limit.
            pooling: pooling of an embedding model; None is a model that generates text.
        """
        self._values = values
        self._where = where
        self.max_seq_len, self.pooling = max_seq_len, pooling
        self._read: set[str] = set()
        self.warnings: list[str] = []  # sentences on keys that are read and have no effect

    @overload
    def read(self, kind: type[T], *keys: str) -> T: ...
    @overload
    def read(self, kind: type[T], *keys: str, default: D) -> T | D: ...
    def read(self, kind: type[T], *keys: str, default: Any = _REQUIRED) -> Any:
        """Reads the value of a key.

        Args:
            kind: type of the value.
            keys: the key, then other names of it; no two of them may disagree.
            default: value where the key is missing; without one, the key is required.

        Raises:
            EngineError: the value is missing (and there is no default), or has another type.
        """
        key, value = self._find(keys)
        if value is None:
            if default is _REQUIRED:
                raise self.error(f"{' or '.join(keys)} is missing")
            return default
        return self._as(kind, key, value)

    def read_size(self, *keys: str, default: int | None = None, maximum: int = MAX_COUNT) -> int:
        """Reads a whole number above 0.

        Args:
            keys: the key, then other names of it.
            default: value where the key is missing; None requires it.
            maximum: limit of the value.

        Raises:
            UnsupportedModelError: it is larger than `maximum`, which is refused before anything of that size is
            allocated.
        """
        size = self.read(int, *keys) if default is None else self.read(int, *keys, default=default)
        if size <= 0:
            raise self.error(f"{keys[0]} is {_short(size)}, not above 0")
        if size > maximum:
            raise self.unsupported(f"{keys[0]} = {_short(size)}", f"At most {maximum} is possible.")
        return size

    def read_positive(self, *keys: str, default: float | None = None) -> float:
        """Reads a number above 0.

        Args:
            keys: the key, then other names of it.
            default: value where the key is missing; None requires it.
        """
        number = self.read(float, *keys) if default is None else self.read(float, *keys, default=default)
        if number <= 0:
            raise self.error(f"{keys[0]} is {number}, not above 0")
        return number

    def read_list(self, kind: type[T], key: str) -> list[T] | None:
        """Reads a list of values of one type; None if the key is missing.

        Args:
            kind: type of the values.
            key: the key.
        """
        _, value = self._find((key,))
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.error(f"{key} is {_short(value)}, not a list")
        return [self._as(kind, f"{key}[{index}]", entry) for index, entry in enumerate(value)]

    def holds(self, key: str, value: object) -> bool:
        """Checks if a key, of any type, has exactly this value.

        Args:
            key: the key.
            value: the value.
        """
        return bool(self._find((key,))[1] == value)

    def has(self, key: str) -> bool:
        """Checks if a key exists, even with the value null."""
        return key in self._values

    def names(self) -> list[str]:
        """Lists all keys that exist."""
        return list(self._values)

    def known(self) -> frozenset[str]:
        """Lists all keys that were read, whether they exist or not."""
        return frozenset(self._read)

    def section(self, *keys: str) -> "ConfigReader | None":
        """Returns an object within the config; None if the key is missing."""
        key, value = self._find(keys)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(f"{key} is {_short(value)}, not an object")
        return ConfigReader(value, f"{self._where}: {key}", self.max_seq_len, self.pooling)

    def error(self, why: str) -> EngineError:
        """Makes the error for a config that cannot be used."""
        return EngineError(f"{self._where} cannot be used", why)

    def unsupported(self, why: str, fix: str = "") -> UnsupportedModelError:
        """Makes the error for a config that is not implemented.

        Args:
            why: the reason.
            fix: advice for the user.
        """
        return UnsupportedModelError(f"{self._where} needs something that is not implemented", why, fix)

    def warn(self, warning: str) -> None:
        """Records a warning about a key that has no effect, as in transformers."""
        self.warnings.append(warning)

    def refuse_unread(self, harmless: Mapping[str, Harmless] | None = None) -> None:
        """Refuses, by name, every key that was not read, unless it is known not to change results.

        Args:
            harmless: keys of the family, in addition to HARMLESS.

        Raises:
            UnsupportedModelError: there are such keys; the message names all of them.
        """
        allowed = {**HARMLESS, **(harmless or {})}
        known = {*self._read, *allowed} - self._values.keys()
        remarks = {}
        for key in self.unread():
            if key not in allowed:
                near = get_close_matches(key, known, n=1, cutoff=NEAR)
                remarks[key] = f" (did you mean {near[0]}?)" if near else ""
            elif not allowed[key].at(self._values[key]):
                remarks[key] = f" (only {' or '.join(map(str, allowed[key].values or ()))} can be built)"
        self._refuse(
            remarks,
            "A model that is built without a feature of its config may compute wrong results. If you know that a key "
            "changes nothing, take it out of config.json.",
        )

    def refuse_any_unread(self, harmless: Collection[str] = ()) -> None:
        """Refuses, by name, every key that was not read: for objects in which every key counts."""
        self._refuse({key: "" for key in self.unread() if key not in harmless})

    def unread(self) -> list[str]:
        """Lists the keys that were not read, without those of value null, which counts as absence."""
        return sorted(key for key, value in self._values.items() if value is not None and key not in self._read)

    def _refuse(self, remarks: Mapping[str, str], fix: str = "") -> None:
        """Refuses keys. remarks: key → text after its value in the message."""
        if remarks:
            named = (f"{key} = {_short(self._values[key])}{remark}" for key, remark in remarks.items())
            raise self.unsupported(", ".join(named), fix)

    def _find(self, keys: tuple[str, ...]) -> tuple[str, Any]:
        self._read.update(keys)
        found = [(key, self._values[key]) for key in keys if self._values.get(key) is not None]
        for key, value in found[1:]:
            if value != found[0][1]:
                raise self.error(f"{found[0][0]} is {_short(found[0][1])}, but {key} is {_short(value)}")
        return found[0] if found else (keys[0], None)

    def _as(self, kind: type[T], key: str, value: Any) -> T:
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            try:
                value = float(value)
            except OverflowError:
                value = math.inf
        fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        if not fits or (isinstance(value, float) and not math.isfinite(value)):
            raise self.error(f"{key} is {_short(value)}, not a {'finite number' if kind is float else kind.__name__}")
        return value  # type: ignore[no-any-return]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
