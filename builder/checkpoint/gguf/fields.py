"""Reads keys of config.json from a file's metadata, where several families have the same ones.

Source: the keys that llama.cpp's convert_hf_to_gguf.py, now conversion/*.py, writes, and the defaults of the loaders
and the computation in its src/models/*.cpp where no key has the value.
"""

from enum import IntEnum
from typing import Any

from enginewright.builder.checkpoint.gguf import rope
from enginewright.builder.checkpoint.gguf.family import Field, GgufFields, Source
from enginewright.errors import EngineError, UnsupportedModelError


class Gating(IntEnum):
    """Function of experts' scores: `expert_gating_func`."""

    SOFTMAX = 1
    SIGMOID = 2
    SOFTMAX_OF_CHOSEN = 3


def always(value: object) -> Field:
    """Makes the field of a value that all files have."""
    return lambda _: value


def size(key: str, default: int | None = None) -> Field:
    """Makes the field of a whole number above 0.

    Args:
        key: key of the metadata.
        default: value if the file does not have the key.
    """
    return lambda source: source.keys.size(key, default)


def positive(key: str, default: float | None = None) -> Field:
    """Makes the field of a finite number above 0.

    Args:
        key: key of the metadata.
        default: value if the file does not have the key.
    """
    return lambda source: source.keys.positive(key, default)


def optional(kind: type[int] | type[float], key: str) -> Field:
    """Makes the field of a number that may be missing, which is None.

    Args:
        kind: type of the number.
        key: key of the metadata.
    """
    return lambda source: source.keys.find(kind, key)


def count(key: str) -> Field:
    """Makes the field of a number that is 0 if the file does not have the key."""
    return lambda source: source.keys.find(int, key) or 0


def has_tensor(end: str) -> Field:
    """Makes the field that is True if a tensor's name has this end."""
    return lambda source: source.any_ends(end)


def sliding_window(source: Source) -> int | None:
    """Reads the width of windows; files in which no layer has one have 0, or no key."""
    return source.keys.find(int, "attention.sliding_window") or None


def layer_types(period: int) -> Field:
    """Makes the field of each layer's kind.

    Args:
        period: one of this number of layers has no window, if the file does not say which.
    """

    def read(source: Source) -> list[str]:
        pattern = source.keys.layers("attention.sliding_window_pattern", source.layers) or period
        layers = range(source.layers)
        local = [(layer + 1) % pattern != 0 for layer in layers] if isinstance(pattern, int) else pattern
        return ["sliding_attention" if flag else "full_attention" for flag in local]

    return read


def layers_with_kv_heads(kind: str, other: str) -> Field:
    """Makes the field of each layer's kind, in files whose other layers have 0 kv heads.

    Args:
        kind: kind of layers with kv heads.
        other: kind of the others.
    """
    return lambda source: [
        kind if heads else other for heads in source.keys.each("attention.head_count_kv", source.layers)
    ]


def one_of_some(key: str) -> Field:
    """Makes the field of a number that some layers share, and that is 0 in all others."""
    return lambda source: _one_of(source, key, set(source.keys.each(key, source.layers)) - {0})


def kv_heads(source: Source) -> int:
    """Reads the number of kv heads, which is the same in all layers."""
    key, heads = "attention.head_count_kv", source.keys.size("attention.head_count")
    return _one_of(source, key, set(source.keys.each(key, source.layers, heads)))


def _one_of(source: Source, key: str, numbers: set[int]) -> int:
    """Returns the only number.

    Raises:
        UnsupportedModelError: two layers have different numbers.
        EngineError: no layer has one.
    """
    found = sorted(numbers)
    if len(found) > 1:
        raise UnsupportedModelError(f"metadata {key} is {' and '.join(map(str, found))} in different layers")
    if found in ([], [0]):
        raise EngineError(f"metadata {key} is 0 in all layers")
    return found[0]


