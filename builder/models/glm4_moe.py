"""GLM 4.5: half of each head is rotated; experts by corrected sigmoids, and one for all tokens.
https://arxiv.org/abs/2508.06471"""

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
from enginewright.builder.models.blocks.layers import read_layer_count
from enginewright.builder.models.blocks.rope import read_rope
from enginewright.builder.weights import Weights

HARMLESS = {
    "output_router_logits": Harmless("It says what transformers returns beside the logits."),
    "router_aux_loss_coef": Harmless("It is about training, which is over."),
    "num_mtp_layers": Harmless("What predicts further tokens is left out."),
    "num_nextn_predict_layers": Harmless("What predicts further tokens is left out."),
}


def build(config: ConfigReader, weights: Weights) -> ir.Model:
    embedding, norm, head = Embedding.read(config), RmsNorm.read(config), Head.read(config)
    mlp = GatedMlp.read(config)
    experts = Experts.read_shared(config, Routing.read_grouped(config, "n_routed_experts", "num_local_experts"), mlp)
    heads, bias = Heads.read(config), config.read(bool, "attention_bias", default=False)
    has_norm = config.read(bool, "use_qk_norm", default=False)
    attention = Attention(heads, bias=bias, head_norm=norm if has_norm else None)
    count, first = read_layer_count(config), config.read(int, "first_k_dense_replace", default=1)
    rope, max_positions = read_rope(config, heads.dim, part=0.5), config.read_size("max_position_embeddings")
    weights.leave_out(f"model.layers.{count}.", "of a layer that predicts further tokens, which is left out")
    config.refuse_unread(HARMLESS)

    layers = [Layer(attention, mlp if layer < first else experts, norm, rope=rope) for layer in range(count)]
    return write_decoder(weights, max_positions, embedding, layers, norm, head)
