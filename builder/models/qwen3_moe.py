"""Qwen3 with experts in place of the MLP in all layers, or some. https://arxiv.org/abs/2505.09388"""

import onnx_ir as ir

from enginewright.builder.config import ConfigReader
from enginewright.builder.harmless_keys import Harmless
from enginewright.builder.models.blocks import (
    Attention,
    Embedding,
    Experts,
    GatedMlp,
    Head,
    Heads,
    Layer,
    RmsNorm,
    Routing,
    write_decoder,
)
from enginewright.builder.models.blocks.layers import read_sparse_layers, read_windows_everywhere
from enginewright.builder.models.blocks.rope import read_rope
from enginewright.builder.weights import Weights

HARMLESS = {
    "output_router_logits": Harmless("It says what transformers returns in addition to the logits."),
    "router_aux_loss_coef": Harmless("It is about training, which is over."),
    "max_window_layers": Harmless("With use_sliding_window all layers have the window."),
}


def build(config: ConfigReader, weights: Weights) -> ir.Model:
    """Builds the dense graph of a model of this family."""
    embedding, norm, head = Embedding.read(config), RmsNorm.read(config), Head.read(config)
    heads, mlp = Heads.read(config, default_dim=128), GatedMlp.read(config)
    bias = config.read(bool, "attention_bias", default=False)
    routing = Routing.read(
        config,
        "num_experts",
        "num_local_experts",
        normalized=config.read(bool, "norm_topk_prob", default=False),
    )
    experts = Experts(routing, Experts.read_width(config), Experts.read_activation(config))
    is_sparse = read_sparse_layers(config)
    attentions = [
        Attention(heads, bias=bias, output_bias=bias, head_norm=norm, window=window)
        for window in read_windows_everywhere(config)
    ]
    rope, max_positions = read_rope(config, heads.dim), config.read_size("max_position_embeddings")
    config.refuse_unread(HARMLESS)

    layers = [
        Layer(attention, experts if sparse else mlp, norm, rope=rope)
        for attention, sparse in zip(attentions, is_sparse, strict=True)
    ]
    return write_decoder(weights, max_positions, embedding, layers, norm, head)
