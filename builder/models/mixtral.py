"""Mixtral: Llama with experts in place of every MLP. https://arxiv.org/abs/2401.04088"""

import onnx_ir as ir

from enginewright.builder.config import ConfigReader
from enginewright.builder.harmless_keys import Harmless
from enginewright.builder.models.blocks import (
    Attention,
    Embedding,
    ExpertNames,
    Experts,
    Head,
    Heads,
    Layer,
    RmsNorm,
    Routing,
    write_decoder,
)
from enginewright.builder.models.blocks.layers import read_layer_count, read_windows
from enginewright.builder.models.blocks.rope import read_rope
from enginewright.builder.weights import Weights

HARMLESS = {
    "output_router_logits": Harmless("It says what transformers returns in addition to the logits."),
    "router_aux_loss_coef": Harmless("It is about training, which is over."),
    "router_jitter_noise": Harmless("It is about training, which is over."),
}
NAMES = ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2")


def build(config: ConfigReader, weights: Weights) -> ir.Model:
    """Builds the dense graph of a model of this family."""
    embedding, norm, head = Embedding.read(config), RmsNorm.read(config), Head.read(config)
    heads = Heads.read(config)
    routing = Routing.read(config, "num_local_experts", "num_experts")
    width, activation = Experts.read_width(config, "intermediate_size"), Experts.read_activation(config)
    experts = Experts(routing, width, activation, names=NAMES)
    window = config.read(int, "sliding_window", default=None)
    windows = read_windows(config, [window is not None] * read_layer_count(config), window)
    rope = read_rope(config, heads.dim, default_theta=1e6)
    max_positions = config.read_size("max_position_embeddings")
    config.refuse_unread(HARMLESS)

    layers = [Layer(Attention(heads, window=window), experts, norm, rope=rope) for window in windows]
    return write_decoder(weights, max_positions, embedding, layers, norm, head)
