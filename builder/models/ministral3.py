"""Ministral 3: llama with YaRN, and queries that grow with the logarithm of their position.

https://mistral.ai/news/mistral-3
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
from enginewright.builder.models.blocks.attention import PositionScale
from enginewright.builder.models.blocks.layers import read_layer_count, read_window
from enginewright.builder.models.blocks.rope import rope_from
from enginewright.builder.weights import Weights


def build(config: ConfigReader, weights: Weights) -> ir.Model:
    """Builds the dense graph of a model of this family."""
    embedding, norm, head = Embedding.read(config), RmsNorm.read(config, epsilon=1e-5), Head.read(config)
    heads, mlp = Heads.read(config, default_dim=None if config.has("head_dim") else 128), GatedMlp.read(config)
    max_positions = config.read_size("max_position_embeddings")
    parameters = config.section("rope_parameters", "rope_scaling") or ConfigReader(ROPE, "rope_parameters")
    scale = PositionScale.read(parameters, max_positions)
    rope = rope_from(parameters, config.read_positive("rope_theta", default=1e6), heads.dim, max_positions)
    attention = Attention(heads, position_scale=scale, window=read_window(config))
    layers = [Layer(attention, mlp, norm, rope=rope)] * read_layer_count(config)
    config.refuse_unread()
    return write_decoder(weights, max_positions, embedding, layers, norm, head)


# Defaults of transformers.
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
