"""Qwen2 and Qwen2.5: biases on q, k and v; sliding windows in the upper layers of some.

https://arxiv.org/abs/2407.10671
"""

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
from enginewright.builder.models.blocks.layers import read_upper_windows
from enginewright.builder.models.blocks.rope import read_rope
from enginewright.builder.weights import Weights

HARMLESS = {"use_mrope": Harmless("Positions are numbers, not times, rows and columns of pictures.", (False,))}


def build(config: ConfigReader, weights: Weights) -> ir.Model:
    """Builds the dense graph of a model of this family."""
    embedding, norm, head = Embedding.read(config), RmsNorm.read(config), Head.read(config)
    heads, mlp = Heads.read(config), GatedMlp.read(config)
    rope, max_positions = read_rope(config, heads.dim), config.read_size("max_position_embeddings")
    layers = [
        Layer(Attention(heads, bias=True, window=window), mlp, norm, rope=rope) for window in read_upper_windows(config)
    ]
    config.refuse_unread(HARMLESS)
    return write_decoder(weights, max_positions, embedding, layers, norm, head)
