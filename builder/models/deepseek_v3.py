"""DeepSeek V3 and R1, and Kimi K2: latent attention, and experts in groups behind a few dense layers.
https://arxiv.org/abs/2412.19437"""

import onnx_ir as ir

from enginewright.builder.config import ConfigReader
from enginewright.builder.harmless_keys import Harmless
from enginewright.builder.models.blocks import (
    Embedding,
    ExpertNames,
    Experts,
    GatedMlp,
    Head,
    LatentAttention,
    Layer,
    RmsNorm,
    Routing,
    write_decoder,
)
from enginewright.builder.models.blocks.latent_attention import LatentHeads
from enginewright.builder.models.blocks.layers import read_layer_count
from enginewright.builder.models.blocks.rope import latent_score_scale, read_rope
from enginewright.builder.weights import Weights

_TRAINING = "It is about training, which is over."
HARMLESS = {
    "aux_loss_alpha": Harmless(_TRAINING),
    "ep_size": Harmless("It says how experts were divided among devices."),
    "moe_layer_freq": Harmless("Every layer behind the dense ones has experts.", (1,)),
    "num_nextn_predict_layers": Harmless("What predicts further tokens is left out, with a note."),
    "output_router_logits": Harmless("It says what transformers returns beside the logits."),
    "pretraining_tp": Harmless("It says in how many parts products were summed in training; the sums are the same."),
    "scoring_func": Harmless("Experts are chosen by sigmoids.", ("sigmoid",)),
    "seq_aux": Harmless(_TRAINING),
    "topk_method": Harmless("Experts are chosen with a correction of their scores.", ("noaux_tc",)),
}


def build(config: ConfigReader, weights: Weights) -> ir.Model:
    embedding, norm, head = Embedding.read(config), RmsNorm.read(config), Head.read(config)
    heads, mlp = LatentHeads.read(config), GatedMlp.read(config)
    interleaved = config.read(bool, "rope_interleave", default=True)
    attention = LatentAttention(
        heads,
        norm,
        scale=heads.key_dim**-0.5 * latent_score_scale(config),
        bias=config.read(bool, "attention_bias", default=False),
    )
    count, dense = read_layer_count(config), config.read(int, "first_k_dense_replace", default=3)
    experts = _read_experts(config, mlp)
    rope = read_rope(config, heads.rope_dim, interleaved=interleaved)
    max_positions = config.read_size("max_position_embeddings")
    config.refuse_unread(HARMLESS)
    weights.ignore("rotary_emb.inv_freq")  # a buffer that some checkpoints have saved
    weights.leave_out(f"model.layers.{count}.", "of a layer that predicts further tokens, which is left out")

    layers = [Layer(attention, mlp if layer < dense else experts, norm, rope=rope) for layer in range(count)]
    return write_decoder(weights, max_positions, embedding, layers, norm, head)


def _read_experts(config: ConfigReader, mlp: GatedMlp) -> Experts:
    """The experts of a layer, with those that all tokens share as one MLP."""
    width, shared = Experts.read_width(config), config.read(int, "n_shared_experts", default=1)
    return Experts(
        Routing.read_grouped(
            config, correction=("gate.e_score_correction_bias",), groups=8, chosen_groups=4, scale=2.5
        ),
        width,
        Experts.read_activation(config),
        shared=GatedMlp(width * shared, mlp.activation) if shared else None,
        names=ExpertNames(shared="shared_experts"),
    )
