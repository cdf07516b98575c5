"""Reads the keys of families whose GGUF files have some of their own, or lack common ones.

Source: set_gguf_parameters of the families in llama.cpp's conversion/*.py, and the computation in its src/models/*.cpp
where no key has the value.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from enginewright.builder.checkpoint.gguf.keys import Keys
from enginewright.errors import EngineError, UnsupportedModelError


class Gating(IntEnum):
    """Function of experts' scores: `expert_gating_func`."""

    SOFTMAX = 1
    SIGMOID = 2
    SOFTMAX_OF_CHOSEN = 3


@dataclass(frozen=True)
class Source:
    """The inputs of a family's reader."""

    keys: Keys  # metadata of the file
    config: Mapping[str, Any]  # values that all families have; the family's own values replace those of the same name
    tensors: Collection[str]  # names of the file's tensors
    rope_factors: torch.Tensor | None = None  # divisors of rope frequencies ([head_dim / 2])

    def any_ends(self, end: str) -> bool:
        """Checks if a tensor's name has this end."""
        return any(name.endswith(f".{end}") for name in self.tensors)

    @property
    def layers(self) -> int:
        """Number of layers."""
        return int(self.config["num_hidden_layers"])


def one_of(keys: Keys, key: str, layers: int, default: int | None = None, without: bool = False) -> int:
    """Reads a number that all layers share.

    Args:
        keys: metadata of the file.
        key: the key.
        layers: number of layers.
        default: value if the file does not have the key.
        without: True if some layers may have none, which is 0.

    Raises:
        UnsupportedModelError: two layers have different numbers.
        EngineError: no layer has one.
    """
    numbers = set(keys.each(key, layers, default))
    found = sorted(numbers - {0}) if without else sorted(numbers)
    if len(found) > 1:
        raise UnsupportedModelError(f"metadata {key} is {' and '.join(map(str, found))} in different layers")
    if found in ([], [0]):
        raise EngineError(f"metadata {key} is 0 in all layers")
    return found[0]


def _gpt_oss(source: Source) -> dict[str, Any]:
    keys = source.keys
    keys.refuse("expert_gating_func", Gating.SOFTMAX_OF_CHOSEN)
    keys.refuse("attention.sliding_window_pattern", 2)
    keys.idle("expert_feed_forward_length")  # repeats feed_forward_length
    rope = source.config["rope_scaling"]
    return {
        # transformers rounds the borders of YaRN's ramp by default, and this family disables that.
        "rope_scaling": rope and {**rope, "truncate": False},
        "attention_bias": True,
        "sliding_window": keys.size("attention.sliding_window"),
        "num_local_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
    }


def _state_heads(keys: Keys) -> tuple[int, int]:
    """Reads the number of heads that carry states, and the width of one."""
    heads, width = keys.size("ssm.time_step_rank"), keys.size("ssm.inner_size")
    if width % heads:
        raise EngineError(f"metadata ssm.inner_size is {width}", f"not a multiple of ssm.time_step_rank, {heads}")
    return heads, width // heads


def _delta_net(source: Source) -> dict[str, Any]:
    keys, layers = source.keys, source.layers
    keys.idle("rope.dimension_sections")  # sections are for positions in pictures; in texts all three are equal
    interval, (heads, dim) = keys.size("full_attention_interval", 4), _state_heads(keys)
    return {
        "layer_types": ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(layers)],
        "linear_conv_kernel_dim": keys.size("ssm.conv_kernel"),
        "linear_key_head_dim": keys.size("ssm.state_size"),
        "linear_num_key_heads": keys.size("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": dim,
    }


def _delta_net_experts(source: Source) -> dict[str, Any]:
    keys = source.keys
    keys.idle("feed_forward_length")  # belongs to layers without experts, and there are none
    return _delta_net(source) | {
        "num_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.size("expert_shared_feed_forward_length"),
        "norm_topk_prob": True,  # llama.cpp always normalizes
    }


