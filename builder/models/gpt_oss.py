"""gpt-oss: attention sinks, every other layer with a window, experts with biases. https://arxiv.org/abs/2508.10925"""

from dataclasses import replace

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
from enginewright.plugins.gemm.gemm import CLAMPED_LIMIT, CLAMPED_SLOPE

HARMLESS = {
    "output_router_logits": Harmless("It says what transformers returns in addition to the logits."),
    "router_aux_loss_coef": Harmless("It is about training, which is over."),
    "hidden_act": Harmless("The gate's activation is a Swish of its own.", ("silu",)),
    "initial_context_length": Harmless("The rope has it as original_max_position_embeddings."),
    "swiglu_alpha": Harmless("Experts are computed with this one.", (CLAMPED_SLOPE,)),
    "swiglu_limit": Harmless("Experts are computed with this one.", (CLAMPED_LIMIT,)),
}


def build(config: ConfigReader, weights: Weights) -> ir.Model:
    """Builds the dense graph of a model of this family."""
    embedding, norm, head = Embedding.read(config), RmsNorm.read(config), Head.read(config)
    bias = config.read(bool, "attention_bias", default=True)
    attention = Attention(Heads.read(config, default_dim=64), bias=bias, output_bias=bias, sinks=True)
    top_keys = ("num_experts_per_tok", "experts_per_token")
    experts = Experts(
        Routing.read(config, "num_local_experts", "num_experts", top_keys=top_keys, bias=True),
        Experts.read_width(config, "intermediate_size"),
        "swiglu_clamped",
        bias=True,
        interleaved=True,
        names=ExpertNames(router="router"),
    )
    slides = [layer % 2 == 0 for layer in range(read_layer_count(config))]
    windows = read_windows(config, slides, config.read(int, "sliding_window", default=128))
    rope = read_rope(config, attention.heads.dim, default_theta=150_000.0)
    max_positions = config.read_size("max_position_embeddings")
    config.refuse_unread(HARMLESS)

    layers = [Layer(replace(attention, window=window), experts, norm, rope=rope) for window in windows]
    return write_decoder(weights, max_positions, embedding, layers, norm, head)
