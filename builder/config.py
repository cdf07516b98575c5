"""Reads config.json by key and type, and knows which keys were read.

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
NEAR = 0.85  # of 1: how alike two keys are where one may be meant for the other
MOST = 2**31 - 1  # of what is counted: positions and token ids have 32 bits

# Far above any model that is known: what is larger is an error, which must not be allocated before it is noticed.
MOST_TOKENS = 2**24
MOST_LAYERS = 2**12
MOST_HEADS = 2**14
MOST_HEAD_DIM = 2**13
MOST_COLUMNS = 2**22
MOST_TAPS = 8  # of a convolution: csrc/cpu/causal_conv.h


class ConfigReader:
    """One JSON object of a checkpoint's config."""

    def __init__(
        self,
        values: Mapping[str, Any],
        where: str = "config.json",
        max_seq_len: int | None = None,
        pooling: Pooling | None = None,
    ) -> None:
        """max_seq_len: positions of the longest sequence that is wanted; None is what the model was made for. pooling:
        what stands in the place of a head; None is a model that generates text.
        """
        self._values = values
        self._where = where
        self.max_seq_len, self.pooling = max_seq_len, pooling
        self._read: set[str] = set()
        self.warnings: list[str] = []  # sentences on keys that are read and do not count

    @overload
    def read(self, kind: type[T], *keys: str) -> T: ...
    @overload
    def read(self, kind: type[T], *keys: str, default: D) -> T | D: ...
    def read(self, kind: type[T], *keys: str, default: Any = _REQUIRED) -> Any:
        """The value of a key. Further keys are other names of it; no two of them may disagree.

        Raises:
            EngineError: the value is missing (and there is no default) or is not of the kind.
        """
        key, value = self._find(keys)
        if value is None:
            if default is _REQUIRED:
                raise self.error(f"{' or '.join(keys)} is missing")
            return default
        return self._as(kind, key, value)

    def read_size(self, *keys: str, default: int | None = None, most: int = MOST) -> int:
        """A whole number above 0, required unless there is a default.

        Raises:
            UnsupportedModelError: it is more than `most`: said before anything of that size is made.
        """
        size = self.read(int, *keys) if default is None else self.read(int, *keys, default=default)
        if size <= 0:
            raise self.error(f"{keys[0]} is {_short(size)}, not above 0")
        if size > most:
            raise self.unsupported(f"{keys[0]} = {_short(size)}", f"At most {most} is possible.")
        return size

    def read_positive(self, *keys: str, default: float | None = None) -> float:
        """A number above 0, required unless there is a default."""
        number = self.read(float, *keys) if default is None else self.read(float, *keys, default=default)
        if number <= 0:
            raise self.error(f"{keys[0]} is {number}, not above 0")
        return number

    def read_list(self, kind: type[T], key: str) -> list[T] | None:
        """A list of one kind, None if there is none."""
        _, value = self._find((key,))
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.error(f"{key} is {_short(value)}, not a list")
        return [self._as(kind, f"{key}[{index}]", entry) for index, entry in enumerate(value)]

    def holds(self, key: str, value: object) -> bool:
        """Whether a key, of whatever type, has just this value."""
        return bool(self._find((key,))[1] == value)

    def has(self, key: str) -> bool:
        """Whether a key is there, if only with the value null."""
        return key in self._values

    def names(self) -> list[str]:
        """All keys that are there."""
        return list(self._values)

    def known(self) -> frozenset[str]:
        """All keys that were asked for, whether they are there or not."""
        return frozenset(self._read)

    def section(self, *keys: str) -> "ConfigReader | None":
        """An object within the config, None if there is none."""
        key, value = self._find(keys)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(f"{key} is {_short(value)}, not an object")
        return ConfigReader(value, f"{self._where}: {key}", self.max_seq_len, self.pooling)

    def error(self, why: str) -> EngineError:
        return EngineError(f"{self._where} cannot be used", why)

    def unsupported(self, why: str, fix: str = "") -> UnsupportedModelError:
        return UnsupportedModelError(f"{self._where} asks for what is not implemented", why, fix)

    def warn(self, warning: str) -> None:
        """Tell people what does not become of a key, where transformers leaves it undone as well."""
        self.warnings.append(warning)

    def refuse_unread(self, harmless: Mapping[str, Harmless] | None = None) -> None:
        """Refuse, by name, every key that was not read, unless it is known that it cannot change a result.

        Args:
            harmless: keys of the family's own, beside those of HARMLESS.

        Raises:
            UnsupportedModelError: naming all of them.
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
            "A model that is built without what a key asks for may give wrong answers. Where you know that a key "
            "changes nothing, take it out of config.json.",
        )

    def refuse_any_unread(self, harmless: Collection[str] = ()) -> None:
        """Refuse, by name, every key that nobody read: for objects in which every key counts."""
        self._refuse({key: "" for key in self.unread() if key not in harmless})

    def unread(self) -> list[str]:
        """The keys that nobody read, but for those with the value null: where a key is known, null is its absence."""
        return sorted(key for key, value in self._values.items() if value is not None and key not in self._read)

    def _refuse(self, remarks: Mapping[str, str], fix: str = "") -> None:
        """remarks: what is said of each key that is refused, behind its value."""
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
