"""The metadata of a GGUF file, read by type; and what all architectures write of their rope."""

import math
from typing import Any, TypeVar

from enginewright.builder.checkpoint.gguf.header import GgufHeader
from enginewright.errors import EngineError, UnsupportedModelError

T = TypeVar("T", int, float, bool, str)

# Keys without an effect on what is computed.
IDLE_KEYS = {"vocab_size", "rope.scaling.finetuned", "tensor_data_layout"}
NO_EXPERTS = {"expert_count", "expert_used_count"}  # which may be 0 where nobody reads them


class Keys:
    """The metadata under `<architecture>.`, read by type. What nobody asked for is refused by `finish`."""

    def __init__(self, header: GgufHeader) -> None:
        self._architecture = str(header.metadata["general.architecture"])
        prefix = self._architecture + "."
        self._values = {key[len(prefix) :]: value for key, value in header.metadata.items() if key.startswith(prefix)}
        self._read: set[str] = set()

    def find(self, kind: type[T], key: str) -> T | None:
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
        value = self.find(kind, key)
        if value is None:
            value = default
        if value is None:
            raise EngineError(f"metadata {self._architecture}.{key} is missing", fix="Convert the model anew.")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        value = self.get(int, key, default)
        if not 0 < value < 1 << 31:
            raise EngineError(f"metadata {self._architecture}.{key} is {value}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.get(float, key, default)
        if not 0 < value < math.inf:
            raise EngineError(f"metadata {self._architecture}.{key} is {value}")
        return value

    def refuse(self, key: str, *harmless: object) -> None:
        """Raises:
        UnsupportedModelError: the key is there with another than a harmless value.
        """
        self._read.add(key)
        value = self._values.get(key)
        if value is not None and value not in harmless:
            raise UnsupportedModelError(f"metadata {self._architecture}.{key} = {value!r} is not implemented")

    def idle(self, *keys: str) -> None:
        """Keys of this architecture that have no effect on what is computed."""
        self._read.update(keys)

    def has(self, key: str) -> bool:
        """Whether it is there, with another value than 0 or nothing."""
        self._read.add(key)
        return bool(self._values.get(key))

    def each(self, key: str, count: int, default: int | None = None) -> list[int]:
        """A number for each of `count` layers; the file has as many, or one for all."""
        self._read.add(key)
        value = self._values.get(key, default)
        if value is None:
            raise EngineError(f"metadata {self._architecture}.{key} is missing", fix="Convert the model anew.")
        numbers = value[:count] if isinstance(value, list) else [value] * count
        if len(numbers) != count or not all(type(each) is int and 0 <= each < 1 << 31 for each in numbers):
            raise EngineError(f"metadata {self._architecture}.{key} does not fit {count} layers")
        return [int(each) for each in numbers]

    def layers(self, key: str, count: int) -> list[bool] | int | None:
        """A flag for each of `count` layers, or a period."""
        self._read.add(key)
        value = self._values.get(key)
        if isinstance(value, list) and len(value) >= count:
            return [bool(flag) for flag in value[:count]]
        if value is None or (type(value) is int and value > 0):
            return value
        raise EngineError(f"metadata {self._architecture}.{key} does not fit {count} layers")

    def finish(self) -> None:
        for key in sorted(self._values.keys() - self._read - IDLE_KEYS):
            self.refuse(key, *((0,) if key in NO_EXPERTS else ()))


def layer_types(keys: Keys, count: int, period: int) -> list[str]:
    """Of each layer: one of `period` sees everything, where the file does not say which do."""
    pattern = keys.layers("attention.sliding_window_pattern", count) or period
    local = [(layer + 1) % pattern != 0 for layer in range(count)] if isinstance(pattern, int) else pattern
    return ["sliding_attention" if flag else "full_attention" for flag in local]


def rope_scaling(keys: Keys, context_tokens: int) -> dict[str, Any] | None:
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
