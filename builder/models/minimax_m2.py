"""MiniMax M2: norms over all heads of q and k, half of each head is rotated, experts by corrected sigmoids.

https://huggingface.co/MiniMaxAI/MiniMax-M2
"""

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
from enginewright.builder.models.blocks.layers import read_layer_count
from enginewright.builder.models.blocks.rope import read_rope
from enginewright.builder.weights import Weights

HARMLESS = {
    "output_router_logits": Harmless("It says what transformers returns in addition to the logits."),
    "router_aux_loss_coef": Harmless("It is about training, which is over."),
    "layernorm_full_attention_beta": Harmless("It is of models with linear attention."),
    "layernorm_linear_attention_beta": Harmless("It is of models with linear attention."),
    "layernorm_mlp_beta": Harmless("It is of models with linear attention."),
    "mlp_intermediate_size": Harmless("It is of layers without experts, and there are none."),
    "mtp_transformer_layers": Harmless("Layers that predict further tokens are left out."),
    "num_mtp_modules": Harmless("Layers that predict further tokens are left out."),
    "qk_norm_type": Harmless("Norms are over all heads of a layer.", ("per_layer",)),
    "router_jitter_noise": Harmless("It is about training, which is over."),
    "scoring_func": Harmless("Scores are sigmoids.", ("sigmoid",)),
    "shared_intermediate_size": Harmless("No expert is shared.", (0,)),
    "shared_moe_mode": Harmless("No expert is shared."),
    "use_mtp": Harmless("Layers that predict further tokens are left out."),
    "use_qk_norm": Harmless("Queries and keys have norms.", (True,)),
    "use_routing_bias": Harmless("Experts are chosen by corrected scores.", (True,)),
}
NAMES = ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2")
CORRECTION = ("e_score_correction_bias",)


def build(config: ConfigReader, weights: Weights) -> ir.Model:
    """Builds the dense graph of a model of this family."""
    embedding, norm, head = Embedding.read(config), RmsNorm.read(config), Head.read(config)
    attention = Attention(Heads.read(config, default_dim=128), head_norm=norm, norms_all_heads=True)
    routing = Routing.read(config, "num_local_experts", "num_experts", scores="sigmoid", correction=CORRECTION)
    width, activation = Experts.read_width(config, "intermediate_size"), Experts.read_activation(config)
    experts = Experts(routing, width, activation, names=NAMES)
    count, dim = read_layer_count(config), attention.heads.dim
    if any(kind != 1 for kind in config.read_list(int, "attn_type_list") or ()):
        raise config.unsupported("attn_type_list has layers of linear attention", "Only 1 is implemented.")
    rope = read_rope(config, dim, default_theta=5e6, part=config.read_size("rotary_dim", default=dim) / dim)
    max_positions = config.read_size("max_position_embeddings")
    config.refuse_unread(HARMLESS)

    layers = [Layer(attention, experts, norm, rope=rope)] * count
    return write_decoder(weights, max_positions, embedding, layers, norm, head)
