"""OLMo 3: OLMo 2 with windows in three layers of four, and a rope of their own for these.

https://arxiv.org/abs/2512.13961
"""

from dataclasses import replace

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
from enginewright.builder.models.blocks.layers import read_layer_count, read_window, read_windows
from enginewright.builder.models.blocks.rope import read_local_and_global
from enginewright.builder.models.olmo2 import AFTER
from enginewright.builder.weights import Weights


def build(config: ConfigReader, weights: Weights) -> ir.Model:
    """Builds the dense graph of a model of this family."""
    embedding, norm, head = Embedding.read(config), RmsNorm.read(config, epsilon=1e-5), Head.read(config)
    bias = config.read(bool, "attention_bias", default=False)
    attention = Attention(Heads.read(config), bias=bias, output_bias=bias, head_norm=norm, norms_all_heads=True)
    layer = Layer(attention, GatedMlp.read(config), norm, before=None, after=AFTER)
    theta, max_positions = config.read_positive("rope_theta", default=5e5), config.read_size("max_position_embeddings")
    local, everywhere = read_local_and_global(config, theta, theta, attention.heads.dim, max_positions)
    slides = [(index + 1) % 4 != 0 for index in range(read_layer_count(config))]
    layers = [
        replace(layer, mixer=replace(attention, window=window), rope=local if window else everywhere)
        for window in read_windows(config, slides, read_window(config, default=4096))
    ]
    config.refuse_unread()
    return write_decoder(weights, max_positions, embedding, layers, norm, head)
