"""Llama 1 to 3, and the many models built like it: SmolLM, TinyLlama, Yi, … https://arxiv.org/abs/2302.13971"""

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
    "is_llama_config": Harmless("It is a remark in SmolLM2's configs."),
    "pretraining_tp": Harmless("It says in how many parts products were summed in training; the sums are the same."),
    "rope_interleaved": Harmless("The halves of a head are rotated against each other.", (False,)),
}


def build(config: ConfigReader, weights: Weights) -> ir.Model:
    """Builds the dense graph of a model of this family."""
    embedding, norm, head = Embedding.read(config), RmsNorm.read(config), Head.read(config)
    bias = config.read(bool, "attention_bias", default=False)
    attention = Attention(Heads.read(config), bias=bias, output_bias=bias)
    mlp = GatedMlp.read(config, bias=config.read(bool, "mlp_bias", default=False))
    layer = Layer(attention, mlp, norm, rope=read_rope(config, attention.heads.dim))
    layers, max_positions = [layer] * read_layer_count(config), config.read_size("max_position_embeddings")
    config.refuse_unread(HARMLESS)
    return write_decoder(weights, max_positions, embedding, layers, norm, head)
