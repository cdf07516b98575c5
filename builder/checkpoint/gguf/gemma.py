"""Reads the keys of Gemma's GGUF files.

Source: Gemma2Model, Gemma3Model and Gemma4Model of llama.cpp's conversion/gemma.py, and the computation in its
src/models/gemma*.cpp where no key has the value.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from enginewright.builder.checkpoint.gguf.families import Source
from enginewright.builder.checkpoint.gguf.keys import Keys, layer_types
from enginewright.errors import EngineError, UnsupportedModelError

GEMMA2_27B_LAYERS = 46
GEMMA3_PATTERN = 6  # every sixth layer is global
GEMMA3_LOCAL_BASE = 10_000.0
GEMMA3_27B_LAYERS = 62
UNROTATED = 1e30  # divisor of the rope frequency of pairs that are not rotated


def gemma2(source: Source) -> dict[str, Any]:
    """Reads Gemma 2's keys."""
    keys = source.keys
    window = keys.size("attention.sliding_window", 4096)
    return _gemma(source, GEMMA2_27B_LAYERS) | {
        "rope_theta": keys.positive("rope.freq_base", 10_000.0),
        "layer_types": layer_types(keys, source.layers, 2),
        "sliding_window": window,
    }


def gemma3(source: Source) -> dict[str, Any]:
    """Reads Gemma 3's keys."""
    keys = source.keys
    window = keys.find(int, "attention.sliding_window") or 0
    types = layer_types(keys, source.layers, GEMMA3_PATTERN)
    own = _gemma(source, GEMMA3_27B_LAYERS) | {
        "rope_theta": keys.positive("rope.freq_base", 10_000.0),
        "rope_local_base_freq": keys.positive("rope.freq_base_swa", GEMMA3_LOCAL_BASE),
        "layer_types": types if window else ["full_attention"] * source.layers,
    }
    return own | ({"sliding_window": window} if window else {})


def _gemma(source: Source, layers_of_27b: int) -> dict[str, Any]:
    keys, config = source.keys, source.config
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "final_logit_softcapping": keys.find(float, "final_logit_softcapping"),
        "attn_logit_softcapping": keys.find(float, "attn_logit_softcapping"),
        # The file does not have it. The 27B model scales by its hidden size over its heads, every other by head_dim.
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"]
        if source.layers == layers_of_27b
        else config["head_dim"],
    }


def gemma4(source: Source) -> dict[str, Any]:
    """Reads Gemma 4's keys; the common `attention.key_length` is that of layers without a window."""
    keys, config = source.keys, source.config
    local_dim, global_dim = keys.size("attention.key_length_swa"), config["head_dim"]
    keys.refuse("attention.value_length_swa", local_dim)
    keys.refuse("rope.dimension_count_swa", local_dim)
    types = layer_types(keys, source.layers, 6)
    shared = keys.find(int, "attention.shared_kv_layers") or 0
    width, is_wide = _mlp_widths(keys, source.layers, shared)
    kv_heads = _kv_heads(keys, types)
    own: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": source.any_ends("attn_q.bias"),
        "attention_k_eq_v": _keys_are_values(source, types[: source.layers - shared]),
        "final_logit_softcapping": keys.find(float, "final_logit_softcapping"),
        "global_head_dim": global_dim,
        "head_dim": local_dim,
        "hidden_size_per_layer_input": keys.find(int, "embedding_length_per_layer_input") or 0,
        "intermediate_size": width,
        "layer_types": types,
        "num_global_key_value_heads": kv_heads.get("full_attention"),
        "num_key_value_heads": kv_heads.get("sliding_attention") or kv_heads["full_attention"],
        "num_kv_shared_layers": shared,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": _rotated_part(source.rope_factors, global_dim),
                "rope_theta": keys.positive("rope.freq_base"),
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": keys.positive("rope.freq_base_swa")},
        },
        "sliding_window": keys.size("attention.sliding_window"),
        "use_double_wide_mlp": is_wide,
        "vocab_size_per_layer_input": config["vocab_size"],
    }
    if not keys.has("expert_count"):
        return own
    return own | {
        "enable_moe_block": True,
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "num_experts": keys.size("expert_count"),
        "top_k_experts": keys.size("expert_used_count"),
    }


def _mlp_widths(keys: Keys, layers: int, shared: int) -> tuple[int, bool]:
    """Returns the width of the lower layers' MLPs, and if those of the upper `shared` layers have twice that."""
    widths = keys.each("feed_forward_length", layers)
    first = widths[0]
    for times in (1, 2):
        if widths == [first * times if layer >= layers - shared else first for layer in range(layers)]:
            return first, times == 2
    raise UnsupportedModelError(
        f"metadata gemma4.feed_forward_length is {widths}", f"{first} in some layers, twice that in the last {shared}"
    )


def _kv_heads(keys: Keys, types: Sequence[str]) -> dict[str, int]:
    """Returns kind of layer → number of kv heads."""
    counts = keys.each("attention.head_count_kv", len(types))
    found: dict[str, int] = {}
    for kind, count in zip(types, counts, strict=True):
        if found.setdefault(kind, count) != count:
            raise UnsupportedModelError(
                f"metadata gemma4.attention.head_count_kv is {found[kind]} and {count} in layers of {kind}"
            )
    return found


def _keys_are_values(source: Source, types: Sequence[str]) -> bool:
    """Checks if layers without a window use keys as values. types: kinds of the layers with keys of their own."""
    everywhere = [layer for layer, kind in enumerate(types) if kind == "full_attention"]
    without = [layer for layer in everywhere if f"blk.{layer}.attn_v.weight" not in source.tensors]
    if without and without != everywhere:
        raise EngineError(f"tensor blk.{without[0]}.attn_v.weight is missing", "other layers without a window have one")
    return bool(without)


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
