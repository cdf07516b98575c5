"""Granite 3 with experts in all layers, and Granite's factors. https://arxiv.org/abs/2405.04324"""

import onnx_ir as ir

from enginewright.builder.config import ConfigReader
from enginewright.builder.models.blocks import Head, Layer, granite, write_decoder
from enginewright.builder.models.blocks.layers import read_layer_count
from enginewright.builder.models.blocks.rope import read_rope
from enginewright.builder.weights import Weights

HARMLESS = granite.HARMLESS


def build(config: ConfigReader, weights: Weights, has_shared: bool = False) -> ir.Model:
    """Builds the dense graph of a model of this family.

    Args:
        config: config of the model.
        weights: weights of the checkpoint.
        has_shared: True if the family may have a shared MLP next to the experts.
    """
    embedding, norm, last = granite.read_scaled(config)
    head, attention, count = Head.read(config), granite.read_attention(config), read_layer_count(config)
    shared = granite.read_shared(config, default=0) if has_shared else None
    experts = granite.read_experts(config, weights, shared)
    rope, max_positions = read_rope(config, attention.heads.dim), config.read_size("max_position_embeddings")
    config.refuse_unread(HARMLESS)
    if shared is not None:
        granite.cut_shared(weights, count, embedding.hidden, shared, f"{granite.BLOCK}.{granite.SHARED}")

    layers = [Layer(attention, experts, norm, ("self_attn", granite.BLOCK), rope=rope)] * count
    return write_decoder(weights, max_positions, embedding, layers, last, head)
