"""Granite 4 H: Mamba-2 in most layers, attention in the others, experts or an MLP, and Granite's factors.

https://arxiv.org/abs/2405.21060
"""

import onnx_ir as ir

from enginewright.builder.config import MAX_COLUMNS, ConfigReader
from enginewright.builder.harmless_keys import Harmless
from enginewright.builder.models.blocks import Head, Layer, Mamba2, granite, write_decoder
from enginewright.builder.models.blocks.layers import read_kinds, read_layer_count
from enginewright.builder.models.blocks.rope import read_rope
from enginewright.builder.weights import Weights

KINDS = {"mamba": False, "linear_attention": False, "attention": True, "full_attention": True}  # True for attention
HARMLESS = {
    **granite.HARMLESS,
    "init_method": Harmless("It is about initial values, which training has changed."),
    "mamba_chunk_size": Harmless("It says how states are computed, and changes rounding at most."),
    "normalization_function": Harmless("Norms are RMS norms.", ("rmsnorm",)),
}
_EXPERTS, _ROPE = ("intermediate_size", "num_experts_per_tok"), ("rope_parameters", "rope_scaling", "rope_theta")
WITHOUT_EXPERTS = dict.fromkeys(_EXPERTS, Harmless("It is about experts: num_local_experts says there are none."))
WITHOUT_ROPE = dict.fromkeys(_ROPE, Harmless("Positions are not rotated: position_embedding_type says so."))


def build(config: ConfigReader, weights: Weights) -> ir.Model:
    """Builds the dense graph of a model of this family."""
    embedding, norm, last = granite.read_scaled(config)
    head, attention = Head.read(config), granite.read_attention(config)
    values = config.read_size("mamba_expand", default=2, maximum=MAX_COLUMNS) * embedding.hidden
    mamba = Mamba2.read(config, values, config.read_positive("rms_norm_eps", default=1e-6))
    attends = read_kinds(config, KINDS, [False] * read_layer_count(config))
    mlp, mlp_name = granite.read_shared(config, default=1024), granite.SHARED
    if mlp is None:
        raise config.unsupported("shared_intermediate_size = 0", "Every layer has a shared MLP.")
    has_experts = config.read(int, "num_local_experts", default=8) != 0
    experts = granite.read_experts(config, weights, mlp) if has_experts else None
    shared_name = f"{granite.BLOCK}.{mlp_name}" if has_experts else mlp_name
    granite.cut_shared(weights, len(attends), embedding.hidden, mlp, shared_name)
    rotates = config.read(str, "position_embedding_type", default="nope") == "rope"
    rope = read_rope(config, attention.heads.dim) if rotates else None
    max_positions = config.read_size("max_position_embeddings", default=2048)
    absent = {**({} if has_experts else WITHOUT_EXPERTS), **({} if rotates else WITHOUT_ROPE)}
    config.refuse_unread({**HARMLESS, **absent})

    layers = [
        Layer(
            attention if own else mamba,
            experts or mlp,
            norm,
            ("self_attn" if own else "mamba", granite.BLOCK if experts else mlp_name),
            rope=rope,
        )
        for own in attends
    ]
    return write_decoder(weights, max_positions, embedding, layers, last, head)
