"""Granite 3 and 4, dense: llama with factors on embeddings, scores, residuals, and logits.

https://arxiv.org/abs/2405.04324
"""

import onnx_ir as ir

from enginewright.builder.config import ConfigReader
from enginewright.builder.harmless_keys import Harmless
from enginewright.builder.models.blocks import GatedMlp, Head, Layer, granite, write_decoder
from enginewright.builder.models.blocks.layers import read_layer_count
from enginewright.builder.models.blocks.rope import read_rope
from enginewright.builder.weights import Weights

HARMLESS = {
    "position_embedding_type": Harmless("Positions are in queries and keys.", ("rope",)),
}


def build(config: ConfigReader, weights: Weights) -> ir.Model:
    """Builds the dense graph of a model of this family."""
    embedding, norm, last = granite.read_scaled(config)
    head, attention = Head.read(config), granite.read_attention(config)
    mlp = GatedMlp.read(config, bias=config.read(bool, "mlp_bias", default=False))
    layer = Layer(attention, mlp, norm, rope=read_rope(config, attention.heads.dim))
    layers, max_positions = [layer] * read_layer_count(config), config.read_size("max_position_embeddings")
    config.refuse_unread(HARMLESS)
    return write_decoder(weights, max_positions, embedding, layers, last, head)
