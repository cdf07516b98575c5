"""Qwen3, dense: norms on each head of q and k, and no biases unless the config says so.

https://arxiv.org/abs/2505.09388
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
from enginewright.builder.models.blocks.layers import read_upper_windows
from enginewright.builder.models.blocks.rope import read_rope
from enginewright.builder.weights import Weights


def build(config: ConfigReader, weights: Weights) -> ir.Model:
    """Builds the dense graph of a model of this family."""
    embedding, norm, head = Embedding.read(config), RmsNorm.read(config), Head.read(config)
    heads, mlp = Heads.read(config, default_dim=128), GatedMlp.read(config)
    bias = config.read(bool, "attention_bias", default=False)
    rope, max_positions = read_rope(config, heads.dim), config.read_size("max_position_embeddings")
    layers = [
        Layer(Attention(heads, bias=bias, output_bias=bias, head_norm=norm, window=window), mlp, norm, rope=rope)
        for window in read_upper_windows(config)
    ]
    config.refuse_unread()
    return write_decoder(weights, max_positions, embedding, layers, norm, head)
