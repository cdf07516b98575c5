"""Lists the families whose GGUF files can be read: one entry for each, with everything that is its own.

Source: the family's class in llama.cpp's conversion/*.py, and the computation in its src/models/*.cpp where no key has
the value.
"""

from dataclasses import replace
from typing import Any

from enginewright.builder.checkpoint.gguf import fields, gemma, names, recipes, rope
from enginewright.builder.checkpoint.gguf.family import Field, GgufFamily, GgufFields, Source
from enginewright.builder.checkpoint.gguf.fields import always, count, has_tensor, layer_types, optional, positive, size
from enginewright.builder.checkpoint.gguf.header import GgufHeader
from enginewright.builder.checkpoint.gguf.recipes import Recipe
from enginewright.errors import EngineError, UnsupportedModelError


def find_family(header: GgufHeader) -> GgufFamily:
    """Finds the family of a file.

    Raises:
        UnsupportedModelError: its architecture has no family.
    """
    name = header.metadata.get("general.architecture")
    known = [family for family in FAMILIES if family.architecture == name]
    if not known:
        raise UnsupportedModelError(
            f"GGUF files of architecture {name!r} are not supported",
            f"supported are {', '.join(dict.fromkeys(family.architecture for family in FAMILIES))}",
            "Build from the model's safetensors checkpoint instead.",
        )
    marked = [family for family in known if family.marker and header.metadata.get(f"{name}.{family.marker}")]
    return (marked or [family for family in known if not family.marker])[0]


def _llama_rope_scaling(source: Source) -> dict[str, Any] | None:
    scaling = fields.rope_scaling(source)
    if source.rope_factors is None:
        return scaling
    return rope.llama3_scaling(source.rope_factors, fields.rope_theta(source), fields.head_dim(source))


def _check_cohere2(source: Source) -> None:
    if fields.head_dim(source) * source.keys.size("attention.head_count") != source.keys.size("embedding_length"):
        raise UnsupportedModelError("heads of another width than hidden / heads are not implemented for cohere2")


def _gpt_oss_rope_scaling(source: Source) -> dict[str, Any] | None:
    scaling = fields.rope_scaling(source)
    # transformers rounds the borders of YaRN's ramp by default, and this family disables that.
    return scaling and {**scaling, "truncate": False}


def _check_deepseek(source: Source) -> None:
    # DeepSeek V2's files have no corrected scores, and older ones no gating function.
    if not any(".exp_probs_b" in name for name in source.tensors):
        raise UnsupportedModelError(
            "tensor blk.0.exp_probs_b.bias is missing in all layers: DeepSeek V2's experts are not implemented"
        )


def _mistral4_rope_scaling(source: Source) -> dict[str, Any]:
    scaling = fields.latent_rope_scaling(source)
    source.keys.refuse("rope.scaling.type", "yarn", "none")
    if scaling is None or scaling["rope_type"] != "yarn":
        raise EngineError("metadata rope.scaling.type is missing", fix="Convert the model again.")
    beta = source.keys.find(float, "attention.temperature_scale")
    source.keys.refuse("attention.temperature_length", scaling["original_max_position_embeddings"])
    return {**scaling, "llama_4_scaling_beta": beta} if beta else scaling


def _mistral4_context(source: Source) -> int:
    context, scaling = source.keys.size("context_length"), _mistral4_rope_scaling(source)
    if "llama_4_scaling_beta" in scaling:
        return context
    # Queries grow from that position on, and not every converter writes the factor.
    original: int = scaling["original_max_position_embeddings"]
    return min(original, context)


def _kimi_linear_attention(source: Source) -> dict[str, Any]:
    """Makes the published config's form, which counts layers from 1. Layers without kv heads carry a state."""
    kv_heads = source.keys.each("attention.head_count_kv", source.layers)
    return {
        "full_attn_layers": [layer for layer, heads in enumerate(kv_heads, 1) if heads],
        "kda_layers": [layer for layer, heads in enumerate(kv_heads, 1) if not heads],
        "head_dim": source.keys.size("kda.head_dim"),
        "num_heads": source.keys.size("attention.head_count"),
        "short_conv_kernel_size": source.keys.size("ssm.conv_kernel"),
    }