def vocab_size(source: Source) -> int:
    """Returns the number of the embedding table's rows."""
    embedding = source.tensors.get("token_embd.weight")
    if embedding is None:
        raise EngineError("tensor token_embd.weight is missing")
    return embedding.shape[0]


def is_tied(source: Source) -> bool:
    """Checks if the embedding table is the head, too."""
    return "output.weight" not in source.tensors


def mean_head_dim(source: Source) -> int:
    """Divides the hidden size by the number of heads."""
    return source.keys.size("embedding_length") // source.keys.size("attention.head_count")


def partly_rotated_head_dim(source: Source) -> int:
    """Reads the width of a head, a part of which may be rotated."""
    keys, rotated = source.keys, source.keys.find(int, "rope.dimension_count")
    dim = keys.size(
        "attention.key_length", rotated if source.family.has_paired_rope and rotated else mean_head_dim(source)
    )
    keys.refuse("attention.value_length", dim)
    return dim


def head_dim(source: Source) -> int:
    """Reads the width of a head, all of which is rotated."""
    dim = partly_rotated_head_dim(source)
    source.keys.refuse("rope.dimension_count", dim)
    return dim


def rotated_part(source: Source) -> float:
    """Returns the share of a head that rope rotates."""
    rotated = source.keys.find(int, "rope.dimension_count")
    return rotated / partly_rotated_head_dim(source) if rotated else 1.0


rope_theta = positive("rope.freq_base", 10_000.0)


def rope_scaling(source: Source) -> dict[str, Any] | None:
    """Makes the rope_scaling; None if there is none."""
    scaling = rope.scaling(source.keys, source.keys.size("context_length"))
    if source.rope_factors is not None and scaling is not None:
        raise UnsupportedModelError("rope factors together with a rope scaling are not implemented")
    return scaling


def check_unused_rope(source: Source) -> None:
    """Reads the rope keys of a family without rope, whose files have some of them."""
    rope_theta(source)
    rope_scaling(source)
    source.keys.find(int, "rope.dimension_count")


LAYER_NORM, RMS_NORM = "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"
COMMON: GgufFields = {
    "vocab_size": vocab_size,
    "hidden_size": size("embedding_length"),
    "num_hidden_layers": lambda source: source.layers,
    "num_attention_heads": size("attention.head_count"),
    "max_position_embeddings": size("context_length"),
    "tie_word_embeddings": is_tied,
    "rms_norm_eps": positive(RMS_NORM),
    "intermediate_size": size("feed_forward_length"),
    "num_key_value_heads": kv_heads,
    "head_dim": head_dim,
    "hidden_act": always("silu"),
    "rope_theta": rope_theta,
    "rope_scaling": rope_scaling,
}
PARTIAL_ROPE: GgufFields = {"head_dim": partly_rotated_head_dim, "partial_rotary_factor": rotated_part}
ATTENTION_BIAS: GgufFields = {"attention_bias": has_tensor("attn_q.bias")}
BIASES: GgufFields = ATTENTION_BIAS | {"mlp_bias": has_tensor("ffn_up.bias")}

EXPERTS: GgufFields = {
    "num_experts": size("expert_count"),
    "num_experts_per_tok": size("expert_used_count"),
    "moe_intermediate_size": size("expert_feed_forward_length"),
    "norm_topk_prob": always(True),  # llama.cpp always normalizes
}
LOCAL_EXPERTS: GgufFields = {
    "num_local_experts": size("expert_count"),
    "num_experts_per_tok": size("expert_used_count"),
}
# DeepSeek V3's. Older files have no groups; llama.cpp then chooses from all experts.
GROUPED_EXPERTS: GgufFields = {
    "n_routed_experts": size("expert_count"),
    "num_experts_per_tok": size("expert_used_count"),
    "n_shared_experts": count("expert_shared_count"),
    "moe_intermediate_size": size("expert_feed_forward_length"),
    "n_group": size("expert_group_count", 1),
    "topk_group": size("expert_group_used_count", 1),
    "norm_topk_prob": lambda source: source.keys.get(bool, "expert_weights_norm", False),
    "routed_scaling_factor": positive("expert_weights_scale", 1.0),
}
SIGMOID_GATING = {"expert_gating_func": Gating.SIGMOID}


