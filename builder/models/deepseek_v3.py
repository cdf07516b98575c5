"""DeepSeek V3 and R1, and Kimi K2: latent attention, and experts in groups after a few dense layers.

https://arxiv.org/abs/2412.19437
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
from enginewright.builder.models.blocks.layers import read_layer_count
from enginewright.builder.models.blocks.mtp import LEFT_OUT, write_mtp_after_layers
from enginewright.builder.models.blocks.rope import read_rope
from enginewright.builder.weights import Weights

_TRAINING = "It is about training, which is over."
HARMLESS = {
    "aux_loss_alpha": Harmless(_TRAINING),
    "ep_size": Harmless("It says how experts were divided among devices."),
    "moe_layer_freq": Harmless("Every layer after the dense ones has experts.", (1,)),
    "num_nextn_predict_layers": Harmless("It is about draft tokens, which answers do not depend on."),
    "output_router_logits": Harmless("It says what transformers returns in addition to the logits."),
    "pretraining_tp": Harmless("It says in how many parts products were summed in training; the sums are the same."),
    "scoring_func": Harmless("Experts are chosen by sigmoids.", ("sigmoid",)),
    "seq_aux": Harmless(_TRAINING),
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
    embedding, norm, head = Embedding.read(config), RmsNorm.read(config), Head.read(config)
    attention = LatentAttention.read(config, config.section("rope_scaling", "rope_parameters"))
    mlp, count = GatedMlp.read(config), read_layer_count(config)
    experts = Experts.read_shared(config, Routing.read_grouped(config, groups=8, chosen_groups=4, scale=2.5), mlp)
    dense = config.read(int, "first_k_dense_replace", default=3)
    interleaved = config.read(bool, "rope_interleave", default=True)
    rope = read_rope(config, attention.heads.rope_dim, interleaved=interleaved)
    max_positions = config.read_size("max_position_embeddings")
    config.refuse_unread(HARMLESS)
    layers = [Layer(attention, mlp if layer < dense else experts, norm, rope=rope) for layer in range(count + 1)]
    return DecoderParts(max_positions, embedding, layers[:-1], norm, head), layers[-1]