def _ministral3_rope_scaling(source: Source) -> dict[str, Any]:
    scaling = fields.rope_scaling(source)
    if scaling is None:
        raise EngineError("metadata mistral3.rope.scaling.type is missing", fix="Convert the model again.")
    factor = source.keys.positive("rope.scaling.yarn_log_multiplier", 1.0)
    beta = source.keys.positive("attention.temperature_scale")
    return {**scaling, "mscale": factor, "mscale_all_dim": factor, "llama_4_scaling_beta": beta}


def _nemotron_h_layers(name: str) -> Field:
    """Makes the field of each layer's kind. name: that of layers with neither attention nor a state."""

    def read(source: Source) -> list[str]:
        kv_heads = source.keys.each("attention.head_count_kv", source.layers)
        widths = source.keys.each("feed_forward_length", source.layers)
        pairs = zip(kv_heads, widths, strict=True)
        return ["attention" if heads else name if width else "mamba" for heads, width in pairs]

    return read


def _granite_hybrid_expansion(source: Source) -> int:
    hidden, width = source.keys.size("embedding_length"), source.keys.size("ssm.inner_size")
    if width % hidden:
        raise UnsupportedModelError(
            f"metadata granitehybrid.ssm.inner_size is {width}, which is not a multiple of {hidden}"
        )
    return width // hidden


def _granite_hybrid_positions(source: Source) -> str:
    return "rope" if source.keys.get(bool, "rope.scaling.finetuned", False) else "nope"


def _granite_hybrid_mlp(source: Source) -> int:
    return source.keys.find(int, "expert_shared_feed_forward_length") or source.keys.size("feed_forward_length")


def _check_falcon_h1(source: Source) -> None:
    if fields.is_tied(source):
        raise UnsupportedModelError(
            "tensor output.weight is missing: the factors of embeddings and logits are in the same weights",
            fix="Build from the model's safetensors checkpoint instead.",
        )


_GEMMA: GgufFields = {
    "hidden_activation": always("gelu_pytorch_tanh"),
    "attention_bias": always(False),
    "final_logit_softcapping": optional(float, "final_logit_softcapping"),
    "attn_logit_softcapping": optional(float, "attn_logit_softcapping"),
}

