"""Nemotron-H and Nemotron 3: Mamba-2, attention without positions, MLPs and experts, each a layer of its own.

https://arxiv.org/abs/2504.03624
"""

from collections.abc import Sequence

import onnx_ir as ir

from enginewright.builder.config import MAX_COLUMNS, MAX_HEAD_DIM, MAX_HEADS, ConfigReader
from enginewright.builder.harmless_keys import Harmless
from enginewright.builder.models.blocks import (
    Attention,
    Embedding,
    ExpertNames,
    Experts,
    Head,
    Heads,
    Layer,
    Mamba2,
    Mlp,
    RmsNorm,
    Routing,
    write_decoder,
)
from enginewright.builder.models.blocks.layers import check_conv_activation, read_taps
from enginewright.builder.weights import Weights

KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}  # in hybrid_override_pattern
OLDER_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}

_INITIAL = "It is about initial values, which training has changed."
_SCAN = "It says how states are computed, and changes rounding at most."
_NO_ROPE = "Attention has no positions."
_DRAFTS = "It is about draft tokens, which are not used."
HARMLESS = {
    "chunk_size": Harmless(_SCAN),
    "expand": Harmless("mamba_num_heads and mamba_head_dim say how wide the inner layer is."),
    "hidden_dropout": Harmless("It is about training, which is over."),
    "mamba_ssm_cache_dtype": Harmless("States are kept in fp32.", ("float32",)),
    "mtp_hybrid_override_pattern": Harmless(_DRAFTS),
    "mtp_layers_block_type": Harmless(_DRAFTS),
    "norm_eps": Harmless("layer_norm_epsilon is what transformers reads."),
    "num_logits_to_keep": Harmless("It says what transformers returns in addition to the last logits."),
    "num_nextn_predict_layers": Harmless(_DRAFTS),
    "output_router_logits": Harmless("It says what transformers returns in addition to the logits."),
    "partial_rotary_factor": Harmless(_NO_ROPE),
    "rescale_prenorm_residual": Harmless(_INITIAL),
    "residual_in_fp32": Harmless("The residual is fp32."),
    "rms_norm_eps": Harmless("layer_norm_epsilon is what transformers reads."),
    "rope_theta": Harmless(_NO_ROPE),
    "time_step_floor": Harmless(_INITIAL),
    "time_step_limit": Harmless("The smallest step is time_step_min, and there is no largest one, as in transformers."),
    "time_step_max": Harmless(_INITIAL),
    "use_mamba_kernels": Harmless(_SCAN),
}
EXPERTS = {
    "moe_shared_expert_overlap": Harmless("It says how devices share the work."),
    "n_shared_experts": Harmless("There is one, of the width that moe_shared_expert_intermediate_size says."),
}
WITHOUT_EXPERTS = dict.fromkeys(
    (
        *EXPERTS,
        "moe_intermediate_size",
        "moe_latent_size",
        "moe_shared_expert_intermediate_size",
        "n_group",
        "n_routed_experts",
        "norm_topk_prob",
        "num_experts_per_tok",
        "routed_scaling_factor",
        "topk_group",
    ),
    Harmless("It is about experts, which no layer has."),
)


def build(config: ConfigReader, weights: Weights) -> ir.Model:
    """Builds the dense graph of a model of this family."""
    embedding, head = Embedding.read(config), Head.read(config)
    norm = RmsNorm(config.read_positive("layer_norm_epsilon", default=1e-5))
    kinds = _read_kinds(config)
    attention = Attention(Heads.read(config, default_dim=128), bias=False, output_bias=False)
    if config.read(bool, "attention_bias", default=False):
        raise config.unsupported("attention_bias = True", "transformers has no such biases in this family.")
    if config.read(int, "sliding_window", default=None) is not None:
        raise config.unsupported("sliding_window is given", "transformers has no windows in this family.")
    mamba = _read_mamba(config)
    mlp = _read_mlp(config, "intermediate_size", 21504)
    experts = _read_experts(config) if "moe" in kinds else None
    max_positions = config.read_size("max_position_embeddings", default=4096)
    config.refuse_unread({**HARMLESS, **(EXPERTS if experts else WITHOUT_EXPERTS)})
    weights.leave_out("mtp.", "of multi-token prediction, which is left out")
    if any(name.startswith("backbone.") for name in weights.tensors.names):
        weights.inside("backbone")

    # Each layer is one part, with the same name for every kind.
    def layer(mixer: Attention | Mamba2 | None, mlp: Mlp | Experts | None = None) -> Layer:
        return Layer(mixer, mlp, norm, names=("mixer", "mixer"), before=("norm", "norm"))

    of_kind = {"linear_attention": layer(mamba), "full_attention": layer(attention)}
    of_kind |= {"mlp": layer(None, mlp), "moe": layer(None, experts)}
    names = ("model.embeddings", "model.norm_f")
    return write_decoder(weights, max_positions, embedding, [of_kind[kind] for kind in kinds], norm, head, *names)


