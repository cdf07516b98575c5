"""GLM 4.5: half of each head is rotated; experts by corrected sigmoids, and one for all tokens.

https://arxiv.org/abs/2508.06471
"""

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
from enginewright.builder.models.blocks.decoder import DecoderParts
from enginewright.builder.models.blocks.layers import read_layer_count
from enginewright.builder.models.blocks.mtp import LEFT_OUT, write_mtp_after_layers
from enginewright.builder.models.blocks.rope import read_rope
from enginewright.builder.weights import Weights

HARMLESS = {
    "output_router_logits": Harmless("It says what transformers returns in addition to the logits."),
    "router_aux_loss_coef": Harmless("It is about training, which is over."),
    "num_mtp_layers": Harmless("It is about draft tokens, which answers do not depend on."),
    "num_nextn_predict_layers": Harmless("It is about draft tokens, which answers do not depend on."),
}


def build(config: ConfigReader, weights: Weights) -> ir.Model:
    """Builds the dense graph of a model of this family."""
    parts, _ = _read(config)
    weights.leave_out(f"model.layers.{len(parts.layers)}.", LEFT_OUT)
    return write_decoder(weights, *parts)


def build_mtp(config: ConfigReader, weights: Weights) -> ir.Model | None:
    """Builds the graph of the multi-token prediction layer; None if the checkpoint has none."""
    return write_mtp_after_layers(weights, *_read(config))


def _read(config: ConfigReader) -> tuple[DecoderParts, Layer]:
    """Reads the model, and its layer of multi-token prediction."""
    embedding, norm, head = Embedding.read(config), RmsNorm.read(config), Head.read(config)
    mlp = GatedMlp.read(config)
    experts = Experts.read_shared(config, Routing.read_grouped(config, "n_routed_experts", "num_local_experts"), mlp)
    heads, bias = Heads.read(config), config.read(bool, "attention_bias", default=False)
    has_norm = config.read(bool, "use_qk_norm", default=False)
    attention = Attention(heads, bias=bias, head_norm=norm if has_norm else None)
    count, first = read_layer_count(config), config.read(int, "first_k_dense_replace", default=1)
    rope, max_positions = read_rope(config, heads.dim, part=0.5), config.read_size("max_position_embeddings")
    config.refuse_unread(HARMLESS)
    layers = [Layer(attention, mlp if layer < first else experts, norm, rope=rope) for layer in range(count + 1)]
    return DecoderParts(max_positions, embedding, layers[:-1], norm, head), layers[-1]
