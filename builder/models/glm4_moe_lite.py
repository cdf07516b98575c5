"""GLM 4.7 Flash: DeepSeek V3's layers, latent attention and experts, in another order.

https://arxiv.org/abs/2508.06471
"""

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
from enginewright.builder.models.blocks.decoder import DecoderParts
from enginewright.builder.models.blocks.layers import read_kinds, read_layer_count
from enginewright.builder.models.blocks.mtp import LEFT_OUT, write_mtp_after_layers
from enginewright.builder.models.blocks.rope import read_rope
from enginewright.builder.weights import Weights

HARMLESS = {
    "first_k_dense_replace": Harmless("Without mlp_layer_types the first layer has no experts, whatever it says."),
    "num_nextn_predict_layers": Harmless("It is about draft tokens, which answers do not depend on."),
    "output_router_logits": Harmless("It says what transformers returns in addition to the logits."),
    "pretraining_tp": Harmless("It says in how many parts products were summed in training; the sums are the same."),
    "topk_method": Harmless("Experts are chosen with a correction of their scores.", ("noaux_tc",)),
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
    embedding, norm, head = Embedding.read(config), RmsNorm.read(config, epsilon=1e-5), Head.read(config)
    attention = LatentAttention.read(config, config.section("rope_scaling", "rope_parameters"))
    mlp, count = GatedMlp.read(config), read_layer_count(config)
    experts = Experts.read_shared(config, Routing.read_grouped(config, scale=1.8), mlp)
    default = [layer > 0 for layer in range(count)]
    is_sparse = read_kinds(config, {"dense": False, "sparse": True}, default, "mlp_layer_types")
    interleaved = config.read(bool, "rope_interleave", default=True)
    rope = read_rope(config, attention.heads.rope_dim, interleaved=interleaved)
    max_positions = config.read_size("max_position_embeddings")
    config.refuse_unread(HARMLESS)
    layers = [Layer(attention, experts if sparse else mlp, norm, rope=rope) for sparse in (*is_sparse, True)]
    return DecoderParts(max_positions, embedding, layers[:-1], norm, head), layers[-1]