def _latent_width(name: str) -> Field:
    """Makes the field of a head's width, which older converters wrote under a key that is now another width's."""

    def read(source: Source) -> int:
        is_new = source.keys.has("attention.key_length_mla")
        return source.keys.size(f"attention.{name}_mla" if is_new else f"attention.{name}")

    return read


def latent_rope_scaling(source: Source) -> dict[str, Any] | None:
    """Makes the rope_scaling of latent attention; None if there is none."""
    scaling = rope_scaling(source)
    if scaling is None:
        return None
    all_dims = round(source.keys.positive("rope.scaling.yarn_log_multiplier") / 0.1, 6)
    return {**scaling, "mscale": all_dims, "mscale_all_dim": all_dims}


_key_width = _latent_width("key_length")
LATENT_ATTENTION: GgufFields = {
    "first_k_dense_replace": count("leading_dense_block_count"),
    "kv_lora_rank": size("attention.kv_lora_rank"),
    "num_key_value_heads": size("attention.head_count"),
    "q_lora_rank": optional(int, "attention.q_lora_rank"),
    "qk_nope_head_dim": lambda source: _key_width(source) - source.keys.size("rope.dimension_count"),
    "qk_rope_head_dim": size("rope.dimension_count"),
    "rope_scaling": latent_rope_scaling,
    "v_head_dim": _latent_width("value_length"),
}
LATENT_ATTENTION_IDLE = ("attention.key_length", "attention.value_length", "attention.head_count_kv")


def state_head_dim(source: Source) -> int:
    """Returns the width of a head that carries a state."""
    heads, width = source.keys.size("ssm.time_step_rank"), source.keys.size("ssm.inner_size")
    if width % heads:
        raise EngineError(f"metadata ssm.inner_size is {width}", f"not a multiple of ssm.time_step_rank, {heads}")
    return width // heads


def _delta_net_layers(source: Source) -> list[str]:
    interval, layers = source.keys.size("full_attention_interval", 4), range(source.layers)
    return ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in layers]


DELTA_NET: GgufFields = {
    "layer_types": _delta_net_layers,
    "linear_conv_kernel_dim": size("ssm.conv_kernel"),
    "linear_key_head_dim": size("ssm.state_size"),
    "linear_num_key_heads": size("ssm.group_count"),
    "linear_num_value_heads": size("ssm.time_step_rank"),
    "linear_value_head_dim": state_head_dim,
}
DELTA_NET_EXPERTS: GgufFields = (
    DELTA_NET
    | EXPERTS
    | {
        "shared_expert_intermediate_size": size("expert_shared_feed_forward_length"),
    }
)
MAMBA2: GgufFields = {
    "mamba_conv_bias": has_tensor("ssm_conv1d.bias"),
    "mamba_d_conv": size("ssm.conv_kernel"),
    "mamba_d_head": state_head_dim,
    "mamba_d_state": size("ssm.state_size"),
    "mamba_n_groups": size("ssm.group_count"),
    "mamba_n_heads": size("ssm.time_step_rank"),
    "mamba_proj_bias": has_tensor("ssm_in.bias"),
}
SHORT_CONV: GgufFields = {
    "conv_bias": has_tensor("shortconv.conv.bias"),
    "conv_L_cache": size("shortconv.l_cache"),
    "layer_types": layers_with_kv_heads("full_attention", "conv"),
    "num_key_value_heads": one_of_some("attention.head_count_kv"),
}
GRANITE_FACTORS: GgufFields = {
    "attention_multiplier": lambda source: source.keys.positive("attention.scale", head_dim(source) ** -0.5),
    "embedding_multiplier": positive("embedding_scale", 1.0),
    "residual_multiplier": positive("residual_scale", 1.0),
    "logits_scaling": positive("logit_scale", 1.0),
}
