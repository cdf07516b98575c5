"""Reads the metadata of a GGUF file by type."""

import math
from typing import TypeVar

from enginewright.builder.checkpoint.gguf.header import GgufHeader
from enginewright.errors import EngineError, UnsupportedModelError

T = TypeVar("T", int, float, bool, str)

# Keys without an effect on results.
IDLE_KEYS = {"vocab_size", "rope.scaling.finetuned", "tensor_data_layout"}
NO_EXPERTS = {"expert_count", "expert_used_count"}  # these may be 0 if nothing reads them


class Keys:
    """The metadata under `<architecture>.`, read by type. `finish` refuses keys that were not read."""

    def __init__(self, header: GgufHeader) -> None:
        self._architecture = str(header.metadata["general.architecture"])
        prefix = self._architecture + "."
        self._values = {key[len(prefix) :]: value for key, value in header.metadata.items() if key.startswith(prefix)}
        self._read: set[str] = set()

    def find(self, kind: type[T], key: str) -> T | None:
        """Reads a key; None if it is missing.

        Args:
            kind: type of the value.
            key: the key.
        """
        self._read.add(key)
        value = self._values.get(key)
        if kind is float and type(value) is int:
            value = float(value)
        if value is not None and type(value) is not kind:
            raise UnsupportedModelError(
                f"metadata {self._architecture}.{key} is a {type(value).__name__}", f"a {kind.__name__} is read"
            )
        return value

    def get(self, kind: type[T], key: str, default: T | None = None) -> T:
        """Reads a key that must exist, or have a default.

        Args:
            kind: type of the value.
            key: the key.
            default: value if the key is missing.
        """
        value = self.find(kind, key)
        if value is None:
            value = default
        if value is None:
            raise EngineError(f"metadata {self._architecture}.{key} is missing", fix="Convert the model again.")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """Reads a whole number above 0.

        Args:
            key: the key.
            default: value if the key is missing.
        """
        value = self.get(int, key, default)
        if not 0 < value < 1 << 31:
            raise EngineError(f"metadata {self._architecture}.{key} is {value}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """Reads a finite number above 0.

        Args:
            key: the key.
            default: value if the key is missing.
        """
        value = self.get(float, key, default)
        if not 0 < value < math.inf:
            raise EngineError(f"metadata {self._architecture}.{key} is {value}")
        return value

    def refuse(self, key: str, *harmless: object) -> None:
        """Refuses a key, unless it has a harmless value.

        Args:
            key: the key.
            harmless: values that change nothing.

        Raises:
            UnsupportedModelError: the key has another value.
        """
        self._read.add(key)
        value = self._values.get(key)
        if value is not None and value not in harmless:
            raise UnsupportedModelError(f"metadata {self._architecture}.{key} = {value!r} is not implemented")

    def idle(self, *keys: str) -> None:
        """Accepts keys of this architecture that have no effect on results."""
        self._read.update(keys)

    def has(self, key: str) -> bool:
        """Checks if a key exists, with another value than 0 or an empty one."""
        self._read.add(key)
        return bool(self._values.get(key))

    def each(self, key: str, count: int, default: int | None = None) -> list[int]:
        """Reads a number for each of `count` layers; the file has as many, or one for all.

        Args:
            key: the key.
            count: number of layers.
            default: value if the key is missing.
        """
        self._read.add(key)
        value = self._values.get(key, default)
        if value is None:
            raise EngineError(f"metadata {self._architecture}.{key} is missing", fix="Convert the model again.")
        numbers = value[:count] if isinstance(value, list) else [value] * count
        if len(numbers) != count or not all(type(each) is int and 0 <= each < 1 << 31 for each in numbers):
            raise EngineError(f"metadata {self._architecture}.{key} does not fit {count} layers")
        return [int(each) for each in numbers]

    def layers(self, key: str, count: int) -> list[bool] | int | None:
        """Reads a flag for each of `count` layers, or a period; None if the key is missing.

        Args:
            key: the key.
            count: number of layers.
        """
        self._read.add(key)
        value = self._values.get(key)
        if isinstance(value, list) and len(value) >= count:
            return [bool(flag) for flag in value[:count]]
        if value is None or (type(value) is int and value > 0):
            return value
        raise EngineError(f"metadata {self._architecture}.{key} does not fit {count} layers")

    def finish(self) -> None:
        """Refuses keys that were not read."""
        for key in sorted(self._values.keys() - self._read - IDLE_KEYS):
            self.refuse(key, *((0,) if key in NO_EXPERTS else ()))
