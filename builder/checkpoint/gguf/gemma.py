"""Reads values of Gemma's config.json that need more than one key of the metadata.

Source: Gemma2Model, Gemma3Model and Gemma4Model of llama.cpp's conversion/gemma.py, and the computation in its
src/models/gemma*.cpp where no key has the value.
"""

import math
from typing import Any

import torch

from enginewright.builder.checkpoint.gguf import fields
from enginewright.builder.checkpoint.gguf.family import Field, Source
from enginewright.errors import EngineError, UnsupportedModelError

UNROTATED = 1e30  # divisor of the rope frequency of pairs that are not rotated


def query_scale(layers_of_27b: int) -> Field:
    """Makes the field of query_pre_attn_scalar, which the file does not have.

    Args:
        layers_of_27b: layers of the 27B model, which scales by its hidden size over its heads, every other by head_dim.
    """
    return lambda source: (fields.mean_head_dim if source.layers == layers_of_27b else fields.head_dim)(source)


# The others are Gemma 4's.
layer_types = fields.layer_types(6)
shared_layers = fields.count("attention.shared_kv_layers")  # the upper layers, which use keys of lower ones


def local_head_dim(source: Source) -> int:
    """Reads the width of a head in layers with a window; the common `attention.key_length` is that of the others."""
    dim = source.keys.size("attention.key_length_swa")
    source.keys.refuse("attention.value_length_swa", dim)
    source.keys.refuse("rope.dimension_count_swa", dim)
    return dim


def local_kv_heads(source: Source) -> int:
    """Reads the number of kv heads in layers with a window, or in all if no layer has one."""
    heads = _kv_heads(source)
    return heads.get("sliding_attention") or heads["full_attention"]


def global_kv_heads(source: Source) -> int | None:
    """Reads the number of kv heads in layers without a window; None if there are no such layers."""
    return _kv_heads(source).get("full_attention")


def _kv_heads(source: Source) -> dict[str, int]:
    """Returns kind of layer → number of kv heads."""
    counts = source.keys.each("attention.head_count_kv", source.layers)
    found: dict[str, int] = {}
    for kind, count in zip(layer_types(source), counts, strict=True):
        if found.setdefault(kind, count) != count:
            raise UnsupportedModelError(
                f"metadata gemma4.attention.head_count_kv is {found[kind]} and {count} in layers of {kind}"
            )
    return found


def keys_are_values(source: Source) -> bool:
    """Checks if layers without a window use keys as values."""
    kinds = layer_types(source)[: source.layers - shared_layers(source)]
    everywhere = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    without = [layer for layer in everywhere if f"blk.{layer}.attn_v.weight" not in source.tensors]
    if without and without != everywhere:
        raise EngineError(f"tensor blk.{without[0]}.attn_v.weight is missing", "other layers without a window have one")
    return bool(without)


def mlp_width(source: Source) -> int:
    """Reads the width of the lower layers' MLPs."""
    return source.keys.each("feed_forward_length", source.layers)[0]


def has_double_wide_mlp(source: Source) -> bool:
    """Checks if the MLPs of layers that use others' keys have twice the width."""
    layers, shared, first = source.layers, shared_layers(source), mlp_width(source)
    widths = source.keys.each("feed_forward_length", layers)
    for times in (1, 2):
        if widths == [first * times if layer >= layers - shared else first for layer in range(layers)]:
            return times == 2
    raise UnsupportedModelError(
        f"metadata gemma4.feed_forward_length is {widths}", f"{first} in some layers, twice that in the last {shared}"
    )


def rope_parameters(source: Source) -> dict[str, Any]:
    """Makes the parameters of rope for both kinds of layers."""
    return {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": _rotated_part(source.rope_factors, fields.head_dim(source)),
            "rope_theta": source.keys.positive("rope.freq_base"),
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": source.keys.positive("rope.freq_base_swa")},
    }


def _rotated_part(factors: torch.Tensor | None, dim: int) -> float:
    """Returns the share of a head's columns that rotates, where the first pairs do and the others do not."""
    if factors is None:
        raise EngineError("tensor rope_freqs.weight is missing", fix="Convert the model again.")
    pairs = int((factors == 1).sum())
    expected = torch.tensor([1.0] * pairs + [UNROTATED] * (dim // 2 - pairs))
    if not pairs or not torch.equal(factors, expected):
        raise UnsupportedModelError(
            "the rope factors are not those of a proportional rope",
            f"{dim // 2} are needed, 1 for each pair of columns that is rotated, then 1e30 for the others",
            "Build from the model's safetensors checkpoint instead.",
        )
    part = 2 * pairs / dim
    # Readers round pairs down: a quotient that is too small by its last bit would lose one.
    return part if int(part * dim // 2) == pairs else math.nextafter(part, math.inf)
