"""ERNIE 4.5, dense: llama with neighbouring columns rotated against each other.

https://yiyan.baidu.com/blog/publication/ERNIE_Technical_Report.pdf
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
from enginewright.builder.models.blocks.layers import read_layer_count
from enginewright.builder.models.blocks.rope import read_rope
from enginewright.builder.weights import Weights

HARMLESS = {"compression_ratio": Harmless("Positions are counted as they are.", (1.0,))}


def build(config: ConfigReader, weights: Weights) -> ir.Model:
    """Builds the dense graph of a model of this family."""
    embedding, norm = Embedding.read(config), RmsNorm.read(config, epsilon=1e-5)
    head, bias = Head.read(config, tied=True), config.read(bool, "use_bias", default=False)
    heads = Heads.read(config, default_dim=None if config.has("head_dim") else 128)
    attention, mlp = Attention(heads, bias=bias, output_bias=bias), GatedMlp.read(config, bias=bias)
    layer = Layer(attention, mlp, norm, rope=read_rope(config, heads.dim, 5e5, interleaved=True))
    layers, max_positions = [layer] * read_layer_count(config), config.read_size("max_position_embeddings")
    config.refuse_unread(HARMLESS)
    return write_decoder(weights, max_positions, embedding, layers, norm, head)