def _grouped_experts(keys: Keys, scores: Gating = Gating.SIGMOID) -> dict[str, Any]:
    """Reads DeepSeek V3's keys. Older files have no groups; llama.cpp then chooses from all experts."""
    keys.refuse("expert_gating_func", scores)
    return {
        "n_routed_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        "n_shared_experts": keys.find(int, "expert_shared_count") or 0,
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "n_group": keys.size("expert_group_count", 1),
        "topk_group": keys.size("expert_group_used_count", 1),
        "norm_topk_prob": keys.get(bool, "expert_weights_norm", False),
        "routed_scaling_factor": keys.positive("expert_weights_scale", 1.0),
    }


def _latent_attention(source: Source) -> dict[str, Any]:
    keys = source.keys
    rope_dim, heads = keys.size("rope.dimension_count"), source.config["num_attention_heads"]
    # Older converters wrote the width of a head in training, and kv_b in one tensor.
    absorbed = keys.has("attention.key_length_mla")
    key_dim = keys.size("attention.key_length_mla" if absorbed else "attention.key_length")
    value_dim = keys.size("attention.value_length_mla" if absorbed else "attention.value_length")
    keys.idle("attention.key_length", "attention.value_length", "attention.head_count_kv")
    rope = source.config["rope_scaling"]
    if rope:
        all_dims = round(keys.positive("rope.scaling.yarn_log_multiplier") / 0.1, 6)
        rope = {**rope, "mscale": all_dims, "mscale_all_dim": all_dims}
    return {
        "first_k_dense_replace": keys.find(int, "leading_dense_block_count") or 0,
        "kv_lora_rank": keys.size("attention.kv_lora_rank"),
        "num_key_value_heads": heads,
        "q_lora_rank": keys.find(int, "attention.q_lora_rank"),
        "qk_nope_head_dim": key_dim - rope_dim,
        "qk_rope_head_dim": rope_dim,
        "rope_scaling": rope,
        "v_head_dim": value_dim,
    }


def _deepseek(source: Source) -> dict[str, Any]:
    # DeepSeek V2's files have no corrected scores, and older ones no gating function.
    if not any(".exp_probs_b" in name for name in source.tensors):
        raise UnsupportedModelError(
            "tensor blk.0.exp_probs_b.bias is missing in all layers: DeepSeek V2's experts are not implemented"
        )
    return _grouped_experts(source.keys) | _latent_attention(source)


