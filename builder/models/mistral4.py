"""Mistral Small 4: latent attention whose queries grow with the logarithm of their position, and experts.

https://huggingface.co/mistralai/Mistral-Small-4-119B-2603
"""

from dataclasses import replace

import onnx_ir as ir

from enginewright.builder.config import ConfigReader
from enginewright.builder.harmless_keys import Harmless
from enginewright.builder.models.blocks import (
    Embedding,
    Experts,
    GatedMlp,
    Head,
    LatentAttention,
    Layer,
    RmsNorm,
    Routing,
    write_decoder,
)
from enginewright.builder.models.blocks.attention import PositionScale
from enginewright.builder.models.blocks.layers import read_layer_count
from enginewright.builder.models.blocks.rope import rope_from
from enginewright.builder.weights import Weights

HARMLESS = {
    "output_router_logits": Harmless("It says what transformers returns in addition to the logits."),
    "pretraining_tp": Harmless("It says in how many parts products were summed in training; the sums are the same."),
}


def build(config: ConfigReader, weights: Weights) -> ir.Model:
    """Builds the dense graph of a model of this family."""
    embedding, norm, head = Embedding.read(config), RmsNorm.read(config), Head.read(config)
    max_positions = config.read_size("max_position_embeddings")
    parameters = config.section("rope_parameters", "rope_scaling")
    if parameters is None:
        raise config.error("rope_parameters is missing")
    scale = PositionScale.read(parameters, max_positions)
    attention = LatentAttention.read(config, parameters, scale, whole_head=True)
    part = attention.heads.rope_dim / attention.heads.key_dim
    theta = config.read_positive("rope_theta", default=10_000.0)
    rope = rope_from(parameters, theta, attention.heads.key_dim, max_positions, part)
    rope = replace(rope, interleaved=config.read(bool, "rope_interleave", default=True))
    mlp, count = GatedMlp.read(config), read_layer_count(config)
    experts = Experts.read_shared(config, Routing.read_grouped(config, scores="softmax", correction=()), mlp)
    dense = config.read(int, "first_k_dense_replace", default=0)
    config.refuse_unread(HARMLESS)

    layers = [Layer(attention, mlp if layer < dense else experts, norm, rope=rope) for layer in range(count)]
    return write_decoder(weights, max_positions, embedding, layers, norm, head)
