"""Mistral 7B, Nemo, Small 2 and 3, and models built like them: llama with a window in some. https://arxiv.org/abs/2310.06825"""

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
from enginewright.builder.models.blocks.layers import read_layer_count, read_window
from enginewright.builder.models.blocks.rope import read_rope
from enginewright.builder.weights import Weights


def build(config: ConfigReader, weights: Weights) -> ir.Model:
    """Builds the dense graph of a model of this family."""
    embedding, norm, head = Embedding.read(config), RmsNorm.read(config), Head.read(config)
    attention = Attention(Heads.read(config), window=read_window(config, default=4096))
    layer = Layer(attention, GatedMlp.read(config), norm, rope=read_rope(config, attention.heads.dim))
    layers, max_positions = [layer] * read_layer_count(config), config.read_size("max_position_embeddings")
    config.refuse_unread()
    return write_decoder(weights, max_positions, embedding, layers, norm, head)