def _read_kinds(config: ConfigReader) -> Sequence[str]:
    count = config.read(int, "num_hidden_layers", default=None)
    pattern = config.read(str, "hybrid_override_pattern", default=None)
    names = config.read_list(str, "layers_block_type") or config.read_list(str, "layer_types")
    if names is None:
        if pattern is None:
            raise config.error("neither layers_block_type nor hybrid_override_pattern says what the layers are")
        names = [KINDS.get(letter, letter) for letter in pattern]
    kinds = [OLDER_NAMES.get(name, name) for name in names]
    if count is not None and count != len(kinds):
        raise config.error(f"{len(kinds)} layers are named, but num_hidden_layers is {count}")
    for kind in kinds:
        if kind not in KINDS.values():
            raise config.unsupported(f"a layer is {kind!r}", f"Implemented are {', '.join(KINDS.values())}.")
    return kinds


def _read_mamba(config: ConfigReader) -> Mamba2:
    heads = config.read_size("mamba_num_heads", default=128, maximum=MAX_HEADS)
    groups = config.read_size("n_groups", "mamba_n_groups", default=8, maximum=MAX_HEADS)
    if heads % groups:
        raise config.error(f"mamba_num_heads is {heads}, which is not a multiple of n_groups, {groups}")
    check_conv_activation(config, "mamba_hidden_act")
    bias = config.read(bool, "use_bias", default=False)
    config.read(bool, "mamba_proj_bias", default=bias)  # transformers reads use_bias alone
    return Mamba2(
        heads,
        config.read_size("mamba_head_dim", default=64, maximum=MAX_HEAD_DIM),
        groups,
        config.read_size("ssm_state_size", default=128, maximum=MAX_HEAD_DIM),
        read_taps(config, "conv_kernel", 4),
        config.read_positive("layer_norm_epsilon", default=1e-5),
        bias,
        config.read(bool, "use_conv_bias", "mamba_conv_bias", default=True),
        config.read_positive("time_step_min", "mamba_dt_min", default=0.001),
    )


def _read_mlp(config: ConfigReader, key: str, default: int) -> Mlp:
    """Reads an MLP; key: key of its width; default: width if the config has none."""
    width = config.read_size(key, default=default, maximum=MAX_COLUMNS)
    bias = config.read(bool, "mlp_bias", default=False)
    if (activation := config.read(str, "mlp_hidden_act", default="relu2")) != "relu2":
        raise config.unsupported(f"mlp_hidden_act = {activation!r}", "Implemented is relu2.")
    return Mlp(width, activation, bias, "up_proj", "down_proj")


def _read_experts(config: ConfigReader) -> Experts:
    latent = config.read(int, "moe_latent_size", default=None)
    shared = _read_mlp(config, "moe_shared_expert_intermediate_size", 7688)
    if latent is not None and shared.bias:
        raise config.unsupported("mlp_bias = True with moe_latent_size", "Projections to latent columns have none.")
    return Experts(
        Routing.read_grouped(config),
        Experts.read_width(config),
        shared.activation,
        latent=0 if latent is None else config.read_size("moe_latent_size", maximum=MAX_COLUMNS),
        shared=shared,
        names=ExpertNames(gate_up_fused="experts.up_proj", shared="shared_experts"),
    )
