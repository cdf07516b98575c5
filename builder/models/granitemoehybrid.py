"""Granite 4 H, dense: Mamba-2 in most layers, attention in the others, and Granite's factors.
https://arxiv.org/abs/2405.21060"""

from dataclasses import replace

import onnx_ir as ir

from enginewright.builder.config import MOST_COLUMNS, MOST_HEAD_DIM, MOST_HEADS, ConfigReader
from enginewright.builder.harmless_keys import Harmless
from enginewright.builder.models.blocks import (
    Attention,
    Embedding,
    GatedMlp,
    Head,
    Heads,
    Layer,
    RmsNorm,
    write_decoder,
)
from enginewright.builder.models.blocks.layers import read_kinds, read_layer_count, read_taps
from enginewright.builder.models.blocks.mamba2 import Mamba2
from enginewright.builder.models.blocks.mlp import read_activation
from enginewright.builder.models.blocks.rope import read_rope
from enginewright.builder.weights import Weights

KINDS = {"mamba": False, "linear_attention": False, "attention": True, "full_attention": True}  # whether it attends
_EXPERTS = "It is about experts, of which the model has none: num_local_experts says so."
_NO_ROPE = "Positions are not in queries and keys: position_embedding_type says so."
HARMLESS = {
    "init_method": Harmless("It is about initial values, which training has changed."),
    "intermediate_size": Harmless("shared_intermediate_size is what transformers reads."),
    "mamba_chunk_size": Harmless("It says how states are computed, and changes rounding at most."),
    "normalization_function": Harmless("Norms are RMS norms.", ("rmsnorm",)),
    "num_experts_per_tok": Harmless(_EXPERTS),
    "output_router_logits": Harmless("It says what transformers returns beside the logits."),
    "router_aux_loss_coef": Harmless("It is about training, which is over."),
}
WITHOUT_ROPE = {key: Harmless(_NO_ROPE) for key in ("rope_parameters", "rope_scaling", "rope_theta")}


def build(config: ConfigReader, weights: Weights) -> ir.Model:
    embedding, norm, head = Embedding.read(config), RmsNorm.read(config), Head.read(config)
    if experts := config.read(int, "num_local_experts", default=8):
        raise config.unsupported(f"num_local_experts = {experts}", "Implemented are models without experts, 0.")
    bias = config.read(bool, "attention_bias", default=False)
    scale = config.read_positive("attention_multiplier", default=1.0)
    attention = Attention(Heads.read(config), bias=bias, output_bias=bias, scale=scale)
    mamba = _read_mamba(config, embedding.hidden, norm.epsilon)
    width = config.read_size("shared_intermediate_size", default=1024, most=MOST_COLUMNS)
    mlp = GatedMlp(width, read_activation(config), names=("gate_proj", "up_proj", "output_linear"))
    attends = read_kinds(config, KINDS, [False] * read_layer_count(config))
    rotates = config.read(str, "position_embedding_type", default="nope") == "rope"
    rope = read_rope(config, attention.heads.dim) if rotates else None
    # As in granite.py: the residual is carried along divided by its factor.
    added = config.read_positive("residual_multiplier", default=1.0)
    embedding = replace(embedding, scale=config.read_positive("embedding_multiplier", default=1.0) / added)
    norm = replace(norm, epsilon=norm.epsilon / added**2)
    last = replace(norm, scale=1.0 / config.read_positive("logits_scaling", default=1.0))
    max_positions = config.read_size("max_position_embeddings", default=2048)
    config.refuse_unread(HARMLESS if rotates else HARMLESS | WITHOUT_ROPE)

    for index in range(len(attends)):
        name = f"model.layers.{index}.shared_mlp"
        weights.cut(f"{name}.input_linear", mlp.cut_fused(name))
    layers = [
        Layer(attention if own else mamba, mlp, norm, ("self_attn" if own else "mamba", "shared_mlp"), rope=rope)
        for own in attends
    ]
    return write_decoder(weights, max_positions, embedding, layers, last, head)


def _read_mamba(config: ConfigReader, hidden: int, epsilon: float) -> Mamba2:
    heads = config.read_size("mamba_n_heads", default=128, most=MOST_HEADS)
    groups = config.read_size("mamba_n_groups", default=1, most=MOST_HEADS)
    values = config.read_size("mamba_expand", default=2, most=MOST_COLUMNS) * hidden
    if config.holds("mamba_d_head", "auto") or config.holds("mamba_d_head", None):
        dim = values // heads
    else:
        dim = config.read_size("mamba_d_head", most=MOST_HEAD_DIM)
    if heads * dim != values:
        raise config.error(f"mamba_n_heads is {heads}, and mamba_d_head {dim}, but all heads have {values} columns")
    if heads % groups:
        raise config.error(f"mamba_n_heads is {heads}, no multiple of mamba_n_groups, which is {groups}")
    limits = config.read(list, "time_step_limit", default=[0.0, None])
    if len(limits) != 2 or limits[0] != 0 or limits[1] not in (None, float("inf"), {"__float__": "Infinity"}):
        raise config.unsupported(f"time_step_limit = {limits}", "Implemented is [0, Infinity].")
    return Mamba2(
        heads,
        dim,
        groups,
        config.read_size("mamba_d_state", default=256, most=MOST_HEAD_DIM),
        read_taps(config, "mamba_d_conv", 4),
        epsilon,
        config.read(bool, "mamba_proj_bias", default=False),
        config.read(bool, "mamba_conv_bias", default=True),
    )
