"""Reads the metadata of a GGUF file by type, and the rope keys that all architectures share."""

import math
from typing import Any, TypeVar

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


def layer_types(keys: Keys, count: int, period: int) -> list[str]:
    """Returns the kind of each layer.

    Args:
        keys: metadata of the file.
        count: number of layers.
        period: one of this number of layers has no window, if the file does not say which.
    """
    pattern = keys.layers("attention.sliding_window_pattern", count) or period
    local = [(layer + 1) % pattern != 0 for layer in range(count)] if isinstance(pattern, int) else pattern
    return ["sliding_attention" if flag else "full_attention" for flag in local]


def rope_scaling(keys: Keys, context_tokens: int) -> dict[str, Any] | None:
    """Makes the rope_scaling of config.json; None if there is none.

    Args:
        keys: metadata of the file.
        context_tokens: positions of the longest sequence.
    """
    old_factor = keys.find(float, "rope.scale_linear")
    factor = keys.find(float, "rope.scaling.factor") or old_factor
    kind = keys.get(str, "rope.scaling.type", "linear" if factor not in (None, 0.0, 1.0) else "none")
    original = keys.find(int, "rope.scaling.original_context_length")
    keys.refuse("rope.scaling.yarn_ext_factor", 1.0)
    keys.refuse("rope.scaling.attn_factor", 1.0)
    if kind == "none":
        return None
    if kind not in ("linear", "yarn") or not factor or not math.isfinite(factor):
        raise UnsupportedModelError(f"rope scaling {kind!r} with factor {factor} is not implemented")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = original or context_tokens
        for key, name in (("attn_factor", "attention_factor"), ("beta_fast", "beta_fast"), ("beta_slow", "beta_slow")):
            if (value := keys.find(float, f"rope.scaling.yarn_{key}")) is not None:
                scaling[name] = value
    return scaling