FAMILIES = (
    GgufFamily(
        "llama",
        "llama",
        names.PROJECTIONS | names.TWO_NORMS,
        config=fields.BIASES | {"rope_scaling": _llama_rope_scaling},
        has_rope_factors=True,
        has_paired_rope=True,
    ),
    GgufFamily(
        "llama",
        "mixtral",
        names.ATTENTION | names.MIXTRAL_EXPERTS | names.TWO_NORMS,
        marker="expert_count",
        config=fields.LOCAL_EXPERTS,
        has_paired_rope=True,
    ),
    GgufFamily("qwen2", "qwen2", names.PROJECTIONS | names.TWO_NORMS, config={"use_sliding_window": always(False)}),
    GgufFamily(
        "qwen3",
        "qwen3",
        names.PROJECTIONS | names.TWO_NORMS | names.HEAD_NORMS,
        config=fields.ATTENTION_BIAS | {"use_sliding_window": always(False)},
    ),
    GgufFamily(
        "qwen3moe",
        "qwen3_moe",
        names.ATTENTION | names.EXPERTS | names.TWO_NORMS | names.HEAD_NORMS,
        config=fields.ATTENTION_BIAS | fields.EXPERTS | {"use_sliding_window": always(False)},
    ),
    GgufFamily(
        "gemma2",
        "gemma2",
        names.PROJECTIONS | names.FOUR_NORMS,
        config=_GEMMA
        | {
            "query_pre_attn_scalar": gemma.query_scale(layers_of_27b=46),
            "layer_types": layer_types(2),
            "sliding_window": size("attention.sliding_window", 4096),
        },
        lacks=("hidden_act",),
        has_shifted_norms=True,
    ),
    _GEMMA3 := GgufFamily(
        "gemma3",
        "gemma3_text",
        names.PROJECTIONS | names.FOUR_NORMS | names.HEAD_NORMS,
        config=_GEMMA
        | {
            "query_pre_attn_scalar": gemma.query_scale(layers_of_27b=62),
            "rope_local_base_freq": positive("rope.freq_base_swa", 10_000.0),
            "layer_types": lambda source: ["full_attention"] * source.layers,
        },
        lacks=("hidden_act",),
        idle=("attention.sliding_window", "attention.sliding_window_pattern"),
        has_shifted_norms=True,
    ),
    replace(
        _GEMMA3,
        marker="attention.sliding_window",
        config=_GEMMA3.config | {"layer_types": layer_types(6), "sliding_window": size("attention.sliding_window")},
    ),
    _GEMMA4 := GgufFamily(
        "gemma4",
        "gemma4_text",
        names.PROJECTIONS
        | names.FOUR_NORMS
        | names.HEAD_NORMS
        | {
            "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
            "ffn_gate_inp": "router.proj",
            "ffn_gate_exps": "experts.{}.gate_proj",
            "ffn_up_exps": "experts.{}.up_proj",
            "ffn_down_exps": "experts.{}.down_proj",
            "ffn_gate_up_exps": ("experts.{}.gate_proj", "experts.{}.up_proj"),
        },
        config=fields.ATTENTION_BIAS
        | {
            "hidden_activation": always("gelu_pytorch_tanh"),
            "attention_k_eq_v": gemma.keys_are_values,
            "final_logit_softcapping": optional(float, "final_logit_softcapping"),
            "global_head_dim": fields.head_dim,
            "head_dim": gemma.local_head_dim,
            "hidden_size_per_layer_input": count("embedding_length_per_layer_input"),
            "intermediate_size": gemma.mlp_width,
            "layer_types": gemma.layer_types,
            "num_global_key_value_heads": gemma.global_kv_heads,
            "num_key_value_heads": gemma.local_kv_heads,
            "num_kv_shared_layers": gemma.shared_layers,
            "rope_parameters": gemma.rope_parameters,
            "sliding_window": size("attention.sliding_window"),
            "use_double_wide_mlp": gemma.has_double_wide_mlp,
            "vocab_size_per_layer_input": fields.vocab_size,
        },
        lacks=("hidden_act", "rope_scaling", "rope_theta"),
        check=fields.rope_scaling,
        has_rope_factors=True,
        recipes=(
            Recipe("layer_scalar", ("layer_output_scale.weight",)),
            Recipe("router.scale", ("ffn_gate_inp.scale",)),
            Recipe("router.per_expert_scale", ("ffn_down_exps.scale",)),
        ),
        top=names.TOP
        | {
            "per_layer_token_embd": "model.embed_tokens_per_layer",
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
        },
    ),
    replace(
        _GEMMA4,
        marker="expert_count",
        config=_GEMMA4.config
        | {
            "enable_moe_block": always(True),
            "moe_intermediate_size": size("expert_feed_forward_length"),
            "num_experts": size("expert_count"),
            "top_k_experts": size("expert_used_count"),
        },
    ),
    GgufFamily("smollm3", "smollm3", names.PROJECTIONS | names.TWO_NORMS, config=fields.BIASES, has_paired_rope=True),
    GgufFamily(
        "granite",
        "granite",
        names.PROJECTIONS | names.TWO_NORMS,
        config=fields.BIASES | fields.GRANITE_FACTORS,
        # For Granite 4 without states, the converter writes keys of states, and repeats the MLP's.
        idle=(
            "ssm.conv_kernel",
            "ssm.group_count",
            "ssm.inner_size",
            "ssm.state_size",
            "ssm.time_step_rank",
            "expert_shared_feed_forward_length",
        ),
        has_paired_rope=True,
    ),
    _OLMO2 := GgufFamily(
        "olmo2",
        "olmo2",
        names.PROJECTIONS
        | names.HEAD_NORMS
        | {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
        config=fields.ATTENTION_BIAS,
    ),
    replace(
        _OLMO2,
        model_type="olmo3",
        marker="attention.sliding_window",
        config=_OLMO2.config | {"layer_types": layer_types(4), "sliding_window": size("attention.sliding_window")},
    ),
    GgufFamily(
        "glm4",
        "glm4",
        names.ATTENTION
        | {
            "ffn_up": "mlp.gate_up_proj",  # one tensor for both
            "ffn_down": "mlp.down_proj",
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_self_attn_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        config=fields.ATTENTION_BIAS | fields.PARTIAL_ROPE,
    ),
    GgufFamily(
        "ernie4_5", "ernie4_5", names.PROJECTIONS | names.TWO_NORMS, config={"use_bias": has_tensor("attn_q.bias")}
    ),
    GgufFamily(
        "hunyuan-dense",
        "hunyuan_v1_dense",
        names.PROJECTIONS
        | names.TWO_NORMS
        | {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
        config=fields.ATTENTION_BIAS,
    ),
    GgufFamily(
        "cohere2",
        "cohere2",
        names.PROJECTIONS | {"attn_norm": "input_layernorm"},
        config=fields.ATTENTION_BIAS
        | {
            "layer_norm_eps": positive(fields.LAYER_NORM),
            "layer_types": layer_types(4),
            "logit_scale": positive("logit_scale"),
            "sliding_window": size("attention.sliding_window"),
        },
        lacks=("rms_norm_eps",),
        check=_check_cohere2,
    ),
    GgufFamily(
        "phi3",
        "phi3",
        {
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        }
        | names.TWO_NORMS,
        config={"sliding_window": fields.sliding_window},
    ),
    GgufFamily(
        "starcoder2",
        "starcoder2",
        names.ATTENTION | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"} | names.TWO_NORMS,
        config={
            "hidden_act": always("gelu_pytorch_tanh"),  # neither the file nor llama.cpp has its windows
            "norm_epsilon": positive(fields.LAYER_NORM),
            "use_bias": has_tensor("attn_q.bias"),
        },
        lacks=("rms_norm_eps",),
    ),
    GgufFamily(
        "gpt-oss",
        "gpt_oss",
        names.ATTENTION | names.EXPERTS | names.NORM_AFTER_ATTENTION | {"ffn_gate_inp": "mlp.router"},
        config=fields.LOCAL_EXPERTS
        | {
            "rope_scaling": _gpt_oss_rope_scaling,
            "attention_bias": always(True),
            "sliding_window": size("attention.sliding_window"),
        },
        required={"expert_gating_func": fields.Gating.SOFTMAX_OF_CHOSEN, "attention.sliding_window_pattern": 2},
        idle=("expert_feed_forward_length",),  # repeats feed_forward_length
        recipes=(Recipe("self_attn.sinks", ("attn_sinks.weight",)),),
    ),
    _QWEN35 := GgufFamily(
        "qwen35",
        "qwen3_5_text",
        names.PROJECTIONS | names.NORM_AFTER_ATTENTION | names.HEAD_NORMS,
        config=fields.PARTIAL_ROPE | fields.DELTA_NET,
        idle=("rope.dimension_sections",),  # sections are for positions in pictures; in texts all three are equal
        has_shifted_norms=True,
        recipes=recipes.DELTA_NET,
        mtp_prefix="mtp",
    ),
    _QWEN35_MOE := replace(
        _QWEN35,
        architecture="qwen35moe",
        model_type="qwen3_5_moe_text",
        layer=names.ATTENTION | names.NORM_AFTER_ATTENTION | names.HEAD_NORMS | names.EXPERTS | names.GATED_EXPERT,
        config=fields.PARTIAL_ROPE | fields.DELTA_NET_EXPERTS,
        lacks=("intermediate_size",),
        idle=(*_QWEN35.idle, "feed_forward_length"),  # belongs to layers without experts, and there are none
    ),
    replace(
        _QWEN35_MOE,
        architecture="qwen3next",
        model_type="qwen3_next",
        layer={**_QWEN35_MOE.layer, "ssm_ba": "linear_attn.in_proj_ba", "ssm_out": "linear_attn.out_proj"},
        # Value heads are in the model's order; files of older converters have in_proj_qkvz in one tensor.
        recipes=(
            Recipe("linear_attn.A_log", ("ssm_a",), recipes.logarithm),
            Recipe("linear_attn.dt_bias", ("ssm_dt.bias",)),
            Recipe("linear_attn.conv1d.weight", ("ssm_conv1d.weight",), recipes.row_of_each),
            Recipe("linear_attn.norm.weight", ("ssm_norm.weight",)),
            Recipe("linear_attn.in_proj_qkvz.weight", ("attn_qkv.weight", "attn_gate.weight"), recipes.by_key_head),
            Recipe("linear_attn.in_proj_qkvz.weight", ("ssm_in.weight",)),
        ),
    ),
    GgufFamily(
        "deepseek2",
        "deepseek_v3",
        names.LATENT_ATTENTION | names.MLP | names.EXPERTS | names.SHARED_EXPERTS | names.TWO_NORMS,
        config=fields.LATENT_ATTENTION | fields.GROUPED_EXPERTS,
        lacks=("head_dim",),
        required=fields.SIGMOID_GATING,
        idle=fields.LATENT_ATTENTION_IDLE,
        check=_check_deepseek,
        recipes=(*recipes.LATENT, *recipes.correction("mlp.gate.e_score_correction_bias")),
        mtp_prefix="model.layers",
    ),
    _MISTRAL4 := GgufFamily(
        "mistral4",
        "mistral4",
        names.LATENT_ATTENTION | names.MLP | names.EXPERTS | names.SHARED_EXPERTS | names.TWO_NORMS,
        config=fields.LATENT_ATTENTION
        | fields.GROUPED_EXPERTS
        | {"max_position_embeddings": _mistral4_context, "rope_scaling": _mistral4_rope_scaling},
        lacks=("head_dim",),
        required={"expert_gating_func": fields.Gating.SOFTMAX},
        idle=fields.LATENT_ATTENTION_IDLE,
        recipes=recipes.LATENT,
    ),
    # Mistral's own form of a checkpoint has this key.
    replace(_MISTRAL4, architecture="deepseek2", marker="attention.temperature_scale"),
    GgufFamily(
        "kimi-linear",
        "kimi_linear",
        names.LATENT_ATTENTION
        | {
            "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj",
            "ssm_beta": "self_attn.b_proj",
            "ssm_norm": "self_attn.o_norm",
            **{f"ssm_{gate}_{part}": f"self_attn.{gate}_{part}_proj" for gate in "fg" for part in "ab"},
        }
        | names.MLP
        | names.MIXTRAL_EXPERTS
        | {stem: name.replace("mlp", "block_sparse_moe") for stem, name in names.SHARED_EXPERTS.items()}
        | names.TWO_NORMS,
        config=fields.LATENT_ATTENTION
        | {
            "linear_attn_config": _kimi_linear_attention,
            "num_experts": size("expert_count"),
            "num_experts_per_token": size("expert_used_count"),
            "num_shared_experts": size("expert_shared_count"),
            "moe_intermediate_size": size("expert_feed_forward_length"),
            "moe_renormalize": always(True),  # llama.cpp always normalizes
            "num_expert_group": size("expert_group_count", 1),
            "topk_group": size("expert_group_used_count", 1),
            "routed_scaling_factor": positive("expert_weights_scale", 1.0),
        },
        lacks=("head_dim",),
        required=fields.SIGMOID_GATING,
        idle=fields.LATENT_ATTENTION_IDLE,
        recipes=(
            Recipe("self_attn.A_log", ("ssm_a",), recipes.logarithm),
            Recipe("self_attn.dt_bias", ("ssm_dt.bias",)),
            Recipe("self_attn.q_conv1d.weight", ("ssm_conv1d_q.weight",), recipes.row_of_each),
            Recipe("self_attn.k_conv1d.weight", ("ssm_conv1d_k.weight",), recipes.row_of_each),
            Recipe("self_attn.v_conv1d.weight", ("ssm_conv1d_v.weight",), recipes.row_of_each),
            *recipes.LATENT,
            *recipes.correction("block_sparse_moe.gate.e_score_correction_bias"),
        ),
    ),
    GgufFamily(
        "glm4moe",
        "glm4_moe",
        names.PROJECTIONS | names.EXPERTS | names.SHARED_EXPERTS | names.NORM_AFTER_ATTENTION | names.HEAD_NORMS,
        config=fields.ATTENTION_BIAS
        | fields.PARTIAL_ROPE
        | fields.GROUPED_EXPERTS
        | {
            "first_k_dense_replace": count("leading_dense_block_count"),
            "use_qk_norm": has_tensor("attn_q_norm.weight"),
        },
        required=fields.SIGMOID_GATING,
        recipes=recipes.correction("mlp.gate.e_score_correction_bias"),
        mtp_prefix="model.layers",
    ),
    _MISTRAL := GgufFamily(
        "mistral3",
        "mistral",
        names.PROJECTIONS | names.TWO_NORMS,
        config={"sliding_window": fields.sliding_window},
        has_paired_rope=True,
    ),
    replace(
        _MISTRAL,
        model_type="ministral3",
        marker="attention.temperature_scale",
        config=_MISTRAL.config | {"rope_scaling": _ministral3_rope_scaling},
    ),
    _LFM2 := GgufFamily(
        "lfm2",
        "lfm2",
        {
            "shortconv.in_proj": "conv.in_proj",
            "shortconv.out_proj": "conv.out_proj",
            "shortconv.conv": "conv.conv",
            "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj",
            "attn_output": "self_attn.out_proj",
            "attn_q_norm": "self_attn.q_layernorm",
            "attn_k_norm": "self_attn.k_layernorm",
            "attn_norm": "operator_norm",
            "ffn_norm": "ffn_norm",
            "ffn_gate": "feed_forward.w1",
            "ffn_up": "feed_forward.w3",
            "ffn_down": "feed_forward.w2",
        },
        config=fields.SHORT_CONV
        | {
            "norm_eps": positive(fields.RMS_NORM),
            "block_auto_adjust_ff_dim": always(False),  # the width in the file is the adjusted one
        },
        lacks=("rms_norm_eps", "hidden_act"),
        recipes=recipes.SHORT_CONV,
        top={"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm", "output": "lm_head"},
    ),
    GgufFamily(
        "lfm2moe",
        "lfm2_moe",
        {
            **_LFM2.layer,
            **{stem: name.replace("block_sparse_moe", "feed_forward") for stem, name in names.MIXTRAL_EXPERTS.items()},
        },
        config=fields.SHORT_CONV
        | fields.EXPERTS
        | {
            "norm_eps": positive(fields.RMS_NORM),
            "num_dense_layers": count("leading_dense_block_count"),
            "routed_scaling_factor": positive("expert_weights_scale", 1.0),
            "use_expert_bias": lambda source: any(".exp_probs_b" in name for name in source.tensors),
        },
        lacks=_LFM2.lacks,
        required=fields.SIGMOID_GATING,
        recipes=(*recipes.SHORT_CONV, *recipes.correction("feed_forward.expert_bias")),
        top=_LFM2.top,
    ),
    _NEMOTRON_H := GgufFamily(
        "nemotron_h",
        "nemotron_h",
        {
            **{stem: name.replace("self_attn", "mixer") for stem, name in names.ATTENTION.items()},
            **{stem: name.replace("mamba", "mixer") for stem, name in names.MAMBA2.items()},
            "attn_norm": "norm",
            "ffn_up": "mixer.up_proj",
            "ffn_down": "mixer.down_proj",
            "ffn_gate_inp": "mixer.gate",
            "ffn_up_exps": "mixer.experts.{}.up_proj",
            "ffn_down_exps": "mixer.experts.{}.down_proj",
            "ffn_up_shexp": "mixer.shared_experts.up_proj",
            "ffn_down_shexp": "mixer.shared_experts.down_proj",
            "ffn_latent_down": "mixer.fc1_latent_proj",
            "ffn_latent_up": "mixer.fc2_latent_proj",
        },
        config={
            "conv_kernel": size("ssm.conv_kernel"),
            "head_dim": fields.partly_rotated_head_dim,
            "intermediate_size": fields.one_of_some("feed_forward_length"),
            "layer_norm_epsilon": positive(fields.RMS_NORM),
            "layers_block_type": _nemotron_h_layers("mlp"),
            "mamba_head_dim": fields.state_head_dim,
            "mamba_num_heads": size("ssm.time_step_rank"),
            "mlp_bias": has_tensor("ffn_up.bias"),
            "n_groups": size("ssm.group_count"),
            "num_key_value_heads": fields.one_of_some("attention.head_count_kv"),
            "ssm_state_size": size("ssm.state_size"),
            "use_bias": has_tensor("ssm_in.bias"),
            "use_conv_bias": has_tensor("ssm_conv1d.bias"),
        },
        lacks=("rms_norm_eps", "hidden_act", "rope_theta", "rope_scaling"),
        idle=("attention.layer_norm_epsilon",),  # the norms' epsilon is there under two names
        check=fields.check_unused_rope,  # attention has no positions
        has_paired_rope=True,
        recipes=recipes.mamba2("mixer"),
        top={"token_embd": "model.embeddings", "output_norm": "model.norm_f", "output": "lm_head"},
        mtp_prefix="mtp",
    ),
    _NEMOTRON_H_MOE := replace(
        _NEMOTRON_H,
        architecture="nemotron_h_moe",
        config=_NEMOTRON_H.config
        | fields.GROUPED_EXPERTS
        | {
            "layers_block_type": _nemotron_h_layers("moe"),
            "moe_shared_expert_intermediate_size": size("expert_shared_feed_forward_length"),
        },
        lacks=(*_NEMOTRON_H.lacks, "intermediate_size"),
        required=fields.SIGMOID_GATING,
        idle=(*_NEMOTRON_H.idle, "moe_latent_size"),
        recipes=(*_NEMOTRON_H.recipes, *recipes.correction("mixer.gate.e_score_correction_bias")),
    ),
    replace(
        _NEMOTRON_H_MOE,
        marker="moe_latent_size",
        config=_NEMOTRON_H_MOE.config | {"moe_latent_size": size("moe_latent_size")},
    ),
    _GRANITE_HYBRID := GgufFamily(
        "granitehybrid",
        "granitemoehybrid",
        names.ATTENTION | names.TWO_NORMS | names.GRANITE_EXPERTS | names.MAMBA2,
        config=fields.GRANITE_FACTORS
        | fields.MAMBA2
        | fields.ATTENTION_BIAS
        | {
            "layer_types": fields.layers_with_kv_heads("attention", "mamba"),
            "mamba_expand": _granite_hybrid_expansion,
            "num_key_value_heads": fields.one_of_some("attention.head_count_kv"),
            "num_local_experts": always(0),
            "position_embedding_type": _granite_hybrid_positions,
            "shared_intermediate_size": _granite_hybrid_mlp,
        },
        idle=("expert_used_count",),
        has_paired_rope=True,
        recipes=(*recipes.mamba2("mamba"), *recipes.SHARED_MLP),
    ),
    replace(
        _GRANITE_HYBRID,
        marker="expert_count",
        config=_GRANITE_HYBRID.config
        | fields.LOCAL_EXPERTS
        | {"shared_intermediate_size": size("expert_shared_feed_forward_length")},
    ),
    _GRANITE_MOE := GgufFamily(
        "granitemoe",
        "granitemoe",
        names.ATTENTION | names.TWO_NORMS | names.GRANITE_EXPERTS,
        config=fields.GRANITE_FACTORS | fields.ATTENTION_BIAS | fields.LOCAL_EXPERTS,
        has_paired_rope=True,
    ),
    replace(
        _GRANITE_MOE,
        model_type="granitemoeshared",
        marker="expert_shared_feed_forward_length",
        config=_GRANITE_MOE.config | {"shared_intermediate_size": size("expert_shared_feed_forward_length")},
        recipes=recipes.SHARED_MLP,
    ),
    # The converter multiplied factors on projections into the weights.
    GgufFamily(
        "falcon-h1",
        "falcon_h1",
        {
            **names.ATTENTION,
            **names.MAMBA2,
            "attn_norm": "input_layernorm",
            **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
        },
        config=fields.MAMBA2
        | {
            "mamba_d_ssm": size("ssm.inner_size"),
            "mamba_norm_before_gate": always(False),  # as llama.cpp computes it
            "mamba_rms_norm": has_tensor("ssm_norm.weight"),
        },
        check=_check_falcon_h1,
        recipes=(*recipes.mamba2("mamba"), Recipe("pre_ff_layernorm.weight", ("ffn_norm",))),
        top=names.TOP | {"output_norm": "model.final_layernorm"},
    ),
    GgufFamily(
        "minimax-m2",
        "minimax_m2",
        names.ATTENTION | names.MIXTRAL_EXPERTS | names.TWO_NORMS | names.HEAD_NORMS,
        config=fields.LOCAL_EXPERTS
        | {
            "head_dim": fields.partly_rotated_head_dim,
            "intermediate_size": size("expert_feed_forward_length"),
            "rotary_dim": size("rope.dimension_count"),
        },
        required=fields.SIGMOID_GATING,
        idle=("feed_forward_length",),  # repeats the experts'
        recipes=recipes.correction("block_sparse_moe.e_score_correction_bias"),
    ),
    GgufFamily(
        "ernie4_5-moe",
        "ernie4_5_moe",
        names.PROJECTIONS | names.EXPERTS | names.SHARED_EXPERTS | names.TWO_NORMS,
        config={
            "moe_intermediate_size": size("expert_feed_forward_length"),
            "moe_k": size("expert_used_count"),
            "moe_layer_interval": size("interleave_moe_layer_step", 1),
            "moe_layer_start_index": count("leading_dense_block_count"),
            "moe_num_experts": size("expert_count"),
            "moe_num_shared_experts": count("expert_shared_count"),
            "use_bias": always(False),
        },
        # The converter writes the width of dense layers divided by the number of kv heads, which has no meaning.
        idle=("expert_shared_feed_forward_length",),
        recipes=recipes.correction("mlp.moe_statics.e_score_correction_bias"),
    ),
    GgufFamily(
        "seed_oss",
        "seed_oss",
        names.PROJECTIONS | names.NORM_AFTER_ATTENTION,
        config=fields.BIASES | {"attention_out_bias": has_tensor("attn_output.bias")},
    ),
    GgufFamily(
        "gpt2",
        "gpt2",
        {
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        config={
            "activation_function": always("gelu_new"),
            "layer_norm_epsilon": positive(fields.LAYER_NORM),
            "n_inner": size("feed_forward_length"),
        },
        lacks=(
            "rms_norm_eps",
            "intermediate_size",
            "num_key_value_heads",
            "head_dim",
            "hidden_act",
            "rope_theta",
            "rope_scaling",
        ),
        check=fields.check_unused_rope,
        recipes=(
            Recipe("attn.c_attn.weight", ("attn_qkv.weight",), recipes.transposed),
            Recipe("attn.c_proj.weight", ("attn_output.weight",), recipes.transposed),
            Recipe("mlp.c_fc.weight", ("ffn_up.weight",), recipes.transposed),
            Recipe("mlp.c_proj.weight", ("ffn_down.weight",), recipes.transposed),
        ),
        top={
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        prefix="transformer.h",
    ),
)
