"""OLMo 2: norms only after attention and MLP, and on all heads of q and k together.

https://arxiv.org/abs/2501.00656
"""

import onnx_ir as ir

from enginewright.builder.config import ConfigReader
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

AFTER = ("post_attention_layernorm", "post_feedforward_layernorm")


def build(config: ConfigReader, weights: Weights) -> ir.Model:
    """Builds the dense graph of a model of this family."""
    embedding, norm, head = Embedding.read(config), RmsNorm.read(config, epsilon=1e-5), Head.read(config)
    bias = config.read(bool, "attention_bias", default=False)
    attention = Attention(Heads.read(config), bias=bias, output_bias=bias, head_norm=norm, norms_all_heads=True)
    rope, max_positions = read_rope(config, attention.heads.dim), config.read_size("max_position_embeddings")
    layer = Layer(attention, GatedMlp.read(config), norm, before=None, after=AFTER, rope=rope)
    layers = [layer] * read_layer_count(config)
    config.refuse_unread()
    return write_decoder(weights, max_positions, embedding, layers, norm, head)
