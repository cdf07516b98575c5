"""Reads config.json by key and type, and knows which keys were read.

A key with the value null counts as absent, as it does for transformers.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar, overload

from enginewright.errors import EngineError, UnsupportedModelError

T = TypeVar("T")
D = TypeVar("D")

_REQUIRED: Any = object()
MOST = 2**31 - 1  # of what is counted: positions and token ids have 32 bits

# Far above any model that is known: what is larger is an error, which must not be allocated before it is noticed.
MOST_TOKENS = 2**24
MOST_LAYERS = 2**12
MOST_HEADS = 2**14
MOST_HEAD_DIM = 2**13
MOST_COLUMNS = 2**22

# Keys that change what some family computes, with the values under which they change nothing. A model that does
# not read one of them does not implement it. Keys that are not listed (use_cache, initializer_range,
# attention_dropout, pretraining_tp, …) cannot change a result, or mean nothing to transformers either.
CHANGES_THE_RESULT: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "alibi": (False,),
    "attention_bias": (False,),
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "embedding_multiplier": (1.0,),
    "final_logit_softcapping": (),
    "hidden_act": (),
    "hidden_activation": (),
    "is_encoder_decoder": (False,),
    "layer_types": (),
    "logit_scale": (1.0,),
    "logits_scaling": (1.0,),
    "mlp_bias": (False,),
    "no_rope_layers": (),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "original_max_position_embeddings": (),
    "partial_rotary_factor": (1.0,),
    "pruned_heads": ({}, []),
    "qk_layernorm": (False,),
    "query_pre_attn_scalar": (),
    "quantization_config": (),
    "residual_multiplier": (1.0,),
    "rope_interleaved": (False,),
    "rope_local_base_freq": (),
    "rope_parameters": (),
    "rope_scaling": (),
    "rope_theta": (),
    "rotary_pct": (1.0,),
    "scale_embedding": (False,),
    "sliding_window": (),
    "sliding_window_pattern": (),
    "tie_word_embeddings": (),
    "use_bidirectional_attention": (False,),
    "use_qk_norm": (False,),
    "use_sliding_window": (False,),
}


class ConfigReader:
    """One JSON object of a checkpoint's config."""

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self._values = values
        self._where = where
        self._read: set[str] = set()

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

    def names(self) -> list[str]:
        """All keys that are there."""
        return list(self._values)

    def section(self, *keys: str) -> "ConfigReader | None":
        """An object within the config, None if there is none."""
        key, value = self._find(keys)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(f"{key} is {_short(value)}, not an object")
        return ConfigReader(value, f"{self._where}: {key}")

    def error(self, why: str) -> EngineError:
        return EngineError(f"{self._where} cannot be used", why)

    def unsupported(self, why: str, fix: str = "") -> UnsupportedModelError:
        return UnsupportedModelError(f"{self._where} asks for what is not implemented", why, fix)

    def refuse_unread(self) -> None:
        """Refuse, by name, keys that change results and that nobody read.

        Raises:
            UnsupportedModelError: naming all of them.
        """
        self._refuse(key for key, harmless in CHANGES_THE_RESULT.items() if self._values.get(key) not in harmless)

    def refuse_any_unread(self, harmless: Collection[str] = ()) -> None:
        """Refuse, by name, every key that nobody read: for objects in which every key counts."""
        self._refuse(key for key in self._values if key not in harmless)

    def _refuse(self, keys: Iterable[str]) -> None:
        found = [key for key in keys if key not in self._read and self._values.get(key) is not None]
        if found:
            raise self.unsupported(", ".join(f"{key} = {_short(self._values[key])}" for key in found))

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
