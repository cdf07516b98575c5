"""Seed-OSS 36B: llama with biases of q, k and v. https://huggingface.co/ByteDance-Seed/Seed-OSS-36B-Instruct"""

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
    "pretraining_tp": Harmless("It says in how many parts products were summed in training; the sums are the same."),
    "residual_dropout": Harmless("It is about training, which is over."),
}


def build(config: ConfigReader, weights: Weights) -> ir.Model:
    """Builds the dense graph of a model of this family."""
    embedding, norm, head = Embedding.read(config), RmsNorm.read(config), Head.read(config)
    attention = Attention(
        Heads.read(config, default_dim=128),
        bias=config.read(bool, "attention_bias", default=True),
        output_bias=config.read(bool, "attention_out_bias", default=False),
    )
    mlp = GatedMlp.read(config, bias=config.read(bool, "mlp_bias", default=False))
    layer = Layer(attention, mlp, norm, rope=read_rope(config, attention.heads.dim))
    layers, max_positions = [layer] * read_layer_count(config), config.read_size("max_position_embeddings")
    config.refuse_unread(HARMLESS)
    return write_decoder(weights, max_positions, embedding, layers, norm, head)
