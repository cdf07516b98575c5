"""ERNIE 4.5 with experts in some layers, and ones for all tokens; a rope of neighbouring columns.

https://ernie.baidu.com/blog/publication/ERNIE_Technical_Report.pdf
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
from enginewright.builder.models.blocks.layers import read_layer_count
from enginewright.builder.models.blocks.rope import read_rope
from enginewright.builder.weights import Weights

HARMLESS = {
    "output_router_logits": Harmless("It says what transformers returns in addition to the logits."),
    "router_aux_loss_coef": Harmless("It is about training, which is over."),
    "moe_capacity": Harmless("It is about training: an expert computes all of its rows."),
    "moe_gate": Harmless("Experts are chosen by their scores.", ("topk",)),
    "moe_norm_min": Harmless(
        "It is the smallest sum that shares are divided by, and no sum is as small.", (1e-12, 0.0)
    ),
    "moe_use_aux_free": Harmless("Scores are corrected when experts are chosen.", (True,)),
    "multi_token_pred_lambda": Harmless("It is about training, which is over."),
    "num_nextn_predict_layers": Harmless("Layers that predict further tokens are left out."),
    "use_bias": Harmless("No layer has a bias.", (False,)),
}
CORRECTION = ("moe_statics.e_score_correction_bias", "gate.moe_statics.e_score_correction_bias")


def build(config: ConfigReader, weights: Weights) -> ir.Model:
    """Builds the dense graph of a model of this family."""
    embedding, norm, head = Embedding.read(config), RmsNorm.read(config), Head.read(config, tied=True)
    attention = Attention(Heads.read(config))
    mlp = GatedMlp.read(config)
    routing = Routing.read(config, "moe_num_experts", top_keys=("moe_k",), correction=CORRECTION)
    experts = Experts.read_shared(config, routing, mlp, "moe_num_shared_experts", default=2)
    is_sparse = _sparse_layers(config)
    rope = read_rope(config, attention.heads.dim, default_theta=500_000.0, interleaved=True)
    max_positions = config.read_size("max_position_embeddings")
    weights.leave_out("model.mtp_", "of the part that predicts further tokens, which is left out")
    config.refuse_unread(HARMLESS)

    layers = [Layer(attention, experts if sparse else mlp, norm, rope=rope) for sparse in is_sparse]
    return write_decoder(weights, max_positions, embedding, layers, norm, head)


def _sparse_layers(config: ConfigReader) -> list[bool]:
    layers = read_layer_count(config)
    first = config.read(int, "moe_layer_start_index", default=1)
    last = config.read(int, "moe_layer_end_index", default=-1)
    every = config.read_size("moe_layer_interval", default=1)
    last = layers - 1 if last == -1 else last
    return [first <= layer <= last and (layer + 1) % every == 0 for layer in range(layers)]