def _kimi_linear(source: Source) -> dict[str, Any]:
    """Makes the published config's form, which counts layers from 1. Layers without kv heads carry a state."""
    keys, latent = source.keys, _latent_attention(source)
    kv_heads = keys.each("attention.head_count_kv", source.layers)
    keys.refuse("expert_gating_func", Gating.SIGMOID)
    return latent | {
        "linear_attn_config": {
            "full_attn_layers": [layer for layer, heads in enumerate(kv_heads, 1) if heads],
            "kda_layers": [layer for layer, heads in enumerate(kv_heads, 1) if not heads],
            "head_dim": keys.size("kda.head_dim"),
            "num_heads": source.config["num_attention_heads"],
            "short_conv_kernel_size": keys.size("ssm.conv_kernel"),
        },
        "num_experts": keys.size("expert_count"),
        "num_experts_per_token": keys.size("expert_used_count"),
        "num_shared_experts": keys.size("expert_shared_count"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "moe_renormalize": True,  # llama.cpp always normalizes
        "num_expert_group": keys.size("expert_group_count", 1),
        "topk_group": keys.size("expert_group_used_count", 1),
        "routed_scaling_factor": keys.positive("expert_weights_scale", 1.0),
    }


def _mistral4(source: Source) -> dict[str, Any]:
    keys, own = source.keys, _latent_attention(source)
    rope = own["rope_scaling"]
    if rope is None:
        raise EngineError("metadata rope.scaling.type is missing", fix="Convert the model again.")
    own |= _grouped_experts(keys, Gating.SOFTMAX)
    original, beta = rope["original_max_position_embeddings"], keys.find(float, "attention.temperature_scale")
    keys.refuse("attention.temperature_length", original)
    if beta:
        return own | {"rope_scaling": {**rope, "llama_4_scaling_beta": beta}}
    # Queries grow from that position on, and not every converter writes the factor.
    return own | {"max_position_embeddings": min(original, source.config["max_position_embeddings"])}


def _glm4_moe(source: Source) -> dict[str, Any]:
    return _grouped_experts(source.keys) | {
        "attention_bias": source.any_ends("attn_q.bias"),
        "first_k_dense_replace": source.keys.find(int, "leading_dense_block_count") or 0,
        "use_qk_norm": source.any_ends("attn_q_norm.weight"),
    }


def _mistral(source: Source) -> dict[str, Any]:
    return {"sliding_window": source.keys.find(int, "attention.sliding_window") or None}


def _ministral3(source: Source) -> dict[str, Any]:
    keys, rope = source.keys, source.config["rope_scaling"]
    if rope is None:
        raise EngineError("metadata mistral3.rope.scaling.type is missing", fix="Convert the model again.")
    factor = keys.positive("rope.scaling.yarn_log_multiplier", 1.0)
    beta = keys.positive("attention.temperature_scale")
    rope = {**rope, "mscale": factor, "mscale_all_dim": factor, "llama_4_scaling_beta": beta}
    return _mistral(source) | {"rope_scaling": rope}


def _lfm2(source: Source) -> dict[str, Any]:
    return _short_conv(source) | {"block_auto_adjust_ff_dim": False}  # the width in the file is the adjusted one


def _short_conv(source: Source) -> dict[str, Any]:
    keys = source.keys
    kv_heads = keys.each("attention.head_count_kv", source.layers)
    return {
        "conv_bias": source.any_ends("shortconv.conv.bias"),
        "conv_L_cache": keys.size("shortconv.l_cache"),
        "layer_types": ["full_attention" if heads else "conv" for heads in kv_heads],
        "num_key_value_heads": one_of(keys, "attention.head_count_kv", source.layers, without=True),
    }


def _lfm2_moe(source: Source) -> dict[str, Any]:
    keys = source.keys
    keys.refuse("expert_gating_func", Gating.SIGMOID)
    return _short_conv(source) | {
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "norm_topk_prob": True,  # llama.cpp always normalizes
        "num_dense_layers": keys.find(int, "leading_dense_block_count") or 0,
        "num_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        "routed_scaling_factor": keys.positive("expert_weights_scale", 1.0),
        "use_expert_bias": any(".exp_probs_b" in name for name in source.tensors),
    }


def _mamba2(source: Source) -> dict[str, Any]:
    keys = source.keys
    heads, dim = _state_heads(keys)
    return {
        "mamba_conv_bias": source.any_ends("ssm_conv1d.bias"),
        "mamba_d_conv": keys.size("ssm.conv_kernel"),
        "mamba_d_head": dim,
        "mamba_d_state": keys.size("ssm.state_size"),
        "mamba_n_groups": keys.size("ssm.group_count"),
        "mamba_n_heads": heads,
        "mamba_proj_bias": source.any_ends("ssm_in.bias"),
    }


def _nemotron_h(source: Source) -> dict[str, Any]:
    keys, layers, mamba = source.keys, source.layers, _mamba2(source)
    # Attention has no positions, and the norms' epsilon is there under two names.
    keys.idle("rope.dimension_count", "rope.freq_base", "attention.layer_norm_epsilon")
    kv_heads, widths = keys.each("attention.head_count_kv", layers), keys.each("feed_forward_length", layers)
    has_experts = keys.has("expert_count")
    mlp = "moe" if has_experts else "mlp"
    pairs = zip(kv_heads, widths, strict=True)
    own = {
        "conv_kernel": mamba["mamba_d_conv"],
        "layers_block_type": ["attention" if heads else mlp if width else "mamba" for heads, width in pairs],
        "mamba_head_dim": mamba["mamba_d_head"],
        "mamba_num_heads": mamba["mamba_n_heads"],
        "mlp_bias": source.any_ends("ffn_up.bias"),
        "n_groups": mamba["mamba_n_groups"],
        "num_key_value_heads": one_of(keys, "attention.head_count_kv", source.layers, without=True),
        "ssm_state_size": mamba["mamba_d_state"],
        "use_bias": mamba["mamba_proj_bias"],
        "use_conv_bias": mamba["mamba_conv_bias"],
    }
    if not has_experts:
        return own | {"intermediate_size": one_of(keys, "feed_forward_length", layers, without=True)}
    own |= _grouped_experts(keys)
    own["moe_shared_expert_intermediate_size"] = keys.size("expert_shared_feed_forward_length")
    if keys.has("moe_latent_size"):
        own["moe_latent_size"] = keys.size("moe_latent_size")
    return own


def granite_factors(source: Source) -> dict[str, Any]:
    """Reads Granite's factors."""
    keys, head_dim = source.keys, source.config["head_dim"]
    return {
        "attention_multiplier": keys.positive("attention.scale", head_dim**-0.5),
        "embedding_multiplier": keys.positive("embedding_scale", 1.0),
        "residual_multiplier": keys.positive("residual_scale", 1.0),
        "logits_scaling": keys.positive("logit_scale", 1.0),
    }


def _granite_moe(source: Source) -> dict[str, Any]:
    keys = source.keys
    return granite_factors(source) | {
        "attention_bias": source.any_ends("attn_q.bias"),
        "num_local_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
    }


def _granite_moe_shared(source: Source) -> dict[str, Any]:
    return _granite_moe(source) | {
        "shared_intermediate_size": source.keys.size("expert_shared_feed_forward_length"),
    }


def _granite_hybrid(source: Source) -> dict[str, Any]:
    keys, mamba = source.keys, _mamba2(source)
    kv_heads, hidden = keys.each("attention.head_count_kv", source.layers), source.config["hidden_size"]
    width = mamba["mamba_d_head"] * mamba["mamba_n_heads"]
    if width % hidden:
        raise UnsupportedModelError(
            f"metadata granitehybrid.ssm.inner_size is {width}, which is not a multiple of {hidden}"
        )
    has_experts = keys.has("expert_count")
    own = _granite_moe_shared(source) if has_experts else granite_factors(source)
    rotates = keys.get(bool, "rope.scaling.finetuned", False)
    keys.idle("expert_used_count")
    return (
        own
        | mamba
        | {
            "attention_bias": source.any_ends("attn_q.bias"),
            "layer_types": ["attention" if heads else "mamba" for heads in kv_heads],
            "mamba_expand": width // hidden,
            "num_key_value_heads": one_of(keys, "attention.head_count_kv", source.layers, without=True),
            "num_local_experts": own.get("num_local_experts", 0),
            "position_embedding_type": "rope" if rotates else "nope",
            "shared_intermediate_size": keys.find(int, "expert_shared_feed_forward_length")
            or keys.size("feed_forward_length"),
        }
    )


def _falcon_h1(source: Source) -> dict[str, Any]:
    """Reads Falcon H1's keys, without factors on projections, which the converter multiplied into the weights."""
    if source.config["tie_word_embeddings"]:
        raise UnsupportedModelError(
            "tensor output.weight is missing: the factors of embeddings and logits are in the same weights",
            fix="Build from the model's safetensors checkpoint instead.",
        )
    mamba = _mamba2(source)
    return mamba | {
        "mamba_d_ssm": mamba["mamba_d_head"] * mamba["mamba_n_heads"],
        "mamba_norm_before_gate": False,  # as llama.cpp computes it
        "mamba_rms_norm": source.any_ends("ssm_norm.weight"),
    }


def _minimax_m2(source: Source) -> dict[str, Any]:
    keys = source.keys
    keys.refuse("expert_gating_func", Gating.SIGMOID)
    keys.idle("feed_forward_length")  # repeats the experts'
    return {
        "intermediate_size": keys.size("expert_feed_forward_length"),
        "num_local_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        "rotary_dim": keys.size("rope.dimension_count"),
    }


def _ernie4_5_moe(source: Source) -> dict[str, Any]:
    keys = source.keys
    # The converter writes the width of dense layers divided by the number of kv heads, which has no meaning.
    keys.idle("expert_shared_feed_forward_length")
    return {
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "moe_k": keys.size("expert_used_count"),
        "moe_layer_interval": keys.size("interleave_moe_layer_step", 1),
        "moe_layer_start_index": keys.find(int, "leading_dense_block_count") or 0,
        "moe_num_experts": keys.size("expert_count"),
        "moe_num_shared_experts": keys.find(int, "expert_shared_count") or 0,
        "use_bias": False,
    }


def _seed_oss(source: Source) -> dict[str, Any]:
    return {
        "attention_bias": source.any_ends("attn_q.bias"),
        "attention_out_bias": source.any_ends("attn_output.bias"),
        "mlp_bias": source.any_ends("ffn_up.bias"),
    }


def _gpt2(source: Source) -> dict[str, Any]:
    return {"activation_function": "gelu_new", "n_inner": source.keys.size("feed_forward_length")}


@dataclass(frozen=True)
class Family:
    """The differences of a family's files from the common keys."""

    read: Callable[[Source], dict[str, Any]] = lambda _: {}  # reads the family's own keys
    absent: tuple[str, ...] = ()  # common keys of config.json that the family lacks, or reads itself
    dropped: tuple[str, ...] = ()  # keys that the family lacks, and that are removed at the end
    # key of the file, and of config.json
    epsilon: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
    partial_rope: bool = False  # True if a part of each head is rotated


LIKE_LLAMA = Family()
KV, NO_ROPE, NO_ACT = ("num_key_value_heads",), ("rope_theta", "rope_scaling"), ("hidden_act",)
LAYER_NORM, RMS_NORM = "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"
FAMILIES: Mapping[str, Family] = {
    "cohere2": Family(epsilon=(LAYER_NORM, "layer_norm_eps")),
    "starcoder2": Family(epsilon=(LAYER_NORM, "norm_epsilon")),
    "glm4": Family(partial_rope=True),
    "gpt_oss": Family(_gpt_oss),
    "qwen3_5_text": Family(_delta_net, partial_rope=True),
    "qwen3_5_moe_text": Family(_delta_net_experts, ("intermediate_size",), partial_rope=True),
    "qwen3_next": Family(_delta_net_experts, ("intermediate_size",), partial_rope=True),
    "deepseek_v3": Family(_deepseek, (*KV, "head_dim")),
    "mistral4": Family(_mistral4, (*KV, "head_dim")),
    "kimi_linear": Family(_kimi_linear, (*KV, "head_dim")),
    "glm4_moe": Family(_glm4_moe, partial_rope=True),
    "mistral": Family(_mistral),
    "ministral3": Family(_ministral3),
    "lfm2": Family(_lfm2, KV, NO_ACT, (RMS_NORM, "norm_eps")),
    "lfm2_moe": Family(_lfm2_moe, KV, NO_ACT, (RMS_NORM, "norm_eps")),
    "nemotron_h": Family(
        _nemotron_h,
        (*KV, "intermediate_size"),
        (*NO_ROPE, *NO_ACT),
        (RMS_NORM, "layer_norm_epsilon"),
        partial_rope=True,
    ),
    "granitemoe": Family(_granite_moe),
    "granitemoeshared": Family(_granite_moe_shared),
    "granitemoehybrid": Family(_granite_hybrid, KV),
    "falcon_h1": Family(_falcon_h1),
    "minimax_m2": Family(_minimax_m2, ("intermediate_size",), partial_rope=True),
    "ernie4_5_moe": Family(_ernie4_5_moe),
    "seed_oss": Family(_seed_oss),
    "gemma4_text": Family(absent=(*KV, "intermediate_size"), dropped=("rope_scaling",)),
    "gpt2": Family(
        _gpt2,
        (*KV, "head_dim", "intermediate_size"),
        (*NO_ROPE, *NO_ACT),
        (LAYER_NORM, "layer_norm_epsilon"),
    ),
}
