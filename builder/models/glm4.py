"""GLM 4, dense, 0414: norms around both parts of a layer, and half of each head rotated, in neighbouring columns.

https://arxiv.org/abs/2406.12793
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


def build(config: ConfigReader, weights: Weights) -> ir.Model:
    """Builds the dense graph of a model of this family."""
    embedding, norm, head = Embedding.read(config), RmsNorm.read(config, epsilon=1.5625e-7), Head.read(config)
    attention = Attention(Heads.read(config, default_dim=128), bias=config.read(bool, "attention_bias", default=True))
    mlp, rope = GatedMlp.read(config), read_rope(config, attention.heads.dim, part=0.5, interleaved=True)
    layer = Layer(attention, mlp, norm, after=("post_self_attn_layernorm", "post_mlp_layernorm"), rope=rope)
    layers, max_positions = [layer] * read_layer_count(config), config.read_size("max_position_embeddings")
    config.refuse_unread()

    for index in range(len(layers)):
        name = f"model.layers.{index}.mlp"
        weights.cut(f"{name}.gate_up_proj", mlp.cut_fused(name))
    return write_decoder(weights, max_positions, embedding, layers, norm, head)
