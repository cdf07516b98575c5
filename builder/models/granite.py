"""Granite 3 and 4, dense: llama with factors on embeddings, scores, what layers add, and logits.
https://arxiv.org/abs/2405.04324"""

from dataclasses import replace

import onnx_ir as ir

from enginewright.builder.config import ConfigReader
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
from enginewright.builder.models.blocks.layers import read_layer_count
from enginewright.builder.models.blocks.rope import read_rope
from enginewright.builder.weights import Weights

HARMLESS = {
    "position_embedding_type": Harmless("Positions are in queries and keys.", ("rope",)),
}


def build(config: ConfigReader, weights: Weights) -> ir.Model:
    embedding, norm, head = Embedding.read(config), RmsNorm.read(config), Head.read(config)
    bias = config.read(bool, "attention_bias", default=False)
    scale = config.read_positive("attention_multiplier", default=1.0)
    attention = Attention(Heads.read(config), bias=bias, output_bias=bias, scale=scale)
    mlp = GatedMlp.read(config, bias=config.read(bool, "mlp_bias", default=False))
    # Where each layer adds r · h to x, x / r is carried along, to which h is added: norms of it are norms of x, with an
    # epsilon of 1 / r² of theirs.
    added = config.read_positive("residual_multiplier", default=1.0)
    embedding = replace(embedding, scale=config.read_positive("embedding_multiplier", default=1.0) / added)
    norm = replace(norm, epsilon=norm.epsilon / added**2)
    last = replace(norm, scale=1.0 / config.read_positive("logits_scaling", default=1.0))
    layer = Layer(attention, mlp, norm, rope=read_rope(config, attention.heads.dim))
    layers, max_positions = [layer] * read_layer_count(config), config.read_size("max_position_embeddings")
    config.refuse_unread(HARMLESS)
    return write_decoder(weights, max_positions, embedding, layers, last, head)
